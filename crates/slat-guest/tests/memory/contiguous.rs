//! Leaves that a TLB may hold as one entry: faults fold them, and a memslot that begins to log
//! unfolds them.

use crate::fixture::*;
use crate::with_guest;
use slat::{Access, PageSize};
use slat_guest::*;

const K64: u64 = 64 << 10;
const M32: u64 = 32 << 20;

fn size(bytes: u64) -> PageSize {
    PageSize::from_bytes(bytes).unwrap()
}

fn folding(largest: PageSize) -> Config {
    Config { contiguous: true, ..Config::new(2, largest) }
}

fn nothing_wrong<C: Case>(machine: &slat_sim::Machine<C::A>) {
    assert_eq!(machine.finish().iter().map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
}

fn of_size<C: Case>(vcpu: &mut TheVcpu<'_, C>, bytes: u64) -> u64 {
    let sizes = vcpu.worker().leaves_by_size();
    sizes.iter().find(|(found, _)| found.bytes() == bytes).map_or(0, |found| found.1)
}

fn folds<C: Case>() {
    with_guest!(C, folding(PageSize::SIZE_4K), memslot(M2), PageSize::SIZE_2M
        => machine, ram, guest, vcpu);
    let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE + 0x5000, Access::Read).unwrap();
    assert_eq!(outcomes, [Outcome::Mapped(size(K64))]);
    // All of it is mapped now.
    let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE + 0xf000, Access::Read).unwrap();
    assert_eq!(outcomes, []);
    // The host invalidates one page: the others stay, and the page comes back as a single leaf.
    let mut taken = Vec::new();
    let invalidation =
        vcpu.worker().invalidate(host_range(HOST + 0x5000, K4), |part| taken.push(part.gpa.0));
    ram.migrate(HOST + 0x5000);
    drop(invalidation);
    assert_eq!(taken, [BASE + 0x5000]);
    assert_eq!((of_size::<C>(&mut vcpu, K4), of_size::<C>(&mut vcpu, K64)), (15, 0));
    let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE + 0x5000, Access::Write).unwrap();
    assert_eq!(outcomes, [Outcome::Mapped(PageSize::SIZE_4K)]);
    nothing_wrong::<C>(&machine);
}

#[test]
fn a_fault_maps_a_group_where_the_backing_has_it_in_one_piece() {
    folds::<ArmPlain>();
    folds::<ArmDirty>();
}

#[test]
fn what_the_backing_has_in_smaller_pieces_is_not_folded() {
    with_guest!(ArmPlain, folding(PageSize::SIZE_1G), memslot(M2), PageSize::SIZE_4K
        => machine, ram, guest, vcpu);
    let (_, outcomes) = attempt::<ArmPlain>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
    assert_eq!(outcomes, [Outcome::Mapped(PageSize::SIZE_4K)]);
    nothing_wrong::<ArmPlain>(&machine);
}

#[test]
fn blocks_fold_into_groups_except_in_a_memslot_too_small() {
    for (bytes, expected) in [(2 * M32, M32), (M32 - M2, M2)] {
        let config = folding(PageSize::SIZE_2M);
        with_guest!(ArmDirty, config, memslot(bytes), PageSize::SIZE_1G
            => machine, ram, guest, vcpu);
        let (_, outcomes) =
            attempt::<ArmDirty>(&machine, &mut vcpu, BASE + 3 * M2, Access::Read).unwrap();
        assert_eq!(outcomes, [Outcome::Mapped(size(expected))]);
        nothing_wrong::<ArmDirty>(&machine);
    }
}

/// Writes before and after the log begins; the log has exactly the writes after that.
fn logs<C: Case>(logging: Logging, initially_set: bool) {
    let config = Config { logging, initially_set, ..folding(PageSize::SIZE_4K) };
    with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
    for page in [0, 40] {
        attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
    }
    assert_eq!(of_size::<C>(&mut vcpu, K64), 2);
    let on = vcpu.worker().set_memslot(logged(M2)).unwrap();
    assert!(matches!(on, MemslotChange::LogOn(_)));
    assert_eq!(of_size::<C>(&mut vcpu, K64), 0, "a memslot that logs has no groups");
    attempt::<C>(&machine, &mut vcpu, BASE + 7 * K4, Access::Write).unwrap();
    attempt::<C>(&machine, &mut vcpu, BASE + 100 * K4, Access::Write).unwrap();
    assert_eq!(of_size::<C>(&mut vcpu, K64), 0, "nor do faults fold there");
    nothing_wrong::<C>(&machine);
}

#[test]
fn a_slot_that_begins_to_log_has_no_groups_and_gets_none() {
    for initially_set in [false, true] {
        logs::<ArmPlain>(Logging::Protect, initially_set);
        logs::<ArmDirty>(Logging::Protect, initially_set);
        logs::<ArmDirty>(Logging::Hardware, initially_set);
    }
}

#[test]
fn on_formats_without_groups_nothing_is_folded() {
    with_guest!(Intel, folding(PageSize::SIZE_4K), memslot(M2), PageSize::SIZE_2M
        => machine, ram, guest, vcpu);
    let (_, outcomes) = attempt::<Intel>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
    assert_eq!(outcomes, [Outcome::Mapped(PageSize::SIZE_4K)]);
    nothing_wrong::<Intel>(&machine);
}

#[test]
fn huge_pages_that_may_not_be_executed_are_not_folded() {
    let config = Config { execute_huge: ExecuteHuge::Split, ..folding(PageSize::SIZE_4K) };
    with_guest!(ArmDirty, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
    let (_, outcomes) = attempt::<ArmDirty>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
    assert_eq!(outcomes, [Outcome::Mapped(PageSize::SIZE_4K)]);
    nothing_wrong::<ArmDirty>(&machine);
}
