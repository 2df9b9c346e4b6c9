//! Writes for which the backing replaces a page that may be mapped elsewhere.
//!
//! # Protocol
//! The backing may answer a write to a page that it shares for reading with another page
//! ([`Backing::page`]). Where two memslots show the old page, or vCPUs have tables of their own, it
//! may be mapped elsewhere, and its readers would miss what is written to the new one. So a write
//! fault that is about to ask announces the page, takes the leaves of it that may not be written,
//! and reservations, from everywhere else, and asks only then; reads that reserve meanwhile map
//! nothing, and try again. This ends when the fault is answered.
//!
//! *Invariant*: when the page with which a write was answered is mapped, the page that it replaced
//! is mapped nowhere, nor will be.
//! - A read that reserves before the walk comes by loses its reservation. One that reserves after
//!   it sees the write, as with invalidations ([`crate::invalidations`]), or asks after the write
//!   did.
//! - A vCPU whose view is not live yet announces the view before it reserves; see `Guest::spaces`.
//! - A write that sees no vCPU whose caches are off, and no memory in two memslots, does nothing of
//!   this. A thread that switches caches off, or adds such a memslot, waits for these writes before
//!   the view, or the memslot, is used.
//! - Writes do not exclude each other: each leaves alone the leaves that may be written, and the
//!   backing replaces a page once.

use crate::backing::{Backing, HvaRange, MAY_WRITE};
use crate::host::Host;
use crate::invalidations::Invalidation;
use crate::worker::{Inside, Worker};
use alloc::vec::Vec;
use slat::{Format, Gpa, GpaRange, Tables};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Empties all entries that may hold the page at `host` for reading, except that for `gpa` in
    /// `own`; no fault maps it for reading until the result is dropped.
    pub(crate) fn empty_elsewhere(
        &mut self,
        (own, gpa): (&Tables<'w, F, H>, Gpa),
        host: HvaRange,
    ) -> Invalidation<'w> {
        let guest = self.guest;
        let replacing = guest.replacing.begin(&host);
        for tables in guest.spaces() {
            let mine = core::ptr::eq::<Tables<'_, F, H>>(tables, own);
            // The page stays the guest's: its marks are kept.
            let moving = guest.leaving.begin();
            self.with_slots(tables, |view, Inside { guard, .. }| {
                let parts = view.backed_by(host).map(|(_, part)| part);
                let parts: Vec<GpaRange> = parts
                    .filter(|part| {
                        let other =
                            !mine || part.start().0 >> F::PAGE_SHIFT != gpa.0 >> F::PAGE_SHIFT;
                        let leaf = guard.translate(part.start()).ok().flatten();
                        let may = |software: slat::Software| software.contains(MAY_WRITE);
                        other && !leaf.is_some_and(|leaf| may(leaf.attributes.software))
                    })
                    .collect();
                guest.unmap(tables, guard, parts, |removed| guest.keep_marks(view, &removed));
            });
            drop(moving);
        }
        replacing
    }
}
