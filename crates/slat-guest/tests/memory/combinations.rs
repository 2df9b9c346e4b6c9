//! Combinations of two operations each of which works alone.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, Hpa, PageSize, Reader};
use slat_guest::*;
use slat_sim::{Machine, Moment};

on_all! {
    fn an_invalidation_leaves_neighbouring_slots_alone<C: Case>() {
        let low = MemslotSpec { bytes: M2 - 16 * K4, ..memslot(0) };
        let gap = M2 - 16 * K4;
        let high = MemslotSpec {
            id: MemslotId(1),
            gpa: Gpa(BASE + gap),
            host: Hva(HOST + gap),
            bytes: 4 * M2 + 16 * K4,
            ..memslot(0)
        };
        let hardware = if C::HARDWARE_DIRTY { Logging::Hardware } else { Logging::Protect };
        let config = Config { logging: hardware, initially_set: true, ..config() };
        with_guest!(C, config, low, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.populate(HOST, 8 * M2, PageSize::SIZE_2M);
        vcpu.worker().set_memslot(high).unwrap();
        for page in [0, 400, 500, 520, 1024] {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        // In the upper memslot its first pages, and a page of its first block.
        let mut taken = Vec::new();
        let range = host_range(HOST + gap, 17 * K4);
        drop(vcpu.worker().invalidate(range, |part| taken.push((part.gpa, part.host))));
        let expected = [
            (Gpa(BASE + 500 * K4), host_range(HOST + 500 * K4, K4)),
            (Gpa(BASE + M2), host_range(HOST + M2, M2)),
        ];
        assert_eq!(taken, expected);
        for page in [0, 400, 1024] {
            assert!(vcpu.worker().translate(Gpa(BASE + page * K4)).unwrap().is_some());
        }
        assert!(machine.finish().is_empty());
    }

    fn an_invalidation_of_less_than_a_page_takes_the_page<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Read).unwrap();
        let mut taken = 0;
        drop(vcpu.worker().invalidate(host_range(HOST + K4 + 5, 7), |part| {
            taken += part.host.bytes;
        }));
        assert_eq!(taken, K4);
    }

    fn tables_that_invalidations_empty_are_given_back<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let mut frames = Vec::new();
        for _ in 0..20 {
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
            drop(vcpu.worker().invalidate(host_range(HOST, M2), |_| {}));
            frames.push(machine.frames());
        }
        assert!(frames[19] <= frames[3] + TABLE_PAGES, "{frames:?}");
    }

    /// A clear finds that an invalidation by the host has already done its work on the leaf, but
    /// has not completed it.
    fn a_clear_with_its_work_done_leaves_no_writable_tlb_entry<C: Case>() {
        with_guest!(C, config(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        machine.cpu(1).load(VMID, vcpu.root());
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        machine.cpu(1).write(BASE).expect("in its TLB, dirty");
        let mut other = Worker::new(&guest).unwrap();
        let mut found = None;
        let clear = |machine: &Machine<C::A>, moment| {
            if moment == Moment::Invalidate && found.is_none() {
                let cleared = other.clear_log(MemslotId(0), 0, 64, &[1]).unwrap();
                // A CPU that writes after the clear is detected, or cannot write.
                found = Some((cleared.pages, machine.cpu(1).write(BASE).is_ok()));
            }
        };
        beside(&machine, clear, || drop(vcpu.worker().invalidate(host_range(HOST, K4), |_| {})));
        assert_eq!(found, Some((1, false)), "a write after the clear had returned");
    }

    /// At each step at which a fetch reads a table, another thread collapses the table's pages.
    fn no_huge_page_becomes_executable<C: Case>() {
        for when in 0..24 {
            let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
            with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
            let split = EagerSplit::new(range(BASE, M2), PageSize::SIZE_4K);
            split.run(vcpu.worker(), || false);
            let mut reader = Reader::register(guest.tables().platform()).unwrap();
            let mut times = 0;
            let collapse = |_: &_, moment| {
                times += u32::from(moment == Moment::Table);
                if times == when + 1 && moment == Moment::Table {
                    let mut guard = guest.tables().enter(&mut reader).unwrap();
                    let no_execute = |leaf: &slat::Attributes| leaf.execute == slat::Execute::None;
                    let _ = guard.collapse_where(range(BASE, M2), PageSize::SIZE_2M, no_execute);
                }
            };
            let fetch = || attempt::<C>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
            beside(&machine, collapse, fetch);
            let found = vcpu.worker().translate(Gpa(BASE)).unwrap().unwrap();
            let executable = found.attributes.execute != slat::Execute::None;
            assert!(found.size == PageSize::SIZE_4K && executable, "{when}: {found:?}");
        }
    }

    /// A fault while its memslot is being unmapped.
    fn nothing_is_mapped_in_a_slot_that_is_going<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let mut other = Vcpu::new(&guest, 1).unwrap();
        let mut outcomes = Vec::new();
        let faults = |_: &_, moment| {
            if moment == Moment::Invalidated {
                outcomes.push(other.fault(Gpa(BASE + K4), Access::Write));
            }
        };
        let gone = MemslotSpec { bytes: 0, ..memslot(0) };
        beside(&machine, faults, || vcpu.worker().set_memslot(gone).unwrap());
        assert!(outcomes.contains(&Outcome::Retry(Retry::MemslotDeleting)), "{outcomes:?}");
        assert_eq!(vcpu.worker().translate(Gpa(BASE + K4)), Ok(None));
    }

    fn a_slot_that_moves_keeps_its_log<C: Case>() {
        let hardware = if C::HARDWARE_DIRTY { Logging::Hardware } else { Logging::Protect };
        for logging in [Logging::Protect, hardware] {
            let config = Config { logging, ..config() };
            with_guest!(C, config, logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
            attempt::<C>(&machine, &mut vcpu, BASE + 3 * K4, Access::Write).unwrap();
            let moved = MemslotSpec { gpa: Gpa(BASE + G1), ..logged(M2) };
            assert_eq!(vcpu.worker().set_memslot(moved), Ok(MemslotChange::Moved));
            let mut bits = [0; 8];
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(1));
            assert_eq!(bits[0], 1 << 3);
        }
    }

    fn pages_beyond_a_smaller_slot_do_not_hide_others_from_a_reset<C: Case>() {
        let config = Config { ring: Some(128), ..config() };
        with_guest!(C, config, logged(128 * K4), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE + 100 * K4, Access::Write).unwrap();
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..memslot(0) }).unwrap();
        vcpu.worker().set_memslot(logged(64 * K4)).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 60 * K4, Access::Write).unwrap();
        let mut pages = [DirtyPage { memslot: MemslotId(9), page: 0 }; 8];
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 2);
        vcpu.worker().reset_rings().unwrap();
        let leaf = vcpu.worker().translate(Gpa(BASE + 60 * K4)).unwrap().unwrap();
        assert!(!leaf.attributes.write, "the next write is in the ring again");
    }

    fn without_table_pages_faults_that_need_none_are_answered<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        machine.limit(0);
        let mut poor = Vcpu::new(&guest, 1).unwrap();
        machine.cpu(1).load(VMID, poor.root());
        assert_eq!(poor.fault(Gpa(0), Access::Read), Outcome::Mmio);
        assert_eq!(poor.fault(Gpa(BASE), Access::Read), Outcome::Spurious);
        assert_eq!(poor.fault(Gpa(BASE + K4), Access::Read), Outcome::Mapped(PageSize::SIZE_4K));
        let split = EagerSplit::with_chunk(range(BASE, M2), PageSize::SIZE_4K, u64::MAX);
        let report = split.run(poor.worker(), || false);
        assert!(matches!(report.stopped, None | Some(SplitStop::OutOfFrames { .. })));
    }

    fn two_reservations_of_one_slot_do_not_void_each_other<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let (mut one, mut two) = (
            Reader::register(guest.tables().platform()).unwrap(),
            Reader::register(guest.tables().platform()).unwrap(),
        );
        let mut cache = slat::TableCache::filled(guest.tables().platform(), 8).unwrap();
        let mut first = guest.tables().enter(&mut one).unwrap();
        let mut second = guest.tables().enter(&mut two).unwrap();
        let first = first.reserve(Gpa(BASE), PageSize::SIZE_2M, &mut cache).unwrap();
        let second = second.reserve(Gpa(BASE), PageSize::SIZE_2M, &mut cache).unwrap();
        let hpa = Hpa(ram.get(HOST).unwrap().hpa);
        assert_eq!(first.commit(hpa, slat::Attributes::RAM), Ok(Some(M2)));
        assert_eq!(second.commit(hpa, slat::Attributes::RAM), Ok(None));
        let _ = vcpu.id();
    }
}

#[test]
fn memory_in_blocks_smaller_than_a_page_is_refused() {
    use slat::format::arm64::Arm64K16;
    let machine = slat_sim::Machine::new(slat_sim::Arm::new(14, BITS), 1);
    let ram = Ram::new();
    ram.populate(HOST, M2, PageSize::SIZE_4K);
    let largest = PageSize::from_bytes(16 << 10).unwrap();
    let config = Config::new(1, largest);
    let guest = Guest::new(Arm64K16::default(), VMID, BITS, &machine, ram, config).unwrap();
    let mut vcpu = Vcpu::new(&guest, 0).unwrap();
    vcpu.worker().set_memslot(memslot(M2)).unwrap();
    let outcome = vcpu.fault(Gpa(BASE), Access::Read);
    assert!(matches!(outcome, Outcome::Refused(Refusal::Page(_))), "{outcome:?}");
}

#[test]
fn an_emptied_view_adds_its_writes_to_each_memslots_own_log() {
    let config = Config { logging: Logging::Hardware, ..config() };
    let half = M2 / 2;
    with_guest!(ArmUncached, config, logged(half), PageSize::SIZE_2M => machine, ram, guest, vcpu);
    ram.populate(HOST, M2, PageSize::SIZE_2M);
    let behind = MemslotSpec {
        id: MemslotId(1),
        gpa: Gpa(BASE + half),
        host: Hva(HOST + half),
        ..logged(half)
    };
    vcpu.worker().set_memslot(behind).unwrap();
    for page in [255, 256] {
        attempt::<ArmUncached>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
    }
    assert!(vcpu.set_caches(true).root_changed);
    let mut bits = [0; 4];
    assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(1));
    assert_eq!(bits, [0, 0, 0, 1 << 63]);
    assert_eq!(vcpu.worker().read_log(MemslotId(1), &mut bits), Ok(1));
    assert_eq!(bits, [1, 0, 0, 0]);
}

#[test]
fn a_vcpu_is_run_by_one_thread_at_a_time() {
    let machine = Intel::machine(1);
    let guest = guest::<Intel>(&machine, &Ram::new(), config());
    let first = Vcpu::new(&guest, 0).unwrap();
    assert_eq!(Vcpu::new(&guest, 0).err(), Some(VcpuError::Taken));
    drop(first);
    assert!(Vcpu::new(&guest, 0).is_ok());
}
