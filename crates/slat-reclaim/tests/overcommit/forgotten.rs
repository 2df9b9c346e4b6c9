//! The content of a guest's pages is not found in swap once the guest has given them back.

use crate::fixture::*;
use crate::shares::{at, guests, pages};
use slat::{Access, PageSize};
use slat_guest::Worker;
use slat_reclaim::*;
use slat_sim::Ept;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Returns a directory on a file system that may support `O_DIRECT`.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Opens the file of a swap file in `directory`, by its descriptor in `/proc`.
fn file_in(directory: &std::path::Path) -> File {
    let is_there = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.starts_with(directory))
    };
    let mut files = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|file| file.path());
    File::open(files.find(is_there).unwrap()).unwrap()
}

/// Returns the number of bytes of the file that are not zero.
fn left(file: &File) -> usize {
    let bytes = file.metadata().unwrap().len() as usize;
    let mut all = vec![0; bytes];
    file.read_exact_at(&mut all, 0).unwrap();
    all.iter().filter(|byte| **byte != 0).count()
}

const SECRET: u64 = 0x5ec2_e75e_c2e7;

/// Runs with the page cache and with `O_DIRECT`. Each page is written, and leaves, `times` times.
fn nothing_is_left(times: u64, gives_back: bool) {
    let directory = directory();
    let new = |direct: bool| match direct {
        true => SwapFile::direct(directory.path(), 1024, PageSize::SIZE_4K),
        false => SwapFile::new(directory.path(), 1024, PageSize::SIZE_4K),
    };
    for swap in [false, true].into_iter().filter_map(|direct| new(direct).ok()) {
        let file = file_in(directory.path());
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600, "who may open it");
        let limit = slat_reclaim::Config::new(200);
        guests(&swap, 512, &[(600, limit)], |pool, mut threads| {
            let machine = threads[0].guest().tables().platform();
            let mut pager = Pager::new(&mut threads[0]);
            for _ in 0..times {
                for page in 0..600 {
                    let write = |hpa| machine.write_host(hpa, SECRET);
                    pager.with_page(at(page), true, write).unwrap();
                }
            }
            assert!(pool.swapped() >= 400 && left(&file) >= 400 * 6);
            if gives_back {
                pager.discard(pages(0, 600));
                assert_eq!((pool.swapped(), pool.trouble()), (0, None));
                assert_eq!(left(&file), 0);
            }
        });
        assert_eq!(left(&file), 0, "once the guest has gone");
    }
}

#[test]
fn what_a_balloon_takes_is_not_in_the_swap_file_any_more() {
    nothing_is_left(1, true);
}

#[test]
fn pages_written_to_swap_repeatedly_leave_nothing_behind() {
    nothing_is_left(3, true);
}

#[test]
fn what_a_guest_had_is_not_in_the_swap_file_once_it_has_gone() {
    nothing_is_left(2, false);
}

/// A guest that writes its pages as they come back leaves stale slots. Those that are not reused
/// are forgotten some dozens at a time.
#[test]
fn what_guests_leave_behind_in_swap_is_bounded() {
    let swap = Flaky::new(2048, PageSize::SIZE_4K);
    guests(&swap, 1024, &[(1024, slat_reclaim::Config::new(1024))], |pool, mut threads| {
        let mut pager = Pager::new(&mut threads[0]);
        let mut bring = |page| pager.bring_in(at(page), Access::Write).unwrap();
        (0..1024).for_each(&mut bring);
        let mut pager = Pager::new(&mut threads[0]);
        while pager.reclaim(64).is_ok() {}
        assert_eq!((pool.swapped(), swap.holds()), (1024, 1024));
        (0..1024).for_each(|page| pager.bring_in(at(page), Access::Write).unwrap());
        assert_eq!((pool.swapped(), swap.holds()), (0, 1024), "no fault has asked swap to forget");
        while pager.reclaim(1).is_err() {}
        assert_eq!((pool.swapped(), swap.holds()), (1, 1));
    });
}

#[test]
fn a_swap_that_cannot_forget_slots_is_reported_and_asked_again() {
    let swap = Flaky::new(256, PageSize::SIZE_4K);
    guests(&swap, 128, &[(128, slat_reclaim::Config::new(128))], |pool, mut threads| {
        let mut pager = Pager::new(&mut threads[0]);
        (0..128).for_each(|page| pager.bring_in(at(page), Access::Write).unwrap());
        while pager.reclaim(64).is_ok() {}
        swap.fail_forgets.store(true, Relaxed);
        pager.discard(pages(0, 100));
        assert_eq!(pool.trouble(), Some(SwapError::System { errno: 5 }));
        assert_eq!((pool.swapped(), swap.holds()), (28, 128));
        swap.fail_forgets.store(false, Relaxed);
        pool.resume();
        pager.discard(pages(100, 1));
        assert_eq!((pool.swapped(), swap.holds(), pool.trouble()), (27, 27, None));
    });
}

/// Waits until `what` is so, at most for ten seconds; returns whether it is.
fn soon(what: impl Fn() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    while !what() && Instant::now() < end {
        std::thread::yield_now();
    }
    what()
}

/// Swap whose writes call a function first, which may let them fail before they touch the slot.
struct HookedSwap<'f> {
    flaky: Flaky,
    first: Mutex<Box<dyn FnMut() -> Result<(), SwapError> + Send + 'f>>,
}

impl<'f> HookedSwap<'f> {
    fn new(slots: u32, first: impl FnMut() -> Result<(), SwapError> + Send + 'f) -> Self {
        let first = Mutex::new(Box::new(first) as Box<_>);
        Self { flaky: Flaky::new(slots, PageSize::SIZE_4K), first }
    }
}

impl Swap for HookedSwap<'_> {
    fn slots(&self) -> u32 {
        self.flaky.slots()
    }

    fn page(&self) -> u64 {
        self.flaky.page()
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
        (self.first.lock().unwrap())()?;
        self.flaky.write(slot, page)
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        self.flaky.read(slot, page)
    }

    fn forget(&self, slots: std::ops::Range<u32>) -> Result<(), SwapError> {
        self.flaky.forget(slots)
    }
}

/// Lets writes of a [`HookedSwap`] swap fail: once `blocks` is set, each says that it was `asked`,
/// and waits for `go`.
#[derive(Default)]
struct FailingWrites {
    blocks: AtomicBool,
    asked: AtomicBool,
    go: AtomicBool,
}

impl FailingWrites {
    fn write(&self, error: SwapError) -> Result<(), SwapError> {
        if !self.blocks.load(Relaxed) {
            return Ok(());
        }
        self.asked.store(true, Relaxed);
        assert!(soon(|| self.go.load(Relaxed)));
        Err(error)
    }
}

/// Another guest's thread has the only slot, with old content of this guest, and its disk hangs. It
/// does not write the slot in the end.
#[test]
fn a_balloon_does_not_wait_for_a_slot_that_another_guest_has() {
    let error = SwapError::System { errno: 5 };
    let failing = FailingWrites::default();
    let FailingWrites { blocks, asked, go } = &failing;
    let swap = HookedSwap::new(1, || failing.write(error));
    let config = slat_reclaim::Config::new(64);
    guests(&swap, 128, &[(64, config), (64, config)], |pool, mut threads| {
        let mut other = threads.pop().unwrap();
        let mut one = threads.pop().unwrap();
        let mut pager = Pager::new(&mut one);
        pager.bring_in(at(0), Access::Write).unwrap();
        while pager.reclaim(1).is_err() {}
        pager.bring_in(at(0), Access::Write).unwrap();
        Pager::new(&mut other).bring_in(at(0), Access::Write).unwrap();
        assert_eq!((pool.swapped(), swap.flaky.holds()), (0, 1));
        blocks.store(true, Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| while Pager::new(&mut other).reclaim(1) == Err(ReclaimError::InUse) {});
            assert!(soon(|| asked.load(Relaxed)));
            // It returns while the other thread's write hangs.
            Pager::new(&mut one).discard(pages(0, 1));
            assert_eq!(swap.flaky.holds(), 1, "the other thread overwrites or wipes it");
            go.store(true, Relaxed);
        });
        assert_eq!(swap.flaky.holds(), 0, "it was given back unwritten, and wiped");
        assert_eq!(pool.trouble(), Some(error));
        blocks.store(false, Relaxed);
        pool.resume();
    });
}

/// While a write finds no room on the disk, the disk fails in another way.
#[test]
fn an_error_of_the_disk_is_not_replaced_by_a_lack_of_room() {
    let failing = FailingWrites::default();
    let FailingWrites { blocks, asked, go } = &failing;
    let swap = HookedSwap::new(64, || failing.write(SwapError::Full));
    let config = slat_reclaim::Config::new(64);
    guests(&swap, 128, &[(64, config), (64, config)], |pool, mut threads| {
        let mut other = threads.pop().unwrap();
        let mut one = threads.pop().unwrap();
        Pager::new(&mut other).bring_in(at(0), Access::Write).unwrap();
        let mut pager = Pager::new(&mut one);
        (0..8).for_each(|page| pager.bring_in(at(page), Access::Write).unwrap());
        while pager.reclaim(8).is_ok() {}
        assert!(pool.swapped() > 0);
        blocks.store(true, Relaxed);
        let error = Some(SwapError::System { errno: 5 });
        std::thread::scope(|scope| {
            let reclaim = || while Pager::new(&mut other).reclaim(1) == Err(ReclaimError::InUse) {};
            scope.spawn(reclaim);
            assert!(soon(|| asked.load(Relaxed)));
            swap.flaky.fail_forgets.store(true, Relaxed);
            pager.discard(pages(0, 8));
            assert_eq!(pool.trouble(), error);
            go.store(true, Relaxed);
        });
        assert_eq!(pool.trouble(), error, "it stays until somebody has looked");
        swap.flaky.fail_forgets.store(false, Relaxed);
        blocks.store(false, Relaxed);
        pool.resume();
    });
}

/// A balloon waits for a page that another thread has claimed, while a reclaimer needs a slot.
#[test]
fn a_balloon_that_waits_for_a_page_keeps_no_swap_slot() {
    let setup = Setup { swap: 2, ..Setup::new(8, 64) };
    setup.run(ept(), Ept::default(), |bench| {
        let [mut main, mut uses, mut balloon, mut reclaims] =
            [(); 4].map(|()| Worker::new(bench.guest).unwrap());
        let mut pager = Pager::new(&mut main);
        for page in [5, 0] {
            pager.bring_in(bench.host(page), Access::Write).unwrap();
            while pager.reclaim(1).is_err() {}
        }
        assert_eq!(bench.pool.swapped(), 2);
        (1..3).for_each(|page| pager.bring_in(bench.host(page), Access::Write).unwrap());
        let (uses_it, go) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (uses_it, go) = (&uses_it, &go);
            scope.spawn(move || {
                let wait = |_| {
                    uses_it.store(true, Relaxed);
                    assert!(soon(|| go.load(Relaxed)));
                };
                Pager::new(&mut uses).with_page(bench.host(1), false, wait).unwrap();
            });
            assert!(soon(|| uses_it.load(Relaxed)));
            scope.spawn(move || Pager::new(&mut balloon).discard(bench.hosts(0, 3)));
            assert!(soon(|| bench.pool.swapped() == 1));
            let reclaimer = scope.spawn(move || {
                while Pager::new(&mut reclaims).reclaim(8) == Err(ReclaimError::InUse) {}
            });
            let ended = soon(|| reclaimer.is_finished());
            // A slot for the reclaimer, if it waits for one.
            pager.bring_in(bench.host(5), Access::Write).unwrap();
            go.store(true, Relaxed);
            assert!(ended, "it waits for a slot that the balloon keeps");
        });
    });
}

/// Its neighbour is given back meanwhile, and so is a range that has only a part of it.
#[test]
fn a_page_that_is_used_again_after_a_discard_keeps_its_content() {
    for case in 0..8u32 {
        let [log, moves, swapped] = [1, 2, 4].map(|bit| case & bit != 0);
        let swap = Flaky::new(1024, PageSize::SIZE_4K);
        guests(&swap, 256, &[(64, slat_reclaim::Config::new(256))], |_, mut threads| {
            let mut thread = threads.pop().unwrap();
            let machine = thread.guest().tables().platform();
            let write = |thread: &mut _, page, value| {
                let write = |hpa| machine.write_host(hpa, value);
                Pager::new(thread).with_page(at(page), true, write).unwrap();
            };
            let read = |thread: &mut _, page| {
                let mut content = [0; 4096];
                Pager::new(thread).copy(at(page), &mut content).unwrap();
                u64::from_ne_bytes(*content.first_chunk().unwrap())
            };
            let spec = crate::fixture::slot(64 * 4096, log);
            thread.set_memslot(spec).unwrap();
            write(&mut thread, 3, 0x33);
            write(&mut thread, 4, 0x44);
            Pager::new(&mut thread).discard(pages(3, 1));
            assert_eq!(read(&mut thread, 3), 0);
            write(&mut thread, 3, 0x55);
            if swapped {
                Pager::new(&mut thread).reclaim(64).unwrap();
            }
            if moves {
                let gpa = slat::Gpa(BASE + (1 << 30));
                thread.set_memslot(slat_guest::MemslotSpec { gpa, ..spec }).unwrap();
            }
            let pins = Pager::new(&mut thread).pin(pages(3, 1)).unwrap();
            let start = slat_guest::Hva(at(3).0 + 2048);
            let most = slat_guest::HvaRange { start, bytes: 4096 + 2048 };
            Pager::new(&mut thread).discard(most);
            assert_eq!((read(&mut thread, 3), read(&mut thread, 4)), (0x55, 0), "half of page 3");
            write(&mut thread, 4, 0x66);
            Pager::new(&mut thread).discard(pages(3, 2));
            assert_eq!((read(&mut thread, 3), read(&mut thread, 4)), (0x55, 0), "pinned");
            drop(pins);
            Pager::new(&mut thread).reclaim(64).unwrap();
            assert_eq!(read(&mut thread, 3), 0x55);
            Pager::new(&mut thread).discard(pages(0, 64));
            assert!((0..64).all(|page| read(&mut thread, page) == 0));
        });
    }
}
