//! Claims of the host, which the machine checks: memory taken back, pages protected, copied, clean
//! or old, translations fresh.

use crate::arch::{Access, Arch};
use crate::machine::Machine;
use crate::state::State;
use crate::tlb::Entry;
use crate::violation::Kind;
use slat::{Gpa, GpaRange, Hpa, Vmid};
use std::collections::BTreeMap;

fn ends(range: GpaRange) -> (u64, u64) {
    (range.start().0, range.end().0)
}

impl<A: Arch> Machine<A> {
    /// Gives the guest memory of the host.
    pub fn give(&self, memory: Hpa, bytes: u64) {
        self.state().host.give(memory.0, bytes);
    }

    /// Takes memory back for another use of the host. Reports every CPU and device that may still
    /// reach it.
    pub fn take_back(&self, memory: Hpa, bytes: u64) {
        let mut state = self.state();
        state.host.take_back(memory.0, bytes);
        let (first, last) = (memory.0, memory.0 + bytes);
        state.forbid_devices(first, last);
        let vmids: Vec<_> = state.vmids.iter().copied().map(Vmid).collect();
        for vmid in vmids {
            let inside = |entry: &Entry| entry.leaf.hpa < last && first < entry.hpa(entry.end());
            state.forbid(vmid, (0, u64::MAX), Kind::FreedMemory, "it was taken back", inside);
        }
    }

    /// The host writes to its own page through its caches.
    pub fn host_write(&self, memory: Hpa) {
        let mut state = self.state();
        state.check_host(memory.0, "writes");
        state.host.host_write(memory.0);
    }

    /// The host reads its own page through its caches.
    pub fn host_read(&self, memory: Hpa) {
        let mut state = self.state();
        state.check_host(memory.0, "reads");
        if let Err(reason) = state.host.host_read(memory.0) {
            let used = format!("the host reads {memory}");
            state.log.report(Kind::MissingMaintenance, None, None, used, reason);
        }
    }

    /// Cleans and invalidates the data cache to the point of coherency (Arm: `dc civac`).
    pub fn clean(&self, memory: Hpa, bytes: u64) {
        self.state().host.clean(memory.0, bytes);
    }

    /// Invalidates the instruction cache (Arm: `ic`).
    pub fn invalidate_instructions(&self, memory: Hpa, bytes: u64) {
        self.state().host.invalidate_instructions(memory.0, bytes);
    }

    /// Claims that no CPU writes to these pages from now on, until [`Machine::unprotect`].
    pub fn protect(&self, vmid: Vmid, range: GpaRange) {
        let mut state = self.state();
        let (start, end) = ends(range);
        state.uses.protect(vmid.0, start, end);
        let writes = |entry: &Entry| entry.leaf.rights.write;
        state.forbid(vmid, (start, end), Kind::RevokedRight, "writes were said to fault", writes);
    }

    /// Ends [`Machine::protect`] for these pages.
    pub fn unprotect(&self, vmid: Vmid, range: GpaRange) {
        let (start, end) = ends(range);
        self.state().uses.unprotect(vmid.0, start, end);
    }

    /// Records that the host has copied these pages, or has otherwise accounted for all writes to
    /// them.
    pub fn copy(&self, vmid: Vmid, range: GpaRange) {
        let (start, end) = ends(range);
        self.state().uses.update(vmid.0, start, end, |page| page.copied = page.written);
    }

    /// Claims that `dirty` is true of every page that was written after it was last copied.
    pub fn claim_clean(&self, vmid: Vmid, range: GpaRange, mut dirty: impl FnMut(Gpa) -> bool) {
        let (start, end) = ends(range);
        let pages = self.state().uses.within(vmid.0, start, end);
        for (gpa, page) in pages {
            if page.copied < page.written && !dirty(Gpa(gpa)) {
                let lost = page.written - page.copied;
                let used = format!("{lost} writes, the last by CPU {}", page.writer);
                let expected = "a page that was written is dirty until it is copied";
                let cpu = Some(page.writer);
                self.state().log.report(Kind::LostDirty, cpu, Some(gpa), used, expected);
            }
        }
    }

    /// Records that the host knows of all uses of these pages so far.
    pub fn seen(&self, vmid: Vmid, range: GpaRange) {
        let (start, end) = ends(range);
        self.state().uses.update(vmid.0, start, end, |page| page.seen = page.used);
    }

    /// Claims that `young` is true of every page that was used after it was last [`Machine::seen`].
    pub fn claim_old(&self, vmid: Vmid, range: GpaRange, mut young: impl FnMut(Gpa) -> bool) {
        let (start, end) = ends(range);
        let pages = self.state().uses.within(vmid.0, start, end);
        for (gpa, page) in pages {
            if page.seen < page.used && !young(Gpa(gpa)) {
                let used = format!("{} accesses", page.used - page.seen);
                let expected = "a page that was used is young until that is seen";
                self.state().log.report(Kind::LostYoung, None, Some(gpa), used, expected);
            }
        }
    }

    /// Claims that the guest on `cpu` has the right to `access`, so that it takes one more fault at
    /// most.
    pub fn claim_progress(&self, cpu: usize, gpa: Gpa, access: Access) {
        let tries = [0; 2].map(|_| self.cpu(cpu).access(gpa.0, access));
        if let Err(fault) = tries[1] {
            let used = format!("{access:?} ends in {fault:?}, and again");
            let expected = "an invalidation makes a CPU see the new right";
            self.state().log.report(Kind::Livelock, Some(cpu), Some(gpa.0), used, expected);
        }
    }

    /// Claims that CPUs cache nothing of these addresses but what the tables hold.
    ///
    /// A cached translation with fewer rights than the tables give is allowed: it only costs a
    /// fault.
    pub fn claim_fresh(&self, vmid: Vmid, range: GpaRange) {
        let mut state = self.state();
        let (start, end) = ends(range);
        let (present, links) = state.present(vmid);
        for cpu in 0..state.cpus.len() {
            let (held, walks) = state.possible(cpu, vmid, start, end);
            for old in held {
                if let Some((kind, expected)) = staleness(&present, &old, start, end) {
                    let used = format!("it may use {}", old.text());
                    state.log.report(kind, Some(cpu), Some(old.start), used, &expected);
                }
            }
            for walk in walks {
                let now = links.get(&(walk.start, walk.shift)).map(|now| (now.table, now.rights));
                if now.is_none_or(|(table, rights)| {
                    table != walk.table || walk.rights.and(rights) != walk.rights
                }) {
                    let used = format!("it may begin a walk at the table {:#x}", walk.table);
                    let expected = format!("the tables link {now:x?}");
                    let at = Some(walk.start);
                    state.log.report(Kind::StaleWalk, Some(cpu), at, used, &expected);
                }
            }
        }
    }
}

/// Returns what is wrong with `old` inside `start..end`, where the tables hold `present`.
fn staleness(
    present: &BTreeMap<u64, Entry>,
    old: &Entry,
    start: u64,
    end: u64,
) -> Option<(Kind, String)> {
    let (mut at, end) = (old.start.max(start), old.end().min(end));
    while at < end {
        let now = present.range(..=at).next_back().map(|(_, now)| now);
        let Some(now) = now.filter(|now| at < now.end()) else {
            return Some((Kind::StaleTranslation, format!("{at:#x} is unmapped")));
        };
        let text = format!("the tables say {}", now.text());
        let (was, is) = (old.leaf, now.leaf);
        if old.hpa(at) != now.hpa(at) || was.memory != is.memory {
            return Some((Kind::StaleTranslation, text));
        }
        if was.rights.and(is.rights) != was.rights {
            return Some((Kind::RevokedRight, text));
        }
        if was.rights.write && was.dirty && !is.dirty {
            return Some((Kind::LostDirty, text));
        }
        at = now.end();
    }
    None
}

impl State {
    /// Reports every translation of the range that a CPU may still use and that is `wrong`.
    pub(crate) fn forbid(
        &mut self,
        vmid: Vmid,
        (start, end): (u64, u64),
        kind: Kind,
        expected: &str,
        wrong: impl Fn(&Entry) -> bool,
    ) {
        for cpu in 0..self.cpus.len() {
            let (held, _) = self.possible(cpu, vmid, start, end);
            for entry in held.into_iter().filter(&wrong) {
                let used = format!("it may use {}", entry.text());
                self.log.report(kind, Some(cpu), Some(entry.start), used, expected);
            }
            let late = self.cpus[cpu].late.iter().filter(|store| store.vmid == vmid);
            let late = late.filter(|store| store.entry.start < end && start < store.entry.end());
            for store in late.filter(|store| wrong(&store.entry)) {
                let used = format!("a store is under way through {}", store.entry.text());
                self.log.report(kind, Some(cpu), Some(store.entry.start), used, expected);
            }
        }
    }
}
