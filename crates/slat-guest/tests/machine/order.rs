//! Steps in the wrong order: freed before invalidated, linked before filled, copied before clean;
//! and in the right order, by the engine.

use crate::cases::Case;
use crate::common::*;
use slat::format::arm64::Arm64;
use slat::{Attributes, Format, Frame, Gpa, Hpa, Platform, Reader, TableCache, UnmapBatch};
use slat_sim::{Arm, Kind, Machine, Moment};

#[test]
fn memory_given_back_before_the_invalidation_is_reached() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.write(1, BASE);
    guest.poke(BASE, |_| 0);
    machine.take_back(Hpa(RAM), 0x1000);
    guest.flush();
    caught(&machine, Kind::FreedMemory);
}

fn memory_that_the_tables_still_map_is_reached<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    machine.take_back(Hpa(RAM), 0x1000);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn the_engine_hands_out_memory_after_the_invalidation() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x3000, K4);
    (0..2).for_each(|cpu| guest.write(cpu, BASE + 0x1000));
    machine.meanwhile(|machine, _| _ = machine.cpu(1).write(BASE + 0x1000));
    guest.unmap(BASE, 0x3000);
    clean(&machine);
}

/// Unlinks an empty table by a plain store, and frees it without waiting for walks.
fn free_a_table(machine: &Machine<Arm>, invalidate: bool) {
    let guest = Guest::arm(machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.read(1, BASE);
    let leaf = guest.poke(BASE, |_| 0);
    let link = machine.above(VMID, &leaf);
    machine.poke(link.table, link.index, 0);
    if invalidate {
        guest.flush();
    }
    // SAFETY: the frame is a page from the engine's cache. The test is about whether hardware still
    // reaches it.
    unsafe { machine.free(Frame::from_hpa(leaf.table).unwrap(), 4096) };
}

#[test]
fn a_table_freed_before_the_invalidation_is_walked() {
    let machine = arm_machine();
    free_a_table(&machine, false);
    caught(&machine, Kind::FreedTable);
}

#[test]
fn a_table_freed_while_linked_is_walked() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    let table = guest.place(BASE).table;
    guest.flush();
    // SAFETY: as above.
    unsafe { machine.free(Frame::from_hpa(table).unwrap(), 4096) };
    let _ = machine.cpu(0).read(BASE);
    caught(&machine, Kind::FreedTable);
}

#[test]
fn a_table_freed_after_the_invalidation_is_not() {
    let machine = arm_machine();
    free_a_table(&machine, true);
    clean(&machine);
}

#[test]
fn a_table_freed_twice_or_written_afterwards_is_noticed() {
    let machine = arm_machine();
    let frame = machine.allocate(4096).unwrap();
    let hpa = frame.hpa();
    // SAFETY: just allocated, and never linked. The second free breaks the contract on purpose.
    unsafe {
        machine.free(frame, 4096);
        machine.free(Frame::from_hpa(hpa).unwrap(), 4096);
    }
    caught(&machine, Kind::BadFree);
    let frame = machine.allocate(4096).unwrap();
    let hpa = frame.hpa();
    // SAFETY: just allocated, and never linked.
    unsafe { machine.free(frame, 4096) };
    machine.poke(hpa, 3, 1);
    caught(&machine, Kind::BadFree);
}

#[test]
fn the_engine_frees_tables_when_no_thread_walks_them() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, K4);
    guest.read(0, BASE);
    let mut reader = Reader::register(&machine).unwrap();
    let inside = guest.tables.enter(&mut reader).unwrap();
    let frames = machine.frames();
    guest.unmap(BASE, 2 << 20);
    assert_eq!(guest.tables.reclaim(), 0, "somebody may be in it");
    drop(inside);
    // The table of pages, and the one above it, which is empty now.
    assert_eq!(guest.tables.reclaim(), 2);
    assert_eq!(machine.frames(), frames - 2);
    clean(&machine);
}

#[test]
fn a_software_walk_into_a_freed_table_is_noticed() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    let leaf = guest.place(BASE);
    let link = machine.above(VMID, &leaf);
    machine.poke(link.table, link.index, 0);
    guest.flush();
    // SAFETY: unlinked and invalidated. That software still walks it is the purpose of the test.
    unsafe { machine.free(Frame::from_hpa(leaf.table).unwrap(), 4096) };
    machine.entries(leaf.table);
    caught(&machine, Kind::FreedTable);
}

/// Turns a block into a table of pages; with `early`, links the table before it is filled.
fn split_by_hand(machine: &Machine<Arm>, early: bool) {
    let guest = Guest::arm(machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    let block = guest.poke(BASE, |_| 0);
    guest.flush();
    let table = machine.allocate(4096).unwrap().hpa();
    let link = || machine.poke(block.table, block.index, Arm64::<12>::table(table, 1));
    if early {
        link();
        machine.publish();
        // The guest continues to run.
        let _ = machine.cpu(0).read(BASE + 0x5000);
    }
    let bits = Arm64::<12>::attribute_bits(block.raw, 1);
    for index in 0..512 {
        let leaf = Arm64::<12>::leaf(bits, 0, Hpa(RAM + ((index as u64) << 12)));
        machine.poke(table, index, leaf);
    }
    if !early {
        link();
    }
    machine.publish();
    guest.read(0, BASE + 0x5000);
    guest.fresh(BASE, 2 << 20);
}

#[test]
fn a_table_linked_before_it_is_filled_is_walked_empty() {
    let machine = arm_machine();
    split_by_hand(&machine, true);
    caught(&machine, Kind::Unfilled);
}

#[test]
fn a_table_filled_before_it_is_linked_is_not() {
    let machine = arm_machine();
    split_by_hand(&machine, false);
    clean(&machine);
}

#[test]
fn the_engine_links_tables_that_are_filled() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    machine.meanwhile(|machine, moment| {
        if moment == Moment::Fill {
            let _ = machine.cpu(0).read(BASE + 0x5000);
        }
    });
    guest.split(BASE, 2 << 20, K4);
    guest.fresh(BASE, 2 << 20);
    clean(&machine);
}

#[test]
fn descriptors_written_into_what_a_leaf_maps_are_guest_memory() {
    // Software takes a block for a table, as a remap of a part of it did.
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    let leaf = guest.place(BASE);
    machine.entries(Arm64::<12>::table_address(leaf.raw));
    caught(&machine, Kind::Reserved);
}

#[test]
fn a_link_to_guest_memory_is_walked_as_what_the_guest_wrote() {
    // A link to memory of the guest, as if a block were a table.
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    guest.poke(BASE, |raw| raw & 0xffff_ffff_f003 | 0b11);
    guest.flush();
    let _ = machine.cpu(0).read(BASE);
    caught(&machine, Kind::Reserved);
}

#[test]
fn the_engine_does_not_walk_into_a_leaf() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, M2);
    guest.with(|guard, cache| {
        let part = range(BASE + 0x1000, 0x1000);
        let mapped = guard.map(part, Hpa(RAM + 0x1000), Attributes::RAM, K4, cache);
        let mut storage = [slat::UnmapEntry::EMPTY; 4];
        let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
        assert!(guard.unmap(part, &mut batch).is_err());
        assert!(guard.write_protect(part).is_err());
        let _ = mapped;
    });
    assert_eq!(guest.place(BASE).level, 2);
    clean(&machine);
}

#[test]
fn the_guest_reaches_a_table_that_was_mapped_to_it() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    let table = guest.tables.root();
    guest.map(BASE, table.0, 0x1000, K4);
    guest.read(0, BASE);
    caught(&machine, Kind::TableExposed);
}

#[test]
fn a_reserved_encoding_is_a_misconfiguration() {
    let machine = ept_machine();
    let guest = Guest::ept(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    // Writable and not readable.
    guest.poke(BASE, |raw| raw & !1);
    guest.flush();
    let _ = machine.cpu(0).read(BASE);
    caught(&machine, Kind::Reserved);
}

fn a_copy_on_write_without_invalidation_writes_the_old_page<C: Case>() {
    // The host moves a page, and the guest continues to write to the old one.
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.write(1, BASE);
    guest.poke(BASE, |raw| raw + 0x1000);
    machine.take_back(Hpa(RAM), 0x1000);
    let _ = machine.cpu(1).write(BASE);
    caught(&machine, Kind::FreedMemory);
}

fn the_engine_moves_a_page_by_unmapping_it_first<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.write(1, BASE);
    guest.unmap(BASE, 0x1000);
    guest.map(BASE, RAM + 0x1000, 0x1000, K4);
    assert_eq!(guest.attempt(1, BASE, slat_sim::Access::Write), Ok(Hpa(RAM + 0x1000)));
    guest.fresh(BASE, 0x1000);
    clean(&machine);
}

#[test]
fn a_vmid_given_to_another_guest_has_the_firsts_translations() {
    let machine = arm_machine();
    let first = Guest::arm(&machine);
    first.map(BASE, RAM, 0x1000, K4);
    first.read(0, BASE);
    let second = Guest::arm(&machine);
    assert!(machine.cpu(0).read(BASE).is_ok(), "it maps nothing");
    second.fresh(BASE, 0x1000);
    caught(&machine, Kind::StaleTranslation);
}

#[test]
fn tables_that_are_destroyed_leave_nothing_behind() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 4 << 20, K4);
    guest.read(0, BASE);
    guest.unmap(BASE, 2 << 20);
    let root = guest.tables.root();
    (0..2).for_each(|cpu| machine.cpu(cpu).unload());
    // SAFETY: no CPU has them loaded.
    unsafe { guest.tables.deactivate() }.destroy();
    assert!(!machine.cpu(0).holds(VMID, Gpa(BASE)) && root != Hpa(0));
    clean(&machine);
}

#[test]
fn tables_that_are_destroyed_while_loaded_are_noticed() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    // SAFETY: the test breaks the contract on purpose: CPUs have the tables loaded.
    unsafe { guest.tables.deactivate() }.destroy();
    caught(&machine, Kind::BadFree);
}

#[test]
fn a_cache_that_is_dropped_gives_its_frames_back() {
    let machine = arm_machine();
    {
        let mut storage = [const { None }; 4];
        let mut cache = TableCache::<Arm64<12>, _>::new(&machine, &mut storage);
        cache.fill(4).unwrap();
    }
    assert_eq!(machine.frames(), 0);
    clean(&machine);
}

#[test]
fn what_the_engine_maps_is_there_when_it_returns() {
    // The table was walked before, so walkers may still read its older values.
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    guest.read(0, BASE);
    guest.map(BASE + 0x1000, RAM + 0x1000, 0x1000, K4);
    guest.read(0, BASE + 0x1000);
    guest.map(BASE + 0x2000, RAM + 0x2000, 0x2000, K4);
    guest.read(0, BASE + 0x3000);
    guest.map(BASE + (2 << 20), RAM + (2 << 20), 2 << 20, M2);
    guest.read(0, BASE + (2 << 20));
    let page = Gpa(BASE + 0x4000);
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&machine, &mut storage);
    cache.fill(4).unwrap();
    let mut reader = Reader::register(&machine).unwrap();
    let mut fault = guest.tables.enter(&mut reader).unwrap();
    let reservation = fault.reserve(page, K4, &mut cache).unwrap();
    reservation.commit(Hpa(RAM + 0x4000), Attributes::RAM).unwrap();
    guest.read(0, page.0);
    clean(&machine);
}

#[test]
fn what_a_dropped_guard_or_removal_owed_is_done_by_the_next() {
    for removal in [false, true] {
        let machine = arm_machine();
        let guest = Guest::arm(&machine);
        guest.map(BASE, RAM, 0x3000, K4);
        guest.write(1, BASE);
        let mut reader = Reader::register(&machine).unwrap();
        {
            let mut storage = [slat::UnmapEntry::EMPTY; 4];
            let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
            let mut guard = guest.tables.enter(&mut reader).unwrap();
            match removal {
                true => _ = guard.unmap(range(BASE, 0x1000), &mut batch).unwrap(),
                false => _ = guard.write_protect(range(BASE, 0x1000)).unwrap(),
            }
        }
        // Another guard, which owes an invalidation of another page.
        guest.with(|guard, _| _ = guard.write_protect(range(BASE + 0x2000, 0x1000)).unwrap());
        guest.fresh(BASE, 0x3000);
        clean(&machine);
    }
}

#[test]
fn the_engine_may_map_before_an_unmap_is_invalidated() {
    for bytes in [0x1000, 2 << 20] {
        let machine = arm_machine();
        let guest = Guest::arm(&machine);
        guest.map(BASE, RAM, 2 << 20, K4);
        guest.write(1, BASE);
        let mut storage = [slat::UnmapEntry::EMPTY; 4];
        let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
        let mut reader = Reader::register(&machine).unwrap();
        guest.tables.enter(&mut reader).unwrap().unmap(range(BASE, bytes), &mut batch).unwrap();
        guest.map(BASE, RAM + (4 << 20), bytes, K4);
        guest.read(1, BASE);
        batch.complete().for_each(|leaf| machine.take_back(leaf.hpa, leaf.bytes));
        guest.read(1, BASE);
        guest.fresh(BASE, 2 << 20);
        clean(&machine);
    }
}

#[test]
fn the_engine_frees_no_table_before_its_unmap_is_invalidated() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 2 << 20, K4);
    guest.read(1, BASE);
    let mut storage = [slat::UnmapEntry::EMPTY; 4];
    let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
    let mut reader = Reader::register(&machine).unwrap();
    guest.tables.enter(&mut reader).unwrap().unmap(range(BASE, 2 << 20), &mut batch).unwrap();
    guest.tables.reclaim();
    clean(&machine);
}

on_every_format! {
    memory_that_the_tables_still_map_is_reached,
    the_engine_moves_a_page_by_unmapping_it_first,
}

on_x86! {
    a_copy_on_write_without_invalidation_writes_the_old_page,
}
