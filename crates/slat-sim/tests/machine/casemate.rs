//! The engine before another judge: Casemate, an executable model of the discipline that Arm
//! demands, which others wrote. `CASEMATE_CHECK` names its `casemate-check`; without it these tests
//! say so, and check nothing.
//!
//! What Casemate does not judge, or forbids beyond the architecture, is left out: docs/bugs.md.

use crate::common::*;
use slat::{Access, Ageing, Ages, Attributes, Hpa, Invalidation, Member, Owner, Removals, Skip};
use slat::{TableCache, Tables};
use slat_sim::{Arm, Barrier, Firmware, Machine, Tlbi};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What Casemate says of a trace.
#[derive(PartialEq, Eq, Debug)]
enum Verdict {
    Accepted,
    /// Which rule is broken.
    Rejected(String),
}

/// The rules that are Casemate's answer to a fault; whatever else it says is no verdict.
const RULES: [&str; 6] = [
    "BBM invalid unclean->valid",
    "BBM valid->valid",
    "BBM write table descriptor with unclean children",
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
    /// Which invalidation is left out, and how many there were until now.
    static LEFT_OUT: Cell<usize> = const { Cell::new(usize::MAX) };
    static SEEN: Cell<usize> = const { Cell::new(0) };
    static SEQUENCE: Cell<Instructions> = const { Cell::new(by_address) };
}

type Instructions = fn(&Machine<Arm>, &Invalidation);

/// What the engine's sequencer says.
fn by_address(machine: &Machine<Arm>, what: &Invalidation) {
    (slat_sim::firmware::ARM.invalidate)(machine, what);
}

/// All of the guest, whatever is asked for: Casemate does not see that an invalidation by address
/// takes links.
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

/// A scenario, its invalidation `number` left out; how many there were.
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
    // The end of the guest is its own invalidation's, and is never faulty.
    LEFT_OUT.set(usize::MAX);
    end(guest);
    if number == usize::MAX {
        clean(&machine);
    }
    let name = format!("{}-{}-{number}", operation.name.replace(' ', "-"), arch.bbm);
    (seen, judge(checker, &machine, &name))
}

/// All CPUs leave the guest, and its tables are given back.
fn end(guest: ArmGuest<'_>) {
    let machine = guest.machine;
    (0..machine.cpus()).for_each(|cpu| machine.cpu(cpu).unload());
    // SAFETY: no CPU has the root loaded, nor will.
    unsafe { guest.tables.deactivate() }.destroy();
}

struct Operation {
    name: &'static str,
    run: fn(&ArmGuest<'_>),
    /// It unlinks tables, which Casemate sees only where all of the guest is invalidated.
    unlinks: bool,
    /// Casemate sees whether its invalidations are there.
    judged: bool,
}

const OPERATIONS: [Operation; 3] = [
    Operation { name: "map", run: map, unlinks: false, judged: true },
    Operation { name: "unmap", run: unmap, unlinks: false, judged: true },
    Operation { name: "unmap a block", run: unmap_block, unlinks: false, judged: true },
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

#[test]
fn casemate_accepts_every_operation_and_misses_every_invalidation() {
    let Some(checker) = checker() else { return };
    for bbm in [0, 1] {
        let arch = Arm { bbm, ..arm() };
        for operation in &OPERATIONS {
            let name = operation.name;
            for sequence in [by_address as Instructions, whole] {
                if operation.unlinks && sequence as usize == by_address as usize {
                    continue;
                }
                let (count, verdict) = run(&checker, arch, operation, sequence, usize::MAX);
                assert_eq!(verdict, Verdict::Accepted, "{name}");
                for number in (0..count).filter(|_| operation.judged) {
                    let (_, verdict) = run(&checker, arch, operation, sequence, number);
                    assert_ne!(verdict, Verdict::Accepted, "{name}, without {number} of {count}");
                }
            }
        }
    }
}
