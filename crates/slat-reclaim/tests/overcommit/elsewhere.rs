//! The dirty log with devices and balloons; swap that is too small; and guests without accessed
//! bits.

use crate::fixture::*;
use slat::format::ept::Ept1G;
use slat::{Access, Format, PageSize};
use slat_guest::*;
use slat_reclaim::*;
use slat_sim::Arch;

fn what_a_device_writes_is_logged<F: Format, A: Arch + Copy>(format: F, arch: A, logging: Logging) {
    let mut setup = Setup::new(256, 128);
    setup.guest.logging = logging;
    setup.run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        let mut worker = Worker::new(bench.guest).unwrap();
        (0..256).for_each(|page| runner.write(page));
        worker.set_memslot(bench.slot(true)).unwrap();
        let log = |worker: &mut TheWorker<'_, '_, F, A>| {
            let mut bits = [0; 4];
            worker.take_log(MemslotId(0), &mut bits).unwrap();
            bits
        };
        (0..3).for_each(|_| _ = log(&mut worker));
        let mut pager = Pager::new(&mut worker);
        pager.with_page(bench.host(3), false, |_| ()).unwrap();
        for page in [70, 200] {
            pager
                .with_page(bench.host(page), true, |hpa| bench.machine.write_host(hpa, 5))
                .unwrap();
        }
        let away =
            |page: &u64| bench.guest.backing().page(bench.host(*page), Access::Read).is_err();
        let (gone, here) = ((10..60).find(away), (210..256).find(|page| !away(page)));
        let gone = [gone.unwrap(), here.unwrap(), 130];
        for page in &gone {
            pager.discard(HvaRange { start: bench.host(*page), bytes: bench.page });
        }
        let found = log(&mut worker);
        for page in gone.iter().chain(&[70, 200]) {
            assert!(found[*page as usize / 64] >> (page % 64) & 1 == 1, "{logging:?} {page}");
        }
        assert_eq!(found[0] >> 3 & 1, 0, "the device only read it");
    });
}

fn what_a_device_writes_and_a_balloon_takes_is_in_the_log<F: Format, A: Arch + Copy>(
    format: F,
    arch: A,
) {
    what_a_device_writes_is_logged(format, arch, Logging::Protect);
}
on_all_formats!(log, super::what_a_device_writes_and_a_balloon_takes_is_in_the_log);

#[test]
fn what_a_device_writes_is_in_the_log_that_hardware_keeps() {
    what_a_device_writes_is_logged(ept(), slat_sim::Ept::default(), Logging::Hardware);
    let (format, arch) = arm(true);
    what_a_device_writes_is_logged(format, arch, Logging::Hardware);
}

/// Swap has room for what does not fit into memory, a batch, and little more: copies of pages that
/// came back make room.
fn swap_that_holds_what_is_away_is_enough<F: Format, A: Arch + Copy>(format: F, arch: A) {
    Setup { swap: 512 - 256 + 64 + 20, ..Setup::new(512, 256) }.run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..512).for_each(|page| runner.write(page));
        for _ in 0..4 {
            (0..512).for_each(|page| runner.check(page));
            (0..512).step_by(7).for_each(|page| runner.write(page));
        }
        assert_eq!(bench.pool.trouble(), None);
    });
}
on_all_formats!(scarce, super::swap_that_holds_what_is_away_is_enough);

/// While swap takes no pages, pages that have a copy there may still leave.
fn what_swap_has_leaves_though_it_takes_nothing<F: Format, A: Arch + Copy>(format: F, arch: A) {
    use std::sync::atomic::Ordering::Relaxed;
    Setup::new(512, 256).run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..512).for_each(|page| runner.write(page));
        (0..2).for_each(|_| (0..512).for_each(|page| runner.check(page)));
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        bench.swap.fail_writes.store(true, Relaxed);
        runner.write(511);
        while bench.pool.trouble().is_none() {
            let _ = pager.reclaim(64);
        }
        (0..512).for_each(|page| runner.check(page));
        while pager.reclaim(64).is_ok() {}
        assert_eq!((bench.paged.resident(), bench.pool.trouble()), (1, Some(SwapError::Full)));
        (0..512).for_each(|page| runner.check(page));
    });
}
on_all_formats!(stopped, super::what_swap_has_leaves_though_it_takes_nothing);

/// Without accessed bits in hardware, pages leave in the order in which they came in.
#[test]
fn a_guest_without_accessed_bits_gives_up_pages_too() {
    let format = Ept1G { accessed_dirty: false, ..ept() };
    let arch = slat_sim::Ept { accessed_dirty: false, ..slat_sim::Ept::default() };
    Setup::new(512, 128).run(format, arch, |bench| {
        let mut runner = Runner::new(bench, 0);
        (0..3).for_each(|_| (0..512).for_each(|page| runner.write(page)));
        (0..512).for_each(|page| runner.check(page));
        assert_eq!(bench.paged.stats().rescued, 0);
    });
}

#[test]
fn a_page_that_can_never_have_room_is_refused_without_a_walk() {
    let mut setup = Setup::new(64, 64);
    setup.reclaim.limit = 0;
    setup.run(ept(), slat_sim::Ept::default(), |bench| {
        let mut worker = Worker::new(bench.guest).unwrap();
        let mut pager = Pager::new(&mut worker);
        let nothing = PageError::NoRoom { reason: ReclaimError::Nothing };
        assert_eq!(pager.bring_in(bench.host(0), Access::Write), Err(nothing));
        assert_eq!(bench.paged.stats().walk.count, 0, "there was nothing to walk over");
        bench.paged.set_limit(1);
        (0..64).for_each(|page| pager.bring_in(bench.host(page), Access::Write).unwrap());
        assert_eq!(bench.paged.resident(), 1);
        let block = PageSize::SIZE_2M.bytes();
        // A range larger than the guest's memory.
        pager.discard(HvaRange { start: Hva(0), bytes: HOST + block });
        assert_eq!((bench.paged.resident(), bench.pool.swapped()), (0, 0));
    });
}
