//! Checks of the engine's stores by Casemate, an executable model of Arm's rules, written by
//! others. `CASEMATE_CHECK` is the path of its `casemate-check`. Without it, these tests say so,
//! and check nothing.
//!
//! Operations that Casemate does not check, or forbids beyond the architecture, are left out: see
//! docs/bugs.md.

use crate::common::*;
use slat::format::arm64::tlbi::Instruction;
use slat::{
    Access, Ageing, Ages, Attributes, BreakBeforeMake, Frame, Hpa, Invalidation, Owner, Platform,
    Skip,
};
use slat_sim::{Arm, Firmware, Machine};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Casemate's result for a trace.
#[derive(PartialEq, Eq, Debug)]
enum Verdict {
    Accepted,
    /// The rule that is broken.
    Rejected(String),
}

/// Casemate's messages for broken rules. A rejection with another message fails the test.
const RULES: [&str; 7] = [
    "BBM invalid unclean->valid",
    "BBM valid->valid",
    "BBM write table descriptor with unclean children",
    "Wrote on a page with an unclean parent",
    "can't free location which is currently a PTE",
    "cannot release table",
    "double-use pte",
];

fn checker() -> Option<PathBuf> {
    let path = std::env::var_os("CASEMATE_CHECK").map(PathBuf::from);
    if path.is_none() {
        eprintln!("skipped: CASEMATE_CHECK does not name a `casemate-check`");
    }
    path
}

fn judge(checker: &Path, machine: &Machine<Arm>, name: &str) -> Verdict {
    let trace = machine.trace().unwrap();
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.trace"));
    std::fs::write(&file, &trace).unwrap();
    let checked = Command::new(checker).args(["-R", "-q"]).arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    let said = said.lines().rev().find(|line| line.starts_with("! ")).unwrap_or_default();
    match checked.status.code() {
        Some(0) => Verdict::Accepted,
        Some(1) if RULES.iter().any(|rule| said.contains(rule)) => {
            Verdict::Rejected(said.to_owned())
        }
        _ => panic!("{name}: {checked:?}, of {}", file.display()),
    }
}

thread_local! {
    /// The number of the invalidation to leave out; `SEEN` counts the invalidations so far.
    static LEFT_OUT: Cell<usize> = const { Cell::new(usize::MAX) };
    static SEEN: Cell<usize> = const { Cell::new(0) };
    static SEQUENCE: Cell<Instructions> = const { Cell::new(by_address) };
}

type Scenario = fn(&ArmGuest<'_>);
type Instructions = fn(&Machine<Arm>, &Invalidation);

/// Executes what the engine's sequencer gives.
fn by_address(machine: &Machine<Arm>, what: &Invalidation) {
    (slat_sim::firmware::ARM.invalidate)(machine, what);
}

/// Invalidates the whole guest, even if the engine asks for less: Casemate does not see that an
/// invalidation by address covers links.
fn whole(machine: &Machine<Arm>, what: &Invalidation) {
    by_address(machine, &Invalidation { range: None, leaf: None, tables: true, ..*what });
}

fn invalidate(machine: &Machine<Arm>, what: &Invalidation) {
    let number = SEEN.replace(SEEN.get() + 1);
    if number == LEFT_OUT.get() {
        slat::Platform::publish(machine);
    } else {
        SEQUENCE.get()(machine, what);
    }
}

fn machine(arch: Arm) -> Machine<Arm> {
    let firmware = Firmware { invalidate, ..slat_sim::firmware::ARM };
    Machine::new(arch, 2).firmware(firmware).tracing()
}

/// Runs a scenario without its invalidation `number`; returns the number of invalidations.
fn run(
    checker: &Path,
    arch: Arm,
    operation: &Operation,
    sequence: Instructions,
    number: usize,
) -> (usize, Verdict) {
    LEFT_OUT.set(number);
    SEEN.set(0);
    SEQUENCE.set(sequence);
    let machine = machine(arch);
    let guest = Guest::arm(&machine);
    (operation.run)(&guest);
    let seen = SEEN.get();
    // The end of the guest has an invalidation of its own, which is never left out.
    LEFT_OUT.set(usize::MAX);
    end(guest);
    if number == usize::MAX {
        clean(&machine);
    }
    let name = format!("{}-{}-{number}", operation.name.replace(' ', "-"), arch.bbm);
    (seen, judge(checker, &machine, &name))
}

/// Unloads the guest from all CPUs, and frees its tables.
fn end(guest: ArmGuest<'_>) {
    let machine = guest.machine;
    (0..machine.cpus()).for_each(|cpu| machine.cpu(cpu).unload());
    // SAFETY: no CPU has the root loaded, nor will.
    unsafe { guest.tables.deactivate() }.destroy();
}

struct Operation {
    name: &'static str,
    run: Scenario,
    /// It unlinks tables, which Casemate accepts only if the whole guest is invalidated.
    unlinks: bool,
    /// Casemate rejects its trace if an invalidation is missing.
    judged: bool,
}

const OPERATIONS: [Operation; 17] = [
    Operation { name: "map", run: map, unlinks: false, judged: true },
    Operation { name: "reserve", run: reserve, unlinks: false, judged: true },
    Operation { name: "map contiguous", run: contiguous, unlinks: false, judged: true },
    Operation { name: "unmap", run: unmap, unlinks: false, judged: true },
    Operation { name: "unmap a block", run: unmap_block, unlinks: false, judged: true },
    Operation { name: "prune", run: prune, unlinks: true, judged: true },
    Operation { name: "split", run: split, unlinks: false, judged: true },
    Operation { name: "split together", run: split_together, unlinks: false, judged: true },
    Operation { name: "collapse", run: collapse, unlinks: true, judged: true },
    Operation { name: "replace", run: replace, unlinks: false, judged: true },
    Operation { name: "owner", run: owner, unlinks: false, judged: true },
    Operation { name: "protect", run: protect, unlinks: false, judged: false },
    Operation { name: "protect tables", run: protect_tables, unlinks: true, judged: false },
    Operation { name: "relax", run: relax, unlinks: false, judged: false },
    Operation { name: "harvest", run: harvest, unlinks: false, judged: false },
    Operation { name: "age", run: age, unlinks: false, judged: false },
    Operation { name: "software bits", run: software, unlinks: false, judged: false },
];

fn map(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.map(BASE + (2 << 20), RAM + (2 << 20), 2 << 20, M2);
    guest.write(0, BASE);
    guest.write(1, BASE + (2 << 20));
}

fn unmap(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.write(1, BASE + 0x1000);
    guest.unmap(BASE + 0x1000, 0x1000);
    guest.map(BASE + 0x1000, RAM + 0x10_0000, 0x1000, K4);
}

fn unmap_block(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 4 << 20, M2);
    guest.write(1, BASE);
    guest.unmap(BASE, 2 << 20);
    guest.map(BASE, RAM, 2 << 20, M2);
}

fn reserve(guest: &ArmGuest<'_>) {
    guest.with(|guard, cache| {
        let reserved = guard.reserve(slat::Gpa(BASE), K4, cache).unwrap();
        reserved.commit(Hpa(RAM), Attributes::RAM).unwrap();
    });
    guest.write(0, BASE);
}

fn contiguous(guest: &ArmGuest<'_>) {
    guest.with(|guard, cache| {
        let group = range(BASE, 0x1_0000);
        guard.map_contiguous(group, Hpa(RAM), Attributes::RAM, K4, cache).unwrap();
    });
    guest.write(0, BASE);
}

fn prune(guest: &ArmGuest<'_>) {
    guest.map(BASE + (2 << 20), RAM + (2 << 20), 2 << 20, M2);
    guest.with(|guard, cache| {
        let (page, owner) = (range(BASE, 0x1000), Owner::new(7));
        guard.set_owner(page, None, owner, cache).unwrap();
        guard.set_owner(page, owner, None, cache).unwrap();
    });
    assert_eq!(guest.with(|guard, _| guard.prune(range(BASE, 2 << 20)).unwrap()), 1);
    guest.tables.reclaim();
    guest.map(BASE, RAM, 2 << 20, M2);
}

fn split(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 2 << 20, M2);
    guest.write(1, BASE);
    guest.split(BASE, 2 << 20, K4);
    guest.write(1, BASE + 0x1000);
}

fn split_together(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 4 << 20, M2);
    guest.write(1, BASE);
    guest.with(|guard, cache| {
        guard.split_together(range(BASE, 4 << 20), K4, cache, 2).unwrap();
    });
    guest.write(1, BASE + 0x1000);
}

fn collapse(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 2 << 20, K4);
    guest.write(1, BASE);
    guest.collapse(BASE, 2 << 20, M2);
    guest.tables.reclaim();
    guest.write(0, BASE + 0x1000);
}

fn replace(guest: &ArmGuest<'_>) {
    let read = Attributes { write: false, ..Attributes::RAM };
    guest.map_as(BASE, RAM, 0x3000, K4, read);
    guest.read(1, BASE + 0x1000);
    let (page, from, to) = (range(BASE + 0x1000, 0x1000), RAM + 0x1000, RAM + 0x10_0000);
    guest.with(|guard, _| guard.replace(page, Hpa(from), Hpa(to), read).unwrap());
    guest.read(1, BASE + 0x1000);
}

fn owner(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.write(1, BASE);
    guest.unmap(BASE, 0x1000);
    guest.with(|guard, cache| {
        let (page, owner) = (range(BASE, 0x1000), Owner::new(7));
        guard.set_owner(page, None, owner, cache).unwrap();
        guard.set_owner(page, owner, None, cache).unwrap();
    });
    guest.map(BASE, RAM + 0x10_0000, 0x1000, K4);
}

fn protect(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.write(1, BASE);
    guest.write_protect(BASE, 0x1000);
}

fn protect_tables(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.map(BASE + (2 << 20), RAM + (2 << 20), 2 << 20, M2);
    guest.write(1, BASE);
    guest.with(|guard, _| guard.write_protect_subtrees(range(BASE, 4 << 20)).unwrap());
    guest.machine.protect(VMID, range(BASE, 4 << 20));
}

fn relax(guest: &ArmGuest<'_>) {
    guest.map_as(BASE, RAM, 0x3000, K4, Attributes { write: false, ..Attributes::RAM });
    guest.read(1, BASE);
    guest.relax(BASE, 0x1000, Access::Write);
    guest.write(1, BASE);
}

fn harvest(guest: &ArmGuest<'_>) {
    guest.map_clean(BASE, RAM, 0x3000, K4);
    guest.write(1, BASE);
    guest.with(|guard, _| guard.harvest(range(BASE, 0x3000), &mut [0]).unwrap());
    guest.machine.copy(VMID, range(BASE, 0x3000));
    guest.write(0, BASE);
}

fn age(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.read(1, BASE);
    let all = range(BASE, 0x3000);
    guest.with(|guard, _| {
        let mut ages = Ages { young: &mut [0], unanswered: &mut [0] };
        let how = Ageing { clear: true, skip: Skip::Nothing, fresh: true };
        guard.age(all, &mut ages, how).unwrap();
    });
    guest.machine.seen(VMID, all);
    guest.read(1, BASE);
}

fn software(guest: &ArmGuest<'_>) {
    guest.map(BASE, RAM, 0x3000, K4);
    guest.read(1, BASE);
    guest.with(|guard, _| {
        let bit = slat::Software::A;
        guard.set_software(range(BASE, 0x1000), bit, bit).unwrap();
    });
}

/// Returns how the platform invalidates in the trace of `operation`.
fn sequence(operation: &Operation) -> Instructions {
    if operation.unlinks { whole } else { by_address }
}

#[test]
fn casemate_accepts_every_operation() {
    let Some(checker) = checker() else { return };
    let mut wrong = Vec::new();
    for operation in &OPERATIONS {
        for arch in [arm(), Arm { bbm: 1, range_instructions: true, ..arm() }] {
            let (_, verdict) = run(&checker, arch, operation, sequence(operation), usize::MAX);
            if verdict != Verdict::Accepted {
                wrong.push((operation.name, arch.bbm, verdict));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn casemate_misses_every_invalidation_that_is_left_out() {
    let Some(checker) = checker() else { return };
    let (mut wrong, mut left_out) = (Vec::new(), 0);
    for operation in OPERATIONS.iter().filter(|operation| operation.judged) {
        let mut number = 0;
        loop {
            let (count, verdict) = run(&checker, arm(), operation, sequence(operation), number);
            if number >= count {
                break;
            }
            eprintln!("{}, without {number}: {verdict:?}", operation.name);
            if verdict == Verdict::Accepted {
                wrong.push((operation.name, number, count));
            }
            number += 1;
            left_out += 1;
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(left_out >= 8, "{left_out} invalidations");
}

/// Executes the instructions of an invalidation, each of them changed by `change`.
fn executed(
    machine: &Machine<Arm>,
    what: &Invalidation,
    change: impl Fn(Instruction) -> Option<Instruction>,
) {
    machine.vttbr(what.vmid);
    machine.sequence(what).filter_map(change).for_each(|instruction| machine.execute(instruction));
}

const FAULTS: [(&str, Instructions); 9] = [
    ("no barrier before", |machine, what| {
        executed(machine, what, |it| (it != Instruction::DsbIshst).then_some(it));
    }),
    ("no barrier behind", |machine, what| {
        executed(machine, what, |it| (it != Instruction::DsbIsh).then_some(it));
    }),
    ("barriers of stores alone", |machine, what| {
        executed(machine, what, |it| {
            Some(if it == Instruction::DsbIsh { Instruction::DsbIshst } else { it })
        });
    }),
    ("entries of both stages stay", |machine, what| {
        executed(machine, what, |it| (it != Instruction::Vmalle1is).then_some(it));
    }),
    ("both stages alone", |machine, what| {
        executed(machine, what, |it| (!matches!(it, Instruction::Ipas2le1is(_))).then_some(it));
    }),
    ("both stages first", |machine, what| {
        machine.vttbr(what.vmid);
        let (mut first, rest): (Vec<_>, Vec<_>) =
            machine.sequence(what).partition(|it| !matches!(it, Instruction::Ipas2le1is(_)));
        first.splice(4..4, rest);
        first.into_iter().for_each(|instruction| machine.execute(instruction));
    }),
    ("an operand that is not shifted", |machine, what| {
        executed(machine, what, |it| match it {
            Instruction::Ipas2le1is(x) => Some(Instruction::Ipas2le1is(x << 12)),
            other => Some(other),
        });
    }),
    ("the page before", |machine, what| {
        executed(machine, what, |it| match it {
            Instruction::Ipas2le1is(x) => Some(Instruction::Ipas2le1is(x - 1)),
            other => Some(other),
        });
    }),
    ("another guest's", |machine, what| {
        machine.vttbr(slat::Vmid(what.vmid.0 + 1));
        machine.sequence(what).for_each(|instruction| machine.execute(instruction));
    }),
];

#[test]
fn casemate_rejects_every_invalidation_that_is_wrong() {
    let Some(checker) = checker() else { return };
    let mut wrong = Vec::new();
    for (name, fault) in FAULTS {
        let operation = Operation { name, run: replace, unlinks: false, judged: true };
        // No invalidation has this number: all of them are executed, and are wrong.
        let (_, verdict) = run(&checker, arm(), &operation, fault, usize::MAX - 1);
        eprintln!("{name}: {verdict:?}");
        if verdict == Verdict::Accepted {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Stores that do not come from the engine, and break a rule.
const STORES: [(&str, Scenario); 6] = [
    ("a block becomes a table", |guest| {
        guest.map(BASE, RAM, 2 << 20, M2);
        guest.map(BASE + (2 << 20), RAM + (2 << 20), 0x1000, K4);
        let table = guest.machine.allocate(4096).unwrap().hpa();
        (0..512).for_each(|index| guest.machine.poke(table, index, 0));
        guest.poke(BASE, |_| table.0 | 0b11);
    }),
    ("invalid in between, and nobody waited", |guest| {
        guest.map(BASE, RAM, 0x1000, K4);
        let old = guest.place(BASE);
        guest.poke(BASE, |_| 0);
        guest.machine.poke(old.table, old.index, old.raw);
    }),
    ("a table has two links", |guest| {
        guest.map(BASE, RAM, 0x1000, K4);
        let link = guest.machine.above(VMID, &guest.place(BASE));
        guest.machine.poke(link.table, link.index + 1, link.raw);
    }),
    ("a table that is linked is freed", |guest| {
        guest.map(BASE, RAM, 0x1000, K4);
        let table = guest.place(BASE).table;
        // SAFETY: the test breaks the contract on purpose; the machine keeps the memory of freed
        // frames.
        unsafe { guest.machine.free(Frame::from_hpa(table).unwrap(), 4096) };
    }),
    ("a table that was just unlinked is freed", |guest| {
        guest.map(BASE, RAM, 0x1000, K4);
        let leaf = guest.place(BASE);
        let link = guest.machine.above(VMID, &leaf);
        guest.machine.poke(link.table, link.index, 0);
        guest.machine.publish();
        // SAFETY: as above.
        unsafe { guest.machine.free(Frame::from_hpa(leaf.table).unwrap(), 4096) };
    }),
    ("a root that is loaded is freed", |guest| {
        guest.map(BASE, RAM, 0x1000, K4);
        let root = guest.tables.root();
        // SAFETY: as above.
        unsafe { guest.machine.free(Frame::from_hpa(root).unwrap(), 4096) };
    }),
];

#[test]
fn casemate_rejects_stores_that_break_the_rules() {
    let Some(checker) = checker() else { return };
    SEQUENCE.set(by_address);
    LEFT_OUT.set(usize::MAX);
    let mut wrong = Vec::new();
    for (name, stores) in STORES {
        let machine = machine(arm());
        stores(&Guest::arm(&machine));
        let verdict = judge(&checker, &machine, &name.replace(' ', "-"));
        eprintln!("{name}: {verdict:?}");
        if verdict == Verdict::Accepted {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The platform declares what its CPUs do not support.
#[test]
fn casemate_rejects_changes_of_size_that_are_not_broken_first() {
    let Some(checker) = checker() else { return };
    SEQUENCE.set(whole);
    LEFT_OUT.set(usize::MAX);
    for (name, change) in [("live split", split as Scenario), ("live collapse", collapse)] {
        let machine = machine(arm()).declaring(BreakBeforeMake::Never);
        change(&Guest::arm(&machine));
        let verdict = judge(&checker, &machine, &name.replace(' ', "-"));
        assert_ne!(verdict, Verdict::Accepted, "{name}");
    }
}

/// Three threads, each with 2 MiB of the guest. With the main thread, these are as many as Casemate
/// supports.
#[test]
fn casemate_accepts_threads_and_rejects_one_that_waits_for_nothing() {
    let Some(checker) = checker() else { return };
    for (name, faulty) in [("threads", None), ("threads-one-faulty", Some(1))] {
        let machine = machine(arm());
        let guest = Guest::arm(&machine);
        guest.map(BASE + (6 << 20), RAM, 0x1000, K4);
        std::thread::scope(|scope| {
            for index in 0..3 {
                let guest = &guest;
                scope.spawn(move || {
                    SEQUENCE.set(whole);
                    let base = BASE + (index << 21);
                    for round in 0..4 {
                        // The faulty thread leaves out the break of its first split.
                        let number = if faulty == Some(index) { 0 } else { usize::MAX };
                        guest.map(base, RAM + (index << 21), 2 << 20, M2);
                        SEEN.set(0);
                        LEFT_OUT.set(number);
                        guest.split(base, 2 << 20, K4);
                        LEFT_OUT.set(usize::MAX);
                        guest.collapse(base, 2 << 20, M2);
                        guest.unmap(base, 2 << 20);
                        assert!(SEEN.get() >= 3, "round {round} invalidates");
                    }
                });
            }
        });
        SEQUENCE.set(whole);
        end(guest);
        let verdict = judge(&checker, &machine, name);
        assert_eq!(verdict == Verdict::Accepted, faulty.is_none(), "{name}: {verdict:?}");
    }
}
