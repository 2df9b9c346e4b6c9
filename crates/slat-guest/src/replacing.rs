//! Writes for which the backing replaces a page that may be mapped elsewhere.
//!
//! # Protocol
//! When the guest writes to a page that the backing shares for reading, the backing may return
//! another page ([`Backing::page`]). If two memslots have the old page, or vCPUs have tables of
//! their own, the old page may be mapped elsewhere, and readers there would miss writes to the new
//! one. So a write fault
//! 1. announces the page;
//! 2. empties the leaves of it that may not be written, and reservations, everywhere else;
//! 3. asks the backing only then.
//!
//! Read faults that reserve meanwhile map nothing, and are retried. The announcement ends when the
//! fault is answered.
//!
//! *Invariant*: when the new page is mapped, the page that it replaced is mapped nowhere, and no
//! later fault maps it.
//! - A read that reserves before the walk of step 2 loses its reservation. A read that reserves
//!   after it sees the announcement, as with invalidations ([`crate::invalidations`]), or asks the
//!   backing after the write did.
//! - A vCPU whose view is not live yet announces the view before it reserves; see `Guest::spaces`.
//! - A write that sees no vCPU whose caches are off, and no memory in two memslots, does neither
//!   step 1 nor step 2. A thread that switches caches off, or adds such a memslot, waits for these
//!   writes before the view, or the memslot, is used.
//! - Writes do not exclude each other: each leaves writable leaves alone, and the backing replaces
//!   a page once.

use crate::backing::{Backing, HvaRange, MAY_WRITE};
use crate::host::Host;
use crate::invalidations::InvalidationInProgress;
use crate::private::MemoryKind;
use crate::worker::{Inside, Worker};
use alloc::vec::Vec;
use slat::{Format, Gpa, GpaRange, Tables};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Empties all entries that may map the page at `host` for reading, except the entry of `gpa`
    /// in `own`. No fault maps the page for reading until the result is dropped.
    pub(crate) fn unmap_elsewhere(
        &mut self,
        (own, gpa): (&Tables<'w, F, H>, Gpa),
        host: HvaRange,
    ) -> InvalidationInProgress<'w> {
        let guest = self.guest;
        let replacing = guest.cow_in_flight.begin(&host);
        for tables in guest.spaces() {
            let mine = core::ptr::eq::<Tables<'_, F, H>>(tables, own);
            // The page stays the guest's, so its marks are kept.
            let moving = guest.marks_in_flight.begin();
            self.with_memslots(tables, |view, Inside { guard, .. }| {
                // Private memory has no host address: a page that is shared by now stays so while
                // this thread is inside the tables.
                let shared = MemoryKind::Shared;
                let parts = view
                    .backed_by(host)
                    .flat_map(|(memslot, part)| memslot.runs::<F>(part, shared));
                let parts: Vec<GpaRange> = parts
                    .filter(|part| {
                        let other =
                            !mine || part.start().0 >> F::PAGE_SHIFT != gpa.0 >> F::PAGE_SHIFT;
                        let leaf = guard.translate(part.start()).ok().flatten();
                        let may = |software: slat::Software| software.contains(MAY_WRITE);
                        other && !leaf.is_some_and(|leaf| may(leaf.attributes.software))
                    })
                    .collect();
                guest
                    .unmap(view, tables, guard, parts, |removed| guest.spill_marks(view, &removed));
            });
            drop(moving);
        }
        replacing
    }
}
