//! The parts of a guest's configuration that change while it runs.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Execute, Gpa, Hpa, PageSize, Vmid};
use slat_guest::*;

/// Returns the number of executable blocks among those of the first `bytes`.
fn executable_blocks<C: Case>(worker: &mut TheWorker<'_, C>, bytes: u64) -> u64 {
    let blocks = (0..bytes).step_by(M2 as usize).filter(|at| {
        let leaf = worker.translate(Gpa(BASE + at)).unwrap();
        leaf.is_some_and(|leaf| {
            leaf.size > PageSize::SIZE_4K && leaf.attributes.execute != Execute::None
        })
    });
    blocks.count() as u64
}

/// A page stays mapped, and cannot be accessed after it was invalidated, under either VMID.
fn goes_on_by_another_vmid<C: Case>(config: Config)
where
    C::A: 'static,
{
    let mut others = storage();
    with_guest!(C, config, memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let mut second = Vcpu::new(&guest, 1, &mut others).unwrap();
    machine.cpu(1).load(VMID, second.root());
    let page = |page: u64| BASE + page * K4;
    for vcpu in [&mut vcpu, &mut second] {
        attempt::<C>(&machine, vcpu, page(0), Access::Write).unwrap();
        attempt::<C>(&machine, vcpu, page(1), Access::Write).unwrap();
    }
    let mut before = VMID;
    for (to, gone) in [(Vmid(8), 0), (Vmid(9), 1)] {
        assert_eq!(set_vmid::<C>(&machine, &guest, [&vcpu, &second].into_iter(), to), before);
        for vcpu in [&mut vcpu, &mut second] {
            let (_, outcomes) = attempt::<C>(&machine, vcpu, page(gone), Access::Write).unwrap();
            assert_eq!(outcomes, [], "it is there");
        }
        let memory = ram.get(HOST + gone * K4).unwrap().hpa;
        let invalidation = vcpu.worker().invalidate(host_range(HOST + gone * K4, K4), |_| {});
        machine.take_back(Hpa(memory), K4);
        for vcpu in [&mut vcpu, &mut second] {
            let held = attempt::<C>(&machine, vcpu, page(gone), Access::Read);
            assert_eq!(held, Err(Outcome::Retry(Retry::Invalidated)));
        }
        drop(invalidation);
        ram.remove(HOST + gone * K4);
        before = to;
    }
    // A change of memslots waits only for threads inside the tables.
    let gone = MemslotSpec { bytes: 0, ..memslot(M2) };
    assert_eq!(vcpu.worker().set_memslot(gone), Ok(MemslotChange::Deleted));
    assert_eq!(machine.finish().iter().map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn so_do_vcpus_on_views_of_their_own() {
    goes_on_by_another_vmid::<ArmUncached>(Config { caches: CachePolicy::Exact, ..config() });
}

on_all! {
    fn a_guest_that_is_known_by_another_vmid_goes_on<C: Case>() {
        goes_on_by_another_vmid::<C>(config());
    }

    fn huge_pages_lose_and_regain_execution_while_the_guest_runs<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let fetch = |vcpu: &mut TheVcpu<'_, C>, page: u64| {
            attempt::<C>(&machine, vcpu, BASE + page * K4, Access::Execute).unwrap().1
        };
        assert_eq!(guest.config().execute_huge, ExecuteHuge::Allowed);
        for block in 0..4 {
            fetch(&mut vcpu, block * 512);
        }
        assert_eq!(executable_blocks::<C>(vcpu.worker(), 4 * M2), 4);
        assert_eq!(vcpu.worker().set_execute_huge(ExecuteHuge::Split), Ok(4 * M2));
        assert_eq!(vcpu.worker().execute_huge(), ExecuteHuge::Split);
        assert_eq!(vcpu.worker().set_execute_huge(ExecuteHuge::Split), Ok(0));
        assert_eq!(executable_blocks::<C>(vcpu.worker(), 4 * M2), 0);
        // The CPU has no executable translation any more: the fetch faults, and splits.
        assert_eq!(fetch(&mut vcpu, 3), [Outcome::Split { from: PageSize::SIZE_2M }]);
        assert_eq!(fetch(&mut vcpu, 4), []);
        // Tables that it made are recovered in a period, as in a guest that began with this
        // setting.
        vcpu.worker().recover_huge_pages();
        assert_eq!(vcpu.worker().recover_huge_pages().bytes, M2);
        assert_eq!(fetch(&mut vcpu, 3), [Outcome::Split { from: PageSize::SIZE_2M }]);
        // The guest is exempt again: a fetch gives the right back in place.
        assert_eq!(vcpu.worker().set_execute_huge(ExecuteHuge::Allowed), Ok(0));
        assert_eq!(fetch(&mut vcpu, 512), [Outcome::MadeExecutable(PageSize::SIZE_2M)]);
        assert_eq!(vcpu.worker().collapse(range(BASE, 4 * M2), PageSize::SIZE_2M), M2);
        assert_eq!(executable_blocks::<C>(vcpu.worker(), 4 * M2), 2);
        assert_eq!(machine.finish().iter().map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
    }

    fn tables_whose_pages_may_be_executed_are_handed_to_recovery<C: Case>() {
        with_guest!(C, config(), memslot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for page in [0, 512] {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Execute).unwrap();
        }
        let split = EagerSplit::new(range(BASE, M2), PageSize::SIZE_4K);
        split.run(vcpu.worker(), || false);
        assert_eq!(vcpu.worker().set_execute_huge(ExecuteHuge::Split), Ok(M2));
        // A collapse makes no executable block either.
        assert_eq!(vcpu.worker().collapse(range(BASE, M2), PageSize::SIZE_2M), 0);
        vcpu.worker().recover_huge_pages();
        assert_eq!(vcpu.worker().recover_huge_pages().bytes, M2);
        assert_eq!(executable_blocks::<C>(vcpu.worker(), 2 * M2), 0);
    }

    fn eager_splits_change_their_size_with_the_next_log_and_the_next_clear<C: Case>() {
        with_guest!(C, config(), memslot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let pages = |vcpu: &mut TheVcpu<'_, C>| vcpu.worker().leaves_by_size()[0].1;
        for block in 0..2 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
        }
        vcpu.worker().set_memslot(logged(2 * M2)).unwrap();
        assert_eq!(pages(&mut vcpu), 0);
        guest.set_eager_split(Some(PageSize::SIZE_4K)).unwrap();
        assert_eq!(guest.eager_split(), Some(PageSize::SIZE_4K));
        // All of it is marked, and a clear splits now.
        vcpu.worker().host_wrote(range(BASE, K4), slat::Maintenance::Data);
        vcpu.worker().take_log(MemslotId(0), &mut [0; 16]).unwrap();
        assert_eq!(pages(&mut vcpu), 512);
        let ended = vcpu.worker().set_memslot(memslot(2 * M2));
        assert!(matches!(ended, Ok(MemslotChange::LogOff { .. })));
        let begun = vcpu.worker().set_memslot(logged(2 * M2)).unwrap();
        let MemslotChange::LogOn(Some(report)) = begun else { panic!("{begun:?}") };
        assert_eq!(report.done, 2 * M2);
        assert_eq!(pages(&mut vcpu), 1024);
        let odd = guest.set_eager_split(PageSize::from_bytes(8 * K4));
        assert!(odd.is_err());
        assert_eq!(guest.eager_split(), Some(PageSize::SIZE_4K));
    }

    fn eager_splits_change_their_size_with_the_next_reset_of_rings<C: Case>() {
        let config = Config { ring: Some(128), ..config() };
        with_guest!(C, config, logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let mut pages = [DirtyPage { memslot: MemslotId(0), page: 0 }; 2];
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 1);
        // A block again, in a memslot that logs.
        vcpu.worker().set_memslot(memslot(M2)).unwrap();
        drop(vcpu.worker().invalidate(host_range(HOST, M2), |_| {}));
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        vcpu.worker().set_memslot(logged(M2)).unwrap();
        assert_eq!(vcpu.worker().leaves_by_size()[0].1, 0);
        guest.set_eager_split(Some(PageSize::SIZE_4K)).unwrap();
        assert_eq!(vcpu.worker().reset_rings().unwrap(), 1);
        assert_eq!(vcpu.worker().leaves_by_size()[0].1, 512);
    }
}
