//! Writes that go unreported, and writes by rights that were taken away.

use crate::cases::Case;
use crate::common::*;
use slat::format::arm64::Arm64;
use slat::{Access, Format, Gpa, Hpa, Platform, UnmapBatch};
use slat_sim::{Arm, Kind, Machine, Moment};

/// Maps a page, writable and clean, and caches it.
fn clean_page(guest: &ArmGuest<'_>) {
    guest.map_clean(BASE, RAM, 0x1000, K4);
    guest.read(0, BASE);
}

#[test]
fn a_split_by_load_and_store_loses_a_write_in_between() {
    let machine = Machine::new(Arm { bbm: 3, ..arm() }, 2);
    let guest = Guest::arm(&machine);
    guest.map_clean(BASE, RAM, 2 << 20, M2);
    let block = guest.place(BASE);
    let table = machine.allocate(4096).unwrap().hpa();
    let bits = Arm64::<12>::attribute_bits(block.raw, 1);
    for index in 0..512 {
        let leaf = Arm64::<12>::leaf(bits, 0, Hpa(RAM + ((index as u64) << 12)));
        machine.poke(table, index, leaf);
    }
    guest.write(1, BASE);
    machine.poke(block.table, block.index, Arm64::<12>::table(table, 1));
    guest.flush();
    guest.check_dirty(BASE, 2 << 20);
    caught(&machine, Kind::LostDirty);
}

#[test]
fn the_engines_split_keeps_a_write_in_between() {
    for bbm in [0, 2, 3] {
        let machine = Machine::new(Arm { bbm, ..arm() }, 2);
        let guest = Guest::arm(&machine);
        guest.map_clean(BASE, RAM, 2 << 20, M2);
        machine.meanwhile(|machine, moment| {
            if moment == Moment::Fill {
                let _ = machine.cpu(1).write(BASE);
            }
        });
        guest.split(BASE, 2 << 20, K4);
        guest.check_dirty(BASE, 2 << 20);
        clean(&machine);
    }
}

#[test]
fn write_protection_by_a_plain_store_loses_a_write_in_between() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    clean_page(&guest);
    let place = guest.place(BASE);
    guest.write(1, BASE);
    machine.poke(place.table, place.index, Arm64::<12>::write_protected(place.raw));
    guest.flush();
    guest.check_dirty(BASE, 0x1000);
    caught(&machine, Kind::LostDirty);
}

#[test]
fn write_protection_that_keeps_dbm_protects_nothing() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    // Clears S2AP[1] alone.
    guest.poke(BASE, |raw| raw & !(1 << 7));
    guest.flush();
    machine.protect(VMID, range(BASE, 0x1000));
    caught(&machine, Kind::RevokedRight);
}

#[test]
fn write_protection_without_an_invalidation_protects_nothing() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.write(1, BASE);
    guest.poke(BASE, Arm64::<12>::write_protected);
    machine.publish();
    machine.protect(VMID, range(BASE, 0x1000));
    guest.write(1, BASE);
    caught(&machine, Kind::RevokedRight);
}

#[test]
fn a_split_that_forgets_write_protection_lets_writes_through() {
    let machine = Machine::new(Arm { bbm: 3, ..arm() }, 2);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    guest.write_protect(BASE, 2 << 20);
    let block = guest.place(BASE);
    let table = machine.allocate(4096).unwrap().hpa();
    let bits = Arm64::<12>::attribute_bits(block.raw, 1) | 1 << 7;
    for index in 0..512 {
        let leaf = Arm64::<12>::leaf(bits, 0, Hpa(RAM + ((index as u64) << 12)));
        machine.poke(table, index, leaf);
    }
    machine.poke(block.table, block.index, Arm64::<12>::table(table, 1));
    guest.flush();
    guest.write(0, BASE + 0x1000);
    caught(&machine, Kind::RevokedRight);
}

#[test]
fn the_engines_protection_holds_and_forgets_no_write() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map_clean(BASE, RAM, 2 << 20, M2);
    machine.meanwhile(|machine, _| _ = machine.cpu(1).write(BASE + 0x2000));
    guest.write_protect(BASE, 2 << 20);
    guest.split(BASE, 2 << 20, K4);
    machine.undisturbed();
    assert!(machine.cpu(1).write(BASE + 0x2000).is_err());
    guest.fresh(BASE, 2 << 20);
    guest.check_dirty(BASE, 2 << 20);
    guest.relax(BASE + 0x2000, 0x1000, Access::Write);
    machine.claim_progress(1, Gpa(BASE + 0x2000), slat_sim::Access::Write);
    clean(&machine);
}

#[test]
fn a_right_given_back_without_an_invalidation_faults_for_ever() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.write_protect(BASE, 0x1000);
    guest.read(0, BASE);
    assert!(machine.cpu(0).write(BASE).is_err());
    machine.unprotect(VMID, range(BASE, 0x1000));
    guest.poke(BASE, |raw| raw | 1 << 7);
    machine.publish();
    machine.claim_progress(0, Gpa(BASE), slat_sim::Access::Write);
    caught(&machine, Kind::Livelock);
}

fn on_x86_the_fault_itself_forgets_the_old_right<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.write_protect(BASE, 0x1000);
    guest.read(0, BASE);
    assert!(machine.cpu(0).write(BASE).is_err());
    machine.unprotect(VMID, range(BASE, 0x1000));
    guest.poke(BASE, |raw| raw | C::F::WRITE);
    machine.claim_progress(0, Gpa(BASE), slat_sim::Access::Write);
    clean(&machine);
}

#[test]
fn an_unmap_by_load_and_store_loses_a_write_in_between() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    clean_page(&guest);
    let place = guest.place(BASE);
    guest.write(1, BASE);
    machine.poke(place.table, place.index, 0);
    guest.flush();
    let dirty = arm64::<12>().decode(place.raw, 0).dirty;
    machine.claim_clean(VMID, range(BASE, 0x1000), |_| dirty);
    caught(&machine, Kind::LostDirty);
}

#[test]
fn the_engines_unmap_hands_out_a_write_in_between() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    clean_page(&guest);
    machine.meanwhile(|machine, _| _ = machine.cpu(1).write(BASE));
    let mut storage = [slat::UnmapEntry::EMPTY; 4];
    let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
    guest.with(|guard, _| guard.unmap(range(BASE, 0x1000), &mut batch).unwrap());
    let removed: Vec<_> = batch.complete().collect();
    let dirty = removed[0].attributes.dirty;
    machine.claim_clean(VMID, range(BASE, 0x1000), |_| dirty);
    clean(&machine);
}

/// Cleans a page in the tables. Then the host copies it before the invalidation, or after it.
fn clean_and_copy(guest: &ArmGuest<'_>, invalidate_first: bool) {
    guest.map(BASE, RAM, 0x1000, K4);
    guest.write(1, BASE);
    guest.poke(BASE, |raw| raw & !(1 << 7));
    guest.machine.publish();
    if invalidate_first {
        guest.flush();
    }
    guest.machine.copy(VMID, range(BASE, 0x1000));
    guest.write(1, BASE);
    if !invalidate_first {
        guest.flush();
    }
    guest.check_dirty(BASE, 0x1000);
}

#[test]
fn a_copy_made_before_the_invalidation_misses_a_write() {
    let machine = arm_machine();
    clean_and_copy(&Guest::arm(&machine), false);
    caught(&machine, Kind::LostDirty);
}

#[test]
fn a_copy_made_after_the_invalidation_misses_none() {
    let machine = arm_machine();
    clean_and_copy(&Guest::arm(&machine), true);
    clean(&machine);
}

#[test]
fn clean_without_an_invalidation_is_claimed_in_vain() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.write(1, BASE);
    guest.poke(BASE, |raw| raw & !(1 << 7));
    machine.publish();
    guest.fresh(BASE, 0x1000);
    caught(&machine, Kind::LostDirty);
}

/// Rounds of a migration: harvest and copy, while the guest writes.
fn migrate<F: Format, A: slat_sim::Arch>(machine: &Machine<A>, format: F) {
    let guest = Guest::new(machine, format);
    guest.map(BASE, RAM, 0x20000, K4);
    let all = range(BASE, 0x20000);
    machine.meanwhile(|machine, _| {
        let page = machine.frames() as u64 % 32;
        let _ = machine.cpu(1).write(BASE + (page << 12));
    });
    for round in 0..4 {
        let mut bitmap = [0u64];
        guest.with(|guard, _| guard.harvest(all, &mut bitmap).unwrap());
        for page in (0..32).filter(|page| bitmap[0] >> page & 1 == 1) {
            machine.copy(VMID, range(BASE + (page << 12), 0x1000));
        }
        guest.check_dirty(BASE, 0x20000);
        guest.write(0, BASE + (round << 13));
    }
    guest.fresh(BASE, 0x20000);
    guest.check_dirty(BASE, 0x20000);
}

fn the_engines_harvest_misses_no_write<C: Case>() {
    let machine = C::machine(2);
    migrate(&machine, C::format());
    clean(&machine);
}

/// If hardware marks nothing, each round protects the pages before it harvests them.
#[test]
fn the_engines_protection_log_misses_no_write() {
    let machine = Machine::new(Arm { hardware_dirty: false, ..arm() }, 2);
    let guest = Guest::new(&machine, Arm64::<12>::default());
    guest.map(BASE, RAM, 0x4000, K4);
    let all = range(BASE, 0x4000);
    for round in 0..3 {
        guest.write_protect(BASE, 0x4000);
        // Protected pages that were written are dirty: this harvest takes them, before the copy.
        let mut bitmap = [0u64];
        guest.with(|guard, _| guard.harvest(all, &mut bitmap).unwrap());
        machine.copy(VMID, all);
        let page = BASE + (round << 12);
        assert!(machine.cpu(0).write(page).is_err());
        guest.relax(page, 0x1000, Access::Write);
        machine.claim_progress(0, Gpa(page), slat_sim::Access::Write);
        guest.check_dirty(BASE, 0x4000);
    }
    clean(&machine);
}

/// Turns a table of pages into a block by hand: the check, the status and the block come from one
/// read of the leaves.
fn collapse_by_hand(guest: &ArmGuest<'_>, meanwhile: impl FnOnce()) {
    let leaf = guest.place(BASE);
    let link = guest.machine.above(VMID, &leaf);
    let children: Vec<_> = (0..512).map(|index| guest.machine.peek(leaf.table, index)).collect();
    assert!(children.iter().all(|&child| child & 1 == 1), "they agree");
    meanwhile();
    let status = children.iter().fold(0, |all, child| all | child & Arm64::<12>::STATUS);
    let bits = Arm64::<12>::attribute_bits(children[0], 0) | status;
    let block = Arm64::<12>::leaf(bits, 1, Hpa(RAM));
    guest.machine.poke(link.table, link.index, 0);
    guest.flush();
    guest.machine.poke(link.table, link.index, block);
    guest.machine.publish();
}

#[test]
fn a_collapse_decided_before_hardware_is_out_loses_a_write() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map_clean(BASE, RAM, 2 << 20, K4);
    guest.read(1, BASE + 0x7000);
    collapse_by_hand(&guest, || guest.write(1, BASE + 0x7000));
    guest.check_dirty(BASE, 2 << 20);
    caught(&machine, Kind::LostDirty);
}

#[test]
fn a_collapse_of_unsealed_leaves_brings_freed_memory_back() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, K4);
    collapse_by_hand(&guest, || guest.unmap(BASE + 0x7000, 0x1000));
    let _ = machine.cpu(0).read(BASE + 0x7000);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn the_engines_collapse_takes_every_write_along() {
    for bbm in [0, 2, 3] {
        let machine = Machine::new(Arm { bbm, ..arm() }, 2);
        let guest = Guest::arm(&machine);
        guest.map_clean(BASE, RAM, 2 << 20, K4);
        machine.meanwhile(|machine, moment| {
            if moment == Moment::Invalidate {
                // By the walk cache, after the block is in place.
                let _ = machine.cpu(1).write(BASE + 0x7000);
            }
        });
        guest.collapse(BASE, 2 << 20, M2);
        assert_eq!(guest.place(BASE).level, 2);
        guest.fresh(BASE, 2 << 20);
        guest.check_dirty(BASE, 2 << 20);
        clean(&machine);
    }
}

fn the_engines_collapse_keeps_writes_through_a_walk_cache<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map_clean(BASE, RAM, 2 << 20, K4);
    guest.read(1, BASE);
    machine.meanwhile(|machine, moment| {
        if moment == Moment::Invalidate {
            let _ = machine.cpu(1).write(BASE + 0x7000);
        }
    });
    guest.collapse(BASE, 2 << 20, M2);
    guest.fresh(BASE, 2 << 20);
    guest.check_dirty(BASE, 2 << 20);
    clean(&machine);
}

/// Tables that share an invalidation: CPUs hold walk caches of each.
fn the_engines_collapse_of_many_tables_takes_every_write_along<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    let (tables, all) = (3, 3 * (2 << 20));
    guest.map_clean(BASE, RAM, all, K4);
    (0..tables).for_each(|table| guest.read(1, BASE + table * (2 << 20)));
    machine.meanwhile(move |machine, moment| {
        if moment == Moment::Invalidate {
            for table in 0..tables {
                let _ = machine.cpu(1).write(BASE + table * (2 << 20) + 0x7000);
            }
        }
    });
    guest.collapse(BASE, all, M2);
    machine.undisturbed();
    guest.fresh(BASE, all);
    guest.check_dirty(BASE, all);
    clean(&machine);
}

fn a_read_only_table_protects_nothing_before_the_invalidation<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x2000, K4);
    guest.write(1, BASE);
    let leaf = guest.place(BASE);
    let link = machine.above(VMID, &leaf);
    // W of EPT and of long mode.
    machine.poke(link.table, link.index, link.raw & !(1 << 1));
    machine.protect(VMID, range(BASE, 0x2000));
    // By a walk that begins below the link.
    let _ = machine.cpu(1).write(BASE + 0x1000);
    caught(&machine, Kind::RevokedRight);
}

on_every_format! {
    the_engines_harvest_misses_no_write,
    the_engines_collapse_keeps_writes_through_a_walk_cache,
    the_engines_collapse_of_many_tables_takes_every_write_along,
}

on_x86! {
    on_x86_the_fault_itself_forgets_the_old_right,
    a_read_only_table_protects_nothing_before_the_invalidation,
}
