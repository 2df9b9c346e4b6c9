//! Write-protect: takes the right to write from a range, keeping what was known to be written.

use crate::addr::{GpaRange, Levels, PageSize, RangeError};
use crate::counts::Counts;
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::tables::{Done, Stopped, Tables};
use crate::walk::{Entry, Flow, Visitor};
use core::fmt;

/// Why a range was not write-protected, or not all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ProtectError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The range ends inside a block.
    CutsBlock {
        /// The size of the block.
        size: PageSize,
    },
    /// Somebody else held an entry for too long.
    Contended,
}

impl fmt::Display for ProtectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(error) => error.fmt(f),
            Self::CutsBlock { size } => {
                write!(f, "the range cuts through a {size} block; split it first, or cover it")
            }
            Self::Contended => {
                f.write_str("an entry is being changed by somebody else; go on from there")
            }
        }
    }
}

impl core::error::Error for ProtectError {}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Takes the right to write from every leaf in `range`.
    ///
    /// A leaf that was written keeps its dirty state, in a software bit. Until the shootdown
    /// completes, a vCPU may go on writing through an entry that its TLB holds: only then is
    /// every later write a fault.
    ///
    /// # Errors
    /// Nothing is done on [`ProtectError::Range`], and on [`ProtectError::CutsBlock`] unless the
    /// block appeared meanwhile. [`ProtectError::Contended`] leaves everything protected that
    /// precedes the address where it stopped.
    #[inline]
    pub fn write_protect(&self, range: GpaRange) -> Result<Done, Stopped<ProtectError>> {
        self.check(&range).map_err(|error| self.refused(&range, ProtectError::Range(error)))?;
        if let Some(size) = self.cut_block(&range) {
            return Err(self.refused(&range, ProtectError::CutsBlock { size }));
        }
        let mut visitor = WriteProtect::default();
        let result = self.walk(range.start().0, range.end().0, &mut visitor);
        let mut done = self.nothing();
        (done.bytes, done.counts) = (visitor.bytes, visitor.counts);
        if visitor.levels != 0 {
            let range = GpaRange::from_bounds(visitor.start, visitor.end);
            let level = visitor.levels.trailing_zeros() as u8;
            let one_size = visitor.levels.is_power_of_two();
            done.shootdown.leaves(range, one_size.then(|| F::size(level)));
        }
        match result {
            Ok(()) => Ok(done),
            Err(halt) => {
                let why = halt.why.unwrap_or(ProtectError::Contended);
                Err(Stopped { at: halt.at, why, done })
            }
        }
    }
}

#[derive(Default)]
struct WriteProtect {
    counts: Counts,
    bytes: u64,
    /// The hull of what was changed, and the levels of the leaves.
    start: u64,
    end: u64,
    levels: u32,
}

impl<'t, F: Format> Visitor<'t, F> for WriteProtect {
    type Error = ProtectError;
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, entry: Entry<'t>) -> Flow<ProtectError> {
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
            return Flow::Stop(ProtectError::CutsBlock { size: F::size(level) });
        }
        // Loses against hardware that sets accessed or dirty, and against other software: either
        // way the new value decides.
        if entry.slot.exchange(entry.raw, protected).is_err() {
            return Flow::Again;
        }
        self.counts.slots_written += 1;
        self.bytes += entry.end - entry.start;
        if self.levels == 0 {
            self.start = entry.start;
        }
        self.end = entry.end;
        self.levels |= 1 << level;
        Flow::Next
    }

    fn counts(&mut self) -> &mut Counts {
        &mut self.counts
    }
}
