//! Reclaim: the choice of pages to give up, their unmap, and their write to swap.

use super::{GuestView, Pager, ranges};
use crate::order::{AccessedBits, Generations, LOOKS, Order, Stretches, Victims};
use crate::page::PageState;
use crate::paged::{BORN_SHIFT, PagedBacking, PagedMemory, Turn};
use crate::pool::Ram;
use crate::slots::TakenSlot;
use crate::stats::Counters;
use crate::swap::{Swap, SwapError};
use crate::undo::Undo;
use crate::work;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;
use slat::Format;
use slat_guest::Host;

/// Number of stale slots at which reclaim has swap forget their content.
const STALE: u32 = 64;

/// Result of a reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReclaimCounts {
    /// Pages that were given up.
    pub pages: u32,
    /// Another thread is giving up pages of this guest: the caller should wait for it.
    pub busy: bool,
}

/// Reason why no page was given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReclaimError {
    /// Swap does not take pages until [`Pool::resume`](crate::Pool::resume) is called, or, if it is
    /// [full](SwapError::Full), until slots are given back.
    Swap(SwapError),
    /// The guest has all the slots of swap that it may have, and all of them hold pages that are
    /// not in memory.
    Quota {
        /// Slots that the guest may have.
        slots: u32,
    },
    /// All pages came in too recently to be given up: the guest uses more memory than it may have.
    /// It should wait, or its limit be raised.
    Thrashing,
    /// The guest has no page in memory.
    Nothing,
    /// The guest has no more pages in memory than it keeps
    /// ([`Config::protected`](crate::Config::protected)): another guest should give up pages
    /// ([`choose`](crate::choose)).
    Protected {
        /// Pages that the guest keeps.
        pages: u32,
    },
    /// All pages that were next were used meanwhile, or were moved by other threads.
    InUse,
    /// All free slots of swap hold old content of other guests, which swap is forgetting for them:
    /// one is free soon.
    Wiping,
}

impl fmt::Display for ReclaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Swap(error) => write!(f, "pages cannot be sent to swap: {error}"),
            Self::Quota { slots } => write!(
                f,
                "the guest has all the {slots} slots of swap that it may have; raise its quota or \
                 its limit, or take pages from it by a balloon"
            ),
            Self::Thrashing => f.write_str(
                "all of the guest's pages came back within the minimum residency; have the guest \
                 wait, raise its limit, or lower the residency",
            ),
            Self::Protected { pages } => write!(
                f,
                "the guest has no more than the {pages} pages that it keeps in memory; have \
                 another guest give up pages, or protect fewer"
            ),
            Self::Nothing => f.write_str("the guest has no page in memory that could be given up"),
            Self::InUse => f.write_str("all pages were used while they were about to be given up"),
            Self::Wiping => f.write_str(
                "swap is forgetting what is in its free slots; have the guest wait, or give swap \
                 more slots",
            ),
        }
    }
}

impl core::error::Error for ReclaimError {}

/// A claimed page, and the slot of swap that it will go to.
#[derive(Clone, Copy)]
struct ClaimedPage {
    page: u32,
    frame: u32,
    copy: Option<u32>,
    slot: u32,
    /// The page was used after the last test of its accessed bit.
    used: bool,
}

impl<F: Format, H: Host, B: PagedBacking> Pager<'_, '_, F, H, B> {
    /// Gives up `want` pages of the guest (at least one), or as many as it can,
    /// [`Config::batch`](crate::Config) at a time. While swap takes no pages, it gives up only
    /// pages that have a copy there.
    ///
    /// Pages that the guest keeps ([`Config::protected`](crate::Config::protected)) stay.
    ///
    /// # Errors
    /// [`ReclaimError`]: none was given up.
    pub fn reclaim(&mut self, want: u32) -> Result<ReclaimCounts, ReclaimError> {
        self.reclaim_of(want, 0)
    }

    /// As [`Pager::reclaim`], but gives up to `least` pages even if the guest has no more than it
    /// keeps, because as many come in.
    pub(super) fn reclaim_of(
        &mut self,
        want: u32,
        least: u32,
    ) -> Result<ReclaimCounts, ReclaimError> {
        let paged = self.paged;
        let Some(mut turn) = paged.turn.try_lock() else {
            return Ok(ReclaimCounts { pages: 0, busy: true });
        };
        let mut want = want.max(1);
        if let pages @ 1.. = paged.protected() {
            let here = paged.resident() >= pages.min(paged.limit());
            want = want.min(paged.spare().max(if here { least } else { 0 }));
            if want == 0 {
                return Err(ReclaimError::Protected { pages });
            }
        }
        let begin = self.now();
        // No page is old enough yet, so no walk is spent on a fault that has to wait.
        if begin >> BORN_SHIFT < turn.none_before {
            return Err(ReclaimError::Thrashing);
        }
        if let Some(reason) = self.no_slot()
            && !paged.may_have_copies()
        {
            return Err(reason);
        }
        if turn.torn {
            // The order takes pages that it has already as they are.
            let all = (0..paged.words.len() as u32).map(|page| (page, false));
            paged.order.put_back(all);
        }
        turn.torn = true;
        paged.note(&mut turn);
        let mut result = None;
        if paged.pool.trouble().is_none() {
            let victims = paged.order.victims(want as usize, &mut GuestView::new(self));
            if victims.pages.is_empty() {
                turn.hold(&victims, paged.resident());
            } else {
                (turn.held, turn.until) = (0, u64::MAX);
            }
            result = Some(self.give_up(victims, &mut turn));
        }
        // A page with a copy leaves though swap takes none.
        let result = match result {
            Some(result @ Ok(_)) => result,
            result => match (paged.pool.trouble(), result) {
                (None, Some(result)) => result,
                (None, None) => Err(ReclaimError::InUse),
                (Some(error), result) => {
                    let victims = self.copied(want as usize, &mut turn);
                    let reason = || result.unwrap_or(Err(ReclaimError::Swap(error)));
                    match victims.pages.is_empty() {
                        true => reason(),
                        false => self.give_up(victims, &mut turn),
                    }
                }
            },
        };
        paged.counters.reclaim.add(self.now() - begin);
        turn.torn = false;
        drop(turn);
        if paged.pool.slots.stale(paged.owner) >= STALE {
            paged.pool.wipe_stale(paged.owner);
        }
        result
    }

    /// Finds at most `want` pages in memory that have a copy in swap; idle ones if there are some.
    fn copied(&mut self, want: usize, turn: &mut Turn) -> Victims {
        let paged = self.paged;
        let (mut found, mut used) = (Victims::default(), Vec::new());
        let mut view = GuestView::new(self);
        turn.find_copy(LOOKS + want as u64, paged, |page| {
            if let Some(until) = view.new_until(page) {
                found.hold(until);
            } else if view.was_used(page) {
                used.push(page);
            } else {
                found.pages.push(page);
            }
            (found.pages.len() + used.len() == want).then_some(())
        });
        if found.pages.is_empty() {
            found.pages = used;
        } else {
            found.kept = used.len() as u64;
        }
        found
    }

    /// Walks over all memory: the pages used since the last walk form a new generation. It is for
    /// callers that want to know idle times ([`PagedMemory::idle`]); reclaim walks by itself.
    /// Returns false if another thread is reclaiming or walking, or if the policy has no walks.
    pub fn walk(&mut self) -> bool {
        let paged = self.paged;
        let Some(mut turn) = paged.turn.try_lock() else { return false };
        let Order::Generations(generations) = &paged.order else { return false };
        paged.note(&mut turn);
        Generations::walk(&mut Stretches::new(generations), &mut GuestView::new(self));
        if paged.config.huge {
            let hot = self.hot_blocks(generations);
            drop(turn);
            hot.into_iter().for_each(|block| _ = self.collapse(block));
        }
        true
    }

    /// Returns why a page without a copy cannot leave now, unless it takes the slot of another
    /// page's copy.
    fn no_slot(&self) -> Option<ReclaimError> {
        let (paged, pool) = (self.paged, self.paged.pool);
        let slots = paged.quota();
        let full = || pool.slots.is_full().then_some(ReclaimError::Swap(SwapError::Full));
        let quota = || (paged.swapped() >= slots).then_some(ReclaimError::Quota { slots });
        pool.trouble().map(ReclaimError::Swap).or_else(quota).or_else(full)
    }

    fn give_up(
        &mut self,
        victims: Victims,
        turn: &mut Turn,
    ) -> Result<ReclaimCounts, ReclaimError> {
        let (paged, counters) = (self.paged, &self.paged.counters);
        Counters::add(&counters.kept, victims.kept);
        Counters::add(&counters.held, victims.held);
        let mut pages = victims.pages;
        if pages.is_empty() {
            return Err(match victims.held {
                0 => ReclaimError::Nothing,
                _ => ReclaimError::Thrashing,
            });
        }
        pages.sort_unstable();
        let mut evicted = 0;
        let mut reason = None;
        // Faults on a page wait while it is claimed.
        for pages in pages.chunks(paged.config.batch.max(1) as usize) {
            let mut leaving = LeavingBatch {
                paged,
                claimed: Vec::with_capacity(pages.len()),
                stays: Vec::new(),
                sent: 0,
            };
            reason = self.claim(pages, &mut leaving, turn).or(reason);
            self.unmap(&mut leaving.claimed);
            // The last is next: pages that were used are released first, then pages leave in their
            // order.
            leaving.claimed.reverse();
            leaving.claimed.sort_by_key(|page| page.used);
            while let Some(&page) = leaving.claimed.last() {
                if page.used {
                    Counters::add(&counters.rescued, 1);
                    leaving.keep();
                    continue;
                }
                match self.send_away(&page) {
                    Ok(()) => leaving.send(),
                    Err(error) => {
                        reason = Some(ReclaimError::Swap(error));
                        leaving.keep();
                    }
                }
            }
            Counters::add(&counters.evicted, leaving.sent.into());
            evicted += leaving.sent;
            paged.order.put_back(leaving.stays.drain(..));
        }
        match (evicted, reason) {
            (0, reason) => Err(reason.unwrap_or(ReclaimError::InUse)),
            (pages, _) => Ok(ReclaimCounts { pages, busy: false }),
        }
    }

    /// Claims those of `pages` that can leave, with a slot of swap for each. Releases a page
    /// without a slot at once, so that it is not unmapped in vain. Returns why a page has no slot.
    fn claim(
        &mut self,
        pages: &[u32],
        leaving: &mut LeavingBatch<'_, '_, B::Ram, B::Swap>,
        turn: &mut Turn,
    ) -> Option<ReclaimError> {
        let paged = self.paged;
        let mut none = paged.pool.trouble().map(ReclaimError::Swap);
        for &page in pages {
            let word = &paged.words[page as usize];
            if none.is_some() && matches!(word.load(), PageState::Resident { copy: None, .. }) {
                leaving.stays.push((page, false));
                continue;
            }
            let here = |place: &PageState| matches!(place, PageState::Resident { .. });
            let Ok(PageState::Resident { frame, copy }) = word.claim(here) else {
                // Another thread has claimed it; or it has left, and will arrive anew.
                leaving.stays.push((page, true));
                continue;
            };
            let release = Undo::new(|| word.release(PageState::Resident { frame, copy }));
            if paged.is_pinned(page) {
                drop(release);
                leaving.stays.push((page, true));
                continue;
            }
            let slot = match (copy, none) {
                (Some(slot), _) => Ok(slot),
                (None, Some(reason)) => Err(reason),
                (None, None) => self.slot(turn),
            };
            match slot {
                Ok(slot) => {
                    release.done();
                    leaving.claimed.push(ClaimedPage { page, frame, copy, slot, used: false });
                }
                Err(reason) => {
                    none = Some(reason);
                    drop(release);
                    leaving.stays.push((page, false));
                }
            }
        }
        for page in &leaving.claimed {
            if self.break_block(page.page) {
                Counters::add(&paged.counters.split, 1);
            }
        }
        none
    }

    /// Unmaps the claimed pages from the guest.
    fn unmap(&mut self, claimed: &mut [ClaimedPage]) {
        let paged = self.paged;
        if claimed.is_empty() {
            return;
        }
        let begin = self.now();
        let hosts = ranges(paged, claimed.iter().map(|claimed| claimed.page));
        // In a format without accessed bits, `accessed` only means that the page was mapped.
        let records = self.worker.guest().tables().format().records_accessed();
        self.alone(|worker| {
            worker.evict(&hosts, |taken| {
                if !taken.accessed || !records {
                    return;
                }
                let first =
                    claimed.partition_point(|it| paged.host(it.page, 1).end() <= taken.host.start);
                let theirs = claimed[first..].iter_mut();
                theirs
                    .take_while(|it| paged.host(it.page, 1).start < taken.host.end())
                    .for_each(|it| it.used = true);
            });
        });
        paged.counters.unmap.add(self.now() - begin);
    }

    /// Writes a page that is unmapped and claimed to swap, unless swap has a copy.
    fn send_away(&mut self, page: &ClaimedPage) -> Result<(), SwapError> {
        let (paged, pool) = (self.paged, self.paged.pool);
        if page.copy.is_some() {
            Counters::add(&paged.counters.clean, 1);
            return Ok(());
        }
        if let Some(error) = pool.trouble() {
            return Err(error);
        }
        let begin = self.now();
        let content = self.content.page(pool.layout.page.bytes());
        pool.ram.read(pool.hpa(page.frame), content);
        let gives = pool.slots.gives();
        let written = pool.swap.write(page.slot, content);
        paged.counters.write.add(self.now() - begin);
        match written {
            Ok(()) => pool.slots.written(page.slot),
            Err(error) => pool.stop(error, gives),
        }
        written
    }

    /// Takes a slot of swap for a page that is to leave, and charges it to the guest.
    fn slot(&self, turn: &mut Turn) -> Result<u32, ReclaimError> {
        let (paged, pool) = (self.paged, self.paged.pool);
        if !paged.charge() {
            return self.spare_slot(turn).ok_or(ReclaimError::Quota { slots: paged.quota() });
        }
        let uncharge = Undo::new(|| paged.uncharge());
        let reason = loop {
            match pool.slots.take(paged.owner) {
                TakenSlot::Slot(slot) => {
                    uncharge.done();
                    return Ok(slot);
                }
                // The thread of this guest that wipes them waits for no other thread meanwhile, so
                // this wait ends.
                TakenSlot::Wait => self.wait(),
                TakenSlot::Wiping => break ReclaimError::Wiping,
                TakenSlot::Full => break ReclaimError::Swap(SwapError::Full),
            }
        };
        drop(uncharge);
        self.spare_slot(turn).ok_or(reason)
    }

    /// Takes the slot of a page that is in memory and has a copy; that page is written again when
    /// it leaves. The slot is already charged to the guest.
    fn spare_slot(&self, turn: &mut Turn) -> Option<u32> {
        let paged = self.paged;
        if !paged.may_have_copies() {
            return None;
        }
        turn.find_copy(LOOKS, paged, |page| {
            let word = &paged.words[page as usize];
            let place = word.load();
            let PageState::Resident { frame, copy: Some(slot) } = place else { return None };
            let taken = word.exchange(place, PageState::Resident { frame, copy: None });
            taken.then(|| {
                paged.pool.slots.reuse(slot, paged.owner);
                slot
            })
        })
    }
}

impl Turn {
    /// Records a search that found only pages that are too new, as `victims` says. Once all
    /// `resident` pages were passed over, no search is made before the first is old enough.
    fn hold(&mut self, victims: &Victims, resident: u32) {
        self.held += victims.held;
        self.until = victims.until.map_or(self.until, |until| until.min(self.until));
        if victims.held > 0 && (!victims.cut || self.held >= resident.into()) {
            self.none_before = self.until;
            (self.held, self.until) = (0, u64::MAX);
        }
    }

    /// Calls `take` with pages that are in memory and have a copy in swap, each at most once, until
    /// it returns a result or `looks` pages were looked at.
    fn find_copy<M: Ram, S: Swap, R>(
        &mut self,
        looks: u64,
        paged: &PagedMemory<'_, M, S>,
        mut take: impl FnMut(u32) -> Option<R>,
    ) -> Option<R> {
        let (begin, mut again) = (self.hand, false);
        for _ in 0..looks {
            work::step();
            let page = match self.copies.first(self.hand) {
                Some(page) if !again || page < begin => page,
                None if !again => {
                    (self.hand, again) = (0, true);
                    continue;
                }
                _ => return None,
            };
            self.hand = page + 1;
            match paged.words[page as usize].load() {
                PageState::Resident { copy: Some(_), .. } => {
                    let result = take(page);
                    if result.is_some() {
                        return result;
                    }
                }
                PageState::Moving => {}
                // Once it has a copy again, it arrives again.
                _ => _ = self.copies.remove(page),
            }
        }
        None
    }
}

/// A batch of pages that leave. If a callback unwinds, those that are still here stay in memory.
struct LeavingBatch<'p, 'h, M: Ram, S: Swap> {
    paged: &'p PagedMemory<'h, M, S>,
    claimed: Vec<ClaimedPage>,
    /// Pages that do not leave, each with whether it was used.
    stays: Vec<(u32, bool)>,
    /// Number of pages that have left.
    sent: u32,
}

impl<M: Ram, S: Swap> LeavingBatch<'_, '_, M, S> {
    /// Keeps the last claimed page in memory, and releases it.
    fn keep(&mut self) {
        let Some(page) = self.claimed.pop() else { return };
        let paged = self.paged;
        self.stays.push((page.page, page.used));
        paged.words[page.page as usize]
            .release(PageState::Resident { frame: page.frame, copy: page.copy });
        if page.copy.is_none() {
            paged.uncharge();
            paged.pool.return_unwritten(page.slot, paged.owner);
        }
    }

    /// The last claimed page is in swap.
    fn send(&mut self) {
        let Some(page) = self.claimed.pop() else { return };
        let paged = self.paged;
        let since = paged.evicted.fetch_add(1, Ordering::Relaxed) as u32;
        paged.words[page.page as usize].release(PageState::Swapped { slot: page.slot, since });
        paged.give_frame(page.frame);
        self.sent += 1;
    }
}

impl<M: Ram, S: Swap> Drop for LeavingBatch<'_, '_, M, S> {
    fn drop(&mut self) {
        let paged = self.paged;
        // Pages of this batch that came back already were subtracted before this addition; that
        // does no harm, as only the thread that has the turn reads the counter.
        paged.away.fetch_add(self.sent, Ordering::Relaxed);
        for page in self.claimed.drain(..) {
            let here = PageState::Resident { frame: page.frame, copy: page.copy };
            paged.words[page.page as usize].release(here);
            if page.copy.is_none() {
                paged.uncharge();
                // Swap has unwound, and is not called again.
                if paged.pool.slots.return_unwritten(page.slot, paged.owner) {
                    paged.pool.slots.wiped(page.slot..page.slot + 1, paged.owner, false);
                }
            }
        }
    }
}
