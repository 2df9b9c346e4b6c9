//! `cargo xtask counts`: instructions and cache lines of each operation, counted by callgrind and
//! compared with the table in `docs/counts.md`.
//!
//! Unlike times, counts are the same on a noisy machine. They depend on the compiler: with another
//! one than the table's, they are not compared.

use crate::workspace::{Outcome, cargo, output, ran};
use crate::{root, setup, target};
use anyhow::{Context, bail, ensure};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

const PAGE: &str = "docs/counts.md";
const BEGIN: &str = "<!-- cargo xtask counts -->\n";
const END: &str = "<!-- end -->\n";
/// Relative difference from the table that is allowed.
const TOLERANCE: f64 = 0.02;
/// Absolute difference that is also allowed, for counts of a few instructions or lines: the table's
/// rounding.
const ROUNDING: f64 = 0.011;
/// Difference of lines that is also allowed, for all of a row: the environment and the program's
/// path decide where stack and heap begin, which moves a few lines. It matters for few units.
const LAYOUT: f64 = 4.0;

/// Profiles of the program, with their options for cargo.
const PROFILES: [(&str, &[&str]); 3] = [
    (
        "release",
        &[
            "profile.release.package.slat.codegen-units=16",
            "profile.release.package.slat-guest.codegen-units=16",
            "profile.release.package.slat-programs.codegen-units=16",
        ],
    ),
    ("fat LTO", &["profile.release.lto='fat'", "profile.release.codegen-units=1"]),
    ("opt-level s", &["profile.release.opt-level='s'"]),
];

/// Sizes of simulated caches, independent of the host: 32 KiB with lines of 64 bytes, and 8 MiB
/// behind them.
const CACHES: [&str; 4] =
    ["--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64", "--LL=8388608,16,64"];

/// Choices that the C library makes by the host's processor, fixed here: callgrind counts 4,096
/// instructions when a processor with fast string operations zeroes a page, and some 230 on others.
const SAME_EVERYWHERE: &str = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX,-SSSE3,\
-SSE4_1,-SSE4_2,-ERMS,-FSRM,-AVX_Fast_Unaligned_Load,-Fast_Unaligned_Copy,-Fast_Copy_Backward:\
glibc.cpu.x86_data_cache_size=0x8000:glibc.cpu.x86_shared_cache_size=0x800000:\
glibc.cpu.x86_non_temporal_threshold=0x600000";

/// An operation, in all profiles.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    name: String,
    units: u64,
    /// Instructions per unit by profile, then lines per unit of the first profile.
    counts: Vec<f64>,
}

/// Counts, and compares the counts with the table; or, with `accept`, writes them to it.
pub fn run(accept: bool) -> anyhow::Result<Outcome> {
    setup::package("valgrind", "valgrind")?;
    let rows = count()?;
    let path = root().join(PAGE);
    let page = std::fs::read_to_string(&path).with_context(|| format!("cannot read {PAGE}"))?;
    let (before, rest) = page.split_once(BEGIN).context("the page has no place for the table")?;
    let (table, after) = rest.split_once(END).context("the table on the page has no end")?;
    let compiler = compiler()?;
    if accept {
        let new = format!("{before}{BEGIN}{}{END}{after}", render(&compiler, &rows));
        std::fs::write(&path, new).with_context(|| format!("cannot write {PAGE}"))?;
        return Ok(Outcome::Ran(Vec::new()));
    }
    let (of, accepted) = parse(table)?;
    if of != compiler {
        println!("{}", render(&compiler, &rows));
        return Ok(Outcome::Skipped(format!("the table in {PAGE} is of {of}, this is {compiler}")));
    }
    let differences = differences(&accepted, &rows);
    ensure!(
        differences.is_empty(),
        "{}\n{PAGE} has other counts; `cargo xtask counts --accept` writes these",
        differences.join("\n")
    );
    Ok(Outcome::Ran(Vec::new()))
}

fn compiler() -> anyhow::Result<String> {
    let version = String::from_utf8(output(Command::new("rustc").arg("--version"))?.stdout)?;
    let words: Vec<&str> = version.split_whitespace().take(2).collect();
    Ok(words.join(" "))
}

fn count() -> anyhow::Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    let mut lines = Vec::new();
    for (place, (profile, settings)) in PROFILES.iter().enumerate() {
        let folder = target().join("counts").join(profile.replace(' ', "-"));
        let mut build = cargo(&["build", "--quiet", "--release", "--package", "slat-programs"]);
        build.args(["--features", "counts", "--bin", "slat-counts"]);
        // Callgrind looks for functions by their names.
        build.args(["--config", "profile.release.strip='none'"]);
        for setting in *settings {
            build.args(["--config", setting]);
        }
        ran(build.env("CARGO_TARGET_DIR", &folder))?;
        let counted = callgrind(&folder.join("release/slat-counts"), &folder.join("callgrind"))?;
        if place == 0 {
            for (name, units, instructions, misses) in counted {
                rows.push(Row { name, units, counts: vec![instructions as f64 / units as f64] });
                lines.push(misses as f64 / units as f64);
            }
            continue;
        }
        ensure!(counted.len() == rows.len(), "{profile}: another number of operations");
        for (row, (_, units, instructions, _)) in rows.iter_mut().zip(counted) {
            row.counts.push(instructions as f64 / units as f64);
        }
    }
    for (row, lines) in rows.iter_mut().zip(lines) {
        row.counts.push(lines);
    }
    Ok(rows)
}

/// Returns each measurement's name, units, instructions, and lines that missed the first cache.
fn callgrind(program: &Path, folder: &Path) -> anyhow::Result<Vec<(String, u64, u64, u64)>> {
    // Otherwise counters of an earlier run would be read.
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => std::fs::create_dir_all(folder)?,
    }
    let out = folder.join("counters");
    std::fs::copy(program, folder.join("slat-counts"))?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--tool=callgrind", "--toggle-collect=slat_counts::measured*"]);
    valgrind.arg("--dump-before=slat_counts::announce*").args(CACHES);
    valgrind.args(["--callgrind-out-file=counters", "./slat-counts"]).current_dir(folder);
    // The stack begins below the environment and the program's path, so both are the same on every
    // host.
    valgrind.env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin");
    valgrind.env("GLIBC_TUNABLES", SAME_EVERYWHERE);
    let names = String::from_utf8(output(&mut valgrind)?.stdout)?;
    let names: Vec<&str> = names.lines().collect();
    let mut counted = Vec::new();
    for (index, name) in names.iter().enumerate() {
        // The first file has what ran before any measurement; the last is written as the program
        // ends.
        let number = index + 2;
        let part = folder.join(format!("counters.{number}"));
        let part = if part.is_file() { part } else { out.clone() };
        let text = std::fs::read_to_string(&part)
            .with_context(|| format!("callgrind wrote no {}", part.display()))?;
        let mut fields = name.split('\t');
        let mut field = || fields.next().context("a line of slat-counts has three fields");
        let (format, operation, units) = (field()?, field()?, field()?.parse()?);
        let (instructions, lines) = totals(&text)?;
        ensure!(instructions > 0, "nothing was counted of {operation}, {format}");
        counted.push((format!("{format}: {operation}"), units, instructions, lines));
    }
    Ok(counted)
}

/// Returns instructions, and data lines that missed the first cache.
fn totals(text: &str) -> anyhow::Result<(u64, u64)> {
    let line = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let events = line("events: ").context("callgrind's file names no events")?;
    let totals = line("totals: ").context("callgrind's file has no totals")?;
    let totals: Vec<u64> = totals.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let of = |event: &str| {
        let place = events.split_whitespace().position(|name| name == event);
        // callgrind leaves out trailing zeros.
        place.map(|place| totals.get(place).copied().unwrap_or(0)).context("an event is missing")
    };
    Ok((of("Ir")?, of("D1mr")? + of("D1mw")?))
}

fn render(compiler: &str, rows: &[Row]) -> String {
    let mut table = format!("Counted with {compiler}.\n\n| operation | units |");
    for (profile, _) in PROFILES {
        write!(table, " {profile} |").expect("a string takes all");
    }
    table.push_str(" lines |\n|---|--:|--:|--:|--:|--:|\n");
    for row in rows {
        write!(table, "| {} | {} |", row.name, row.units).expect("a string takes all");
        for count in &row.counts {
            write!(table, " {count:.2} |").expect("a string takes all");
        }
        table.push('\n');
    }
    table
}

/// Returns the compiler of a table, and its rows.
fn parse(table: &str) -> anyhow::Result<(String, Vec<Row>)> {
    let mut lines = table.lines();
    let first = lines.next().unwrap_or_default();
    let compiler = first.strip_prefix("Counted with ").and_then(|rest| rest.strip_suffix('.'));
    let compiler = compiler.context("the table does not say of which compiler it is")?;
    let mut rows = Vec::new();
    for line in lines.filter(|line| line.starts_with('|')).skip(2) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, units, counts @ ..] = &cells[..] else { bail!("a row is too short: {line}") };
        let counts = counts.iter().map(|cell| cell.parse()).collect::<Result<_, _>>();
        let counts = counts.with_context(|| format!("a cell is no number: {line}"))?;
        rows.push(Row { name: (*name).to_owned(), units: units.parse()?, counts });
    }
    Ok((compiler.to_owned(), rows))
}

/// Returns the differences from the accepted rows, one per line.
fn differences(accepted: &[Row], now: &[Row]) -> Vec<String> {
    let mut found = Vec::new();
    for row in accepted.iter().filter(|row| !now.iter().any(|new| new.name == row.name)) {
        found.push(format!("{}: is in the table, and is not counted", row.name));
    }
    for row in now {
        let Some(old) = accepted.iter().find(|old| old.name == row.name) else {
            found.push(format!("{}: is not in the table", row.name));
            continue;
        };
        if old.counts.len() != row.counts.len() || old.units != row.units {
            found.push(format!("{}: the table has other columns or units", row.name));
            continue;
        }
        let columns = PROFILES.iter().map(|(profile, _)| (*profile, 0.0));
        let columns = columns.chain([("lines", LAYOUT / row.units as f64)]);
        for ((old, new), (column, layout)) in old.counts.iter().zip(&row.counts).zip(columns) {
            if (new - old).abs() > old * TOLERANCE + ROUNDING + layout {
                found.push(format!(
                    "{}, {column}: {new:.2} a unit, {old:.2} in the table",
                    row.name
                ));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, counts: [f64; 4]) -> Row {
        Row { name: name.to_owned(), units: 4096, counts: counts.to_vec() }
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let rows = [row("arm64: map", [5.25, 5.0, 9.5, 0.14]), row("ept: age", [1.0; 4])];
        let (compiler, read) = parse(&render("rustc 1.0.0", &rows)).unwrap();
        assert_eq!(compiler, "rustc 1.0.0");
        assert_eq!(read, rows);
    }

    #[test]
    fn a_change_above_two_percent_is_reported_and_below_it_not() {
        let accepted = [row("map", [100.0, 100.0, 100.0, 1.0])];
        assert!(differences(&accepted, &[row("map", [101.9, 98.1, 100.0, 1.02])]).is_empty());
        let told = differences(&accepted, &[row("map", [102.1, 100.0, 97.0, 1.04])]);
        assert_eq!(told.len(), 3, "{told:?}");
    }

    #[test]
    fn a_rows_few_cache_lines_may_vary_but_not_its_instructions() {
        let few = |counts: [f64; 4]| [Row { units: 64, ..row("begin", counts) }];
        let accepted = few([200.0, 170.0, 220.0, 1.33]);
        assert!(differences(&accepted, &few([200.0, 170.0, 220.0, 1.38])).is_empty());
        let told = differences(&accepted, &few([204.1, 170.0, 220.0, 1.45]));
        assert_eq!(told.len(), 2, "{told:?}");
    }

    #[test]
    fn an_operation_that_is_added_or_removed_is_reported() {
        let told = differences(&[row("old", [1.0; 4])], &[row("new", [1.0; 4])]);
        assert_eq!(told.len(), 2, "{told:?}");
    }

    #[test]
    fn totals_are_found_by_the_names_of_events() {
        let text = "events: Ir Dr Dw I1mr D1mr D1mw\nfn=x\ntotals: 70 1 2 3 4\n";
        assert_eq!(totals(text).unwrap(), (70, 4));
        assert!(totals("events: Ir\ntotals: 70\n").is_err());
    }
}
