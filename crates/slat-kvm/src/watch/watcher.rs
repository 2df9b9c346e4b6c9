//! The watch: finds and releases guests, and takes samples of them.

mod total;

pub use self::total::{GuestTotal, Sample, ThreadChange, VcpuTotal};
use self::total::{MOST_SAMPLES, halve};
use crate::procfs::Files;
use crate::stats::Changes;
use crate::watch::debugfs::Debugfs;
use crate::watch::events::Events;
use crate::watch::events::times::Stalls;
use crate::watch::find::{self, NotFound};
use crate::watch::guest::{Guest, Knowledge, Reading, State};
use crate::watch::held::Process;
use crate::watch::metric::{Metric, Scope, Values, since};
use crate::watch::traced::{SPARE, TraceCounts};
use crate::watch::working_set::WorkingSets;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// The guests to watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All guests of this host, including those that start later.
    All,
    /// The guests of one process.
    Pid(i32),
}

/// The guests that a step found and lost.
#[derive(Debug, Default)]
pub struct Step {
    /// New guests, as indices into [`Watch::guests`].
    pub came: Vec<usize>,
    /// Guests that ended, as indices into [`Watch::guests`].
    pub went: Vec<usize>,
}

/// A guest that is watched, or was watched until it ended.
#[derive(Debug)]
pub struct WatchedGuest {
    /// `None` after the guest's end, so that the watch holds no descriptor of it.
    guest: Option<Guest>,
    began: Duration,
    read_at: Duration,
    first: Reading,
    last: Reading,
    total: GuestTotal,
}

impl WatchedGuest {
    /// Returns the totals up to the last sample.
    pub fn total(&self) -> &GuestTotal {
        &self.total
    }

    /// Returns whether the guest is still watched.
    pub fn is_there(&self) -> bool {
        self.guest.is_some()
    }
}

/// A watch of guests.
#[derive(Debug)]
pub struct Watch<'f> {
    files: Files<'f>,
    debugfs: Result<Debugfs, String>,
    traced: TraceCounts,
    which: Which,
    /// The process to watch; `None` if the kernel gives no descriptor of it.
    process: Option<Process>,
    began: Instant,
    look_again: Instant,
    /// VMs in KVM's folder in debugfs.
    listed: BTreeSet<OsString>,
    /// The list had changed at the last look, which may have come before a descriptor: KVM lists a
    /// VM before its process has one, and vCPUs come after it.
    was_listed: bool,
    guests: Vec<WatchedGuest>,
    hidden: usize,
    working_sets: Option<WorkingSets>,
    most_ended: Option<usize>,
    forgotten: usize,
}

impl<'f> Watch<'f> {
    /// Attaches to the existing guests, and listens to tracepoints. `events` gets the number of
    /// vCPUs that all guests of this host have.
    ///
    /// # Errors
    /// [`NotFound`] if the process to watch has no guest, or may not be read. With [`Which::All`],
    /// a host without guests is no error.
    pub fn begin(
        files: Files<'f>,
        debugfs: Result<Debugfs, String>,
        events: impl FnOnce(usize) -> Events,
        which: Which,
    ) -> Result<Self, NotFound> {
        let now = Instant::now();
        let guests = find::guests(&files).found;
        let vcpus = guests.iter().map(|found| found.has.vcpus.len()).sum();
        let mut watch = Self {
            files,
            debugfs,
            traced: TraceCounts::new(events(vcpus)),
            which,
            process: None,
            began: now,
            look_again: now,
            listed: BTreeSet::new(),
            was_listed: true,
            guests: Vec::new(),
            hidden: 0,
            working_sets: None,
            most_ended: None,
            forgotten: 0,
        };
        if let Which::Pid(pid) = which {
            watch.process = Process::open(pid).ok();
            find::guest(&files, pid)?;
        }
        // The list comes before the look, here and in each step: a VM that is made between them
        // changes the next list.
        watch.listed = watch.list();
        watch.look(&mut Step::default());
        match (which, watch.guests.is_empty()) {
            // The process ended a moment ago.
            (Which::Pid(_), true) => Err(NotFound::NoProcess),
            _ => Ok(watch),
        }
    }

    /// Returns the guests, in the order in which they were found. A guest keeps its index, unless
    /// [`Watch::keep_ended`] was called.
    pub fn guests(&self) -> &[WatchedGuest] {
        &self.guests
    }

    /// Returns the number of processes whose descriptors could not be read, in the last search.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Returns KVM's folder in debugfs, or the reason why it cannot be read.
    pub fn debugfs(&self) -> &Result<Debugfs, String> {
        &self.debugfs
    }

    /// Returns the means by which KVM's tracepoints are received.
    pub fn events(&self) -> &Events {
        self.traced.events()
    }

    /// Returns the number of events of tracepoints that are not in the accounts, because there was
    /// no room or because another program ran on the CPU. The kernel counts the latter from 6.7 on.
    pub fn lost(&self) -> u64 {
        self.traced.lost()
    }

    /// Returns the number of unmap notifications for addresses at which several guests have memory,
    /// so that they cannot be attributed.
    pub fn ambiguous(&self) -> u64 {
        self.traced.ambiguous()
    }

    /// Estimates guests' working sets from now on. This changes state of the host.
    pub fn estimate(&mut self, working_sets: WorkingSets) {
        self.working_sets = Some(working_sets);
        self.step_working_sets();
    }

    /// Takes KVM's counters of a process's guest as its VMM tells them, for the next step: metrics
    /// that no other source has are from these.
    pub fn tell(&mut self, pid: i32, told: &Result<BTreeMap<String, u64>, String>) {
        let there = self.guests.iter_mut().filter_map(|it| it.guest.as_mut());
        there.filter(|guest| guest.pid() == pid).for_each(|guest| guest.take_told(told.clone()));
    }

    /// Forgets the guests that ended, except for this number of the latest, before the next step.
    /// A watch that never ends would otherwise keep all guests that ever ran.
    pub fn keep_ended(&mut self, most: usize) {
        self.most_ended = Some(most);
    }

    /// Returns the number of guests that ended and were forgotten.
    pub fn forgotten(&self) -> usize {
        self.forgotten
    }

    fn forget_ended(&mut self) {
        let Some(most) = self.most_ended else { return };
        let ended = self.guests.iter().filter(|it| !it.is_there()).count();
        let mut surplus = ended.saturating_sub(most);
        self.forgotten += surplus;
        self.guests.retain(|it| {
            let goes = surplus > 0 && !it.is_there();
            surplus -= usize::from(goes);
            !goes
        });
    }

    /// Returns the estimates of guests' working sets, if they were asked for.
    pub fn working_sets(&self) -> Option<&WorkingSets> {
        self.working_sets.as_ref()
    }

    fn step_working_sets(&mut self) {
        let Some(working_sets) = &mut self.working_sets else { return };
        let there = || self.guests.iter().filter_map(|it| it.guest.as_ref());
        // A mark that sees a part of the memory would tell a part as the whole.
        let asked = |guest: &&Guest| !guest.has_ended() && guest.unseen().is_none();
        let pids: BTreeSet<i32> = there().filter(asked).map(Guest::pid).collect();
        working_sets.step(&self.files, &pids);
        for guest in self.guests.iter_mut().filter_map(|it| it.guest.as_mut()) {
            guest.take_working_set(match guest.unseen() {
                Some(why) => Err(why.to_owned()),
                None => working_sets.of(guest.pid()),
            });
        }
    }

    /// Takes the values that only the end needs, all counters of KVM by the kernel's names, and
    /// releases all guests: what their readers do later delays the end of no VM.
    pub fn end(&mut self) {
        for watched in &mut self.guests {
            if let Some(guest) = watched.guest.take() {
                watched.total.take(guest.changes());
                self.traced.forget(guest.pid());
            }
        }
    }

    /// Returns the seconds since the watch began.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Returns whether the process to watch has ended. A step after that still reads its last
    /// counts.
    pub fn is_over(&self) -> bool {
        let Which::Pid(pid) = self.which else { return false };
        match &self.process {
            Some(process) => process.has_ended(),
            None => find::descriptors(&self.files, pid) == Err(NotFound::NoProcess),
        }
    }

    /// Returns whether the process to watch, or the process of a watched guest, has ended. Then it
    /// is time for the next step.
    pub fn is_ending(&self) -> bool {
        self.is_over() || self.wait(Duration::ZERO)
    }

    /// Waits until `time` has passed, a guest's process ends, or a signal arrives. Returns whether
    /// a process has ended, so that it is time for the next step.
    pub fn wait(&self, time: Duration) -> bool {
        let ends = self.guests.iter().filter_map(|it| it.guest.as_ref()?.ends());
        let ends = ends.chain(self.process.as_ref().map(AsFd::as_fd));
        let mut ends: Vec<PollFd<'_>> =
            ends.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let time = Timespec {
            tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        };
        // On any other result, the next step finds out the state.
        poll(&mut ends, Some(&time)).is_ok_and(|ready| ready > 0)
    }

    /// Takes a sample of each guest, releases the guests that ended, and looks for new ones.
    pub fn step(&mut self) -> Step {
        self.forget_ended();
        let mut step = Step::default();
        let began = self.began;
        // Only a list of all guests shows which of them have memory at an address.
        let all = (self.which == Which::All).then(|| {
            let there = self.guests.iter().filter(|it| it.is_there());
            there.map(|it| it.total.pid).collect::<Vec<_>>()
        });
        self.traced.hear(&self.files, all.clone());
        self.step_working_sets();
        let share = self.share();
        for (place, watched) in self.guests.iter_mut().enumerate() {
            let Some(guest) = &mut watched.guest else { continue };
            // The state comes before the values: held descriptors still have the last counts of a
            // guest that ended.
            let mut state = guest.state(&self.files);
            let (mut now, mut knowledge) = guest.read(&self.files, &self.traced, share);
            if state == State::Runs && guest.has_ended() {
                state = State::ProcessEnded;
            }
            if state != State::Runs {
                // Its last events may have come since the accounts were heard.
                self.traced.hear(&self.files, all.clone());
                (now, knowledge) = guest.read(&self.files, &self.traced, share);
                // The PID may belong to another process by now, and its memory to another VM; the
                // guest's tables are gone. Counts of held descriptors are its last ones.
                let counts = |metric: Metric| {
                    !matches!(metric.scope(), Scope::Thread | Scope::Process) && !metric.is_level()
                };
                let all = now.vcpus.iter_mut().chain([&mut now.guest]);
                all.for_each(|values| values.retain(|metric, _| counts(*metric)));
            }
            let at = began.elapsed();
            // Counters by name are many, and only the end needs them.
            let changes = (state != State::Runs).then(|| guest.changes());
            let (stalls, each) = guest.stalls(&self.traced);
            let pid = guest.pid();
            watched.lose(self.traced.lossy(pid), self.traced.lossy_vcpus(pid));
            watched.take(at, now, knowledge);
            if let Some(changes) = changes {
                watched.total.take(changes);
            }
            watched.total.state = state;
            watched.total.stalls = stalls;
            watched.total.vcpus.iter_mut().zip(each).for_each(|(row, it)| row.stalls = it);
            watched.total.invalidated_by = self.traced.invalidated_by(pid);
            if state != State::Runs {
                watched.guest = None;
                self.traced.forget(pid);
                step.went.push(place);
            }
        }
        // KVM's folder in debugfs shows at once that a VM was created or destroyed.
        let listed = self.list();
        let is_listed = listed != self.listed;
        self.listed = listed;
        let was_listed = std::mem::replace(&mut self.was_listed, is_listed);
        let is_due = is_listed || was_listed || Instant::now() >= self.look_again;
        if is_due || !step.went.is_empty() {
            self.look(&mut step);
        }
        step
    }

    /// Returns the VMs in KVM's folder in debugfs.
    fn list(&self) -> BTreeSet<OsString> {
        self.debugfs.as_ref().map(Debugfs::list).unwrap_or_default()
    }

    /// Attaches to new guests, and sets the time of the next look, so that looks take at most one
    /// part in [`SPARE`] of the time.
    fn look(&mut self, step: &mut Step) {
        let began = Instant::now();
        let found = match self.which {
            Which::All => {
                let search = find::guests(&self.files);
                self.hidden = search.hidden;
                search.found
            }
            Which::Pid(pid) => find::guest(&self.files, pid).into_iter().collect(),
        };
        // A process that has other VMs than before is attached to again.
        for (place, watched) in self.guests.iter_mut().enumerate() {
            let Some(guest) = &mut watched.guest else { continue };
            let Some(now) = found.iter().find(|found| found.pid == guest.pid()) else { continue };
            if guest.look_again(&self.files, &self.debugfs, &now.has) {
                watched.total.take(guest.changes());
                watched.guest = None;
                watched.total.state = State::VmClosed;
                self.traced.forget(now.pid);
                step.went.push(place);
            }
        }
        let there = || self.guests.iter().filter_map(|it| it.guest.as_ref());
        let known: Vec<i32> = there().map(Guest::pid).collect();
        let new = found.into_iter().filter(|found| !known.contains(&found.pid));
        let attach = |found| Guest::attach(&self.files, &self.debugfs, found);
        let new: Vec<Guest> = new.map(attach).collect();
        for guest in there().chain(&new) {
            let threads = guest.vcpus().filter_map(|(_, thread)| thread);
            self.traced.follow(guest.pid(), threads);
        }
        if !new.is_empty() {
            // As in a step, all readings follow one look at the accounts of tracepoints.
            let pids: Vec<_> = new.iter().map(|it| (it.pid(), it.vcpus().count())).collect();
            let share = u32::try_from(known.len() + new.len()).unwrap_or(u32::MAX);
            self.traced.begin(&self.files, known, &pids);
            for guest in new {
                step.came.push(self.guests.len());
                self.guests.push(self.watched(guest, share));
            }
        }
        // If KVM lists its VMs in debugfs, only new vCPUs depend on this look.
        let spare = if self.listed.is_empty() { SPARE } else { 4 * SPARE };
        self.look_again = Instant::now() + began.elapsed() * spare;
    }

    /// Returns the number of watched guests.
    fn share(&self) -> u32 {
        let there = self.guests.iter().filter(|it| it.is_there()).count();
        u32::try_from(there).unwrap_or(u32::MAX).max(1)
    }

    /// Takes the first reading of a guest, from which it is watched.
    fn watched(&self, mut guest: Guest, share: u32) -> WatchedGuest {
        let (first, knowledge) = guest.read(&self.files, &self.traced, share);
        let began = self.began.elapsed();
        let vcpus = guest.vcpus().map(|(index, thread)| VcpuTotal::new(index, thread));
        let total = GuestTotal {
            pid: guest.pid(),
            name: guest.found().name.clone(),
            domain: guest.found().domain.clone(),
            cgroup: guest.found().cgroup.clone(),
            pod: guest.found().cgroup.as_deref().and_then(find::pod),
            vms: guest.vms(),
            found_at: began.as_secs_f64(),
            seconds: 0.0,
            state: State::Runs,
            knowledge,
            total: since(&first.guest, &first.guest),
            statistics: Changes::new(),
            stalls: Stalls::new(),
            invalidated_by: BTreeMap::new(),
            threads: Vec::new(),
            vcpus: vcpus.collect(),
            samples: Vec::new(),
        };
        let last = first.clone();
        WatchedGuest { guest: Some(guest), began, read_at: began, first, last, total }
    }
}

impl WatchedGuest {
    /// Forgets what is known of metrics that lost events: what was counted is not all of it.
    fn lose<'w>(&mut self, metrics: impl Iterator<Item = (Metric, &'w str)>, vcpus: bool) {
        for (metric, why) in metrics {
            self.first.guest.remove(&metric);
            self.last.guest.remove(&metric);
            let knowledge = &mut self.total.knowledge;
            // Another reason why it is not known tells more.
            if knowledge.sources.remove(&metric).is_some() {
                knowledge.unknown.insert(metric, why.to_owned());
            }
        }
        if vcpus {
            let readings = [&mut self.first, &mut self.last].into_iter();
            readings.flat_map(|it| &mut it.vcpus).for_each(|values| {
                values.retain(|metric, _| metric.scope() != Scope::Traced);
            });
        }
    }

    /// Takes a reading.
    fn take(&mut self, at: Duration, mut now: Reading, knowledge: Knowledge) {
        let mut known = None;
        if !(now.knows_what(&self.last) && now.knows_what(&self.first)) {
            known = Some(now.clone());
            self.align(at, &mut now);
        }
        self.put(at, now, known, knowledge);
    }

    /// Makes the readings of now, of the first sample and of the last sample have the same metrics.
    fn align(&mut self, at: Duration, now: &mut Reading) {
        // A process that ended no longer has values; its last values stay.
        let keep = |now: &mut Values, last: &Values| {
            last.iter().for_each(|(metric, value)| {
                now.entry(*metric).or_insert(*value);
            });
        };
        keep(&mut now.guest, &self.last.guest);
        now.vcpus.iter_mut().zip(&self.last.vcpus).for_each(|(now, last)| keep(now, last));
        // A vCPU that was created meanwhile starts from zero.
        let zero = |values: &Values| values.keys().map(|metric| (*metric, 0)).collect::<Values>();
        if self.first.vcpus.is_empty() {
            let mut none = zero(&now.guest);
            none.retain(|metric, _| matches!(metric.scope(), Scope::Vcpu | Scope::Thread));
            keep(&mut self.first.guest, &none);
            keep(&mut self.last.guest, &none);
        }
        for reading in [&mut self.first, &mut self.last] {
            let more = now.vcpus.iter().skip(reading.vcpus.len()).map(zero);
            reading.vcpus.extend(more.collect::<Vec<_>>());
        }
        if let Some(guest) = &self.guest {
            for (vcpu, thread) in guest.vcpus().skip(self.total.vcpus.len()) {
                self.total.thread_changed(at, vcpu, true, thread);
                self.total.vcpus.push(VcpuTotal::new(vcpu, thread));
            }
        }
        // Values of tracepoints start from zero, too.
        let traced = |values: &Values| {
            let mut none = zero(values);
            none.retain(|metric, _| metric.event().is_some());
            none
        };
        for reading in [&mut self.first, &mut self.last] {
            keep(&mut reading.guest, &traced(&now.guest));
            reading.vcpus.iter_mut().zip(&now.vcpus).for_each(|(it, now)| keep(it, &traced(now)));
        }
        // A metric that is known only since now starts from its current value.
        keep(&mut self.first.guest, &now.guest);
        keep(&mut self.last.guest, &now.guest);
        for (first, now) in self.first.vcpus.iter_mut().zip(&now.vcpus) {
            keep(first, now);
        }
        for (last, now) in self.last.vcpus.iter_mut().zip(&now.vcpus) {
            keep(last, now);
        }
    }

    /// Puts a sample. `known` is what was read, if `now` has more: what is not known any more did
    /// not stand still.
    fn put(&mut self, at: Duration, now: Reading, known: Option<Reading>, knowledge: Knowledge) {
        let between = |from: &Reading| {
            let vcpus = from.vcpus.iter().zip(&now.vcpus).map(|(from, now)| since(from, now));
            (since(&from.guest, &now.guest), vcpus.collect::<Vec<_>>())
        };
        let (mut guest, mut each) = between(&self.last);
        if let Some(known) = known {
            guest.retain(|metric, _| known.guest.contains_key(metric));
            for (vcpu, known) in each.iter_mut().zip(&known.vcpus) {
                vcpu.retain(|metric, _| known.contains_key(metric));
            }
        }
        let seconds = at.saturating_sub(self.read_at).as_secs_f64();
        let sample = Sample { at: at.as_secs_f64(), seconds, guest, vcpus: each };
        self.total.samples.push(sample);
        if self.total.samples.len() > MOST_SAMPLES {
            halve(&mut self.total.samples);
        }
        let (total, each) = between(&self.first);
        self.total.total = total;
        for (row, total) in self.total.vcpus.iter_mut().zip(each) {
            row.total = total;
        }
        if let Some(guest) = &self.guest {
            self.total.threads_now(at, guest.vcpus());
        }
        self.total.seconds = at.saturating_sub(self.began).as_secs_f64();
        for (metric, by) in knowledge.sources {
            self.total.knowledge.sources.insert(metric, by);
        }
        // The reason may have changed.
        self.total.knowledge.unknown.extend(knowledge.unknown);
        let sources = &self.total.knowledge.sources;
        self.total.knowledge.unknown.retain(|metric, _| !sources.contains_key(metric));
        (self.last, self.read_at) = (now, at);
    }
}

#[cfg(test)]
mod tests;
