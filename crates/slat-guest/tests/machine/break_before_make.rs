//! Live entries that are replaced without a break, on CPUs that require one and on CPUs that do
//! not.

use crate::cases::Case;
use crate::common::*;
use slat::format::arm64::Arm64;
use slat::{Attributes, BreakBeforeMake, Execute, Format, Hpa, Memory, PageSize, Platform};
use slat_sim::arch::Sizes;
use slat_sim::{Arch, Arm, Ept, Kind, Machine};

/// Replaces a live block by a table, as a split on x86 does, and invalidates afterwards.
fn split_live<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.map(BASE, RAM, 2 << 20, M2);
    guest.read(0, BASE);
    let table = guest.machine.allocate(4096).unwrap().hpa();
    let block = guest.place(BASE);
    let bits = F::attribute_bits(block.raw, 1);
    for index in 0..512 {
        let leaf = F::leaf(bits, 0, Hpa(RAM + ((index as u64) << 12)));
        guest.machine.poke(table, index, leaf);
    }
    guest.machine.poke(block.table, block.index, F::table(table, 1));
    guest.machine.publish();
    guest.read(0, BASE + 0x1000);
    guest.flush();
    guest.fresh(BASE, 2 << 20);
}

#[test]
fn a_live_block_split_without_a_break_is_two_sizes_of_one_page() {
    let machine = arm_machine();
    split_live(&Guest::arm(&machine));
    caught(&machine, Kind::SizeConflict);
}

#[test]
fn on_level_3_it_is_harmless() {
    let machine = Machine::new(Arm { bbm: 3, ..arm() }, 2);
    split_live(&Guest::arm(&machine));
    clean(&machine);
}

fn where_no_change_of_size_breaks_it_is_harmless<C: Case>() {
    let machine = C::machine(2);
    if C::machine(2).arch().sizes() == Sizes::Allowed {
        split_live(&C::guest(&machine));
    }
    clean(&machine);
}

#[test]
fn bbm_level_2_without_an_abort_handler_ends_in_the_abort() {
    let machine = Machine::new(Arm { bbm: 2, ..arm() }, 2).declaring(BreakBeforeMake::Never);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    machine.meanwhile(|machine, _| _ = machine.cpu(0).read(BASE + 0x1000));
    guest.split(BASE, 2 << 20, K4);
    caught(&machine, Kind::SizeConflict);
}

#[test]
fn level_2_with_a_handler_aborts_and_goes_on() {
    let machine = Machine::new(Arm { bbm: 2, ..arm() }, 2);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    machine.meanwhile(|machine, _| _ = machine.cpu(0).read(BASE + 0x1000));
    guest.split(BASE, 2 << 20, K4);
    assert!(machine.conflict_aborts() > 0);
    guest.fresh(BASE, 2 << 20);
    clean(&machine);
}

#[test]
fn a_split_that_is_not_broken_where_it_should_be_is_noticed() {
    // The platform declares what its CPUs do not support.
    let machine = arm_machine().declaring(BreakBeforeMake::Never);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    guest.read(0, BASE);
    guest.split(BASE, 2 << 20, K4);
    caught(&machine, Kind::SizeConflict);
}

#[test]
fn a_collapse_that_is_not_broken_where_it_should_be_is_noticed() {
    let machine = arm_machine().declaring(BreakBeforeMake::Never);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, K4);
    guest.read(0, BASE);
    guest.collapse(BASE, 2 << 20, M2);
    caught(&machine, Kind::SizeConflict);
}

#[test]
fn an_address_changed_without_a_break_is_two_translations() {
    let machine = Machine::new(Arm { bbm: 3, ..arm() }, 2);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.read(0, BASE);
    guest.poke(BASE, |raw| raw + 0x1000);
    machine.publish();
    caught(&machine, Kind::BreakBeforeMake);
}

#[test]
fn a_memory_type_changed_without_a_break_is_a_type_conflict() {
    let machine = Machine::new(Arm { bbm: 3, ..arm() }, 2);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.read(0, BASE);
    // MemAttr 0b0101: not cacheable.
    guest.poke(BASE, |raw| raw & !(0b1111 << 2) | 0b0101 << 2);
    machine.publish();
    caught(&machine, Kind::BreakBeforeMake);
}

#[test]
fn another_table_without_a_break_is_two_tables_of_one_range() {
    let machine = Machine::new(Arm { bbm: 3, ..arm() }, 2);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.read(0, BASE);
    let leaf = guest.place(BASE);
    let link = machine.above(VMID, &leaf);
    let table = machine.allocate(4096).unwrap().hpa();
    (0..512).for_each(|index| machine.poke(table, index, machine.peek(leaf.table, index)));
    machine.poke(link.table, link.index, Arm64::<12>::table(table, 1));
    machine.publish();
    caught(&machine, Kind::BreakBeforeMake);
}

#[test]
fn a_break_without_its_invalidation_is_none() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.read(0, BASE);
    guest.poke(BASE, |_| 0);
    machine.publish();
    guest.map(BASE, RAM + 0x1000, 0x1000, K4);
    caught(&machine, Kind::BreakBeforeMake);
}

/// The reason for no-execute huge pages: a machine check on page size change.
#[test]
fn code_in_two_sizes_is_a_machine_check() {
    let machine = Machine::new(Ept { multihit: true, ..Ept::default() }, 2);
    split_live(&Guest::ept(&machine));
    caught(&machine, Kind::SizeConflict);
}

#[test]
fn the_engine_answers_a_fetch_from_a_huge_page_by_a_split() {
    let machine = Machine::new(Ept { multihit: true, ..Ept::default() }, 2);
    let guest = Guest::ept(&machine);
    let data = Attributes { execute: Execute::None, ..Attributes::RAM };
    guest.map_as(BASE, RAM, 2 << 20, M2, data);
    guest.write(0, BASE);
    assert!(machine.cpu(0).execute(BASE + 0x3000).is_err());
    guest.split(BASE, 2 << 20, K4);
    guest.relax(BASE + 0x3000, 0x1000, slat::Access::Execute);
    machine.cpu(0).execute(BASE + 0x3000).unwrap();
    guest.fresh(BASE, 2 << 20);
    clean(&machine);
}

fn resize<const G: u32>(bbm: u8) {
    let arm = Arm { bbm, ..Arm::new(G, BITS) };
    let machine = Machine::new(arm, 2);
    let guest = Guest::new(&machine, arm64::<G>());
    let (page, block) = (1u64 << G, 1u64 << (G + G - 3));
    let (page_size, block_size) =
        (PageSize::from_bytes(page).unwrap(), PageSize::from_bytes(block).unwrap());
    let block = if block > 64 << 20 { return } else { block };
    guest.map(BASE, RAM, block, block_size);
    for cpu in 0..2 {
        guest.write(cpu, BASE + page);
    }
    machine.meanwhile(move |machine, _| {
        let _ = machine.cpu(0).read(BASE + page);
        let _ = machine.cpu(1).write(BASE + 3 * page);
    });
    guest.split(BASE, block, page_size);
    guest.fresh(BASE, block);
    guest.read(0, BASE + page);
    guest.collapse(BASE, block, block_size);
    guest.read(0, BASE + page);
    guest.fresh(BASE, block);
    guest.tables.reclaim();
    guest.check_dirty(BASE, block);
    machine.undisturbed();
    assert_eq!(guest.place(BASE).level, 2, "a block again");
    guest.unmap(BASE, block);
    clean(&machine);
}

#[test]
fn the_engine_splits_and_collapses_blocks_at_every_bbm_level() {
    for bbm in 0..=3 {
        resize::<12>(bbm);
        resize::<14>(bbm);
    }
}

fn the_engine_splits_and_collapses_live_blocks<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    (0..2).for_each(|cpu| guest.write(cpu, BASE));
    machine.meanwhile(|machine, _| {
        let _ = machine.cpu(0).read(BASE + 0x1000);
        let _ = machine.cpu(1).write(BASE + 0x3000);
    });
    guest.split(BASE, 2 << 20, K4);
    guest.collapse(BASE, 2 << 20, M2);
    guest.fresh(BASE, 2 << 20);
    guest.tables.reclaim();
    guest.check_dirty(BASE, 2 << 20);
    clean(&machine);
}

#[test]
fn the_engine_does_not_map_over_what_is_mapped_otherwise() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.read(0, BASE);
    let device = Attributes { memory: Memory::Device, ..Attributes::RAM };
    guest.with(|guard, cache| {
        let again = range(BASE, 0x1000);
        assert!(guard.map(again, Hpa(RAM + 0x1000), Attributes::RAM, K4, cache).is_err());
        assert!(guard.map(again, Hpa(RAM), device, K4, cache).is_err());
    });
    machine.speculate();
    guest.fresh(BASE, 0x1000);
    clean(&machine);
}

on_every_format! {
    where_no_change_of_size_breaks_it_is_harmless,
    the_engine_splits_and_collapses_live_blocks,
}
