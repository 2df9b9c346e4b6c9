//! Invalidations on Arm, each with a bug that some hypervisor had.
//!
//! All tests have one scenario: both CPUs use a page, which is then unmapped, and its memory is
//! taken back. The platform under the engine is wrong; in the last tests it is correct.

use crate::common::*;
use slat::format::arm64::tlbi::{Instruction, Tlbi as Sequencer};
use slat::format::arm64::{Arm64Lpa2K4, id::Granule};
use slat::{Format, Invalidation, PageSize};
use slat_sim::{Arm, Barrier, Firmware, Kind, Machine, Tlbi};

/// Far from address 0, so that a wrong operand is the address of another page.
const FAR: u64 = 0x12_3400_0000;

fn unmap_a_page<const G: u32>(machine: &Machine<Arm>) {
    let guest = Guest::new(machine, arm64::<G>());
    let page = 1 << G;
    let at = FAR + 5 * page;
    guest.map(at, RAM, 2 * page, PageSize::from_bytes(page).unwrap());
    (0..2).for_each(|cpu| guest.write(cpu, at));
    guest.unmap(at, page);
    guest.fresh(at, page);
    for cpu in 0..2 {
        let _ = machine.cpu(cpu).write(at);
    }
}

fn machine<const G: u32>(invalidate: fn(&Machine<Arm>, &Invalidation)) -> Machine<Arm> {
    Machine::new(Arm::new(G, BITS), 2).firmware(invalidating(invalidate))
}

/// Executes the right sequence with operands that `wrong` changes.
fn with_operands(machine: &Machine<Arm>, what: &Invalidation, wrong: impl Fn(u64) -> u64) {
    machine.vttbr(what.vmid);
    for instruction in machine.sequence(what) {
        machine.execute(match instruction {
            Instruction::Ipas2e1is(x) => Instruction::Ipas2e1is(wrong(x)),
            Instruction::Ipas2le1is(x) => Instruction::Ipas2le1is(wrong(x)),
            other => other,
        });
    }
}

/// Executes the right sequence with instructions that `wrong` changes or leaves out.
fn with_instructions(
    machine: &Machine<Arm>,
    what: &Invalidation,
    wrong: impl Fn(Instruction) -> Option<Instruction>,
) {
    machine.vttbr(what.vmid);
    machine.sequence(what).filter_map(wrong).for_each(|instruction| machine.execute(instruction));
}

#[test]
fn an_operand_that_is_not_shifted_leaves_the_page() {
    let machine = machine::<12>(|machine, what| with_operands(machine, what, |x| x << 12));
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn an_operand_in_units_of_the_granule_leaves_a_16k_page() {
    let machine = machine::<14>(|machine, what| with_operands(machine, what, |x| x >> 2));
    unmap_a_page::<14>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn an_operand_in_units_of_the_granule_leaves_a_64k_page() {
    let machine = machine::<16>(|machine, what| with_operands(machine, what, |x| x >> 4));
    unmap_a_page::<16>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn address_bits_that_spill_into_the_level_hint_leave_the_page() {
    // As with a sign-extended address: TTL names a granule that the tables do not have.
    let machine = machine::<12>(|machine, what| with_operands(machine, what, |x| x | 0xffff << 44));
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn a_hint_of_another_level_leaves_the_page() {
    let machine = machine::<12>(|machine, what| {
        with_operands(machine, what, |x| x & !(0xf << 44) | 0b0110 << 44);
    });
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn a_range_in_units_of_4k_leaves_64k_pages() {
    let faulty = machine::<16>(|machine, what| {
        let range = what.range.unwrap();
        machine.vttbr(what.vmid);
        machine.dsb(Barrier::Ishst);
        machine.tlbi(Tlbi::Ripas2e1is, 0b11 << 46 | range.start().0 >> 12);
        machine.dsb(Barrier::Ish);
        machine.tlbi(Tlbi::Vmalle1is, 0);
        machine.dsb(Barrier::Ish);
    });
    unmap_a_page::<16>(&faulty);
    caught(&faulty, Kind::FreedMemory);
}

#[test]
fn the_hypervisors_own_stage_is_not_the_guests() {
    let machine = machine::<12>(|machine, what| {
        let range = what.range.unwrap();
        machine.dsb(Barrier::Ishst);
        machine.tlbi(Tlbi::Vae2is, range.start().0);
        machine.dsb(Barrier::Ish);
    });
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn an_invalidation_that_does_nothing_leaves_the_page() {
    let machine = machine::<12>(|machine, _| machine.dsb(Barrier::Ish));
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::StaleTranslation);
}

#[test]
fn without_vmalle1is_combined_translations_stay() {
    let machine = machine::<12>(|machine, what| {
        with_instructions(machine, what, |i| Some(i).filter(|i| *i != Instruction::Vmalle1is));
    });
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn combined_translations_return_without_a_dsb_before_vmalle1is() {
    let machine = machine::<12>(|machine, what| {
        machine.vttbr(what.vmid);
        let by_address: Vec<_> = machine.sequence(what).collect();
        let barriers = |i: &&Instruction| !matches!(i, Instruction::DsbIsh);
        by_address.iter().filter(barriers).for_each(|&i| machine.execute(i));
        machine.dsb(Barrier::Ish);
    });
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn a_local_invalidation_leaves_the_other_cpu() {
    let machine = machine::<12>(|machine, what| {
        with_instructions(machine, what, |i| {
            Some(match i {
                Instruction::Ipas2e1is(x) => Instruction::Ipas2e1(x),
                Instruction::Ipas2le1is(x) => Instruction::Ipas2le1(x),
                Instruction::Vmalle1is => Instruction::Vmalle1,
                other => other,
            })
        });
    });
    unmap_a_page::<12>(&machine);
    let found = machine.finish();
    assert!(!found.is_empty() && found.iter().all(|violation| violation.cpu == Some(1)));
}

#[test]
fn without_dsb_ishst_before_it_a_walk_brings_the_page_back() {
    let faulty = Firmware {
        publish: |_| (),
        invalidate: |machine: &Machine<Arm>, what| {
            with_instructions(machine, what, |i| Some(i).filter(|i| *i != Instruction::DsbIshst));
        },
        ..slat_sim::firmware::ARM
    };
    let machine = arm_machine().firmware(faulty);
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn without_dsb_ish_after_it_the_page_is_still_there() {
    let machine = machine::<12>(|machine, what| {
        with_instructions(machine, what, |i| Some(i).filter(|i| *i != Instruction::DsbIsh));
    });
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn combined_translations_survive_without_the_last_dsb_ish() {
    let machine = machine::<12>(|machine, what| {
        machine.vttbr(what.vmid);
        let all: Vec<_> = machine.sequence(what).collect();
        let last = all.iter().rposition(|i| *i == Instruction::DsbIsh).unwrap();
        let others = all.iter().enumerate().filter(|(index, _)| *index != last);
        others.for_each(|(_, &instruction)| machine.execute(instruction));
    });
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn without_dsb_ishst_after_a_map_the_guest_faults_again() {
    let faulty = Firmware { publish: |_| (), ..slat_sim::firmware::ARM };
    for (firmware, kind) in [(faulty, Some(Kind::Livelock)), (slat_sim::firmware::ARM, None)] {
        // A speculative walk would have read the entry by now.
        let lazy = without(|lazy| lazy.speculation = false);
        let machine = arm_machine().firmware(firmware).lazy(lazy);
        let guest = Guest::arm(&machine);
        guest.map(FAR, RAM, 0x1000, K4);
        let _ = machine.cpu(0).read(FAR);
        guest.map(FAR + 0x1000, RAM + 0x1000, 0x1000, K4);
        machine.claim_progress(0, slat::Gpa(FAR + 0x1000), slat_sim::Access::Read);
        match kind {
            Some(kind) => caught(&machine, kind),
            None => clean(&machine),
        }
    }
}

#[test]
fn dsb_nsh_does_not_wait_for_other_cpus() {
    let machine = machine::<12>(|machine, what| {
        with_instructions(machine, what, |i| {
            Some(if i == Instruction::DsbIsh { Instruction::DsbNsh } else { i })
        });
    });
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn another_guests_vmid_leaves_the_page() {
    let machine = machine::<12>(|machine, what| {
        machine.vttbr(slat::Vmid(what.vmid.0 + 1));
        machine.sequence(what).for_each(|i| machine.execute(i));
    });
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn last_levels_alone_leave_links_to_an_unlinked_table() {
    let machine = machine::<12>(|machine, what| {
        with_instructions(machine, what, |i| {
            Some(match i {
                Instruction::Ipas2e1is(x) => Instruction::Ipas2le1is(x),
                // Of the whole guest, only what invalidations by address cover.
                Instruction::Vmalls12e1is => Instruction::Vmalle1is,
                other => other,
            })
        });
    });
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, K4);
    guest.read(1, BASE);
    // The table above stays linked, so that the invalidation is by address.
    guest.map(BASE + (2 << 20), RAM + (2 << 20), 0x1000, K4);
    guest.unmap(BASE, 2 << 20);
    assert_eq!(guest.tables.reclaim(), 1);
    caught(&machine, Kind::FreedTable);
}

fn engine_is_clean<const G: u32>(change: impl Fn(Arm) -> Arm) {
    let machine = Machine::new(change(Arm::new(G, BITS)), 2);
    unmap_a_page::<G>(&machine);
    clean(&machine);
    // Then a whole table, and a range that is too large for instructions by address.
    let machine = Machine::new(change(Arm::new(G, BITS)), 2);
    let guest = Guest::new(&machine, arm64::<G>());
    let table = slat::format::arm64::Arm64::<G>::size(1).bytes();
    let bytes = table.min(32 << 20);
    let page = PageSize::from_bytes(1 << G).unwrap();
    guest.map(FAR & !(table - 1), RAM + (2 << G), bytes, page);
    guest.read(0, FAR & !(table - 1));
    guest.unmap(FAR & !(table - 1), bytes);
    guest.fresh(FAR & !(table - 1), bytes);
    guest.tables.reclaim();
    clean(&machine);
}

#[test]
fn the_engines_sequences_leave_nothing_on_any_granule() {
    for ttl in [false, true] {
        for range_instructions in [false, true] {
            let change = |arm| Arm { ttl, range_instructions, ..arm };
            engine_is_clean::<12>(change);
            engine_is_clean::<14>(change);
            engine_is_clean::<16>(change);
        }
    }
}

/// Unmaps a range of pages above 2^48, with tables and memory above 2^48 as well.
fn unmap_beyond_48_bits(machine: &Machine<Arm>) {
    const TOP: u64 = 0xf_1234_5600_0000;
    let format = Arm64Lpa2K4 { hardware_dirty: true, ..Default::default() };
    let guest = Guest::with_bits(machine, format, 52);
    let memory = (1 << 50) - 0x8000;
    machine.give(slat::Hpa(memory), 0x10000);
    guest.map(TOP, memory, 0x10000, K4);
    (0..2).for_each(|cpu| guest.write(cpu, TOP + 0x9000));
    guest.unmap(TOP, 0xc000);
    guest.fresh(TOP, 0x10000);
}

fn lpa2_machine() -> Machine<Arm> {
    let arch = Arm { range_instructions: true, ..Arm::new(12, 52).with_lpa2() };
    Machine::new(arch, 2).frames_from(0b11 << 50)
}

#[test]
fn with_lpa2_a_range_in_units_of_the_granule_leaves_the_pages() {
    let machine = lpa2_machine().firmware(invalidating(|machine: &Machine<Arm>, what| {
        machine.vttbr(what.vmid);
        // As if DS were 0, with addresses of the same width.
        let start = what.range.unwrap().start().0;
        machine.dsb(Barrier::Ishst);
        machine.tlbi(Tlbi::Ripas2e1is, 0b01 << 46 | 31 << 39 | start >> 12 & ((1 << 37) - 1));
        machine.dsb(Barrier::Ish);
        machine.tlbi(Tlbi::Vmalle1is, 0);
        machine.dsb(Barrier::Ish);
    }));
    unmap_beyond_48_bits(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn with_lpa2_the_engines_ranges_leave_nothing() {
    let machine = lpa2_machine();
    unmap_beyond_48_bits(&machine);
    clean(&machine);
    let what = Invalidation { range: Some(range(1 << 50, 0x10000)), ..WHOLE };
    let sequencer = Sequencer {
        range_instructions: true,
        lpa2: true,
        address_bits: 52,
        ..Sequencer::new(Granule::K4)
    };
    let by_range = |i: &Instruction| matches!(i, Instruction::Ripas2le1is(_));
    assert!(sequencer.sequence(&what).any(|i| by_range(&i)), "it went by a range");
    assert!(machine.sequence(&what).eq(sequencer.sequence(&what)));
}

const WHOLE: Invalidation = Invalidation { vmid: VMID, range: None, leaf: None, tables: false };

/// CPUs on which stores are late, and a platform that repeats its last TLBI or does not.
fn late(repeats_tlbi: bool) -> Machine<Arm> {
    Machine::new(Arm { late_stores: true, repeats_tlbi, ..Arm::new(12, BITS) }, 2)
}

/// Both CPUs write a page, which is then write-protected.
fn protect_a_page(machine: &Machine<Arm>) {
    let guest = Guest::new(machine, arm64::<12>());
    guest.map(FAR, RAM, 0x3000, PageSize::SIZE_4K);
    (0..2).for_each(|cpu| guest.write(cpu, FAR + 0x1000));
    guest.write_protect(FAR, 0x3000);
}

#[test]
fn late_stores_reach_a_page_if_one_invalidation_is_all() {
    let machine = late(false);
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
    let machine = late(false);
    protect_a_page(&machine);
    caught(&machine, Kind::RevokedRight);
}

#[test]
fn late_stores_have_landed_after_a_repeated_invalidation() {
    for scenario in [unmap_a_page::<12>, protect_a_page] {
        let machine = late(true);
        scenario(&machine);
        clean(&machine);
    }
}

/// The sequence with `ipas2le1is` has one invalidation that completes stores, and needs another.
#[test]
fn the_invalidation_of_stage_2_alone_completes_no_late_store() {
    let twice = |machine: &Machine<Arm>, what: &Invalidation| {
        let first = |i: &Instruction| !matches!(i, Instruction::Vmalle1is);
        machine.vttbr(what.vmid);
        machine.sequence(what).filter(first).for_each(|i| machine.execute(i));
        machine.sequence(what).for_each(|i| machine.execute(i));
    };
    let machine = late(false).firmware(invalidating(twice));
    unmap_a_page::<12>(&machine);
    caught(&machine, Kind::FreedMemory);
}
