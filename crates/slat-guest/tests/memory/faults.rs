//! The outcomes of faults.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, Hpa, MapError, PageSize};
use slat_guest::*;

on_all! {
    fn the_largest_leaf_that_slot_and_backing_allow_is_mapped<C: Case>() {
        for (block, bytes) in [
            (PageSize::SIZE_1G, 2 * G1),
            (PageSize::SIZE_2M, 2 * G1),
            (PageSize::SIZE_4K, 4 * M2),
        ] {
            with_guest!(C, config(), memslot(bytes), block => machine, ram, guest, vcpu);
            let gpa = BASE + 3 * M2 + 5 * K4;
            let (hpa, outcomes) = attempt::<C>(&machine, &mut vcpu, gpa, Access::Write).unwrap();
            assert_eq!(outcomes, [Outcome::Mapped(block)]);
            assert_eq!(hpa, Hpa(ram.get(HOST + gpa - BASE).unwrap().hpa));
            assert!(machine.finish().is_empty());
        }
    }

    fn a_block_does_not_reach_out_of_its_slot<C: Case>() {
        let spec = MemslotSpec { gpa: Gpa(BASE + K4), host: Hva(HOST + K4), ..memslot(G1) };
        with_guest!(C, config(), spec, PageSize::SIZE_1G => machine, ram, guest, vcpu);
        let size = |outcome: &[Outcome]| match outcome {
            [Outcome::Mapped(size)] => *size,
            other => panic!("{other:?}"),
        };
        let mut map = |gpa| size(&attempt::<C>(&machine, &mut vcpu, gpa, Access::Read).unwrap().1);
        assert_eq!(map(BASE + K4), PageSize::SIZE_4K);
        assert_eq!(map(BASE + M2), PageSize::SIZE_2M);
        assert_eq!(map(BASE + G1), PageSize::SIZE_4K);
        assert!(machine.finish().is_empty());
    }

    fn a_slot_aligned_otherwise_than_its_memory_is_mapped_in_pages<C: Case>() {
        let spec = MemslotSpec { host: Hva(HOST + K4), ..memslot(4 * M2) };
        with_guest!(C, config(), spec, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let (_, outcomes) =
            attempt::<C>(&machine, &mut vcpu, BASE + M2, Access::Write).unwrap();
        assert_eq!(outcomes, [Outcome::Mapped(PageSize::SIZE_4K)]);
    }

    fn what_has_no_memory_is_for_the_vmm_to_emulate<C: Case>() {
        let spec = MemslotSpec { read_only: true, ..memslot(M2) };
        with_guest!(C, config(), spec, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let mut fails = |gpa, access| attempt::<C>(&machine, &mut vcpu, gpa, access).unwrap_err();
        assert_eq!(fails(BASE - K4, Access::Read), Outcome::Mmio);
        assert_eq!(fails(BASE + M2, Access::Write), Outcome::Mmio);
        assert_eq!(fails(BASE, Access::Write), Outcome::Mmio, "a write to a read-only memslot");
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        let write = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write);
        assert_eq!(write.unwrap_err(), Outcome::Mmio, "also where it was read before");
        assert!(machine.finish().is_empty());
    }

    fn each_refusal_by_the_backing_has_its_own_outcome<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        ram.change(HOST, |page| page.ready = false);
        ram.remove(HOST + K4);
        ram.change(HOST + 2 * K4, |page| page.execute = false);
        let mut fails = |page, access| {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, access).unwrap_err()
        };
        assert!(matches!(fails(0, Access::Read), Outcome::Retry(Retry::Absent(Some(_)))));
        assert_eq!(fails(1, Access::Read), Outcome::Refused(Refusal::NoPage));
        assert_eq!(fails(2, Access::Execute), Outcome::Refused(Refusal::NotExecutable));
        ram.change(HOST, |page| page.ready = true);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 2 * K4, Access::Write).unwrap();
        let fetch = attempt::<C>(&machine, &mut vcpu, BASE + 2 * K4, Access::Execute);
        assert_eq!(fetch.unwrap_err(), Outcome::Refused(Refusal::NotExecutable));
    }

    fn a_page_shared_for_reading_is_replaced_by_the_first_write<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        ram.change(HOST, |page| page.write = false);
        let (shared, _) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        let (own, _) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        assert_ne!(shared, own);
        machine.take_back(shared, K4);
        let (read, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        assert_eq!((read, &outcomes[..]), (own, &[][..]));
        assert!(machine.finish().is_empty());
    }

    fn a_page_that_may_be_written_again_stays_where_it_is_mapped<C: Case>() {
        let config = Config { logging: Logging::Protect, ..config() };
        let logged = MemslotSpec { log_dirty: true, ..memslot(M2) };
        with_guest!(C, config, logged, PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let page = |page: &mut HostPage| (page.write, page.own) = (false, true);
        ram.change(HOST, page);
        let (first, _) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        let mut log = [0; 8];
        vcpu.worker().take_log(MemslotId(0), &mut log).unwrap();
        let (second, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let made = [Outcome::MadeWritable(PageSize::SIZE_4K)];
        assert_eq!((first, &outcomes[..]), (second, &made[..]));
        log.fill(0);
        vcpu.worker().take_log(MemslotId(0), &mut log).unwrap();
        assert_eq!(log, [1, 0, 0, 0, 0, 0, 0, 0]);
        // From now on it may be written, whatever protects it meanwhile.
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        // The backing has another page by now: the leaf is replaced.
        ram.change(HOST + K4, page);
        attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Read).unwrap();
        let (_, other) = ram.migrate(HOST + K4);
        let (found, _) = attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Write).unwrap();
        assert_eq!(found, Hpa(other));
        assert!(machine.finish().is_empty());
    }

    fn two_vcpus_that_fault_on_one_page_agree<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        machine.cpu(1).load(VMID, vcpu.root());
        let begin = machine.now();
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(PageSize::SIZE_4K));
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Spurious);
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Read), Outcome::Spurious);
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Execute), Outcome::Spurious);
        let stats = guest.stats();
        assert_eq!(stats.faults(FaultKind::Spurious).count, 3);
        assert_eq!(stats.vcpus[0].of(FaultKind::Mapped).count, 1);
        let stall = stats.vcpus[0].stall();
        assert!((stall.longest..=machine.now() - begin).contains(&stall.ticks), "{stall:?}");
        assert!(stall.longest > 0);
    }

    fn a_fault_without_table_pages_says_so_and_changes_nothing<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        machine.limit(machine.frames());
        let refused = Outcome::Refused(Refusal::OutOfFrames);
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Write), refused);
        machine.limit(usize::MAX);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
    }

    fn a_backing_whose_blocks_are_smaller_than_a_page_is_refused<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        ram.change(HOST, |page| page.block = PageSize::from_bytes(K4 / 2).unwrap());
        let outcome = vcpu.fault(Gpa(BASE), Access::Write);
        let Outcome::Refused(Refusal::Page(MapError::LeafSize(_))) = outcome else {
            panic!("{outcome:?}")
        };
        assert_eq!(vcpu.worker().translate(Gpa(BASE)), Ok(None));
        // A size between those of leaves is mapped by the next smaller leaves.
        ram.change(HOST, |page| page.block = PageSize::from_bytes(2 * K4).unwrap());
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(PageSize::SIZE_4K));
        assert!(machine.finish().is_empty());
    }

    fn a_cpu_that_holds_an_older_right_gets_on<C: Case>() {
        with_guest!(C, config(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let mut other = Vcpu::new(&guest, 1).unwrap();
        machine.cpu(1).load(VMID, other.root());
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        attempt::<C>(&machine, &mut other, BASE, Access::Read).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let (_, outcomes) = attempt::<C>(&machine, &mut other, BASE, Access::Write).unwrap();
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Spurious), "{outcomes:?}");
        assert!(machine.finish().is_empty());
    }
}
