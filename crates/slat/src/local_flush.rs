//! The invalidation on the CPU that faulted, after it was given a right, as a value that must be
//! used.
//!
//! A thread that takes a right owes an invalidation on all CPUs ([`Shootdown`](crate::Shootdown)).
//! A thread that gives a right owes other CPUs nothing: a CPU that holds the old rights in its TLB
//! faults once more, and finds the new ones. But where a fault does not remove the faulting entry
//! from the TLB ([`Format::KEEPS_FAULTING`]: Arm, RISC-V), the CPU that runs the guest again would
//! fault at that same entry for ever. This CPU, and only this one, has to invalidate it first.

use crate::addr::{Gpa, GpaRange};
use crate::format::Format;
use crate::invalidation::Invalidation;
use crate::platform::Platform;
use crate::tables::Tables;
use core::fmt;

/// Rights that leaves of a range were given, or had already: the result of
/// [`Guard::relax`](crate::Guard::relax) and similar operations.
///
/// The CPU whose vCPU waits for the right calls [`LocalFlush::flush_local`] before it runs the
/// guest again, *also if nothing changed*: another thread may have given the right meanwhile, and
/// the CPU's TLB entry is older. A caller that gives rights for which no vCPU of this CPU waits
/// calls [`LocalFlush::not_needed_here`].
///
/// An operation that stopped returns none. A caller that repeats it for the same range gets one for
/// the whole range. A caller that does not repeat it has nothing to flush: the guest faults again.
#[must_use = "the CPU that faulted may fault for ever until it forgets the old rights: \
              `flush_local` on that CPU, or `not_needed_here`"]
pub struct LocalFlush<'t, 'p, F: Format, P: Platform> {
    tables: &'t Tables<'p, F, P>,
    range: GpaRange,
    bytes: u64,
}

impl<'t, 'p, F: Format, P: Platform> LocalFlush<'t, 'p, F, P> {
    #[inline(always)]
    pub(crate) const fn new(tables: &'t Tables<'p, F, P>, range: GpaRange, bytes: u64) -> Self {
        Self { tables, range, bytes }
    }

    /// Returns the bytes of guest memory whose leaves changed.
    #[inline(always)]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns whether any leaf changed.
    #[inline(always)]
    pub const fn is_changed(&self) -> bool {
        self.bytes != 0
    }

    /// Returns the invalidation that the faulting CPU has to execute before it runs the guest
    /// again: of all leaves, of any size, that cover an address of the range, but no links. `None`
    /// where a fault itself removes the entry from the TLB, or makes the CPU walk again (x86,
    /// Power).
    #[inline(always)]
    pub fn invalidation(&self) -> Option<Invalidation> {
        F::KEEPS_FAULTING.then(|| Invalidation {
            vmid: self.tables.vmid(),
            range: Some(self.range),
            leaf: None,
            tables: false,
        })
    }

    /// Narrows the invalidation to the page of `gpa`, where the CPU faulted. At other pages of the
    /// range the CPU may fault once more. Where a block got the right, this takes one instruction
    /// in place of one for each page. It changes nothing for an address outside the range.
    #[inline(always)]
    pub fn at(self, gpa: Gpa) -> Self {
        let page = 1 << F::PAGE_SHIFT;
        let start = gpa.0 & !(page - 1);
        let inside = self.range.start().0 <= start && start < self.range.end().0;
        let range = if inside { GpaRange::from_bounds(start, start + page) } else { self.range };
        Self { range, ..self }
    }

    /// Invalidates the old rights on the calling CPU ([`Platform::invalidate_local`]), and returns
    /// the bytes that changed. The CPU that faulted calls it before it runs the guest again.
    #[inline(always)]
    pub fn flush_local(self) -> u64 {
        if let Some(what) = self.invalidation() {
            self.tables.platform().invalidate_local(&what);
        }
        self.bytes
    }

    /// Invalidates nothing, and returns the bytes that changed. The caller states that no vCPU that
    /// waits for these rights runs on the calling CPU next. Another vCPU that holds the old rights
    /// faults, and its CPU handles that.
    #[inline(always)]
    pub const fn not_needed_here(self) -> u64 {
        self.bytes
    }
}

impl<F: Format, P: Platform> Clone for LocalFlush<'_, '_, F, P> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format, P: Platform> Copy for LocalFlush<'_, '_, F, P> {}

impl<F: Format, P: Platform> fmt::Debug for LocalFlush<'_, '_, F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { range, bytes, .. } = self;
        f.debug_struct("LocalFlush").field("range", range).field("bytes", bytes).finish()
    }
}
