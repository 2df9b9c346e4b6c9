//! Races that every engine has to survive: a fault while the host takes memory back, a collapse
//! during an unmap, faults during the next round of logging.

use crate::cases::Case;
use crate::common::*;
use slat::{Access, Attributes, Gpa, Hpa, Reader, TableCache, UnmapBatch};
use slat_sim::{Arch, Kind, Machine, Moment};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_fault_that_maps_a_page_the_host_took_back_is_noticed() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    // The fault has looked up RAM for the page; then the host empties the range and continues.
    guest.unmap(BASE, 0x1000);
    machine.take_back(Hpa(RAM), 0x1000);
    guest.map(BASE, RAM, 0x1000, K4);
    let _ = machine.cpu(0).read(BASE);
    caught(&machine, Kind::FreedMemory);
}

#[test]
fn a_reservation_does_not_outlive_the_hosts_taking_memory_back() {
    let machine = arm_machine();
    let guest = Guest::arm(&machine);
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(&machine, &mut storage);
    cache.fill(4).unwrap();
    let mut reader = Reader::register(&machine).unwrap();
    let mut fault = guest.tables.enter(&mut reader).unwrap();
    let reservation = fault.reserve(Gpa(BASE), K4, &mut cache).unwrap();
    // The fault asks for the backing here, and gets RAM. Then the host takes it back.
    guest.unmap(BASE, 0x1000);
    machine.take_back(Hpa(RAM), 0x1000);
    assert_eq!(reservation.commit(Hpa(RAM), Attributes::RAM), Ok(None));
    assert!(machine.cpu(0).read(BASE).is_err());
    clean(&machine);
}

/// Leaks the machine and the guest, because a hook keeps references to them.
fn leaked<A: Arch, F: slat::Format>(
    machine: Machine<A>,
    format: F,
) -> &'static Guest<'static, F, A> {
    Box::leak(Box::new(Guest::new(Box::leak(Box::new(machine)), format)))
}

/// Sets the work of another thread: it runs once, at the `nth` call that the engine makes of the
/// machine from now on. At each call the guest writes to `touched`.
fn at_call<A: Arch>(
    machine: &'static Machine<A>,
    nth: usize,
    touched: u64,
    mut work: impl FnMut() + Send + 'static,
) {
    let mut calls = 0;
    machine.meanwhile(move |machine, _| {
        calls += 1;
        let _ = machine.cpu(1).write(touched);
        if calls == nth {
            work();
        }
    });
}

/// Runs a collapse. At its `nth` call, another thread unmaps a page.
fn collapse_beside_unmap<A: Arch, F: slat::Format>(machine: Machine<A>, format: F, nth: usize) {
    let guest = leaked(machine, format);
    let machine = guest.machine;
    guest.map(BASE, RAM, 2 << 20, K4);
    guest.read(1, BASE + 0x7000);
    at_call(machine, nth, BASE + 0x8000, move || {
        let mut storage = [slat::UnmapEntry::EMPTY; 4];
        let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
        let mut reader = Reader::register(machine).unwrap();
        let mut guard = guest.tables.enter(&mut reader).unwrap();
        // The unmap may have to be tried again; this test does not.
        let _ = guard.unmap(range(BASE + 0x7000, 0x1000), &mut batch);
        drop(guard);
        batch.complete().for_each(|leaf| machine.take_back(leaf.hpa, leaf.bytes));
    });
    guest.with(|guard, _| _ = guard.collapse(range(BASE, 2 << 20), M2));
    machine.undisturbed();
    guest.fresh(BASE, 2 << 20);
    guest.check_dirty(BASE, 0x7000);
    guest.check_dirty(BASE + 0x8000, 0x1000);
    let _ = machine.cpu(0).read(BASE + 0x7000);
    guest.tables.reclaim();
    clean(machine);
}

fn the_engines_collapse_during_an_unmap_restores_no_page<C: Case>() {
    for nth in 1..12 {
        collapse_beside_unmap(C::machine(2), C::format(), nth);
    }
}

/// The work of another thread in a table whose place a block takes.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    Unmap,
    Fault,
    Protect,
    Harvest,
    Whole,
}

/// Puts a block on other memory in place of a table. At the `nth` call, another thread works there.
fn a_block_replaces_a_table_while_another_thread_is_in_it<C: Case>() {
    use Beside::*;
    let block = RAM + (8 << 20);
    for (beside, nth) in [Unmap, Fault, Protect, Harvest, Whole]
        .into_iter()
        .flat_map(|b| (1..9).map(move |n| (b, n)))
    {
        let guest = leaked(C::machine(2), C::format());
        let machine = guest.machine;
        guest.map_clean(BASE, RAM, 1 << 20, K4);
        guest.read(1, BASE + 0x7000);
        at_call(machine, nth, BASE + 0x8000, move || {
            let mut reader = Reader::register(machine).unwrap();
            let mut guard = guest.tables.enter(&mut reader).unwrap();
            let page = range(BASE + 0x7000, 0x1000);
            // The work may have to be tried again; this test does not.
            match beside {
                Unmap => {
                    let mut storage = [slat::UnmapEntry::EMPTY; 4];
                    let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
                    let _ = guard.unmap(page, &mut batch);
                    drop(guard);
                    batch.complete().for_each(drop);
                }
                Fault => {
                    let mut storage = [const { None }; 4];
                    let mut cache = TableCache::new(machine, &mut storage);
                    let at = BASE + (1 << 20);
                    if let Ok(reserved) = guard.reserve(Gpa(at), K4, &mut cache) {
                        let _ = reserved.commit(Hpa(RAM + (1 << 20)), Attributes::RAM);
                    }
                }
                Protect => {
                    let _ = guard.write_protect(page);
                    guard.invalidate();
                }
                Harvest => _ = guard.harvest(range(BASE, 2 << 20), &mut [0; 8]),
                Whole => _ = guard.replace_table(Gpa(BASE), M2, Hpa(block), Attributes::RAM),
            }
        });
        let done =
            guest.with(|guard, _| guard.replace_table(Gpa(BASE), M2, Hpa(block), Attributes::RAM));
        machine.undisturbed();
        let stands = guest.look(Gpa(BASE)).filter(|found| found.size == M2);
        assert!(done.is_err() || stands.is_some());
        if stands.is_some() {
            // No CPU reaches the old memory, and no thread is inside.
            machine.take_back(Hpa(RAM), 2 << 20);
            guest.write(0, BASE + 0x7000);
            guest.write(1, BASE + (1 << 20));
        }
        guest.fresh(BASE, 2 << 20);
        guest.tables.reclaim();
        clean(machine);
    }
}

/// Runs a split. At its `nth` call, another thread protects the block.
fn the_engines_split_beside_write_protection_loses_no_write<C: Case>() {
    for nth in 1..12 {
        let guest = leaked(C::machine(2), C::format());
        let machine = guest.machine;
        guest.map(BASE, RAM, 4 << 20, M2);
        at_call(machine, nth, BASE, move || {
            let mut reader = Reader::register(machine).unwrap();
            let mut guard = guest.tables.enter(&mut reader).unwrap();
            let done = guard.write_protect(range(BASE, 4 << 20));
            guard.invalidate();
            if done.is_ok() {
                machine.protect(VMID, range(BASE, 4 << 20));
            }
        });
        guest.with(|guard, cache| _ = guard.split(range(BASE, 4 << 20), K4, cache));
        machine.undisturbed();
        let _ = machine.cpu(1).write(BASE);
        guest.fresh(BASE, 4 << 20);
        guest.check_dirty(BASE, 4 << 20);
        clean(machine);
    }
}

/// Rounds of logging on real threads, while faults give rights back.
fn faults_during_rounds_of_protection_lose_no_write<C: Case>() {
    const PAGES: u64 = 24;
    for seed in crate::seed::seeds(4) {
        let machine = C::machine(2).random(seed);
        let guest = C::guest(&machine);
        guest.map_clean(BASE, RAM, PAGES << 12, K4);
        let all = range(BASE, 2 << 20);
        let log = Mutex::new(BTreeSet::new());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for cpu in 0..2 {
                let (machine, guest, log, stop) = (&machine, &guest, &log, &stop);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed.wrapping_mul(2) + cpu as u64);
                    let mut reader = Reader::register(machine).unwrap();
                    while !stop.load(Ordering::Relaxed) {
                        let page = BASE + (rng.u64(..PAGES) << 12);
                        if machine.cpu(cpu).write(page).is_err() {
                            let mut guard = guest.tables.enter(&mut reader).unwrap();
                            let _ = guard
                                .relax(range(page, 0x1000), Access::Write)
                                .map(slat::LocalFlush::not_needed_here);
                            guard.invalidate();
                            machine.forget(cpu, VMID, range(page, 0x1000));
                            log.lock().unwrap().insert(page);
                        }
                    }
                });
            }
            let mut reader = Reader::register(&machine).unwrap();
            for _ in 0..60 {
                let taken = std::mem::take(&mut *log.lock().unwrap());
                let mut guard = guest.tables.enter(&mut reader).unwrap();
                // Pages that cannot be protected now stay in the log.
                let done = guard.write_protect(all).is_ok();
                guard.invalidate();
                let mut bitmap = [0u64; 8];
                let harvested = guard.harvest(range(BASE, PAGES << 12), &mut bitmap).is_ok();
                if done && harvested {
                    for page in taken {
                        machine.copy(VMID, range(page, 0x1000));
                    }
                    for page in (0..PAGES).filter(|page| bitmap[0] >> page & 1 == 1) {
                        machine.copy(VMID, range(BASE + (page << 12), 0x1000));
                    }
                } else {
                    log.lock().unwrap().extend(taken);
                    let pages = (0..PAGES).filter(|page| bitmap[0] >> page & 1 == 1);
                    log.lock().unwrap().extend(pages.map(|page| BASE + (page << 12)));
                }
                drop(guard);
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let log = log.into_inner().unwrap();
        machine.claim_clean(VMID, all, |gpa| log.contains(&gpa.0) || guest.is_dirty(gpa));
        clean(&machine);
    }
}

fn a_round_that_is_not_invalidated_loses_a_write<C: Case>() {
    let machine = C::machine(2);
    let guest = C::guest(&machine);
    guest.map(BASE, RAM, 0x4000, K4);
    guest.write(1, BASE);
    let mut reader = Reader::register(&machine).unwrap();
    let mut guard = guest.tables.enter(&mut reader).unwrap();
    guard.write_protect(range(BASE, 2 << 20)).unwrap();
    // The test claims that the round has begun, which is wrong.
    machine.protect(VMID, range(BASE, 2 << 20));
    machine.copy(VMID, range(BASE, 0x4000));
    guest.write(1, BASE);
    caught(&machine, Kind::RevokedRight);
}

fn a_table_is_not_freed_under_a_walk_in_software<C: Case>() {
    // At one moment of a scan, another thread unmaps and reclaims the table that is scanned.
    for nth in 1..8 {
        let guest = leaked(C::machine(2), C::format());
        let machine = guest.machine;
        guest.map(BASE, RAM, 2 << 20, K4);
        let mut calls = 0;
        machine.meanwhile(move |_, moment| {
            calls += usize::from(moment == Moment::Table);
            if calls == nth {
                calls += 1;
                guest.unmap(BASE, 2 << 20);
                guest.tables.reclaim();
            }
        });
        guest.with(|guard, _| {
            let _ = guard.write_protect(range(BASE, 2 << 20));
            let _ = guard.translate(Gpa(BASE));
        });
        machine.undisturbed();
        guest.tables.reclaim();
        guest.fresh(BASE, 2 << 20);
        clean(machine);
    }
}

on_every_format! {
    the_engines_collapse_during_an_unmap_restores_no_page,
    the_engines_split_beside_write_protection_loses_no_write,
    a_table_is_not_freed_under_a_walk_in_software,
    a_block_replaces_a_table_while_another_thread_is_in_it,
}

on_x86! {
    faults_during_rounds_of_protection_lose_no_write,
    a_round_that_is_not_invalidated_loses_a_write,
}
