//! `slat-bench engine --format`: compares the same operations on tables of several formats, and
//! with the machine's limits.
//!
//! All entrants of an operation take turns, each on its own memory. They have guest memory of the
//! same size, in leaves of their own sizes, so the time of a page is compared.

use super::ours::{Left, Turns};
use super::work::{Op, Setting, Work};
use super::works_of;
use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, FORMATS, MACHINE};
use crate::fill::Stores;
use crate::fixture::whole_blocks;
use crate::fixture::{CHUNK, Fixture};
use crate::format::TableFormat;
use crate::on_format;
use crate::settings::engine::{EngineArgs, Part};
use crate::settings::peers::Caches;
use crate::tables;
use crate::threads::{Pin, cpus};
use anyhow::ensure;
use clap::ValueEnum;
use serde_json::{Map, json};
use slat::{BreakBeforeMake, Format};
use slat_lab::failure::bad_input;
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Stands between the names of a format and of a limit.
const BESIDE: &str = ": ";

/// Memory for tables, shared by the formats of one page size.
type SharedArena = Rc<RefCell<Arena>>;

/// An operation that several formats have.
struct Common {
    op: Op,
    memory: u64,
    /// Rank of the leaves among the format's sizes, from 0, the smallest.
    rank: usize,
    of: Vec<(TableFormat, Work)>,
}

/// Measures the parts that `args` asks for, on each of its formats.
///
/// # Errors
/// Sizes that cannot be right, too little memory, or an operation whose result is wrong.
pub fn run(args: &EngineArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let memory = whole_blocks(args.memory())?.bytes();
    let mut formats = Vec::new();
    for format in &args.format {
        if !formats.contains(format) {
            formats.push(*format);
        }
    }
    let works = common(args, &formats, memory, session)?;
    let arenas = arenas(&formats, &works, memory, session)?;
    let cpus = cpus()?;
    let _pin = Pin::to(cpus[0])?;
    let by_tables = by_tables(args, &formats, memory, session)?;
    let rounds = args.rounds();
    let contests = works.len() + by_tables.len();
    session.start(FORMATS, contests as u64 * u64::from(rounds + 1));
    let mut results = Vec::new();
    // `hold` needs an arena, but each entrant has its own.
    let mut nobodys = Arena::new(0, 4096, BreakBeforeMake::Never)?;
    for work in &works {
        let mut contest = Contest::new(FORMATS, work.title(), work.params());
        for &(format, each) in &work.of {
            let arena = arenas[&each.page.bytes()].clone();
            contest = on_format!(format, |f| enter(contest, format, f, each, arena));
        }
        session.say(contest.title());
        match contest.hold(&mut nobodys, session, rounds)? {
            Some(measured) => results.extend(measured.into_iter().map(|m| work.told(m))),
            None => return Ok(results),
        }
    }
    for (mut contest, page) in by_tables {
        session.say(contest.title());
        let rounds = contest.rounds(rounds);
        match contest.hold(&mut arenas[&page].borrow_mut(), session, rounds)? {
            Some(measured) => results.extend(measured),
            None => break,
        }
    }
    session.finish();
    Ok(results)
}

/// Returns the operations, each with the formats that have it. The session reports formats that
/// lack one.
fn common(
    args: &EngineArgs,
    formats: &[TableFormat],
    memory: u64,
    session: &mut Session,
) -> anyhow::Result<Vec<Common>> {
    let mut all: Vec<Common> = Vec::new();
    for &part in Part::value_variants().iter().filter(|part| args.wants(**part)) {
        if matches!(part, Part::SplitThreads | Part::MapThreads | Part::Beside) {
            if args.only.contains(&part) {
                let reason = "two threads are measured on arm64-4k, without --format";
                session.skip(part.to_string(), reason);
            }
            continue;
        }
        for &format in formats {
            if part == Part::Flush && on_format!(format, |f| f.forces_caches()) {
                let reason = "not with this format: its guests cannot get past the caches";
                session.skip(format!("{part}, {format}"), reason);
                continue;
            }
            let leaves = format.leaves();
            for work in works_of(part, &leaves, memory) {
                let rank = leaves.iter().position(|leaf| *leaf == work.leaf).unwrap_or(0);
                let (op, memory) = (work.op, work.memory);
                let same = |it: &&mut Common| (it.op, it.memory, it.rank) == (op, memory, rank);
                match all.iter_mut().find(same) {
                    Some(common) => common.of.push((format, work)),
                    None => all.push(Common { op, memory, rank, of: vec![(format, work)] }),
                }
            }
        }
    }
    Ok(all)
}

/// Returns memory for each page size.
fn arenas(
    formats: &[TableFormat],
    works: &[Common],
    memory: u64,
    session: &Session,
) -> anyhow::Result<BTreeMap<u64, SharedArena>> {
    let mut bytes: BTreeMap<u64, u64> = BTreeMap::new();
    // Operations by tables need as much memory as a split to pages.
    let least = formats.iter().map(|format| {
        let page = format.leaves()[0];
        Work { op: Op::Split, memory, leaf: page, page }
    });
    let works = works.iter().flat_map(|common| common.of.iter().map(|(_, work)| *work));
    for work in works.chain(least) {
        let most = bytes.entry(work.page.bytes()).or_default();
        *most = work.table_bytes().max(*most);
    }
    let (needed, available) = (bytes.values().sum::<u64>(), session.memory_available());
    if needed > available / 10 * 9 {
        return Err(bad_input(format!(
            "the tables of {} take {} MiB, those of each page size in memory of their own, and \
             this machine has {} MiB free; take a smaller --memory, or fewer formats",
            Size(memory),
            needed >> 20,
            available >> 20
        )));
    }
    let arena = |(page, bytes): (u64, u64)| {
        let arena = Arena::new(bytes as usize, page as usize, BreakBeforeMake::Always)?;
        Ok((page, Rc::new(RefCell::new(arena))))
    };
    bytes.into_iter().map(arena).collect()
}

/// Enters a format and its limit.
fn enter<'a, F: Format>(
    contest: Contest<'a>,
    name: TableFormat,
    format: F,
    work: Work,
    arena: SharedArena,
) -> Contest<'a> {
    let setting = Setting { chunk: CHUNK, fwb: false, caches: Caches::Warm };
    let left = Left::default();
    let turns =
        Turns { fixture: Fixture::new(format, work.memory), work, setting, left: left.clone() };
    let limit = turns.limit();
    let (mut turn, own) = (turns.turn(Stores::Plain), arena.clone());
    let contest = contest.enter(name.to_string(), ENGINE, move |_, check| {
        let sample = turn(&mut own.borrow_mut(), check)?;
        if check {
            let mapped: u64 = left.take().iter().map(|run| run.count * run.first.size).sum();
            let expected = if work.op == Op::Unmap { 0 } else { work.memory };
            ensure!(mapped == expected, "{mapped} bytes are mapped, not {expected}");
        }
        Ok(sample)
    });
    let Some((limit, mut turn)) = limit else { return contest };
    contest.enter(format!("{name}{BESIDE}{limit}"), MACHINE, move |_, check| {
        turn(&mut arena.borrow_mut(), check)
    })
}

/// Returns the contests that only formats with accessed bits in tables have, each with
/// its page size.
fn by_tables<'a>(
    args: &EngineArgs,
    formats: &[TableFormat],
    memory: u64,
    session: &mut Session,
) -> anyhow::Result<Vec<(Contest<'a>, u64)>> {
    let mut all = Vec::new();
    let part = Part::AgeTables;
    for &name in formats.iter().filter(|_| args.wants(part)) {
        let (contests, page) = on_format!(name, |f| posed(f, name, memory));
        match contests {
            Some(contests) => all.extend(contests.into_iter().map(|contest| (contest, page))),
            None => session.skip(
                format!("{part}, {name}"),
                "not with this format: its tables have no accessed flag",
            ),
        }
    }
    Ok(all)
}

/// Returns the contests of ageing by tables, if the format can, and the page size.
fn posed<'a, F: Format>(
    format: F,
    name: TableFormat,
    memory: u64,
) -> (Option<Vec<Contest<'a>>>, u64) {
    let contests = (F::TABLE_ACCESSED != 0).then(|| tables::age(format, name, memory));
    (contests, F::size(0).bytes())
}

impl Common {
    fn leaves(&self) -> &'static str {
        ["pages", "blocks", "larger blocks"][self.rank.min(2)]
    }

    fn title(&self) -> String {
        format!("{}, {}, {}", self.op.name(), self.leaves(), Size(self.memory))
    }

    fn params(&self) -> Map<String, serde_json::Value> {
        let params = [
            ("operation", json!(self.op.name())),
            ("memory", json!(self.memory)),
            ("leaves", json!(self.leaves())),
        ];
        params.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
    }

    /// Returns the result of one entrant with format and limit moved from its variant to the
    /// parameters.
    fn told(&self, mut measured: Measurement) -> Measurement {
        let (format, variant) = match measured.variant.split_once(BESIDE) {
            Some((format, limit)) => (format.to_owned(), limit.to_owned()),
            None => (measured.variant.clone(), super::known::SLAT.to_owned()),
        };
        if let Some((_, work)) = self.of.iter().find(|(name, _)| name.to_string() == format) {
            measured.params.insert("backing".to_owned(), json!(work.leaf.to_string()));
            measured.params.insert("granule".to_owned(), json!(work.page.bytes()));
            measured.params.insert("pieces".to_owned(), json!(work.pieces()));
        }
        measured.params.insert("format".to_owned(), json!(format));
        measured.variant = variant;
        measured
    }
}

#[cfg(test)]
mod tests {
    use super::super::SLAT;
    use super::*;
    use crate::format::Granule;
    use crate::settings::peers::LinuxArgs;

    fn run_on(format: &[TableFormat], only: &[Part]) -> (Vec<Measurement>, Session) {
        let args = EngineArgs {
            memory: Some(Size(1 << 30)),
            only: only.to_vec(),
            rounds: Some(1),
            quick: true,
            format: format.to_vec(),
            granule: Granule::Size4k,
            linux: LinuxArgs::default(),
        };
        let mut session = Session::quiet();
        (run(&args, &mut session).unwrap(), session)
    }

    /// Each turn checks its work. This test checks that all formats finish, with as many entries as
    /// there are pages.
    #[test]
    fn formats_do_the_same_on_leaves_of_their_own_sizes() {
        let formats = [TableFormat::Arm64K16, TableFormat::Arm64K64, TableFormat::Ept];
        let (results, _) = run_on(&formats, &[Part::Split, Part::Protect, Part::Age, Part::Map]);
        let pages = [1 << 16, 1 << 14, 1 << 18];
        for (format, pages) in formats.into_iter().zip(pages) {
            let of = |operation: &str| {
                let found = results.iter().find(|m| {
                    m.variant == SLAT
                        && m.params["format"] == format.to_string()
                        && m.params["operation"] == operation
                });
                found.unwrap_or_else(|| panic!("no {operation} of {format}"))
            };
            assert_eq!(of("map page by page").params["pieces"], pages, "{format}");
            assert_eq!(of("write-protect").counts["entries_written"], pages, "{format}");
            assert_eq!(of("age, all young").counts["entries_written"], pages, "{format}");
        }
        let large = results.iter().filter(|m| m.params["leaves"] == "larger blocks");
        assert!(
            large.clone().count() > 0 && large.into_iter().all(|m| m.params["format"] == "ept")
        );
    }

    #[test]
    fn what_a_format_lacks_is_said() {
        let formats = [TableFormat::Arm64K4, TableFormat::Ept];
        let (results, session) = run_on(&formats, &[Part::Flush, Part::AgeTables, Part::Beside]);
        let left_out: Vec<_> = session.skipped().iter().map(|it| &*it.what).collect();
        assert_eq!(left_out, ["flush, ept", "beside", "age-tables, arm64-4k"]);
        let named = |name: &str| results.iter().any(|m| m.params["format"] == name);
        assert!(named("arm64-4k") && named("ept"));
    }
}
