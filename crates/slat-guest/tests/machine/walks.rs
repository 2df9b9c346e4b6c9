//! The guest's own page tables, which its MMU walks through the second stage.

use crate::cases::Case;
use crate::common::*;
use slat::{Access, Gpa};
use slat_sim::{Fault, Kind};

fn a_guests_walk_of_its_own_tables_needs_the_right_to_write<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x2000, K4);
    guest.write_protect(BASE, 0x1000);
    assert!(machine.cpu(0).read(BASE).is_ok());
    assert_eq!(machine.cpu(0).walk(BASE), Err(Fault::Permission));
    guest.relax(BASE, 0x1000, Access::Write);
    assert!(machine.cpu(0).walk(BASE).is_ok());
    clean(&machine);
}

fn a_guests_walk_of_its_own_tables_is_in_the_log<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map_clean(BASE, RAM, 0x2000, K4);
    guest.read(0, BASE + 0x1000);
    machine.cpu(0).walk(BASE).unwrap();
    assert!(guest.is_dirty(Gpa(BASE)) && !guest.is_dirty(Gpa(BASE + 0x1000)));
    let mut bitmap = [0];
    guest.with(|guard, _| guard.harvest(range(BASE, 0x2000), &mut bitmap).unwrap());
    assert_eq!(bitmap[0], 1);
    // The host copies; the guest's next walk is marked again.
    machine.copy(VMID, range(BASE, 0x2000));
    machine.cpu(0).walk(BASE).unwrap();
    guest.check_dirty(BASE, 0x2000);
    clean(&machine);
}

fn a_walk_that_was_taken_for_a_read_is_lost<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map_clean(BASE, RAM, 0x1000, K4);
    machine.cpu(0).walk(BASE).unwrap();
    // As if the guest had only read: the page is marked clean again.
    guest.poke(BASE, |raw| raw & !<C::F as slat::Format>::DIRTY);
    guest.flush();
    guest.check_dirty(BASE, 0x1000);
    caught(&machine, Kind::LostDirty);
}

on_x86! {
    a_guests_walk_of_its_own_tables_needs_the_right_to_write,
    a_guests_walk_of_its_own_tables_is_in_the_log,
    a_walk_that_was_taken_for_a_read_is_lost,
}
