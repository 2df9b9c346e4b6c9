//! Tests that reports in the repository contain nothing of the host that readers do not need: not
//! its name, not its kernel's command line, no parameters that only its vendor's KVM has, and no
//! folder that only the host has.
//! Reports of selftests keep the output of `execute_perf_test`, which is Slat's own; that of others
//! is Linux's text.
//!
//! `UPDATE_DOCS=1 cargo test -p xtask kept` removes these parts from new reports, and updates their
//! pages.

use crate::root;
use serde_json::{Value, json};
use slat_lab::record::Report;
use slat_lab::report::html;
use std::path::{Path, PathBuf};

/// Modules whose parameters Linux documents.
const MODULES: [&str; 3] = ["kvm", "kvm_intel", "kvm_amd"];

/// Removes the host's data from a report; returns whether there was any.
fn anonymous(report: &mut Value) -> bool {
    let before = report["host"].clone();
    let emulated = report.get("emulator").is_some();
    let host = &mut report["host"];
    host["name"] = json!("example");
    // The command line of an emulated machine is Slat's own.
    if !emulated {
        host["kernel"]["command_line"] = json!("not available");
    }
    if let Some(modules) = host["kvm"]["parameters"].as_object_mut() {
        modules.retain(|module, _| MODULES.contains(&module.as_str()));
    }
    before != *host
}

/// Shortens absolute paths of the command to their last names; returns whether there was any.
fn without_folders(report: &mut Value) -> bool {
    let words = report["command"].as_array_mut().into_iter().flatten();
    let shortened = words.filter_map(|word| {
        let path = word.as_str().map(PathBuf::from).filter(|path| path.is_absolute())?;
        *word = json!(path.file_name()?.to_str()?);
        Some(())
    });
    shortened.count() > 0
}

/// Removes the output of Linux's selftests; returns whether there was any.
fn without_output(report: &mut Value) -> bool {
    let is_own = |test: &Value| test["name"].as_str().is_some_and(|name| name.starts_with("exec"));
    let tests = report["tests"].as_array_mut().into_iter().flatten();
    let said = tests.filter(|test| !is_own(test)).filter_map(|test| test.as_object_mut());
    said.filter_map(|test| test.remove("output")).count() > 0
}

/// Returns a report as its program writes it, with keys in their order.
fn text(report: Value) -> String {
    let text = match report.get("emulator").or(report.get("tests")) {
        Some(_) => serde_json::to_string_pretty(&report),
        None => serde_json::to_string_pretty(&serde_json::from_value::<Report>(report).unwrap()),
    };
    text.unwrap() + "\n"
}

/// Returns all files below a folder with this extension.
fn below(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let found = |path: PathBuf| match path.is_dir() {
        true => below(&path, extension),
        false => {
            path.extension().is_some_and(|of| of == extension).then_some(path).into_iter().collect()
        }
    };
    entries.flat_map(found).collect()
}

#[test]
fn reports_that_are_kept_reveal_nothing_about_their_host() {
    let update = std::env::var_os("UPDATE_DOCS").is_some();
    let mut stale = Vec::new();
    for path in below(&root().join("docs"), "json") {
        let mut report: Value =
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let told = report.get("host").is_some() && anonymous(&mut report);
        if told | without_folders(&mut report) | without_output(&mut report) {
            if update {
                std::fs::write(&path, text(report)).unwrap();
            }
            stale.push(path);
        }
    }
    for path in below(&root().join("docs/examples"), "html") {
        let program = &slat_cli::PROGRAM;
        let report = slat_lab::run::read(program, path.parent().unwrap()).unwrap();
        let page = html::render(&report, &(program.readers)());
        if std::fs::read_to_string(&path).unwrap() != page {
            if update {
                std::fs::write(&path, page).unwrap();
            }
            stale.push(path);
        }
    }
    assert!(stale.is_empty(), "UPDATE_DOCS=1 writes {stale:?} anew, or has just done so");
}

#[test]
fn names_command_lines_folders_and_a_vendors_own_parameters_are_taken_out() {
    let mut report = json!({ "host": {
        "name": "a", "kernel": { "command_line": "b", "release": "6.12" },
        "kvm": { "parameters": { "kvm": { "tdp_mmu": "Y" }, "kvm_own": { "c": "d" } } },
    } });
    assert!(anonymous(&mut report) && !anonymous(&mut report));
    assert_eq!(
        report["host"],
        json!({
            "name": "example", "kernel": { "command_line": "not available", "release": "6.12" },
            "kvm": { "parameters": { "kvm": { "tdp_mmu": "Y" } } },
        })
    );
    let mut emulated = json!({ "emulator": {}, "host": { "kernel": { "command_line": "b" } } });
    anonymous(&mut emulated);
    assert_eq!(emulated["host"]["kernel"]["command_line"], "b");
    let mut command =
        json!({ "command": ["slat-bench", "--linux-tree", "/a/6.12", "-o", "docs/b"] });
    assert!(without_folders(&mut command) && !without_folders(&mut command));
    assert_eq!(command["command"], json!(["slat-bench", "--linux-tree", "6.12", "-o", "docs/b"]));
    let mut tests = json!({ "tests": [
        { "name": "other_test -v 1", "output": "a" },
        { "name": "execute_perf_test", "output": "b" },
    ] });
    assert!(without_output(&mut tests) && !without_output(&mut tests));
    assert_eq!(tests["tests"][0], json!({ "name": "other_test -v 1" }));
    assert_eq!(tests["tests"][1]["output"], "b");
}
