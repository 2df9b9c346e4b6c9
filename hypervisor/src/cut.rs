//! Checks whether a copy of the guest's memory has the state of one moment, by the stamps that the
//! guest's program, in `tests/programs/src/jobs`, wrote there. Its `crew.rs` defines their order.

use core::fmt;

/// The first words of one of the program's pages.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StampedPage {
    /// The stamp: the thread plus 1 in the upper 16 bits, the number in the lower 48.
    pub stamp: u64,
    /// The last number of the thread's neighbour, which the thread read before it wrote the stamp.
    pub seen: u64,
}

impl StampedPage {
    /// Returns the number of the stamp.
    pub const fn number(&self) -> u64 {
        self.stamp & NUMBER
    }
}

/// Reason why a copy does not have the state of one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TornCopy {
    /// The page has a stamp that its thread does not write there.
    Foreign {
        /// The thread that owns the page.
        thread: u64,
        /// Index of the page among those of the thread.
        page: u64,
        /// The stamp in the page.
        stamp: u64,
    },
    /// The copy has a later number of the same thread, but not the number that the thread wrote to
    /// this page before it.
    Older {
        /// The thread that owns the page.
        thread: u64,
        /// Index of the page among those of the thread.
        page: u64,
        /// The number in the page.
        number: u64,
        /// The last number of the thread in the copy.
        last: u64,
    },
    /// The thread had read a number of its neighbour that the copy does not have.
    Unseen {
        /// The thread.
        thread: u64,
        /// The number that it had read.
        seen: u64,
        /// The last number of the neighbour in the copy.
        last: u64,
    },
}

impl fmt::Display for TornCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Foreign { thread, page, stamp } => {
                write!(f, "page {page} of thread {thread} begins with {stamp:#x}")
            }
            Self::Older { thread, page, number, last } => write!(
                f,
                "page {page} of thread {thread} has number {number}, beside its number {last}"
            ),
            Self::Unseen { thread, seen, last } => write!(
                f,
                "thread {thread} had seen number {seen} of its neighbour, whose last is {last}"
            ),
        }
    }
}

const NUMBER: u64 = (1 << 48) - 1;

/// Checks the pages of `threads` threads, `each` of them for each thread; `at` returns the first
/// words of a page by thread and page. Returns how many numbers all threads together had written.
///
/// # Errors
/// Returns [`TornCopy`] if the copy does not have the state of one moment.
pub fn check(
    threads: u64,
    each: u64,
    at: impl Fn(u64, u64) -> StampedPage,
) -> Result<u64, TornCopy> {
    let number = |thread, page| at(thread, page).number();
    let last_of = |thread| (0..each).map(|page| number(thread, page)).max().unwrap_or_default();
    let mut written = 0;
    for thread in 0..threads {
        let (last, neighbours) = (last_of(thread), last_of((thread + 1) % threads));
        for page in 0..each {
            let StampedPage { stamp, seen } = at(thread, page);
            let number = number(thread, page);
            if stamp >> 48 != thread + 1 || number % each != page {
                return Err(TornCopy::Foreign { thread, page, stamp });
            }
            if number + each <= last {
                return Err(TornCopy::Older { thread, page, number, last });
            }
            if seen > neighbours {
                return Err(TornCopy::Unseen { thread, seen, last: neighbours });
            }
        }
        written += last + 1;
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Returns the pages of two threads with four pages each, after they wrote `numbers` numbers.
    /// Each thread has read the last number of the other.
    fn written(numbers: [u64; 2]) -> Vec<StampedPage> {
        let of = |thread: usize| {
            (0..4).map(move |page| {
                let number = (0..numbers[thread]).rev().find(|number| number % 4 == page).unwrap();
                let stamp = (thread as u64 + 1) << 48 | number;
                StampedPage { stamp, seen: numbers[1 - thread] - 1 }
            })
        };
        of(0).chain(of(1)).collect()
    }

    fn checked(pages: &[StampedPage]) -> Result<u64, TornCopy> {
        check(2, 4, |thread, page| pages[(4 * thread + page) as usize])
    }

    #[test]
    fn memory_of_one_moment_is_whole_wherever_its_threads_were() {
        for one in 4..13 {
            for other in 4..13 {
                assert_eq!(checked(&written([one, other])), Ok(one + other));
            }
        }
    }

    #[test]
    fn a_page_of_an_earlier_moment_is_found() {
        // Page 2 does not have number 10 yet, which is a state of one moment unless number 11 is
        // there.
        let mut torn = written([11, 8]);
        torn[2].stamp -= 4;
        assert_eq!(checked(&torn), Err(TornCopy::Unseen { thread: 1, seen: 10, last: 9 }));
        torn[4..].iter_mut().for_each(|page| page.seen = 9);
        assert_eq!(checked(&torn), Ok(18));
        let mut torn = written([12, 8]);
        torn[2].stamp -= 4;
        let older = TornCopy::Older { thread: 0, page: 2, number: 6, last: 11 };
        assert_eq!(checked(&torn), Err(older));
    }

    #[test]
    fn a_thread_that_is_ahead_of_its_neighbour_is_found() {
        let mut torn = written([11, 8]);
        torn[1].seen = 8;
        assert_eq!(checked(&torn), Err(TornCopy::Unseen { thread: 0, seen: 8, last: 7 }));
    }

    #[test]
    fn a_page_that_is_lost_or_anothers_is_found() {
        for stamp in [0, 0xdead_dead_dead_dead, 2 << 48 | 8, 1 << 48 | 9] {
            let mut torn = written([11, 8]);
            torn[0].stamp = stamp;
            let foreign = TornCopy::Foreign { thread: 0, page: 0, stamp };
            assert_eq!(checked(&torn), Err(foreign));
        }
    }
}
