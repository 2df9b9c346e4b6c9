//! The one walk: a range, the levels wanted (known at compile time), a visitor that is inlined.
//!
//! A table is read slot by slot in ascending order. A slot that links a table is descended into if
//! any wanted level lies below; every other slot of a wanted level is shown to the visitor, which
//! may change it. The code of each level is compiled for that level, so a visitor that wants no
//! last level costs nothing there: its tables are not touched.
//!
//! # Concurrency
//! The walk holds no lock. A slot is loaded once and the visitor works on that value; it
//! changes the slot by [`Slot::exchange`] from that very value, and asks for the slot to be loaded
//! again where it lost. A table that was linked when its parent was read stays allocated until the
//! tables are exclusively borrowed (see [`crate::Tables::reclaim`]), so a walk inside a
//! table that was unlinked meanwhile reads memory that is still a table; it finds only frozen
//! slots there, and changes none.

use crate::addr::{Gpa, Levels};
use crate::format::{Format, Kind, RUN};
use crate::platform::Platform;
use crate::sync::relax;
use crate::table::{self, Slot};

/// How often a walk waits for a marker, or loses a slot, before it gives up.
#[cfg(not(loom))]
pub(crate) const PATIENCE: u32 = 1 << 12;
#[cfg(loom)]
pub(crate) const PATIENCE: u32 = 2;

/// A slot that a visitor is shown, and the part of the walk's range that it covers.
pub(crate) struct Entry<'t> {
    pub slot: &'t Slot,
    /// Its value when it was loaded.
    pub raw: u64,
    /// The part of the range that the slot covers.
    pub start: u64,
    pub end: u64,
}

impl Entry<'_> {
    /// Whether the range covers all of the slot.
    #[inline(always)]
    pub fn whole<F: Format>(&self, level: u8) -> bool {
        self.end - self.start == 1 << F::shift(level)
    }

    /// The first address that the slot covers.
    #[inline(always)]
    pub fn base<F: Format>(&self, level: u8) -> u64 {
        self.start & !((1 << F::shift(level)) - 1)
    }
}

/// What the walk does after a visit.
pub(crate) enum Flow {
    /// Goes on behind the slot.
    Next,
    /// Loads the slot again: it changed, or links a table now that is to be entered.
    Again,
    /// Loads it again after a while: somebody else holds it.
    Wait,
    /// Ends here, for a reason that the visitor keeps.
    Stop,
}

/// Whether a walk came to its end, or else where it stopped: at the visitor's will, or because
/// somebody else held a slot for too long. Small, so that it travels in registers.
pub(crate) type Outcome = Result<(), Gpa>;

/// What a walk did to the slots of one table: kept apart from the visitor, so that it stays in
/// registers across atomic exchanges.
pub(crate) struct Tally {
    pub read: u64,
    /// Slots exchanged or stored.
    pub changed: u64,
    /// The hull of the changed slots, if any.
    pub start: u64,
    pub end: u64,
}

impl Tally {
    const NONE: Self = Self { read: 0, changed: 0, start: 0, end: 0 };

    /// Counts the entry as changed.
    #[inline(always)]
    pub fn change(&mut self, entry: &Entry<'_>) {
        if self.changed == 0 {
            self.start = entry.start;
        }
        self.end = entry.end;
        self.changed += 1;
    }
}

pub(crate) trait Visitor<'t, F: Format> {
    /// The levels whose slots the visitor is shown; no table that holds none of them is read.
    const LEVELS: Levels;

    /// `level` is a constant wherever this is inlined.
    fn visit(&mut self, level: u8, entry: Entry<'t>, tally: &mut Tally) -> Flow;

    /// After everything below a slot that links a table was visited.
    #[inline(always)]
    fn leave(&mut self, _level: u8, _entry: Entry<'t>, _children: &'t [Slot]) {}

    /// Adds what was done to the slots of one table at `level`.
    fn settle(&mut self, level: u8, tally: Tally);
}

/// Walks `start..end` from a table of `slots` at `level`.
///
/// A range inside one slot, and smaller than it, begins in the table below: short calls skip the
/// loops of the levels above.
#[inline]
pub(crate) fn walk<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    mut slots: &'t [Slot],
    mut level: u8,
    (start, end): (u64, u64),
    visitor: &mut V,
) -> Outcome {
    while V::LEVELS.any_below(level) && (start ^ (end - 1)) >> F::shift(level) == 0 {
        let index = (start >> F::shift(level)) as usize & (slots.len() - 1);
        let raw = slots[index].load();
        if F::kind(raw, level) != Kind::Table || end - start == 1 << F::shift(level) {
            break;
        }
        visitor.settle(level, Tally { read: 1, ..Tally::NONE });
        // SAFETY: as in `table` below.
        slots = unsafe { table::slots(platform, F::table_address(raw), 1 << F::INDEX_BITS) };
        level -= 1;
    }
    match level {
        0 => table::<F, P, V, 0>(platform, slots, start, end, visitor),
        1 => table::<F, P, V, 1>(platform, slots, start, end, visitor),
        2 => table::<F, P, V, 2>(platform, slots, start, end, visitor),
        3 => table::<F, P, V, 3>(platform, slots, start, end, visitor),
        _ => table::<F, P, V, 4>(platform, slots, start, end, visitor),
    }
}

#[inline]
fn table<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    end: u64,
    visitor: &mut V,
) -> Outcome {
    let shift = F::shift(LEVEL);
    let mask = slots.len() - 1;
    let first = (start >> shift) as usize & mask;
    let last = ((end - 1) >> shift) as usize & mask;
    let mut slots = &slots[first..=last];
    let mut at = start;
    let mut tally = Tally::NONE;
    let mut result = Ok(());
    loop {
        if let Some(run) = slots.first_chunk::<RUN>() {
            let passed = pass_run::<F, V, LEVEL>(run, at, visitor, &mut tally);
            at = if passed == 0 { at } else { ((at >> shift) + passed as u64) << shift };
            slots = &slots[passed..];
            if passed == RUN {
                continue;
            }
        }
        let Some((slot, rest)) = slots.split_first() else { break };
        let next = (((at >> shift) + 1) << shift).min(end);
        result = one::<F, P, V, LEVEL>(platform, slot, at, next, visitor, &mut tally);
        if result.is_err() {
            break;
        }
        (slots, at) = (rest, next);
    }
    visitor.settle(LEVEL, tally);
    result
}

/// Passes as many slots of a run, from its start, as need no second look.
///
/// Tables that nobody wants to enter are stepped over at the speed of loads. Pages are loaded a
/// run ahead: a visitor that exchanges each then waits for the exchanges alone, and they find
/// out if a value is no longer the one that was loaded.
#[inline(always)]
fn pass_run<'t, F: Format, V: Visitor<'t, F>, const LEVEL: u8>(
    run: &'t [Slot; RUN],
    mut at: u64,
    visitor: &mut V,
    tally: &mut Tally,
) -> usize {
    if LEVEL > 0 {
        if V::LEVELS.any_below(LEVEL) || !F::all_tables(&run.each_ref().map(Slot::load), LEVEL) {
            return 0;
        }
        tally.read += RUN as u64;
        return RUN;
    }
    let raws = run.each_ref().map(Slot::load);
    for (index, (slot, raw)) in run.iter().zip(raws).enumerate() {
        let entry = Entry { slot, raw, start: at, end: at + (1 << F::shift(LEVEL)) };
        at = entry.end;
        if !matches!(visitor.visit(LEVEL, entry, tally), Flow::Next) {
            tally.read += index as u64;
            return index;
        }
    }
    tally.read += RUN as u64;
    RUN
}

/// Visits one slot until it is done with, and everything below it.
#[inline(always)]
fn one<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8>(
    platform: &'t P,
    slot: &'t Slot,
    start: u64,
    end: u64,
    visitor: &mut V,
    tally: &mut Tally,
) -> Outcome {
    for _ in 0..PATIENCE {
        let raw = slot.load();
        tally.read += 1;
        let entry = Entry { slot, raw, start, end };
        if LEVEL > 0 && F::kind(raw, LEVEL) == Kind::Table {
            if V::LEVELS.any_below(LEVEL) {
                // SAFETY: a table that a slot links is allocated by the walk's platform with
                // `1 << INDEX_BITS` slots, and given back only under an exclusive borrow of
                // the tables, which `'t` rules out.
                let children =
                    unsafe { table::slots(platform, F::table_address(raw), 1 << F::INDEX_BITS) };
                descend::<F, P, V, LEVEL>(platform, children, start, end, visitor)?;
                visitor.leave(LEVEL, entry, children);
            }
            return Ok(());
        }
        if !V::LEVELS.contains(LEVEL) {
            return Ok(());
        }
        match visitor.visit(LEVEL, entry, tally) {
            Flow::Next => return Ok(()),
            Flow::Again => {}
            Flow::Wait => relax(),
            Flow::Stop => return Err(Gpa(start)),
        }
    }
    Err(Gpa(start))
}

/// `LEVEL - 1`, which constant generics cannot say; all arms but one vanish.
#[inline(always)]
fn descend<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    end: u64,
    visitor: &mut V,
) -> Outcome {
    match LEVEL {
        4 => table::<F, P, V, 3>(platform, slots, start, end, visitor),
        3 => table::<F, P, V, 2>(platform, slots, start, end, visitor),
        2 => table::<F, P, V, 1>(platform, slots, start, end, visitor),
        1 => table::<F, P, V, 0>(platform, slots, start, end, visitor),
        _ => Ok(()),
    }
}
