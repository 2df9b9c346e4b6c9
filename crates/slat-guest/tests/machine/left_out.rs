//! Leaves out each of the engine's invalidations, one at a time. The machine must find what is left
//! then.

use crate::cases::Case;
use crate::common::*;
use slat::{AgeBitmaps, AgeOptions, Attributes, Format, Hpa, Invalidation, TableBits};
use slat_sim::{Arch, Firmware, HasFirmware, Machine};
use std::cell::Cell;

thread_local! {
    /// The number of the invalidation to leave out; `SEEN` counts the invalidations so far.
    static LEFT_OUT: Cell<usize> = const { Cell::new(usize::MAX) };
    static SEEN: Cell<usize> = const { Cell::new(0) };
}

fn invalidate<A: HasFirmware>(machine: &Machine<A>, what: &Invalidation) {
    let number = SEEN.replace(SEEN.get() + 1);
    if number == LEFT_OUT.get() {
        // The stores are still published.
        slat::Platform::publish(machine);
    } else {
        (A::FIRMWARE.invalidate)(machine, what);
    }
}

/// Runs `scenario` without invalidation `number`; returns the number of invalidations, and whether
/// the machine found the bug.
fn run<C: Case>(number: usize, scenario: fn(&Guest<'_, C::F, C::A>)) -> (usize, bool) {
    LEFT_OUT.set(number);
    SEEN.set(0);
    let faulty = Firmware { invalidate: invalidate::<C::A>, ..C::A::FIRMWARE };
    // There is no hook on this thread: speculation is enough of a guest.
    let machine = C::machine(2).firmware(faulty);
    scenario(&C::guest(&machine));
    (SEEN.get(), !machine.finish().is_empty())
}

fn each<C: Case>(name: &str, scenario: fn(&Guest<'_, C::F, C::A>)) {
    let (count, noticed) = run::<C>(usize::MAX, scenario);
    assert!(count > 0 && !noticed, "{name}: {count} invalidations");
    for number in 0..count {
        assert!(run::<C>(number, scenario).1, "{name}: nobody misses invalidation {number}");
    }
}

fn unmap<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.map(BASE, RAM, 0x3000, K4);
    (0..2).for_each(|cpu| guest.write(cpu, BASE + 0x1000));
    guest.unmap(BASE + 0x1000, 0x1000);
}

fn unlink<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.map(BASE, RAM, 2 << 20, K4);
    guest.read(1, BASE);
    guest.unmap(BASE, 2 << 20);
    guest.fresh(BASE, 2 << 20);
}

fn protect<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.write(1, BASE);
    guest.write_protect(BASE, 0x1000);
}

fn harvest<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.write(1, BASE);
    let mut bitmap = [0];
    guest.with(|guard, _| guard.harvest(range(BASE, 0x3000), &mut bitmap).unwrap());
    guest.machine.copy(VMID, range(BASE, 0x3000));
    guest.fresh(BASE, 0x3000);
}

/// A log that completes late, for both pages at once.
fn clean<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.map(BASE, RAM, 0x2000, K4);
    guest.write(1, BASE);
    let clean = |gpa| {
        guest.with(|guard, _| {
            guard.clean(range(gpa, 0x1000)).unwrap();
            guest.tables.shootdown(guard).unwrap()
        })
    };
    let mut late = clean(BASE);
    guest.write(1, BASE + 0x1000);
    late.merge(clean(BASE + 0x1000));
    late.complete();
    guest.machine.copy(VMID, range(BASE, 0x2000));
    guest.fresh(BASE, 0x2000);
}

fn age<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.read(1, BASE);
    let (mut young, mut unanswered) = ([0], [0]);
    let all = range(BASE, 0x3000);
    guest.with(|guard, _| {
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let how = AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb: true };
        guard.age(all, &mut ages, how).unwrap();
    });
    guest.machine.seen(VMID, all);
    guest.read(1, BASE);
    guest
        .machine
        .claim_old(VMID, all, |gpa| guest.look(gpa).is_some_and(|leaf| leaf.attributes.accessed));
}

fn collapse<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    guest.map(BASE, RAM, 2 << 20, K4);
    guest.write(1, BASE);
    guest.collapse(BASE, 2 << 20, M2);
    guest.fresh(BASE, 2 << 20);
}

fn replace_table<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    let (old, block) = (2 << 20, RAM + (8 << 20));
    guest.map(BASE, RAM, old, K4);
    guest.write(1, BASE);
    let done = guest
        .with(|guard, _| guard.replace_table(slat::Gpa(BASE), M2, Hpa(block), Attributes::RAM));
    assert_eq!(done, Ok(Some(old)));
    guest.machine.take_back(Hpa(RAM), old);
    guest.write(1, BASE);
    guest.fresh(BASE, old);
}

fn replace<F: Format, A: Arch>(guest: &Guest<'_, F, A>) {
    let read = Attributes { write: false, ..Attributes::RAM };
    guest.map_as(BASE, RAM, 0x3000, K4, read);
    guest.read(1, BASE + 0x1000);
    let (page, from, to) = (range(BASE + 0x1000, 0x1000), RAM + 0x1000, RAM + 0x10_0000);
    guest.with(|guard, _| guard.replace(page, Hpa(from), Hpa(to), read).unwrap());
    guest.machine.take_back(Hpa(from), 0x1000);
    guest.read(1, BASE + 0x1000);
}

fn no_invalidation_can_be_left_out<C: Case>() {
    each::<C>("unmap", unmap);
    each::<C>("unlink", unlink);
    each::<C>("protect", protect);
    if C::format().encode(CLEAN).is_ok() {
        each::<C>("harvest", harvest);
        each::<C>("clean", clean);
    }
    each::<C>("age", age);
    each::<C>("collapse", collapse);
    each::<C>("replace", replace);
    each::<C>("replace a table", replace_table);
}

on_every_format!(no_invalidation_can_be_left_out);
