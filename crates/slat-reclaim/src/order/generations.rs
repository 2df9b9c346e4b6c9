//! Generations: pages by the last ageing walk that found them used.
//!
//! A walk over all memory begins a generation, and puts the pages that it finds used into it. The
//! walk only writes the new generation's number for each page: a page stays in the queue where it
//! is, and moves to the queue of its generation when its turn comes. The oldest generation is given
//! up first. The accessed bit of a page about to be given up is tested once more, with its
//! neighbours if [`ScanOptions::around`] says so; if the page was used, it goes to the youngest
//! generation. While frequency predicts uses better than recency ([`Heat`]), the coldest pages are
//! given up in place of the oldest generation; all else stays the same.
//!
//! *Invariant*: a page is in one queue at most. A page that left and came back before its turn is
//! still in a queue: it gets the number of its new generation, and stays where it is. A page that
//! is not in memory leaves its queue when its turn comes; so does one that was given up because it
//! was cold. No search finds a page twice: it either takes cold pages, each at one place of its
//! order, or removes pages from queues, and does not do both.

use super::heat::{Coldest, Heat};
use super::queue::{Links, Queue};
use super::{AccessedBits, LOOKS, Look, STRETCH, ScanOptions, Stretches, Victims};
use crate::work;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

/// Number of the youngest generations that are not given up, so that pages have time to be used
/// again between walks.
const KEPT: usize = 4;
/// Pages that are tested together.
const AROUND: u32 = 64;
/// Pages that a walk of a search reads for each page that came in or was given up, so that a search
/// that is repeated in vain does not walk again.
const LOOKED_AT: u32 = 64;
/// Idle times, in walks, that histograms distinguish.
pub(crate) const IDLE: usize = 32;

#[derive(Debug)]
pub(crate) struct Generations {
    looks: ScanOptions,
    /// For each page, the generation that it belongs to.
    of: Box<[u32]>,
    links: Links,
    /// For each 64 pages, the last search that tested them around a page about to be given up.
    around: Box<[u32]>,
    /// Number of the current search for victims; tests of neighbours are valid for one search.
    search: u32,
    /// Generations, the oldest first.
    queues: VecDeque<Generation>,
    /// Number of the oldest generation.
    oldest: u32,
    /// How often all generations were renumbered.
    renumbered: u64,
    /// Pages that were used again, by how many walks had found them idle before. The last entry
    /// counts all longer idle times.
    woken: [u64; IDLE],
    walks: u64,
    /// The part of [`AccessedBits::progress`] that walks of searches have used up.
    spent: u64,
    young: Vec<u64>,
    /// How often pages were used, if [`ScanOptions::frequency`] is set.
    heat: Option<Box<Heat>>,
}

#[derive(Debug)]
struct Generation {
    /// Pages that were put here, and have not moved on yet.
    pages: Queue,
    /// When the generation began.
    began: u64,
}

impl Generation {
    const fn new(began: u64) -> Self {
        Self { pages: Queue::new(), began }
    }
}

/// Results of the walks so far.
pub(crate) struct Census {
    /// For each generation, the youngest first: when it began, and its number of pages.
    pub generations: Vec<(u64, u64)>,
    pub walks: u64,
    pub woken: Vec<u64>,
}

/// Once the oldest generation has this number, all generations are renumbered.
const LAST: u32 = if cfg!(test) { 1 << 6 } else { 1 << 31 };

impl Generations {
    pub fn new(pages: u32, looks: ScanOptions, now: u64) -> Self {
        let fill = |len: u32| vec![0; len as usize].into_boxed_slice();
        Self {
            looks,
            of: fill(pages),
            links: Links::new(pages),
            around: fill(pages.div_ceil(AROUND)),
            search: 0,
            queues: (0..=KEPT).map(|_| Generation::new(now)).collect(),
            oldest: 0,
            renumbered: 0,
            woken: [0; IDLE],
            walks: 0,
            spent: 0,
            young: Vec::new(),
            heat: looks.frequency.then(|| Box::new(Heat::new(pages))),
        }
    }

    fn youngest(&self) -> u32 {
        self.oldest + self.queues.len() as u32 - 1
    }

    /// Assigns `page` to `generation`: puts it at the end of its queue, or leaves it where it is
    /// queued.
    fn enqueue(&mut self, page: u32, generation: u32) {
        let generation = generation.clamp(self.oldest, self.youngest());
        self.of[page as usize] = generation;
        let queue = &mut self.queues[(generation - self.oldest) as usize].pages;
        self.links.push(queue, page);
    }

    pub fn arrive(&mut self, page: u32, distance: Option<u32>, here: u32) {
        self.count(page, distance.is_some());
        // A page that would have stayed with twice the memory counts as in use.
        let in_use = distance.is_none_or(|distance| distance <= here);
        self.enqueue(page, self.youngest() - u32::from(!in_use));
    }

    /// Counts a use of `page`; `before` says whether it was in memory before.
    fn count(&mut self, page: u32, before: bool) {
        let youngest = self.youngest();
        if let Some(heat) = &mut self.heat {
            let age = youngest.saturating_sub(self.of[page as usize]);
            heat.used(page, before.then_some(age));
        }
    }

    pub fn put_back(&mut self, page: u32, used: bool) {
        if used {
            self.count(page, true);
        }
        self.enqueue(page, if used { self.youngest() } else { self.of[page as usize] });
    }

    /// Returns whether a search may walk: enough pages came in or were given up since searches
    /// walked. What is saved up is enough for two walks.
    fn affords_walk(&mut self, guest: &impl AccessedBits) -> bool {
        let (price, progress) = (u64::from(guest.pages() / LOOKED_AT).max(1), guest.progress());
        let spent = self.spent.max(progress.saturating_sub(2 * price));
        let affords = progress.saturating_sub(spent) >= price;
        if affords {
            self.spent = spent + price;
        }
        affords
    }

    /// Walks if the search may, and returns whether it did.
    fn walk_for(
        order: &mut Stretches<'_, Self>,
        guest: &mut impl AccessedBits,
        found: &mut Victims,
    ) -> bool {
        let walks = found.walks < 2 && order.get().affords_walk(guest);
        if walks {
            found.walks += 1;
            Self::walk(order, guest);
        }
        walks
    }

    /// Walks over all memory, and puts the pages that were used into a new generation.
    pub fn walk(order: &mut Stretches<'_, Self>, guest: &mut impl AccessedBits) {
        let now = guest.now();
        let this = order.get();
        this.settle();
        let idle = this.youngest();
        let new = idle + 1;
        this.queues.push_back(Generation::new(now));
        this.walks += 1;
        let (pages, window) = (guest.pages(), this.looks.window.max(1));
        let mut young = core::mem::take(&mut this.young);
        let mut first = 0;
        while first < pages {
            let count = window.min(pages - first);
            order.pause();
            if (first..first + count).any(|page| guest.is_here(page)) {
                young.clear();
                young.resize((count as usize).div_ceil(64), 0);
                guest.young(Look::Walk, first, count, &mut young);
                each(&young, |bit| order.get().used(first + bit, idle, new));
            }
            first += count;
        }
        order.get().young = young;
        Self::draw_up(order, guest);
    }

    /// Chooses, at the end of a walk, the pages that heat would give up until the next walk.
    fn draw_up(order: &mut Stretches<'_, Self>, guest: &impl AccessedBits) {
        let Some(heat) = &mut order.get().heat else { return };
        heat.begin();
        for first in (0..guest.pages()).step_by(STRETCH as usize) {
            order.pause();
            let this = order.get();
            let youngest = this.youngest();
            let Some(heat) = &mut this.heat else { return };
            for page in first..guest.pages().min(first + STRETCH) {
                work::step();
                let age = youngest.saturating_sub(this.of[page as usize]);
                heat.look(page, age, guest.is_here(page));
            }
        }
        if let Some(heat) = &mut order.get().heat {
            heat.draw_up();
        }
    }

    /// Renumbers generations before their numbers run out, and merges the oldest ones so that no
    /// more than [`IDLE`] remain before a walk, even if no page is given up between walks.
    fn settle(&mut self) {
        if self.oldest >= LAST {
            let passed = core::mem::take(&mut self.oldest);
            self.renumbered += 1;
            for of in &mut self.of {
                *of = of.saturating_sub(passed);
            }
        }
        while self.queues.len() > IDLE {
            let Some(Generation { pages, began }) = self.queues.pop_front() else { return };
            self.oldest += 1;
            let Some(next) = self.queues.front_mut() else { return };
            next.began = began;
            // A number below that of the oldest generation counts as the oldest generation.
            self.links.prepend(&pages, &mut next.pages);
        }
    }

    /// Records that `page` was used after the walk that began generation `last`, and assigns it to
    /// `generation`.
    fn used(&mut self, page: u32, last: u32, generation: u32) {
        if let Some(heat) = &mut self.heat {
            heat.used(page, Some(last.saturating_sub(self.of[page as usize])));
        }
        let of = &mut self.of[page as usize];
        let idle = last.saturating_sub(*of) as usize;
        self.woken[idle.min(IDLE - 1)] += 1;
        *of = generation;
    }

    pub fn victims(
        order: &mut Stretches<'_, Self>,
        want: usize,
        guest: &mut impl AccessedBits,
    ) -> Victims {
        let mut found = Victims::default();
        let this = order.get();
        this.search = this.search.wrapping_add(1);
        if order.get().heat.as_ref().is_some_and(|heat| heat.is_stale()) {
            Self::walk_for(order, guest, &mut found);
        }
        Self::coldest(order, want, guest, &mut found);
        if !found.pages.is_empty() {
            return found;
        }
        // The search ends even if all pages are in use or new: it puts them into the youngest
        // generation, and more than two walks pass before that one is the oldest.
        let patience = LOOKS + want as u64;
        while found.pages.len() < want {
            if found.held + found.kept >= patience {
                found.cut = true;
                if found.pages.is_empty() {
                    Self::take_regardless(order, want, guest, &mut found);
                }
                break;
            }
            work::step();
            let this = order.get();
            let Some(first) = this.queues.front_mut() else { break };
            let Some(page) = this.links.pop(&mut first.pages) else {
                if this.queues.len() > KEPT + 1 {
                    this.queues.pop_front();
                    this.oldest += 1;
                } else if this.queues.iter().all(|queue| queue.pages.is_empty()) {
                    break;
                } else if Self::walk_for(order, guest, &mut found) {
                    continue;
                } else if found.pages.is_empty() {
                    Self::take_regardless(order, want, guest, &mut found);
                    break;
                } else {
                    break;
                }
                continue;
            };
            if !guest.is_here(page) {
                continue;
            }
            if this.of[page as usize] > this.oldest {
                this.enqueue(page, this.of[page as usize]);
                continue;
            }
            if let Some(until) = guest.new_until(page) {
                found.hold(until);
                this.enqueue(page, this.youngest());
                continue;
            }
            if Self::was_used(order, page, guest) {
                found.kept += 1;
                order.get().put_back(page, true);
                continue;
            }
            order.get().gives_up(page, &mut found);
        }
        found
    }

    fn gives_up(&mut self, page: u32, found: &mut Victims) {
        found.pages.push(page);
        if let Some(heat) = &mut self.heat {
            heat.gives_up(page);
        }
    }

    /// Finds the coldest pages, while heat predicts better. They stay in their queues until their
    /// turn.
    fn coldest(
        order: &mut Stretches<'_, Self>,
        want: usize,
        guest: &mut impl AccessedBits,
        found: &mut Victims,
    ) {
        let patience = LOOKS + want as u64;
        while found.pages.len() < want && found.held + found.kept < patience {
            let Some(heat) = order.get().heat.as_mut().filter(|heat| heat.leads()) else { return };
            match heat.coldest(STRETCH) {
                Coldest::Page(page) if heat.is_counted(page) || !guest.is_here(page) => {}
                Coldest::Page(page) => {
                    if let Some(until) = guest.new_until(page) {
                        found.hold(until);
                    } else if Self::was_used_since(order, page, guest) {
                        found.kept += 1;
                        order.get().put_back(page, true);
                    } else {
                        order.get().gives_up(page, found);
                    }
                }
                Coldest::Later => order.pause(),
                Coldest::None => {
                    if !found.pages.is_empty() || !Self::walk_for(order, guest, found) {
                        return;
                    }
                }
            }
        }
    }

    /// Gives up the pages that were used longest ago although all pages are in use, as two walks
    /// have just found. If the search could not afford them, first tests some pages.
    fn take_regardless(
        order: &mut Stretches<'_, Self>,
        want: usize,
        guest: &mut impl AccessedBits,
        found: &mut Victims,
    ) {
        let mut tests = if found.walks < 2 && !found.cut { 2 * want as u64 } else { 0 };
        let patience = found.held + LOOKS;
        for place in 0..order.get().queues.len() {
            for _ in 0..order.get().queues[place].pages.len() {
                if found.pages.len() == want {
                    return;
                }
                if found.held >= patience {
                    found.cut = true;
                    return;
                }
                work::step();
                let this = order.get();
                let Some(page) = this.links.pop(&mut this.queues[place].pages) else { break };
                if !guest.is_here(page) {
                    continue;
                }
                let (of, number) = (this.of[page as usize], this.oldest + place as u32);
                if of > number {
                    this.enqueue(page, of);
                } else if let Some(until) = guest.new_until(page) {
                    found.hold(until);
                    this.enqueue(page, number);
                } else if tests > 0 && of < this.youngest() && {
                    tests -= 1;
                    Self::was_used(order, page, guest)
                } {
                    found.kept += 1;
                    order.get().put_back(page, true);
                } else {
                    order.get().gives_up(page, found);
                }
            }
        }
    }

    /// Returns whether the page was used according to the last walk, or to a test since.
    fn was_used(order: &mut Stretches<'_, Self>, page: u32, guest: &mut impl AccessedBits) -> bool {
        if !order.get().looks.around {
            order.pause();
            return guest.was_used(page);
        }
        Self::look_around(order, page, guest);
        let this = order.get();
        this.of[page as usize] == this.youngest()
    }

    /// Returns whether the page was used since the last walk.
    fn was_used_since(
        order: &mut Stretches<'_, Self>,
        page: u32,
        guest: &mut impl AccessedBits,
    ) -> bool {
        if !order.get().looks.around {
            order.pause();
            return guest.was_used(page);
        }
        Self::look_around(order, page, guest);
        order.get().heat.as_ref().is_some_and(|heat| heat.is_counted(page))
    }

    /// Tests the 64 pages around `page`, once in a search.
    fn look_around(order: &mut Stretches<'_, Self>, page: u32, guest: &mut impl AccessedBits) {
        let this = order.get();
        let (number, first) = (page / AROUND, page / AROUND * AROUND);
        let youngest = this.youngest();
        if core::mem::replace(&mut this.around[number as usize], this.search) != this.search {
            let mut young = [0];
            let count = AROUND.min(guest.pages() - first);
            order.pause();
            guest.young(Look::Around, first, count, &mut young);
            each(&young, |bit| order.get().used(first + bit, youngest, youngest));
        }
    }

    /// Returns whether the page was used since the last walk but one.
    pub fn is_young(&self, page: u32) -> bool {
        self.of[page as usize] + 1 >= self.youngest()
    }

    /// Returns how long pages were idle, according to the walks so far.
    pub fn census(order: &mut Stretches<'_, Self>, is_here: impl Fn(u32) -> bool) -> Census {
        loop {
            let this = order.get();
            let (oldest, youngest, renumbered) = (this.oldest, this.youngest(), this.renumbered);
            let mut census = Census {
                generations: this.queues.iter().rev().map(|queue| (queue.began, 0)).collect(),
                walks: this.walks,
                woken: this.woken.to_vec(),
            };
            // If another thread gives up pages meanwhile, each page counts as it is when the loop
            // reads it.
            for page in 0..this.of.len() as u32 {
                let this = order.get();
                if this.renumbered == renumbered && is_here(page) {
                    let of = this.of[page as usize].clamp(oldest, youngest);
                    census.generations[(youngest - of) as usize].1 += 1;
                }
            }
            if order.get().renumbered == renumbered {
                return census;
            }
        }
    }
}

/// Calls `what` with each bit that is set.
fn each(bits: &[u64], mut what: impl FnMut(u32)) {
    for (index, &word) in bits.iter().enumerate() {
        let mut word = word;
        while word != 0 {
            what(index as u32 * 64 + word.trailing_zeros());
            word &= word - 1;
        }
    }
}

#[cfg(test)]
mod tests;
