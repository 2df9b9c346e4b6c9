//! A CPU with a guest on it: walks the tables, sets accessed and dirty by compare-and-swap, and
//! holds in its TLB and walk cache whatever was not invalidated.

use crate::machine::{Guest, World};
use core::ops::Range;
use slat::format::tiny::Tiny;
use slat::{BreakBeforeMake, Format, Gpa, Hpa, Invalidation, Platform, Slot};
use std::vec::Vec;

const VALID: u64 = 1 << 0;
const TABLE: u64 = 1 << 1;
const READ: u64 = 1 << 6;
const WRITE: u64 = 1 << 7;
const ACCESSED: u64 = 1 << 10;
const DBM: u64 = 1 << 51;

struct Entry {
    range: Range<u64>,
    hpa: u64,
    /// A write goes through without another look at the descriptor.
    dirty: bool,
}

struct Walk {
    range: Range<u64>,
    level: u8,
    table: Hpa,
}

/// What was walked and not yet invalidated. A CPU may still hold it, or not.
#[derive(Default)]
pub struct Tlb {
    entries: Vec<Entry>,
    walks: Vec<Walk>,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Tlb {
    pub fn holds_table(&self, table: Hpa) -> bool {
        self.walks.iter().any(|walk| walk.table == table)
    }

    /// As sparingly as Arm allows: leaves of another size than the hint says stay, and so do
    /// walk-cache entries unless tables were named.
    pub fn invalidate(&mut self, what: &Invalidation) {
        let range = what.range.map_or(0..u64::MAX, |r| r.start().0..r.end().0);
        self.entries.retain(|entry| {
            let size = entry.range.end - entry.range.start;
            !overlap(&entry.range, &range) || what.leaf.is_some_and(|leaf| leaf.bytes() != size)
        });
        self.walks.retain(|walk| !what.tables || !overlap(&walk.range, &range));
    }

    fn insert(&mut self, bbm: BreakBeforeMake, new: Entry) {
        for old in self.entries.iter().filter(|old| overlap(&old.range, &new.range)) {
            let offset = |entry: &Entry| entry.hpa.wrapping_sub(entry.range.start);
            assert_eq!(offset(old), offset(&new), "two addresses for one page in the TLB");
            let resized = old.range != new.range;
            assert!(!resized || !bbm.breaks_size_change(), "two sizes for one page in the TLB");
        }
        self.entries.push(new);
    }
}

/// How a CPU uses what it holds.
#[derive(Clone, Copy, PartialEq)]
pub enum Use {
    /// Whenever it can.
    Always,
    /// Never: it walks each time.
    Never,
}

impl Guest {
    /// The guest touches `gpa`; `None` if that faults.
    pub fn access(&self, gpa: u64, write: bool, held: Use) -> Option<Hpa> {
        let world = self.world;
        assert!(world.running.get(), "no CPU runs");
        let _bus = world.bus.lock().unwrap();
        let hpa =
            self.through_tlb(gpa, write, held).or_else(|| self.through_tables(gpa, write, held))?;
        let taken = world.taken.borrow();
        assert!(!taken.iter().any(|taken| taken.contains(&hpa)), "the guest reached freed memory");
        let protected = world.protected.borrow();
        let held_back = protected.iter().any(|range| range.contains(&gpa));
        assert!(!write || !held_back, "the guest wrote to protected memory");
        Some(Hpa(hpa))
    }

    /// A write, by a CPU that always walks.
    pub fn write(&self, gpa: u64) -> bool {
        self.access(gpa, true, Use::Never).is_some()
    }

    fn through_tlb(&self, gpa: u64, write: bool, held: Use) -> Option<u64> {
        let tlb = self.world.tlb.borrow();
        let mut hits = tlb.entries.iter().filter(|entry| entry.range.contains(&gpa));
        let hit = hits.find(|entry| held == Use::Always && (!write || entry.dirty))?;
        Some(hit.hpa + (gpa - hit.range.start))
    }

    fn through_tables(&self, gpa: u64, write: bool, held: Use) -> Option<u64> {
        let world: &World = self.world;
        loop {
            let root = (self.tables().geometry().root_level, self.tables().root());
            let cached = {
                let tlb = world.tlb.borrow();
                let mut walks: Vec<_> =
                    tlb.walks.iter().filter(|walk| walk.range.contains(&gpa)).collect();
                walks.sort_by_key(|walk| walk.level);
                walks.first().map(|walk| (walk.level, walk.table))
            };
            let (mut level, mut table) = cached.filter(|_| held == Use::Always).unwrap_or(root);
            let (slot, raw) = loop {
                let index = (gpa >> Tiny::shift(level)) as usize & 1;
                // SAFETY: every table of the format has two slots. They may be poisoned by now,
                // but stay allocated until the model ends.
                let slot: &Slot = unsafe { world.slots(table).add(index).as_ref() };
                let raw = slot.load();
                if level == 0 || raw & (VALID | TABLE) != VALID | TABLE {
                    break (slot, raw);
                }
                let start = gpa & !((1 << Tiny::shift(level)) - 1);
                let range = start..start + (1 << Tiny::shift(level));
                (level, table) = (level - 1, Tiny::table_address(raw));
                world.tlb.borrow_mut().walks.push(Walk { range, level, table });
            };
            if raw & VALID == 0 || raw & READ == 0 || write && raw & (WRITE | DBM) == 0 {
                return None;
            }
            let new = raw | ACCESSED | if write { WRITE } else { 0 };
            // A descriptor that changed since it was read is not updated: the walk begins anew.
            if new != raw && slot.exchange(raw, new).is_err() {
                continue;
            }
            let start = gpa & !((1 << Tiny::shift(level)) - 1);
            let range = start..start + (1 << Tiny::shift(level));
            let hpa = Tiny::leaf_address(raw, level).0;
            let dirty = new & WRITE != 0;
            world.tlb.borrow_mut().insert(world.break_before_make(), Entry { range, hpa, dirty });
            return Some(hpa + (gpa - start));
        }
    }

    /// What software sees; `None` if it has to try again.
    pub fn look(&self, gpa: u64) -> Option<Option<Hpa>> {
        self.tables().translate(Gpa(gpa)).ok().map(|found| found.map(|found| found.hpa))
    }
}
