//! Unmap: empties a range, hands out what stood there, retires the tables that it covered.
//!
//! # Protocol
//! A leaf is taken out by one compare-and-swap whose old value goes to the caller. A table whose
//! whole range was unmapped is then retired in this order: every one of its slots goes from empty
//! to frozen, which keeps other software out and fails if anything was mapped there meanwhile;
//! its parent's slot is emptied; the table joins the retired list, which only an exclusive borrow
//! and the invalidation of walk caches empty. Between the first marker and the last release
//! nothing is allocated and nobody is called.
//!
//! A slot of a frozen table stays frozen until the table is reclaimed; so who froze all of them owns
//! the parent's slot. Leaves and table may be owed by two callers: leaves by who took them out,
//! the table by who froze it; reclaim invalidates both.

use super::ChangeError;
use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize};
use crate::format::{Attributes, Format, Kind};
use crate::platform::Platform;
use crate::table::Slot;
use crate::tables::{Done, Stopped, Tables};
use crate::walk::{Entry, Flow, Tally, Visitor};

/// A leaf that was taken out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Removed {
    /// Where it stood.
    pub gpa: Gpa,
    /// Its size.
    pub size: PageSize,
    /// The memory behind it. The guest may use it until the shootdown completes.
    pub hpa: Hpa,
    /// Rights, memory type and state at the moment it was taken out. Hardware sets nothing in
    /// it any more; but a page that was dirty may be written until the shootdown completes.
    pub attributes: Attributes,
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Unmaps `range`, and calls `removed` for each leaf in ascending order.
    ///
    /// The memory behind a leaf must not be reused, nor its content copied as final, before the
    /// shootdown in the answer has completed.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`], and on [`ChangeError::CutsBlock`] unless the block
    /// appeared meanwhile. [`ChangeError::Contended`] leaves everything unmapped that precedes the
    /// address where it stopped.
    pub fn unmap(
        &self,
        range: GpaRange,
        removed: impl FnMut(Removed),
    ) -> Result<Done, Stopped<ChangeError>> {
        self.check(&range).map_err(|error| self.refused(&range, ChangeError::Range(error)))?;
        if let Some(size) = self.cut_block(&range) {
            return Err(self.refused(&range, ChangeError::CutsBlock { size }));
        }
        let mut visitor =
            Unmap { tables: self, removed, done: self.nothing(), why: ChangeError::Contended };
        let result = self.walk(range.start().0, range.end().0, &mut visitor);
        let Unmap { done, why, .. } = visitor;
        match result {
            Ok(()) => Ok(done),
            Err(at) => Err(Stopped { at, why, done }),
        }
    }
}

struct Unmap<'t, 'p, F: Format, P: Platform, R> {
    tables: &'t Tables<'p, F, P>,
    removed: R,
    done: Done,
    why: ChangeError,
}

impl<'t, F: Format, P: Platform, R: FnMut(Removed)> Visitor<'t, F> for Unmap<'_, '_, F, P, R> {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, entry: Entry<'t>, tally: &mut Tally) -> Flow {
        match F::kind(entry.raw, level) {
            Kind::Leaf => {}
            Kind::Frozen => return Flow::Wait,
            _ => return Flow::Next,
        }
        if level > 0 && !entry.whole::<F>(level) {
            self.why = ChangeError::CutsBlock { size: F::size(level) };
            return Flow::Stop;
        }
        if entry.slot.exchange(entry.raw, 0).is_err() {
            return Flow::Again;
        }
        tally.change(&entry);
        (self.removed)(Removed {
            gpa: Gpa(entry.start),
            size: F::size(level),
            hpa: F::leaf_address(entry.raw, level),
            attributes: self.tables.format.decode(entry.raw, level),
        });
        Flow::Next
    }

    #[inline(always)]
    fn leave(&mut self, level: u8, entry: Entry<'t>, children: &'t [Slot]) {
        if entry.whole::<F>(level) && freeze::<F>(children) {
            self.done.counts.slots_written += children.len() as u64 + 1;
            // Only who froze the children may unlink them, so the slot still holds the table.
            entry.slot.release(entry.raw, 0);
            self.tables.retire(F::table_address(entry.raw), &children[0]);
            self.done.shootdown.table(GpaRange::from_bounds(entry.start, entry.end));
        }
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: Tally) {
        self.done.settle::<F>(level, &tally, true);
    }
}

/// Freezes a table that is empty; leaves any other as it was.
fn freeze<F: Format>(slots: &[Slot]) -> bool {
    let frozen = F::frozen(Hpa(0));
    let full = slots.iter().position(|slot| slot.exchange(0, frozen).is_err());
    if let Some(full) = full {
        slots[..full].iter().for_each(|slot| slot.release(frozen, 0));
    }
    full.is_none()
}
