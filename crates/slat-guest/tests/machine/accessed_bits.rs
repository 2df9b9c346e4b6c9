//! Accesses that go unreported.

use crate::cases::Case;
use crate::common::*;
use slat::format::arm64::Arm64;
use slat::{AgeBitmaps, AgeOptions, Format, Gpa, Platform, TableBits};
use slat_sim::{Arch, Kind};

/// Scans a whole table from `BASE`, and records the pages that are young or have no answer as seen.
/// Returns which of the first 64 pages are young.
fn scan<F: Format, A: Arch>(guest: &Guest<'_, F, A>, how: AgeOptions) -> u64 {
    let (mut young, mut unanswered) = ([0u64; 8], [0u64; 8]);
    let all = range(BASE, 2 << 20);
    guest.with(|guard, _| {
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        guard.age(all, &mut ages, how).unwrap();
    });
    let known = |page: &usize| (young[page / 64] | unanswered[page / 64]) >> (page % 64) & 1 == 1;
    for page in (0..512).filter(known) {
        let page = page as u64;
        guest.machine.seen(VMID, range(BASE + (page << 12), 0x1000));
    }
    young[0]
}

fn check<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.machine.claim_old(VMID, range(BASE, 0x20000), |gpa| accessed(guest, gpa));
}

fn accessed<F: Format, A: Arch>(guest: &Guest<'_, F, A>, gpa: Gpa) -> bool {
    guest.look(gpa).is_some_and(|found| found.attributes.accessed)
}

const EXACT: AgeOptions = AgeOptions { clear: true, table_bits: TableBits::Exact, flush_tlb: true };

#[test]
fn a_page_made_old_without_an_invalidation_is_used_unseen() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x20000, K4);
    guest.read(0, BASE);
    guest.poke(BASE, |raw| raw & !Arm64::<12>::ACCESSED);
    machine.publish();
    machine.seen(VMID, range(BASE, 0x20000));
    guest.read(0, BASE);
    check(&guest);
    caught(&machine, Kind::LostYoung);
}

#[test]
fn a_young_page_cleared_by_a_plain_store_is_lost() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x20000, K4);
    scan(&guest, EXACT);
    let place = guest.place(BASE);
    guest.read(1, BASE);
    machine.poke(place.table, place.index, place.raw);
    guest.flush();
    check(&guest);
    caught(&machine, Kind::LostYoung);
}

fn a_tables_bit_cleared_after_its_leaves_hides_an_access<C: Case>() {
    // The walk cache marks a leaf, and not the table above it.
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x20000, K4);
    scan(&guest, EXACT);
    guest.read(1, BASE);
    let leaf = guest.place(BASE);
    let link = machine.above(VMID, &leaf);
    let accessed_bit = C::F::TABLE_ACCESSED;
    machine.poke(leaf.table, leaf.index, leaf.raw & !accessed_bit);
    machine.seen(VMID, range(BASE, 0x20000));
    machine.poke(link.table, link.index, link.raw & !accessed_bit);
    guest.read(1, BASE + 0x1000);
    // As if nothing below a table without a mark had been used.
    let above = machine.peek(link.table, link.index) & accessed_bit != 0;
    machine.claim_old(VMID, range(BASE, 0x20000), |_| above);
    caught(&machine, Kind::LostYoung);
}

fn scans<F: Format, A: Arch>(guest: &Guest<'_, F, A>, how: AgeOptions) {
    guest.map(BASE, RAM, 0x20000, K4);
    for round in 0..6u64 {
        for page in 0..round {
            guest.read((page % 2) as usize, BASE + (page << 13));
        }
        let machine = guest.machine;
        machine.meanwhile(move |machine, _| _ = machine.cpu(1).read(BASE + (round << 12)));
        scan(guest, how);
        machine.undisturbed();
        guest.read(0, BASE + 0x1f000);
        check(guest);
    }
}

fn the_engines_exact_scans_miss_no_access<C: Case>() {
    for skip in [TableBits::Ignored, TableBits::Exact] {
        let how = AgeOptions { table_bits: skip, ..EXACT };
        let machine = C::machine(2);
        scans(&C::guest(&machine), how);
        clean(&machine);
    }
}

#[test]
fn a_scan_that_is_not_fresh_may_miss_what_a_tlb_holds() {
    // Linux leaves the invalidation out, and documents that. Here it has an effect.
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x20000, K4);
    guest.read(0, BASE);
    scan(&guest, AgeOptions { flush_tlb: false, ..EXACT });
    machine.seen(VMID, range(BASE, 0x20000));
    // Nothing was owed, so nothing was invalidated.
    guest.read(0, BASE);
    check(&guest);
    let found = machine.finish();
    assert!(!found.is_empty());
    assert!(found.iter().all(|violation| violation.kind == Kind::LostYoung));
}

#[test]
fn without_hardware_the_access_flag_faults() {
    let machine = slat_sim::Machine::new(
        slat_sim::Arm { hardware_accessed: false, hardware_dirty: false, ..arm() },
        2,
    );
    let guest = Guest::new(&machine, Arm64::<12>::default());
    guest.map(BASE, RAM, 0x20000, K4);
    scan(&guest, EXACT);
    assert_eq!(machine.cpu(0).read(BASE), Err(slat_sim::Fault::Accessed));
    guest.relax(BASE, 0x1000, slat::Access::Read);
    machine.claim_progress(0, Gpa(BASE), slat_sim::Access::Read);
    check(&guest);
    clean(&machine);
}

fn an_exact_scan_sees_walk_cache_accesses_at_every_moment<C: Case>() {
    // Speculative walks would mark the tables, and so hide the bug.
    let lazy = without(|lazy| lazy.speculation = false);
    for nth in 1..16 {
        let machine = C::machine(2).lazy(lazy);
        let guest = C::guest(&machine);
        guest.map(BASE, RAM, 4 << 20, K4);
        let all = range(BASE, 4 << 20);
        let scan = || {
            let (mut young, mut unanswered) = ([0u64; 16], [0u64; 16]);
            guest.with(|guard, _| {
                let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
                guard.age(all, &mut ages, EXACT).unwrap();
            });
            for page in (0..1024).filter(|page| young[page / 64] >> (page % 64) & 1 == 1) {
                machine.seen(VMID, range(BASE + ((page as u64) << 12), 0x1000));
            }
        };
        scan();
        guest.read(1, BASE);
        let mut calls = 0;
        machine.meanwhile(move |machine, _| {
            calls += 1;
            if calls == nth {
                machine.cpu(1).read(BASE + 0x1000).unwrap();
            }
        });
        scan();
        machine.undisturbed();
        scan();
        machine.claim_old(VMID, all, |_| false);
        clean(&machine);
    }
}

fn an_exact_scan_finds_what_software_made_young<C: Case>() {
    let machine = C::machine(2).lazy(without(|lazy| lazy.speculation = false));
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x4000, K4);
    scan(&guest, EXACT);
    assert_eq!(scan(&guest, EXACT), 0, "nothing was used since");
    // A page mapped by a fault; two pages after it; a leaf that was there; a reservation.
    guest.map(BASE + 0x4000, RAM + 0x4000, 0x1000, K4);
    assert_eq!(scan(&guest, EXACT), 1 << 4);
    guest.map(BASE + 0x5000, RAM + 0x5000, 0x2000, K4);
    assert_eq!(scan(&guest, EXACT), 0b11 << 5);
    guest.relax(BASE + 0x1000, 0x1000, slat::Access::Read);
    assert_eq!(scan(&guest, EXACT), 1 << 1);
    guest.with(|guard, cache| {
        let reservation = guard.reserve(Gpa(BASE + 0x8000), K4, cache).unwrap();
        reservation.commit(slat::Hpa(RAM + 0x8000), slat::Attributes::RAM).unwrap();
    });
    assert_eq!(scan(&guest, EXACT), 1 << 8);
    clean(&machine);
}

on_every_format! {
    the_engines_exact_scans_miss_no_access,
    an_exact_scan_finds_what_software_made_young,
}

on_x86! {
    a_tables_bit_cleared_after_its_leaves_hides_an_access,
    an_exact_scan_sees_walk_cache_accesses_at_every_moment,
}
