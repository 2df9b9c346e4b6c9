//! Power's radix trees: invalidations that leave something out on purpose, and leaves that hardware
//! does not mark.

use crate::common::*;
use slat::format::power::tlbie::{Instruction, Operands, Tlbie};
use slat::format::power::{PowerK4, PowerK64};
use slat::{Access, Attributes, Format, Gpa, Hpa, Invalidation, PageSize, Platform};
use slat_sim::{Fault, Kind, Machine, Power};

const K64: u64 = 1 << 16;
const FORMAT: PowerK64 = PowerK64 { output_bits: 51 };

fn size() -> PageSize {
    PageSize::from_bytes(K64).unwrap()
}

fn execute(machine: &Machine<Power>, instruction: Instruction) {
    match instruction {
        Instruction::Ptesync => machine.ptesync(),
        Instruction::Tlb(x) => machine.tlbie(x.rb, x.rs, 0),
        Instruction::All(x) => machine.tlbie(x.rb, x.rs, 2),
        Instruction::Eieio => machine.eieio(),
        Instruction::Tlbsync => machine.tlbsync(),
        Instruction::TlbLocal(_) | Instruction::AllLocal(_) => {
            unreachable!("no part of what reaches all CPUs")
        }
    }
}

/// Creates a machine whose platform invalidates by `invalidate`.
fn wrong(invalidate: fn(&Machine<Power>, &Invalidation)) -> Machine<Power> {
    Machine::new(Power::new(16), 2).firmware(invalidating(invalidate))
}

fn skipping(machine: &Machine<Power>, what: &Invalidation, skip: impl Fn(&Instruction) -> bool) {
    let sequence = Tlbie::default().sequence(what);
    sequence.filter(|i| !skip(i)).for_each(|i| execute(machine, i));
}

/// Unmaps a page while the other CPU runs, and takes its memory back.
fn unmap_a_page(machine: &Machine<Power>) {
    let guest = Guest::new(machine, FORMAT);
    guest.map(BASE, RAM, 2 * K64, size());
    (0..2).for_each(|cpu| guest.write(cpu, BASE));
    guest.unmap(BASE, K64);
    let _ = machine.cpu(1).write(BASE);
}

/// Unmaps all pages of a table, so that it and the empty tables above it are freed.
fn unmap_a_table(machine: &Machine<Power>) {
    let guest = Guest::new(machine, FORMAT);
    guest.map(BASE, RAM, 2 << 20, size());
    guest.read(1, BASE);
    guest.unmap(BASE, 2 << 20);
    assert_eq!(guest.tables.reclaim(), 3);
}

#[test]
fn the_engines_invalidations_leave_nothing() {
    let machine = Machine::new(Power::new(16), 2);
    unmap_a_page(&machine);
    clean(&machine);
    let machine = Machine::new(Power::new(16), 2);
    unmap_a_table(&machine);
    clean(&machine);
}

#[test]
fn a_stale_walk_cache_leads_into_a_freed_table() {
    let machine = wrong(|machine, what| {
        for instruction in Tlbie::default().sequence(what) {
            execute(
                machine,
                match instruction {
                    Instruction::All(operands) => Instruction::Tlb(operands),
                    other => other,
                },
            );
        }
    });
    unmap_a_table(&machine);
    caught(&machine, Kind::FreedTable);
}

#[test]
fn tables_invalidated_by_address_alone_stay_in_the_walk_cache() {
    let machine = wrong(|machine, what| {
        machine.ptesync();
        let range = what.range.unwrap_or_else(|| range(BASE, 2 << 20));
        for gpa in (range.start().0..range.end().0).step_by(K64 as usize) {
            // RIC=2 by address does not invalidate links.
            execute(machine, Instruction::All(Operands { rb: gpa | 5 << 5, rs: VMID.0.into() }));
        }
        for last in [Instruction::Eieio, Instruction::Tlbsync, Instruction::Ptesync] {
            execute(machine, last);
        }
    });
    unmap_a_table(&machine);
    caught(&machine, Kind::FreedTable);
}

#[test]
fn an_invalidation_of_another_page_size_leaves_the_page() {
    let machine = wrong(|machine, what| {
        for instruction in Tlbie::default().sequence(what) {
            execute(
                machine,
                match instruction {
                    // AP 0 means 4k.
                    Instruction::Tlb(x) => Instruction::Tlb(Operands { rb: x.rb & !0xe0, ..x }),
                    other => other,
                },
            );
        }
    });
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn another_partition_is_not_this_guest() {
    let machine = wrong(|machine, what| {
        let other = Invalidation { vmid: slat::Vmid(what.vmid.0 + 1), ..*what };
        Tlbie::default().sequence(&other).for_each(|i| execute(machine, i));
    });
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn without_eieio_or_tlbsync_no_cpu_waits_for_the_others() {
    let machine = wrong(|machine, what| skipping(machine, what, |i| *i == Instruction::Tlbsync));
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
    let machine = wrong(|machine, what| skipping(machine, what, |i| *i == Instruction::Eieio));
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn without_the_first_ptesync_a_walker_reads_what_was_there() {
    let machine = wrong(|machine, what| {
        let sequence = Tlbie::default().sequence(what);
        sequence.skip(1).for_each(|instruction| execute(machine, instruction));
    });
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn a_block_that_is_split_without_a_break_is_two_translations() {
    let machine = Machine::new(Power::new(16), 2);
    let guest = Guest::new(&machine, FORMAT);
    guest.map(BASE, RAM, 2 << 20, M2);
    guest.read(0, BASE);
    let table = machine.allocate(4096).unwrap().hpa();
    let block = guest.place(BASE);
    let bits = PowerK64::attribute_bits(block.raw, 1);
    for index in 0..32 {
        let leaf = PowerK64::leaf(bits, 0, Hpa(RAM + index as u64 * K64));
        machine.poke(table, index, leaf);
    }
    machine.poke(block.table, block.index, PowerK64::table(table, 1));
    machine.publish();
    guest.read(0, BASE + K64);
    caught(&machine, Kind::SizeConflict);
    // The engine's split uses a break.
    let machine = Machine::new(Power::new(16), 2);
    let guest = Guest::new(&machine, FORMAT);
    guest.map(BASE, RAM, 2 << 20, M2);
    machine.meanwhile(|machine, _| _ = machine.cpu(0).read(BASE + K64));
    guest.split(BASE, 2 << 20, size());
    guest.fresh(BASE, 2 << 20);
    clean(&machine);
}

#[test]
fn a_write_that_hardware_does_not_mark_faults_and_is_recorded() {
    let machine = Machine::new(Power { sets: false, ..Power::new(12) }, 2);
    let guest = Guest::new(&machine, PowerK4 { output_bits: 51 });
    let clean_leaf = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
    guest.map_as(BASE, RAM, 0x1000, K4, clean_leaf);
    let (write, read) = (|| machine.cpu(1).write(BASE), || machine.cpu(1).read(BASE));
    assert_eq!((read(), write()), (Err(Fault::Accessed), Err(Fault::Accessed)));
    guest.relax(BASE, 0x1000, Access::Read);
    assert_eq!((read(), write()), (Ok(Hpa(RAM)), Err(Fault::Accessed)));
    guest.relax(BASE, 0x1000, Access::Write);
    assert_eq!(write(), Ok(Hpa(RAM)));
    guest.check_dirty(BASE, 0x1000);
    // The page is cleaned and invalidated, so that every write is seen.
    let mut bitmap = [0];
    guest.with(|guard, _| guard.harvest(range(BASE, 0x1000), &mut bitmap).unwrap());
    machine.copy(VMID, range(BASE, 0x1000));
    assert_eq!((bitmap, write()), ([1], Err(Fault::Accessed)));
    assert!(!guest.is_dirty(Gpa(BASE)));
    clean(&machine);
}

#[test]
fn a_clean_that_is_not_invalidated_loses_the_next_write() {
    let machine = wrong(|machine, _| machine.ptesync());
    let guest = Guest::new(&machine, FORMAT);
    guest.map_clean(BASE, RAM, K64, size());
    guest.write(1, BASE);
    guest.with(|guard, _| guard.harvest(range(BASE, K64), &mut [0]).unwrap());
    machine.copy(VMID, range(BASE, K64));
    guest.write(1, BASE);
    guest.check_dirty(BASE, K64);
    caught(&machine, Kind::LostDirty);
}
