//! Traces in Casemate's format: the records of its grammar, in the order that its model wants.

use crate::common::*;
use slat_sim::{Machine, Untold};

/// Names of records in order, without those that repeat.
fn names(trace: &str) -> Vec<&str> {
    let name = |line: &'static str| line;
    let _ = name;
    let mut names: Vec<_> =
        trace.lines().map(|line| line.trim_start_matches('(').split(' ').next().unwrap()).collect();
    names.dedup();
    names
}

fn traced() -> String {
    let machine = arm_machine().tracing();
    let guest = Guest::arm(&machine);
    guest.map(BASE, RAM, 0x1000, K4);
    // Its neighbour keeps the table: the page alone is unmapped.
    guest.map(BASE + 0x1000, RAM + 0x1000, 0x1000, K4);
    guest.unmap(BASE, 0x1000);
    clean(&machine);
    machine.trace().unwrap()
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
            // Numbers become their kind.
            let words = fields.split(' ').map(|word| {
                if word.starts_with("0x") { word.find(')').map_or("N", |_| "N)") } else { word }
            });
            words.collect::<Vec<_>>().join(" ")
        };
        let known: &[&str] = match name {
            "mem-init" | "mem-free" => &["(address N) (size N)"],
            "mem-write" => &["(mem-order release) (address N) (value N)"],
            "sysreg-write" => &["(sysreg vttbr_el2) (value N)"],
            "barrier" => &["dsb (kind ish)", "dsb (kind ishst)", "isb"],
            "tlbi" => &["ipas2e1is (value N)", "vmalle1is", "vmalls12e1is"],
            "hint" => &[
                "(kind set_root_lock) (location N) (value N)",
                "(kind set_owner_root) (location N) (value N)",
            ],
            "lock" | "unlock" => &["(address N)"],
            _ => &[],
        };
        assert!(known.contains(&shape.as_str()), "{line}: {shape}");
    }
}

#[test]
fn an_unmapped_page_is_written_published_invalidated_and_waited_for() {
    let trace = traced();
    let last: Vec<_> = trace.lines().rev().take_while(|line| !line.contains("mem-write")).collect();
    let names: Vec<_> = names(&trace).into_iter().rev().take(8).collect();
    assert!(names.contains(&"tlbi"), "{names:?}");
    let order: Vec<_> = last
        .iter()
        .rev()
        .filter(|line| line.contains("tlbi") || line.contains("barrier"))
        .map(|line| {
            ["ishst", "ipas2e1is", "(kind ish)", "vmalle1is", " isb "]
                .into_iter()
                .find(|what| line.contains(what))
                .unwrap()
        })
        .collect();
    let wanted = ["ishst", "ipas2e1is", "(kind ish)", "vmalle1is", "(kind ish)", " isb "];
    assert!(order.windows(wanted.len()).any(|window| window == wanted), "{order:?}");
}

#[test]
fn a_table_is_owned_before_it_is_written_and_written_before_it_is_linked() {
    let trace = traced();
    let writes: Vec<_> = trace.lines().filter(|line| line.starts_with("(mem-write")).collect();
    let value = |line: &str| {
        let value = line.split("(value 0x").nth(1).unwrap();
        u64::from_str_radix(value.split(')').next().unwrap(), 16).unwrap()
    };
    // The page's leaf, then the link to its table, then the link to that table.
    let values: Vec<_> = writes.iter().take(3).map(|line| value(line)).collect();
    assert_eq!(values[0] & 0xf_ffff_f000, RAM);
    assert!(values[1] & 0xff_0000_0000 != 0 && values[2] & 0xff_0000_0000 != 0, "{values:x?}");
}

#[test]
fn a_machine_that_was_not_asked_records_nothing() {
    let machine: Machine<_> = arm_machine();
    Guest::arm(&machine).map(BASE, RAM, 0x1000, K4);
    assert_eq!(machine.trace(), Err(Untold::NotRecorded));
}
