//! What the CPU that faulted has to forget after it was given a right, as a value that must be
//! used.
//!
//! Who takes a right owes an invalidation to all CPUs ([`Shootdown`](crate::Shootdown)). Who gives
//! one owes nothing to others: a CPU that holds the old rights faults once more, and finds the new
//! ones. But where a fault does not make a CPU forget what it faulted at
//! ([`Format::KEEPS_FAULTING`]: Arm, RISC-V), the CPU that runs the guest again faults at the very
//! entry that it holds, for ever. It has to forget that entry first, and it alone.

use crate::addr::{Gpa, GpaRange};
use crate::format::Format;
use crate::platform::Platform;
use crate::shootdown::Invalidation;
use crate::tables::Tables;
use core::fmt;

/// Rights that were given to leaves of a range, or were found there: what
/// [`Guard::relax`](crate::Guard::relax) and its like return.
///
/// The CPU that runs the vCPU which waits for the right calls [`Granted::flush_local`] before it
/// runs the guest again, *also where nothing changed*: another thread may have given the right
/// since, and what the CPU holds is older. Who gives rights that no vCPU of this CPU waits for says
/// so ([`Granted::elsewhere`]).
///
/// An operation that halted returns none. Who repeats it for the same range gets one for all of
/// it; who does not has given the guest nothing that it could wait for: it faults again.
#[must_use = "the CPU that faulted may fault for ever until it forgets the old rights: \
              `flush_local` on that CPU, or `elsewhere`"]
pub struct Granted<'t, 'p, F: Format, P: Platform> {
    tables: &'t Tables<'p, F, P>,
    range: GpaRange,
    bytes: u64,
}

impl<'t, 'p, F: Format, P: Platform> Granted<'t, 'p, F, P> {
    #[inline(always)]
    pub(crate) const fn new(tables: &'t Tables<'p, F, P>, range: GpaRange, bytes: u64) -> Self {
        Self { tables, range, bytes }
    }

    /// Bytes of guest memory whose leaves changed.
    #[inline(always)]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether any leaf changed.
    #[inline(always)]
    pub const fn is_changed(&self) -> bool {
        self.bytes != 0
    }

    /// What the CPU that faulted has to forget before it runs the guest again: all leaves that
    /// cover an address of the range, of whichever size (so no size is named), and no links to
    /// tables. `None` where a fault has made the CPU forget it, or look again (x86, Power).
    #[inline(always)]
    pub fn invalidation(&self) -> Option<Invalidation> {
        F::KEEPS_FAULTING.then(|| Invalidation {
            vmid: self.tables.vmid(),
            range: Some(self.range),
            leaf: None,
            tables: false,
        })
    }

    /// Less of it: what covers the page of `gpa` alone, if the CPU faulted there. At other pages of
    /// the range it may fault once more. Where a block got the right, this is one instruction in
    /// place of one a page. Nothing changes for an address outside the range.
    #[inline(always)]
    pub fn at(self, gpa: Gpa) -> Self {
        let page = 1 << F::PAGE_SHIFT;
        let start = gpa.0 & !(page - 1);
        let inside = self.range.start().0 <= start && start < self.range.end().0;
        let range = if inside { GpaRange::from_bounds(start, start + page) } else { self.range };
        Self { range, ..self }
    }

    /// Makes the calling CPU forget the old rights ([`Platform::invalidate_local`]); returns the
    /// bytes that changed. To be called on the CPU that faulted, before it runs the guest again.
    #[inline(always)]
    pub fn flush_local(self) -> u64 {
        if let Some(what) = self.invalidation() {
            self.tables.platform().invalidate_local(&what);
        }
        self.bytes
    }

    /// Nothing is invalidated: no vCPU that waits for these rights runs on the calling CPU next.
    /// One that runs elsewhere faults, and is answered there; so is one that runs here and was not
    /// waiting. Returns the bytes that changed.
    #[inline(always)]
    pub const fn elsewhere(self) -> u64 {
        self.bytes
    }
}

impl<F: Format, P: Platform> Clone for Granted<'_, '_, F, P> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format, P: Platform> Copy for Granted<'_, '_, F, P> {}

impl<F: Format, P: Platform> fmt::Debug for Granted<'_, '_, F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { range, bytes, .. } = self;
        f.debug_struct("Granted").field("range", range).field("bytes", bytes).finish()
    }
}
