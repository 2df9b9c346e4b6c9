//! What a fault says that it did, is what it did.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, PageSize};
use slat_guest::*;
use slat_sim::Moment;

/// Makes the first block a table whose pages may not be executed: a log is on, and a write has
/// split the block.
fn split_by_a_write<C: Case>(machine: &slat_sim::Machine<C::A>, vcpu: &mut TheVcpu<'_, C>) {
    attempt::<C>(machine, vcpu, BASE, Access::Write).unwrap();
    vcpu.worker().set_memslot(logged(M2)).unwrap();
    attempt::<C>(machine, vcpu, BASE, Access::Write).unwrap();
}

on_all! {
    fn a_fault_takes_the_ticks_from_its_beginning_to_its_end<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        machine.here(0);
        (0..100).for_each(|_| _ = machine.now());
        machine.meanwhile(|machine, _| (0..8).for_each(|_| _ = machine.now()));
        let before = machine.now();
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(PageSize::SIZE_4K));
        let after = machine.now();
        machine.undisturbed();
        let spent = guest.stats().vcpus[0].of(FaultKind::Mapped);
        // The fault asks for the time as well, at its beginning and its end.
        assert_eq!(spent.ticks, after - before - 2);
        assert!(spent.ticks > 8);
    }

    fn a_devices_tables_follow_only_if_they_are_to<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        ram.change(HOST, |page| (page.write, page.own) = (false, true));
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        assert_eq!(outcomes, [Outcome::MadeWritable(PageSize::SIZE_4K)]);
        assert_eq!(machine.device_access(VMID, Gpa(BASE), false), None);
    }

    fn a_block_is_as_large_as_pages_of_the_other_kind_allow<C: Case>() {
        with_guest!(C, config(), hidden(G1), PageSize::SIZE_1G => machine, ram, guest, vcpu);
        let page = range(BASE + M2, K4);
        vcpu.worker().convert(page, MemoryKind::Private, |_| {}).unwrap();
        machine.claim_kind(VMID, page, MemoryKind::Private);
        let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        assert_eq!(outcomes, [Outcome::Mapped(PageSize::SIZE_2M)]);
        assert!(machine.finish().is_empty());
    }

    fn a_block_that_may_not_be_executed_is_mapped_by_one_attempt<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
        for access in [Access::Read, Access::Write] {
            with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            machine.here(0);
            assert_eq!(vcpu.fault(Gpa(BASE), access), Outcome::Mapped(PageSize::SIZE_2M));
        }
    }

    fn only_a_block_is_unmapped_for_a_fetch<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Zap, ..config() };
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        split_by_a_write::<C>(&machine, &mut vcpu);
        let fetched = attempt::<C>(&machine, &mut vcpu, BASE + 5 * K4, Access::Execute).unwrap();
        assert_eq!(fetched.1, [Outcome::MadeExecutable(PageSize::SIZE_4K)]);
        assert!(machine.finish().is_empty());
    }

    fn a_fetch_that_splits_a_block_for_one_page_says_that_it_split<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::SplitPage, ..config() };
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        let fetched = attempt::<C>(&machine, &mut vcpu, BASE + 5 * K4, Access::Execute).unwrap();
        assert_eq!(fetched.1, [Outcome::Split { from: PageSize::SIZE_2M }]);
        assert!(machine.finish().is_empty());
    }

    /// When the fetch has filled a table for the block, another vCPU's write splits the block. The
    /// pages have no right to be executed then.
    fn a_fetch_whose_block_another_vcpu_splits_gets_its_right<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        vcpu.worker().set_memslot(logged(M2)).unwrap();
        let split = Outcome::Split { from: PageSize::SIZE_2M };
        let (write, at) = ((BASE + K4, Access::Write), (Moment::Fill, 0));
        let (fetch, other) = meets::<C>((&machine, &guest, &mut vcpu), write, at);
        assert_eq!((fetch, other), (split, Some(split)));
        assert!(machine.cpu(0).execute(BASE).is_ok());
        assert!(machine.finish().is_empty());
    }

    /// The second fetch comes each time that the first begins to look at a table.
    fn of_two_fetches_from_one_page_one_makes_it_executable<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
        let made = Outcome::MadeExecutable(PageSize::SIZE_4K);
        let mut met = 0;
        for when in 0..10 {
            with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            split_by_a_write::<C>(&machine, &mut vcpu);
            let (fetch, at) = ((BASE, Access::Execute), (Moment::Table, when));
            let (first, second) = meets::<C>((&machine, &guest, &mut vcpu), fetch, at);
            let Some(second) = second else { break };
            let expected = [(made, Outcome::Spurious), (Outcome::Spurious, made)];
            assert!(expected.contains(&(first, second)), "{when}: {first:?}, {second:?}");
            assert!(machine.cpu(0).execute(BASE).is_ok());
            met += 1;
        }
        assert!(met > 2);
    }
}

/// The vCPU fetches from [`BASE`]. When the engine reaches this moment for the `at.1`-th time,
/// another vCPU makes its access. Returns the outcomes of both faults.
fn meets<C: Case>(
    (machine, guest, vcpu): (&slat_sim::Machine<C::A>, &TheGuest<'_, C>, &mut TheVcpu<'_, C>),
    (gpa, access): (u64, Access),
    at: (Moment, u32),
) -> (Outcome, Option<Outcome>) {
    let mut other = Vcpu::new(guest, 1).unwrap();
    let (mut times, mut met) = (0, None);
    let then = |machine: &slat_sim::Machine<C::A>, moment| {
        times += u32::from(moment == at.0);
        if moment == at.0 && times == at.1 + 1 {
            machine.here(1);
            met = Some(other.fault(Gpa(gpa), access));
            machine.here(0);
        }
    };
    machine.here(0);
    let outcome = beside(machine, then, || vcpu.fault(Gpa(BASE), Access::Execute));
    (outcome, met)
}

#[test]
fn a_view_that_has_no_room_for_one_path_is_refused() {
    for room in [0, 1] {
        with_guest!(ArmUncached, config(), memslot(M2), PageSize::SIZE_4K
            => machine, ram, guest, vcpu);
        machine.limit(machine.frames() + room);
        let refused = attempt::<ArmUncached>(&machine, &mut vcpu, BASE, Access::Write);
        assert_eq!(refused, Err(Outcome::Refused(Refusal::OutOfFrames)));
        assert!(machine.finish().is_empty());
    }
}
