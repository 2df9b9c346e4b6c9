//! Attributes the accounts of KVM's tracepoints to guests.
//!
//! The events of a vCPU come on its thread. An MMU notifier event has addresses and no owner. It is
//! attributed to the guest whose own thread caused it, or else to the only guest that has memory at
//! these addresses.

use crate::procfs::Files;
use crate::watch::events::times::{Stalls, Why, faults};
use crate::watch::events::{
    Accounts, EXIT, Events, Notices, PROTECTED, PUSH, Place, Thread, USER_EXIT,
};
use crate::watch::find;
use crate::watch::metric::{Metric, Scope, Sink, Source};
use crate::watch::task;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// Why events of exits have no values, though programs listen to them.
const SILENT: &str = "kvm_exit has not fired, though KVM has it: where KVM works without hardware \
                      virtualisation (kvm_pvm) it never does";

/// Why events that perf counts have no values.
const UNFOLLOWED: &str = "perf counts events of single threads, and no thread of a vCPU is known \
                          whose events it counts";

/// Work that costs a guest's process time takes at most one part in `SPARE` of the time.
pub(crate) const SPARE: u32 = 200;

/// Why times of exits have no values, though some were measured.
const UNTIMED: &str = "events were lost: more threads of this guest ran vCPUs than have room for \
                       an account";

/// Most places whose owner is not known yet, and most places whose owner is kept.
const PLACES: usize = 1 << 15;
/// Most names of processes that unmapped memory of a guest. Others count as [`OTHERS`].
const NAMES: usize = 64;
const OTHERS: &str = "other processes";

/// Everything that tracepoints counted up to now.
#[derive(Debug)]
pub(crate) struct TraceCounts {
    events: Events,
    heard: Accounts,
    /// The process whose memory lies at a place; `None` if several guests have memory there.
    owners: BTreeMap<Place, Option<i32>>,
    /// What was counted at places whose owner is not known yet.
    open: BTreeMap<Place, Notices>,
    /// Unmaps at places where several guests have memory.
    ambiguous: u64,
    /// The guests that are watched, with their processes' names.
    watched: BTreeMap<i32, String>,
    /// Notifications of each watched guest that are not in its own account.
    noticed: BTreeMap<i32, GuestNotices>,
    /// Guests for which notifications of unmaps, and of ageing, may be missing, and why.
    unplaced: [BTreeMap<i32, String>; 2],
    /// Ranges that were lost when somebody last looked.
    lost: u64,
    /// Events without room of guests that ended.
    lost_before: u64,
    /// Whether an exit of any guest was received.
    fires: bool,
    look_again: Instant,
}

/// Notifications about a guest's memory.
#[derive(Clone, Debug, Default)]
struct GuestNotices {
    all: Notices,
    /// Unmaps by the guest's own process.
    own: u64,
    /// Number of unmaps by the name of the process that caused them.
    by: BTreeMap<String, u64>,
}

impl GuestNotices {
    fn add(&mut self, notices: Notices, name: &str) {
        self.all.add(notices);
        if notices.unmaps > 0 {
            let is_known = self.by.len() < NAMES || self.by.contains_key(name);
            let name = if is_known { name } else { OTHERS };
            *self.by.entry(name.to_owned()).or_default() += notices.unmaps;
        }
    }
}

impl TraceCounts {
    pub fn new(events: Events) -> Self {
        Self {
            events,
            heard: Accounts::default(),
            owners: BTreeMap::new(),
            open: BTreeMap::new(),
            ambiguous: 0,
            watched: BTreeMap::new(),
            noticed: BTreeMap::new(),
            unplaced: Default::default(),
            lost: 0,
            lost_before: 0,
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
        self.events.forget(pid);
        self.heard.threads.retain(|thread, _| thread.0 != pid);
        let own = self.heard.guests.remove(&pid);
        self.lost_before += own.map_or(0, |own| own.roomless());
        self.watched.remove(&pid);
        self.noticed.remove(&pid);
        for unplaced in &mut self.unplaced {
            unplaced.remove(&pid);
        }
        self.owners.retain(|_, owner| owner.is_some_and(|owner| owner != pid));
    }

    /// Begins the accounts of guests of the processes `new`, each with its number of vCPUs: they
    /// have nothing that was counted before. `there` are the processes whose guests are watched
    /// already.
    pub fn begin(&mut self, files: &Files<'_>, there: Vec<i32>, new: &[(i32, usize)]) {
        for (pid, vcpus) in new {
            self.events.begin(*pid, *vcpus);
        }
        self.events.hear(&mut self.heard);
        // Places of guests that are watched already get their owners now, whenever the last look
        // was. What was counted at all others belongs to no guest.
        self.look_again = Instant::now();
        self.place(files, Some(there));
        self.open.clear();
        for (pid, _) in new {
            self.watched.insert(*pid, name(files, *pid));
        }
        self.note_fires();
    }

    /// Returns the number of events that are not in the accounts.
    pub fn lost(&self) -> u64 {
        let roomless = self.heard.guests.values().map(|own| own.roomless()).sum::<u64>();
        self.heard.lost + self.heard.missed + self.lost_before + roomless
    }

    /// Returns the number of unmaps at places where several guests have memory.
    pub fn ambiguous(&self) -> u64 {
        self.ambiguous
    }

    /// Reads the accounts. `guests` are the processes that may own memory; `None` means all that
    /// have guests.
    pub fn hear(&mut self, files: &Files<'_>, guests: Option<Vec<i32>>) {
        self.events.hear(&mut self.heard);
        self.place(files, guests);
        self.note_fires();
    }

    /// Accounts end, but what fired once can fire again.
    fn note_fires(&mut self) {
        self.fires |= self.heard.threads.values().any(|thread| thread.stalls.is_some());
    }

    /// Gives what was counted at places to the guests that have memory there.
    fn place(&mut self, files: &Files<'_>, guests: Option<Vec<i32>>) {
        let mut names = BTreeMap::new();
        for (place, notices) in std::mem::take(&mut self.heard.places) {
            if place.is_anywhere() {
                self.take_anywhere(files, place.by, notices);
            } else if let Some(owner) = self.owners.get(&place) {
                self.give(files, place, *owner, notices, &mut names);
            } else {
                self.open.entry(place).or_default().add(notices);
            }
        }
        self.own(files, guests, &mut names);
        let lost = self.heard.lost > self.lost;
        self.lost = self.heard.lost;
        if lost {
            self.miss("of processes that found no room for an account", [true; 2]);
        }
        if self.open.len() > PLACES {
            self.open.clear();
            self.miss("at more places than can be given to guests", [true; 2]);
        }
    }

    /// Takes notices of a process at places that found no room. If the process has a guest, they
    /// are of that guest; otherwise they may be of any.
    fn take_anywhere(&mut self, files: &Files<'_>, by: i32, notices: Notices) {
        if self.watched.contains_key(&by) {
            let name = name(files, by);
            let it = self.noticed.entry(by).or_default();
            it.add(notices, &name);
            it.own += notices.unmaps;
        } else if find::guest(files, by).is_err() {
            let what = format!("of process {by} ({}) at too many places", name(files, by));
            self.miss(&what, [notices.unmaps > 0, notices.ages > 0]);
        }
    }

    /// Notes that notifications are missing that may be of any guest.
    fn miss(&mut self, what: &str, kinds: [bool; 2]) {
        for (unplaced, _) in self.unplaced.iter_mut().zip(kinds).filter(|(_, is)| *is) {
            for pid in self.watched.keys() {
                let why = || format!("events were lost: ranges {what}");
                unplaced.entry(*pid).or_insert_with(why);
            }
        }
    }

    /// Returns why a metric of notifications lost some, if it did.
    fn lost_of_notices(&self, pid: i32, metric: Metric) -> Option<&str> {
        let kind = usize::from(metric == Metric::Ageings);
        self.unplaced[kind].get(&pid).map(String::as_str)
    }

    /// Adds notices at a place to those of its owner.
    fn give(
        &mut self,
        files: &Files<'_>,
        place: Place,
        owner: Option<i32>,
        notices: Notices,
        names: &mut BTreeMap<i32, String>,
    ) {
        match owner {
            None => self.ambiguous += notices.unmaps,
            Some(pid) if self.watched.contains_key(&pid) => {
                let name = names.entry(place.by).or_insert_with(|| name(files, place.by));
                let it = self.noticed.entry(pid).or_default();
                it.add(notices, name);
                it.own += if place.by == pid { notices.unmaps } else { 0 };
            }
            Some(_) => {}
        }
    }

    /// Finds the owners of places with notifications, for at most one part in [`SPARE`] of the
    /// time, because it reads each process's mappings. What has no owner then is of no guest.
    fn own(
        &mut self,
        files: &Files<'_>,
        guests: Option<Vec<i32>>,
        names: &mut BTreeMap<i32, String>,
    ) {
        if self.open.is_empty() || Instant::now() < self.look_again {
            return;
        }
        let began = Instant::now();
        let find = || find::guests(files).found.iter().map(|found| found.pid).collect();
        let pids: Vec<i32> = guests.unwrap_or_else(find);
        let mut unread = false;
        let read = |pid: &i32| {
            let read = task::mappings(files, *pid, |_| true);
            // A process that ended has no memory.
            unread |= read.is_err() && files.0.join(format!("proc/{pid}")).exists();
            (*pid, read.ok().flatten().unwrap_or_default())
        };
        let mappings: Vec<(i32, Vec<Range<u64>>)> = pids.iter().map(read).collect();
        if self.owners.len() > PLACES {
            self.owners.clear();
        }
        // A guest that is not watched yet causes notifications of its own memory alone.
        let mut have_guests: BTreeMap<i32, bool> = BTreeMap::new();
        for (place, notices) in std::mem::take(&mut self.open) {
            let has_guest = |by| pids.contains(by) || find::guest(files, *by).is_ok();
            let by = place.by;
            let owner = if *have_guests.entry(by).or_insert_with(|| has_guest(&by)) {
                Some(by)
            } else {
                let here = place.addresses();
                let overlaps = |it: &Range<u64>| it.start < here.end && here.start < it.end;
                let has = mappings.iter().filter(|(_, all)| all.iter().any(overlaps));
                let mut has = has.map(|(pid, _)| *pid);
                match (has.next(), has.next()) {
                    (_, None) if unread => {
                        let what = "at places that may be of a guest whose maps cannot be read";
                        self.miss(what, [notices.unmaps > 0, notices.ages > 0]);
                        continue;
                    }
                    (None, _) => continue,
                    (one, None) => one,
                    _ => None,
                }
            };
            self.owners.insert(place, owner);
            self.give(files, place, owner, notices, names);
        }
        self.look_again = Instant::now() + began.elapsed() * SPARE;
    }

    /// Returns the thread that ran a vCPU last, if the kernel provides it.
    pub fn thread(&self, pid: i32, vcpu: u32) -> Option<i32> {
        let threads = self.heard.threads.range((pid, 1)..=(pid, i32::MAX));
        let of_it = threads.filter(|(_, thread)| thread.vcpu == Some(vcpu));
        of_it.max_by_key(|(_, thread)| thread.last).map(|((_, tid), _)| *tid)
    }

    /// Returns the accounts of a process's threads: of `tids`, or of all.
    fn threads(&self, pid: i32, tids: Option<&[i32]>) -> impl Iterator<Item = &Thread> {
        let threads = self.heard.threads.range((pid, 0)..=(pid, i32::MAX));
        let wanted = move |tid: i32| tids.is_none_or(|tids| tids.contains(&tid));
        threads.filter(move |((_, tid), _)| wanted(*tid)).map(|(_, thread)| thread)
    }

    /// Returns why a metric of a process's threads lost events: of each vCPU's, or of all.
    fn lost_of_threads(&self, pid: i32, event: &str, of_vcpu: bool) -> Option<&'static str> {
        let own = self.heard.guests.get(&pid)?;
        let unattributed = own.roomless() > 0 || self.heard.threads.contains_key(&(pid, 0));
        let lost = if of_vcpu { unattributed } else { event == EXIT && own.untimed > 0 };
        lost.then_some(UNTIMED)
    }

    /// Returns the metrics of a guest that lost events, and why. Their values are too small from
    /// then on.
    pub fn lossy(&self, pid: i32) -> impl Iterator<Item = (Metric, &str)> {
        let noticed = Metric::of(Scope::Noticed)
            .filter_map(move |metric| Some((metric, self.lost_of_notices(pid, metric)?)));
        let traced = Metric::of(Scope::Traced).filter_map(move |metric| {
            Some((metric, self.lost_of_threads(pid, metric.event()?, false)?))
        });
        traced.chain(noticed)
    }

    /// Returns whether events of a guest's vCPUs are in no thread's account.
    pub fn lossy_vcpus(&self, pid: i32) -> bool {
        self.lost_of_threads(pid, EXIT, true).is_some()
    }

    /// Returns how long threads of a process were out of the guest, by reason.
    pub fn stalls(&self, pid: i32, tids: Option<&[i32]>) -> Stalls {
        let mut sum = Stalls::new();
        if self.lost_of_threads(pid, EXIT, tids.is_some()).is_some() {
            return sum;
        }
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
                _ => {
                    let each = self.threads(pid, tids).filter_map(|it| it.counts.get(event));
                    let own = self.heard.guests.get(&pid).filter(|_| tids.is_none());
                    let roomless = own.map_or(0, |own| match event {
                        USER_EXIT => own.user_exits,
                        PUSH => own.pushes,
                        _ => 0,
                    });
                    each.sum::<u64>() + roomless
                }
            };
            let unread = self.unread(pid);
            let lost = self.lost_of_threads(pid, event, tids.is_some());
            let mut counts = self.threads(pid, tids).map(|thread| &thread.counts);
            let by_thread = self.events.source() == Source::PerfCounts;
            let unfollowed = by_thread && !counts.any(|counts| counts.contains_key(event));
            let unfollowed = unfollowed.then_some(UNFOLLOWED);
            let silent = (event == EXIT && !self.fires).then_some(SILENT);
            let unmeasured = match metric {
                Metric::FaultNsWithTransitions => transition.err(),
                Metric::FaultsProtected | Metric::ProtectedNs => self.events.why(PROTECTED),
                _ => None,
            };
            let why = self.events.why(event).or(unread).or(unfollowed).or(silent).or(lost);
            let why = why.or(unmeasured);
            sink.put(metric, self.events.source(), why.map_or(Ok(value), Err));
        }
    }

    /// Returns why the accounts of a process are not known, if they are not.
    fn unread(&self, pid: i32) -> Option<&str> {
        let unread = self.heard.no_threads.as_deref();
        let unread = unread.filter(|_| !self.heard.guests.contains_key(&pid));
        self.events.roomless(pid).or(unread)
    }

    /// Puts the metrics of the host's notifications about a process's memory.
    pub fn guest(&self, pid: i32, sink: &mut Sink) {
        let mut noticed = self.noticed.get(&pid).cloned().unwrap_or_default();
        if let Some(own) = self.heard.guests.get(&pid) {
            noticed.all.add(own.notices);
            noticed.own += own.notices.unmaps;
        }
        for metric in Metric::of(Scope::Noticed) {
            let Some(event) = metric.event() else { continue };
            let value = match metric {
                Metric::Invalidations => noticed.all.unmaps,
                Metric::InvalidatedBytes => noticed.all.unmapped_bytes,
                Metric::InvalidationsByOthers => noticed.all.unmaps - noticed.own,
                Metric::Ageings => noticed.all.ages,
                _ => 0,
            };
            let unread = self.heard.no_places.as_deref().or(self.unread(pid));
            let lost = self.lost_of_notices(pid, metric);
            let why = self.events.why(event).or(unread).or(lost);
            sink.put(metric, self.events.source(), why.map_or(Ok(value), Err));
        }
    }

    /// Returns the processes that unmapped memory of a process, by name, and how often each did.
    pub fn invalidated_by(&self, pid: i32) -> BTreeMap<String, u64> {
        if self.unplaced[0].contains_key(&pid) {
            return BTreeMap::new();
        }
        let mut by = self.noticed.get(&pid).map(|it| it.by.clone()).unwrap_or_default();
        let own = self.heard.guests.get(&pid).map_or(0, |own| own.notices.unmaps);
        if own > 0 {
            *by.entry(self.watched.get(&pid).cloned().unwrap_or_default()).or_default() += own;
        }
        by
    }
}

/// Returns the name that a process has now.
fn name(files: &Files<'_>, pid: i32) -> String {
    let name = files.text(format!("proc/{pid}/comm"));
    name.unwrap_or_else(|| "a process that ended".to_owned())
}

#[cfg(test)]
mod tests;
