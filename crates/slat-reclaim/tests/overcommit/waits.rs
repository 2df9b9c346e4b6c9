//! Waits for the disk, the cost of faults that have to wait, and uses by devices.

use crate::fixture::*;
use crate::shares::{at, guests};
use slat::{Access, PageSize};
use slat_guest::*;
use slat_reclaim::*;
use slat_sim::Ept;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// A disk whose writes block until the test lets them continue.
struct BlockedDisk {
    flaky: Flaky,
    reached: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
}

impl Swap for BlockedDisk {
    fn slots(&self) -> u32 {
        self.flaky.slots()
    }

    fn page(&self) -> u64 {
        self.flaky.page()
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
        // Once the test has dropped its end, writes do not block any more.
        if self.reached.lock().unwrap().send(()).is_ok() {
            let _ = self.go_on.lock().unwrap().recv_timeout(Duration::from_secs(20));
        }
        self.flaky.write(slot, page)
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        self.flaky.read(slot, page)
    }
}

#[test]
fn a_query_of_a_guests_load_never_waits_for_a_disk() {
    for policy in [Policy::Generations, Policy::TwoLists] {
        let (reached, at_disk) = channel();
        let (go, go_on) = channel();
        let flaky = Flaky::new(256, PageSize::SIZE_4K);
        let swap = BlockedDisk { flaky, reached: Mutex::new(reached), go_on: Mutex::new(go_on) };
        let config = slat_reclaim::Config { policy, ..slat_reclaim::Config::new(128) };
        guests(&swap, 128, &[(128, config)], |_, mut threads| {
            let mut thread = threads.pop().unwrap();
            let paged = *thread.guest().backing();
            (0..128).for_each(|page| {
                Pager::new(&mut thread).bring_in(at(page), Access::Write).unwrap()
            });
            std::thread::scope(|scope| {
                let reclaimer = scope.spawn(move || {
                    assert!(Pager::new(&mut thread).reclaim(64).is_ok());
                });
                // A write has reached the disk, and blocks.
                at_disk.recv().unwrap();
                let asked = scope.spawn(|| {
                    let load = paged.load();
                    assert_eq!((load.resident, load.limit), (128, 128));
                    assert_eq!(paged.idle().is_some(), policy == Policy::Generations);
                    assert_eq!(paged.places().moving, 64);
                });
                let mut patience = 1000;
                while !asked.is_finished() && patience != 0 {
                    std::thread::sleep(Duration::from_millis(5));
                    patience -= 1;
                }
                let waited = !asked.is_finished();
                // Lets the write continue.
                drop(at_disk);
                drop(go);
                asked.join().unwrap();
                reclaimer.join().unwrap();
                assert!(!waited, "{policy:?}: who asked waited for the disk");
            });
        });
    }
}

/// A device sets no accessed bit; the pages that it uses stay all the same, as those that the guest
/// uses do.
#[test]
fn what_a_device_uses_stays() {
    for policy in [Policy::Generations, Policy::TwoLists] {
        let mut setup = Setup::new(512, 128);
        setup.reclaim.policy = policy;
        setup.run(ept(), Ept::default(), |bench| {
            let mut runner = Runner::new(bench, 0);
            let mut worker = Worker::new(bench.guest).unwrap();
            let away =
                |page: u64| bench.guest.backing().page(bench.host(page), Access::Read).is_err();
            (0..512).for_each(|page| runner.write(page));
            let (mut device, mut guest) = (0, 0);
            for round in 0..200u64 {
                device += u32::from(away(3));
                guest += u32::from(away(4));
                for _ in 0..20 {
                    Pager::new(&mut worker).with_page(bench.host(3), false, |_| ()).unwrap();
                    runner.check(4);
                }
                (0..30).for_each(|page| runner.check(10 + (round * 30 + page) % 500));
            }
            assert!(
                device <= guest + 5,
                "{policy:?}: {device} times away, the guest's own {guest}"
            );
        });
    }
}

#[test]
fn a_waiting_fault_walks_once_until_a_page_is_old_enough() {
    for policy in [Policy::Generations, Policy::TwoLists] {
        let mut setup = Setup::new(2048 + 64, 2048);
        setup.reclaim = slat_reclaim::Config { policy, residency: u64::MAX / 4, ..setup.reclaim };
        setup.run(ept(), Ept::default(), |bench| {
            let mut worker = Worker::new(bench.guest).unwrap();
            let mut pager = Pager::new(&mut worker);
            (0..2048).for_each(|page| pager.bring_in(bench.host(page), Access::Write).unwrap());
            let refused = PageError::NoRoom { reason: ReclaimError::Thrashing };
            let mut refusals = 0;
            let mut refuse = || {
                assert_eq!(pager.bring_in(bench.host(2050), Access::Read), Err(refused));
                let invalidations = bench.guest.stats().totals.invalidations;
                let mut stats = bench.paged.stats();
                refusals += 1;
                let counted = std::mem::take(&mut stats.thrashing);
                assert_eq!(counted, refusals, "each refusal is counted");
                (stats, invalidations)
            };
            let first = refuse();
            assert!(first.0.walk.count <= 2 && first.0.held >= 2048);
            (0..10).for_each(|_| assert_eq!(refuse(), first, "{policy:?}"));
        });
    }
}

#[test]
fn a_page_may_leave_as_soon_as_it_is_old_enough() {
    for policy in [Policy::Generations, Policy::TwoLists] {
        let mut setup = Setup::new(64, 32);
        let residency = Duration::from_millis(300);
        setup.reclaim.policy = policy;
        setup.reclaim.residency = residency.as_nanos() as u64;
        setup.run(ept(), Ept::default(), |bench| {
            let mut worker = Worker::new(bench.guest).unwrap();
            let mut pager = Pager::new(&mut worker);
            (0..32).for_each(|page| pager.bring_in(bench.host(page), Access::Write).unwrap());
            // Too soon, unless the machine is slow.
            _ = pager.reclaim(1);
            std::thread::sleep(residency + Duration::from_millis(3));
            assert!(pager.bring_in(bench.host(40), Access::Write).is_ok(), "{policy:?}");
        });
    }
}

/// A fault that brings in a block loses the race for one of its pages, and releases all that it has
/// claimed.
#[test]
fn a_race_for_a_page_of_a_block_leaves_nothing_behind() {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    let mut setup = Setup::new(512, 1024);
    setup.reclaim.huge = true;
    setup.run(ept(), Ept::default(), |bench| {
        let mut worker = Worker::new(bench.guest).unwrap();
        let other = Worker::new(bench.guest).unwrap();
        let other = &Mutex::new(other);
        // Some of the blocks come in whole; in others, a thread that copies a page claims it first,
        // before the fault's claims or during them.
        for rounds in 0..200u64 {
            let page = 511 - rounds % 64;
            let (begun, over) = (&AtomicBool::new(false), &AtomicBool::new(false));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut other, mut content) = (other.lock().unwrap(), bench.room_for_a_page());
                    while !over.load(Relaxed) {
                        let mut pager = Pager::new(&mut *other);
                        pager.copy(bench.host(page), &mut content).unwrap();
                        begun.store(true, Relaxed);
                    }
                });
                while !begun.load(Relaxed) {
                    std::thread::yield_now();
                }
                Pager::new(&mut worker).bring_in(bench.host(0), Access::Write).unwrap();
                over.store(true, Relaxed);
            });
            bench.check_accounts();
            Pager::new(&mut worker).discard(bench.hosts(0, 512));
            assert_eq!(bench.paged.resident(), 0);
        }
    });
}
