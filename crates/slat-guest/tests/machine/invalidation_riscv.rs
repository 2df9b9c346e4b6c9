//! Fences on RISC-V, each left out or with a bug that some hypervisor had.
//!
//! There are two scenarios. Both harts use a page, which is then unmapped, and its memory is taken
//! back. Or a hart faults, and the fault is handled.

use crate::cases::{Case, Hart};
use crate::common::*;
use slat::format::riscv::{Mode, RiscV as GStage};
use slat::{Access, Gpa, Invalidation, Vmid};
use slat_sim::{Firmware, Kind, Machine, RiscV, firmware};

/// Far from address 0, so that a wrong operand is the address of another page.
const FAR: u64 = 0x12_3400_0000;

fn unmap_a_page(machine: &Machine<RiscV>) {
    let guest = Hart::guest(machine);
    guest.map(FAR, RAM, 0x2000, K4);
    (0..2).for_each(|hart| guest.write(hart, FAR));
    guest.unmap(FAR, 0x1000);
    guest.fresh(FAR, 0x1000);
}

fn machine(invalidate: fn(&Machine<RiscV>, &Invalidation)) -> Machine<RiscV> {
    Hart::machine(2).firmware(invalidating(invalidate))
}

/// Does what the correct platform does by address, with operands that `wrong` changes.
fn with_operands(
    machine: &Machine<RiscV>,
    what: &Invalidation,
    wrong: impl Fn(u64, Vmid) -> (u64, Vmid),
) {
    machine.fence();
    // For the whole guest, the range that these tests map.
    let range = what.range.unwrap_or(range(BASE, 2 << 20));
    for hart in 0..2 {
        for gpa in (range.start().0..range.end().0).step_by(0x1000) {
            let (rs1, rs2) = wrong(gpa, what.vmid);
            machine.hfence_gvma(hart, Some(rs1), Some(rs2));
        }
    }
}

#[test]
fn an_address_that_is_not_shifted_leaves_the_page() {
    let machine = machine(|machine, what| with_operands(machine, what, |gpa, of| (gpa, of)));
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn a_page_number_leaves_the_page() {
    let machine = machine(|machine, what| with_operands(machine, what, |gpa, of| (gpa >> 12, of)));
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn another_guests_vmid_leaves_the_page() {
    let machine = machine(|machine, what| {
        with_operands(machine, what, |gpa, of| (gpa >> 2, Vmid(of.0 + 1)));
    });
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn the_right_operands_leave_nothing() {
    let machine = machine(|machine, what| with_operands(machine, what, |gpa, of| (gpa >> 2, of)));
    unmap_a_page(&machine);
    clean(&machine);
}

#[test]
fn an_invalidation_that_does_nothing_leaves_the_page() {
    let machine = machine(|machine, _| machine.fence());
    unmap_a_page(&machine);
    caught(&machine, Kind::StaleTranslation);
}

#[test]
fn hfence_vvma_leaves_the_second_stage() {
    let machine = machine(|machine, what| {
        machine.fence();
        (0..2).for_each(|hart| machine.hfence_vvma(hart, what.vmid));
    });
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn a_fence_on_this_hart_leaves_the_others() {
    let machine = machine(|machine, what| {
        machine.fence();
        machine.hfence_gvma(0, None, Some(what.vmid));
    });
    unmap_a_page(&machine);
    let found = machine.finish();
    assert!(!found.is_empty() && found.iter().all(|violation| violation.cpu == Some(1)));
}

#[test]
fn a_walk_brings_the_page_back_without_a_fence_of_stores() {
    let faulty = Firmware {
        publish: |_| (),
        invalidate: |machine, what| {
            (0..2).for_each(|hart| machine.hfence_gvma(hart, None, Some(what.vmid)));
        },
        ..firmware::RISCV
    };
    let machine = Hart::machine(2).firmware(faulty);
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn one_address_of_several_leaves_the_others() {
    let machine = machine(|machine, what| {
        machine.fence();
        let first = what.range.unwrap().start().0;
        (0..2).for_each(|hart| machine.hfence_gvma(hart, Some(first >> 2), Some(what.vmid)));
    });
    let guest = Hart::guest(&machine);
    guest.map(FAR, RAM, 0x4000, K4);
    guest.write(1, FAR + 0x1000);
    guest.unmap(FAR, 0x2000);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn addresses_leave_links_to_an_unlinked_table() {
    for (faulty, kind) in [(true, Some(Kind::FreedTable)), (false, None)] {
        let by_address = |machine: &Machine<RiscV>, what: &Invalidation| {
            with_operands(machine, what, |gpa, of| (gpa >> 2, of));
        };
        let machine = if faulty { machine(by_address) } else { Hart::machine(2) };
        let guest = Hart::guest(&machine);
        guest.map(BASE, RAM, 2 << 20, K4);
        guest.read(1, BASE);
        guest.unmap(BASE, 2 << 20);
        // The table of pages, and the one above it, which is empty now.
        assert_eq!(guest.tables.reclaim(), 2);
        match kind {
            Some(kind) => caught(&machine, kind),
            None => clean(&machine),
        }
    }
}

#[test]
fn without_a_fence_after_a_map_the_guest_faults_again() {
    let faulty = Firmware { publish: |_| (), ..firmware::RISCV };
    for (firmware, kind) in [(faulty, Some(Kind::Livelock)), (firmware::RISCV, None)] {
        // A speculative walk would have read the entry by now.
        let lazy = without(|lazy| lazy.speculation = false);
        let machine = Hart::machine(2).firmware(firmware).lazy(lazy);
        let guest = Hart::guest(&machine);
        guest.map(FAR, RAM, 0x1000, K4);
        let _ = machine.cpu(0).read(FAR);
        guest.map(FAR + 0x1000, RAM + 0x1000, 0x1000, K4);
        machine.claim_progress(0, Gpa(FAR + 0x1000), slat_sim::Access::Read);
        match kind {
            Some(kind) => caught(&machine, kind),
            None => clean(&machine),
        }
    }
}

/// Handles a fault by `answer`, and resumes the hart by `resume`.
fn fault(
    arch: RiscV,
    resume: fn(&Machine<RiscV>, usize, Gpa),
    prepare: impl FnOnce(&Guest<'_, GStage, RiscV>),
    answer: impl FnOnce(&Guest<'_, GStage, RiscV>),
) -> Machine<RiscV> {
    let firmware = Firmware { resume, ..firmware::RISCV };
    let machine = Machine::new(arch, 2).firmware(firmware);
    {
        let guest = Guest::new(&machine, GStage::default());
        prepare(&guest);
        assert!(machine.cpu(0).write(BASE).is_err());
        answer(&guest);
        machine.claim_progress(0, Gpa(BASE), slat_sim::Access::Write);
    }
    machine
}

const NOTHING: fn(&Machine<RiscV>, usize, Gpa) = |_, _, _| ();
const BY_ADDRESS: fn(&Machine<RiscV>, usize, Gpa) =
    |machine, hart, gpa| machine.hfence_gvma(hart, Some(gpa.0 >> 2), Some(VMID));
const ALL: fn(&Machine<RiscV>, usize, Gpa) =
    |machine, hart, _| machine.hfence_gvma(hart, None, Some(VMID));
const ELSEWHERE: fn(&Machine<RiscV>, usize, Gpa) =
    |machine, hart, _| machine.hfence_gvma(1 - hart, None, Some(VMID));

fn map(guest: &Guest<'_, GStage, RiscV>) {
    guest.map(BASE, RAM, 0x1000, K4);
}

#[test]
fn a_hart_that_faulted_needs_its_own_fence_after_a_map() {
    let neighbour = |guest: &Guest<'_, GStage, RiscV>| {
        guest.map(BASE + 0x1000, RAM + 0x1000, 0x1000, K4);
    };
    let hart = RiscV::default();
    caught(&fault(hart, NOTHING, neighbour, map), Kind::Livelock);
    caught(&fault(hart, ELSEWHERE, neighbour, map), Kind::Livelock);
    clean(&fault(hart, BY_ADDRESS, neighbour, map));
    clean(&fault(hart, ALL, neighbour, map));
    let svvptc = RiscV { svvptc: true, ..hart };
    clean(&fault(svvptc, NOTHING, neighbour, map));
}

#[test]
fn a_fence_by_address_leaves_an_invalid_entry_of_a_new_table() {
    let nothing = |_: &Guest<'_, GStage, RiscV>| ();
    let hart = RiscV::default();
    caught(&fault(hart, BY_ADDRESS, nothing, map), Kind::Livelock);
    clean(&fault(hart, ALL, nothing, map));
    let block = |guest: &Guest<'_, GStage, RiscV>| guest.map(BASE, RAM, 2 << 20, M2);
    let beside = |guest: &Guest<'_, GStage, RiscV>| {
        guest.map(BASE + (2 << 20), RAM + (2 << 20), 2 << 20, M2);
    };
    clean(&fault(hart, BY_ADDRESS, beside, block));
}

#[test]
fn a_right_given_back_needs_it_with_svvptc_too() {
    let protected = |guest: &Guest<'_, GStage, RiscV>| {
        map(guest);
        guest.write_protect(BASE, 0x1000);
        guest.read(0, BASE);
    };
    let give = |guest: &Guest<'_, GStage, RiscV>| {
        guest.machine.unprotect(VMID, range(BASE, 0x1000));
        guest.with(|guard, _| {
            guard
                .relax(range(BASE, 0x1000), Access::Write)
                .map(slat::LocalFlush::not_needed_here)
                .unwrap()
        });
    };
    for svvptc in [false, true] {
        let hart = RiscV { svvptc, ..RiscV::default() };
        caught(&fault(hart, NOTHING, protected, give), Kind::Livelock);
        clean(&fault(hart, BY_ADDRESS, protected, give));
    }
}

#[test]
fn a_leaf_that_software_marked_needs_it_too() {
    let clean_page = |guest: &Guest<'_, GStage, RiscV>| {
        guest.map_clean(BASE, RAM, 0x1000, K4);
        guest.read(0, BASE);
    };
    let mark = |guest: &Guest<'_, GStage, RiscV>| {
        guest.with(|guard, _| {
            guard
                .relax(range(BASE, 0x1000), Access::Write)
                .map(slat::LocalFlush::not_needed_here)
                .unwrap()
        });
    };
    let hart = RiscV { hardware_marks: false, svvptc: true, ..RiscV::default() };
    caught(&fault(hart, NOTHING, clean_page, mark), Kind::Livelock);
    clean(&fault(hart, BY_ADDRESS, clean_page, mark));
}

#[test]
fn a_hart_whose_fault_another_answered_needs_a_fence_too() {
    // Nothing is left to change: only the hart's own entry makes it fault.
    let nothing = |_: &Guest<'_, GStage, RiscV>| ();
    let other = |guest: &Guest<'_, GStage, RiscV>| {
        guest.machine.here(1);
        map(guest);
        guest.write(1, BASE);
        guest.machine.here(0);
    };
    caught(&fault(RiscV::default(), NOTHING, nothing, other), Kind::Livelock);
    clean(&fault(RiscV::default(), ALL, nothing, other));
}

#[test]
fn the_engines_invalidations_leave_nothing_in_any_mode() {
    for (widest, levels) in [(Mode::Sv39x4, 3), (Mode::Sv48x4, 4), (Mode::Sv57x4, 5)] {
        let machine = Machine::new(RiscV { levels, ..RiscV::default() }, 2).frames_from(1 << 54);
        let format = GStage { widest, ..GStage::default() };
        let guest = Guest::with_bits(&machine, format, widest.address_bits());
        // The upper half: addresses are not sign-extended.
        let top = (1 << widest.address_bits()) - (4 << 20);
        guest.map(top, RAM, 0x3000, K4);
        guest.map(top + (2 << 20), RAM + (2 << 20), 2 << 20, M2);
        (0..2).for_each(|hart| guest.write(hart, top + 0x1000));
        guest.unmap(top + 0x1000, 0x1000);
        guest.fresh(top, 4 << 20);
        guest.split(top + (2 << 20), 2 << 20, K4);
        guest.unmap(top + (2 << 20), 2 << 20);
        assert_eq!(guest.tables.reclaim(), 1);
        guest.fresh(top, 4 << 20);
        clean(&machine);
    }
}
