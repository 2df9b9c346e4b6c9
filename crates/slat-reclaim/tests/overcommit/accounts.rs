//! All operations of one thread, in random order: after each step, the accounts of frames, slots of
//! swap and pages add up, and pages have the expected content.

use crate::fixture::*;
use slat::{Access, Format};
use slat_guest::*;
use slat_reclaim::*;
use slat_sim::Arch;
use std::sync::atomic::Ordering::Relaxed;

/// Runs one history, and checks the accounts and the content of pages after each step.
fn history<F: Format, A: Arch + Copy>(format: F, arch: A, setup: Setup, seed: u64, steps: u32) {
    let pages = setup.pages;
    setup.run(format, arch, |bench| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut runner = Runner::new(bench, 0);
        let mut worker = Worker::new(bench.guest).unwrap();
        // No access waits for a page that cannot come in.
        bench.stop.store(true, Relaxed);
        for _ in 0..steps {
            let page = rng.u64(..pages);
            let (host, before) = (bench.host(page), bench.paged.stats());
            let fails = rng.u8(..10) == 0;
            bench.swap.fail_writes.store(fails && rng.bool(), Relaxed);
            bench.swap.fail_reads.store(fails && rng.bool(), Relaxed);
            let mut pager = Pager::new(&mut worker);
            match rng.u8(..24) {
                0..6 => runner.write(page),
                6..12 => runner.check(page),
                12 => {
                    let access = [Access::Read, Access::Write][rng.usize(..2)];
                    let here =
                        |page: u64| bench.guest.backing().page(bench.host(page), Access::Read);
                    let came = pager.bring_in(host, access);
                    assert_eq!(came.is_ok(), here(page).is_ok());
                }
                13..16 => {
                    let resident = bench.paged.resident();
                    match pager.reclaim(rng.u32(1..40)) {
                        Ok(gone) => assert_eq!(bench.paged.resident() + gone.pages, resident),
                        Err(_) => assert_eq!(bench.paged.resident(), resident),
                    }
                }
                16 => _ = pager.walk(),
                17 => {
                    let count = rng.u64(1..20).min(pages - page);
                    pager.discard(bench.hosts(page, count));
                    for page in page..page + count {
                        bench.stamps[page as usize].store(0, Relaxed);
                        assert!(
                            bench.guest.backing().page(bench.host(page), Access::Read).is_err()
                        );
                    }
                }
                18 => {
                    let write = rng.bool();
                    let touch = |hpa: slat::Hpa| {
                        // The page is in memory, and claimed for the device.
                        assert_eq!(bench.paged.places().moving, 1);
                        let found = bench.machine.read_host(hpa);
                        let version = bench.stamps[page as usize].load(Relaxed);
                        assert_eq!(found, stamp(page, version), "page {page}");
                        if write {
                            for place in bench.places() {
                                let value = stamp(page, version + 1);
                                bench.machine.write_host(slat::Hpa(hpa.0 + place), value);
                            }
                            bench.stamps[page as usize].store(version + 1, Relaxed);
                        }
                    };
                    _ = pager.with_page(host, write, touch);
                }
                19 => {
                    let mut content = bench.room_for_a_page();
                    if pager.copy(host, &mut content).is_ok() {
                        let found = u64::from_ne_bytes(content[..8].try_into().unwrap());
                        let version = bench.stamps[page as usize].load(Relaxed);
                        assert_eq!(found, stamp(page, version), "page {page}");
                    }
                }
                20 => bench.paged.set_limit(rng.u32(1..setup.frames as u32 + 20)),
                21 => bench.paged.set_swap([u32::MAX, rng.u32(..setup.swap)][rng.usize(..2)]),
                22 => drop(worker.invalidate(bench.hosts(page, 1), |_| {})),
                _ => bench.pool.resume(),
            }
            bench.check_accounts();
            // Arrivals minus departures are the pages that are there.
            let (stats, places) = (bench.paged.stats(), bench.paged.places());
            let since = stats.since(&before);
            assert!(since.clean <= since.evicted);
            let Places { nowhere, here, copied, moving, away } = places;
            assert_eq!(u64::from(nowhere + here + copied + moving + away), pages);
            assert!(bench.swap.holds() as u32 >= copied + away);
        }
        bench.swap.fail_writes.store(false, Relaxed);
        bench.swap.fail_reads.store(false, Relaxed);
        bench.pool.resume();
        bench.paged.set_limit(setup.frames as u32);
        bench.paged.set_swap(u32::MAX);
        bench.stop.store(false, Relaxed);
        (0..pages).for_each(|page| runner.check(page));
        let stats = bench.paged.stats();
        assert!(stats.refaults > 50 && stats.clean > 0 && stats.evicted > 50, "{stats:?}");
        // The order has lost no page: as many leave as swap has room for.
        let mut refused = 0;
        while refused < 10 {
            refused += u32::from(Pager::new(&mut worker).reclaim(64).is_err());
        }
        assert_eq!(u64::from(bench.paged.resident()), pages.saturating_sub(setup.swap.into()));
        Pager::new(&mut worker).discard(bench.hosts(0, pages));
        bench.check_accounts();
        let left = (bench.paged.resident(), bench.pool.swapped(), bench.swap.holds());
        assert_eq!(left, (0, 0, 0));
    });
}

fn all_adds_up_after_every_step<F: Format, A: Arch + Copy>(format: F, arch: A) {
    let setup = Setup { swap: 150, ..Setup::new(200, 120) };
    for (seed, policy) in [(1, Policy::Generations), (2, Policy::TwoLists)] {
        let batch = [1, 16][seed as usize - 1];
        let reclaim = slat_reclaim::Config { policy, batch, ..setup.reclaim };
        history(format, arch, Setup { reclaim, ..setup }, seed, 3000);
    }
}
on_all_formats!(steps, super::all_adds_up_after_every_step);

/// Blocks come in whole, and break.
fn all_adds_up_with_huge_pages<F: Format, A: Arch + Copy>(format: F, arch: A) {
    let block = F::size(1).bytes() / F::size(0).bytes();
    if block > 512 {
        return;
    }
    let mut setup = Setup::new(2 * block + 40, 2 * block);
    setup.reclaim.huge = true;
    history(format, arch, setup, 3, 1500);
}
on_all_formats!(blocks, super::all_adds_up_with_huge_pages);
