//! What a call costs, in steps: it does not grow with swap, nor with what other guests have; and a
//! fault that is refused costs a bounded number of steps, whatever the size of the guest.

use super::*;
use crate::work::steps;
use crate::{Config, Layout, Policy, Pool, ReclaimError};
use slat::format::ept::Ept1G;
use slat::{Gpa, Vmid};
use slat_guest::{Guest, MemslotId, MemslotSpec};
use slat_sim::Ept;
use slat_sim::fast::FastMachine;
use std::sync::atomic::AtomicBool;

const HOST: u64 = 1 << 40;
const K4: u64 = 4096;

struct Mem<'m>(&'m FastMachine<Ept>);

impl Ram for Mem<'_> {
    fn read(&self, hpa: Hpa, page: &mut [u8]) {
        self.0.copy_out(hpa, page);
    }

    fn write(&self, hpa: Hpa, page: &[u8]) {
        self.0.copy_in(hpa, page);
    }
}

/// Swap that keeps nothing.
struct NoSwap {
    slots: u32,
    broken: AtomicBool,
}

impl Swap for NoSwap {
    fn slots(&self) -> u32 {
        self.slots
    }

    fn page(&self) -> u64 {
        K4
    }

    fn write(&self, _: u32, _: &[u8]) -> Result<(), SwapError> {
        match self.broken.load(Ordering::Relaxed) {
            true => Err(SwapError::System { errno: 5 }),
            false => Ok(()),
        }
    }

    fn read(&self, _: u32, page: &mut [u8]) -> Result<(), SwapError> {
        page.fill(0);
        Ok(())
    }
}

type Memory<'h> = PagedMemory<'h, Mem<'h>, &'h NoSwap>;
type Thread<'w, 'h> = Worker<'w, Ept1G, FastMachine<Ept>, &'h Memory<'h>>;

fn at(page: u32) -> Hva {
    Hva(HOST + u64::from(page) * K4)
}

fn range(page: u32, pages: u32) -> HvaRange {
    HvaRange { start: at(page), bytes: u64::from(pages) * K4 }
}

/// Calls `work` with a guest of each number of pages, on `frames` frames and `slots` slots.
fn guests(
    frames: u32,
    slots: u32,
    guests: &[(u32, Config)],
    work: impl for<'w, 'h> FnOnce(&'h NoSwap, Vec<Thread<'w, 'h>>),
) {
    let bytes = |pages: u32| u64::from(pages) * K4;
    let machine = FastMachine::new(Ept::default(), 1, bytes(frames), 64 << 20).unwrap();
    let (page, block) = (PageSize::SIZE_4K, PageSize::SIZE_2M);
    let layout = Layout { base: machine.memory_base(), bytes: bytes(frames), page, block };
    let swap = NoSwap { slots, broken: AtomicBool::new(false) };
    let pool = Pool::new(Mem(&machine), layout, &swap).unwrap();
    let new =
        |&(pages, config)| PagedMemory::new(&pool, Hva(HOST), bytes(pages), config, 0).unwrap();
    let memory: Vec<_> = guests.iter().map(new).collect();
    let new = |(index, paged)| {
        let config = slat_guest::Config::new(1, block);
        let vmid = Vmid(index as u16 + 1);
        Guest::new(Ept1G::default(), vmid, 39, &machine, paged, config).unwrap()
    };
    let those: Vec<_> = memory.iter().enumerate().map(new).collect();
    let threads = those.iter().zip(guests).map(|(guest, (pages, _))| {
        let mut worker = Worker::new(guest).unwrap();
        let slot = MemslotSpec::new(MemslotId(0), Gpa(1 << 32), bytes(*pages), Hva(HOST));
        worker.set_memslot(slot).unwrap();
        worker
    });
    work(&swap, threads.collect());
}

fn bring(thread: &mut Thread<'_, '_>, mut pages: core::ops::Range<u32>, access: Access) {
    pages.try_for_each(|page| Pager::new(thread).bring_in(at(page), access)).unwrap();
}

/// Sends the first `pages` pages of the guest to swap.
fn send(thread: &mut Thread<'_, '_>, pages: u32) {
    while Pager::new(thread).paged().places().away < pages {
        _ = Pager::new(thread).reclaim(pages);
    }
}

type Work = fn(&mut Thread<'_, '_>);

#[test]
fn no_call_costs_more_if_swap_or_another_guest_is_larger() {
    let calls: [(&str, Work); 12] = [
        ("first touch", |it| bring(it, 20..21, Access::Write)),
        ("read again", |it| bring(it, 0..1, Access::Read)),
        ("write again", |it| bring(it, 1..2, Access::Write)),
        ("reclaim", |it| _ = Pager::new(it).reclaim(4)),
        ("copy", |it| Pager::new(it).copy(at(2), &mut [0; 4096]).unwrap()),
        ("with_page", |it| Pager::new(it).with_page(at(3), true, |_| ()).unwrap()),
        ("pin", |it| drop(Pager::new(it).pin(range(4, 2)).unwrap())),
        ("discard of a page in memory", |it| Pager::new(it).discard(range(20, 1))),
        ("discard of a page in swap", |it| Pager::new(it).discard(range(5, 2))),
        ("walk", |it| assert!(Pager::new(it).walk())),
        ("set_protected", |it| it.guest().backing().set_protected(1).unwrap()),
        ("discard of all", |it| Pager::new(it).discard(range(0, 64))),
    ];
    let costs = |slots: u32, neighbour: u32| {
        let mut costs = Vec::new();
        let config = Config::new(1 << 16);
        let two = [(64, config), (1 << 14, config)];
        guests(1 << 15, slots, &two, |_, mut threads| {
            let (mut other, mut one) = (threads.pop().unwrap(), threads.pop().unwrap());
            // The other guest has pages in swap, and in as many slots old content.
            bring(&mut other, 0..2 * neighbour, Access::Write);
            send(&mut other, 2 * neighbour);
            bring(&mut other, 0..neighbour, Access::Write);
            bring(&mut one, 0..8, Access::Write);
            send(&mut one, 8);
            for (name, call) in calls {
                costs.push((name, steps(|| call(&mut one))));
            }
        });
        costs
    };
    let small = costs(1 << 10, 16);
    for (slots, neighbour) in [(1 << 20, 16), (1 << 14, 1 << 12), (1 << 20, 1 << 12)] {
        for (few, many) in small.iter().zip(costs(slots, neighbour)) {
            // A larger set of slots has one or two levels more.
            let bound = few.1 + few.1 / 2 + 32;
            assert!(many.1 <= bound, "{slots} slots, {neighbour} pages: {few:?}, {many:?}");
        }
    }
}

#[test]
fn a_refused_fault_costs_no_more_if_the_guest_is_larger() {
    struct Case {
        name: &'static str,
        config: fn(Config) -> Config,
        slots: u32,
        ready: fn(&NoSwap, &mut Thread<'_, '_>, u32),
        is: fn(ReclaimError) -> bool,
    }
    let nothing: fn(&NoSwap, &mut Thread<'_, '_>, u32) = |_, _, _| ();
    let same: fn(Config) -> Config = |config| config;
    let new = |name, config, slots, ready, is| Case { name, config, slots, ready, is };
    let cases = [
        new(
            "all pages are too new",
            |config| Config { residency: u64::MAX / 4, ..config },
            1 << 17,
            nothing,
            |reason| reason == ReclaimError::Thrashing,
        ),
        new("swap has no slot", same, 0, nothing, |reason| {
            reason == ReclaimError::Swap(SwapError::Full)
        }),
        new(
            "no slot for the guest",
            |config| Config { swap: 0, ..config },
            1 << 17,
            nothing,
            |reason| reason == ReclaimError::Quota { slots: 0 },
        ),
        new(
            "a broken disk",
            same,
            1 << 17,
            |swap, _, _| swap.broken.store(true, Ordering::Relaxed),
            |reason| matches!(reason, ReclaimError::Swap(_)),
        ),
    ];
    for policy in [Policy::Generations, Policy::TwoLists] {
        for case in &cases {
            let costs = |limit: u32| {
                let mut costs = Vec::new();
                let config = (case.config)(Config { policy, ..Config::new(limit) });
                guests(limit, case.slots, &[(2 * limit, config)], |swap, mut threads| {
                    let mut thread = threads.pop().unwrap();
                    bring(&mut thread, 0..limit, Access::Write);
                    (case.ready)(swap, &mut thread, limit);
                    // The arrivals are noted, which their faults pay for.
                    for index in 0..4 {
                        // As if time had passed, so that it searches.
                        thread.guest().backing().turn.lock().none_before = 0;
                        let fault = || {
                            let result =
                                Pager::new(&mut thread).bring_in(at(limit + index), Access::Read);
                            let Err(PageError::NoRoom { reason }) = result else {
                                panic!("{}: {result:?}", case.name)
                            };
                            assert!((case.is)(reason), "{}: {reason:?}", case.name);
                        };
                        costs.push(steps(fault));
                    }
                });
                costs
            };
            let (small, large) = (costs(1 << 13), costs(1 << 14));
            // A search passes over a bounded number of pages, and a fault makes few searches.
            let bound = small[1..].iter().max().unwrap() + 64;
            let (name, rest) = (case.name, &large[1..]);
            assert!(rest.iter().all(|cost| *cost <= bound), "{policy:?}, {name}: {large:?}");
        }
    }
}

#[test]
fn a_fault_is_refused_after_one_search_if_all_pages_are_pinned() {
    for limit in [1 << 10, 1 << 12] {
        guests(limit, 1 << 14, &[(2 * limit, Config::new(limit))], |_, mut threads| {
            let mut thread = threads.pop().unwrap();
            let paged = *thread.guest().backing();
            let _pinned = Pager::new(&mut thread).pin(range(0, limit)).unwrap();
            let mut refuse = |page| {
                let before = paged.stats();
                let cost = steps(|| {
                    let result = Pager::new(&mut thread).bring_in(at(limit + page), Access::Read);
                    assert!(matches!(result, Err(PageError::NoRoom { .. })), "{result:?}");
                });
                let stats = paged.stats().since(&before);
                (stats.reclaim.count, stats.walk.count, cost)
            };
            refuse(0);
            for page in 1..4 {
                let (searches, walks, cost) = refuse(page);
                assert!(searches <= 1 && walks == 0 && cost <= 64, "{searches} {walks} {cost}");
            }
        });
    }
}

/// The pages with a copy are 16 of many, and the last in the order.
#[test]
fn while_a_disk_fails_a_page_with_a_copy_is_found_at_once() {
    for (policy, pages) in [Policy::Generations, Policy::TwoLists]
        .into_iter()
        .flat_map(|policy| [1 << 9, 1 << 13].map(|pages| (policy, pages)))
    {
        let config = Config { policy, batch: 4, ..Config::new(pages) };
        guests(pages, 1 << 10, &[(2 * pages, config)], |swap, mut threads| {
            let mut thread = threads.pop().unwrap();
            let paged = *thread.guest().backing();
            bring(&mut thread, 0..pages, Access::Write);
            send(&mut thread, 16);
            let is_away = |page: &u32| {
                matches!(paged.words[*page as usize].load(), PageState::Swapped { .. })
            };
            let away: Vec<u32> = (0..pages).filter(is_away).collect();
            let back = pages - paged.resident();
            let back = away.into_iter().take(back as usize);
            back.for_each(|page| bring(&mut thread, page..page + 1, Access::Read));
            let copied = paged.places().copied;
            assert!(copied >= 16);
            swap.broken.store(true, Ordering::Relaxed);
            for page in 0..copied {
                let result = Pager::new(&mut thread).bring_in(at(pages + page), Access::Read);
                assert_eq!(result, Ok(()), "{policy:?}, {pages} pages: page {page} of {copied}");
            }
        });
    }
}

#[test]
fn a_page_with_a_copy_is_found_again_after_a_thread_moved_it() {
    for policy in [Policy::Generations, Policy::TwoLists] {
        let config = Config { policy, batch: 4, ..Config::new(64) };
        guests(64, 1 << 10, &[(128, config)], |swap, mut threads| {
            let mut thread = threads.pop().unwrap();
            let paged = *thread.guest().backing();
            bring(&mut thread, 0..64, Access::Write);
            send(&mut thread, 4);
            let copied = |page: &u32| {
                matches!(
                    paged.words[*page as usize].load(),
                    PageState::Resident { copy: Some(_), .. }
                )
            };
            let away = (0..64).filter(|page| {
                matches!(paged.words[*page as usize].load(), PageState::Swapped { .. })
            });
            let away: Vec<u32> = away.take(2).collect();
            away.into_iter().for_each(|page| bring(&mut thread, page..page + 1, Access::Read));
            swap.broken.store(true, Ordering::Relaxed);
            let pages: Vec<u32> = (0..64).filter(copied).collect();
            assert_ne!(pages, []);
            let claim = |&page: &u32| {
                let word = &paged.words[page as usize];
                Claim { word, place: word.claim(|_| true).unwrap() }
            };
            let moving: Vec<_> = pages.iter().map(claim).collect();
            let result = Pager::new(&mut thread).reclaim(1);
            assert!(result.is_err(), "{policy:?}: {result:?}");
            drop(moving);
            assert_eq!(Pager::new(&mut thread).reclaim(1).unwrap().pages, 1, "{policy:?}");
        });
    }
}
