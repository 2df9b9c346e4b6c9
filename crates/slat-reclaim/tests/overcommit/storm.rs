//! A stress test of all operations at once: two vCPUs, reclaim, ageing, a migration that copies
//! from the dirty log, a host that takes memory back, and a device.

use crate::fixture::*;
use slat::{AgeOptions, Format, Gpa, GpaRange, TableBits};
use slat_guest::*;
use slat_reclaim::*;
use slat_sim::Arch;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const PAGES: u64 = 2048;

fn vcpu<F: Format, A: Arch + Copy>(bench: &Bench<'_, F, A>, id: u16, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut runner = Runner::new(bench, id);
    let vcpus = u64::from(VCPUS);
    while !bench.stop.load(Relaxed) {
        // Some pages are hot, and phases change.
        let hot = (bench.paged.stats().evicted / 4096 * 97) % PAGES;
        let page = match rng.u8(..4) {
            0 => rng.u64(..PAGES),
            _ => (hot + rng.u64(..PAGES / 4)) % PAGES,
        };
        let own = page / vcpus * vcpus + u64::from(id);
        match rng.u8(..8) {
            0..=2 => runner.write(own),
            3..=6 => runner.check(own),
            _ => runner.peek(page),
        }
    }
}

/// A separate thread that keeps some frames free.
fn reclaim<F: Format, A: Arch + Copy>(bench: &Bench<'_, F, A>, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut worker = Worker::new(bench.guest).unwrap();
    while !bench.stop.load(Relaxed) {
        if bench.pool.free() < 64 {
            let _ = Pager::new(&mut worker).reclaim(rng.u32(1..64));
        }
        match rng.u8(..16) {
            0 => _ = Pager::new(&mut worker).walk(),
            1 => {
                let skip = [TableBits::Ignored, TableBits::Exact][rng.usize(..2)];
                let how = AgeOptions { clear: true, table_bits: skip, flush_tlb: rng.bool() };
                let range = GpaRange::new(Gpa(BASE), PAGES * bench.page).unwrap();
                worker.age(range, None, &mut [0; PAGES as usize / 64], how).unwrap();
            }
            _ => std::thread::yield_now(),
        }
        bench.guest.reclaim();
    }
}

/// The host unmaps memory from the guest, and gives it back unchanged.
fn host_takes<F: Format, A: Arch + Copy>(bench: &Bench<'_, F, A>, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut worker = Worker::new(bench.guest).unwrap();
    while !bench.stop.load(Relaxed) {
        let (page, count) = (rng.u64(..PAGES), rng.u64(1..=32));
        let hosts = bench.hosts(page, count.min(PAGES - page));
        drop(worker.invalidate(hosts, |_| {}));
        // A device reads what it wrote last.
        let (write, device) = (rng.bool(), &bench.device[page as usize]);
        let touch = |hpa: slat::Hpa| {
            let hpa = slat::Hpa(hpa.0 + DEVICE);
            let version = device.load(Relaxed);
            assert_eq!(bench.machine.read_host(hpa), version, "page {page}, of the device");
            if write {
                bench.machine.write_host(hpa, version + 1);
                device.store(version + 1, Relaxed);
            }
        };
        let _ = Pager::new(&mut worker).with_page(bench.host(page), write, touch);
        std::thread::yield_now();
    }
}

fn migrate<F: Format, A: Arch + Copy>(
    bench: &Bench<'_, F, A>,
    worker: &mut TheWorker<'_, '_, F, A>,
    copies: &Mutex<Vec<[u64; 2]>>,
    pages: impl Iterator<Item = u64>,
) {
    let mut copies = copies.lock().unwrap();
    let mut content = bench.room_for_a_page();
    for page in pages {
        while Pager::new(worker).copy(bench.host(page), &mut content).is_err() {
            assert!(bench.swap.fail_reads.load(Relaxed));
        }
        copies[page as usize] = [word(&content, bench.places()[1]), word(&content, DEVICE)];
    }
}

fn word(content: &[u8], place: u64) -> u64 {
    let place = place as usize;
    u64::from_ne_bytes(content[place..place + 8].try_into().unwrap())
}

fn set(bits: &[u64]) -> impl Iterator<Item = u64> {
    (0..PAGES).filter(|page| bits[*page as usize / 64] >> (page % 64) & 1 == 1)
}

fn storm<F: Format, A: Arch + Copy>(format: F, arch: A, setup: Setup, seed: u64) {
    setup.run(format, arch, |bench| {
        let copies = &Mutex::new(vec![[0; 2]; PAGES as usize]);
        let mut worker = Worker::new(bench.guest).unwrap();
        std::thread::scope(|scope| {
            let threads = [
                scope.spawn(move || vcpu(bench, 0, seed)),
                scope.spawn(move || vcpu(bench, 1, seed + 1)),
                scope.spawn(move || reclaim(bench, seed + 2)),
                scope.spawn(move || host_takes(bench, seed + 3)),
            ];
            std::thread::sleep(Duration::from_millis(10));
            worker.set_memslot(bench.slot(true)).unwrap();
            migrate(bench, &mut worker, copies, 0..PAGES);
            let start = Instant::now();
            let enough = || bench.paged.stats().refaults > PAGES;
            let mut bits = [0; PAGES as usize / 64];
            let mut rng = fastrand::Rng::with_seed(seed);
            while start.elapsed() < Duration::from_millis(150)
                || (!enough() && start.elapsed() < Duration::from_secs(60))
            {
                bits.fill(0);
                worker.take_log(MemslotId(0), &mut bits).unwrap();
                migrate(bench, &mut worker, copies, set(&bits));
                // Swap fails now and then.
                bench.swap.fail_writes.store(rng.u8(..8) == 0, Relaxed);
                bench.swap.fail_reads.store(rng.u8(..16) == 0, Relaxed);
                std::thread::sleep(Duration::from_millis(1));
                bench.swap.fail_writes.store(false, Relaxed);
                bench.swap.fail_reads.store(false, Relaxed);
                bench.pool.resume();
            }
            bench.stop.store(true, Relaxed);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            for _ in 0..2 {
                bits.fill(0);
                worker.take_log(MemslotId(0), &mut bits).unwrap();
                migrate(bench, &mut worker, copies, set(&bits));
            }
            assert!(enough(), "{:?}", bench.paged.stats());
        });
        let mut content = bench.room_for_a_page();
        let copies = copies.lock().unwrap();
        for page in 0..PAGES {
            Pager::new(&mut worker).copy(bench.host(page), &mut content).unwrap();
            let version = bench.stamps[page as usize].load(Relaxed);
            for place in bench.places() {
                assert_eq!(word(&content, place), stamp(page, version), "page {page} at {place}");
            }
            let device = bench.device[page as usize].load(Relaxed);
            assert_eq!(word(&content, DEVICE), device, "page {page}, of the device");
            let now = [stamp(page, version), device];
            assert_eq!(copies[page as usize], now, "page {page} was not copied");
        }
    });
}

fn nothing_is_lost_with_everything_at_once<F: Format, A: Arch + Copy>(format: F, arch: A) {
    let rounds = std::env::var("ROUNDS").map_or(1, |rounds| rounds.parse().unwrap());
    let seed = crate::seed::seed();
    for round in 0..rounds {
        let seed = seed + 100 * round;
        let setup = Setup::new(PAGES, PAGES * 2 / 3);
        let reclaim = slat_reclaim::Config { fresh: true, ..setup.reclaim };
        storm(format, arch, Setup { reclaim, ..setup }, seed);
        let reclaim = slat_reclaim::Config { huge: true, batch: 16, ..reclaim };
        storm(format, arch, Setup { reclaim, frames: 1700, ..setup }, seed + 10);
        let reclaim = slat_reclaim::Config { policy: Policy::TwoLists, batch: 1, ..reclaim };
        storm(format, arch, Setup { reclaim, frames: 600, ..setup }, seed + 20);
        if (round + 1) % 100 == 0 {
            eprintln!("{}: {} rounds of three storms", std::any::type_name::<A>(), round + 1);
        }
    }
}
on_all_formats!(storms, super::nothing_is_lost_with_everything_at_once);

fn hardware_log(log: Logging) -> slat_guest::Config {
    slat_guest::Config { logging: log, ..slat_guest::Config::new(VCPUS, slat::PageSize::SIZE_2M) }
}

#[test]
fn nothing_is_lost_where_hardware_keeps_the_log() {
    let setup = Setup { guest: hardware_log(Logging::Hardware), ..Setup::new(PAGES, 1300) };
    let seed = crate::seed::seed();
    storm(ept(), slat_sim::Ept::default(), setup, seed + 7);
    let (format, arch) = arm(true);
    storm(format, arch, setup, seed + 8);
}
