//! A CPU of the fast machine: its windows, walks and accesses.

use super::error::{AccessError, Why};
use super::moment::{Moment, moment};
use super::tlb::{Found, Tlb};
use super::window::Door;
use super::{Barriers, FastMachine};
use crate::arch::{Access, Arch, Descriptor, Fault, Rights};
use slat::{Hpa, Vmid};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A CPU of a [`FastMachine`], driven by one thread; see [`FastMachine::cpu`].
#[derive(Debug)]
pub struct FastCpu<'m, A: Arch> {
    machine: &'m FastMachine<A>,
    door: &'m Door,
    barriers: Barriers,
    /// The counter that `door` holds.
    window: u64,
    /// The generation whose invalidations the TLB has seen.
    seen: u64,
    tlb: Tlb,
    root: Option<(Vmid, Hpa)>,
    walks: u64,
}

impl<'m, A: Arch> FastCpu<'m, A> {
    pub(super) fn new(machine: &'m FastMachine<A>, door: &'m Door, window: u64) -> Self {
        let (tlb, seen, barriers) = (Tlb::default(), machine.log.now(), machine.barriers);
        Self { machine, door, barriers, window, seen, tlb, root: None, walks: 0 }
    }

    /// Runs the guest `vmid` with the tables at `root` from now on, and flushes the TLB.
    pub fn load(&mut self, vmid: Vmid, root: Hpa) {
        self.root = Some((vmid, root));
        self.tlb.flush();
    }

    /// Runs no guest from now on, so that every access faults.
    pub fn unload(&mut self) {
        self.root = None;
        self.tlb.flush();
    }

    /// Returns the number of walks so far: accesses that the TLB did not serve.
    pub const fn walks(&self) -> u64 {
        self.walks
    }

    /// The guest loads the word at `gpa`.
    ///
    /// # Errors
    /// [`AccessError`]; nothing was accessed.
    #[inline]
    pub fn read(&mut self, gpa: u64) -> Result<u64, AccessError> {
        self.access(gpa, Access::Read, |word| word.load(Relaxed))
    }

    /// The guest stores `value` to the word at `gpa`.
    ///
    /// # Errors
    /// [`AccessError`]; nothing was accessed.
    #[inline]
    pub fn write(&mut self, gpa: u64, value: u64) -> Result<(), AccessError> {
        self.access(gpa, Access::Write, |word| word.store(value, Relaxed))
    }

    /// The guest fetches the word at `gpa` as an instruction.
    ///
    /// # Errors
    /// [`AccessError`]; nothing was accessed.
    #[inline]
    pub fn execute(&mut self, gpa: u64) -> Result<u64, AccessError> {
        self.access(gpa, Access::Execute, |word| word.load(Relaxed))
    }

    #[inline(always)]
    fn access<R>(
        &mut self,
        gpa: u64,
        access: Access,
        go: impl FnOnce(&AtomicU64) -> R,
    ) -> Result<R, AccessError> {
        self.begin();
        let result = match self.tlb.find(gpa, access) {
            Some(hpa) => Ok(hpa),
            None => self.miss(gpa, access),
        };
        let result = result.map(|hpa| {
            // SAFETY: `miss` finds and keeps pieces of guest memory only. It refuses addresses that
            // are not aligned, and the TLB does not match them.
            go(unsafe { self.machine.space.word(hpa) })
        });
        self.end();
        result
    }

    /// The protocol depends on the order of its three steps.
    #[inline(always)]
    fn begin(&mut self) {
        self.window += 1;
        self.door.set(self.window);
        self.barriers.here();
        let now = self.machine.log.now();
        moment(Moment::Looked);
        if now != self.seen {
            self.catch_up(now);
        }
    }

    #[inline(always)]
    fn end(&mut self) {
        self.window += 1;
        self.door.set(self.window);
    }

    /// Drops what was invalidated since the last window.
    #[cold]
    fn catch_up(&mut self, now: u64) {
        let Self { machine, seen, tlb, root, .. } = self;
        let complete = machine.log.since(*seen, now, |vmid, start, end| {
            if root.is_some_and(|(own, _)| u64::from(own.0) == vmid) {
                tlb.forget(start, end);
            }
        });
        if !complete {
            tlb.flush();
        }
        *seen = now;
    }

    #[cold]
    #[inline(never)]
    fn miss(&mut self, gpa: u64, access: Access) -> Result<u64, AccessError> {
        let found = match self.walk(gpa, access) {
            Ok(found) => found,
            Err(reason) => {
                if reason == Why::Mmu(Fault::Permission) && self.machine.arch.fault_forgets() {
                    self.tlb.forget(gpa, gpa + 1);
                }
                return Err(AccessError { gpa, access, reason });
            }
        };
        moment(Moment::Walked);
        self.tlb.keep(&found);
        Ok(found.hpa)
    }

    /// Walks the tables, and marks entries as hardware does.
    fn walk(&mut self, gpa: u64, access: Access) -> Result<Found, Why> {
        let (arch, space) = (&self.machine.arch, &self.machine.space);
        self.walks += 1;
        if !gpa.is_multiple_of(8) {
            return Err(Why::Unaligned);
        }
        let (_, root) = self.root.ok_or(Fault::Translation)?;
        if gpa >> arch.address_bits() != 0 {
            return Err(Fault::Translation.into());
        }
        let write = access == Access::Write;
        let (mut level, mut table, mut above) = (arch.root_level(), root.0, Rights::ALL);
        loop {
            let shift = arch.shift(level);
            let index = (gpa >> shift) as usize & (arch.entries(level) - 1);
            let pte = space.pte(table, index).ok_or(Why::NoMemory { hpa: table })?;
            let raw = pte.load();
            let (marked, found) = match arch.decode(raw, level) {
                Descriptor::Invalid => return Err(Fault::Translation.into()),
                Descriptor::Reserved(_) => return Err(Fault::Reserved.into()),
                Descriptor::Table { table: next, rights } => {
                    let marked = arch.mark(raw, level, write)?;
                    // If the entry changed before the mark was set, it is read again.
                    if marked == raw || pte.exchange(raw, marked).is_ok() {
                        above = above.and(rights);
                        (level, table) = (arch.below(level), next);
                    }
                    continue;
                }
                Descriptor::Leaf(leaf) => {
                    // Comes before the rights, because a fault of the access flag has priority over
                    // a permission fault.
                    let marked = arch.mark(raw, level, write)?;
                    let rights = above.and(leaf.rights);
                    if !rights.allow(access) {
                        return Err(Fault::Permission.into());
                    }
                    let hpa = leaf.hpa + (gpa & ((1 << shift) - 1));
                    let dirty = leaf.dirty || write;
                    (marked, Found { gpa, hpa, shift, rights, dirty })
                }
            };
            // Guest memory begins and ends at a multiple of the size of each piece.
            if !space.memory().contains(&found.hpa) {
                return Err(Why::NoMemory { hpa: found.hpa });
            }
            if marked == raw || pte.exchange(raw, marked).is_ok() {
                return Ok(found);
            }
        }
    }
}

impl<A: Arch> Drop for FastCpu<'_, A> {
    fn drop(&mut self) {
        self.door.give(self.window);
    }
}
