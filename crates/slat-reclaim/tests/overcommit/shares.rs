//! Guests that share a pool: memory and swap that one of them takes do not harm the others.

use crate::fixture::*;
use slat::format::ept::Ept1G;
use slat::{Access, PageSize, Vmid};
use slat_guest::*;
use slat_reclaim::*;
use slat_sim::Ept;
use slat_sim::fast::FastMachine;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const K4: u64 = 4096;

pub type Memory<'h, S> = PagedMemory<'h, Mem<'h, Ept>, &'h S>;
pub type Thread<'w, 'h, S> = Worker<'w, Ept1G, FastMachine<Ept>, &'h Memory<'h, S>>;

/// Makes guests with these numbers of pages on one pool, and a worker for each, and calls `work`.
/// Then checks that all accounts add up, and that nothing is left of the guests after they are
/// destroyed.
pub fn guests<S: Swap>(
    swap: &S,
    frames: u64,
    guests: &[(u64, slat_reclaim::Config)],
    work: impl for<'w, 'h> FnOnce(&Pool<Mem<'h, Ept>, &'h S>, Vec<Thread<'w, 'h, S>>),
) {
    let machine = FastMachine::new(Ept::default(), 1, frames * K4, 32 << 20).unwrap();
    let layout = Layout {
        base: machine.memory_base(),
        bytes: frames * K4,
        page: PageSize::SIZE_4K,
        block: PageSize::SIZE_2M,
    };
    let pool = Pool::new(Mem(&machine), layout, swap).unwrap();
    let new =
        |&(pages, config): &(u64, _)| PagedMemory::new(&pool, Hva(HOST), pages * K4, config, 0);
    let memory: Vec<_> = guests.iter().map(|guest| new(guest).unwrap()).collect();
    let new = |(index, paged)| {
        let config = slat_guest::Config::new(1, PageSize::SIZE_2M);
        Guest::new(ept(), Vmid(index as u16 + 1), 39, &machine, paged, config).unwrap()
    };
    let those: Vec<_> = memory.iter().enumerate().map(new).collect();
    let threads = those.iter().zip(guests).map(|(guest, (pages, _))| {
        let mut worker = Worker::new(guest).unwrap();
        worker.set_memslot(slot(pages * K4, false)).unwrap();
        worker
    });
    work(&pool, threads.collect());
    check_accounts(&pool, &memory.iter().collect::<Vec<_>>());
    for guest in those {
        // SAFETY: no CPU has loaded its tables.
        unsafe { guest.destroy() };
    }
    for paged in memory {
        // SAFETY: its guest is destroyed.
        unsafe { paged.release() };
    }
    assert_eq!((pool.free(), pool.swapped()), (pool.total(), 0), "what ended guests had");
}

pub fn at(page: u64) -> Hva {
    Hva(HOST + page * K4)
}

pub fn pages(page: u64, count: u64) -> HvaRange {
    HvaRange { start: at(page), bytes: count * K4 }
}

type Ends = Result<(), PageError>;

fn bring<S: Swap>(thread: &mut Thread<'_, '_, S>, mut pages: std::ops::Range<u64>) -> Ends {
    let mut pager = Pager::new(thread);
    pages.try_for_each(|page| pager.bring_in(at(page), Access::Write))
}

const fn config(limit: u32, swap: u32) -> slat_reclaim::Config {
    slat_reclaim::Config { swap, ..slat_reclaim::Config::new(limit) }
}

const FULL: ReclaimError = ReclaimError::Swap(SwapError::Full);

#[test]
fn a_guest_that_filled_swap_blocks_no_other_once_swap_is_free() {
    let swap = Flaky::new(256, PageSize::SIZE_4K);
    let two = [(4096, config(200, u32::MAX)), (300, config(200, u32::MAX))];
    guests(&swap, 512, &two, |pool, mut threads| {
        let [hog, other] = &mut threads[..] else { unreachable!() };
        bring(other, 0..190).unwrap();
        assert_eq!(bring(hog, 0..4096), Err(PageError::NoRoom { reason: FULL }));
        assert_eq!((pool.swapped(), pool.trouble()), (256, None));
        let refused = |thread: &Thread<'_, '_, Flaky>| thread.guest().backing().stats().no_room;
        assert_eq!((refused(hog), refused(other)), (1, 0));
        assert_eq!(bring(other, 190..300), Err(PageError::NoRoom { reason: FULL }));
        Pager::new(hog).discard(pages(0, 4096));
        assert_eq!((pool.swapped(), pool.trouble()), (0, None));
        bring(other, 190..300).unwrap();
    });
}

#[test]
fn a_guest_uses_swap_up_to_its_quota_and_leaves_the_rest() {
    let swap = Flaky::new(256, PageSize::SIZE_4K);
    let two = [(4096, config(200, 100)), (300, config(200, u32::MAX))];
    guests(&swap, 512, &two, |pool, mut threads| {
        let [hog, other] = &mut threads[..] else { unreachable!() };
        let quota = ReclaimError::Quota { slots: 100 };
        assert_eq!(bring(hog, 0..4096), Err(PageError::NoRoom { reason: quota }));
        let paged = *hog.guest().backing();
        assert_eq!((paged.resident(), paged.swapped(), paged.places().away), (200, 100, 100));
        let refused = |thread: &Thread<'_, '_, Flaky>| thread.guest().backing().stats().over_quota;
        assert_eq!((refused(hog), refused(other)), (1, 0));
        // No page leaves that would have to come back at once, and no walk is done in vain.
        let before = (paged.stats(), hog.guest().stats().totals.invalidations);
        assert_eq!(Pager::new(hog).reclaim(64), Err(quota));
        assert_eq!((paged.stats(), hog.guest().stats().totals.invalidations), before);
        bring(other, 0..300).unwrap();
        assert_eq!(
            (pool.swapped(), pool.trouble()),
            (100 + other.guest().backing().swapped(), None)
        );
        // With a higher quota the guest goes on; a lower one holds from then on.
        paged.set_swap(110);
        let quota = ReclaimError::Quota { slots: 110 };
        assert_eq!(bring(hog, 300..4096), Err(PageError::NoRoom { reason: quota }));
        assert_eq!(paged.swapped(), 110);
        paged.set_swap(20);
        Pager::new(hog).discard(pages(0, 300));
        let quota = ReclaimError::Quota { slots: 20 };
        assert_eq!(bring(hog, 0..300), Err(PageError::NoRoom { reason: quota }));
        assert!(paged.swapped() <= 20);
    });
}

/// Slots of copies of pages in memory count towards the quota, and are reused.
#[test]
fn a_guest_at_its_quota_gives_up_pages_for_returning_ones() {
    let swap = Flaky::new(256, PageSize::SIZE_4K);
    guests(&swap, 256, &[(240, config(128, 120))], |_, mut threads| {
        let thread = &mut threads[0];
        bring(thread, 0..240).unwrap();
        let paged = *thread.guest().backing();
        for round in 0..6 {
            for page in 0..240 {
                let access = [Access::Read, Access::Write][usize::from(page % 4 == round % 4)];
                Pager::new(thread).bring_in(at(page), access).unwrap();
                assert!(paged.swapped() <= 120, "{:?}", paged.places());
            }
        }
        assert!(paged.places().copied > 0);
        // Gives up all pages that the quota allows.
        let mut all = 0;
        while let Ok(gone) = Pager::new(thread).reclaim(7) {
            all += gone.pages;
        }
        assert_eq!((paged.places().away, paged.swapped()), (120, 120), "{all} left");
    });
}

/// Swap has three free slots, and eight pages are next: five of them are not unmapped.
#[test]
fn only_pages_that_have_a_slot_are_taken_from_the_guest() {
    let swap = Flaky::new(3, PageSize::SIZE_4K);
    guests(&swap, 64, &[(64, config(64, u32::MAX))], |_, mut threads| {
        let thread = &mut threads[0];
        bring(thread, 0..8).unwrap();
        assert_eq!(Pager::new(thread).reclaim(8), Ok(ReclaimCounts { pages: 3, busy: false }));
        let stats = thread.guest().backing().stats();
        assert_eq!((stats.unmap.count, stats.write.count), (1, 3));
        assert_eq!(Pager::new(thread).reclaim(8), Err(FULL));
        assert_eq!(thread.guest().backing().stats().unmap.count, 1);
        // The others are next when there is room again.
        for left in [5, 2, 0] {
            assert_eq!(thread.guest().backing().resident(), left);
            let away = |page: &u64| thread.guest().backing().page(at(*page), Access::Read).is_err();
            let gone: Vec<u64> = (0..8).filter(away).collect();
            gone.iter().for_each(|page| Pager::new(thread).discard(pages(*page, 1)));
            _ = Pager::new(thread).reclaim(8);
        }
    });
}

#[test]
fn slots_that_return_retry_a_full_disk_but_not_a_failed_one() {
    for (errno, error) in [(0, SwapError::Full), (5, SwapError::System { errno: 5 })] {
        let swap = Flaky::new(128, PageSize::SIZE_4K);
        guests(&swap, 64, &[(96, config(64, u32::MAX))], |pool, mut threads| {
            let thread = &mut threads[0];
            bring(thread, 0..80).unwrap();
            swap.errno.store(errno, Relaxed);
            swap.fail_writes.store(true, Relaxed);
            assert_eq!(Pager::new(thread).reclaim(1), Err(ReclaimError::Swap(error)));
            swap.fail_writes.store(false, Relaxed);
            assert_eq!(pool.trouble(), Some(error));
            assert_eq!(Pager::new(thread).reclaim(1), Err(ReclaimError::Swap(error)));
            let away = |page: &u64| thread.guest().backing().page(at(*page), Access::Read).is_err();
            let page = (0..80).find(away).unwrap();
            let free = Pager::new(thread).bring_in(at(page), Access::Write);
            let left = match errno {
                0 => None,
                _ => Some(error),
            };
            if free.is_err() {
                // No frame was free either.
                Pager::new(thread).discard(pages(page, 1));
            }
            assert_eq!(pool.trouble(), left, "after a slot was given back");
            assert_eq!(Pager::new(thread).reclaim(1).is_ok(), left.is_none());
            pool.resume();
            assert!(Pager::new(thread).reclaim(1).is_ok());
        });
    }
}

/// The other guest has all free memory: the small guest is not drained for it.
#[test]
fn a_small_guest_in_its_limit_loses_one_page_per_arrival() {
    let swap = Flaky::new(2048, PageSize::SIZE_4K);
    let two = [(1024, config(1024, u32::MAX)), (64, config(64, u32::MAX))];
    guests(&swap, 512, &two, |pool, mut threads| {
        let [hog, small] = &mut threads[..] else { unreachable!() };
        bring(small, 0..8).unwrap();
        let mut pages_of_hog = 0..1024;
        let mut fill = || {
            while pool.free() != 0 {
                let page = pages_of_hog.next().unwrap();
                bring(hog, page..page + 1).unwrap();
            }
        };
        for page in 8..64 {
            fill();
            bring(small, page..page + 1).unwrap();
            assert_eq!(small.guest().backing().stats().evicted, page - 7);
            assert_eq!((small.guest().backing().resident(), pool.free()), (8, 0));
        }
        // The guest that has most of the memory gives up most of a batch at a time.
        fill();
        bring(hog, 1000..1001).unwrap();
        assert_eq!(hog.guest().backing().stats().evicted, 64 * 504 / 512);
    });
}

/// A slot that is being wiped is free, but cannot be handed out yet: a thread of another guest does
/// not wait for it, and is not told that swap is full.
#[test]
fn swap_is_not_reported_as_full_while_slots_are_wiped() {
    let swap = Flaky::new(64, PageSize::SIZE_4K);
    swap.slow_forgets.store(true, Relaxed);
    let two = [(64, config(64, u32::MAX)), (64, config(64, u32::MAX))];
    guests(&swap, 128, &two, |_, mut threads| {
        let other = threads.pop().unwrap();
        let mut one = threads.pop().unwrap();
        bring(&mut one, 0..64).unwrap();
        let mut other = other;
        bring(&mut other, 0..64).unwrap();
        while Pager::new(&mut one).reclaim(64).is_ok() {}
        assert_eq!(Pager::new(&mut other).reclaim(1), Err(FULL));
        std::thread::scope(|scope| {
            scope.spawn(move || Pager::new(&mut one).discard(pages(0, 64)));
            while !swap.forgetting.load(Relaxed) {
                std::thread::yield_now();
            }
            let mut pager = Pager::new(&mut other);
            let mut last = pager.reclaim(8);
            while last == Err(ReclaimError::Wiping) {
                std::thread::yield_now();
                last = pager.reclaim(8);
            }
            assert_eq!(last, Ok(ReclaimCounts { pages: 8, busy: false }));
        });
    });
}

/// Slots are given back during a write that fails because the disk is full: the next write is
/// attempted without a call of `resume`.
#[test]
fn swap_slots_freed_while_the_disk_reports_full_are_reused() {
    struct Full<'f>(Flaky, std::sync::Mutex<Box<dyn FnMut() + Send + 'f>>);
    impl Swap for Full<'_> {
        fn slots(&self) -> u32 {
            self.0.slots()
        }

        fn page(&self) -> u64 {
            self.0.page()
        }

        fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
            let result = self.0.write(slot, page);
            if result.is_err() {
                (self.1.lock().unwrap())();
            }
            result
        }

        fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
            self.0.read(slot, page)
        }
    }
    let (asked, go) = (AtomicBool::new(false), AtomicBool::new(false));
    let wait = || {
        asked.store(true, Relaxed);
        while !go.load(Relaxed) {
            std::thread::yield_now();
        }
    };
    let swap = Full(Flaky::new(64, PageSize::SIZE_4K), std::sync::Mutex::new(Box::new(wait)));
    let two = [(64, config(64, u32::MAX)), (64, config(64, u32::MAX))];
    guests(&swap, 128, &two, |pool, mut threads| {
        let mut other = threads.pop().unwrap();
        let mut one = threads.pop().unwrap();
        bring(&mut one, 0..8).unwrap();
        bring(&mut other, 0..8).unwrap();
        while Pager::new(&mut one).reclaim(8).is_ok() {}
        swap.0.fail_writes.store(true, Relaxed);
        std::thread::scope(|scope| {
            let full = scope.spawn(|| Pager::new(&mut other).reclaim(1));
            while !asked.load(Relaxed) {
                std::thread::yield_now();
            }
            Pager::new(&mut one).discard(pages(0, 8));
            swap.0.fail_writes.store(false, Relaxed);
            go.store(true, Relaxed);
            assert_eq!(full.join().unwrap(), Err(FULL));
        });
        assert_eq!(pool.trouble(), None);
        assert!(Pager::new(&mut other).reclaim(1).is_ok());
    });
}

/// A guest keeps its protected pages while other guests want memory; pages of the others come and
/// go.
#[test]
fn pages_that_a_guest_keeps_are_given_up_for_its_own_alone() {
    let swap = Flaky::new(4096, PageSize::SIZE_4K);
    let keeps = slat_reclaim::Config { protected: 100, ..config(150, u32::MAX) };
    let two = [(400, keeps), (4096, config(4096, u32::MAX))];
    guests(&swap, 256, &two, |pool, mut threads| {
        let [kept, other] = &mut threads[..] else { unreachable!() };
        let (his, its) = (*kept.guest().backing(), *other.guest().backing());
        bring(kept, 0..120).unwrap();
        // The other guest has the rest, in which its pages come and go.
        bring(other, 0..1000).unwrap();
        assert_eq!(his.resident(), 120, "who wants memory gives up its own");
        assert_eq!(his.spare(), 20);
        let given = Pager::new(kept).reclaim(64).unwrap();
        assert_eq!((given.pages, his.resident()), (20, 100));
        let protected = ReclaimError::Protected { pages: 100 };
        assert_eq!(Pager::new(kept).reclaim(1), Err(protected));
        assert_eq!(choose(&[his.load(), its.load()]), Some(1));
        // All frames are taken: a page of this guest comes in for another of its own.
        let mut next = 1000;
        let mut take_all = |other: &mut Thread<'_, '_, _>| {
            while pool.free() != 0 {
                bring(other, next..next + 1).unwrap();
                next += 1;
            }
        };
        take_all(other);
        bring(kept, 200..300).unwrap();
        assert_eq!(his.resident(), 100);
        // Below the number that it keeps, the guest gets no page until another guest gives up
        // pages.
        Pager::new(kept).discard(pages(0, 400));
        take_all(other);
        assert_eq!(bring(kept, 0..1), Err(PageError::NoRoom { reason: protected }));
        assert_eq!(his.stats().below_protected, 1);
        assert_eq!(its.stats().below_protected, 0);
        assert!(Pager::new(other).reclaim(64).unwrap().pages >= 1);
        bring(kept, 0..1).unwrap();
        // The guests together cannot keep more pages than the pool has.
        let refused = PoolError::Protected { asked: 157, left: 156 };
        assert_eq!(its.set_protected(157), Err(refused));
        its.set_protected(156).unwrap();
        let refused = PoolError::Protected { asked: 101, left: 100 };
        assert_eq!(his.set_protected(101), Err(refused));
        his.set_protected(0).unwrap();
        its.set_protected(256).unwrap();
    });
}
