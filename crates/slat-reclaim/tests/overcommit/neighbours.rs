//! A disk that does not answer one guest holds up no other guest; and threads of the guest that
//! wait for it wait by `Host::wait`.

use crate::hooked::*;
use crate::shares::{at, pages};
use slat::Access;
use slat_reclaim::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

thread_local! {
    /// The disk does not answer this thread.
    static HANGS: Cell<bool> = const { Cell::new(false) };
}

/// A disk that hangs, and a count of the waits of the threads that do not call it.
#[derive(Default)]
struct Hang {
    hung: AtomicBool,
    go: AtomicBool,
    /// The test took so long that the disk has answered.
    answered: AtomicBool,
    waits: AtomicU64,
}

/// Returns whether `what` is so before 20 seconds have passed.
fn soon(what: impl Fn() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(20);
    while !what() && Instant::now() < end {
        std::thread::yield_now();
    }
    what()
}

impl Hang {
    fn call(&self, call: Call) {
        let disk = matches!(call, Call::SwapWrite | Call::SwapRead | Call::SwapForget);
        if HANGS.get() && disk {
            self.hung.store(true, Relaxed);
            if !soon(|| self.go.load(Relaxed)) {
                self.answered.store(true, Relaxed);
            }
        } else if !HANGS.get() && call == Call::Wait {
            self.waits.fetch_add(1, Relaxed);
        }
    }

    /// Calls `meanwhile` while `work` has called the disk on another thread, which does not answer.
    fn during<'t>(&self, work: impl FnOnce() + Send + 't, meanwhile: impl FnOnce()) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                HANGS.set(true);
                work();
            });
            assert!(soon(|| self.hung.load(Relaxed)), "the disk was not called");
            meanwhile();
            self.go.store(true, Relaxed);
        });
    }
}

/// Sends the first `count` pages of a guest to swap.
fn send(thread: &mut Thread<'_, '_>, count: u64) {
    let mut pager = Pager::new(thread);
    (0..count).for_each(|page| pager.bring_in(at(page), Access::Write).unwrap());
    let places = |pager: &Pager<'_, '_, _, _, _>| pager.paged().places().away;
    while places(&pager) < count as u32 {
        _ = pager.reclaim(count as u32);
    }
}

type Work = fn(&mut Thread<'_, '_>);

/// Ways in which a guest of which two pages are in swap, and two in memory, calls the disk.
const HANGING: [(&str, Work); 3] = [
    ("write", |thread| _ = Pager::new(thread).reclaim(2)),
    ("read", |thread| Pager::new(thread).bring_in(at(0), Access::Read).unwrap()),
    ("forget", |thread| Pager::new(thread).discard(pages(0, 2))),
];

#[test]
fn no_call_waits_for_the_disk_of_another_guest() {
    let calls: [(&str, Work); 17] = [
        ("first touch", |it| Pager::new(it).bring_in(at(20), Access::Read).unwrap()),
        ("reclaim", |it| _ = Pager::new(it).reclaim(1)),
        ("write again", |it| {
            (0..6).for_each(|page| {
                Pager::new(it).bring_in(at(page), Access::Write).unwrap();
            })
        }),
        ("copy", |it| Pager::new(it).copy(at(1), &mut [0; 4096]).unwrap()),
        ("with_page", |it| Pager::new(it).with_page(at(2), true, |_| ()).unwrap()),
        ("pin", |it| drop(Pager::new(it).pin(pages(3, 2)).unwrap())),
        ("walk", |it| assert!(Pager::new(it).walk())),
        ("discard", |it| Pager::new(it).discard(pages(0, 1))),
        ("discard of all", |it| Pager::new(it).discard(pages(0, 64))),
        ("set_limit", |it| it.guest().backing().set_limit(63)),
        ("set_swap", |it| it.guest().backing().set_swap(8)),
        ("set_protected", |it| it.guest().backing().set_protected(1).unwrap()),
        ("load", |it| _ = it.guest().backing().load()),
        ("idle", |it| _ = it.guest().backing().idle()),
        ("places", |it| _ = it.guest().backing().places()),
        ("stats", |it| _ = it.guest().backing().stats()),
        ("pool", |it| {
            let pool = it.guest().backing().pool();
            _ = (pool.free(), pool.swapped(), pool.trouble());
            pool.resume();
        }),
    ];
    for (name, hanging) in HANGING {
        let hang = Hang::default();
        let config = slat_reclaim::Config::new(64);
        hooked(&|call| hang.call(call), 256, 8, &[(64, config); 2], |_, _, mut threads| {
            let [mut two, _] = threads.pop().unwrap();
            let [mut one, _] = threads.pop().unwrap();
            // All free slots have old content of guest two, so that guest one gets such slots.
            send(&mut one, 2);
            (2..4).for_each(|page| Pager::new(&mut one).bring_in(at(page), Access::Write).unwrap());
            send(&mut two, 6);
            for page in 0..6 {
                Pager::new(&mut two).bring_in(at(page), Access::Write).unwrap();
            }
            let paged = *one.guest().backing();
            hang.waits.store(0, Relaxed);
            hang.during(
                || hanging(&mut one),
                || {
                    for (call, work) in calls {
                        work(&mut two);
                        let waits = hang.waits.load(Relaxed);
                        let answered = hang.answered.load(Relaxed);
                        assert!(
                            waits == 0 && !answered,
                            "{call}, {name}: {waits} waits, {answered}"
                        );
                    }
                    // Calls of the same guest that move no page.
                    paged.set_protected(2).unwrap();
                    paged.set_protected(0).unwrap();
                    paged.set_limit(32);
                    _ = (paged.load(), paged.idle(), paged.stats(), paged.places());
                    assert!(!hang.answered.load(Relaxed), "{name}");
                },
            );
        });
    }
}

/// One thread of the guest writes a page to a disk that does not answer, another needs that page or
/// its frame.
#[test]
fn a_thread_that_waits_for_its_guests_disk_waits_by_the_host() {
    let calls: [(&str, Work); 6] = [
        ("bring_in", |it| Pager::new(it).bring_in(at(0), Access::Read).unwrap()),
        ("copy", |it| Pager::new(it).copy(at(0), &mut [0; 4096]).unwrap()),
        ("with_page", |it| Pager::new(it).with_page(at(0), true, |_| ()).unwrap()),
        ("pin", |it| drop(Pager::new(it).pin(pages(0, 1)).unwrap())),
        ("discard", |it| Pager::new(it).discard(pages(0, 1))),
        ("another page", |it| Pager::new(it).bring_in(at(9), Access::Read).unwrap()),
    ];
    for (name, call) in calls {
        let hang = Hang::default();
        let config = slat_reclaim::Config { batch: 4, ..slat_reclaim::Config::new(4) };
        hooked(&|call| hang.call(call), 64, 64, &[(64, config)], |_, _, mut threads| {
            let [mut one, mut other] = threads.pop().unwrap();
            for page in 0..4 {
                Pager::new(&mut one).bring_in(at(page), Access::Write).unwrap();
            }
            let gives_up = || while Pager::new(&mut one).reclaim(4) == Err(ReclaimError::InUse) {};
            std::thread::scope(|scope| {
                hang.during(gives_up, || {
                    scope.spawn(|| call(&mut other));
                    assert!(soon(|| hang.waits.load(Relaxed) >= 3), "{name} does not wait");
                    assert!(!hang.answered.load(Relaxed), "{name}");
                });
            });
        });
    }
}
