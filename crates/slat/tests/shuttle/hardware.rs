//! CPUs that run a guest: they walk the tables, set accessed and dirty by compare-and-swap, and
//! hold entries in their TLB and walk cache until they are invalidated.

use crate::guest::Guest;
use crate::machine::World;
pub use crate::walked::Walked;
use core::ops::Range;
use slat::{BreakBeforeMake, Format, Hpa, Invalidation, Platform, Pte};

#[derive(PartialEq)]
struct Entry {
    range: Range<u64>,
    hpa: u64,
    /// The bytes of the leaf, or of each leaf of the group.
    size: u64,
    /// A write goes on without reading the descriptor again.
    dirty: bool,
}

#[derive(Clone, PartialEq)]
struct Walk {
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
            !overlap(&entry.range, &range) || other
        });
        self.walks.retain(|walk| !what.tables || !overlap(&walk.range, &range));
    }

    fn insert<F: Format>(&mut self, bbm: BreakBeforeMake, new: Entry) {
        for old in self.entries.iter().filter(|old| overlap(&old.range, &new.range)) {
            let offset = |entry: &Entry| entry.hpa.wrapping_sub(entry.range.start);
            let moved = offset(old) != offset(&new);
            assert!(!moved || !F::REFILL_BREAKS, "two addresses for one page in the TLB");
            let resized = old.range != new.range;
            assert!(!resized || !bbm.breaks_size_change(), "two sizes for one page in the TLB");
        }
        if !self.entries.contains(&new) {
            self.entries.push(new);
        }
    }
}

impl<F: Walked> Guest<'_, F> {
    /// The guest accesses `gpa`, by a CPU that uses the entries that it `held` or walks from the
    /// root; returns whether that faults.
    pub fn access(&self, gpa: u64, write: bool, held: bool) -> bool {
        let world = self.world;
        let _bus = world.running.get().then(|| world.bus.read().unwrap());
        let through = held.then(|| self.through_tlb(gpa, write)).flatten();
        let walked = through.is_none();
        let found = through.or_else(|| self.through_tables(gpa, write, held));
        self.trace(format_args!("uses {gpa:x}, write {write}, held {held}: {found:x?}"));
        if let Some(hpa) = found {
            world.ledger.used(gpa, hpa, write, walked);
        }
        found.is_none()
    }

    fn through_tlb(&self, gpa: u64, write: bool) -> Option<u64> {
        let tlb = self.world.tlb.borrow();
        let mut hits = tlb.entries.iter().filter(|entry| entry.range.contains(&gpa));
        let hit = hits.find(|entry| !write || entry.dirty)?;
        Some(hit.hpa + (gpa - hit.range.start))
    }

    fn through_tables(&self, gpa: u64, write: bool, held: bool) -> Option<u64> {
        let world: &World = self.world;
        let pte = |table: Hpa, level: u8| -> &Pte {
            let index = (gpa >> F::shift(level)) as usize & 1;
            // SAFETY: every table of these formats has two entries, which stay allocated for as
            // long as the world does.
            unsafe { world.entries(table).add(index).as_ref() }
        };
        'walk: loop {
            let root = Walk {
                range: 0..u64::MAX,
                level: self.tables.geometry().root_level,
                table: self.tables.root(),
                writes: true,
            };
            let cached = {
                let tlb = world.tlb.borrow();
                let hits = tlb.walks.iter().filter(|walk| walk.range.contains(&gpa));
                let fit = hits.filter(|walk| walk.writes || !write);
                fit.min_by_key(|walk| walk.level).cloned()
            };
            let Walk { mut level, mut table, mut writes, .. } =
                cached.filter(|_| held).unwrap_or(root);
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
                let walk = Walk { range, level, table, writes };
                let walks = &mut world.tlb.borrow_mut().walks;
                if !walks.contains(&walk) {
                    walks.push(walk);
                }
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
            let entry = Entry { range, hpa, size, dirty };
            world.tlb.borrow_mut().insert::<F>(world.break_before_make(), entry);
            return Some(hpa + (gpa - start));
        }
    }
}
