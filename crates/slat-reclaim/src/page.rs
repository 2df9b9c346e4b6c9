//! The place of each page of a guest's memory: one word per page.
//!
//! # Protocol
//! A thread that moves a page claims its word, by a compare-and-swap to *moving*, and releases it
//! by storing where the page is then. Faults that meet a claimed word are answered "not yet".
//!
//! *Invariants*:
//! - A frame belongs to one word that says *here*, to one claimer, or to the pool.
//! - A word says *here with a copy* only while no leaf lets the guest write the page: what is in
//!   the swap slot is what is in the frame. A fault that maps the page for writing drops the copy
//!   first, by an exchange that fails if the word is claimed. A fault that gives a present leaf the
//!   right to write claims the word until the leaf has the right: otherwise the page could leave
//!   and come back with a copy before that.
//! - A thread that claims a page to send it away unmaps it, by `Worker::evict`, before it reads the
//!   content. A fault reserves its page-table entry, then loads the word; the thread that sends the
//!   page away changes the word, then looks for reserved entries. Each executes a fence in between:
//!   the fault when it looks for invalidations, `Worker::evict` when it begins.

use slat::sync::{AtomicU64, Ordering};

/// Frames and swap slots are numbered below this: 1 TiB of 4 KiB pages.
pub(crate) const NUMBERS: u64 = 1 << 28;
const MASK: u64 = NUMBERS - 1;
const FIRST: u32 = 2;
const SECOND: u32 = 30;

/// Where a page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PageState {
    /// In no frame and not in swap yet: it reads as zero.
    Empty,
    /// In memory; with a `copy`, also in that slot of swap, as the page was not written since it
    /// came back.
    Resident { frame: u32, copy: Option<u32> },
    /// Claimed by a thread that moves it.
    Moving,
    /// In swap; `since` is how many pages the guest had given up before this one (modulo 2^28).
    Swapped { slot: u32, since: u32 },
}

impl PageState {
    fn encode(self) -> u64 {
        let number = |slot: u32| u64::from(slot) + 1;
        match self {
            Self::Empty => 0,
            Self::Resident { frame, copy } => {
                1 | u64::from(frame) << FIRST | copy.map_or(0, number) << SECOND
            }
            Self::Moving => 2,
            Self::Swapped { slot, since } => {
                3 | (u64::from(since) & MASK) << FIRST | number(slot) << SECOND
            }
        }
    }

    fn decode(word: u64) -> Self {
        let first = (word >> FIRST & MASK) as u32;
        let slot = (word >> SECOND).checked_sub(1).map(|slot| slot as u32);
        match (word & 3, slot) {
            (1, copy) => Self::Resident { frame: first, copy },
            (2, _) => Self::Moving,
            (3, Some(slot)) => Self::Swapped { slot, since: first },
            _ => Self::Empty,
        }
    }
}

/// The word of a page.
#[derive(Debug)]
pub(crate) struct Word(AtomicU64);

impl Default for Word {
    fn default() -> Self {
        Self(AtomicU64::new(PageState::Empty.encode()))
    }
}

impl Word {
    pub fn load(&self) -> PageState {
        PageState::decode(self.0.load(Ordering::Acquire))
    }

    /// Returns whether the page is in memory, or is claimed by a thread that may leave it there.
    pub fn may_be_here(&self) -> bool {
        matches!(self.load(), PageState::Resident { .. } | PageState::Moving)
    }

    /// Replaces `old` with `new`; returns false, and changes nothing, if the word is not `old`.
    pub fn exchange(&self, old: PageState, new: PageState) -> bool {
        let (old, new) = (old.encode(), new.encode());
        self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Claims the page if `wanted` accepts its place; `Err` has the place otherwise.
    pub fn claim(&self, wanted: impl Fn(&PageState) -> bool) -> Result<PageState, PageState> {
        loop {
            let place = self.load();
            if place == PageState::Moving || !wanted(&place) {
                return Err(place);
            }
            if self.exchange(place, PageState::Moving) {
                return Ok(place);
            }
        }
    }

    /// Ends the caller's claim: the page is at `place`.
    pub fn release(&self, place: PageState) {
        assert_eq!(self.load(), PageState::Moving, "a claim was not respected");
        self.0.store(place.encode(), Ordering::Release);
    }
}

/// Claims all of these pages if none of them has been touched; otherwise claims none.
pub(crate) fn claim_untouched(words: &[Word]) -> bool {
    let claim = |word: &&Word| word.claim(|place| *place == PageState::Empty).is_ok();
    let claimed = words.iter().take_while(claim).count();
    if claimed == words.len() {
        return true;
    }
    words[..claimed].iter().for_each(|word| word.release(PageState::Empty));
    false
}

/// A claim that ends when this is dropped, also by a panic.
pub(crate) struct Claim<'w> {
    pub word: &'w Word,
    /// Where the page is when the claim ends.
    pub place: PageState,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.word.release(self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_says_what_was_said() {
        let most = (NUMBERS - 2) as u32;
        for place in [
            PageState::Empty,
            PageState::Moving,
            PageState::Resident { frame: 0, copy: None },
            PageState::Resident { frame: most, copy: Some(0) },
            PageState::Resident { frame: 0, copy: Some(most) },
            PageState::Swapped { slot: 0, since: most },
            PageState::Swapped { slot: most, since: 0 },
        ] {
            assert_eq!(PageState::decode(place.encode()), place);
        }
    }

    #[test]
    fn a_page_may_be_here_unless_it_is_known_to_be_elsewhere() {
        for (place, may_be) in [
            (PageState::Empty, false),
            (PageState::Resident { frame: 1, copy: None }, true),
            (PageState::Moving, true),
            (PageState::Swapped { slot: 1, since: 0 }, false),
        ] {
            assert_eq!(Word(AtomicU64::new(place.encode())).may_be_here(), may_be, "{place:?}");
        }
    }

    #[test]
    fn a_page_that_is_claimed_can_be_claimed_by_no_other_thread() {
        let word = Word::default();
        assert_eq!(word.claim(|_| true), Ok(PageState::Empty));
        assert_eq!(word.claim(|_| true), Err(PageState::Moving));
        let here = PageState::Resident { frame: 3, copy: Some(9) };
        assert!(!word.exchange(here, PageState::Empty));
        word.release(here);
        assert_eq!(word.claim(|place| *place == PageState::Empty), Err(here));
        assert!(word.exchange(here, PageState::Resident { frame: 3, copy: None }));
    }

    #[test]
    fn pages_of_a_block_are_claimed_all_or_none() {
        for taken in 0..8 {
            let words: [Word; 8] = core::array::from_fn(|_| Word::default());
            assert_eq!(words[taken].claim(|_| true), Ok(PageState::Empty));
            assert!(!claim_untouched(&words));
            let moving = words.iter().filter(|word| word.load() == PageState::Moving).count();
            assert_eq!(moving, 1, "page {taken} was another's, and is alone claimed");
            words[taken].release(PageState::Empty);
            assert!(claim_untouched(&words));
            assert!(words.iter().all(|word| word.load() == PageState::Moving));
        }
    }

    #[test]
    fn a_dropped_claim_leaves_the_page_in_its_stated_place() {
        let word = Word::default();
        assert_eq!(word.claim(|_| true), Ok(PageState::Empty));
        let there = PageState::Swapped { slot: 5, since: 2 };
        drop(Claim { word: &word, place: there });
        assert_eq!(word.load(), there);
    }

    #[test]
    #[should_panic(expected = "a claim was not respected")]
    fn a_word_that_no_thread_claimed_cannot_be_released() {
        Word::default().release(PageState::Empty);
    }
}
