//! Generations: pages by the last ageing walk that found them used.
//!
//! A walk over all memory begins a generation, into which goes what it finds used. A page is in the queue of
//! the generation in which it was put there, and goes on to its own when its turn comes: the walk writes
//! a number a page, and moves nothing. The oldest generation is given up first. What is about to be given
//! up is asked about once more, if wanted with its neighbours, and goes to the youngest if it was used.

use super::{Accessed, Look, Looks, Victims};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

/// Generations that are not given up: pages need the time between two walks to be used again.
const KEPT: usize = 4;
/// Pages that are looked at together.
const AROUND: u32 = 64;
/// Idle walks that histograms tell apart.
pub(crate) const IDLE: usize = 32;

#[derive(Debug)]
pub(crate) struct Generations {
    looks: Looks,
    /// Of each page, the generation that it belongs to.
    of: Box<[u32]>,
    /// Of each page, the generation in whose queue it is.
    queued: Box<[u32]>,
    /// Of each 64 pages, when they were looked at around a page that was about to be given up.
    around: Box<[u32]>,
    /// Number of the search for victims; answers about neighbours are good for one.
    search: u32,
    /// The oldest first.
    queues: VecDeque<Queue>,
    /// Number of the oldest.
    oldest: u32,
    /// Pages that were used again after so many walks without: the last entry is for all beyond.
    pub(crate) woken: [u64; IDLE],
    pub(crate) walks: u64,
    young: Vec<u64>,
}

#[derive(Debug, Default)]
struct Queue {
    pages: VecDeque<u32>,
    /// When the generation began.
    began: u64,
}

/// In no queue.
const NONE: u32 = u32::MAX;
/// Before the oldest generation has this number, all are numbered anew.
const LAST: u32 = if cfg!(test) { 1 << 6 } else { 1 << 31 };

impl Generations {
    pub fn new(pages: u32, looks: Looks, now: u64) -> Self {
        let fill = |value: u32, len: u32| vec![value; len as usize].into_boxed_slice();
        let queue = || Queue { pages: VecDeque::new(), began: now };
        Self {
            looks,
            of: fill(0, pages),
            queued: fill(NONE, pages),
            around: fill(0, pages.div_ceil(AROUND)),
            search: 0,
            queues: (0..=KEPT).map(|_| queue()).collect(),
            oldest: 0,
            woken: [0; IDLE],
            walks: 0,
            young: Vec::new(),
        }
    }

    fn youngest(&self) -> u32 {
        self.oldest + self.queues.len() as u32 - 1
    }

    fn enqueue(&mut self, page: u32, generation: u32) {
        let generation = generation.clamp(self.oldest, self.youngest());
        self.of[page as usize] = generation;
        self.queued[page as usize] = generation;
        self.queues[(generation - self.oldest) as usize].pages.push_back(page);
    }

    pub fn arrive(&mut self, page: u32, distance: Option<u32>, here: u32) {
        // What came back so soon that as much memory again would have kept it is in use.
        let in_use = distance.is_none_or(|distance| distance <= here);
        self.enqueue(page, self.youngest() - u32::from(!in_use));
    }

    pub fn put_back(&mut self, page: u32, used: bool) {
        self.enqueue(page, if used { self.youngest() } else { self.oldest });
    }

    /// Walks over all memory: what was used is in a new generation.
    pub fn walk(&mut self, guest: &mut impl Accessed) {
        self.settle();
        let idle = self.youngest();
        let new = idle + 1;
        self.queues.push_back(Queue { pages: VecDeque::new(), began: guest.now() });
        self.walks += 1;
        let (pages, window) = (guest.pages(), self.looks.window.max(1));
        let mut young = core::mem::take(&mut self.young);
        let mut first = 0;
        while first < pages {
            let count = window.min(pages - first);
            if (first..first + count).any(|page| guest.is_here(page)) {
                young.clear();
                young.resize((count as usize).div_ceil(64), 0);
                guest.young(Look::Walk, first, count, &mut young);
                each(&young, |bit| self.used(first + bit, idle, new));
            }
            first += count;
        }
        self.young = young;
    }

    /// Walks that nothing is given up between leave no more generations than are told apart; and numbers
    /// begin anew before they end.
    fn settle(&mut self) {
        if self.oldest >= LAST {
            let passed = core::mem::take(&mut self.oldest);
            for of in &mut self.of {
                *of = of.saturating_sub(passed);
            }
            // What is not queued in a generation that there is, is not queued.
            for queued in &mut self.queued {
                *queued = queued.checked_sub(passed).filter(|_| *queued != NONE).unwrap_or(NONE);
            }
        }
        while self.queues.len() > IDLE {
            let Some(Queue { pages, began }) = self.queues.pop_front() else { return };
            self.oldest += 1;
            let Some(next) = self.queues.front_mut() else { return };
            next.began = began;
            for page in pages.into_iter().rev() {
                if self.queued[page as usize] == self.oldest - 1 {
                    self.queued[page as usize] = self.oldest;
                    self.of[page as usize] = self.of[page as usize].max(self.oldest);
                    next.pages.push_front(page);
                }
            }
        }
    }

    /// `page` was used, after the walk that began `last`: it is of `generation` from now on.
    fn used(&mut self, page: u32, last: u32, generation: u32) {
        let of = &mut self.of[page as usize];
        let idle = last.saturating_sub(*of) as usize;
        self.woken[idle.min(IDLE - 1)] += 1;
        *of = generation;
    }

    pub fn victims(&mut self, want: usize, guest: &mut impl Accessed) -> Victims {
        let mut found = Victims::default();
        self.search = self.search.wrapping_add(1);
        // Each page is looked at twice at most: what all use all the time is given up all the same.
        let mut patience = 2 * u64::from(guest.pages()) + want as u64;
        while found.pages.len() < want {
            let Some(queue) = self.queues.front_mut() else { break };
            let Some(page) = queue.pages.pop_front() else {
                if self.queues.len() > KEPT + 1 {
                    self.queues.pop_front();
                    self.oldest += 1;
                } else if self.queues.iter().all(|queue| queue.pages.is_empty()) {
                    break;
                } else if found.walks < 2 {
                    found.walks += 1;
                    self.walk(guest);
                } else if found.pages.is_empty() {
                    self.take_regardless(want, guest, &mut found);
                    break;
                } else {
                    break;
                }
                continue;
            };
            if self.queued[page as usize] != self.oldest {
                // It was given up, and came back: it is in another queue.
                continue;
            }
            self.queued[page as usize] = NONE;
            if !guest.is_here(page) {
                continue;
            }
            if self.of[page as usize] > self.oldest {
                self.enqueue(page, self.of[page as usize]);
                continue;
            }
            if guest.is_new(page) {
                found.held += 1;
                self.enqueue(page, self.youngest());
                if patience == 0 {
                    break;
                }
                patience -= 1;
                continue;
            }
            if patience > 0 && self.was_used(page, guest) {
                found.kept += 1;
                patience -= 1;
                self.put_back(page, true);
                continue;
            }
            found.pages.push(page);
        }
        found
    }

    /// All pages are in use: gives up those that were used longest ago all the same.
    fn take_regardless(&mut self, want: usize, guest: &impl Accessed, found: &mut Victims) {
        for number in self.oldest..=self.youngest() {
            let place = (number - self.oldest) as usize;
            for _ in 0..self.queues[place].pages.len() {
                if found.pages.len() == want {
                    return;
                }
                let Some(page) = self.queues[place].pages.pop_front() else { break };
                if self.queued[page as usize] != number || !guest.is_here(page) {
                    continue;
                }
                if self.of[page as usize] > number {
                    self.enqueue(page, self.of[page as usize]);
                } else if guest.is_new(page) {
                    found.held += 1;
                    self.queues[place].pages.push_back(page);
                } else {
                    self.queued[page as usize] = NONE;
                    found.pages.push(page);
                }
            }
        }
    }

    fn was_used(&mut self, page: u32, guest: &mut impl Accessed) -> bool {
        if !self.looks.around {
            return guest.was_used(page);
        }
        let (number, first) = (page / AROUND, page / AROUND * AROUND);
        let youngest = self.youngest();
        if core::mem::replace(&mut self.around[number as usize], self.search) != self.search {
            let mut young = [0];
            let count = AROUND.min(guest.pages() - first);
            guest.young(Look::Around, first, count, &mut young);
            each(&young, |bit| self.used(first + bit, youngest, youngest));
        }
        self.of[page as usize] == youngest
    }

    /// Whether the page was used since the last walk but one.
    pub fn is_young(&self, page: u32) -> bool {
        self.of[page as usize] + 1 >= self.youngest()
    }

    /// Of generations, the youngest first: when each began, and how many pages it has.
    pub fn census(&self, is_here: impl Fn(u32) -> bool) -> Vec<(u64, u64)> {
        let mut pages = vec![0; self.queues.len()];
        for page in (0..self.of.len() as u32).filter(|&page| is_here(page)) {
            let of = self.of[page as usize].clamp(self.oldest, self.youngest());
            pages[(self.youngest() - of) as usize] += 1;
        }
        self.queues.iter().rev().map(|queue| queue.began).zip(pages).collect()
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
mod tests {
    use super::*;
    use crate::order::tests::Memory;

    fn generations(pages: u32, window: u32, around: bool) -> (Generations, Memory) {
        let mut order = Generations::new(pages, Looks { window, around }, 0);
        let memory = Memory::all_here(pages);
        (0..pages).for_each(|page| order.arrive(page, None, pages));
        (order, memory)
    }

    #[test]
    fn what_is_used_is_kept_and_what_is_not_is_given_up() {
        for (window, around) in [(1, false), (64, true), (1 << 20, true)] {
            let (mut order, mut memory) = generations(1000, window, around);
            for _ in 0..4 {
                memory.uses(0..500);
                order.walk(&mut memory);
            }
            let found = order.victims(500, &mut memory);
            assert_eq!(found.pages.len(), 500);
            assert!(found.pages.iter().all(|page| *page >= 500), "{window} {around}");
        }
    }

    #[test]
    fn a_page_that_was_used_since_the_walk_is_kept_when_its_turn_comes() {
        for around in [false, true] {
            let (mut order, mut memory) = generations(256, 64, around);
            for _ in 0..4 {
                order.walk(&mut memory);
            }
            memory.uses(10..20);
            let found = order.victims(246, &mut memory);
            assert_eq!(found.pages.len(), 246, "around: {around}");
            assert!(found.pages.iter().all(|page| !(10..20).contains(page)));
        }
    }

    #[test]
    fn neighbours_are_asked_about_in_one_call() {
        let (mut order, mut memory) = generations(256, 256, true);
        for _ in 0..4 {
            order.walk(&mut memory);
        }
        memory.calls = 0;
        assert_eq!(order.victims(256, &mut memory).pages.len(), 256);
        assert_eq!(memory.calls, 4);
    }

    #[test]
    fn something_is_given_up_even_if_all_pages_are_used_all_the_time() {
        let (mut order, mut memory) = generations(128, 64, true);
        memory.always_used = true;
        assert_eq!(order.victims(32, &mut memory).pages.len(), 32);
    }

    #[test]
    fn nothing_is_given_up_that_came_just_now() {
        let (mut order, mut memory) = generations(128, 64, true);
        memory.new = true;
        let found = order.victims(32, &mut memory);
        assert!(found.pages.is_empty() && found.held > 0);
    }

    #[test]
    fn a_page_that_left_and_came_back_is_given_up_once() {
        let (mut order, mut memory) = generations(64, 64, false);
        memory.here[5] = false;
        order.arrive(5, Some(3), 64);
        memory.here[5] = true;
        let mut all = order.victims(100, &mut memory).pages;
        all.sort_unstable();
        assert_eq!(all, (0..64).collect::<Vec<_>>());
    }

    #[test]
    fn walks_without_end_keep_a_bounded_number_of_generations() {
        let (mut order, mut memory) = generations(100, 64, false);
        for _ in 0..200 {
            memory.uses(0..30);
            order.walk(&mut memory);
        }
        assert!(order.queues.len() <= IDLE + 1);
        assert!(order.youngest() <= LAST + IDLE as u32 + 1, "numbers begin anew");
        assert_eq!(order.census(|_| true).iter().map(|row| row.1).sum::<u64>(), 100);
        let found = order.victims(70, &mut memory).pages;
        assert!(found.len() == 70 && found.iter().all(|page| *page >= 30));
    }

    #[test]
    fn a_page_was_idle_as_long_whoever_finds_it_used() {
        for by_walk in [false, true] {
            let (mut order, mut memory) = generations(64, 64, true);
            (0..6).for_each(|_| order.walk(&mut memory));
            memory.uses(5..6);
            match by_walk {
                true => order.walk(&mut memory),
                false => assert_eq!(order.victims(1, &mut memory).pages.len(), 1),
            }
            let woken = order.woken.iter().enumerate().filter(|(_, pages)| **pages != 0);
            assert_eq!(woken.collect::<Vec<_>>(), [(6, &1)], "by a walk: {by_walk}");
        }
    }

    #[test]
    fn of_pages_that_are_all_in_use_those_used_last_stay() {
        let (mut order, mut memory) = generations(128, 64, false);
        // Since they came, the first half were used again.
        memory.uses(0..64);
        order.walk(&mut memory);
        let mut found = Victims::default();
        order.take_regardless(64, &memory, &mut found);
        assert!(found.pages.len() == 64 && found.pages.iter().all(|page| *page >= 64));
        order.take_regardless(100, &memory, &mut found);
        assert_eq!(found.pages.len(), 100);
    }

    #[test]
    fn the_census_tells_how_long_pages_were_idle() {
        let (mut order, mut memory) = generations(100, 64, false);
        for now in 1..=3 {
            memory.time = now * 10;
            memory.uses(0..30);
            order.walk(&mut memory);
        }
        let census = order.census(|_| true);
        assert_eq!(census[0], (30, 30));
        assert_eq!(census.iter().map(|row| row.1).sum::<u64>(), 100);
        assert_eq!(census[3].1, 70, "idle since the first: {census:?}");
        assert_eq!(order.woken[0], 90);
    }
}
