//! What kept a guest's vCPUs from running: causes, ranked by their share of the vCPUs' time.
//!
//! A metric that is unknown is never taken for 0: its causes are listed as not known. Times of
//! different causes may overlap, as a vCPU can wait for a CPU within a fault: what is left after
//! idleness and the guest's own code bounds their sum.

mod words;

use super::live::label;
use super::timeline::{self, Event};
use schemars::JsonSchema;
use serde::Serialize;
use slat_kvm::watch::{GuestTotal, Metric, Sample};

/// A cause with a smaller share of the time is left out.
const LEAST: f64 = 0.01;

/// Ranges unmapped in a second below which nothing is said: a VMM always unmaps some of its own.
const LEAST_UNMAPPED: f64 = 10.0;

/// How many times as long as another fault one takes that reads from a disk.
const READS: f64 = 100.0;

/// Least and longest time of a read from a disk, in nanoseconds: by them a count of reads is
/// ranked, and told from reclaim, where the time of faults is unknown.
const READ_NS: (f64, f64) = (1e5, 1e7);

/// Time of a write to a protected page, in nanoseconds: by it logged pages are ranked where the
/// time of faults is unknown.
const WRITE_NS: f64 = 2e3;

/// A cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Ready to run, without a CPU.
    WaitingForCpu,
    /// Writes to pages that a dirty log protects, or that are shared.
    ProtectedWrites,
    /// Faults that read from the disk while memory is in swap.
    Swap,
    /// Faults that read from the disk while none is.
    HostMajorFaults,
    /// The control group reclaims memory.
    Reclaim,
    /// Other faults: KVM maps memory.
    Mapping,
    /// Ranges that the host unmapped; their later faults are counted under the other causes.
    Unmapped,
    /// The vCPUs had no work.
    Idle,
}

use Cause as C;

impl Cause {
    const ALL: [Self; 8] = [
        C::WaitingForCpu,
        C::ProtectedWrites,
        C::Swap,
        C::HostMajorFaults,
        C::Reclaim,
        C::Mapping,
        C::Unmapped,
        C::Idle,
    ];
}

/// A cause that was found.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Found {
    /// The cause.
    pub cause: Cause,
    /// Share of the vCPUs' time; none if only a count is known.
    pub share: Option<f64>,
    /// The share is an estimate, from the pressure of the control group.
    pub is_estimate: bool,
    /// Times that it happened, if that is counted.
    pub count: Option<u64>,
    /// Seconds from the beginning of the watch to the first sample with this cause.
    pub from: f64,
    /// Seconds from the beginning of the watch to the end of the last one.
    pub to: f64,
    /// The cause in words.
    pub what: String,
    /// What to do, in words; empty if nothing is to be done.
    pub to_do: String,
}

/// The verdict on a guest.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Verdict {
    /// The guest's process.
    pub pid: i32,
    /// The guest, as texts name it.
    #[serde(skip)]
    pub guest: String,
    /// Share of the vCPUs' time for all known causes but idleness; none if no time is known.
    pub stood_still: Option<f64>,
    /// The causes, the worst first, idleness last.
    pub causes: Vec<Found>,
    /// Causes that may exist, and whose metrics are unknown.
    pub not_known: Vec<&'static str>,
    /// What happened, in the order of time.
    pub events: Vec<Event>,
    /// The verdict in words.
    pub said: String,
}

impl Verdict {
    /// Takes what the guest's monitor told.
    pub fn take(&mut self, events: Vec<Event>) {
        self.events.extend(events);
        self.events.sort_by(|one, other| one.at.total_cmp(&other.at));
    }
}

/// What is summed of a cause.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    /// Nanoseconds of vCPUs' time, and of how many that is known.
    ns: f64,
    of: f64,
    is_estimate: bool,
    count: u64,
    is_counted: bool,
    /// Nanoseconds by which it is ranked if its time is unknown.
    weight: f64,
    span: Option<(f64, f64)>,
}

impl Sum {
    fn add(&mut self, sample: &Sample, ns: f64, of: f64) {
        let ns = ns.clamp(0.0, of);
        (self.ns, self.of) = (self.ns + ns, self.of + of);
        if ns >= LEAST * of {
            self.seen(sample);
        }
    }

    fn count(&mut self, sample: &Sample, count: u64) {
        self.is_counted = true;
        self.count += count;
        if count > 0 {
            self.seen(sample);
        }
    }

    fn seen(&mut self, sample: &Sample) {
        let from = (sample.at - sample.seconds).max(0.0);
        self.span = Some((self.span.map_or(from, |(from, _)| from), sample.at));
    }

    fn share(&self) -> Option<f64> {
        (self.of > 0.0).then(|| self.ns / self.of)
    }
}

/// What is summed of a guest.
#[derive(Debug, Default)]
struct Account {
    sums: [Sum; Cause::ALL.len()],
    /// Most bytes that were in swap, if that is known.
    swap: Option<u64>,
}

impl Account {
    fn of(&mut self, cause: Cause) -> &mut Sum {
        &mut self.sums[cause as usize]
    }

    /// Takes a sample, whose vCPUs had `of` nanoseconds. `swapped`: the most bytes that were in
    /// swap around it.
    fn take(&mut self, sample: &Sample, of: f64, swapped: Option<u64>) {
        let count = |metric| sample.guest.get(&metric).copied();
        let ns = |metric| count(metric).map(|ns| ns as f64);
        if let Some(waiting) = ns(Metric::WaitingNs) {
            self.of(C::WaitingForCpu).add(sample, waiting, of);
        }
        if let Some(protected) = ns(Metric::ProtectedNs) {
            self.of(C::ProtectedWrites).add(sample, protected, of);
        }
        if let Some(writes) = count(Metric::FaultsProtected) {
            self.of(C::ProtectedWrites).count(sample, writes);
        }
        // Rings tell that memory is logged where nothing tells the time that it takes.
        let untimed = !sample.guest.contains_key(&Metric::ProtectedNs);
        if let Some(pages) = count(Metric::PagesLogged).filter(|_| untimed) {
            self.of(C::ProtectedWrites).count(sample, pages);
            self.of(C::ProtectedWrites).weight += pages as f64 * WRITE_NS;
        }
        // Some task of the group waited, or all did, each vCPU's among them.
        let vcpus = of / (sample.seconds * 1e9);
        let pressure = ns(Metric::PressureSomeNs).map(|some| {
            let all = ns(Metric::PressureFullNs).unwrap_or(0.0) * vcpus;
            some.max(all)
        });
        self.swap = self.swap.max(swapped);
        let read = if swapped > Some(0) { C::Swap } else { C::HostMajorFaults };
        let reads = count(Metric::HostMajorFaults);
        if let Some(reads) = reads {
            self.of(read).count(sample, reads);
        }
        let faults = ns(Metric::FaultNs).zip(ns(Metric::ProtectedNs));
        let Some(faults) = faults.map(|(all, protected)| (all - protected).max(0.0)) else {
            return self.without_times(sample, of, read, reads, pressure);
        };
        let reading = reads.map(|reads| faults * share_of_reads(sample, reads));
        if let Some(reading) = reading {
            self.of(read).add(sample, reading, of);
        }
        let other = faults - reading.unwrap_or(0.0);
        let reclaim = pressure.map_or(0.0, |ns| (ns - reading.unwrap_or(0.0)).max(0.0));
        if pressure.is_some() {
            self.of(C::Reclaim).is_estimate = true;
            self.of(C::Reclaim).add(sample, reclaim, of);
        }
        self.of(C::Mapping).add(sample, other - reclaim, of);
    }

    /// Takes a sample without the time of faults: pressure tells the time of reads and reclaim.
    fn without_times(
        &mut self,
        sample: &Sample,
        of: f64,
        read: Cause,
        reads: Option<u64>,
        pressure: Option<f64>,
    ) {
        let reads = reads.unwrap_or(0) as f64;
        let reading = pressure.map_or(0.0, |ns| ns.min(reads * READ_NS.1));
        let sum = self.of(read);
        if pressure.is_some() && reads > 0.0 {
            sum.is_estimate = true;
            sum.add(sample, reading, of);
        }
        sum.weight += reads * READ_NS.0;
        if let Some(ns) = pressure {
            self.of(C::Reclaim).is_estimate = true;
            self.of(C::Reclaim).add(sample, ns - reading, of);
        }
    }
}

/// Returns the share of the time of a sample's faults in those that read from the disk.
fn share_of_reads(sample: &Sample, reads: u64) -> f64 {
    let kinds = [Metric::FaultsRead, Metric::FaultsWritten, Metric::FaultsExecuted];
    let all = kinds.iter().map(|metric| sample.guest.get(metric)).sum::<Option<u64>>();
    let others = all.map_or(0, |all| all.saturating_sub(reads)) as f64;
    match reads as f64 * READS {
        0.0 => 0.0,
        reads => reads / (reads + others),
    }
}

/// Samples, on each side, of which any tells that reads were of swap.
const AROUND: usize = 3;

/// Returns the verdict on a guest.
pub fn of(guest: &GuestTotal) -> Verdict {
    let mut account = Account::default();
    let mut all = 0.0;
    for (at, sample) in guest.samples.iter().enumerate() {
        let vcpus = sample.vcpus.len().max(guest.vcpus.len().min(1));
        let of = sample.seconds * 1e9 * vcpus as f64;
        if of > 0.0 && of.is_finite() {
            all += of;
            // What is read back at once is in swap between two samples alone.
            let around = guest.samples.iter().skip(at.saturating_sub(AROUND)).take(2 * AROUND);
            let swapped = around.filter_map(|it| it.guest.get(&Metric::SwapBytes).copied()).max();
            account.take(sample, of, swapped);
            idle(account.of(C::Idle), sample, of);
            if let Some(count) = sample.guest.get(&Metric::Invalidations) {
                account.of(C::Unmapped).count(sample, *count);
            }
        }
    }
    let mut causes: Vec<(f64, Found)> =
        C::ALL.into_iter().filter_map(|cause| found(cause, &account, guest, all)).collect();
    causes.sort_by(|one, other| other.0.total_cmp(&one.0));
    let causes: Vec<Found> = causes.into_iter().map(|(_, found)| found).collect();
    let not_known = not_known(&account);
    let shares = causes.iter().filter(|it| it.cause != C::Idle).filter_map(|it| it.share);
    let is_timed = |sum: &Sum| sum.of > 0.0;
    let most = shares.clone().fold(0.0, f64::max);
    let left = 1.0 - account.of(C::Idle).share().unwrap_or(0.0) - own_code(guest, all);
    let stood_still = || shares.sum::<f64>().min(left.max(most));
    let stood_still = account.sums.iter().any(is_timed).then(stood_still);
    let (pid, events, said) = (guest.pid, timeline::of(guest), String::new());
    let label = label(guest);
    let mut verdict = Verdict { pid, guest: label, stood_still, causes, not_known, events, said };
    verdict.said = words::said(&verdict, guest);
    verdict
}

/// Returns the share of the vCPUs' time in the guest's own code, as far as it is known. Ticks count
/// it, which may be more than the time on a CPU.
fn own_code(guest: &GuestTotal, all: f64) -> f64 {
    let ns = |metric| guest.total.get(&metric).map(|ns| *ns as f64);
    let own = ns(Metric::GuestNs).zip(ns(Metric::RunningNs)).map(|(own, ran)| own.min(ran));
    own.map_or(0.0, |own| own / all)
}

/// Takes the time without work: from the exits, or else from KVM's counters.
fn idle(sum: &mut Sum, sample: &Sample, of: f64) {
    let ns = |metric| sample.guest.get(&metric).map(|ns| *ns as f64);
    let halted = ns(Metric::HaltWaitNs).zip(ns(Metric::HaltPollNs));
    let idle = ns(Metric::IdleNs).or_else(|| halted.map(|(asleep, polled)| asleep + polled));
    if let Some(idle) = idle {
        sum.add(sample, idle, of);
    }
}

/// Returns a cause and its rank, if it is worth a word. `all` is the vCPUs' time.
fn found(cause: Cause, account: &Account, guest: &GuestTotal, all: f64) -> Option<(f64, Found)> {
    let sum = account.sums[cause as usize];
    let share = sum.share().filter(|share| *share >= LEAST);
    let count = sum.is_counted.then_some(sum.count);
    let per_second = sum.count as f64 / guest.seconds;
    let (is_there, rank) = match cause {
        // No stall of its own: behind all that has a share, before idleness.
        C::Unmapped => (per_second >= LEAST_UNMAPPED, 0.0),
        C::Idle => (share.is_some(), -1.0),
        // Nothing tells the time: by the count alone.
        C::ProtectedWrites | C::Swap | C::HostMajorFaults if sum.of == 0.0 => {
            (per_second >= 1.0, sum.weight / all)
        }
        _ => (share.is_some(), share.unwrap_or(0.0)),
    };
    let (from, to) = sum.span.unwrap_or_default();
    let found = |(what, to_do)| Found {
        cause,
        share,
        is_estimate: sum.is_estimate,
        count,
        from,
        to,
        what,
        to_do,
    };
    is_there.then(|| (rank, found(words::words(cause, sum.count, account, guest))))
}

/// Returns the causes about which nothing is known.
fn not_known(account: &Account) -> Vec<&'static str> {
    let sum = |cause: Cause| &account.sums[cause as usize];
    let is_timed = |cause| sum(cause).of > 0.0;
    let is_counted = |cause| sum(cause).is_counted;
    let reads = is_counted(C::Swap) || is_counted(C::HostMajorFaults);
    [
        (is_timed(C::WaitingForCpu), "waiting for a CPU"),
        (is_timed(C::ProtectedWrites), "time in writes to protected pages"),
        (is_timed(C::Mapping), "time in other faults"),
        (reads, "host major faults"),
        (account.swap.is_some(), "how much is in swap"),
        (is_timed(C::Reclaim), "memory pressure of its control group"),
        (is_counted(C::Unmapped), "ranges unmapped by the host"),
        (is_timed(C::Idle), "idle"),
    ]
    .into_iter()
    .filter_map(|(is_known, what)| (!is_known).then_some(what))
    .collect()
}

#[cfg(test)]
mod tests;
