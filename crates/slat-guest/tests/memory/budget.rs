//! Table pages of a guest: an exact account, and what is refused at the bound.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Hpa, PageSize};
use slat_guest::*;

on_all! {
    fn table_pages_add_up_after_each_step<C: Case>() {
        let machine = C::machine(2);
        give_all::<C>(&machine);
        let ram = Ram::from(C::FIRST_HPA);
        let nobody = machine.frames();
        let guest = guest::<C>(&machine, &ram, config());
        let roots = machine.frames();
        let check = |guest: &TheGuest<'_, C>, what: &str| {
            let frames = machine.frames() - roots;
            assert_eq!(guest.table_pages(), frames as u64, "after {what}");
        };
        check(&guest, "nothing");
        ram.populate(HOST, 8 * M2, PageSize::SIZE_2M);
        {
            let (mut one, mut two) = (storage(), storage());
            let mut vcpu = Vcpu::new(&guest, 0, &mut one).unwrap();
            let mut other = Worker::new(&guest, &mut two).unwrap();
            machine.cpu(0).load(VMID, vcpu.root());
            other.set_memslot(memslot(8 * M2)).unwrap();
            for round in 0..3 {
                for block in 0..8 {
                    attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
                    check(&guest, "faults");
                }
                other.set_memslot(logged(8 * M2)).unwrap();
                check(&guest, "a log's beginning");
                for block in 0..8 {
                    let gpa = BASE + block * M2 + round * K4;
                    attempt::<C>(&machine, &mut vcpu, gpa, Access::Write).unwrap();
                    check(&guest, "writes");
                }
                other.take_log(MemslotId(0), &mut [0; 64]).unwrap();
                check(&guest, "a clear");
                other.set_memslot(memslot(8 * M2)).unwrap();
                check(&guest, "a log's end");
                let split = EagerSplit::new(range(BASE, 8 * M2), PageSize::SIZE_4K);
                split.run(&mut other, || false);
                check(&guest, "a split");
                drop(other.invalidate(host_range(HOST, 3 * M2), |_| {}));
                check(&guest, "an invalidation");
                other.collapse(range(BASE, 8 * M2), PageSize::SIZE_2M);
                check(&guest, "a collapse");
                guest.reclaim();
                check(&guest, "a reclaim");
            }
            other.teardown();
            check(&guest, "all memslots have gone");
            drop(other);
            check(&guest, "a worker has gone");
        }
        check(&guest, "the vCPU has gone");
        guest.reclaim();
        check(&guest, "all is given back");
        assert!(guest.table_pages() <= 2, "what is left are the tables above the memslot's");
        drop(guest);
        assert_eq!(machine.frames(), nobody);
    }

    fn a_guest_that_is_dropped_gives_back_its_tables<C: Case>() {
        let machine = C::machine(2);
        give_all::<C>(&machine);
        let before = machine.frames();
        {
            let ram = Ram::from(C::FIRST_HPA);
            let guest = guest::<C>(&machine, &ram, config());
            let mut storage = storage();
            let mut vcpu = Vcpu::new(&guest, 0, &mut storage).unwrap();
            ram.populate(HOST, M2, PageSize::SIZE_4K);
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            assert!(matches!(vcpu.fault(slat::Gpa(BASE), Access::Write), Outcome::Mapped(_)));
            assert!(machine.frames() > before);
        }
        assert_eq!(machine.frames(), before);
        assert!(machine.finish().is_empty());
    }

    fn a_guest_is_refused_more_table_pages_than_it_may_have<C: Case>() {
        for bound in [0, 1, 8, 20, 100] {
            let config = Config { table_pages: Some(bound), ..config() };
            with_guest!(C, config, memslot(64 * M2), PageSize::SIZE_4K
                => machine, ram, guest, vcpu);
            let mut refused = None;
            for table in 0..64 {
                match attempt::<C>(&machine, &mut vcpu, BASE + table * M2, Access::Write) {
                    Ok(_) => assert_eq!(refused, None),
                    Err(outcome) => refused = refused.or(Some((table, outcome))),
                }
                assert!(guest.table_pages() <= u64::from(bound));
            }
            let limit = TableLimit { pages: u64::from(bound) };
            match (bound, refused) {
                (100, found) => {
                    assert_eq!((found, guest.stats().totals.table_limit), (None, 0));
                }
                (_, Some((table, outcome))) => {
                    assert_eq!(outcome, Outcome::Refused(Refusal::TableLimit(limit)));
                    assert!(guest.stats().totals.table_limit > 0);
                    assert!(table + 8 > u64::from(bound), "{table} of {bound}");
                }
                (_, None) => panic!("{bound}"),
            }
            // The pages that it has stay mapped; memory that is unmapped makes room.
            if bound == 20 {
                let other = attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Write);
                assert!(other.is_ok());
                drop(vcpu.worker().invalidate(host_range(HOST, 8 * M2), |_| {}));
                attempt::<C>(&machine, &mut vcpu, BASE + 60 * M2, Access::Write).unwrap();
            }
            assert!(machine.finish().is_empty());
        }
    }

    fn a_split_at_the_bound_says_so_and_goes_on_when_there_is_room<C: Case>() {
        let config = Config { table_pages: Some(12), ..config() };
        with_guest!(C, config, memslot(16 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for block in 0..16 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
        }
        let split = EagerSplit::new(range(BASE, 16 * M2), PageSize::SIZE_4K);
        let report = split.run(vcpu.worker(), || false);
        let Some(SplitStop::TableLimit { at, limit }) = report.stopped else {
            panic!("{report:?}")
        };
        assert_eq!((at.0 - BASE, limit), (report.split, TableLimit { pages: 12 }));
        assert!(limit.to_string().contains("12 table pages"), "{limit}");
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

/// Two vCPUs use all of the memory with their caches off: both views together exceed the bound.
#[test]
fn views_do_not_grow_beyond_the_bound_and_vcpus_go_on() {
    let (bound, blocks) = (60, 32);
    let machine = ArmUncached::machine(2);
    give_all::<ArmUncached>(&machine);
    let ram = Ram::from(ArmUncached::FIRST_HPA);
    let config = Config { vcpus: 2, table_pages: Some(bound), ..config() };
    let guest = guest::<ArmUncached>(&machine, &ram, config);
    let roots = machine.frames();
    ram.populate(HOST, blocks * M2, PageSize::SIZE_2M);
    let mut storages: Vec<TableStorage> = (0..2).map(|_| storage()).collect();
    let mut vcpus: Vec<_> =
        storages.iter_mut().zip(0..).map(|(it, id)| Vcpu::new(&guest, id, it).unwrap()).collect();
    vcpus[0].worker().set_memslot(memslot(blocks * M2)).unwrap();
    for vcpu in &vcpus {
        machine.cpu(vcpu.id() as usize).load(VMID, vcpu.root());
    }
    for round in 0..2 {
        for vcpu in &mut vcpus {
            for block in 0..blocks {
                let gpa = BASE + block * M2 + round * K4;
                attempt::<ArmUncached>(&machine, vcpu, gpa, Access::Write).unwrap();
                assert!(guest.table_pages() <= u64::from(bound));
                assert_eq!(guest.table_pages(), (machine.frames() - roots) as u64);
            }
        }
    }
    // Pages in views that were emptied for room count as used, and written.
    let mut young = vec![0; blocks as usize * 8];
    let how = slat::AgeOptions { clear: false, ..slat::AgeOptions::LEAVES };
    vcpus[0].worker().age(range(BASE, blocks * M2), None, &mut young, how).unwrap();
    let used: Vec<_> = (0..blocks as usize).map(|block| young[block * 8]).collect();
    assert_eq!(used, vec![0b11; blocks as usize]);
    drop(vcpus);
    assert!(machine.finish().is_empty());
}

/// The vCPU's view is emptied for a table page, and the host finds what it maps there after that.
#[test]
fn a_view_that_was_left_for_room_is_found_by_the_host() {
    type C = ArmUncached;
    for last in 0..24 {
        let config = Config { table_pages: Some(12), ..Config::new(1, PageSize::SIZE_2M) };
        with_guest!(C, config, memslot(64 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
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
