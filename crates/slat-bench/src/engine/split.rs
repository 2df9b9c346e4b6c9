//! Splits of blocks, compared with filling as many bytes.

use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, Sample, is_large};
use crate::fill::Stores;
use crate::fixture::{CHUNK, Fixture, chunk_storage, counted, steps};
use crate::format::TableFormat;
use crate::limit;
use crate::settings::engine::Part;
use crate::stopwatch::Stopwatch;
use crate::threads::{Gate, together};
use anyhow::ensure;
use slat::format::arm64::Arm64K4;
use slat::{Attributes, BreakBeforeMake, GpaRange, OpCounts, PageSize, Reader, TableCache, Tables};

type K4 = Arm64K4;

/// Number of entries of a table.
const TABLE: usize = 512;

/// Returns the contests for blocks of 2m and of 1g, with a plain fill for each kind of stores.
pub fn contests<'a>(memory: u64) -> anyhow::Result<Vec<Contest<'a>>> {
    let contest = |(of, size): (&'static str, PageSize)| {
        let fixture = Fixture::new(K4::default(), memory);
        let bytes = built_bytes(memory, size);
        let by = move |bbm, stores| {
            move |arena: &mut Arena, check: bool| {
                arena.set_break_before_make(bbm);
                arena.set_stores(stores);
                split(&fixture, size, bytes, arena, check)
            }
        };
        let split = move |stores| by(BreakBeforeMake::Always, stores);
        let fill = move |stores| {
            move |arena: &mut Arena, _: bool| {
                arena.reset();
                arena.warm(bytes);
                let watch = Stopwatch::start();
                limit::fill_by(arena.words(bytes), TABLE, stores);
                Ok(Sample::time(watch.seconds()))
            }
        };
        let contest = crate::contest::pose(Part::Split, TableFormat::Arm64K4, memory, of)
            .enter("split", ENGINE, split(Stores::Plain))
            .enter("split-unbroken", ENGINE, by(BreakBeforeMake::Never, Stores::Plain))
            .enter("split-wide", ENGINE, split(Stores::Wide))
            .enter("split-streaming", ENGINE, split(Stores::Streaming))
            .enter("fill-plain", MACHINE, fill(Stores::Plain))
            .enter("fill-wide", MACHINE, fill(Stores::Wide))
            .enter("fill-streaming", MACHINE, fill(Stores::Streaming));
        let contest = contest
            .ratio(format!("split {of}"), &["split"], &["fill-plain"])
            .at_most(if is_large(memory) { 1.5 } else { 1.3 });
        let unbroken = format!("split {of}, no break needed");
        let (what, of) = (format!("split {of}, streaming"), format!("split {of}, wide stores"));
        let streaming: &[&str] = &["split-streaming"];
        let contest = contest
            .ratio(what, streaming, &["fill-plain"])
            .at_most(is_large(memory).then_some(0.8));
        let contest = contest.ratio(unbroken, &["split-unbroken"], &["fill-plain"]);
        contest.ratio(of, &["split-wide"], &["fill-plain"]).ratio(
            "  of the machine: fill, streaming",
            &["fill-streaming"],
            &["fill-plain"],
        )
    };
    let sizes = [("2m", PageSize::SIZE_2M), ("1g", PageSize::SIZE_1G)];
    Ok(sizes.map(contest).into())
}

/// Returns the bytes of the tables that splitting blocks of `size` builds.
fn built_bytes(memory: u64, size: PageSize) -> usize {
    let pages = memory >> 9;
    (if size == PageSize::SIZE_1G { pages + (memory >> 18) } else { pages }) as usize
}

/// Splits all memory in chunks with one thread. The time includes filling its cache.
fn split(
    fixture: &Fixture<K4>,
    size: PageSize,
    bytes: usize,
    arena: &mut Arena,
    check: bool,
) -> anyhow::Result<Sample> {
    arena.reset();
    let arena = &*arena;
    let tables = fixture.live(arena, size, Attributes::RAM)?;
    arena.warm(bytes);
    let mut storage = chunk_storage();
    let mut cache = TableCache::new(arena, &mut storage);
    let mut reader = Reader::register(arena)?;
    let before = arena.invalidations();
    let watch = Stopwatch::start();
    let counts = split_range(&tables, &mut reader, fixture.range(), &mut cache)?;
    let seconds = watch.seconds();
    let invalidations = arena.invalidations() - before;
    ensure!(
        counts.tables_built as usize * 4096 == bytes,
        "{} tables were built, not {}",
        counts.tables_built,
        bytes / 4096
    );
    if check {
        let guard = tables.enter(&mut reader)?;
        fixture.check(&guard, fixture.range(), PageSize::SIZE_4K, |a| a == Attributes::RAM)?;
    }
    Ok(Sample { seconds, counts: counted(counts, invalidations) })
}

fn split_range<'p>(
    tables: &Tables<'p, K4, Arena>,
    reader: &mut Reader<'p, Arena>,
    range: GpaRange,
    cache: &mut TableCache<'_, K4, Arena>,
) -> anyhow::Result<OpCounts> {
    let mut counts = OpCounts::NONE;
    for chunk in steps(range, CHUNK) {
        cache.fill(usize::MAX)?;
        let mut guard = tables.enter(reader)?;
        guard.split(chunk, PageSize::SIZE_4K, cache)?;
        counts += guard.counts();
        guard.invalidate();
    }
    Ok(counts)
}

/// Returns the contest of two threads with their own table caches, on disjoint halves, against one.
pub fn threads(memory: u64, cpus: &[usize]) -> anyhow::Result<Contest<'_>> {
    let fixture = Fixture::new(K4::default(), memory);
    let bytes = built_bytes(memory, PageSize::SIZE_2M);
    let split = move |threads: usize| {
        move |arena: &mut Arena, check: bool| {
            split_by(&fixture, bytes, &cpus[..threads], arena, check)
        }
    };
    let fill = move |threads: usize| {
        move |arena: &mut Arena, _: bool| fill_by(bytes, &cpus[..threads], arena)
    };
    Ok(crate::contest::pose(Part::SplitThreads, TableFormat::Arm64K4, memory, "2m")
        .enter("split-1", ENGINE, split(1))
        .enter("split-2", ENGINE, split(2))
        .enter("fill-1", MACHINE, fill(1))
        .enter("fill-2", MACHINE, fill(2))
        .ratio("split 2m, two threads by one", &["split-2", "fill-1"], &["split-1", "fill-2"])
        .at_most(1.2))
}

fn split_by(
    fixture: &Fixture<K4>,
    bytes: usize,
    cpus: &[usize],
    arena: &mut Arena,
    check: bool,
) -> anyhow::Result<Sample> {
    let arena = arena.begin(BreakBeforeMake::Always, Stores::Plain);
    let tables = &fixture.live(arena, PageSize::SIZE_2M, Attributes::RAM)?;
    arena.warm(bytes);
    let share = fixture.range().size() / cpus.len() as u64;
    let work = |thread: u64| {
        move |gate: &Gate| {
            let mut storage = chunk_storage();
            let mut cache = TableCache::new(arena, &mut storage);
            let mut reader = Reader::register(arena)?;
            let range = fixture.part(thread * share, share);
            let (seconds, counts) =
                gate.pass(|| split_range(tables, &mut reader, range, &mut cache));
            Ok((seconds, counts?))
        }
    };
    let (seconds, counts) = together(cpus, (0..cpus.len() as u64).map(work).collect())?;
    let built: u64 = counts.iter().map(|counts| counts.tables_built).sum();
    ensure!(built as usize * 4096 == bytes, "{built} tables were built, not {}", bytes / 4096);
    if check {
        let mut reader = Reader::register(arena)?;
        let guard = tables.enter(&mut reader)?;
        fixture.check(&guard, fixture.range(), PageSize::SIZE_4K, |a| a == Attributes::RAM)?;
    }
    Ok(Sample { seconds, counts: vec![("tables_built", built)] })
}

fn fill_by(bytes: usize, cpus: &[usize], arena: &mut Arena) -> anyhow::Result<Sample> {
    arena.reset();
    arena.warm(bytes);
    let share = bytes / 8 / cpus.len();
    let work =
        |words| move |gate: &Gate| Ok(gate.pass(|| limit::fill_by(words, TABLE, Stores::Plain)));
    let words = arena.words(bytes).chunks_mut(share);
    let (seconds, _) = together(cpus, words.map(work).collect())?;
    Ok(Sample::time(seconds))
}
