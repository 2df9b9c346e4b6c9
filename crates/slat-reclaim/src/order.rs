//! Order in which pages are given up: by generations, or by two lists.
//!
//! Both work on numbers of pages, and ask for accessed bits through [`AccessedBits`]; neither knows
//! of tables, frames or swap.
//!
//! Only the holder of the turn ([`PagedMemory::turn`](crate::paged::PagedMemory)) changes an order.
//! The lock on it is for threads that read it meanwhile. It is held for short stretches, and never
//! during a test of accessed bits or an access to a disk.

#[cfg(test)]
mod contest;
mod generations;
mod heat;
mod lists;
mod queue;

pub(crate) use generations::Generations;
pub(crate) use lists::Lists;

use crate::arrivals::Arrivals;
use crate::work;
use alloc::boxed::Box;
use alloc::vec::Vec;
use spin::{Mutex, MutexGuard};

/// Reason for a test of accessed bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Look {
    /// An ageing walk over all memory.
    Walk,
    /// A test of the page that is about to be given up.
    Check,
    /// A test of that page and the pages around it.
    Around,
}

/// The guest as the order of its pages sees it.
pub(crate) trait AccessedBits {
    /// Returns the number of pages of the guest.
    fn pages(&self) -> u32;
    /// Returns whether the page is in memory, or is being moved. A page that is neither leaves its
    /// list until it arrives.
    fn is_here(&self, page: u32) -> bool;
    /// Returns until when the page must stay, as it came in too recently; `None` if it may be given
    /// up.
    fn new_until(&self, page: u32) -> Option<u64>;
    /// Tests and clears the accessed bits of `count` pages from `first` on: bit 0 of `young` is the
    /// first. `young` is all zero, and long enough.
    fn young(&mut self, look: Look, first: u32, count: u32, young: &mut [u64]);
    /// Tests and clears the accessed bit of one page.
    fn was_used(&mut self, page: u32) -> bool {
        let mut young = [0];
        self.young(Look::Check, page, 1, &mut young);
        young[0] & 1 != 0
    }
    /// Returns how many pages came in and were given up so far.
    fn progress(&self) -> u64;
    /// Returns the time, in ticks.
    fn now(&self) -> u64;
}

/// Pages to be given up, and counts of the search for them.
#[derive(Debug, Default)]
pub(crate) struct Victims {
    pub pages: Vec<u32>,
    /// Pages that were next, but had been used.
    pub kept: u64,
    /// Walks over all memory.
    pub walks: u64,
    /// Pages that were next, but had come in too recently.
    pub held: u64,
    /// When the first of the pages in `held` may be given up.
    pub until: Option<u64>,
    /// The search ended early, after [`LOOKS`] pages that were too new.
    pub cut: bool,
}

/// Number of pages, beyond those that are wanted, that a search passes over because they are in use
/// or too new. This bounds a search that finds no page, whatever the guest's size. Other steps of a
/// search are paid for: by the arrival of a page, or by a walk.
pub(crate) const LOOKS: u64 = 8192;

impl Victims {
    pub fn hold(&mut self, until: u64) {
        self.held += 1;
        self.until = Some(self.until.map_or(until, |first| first.min(until)));
        work::step();
    }
}

/// How accessed bits are tested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ScanOptions {
    /// Pages of one call of the walk; with 1, one call for each page in memory.
    pub window: u32,
    /// Tests a page that is about to be given up together with the 64 pages around it.
    pub around: bool,
    /// Orders pages by how often they were used, while that predicts their next use better than the
    /// time of the last one.
    pub frequency: bool,
}

/// Steps after which the holder of the lock releases it, so that others can take it.
const STRETCH: u32 = 1024;

/// The lock on an order, held for one stretch after the other.
pub(crate) struct Stretches<'o, T> {
    order: &'o Mutex<T>,
    held: Option<MutexGuard<'o, T>>,
    left: u32,
}

impl<'o, T> Stretches<'o, T> {
    pub const fn new(order: &'o Mutex<T>) -> Self {
        Self { order, held: None, left: STRETCH }
    }

    /// The order, for the next step.
    pub fn get(&mut self) -> &mut T {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => self.pause(),
        }
        let order = self.order;
        self.held.get_or_insert_with(|| order.lock())
    }

    /// Releases the lock until the next step.
    pub fn pause(&mut self) {
        self.held = None;
        self.left = STRETCH;
    }
}

/// One of the two orders.
#[derive(Debug)]
pub(crate) enum Order {
    Generations(Box<Mutex<Generations>>),
    Lists(Mutex<Lists>),
}

impl Order {
    pub fn generations(order: Generations) -> Self {
        Self::Generations(Box::new(Mutex::new(order)))
    }

    pub const fn lists(order: Lists) -> Self {
        Self::Lists(Mutex::new(order))
    }

    /// Adds all pages that arrived to the order, each with how many pages were given up since it
    /// was in memory (`None` for a first touch), and calls `noted` with each. `here` is the number
    /// of pages in memory.
    pub fn note(&self, arrivals: &Arrivals, here: u32, mut noted: impl FnMut(u32)) {
        match self {
            Self::Generations(order) => {
                let mut order = Stretches::new(order);
                arrivals.take(|page, distance| {
                    noted(page);
                    order.get().arrive(page, distance, here);
                });
            }
            Self::Lists(order) => {
                let mut order = Stretches::new(order);
                arrivals.take(|page, distance| {
                    noted(page);
                    order.get().arrive(page, distance, here);
                });
            }
        }
    }

    /// Finds at most `want` pages to be given up. Before the next search, the caller puts back
    /// those that it does not give up after all, by [`Order::put_back`], as they may be in no list
    /// any more.
    pub fn victims(&self, want: usize, guest: &mut impl AccessedBits) -> Victims {
        match self {
            Self::Generations(order) => {
                Generations::victims(&mut Stretches::new(order), want, guest)
            }
            Self::Lists(order) => Lists::victims(&mut Stretches::new(order), want, guest),
        }
    }

    /// Puts back pages that were not given up, each with whether it was used meanwhile; those that
    /// were not used could not leave for another reason, such as a failed write to swap.
    pub fn put_back(&self, pages: impl Iterator<Item = (u32, bool)>) {
        match self {
            Self::Generations(order) => {
                let mut order = Stretches::new(order);
                pages.for_each(|(page, used)| order.get().put_back(page, used));
            }
            Self::Lists(order) => {
                let mut order = Stretches::new(order);
                pages.for_each(|(page, used)| order.get().put_back(page, used));
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::Cell;
    use std::ops::Range;

    /// A guest whose state the test sets.
    pub struct Memory {
        pub here: Vec<bool>,
        pub accessed: Vec<bool>,
        pub always_used: bool,
        pub new: bool,
        pub time: u64,
        pub calls: u64,
        pub progress: Cell<u64>,
        /// No page comes in.
        pub still: bool,
    }

    impl Memory {
        pub fn all_here(pages: u32) -> Self {
            let (here, accessed) = (vec![true; pages as usize], vec![false; pages as usize]);
            let (progress, still) = (Cell::new(0), false);
            let (always_used, new) = (false, false);
            Self { here, accessed, always_used, new, time: 0, calls: 0, progress, still }
        }

        /// Returns when a page is old enough, if it is new.
        pub fn until(&self, page: u32) -> u64 {
            self.time + 100 + u64::from(page)
        }

        pub fn uses(&mut self, pages: Range<usize>) {
            self.accessed[pages].fill(true);
        }
    }

    impl AccessedBits for Memory {
        fn pages(&self) -> u32 {
            self.here.len() as u32
        }

        fn is_here(&self, page: u32) -> bool {
            self.here[page as usize]
        }

        fn new_until(&self, page: u32) -> Option<u64> {
            self.new.then_some(self.until(page))
        }

        fn young(&mut self, _look: Look, first: u32, count: u32, young: &mut [u64]) {
            self.calls += 1;
            for bit in 0..count as usize {
                let accessed = &mut self.accessed[first as usize + bit];
                if core::mem::take(accessed) || self.always_used {
                    young[bit / 64] |= 1 << (bit % 64);
                }
            }
        }

        fn progress(&self) -> u64 {
            // As if enough pages came in before each walk.
            let more = if self.still { 0 } else { u64::from(self.pages()) };
            self.progress.set(self.progress.get() + more);
            self.progress.get()
        }

        fn now(&self) -> u64 {
            self.time
        }
    }

    #[test]
    fn a_search_of_used_pages_costs_the_same_in_a_larger_guest() {
        let looks = ScanOptions { window: 512, around: false, frequency: false };
        let costs = |pages: u32| {
            let generations = Order::generations(Generations::new(pages, looks, 0));
            [generations, Order::lists(Lists::new(pages))].map(|order| {
                order.put_back((0..pages).map(|page| (page, true)));
                let mut memory = Memory::all_here(pages);
                (memory.always_used, memory.still) = (true, true);
                let searches = (0..6).map(|_| {
                    work::steps(|| {
                        let found = order.victims(8, &mut memory);
                        assert!(found.walks == 0 && found.kept <= LOOKS + 8);
                        order.put_back(found.pages.into_iter().map(|page| (page, true)));
                    })
                });
                searches.max().unwrap()
            })
        };
        let (small, large) = (costs(1 << 15), costs(1 << 18));
        assert!(
            large.iter().zip(small).all(|(large, small)| *large <= small),
            "{small:?} {large:?}"
        );
    }

    /// A guest whose accessed bits may be tested only while the order is not locked.
    struct WatchedGuest<'o, T> {
        memory: Memory,
        order: &'o Mutex<T>,
    }

    impl<T> AccessedBits for WatchedGuest<'_, T> {
        fn pages(&self) -> u32 {
            self.memory.pages()
        }

        fn is_here(&self, page: u32) -> bool {
            self.memory.is_here(page)
        }

        fn new_until(&self, page: u32) -> Option<u64> {
            self.memory.new_until(page)
        }

        fn young(&mut self, look: Look, first: u32, count: u32, young: &mut [u64]) {
            assert!(self.order.try_lock().is_some(), "{look:?} at {first}");
            self.memory.young(look, first, count, young);
        }

        fn progress(&self) -> u64 {
            self.memory.progress()
        }

        fn now(&self) -> u64 {
            self.memory.now()
        }
    }

    #[test]
    fn no_order_is_locked_during_a_test_of_accessed_bits() {
        const PAGES: u32 = 100;
        for (window, around) in [(1, false), (64, true)] {
            let looks = ScanOptions { window, around, frequency: true };
            let order = Mutex::new(Generations::new(PAGES, looks, 0));
            (0..PAGES).for_each(|page| order.lock().arrive(page, None, PAGES));
            let mut guest = WatchedGuest { memory: Memory::all_here(PAGES), order: &order };
            (0..4).for_each(|_| Generations::walk(&mut Stretches::new(&order), &mut guest));
            guest.memory.uses(0..50);
            let found = Generations::victims(&mut Stretches::new(&order), 10, &mut guest);
            assert_eq!(found.pages, (50..60).collect::<Vec<_>>());
        }
        let order = Mutex::new(Lists::new(PAGES));
        (0..PAGES).for_each(|page| order.lock().put_back(page, page < 80));
        let mut guest = WatchedGuest { memory: Memory::all_here(PAGES), order: &order };
        assert_eq!(Lists::victims(&mut Stretches::new(&order), 10, &mut guest).pages.len(), 10);
    }

    /// Each page is in one queue at most, and in one if it is here and was not given up.
    pub(super) fn check_queues<'q>(
        links: &queue::Links,
        queues: impl Iterator<Item = &'q queue::Queue>,
        memory: &Memory,
        evicted: &[u32],
        may_stay: bool,
    ) {
        let (mut queued, mut lengths) = (Vec::new(), 0);
        for queue in queues {
            queued.extend(links.pages(queue));
            lengths += queue.len();
        }
        assert_eq!(lengths as usize, queued.len());
        queued.sort_unstable();
        assert!(queued.windows(2).all(|pages| pages[0] < pages[1]), "{queued:?}");
        for page in 0..memory.pages() {
            let is_queued = queued.binary_search(&page).is_ok();
            assert_eq!(is_queued, links.is_queued(page));
            let wanted = memory.is_here(page) && !evicted.contains(&page);
            assert!(is_queued || !wanted, "page {page} is lost");
            let in_the_way = is_queued && evicted.contains(&page);
            assert!(may_stay || !in_the_way, "page {page} is in the way");
        }
    }
}
