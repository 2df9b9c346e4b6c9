//! `cargo xtask size`: the engine's text for a user without an operating system, by operation.
//!
//! An operation's bytes are those of all functions that it can reach in the archive's one object of
//! Rust code: what a user of that operation alone gets. Operations share functions, so their sum is
//! more than the whole. The platform is the user's, and not counted; nor are `memcpy` and its like.

use crate::{setup, stages, target};
use anyhow::{Context, bail};
use object::read::archive::ArchiveFile;
use object::{Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionIndex, SectionKind};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

const TRIPLE: &str = setup::BARE;
const FORMATS: [(&str, &str); 5] = [
    ("arm64", "arm64 stage 2, 4K granule"),
    ("ept", "Intel EPT"),
    ("npt", "AMD NPT"),
    ("power", "Power radix, 64K pages"),
    ("riscv", "RISC-V G-stage"),
];
const LEVELS: [&str; 2] = ["2", "s"];

/// Bytes by operation, and of all.
type Sizes = (BTreeMap<String, u64>, u64);

/// Builds for each format and level of optimisation, and prints a table.
pub fn run() -> anyhow::Result<()> {
    setup::target(setup::BARE)?;
    let mut columns = Vec::new();
    for (feature, name) in FORMATS {
        for level in LEVELS {
            columns.push((format!("{name}, -O{level}"), build(feature, level)?));
        }
    }
    print(&columns);
    Ok(())
}

fn build(feature: &str, level: &str) -> anyhow::Result<Sizes> {
    let folder = target().join("size");
    let mut build = stages::cargo(&["build", "--quiet", "--release", "--package", "slat-size"]);
    build.args(["--target", TRIPLE, "--no-default-features", "--features", feature]);
    build
        .env("CARGO_TARGET_DIR", &folder)
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", level)
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    stages::ran(&mut build)?;
    read(&folder.join(TRIPLE).join("release/libslat_size.a"))
}

fn read(path: &Path) -> anyhow::Result<Sizes> {
    let data = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let archive = ArchiveFile::parse(&*data)?;
    for member in archive.members() {
        let member = member?;
        if member.name().starts_with(b"slat_size-") {
            return sizes(&object::File::parse(member.data(&*data)?)?);
        }
    }
    bail!("{} holds no code of slat-size", path.display())
}

fn sizes(file: &object::File<'_>) -> anyhow::Result<Sizes> {
    let is_text = |index| {
        file.section_by_index(index).is_ok_and(|section| section.kind() == SectionKind::Text)
    };
    let bytes = |sections: &HashSet<SectionIndex>| -> u64 {
        let sections = sections.iter().filter(|index| is_text(**index));
        sections.filter_map(|index| file.section_by_index(*index).ok()).map(|s| s.size()).sum()
    };
    let mut operations = BTreeMap::new();
    let mut all = HashSet::new();
    for symbol in file.symbols() {
        let Some(name) = symbol.name().ok().and_then(|name| name.strip_prefix("op_")) else {
            continue;
        };
        let section = symbol.section_index().context("an operation without a section")?;
        let reached = reach(file, section)?;
        operations.insert(name.to_owned(), bytes(&reached));
        all.extend(reached);
    }
    Ok((operations, bytes(&all)))
}

/// A function has a section of its own; whatever it refers to comes with it.
fn reach(file: &object::File<'_>, from: SectionIndex) -> anyhow::Result<HashSet<SectionIndex>> {
    let mut reached = HashSet::from([from]);
    let mut waiting = vec![from];
    while let Some(index) = waiting.pop() {
        for (_, relocation) in file.section_by_index(index)?.relocations() {
            let target = match relocation.target() {
                RelocationTarget::Symbol(symbol) => file.symbol_by_index(symbol)?.section_index(),
                RelocationTarget::Section(section) => Some(section),
                _ => None,
            };
            waiting.extend(target.filter(|target| reached.insert(*target)));
        }
    }
    Ok(reached)
}

fn print(columns: &[(String, Sizes)]) {
    let names: BTreeSet<_> = columns.iter().flat_map(|(_, sizes)| sizes.0.keys()).collect();
    println!("Bytes of text for {TRIPLE}:\n");
    let heads: Vec<_> = columns.iter().map(|(head, _)| head.as_str()).collect();
    println!("| operation | {} |", heads.join(" | "));
    println!("|---|{}", "---:|".repeat(columns.len()));
    for name in names {
        row(name, columns.iter().map(|(_, sizes)| sizes.0.get(name).copied().unwrap_or(0)));
    }
    row("**all of them**", columns.iter().map(|(_, sizes)| sizes.1));
}

fn row(name: &str, bytes: impl Iterator<Item = u64>) {
    println!("| {name} | {} |", bytes.map(|n| n.to_string()).collect::<Vec<_>>().join(" | "));
}
