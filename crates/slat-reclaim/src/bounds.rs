//! Bounds of the refaults for a sequence of uses that is known: what an order of pages is held
//! against.

use std::collections::{BinaryHeap, VecDeque};
use std::vec;
use std::vec::Vec;

const EXPONENT: f64 = 0.99;

/// Pages by Zipf's law; the frequency of a page does not depend on its place.
#[derive(Debug)]
pub struct Zipf {
    /// Cumulative shares of the pages, up to each one.
    sums: Vec<f64>,
    pages: Vec<u32>,
}

impl Zipf {
    /// Makes the first of `pages` the most frequent.
    pub fn new(pages: Vec<u32>) -> Self {
        let mut sum = 0.0;
        let add = |rank: u32| {
            sum += f64::from(rank).powf(-EXPONENT);
            sum
        };
        let sums = (1..=pages.len() as u32).map(add).collect();
        Self { sums, pages }
    }

    /// Returns the page for a random number from 0 to 1.
    pub fn page(&self, random: f64) -> u32 {
        let at = random * self.sums.last().unwrap_or(&0.0);
        let rank = self.sums.partition_point(|&sum| sum <= at);
        self.pages[rank.min(self.pages.len() - 1)]
    }
}

/// Returns the refaults of Belady's policy, which always gives up the page whose next use is last:
/// no policy has fewer. The guest first uses all `pages` in order.
pub fn fewest_refaults(pages: u32, memory: u32, uses: impl Iterator<Item = u32>) -> u64 {
    let all: Vec<u32> = (0..pages).chain(uses).collect();
    let mut next = vec![u32::MAX; all.len()];
    let mut later = vec![u32::MAX; pages as usize];
    for (at, &page) in all.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut later[page as usize], at as u32);
    }
    // For pages in memory, the time of their next use. Entries that are out of date stay in the
    // heap.
    let mut farthest: BinaryHeap<(u32, u32)> = BinaryHeap::new();
    let mut due: Vec<Option<u32>> = vec![None; pages as usize];
    let (mut here, mut misses) = (0, 0);
    for (at, &page) in all.iter().enumerate() {
        if due[page as usize].is_none() {
            misses += 1;
            if here == memory {
                while let Some((when, victim)) = farthest.pop() {
                    if due[victim as usize] == Some(when) {
                        due[victim as usize] = None;
                        break;
                    }
                }
            } else {
                here += 1;
            }
        }
        due[page as usize] = Some(next[at]);
        farthest.push((next[at], page));
    }
    misses - u64::from(pages)
}

/// Returns the refaults of a policy that always gives up the page used longest ago.
pub fn refaults_of_lru(pages: u32, memory: u32, uses: impl Iterator<Item = u32>) -> u64 {
    // Uses in their order. Only the last one of each page counts.
    let mut queue: VecDeque<(u32, u64)> = VecDeque::new();
    let mut last: Vec<Option<u64>> = vec![None; pages as usize];
    let (mut here, mut misses) = (0, 0);
    for (now, page) in (0..).zip((0..pages).chain(uses)) {
        if last[page as usize].replace(now).is_none() {
            misses += 1;
            here += 1;
            while here > memory {
                let Some((victim, when)) = queue.pop_front() else { break };
                if last[victim as usize] == Some(when) {
                    last[victim as usize] = None;
                    here -= 1;
                }
            }
        }
        queue.push_back((page, now));
    }
    misses - u64::from(pages)
}

/// Returns the fewest refaults of a policy that knows how often each page is used, and not when. It
/// keeps the pages that are used most, and has one place for all others. For independent uses no
/// policy without foresight does better (Aho, Denning, Ullman, "Principles of Optimal Page
/// Replacement", 1971).
pub fn refaults_by_frequency(pages: u32, memory: u32, uses: impl Iterator<Item = u32>) -> u64 {
    let mut counts = vec![0u64; pages as usize];
    uses.for_each(|page| counts[page as usize] += 1);
    counts.sort_unstable_by(|a, b| b.cmp(a));
    counts.iter().skip(memory as usize - 1).sum()
}

/// Returns a lower bound of the refaults of policies without foresight, for independent uses, on
/// average over all ways to assign the frequencies to the pages. A policy can only know how often
/// each page was used until now: of two pages, the one with more uses so far is more likely the
/// more frequent one. So at each use the bound has those pages in memory that were used most until
/// then, and of pages that were used equally often as large a part as fits. It does not count how
/// pages came there.
pub fn refaults_without_foresight(pages: u32, memory: u32, uses: impl Iterator<Item = u32>) -> f64 {
    let mut counts = vec![0; pages as usize];
    // For each count, the number of pages that have it. All pages with a count above `last` are in
    // memory; `above` is their number.
    let mut having = vec![u64::from(pages)];
    let (mut last, mut above, mut misses) = (0, 0, 0.0);
    for page in uses {
        let count: &mut usize = &mut counts[page as usize];
        if *count < last {
            misses += 1.0;
        } else if *count == last {
            let room = u64::from(memory) - above;
            misses += 1.0 - (room as f64 / having[last] as f64).min(1.0);
            above += 1;
        }
        having[*count] -= 1;
        *count += 1;
        if *count == having.len() {
            having.push(0);
        }
        having[*count] += 1;
        while above > u64::from(memory) {
            last += 1;
            above -= having[last];
        }
    }
    misses
}
