//! Write-protect: takes the right to write from a range, keeping what was known to be written.

use super::ChangeError;
use crate::addr::{GpaRange, Levels};
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::tables::{Done, Stopped, Tables};
use crate::walk::{Entry, Flow, Tally, Visitor};

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
        self.check(&range).map_err(|error| self.refused(&range, ChangeError::Range(error)))?;
        if let Some(size) = self.cut_block(&range) {
            return Err(self.refused(&range, ChangeError::CutsBlock { size }));
        }
        let mut visitor = WriteProtect { done: self.nothing(), why: ChangeError::Contended };
        let result = self.walk(range.start().0, range.end().0, &mut visitor);
        let WriteProtect { done, why, .. } = visitor;
        match result {
            Ok(()) => Ok(done),
            Err(at) => Err(Stopped { at, why, done }),
        }
    }
}

struct WriteProtect {
    done: Done,
    why: ChangeError,
}

impl<'t, F: Format> Visitor<'t, F> for WriteProtect {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, entry: Entry<'t>, tally: &mut Tally) -> Flow {
        match F::kind(entry.raw, level) {
            Kind::Leaf => {}
            Kind::Frozen => return Flow::Wait,
            _ => return Flow::Next,
        }
        let protected = F::write_protected(entry.raw);
        if protected == entry.raw {
            return Flow::Next;
        }
        if level > 0 && !entry.whole::<F>(level) {
            self.why = ChangeError::CutsBlock { size: F::size(level) };
            return Flow::Stop;
        }
        // Loses against hardware that sets accessed or dirty, and against other software: either
        // way the new value decides.
        if entry.slot.exchange(entry.raw, protected).is_err() {
            return Flow::Again;
        }
        tally.change(&entry);
        Flow::Next
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: Tally) {
        self.done.settle::<F>(level, &tally, true);
    }
}
