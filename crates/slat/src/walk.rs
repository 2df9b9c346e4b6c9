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
use crate::counts::Counts;
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
pub(crate) enum Flow<E> {
    /// Goes on behind the slot.
    Next,
    /// Loads the slot again: it changed, or links a table now that is to be entered.
    Again,
    /// Loads it again after a while: somebody else holds it.
    Wait,
    /// Ends here.
    Stop(E),
}

/// Where a walk ended early, and why.
pub(crate) struct Halt<E> {
    pub at: Gpa,
    /// `None`: somebody else held a slot for too long.
    pub why: Option<E>,
}

pub(crate) trait Visitor<'t, F: Format> {
    type Error;

    /// The levels whose slots the visitor is shown; no table that holds none of them is read.
    const LEVELS: Levels;

    /// `level` is a constant wherever this is inlined.
    fn visit(&mut self, level: u8, entry: Entry<'t>) -> Flow<Self::Error>;

    /// After everything below a slot that links a table was visited.
    #[inline(always)]
    fn leave(&mut self, _level: u8, _entry: Entry<'t>, _children: &'t [Slot]) {}

    fn counts(&mut self) -> &mut Counts;
}

/// Walks `start..end` from a table of `slots` at `level`.
#[inline]
pub(crate) fn walk<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    slots: &'t [Slot],
    level: u8,
    (start, end): (u64, u64),
    visitor: &mut V,
) -> Result<(), Halt<V::Error>> {
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
) -> Result<(), Halt<V::Error>> {
    let shift = F::shift(LEVEL);
    let mask = slots.len() - 1;
    let first = (start >> shift) as usize & mask;
    let last = ((end - 1) >> shift) as usize & mask;
    let slots = &slots[first..=last];
    let mut at = start;
    let mut read = 0;
    let mut index = 0;
    let mut result = Ok(());
    'slots: while let Some(slot) = slots.get(index) {
        // Whole runs of tables that nobody wants to enter are stepped over at the speed of loads.
        if LEVEL > 0 && !V::LEVELS.any_below(LEVEL) {
            let run = slots[index..].first_chunk::<RUN>();
            if run.is_some_and(|run| F::all_tables(&run.each_ref().map(Slot::load), LEVEL)) {
                read += RUN as u64;
                index += RUN;
                at = ((at >> shift) + RUN as u64) << shift;
                continue;
            }
        }
        let next = (((at >> shift) + 1) << shift).min(end);
        let mut patience = PATIENCE;
        loop {
            let raw = slot.load();
            read += 1;
            let entry = Entry { slot, raw, start: at, end: next };
            if LEVEL > 0 && F::kind(raw, LEVEL) == Kind::Table {
                if V::LEVELS.any_below(LEVEL) {
                    // SAFETY: a table that a slot links is allocated by the walk's platform with
                    // `1 << INDEX_BITS` slots, and given back only under an exclusive borrow of
                    // the tables, which `'t` rules out.
                    let children = unsafe {
                        table::slots(platform, F::table_address(raw), 1 << F::INDEX_BITS)
                    };
                    if let Err(halt) =
                        descend::<F, P, V, LEVEL>(platform, children, at, next, visitor)
                    {
                        result = Err(halt);
                        break 'slots;
                    }
                    visitor.leave(LEVEL, entry, children);
                }
                break;
            }
            if !V::LEVELS.contains(LEVEL) {
                break;
            }
            match visitor.visit(LEVEL, entry) {
                Flow::Next => break,
                Flow::Again => {}
                Flow::Wait => relax(),
                Flow::Stop(why) => {
                    result = Err(Halt { at: Gpa(at), why: Some(why) });
                    break 'slots;
                }
            }
            patience -= 1;
            if patience == 0 {
                result = Err(Halt { at: Gpa(at), why: None });
                break 'slots;
            }
        }
        at = next;
        index += 1;
    }
    visitor.counts().slots_read += read;
    result
}

/// `LEVEL - 1`, which constant generics cannot say; all arms but one vanish.
#[inline(always)]
fn descend<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    end: u64,
    visitor: &mut V,
) -> Result<(), Halt<V::Error>> {
    match LEVEL {
        4 => table::<F, P, V, 3>(platform, slots, start, end, visitor),
        3 => table::<F, P, V, 2>(platform, slots, start, end, visitor),
        2 => table::<F, P, V, 1>(platform, slots, start, end, visitor),
        1 => table::<F, P, V, 0>(platform, slots, start, end, visitor),
        _ => Ok(()),
    }
}
