//! Accounts of the private pages that the guest has. A machine that protects private memory keeps
//! them in SNP's RMP, TDX's secure EPT or CCA's granules. Such a machine refuses to give a page
//! twice, or to take a page that was not given; here such errors are counted.

use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering};

/// The accounts: a bit for each page, which is set if the guest has the page, and counts.
#[derive(Debug)]
pub struct Granules<B> {
    given: B,
    counts: [AtomicU64; 3],
}

/// Counts of pages.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct LocalFlush {
    /// Pages that were given.
    pub given: u64,
    /// Pages that were taken.
    pub taken: u64,
    /// Pages that were given although the guest had them, that were taken although it did not have
    /// them, or that do not exist.
    pub wrong: u64,
}

const GIVEN: usize = 0;
const TAKEN: usize = 1;
const WRONG: usize = 2;

impl<B: Deref<Target = [AtomicU64]>> Granules<B> {
    /// Creates accounts of as many pages as these words have bits, all of them clear: the guest has
    /// no page.
    pub fn new(words: B) -> Self {
        Self { given: words, counts: [const { AtomicU64::new(0) }; 3] }
    }

    /// Records that the guest gets these pages.
    pub fn give(&self, first: u64, pages: u64) {
        self.each(first, pages, GIVEN, |word, bit| word.fetch_or(bit, Ordering::SeqCst) & bit == 0);
    }

    /// Records that these pages are taken from the guest.
    pub fn take(&self, first: u64, pages: u64) {
        self.each(first, pages, TAKEN, |word, bit| {
            word.fetch_and(!bit, Ordering::SeqCst) & bit != 0
        });
    }

    /// Counts an operation on something that is not a page of this memory.
    pub fn is_wrong(&self) {
        self.counts[WRONG].fetch_add(1, Ordering::Relaxed);
    }

    fn each(&self, first: u64, pages: u64, count: usize, right: impl Fn(&AtomicU64, u64) -> bool) {
        for page in first..first.saturating_add(pages) {
            let word = self.given.get((page / 64) as usize);
            let right = word.is_some_and(|word| right(word, 1 << (page % 64)));
            self.counts[if right { count } else { WRONG }].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how many pages the guest has.
    pub fn held(&self) -> u64 {
        self.given.iter().map(|word| u64::from(word.load(Ordering::SeqCst).count_ones())).sum()
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> LocalFlush {
        let [given, taken, wrong] = self.counts.each_ref().map(|all| all.load(Ordering::Relaxed));
        LocalFlush { given, taken, wrong }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;

    fn pages() -> Granules<Box<[AtomicU64]>> {
        Granules::new((0..2).map(|_| AtomicU64::new(0)).collect())
    }

    #[test]
    fn what_is_given_is_held_until_it_is_taken() {
        let pages = pages();
        pages.give(60, 8);
        assert_eq!(pages.held(), 8);
        pages.take(62, 4);
        pages.give(62, 1);
        assert_eq!(pages.held(), 5);
        assert_eq!(pages.counts(), LocalFlush { given: 9, taken: 4, wrong: 0 });
    }

    #[test]
    fn a_page_given_twice_taken_in_vain_or_missing_is_wrong() {
        let pages = pages();
        pages.give(0, 2);
        pages.give(1, 2);
        assert_eq!(pages.counts(), LocalFlush { given: 3, taken: 0, wrong: 1 });
        pages.take(2, 2);
        assert_eq!(pages.counts(), LocalFlush { given: 3, taken: 1, wrong: 2 });
        pages.give(127, 2);
        assert_eq!(pages.counts(), LocalFlush { given: 4, taken: 1, wrong: 3 });
        pages.is_wrong();
        assert_eq!(pages.counts().wrong, 4);
    }
}
