//! A CPU's TLB and walk cache, and its walks, for both explorers: the hardware reads and marks
//! entries as the manuals say, and holds what it read until that is invalidated.

use crate::machine::World;
pub use crate::walked::WalkedFormat;
use core::ops::Range;
use slat::{BreakBeforeMake, Format, Hpa, Invalidation, Platform, Pte, Tables, Vmid};
use std::vec::Vec;

#[derive(PartialEq)]
struct Entry {
    vmid: Vmid,
    range: Range<u64>,
    hpa: u64,
    /// The size of the leaf, or of each leaf in the group, in bytes.
    size: u64,
    /// A write goes on without reading the descriptor again.
    dirty: bool,
}

#[derive(Clone, PartialEq)]
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

    fn insert<F: Format>(&mut self, bbm: BreakBeforeMake, new: Entry) {
        let same = |old: &&Entry| old.vmid == new.vmid && overlap(&old.range, &new.range);
        for old in self.entries.iter().filter(same) {
            let offset = |entry: &Entry| entry.hpa.wrapping_sub(entry.range.start);
            let moved = offset(old) != offset(&new);
            // No model fills an entry before its invalidation; histories do where that is allowed.
            let allowed = cfg!(shuttle) && !F::REFILL_BREAKS;
            assert!(!moved || allowed, "two addresses for one page in the TLB");
            let resized = old.range != new.range;
            assert!(!resized || !bbm.breaks_size_change(), "two sizes for one page in the TLB");
        }
        if !self.entries.contains(&new) {
            self.entries.push(new);
        }
    }

    /// The address that an entry has for `gpa`. A write needs one that is dirty.
    fn hit(&self, vmid: Vmid, gpa: u64, write: bool) -> Option<u64> {
        let mut hits = self.entries.iter().filter(|e| e.vmid == vmid && e.range.contains(&gpa));
        let hit = hits.find(|entry| !write || entry.dirty)?;
        Some(hit.hpa + (gpa - hit.range.start))
    }
}

/// Walks the tables for an access to `gpa`, from an entry of the walk cache if the CPU uses those
/// that it `held`; `None` if that faults.
fn walk<F: WalkedFormat>(
    tables: &Tables<'_, F, World>,
    gpa: u64,
    write: bool,
    held: bool,
) -> Option<u64> {
    let world = tables.platform();
    let pte = |table: Hpa, level: u8| -> &Pte {
        let index = (gpa >> F::shift(level)) as usize & 1;
        // SAFETY: every table of these formats has two entries. They may be poisoned by now, but
        // stay allocated for as long as the world does.
        unsafe { world.entries(table).add(index).as_ref() }
    };
    'walk: loop {
        let vmid = world.loaded.get();
        let root = Walk {
            vmid,
            range: 0..u64::MAX,
            level: tables.geometry().root_level,
            table: tables.root(),
            writes: true,
        };
        let cached = {
            let tlb = world.tlb.borrow();
            let hits = tlb.walks.iter();
            let hits = hits.filter(|walk| walk.vmid == vmid && walk.range.contains(&gpa));
            let fit = hits.filter(|walk| walk.writes || !write);
            fit.min_by_key(|walk| walk.level).cloned()
        };
        let Walk { mut level, mut table, mut writes, .. } = cached.filter(|_| held).unwrap_or(root);
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
            let walk = Walk { vmid, range, level, table, writes };
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
        let entry = Entry { vmid, range, hpa, size, dirty };
        world.tlb.borrow_mut().insert::<F>(world.break_before_make(), entry);
        return Some(hpa + (gpa - start));
    }
}

/// How a CPU uses the entries that it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Whenever possible.
    Always,
    /// Never: it walks each time.
    Never,
}

/// The guest accesses `gpa`, by a CPU that uses the entries that it `held`, or not; `None` if that
/// faults.
pub fn access<F: WalkedFormat>(
    tables: &Tables<'_, F, World>,
    gpa: u64,
    write: bool,
    held: Use,
) -> Option<u64> {
    let held = held == Use::Always;
    let world = tables.platform();
    let _bus = world.running.get().then(|| world.bus.shared());
    let hit = held.then(|| world.tlb.borrow().hit(world.loaded.get(), gpa, write)).flatten();
    let hpa = hit.or_else(|| walk(tables, gpa, write, held))?;
    // The models' scans flush the TLB.
    world.ledger.used(gpa, hpa, write, cfg!(loom) || hit.is_none());
    Some(hpa)
}
