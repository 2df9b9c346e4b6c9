//! Attributes the accounts of KVM's tracepoints to guests.
//!
//! The events of a vCPU come on its thread. An MMU notifier event has addresses and no owner. It is
//! attributed to the guest whose own thread caused it, or else to the only guest that has memory at
//! these addresses.

use crate::events::times::{Stalls, Why, faults};
use crate::events::{EXIT, Events, Heard, Notices, Place, Thread};
use crate::find;
use crate::guest::SPARE;
use crate::metric::{Metric, Scope, Sink, Source};
use crate::task;
use slat_procfs::Files;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// Why events of exits have no values, though programs listen to them.
const SILENT: &str = "kvm_exit has not fired, though KVM has it: where KVM works without hardware \
                      virtualisation (kvm_pvm) it never does";

/// Why events that perf counts have no values.
const UNFOLLOWED: &str = "perf counts events of single threads, and no thread of a vCPU is known \
                          whose events it counts";

/// Everything that tracepoints counted up to now.
#[derive(Debug)]
pub(crate) struct Traced {
    events: Events,
    heard: Heard,
    /// The process whose memory lies at a place; `None` if several guests have memory there.
    owners: BTreeMap<Place, Option<i32>>,
    /// The counts of a place when its owner ended: the kernel goes on counting from there, and the
    /// place may have another owner by then.
    settled: BTreeMap<Place, Notices>,
    /// Unmaps among `settled` at places where several guests had memory.
    settled_ambiguous: u64,
    /// Names of the processes on whose behalf notifications came.
    names: BTreeMap<i32, String>,
    /// Notifications of each guest, summed over places.
    noticed: BTreeMap<i32, Noticed>,
    /// Whether an exit of any guest was received.
    fires: bool,
    look_again: Instant,
}

/// Notifications about a guest's memory.
#[derive(Clone, Debug, Default)]
struct Noticed {
    all: Notices,
    /// Number of unmaps by the process that caused them.
    by: BTreeMap<i32, u64>,
}

impl Traced {
    pub fn new(events: Events) -> Self {
        Self {
            events,
            heard: Heard::default(),
            owners: BTreeMap::new(),
            settled: BTreeMap::new(),
            settled_ambiguous: 0,
            names: BTreeMap::new(),
            noticed: BTreeMap::new(),
            fires: false,
            look_again: Instant::now(),
        }
    }

    pub fn events(&self) -> &Events {
        &self.events
    }

    pub fn follow(&mut self, pid: i32, tids: impl Iterator<Item = i32>) {
        self.events.follow(pid, tids);
    }

    /// Ends the account of a process's guests. What is counted later at its places belongs to the
    /// guest that has memory there then.
    pub fn forget(&mut self, pid: i32) {
        self.restart(pid);
        self.events.forget(pid);
        self.settled_ambiguous = self.ambiguous();
        let (settled, heard) = (&mut self.settled, &self.heard);
        self.owners.retain(|place, owner| {
            let stays = owner.is_some_and(|owner| owner != pid);
            if !stays {
                settled.insert(*place, heard.places.get(place).copied().unwrap_or_default());
            }
            stays
        });
    }

    /// Begins the accounts of guests of the processes `new`: they have nothing that was counted
    /// before. `there` are the processes whose guests are watched already.
    pub fn begin(&mut self, files: &Files<'_>, there: Vec<i32>, new: &[i32]) {
        self.events.hear(&mut self.heard);
        // Places of guests that are watched already get their owners now, whenever the last look
        // was. What was counted at all others belongs to no guest.
        if !there.is_empty() {
            self.look_again = Instant::now();
            self.own(files, Some(there));
        }
        for (place, notices) in &self.heard.places {
            if !self.owners.contains_key(place) {
                self.settled.insert(*place, *notices);
            }
        }
        new.iter().for_each(|pid| self.restart(*pid));
        self.sum();
    }

    /// Ends the accounts of a process's threads, if the events can: later events begin others.
    fn restart(&mut self, pid: i32) {
        let events = &self.events;
        self.heard.threads.retain(|thread, _| thread.0 != pid || !events.restart(*thread));
    }

    /// Returns what was counted at a place since its last owner ended.
    fn since(&self, place: &Place, now: &Notices) -> Notices {
        let before = self.settled.get(place).copied().unwrap_or_default();
        Notices {
            unmaps: now.unmaps - before.unmaps,
            unmapped_bytes: now.unmapped_bytes - before.unmapped_bytes,
            ages: now.ages - before.ages,
        }
    }

    /// Returns the number of events that are not in the accounts.
    pub fn lost(&self) -> u64 {
        self.heard.lost
    }

    /// Returns the number of unmaps at places where several guests have memory.
    pub fn ambiguous(&self) -> u64 {
        let several = |place: &Place| self.owners.get(place) == Some(&None);
        let places = self.heard.places.iter().filter(|(place, _)| several(place));
        let since = places.map(|(place, now)| self.since(place, now).unmaps).sum::<u64>();
        self.settled_ambiguous + since
    }

    /// Reads the accounts. `guests` are the processes that may own memory; `None` means all that
    /// have guests.
    pub fn hear(&mut self, files: &Files<'_>, guests: Option<Vec<i32>>) {
        self.events.hear(&mut self.heard);
        self.own(files, guests);
        self.sum();
    }

    /// Computes the sums once, which are then read for each guest.
    fn sum(&mut self) {
        // Accounts end, but what fired once can fire again.
        self.fires |= self.heard.threads.values().any(|thread| thread.stalls.is_some());
        self.noticed.clear();
        for (place, notices) in &self.heard.places {
            let Some(Some(pid)) = self.owners.get(place) else { continue };
            let notices = self.since(place, notices);
            let it = self.noticed.entry(*pid).or_default();
            it.all.unmaps += notices.unmaps;
            it.all.unmapped_bytes += notices.unmapped_bytes;
            it.all.ages += notices.ages;
            *it.by.entry(place.by).or_default() += notices.unmaps;
        }
    }

    /// Finds the owners of places with notifications, for at most one part in [`SPARE`] of the
    /// time, because it reads each process's mappings.
    fn own(&mut self, files: &Files<'_>, guests: Option<Vec<i32>>) {
        let places = self.heard.places.keys();
        let open: Vec<Place> =
            places.filter(|place| !self.owners.contains_key(place)).copied().collect();
        if open.is_empty() || Instant::now() < self.look_again {
            return;
        }
        let began = Instant::now();
        let find = || find::guests(files).found.iter().map(|found| found.pid).collect();
        let pids: Vec<i32> = guests.unwrap_or_else(find);
        let mappings: Vec<(i32, Vec<Range<u64>>)> =
            pids.iter().map(|pid| (*pid, task::mappings(files, *pid, |_| true))).collect();
        for place in open {
            self.names.entry(place.by).or_insert_with(|| {
                let name = files.text(format!("proc/{}/comm", place.by));
                name.unwrap_or_else(|| "a process that ended".to_owned())
            });
            if pids.contains(&place.by) {
                self.owners.insert(place, Some(place.by));
                continue;
            }
            let here = place.addresses();
            let overlaps = |it: &Range<u64>| it.start < here.end && here.start < it.end;
            let mut has =
                mappings.iter().filter(|(_, all)| all.iter().any(overlaps)).map(|(pid, _)| *pid);
            match (has.next(), has.next()) {
                (None, _) => {}
                (Some(pid), None) => drop(self.owners.insert(place, Some(pid))),
                _ => drop(self.owners.insert(place, None)),
            }
        }
        self.look_again = Instant::now() + began.elapsed() * SPARE;
    }

    /// Returns the thread that ran a vCPU last, if the kernel provides it.
    pub fn thread(&self, pid: i32, vcpu: u32) -> Option<i32> {
        let mut threads = self.heard.threads.range((pid, 0)..=(pid, i32::MAX));
        threads.find(|(_, thread)| thread.vcpu == Some(vcpu)).map(|((_, tid), _)| *tid)
    }

    /// Returns the accounts of a process's threads: of `tids`, or of all.
    fn threads(&self, pid: i32, tids: Option<&[i32]>) -> impl Iterator<Item = &Thread> {
        let threads = self.heard.threads.range((pid, 0)..=(pid, i32::MAX));
        let wanted = move |tid: i32| tids.is_none_or(|tids| tids.contains(&tid));
        threads.filter(move |((_, tid), _)| wanted(*tid)).map(|(_, thread)| thread)
    }

    /// Returns how long threads of a process were out of the guest, by reason.
    pub fn stalls(&self, pid: i32, tids: Option<&[i32]>) -> Stalls {
        let mut sum = Stalls::new();
        for (why, times) in self.threads(pid, tids).filter_map(|it| it.stalls.as_ref()).flatten() {
            sum.entry(*why).or_default().add(times);
        }
        sum
    }

    /// Puts the metrics of a process's threads: of `tids`, or of all.
    pub fn vcpu(&self, pid: i32, tids: Option<&[i32]>, sink: &mut Sink) {
        let stalls = self.stalls(pid, tids);
        let faults = faults(&stalls);
        let transition = self.events.transition();
        for metric in Metric::of(Scope::Traced) {
            let Some(event) = metric.event() else { continue };
            let count = |why| stalls.get(&why).map_or(0, |times| times.count);
            let time = |why| stalls.get(&why).map_or(0, |times| times.total_ns);
            let value = match metric {
                Metric::FaultNs => faults.total_ns,
                Metric::FaultNsWithTransitions => {
                    faults.total_ns + faults.count * transition.unwrap_or(0)
                }
                Metric::OtherExitNs => time(Why::Other),
                Metric::IdleNs => time(Why::Idle),
                Metric::FaultsRead => count(Why::FaultRead),
                Metric::FaultsWritten => count(Why::FaultWrite),
                Metric::FaultsProtected => count(Why::FaultProtected),
                Metric::ProtectedNs => time(Why::FaultProtected),
                Metric::FaultsExecuted => count(Why::FaultExecute),
                _ => self.threads(pid, tids).filter_map(|thread| thread.counts.get(event)).sum(),
            };
            let unread = self.heard.no_threads.as_deref();
            let mut counts = self.threads(pid, tids).map(|thread| &thread.counts);
            let by_thread = self.events.source() == Source::PerfCounts;
            let unfollowed = by_thread && !counts.any(|counts| counts.contains_key(event));
            let unfollowed = unfollowed.then_some(UNFOLLOWED);
            let silent = (event == EXIT && !self.fires).then_some(SILENT);
            let unmeasured = match metric {
                Metric::FaultNsWithTransitions => transition.err(),
                _ => None,
            };
            let why = self.events.why(event).or(unread).or(unfollowed).or(silent).or(unmeasured);
            sink.put(metric, self.events.source(), why.map_or(Ok(value), Err));
        }
    }

    /// Puts the metrics of the host's notifications about a process's memory.
    pub fn guest(&self, pid: i32, sink: &mut Sink) {
        let none = Noticed::default();
        let noticed = self.noticed.get(&pid).unwrap_or(&none);
        for metric in Metric::of(Scope::Noticed) {
            let Some(event) = metric.event() else { continue };
            let own = noticed.by.get(&pid).copied().unwrap_or(0);
            let value = match metric {
                Metric::Invalidations => noticed.all.unmaps,
                Metric::InvalidatedBytes => noticed.all.unmapped_bytes,
                Metric::InvalidationsByOthers => noticed.all.unmaps - own,
                Metric::Ageings => noticed.all.ages,
                _ => 0,
            };
            let why = self.events.why(event).or(self.heard.no_places.as_deref());
            sink.put(metric, self.events.source(), why.map_or(Ok(value), Err));
        }
    }

    /// Returns the processes that unmapped memory of a process, by name, and how often each did.
    pub fn invalidated_by(&self, pid: i32) -> BTreeMap<String, u64> {
        let mut by = BTreeMap::new();
        let each = self.noticed.get(&pid).into_iter().flat_map(|noticed| &noticed.by);
        for (who, unmaps) in each.filter(|(_, unmaps)| **unmaps > 0) {
            let name = self.names.get(who).cloned().unwrap_or_default();
            *by.entry(name).or_default() += unmaps;
        }
        by
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::times::Times;
    use crate::find::tests::Made;

    const HERE: u64 = 0x7f00_0000_0000;

    fn heard(places: &[(i32, u64, u64)]) -> Heard {
        let notices = |unmaps| Notices { unmaps, unmapped_bytes: unmaps << 12, ages: 3 * unmaps };
        let place = |&(by, at, unmaps): &(i32, u64, u64)| (Place::new(by, at), notices(unmaps));
        Heard { places: places.iter().map(place).collect(), ..Heard::default() }
    }

    fn of(traced: &Traced, pid: i32) -> [u64; 4] {
        let mut sink = Sink::default();
        traced.guest(pid, &mut sink);
        let all = Metric::of(Scope::Noticed);
        let values: Vec<u64> = all.map(|metric| sink.values[&metric]).collect();
        values.try_into().unwrap()
    }

    #[test]
    fn a_notice_is_of_the_guest_that_gave_it_or_of_the_only_one_with_memory_there() {
        let host = Made::new();
        for pid in [10, 11] {
            host.process(pid, "vmm", &["anon_inode:kvm-vm"]);
        }
        host.process(2, "ksmd", &[]);
        host.write("proc/10/maps", &format!("{HERE:x}-{:x} rw-p 0 00:00 0\n", HERE + (1 << 30)));
        let other = HERE + (1 << 29);
        host.write("proc/11/maps", &format!("{other:x}-{:x} rw-p 0 00:00 0\n", HERE + (2 << 30)));
        let mut traced = Traced::new(Events::nothing("made up"));
        traced.events = Events::heard_in_a_test();
        let all = [
            (11, HERE, 5),                   // A guest itself, wherever.
            (2, HERE + 4096, 7),             // Only one has memory there.
            (2, other, 11),                  // Both have.
            (2, HERE + (3 << 30), 13),       // None has.
            (2, HERE + (1 << 30) + 4096, 1), // Only the other.
        ];
        traced.heard = heard(&all);
        traced.own(&host.files(), None);
        traced.sum();
        assert_eq!(of(&traced, 10), [7, 7 << 12, 7, 21]);
        assert_eq!(of(&traced, 11), [6, 6 << 12, 1, 18]);
        assert_eq!(traced.ambiguous(), 11);
        assert_eq!(
            traced.invalidated_by(11),
            [("vmm".to_owned(), 5), ("ksmd".to_owned(), 1)].into()
        );
    }

    #[test]
    fn a_place_of_a_guest_that_ended_belongs_to_the_guest_that_has_memory_there_next() {
        let host = Made::new();
        let maps = |pid: i32| {
            let range = format!("{HERE:x}-{:x} rw-p 0 00:00 0\n", HERE + (1 << 30));
            host.write(format!("proc/{pid}/maps"), &range);
        };
        host.process(10, "vmm", &["anon_inode:kvm-vm"]);
        host.process(2, "ksmd", &[]);
        maps(10);
        let mut traced = Traced::new(Events::heard_in_a_test());
        let hear = |traced: &mut Traced, pids: &[i32], unmaps| {
            traced.heard = heard(&[(2, HERE, unmaps)]);
            traced.look_again = Instant::now();
            traced.own(&host.files(), Some(pids.to_vec()));
            traced.sum();
        };
        hear(&mut traced, &[10], 7);
        assert_eq!(of(&traced, 10)[0], 7);
        traced.forget(10);
        host.process(11, "vmm", &["anon_inode:kvm-vm"]);
        maps(11);
        hear(&mut traced, &[11], 9);
        assert_eq!((of(&traced, 10)[0], of(&traced, 11)[0]), (0, 2));
        // Several guests have memory there for a while: these unmaps stay ambiguous.
        traced.forget(11);
        hear(&mut traced, &[10, 11], 14);
        assert_eq!((traced.ambiguous(), of(&traced, 11)[0]), (5, 0));
        traced.forget(10);
        hear(&mut traced, &[11], 15);
        assert_eq!((traced.ambiguous(), of(&traced, 11)[0]), (5, 1));
    }

    #[test]
    fn time_in_faults_with_transitions_has_one_for_each_fault_or_a_reason() {
        let times = |count, total_ns| {
            let mut times = Times::default();
            (times.count, times.total_ns) = (count, total_ns);
            times
        };
        let stalls = [
            (Why::FaultWrite, times(2, 1000)),
            (Why::FaultRead, times(1, 300)),
            (Why::Other, times(9, 9000)),
        ];
        let thread = Thread { stalls: Some(stalls.into()), ..Thread::default() };
        let told = |events| {
            let mut traced = Traced::new(events);
            traced.heard.threads = [((10, 20), thread.clone())].into();
            traced.sum();
            let mut sink = Sink::default();
            traced.vcpu(10, None, &mut sink);
            sink
        };
        let known = told(Events::calibrated_in_a_test(400));
        assert_eq!(known.values[&Metric::FaultNs], 1300);
        assert_eq!(known.values[&Metric::FaultNsWithTransitions], 1300 + 3 * 400);
        let unknown = told(Events::heard_in_a_test());
        assert_eq!(unknown.values[&Metric::FaultNs], 1300);
        let why = &unknown.unknown[&Metric::FaultNsWithTransitions];
        assert!(why.contains("--no-calibration"), "{why}");
    }

    #[test]
    fn accounts_that_could_not_be_read_and_threads_that_perf_does_not_follow_are_no_zeros() {
        let told = |traced: &Traced, tids| {
            let mut sink = Sink::default();
            traced.vcpu(10, tids, &mut sink);
            traced.guest(10, &mut sink);
            sink
        };
        let mut traced = Traced::new(Events::heard_in_a_test());
        traced.heard.no_threads = Some("not readable".to_owned());
        traced.heard.no_places = Some("neither".to_owned());
        let unread = told(&traced, None);
        assert!(unread.values.is_empty(), "{unread:?}");
        assert_eq!(unread.unknown[&Metric::UserExits], "not readable");
        assert_eq!(unread.unknown[&Metric::Invalidations], "neither");
        let mut traced = Traced::new(Events::counted_in_a_test());
        let counts = [("kvm_userspace_exit", 3)].into();
        let thread = Thread { counts, ..Thread::default() };
        // Of the thread 21, perf refused the events.
        traced.heard.threads = [((10, 20), thread), ((10, 21), Thread::default())].into();
        assert_eq!(told(&traced, None).values[&Metric::UserExits], 3);
        for unknown in [told(&traced, Some(&[21])), told(&traced, Some(&[22]))] {
            assert!(unknown.unknown[&Metric::UserExits].contains("no thread"), "{unknown:?}");
        }
    }

    #[test]
    fn threads_are_summed_and_exits_that_never_come_are_no_zero() {
        let mut traced = Traced::new(Events::heard_in_a_test());
        let thread = |exits: u64, vcpu| Thread {
            vcpu,
            counts: [("kvm_userspace_exit", exits)].into(),
            stalls: None,
        };
        traced.heard.threads = [((10, 20), thread(3, None)), ((10, 21), thread(4, Some(1)))].into();
        traced.heard.threads.insert((11, 22), thread(100, Some(1)));
        traced.sum();
        let told = |traced: &Traced, tids| {
            let mut sink = Sink::default();
            traced.vcpu(10, tids, &mut sink);
            sink
        };
        assert_eq!(
            told(&traced, None).values,
            [(Metric::UserExits, 7), (Metric::PagesLogged, 0)].into()
        );
        assert_eq!(told(&traced, Some(&[20])).values[&Metric::UserExits], 3);
        assert!(told(&traced, None).unknown[&Metric::FaultNs].contains("has not fired"));
        assert_eq!((traced.thread(10, 1), traced.thread(10, 0)), (Some(21), None));
        // Once an exit of any guest is received, a guest without exits has zero.
        traced.heard.threads.get_mut(&(11, 22)).unwrap().stalls = Some(Stalls::new());
        traced.sum();
        assert_eq!(told(&traced, None).values[&Metric::FaultNs], 0);
    }
}
