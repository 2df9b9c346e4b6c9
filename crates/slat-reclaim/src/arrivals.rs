//! Pages that came in, or that a device used, until the holder of the order notes them: a stack of
//! page numbers, with each page in it once at most.
//!
//! # Protocol
//! Faults push pages, and take no lock; the holder of the order takes all pages. A page's link is
//! `ABSENT` while the page is not on the stack. A pusher claims the link first; if the link is
//! claimed already, the pusher lowers the distance in it, if its own is less. The taker makes each
//! link absent, then notes the page, with the distance that the link had then. While a link is not
//! absent, its upper half, the distance, changes by exchanges alone. Its lower half, the next page,
//! is written by the thread that claimed the link until the page is on the stack, and by the taker
//! from then on. A write of one half keeps the other.
//!
//! *Invariant*: a page is noted after it came. A fault claims the page's word, then reads its link;
//! the taker changes the link, then reads words. Each executes a fence in between. So either the
//! link was absent, and the page is pushed; or a taker notes the page later, and finds its word
//! claimed.

use alloc::boxed::Box;
use slat::sync::{AtomicU64, Ordering, agreed};

const ABSENT: u64 = u64::MAX;
/// The end of the stack, in `head` or in a link.
const END: u32 = u32::MAX;
/// The page came for the first time.
const FIRST: u32 = 1 << 31;

#[derive(Debug)]
pub(crate) struct Arrivals {
    head: AtomicU64,
    /// For each page: the next page down in the lower half, and the number of pages that were given
    /// up while this one was away in the upper half.
    links: Box<[AtomicU64]>,
}

const fn link(next: u32, distance: u32) -> u64 {
    next as u64 | (distance as u64) << 32
}

impl Arrivals {
    pub fn new(pages: u32) -> Self {
        let links = (0..pages).map(|_| AtomicU64::new(ABSENT)).collect();
        Self { head: AtomicU64::new(END.into()), links }
    }

    /// Records that `page` came in. `distance` is the number of pages that were given up while it
    /// was away: `None` for a first touch, 0 for a page that a device used. If a page came twice
    /// before it was noted, the least distance counts.
    pub fn push(&self, page: u32, distance: Option<u32>) {
        let distance = distance.map_or(FIRST, |distance| distance.min(FIRST - 1));
        let place = &self.links[page as usize];
        agreed();
        let mut head = self.head.load(Ordering::Relaxed);
        let mut now = ABSENT;
        loop {
            let new = match now {
                ABSENT => link(head as u32, distance),
                _ => link(now as u32, distance),
            };
            match place.compare_exchange(now, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(ABSENT) => break,
                Ok(_) => return,
                Err(ABSENT) => now = ABSENT,
                Err(other) => match (other >> 32) as u32 {
                    // A first touch counts as the least.
                    least if least == FIRST || least <= distance => return,
                    _ => now = other,
                },
            }
        }
        while let Err(now) =
            self.head.compare_exchange(head, page.into(), Ordering::Release, Ordering::Relaxed)
        {
            head = now;
            self.point(place, head as u32);
        }
    }

    /// Makes a link that the caller may write point to `next`; returns its previous target.
    fn point(&self, place: &AtomicU64, next: u32) -> u32 {
        let mut now = place.load(Ordering::Relaxed);
        loop {
            let new = link(next, (now >> 32) as u32);
            match place.compare_exchange(now, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return now as u32,
                Err(other) => now = other,
            }
        }
    }

    /// Takes all pages off the stack, and notes them in the order in which they came.
    pub fn take(&self, mut note: impl FnMut(u32, Option<u32>)) {
        let mut down = self.head.swap(END.into(), Ordering::Acquire) as u32;
        let mut first = END;
        while down != END {
            let next = self.point(&self.links[down as usize], first);
            (first, down) = (down, next);
        }
        while first != END {
            let page = first;
            let now = self.links[page as usize].swap(ABSENT, Ordering::AcqRel);
            agreed();
            first = now as u32;
            let distance = (now >> 32) as u32;
            note(page, (distance != FIRST).then_some(distance));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicBool;
    use std::sync::Mutex;

    fn taken(arrivals: &Arrivals) -> Vec<(u32, Option<u32>)> {
        let mut all = Vec::new();
        arrivals.take(|page, distance| all.push((page, distance)));
        all
    }

    #[test]
    fn pages_are_noted_once_and_in_their_order() {
        let arrivals = Arrivals::new(10);
        assert_eq!(taken(&arrivals), []);
        arrivals.push(7, None);
        arrivals.push(0, Some(3));
        arrivals.push(7, Some(1));
        arrivals.push(9, Some(u32::MAX));
        assert_eq!(taken(&arrivals), [(7, None), (0, Some(3)), (9, Some(FIRST - 1))]);
        assert_eq!(taken(&arrivals), []);
        arrivals.push(7, Some(1));
        assert_eq!(taken(&arrivals), [(7, Some(1))]);
    }

    #[test]
    fn of_a_page_that_came_twice_the_least_distance_counts() {
        let arrivals = Arrivals::new(3);
        for distance in [9, 12, 0, 4] {
            arrivals.push(1, Some(distance));
            arrivals.push(2, Some(5));
        }
        arrivals.push(1, None);
        assert_eq!(taken(&arrivals), [(1, Some(0)), (2, Some(5))]);
    }

    #[test]
    fn no_page_is_missed_that_comes_while_others_are_noted() {
        const PAGES: u32 = 16;
        const PUSHES: u32 = if cfg!(miri) { 100 } else { 20_000 };
        let arrivals = &Arrivals::new(PAGES);
        let came: &[_; PAGES as usize] = &core::array::from_fn(|_| AtomicU64::new(0));
        let noted = &Mutex::new([0; PAGES as usize]);
        let over = &AtomicBool::new(false);
        let note = &|| {
            let mut noted = noted.lock().unwrap();
            arrivals.take(|page, _| {
                noted[page as usize] = came[page as usize].load(Ordering::SeqCst);
            });
        };
        std::thread::scope(|scope| {
            let pushers: Vec<_> = (0..3)
                .map(|seed| {
                    scope.spawn(move || {
                        let mut rng = fastrand::Rng::with_seed(seed);
                        for _ in 0..PUSHES {
                            let page = rng.u32(..PAGES);
                            came[page as usize].fetch_add(1, Ordering::SeqCst);
                            arrivals.push(page, Some(1));
                        }
                    })
                })
                .collect();
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    note();
                }
            });
            pushers.into_iter().for_each(|pusher| pusher.join().unwrap());
            over.store(true, Ordering::Relaxed);
        });
        note();
        let all = came.each_ref().map(|came| came.load(Ordering::SeqCst));
        assert_eq!(*noted.lock().unwrap(), all);
    }
}
