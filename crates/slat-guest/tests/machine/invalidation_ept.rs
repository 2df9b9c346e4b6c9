//! Invalidations on Intel, with bugs that some hypervisor had.

use crate::common::*;
use slat::Invalidation;
use slat_sim::{Ept, Kind, Machine};

fn unmap_a_page(machine: &Machine<Ept>) {
    let guest = Guest::ept(machine);
    guest.map(BASE, RAM, 0x2000, K4);
    (0..2).for_each(|cpu| guest.write(cpu, BASE));
    guest.unmap(BASE, 0x1000);
    guest.fresh(BASE, 0x1000);
}

fn machine(invalidate: fn(&Machine<Ept>, &Invalidation)) -> Machine<Ept> {
    ept_machine().firmware(invalidating(invalidate))
}

#[test]
fn invlpg_leaves_the_guests_translations() {
    let machine = machine(|machine, what| {
        (0..2).for_each(|cpu| machine.invlpg(cpu, what.range.unwrap().start().0));
    });
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn invept_on_this_cpu_leaves_the_others() {
    let machine = machine(|machine, what| machine.invept(0, Some(what.vmid)));
    unmap_a_page(&machine);
    let found = machine.finish();
    assert!(!found.is_empty() && found.iter().all(|violation| violation.cpu == Some(1)));
}

#[test]
fn invept_of_another_guest_leaves_the_page() {
    let machine = machine(|machine, what| {
        let other = slat::Vmid(what.vmid.0 + 1);
        (0..2).for_each(|cpu| machine.invept(cpu, Some(other)));
    });
    unmap_a_page(&machine);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn the_engines_invalidations_leave_nothing() {
    let machine = ept_machine();
    unmap_a_page(&machine);
    let guest = Guest::ept(&machine);
    guest.map(BASE, RAM + (2 << 20), 2 << 20, K4);
    guest.read(1, BASE);
    guest.unmap(BASE, 2 << 20);
    // The table of pages, and the two above it, which are empty now.
    assert_eq!(guest.tables.reclaim(), 3);
    clean(&machine);
}
