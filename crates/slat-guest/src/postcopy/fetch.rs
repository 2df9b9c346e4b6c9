//! A fetch: pages that one thread brings, from the claim to the wake of vCPUs that wait for them.

use super::{ASKED, BACKGROUND, BLOCKS, GIVEN_BACK, PostCopy, UnderWay};
use crate::backing::{Backing, HvaRange};
use crate::host::Host;
use crate::sync::Ordering;
use crate::worker::Worker;
use alloc::vec::Vec;
use slat::Format;

/// Pages that one thread has to fetch. If it is dropped before they arrive, they have to be fetched
/// again; pages that a fault has asked for come first.
#[must_use = "dropped, the pages are to be fetched again"]
#[derive(Debug)]
pub struct Fetch<'l, B> {
    pub(super) late: &'l PostCopy<B>,
    pub(super) first: u64,
    /// The number of pages; 0 once they have arrived.
    pub(super) pages: u64,
    pub(super) asked: bool,
}

impl<B> Fetch<'_, B> {
    /// Returns the addresses of the pages in the backing.
    pub fn host(&self) -> HvaRange {
        self.late.host(self.first, self.pages)
    }

    /// Returns whether a fault has asked for the page: a vCPU waits.
    pub const fn asked(&self) -> bool {
        self.asked
    }

    /// Runs `change` on the record of the fetch.
    fn under_way<R>(&self, change: impl FnOnce(&mut UnderWay) -> R) -> R {
        let mut work = self.late.work.lock();
        let mine = work.fetches.iter_mut().find(|fetch| fetch.first == self.first);
        change(mine.expect("it is under way until it ends"))
    }

    /// Calls `put` with each part of the pages that is still to be fetched: `put` writes the
    /// content there, in `inner`'s memory. Returns the number of these pages; 0 if all of them were
    /// discarded, or lost, since they were handed out. A thread that discards or loses them waits
    /// while `put` runs, so `put` only copies what was fetched before.
    ///
    /// A caller that neither discards nor loses pages while they are fetched may write them without
    /// this.
    pub fn place(&self, mut put: impl FnMut(HvaRange)) -> u64 {
        struct PlacementGuard<'f, 'l, B>(&'f Fetch<'l, B>);

        impl<B> Drop for PlacementGuard<'_, '_, B> {
            fn drop(&mut self) {
                self.0.under_way(|fetch| fetch.placing = false);
            }
        }

        let wanted = self.under_way(|fetch| {
            fetch.placing = true;
            fetch.pages & !fetch.overtaken
        });
        let _placing = PlacementGuard(self);
        let mut rest = wanted;
        while rest != 0 {
            let from = u64::from(rest.trailing_zeros());
            let pages = u64::from((rest >> from).trailing_ones());
            put(self.late.host(self.first + from, pages));
            rest &= !((u64::MAX >> (64 - pages)) << from);
        }
        wanted.count_ones().into()
    }

    /// Reports that the content is in its place, in `inner`'s memory. It wakes vCPUs that wait for
    /// it, and forms the blocks whose last page has arrived. Pages that were discarded or lost
    /// since they were handed out stay as that call has left them.
    pub fn arrived<F: Format, H: Host, G: Backing>(mut self, worker: &mut Worker<'_, F, H, G>) {
        let (late, host) = (self.late, self.host());
        let mut whole = Vec::new();
        // From here on there is nothing to give back, even if a call to the VMM panics.
        self.pages = 0;
        let landed = late.end(self.first, true, |block| whole.push(block));
        let count = if self.asked { ASKED } else { BACKGROUND };
        late.counts[count].fetch_add(landed, Ordering::Relaxed);
        worker.guest().arrived(host);
        for start in whole {
            let block = HvaRange { start, bytes: late.block.bytes() };
            let formed = worker.put_together(block, late.block);
            late.counts[BLOCKS].fetch_add(formed, Ordering::Relaxed);
        }
    }
}

impl<B> Drop for Fetch<'_, B> {
    fn drop(&mut self) {
        if self.pages != 0 {
            self.late.counts[GIVEN_BACK].fetch_add(self.pages, Ordering::Relaxed);
            self.late.end(self.first, false, |_| {});
        }
    }
}
