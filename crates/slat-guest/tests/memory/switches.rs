//! What changes of a guest's configuration while it runs.

use crate::bed::*;
use crate::{on_all, with_guest};
use slat::{Access, Execute, Gpa, PageSize};
use slat_guest::*;

/// Blocks that may be executed, among those of the first `bytes`.
fn executable_blocks<C: Case>(worker: &mut TheWorker<'_, C>, bytes: u64) -> u64 {
    let blocks = (0..bytes).step_by(M2 as usize).filter(|at| {
        let leaf = worker.translate(Gpa(BASE + at)).unwrap();
        leaf.is_some_and(|leaf| {
            leaf.size > PageSize::SIZE_4K && leaf.attributes.execute != Execute::None
        })
    });
    blocks.count() as u64
}

on_all! {
    fn huge_pages_lose_and_regain_execution_while_the_guest_runs<C: Case>() {
        with_guest!(C, config(), slot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
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
        // The CPU has forgotten that it could: the fetch faults, and splits.
        assert_eq!(fetch(&mut vcpu, 3), [Outcome::Split { from: PageSize::SIZE_2M }]);
        assert_eq!(fetch(&mut vcpu, 4), []);
        // What it split comes back in a period, as it does where the guest began so.
        vcpu.worker().recover_huge_pages();
        assert_eq!(vcpu.worker().recover_huge_pages().bytes, M2);
        assert_eq!(fetch(&mut vcpu, 3), [Outcome::Split { from: PageSize::SIZE_2M }]);
        // And it is exempt again: a fetch gives the right in place.
        assert_eq!(vcpu.worker().set_execute_huge(ExecuteHuge::Allowed), Ok(0));
        assert_eq!(fetch(&mut vcpu, 512), [Outcome::MadeExecutable(PageSize::SIZE_2M)]);
        assert_eq!(vcpu.worker().collapse(range(BASE, 4 * M2), PageSize::SIZE_2M), M2);
        assert_eq!(executable_blocks::<C>(vcpu.worker(), 4 * M2), 2);
        assert_eq!(machine.finish().iter().map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
    }

    fn tables_whose_pages_may_be_executed_are_handed_to_recovery<C: Case>() {
        with_guest!(C, config(), slot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for page in [0, 512] {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Execute).unwrap();
        }
        let split = EagerSplit::new(range(BASE, M2), PageSize::SIZE_4K);
        split.run(vcpu.worker(), || false);
        assert_eq!(vcpu.worker().set_execute_huge(ExecuteHuge::Split), Ok(M2));
        // Not by the back door: a block may not be executed any more.
        assert_eq!(vcpu.worker().collapse(range(BASE, M2), PageSize::SIZE_2M), 0);
        vcpu.worker().recover_huge_pages();
        assert_eq!(vcpu.worker().recover_huge_pages().bytes, M2);
        assert_eq!(executable_blocks::<C>(vcpu.worker(), 2 * M2), 0);
    }

    fn eager_splits_change_their_size_with_the_next_log_and_the_next_clear<C: Case>() {
        with_guest!(C, config(), slot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let pages = |vcpu: &mut TheVcpu<'_, C>| vcpu.worker().leaves_by_size()[0].1;
        for block in 0..2 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
        }
        vcpu.worker().set_slot(logged(2 * M2)).unwrap();
        assert_eq!(pages(&mut vcpu), 0);
        guest.set_eager_split(Some(PageSize::SIZE_4K)).unwrap();
        assert_eq!(guest.eager_split(), Some(PageSize::SIZE_4K));
        // Marked as a whole: a clear splits now.
        vcpu.worker().host_wrote(range(BASE, K4), slat::Maintenance::Data);
        vcpu.worker().take_log(SlotId(0), &mut [0; 16]).unwrap();
        assert_eq!(pages(&mut vcpu), 512);
        let ended = vcpu.worker().set_slot(slot(2 * M2));
        assert!(matches!(ended, Ok(SlotChange::LogOff { .. })));
        let begun = vcpu.worker().set_slot(logged(2 * M2)).unwrap();
        let SlotChange::LogOn(Some(report)) = begun else { panic!("{begun:?}") };
        assert_eq!(report.done, 2 * M2);
        assert_eq!(pages(&mut vcpu), 1024);
        let odd = guest.set_eager_split(PageSize::from_bytes(8 * K4));
        assert!(odd.is_err());
        assert_eq!(guest.eager_split(), Some(PageSize::SIZE_4K));
    }
}
