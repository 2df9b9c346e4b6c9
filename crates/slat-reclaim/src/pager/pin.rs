//! Pinned pages, which a device uses for longer than one call: they stay in memory, in their
//! frames.
//!
//! *Invariant*: a page that is pinned does not leave its frame. Only a thread that has claimed the
//! page adds a pin, or acts on the count; and a thread claims a page before it gives it up, moves
//! it or discards it.
//!
//! The order of pages drops a page that is pinned when its turn comes, so that no search passes
//! over it twice. A page that is not pinned any more arrives again: the count changes, then the
//! page is pushed, as `arrivals` requires.

use super::{PageError, Pager};
use crate::page::{Claim, PageState};
use crate::paged::{PagedBacking, PagedMemory};
use crate::pool::Ram;
use crate::swap::Swap;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;
use slat::{Access, Format, Hpa};
use slat_guest::{Host, HvaRange, PagePin, PinError};

/// Pinned pages: they stay in memory, in their frames, until this is dropped.
#[must_use = "dropped, the pages are pinned no more"]
pub struct PagesPinned<'w, M: Ram, S: Swap> {
    paged: &'w PagedMemory<'w, M, S>,
    first: u32,
    memory: Vec<Hpa>,
    /// The pins of the tables that map them.
    _tables: Vec<PagePin<'w>>,
}

impl<M: Ram, S: Swap> PagesPinned<'_, M, S> {
    /// Returns the host address of each page.
    pub fn memory(&self) -> &[Hpa] {
        &self.memory
    }
}

impl<M: Ram, S: Swap> fmt::Debug for PagesPinned<'_, M, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagesPinned")
            .field("first", &self.first)
            .field("memory", &self.memory)
            .finish()
    }
}

impl<M: Ram, S: Swap> Drop for PagesPinned<'_, M, S> {
    fn drop(&mut self) {
        for page in self.first..self.first + self.memory.len() as u32 {
            if self.paged.pins[page as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
                self.paged.pinned.fetch_sub(1, Ordering::Relaxed);
                self.paged.arrivals.push(page, Some(0));
            }
        }
    }
}

impl<'w, F: Format, H: Host, B: PagedBacking> Pager<'_, 'w, F, H, B> {
    /// Brings in the pages of `host`, a range of whole pages, and keeps them in their frames until
    /// the result is dropped: no pager gives them up, moves them into a block or discards them
    /// ([`Pager::discard`]), and their tables stay ([`Worker::pin`]). The caller reports which
    /// pages a device writes ([`Worker::device_used`]). Pinned pages count towards the guest's
    /// limit: a guest whose limit is all pinned has no page to give up.
    ///
    /// [`Worker::pin`]: slat_guest::Worker::pin
    /// [`Worker::device_used`]: slat_guest::Worker::device_used
    ///
    /// # Errors
    /// [`PageError`]; nothing is pinned. [`PageError::NotPinned`] if a page is in no memslot of the
    /// guest, or is pinned 65,535 times already.
    pub fn pin(&mut self, host: HvaRange) -> Result<PagesPinned<'w, B::Ram, B::Swap>, PageError> {
        let paged = self.paged;
        let size = paged.pool.layout.page.bytes();
        let outside = Err(PageError::Outside { host: host.start });
        if (host.start.0 | host.bytes) & (size - 1) != 0 || host.end() > paged.range.end() {
            return outside;
        }
        let Some(first) = paged.number(host.start) else { return outside };
        let pages = first..first + (host.bytes / size) as u32;
        for page in pages.clone() {
            let page = paged.host(page, 1);
            if self.worker.guest_ranges(page).is_empty() {
                return Err(PageError::NotPinned(PinError::NoMemslot { at: page.start }));
            }
        }
        let mut tables = Vec::new();
        for range in self.worker.guest_ranges(host) {
            tables.push(self.worker.pin(range).map_err(PageError::NotPinned)?);
        }
        let mut pinned = PagesPinned { paged, first, memory: Vec::new(), _tables: tables };
        for page in pages {
            let hpa = self.pin_page(page)?;
            pinned.memory.push(hpa);
        }
        Ok(pinned)
    }

    fn pin_page(&mut self, page: u32) -> Result<Hpa, PageError> {
        let paged = self.paged;
        let word = &paged.words[page as usize];
        loop {
            self.bring_in(paged.host(page, 1).start, Access::Write)?;
            let Ok(PageState::Resident { frame, copy }) =
                word.claim(|place| matches!(place, PageState::Resident { .. }))
            else {
                self.wait();
                continue;
            };
            let more = |pins: u16| pins.checked_add(1);
            let pins = &paged.pins[page as usize];
            let added = pins.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more);
            if added == Ok(0) {
                paged.pinned.fetch_add(1, Ordering::Relaxed);
            }
            // A device may write the page, which makes swap's copy stale.
            drop(Claim {
                word,
                place: PageState::Resident { frame, copy: copy.filter(|_| added.is_err()) },
            });
            added.map_err(|_| PageError::NotPinned(PinError::TooOften))?;
            copy.into_iter().for_each(|slot| paged.give_slot(slot));
            return Ok(paged.pool.hpa(frame));
        }
    }
}

impl<M: Ram, S: Swap> PagedMemory<'_, M, S> {
    /// Returns whether the page is pinned to its frame. While the caller has claimed the page, it
    /// is not pinned anew.
    pub(crate) fn is_pinned(&self, page: u32) -> bool {
        self.pins[page as usize].load(Ordering::Acquire) != 0
    }

    /// Returns whether all pages in memory are pinned.
    pub(crate) fn all_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed) >= self.resident()
    }
}
