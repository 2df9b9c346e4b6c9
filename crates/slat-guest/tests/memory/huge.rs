//! Huge pages that may not be executed, that a fault or an eager split splits, and that are
//! recovered.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, PageSize};
use slat_guest::*;
use slat_sim::{Ept, Machine};
use std::cell::Cell;

fn never_huge(execute_huge: ExecuteHuge) -> Config {
    Config { execute_huge, ..config() }
}

/// Faults until all pages of the first `bytes` were read and executed.
fn execute_all<C: Case>(
    config: Config,
    bytes: u64,
    block: PageSize,
) -> (u64, Vec<(PageSize, u64)>) {
    let all = bytes.next_multiple_of(block.bytes());
    with_guest!(C, config, memslot(all), block => machine, ram, guest, vcpu);
    for at in (0..all).step_by(block.bytes() as usize) {
        attempt::<C>(&machine, &mut vcpu, BASE + at, Access::Read).unwrap();
    }
    let mut faults = 0;
    for access in [Access::Execute, Access::Read] {
        for at in (0..bytes).step_by(K4 as usize) {
            let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE + at, access).unwrap();
            faults += outcomes.len() as u64;
        }
    }
    assert_eq!(machine.finish().iter().map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
    (faults, vcpu.worker().leaves_by_size())
}

on_all! {
    fn a_fetch_splits_along_its_path_and_frees_all_new_pages<C: Case>() {
        let (faults, sizes) =
            execute_all::<C>(never_huge(ExecuteHuge::Split), 4 * M2, PageSize::SIZE_1G);
        assert_eq!(faults, 4, "one for each 2m that was executed");
        let expected =
            [(PageSize::SIZE_4K, 2048), (PageSize::SIZE_2M, 508), (PageSize::SIZE_1G, 0)];
        assert_eq!(sizes, expected, "larger siblings stay");
    }

    fn unmapping_costs_a_fault_for_each_page<C: Case>() {
        let (faults, _) = execute_all::<C>(never_huge(ExecuteHuge::Zap), 2 * M2, PageSize::SIZE_1G);
        assert_eq!(faults, 1024);
    }

    fn only_the_page_that_was_fetched_becomes_executable_if_asked<C: Case>() {
        let (faults, _) =
            execute_all::<C>(never_huge(ExecuteHuge::SplitPage), M2, PageSize::SIZE_2M);
        assert_eq!(faults, 512);
    }

    fn pages_that_a_write_split_become_executable_together<C: Case>() {
        let config = never_huge(ExecuteHuge::Split);
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        vcpu.worker().set_memslot(logged(M2)).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let mut outcomes = Vec::new();
        for page in 0..512 {
            let gpa = BASE + page * K4;
            outcomes.extend(attempt::<C>(&machine, &mut vcpu, gpa, Access::Execute).unwrap().1);
        }
        assert_eq!(outcomes, [Outcome::MadeExecutable(PageSize::SIZE_4K)]);
        assert!(machine.finish().is_empty());
    }

    fn what_a_block_knew_of_its_use_is_not_made_up_by_the_split<C: Case>() {
        let config = never_huge(ExecuteHuge::Split);
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        let how = slat::AgeOptions { flush_tlb: true, ..slat::AgeOptions::LEAVES };
        vcpu.worker().age(range(BASE, M2), None, &mut [0; 8], how).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 7 * K4, Access::Execute).unwrap();
        let mut young = [0; 8];
        vcpu.worker().age(range(BASE, M2), None, &mut young, how).unwrap();
        assert_eq!(young, [1 << 7, 0, 0, 0, 0, 0, 0, 0]);
    }

    fn huge_pages_recover_after_a_period_except_in_logged_memslots<C: Case>() {
        let config = never_huge(ExecuteHuge::Split);
        with_guest!(C, config, memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for block in 0..3 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
        }
        for block in 0..2 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Execute).unwrap();
        }
        assert_eq!(vcpu.worker().recover_huge_pages(), RecoveryCounts::default(), "a period first");
        vcpu.worker().set_memslot(logged(4 * M2)).unwrap();
        let logged = vcpu.worker().recover_huge_pages();
        assert_eq!(logged, RecoveryCounts { bytes: 0, left: 2 });
        vcpu.worker().set_memslot(memslot(4 * M2)).unwrap();
        let mut recovered = 0;
        for _ in 0..2 {
            recovered += vcpu.worker().recover_huge_pages().bytes;
        }
        assert_eq!(recovered, 2 * M2);
        assert_eq!(vcpu.worker().leaves_by_size()[1], (PageSize::SIZE_2M, 3));
        let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
        assert_eq!(outcomes, [Outcome::Split { from: PageSize::SIZE_2M }], "not executable");
        assert!(machine.finish().is_empty());
    }

    fn an_eager_split_stops_and_goes_on_where_it_was<C: Case>() {
        with_guest!(C, config(), memslot(4 * G1), PageSize::SIZE_1G => machine, ram, guest, vcpu);
        for block in 0..4 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * G1, Access::Write).unwrap();
        }
        let split = EagerSplit::new(range(BASE, 4 * G1), PageSize::SIZE_2M);
        let chunks = Cell::new(0);
        let first = split.run(vcpu.worker(), || chunks.replace(chunks.get() + 1) == 1);
        let stopped = Some(SplitStop::Asked);
        assert_eq!(first, SplitReport { split: G1, done: G1, stopped });
        assert!(!split.is_done());
        let mut other = Worker::new(&guest).unwrap();
        let rest = split.run(&mut other, || false);
        assert_eq!(rest, SplitReport { split: 3 * G1, done: 3 * G1, stopped: None });
        assert_eq!(other.leaves_by_size()[1], (PageSize::SIZE_2M, 2048));
        let again = EagerSplit::new(range(BASE, 4 * G1), PageSize::SIZE_2M);
        assert_eq!(again.run(&mut other, || false).split, 0, "all was split");
        assert!(machine.finish().is_empty());
    }

    fn an_eager_split_that_runs_dry_says_where<C: Case>() {
        with_guest!(C, config(), memslot(16 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for block in 0..16 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
        }
        let mut worker = Worker::new(&guest).unwrap();
        machine.limit(machine.frames() + 5);
        let split = EagerSplit::new(range(BASE, 16 * M2), PageSize::SIZE_4K);
        let report = split.run(&mut worker, || false);
        let Some(SplitStop::OutOfFrames { at, .. }) = report.stopped else { panic!("{report:?}") };
        assert_eq!((report.split, report.done, at.0 - BASE), (5 * M2, 5 * M2, 5 * M2));
        machine.limit(usize::MAX);
        let report = split.run(&mut worker, || false);
        assert_eq!((report.split, report.stopped), (11 * M2, None));
        assert!(machine.finish().is_empty());
    }
}

#[test]
fn a_cpu_with_the_multihit_erratum_never_fetches_two_sizes() {
    let machine = Machine::new(Ept { multihit: true, ..Ept::default() }, 2);
    give_all::<Intel>(&machine);
    let ram = Ram::new();
    let guest = guest::<Intel>(&machine, &ram, never_huge(ExecuteHuge::Split));
    let mut vcpu = Vcpu::new(&guest, 0).unwrap();
    (0..2).for_each(|cpu| machine.cpu(cpu).load(VMID, vcpu.root()));
    ram.populate(HOST, 4 * M2, PageSize::SIZE_2M);
    vcpu.worker().set_memslot(memslot(4 * M2)).unwrap();
    for page in 0..2048 {
        attempt::<Intel>(&machine, &mut vcpu, BASE + page * K4, Access::Read).unwrap();
        attempt::<Intel>(&machine, &mut vcpu, BASE + page * K4, Access::Execute).unwrap();
        let _ = machine.cpu(1).execute(BASE + page * K4);
    }
    for _ in 0..2 {
        vcpu.worker().recover_huge_pages();
    }
    attempt::<Intel>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
    assert!(machine.finish().is_empty());
}
