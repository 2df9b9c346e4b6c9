//! The maps of the programs: a room for each watched guest, and two maps of places.
//!
//! A guest's room belongs to it alone, and goes with it. Where half of it is used, the accounts of
//! threads that ended are taken out: nothing writes those any more.
//!
//! Places are in maps that are exchanged at each hearing. The exchange waits for the programs that
//! use the map which it takes out (Linux 4.20), so that one is read and emptied while nothing
//! writes to it.

use super::programs::{self, RANGE_WORDS, THREAD_WORDS};
use super::{Accounts, Notices, Place, Thread, ids, notices, place, thread};
use crate::watch::bpf::sys::{Kind, Map};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::path::Path;

/// Most guests that have a room.
const GUESTS: usize = 4096;
/// Accounts in each room, where the kernel wants all rooms alike (before Linux 5.10).
const ALIKE: usize = 64;
/// Most places, and most processes that found no room at a place, between two hearings.
const RANGES: [usize; 2] = [8192, 1024];
/// Most threads of a guest that ended whose accounts are kept apart.
const GONE: usize = 256;

/// What a guest's own account has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Own {
    /// Ranges that the guest's own threads unmapped or aged.
    pub notices: Notices,
    /// Exits of threads that found no room: their times are not known.
    pub untimed: u64,
    /// Exits to the VMM, and pages put into rings, on threads that found no room.
    pub user_exits: u64,
    pub pushes: u64,
}

impl Own {
    /// Returns the number of events that are in no thread's account.
    pub fn roomless(&self) -> u64 {
        self.untimed + self.user_exits + self.pushes
    }
}

#[derive(Debug)]
pub(super) struct Rooms {
    outer: Map,
    each: BTreeMap<i32, Room>,
}

#[derive(Debug)]
pub(super) struct Room {
    pub map: Map,
    /// Accounts of threads that ended; the thread 0 stands for the first of many.
    gone: BTreeMap<i32, Thread>,
}

/// Returns the key of a process's room, and of the guest's own account therein.
fn key(pid: i32) -> u64 {
    (pid as u64) << 32
}

impl Rooms {
    pub fn new() -> Result<Self, Errno> {
        let like = Map::new(Kind::Hash, THREAD_WORDS, ALIKE)?;
        Ok(Self { outer: Map::of_maps(Kind::HashOfMaps, &like, GUESTS)?, each: BTreeMap::new() })
    }

    pub fn fd(&self) -> i32 {
        self.outer.fd()
    }

    /// Gives a process a room, with place for the threads of about `vcpus` vCPUs.
    pub fn open(&mut self, pid: i32, vcpus: usize) -> Result<(), Errno> {
        let made = |most| -> Result<_, Errno> {
            let map = Map::new(Kind::Hash, THREAD_WORDS, most)?;
            map.set(key(pid), &[0; THREAD_WORDS])?;
            self.outer.set_map(key(pid), &map)?;
            Ok(map)
        };
        let map = match made((2 * vcpus + 16).next_power_of_two()) {
            Err(Errno::INVAL) => made(ALIKE),
            made => made,
        };
        self.each.insert(pid, Room { map: map?, gone: BTreeMap::new() });
        Ok(())
    }

    /// Takes a process's room: its later events are in no account.
    pub fn close(&mut self, pid: i32) {
        // If the kernel does not find it, it is not there.
        let _ = self.outer.delete(key(pid));
        self.each.remove(&pid);
    }

    /// Returns the words of a thread's account.
    pub fn account(&self, pid: i32, tid: i32) -> Option<Vec<u64>> {
        self.each.get(&pid)?.map.value(key(pid) | tid as u64).ok()
    }

    #[cfg(test)]
    pub fn room(&self, pid: i32) -> &Map {
        &self.each[&pid].map
    }

    #[cfg(test)]
    pub fn unreadable(pid: i32) -> Self {
        let outer = Map::unreadable(Kind::HashOfMaps, 1);
        let map = Map::unreadable(Kind::Hash, THREAD_WORDS);
        Self { outer, each: [(pid, Room { map, gone: BTreeMap::new() })].into() }
    }

    /// Brings the accounts of all guests up to now. Those of a guest whose room cannot be read stay
    /// as they were; without any, there is a reason.
    pub fn hear(&mut self, heard: &mut Accounts) {
        heard.threads.retain(|(pid, _), _| self.each.contains_key(pid));
        heard.guests.retain(|pid, _| self.each.contains_key(pid));
        heard.no_threads = None;
        for (pid, room) in &mut self.each {
            if let Err(error) = room.hear(*pid, heard)
                && !heard.guests.contains_key(pid)
            {
                heard.no_threads = Some(unread(error));
            }
        }
    }
}

impl Room {
    fn hear(&mut self, pid: i32, heard: &mut Accounts) -> Result<(), Errno> {
        let entries = self.map.entries()?;
        let is_half_full = 2 * entries.len() > self.map.most();
        let mut threads: BTreeMap<i32, Thread> = BTreeMap::new();
        for (key, words) in entries {
            let (_, tid) = ids(key);
            if tid == 0 {
                heard.guests.insert(pid, own(&words));
                continue;
            }
            if is_half_full
                && !Path::new(&format!("/proc/{pid}/task/{tid}")).exists()
                && let Ok(last) = self.map.value(key)
                && self.map.delete(key).is_ok()
            {
                self.gone.entry(tid).or_default().add(&thread(&last));
                continue;
            }
            threads.insert(tid, thread(&words));
        }
        while self.gone.range(1..).nth(GONE).is_some() {
            let first = *self.gone.range(1..).next().map_or(&0, |(tid, _)| tid);
            let mut thread = self.gone.remove(&first).unwrap_or_default();
            thread.vcpu = None;
            self.gone.entry(0).or_default().add(&thread);
        }
        for (tid, gone) in &self.gone {
            threads.entry(*tid).or_default().add(gone);
        }
        heard.threads.retain(|(of, _), _| *of != pid);
        heard.threads.extend(threads.into_iter().map(|(tid, thread)| ((pid, tid), thread)));
        Ok(())
    }
}

fn own(words: &[u64]) -> Own {
    Own {
        notices: notices(&words[programs::OWN..]),
        untimed: words[programs::UNTIMED],
        user_exits: words[programs::USER_EXITS],
        pushes: words[programs::PUSHES],
    }
}

fn unread(error: Errno) -> String {
    format!("the accounts of eBPF's programs cannot be read: {error} (the call is Linux 5.6's)")
}

/// Accounts of places: a map that programs write to, and one that is empty, for each index.
#[derive(Debug)]
pub(super) struct Places {
    outer: Map,
    maps: [[Map; 2]; 2],
    heard: bool,
}

impl Places {
    pub fn new() -> Result<Self, Errno> {
        Self::with_room(RANGES)
    }

    pub fn with_room([places, processes]: [usize; 2]) -> Result<Self, Errno> {
        let new = |most| Map::new(Kind::Hash, RANGE_WORDS, most);
        // All inner maps of one outer map are alike before Linux 5.10.
        let all = |places, processes| -> Result<_, Errno> {
            let maps = [[new(places)?, new(places)?], [new(processes)?, new(processes)?]];
            let outer = Map::of_maps(Kind::ArrayOfMaps, &maps[0][0], 2)?;
            for (index, pair) in maps.iter().enumerate() {
                outer.set_map(index as u64, &pair[0])?;
            }
            Ok(Self { outer, maps, heard: false })
        };
        match all(places, processes) {
            Err(Errno::INVAL) => all(places, places),
            made => made,
        }
    }

    pub fn fd(&self) -> i32 {
        self.outer.fd()
    }

    #[cfg(test)]
    pub fn unreadable() -> Self {
        let map = || Map::unreadable(Kind::Hash, RANGE_WORDS);
        let maps = [[map(), map()], [map(), map()]];
        Self { outer: Map::unreadable(Kind::ArrayOfMaps, 1), maps, heard: false }
    }

    #[cfg(test)]
    pub fn used(&self, index: usize) -> &Map {
        &self.maps[index][0]
    }

    /// Adds what was counted since the last time. What cannot be read now is read the next time; if
    /// nothing ever was, there is a reason.
    pub fn hear(&mut self, heard: &mut Accounts) {
        let read = (0..2).try_for_each(|index| self.take(index, &mut heard.places));
        self.heard |= read.is_ok();
        heard.no_places = read.err().filter(|_| !self.heard).map(unread);
    }

    fn take(&mut self, index: usize, to: &mut BTreeMap<Place, Notices>) -> Result<(), Errno> {
        let [used, empty] = &mut self.maps[index];
        if used.entries()?.is_empty() {
            return Ok(());
        }
        self.outer.set_map(index as u64, empty)?;
        std::mem::swap(used, empty);
        for (key, words) in empty.entries()? {
            // One that cannot be deleted is counted again: it never comes to that, as it is there.
            empty.delete(key)?;
            to.entry(place(key)).or_default().add(notices(&words));
        }
        Ok(())
    }
}
