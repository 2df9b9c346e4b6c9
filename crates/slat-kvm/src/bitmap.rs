//! A bitmap with one bit per page, in the layout of `KVM_GET_DIRTY_LOG`.

use std::ops::Range;

/// A dirty log in user space: bit `i` of the words, counted from the lowest, is page `i` (api.rst,
/// `KVM_GET_DIRTY_LOG`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirtyBitmap {
    words: Vec<u64>,
    pages: u64,
}

/// The result of comparing a log with the pages that were written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Pages in the log.
    pub in_log: u64,
    /// Pages that were written.
    pub written: u64,
    /// Pages in the log that were not written. KVM may report such pages, but each costs a copy.
    pub excess: u64,
}

/// Pages that were written and are not in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingPages {
    /// The first missing page.
    pub first: u64,
    /// Number of missing pages.
    pub count: u64,
}

impl DirtyBitmap {
    /// Makes an empty log for `pages` pages.
    pub fn new(pages: u64) -> Self {
        Self { words: vec![0; pages.div_ceil(64) as usize], pages }
    }

    /// Returns how many pages the log covers.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the words. Bits past the last page are zero unless a caller sets them.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Returns the words, for the kernel to write.
    pub fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// Returns the range of the words of `pages` pages from `first` on. Returns `None` if the log
    /// does not hold that many, or if `first` is not the first page of a word.
    pub(crate) fn words_of(&self, first: u64, pages: u64) -> Option<Range<usize>> {
        let end = usize::try_from((first / 64).checked_add(pages.div_ceil(64))?).ok()?;
        let held = first.is_multiple_of(64) && end <= self.words.len();
        held.then_some((first / 64) as usize..end)
    }

    /// Sets all words to zero. This also faults in the memory that holds them.
    pub fn reset(&mut self) {
        self.words.fill(0);
    }

    /// Adds a page.
    ///
    /// # Panics
    /// If the log does not cover the page.
    pub fn insert(&mut self, page: u64) {
        assert!(page < self.pages, "page {page} of a slot of {}", self.pages);
        self.words[(page / 64) as usize] |= 1 << (page % 64);
    }

    /// Returns whether the page is in the log. It returns false for a page past the end.
    pub fn contains(&self, page: u64) -> bool {
        page < self.pages && self.words[(page / 64) as usize] >> (page % 64) & 1 == 1
    }

    /// Returns the number of pages in the log.
    pub fn count(&self) -> u64 {
        self.valid_words().map(|(_, word)| u64::from(word.count_ones())).sum()
    }

    /// Compares the log with the pages that were `written`.
    ///
    /// # Errors
    /// [`MissingPages`] if a written page is not in the log.
    ///
    /// # Panics
    /// If the two cover different numbers of pages.
    pub fn check(&self, written: &DirtyBitmap) -> Result<Tally, MissingPages> {
        assert_eq!(self.pages, written.pages);
        let mut tally = Tally::default();
        let mut missing: Option<MissingPages> = None;
        for ((index, log), (_, wrote)) in self.valid_words().zip(written.valid_words()) {
            tally.in_log += u64::from(log.count_ones());
            tally.written += u64::from(wrote.count_ones());
            tally.excess += u64::from((log & !wrote).count_ones());
            let lost = wrote & !log;
            if lost != 0 {
                let first = index * 64 + u64::from(lost.trailing_zeros());
                missing.get_or_insert(MissingPages { first, count: 0 }).count +=
                    u64::from(lost.count_ones());
            }
        }
        missing.map_or(Ok(tally), Err)
    }

    /// Returns the words with their numbers. Bits past the last page are masked, because the kernel
    /// copies whole words.
    fn valid_words(&self) -> impl Iterator<Item = (u64, u64)> {
        let tail = self.pages % 64;
        let last = (self.words.len() as u64).wrapping_sub(1);
        (0u64..).zip(&self.words).map(move |(index, &word)| {
            let cut = index == last && tail != 0;
            (index, if cut { word & ((1 << tail) - 1) } else { word })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(pages: u64, set: impl IntoIterator<Item = u64>) -> DirtyBitmap {
        let mut bitmap = DirtyBitmap::new(pages);
        set.into_iter().for_each(|page| bitmap.insert(page));
        bitmap
    }

    #[test]
    fn a_log_equal_to_the_written_pages_passes() {
        let written = log(200, (0..200).step_by(3));
        let tally = written.check(&written).unwrap();
        assert_eq!(tally, Tally { in_log: 67, written: 67, excess: 0 });
    }

    #[test]
    fn any_single_lost_bit_is_found() {
        let written = log(200, (0..200).step_by(3));
        for lost in (0..200).step_by(3) {
            let mut fetched = written.clone();
            fetched.words_mut()[(lost / 64) as usize] ^= 1 << (lost % 64);
            assert_eq!(fetched.check(&written), Err(MissingPages { first: lost, count: 1 }));
        }
    }

    #[test]
    fn pages_in_excess_are_counted_and_allowed() {
        let tally = log(130, 0..130).check(&log(130, 5..10)).unwrap();
        assert_eq!(tally, Tally { in_log: 130, written: 5, excess: 125 });
    }

    #[test]
    fn a_lost_page_is_found_among_pages_in_excess() {
        let missing = log(130, 0..129).check(&log(130, [3, 129])).unwrap_err();
        assert_eq!(missing, MissingPages { first: 129, count: 1 });
    }

    #[test]
    fn a_part_has_words_if_it_begins_one_and_the_log_holds_it() {
        let log = log(128, []);
        assert_eq!(log.words_of(64, 64), Some(1..2));
        assert_eq!(log.words_of(0, 65), Some(0..2));
        for (first, pages) in [(0, 129), (64, 65), (192, 0), (1, 64), (!63, u64::MAX)] {
            assert_eq!(log.words_of(first, pages), None);
        }
    }

    #[test]
    fn bits_past_the_end_do_not_count() {
        let mut fetched = log(65, []);
        fetched.words_mut().fill(u64::MAX);
        assert_eq!(fetched.count(), 65);
        assert!(!fetched.contains(65));
    }
}
