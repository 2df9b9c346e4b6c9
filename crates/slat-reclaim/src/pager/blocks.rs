//! Huge pages: they are kept while they are used, split when they are next to be given up, and
//! collapsed again from pages that are in use.

use super::Pager;
use crate::order::Generations;
use crate::page::{PageState, claim_untouched};
use crate::paged::PagedBacking;
use crate::pool::Ram;
use crate::stats::Counters;
use crate::undo::Undo;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use slat::Format;
use slat::sync::agreed;
use slat_guest::{EagerSplit, Host};
use spin::Mutex;

impl<F: Format, H: Host, B: PagedBacking> Pager<'_, '_, F, H, B> {
    /// Brings in the whole block around `page`, if no page of it was ever touched, and a block is
    /// free. Returns whether it did.
    pub(super) fn bring_block(&mut self, page: u32) -> bool {
        let (paged, pool) = (self.paged, self.paged.pool);
        let (pages, block) = (1 << pool.frames.order(), paged.block_of(page));
        let first = (block as u32) << pool.frames.order();
        let Some(words) = paged.words.get(first as usize..(first + pages) as usize) else {
            return false;
        };
        if words.iter().any(|word| word.load() != PageState::Empty) {
            return false;
        }
        let fits = |here: u32| here.checked_add(pages).filter(|here| *here <= paged.limit());
        if paged.here.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fits).is_err() {
            return false;
        }
        let Some(frame) = pool.frames.take_block() else {
            paged.here.fetch_sub(pages, Ordering::AcqRel);
            return false;
        };
        let give = Undo::new(|| (frame..frame + pages).for_each(|frame| paged.give_frame(frame)));
        if !claim_untouched(words) {
            return false;
        }
        let release = Undo::new(|| words.iter().for_each(|word| word.release(PageState::Empty)));
        let zeroes = self.content.page(pool.layout.page.bytes());
        zeroes.fill(0);
        (frame..frame + pages).for_each(|frame| pool.ram.write(pool.hpa(frame), zeroes));
        (first..first + pages).for_each(|page| self.arrived(page, None));
        release.done();
        give.done();
        // Stored before a fault can find a page of the block.
        paged.whole[block].store(1, Ordering::Release);
        for (index, word) in words.iter().enumerate() {
            word.release(PageState::Resident { frame: frame + index as u32, copy: None });
        }
        Counters::add(&paged.counters.huge, 1);
        true
    }

    /// Breaks the block around `page` into pages; returns whether it was a block. Splits its leaf,
    /// if it has one, so that accessed bits are found page by page.
    pub(super) fn break_block(&mut self, page: u32) -> bool {
        let paged = self.paged;
        let block = paged.block_of(page);
        if paged.whole[block].swap(0, Ordering::AcqRel) == 0 {
            return false;
        }
        // Orders the store before the search for leaves: a fault maps by what it reads in `whole`.
        agreed();
        let order = paged.pool.frames.order();
        for range in self.worker.guest_ranges(paged.host((block as u32) << order, 1 << order)) {
            // If there are too few free tables to split the leaf, `unmap` takes out the whole
            // block.
            EagerSplit::new(range, paged.pool.layout.page).run(self.worker, || false);
        }
        true
    }

    /// Returns the blocks that are not whole, of which all pages are in memory, and three quarters
    /// were used since the last walk but one.
    pub(super) fn hot_blocks(&self, generations: &Mutex<Generations>) -> Vec<u32> {
        let paged = self.paged;
        let pages = 1u32 << paged.pool.frames.order();
        let is_hot = |block: &u32| {
            let all = block * pages..(block + 1) * pages;
            let here =
                |page: u32| matches!(paged.words[page as usize].load(), PageState::Resident { .. });
            !paged.is_whole(block * pages) && all.clone().all(here) && {
                let generations = generations.lock();
                all.filter(|&page| generations.is_young(page)).count() as u32 * 4 >= pages * 3
            }
        };
        (0..paged.words.len() as u32 / pages).filter(is_hot).collect()
    }

    /// Collapses the pages of `block`: in their frames if these are a block, otherwise by a copy to
    /// a free block. Returns false if a page is not in memory, is claimed or is pinned, or if no
    /// block is free.
    pub(super) fn collapse(&mut self, block: u32) -> bool {
        let (paged, pool) = (self.paged, self.paged.pool);
        let (order, pages) = (pool.frames.order(), 1u32 << pool.frames.order());
        let first = block << order;
        let words = &paged.words[first as usize..(first + pages) as usize];
        let mut old = Vec::with_capacity(words.len());
        for word in words {
            match word.claim(|place| matches!(place, PageState::Resident { .. })) {
                Ok(PageState::Resident { frame, copy }) => old.push((frame, copy)),
                _ => break,
            }
        }
        let in_place = old.iter().enumerate().all(|(index, (frame, _))| {
            old[0].0.is_multiple_of(pages) && *frame == old[0].0 + index as u32
        });
        let pinned = (first..first + old.len() as u32).any(|page| paged.is_pinned(page));
        let complete = old.len() == words.len() && !pinned;
        let new = match complete {
            true if in_place => Some(old[0].0),
            true => pool.frames.take_block(),
            false => None,
        };
        let release = Undo::new(|| {
            for (word, &(frame, copy)) in words.iter().zip(&old) {
                word.release(PageState::Resident { frame, copy });
            }
        });
        let Some(new) = new else { return false };
        let give = Undo::new(|| {
            if !in_place {
                (new..new + pages).for_each(|frame| pool.frames.give(frame));
            }
        });
        self.alone(|worker| worker.evict(&[paged.host(first, pages)], |_| {}));
        let content = self.content.page(pool.layout.page.bytes());
        for (index, (frame, _)) in old.iter().enumerate().filter(|_| !in_place) {
            pool.ram.read(pool.hpa(*frame), content);
            pool.ram.write(pool.hpa(new + index as u32), content);
        }
        release.done();
        give.done();
        paged.whole[block as usize].store(1, Ordering::Release);
        for ((index, word), (frame, copy)) in words.iter().enumerate().zip(old) {
            // One leaf lets the guest write all pages of the block, so the copies in swap are
            // dropped.
            word.release(PageState::Resident { frame: new + index as u32, copy: None });
            copy.into_iter().for_each(|slot| paged.give_slot(slot));
            if !in_place {
                pool.frames.give(frame);
            }
        }
        Counters::add(&paged.counters.collapsed, 1);
        Counters::add(&paged.counters.moved, if in_place { 0 } else { pages.into() });
        true
    }
}
