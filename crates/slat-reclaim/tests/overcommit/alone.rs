//! Tests of each operation with one thread, and of failures of swap.

use crate::fixture::*;
use slat::{Access, Format};
use slat_guest::*;
use slat_reclaim::*;
use slat_sim::Arch;
use std::sync::atomic::Ordering::Relaxed;

fn all_pages_keep_their_content<F: Format, A: Arch + Copy>(format: F, arch: A) {
    let variants = |reclaim: slat_reclaim::Config| {
        [
            reclaim,
            slat_reclaim::Config {
                look_around: false,
                window: 1,
                table_bits: slat::TableBits::Ignored,
                ..reclaim
            },
            slat_reclaim::Config { policy: Policy::TwoLists, batch: 1, ..reclaim },
        ]
    };
    for reclaim in variants(slat_reclaim::Config::new(256)) {
        Setup { reclaim, ..Setup::new(512, 256) }.run(format, arch, |bench| {
            let mut runner = Runner::new(bench, 0);
            for _ in 0..3 {
                (0..512).for_each(|page| runner.write(page));
                (0..512).rev().for_each(|page| runner.check(page));
            }
            let stats = bench.paged.stats();
            assert_eq!(stats.first_touches, 512);
            assert!(stats.refaults >= 512 && stats.evicted >= 512, "{stats:?}");
            assert!(bench.paged.resident() <= 256);
        });
    }
}
on_all_formats!(content, super::all_pages_keep_their_content);

fn what_is_read_only_is_written_to_swap_once<F: Format, A: Arch + Copy>(format: F, arch: A) {
    Setup::new(512, 256).run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..512).for_each(|page| runner.write(page));
        // The pages in memory were written; from now on none is.
        (0..512).for_each(|page| runner.check(page));
        (0..512).for_each(|page| runner.check(page));
        let writes = bench.swap.writes.load(Relaxed);
        (0..3).for_each(|_| (0..512).for_each(|page| runner.check(page)));
        assert_eq!(bench.swap.writes.load(Relaxed), writes);
        assert!(bench.paged.stats().clean > 256);
    });
}
on_all_formats!(clean, super::what_is_read_only_is_written_to_swap_once);

fn a_swap_that_does_not_write_stops_eviction_and_loses_nothing<F: Format, A: Arch + Copy>(
    format: F,
    arch: A,
) {
    Setup::new(512, 256).run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..300).for_each(|page| runner.write(page));
        bench.swap.fail_writes.store(true, Relaxed);
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        let full = ReclaimError::Swap(SwapError::Full);
        assert_eq!(pager.reclaim(10), Err(full));
        assert_eq!(bench.pool.trouble(), Some(SwapError::Full));
        let bring = |page| pager.bring_in(bench.host(page), Access::Write);
        let error = (300..512).map(bring).find_map(Result::err);
        assert_eq!(error, Some(PageError::NoRoom { reason: full }));
        assert_eq!(pager.reclaim(10), Err(full), "until somebody has looked");
        // The pages in memory stay in use.
        let here = (0..512)
            .filter(|&page| bench.guest.backing().page(bench.host(page), Access::Read).is_ok());
        let here: Vec<u64> = here.collect();
        assert_eq!(here.len(), 256);
        here.into_iter().for_each(|page| runner.write(page));
        bench.swap.fail_writes.store(false, Relaxed);
        bench.pool.resume();
        (0..512).for_each(|page| runner.check(page));
    });
}
on_all_formats!(full, super::a_swap_that_does_not_write_stops_eviction_and_loses_nothing);

fn a_swap_that_does_not_read_is_asked_again_another_time<F: Format, A: Arch + Copy>(
    format: F,
    arch: A,
) {
    Setup::new(512, 256).run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..512).for_each(|page| runner.write(page));
        bench.swap.fail_reads.store(true, Relaxed);
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        let away =
            |page: &u64| bench.guest.backing().page(bench.host(*page), Access::Read).is_err();
        let page = (0..512).find(away).unwrap();
        let error =
            PageError::Read { host: bench.host(page), error: SwapError::Short { bytes: 7 } };
        assert_eq!(pager.bring_in(bench.host(page), Access::Read), Err(error));
        assert_eq!(pager.copy(bench.host(page), &mut bench.room_for_a_page()), Err(error));
        bench.swap.fail_reads.store(false, Relaxed);
        (0..512).for_each(|page| runner.check(page));
    });
}
on_all_formats!(short, super::a_swap_that_does_not_read_is_asked_again_another_time);

fn swap_that_is_too_small_is_called_full<F: Format, A: Arch + Copy>(format: F, arch: A) {
    Setup { swap: 10, ..Setup::new(512, 256) }.run(format, arch, |bench| {
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        let bring = |page| pager.bring_in(bench.host(page), Access::Write);
        let error = (0..512).map(bring).find_map(Result::err).unwrap();
        let full = ReclaimError::Swap(SwapError::Full);
        assert_eq!(error, PageError::NoRoom { reason: full });
        assert_eq!(bench.pool.swapped(), 10);
    });
}
on_all_formats!(small, super::swap_that_is_too_small_is_called_full);

/// Pages of a block.
fn pages_of_a_block<F: Format>() -> u64 {
    F::size(1).bytes() / F::size(0).bytes()
}

fn huge_pages_come_split_and_are_put_together<F: Format, A: Arch + Copy>(format: F, arch: A) {
    let block = pages_of_a_block::<F>();
    let mut setup = Setup::new(4 * block, 3 * block);
    setup.reclaim.huge = true;
    setup.run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..3 * block).step_by(block as usize).for_each(|page| runner.write(page));
        assert_eq!((bench.paged.stats().huge, bench.paged.resident()), (3, 3 * block as u32));
        let mut worker = Worker::new(bench.guest).unwrap();
        let two = |worker: &mut TheWorker<'_, '_, F, A>| {
            let sizes = worker.leaves_by_size();
            sizes.iter().find(|(size, _)| *size == F::size(1)).unwrap().1
        };
        assert_eq!(two(&mut worker), 3);
        // The fourth block does not fit as a whole: idle pages make room.
        let more = block / 8;
        (3 * block..3 * block + more).for_each(|page| runner.write(page));
        let stats = bench.paged.stats();
        assert!(stats.split >= 1 && stats.evicted >= more, "{stats:?}");
        assert!(two(&mut worker) < 3);
        // All pages are in use, and fit: they become blocks again.
        Pager::new(&mut worker).discard(bench.hosts(2 * block, 2 * block));
        for page in 2 * block..4 * block {
            bench.stamps[page as usize].store(0, Relaxed);
        }
        (0..2 * block).for_each(|page| runner.write(page));
        for _ in 0..3 {
            (0..2 * block).for_each(|page| runner.check(page));
            assert!(Pager::new(&mut worker).walk());
        }
        (0..2 * block).for_each(|page| runner.check(page));
        (0..2 * block).for_each(|page| runner.write(page));
        assert!(bench.paged.stats().collapsed >= 1, "{:?}", bench.paged.stats());
        assert!(two(&mut worker) >= 1);
        (0..4 * block).for_each(|page| runner.check(page));
    });
}
on_all_formats!(huge, super::huge_pages_come_split_and_are_put_together);

fn pages_that_were_away_are_put_together_with_their_content<F: Format, A: Arch + Copy>(
    format: F,
    arch: A,
) {
    let block = pages_of_a_block::<F>();
    let mut setup = Setup::new(2 * block, 4 * block);
    setup.reclaim.huge = true;
    setup.run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..2 * block).for_each(|page| runner.write(page));
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        (0..12).for_each(|_| _ = pager.reclaim(block as u32 / 8));
        // The pages come back for reads: swap has copies, and the frames are different.
        while bench.paged.stats().collapsed < 2 {
            (0..2 * block).for_each(|page| runner.check(page));
            assert!(pager.walk());
        }
        let stats = bench.paged.stats();
        assert!(stats.refaults >= block && stats.moved >= 2 * block, "{stats:?}");
        // The last pages never left: the first fault finds no copy, and maps the whole block.
        (0..2 * block).rev().for_each(|page| runner.write(page));
        let mut content = bench.room_for_a_page();
        for page in 0..2 * block {
            pager.copy(bench.host(page), &mut content).unwrap();
            let word = u64::from_ne_bytes(content[..8].try_into().unwrap());
            assert_eq!(word, stamp(page, 2), "the guest wrote elsewhere");
        }
        while pager.reclaim(64).is_ok() {}
        (0..2 * block).for_each(|page| runner.check(page));
    });
}
on_all_formats!(together, super::pages_that_were_away_are_put_together_with_their_content);

fn a_copy_a_device_and_a_balloon_see_pages_wherever_they_are<F: Format, A: Arch + Copy>(
    format: F,
    arch: A,
) {
    Setup::new(512, 128).run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..512).for_each(|page| runner.write(page));
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        let mut content = bench.room_for_a_page();
        for page in 0..512 {
            pager.copy(bench.host(page), &mut content).unwrap();
            let word = u64::from_ne_bytes(content[..8].try_into().unwrap());
            assert_eq!(word, stamp(page, 1));
        }
        assert!(pager.copy(bench.host(512), &mut content).is_err(), "outside");
        let short = pager.copy(bench.host(0), &mut content[..512]);
        assert_eq!(short, Err(PageError::Length { bytes: 512 }));
        // A device writes all pages, after swap had copies of them.
        (0..512).for_each(|page| runner.check(page));
        for page in 0..512 {
            let write = |hpa: slat::Hpa| {
                bench.places().iter().for_each(|place| {
                    bench.machine.write_host(slat::Hpa(hpa.0 + place), stamp(page, 9));
                });
            };
            pager.with_page(bench.host(page), true, write).unwrap();
            bench.stamps[page as usize].store(9, Relaxed);
        }
        (0..512).for_each(|page| runner.check(page));
        // Discarded pages read as zero, and take neither memory nor swap.
        pager.discard(HvaRange { start: Hva(HOST + 1), bytes: 512 * bench.page - 1 });
        assert_eq!(bench.paged.resident() + bench.pool.swapped(), 1);
        (1..512).for_each(|page| bench.stamps[page].store(0, Relaxed));
        (0..512).for_each(|page| runner.check(page));
    });
}
on_all_formats!(elsewhere, super::a_copy_a_device_and_a_balloon_see_pages_wherever_they_are);

fn a_page_in_use_by_a_device_at_its_turn_is_given_up_later<F: Format, A: Arch + Copy>(
    format: F,
    arch: A,
) {
    for policy in [Policy::Generations, Policy::TwoLists] {
        let mut setup = Setup::new(512, 256);
        setup.reclaim.policy = policy;
        setup.run(format, arch, |bench| {
            let mut runner = Runner::new(bench, 0);
            (0..64).for_each(|page| runner.write(page));
            let mut worker = Worker::new(bench.guest).unwrap();
            // A page that was used is tested twice, so this takes several rounds.
            let give_up_all = |worker: &mut TheWorker<'_, '_, F, A>| {
                (0..8).for_each(|_| _ = Pager::new(worker).reclaim(64));
                bench.paged.resident()
            };
            let while_it_has = |_| assert_eq!(give_up_all(&mut worker), 1);
            Pager::new(runner.worker()).with_page(bench.host(7), false, while_it_has).unwrap();
            assert_eq!(give_up_all(&mut worker), 0, "{policy:?}");
            (0..64).for_each(|page| runner.check(page));
        });
    }
}
on_all_formats!(held, super::a_page_in_use_by_a_device_at_its_turn_is_given_up_later);

fn a_pinned_page_stays_in_place_and_keeps_a_devices_writes<F: Format, A: Arch + Copy>(
    format: F,
    arch: A,
) {
    let mut setup = Setup::new(512, 256);
    setup.reclaim.huge = true;
    setup.run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..64).for_each(|page| runner.write(page));
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        // All pages are in memory again, with copies in swap.
        (0..8).for_each(|_| _ = pager.reclaim(64));
        (0..64).for_each(|page| runner.check(page));
        let pinned = pager.pin(bench.hosts(7, 2)).unwrap();
        let memory = pinned.memory().to_vec();
        assert_eq!(memory.len(), 2);
        for (page, hpa) in (7..9).zip(&memory) {
            for place in bench.places() {
                bench.machine.write_host(slat::Hpa(hpa.0 + place), stamp(page, 9));
            }
            bench.stamps[page as usize].store(9, Relaxed);
        }
        (0..8).for_each(|_| _ = pager.reclaim(64));
        assert_eq!(bench.paged.resident(), 2);
        pager.discard(bench.hosts(7, 1));
        assert_eq!(bench.paged.resident(), 2, "a device has it");
        (0..64).for_each(|page| runner.check(page));
        pager.walk();
        let again = pager.pin(bench.hosts(7, 2)).unwrap();
        assert_eq!(again.memory(), memory);
        drop((pinned, again));
        (0..8).for_each(|_| _ = pager.reclaim(64));
        assert_eq!(bench.paged.resident(), 0);
        (0..64).for_each(|page| runner.check(page));
        let beyond = bench.host(512 * 512);
        let beyond = pager.pin(HvaRange { start: beyond, bytes: bench.page });
        assert!(matches!(beyond, Err(PageError::Outside { .. })));
    });
}
on_all_formats!(pinned, super::a_pinned_page_stays_in_place_and_keeps_a_devices_writes);

fn what_is_used_stays_and_the_idle_part_is_known<F: Format, A: Arch + Copy>(format: F, arch: A) {
    let mut setup = Setup::new(1024, 1024);
    setup.reclaim.fresh = true;
    setup.run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..1024).for_each(|page| runner.write(page));
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        for _ in 0..4 {
            assert!(pager.walk());
            (0..256).for_each(|page| runner.check(page));
        }
        assert!(pager.walk());
        let idle = bench.paged.idle().unwrap();
        assert_eq!(idle.generations[0].pages, 256, "{idle:?}");
        assert_eq!(idle.takeable(0.0), 768, "{idle:?}");
        assert_eq!(pager.reclaim(768).unwrap().pages, 768);
        let before = bench.paged.stats().refaults;
        (0..256).for_each(|page| runner.check(page));
        assert_eq!(bench.paged.stats().refaults, before, "what was used had to come back");
        // Below a smaller limit, each page that comes in gives up a batch.
        bench.paged.set_limit(100);
        runner.check(500);
        assert_eq!(bench.paged.resident(), 256 - 64 + 1);
        (501..504).for_each(|page| runner.check(page));
        assert!(bench.paged.resident() <= 100);
    });
}
on_all_formats!(working_set, super::what_is_used_stays_and_the_idle_part_is_known);

fn pages_stay_for_the_minimum_residency<F: Format, A: Arch + Copy>(format: F, arch: A) {
    let mut setup = Setup::new(512, 256);
    // Longer than the test takes.
    setup.reclaim.residency = 1 << 42;
    setup.run(format, arch, |bench| {
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        (0..256).for_each(|page| pager.bring_in(bench.host(page), Access::Write).unwrap());
        let thrashing = PageError::NoRoom { reason: ReclaimError::Thrashing };
        assert_eq!(pager.bring_in(bench.host(256), Access::Write), Err(thrashing));
        assert_eq!(bench.paged.stats().evicted, 0);
    });
}
on_all_formats!(residency, super::pages_stay_for_the_minimum_residency);

#[test]
fn a_pool_that_cannot_be_is_refused() {
    use slat::{Hpa, PageSize};
    let machine = slat_sim::fast::FastMachine::new(slat_sim::Ept::default(), 1, 2 << 20, 1 << 20);
    let machine = machine.unwrap();
    let swap = Flaky::new(1, PageSize::SIZE_4K);
    let layout = Layout {
        base: Hpa(2 << 20),
        bytes: 1 << 20,
        page: PageSize::SIZE_4K,
        block: PageSize::SIZE_2M,
    };
    let refused = |layout| Pool::new(Mem(&machine), layout, &swap).err().unwrap();
    let unaligned = |size| PoolError::Unaligned { size };
    assert_eq!(refused(Layout { base: Hpa(4096), ..layout }), unaligned(PageSize::SIZE_2M));
    assert_eq!(refused(Layout { bytes: 4095, ..layout }), unaligned(PageSize::SIZE_4K));
    let (base, bytes) = (Hpa(0u64.wrapping_sub(2 << 20)), 2 << 20);
    assert_eq!(refused(Layout { base, bytes, ..layout }), PoolError::Beyond { base, bytes });
    let pages = 1 << 28;
    assert_eq!(refused(Layout { bytes: 1 << 40, ..layout }), PoolError::TooMany { pages });
    let block = PageSize::SIZE_4K;
    assert_eq!(refused(Layout { block, ..layout }), PoolError::Block { block });
    let size = |bytes| PageSize::from_bytes(bytes).unwrap();
    let large = Layout { page: size(16 << 10), block: size(32 << 20), base: Hpa(0), ..layout };
    assert_eq!(refused(large), PoolError::Swap { page: 4096 });
    let pool = Pool::new(Mem(&machine), layout, &swap).unwrap();
    let config = slat_reclaim::Config::new(1);
    let refused =
        |start, bytes| PagedMemory::new(&pool, Hva(start), bytes, config, 0).err().unwrap();
    assert_eq!(refused(4096, 4096), unaligned(PageSize::SIZE_2M));
    assert_eq!(refused(0, 100), unaligned(PageSize::SIZE_4K));
    assert_eq!(refused(0, 1 << 40), PoolError::TooMany { pages });
}

/// A leaf of the guest would have several frames, or a frame several leaves.
#[test]
fn a_guest_whose_pages_are_not_the_pools_has_none() {
    use slat::{PageSize, Vmid};
    let machine = slat_sim::fast::FastMachine::new(slat_sim::Ept::default(), 1, 4 << 20, 4 << 20);
    let machine = machine.unwrap();
    let size = |bytes| PageSize::from_bytes(bytes).unwrap();
    let (page, block) = (size(16 << 10), size(2 << 20));
    let swap = Flaky::new(16, page);
    let layout = Layout { base: machine.memory_base(), bytes: 1 << 20, page, block };
    let pool = Pool::new(Mem(&machine), layout, &swap).unwrap();
    let config = slat_reclaim::Config::new(64);
    let paged = PagedMemory::new(&pool, Hva(HOST), 1 << 20, config, 0).unwrap();
    let config = slat_guest::Config::new(1, PageSize::SIZE_2M);
    let guest = Guest::new(ept(), Vmid(1), 39, &machine, &paged, config).unwrap();
    let mut worker = Worker::new(&guest).unwrap();
    worker.set_memslot(slot(1 << 20, false)).unwrap();
    let refused = PageError::PageSize { pool: page, tables: PageSize::SIZE_4K };
    let mut pager = Pager::new(&mut worker);
    assert_eq!(pager.bring_in(Hva(HOST), Access::Write), Err(refused));
    assert_eq!(pager.with_page(Hva(HOST), true, |_| ()), Err(refused));
    assert_eq!(paged.resident(), 0);
}

/// Two guests share a pool; each has its own limit, and both together are bound by the pool.
#[test]
fn guests_of_a_pool_keep_within_their_limits_and_the_pool() {
    use slat::{Gpa, PageSize, Vmid};
    const K4: u64 = 4096;
    use slat_sim::fast::FastMachine;
    let machine = FastMachine::new(slat_sim::Ept::default(), 2, 4 << 20, 16 << 20).unwrap();
    let swap = Flaky::new(2048, PageSize::SIZE_4K);
    let layout = Layout {
        base: machine.memory_base(),
        bytes: 1024 * K4,
        page: PageSize::SIZE_4K,
        block: PageSize::SIZE_2M,
    };
    let pool = Pool::new(Mem(&machine), layout, &swap).unwrap();
    let paged = [700, 600].map(|limit| {
        let config = slat_reclaim::Config::new(limit);
        PagedMemory::new(&pool, Hva(HOST), 1024 * K4, config, 0).unwrap()
    });
    let guests = [0, 1].map(|index| {
        let config = slat_guest::Config::new(1, PageSize::SIZE_2M);
        let vmid = Vmid(index as u16 + 1);
        Guest::new(ept(), vmid, 39, &machine, &paged[index], config).unwrap()
    });
    let mut vcpus: Vec<_> = guests
        .iter()
        .enumerate()
        .map(|(index, guest)| {
            let mut vcpu = Vcpu::new(guest, 0).unwrap();
            vcpu.worker().set_memslot(slot(1024 * K4, false)).unwrap();
            let mut cpu = machine.cpu(index).unwrap();
            cpu.load(Vmid(index as u16 + 1), vcpu.root());
            (vcpu, cpu)
        })
        .collect();
    let mut rng = fastrand::Rng::with_seed(crate::seed::seed());
    let mut versions = [[0u64; 1024]; 2];
    for step in 0..40_000 {
        let (index, page) = (rng.usize(..2), rng.u64(..1024));
        let (vcpu, cpu) = &mut vcpus[index];
        let gpa = BASE + page * K4;
        let version = &mut versions[index][page as usize];
        let stamp = |version: u64| {
            if version == 0 { 0 } else { (index as u64) << 60 | page << 40 | version }
        };
        loop {
            let done = match step % 3 {
                0 => cpu.write(gpa, stamp(*version + 1)).map(|()| *version += 1),
                _ => cpu.read(gpa).map(|found| assert_eq!(found, stamp(*version))),
            };
            let Err(error) = done else { break };
            let access = if step % 3 == 0 { Access::Write } else { Access::Read };
            assert!(error.fault().is_some());
            if let Outcome::Retry(Retry::Absent(_)) = vcpu.fault(Gpa(gpa), access) {
                let mut pager = Pager::new(vcpu.worker());
                if let Err(PageError::NoRoom { .. }) = pager.bring_in(Hva(HOST + page * K4), access)
                {
                    let loads = [paged[0].load(), paged[1].load()];
                    let chosen = choose(&loads).unwrap();
                    let reclaimed = Pager::new(vcpus[chosen].0.worker()).reclaim(8);
                    // A call looks at a bounded number of pages, all of which may be in use.
                    assert!(matches!(reclaimed, Ok(_) | Err(ReclaimError::InUse)), "{reclaimed:?}");
                    break;
                }
            }
        }
        assert!(paged[0].resident() <= 700 && paged[1].resident() <= 600);
        assert_eq!(paged[0].resident() + paged[1].resident() + pool.free(), 1024);
        if step % 1000 == 0 {
            // The guest that has more to spare gives up pages.
            let chosen = choose(&[paged[0].load(), paged[1].load()]).unwrap();
            let reclaimed = Pager::new(vcpus[chosen].0.worker()).reclaim(32);
            assert!(matches!(reclaimed, Ok(_) | Err(ReclaimError::InUse)), "{reclaimed:?}");
        }
    }
    assert!(paged.iter().all(|paged| paged.stats().refaults > 1000));
    drop(vcpus);
    for guest in guests {
        // SAFETY: no CPU has the guest's tables loaded.
        unsafe { guest.destroy() };
    }
    for paged in paged {
        // SAFETY: its guest is destroyed.
        unsafe { paged.release() };
    }
    assert_eq!((pool.free(), pool.swapped()), (1024, 0), "what ended guests had");
}

#[test]
fn memory_without_a_memslot_is_not_pinned() {
    Setup::new(1024, 2048).run(ept(), slat_sim::Ept::default(), |bench| {
        let mut worker = Worker::new(bench.guest).unwrap();
        let refused = |worker: &mut _, range, page| {
            let pinned = Pager::new(worker).pin(range).unwrap_err();
            let at = bench.host(page);
            assert_eq!(pinned, PageError::NotPinned(PinError::NoMemslot { at }));
        };
        // The memslot has a part of the memory, then none.
        let slot = bench.slot(false);
        worker.set_memslot(MemslotSpec { bytes: 0, ..slot }).unwrap();
        worker.set_memslot(MemslotSpec { bytes: 512 * bench.page, ..slot }).unwrap();
        refused(&mut worker, bench.hosts(500, 20), 512);
        drop(Pager::new(&mut worker).pin(bench.hosts(500, 12)).unwrap());
        worker.set_memslot(MemslotSpec { bytes: 0, ..slot }).unwrap();
        refused(&mut worker, bench.hosts(0, 512), 0);
        worker.set_memslot(slot).unwrap();
        let range = slat::GpaRange::new(slat::Gpa(BASE), 1024 * bench.page).unwrap();
        assert!(!worker.is_pinned(range));
    });
}
