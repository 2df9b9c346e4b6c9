//! Runs random histories of operations through Linux's tables and the engine's. After each
//! operation both must map the same addresses, by leaves of the same sizes, to the same memory,
//! with the same rights.
//!
//! The operations are those that both define alike. Linux takes a block whole where the engine
//! refuses to cut it, so ranges are widened to the leaves at their ends. Nothing is mapped over
//! existing leaves. No block is mapped where the engine keeps a table that was emptied in parts,
//! because it would map smaller leaves in it. Two differences are allowed: Linux makes pages young
//! when it splits them off an old block, until they age, and it protects the hull of a cleared
//! word.

use super::linux::{Trees, build, interrupted};
use super::{LINUX, checked_trees, leaf_sizes, leaves};
use crate::arena::Arena;
use crate::fixture::Fixture;
use crate::format::Granule;
use crate::linux::{Helper, Leaf, Op as Call, Prot, Run};
use crate::settings::peers::{CHECK_EXAMPLES, CheckArgs, WalkKind};
use anyhow::{Context, anyhow, bail, ensure};
use fastrand::Rng;
use serde_json::json;
use slat::format::arm64::Arm64;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, Format, Gpa, GpaRange, Guard,
    PageSize, Pages, Reader, TableCache, Tables, UnmapBatch, UnmapEntry,
};
use slat_lab::failure::Failure;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::unit::Unit;
use std::collections::BTreeSet;
use std::fmt;

/// Size of the memory that the histories use: the blocks around the first GiB and the second.
const MEMORY: u64 = 2 << 30;

/// Bytes of table memory of each side.
const TABLES: usize = 32 << 20;

/// An operation that both sides do.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Maps by a fault, leaf by leaf, or as one walk.
    Map {
        start: u64,
        size: u64,
        leaf: u64,
        write: bool,
        fault: bool,
    },
    Unmap {
        start: u64,
        size: u64,
    },
    Split {
        start: u64,
        size: u64,
        chunk: u64,
    },
    Protect {
        start: u64,
        size: u64,
    },
    Clear {
        start: u64,
        word: u64,
    },
    Age {
        start: u64,
        size: u64,
    },
    Write {
        gpa: u64,
    },
    Read {
        gpa: u64,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Map { start, size, leaf, write, fault } => {
                let rights = if *write { "rwx" } else { "rx" };
                let how = if *fault { "faults" } else { "a walk" };
                write!(f, "map {start:#x} + {size:#x} by {leaf:#x}, {rights}, by {how}")
            }
            Self::Unmap { start, size } => write!(f, "unmap {start:#x} + {size:#x}"),
            Self::Split { start, size, chunk } => {
                write!(f, "split {start:#x} + {size:#x} by chunks of {chunk:#x}")
            }
            Self::Protect { start, size } => write!(f, "write-protect {start:#x} + {size:#x}"),
            Self::Clear { start, word } => write!(f, "clear the word {word:#x} at {start:#x}"),
            Self::Age { start, size } => write!(f, "age {start:#x} + {size:#x}"),
            Self::Write { gpa } => write!(f, "write fault at {gpa:#x}"),
            Self::Read { gpa } => write!(f, "access fault at {gpa:#x}"),
        }
    }
}

/// The scenario of random histories.
pub struct Check;

impl Scenario for Check {
    const NAME: &'static str = "check";
    const ABOUT: &'static str =
        "Check Linux's tables against the engine's by random histories of operations";
    const EXAMPLES: &'static str = CHECK_EXAMPLES;
    const RENDERER: Renderer = super::tables::HISTORIES;
    type Settings = CheckArgs;

    fn run(args: &CheckArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        match args.granule {
            Granule::Size4k => by(Arm64::<12>::default(), args, session),
            Granule::Size16k => by(Arm64::<14>::default(), args, session),
            Granule::Size64k => by(Arm64::<16>::default(), args, session),
        }
    }
}

fn by<const SHIFT: u32>(
    format: Arm64<SHIFT>,
    args: &CheckArgs,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>>
where
    Arm64<SHIFT>: Format,
{
    let fwb = args.trees.fwb.is_on();
    let builds: Vec<_> =
        args.trees.walks.iter().map(|kind| build(SHIFT, fwb, *kind, false)).collect();
    let mut trees = checked_trees(&args.trees, &builds, TABLES as u64, session)?;
    let mut arena = Arena::new(TABLES, 1 << SHIFT, BreakBeforeMake::Always)?;
    let format = Arm64 { forced_write_back: fwb, ..format };
    let fixture = Fixture::new(format, MEMORY);
    let all = trees.len() * builds.len() * args.histories as usize;
    session.start("histories", all as u64);
    let mut results = Vec::new();
    for tree in 0..trees.len() {
        for (kind, how) in args.trees.walks.iter().zip(&builds) {
            let name = trees.name(tree).to_owned();
            session.say(&format!("{name}, {kind}"));
            let mut tally = Tally::default();
            for history in 0..args.histories {
                if session.check().is_err() {
                    break;
                }
                let seed = args.seed.wrapping_add(u64::from(history));
                let helper = trees.helper(tree, *how)?;
                let mut steps = Vec::new();
                let went = one(&fixture, &mut arena, helper, seed, args, &mut steps, &mut tally);
                went.map_err(|error| match error.is::<Failure>() {
                    true => error,
                    false => anyhow!("{error:#}\n{}", told(args, &name, *kind, seed, &steps)),
                })?;
                tally.histories += 1;
                session.step();
            }
            results.push(measurement(args, &trees, tree, *kind, &tally));
        }
    }
    session.finish();
    Ok(results)
}

/// Returns the history as text, to be read from its end, and the command that repeats it.
fn told(args: &CheckArgs, name: &str, kind: WalkKind, seed: u64, steps: &[Step]) -> String {
    let steps: Vec<String> = steps.iter().map(|step| format!("  {step}")).collect();
    format!(
        "this is after the last of these operations, {kind} walks of {name}; `slat-bench check \
         --seed {seed} --histories 1 --length {} --granule {} --walks {kind} --fwb {}`, with the \
         same trees and edits, does them again:\n{}",
        args.length,
        args.granule,
        args.trees.fwb,
        steps.join("\n")
    )
}

#[derive(Default)]
struct Tally {
    histories: u64,
    steps: u64,
    leaves: u64,
}

fn measurement(
    args: &CheckArgs,
    trees: &Trees,
    tree: usize,
    kind: WalkKind,
    tally: &Tally,
) -> Measurement {
    let params = [
        ("granule", json!(args.granule.bytes())),
        ("walks", json!(kind.to_string())),
        ("linux", json!(trees.version(tree))),
        ("seed", json!(args.seed)),
        ("length", json!(args.length)),
    ];
    let counts = [
        ("histories", tally.histories),
        ("operations", tally.steps),
        ("leaves_compared", tally.leaves),
    ];
    let params = params.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
    let (scenario, variant, steps) = (super::tables::CHECK, trees.name(tree), tally.steps as f64);
    Measurement {
        counts: counts.map(|(name, count)| (name.to_owned(), count)).into(),
        ..Measurement::new(scenario, LINUX, variant, params, Unit::OPERATIONS, vec![steps])
    }
}

fn one<F: Format>(
    fixture: &Fixture<F>,
    arena: &mut Arena,
    helper: &mut Helper,
    seed: u64,
    args: &CheckArgs,
    steps: &mut Vec<Step>,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    arena.reset();
    let arena = &*arena;
    let tables = fixture.empty(arena)?.activate();
    helper.call(Call::Reset).map_err(interrupted)?;
    let sizes = &leaf_sizes(args.granule);
    let mut rng = Rng::with_seed(seed);
    let mut both = Both {
        fixture,
        arena,
        tables: &tables,
        helper,
        sizes,
        loose: BTreeSet::new(),
        rejuvenated: Vec::new(),
    };
    let mut reader = Reader::register(arena)?;
    // Not every step that is drawn can be done.
    for _ in 0..args.length * 16 {
        if steps.len() == args.length as usize {
            break;
        }
        let Some(step) = both.choose(&mut rng, &mut reader)? else { continue };
        steps.push(step);
        both.step(step, &mut reader)?;
        tally.steps += 1;
        tally.leaves += both.compare()?;
    }
    both.end()
}

/// The tables of both sides.
struct Both<'b, 'p, F: Format> {
    fixture: &'b Fixture<F>,
    arena: &'p Arena,
    tables: &'b Tables<'p, F, Arena>,
    helper: &'b mut Helper,
    sizes: &'b [PageSize],
    /// Pages that Linux protected beyond those asked for.
    loose: BTreeSet<u64>,
    /// Old blocks that Linux made young as it split them: start and end of each.
    rejuvenated: Vec<(u64, u64)>,
}

impl<'p, F: Format> Both<'_, 'p, F> {
    fn page(&self) -> u64 {
        self.sizes[0].bytes()
    }

    /// Returns a step that both sides define alike; `None` if no step of its kind is possible
    /// there.
    fn choose(
        &self,
        rng: &mut Rng,
        reader: &mut Reader<'p, Arena>,
    ) -> anyhow::Result<Option<Step>> {
        let (page, all) = (self.page(), self.fixture.range());
        let mut one_of = |sizes: &[PageSize]| sizes[rng.usize(..sizes.len())].bytes();
        let (block, chunk) = (one_of(self.sizes), one_of(&self.sizes[1..]));
        // Addresses lie near the start of a few blocks, on either side, so that operations meet,
        // and ranges that begin in one table end in another.
        let middle = self.sizes[1].bytes();
        let mut near = || {
            let block = all.start().0 + rng.u64(..2) * (1 << 30) + rng.u64(..4) * middle;
            let at = block + rng.u64(..80) * page;
            at.saturating_sub(rng.u64(..2) * 40 * page).max(all.start().0)
        };
        let (at, other) = (near(), near());
        let kind = rng.u32(..12);
        let (start, end) = if kind < 4 || rng.bool() {
            let start = at & !(block - 1);
            (start, (start + rng.u64(1..4) * block).min(all.end().0))
        } else {
            (at.min(other), at.max(other) + page)
        };
        if start >= end {
            return Ok(None);
        }
        let guard = self.tables.enter(reader)?;
        let (from, to) = widened(&guard, start, end)?;
        let (start_whole, size) = (from, to - from);
        let mapped = guard.translate(Gpa(at))?;
        let empty = |at| guard.descriptor(Gpa(at)).is_some_and(|(_, size)| size.bytes() >= block);
        let free =
            || self.found(start, end).is_empty() && (start..end).step_by(block as usize).all(empty);
        Ok(match kind {
            0..=3 => free().then(|| Step::Map {
                start,
                size: end - start,
                leaf: block,
                write: rng.u32(..4) > 0,
                fault: rng.bool(),
            }),
            4 => Some(Step::Unmap { start: start_whole, size }),
            5 | 6 => Some(Step::Split { start: start_whole, size, chunk }),
            7 => Some(Step::Protect { start: start_whole, size }),
            8 => {
                // Only where pages are mapped already: Linux protects all of a block.
                let start = at & !(64 * page - 1);
                let bit = |rng: &mut Rng| 1u64 << rng.u32(..64);
                let word = match rng.u32(..4) {
                    0 => bit(rng),
                    1 => bit(rng) | bit(rng) | bit(rng),
                    2 => u64::MAX,
                    _ => rng.u64(..) | bit(rng),
                };
                self.is_pages(start, start + 64 * page).then_some(Step::Clear { start, word })
            }
            9 => Some(Step::Age { start: start_whole, size }),
            10 => mapped.map(|_| Step::Write { gpa: at & !(page - 1) }),
            _ => mapped.map(|_| Step::Read { gpa: at & !(page - 1) }),
        })
    }

    /// Unmaps what is left: Linux's reference counts must free all tables.
    fn end(&mut self) -> anyhow::Result<()> {
        let all = self.fixture.range();
        let left = self.call(Call::Unmap { start: all.start().0, size: all.size() })?;
        let empty = self.call(Call::Reset)?;
        let tables = |answer: &crate::linux::Answer| {
            answer.counts.iter().find(|(name, _)| name == "tables").map_or(0, |(_, bytes)| *bytes)
        };
        ensure!(
            tables(&left) == tables(&empty),
            "all is unmapped, and {} bytes of tables stay allocated",
            tables(&left) - tables(&empty)
        );
        Ok(())
    }

    fn found(&self, start: u64, end: u64) -> Vec<Run> {
        let range = GpaRange::new(Gpa(start), end - start).expect("it is not empty");
        leaves::of(self.tables, self.arena, range)
    }

    fn is_pages(&self, start: u64, end: u64) -> bool {
        let found = self.found(start, end);
        found.iter().map(|run| run.count).sum::<u64>() == (end - start) / self.page()
            && found.iter().all(|run| run.first.size == self.page())
    }

    fn call(&mut self, what: Call) -> anyhow::Result<crate::linux::Answer> {
        self.helper.call(what).map_err(interrupted)
    }

    fn step(&mut self, step: Step, reader: &mut Reader<'p, Arena>) -> anyhow::Result<()> {
        if let Step::Split { start, size, .. } = step {
            let blocks = self.found(start, start + size).into_iter().flat_map(|run| each(&run));
            let page = self.page();
            let old = blocks.filter(|leaf| leaf.size > page && leaf.raw & leaves::ACCESSED == 0);
            self.rejuvenated.extend(old.map(|leaf| (leaf.gpa, leaf.gpa + leaf.size)));
        }
        let ours = self.ours(step, reader)?;
        let host = Fixture::<F>::host(&self.fixture.range()).0 - self.fixture.range().start().0;
        let (largest, page) = (self.sizes[self.sizes.len() - 1].bytes(), self.page());
        match step {
            Step::Map { start, size, leaf, write, fault } => {
                let (prot, host) = (Prot { write, ..Prot::RAM }, start + host);
                self.call(match fault {
                    true => Call::Map { start, size, host, leaf, prot },
                    false => Call::Build { start, size, host, leaf, prot },
                })?;
            }
            Step::Unmap { start, size } => {
                self.call(Call::Unmap { start, size })?;
            }
            Step::Split { start, size, chunk } => {
                self.call(Call::Split { start, size, chunk })?;
            }
            Step::Protect { start, size } => {
                self.call(Call::Protect { start, size })?;
            }
            Step::Clear { start, word } => {
                let size = 64 * page;
                self.call(Call::Clear { start, size, word, chunk: largest })?;
                let hull = word.trailing_zeros()..64 - word.leading_zeros();
                let spared = hull.filter(|bit| word >> bit & 1 == 0);
                self.loose.extend(spared.map(|bit| start + u64::from(bit) * page));
            }
            Step::Age { start, size } => {
                let young = self.call(Call::Age { start, size, each: false })?.found;
                ensure!(ours == 0 || young > 0, "the engine found young pages, Linux none");
                let known =
                    self.rejuvenated.iter().any(|&(from, to)| from < start + size && to > start);
                ensure!(
                    ours > 0 || young == 0 || known,
                    "Linux found young pages, the engine none"
                );
            }
            Step::Write { gpa } => {
                self.call(Call::Relax { start: gpa, size: page, prot: Prot::RAM })?;
                self.call(Call::Young { start: gpa, size: page })?;
                self.loose.remove(&gpa);
            }
            Step::Read { gpa } => {
                self.call(Call::Young { start: gpa, size: page })?;
            }
        }
        if let Step::Map { start, size, .. }
        | Step::Unmap { start, size }
        | Step::Age { start, size } = step
        {
            let all = std::mem::take(&mut self.rejuvenated).into_iter();
            let left =
                all.flat_map(|(from, to)| [(from, to.min(start)), (from.max(start + size), to)]);
            self.rejuvenated = left.filter(|(from, to)| from < to).collect();
        }
        if let Step::Map { start, size, .. }
        | Step::Unmap { start, size }
        | Step::Protect { start, size } = step
        {
            self.loose.retain(|page| !(start..start + size).contains(page));
        }
        Ok(())
    }

    /// Does the step in the engine; for ageing, returns the number of young pages.
    fn ours(&mut self, step: Step, reader: &mut Reader<'p, Arena>) -> anyhow::Result<u64> {
        let mut places = [UnmapEntry::EMPTY; 4096];
        let mut batch = UnmapBatch::new(self.tables, &mut places);
        let mut storage = crate::fixture::chunk_storage();
        let mut cache = TableCache::new(self.arena, &mut storage);
        let mut guard = self.tables.enter(reader)?;
        let range = |start, size| GpaRange::new(Gpa(start), size);
        let mut young = 0;
        match step {
            Step::Map { start, size, leaf, write, .. } => {
                let range = range(start, size)?;
                let leaf = PageSize::from_bytes(leaf).context("a size of the granule")?;
                let attributes = Attributes { write, ..Attributes::RAM };
                cache.fill(usize::MAX)?;
                guard.map(range, Fixture::<F>::host(&range), attributes, leaf, &mut cache)?;
            }
            Step::Unmap { start, size } => {
                guard.unmap(range(start, size)?, &mut batch)?;
            }
            Step::Split { start, size, .. } => {
                let (mut at, end) = (start, start + size);
                while at < end {
                    let step = (end - at).min(1 << 30);
                    cache.fill(usize::MAX)?;
                    guard.split(range(at, step)?, self.sizes[0], &mut cache)?;
                    at += step;
                }
            }
            Step::Protect { start, size } => {
                guard.write_protect(range(start, size)?)?;
            }
            Step::Clear { start, word } => {
                guard.write_protect_pages(&Pages { start: Gpa(start), bits: &[word] })?;
            }
            Step::Age { start, size } => {
                let words = (size / self.sizes[0].bytes()).div_ceil(64) as usize;
                let (mut yes, mut unanswered) = (vec![0; words], vec![0; words]);
                let mut ages = AgeBitmaps { young: &mut yes, unanswered: &mut unanswered };
                young = guard.age(range(start, size)?, &mut ages, AgeOptions::LEAVES)?.young;
            }
            Step::Write { gpa } | Step::Read { gpa } => {
                let write = matches!(step, Step::Write { .. });
                let leaf = guard.translate(Gpa(gpa))?.context("it was mapped")?.size.bytes();
                let access = if write { Access::Write } else { Access::Read };
                guard
                    .relax(range(gpa & !(leaf - 1), leaf)?, access)
                    .map(slat::LocalFlush::not_needed_here)?;
            }
        }
        guard.invalidate();
        drop(guard);
        batch.complete().for_each(drop);
        Ok(young)
    }

    /// Compares all leaves; returns how many there are.
    fn compare(&mut self) -> anyhow::Result<u64> {
        let all = self.fixture.range();
        let ours = self.found(all.start().0, all.end().0);
        let theirs = self.helper.leaves(all.start().0, all.size()).map_err(interrupted)?;
        let (mut ours, mut theirs) = (ours.into_iter(), theirs.into_iter());
        let (mut our, mut their) = (ours.next(), theirs.next());
        let mut count = 0;
        while let (Some(a), Some(b)) = (our, their) {
            let both = a.count.min(b.count);
            // Of leaves that follow each other on both sides, either all differ alike or none
            // differs.
            if (a.first.gpa, a.first.size) != (b.first.gpa, b.first.size)
                || (a.first.raw ^ b.first.raw) & !leaves::SOFTWARE != 0
                || b.first.raw & leaves::SOFTWARE != 0
            {
                let pairs = each(&a).zip(each(&b)).take(both as usize);
                pairs.into_iter().try_for_each(|(our, their)| self.same(our, their))?;
            }
            count += both;
            our = leaves::rest(a, both).or_else(|| ours.next());
            their = leaves::rest(b, both).or_else(|| theirs.next());
        }
        if let Some(our) = our {
            bail!("only the engine maps {:#x}", our.first.gpa);
        }
        if let Some(their) = their {
            bail!("only Linux maps {:#x}, by {:#x}", their.first.gpa, their.first.raw);
        }
        Ok(count)
    }

    fn same(&self, our: Leaf, their: Leaf) -> anyhow::Result<()> {
        ensure!(
            (our.gpa, our.size) == (their.gpa, their.size),
            "the engine has a leaf of {:#x} bytes at {:#x}, Linux one of {:#x} at {:#x}",
            our.size,
            our.gpa,
            their.size,
            their.gpa
        );
        let mut differing = our.raw ^ their.raw;
        if their.raw & leaves::SOFTWARE == 0 {
            differing &= !leaves::SOFTWARE;
        }
        let rejuvenated = self.rejuvenated.iter().any(|&(from, to)| (from..to).contains(&our.gpa));
        if rejuvenated && their.raw & leaves::ACCESSED != 0 {
            differing &= !leaves::ACCESSED;
        }
        if self.loose.contains(&our.gpa) && their.raw & leaves::WRITE == 0 {
            differing &= !leaves::WRITE;
        }
        ensure!(
            differing == 0,
            "{:#x}: the engine's descriptor is {:#x}, Linux's {:#x}",
            our.gpa,
            our.raw,
            their.raw
        );
        Ok(())
    }
}

fn each(run: &Run) -> impl Iterator<Item = Leaf> + use<> {
    let Run { first, count } = *run;
    (0..count).map(move |number| Leaf {
        gpa: first.gpa + number * first.size,
        raw: first.raw + number * first.size,
        ..first
    })
}

/// Returns the range, extended to whole leaves at its ends.
fn widened<F: Format>(
    guard: &Guard<'_, '_, F, Arena>,
    start: u64,
    end: u64,
) -> anyhow::Result<(u64, u64)> {
    let around = |gpa: u64| -> anyhow::Result<(u64, u64)> {
        let size = guard.translate(Gpa(gpa))?.map_or(1, |found| found.size.bytes());
        let first = gpa & !(size - 1);
        Ok((first, first + size))
    };
    Ok((start.min(around(start)?.0), end.max(around(end - 1)?.1)))
}
