//! A write that has the backing replace a page, which may be mapped elsewhere.
//!
//! # Protocol
//! A page that the backing shares for reading is another one once it was asked for a write
//! ([`Backing::page`]). Where two slots show it, or vCPUs have tables of their own, the old page
//! may be mapped elsewhere, and who goes on reading it would miss what is written to the new one.
//! So a write fault that is about to ask says which page it is, takes from everywhere else the
//! leaves of it that may not be written, and reservations, and asks only then; reads that reserve
//! meanwhile map nothing, and try again. It ends when the fault is answered.
//!
//! *Invariant*: when a page that a write was answered with is mapped, the page that it replaced is
//! mapped nowhere, nor will be.
//! - A read that reserves before the walk comes by loses its reservation. One that reserves after
//!   it sees the write, as with invalidations ([`crate::invalidations`]), or asks after the write
//!   did.
//! - A vCPU whose view is not live yet says so before it reserves; see `Guest::spaces`.
//! - A write that sees no vCPU whose caches are off, and no memory in two slots, does nothing of
//!   this. Who switches caches off, or adds such a slot, waits for these writes before the view, or
//!   the slot, is used.
//! - Writes do not keep each other away: each leaves what may be written where it is, and the
//!   backing replaces a page once.

use crate::backing::{Backing, HvaRange, MAY_WRITE};
use crate::host::Host;
use crate::invalidations::Invalidation;
use crate::worker::{Inside, Worker};
use alloc::vec::Vec;
use slat::{Format, Gpa, GpaRange, Tables};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Empties what may hold the page at `host` for reading, wherever that is but at the page of
    /// `gpa` in `own`; until the result is dropped it comes back nowhere.
    pub(crate) fn empty_elsewhere(
        &mut self,
        (own, gpa): (&Tables<'w, F, H>, Gpa),
        host: HvaRange,
    ) -> Invalidation<'w> {
        let guest = self.guest;
        let replacing = guest.replacing.begin(&host);
        for tables in guest.spaces() {
            let mine = core::ptr::eq::<Tables<'_, F, H>>(tables, own);
            // The page stays the guest's.
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
