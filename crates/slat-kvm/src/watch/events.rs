//! KVM's tracepoints, aggregated in the kernel: this process reads sums and histograms, not events.
//!
//! `Events` uses eBPF programs if the kernel accepts them. Otherwise perf counts events of threads,
//! without times. Otherwise `Events` has the reason. All of these are descriptors, and end with
//! this process however it ends.

mod programs;
mod rooms;
pub(crate) mod times;
pub(crate) mod tracepoint;
mod transition;

use crate::procfs::Files;
use crate::watch::bpf::sys::{Event, Kind, Map, Program, ProgramInput};
use crate::watch::metric::Source;
pub(crate) use crate::watch::tracepoints::*;
use programs::{ANYWHERE, Maps, Notice, RANGE_SHIFT, THREAD_WORDS};
pub(crate) use rooms::Own;
use rooms::{Places, Rooms};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ops::Range;
use times::{STRIDE, Stalls, Times, Why};
use tracepoint::{Field, Tracefs, Tracepoint};
use transition::Outside;

/// Events that perf counts if the kernel refuses programs.
const COUNTED: [&str; 2] = [USER_EXIT, PUSH];

/// The means by which KVM's tracepoints are received.
#[derive(Debug)]
pub struct Events {
    how: How,
    /// Why an event is not received, by event.
    why: BTreeMap<&'static str, String>,
    /// Nanoseconds of a transition, or why that is not known.
    transition: Result<u64, String>,
    /// Why a process has no room for accounts.
    roomless: BTreeMap<i32, String>,
}

#[derive(Debug)]
enum How {
    Programs(Box<Programs>),
    Counts {
        numbers: Vec<(&'static str, u64)>,
        threads: BTreeMap<(i32, i32), Vec<Event>>,
    },
    Nothing,
    /// What is heard, one after the other; the last of them again and again.
    #[cfg(test)]
    Made(std::collections::VecDeque<Accounts>),
}

#[derive(Debug)]
struct Programs {
    rooms: Rooms,
    places: Places,
    lost: Map,
    /// Keeps the map open, which the programs use.
    _empty: Map,
    programs: Vec<Program>,
    _events: Vec<Event>,
}

/// The account of a thread.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Thread {
    /// The vCPU that it runs, if the kernel provides it.
    pub vcpu: Option<u32>,
    /// Counts by tracepoint.
    pub counts: BTreeMap<&'static str, u64>,
    /// Times out of the guest; `None` if the kernel does not provide them.
    pub stalls: Option<Stalls>,
    /// Nanoseconds of the kernel's clock at its last exit; 0 if it had none.
    pub last: u64,
}

impl Thread {
    /// Adds another account of the same thread, or of one that ran the same vCPU.
    fn add(&mut self, other: &Self) {
        if other.last >= self.last {
            self.vcpu = other.vcpu.or(self.vcpu);
        }
        self.last = self.last.max(other.last);
        for (event, count) in &other.counts {
            *self.counts.entry(event).or_default() += count;
        }
        for (why, times) in other.stalls.iter().flatten() {
            self.stalls.get_or_insert_default().entry(*why).or_default().add(times);
        }
    }
}

/// MMU notifier events: numbers and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Notices {
    pub unmaps: u64,
    pub unmapped_bytes: u64,
    pub ages: u64,
}

impl Notices {
    pub fn add(&mut self, more: Self) {
        self.unmaps += more.unmaps;
        // A process may unmap what it has not touched, as often as it likes.
        self.unmapped_bytes = self.unmapped_bytes.saturating_add(more.unmapped_bytes);
        self.ages += more.ages;
    }
}

/// A range of addresses, and the process on whose behalf the notification came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    /// The process that the CPU ran, which need not be the owner of the memory.
    pub by: i32,
    chunk: u32,
}

impl Place {
    pub fn addresses(self) -> Range<u64> {
        let begin = u64::from(self.chunk) << RANGE_SHIFT;
        begin..begin + (1 << RANGE_SHIFT)
    }

    /// Returns whether the addresses are not known: there was no room for more places.
    pub fn is_anywhere(self) -> bool {
        self.chunk == ANYWHERE
    }

    #[cfg(test)]
    pub fn anywhere(by: i32) -> Self {
        Self { by, chunk: ANYWHERE }
    }

    #[cfg(test)]
    pub fn new(by: i32, address: u64) -> Self {
        Self { by, chunk: (address >> RANGE_SHIFT) as u32 }
    }
}

/// The accounts of the guests that are watched, and of places.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Accounts {
    pub threads: BTreeMap<(i32, i32), Thread>,
    /// The guests' own accounts.
    pub guests: BTreeMap<i32, Own>,
    /// What other processes caused since somebody took it from here.
    pub places: BTreeMap<Place, Notices>,
    /// Ranges that found no room.
    pub lost: u64,
    /// Events that a program missed because, from Linux 6.7 on, another one ran.
    pub missed: u64,
    /// Why the accounts of threads are not known, if they could not be read so far.
    pub no_threads: Option<String>,
    /// Why the accounts of places are not known, if they could not be read so far.
    pub no_places: Option<String>,
}

impl Events {
    /// Listens by the best means that the host allows.
    pub fn open() -> Self {
        match Programs::load(Tracefs::open()) {
            Ok((programs, why)) => Self::of(How::Programs(Box::new(programs)), why),
            Err(refused) => Self::counting(&refused),
        }
    }

    /// Returns why a host with these files shows no events, if the files say so.
    pub fn refused(files: &Files<'_>) -> Option<String> {
        Tracefs::usual(files).err()
    }

    /// Counts events of threads by perf, because programs are refused for the reason `refused`.
    pub fn counting(refused: &str) -> Self {
        let counted = || -> Result<_, String> {
            let tracefs = Tracefs::open()?;
            let mut numbers = Vec::new();
            let mut why = all(&format!("{refused}; perf counts no times and no ranges"));
            for name in COUNTED {
                match tracefs.event(&format!("kvm/{name}")) {
                    Ok(event) => {
                        numbers.push((name, event.number));
                        why.remove(name);
                    }
                    Err(error) => {
                        why.insert(name, error);
                    }
                }
            }
            // Checks that perf permits it.
            if let Some((_, number)) = numbers.first() {
                Event::count(*number, 0).map_err(|error| format!("{refused}; {}", perf(error)))?;
            }
            Ok((numbers, why))
        };
        match counted() {
            Ok((numbers, why)) => Self::of(How::Counts { numbers, threads: BTreeMap::new() }, why),
            Err(why) => Self::nothing(&why),
        }
    }

    /// Listens to nothing, for the reason `why`.
    pub fn nothing(why: &str) -> Self {
        Self::of(How::Nothing, all(why))
    }

    /// Events that count as received: none has a reason why not.
    #[cfg(test)]
    pub(crate) fn heard_in_a_test() -> Self {
        Self::of(How::Nothing, BTreeMap::new())
    }

    /// Events that count as received, with a transition of `transition` nanoseconds.
    #[cfg(test)]
    pub(crate) fn calibrated_in_a_test(transition: u64) -> Self {
        Self { transition: Ok(transition), ..Self::heard_in_a_test() }
    }

    /// Events that hear each of `all` in turn, and the last one from then on.
    #[cfg(test)]
    pub(crate) fn made(all: impl IntoIterator<Item = Accounts>) -> Self {
        Self::of(How::Made(all.into_iter().collect()), BTreeMap::new())
    }

    /// Events that perf counts, of no thread yet.
    #[cfg(test)]
    pub(crate) fn counted_in_a_test() -> Self {
        let how = How::Counts { numbers: Vec::new(), threads: BTreeMap::new() };
        Self::of(how, BTreeMap::new())
    }

    fn of(how: How, why: BTreeMap<&'static str, String>) -> Self {
        Self { how, why, transition: Err(UNMEASURED.to_owned()), roomless: BTreeMap::new() }
    }

    /// Measures the transition: what an exit takes before `kvm_exit` and after `kvm_entry`. A guest
    /// of this process's own runs for some milliseconds, and is gone when this returns.
    pub fn calibrate(&mut self) {
        let heard = [EXIT, ENTRY].into_iter().try_for_each(|event| match self.why(event) {
            Some(why) => Err(why.to_owned()),
            None => Ok(()),
        });
        self.transition = heard.and_then(|()| {
            let How::Programs(programs) = &mut self.how else { return Err(UNMEASURED.to_owned()) };
            let own = std::process::id().cast_signed();
            programs.rooms.open(own, 1).map_err(refusal)?;
            let transition = transition::measure(|| programs.outside());
            programs.rooms.close(own);
            transition
        });
    }

    /// Nanoseconds of a transition: what an exit takes before `kvm_exit` and after `kvm_entry`.
    ///
    /// # Errors
    /// Why that is not known, in words.
    pub fn transition(&self) -> Result<u64, &str> {
        self.transition.as_ref().copied().map_err(String::as_str)
    }

    /// Returns the means by which events are received, in words.
    pub fn how(&self) -> String {
        match &self.how {
            How::Programs(_) => Source::Tracepoints.to_string(),
            How::Counts { .. } => Source::PerfCounts.to_string(),
            _ => self.why.values().next().cloned().unwrap_or_default(),
        }
    }

    /// Returns the source of the values.
    pub(crate) fn source(&self) -> Source {
        match self.how {
            How::Counts { .. } => Source::PerfCounts,
            _ => Source::Tracepoints,
        }
    }

    /// Returns the reason why an event is not received, if it is not.
    pub(crate) fn why(&self, event: &str) -> Option<&str> {
        self.why.get(event).map(String::as_str)
    }

    /// Follows threads of a process that run vCPUs. Only perf needs it.
    pub(crate) fn follow(&mut self, pid: i32, tids: impl Iterator<Item = i32>) {
        let How::Counts { numbers, threads } = &mut self.how else { return };
        for tid in tids {
            threads.entry((pid, tid)).or_insert_with(|| {
                let each = numbers.iter().map(|(_, number)| Event::count(*number, tid));
                let all: Result<Vec<_>, Errno> = each.collect();
                all.unwrap_or_else(|error| {
                    // Without those of one thread, the sum of the others is not the guest's. A
                    // thread that has ended has none.
                    if error != Errno::SRCH {
                        let why = format!("a thread's events are not counted: {}", perf(error));
                        self.roomless.insert(pid, why);
                    }
                    Vec::new()
                })
            });
        }
    }

    /// Begins accounts of a process, which has about `vcpus` vCPUs: with nothing that was before.
    pub(crate) fn begin(&mut self, pid: i32, vcpus: usize) {
        let How::Programs(programs) = &mut self.how else { return };
        let why = match programs.rooms.open(pid, vcpus) {
            Ok(()) => return drop(self.roomless.remove(&pid)),
            Err(Errno::TOOBIG) => "more guests are watched than have room for accounts".to_owned(),
            Err(error) => refusal(error),
        };
        self.roomless.insert(pid, why);
    }

    /// Returns why a process has no accounts, if it has none.
    pub(crate) fn roomless(&self, pid: i32) -> Option<&str> {
        self.roomless.get(&pid).map(String::as_str)
    }

    /// Ends the accounts of a process.
    pub(crate) fn forget(&mut self, pid: i32) {
        self.roomless.remove(&pid);
        match &mut self.how {
            How::Counts { threads, .. } => threads.retain(|(of, _), _| *of != pid),
            How::Programs(programs) => programs.rooms.close(pid),
            _ => {}
        }
    }

    /// Brings the accounts up to now. What cannot be read stays as it was.
    pub(crate) fn hear(&mut self, heard: &mut Accounts) {
        match &mut self.how {
            How::Programs(programs) => programs.hear(heard),
            How::Counts { numbers, threads } => {
                heard.threads.retain(|key, _| threads.contains_key(key));
                for (key, events) in threads {
                    let thread = heard.threads.entry(*key).or_default();
                    for ((name, _), event) in numbers.iter().zip(events) {
                        thread.counts.extend(event.counted().ok().map(|count| (*name, count)));
                    }
                }
            }
            How::Nothing => {}
            #[cfg(test)]
            How::Made(all) => {
                let next = if all.len() > 1 { all.pop_front() } else { all.front().cloned() };
                *heard = next.unwrap_or_default();
            }
        }
    }
}

/// Reason why there is no transition, if the user left it out.
const UNMEASURED: &str = "the transition was not measured: leave out --no-calibration";

/// Returns the same reason for all events.
fn all(why: &str) -> BTreeMap<&'static str, String> {
    [EXIT, ENTRY, USER_EXIT, PUSH, UNMAP, AGE, TEST_AGE].map(|name| (name, why.to_owned())).into()
}

impl Programs {
    /// Loads what the kernel takes. Without tracefs these are the programs that read no field.
    fn load(
        tracefs: Result<Tracefs, String>,
    ) -> Result<(Self, BTreeMap<&'static str, String>), String> {
        // Programs identify threads by their numbers there.
        if !Files::here().in_first_namespace("pid") {
            return Err("in a container threads have other numbers than programs see".to_owned());
        }
        let map = |kind, words, most| Map::new(kind, words, most).map_err(refusal);
        let rooms = Rooms::new().map_err(refusal)?;
        let places = Places::new().map_err(refusal)?;
        let empty = map(Kind::Array, THREAD_WORDS, 1)?;
        let lost = map(Kind::Array, 1, 1)?;
        let maps =
            Maps { rooms: rooms.fd(), ranges: places.fd(), empty: empty.fd(), lost: lost.fd() };
        let (mut programs, mut events) = (Vec::new(), Vec::new());
        let mut why = BTreeMap::new();
        // Programs that refine the reason of an exit come first: one that is missing does no harm.
        let order = ["kvm_mmio", "kvm_guest_fault", ENTRY, EXIT, USER_EXIT, PUSH];
        for name in order.into_iter().chain([UNMAP, AGE, TEST_AGE]) {
            let run = || -> Result<_, String> {
                let listen = |text: &[u64]| {
                    let program = Program::load(ProgramInput::Raw, text).ok()?;
                    Event::run_raw(name, &program).ok().map(|event| (program, event))
                };
                let plain = match name {
                    ENTRY => Some(programs::entry(maps)),
                    "kvm_mmio" => Some(programs::mmio(maps)),
                    // Called with the arguments, of which the reason is the first.
                    USER_EXIT => Some(programs::user_exit(Field { offset: 0, size: 4 }, maps)),
                    PUSH => Some(programs::counted(programs::PUSHES, maps)),
                    _ => None,
                };
                if let Some(listens) = plain.as_deref().and_then(listen) {
                    return Ok(listens);
                }
                let event =
                    tracefs.as_ref().map_err(Clone::clone)?.event(&format!("kvm/{name}"))?;
                let text = |event: &Tracepoint| match (name, &plain) {
                    (USER_EXIT, _) => Ok(programs::user_exit(event.field("reason")?, maps)),
                    (_, Some(plain)) => Ok(plain.clone()),
                    (EXIT, _) => programs::exit(event, maps),
                    ("kvm_guest_fault", _) => programs::guest_fault(event, maps),
                    (UNMAP, _) => programs::notice(event, Notice::Unmap, maps),
                    (AGE, _) => programs::notice(event, Notice::Age, maps),
                    _ => programs::notice(event, Notice::TestAge, maps),
                };
                if let Some(known) = event.arguments(name)
                    && let Some(listens) = listen(&text(&known)?)
                {
                    return Ok(listens);
                }
                let program =
                    Program::load(ProgramInput::ByPerf, &text(&event)?).map_err(|refused| {
                        match refused.error {
                            Errno::PERM => refusal(Errno::PERM),
                            _ => format!("the kernel refuses the program of {name}: {refused}"),
                        }
                    })?;
                let event = Event::run(event.number, &program).map_err(perf)?;
                Ok((program, event))
            };
            match run() {
                Ok((program, event)) => {
                    programs.push(program);
                    events.push(event);
                }
                Err(error) => {
                    why.insert(name, error);
                }
            }
        }
        if cfg!(target_arch = "riscv64") {
            let reason = "RISC-V's kvm_exit does not say whether a written page was mapped";
            why.insert(PROTECTED, reason.to_owned());
        }
        if events.is_empty() {
            return Err(why.remove(UNMAP).unwrap_or_default());
        }
        Ok((Self { rooms, places, lost, _empty: empty, programs, _events: events }, why))
    }

    /// What is known of this thread's exits, if it had any.
    fn outside(&self) -> Option<Outside> {
        let own = std::process::id().cast_signed();
        let words = self.rooms.account(own, rustix::thread::gettid().as_raw_pid())?;
        let stalls = thread(&words).stalls?;
        let sum = |of: fn(&Times) -> u64| stalls.values().map(of).sum();
        Some(Outside { exits: sum(|times| times.count), ns: sum(|times| times.total_ns) })
    }

    fn hear(&mut self, heard: &mut Accounts) {
        self.rooms.hear(heard);
        self.places.hear(heard);
        // Both only grow. One that cannot be read now may be readable the next time.
        let missed: u64 = self.programs.iter().filter_map(|it| it.missed().ok()).sum();
        heard.missed = heard.missed.max(missed);
        heard.lost = heard.lost.max(self.lost.value(0).map_or(0, |value| value[0]));
    }
}

/// Splits a key into process and thread.
fn ids(key: u64) -> (i32, i32) {
    ((key >> 32) as i32, key as i32)
}

fn place(key: u64) -> Place {
    Place { by: (key >> 32) as i32, chunk: key as u32 }
}

fn thread(words: &[u64]) -> Thread {
    let stalls = words[programs::TIMES..].chunks_exact(STRIDE).zip(Why::ALL);
    let stalls: Stalls = stalls
        .map(|(words, why)| (why, Times::of(words)))
        .filter(|(_, times)| times.count > 0)
        .collect();
    let fired = !stalls.is_empty() || words[programs::BEGAN] != 0;
    Thread {
        vcpu: u32::try_from(words[programs::VCPU]).ok().and_then(|vcpu| vcpu.checked_sub(1)),
        counts: [(USER_EXIT, words[programs::USER_EXITS]), (PUSH, words[programs::PUSHES])].into(),
        stalls: fired.then_some(stalls),
        last: words[programs::LAST],
    }
}

fn notices(words: &[u64]) -> Notices {
    Notices { unmaps: words[0], unmapped_bytes: words[1], ages: words[2] + words[4] }
}

/// Returns why maps or programs are refused, and what would change that.
fn refusal(error: Errno) -> String {
    match error {
        Errno::PERM => "eBPF is refused: run as root (CAP_BPF and CAP_PERFMON), where the kernel \
                        is not locked down"
            .to_owned(),
        Errno::NOSYS => "this kernel has no eBPF (CONFIG_BPF_SYSCALL)".to_owned(),
        Errno::NOMEM => {
            "no memory for eBPF's maps: ulimit -l, or the control group's limit".to_owned()
        }
        error => format!("eBPF: {error}"),
    }
}

/// Returns why an event cannot be opened, and what would change that.
fn perf(error: Errno) -> String {
    match error {
        Errno::PERM | Errno::ACCESS => "perf events are refused: run as root (CAP_PERFMON), where \
                                        the kernel is not locked down"
            .to_owned(),
        Errno::TOOBIG => "64 programs listen already, which is all that a tracepoint takes: end \
                          another watch"
            .to_owned(),
        Errno::NOSYS => "this kernel has no perf events".to_owned(),
        error => format!("perf_event_open: {error}"),
    }
}

#[cfg(test)]
mod tests;
