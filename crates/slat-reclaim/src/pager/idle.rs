//! How long pages were idle, for callers that decide how much memory a guest needs.

use crate::order::{Generations, Order, Stretches};
use crate::paged::PagedMemory;
use crate::pool::Ram;
use crate::swap::Swap;
use alloc::vec::Vec;

/// Numbers of pages by how long they were idle.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Idle {
    /// Generations, the youngest first.
    pub generations: Vec<Generation>,
    /// Number of walks so far.
    pub walks: u64,
    /// Number of walks before the first one that `woken` counts.
    before: u64,
    /// Pages that walks found used again, by how many walks had found them idle before. The last
    /// entry counts all longer idle times.
    pub woken: Vec<u64>,
}

/// Pages that were last used in one generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Generation {
    /// When the generation began, in ticks.
    pub began: u64,
    /// Pages of it in memory.
    pub pages: u64,
}

impl Idle {
    /// Returns the cost of taking all pages that were idle for `walks` walks or more: how many such
    /// pages were used again between two walks, on average. For each idle time, walks with too few
    /// walks before them to find it do not count.
    pub fn waking(&self, walks: usize) -> f64 {
        let woken = self.woken.iter().enumerate().skip(walks);
        let rate = |(idle, &pages): (usize, &u64)| pages as f64 / self.told(idle).max(1) as f64;
        woken.map(rate).sum()
    }

    /// Returns the number of walks that could find a page idle for `idle` walks.
    fn told(&self, idle: usize) -> u64 {
        let told = |walks: u64| walks.saturating_sub(idle as u64);
        told(self.walks) - told(self.before)
    }

    /// Returns the number of pages that were idle for `walks` walks or more.
    pub fn pages(&self, walks: usize) -> u64 {
        self.generations.iter().skip(walks).map(|generation| generation.pages).sum()
    }

    /// Returns how many pages could be taken from the guest at a cost of at most `refaults`
    /// refaults between two walks. It takes the shortest idle time whose cost ([`Idle::waking`]) is
    /// at most `refaults`, and counts the pages that were idle for that time or longer. An idle
    /// time of N walks is considered only if N walks could find it: after 10 walks, none above 5.
    pub fn takeable(&self, refaults: f64) -> u64 {
        let known = |walks: &usize| self.told(*walks) >= *walks as u64;
        let mut walks = (1..self.generations.len()).take_while(known);
        let walks = walks.find(|&walks| self.waking(walks) <= refaults);
        walks.map_or(0, |walks| self.pages(walks))
    }

    /// Returns the difference from `earlier`, with the current generations, to judge a guest by its
    /// recent behaviour.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let woken =
            self.woken.iter().zip(&earlier.woken).map(|(now, then)| now.saturating_sub(*then));
        Self {
            generations: self.generations.clone(),
            walks: self.walks,
            before: earlier.walks,
            woken: woken.collect(),
        }
    }
}

impl<M: Ram, S: Swap> PagedMemory<'_, M, S> {
    /// Returns how long pages were idle, as of the last walk, and gives up no page. `None` if the
    /// policy has no generations. Waits only for threads that hold the lock on the order, which
    /// they hold for short stretches.
    pub fn idle(&self) -> Option<Idle> {
        let Order::Generations(generations) = &self.order else { return None };
        let is_here = |page: u32| self.words[page as usize].may_be_here();
        let census = Generations::census(&mut Stretches::new(generations), is_here);
        let generation = |(began, pages)| Generation { began, pages };
        Some(Idle {
            generations: census.generations.into_iter().map(generation).collect(),
            walks: census.walks,
            before: 0,
            woken: census.woken,
        })
    }
}
