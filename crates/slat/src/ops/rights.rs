//! Rights: taken from a range for dirty logging, and given back in a fault.
//!
//! A leaf is rewritten by one compare-and-swap from the value that was read. It loses against
//! hardware that sets accessed or dirty, and against other software; either way the new value
//! decides. So protection and a fault that meet leave the leaf as the later of them wants it, and
//! neither forgets that it was written.

use super::ChangeError;
use crate::addr::{GpaRange, Levels};
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::tables::{Done, Stopped, Tables};
use crate::walk::{Entry, Flow, Tally, Visitor};

/// How the guest uses memory in the fault that [`Tables::relax`] answers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// It reads or executes: the leaf becomes accessed.
    Read,
    /// It writes: the leaf becomes accessed, writable and dirty.
    Write,
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Takes the right to write from every leaf in `range`.
    ///
    /// A leaf that was written keeps its dirty state, in a software bit. Until the shootdown
    /// completes, a vCPU may go on writing through an entry that its TLB holds: only then is
    /// every later write a fault. A leaf that another call protected at the same time is in that
    /// call's shootdown, not in this one's.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`], and on [`ChangeError::CutsBlock`] unless the
    /// block appeared meanwhile. [`ChangeError::Contended`] leaves everything protected that
    /// precedes the address where it stopped.
    #[inline]
    pub fn write_protect(&self, range: GpaRange) -> Result<Done, Stopped<ChangeError>> {
        self.rewrite::<true>(range, F::write_protected)
    }

    /// Makes every leaf that overlaps `range` fit for `access`, as a fault does to a leaf that is
    /// there: the opposite of [`Tables::write_protect`], and what sets the accessed state where
    /// hardware does not. Whether the guest may write there is for the caller to know.
    ///
    /// [`Access::Read`] owes no invalidation: a leaf that is not accessed is in no TLB. After
    /// [`Access::Write`] a CPU may hold the old rights and fault once more; it is enough to
    /// complete the shootdown on the CPU that faulted.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`], and, for a write, on [`ChangeError::CutsBlock`]
    /// unless the block appeared meanwhile: more than was asked for would become writable. A read
    /// covers the whole block. [`ChangeError::Contended`] leaves everything done that precedes the
    /// address where it stopped.
    #[inline]
    pub fn relax(&self, range: GpaRange, access: Access) -> Result<Done, Stopped<ChangeError>> {
        match access {
            Access::Read => self.rewrite::<false>(range, |raw| self.format.relaxed(raw, false)),
            Access::Write => self.rewrite::<true>(range, |raw| self.format.relaxed(raw, true)),
        }
    }

    /// Rewrites each leaf by `change`. With `RIGHTS`, rights change: leaves are covered whole, and
    /// their translations become stale.
    #[inline]
    fn rewrite<const RIGHTS: bool>(
        &self,
        range: GpaRange,
        change: impl Fn(u64) -> u64,
    ) -> Result<Done, Stopped<ChangeError>> {
        self.check(&range).map_err(|error| self.refused(&range, ChangeError::Range(error)))?;
        if RIGHTS && let Some(size) = self.cut_block(&range) {
            return Err(self.refused(&range, ChangeError::CutsBlock { size }));
        }
        let done = self.nothing();
        let mut visitor = Rewrite::<_, RIGHTS> { change, done, why: ChangeError::Contended };
        let result = self.walk(range.start().0, range.end().0, &mut visitor);
        let Rewrite { done, why, .. } = visitor;
        match result {
            Ok(()) => Ok(done),
            Err(at) => Err(Stopped { at, why, done }),
        }
    }
}

struct Rewrite<C, const RIGHTS: bool> {
    change: C,
    done: Done,
    why: ChangeError,
}

impl<'t, F: Format, C: Fn(u64) -> u64, const RIGHTS: bool> Visitor<'t, F> for Rewrite<C, RIGHTS> {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, entry: Entry<'t>, tally: &mut Tally) -> Flow {
        match F::kind(entry.raw, level) {
            Kind::Leaf => {}
            Kind::Frozen => return Flow::Wait,
            _ => return Flow::Next,
        }
        let changed = (self.change)(entry.raw);
        if changed == entry.raw {
            return Flow::Next;
        }
        if RIGHTS && level > 0 && !entry.whole::<F>(level) {
            self.why = ChangeError::CutsBlock { size: F::size(level) };
            return Flow::Stop;
        }
        if entry.slot.exchange(entry.raw, changed).is_err() {
            return Flow::Again;
        }
        tally.change(&entry);
        Flow::Next
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: Tally) {
        self.done.settle::<F>(level, &tally, RIGHTS);
    }
}
