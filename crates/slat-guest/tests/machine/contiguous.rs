//! Groups of leaves that a TLB holds as one (Arm's Contiguous bit), changed in part: by the engine,
//! and by stores that omit a step.

use crate::common::*;
use slat::{Access, Attributes, Hpa, Platform};
use slat_sim::{Arm, Kind, Machine};

const PAGE: u64 = 0x1000;
const GROUP: u64 = 0x1_0000;
const CONTIGUOUS: u64 = 1 << 52;

fn folded<'p>(machine: &'p Machine<Arm>, attributes: Attributes) -> ArmGuest<'p> {
    let guest = Guest::arm(machine);
    guest.with(|guard, cache| {
        guard.map_contiguous(range(BASE, 2 * GROUP), Hpa(RAM), attributes, K4, cache).unwrap();
    });
    guest
}

/// Makes both CPUs cache the group, and access it at each of the engine's calls.
fn used(guest: &ArmGuest<'_>) {
    (0..2).for_each(|cpu| guest.write(cpu, BASE + 7 * PAGE));
    guest.machine.meanwhile(|machine, _| {
        _ = machine.cpu(0).write(BASE + 3 * PAGE);
        _ = machine.cpu(1).read(BASE + 9 * PAGE);
    });
}

fn on_every_level(body: impl Fn(&ArmGuest<'_>)) {
    let clean_ram = Attributes { dirty: false, ..Attributes::RAM };
    for bbm in [0, 2, 3] {
        let machine = Machine::new(Arm { bbm, ..arm() }, 2);
        let guest = folded(&machine, clean_ram);
        used(&guest);
        body(&guest);
        machine.undisturbed();
        guest.fresh(BASE, 2 * GROUP);
        clean(&machine);
    }
}

#[test]
fn a_page_of_a_group_loses_its_right_and_no_cpu_writes_to_it() {
    on_every_level(|guest| {
        let page = range(BASE + 3 * PAGE, PAGE);
        guest.with(|guard, _| guard.write_protect(page).unwrap());
        guest.machine.protect(VMID, page);
        assert!(guest.machine.cpu(1).write(BASE + 3 * PAGE).is_err());
        assert!(guest.machine.cpu(1).write(BASE + 4 * PAGE).is_ok());
    });
}

#[test]
fn a_page_of_a_group_is_unmapped_and_no_cpu_reaches_its_memory() {
    on_every_level(|guest| {
        guest.unmap(BASE + 3 * PAGE, PAGE);
        assert!(guest.machine.cpu(0).read(BASE + 3 * PAGE).is_err());
        // The whole other group, without unfolding it.
        guest.unmap(BASE + GROUP, GROUP);
    });
}

#[test]
fn a_group_in_tlbs_is_harvested_split_and_aged_correctly() {
    on_every_level(|guest| {
        let all = range(BASE, 2 * GROUP);
        let mut young = [0];
        guest.with(|guard, _| {
            let mut ages = slat::AgeBitmaps { young: &mut young, unanswered: &mut [0] };
            guard
                .age(
                    all,
                    &mut ages,
                    slat::AgeOptions { flush_tlb: true, ..slat::AgeOptions::LEAVES },
                )
                .unwrap()
        });
        assert_eq!(young[0], 0xffff_ffff, "mapped as used");
        let mut dirty = [0];
        guest.with(|guard, _| guard.harvest(all, &mut dirty).unwrap());
        assert_eq!(dirty[0], 0xffff, "all of the group that was written");
        let page = range(BASE + 5 * PAGE, PAGE);
        guest.with(|guard, _| guard.execute_protect(page).unwrap());
        guest.with(|guard, _| {
            guard.relax(page, Access::Write).map(slat::LocalFlush::not_needed_here).unwrap()
        });
    });
}

#[test]
fn a_member_of_a_group_that_alone_loses_its_right_is_noticed() {
    let machine = arm_machine();
    let guest = folded(&machine, Attributes::RAM);
    guest.read(0, BASE + 7 * PAGE);
    // The group is neither unfolded nor broken; the invalidation is correct.
    let page = range(BASE + 3 * PAGE, PAGE);
    guest.poke(BASE + 3 * PAGE, |raw| raw & !(1 << 7 | 1 << 51));
    machine.publish();
    guest.flush();
    guest.read(0, BASE + 7 * PAGE);
    machine.protect(VMID, page);
    caught(&machine, Kind::RevokedRight);
}

#[test]
fn an_emptied_member_of_a_remaining_group_is_noticed() {
    let machine = arm_machine();
    let guest = folded(&machine, Attributes::RAM);
    guest.read(0, BASE + 7 * PAGE);
    guest.poke(BASE + 3 * PAGE, |_| 0);
    machine.publish();
    guest.flush();
    guest.read(0, BASE + 7 * PAGE);
    guest.fresh(BASE, GROUP);
    caught(&machine, Kind::StaleTranslation);
}

#[test]
fn an_unfold_without_a_break_gives_a_page_two_sizes() {
    let machine = arm_machine();
    let guest = folded(&machine, Attributes::RAM);
    guest.read(0, BASE + 7 * PAGE);
    for page in 0..16 {
        guest.poke(BASE + page * PAGE, |raw| raw & !CONTIGUOUS);
    }
    machine.publish();
    guest.read(0, BASE + 3 * PAGE);
    caught(&machine, Kind::SizeConflict);
}

#[test]
fn a_group_that_points_where_none_can_is_noticed() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM + PAGE, GROUP, K4);
    guest.unmap(BASE, GROUP);
    guest.map(BASE + GROUP, RAM + PAGE, GROUP, K4);
    guest.poke(BASE + GROUP, |raw| raw | CONTIGUOUS);
    machine.publish();
    guest.read(0, BASE + GROUP);
    caught(&machine, Kind::Reserved);
}
