//! Data and instruction caches between the host and the guest.

use crate::common::*;
use slat::{Attributes, Hpa, Memory};
use slat_sim::{Access, Arm, Firmware, Kind, Machine, firmware};

/// A platform that maintains no cache.
const CARELESS: Firmware<Arm> = Firmware { maintain: |_, _, _, _| (), ..firmware::ARM };

fn boot(machine: &Machine<Arm>, access: Access) {
    let guest = Guest::arm(machine);
    machine.host_write(Hpa(RAM));
    guest.map(BASE, RAM, 0x1000, K4);
    // The guest's caches are off.
    machine.cpu(0).access_uncached(BASE, access).unwrap();
}

#[test]
fn memory_never_cleaned_is_stale_to_a_guest_without_caches() {
    let machine = arm_machine().firmware(CARELESS);
    boot(&machine, Access::Read);
    caught(&machine, Kind::MissingMaintenance);
}

#[test]
fn instructions_that_the_host_wrote_are_old_to_the_guest() {
    let machine = arm_machine().firmware(CARELESS);
    boot(&machine, Access::Execute);
    caught(&machine, Kind::MissingMaintenance);
}

#[test]
fn data_alone_is_not_enough_for_instructions() {
    let data = Firmware {
        maintain: |machine: &Machine<Arm>, memory, bytes, _| machine.clean(memory, bytes),
        ..firmware::ARM
    };
    let machine = arm_machine().firmware(data);
    boot(&machine, Access::Execute);
    caught(&machine, Kind::MissingMaintenance);
}

#[test]
fn the_engine_maintains_memory_before_it_maps_it() {
    for access in [Access::Read, Access::Execute] {
        let machine = arm_machine();
        boot(&machine, access);
        clean(&machine);
    }
}

#[test]
fn a_host_that_reads_uncached_guest_writes_finds_stale_lines() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    machine.host_read(Hpa(RAM));
    machine.cpu(0).access_uncached(BASE, Access::Write).unwrap();
    machine.host_read(Hpa(RAM));
    caught(&machine, Kind::MissingMaintenance);
}

#[test]
fn the_engines_flush_makes_the_host_see_it() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    machine.host_read(Hpa(RAM));
    machine.cpu(0).access_uncached(BASE, Access::Write).unwrap();
    guest.with(|guard, _| guard.clean_caches(range(BASE, 0x1000)).unwrap());
    machine.host_read(Hpa(RAM));
    machine.cpu(0).access(BASE, Access::Read).unwrap();
    clean(&machine);
}

#[test]
fn code_the_host_writes_after_the_map_is_stale_until_a_flush() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    machine.host_write(Hpa(RAM));
    machine.cpu(0).execute(BASE).unwrap();
    caught(&machine, Kind::MissingMaintenance);
}

#[test]
fn forced_write_back_needs_no_data_maintenance() {
    let machine = Machine::new(Arm { forced_write_back: true, ..arm() }, 2).firmware(CARELESS);
    let format = slat::format::arm64::Arm64::<12> { forced_write_back: true, ..arm64() };
    let guest = Guest::new(&machine, format);
    guest.map(BASE, RAM, 0x1000, K4);
    machine.cpu(0).access_uncached(BASE, Access::Write).unwrap();
    machine.host_read(Hpa(RAM));
    clean(&machine);
}

#[test]
fn a_mapping_that_is_not_cacheable_bypasses_the_caches_too() {
    let machine = arm_machine().firmware(CARELESS);
    let guest = Guest::arm(&machine);
    let frame_buffer = Attributes { memory: Memory::NonCacheable, ..Attributes::RAM };
    guest.map_as(BASE, RAM, 0x1000, K4, frame_buffer);
    guest.read(0, BASE);
    caught(&machine, Kind::MissingMaintenance);
}

#[test]
fn the_engine_maintains_caches_regardless_of_how_it_maps() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    let use_it = |gpa: u64| {
        machine.cpu(0).access_uncached(gpa, Access::Read).unwrap();
        machine.cpu(0).execute(gpa).unwrap();
    };
    // A table of pages; a page after them, and more pages; a block; a reservation.
    guest.map(BASE, RAM, 0x2000, K4);
    guest.map(BASE + 0x2000, RAM + 0x2000, 0x1000, K4);
    guest.map(BASE + 0x3000, RAM + 0x3000, 0x2000, K4);
    guest.map(BASE + (2 << 20), RAM + (2 << 20), 2 << 20, M2);
    guest.with(|guard, cache| {
        let reservation = guard.reserve(slat::Gpa(BASE + 0x5000), K4, cache).unwrap();
        reservation.commit(Hpa(RAM + 0x5000), Attributes::RAM).unwrap();
    });
    (0..6).for_each(|page| use_it(BASE + (page << 12)));
    (0..4).for_each(|part| use_it(BASE + (2 << 20) + (part << 19)));
    clean(&machine);
}
