//! Differences between the hosts of two runs: the machine itself, and settings of it.

use super::run::Run;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// The facts about the host that belong to the machine itself.
const MACHINE: [&str; 6] = [
    "/cpu/model",
    "/cpu/architecture",
    "/cpu/usable",
    "/memory/total",
    "/virtualisation/hypervisor",
    "/virtualisation/product",
];

/// Returns the differences of the machines: name, first, second.
pub(super) fn machines(first: &Run, second: &Run) -> Vec<[String; 3]> {
    MACHINE
        .iter()
        .filter_map(|path| {
            let (a, b) = (first.host.pointer(path), second.host.pointer(path));
            // Kernels reserve different amounts of memory.
            let close = *path == "/memory/total"
                && a.and_then(Value::as_f64)
                    .zip(b.and_then(Value::as_f64))
                    .is_some_and(|(a, b)| (a - b).abs() <= a.max(b) * 0.02);
            (a != b && !close).then(|| [path[1..].replace('/', " "), shown(a), shown(b)])
        })
        .collect()
}

/// Returns differences of the kernel, module parameters, settings of the host, tool and command
/// line.
pub(super) fn variables(first: &Run, second: &Run) -> Vec<[String; 3]> {
    let mut found = Vec::new();
    let mut say = |name: &str, a: Option<&Value>, b: Option<&Value>| {
        if a != b {
            found.push([name.to_owned(), shown(a), shown(b)]);
        }
    };
    say("tool", Some(&first.tool), Some(&second.tool));
    for path in [
        "/name",
        "/kernel/release",
        "/kernel/version",
        "/kernel/command_line",
        "/cpu/microcode",
        "/cpu/governor",
        "/cpu/smt",
        "/cpu/turbo",
        "/kvm/device",
        "/thp",
        "/hugetlb",
        "/aslr",
        "/numa_nodes",
    ] {
        let (a, b) = (first.host.pointer(path), second.host.pointer(path));
        say(&path[1..].replace(['/', '_'], " "), a, b);
    }
    let none = Map::new();
    let map = |value: Option<&Value>| value.and_then(Value::as_object).unwrap_or(&none).clone();
    let of = |run: &Run, path: &str| map(run.host.pointer(path));
    let both = |a: &Map<String, Value>, b: &Map<String, Value>| -> BTreeSet<String> {
        a.keys().chain(b.keys()).cloned().collect()
    };
    let (a, b) = (of(first, "/cpu/mitigations"), of(second, "/cpu/mitigations"));
    for name in both(&a, &b) {
        say(&format!("vulnerability {}", name.replace('_', " ")), a.get(&name), b.get(&name));
    }
    let (a, b) = (of(first, "/kvm/parameters"), of(second, "/kvm/parameters"));
    for module in both(&a, &b) {
        let (a, b) = (map(a.get(&module)), map(b.get(&module)));
        for name in both(&a, &b) {
            say(&format!("{module}.{name}"), a.get(&name), b.get(&name));
        }
    }
    if first.command != second.command {
        found.push(["command".to_owned(), first.command.join(" "), second.command.join(" ")]);
    }
    found
}

pub(super) fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "–".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}
