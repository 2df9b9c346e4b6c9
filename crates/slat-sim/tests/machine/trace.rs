//! Traces in Casemate's format, checked against their documentation. These tests do not need
//! Casemate.

use crate::common::*;
use slat::format::arm64::tlbi::Instruction;
use slat::{Attributes, Hpa, Platform, Vmid};
use slat_sim::{Arm, Machine, Tlbi, Untold};
use std::collections::BTreeMap;

fn traced() -> String {
    let machine = arm_machine().tracing();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    // The next page keeps the table, so that only a page is unmapped.
    guest.map(BASE + 0x1000, RAM + 0x1000, 0x1000, K4);
    guest.unmap(BASE, 0x1000);
    (0..2).for_each(|cpu| machine.cpu(cpu).unload());
    // SAFETY: no CPU has the root loaded, nor will.
    unsafe { guest.tables.deactivate() }.destroy();
    clean(&machine);
    machine.trace().unwrap()
}

/// Thread, address and value of each store, in the order of the trace.
fn stores(trace: &str) -> Vec<(usize, u64, u64)> {
    let stores = trace.lines().filter(|line| line.starts_with("(mem-write"));
    let field = |line: &str, name: &str| {
        let value = line.split(name).nth(1).unwrap().split(')').next().unwrap();
        u64::from_str_radix(value.trim_start_matches("0x"), 16).unwrap()
    };
    stores
        .map(|line| {
            (field(line, "(tid ") as usize, field(line, "(address "), field(line, "(value "))
        })
        .collect()
}

#[test]
fn every_record_has_the_fields_of_the_grammar_in_order() {
    let trace = traced();
    for (number, line) in trace.lines().enumerate() {
        let (name, rest) = line[1..].split_once(' ').unwrap();
        let common = format!("(id {number}) (tid 0) ");
        let fields = rest.strip_prefix(&common).expect(line);
        let fields = fields.strip_suffix(" (src \"slat:0\"))").expect(line);
        let shape: String = {
            // Numbers are replaced by N.
            let words = fields.split(' ').map(|word| {
                if word.starts_with("0x") { word.find(')').map_or("N", |_| "N)") } else { word }
            });
            words.collect::<Vec<_>>().join(" ")
        };
        let known: &[&str] = match name {
            "mem-init" | "mem-free" => &["(address N) (size N)"],
            "mem-write" => &[
                "(mem-order plain) (address N) (value N)",
                "(mem-order release) (address N) (value N)",
            ],
            "sysreg-write" => &["(sysreg vtcr_el2) (value N)", "(sysreg vttbr_el2) (value N)"],
            "barrier" => &["dsb (kind ish)", "dsb (kind ishst)", "isb"],
            "tlbi" => &["ipas2e1is (value N)", "vmalle1is", "vmalls12e1is"],
            "hint" => &["(kind release_table) (location N) (value N)"],
            _ => &[],
        };
        assert!(known.contains(&shape.as_str()), "{line}: {shape}");
    }
}

#[test]
fn an_unmapped_page_is_written_published_invalidated_and_waited_for() {
    let trace = traced();
    let what = ["mem-write", "ishst", "ipas2e1is", "(kind ish)", "vmalle1is", " isb "];
    let order: Vec<_> = trace
        .lines()
        .filter_map(|line| what.into_iter().find(|what| line.contains(what)))
        .collect();
    let wanted =
        ["mem-write", "ishst", "ipas2e1is", "(kind ish)", "vmalle1is", "(kind ish)", " isb "];
    assert!(order.windows(wanted.len()).any(|window| window == wanted), "{order:?}");
}

#[test]
fn a_root_is_given_up_before_its_tables_are_freed() {
    let trace = traced();
    let (_, behind) = trace.split_once("release_table").unwrap();
    let behind: Vec<_> = behind.lines().skip(1).collect();
    assert_eq!(behind.len(), 3, "the page's table, the one above, the root: {behind:#?}");
    assert!(behind.iter().all(|line| line.starts_with("(mem-free")), "{behind:#?}");
}

/// All ways in which the engine stores: to tables that are live, new, inactive, or exclusive.
#[test]
fn the_stores_of_a_trace_in_order_make_the_tables() {
    let machine = arm_machine().tracing();
    machine.give(Hpa(RAM), 64 << 20);
    let mut inactive = slat::Inactive::new(arm64::<12>(), VMID, BITS, &machine).unwrap();
    let mut storage = [const { None }; 8];
    let mut cache = slat::TableCache::new(&machine, &mut storage);
    cache.fill(6).unwrap();
    let pages = range(BASE + (8 << 20), 0x8_0000);
    inactive.map(pages, Hpa(RAM), Attributes::RAM, K4, &mut cache).unwrap();
    drop(cache);
    inactive.write_protect(range(BASE + (8 << 20), 0x4_0000)).unwrap();
    let mut guest = Guest { machine: &machine, tables: inactive.activate(), consumers: Vec::new() };
    (0..2).for_each(|cpu| machine.cpu(cpu).load(VMID, guest.tables.root()));
    guest.tables.exclusive().write_protect(range(BASE + (8 << 20), 0x8_0000)).unwrap();
    guest.map(BASE, RAM + (2 << 20), 2 << 20, M2);
    guest.write(1, BASE);
    guest.split(BASE, 2 << 20, K4);
    guest.collapse(BASE, 2 << 20, M2);
    guest.split(BASE, 2 << 20, K4);
    guest.unmap(BASE, 0x1000);
    guest.write_protect(BASE + 0x1000, 0x3000);
    let trace = machine.trace().unwrap();
    let replayed: BTreeMap<_, _> =
        stores(&trace).into_iter().map(|(_, address, value)| (address, value)).collect();
    let freed = |table: u64| {
        let record = format!("(address {table:#x}) (size");
        trace.lines().any(|line| line.starts_with("(mem-free") && line.contains(&record))
    };
    let mut tables: Vec<_> = replayed.keys().map(|address| address & !0xfff).collect();
    tables.dedup();
    tables.retain(|table| !freed(*table));
    assert!(tables.contains(&guest.tables.root().0) && tables.len() >= 4, "{tables:#x?}");
    for table in tables {
        for index in 0..512 {
            let pte = machine.peek(Hpa(table), index);
            let stored = replayed.get(&(table + 8 * index as u64));
            assert_eq!(stored, Some(&pte), "entry {index} of {table:#x}");
        }
    }
}

#[test]
fn an_entry_that_is_invalid_for_a_moment_is_so_in_the_trace() {
    let machine = arm_machine().tracing();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    let leaf = guest.place(BASE);
    machine.poke(leaf.table, leaf.index, 0);
    machine.poke(leaf.table, leaf.index, leaf.raw);
    // A table that no entry links.
    let table = machine.allocate(4096).unwrap().hpa();
    machine.poke(table, 3, 0x18);
    let stored: Vec<_> = stores(&machine.trace().unwrap());
    let address = leaf.table.0 + 8 * leaf.index as u64;
    assert_eq!(
        stored[stored.len() - 3..],
        [(0, address, 0), (0, address, leaf.raw), (0, table.0 + 24, 0x18)]
    );
}

#[test]
fn stores_of_threads_are_in_the_order_in_which_they_happened_and_under_their_threads() {
    const ROUNDS: u64 = 500;
    let machine = arm_machine().tracing();
    let frame = machine.allocate(4096).unwrap();
    machine.poke(frame.hpa(), 0, 0);
    std::thread::scope(|scope| {
        for own in 1..4 {
            let (machine, table) = (&machine, frame.hpa());
            scope.spawn(move || {
                // SAFETY: the frame has 512 entries, and lives as long as the machine.
                let shared = unsafe { machine.entries(table).as_ref() };
                for round in 0..ROUNDS {
                    let mut old = shared.load();
                    while let Err(found) = shared.exchange(old, old + 1) {
                        old = found;
                    }
                    machine.poke(table, own, round << 1);
                }
            });
        }
    });
    let stored = stores(&machine.trace().unwrap());
    let at = |index: u64| {
        let address = frame.hpa().0 + 8 * index;
        stored.iter().filter(move |store| store.1 == address)
    };
    for own in 1..4 {
        let values: Vec<_> = at(own).map(|store| store.2).collect();
        assert_eq!(values, (0..ROUNDS).map(|round| round << 1).collect::<Vec<_>>());
        let threads: std::collections::BTreeSet<_> = at(own).map(|store| store.0).collect();
        assert_eq!(threads.len(), 1, "one thread's own entry");
    }
    let shared: Vec<_> = at(0).map(|store| store.2).collect();
    assert_eq!(shared, (0..=3 * ROUNDS).collect::<Vec<_>>());
}

fn refused(arch: Arm, instruction: Option<Instruction>) -> Untold {
    let machine = Machine::new(arch, 2).tracing();
    machine.vttbr(VMID);
    instruction.into_iter().for_each(|instruction| machine.execute(instruction));
    machine.trace().unwrap_err()
}

#[test]
fn what_casemate_has_no_word_for_is_refused() {
    use Instruction::*;
    let local = [
        (Ipas2e1(1), Tlbi::Ipas2e1),
        (Ipas2le1(1), Tlbi::Ipas2le1),
        (Ripas2e1(1), Tlbi::Ripas2e1),
        (Ripas2le1(1), Tlbi::Ripas2le1),
        (Vmalle1, Tlbi::Vmalle1),
        (Vmalls12e1, Tlbi::Vmalls12e1),
    ];
    for (instruction, op) in local {
        assert_eq!(refused(arm(), Some(instruction)), Untold::Local(op));
    }
    for barrier in [DsbNsh, DsbNshst] {
        assert!(matches!(refused(arm(), Some(barrier)), Untold::Barrier(_)));
    }
    // 32 * 2^16 pages.
    let range = 0b01 << 46 | 3 << 44 | 31 << 39;
    assert_eq!(refused(arm(), Some(Ripas2e1is(range))), Untold::Range(32 << 16));
    let wide = Arm::new(12, 52).with_lpa2();
    for arch in [Arm::new(14, BITS), Arm::new(16, BITS), Arm::new(12, 40), Arm::new(12, 33), wide] {
        let refusal = refused(arch, None);
        assert!(matches!(refusal, Untold::Tables { .. }), "{arch:?}: {refusal}");
    }
    for bits in [30, 35, 39, 44, 48] {
        let machine = Machine::new(Arm::new(12, bits), 1).tracing();
        assert_eq!(machine.trace(), Ok(String::new()), "{bits} bits");
    }
}

#[test]
fn a_fifth_thread_is_refused() {
    let machine = arm_machine().tracing();
    for threads in 1..=5 {
        std::thread::scope(|scope| _ = scope.spawn(|| machine.vttbr(Vmid(1))));
        assert_eq!(machine.trace().is_err(), threads == 5);
    }
    assert_eq!(machine.trace(), Err(Untold::Threads(5)));
}

#[test]
fn a_machine_that_was_not_asked_records_nothing() {
    let machine: Machine<_> = arm_machine();
    Guest::arm(&machine).map(BASE, RAM, 0x1000, K4);
    assert_eq!(machine.trace(), Err(Untold::NotRecorded));
}
