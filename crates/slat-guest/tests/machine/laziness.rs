//! Each kind of laziness finds a bug that nothing else finds: the machine finds it with all
//! switches on, and misses it with one off.

use crate::cases::{Case, Hart};
use crate::common::*;
use slat::format::arm64::tlbi::Instruction;
use slat::{BreakBeforeMake, Gpa, Hpa, Invalidation, Platform};
use slat_sim::{Access, Arm, Ept, Firmware, Kind, Lazy, Machine, firmware};

/// Checks that the machine finds the bug with all switches on, as `kind`, and misses it with
/// `switch` off.
fn escapes(bug: impl Fn(Lazy) -> Machine<Arm>, kind: Kind, switch: fn(&mut Lazy)) {
    caught(&bug(Lazy::ALL), kind);
    clean(&bug(without(switch)));
}

fn skipping(machine: &Machine<Arm>, what: &Invalidation, skip: impl Fn(&Instruction) -> bool) {
    machine.vttbr(what.vmid);
    machine.sequence(what).filter(|i| !skip(i)).for_each(|i| machine.execute(i));
}

/// Unmaps a page and takes its memory back, on a platform that invalidates by `invalidate`.
fn unmap_a_page(lazy: Lazy, invalidate: fn(&Machine<Arm>, &Invalidation)) -> Machine<Arm> {
    let machine = arm_machine().firmware(invalidating(invalidate)).lazy(lazy);
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x2000, K4);
    (0..2).for_each(|cpu| guest.write(cpu, BASE));
    guest.unmap(BASE, 0x1000);
    let _ = machine.cpu(1).write(BASE);
    machine
}

#[test]
fn tlb() {
    // The platform invalidates entries of both stages only.
    let bug = |lazy| {
        unmap_a_page(lazy, |machine, what| {
            skipping(machine, what, |i| {
                matches!(i, Instruction::Ipas2e1is(_) | Instruction::Ipas2le1is(_))
            });
        })
    };
    // If the second stage's entries are not cached, those of both stages cannot come back from
    // them.
    escapes(bug, Kind::FreedMemory, |lazy| lazy.tlb = false);
}

#[test]
fn combined() {
    let bug = |lazy| {
        unmap_a_page(lazy, |machine, what| {
            skipping(machine, what, |i| *i == Instruction::Vmalle1is);
        })
    };
    escapes(bug, Kind::FreedMemory, |lazy| lazy.combined = false);
}

#[test]
fn walk_cache() {
    let bug = |lazy| {
        let last_level = invalidating(|machine: &Machine<Arm>, what| {
            machine.vttbr(what.vmid);
            for instruction in machine.sequence(&Invalidation { tables: false, ..*what }) {
                machine.execute(match instruction {
                    Instruction::Vmalls12e1is => Instruction::Vmalle1is,
                    other => other,
                });
            }
        });
        let machine = arm_machine().firmware(last_level).lazy(lazy);
        let guest = Guest::arm(&machine);
        guest.map(BASE, RAM, 2 << 20, K4);
        guest.read(1, BASE);
        // The table above stays linked, so that the invalidation is by address.
        guest.map(BASE + (2 << 20), RAM + (2 << 20), 0x1000, K4);
        guest.unmap(BASE, 2 << 20);
        assert_eq!(guest.tables.reclaim(), 1);
        machine
    };
    escapes(bug, Kind::FreedTable, |lazy| lazy.walk_cache = false);
}

#[test]
fn walk_cache_with_rights() {
    // On x86, the right to write is taken from a table, and links are not invalidated.
    let bug = |lazy| {
        let machine = Machine::new(Ept::default(), 2).lazy(lazy);
        let guest = Guest::ept(&machine);
        guest.map_clean(BASE, RAM, 0x2000, K4);
        guest.read(1, BASE);
        let link = machine.above(VMID, &guest.place(BASE));
        machine.poke(link.table, link.index, link.raw & !0b10);
        // Only leaves are invalidated: no instruction does only that, but a wrong emulation might.
        for cpu in 0..2 {
            machine.forget(cpu, VMID, range(BASE, 0x2000));
        }
        machine.protect(VMID, range(BASE, 0x2000));
        machine
    };
    caught(&bug(Lazy::ALL), Kind::RevokedRight);
    clean(&bug(without(|lazy| lazy.walk_cache = false)));
}

#[test]
fn late_stores() {
    let bug = |lazy| {
        let faulty = Firmware {
            publish: |_| (),
            invalidate: |machine: &Machine<Arm>, what| {
                skipping(machine, what, |i| *i == Instruction::DsbIshst);
            },
            ..firmware::ARM
        };
        let machine = arm_machine().firmware(faulty).lazy(lazy);
        let guest = Guest::arm(&machine);
        guest.map(BASE, RAM, 0x2000, K4);
        guest.write(1, BASE);
        guest.unmap(BASE, 0x1000);
        machine
    };
    escapes(bug, Kind::FreedMemory, |lazy| lazy.late_stores = false);
}

#[test]
fn late_invalidation() {
    let bug = |lazy| {
        unmap_a_page(lazy, |machine, what| skipping(machine, what, |i| *i == Instruction::DsbIsh))
    };
    escapes(bug, Kind::FreedMemory, |lazy| lazy.late_invalidation = false);
}

#[test]
fn speculation() {
    // No access uses the page while its address changes without a break.
    let bug = |lazy| {
        let machine = arm_machine().lazy(lazy);
        let guest = Guest::arm(&machine);
        guest.map(BASE, RAM, 0x1000, K4);
        guest.poke(BASE, |raw| raw + 0x1000);
        machine.publish();
        guest.flush();
        guest.read(0, BASE);
        machine
    };
    escapes(bug, Kind::BreakBeforeMake, |lazy| lazy.speculation = false);
}

#[test]
fn silent_writes() {
    // The page is cleaned without an invalidation.
    let bug = |lazy| {
        let machine = arm_machine().lazy(lazy);
        let guest = Guest::arm(&machine);
        guest.map(BASE, RAM, 0x1000, K4);
        guest.write(0, BASE);
        guest.poke(BASE, |raw| raw & !(1 << 7));
        machine.publish();
        machine.copy(VMID, range(BASE, 0x1000));
        guest.write(0, BASE);
        guest.check_dirty(BASE, 0x1000);
        machine
    };
    escapes(bug, Kind::LostDirty, |lazy| lazy.silent_writes = false);
}

#[test]
fn stale_faults() {
    // A right is given back without an invalidation.
    let bug = |lazy| {
        let machine = arm_machine().lazy(lazy);
        let guest = Guest::arm(&machine);
        guest.map(BASE, RAM, 0x1000, K4);
        guest.write_protect(BASE, 0x1000);
        guest.read(0, BASE);
        machine.unprotect(VMID, range(BASE, 0x1000));
        guest.poke(BASE, |raw| raw | 1 << 7);
        machine.publish();
        machine.claim_progress(0, Gpa(BASE), Access::Write);
        machine
    };
    escapes(bug, Kind::Livelock, |lazy| lazy.stale_faults = false);
}

#[test]
fn invalid_entries() {
    // A hart that faulted resumes without a fence.
    let bug = |lazy| {
        let faulty = Firmware { resume: |_, _, _| (), ..firmware::RISCV };
        let machine = Hart::machine(2).firmware(faulty).lazy(lazy);
        let guest = Hart::guest(&machine);
        let _ = machine.cpu(0).read(BASE);
        guest.map(BASE, RAM, 0x1000, K4);
        machine.claim_progress(0, Gpa(BASE), Access::Read);
        machine
    };
    caught(&bug(Lazy::ALL), Kind::Livelock);
    clean(&bug(without(|lazy| lazy.invalid_entries = false)));
}

#[test]
fn conflict_aborts() {
    // The platform declares level 3, and its CPUs have level 2.
    let bug = |lazy| {
        let arch = Arm { bbm: 2, ..arm() };
        let machine = Machine::new(arch, 2).declaring(BreakBeforeMake::Never).lazy(lazy);
        let guest = Guest::arm(&machine);
        guest.map(BASE, RAM, 2 << 20, M2);
        machine.meanwhile(|machine, _| _ = machine.cpu(0).read(BASE + 0x1000));
        guest.split(BASE, 2 << 20, K4);
        machine
    };
    escapes(bug, Kind::SizeConflict, |lazy| lazy.conflict_aborts = false);
}

/// The guest's first access to memory that the host wrote, on a platform without maintenance.
fn careless(lazy: Lazy, access: Access) -> Machine<Arm> {
    let careless = Firmware { maintain: |_, _, _, _| (), ..firmware::ARM };
    let machine = arm_machine().firmware(careless).lazy(lazy);
    let guest = Guest::arm(&machine);
    machine.host_write(Hpa(RAM));
    guest.map(BASE, RAM, 0x1000, K4);
    machine.cpu(0).access_uncached(BASE, access).unwrap();
    machine
}

#[test]
fn data_cache() {
    let bug = |lazy| careless(lazy, Access::Read);
    escapes(bug, Kind::MissingMaintenance, |lazy| lazy.data_cache = false);
}

#[test]
fn instruction_cache() {
    let bug = |lazy| careless(lazy, Access::Execute);
    escapes(bug, Kind::MissingMaintenance, |lazy| lazy.instruction_cache = false);
}

#[test]
fn a_machine_without_any_laziness_finds_none_of_these() {
    let none = |bug: fn(Lazy) -> Machine<Arm>| clean(&bug(Lazy::NONE));
    none(|lazy| unmap_a_page(lazy, |_, _| ()));
    none(|lazy| careless(lazy, Access::Read));
    none(|lazy| careless(lazy, Access::Execute));
}
