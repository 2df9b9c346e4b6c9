//! Frames for tables: all are given back, and what a guest does without.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Hpa, PageSize};
use slat_guest::*;

on_all! {
    fn a_guest_that_is_dropped_gives_back_its_tables<C: Case>() {
        let machine = C::machine(2);
        give_all::<C>(&machine);
        let before = machine.frames();
        {
            let ram = Ram::from(C::FIRST_HPA);
            let guest = guest::<C>(&machine, &ram, config());
            let mut vcpu = Vcpu::new(&guest, 0).unwrap();
            ram.populate(HOST, M2, PageSize::SIZE_4K);
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            assert!(matches!(vcpu.fault(slat::Gpa(BASE), Access::Write), Outcome::Mapped(_)));
            assert!(machine.frames() > before);
        }
        assert_eq!(machine.frames(), before);
        assert!(machine.finish().is_empty());
    }

    fn a_guest_without_frames_keeps_its_pages_and_reuses_tables<C: Case>() {
        with_guest!(C, config(), memslot(64 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        machine.limit(machine.frames() + 20);
        let mut write = |at| attempt::<C>(&machine, &mut vcpu, BASE + at, Access::Write);
        let refused = (0..64).find_map(|table| Some((table, write(table * M2).err()?)));
        let (table, outcome) = refused.expect("64 tables");
        assert_eq!(outcome, Outcome::Refused(Refusal::OutOfFrames));
        assert!(table + 8 > 20, "{table}");
        write(K4).unwrap();
        drop(vcpu.worker().invalidate(host_range(HOST, 8 * M2), |_| {}));
        attempt::<C>(&machine, &mut vcpu, BASE + 60 * M2, Access::Write).unwrap();
        assert!(machine.finish().is_empty());
    }

    fn a_split_without_frames_says_so_and_goes_on_with_some<C: Case>() {
        with_guest!(C, config(), memslot(16 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        machine.limit(machine.frames() + 12);
        for block in 0..16 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
        }
        let split = EagerSplit::new(range(BASE, 16 * M2), PageSize::SIZE_4K);
        let report = split.run(vcpu.worker(), || false);
        let Some(SplitStop::OutOfFrames { at, .. }) = report.stopped else { panic!("{report:?}") };
        assert_eq!(at.0 - BASE, report.split);
        vcpu.worker().collapse(range(BASE, 16 * M2), PageSize::SIZE_2M);
        assert!(split.run(vcpu.worker(), || false).split > 0);
        // A log protects the rest as it is, and misses no write.
        vcpu.worker().set_memslot(logged(16 * M2)).unwrap();
        let mut bits = [0; 128];
        for block in 0..16 {
            let wrote = attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write);
            let dirty = vcpu.worker().read_log(MemslotId(0), &mut bits).unwrap();
            assert_eq!(bits[block as usize * 8], u64::from(wrote.is_ok()), "{dirty} {wrote:?}");
        }
    }
}

/// The vCPU uses all of the memory with its caches off: its view would need more frames than there
/// are.
#[test]
fn a_view_is_emptied_for_room_and_its_vcpu_goes_on() {
    type C = ArmUncached;
    let blocks = 128;
    with_guest!(C, config(), memslot(blocks * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
    machine.limit(machine.frames() + 60);
    for at in (0..2).flat_map(|round| (0..blocks).map(move |block| block * M2 + round * K4)) {
        attempt::<C>(&machine, &mut vcpu, BASE + at, Access::Write).unwrap();
    }
    // Pages in views that were emptied for room count as used, and written.
    let mut young = vec![0; blocks as usize * 8];
    let how = slat::AgeOptions { clear: false, ..slat::AgeOptions::LEAVES };
    vcpu.worker().age(range(BASE, blocks * M2), None, &mut young, how).unwrap();
    let used: Vec<_> = (0..blocks as usize).map(|block| young[block * 8]).collect();
    assert_eq!(used, vec![0b11; blocks as usize]);
    assert!(machine.finish().is_empty());
}

/// The vCPU's view is emptied for a table page, and the host finds what it maps there after that.
#[test]
fn a_view_that_was_left_for_room_is_found_by_the_host() {
    type C = ArmUncached;
    for last in 0..24 {
        with_guest!(C, config(), memslot(64 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        machine.limit(machine.frames() + 12);
        let mut at = Hpa(0);
        for block in 0..=last {
            at = attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap().0;
        }
        let host = host_range(HOST + last * M2, K4);
        ram.change(host.start.0, |page| page.ready = false);
        let held = vcpu.worker().invalidate(host, |_| {});
        machine.take_back(at, K4);
        assert!(machine.cpu(0).read(BASE + last * M2).is_err(), "block {last} is still used");
        drop(held);
        assert!(machine.finish().is_empty(), "{last}");
    }
}
