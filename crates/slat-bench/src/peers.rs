//! Compares the engine with other code that keeps such tables (Linux's own code, crates) and with
//! the machine's limits, on the same work in the same run.
//!
//! Linux's code runs in a separate program that a pipe drives. All take turns, on one CPU, by one
//! clock. In the round that warms up, the leaves that each entrant leaves behind are compared with
//! the engine's, entry by entry, and differences that are allowed are counted by their reason.

pub mod check;
#[cfg(feature = "peers")]
pub(crate) mod crates;
pub mod format_tables;
pub mod formats;
mod known;
mod leaves;
mod linux;
mod ours;
pub mod split;
mod tables;
mod work;

use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, is_large};
use crate::fill::Stores;
use crate::fixture::Fixture;
use crate::fixture::{STEP, whole_blocks};
use crate::format::Granule;
use crate::linux::Build;
use crate::settings::engine::{EngineArgs, Part};
use crate::settings::peers::{LinuxArgs, PeersArgs, TablesTarget, TreesArgs, WalkKind};
use crate::split::{SplitArgs, SplitMoment, What};
use crate::threads::{Pin, cpus};
use known::SLAT;
use linux::{LinuxTurns, Trees};
use ours::Turns;
use slat::format::arm64::Arm64;
use slat::{BreakBeforeMake, Format, PageSize};
use slat_lab::failure::bad_input;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::cell::RefCell;
use std::rc::Rc;
use work::{Op, SPARSE, Setting, Work};

/// Target of results of Linux's code.
pub const LINUX: &str = "linux-source";
const CRATE: &str = "crate";

/// Variant of the engine that fills tables with streaming stores.
const STREAMING: &str = "slat, streaming";

/// Variant of the engine with tables that have one owner, for the comparison with crates.
const OWNED: &str = "slat, owned";

/// A walk of the engine's tables that promises no more than the crates' do.
const PLAIN: &str = "slat, plain walk";

/// The scenario of comparisons with Linux, crates and limits.
pub struct Peers;

impl Scenario for Peers {
    const NAME: &'static str = "peers";
    const ABOUT: &'static str =
        "Hold the engine against everybody: Linux's trees, other crates, the machine's limits";
    const EXAMPLES: &'static str = crate::settings::peers::EXAMPLES;
    const RENDERER: Renderer = tables::RENDERER;
    type Settings = PeersArgs;

    fn run(args: &PeersArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        all(args, session)
    }
}

/// Measures `split` of the engine and of Linux.
///
/// # Errors
/// Values that cannot be right, no usable tree, or a measurement that failed.
pub fn split(
    args: &SplitArgs,
    linux: &LinuxArgs,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let granule = args.format().granule()?;
    let (memory, page) = (whole_blocks(args.memory)?.bytes(), leaf_sizes(granule)[0]);
    if args.target_size() != Size(page.bytes()) || args.bbm()? != 0 {
        return Err(bad_input(
            "Linux splits down to pages, and always breaks: leave out --target-size and --bbm \
             beside --target linux-source",
        ));
    }
    let mut works = Vec::new();
    for backing in args.backings() {
        let leaf = leaf(granule, backing)?;
        for (&when, &what) in
            args.when.iter().flat_map(|when| args.what.iter().map(move |what| (when, what)))
        {
            let op = match (when, what) {
                (SplitMoment::Enable, What::Split) => Op::Split,
                (SplitMoment::Enable, What::Call) => Op::Enable,
                (SplitMoment::Clear, What::Call) => Op::ClearSplit,
                (SplitMoment::Clear, What::Split) => {
                    let reason = "Linux clears and splits in one function; --what call measures it";
                    session.skip(format!("{backing} pages, clear, split"), reason);
                    continue;
                }
            };
            works.push(Work { op, memory, leaf, page });
        }
    }
    let run = Run { granule, rounds: args.samples, linux, everybody: false };
    run.measure(&works, session)
}

/// Measures the parts of `engine` that Linux has as well, with Linux.
///
/// # Errors
/// As [`split()`].
pub fn engine(args: &EngineArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let memory = whole_blocks(args.memory())?.bytes();
    let granule = args.granule()?;
    let sizes = leaf_sizes(granule);
    for part in &args.only {
        if works_of(*part, &sizes, memory).is_empty() {
            session.skip(part.to_string(), "Linux has nothing like it, or not with one thread");
        }
    }
    let parts =
        <Part as clap::ValueEnum>::value_variants().iter().filter(|part| args.wants(**part));
    let works: Vec<Work> = parts.flat_map(|part| works_of(*part, &sizes, memory)).collect();
    let run = Run { granule, rounds: args.rounds(), linux: &args.linux, everybody: false };
    run.measure(&works, session)
}

/// Measures those parts of `engine` for `target engine`, without Linux.
///
/// # Errors
/// As [`split()`].
pub fn alone(
    args: &EngineArgs,
    parts: &[Part],
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let memory = whole_blocks(args.memory())?.bytes();
    let works: Vec<Work> = parts
        .iter()
        .flat_map(|part| works_of(*part, &leaf_sizes(Granule::Size4k), memory))
        .collect();
    let linux = LinuxArgs::default();
    Run { granule: Granule::Size4k, rounds: args.rounds(), linux: &linux, everybody: false }
        .measure(&works, session)
}

/// Measures the engine with Linux, crates and limits.
///
/// # Errors
/// As [`split()`].
pub fn all(args: &PeersArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let memory = args.memory.unwrap_or(Size(if args.quick { 1 << 30 } else { 64 << 30 }));
    let memory = whole_blocks(memory)?.bytes();
    let parts = <Part as clap::ValueEnum>::value_variants().iter();
    let works: Vec<Work> =
        parts.flat_map(|part| works_of(*part, &leaf_sizes(Granule::Size4k), memory)).collect();
    let rounds = args.rounds.unwrap_or(if args.quick { 3 } else { 7 });
    let linux = LinuxArgs { target: TablesTarget::LinuxSource, ..args.linux.clone() };
    if linux.trees.linux_tree.is_empty() {
        session
            .skip("Linux's tables", "no tree was given; --linux-tree PATH, or `cargo xtask peers`");
    }
    Run { granule: Granule::Size4k, rounds, linux: &linux, everybody: true }
        .measure(&works, session)
}

/// Returns the sizes of leaves, the smallest first.
fn leaf_sizes(granule: Granule) -> Vec<PageSize> {
    granule.leaf_sizes().iter().filter_map(|size| PageSize::from_bytes(size.bytes())).collect()
}

fn leaf(granule: Granule, backing: Size) -> anyhow::Result<PageSize> {
    let sizes = leaf_sizes(granule);
    sizes.iter().copied().find(|size| size.bytes() == backing.bytes()).ok_or_else(|| {
        let names: Vec<String> = sizes.iter().map(ToString::to_string).collect();
        bad_input(format!(
            "--backing {backing}: a granule of {granule} has pages and blocks of {}",
            names.join(", ")
        ))
    })
}

/// Returns the work of a part; none where only the engine has the part.
fn works_of(part: Part, sizes: &[PageSize], memory: u64) -> Vec<Work> {
    let (page, blocks) = (sizes[0], &sizes[1..]);
    let small = (memory / 8).next_multiple_of(STEP);
    let by_pages = |op| Work { op, memory: small, leaf: page, page };
    let all = |ops: &[Op]| ops.iter().map(|op| by_pages(*op)).collect();
    match part {
        Part::Split => {
            let mut works = Vec::new();
            for memory in if small == memory { vec![memory] } else { vec![small, memory] } {
                let of = |leaf: &PageSize| Work { op: Op::Split, memory, leaf: *leaf, page };
                works.extend(sizes.iter().map(of));
            }
            works
        }
        Part::Protect => all(&[Op::Protect, Op::ProtectAgain]),
        Part::Clear => {
            let mut works: Vec<Work> = all(&[Op::Clear(u64::MAX), Op::Clear(SPARSE)]);
            works.push(Work { leaf: blocks[0], ..by_pages(Op::ClearSplit) });
            works
        }
        Part::Age => all(&[Op::AgeYoung, Op::AgeOld, Op::AgeEach]),
        Part::Map => all(&[Op::Map]),
        Part::Unmap => all(&[Op::Unmap]),
        Part::Relax => all(&[Op::Relax]),
        Part::Translate => vec![Work { memory, ..by_pages(Op::Lookup) }],
        Part::Flush => all(&[Op::Flush]),
        Part::Inactive => all(&[Op::BuildInactive, Op::ProtectInactive]),
        _ => Vec::new(),
    }
}

/// Settings of a run.
struct Run<'r> {
    granule: Granule,
    rounds: u32,
    linux: &'r LinuxArgs,
    /// Also measures crates, and edited trees only in operations that split.
    everybody: bool,
}

impl Run<'_> {
    fn measure(&self, works: &[Work], session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        match self.granule {
            Granule::Size4k => self.by(Arm64::<12>::default(), works, session),
            Granule::Size16k => self.by(Arm64::<14>::default(), works, session),
            Granule::Size64k => self.by(Arm64::<16>::default(), works, session),
        }
    }

    fn by<const SHIFT: u32>(
        &self,
        format: Arm64<SHIFT>,
        works: &[Work],
        session: &mut Session,
    ) -> anyhow::Result<Vec<Measurement>>
    where
        Arm64<SHIFT>: Format,
    {
        let largest = leaf_sizes(self.granule).last().map_or(STEP, |size| size.bytes());
        let chunk = match self.linux.chunk_size {
            Some(chunk) => leaf(self.granule, chunk).map(|size| size.bytes()).map_err(|_| {
                bad_input(format!(
                    "--chunk-size {chunk} is not what KVM takes with a granule of {}: a block of \
                     the granule's",
                    self.granule
                ))
            })?,
            None => largest,
        };
        let setting =
            Setting { chunk, fwb: self.linux.trees.fwb.is_on(), caches: self.linux.caches };
        let Some(table_bytes) = works.iter().map(Work::table_bytes).max() else {
            return Ok(Vec::new());
        };
        let kinds = self.kinds();
        let builds: Vec<Build> =
            kinds.iter().map(|kind| linux::build(SHIFT, setting.fwb, *kind, false)).collect();
        let trees = self.linux.trees.linux_tree.len() + self.linux.trees.with.len();
        // Memory for the engine, and for each tree's programs: one for each kind of walk, one that
        // flushes, and one that counts. A page of tables needs 64 bytes more.
        let needed = table_bytes * (1 + (trees * (kinds.len() + 2)) as u64) / 60 * 61;
        let available = session.memory_available();
        if needed > available / 10 * 9 {
            return Err(bad_input(format!(
                "the tables take {} MiB, each in memory of its own, and this machine has {} MiB \
                 free; take a smaller --memory, or fewer trees",
                needed >> 20,
                available >> 20
            )));
        }
        let cpus = cpus()?;
        // Pins before a helper starts, because a helper stays on its parent's CPU.
        let _pin = Pin::to(cpus[0])?;
        let trees = self.trees(&builds, table_bytes, session)?;
        let mut arena = Arena::new(table_bytes as usize, 1 << SHIFT, BreakBeforeMake::Always)?;
        let mut contests = Vec::new();
        for &work in works {
            let mut format = format;
            format.forced_write_back = work.fwb(&setting);
            let fixture = Fixture::new(format, work.memory);
            contests.push(
                self.contest(
                    &Turns { fixture, work, setting, left: Rc::default() },
                    trees.as_ref(),
                ),
            );
        }
        #[cfg(feature = "peers")]
        if self.everybody {
            contests.extend(crates::contests(
                works.iter().map(|work| work.memory).min().unwrap_or(STEP),
                setting.caches,
            ));
        }
        session.start("peers", contests.len() as u64 * u64::from(self.rounds + 1));
        let mut results = Vec::new();
        for mut contest in contests {
            session.say(contest.title());
            match contest.hold(&mut arena, session, self.rounds) {
                Ok(Some(measured)) => results.extend(measured),
                Ok(None) => break,
                // One failed contest discards neither earlier results nor later contests.
                Err(error) => session.fail(contest.title(), format!("{error:#}")),
            }
        }
        session.finish();
        Ok(results)
    }

    fn kinds(&self) -> Vec<WalkKind> {
        let mut kinds = match self.linux.target {
            TablesTarget::Engine => Vec::new(),
            TablesTarget::LinuxSource => self.linux.trees.walks.clone(),
        };
        kinds.sort_by_key(|kind| *kind as u8);
        kinds.dedup();
        kinds
    }

    /// Opens and starts the trees, if any are needed.
    fn trees(
        &self,
        builds: &[Build],
        table_bytes: u64,
        session: &mut Session,
    ) -> anyhow::Result<Option<Rc<RefCell<Trees>>>> {
        if builds.is_empty() || (self.everybody && self.linux.trees.linux_tree.is_empty()) {
            return Ok(None);
        }
        let opened = checked_trees(&self.linux.trees, builds, table_bytes, session);
        match opened {
            Ok(mut trees) => {
                trees.start(builds)?;
                Ok(Some(Rc::new(RefCell::new(trees))))
            }
            // Without Linux, the other entrants still run.
            Err(error) if self.everybody && session.check().is_ok() => {
                session.skip("Linux's tables", format!("{error:#}"));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn contest<'a, F: Format + 'a>(
        &self,
        turns: &Turns<F>,
        trees: Option<&Rc<RefCell<Trees>>>,
    ) -> Contest<'a> {
        let work = turns.work;
        let mut contest = Contest::new("peers", work.title(), work.params(&turns.setting))
            .with_guests()
            // The engine is first in the round that warms up: the others are compared with its
            // leaves.
            .enter(SLAT, ENGINE, turns.clone().turn(Stores::Plain));
        let streams = work.op == Op::Split && !work.is_split_already();
        if streams {
            contest = contest.enter(STREAMING, ENGINE, turns.clone().turn(Stores::Streaming));
        }
        let mut first: Option<(String, Option<String>)> = None;
        if let Some(trees) = trees {
            let count = trees.borrow().len();
            for tree in 0..count {
                let (name, edited) =
                    (trees.borrow().name(tree).to_owned(), trees.borrow().is_edited(tree));
                if self.everybody && edited && !work.op.splits() {
                    continue;
                }
                let mut shared = None;
                let kinds = self.kinds();
                for &kind in &kinds {
                    let alone = kinds.contains(&WalkKind::Exclusive);
                    let variant = match kind {
                        WalkKind::Exclusive => name.clone(),
                        WalkKind::Shared if self.everybody && edited => continue,
                        WalkKind::Shared if work.op.differs_if_shared() => {
                            format!("{name}, shared")
                        }
                        // A shared walk would be the same: one result is enough.
                        WalkKind::Shared if alone => continue,
                        WalkKind::Shared => name.clone(),
                    };
                    if kind == WalkKind::Shared && variant != name {
                        shared = Some(variant.clone());
                    }
                    let linux = LinuxTurns::beside(turns, trees, tree, kind);
                    contest = contest.enter(&*variant, LINUX, linux.turn());
                    contest = contest.note(&variant, trees.borrow().compiler());
                }
                if let Some((before, _)) = &first
                    && *before != name
                    && kinds.contains(&WalkKind::Exclusive)
                {
                    let what = format!("{}, {} pages: {name}", work.op.name(), work.leaf);
                    contest = contest.ratio(what, &[&name], &[before]);
                }
                first.get_or_insert((name, shared));
            }
        }
        if let Some((limit, turn)) = turns.limit() {
            contest = contest.enter(limit, MACHINE, turn);
        }
        match first {
            Some((name, shared)) if self.granule == Granule::Size4k => beside(
                contest,
                &work,
                streams,
                self.kinds().contains(&WalkKind::Exclusive).then_some(&*name),
                shared.as_deref(),
            ),
            _ => contest,
        }
    }
}

/// Opens the trees.
///
/// # Errors
/// No tree was given, or none can be used; or the user pressed Ctrl-C.
fn checked_trees(
    args: &TreesArgs,
    builds: &[Build],
    table_bytes: u64,
    session: &mut Session,
) -> anyhow::Result<Trees> {
    if args.linux_tree.is_empty() {
        return Err(bad_input(
            "this needs a tree: --linux-tree PATH, the top folder of Linux's source (Debian's \
             package linux-source-6.12 has one)",
        ));
    }
    let before = session.skipped().len();
    let trees = Trees::open(args, builds, table_bytes, session)?;
    if trees.len() == 0 {
        let reasons: Vec<&str> =
            session.skipped()[before..].iter().map(|skipped| &*skipped.reason).collect();
        return Err(bad_input(reasons.join("\n")));
    }
    Ok(trees)
}

/// Returns the most time that the engine may take, by that of an exclusive walk.
fn beside_exclusive(work: &Work) -> Option<f64> {
    Some(match work.op {
        Op::Split if work.leaf == PageSize::SIZE_4K => 0.01,
        Op::Split if is_large(work.memory) => 0.125,
        Op::Split => 0.05,
        Op::AgeOld => 0.25,
        Op::Map => 1.0 / 3.0,
        Op::Lookup => 0.5,
        Op::Unmap => 1.0,
        Op::Protect => 1.1,
        Op::ProtectInactive => 1.0 / 6.0,
        _ => return None,
    })
}

/// Returns the most time that the engine may take, by that of a shared walk.
fn beside_shared(op: Op) -> Option<f64> {
    matches!(op, Op::Protect | Op::Clear(_) | Op::AgeYoung).then_some(1.0 / 1.5)
}

/// Adds ratios of the engine to Linux, for exclusive and for shared walks.
fn beside<'a>(
    mut contest: Contest<'a>,
    work: &Work,
    streams: bool,
    exclusive: Option<&str>,
    shared: Option<&str>,
) -> Contest<'a> {
    let what = format!("{}, {} pages", work.op.name(), work.leaf);
    for (linux, limit) in [(exclusive, beside_exclusive(work)), (shared, beside_shared(work.op))] {
        if let Some(linux) = linux {
            contest = contest.ratio(&*what, &[SLAT], &[linux]).at_most(limit);
        }
    }
    if let Some(linux) = exclusive.filter(|_| streams) {
        contest = contest
            .ratio(format!("{what}, streaming"), &[STREAMING], &[linux])
            .at_most((work.op == Op::Split && is_large(work.memory)).then_some(1.0 / 12.0));
    }
    contest
}
