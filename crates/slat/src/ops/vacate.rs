//! Unmapping where no CPU has the tables and nobody else is in them: what is there is handed out, tables
//! that are covered whole are given back at once, and nothing is owed.

use super::unfold::{Group, folded};
use super::{Change, ChangeError, Plainly};
use crate::addr::{Gpa, GpaRange, Hpa};

use crate::format::{Format, Kind};
use crate::inactive::Inactive;
use crate::ops::Removed;
use crate::platform::Platform;
use crate::table::{self, Frame, Slot};
use crate::tables::{Halted, Tables};

impl<F: Format, P: Platform> Inactive<'_, F, P> {
    /// Unmaps `range`, and hands each run of neighbouring leaves of one kind to `removed`; returns the
    /// bytes that were mapped. A run may end where memory crosses a multiple of [`Format::CARRY`], too.
    /// Reservations in the range are void. Tables that the range covers whole are given back; one that
    /// is emptied in parts stays.
    ///
    /// # Errors
    /// [`ChangeError::Range`] and [`ChangeError::CutsBlock`]: nothing is done.
    pub fn unmap(
        &mut self,
        range: GpaRange,
        mut removed: impl FnMut(Removed),
    ) -> Result<u64, Halted<ChangeError>> {
        let tables = &self.0;
        if let Err(why) = tables.check_change(&range) {
            return Err(Halted { at: range.start(), why });
        }
        let mut vacate = Vacate { tables, run: None, bytes: 0, removed: &mut removed };
        let (start, end) = (range.start().0, range.end().0);
        vacate.table(tables.root_slots(), tables.geometry().root_level, start, end, false);
        vacate.finish();
        Ok(vacate.bytes)
    }
}

/// Leaves whose descriptors follow each other.
struct Run {
    first: Removed,
    /// What the next leaf of the run would be.
    raw: u64,
    gpa: u64,
    level: u8,
}

struct Vacate<'t, 'p, 'r, F: Format, P: Platform> {
    tables: &'t Tables<'p, F, P>,
    run: Option<Run>,
    bytes: u64,
    removed: &'r mut dyn FnMut(Removed),
}

impl<F: Format, P: Platform> Vacate<'_, '_, '_, F, P> {
    /// Empties the part of a table from `start` to `end`; of one that goes, no slot need be stored.
    fn table(&mut self, slots: &[Slot], level: u8, start: u64, end: u64, goes: bool) {
        let shift = F::shift(level);
        let (first, last) = (start >> shift, (end - 1) >> shift);
        let mask = slots.len() as u64 - 1;
        let mut number = first;
        while number <= last {
            if level == 0 && goes {
                let rest = &slots[(number & mask) as usize..=(last & mask) as usize];
                number += self.more(rest, number << shift);
                if number > last {
                    break;
                }
            }
            let slot = &slots[(number & mask) as usize];
            let mut raw = slot.load();
            if F::kind(raw, level) == Kind::Leaf
                && folded::<F>(raw)
                && let Some(group) = Group::<F>::within(slots, level, number << shift)
            {
                group.unfold_alone();
                raw = slot.load();
            }
            let (from, to) = (start.max(number << shift), end.min((number + 1) << shift));
            number += 1;
            match F::kind(raw, level) {
                Kind::Empty => continue,
                Kind::Leaf => self.leaf(raw, level, from),
                Kind::Table if level > 0 => {
                    let whole = to - from == 1 << shift;
                    self.child(F::table_address(raw), level - 1, from, to, whole);
                    if !whole {
                        continue;
                    }
                }
                // A reservation; marks are gone when their owner's borrow of the tables is.
                _ => {}
            }
            if !goes {
                let _ = Plainly::exchange(slot, raw, 0);
            }
        }
    }

    fn child(&mut self, hpa: Hpa, level: u8, start: u64, end: u64, whole: bool) {
        let platform = self.tables.platform;
        // SAFETY: a linked table has that many slots, and stays until it is freed below.
        let slots = unsafe { table::slots(platform, hpa, F::slots(level)) };
        self.table(slots, level, start, end, whole);
        if !whole {
            return;
        }
        // SAFETY: nobody else is in the tables, and no CPU has them: `Inactive` was borrowed mutably;
        // its slot is emptied, or goes with the table around it. All tables below the root came from
        // caches, which allocate `TABLE_BYTES`; all that this one linked were freed just before.
        unsafe {
            if let Some(frame) = Frame::from_hpa(hpa) {
                platform.free(frame, F::TABLE_BYTES);
            }
        }
    }

    /// How many pages, from the first on, go on where the run ends: at the speed of loads.
    fn more(&mut self, pages: &[Slot], gpa: u64) -> u64 {
        let Some(run) = &mut self.run else { return 0 };
        if (run.gpa, run.level) != (gpa, 0) {
            return 0;
        }
        let page = 1 << F::PAGE_SHIFT;
        let raw = |number: u64| F::further(run.raw, number * page);
        let same = pages.iter().zip(0..).take_while(|(slot, number)| slot.load() == raw(*number));
        let count = same.count() as u64;
        let Some(before) = count.checked_sub(1) else { return 0 };
        // Descriptors count upwards as their addresses do, unless a field of theirs ends.
        let last = raw(before);
        let follows = run.first.hpa.0 + run.first.bytes + before * page;
        if F::leaf_address(last, 0).0 != follows {
            return 0;
        }
        let bytes = count * page;
        (run.raw, run.gpa) = (F::further(run.raw, bytes), run.gpa + bytes);
        run.first.bytes += bytes;
        self.bytes += bytes;
        count
    }

    #[inline]
    fn leaf(&mut self, raw: u64, level: u8, gpa: u64) {
        let size = F::size(level);
        self.bytes += size.bytes();
        if let Some(run) = &mut self.run
            && (run.raw, run.gpa, run.level) == (raw, gpa, level)
            && F::leaf_address(raw, level).0 == run.first.hpa.0 + run.first.bytes
        {
            run.first.bytes += size.bytes();
            run.raw = F::further(raw, size.bytes());
            run.gpa += size.bytes();
            return;
        }
        self.finish();
        let first = Removed {
            gpa: Gpa(gpa),
            bytes: size.bytes(),
            size,
            hpa: F::leaf_address(raw, level),
            attributes: self.tables.format().decode(raw, level),
        };
        let (raw, gpa) = (F::further(raw, size.bytes()), gpa + size.bytes());
        self.run = Some(Run { first, raw, gpa, level });
    }

    fn finish(&mut self) {
        if let Some(run) = self.run.take() {
            (self.removed)(run.first);
        }
    }
}
