//! Litmus tests of the instructions of an invalidation on Arm, for herd7, which `cargo xtask test
//! herd7` runs: each sequence that [`Tlbi::sequence`] returns, between the break and what may
//! follow it, and the same sequence with one instruction left out.
//!
//! The files are made from what the engine's code emits: `SLAT_LITMUS=FOLDER cargo test -p slat
//! --test litmus` writes them to a folder. [`expected`] decides what herd7 has to find for each.
//!
//! # What the model sees
//! herd7's model of Arm translates by one stage: the descriptor `PTE(x)`, a TLB, and invalidations
//! of it. So this test looks at a sequence by address twice, each time as the model's one stage:
//! - *stage 2*: the TLB holds entries of stage 2. `tlbi vmalle1is` does not affect them, and is
//!   left out.
//! - *combined*: the TLB holds entries of both stages in one. `tlbi ipas2e1is` does not affect
//!   them, and is left out.
//!
//! The model cannot see what joins the two: an entry of both stages that a CPU makes from a stale
//! entry of stage 2. A barrier between the two invalidations prevents that. Nor does the model know
//! ranges (`ripas2e1is`; the barriers around it are those of one address), levels (`ipas2le1is` is
//! treated as `ipas2e1is`), other VMIDs, or barriers of one PE (`nsh`), which are written as `ish`
//! here.
#![cfg(all(feature = "arm64", not(any(loom, shuttle))))]

use slat::format::arm64::id::Granule;
use slat::format::arm64::tlbi::{Scope, Tlbi};
use slat::{Gpa, GpaRange, Invalidation, PageSize, Vmid};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// An outcome that is forbidden after a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Claim {
    /// Another CPU that learnt that the sequence is done reaches the unmapped memory.
    Reached,
    /// Another CPU goes back to the old page after it saw the new one, which was mapped after the
    /// sequence.
    Back,
    /// The CPU that executed the sequence reaches the memory that it unmapped.
    Itself,
}

/// The kind of TLB entries that the model's one stage stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum View {
    /// Both kinds: the sequence has one invalidation.
    Whole,
    Stage2,
    Combined,
}

/// Whether herd7 finds an execution with the forbidden outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expectation {
    Never,
    Sometimes,
}

/// The invalidations that have different sequences, by name.
fn sequences() -> Vec<(&'static str, Tlbi, Invalidation)> {
    let range = GpaRange::new(Gpa(0x8000_0000), 0x1000).ok();
    let leaf = Some(PageSize::SIZE_4K);
    let what = |range, leaf, tables| Invalidation { vmid: Vmid(1), range, leaf, tables };
    let all = Tlbi::new(Granule::K4);
    let mut list = Vec::new();
    for (scope, names) in [
        (Scope::InnerShareable, ["guest", "leaf", "tables"]),
        (Scope::Local, ["local-guest", "local-leaf", "local-tables"]),
    ] {
        let cpu = Tlbi { scope, ..all };
        list.push((names[0], cpu, what(None, None, true)));
        list.push((names[1], cpu, what(range, leaf, false)));
        list.push((names[2], cpu, what(range, None, true)));
    }
    list
}

/// Returns the sequence's instructions without operands, as far as the view sees them.
fn code(cpu: &Tlbi, what: &Invalidation, view: View) -> Vec<String> {
    let text = cpu.sequence(what).map(|instruction| instruction.to_string());
    let bare = text.map(|text| text.split(" //").next().unwrap_or_default().to_uppercase());
    let seen = bare.filter(|text| match view {
        View::Whole => true,
        View::Stage2 => !text.contains("VMALLE1"),
        View::Combined => !text.contains("IPAS2"),
    });
    // The model has no barrier of one PE.
    seen.map(|text| text.replace("DSB NSH", "DSB ISH")).collect()
}

/// The answer that herd7 has to give where the instruction at `without` is left out, and the
/// reason.
fn expected(claim: Claim, code: &[String], without: Option<usize>) -> (Expectation, &'static str) {
    let Some(without) = without else {
        return (Expectation::Never, "the sequence is whole");
    };
    let left = &code[..without];
    let rest = &code[without + 1..];
    let barrier = |text: &String| text == "DSB ISH";
    let invalidates = |text: &String| text.starts_with("TLBI");
    match code[without].as_str() {
        "ISB" if claim == Claim::Itself => {
            (Expectation::Sometimes, "the load may have been translated before")
        }
        "ISB" => (Expectation::Never, "only the CPU that executed the sequence needs it"),
        "DSB ISHST" if rest.iter().take_while(|text| !invalidates(text)).any(barrier) => {
            (Expectation::Never, "the barrier behind the other invalidation is in its place")
        }
        "DSB ISHST" => {
            (Expectation::Sometimes, "a walk behind the invalidation finds the old entry")
        }
        "DSB ISH" if !left.iter().any(invalidates) => (
            Expectation::Never,
            "for the combined entry alone; it keeps the two invalidations apart, unseen here",
        ),
        "DSB ISH" if left.last().is_some_and(barrier) || rest.first().is_some_and(barrier) => (
            Expectation::Never,
            "the other barrier is in its place; between is what is unseen here",
        ),
        "DSB ISH" => (Expectation::Sometimes, "the invalidation may complete later"),
        _ => (Expectation::Sometimes, "nothing is invalidated"),
    }
}

/// The code before and after the sequence, and that of another CPU.
struct Frame {
    state: &'static str,
    behind: &'static [&'static str],
    other: &'static [&'static str],
    /// The forbidden outcome.
    exists: &'static str,
    claim: &'static str,
}

const fn frame(claim: Claim) -> Frame {
    match claim {
        Claim::Reached => Frame {
            state: " [x]=1; [done]=0;\n 0:X6=done; 1:X4=x; 1:X6=done;\n",
            behind: &["MOV W5, #1", "STR W5, [X6]"],
            other: &["LDR W5, [X6]", "DMB ISHLD", "LDR W7, [X4]"],
            exists: "1:X5=1 /\\ 1:X7=1",
            claim: "what was unmapped is reached by a CPU that learnt that it is done",
        },
        Claim::Back => Frame {
            state: " [x]=1; [new]=2;\n 0:X6=(oa:PA(new), valid:1); 1:X4=x;\n",
            behind: &["STR X6, [X2]"],
            other: &["LDR W5, [X4]", "LDR W7, [X4]"],
            exists: "1:X5=2 /\\ 1:X7=1",
            claim: "a CPU goes back to the old page after it saw the new one",
        },
        Claim::Itself => Frame {
            state: " [x]=1;\n",
            behind: &["LDR W7, [X4]"],
            other: &[],
            exists: "0:X7=1",
            claim: "what was unmapped is reached by the CPU that unmapped it",
        },
    }
}

fn litmus(name: &str, claim: Claim, code: &[String], without: Option<usize>) -> String {
    let (expected, reason) = expected(claim, code, without);
    let Frame { state, behind, other, exists, claim } = frame(claim);
    let mut lines: Vec<&str> = vec!["LSR X0, X4, #12", "STR X1, [X2]"];
    lines.extend(code.iter().enumerate().filter(|(at, _)| Some(*at) != without).map(|(_, i)| &**i));
    lines.extend(behind);
    let wide = lines.iter().map(|line| line.len()).max().unwrap_or(0);
    let mut text = format!("AArch64 {name}\n(* Not: {claim}.\n");
    if let Some(without) = without {
        _ = writeln!(text, "   Without: {}", code[without].to_lowercase());
    }
    _ = writeln!(text, "   Expected: {expected:?}, as {reason}. *)");
    _ = write!(text, "Variant=vmsa\n{{\n{state}");
    text += " [PTE(x)]=(oa:PA(x), valid:1);\n";
    text += " 0:X1=(oa:PA(x), valid:0); 0:X2=PTE(x); 0:X4=x;\n}\n";
    lines.insert(0, "P0");
    for (row, line) in lines.iter().enumerate() {
        _ = write!(text, " {line:<wide$}");
        match (other, row.checked_sub(1)) {
            ([], _) => {}
            (_, None) => text += " | P1          ",
            (other, Some(row)) => _ = write!(text, " | {:<12}", other.get(row).unwrap_or(&"")),
        }
        text += " ;\n";
    }
    _ = writeln!(text, "exists ({exists})");
    text
}

/// All files, by name.
fn files() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    for (sequence, cpu, what) in sequences() {
        let claims: &[Claim] = match cpu.scope {
            Scope::InnerShareable => &[Claim::Reached, Claim::Back, Claim::Itself],
            Scope::Local => &[Claim::Itself],
        };
        let views: &[View] = match what.range {
            None => &[View::Whole],
            Some(_) => &[View::Stage2, View::Combined],
        };
        for (claim, view) in claims.iter().flat_map(|claim| views.iter().map(move |v| (*claim, *v)))
        {
            let code = code(&cpu, &what, view);
            let entries = if view == View::Whole { String::new() } else { format!("-{view:?}") };
            let whole = format!("{sequence}{entries}-{claim:?}").to_lowercase();
            for without in core::iter::once(None).chain((0..code.len()).map(Some)) {
                let name = match without {
                    None => whole.clone(),
                    Some(at) => format!("{whole}-without-{}", at + 1),
                };
                files.insert(format!("{name}.litmus"), litmus(&name, claim, &code, without));
            }
        }
    }
    files
}

#[test]
fn each_sequence_is_a_litmus_test_with_and_without_each_part() {
    let files = files();
    assert_eq!(files.len(), 116, "see docs/concurrency.md");
    if let Some(folder) = std::env::var_os("SLAT_LITMUS") {
        for (name, text) in &files {
            std::fs::write(Path::new(&folder).join(name), text).unwrap();
        }
    }
}

/// The two views together see all of a sequence, and each complete test is one of the views.
#[test]
fn no_instruction_of_a_sequence_is_unseen() {
    for (name, cpu, what) in sequences() {
        let whole = code(&cpu, &what, View::Whole);
        let [stage2, combined] = [View::Stage2, View::Combined].map(|v| code(&cpu, &what, v));
        for instruction in &whole {
            let seen = stage2.contains(instruction) || combined.contains(instruction);
            assert!(seen, "{name}: {instruction}");
        }
    }
}
