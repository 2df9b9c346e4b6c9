//! A CPU that runs a guest: it walks the tables, sets accessed and dirty by compare-and-swap, and
//! holds entries in its TLB and walk cache until they are invalidated.

use crate::guest::On;
use crate::machine::{PAGE, World};
pub use crate::walked::Walked;
use core::ops::Range;
use slat::{BreakBeforeMake, Hpa, Invalidation, Platform, Pte, Vmid};
use std::vec::Vec;

struct Entry {
    vmid: Vmid,
    range: Range<u64>,
    hpa: u64,
    /// The size of the leaf, or of each leaf in the group, in bytes.
    size: u64,
    /// A write goes on without reading the descriptor again.
    dirty: bool,
}

#[derive(Clone)]
struct Walk {
    vmid: Vmid,
    range: Range<u64>,
    level: u8,
    table: Hpa,
    /// All tables on the way allowed writes when they were walked.
    writes: bool,
}

/// Entries that were walked and not yet invalidated. A CPU may still hold each of them, or not.
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

    /// Invalidates as little as Arm allows: leaves of another size than the hint's stay, and so do
    /// walk-cache entries unless tables were named.
    pub fn invalidate(&mut self, what: &Invalidation) {
        let range = what.range.map_or(0..u64::MAX, |r| r.start().0..r.end().0);
        self.entries.retain(|entry| {
            let other = what.leaf.is_some_and(|leaf| leaf.bytes() != entry.size);
            !overlap(&entry.range, &range) || other || entry.vmid != what.vmid
        });
        self.walks
            .retain(|walk| !what.tables || !overlap(&walk.range, &range) || walk.vmid != what.vmid);
    }

    fn insert(&mut self, bbm: BreakBeforeMake, new: Entry) {
        let same = |old: &&Entry| old.vmid == new.vmid && overlap(&old.range, &new.range);
        for old in self.entries.iter().filter(same) {
            let offset = |entry: &Entry| entry.hpa.wrapping_sub(entry.range.start);
            assert_eq!(offset(old), offset(&new), "two addresses for one page in the TLB");
            let resized = old.range != new.range;
            assert!(!resized || !bbm.breaks_size_change(), "two sizes for one page in the TLB");
        }
        self.entries.push(new);
    }
}

/// How a CPU uses the entries that it holds.
#[derive(Clone, Copy, PartialEq)]
pub enum Use {
    /// Whenever possible.
    Always,
    /// Never: it walks each time.
    Never,
}

impl<F: Walked> On<F> {
    /// The guest accesses `gpa`; `None` if that faults.
    pub fn access(&self, gpa: u64, write: bool, held: Use) -> Option<Hpa> {
        let world = self.world;
        assert!(world.running.get(), "no CPU runs");
        let _bus = world.bus.lock().unwrap();
        let hpa =
            self.through_tlb(gpa, write, held).or_else(|| self.through_tables(gpa, write, held))?;
        let taken = world.taken.borrow();
        assert!(!taken.iter().any(|taken| taken.contains(&hpa)), "the guest reached freed memory");
        let held_back = world.protected.borrow().contains(&(gpa & !(PAGE - 1)));
        assert!(!write || !held_back, "the guest wrote to protected memory");
        world.used(gpa & !(PAGE - 1), write);
        Some(Hpa(hpa))
    }

    /// A write by a CPU that always walks.
    pub fn write(&self, gpa: u64) -> bool {
        self.access(gpa, true, Use::Never).is_some()
    }

    fn through_tlb(&self, gpa: u64, write: bool, held: Use) -> Option<u64> {
        let tlb = self.world.tlb.borrow();
        let vmid = self.world.loaded.get();
        let mut hits = tlb.entries.iter().filter(|e| e.vmid == vmid && e.range.contains(&gpa));
        let hit = hits.find(|entry| held == Use::Always && (!write || entry.dirty))?;
        Some(hit.hpa + (gpa - hit.range.start))
    }

    fn through_tables(&self, gpa: u64, write: bool, held: Use) -> Option<u64> {
        let world: &World = self.world;
        let pte = |table: Hpa, level: u8| -> &'static Pte {
            let index = (gpa >> F::shift(level)) as usize & 1;
            // SAFETY: every table of the format has two entries. They may be poisoned by now,
            // but stay allocated until the model ends.
            unsafe { world.entries(table).add(index).as_ref() }
        };
        'walk: loop {
            let vmid = world.loaded.get();
            let root = Walk {
                vmid,
                range: 0..u64::MAX,
                level: self.tables().geometry().root_level,
                table: self.tables().root(),
                writes: true,
            };
            let cached = {
                let tlb = world.tlb.borrow();
                let hits = tlb.walks.iter();
                let hits = hits.filter(|walk| walk.vmid == vmid && walk.range.contains(&gpa));
                let fit = hits.filter(|walk| walk.writes || !write);
                fit.min_by_key(|walk| walk.level).cloned()
            };
            let Walk { mut level, mut table, mut writes, .. } =
                cached.filter(|_| held == Use::Always).unwrap_or(root);
            let (pte, raw) = loop {
                let pte = pte(table, level);
                let raw = pte.load();
                if !F::links(raw, level) {
                    break (pte, raw);
                }
                let passed = F::passed(raw);
                if passed != raw && pte.exchange(raw, passed).is_err() {
                    continue 'walk;
                }
                writes &= F::lets_write(raw);
                let start = gpa & !((1 << F::shift(level)) - 1);
                let range = start..start + (1 << F::shift(level));
                (level, table) = (level - 1, F::table_address(raw));
                world.tlb.borrow_mut().walks.push(Walk { vmid, range, level, table, writes });
            };
            let new = F::used(raw, write).filter(|_| writes || !write)?;
            // A descriptor that changed since it was read is not updated: the CPU walks again.
            if new != raw && pte.exchange(raw, new).is_err() {
                continue;
            }
            let (size, reach) = (1 << F::shift(level), F::reach(raw, level));
            let start = gpa & !(reach - 1);
            let range = start..start + reach;
            let hpa = F::leaf_address(raw, level).0 - ((gpa & !(size - 1)) - start);
            let dirty = writes && F::written(new);
            let entry = Entry { vmid, range, hpa, size, dirty };
            world.tlb.borrow_mut().insert(world.break_before_make(), entry);
            return Some(hpa + (gpa - start));
        }
    }
}
