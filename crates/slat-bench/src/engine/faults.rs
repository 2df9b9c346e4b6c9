//! Faults that map one page each, with allocated table pages; by one thread and by two.

use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, Sample};
use crate::fill::Stores;
use crate::fixture::{Fixture, storage};
use crate::format::TableFormat;
use crate::limit;
use crate::settings::engine::Part;
use crate::stopwatch::Stopwatch;
use crate::threads::{Gate, together};
use anyhow::ensure;
use slat::format::arm64::Arm64K4;
use slat::{Attributes, BreakBeforeMake, Guard, PageSize, Reader, TableCache, Tables};
use std::hint::black_box;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

/// Returns the number of table pages that mapping `pages` pages takes.
pub fn tables_of(pages: u64) -> usize {
    (pages.div_ceil(512) + pages.div_ceil(512 * 512)) as usize + 4
}

/// Handles a fault on each page of `pages`; returns the number of bytes mapped.
#[inline]
pub fn map_each<'p>(
    fixture: &Fixture<Arm64K4>,
    tables: &Tables<'p, Arm64K4, Arena>,
    reader: &mut Reader<'p, Arena>,
    cache: &mut TableCache<'_, Arm64K4, Arena>,
    pages: Range<u64>,
) -> anyhow::Result<u64> {
    let mut mapped = 0;
    for page in pages {
        let mut guard = tables.enter(reader)?;
        mapped += map_page(fixture, &mut guard, cache, page)?;
        guard.invalidate();
    }
    Ok(mapped)
}

#[inline(always)]
fn map_page(
    fixture: &Fixture<Arm64K4>,
    guard: &mut Guard<'_, '_, Arm64K4, Arena>,
    cache: &mut TableCache<'_, Arm64K4, Arena>,
    page: u64,
) -> anyhow::Result<u64> {
    let page = fixture.page(page);
    let hpa = Fixture::<Arm64K4>::host(&page);
    Ok(guard.map(page, hpa, Attributes::RAM, PageSize::SIZE_4K, cache)?)
}

/// Returns the contest of one thread that maps all pages in ascending order, by a guard for each
/// and by one for all, with one compare-and-swap of each entry as limit.
pub fn map<'a>(memory: u64) -> anyhow::Result<Contest<'a>> {
    let fixture = Fixture::new(Arm64K4::default(), memory);
    let map = move |kept: bool| {
        move |arena: &mut Arena, check: bool| {
            let arena = arena.begin(BreakBeforeMake::Always, Stores::Plain);
            let tables = fixture.empty(arena)?.activate();
            let mut storage = storage(tables_of(fixture.pages()));
            let mut cache = TableCache::new(arena, &mut storage);
            cache.fill(usize::MAX)?;
            let mut reader = Reader::register(arena)?;
            let pages = 0..fixture.pages();
            let watch = Stopwatch::start();
            let mapped = if kept {
                let mut guard = tables.enter(&mut reader)?;
                let mut mapped = 0;
                for page in pages {
                    mapped += map_page(&fixture, &mut guard, &mut cache, page)?;
                }
                guard.invalidate();
                mapped
            } else {
                map_each(&fixture, &tables, &mut reader, &mut cache, pages)?
            };
            let seconds = watch.seconds();
            ensure!(mapped == fixture.range().size(), "{mapped} bytes were mapped");
            if check {
                let guard = tables.enter(&mut reader)?;
                fixture
                    .check(&guard, fixture.range(), PageSize::SIZE_4K, |a| a == Attributes::RAM)?;
            }
            Ok(Sample::time(seconds))
        }
    };
    Ok(crate::contest::pose(Part::Map, TableFormat::Arm64K4, memory, "4k, one by one")
        .enter("map", ENGINE, map(false))
        .enter("map-kept", ENGINE, map(true))
        .enter("cas", MACHINE, move |arena, _| {
            let arena = arena.begin(BreakBeforeMake::Always, Stores::Plain);
            let tables = fixture.live(arena, PageSize::SIZE_4K, Attributes::RAM)?;
            let ptes = fixture.entries(&tables, arena);
            let watch = Stopwatch::start();
            for table in &ptes {
                black_box(limit::exchange(table));
            }
            Ok(Sample::time(watch.seconds()))
        })
        .ratio("map one page, guard kept", &["map-kept"], &["cas"])
        .at_most(5.0)
        .ratio("map one page, a guard for each", &["map"], &["cas"])
        .at_most(5.0))
}

/// Returns the contest of one thread and of two that map disjoint ranges, with compare-and-swaps of
/// the same entries as limit.
pub fn threads(memory: u64, cpus: &[usize]) -> anyhow::Result<Contest<'_>> {
    let fixture = Fixture::new(Arm64K4::default(), memory);
    let map = move |threads: usize| {
        move |arena: &mut Arena, check: bool| map_by(&fixture, &cpus[..threads], arena, check)
    };
    let cas = move |threads: usize| {
        move |arena: &mut Arena, _: bool| exchange_by(&fixture, &cpus[..threads], arena)
    };
    Ok(crate::contest::pose(Part::MapThreads, TableFormat::Arm64K4, memory, "4k, one by one")
        .enter("map-1", ENGINE, map(1))
        .enter("map-2", ENGINE, map(2))
        .enter("cas-1", MACHINE, cas(1))
        .enter("cas-2", MACHINE, cas(2))
        .ratio("map one page, two threads by one", &["map-2", "cas-1"], &["map-1", "cas-2"])
        .at_most(1.2))
}

fn map_by(
    fixture: &Fixture<Arm64K4>,
    cpus: &[usize],
    arena: &mut Arena,
    check: bool,
) -> anyhow::Result<Sample> {
    let arena = arena.begin(BreakBeforeMake::Always, Stores::Plain);
    let tables = &fixture.empty(arena)?.activate();
    let share = fixture.pages() / cpus.len() as u64;
    let work = |thread: u64| {
        move |gate: &Gate| {
            let mut storage = storage(tables_of(share));
            let mut cache = TableCache::new(arena, &mut storage);
            cache.fill(usize::MAX)?;
            let mut reader = Reader::register(arena)?;
            let pages = thread * share..(thread + 1) * share;
            let (seconds, mapped) =
                gate.pass(|| map_each(fixture, tables, &mut reader, &mut cache, pages));
            ensure!(mapped? == share << 12, "not all was mapped");
            Ok((seconds, ()))
        }
    };
    let (seconds, _) = together(cpus, (0..cpus.len() as u64).map(work).collect())?;
    if check {
        let mut reader = Reader::register(arena)?;
        let guard = tables.enter(&mut reader)?;
        fixture.check(&guard, fixture.range(), PageSize::SIZE_4K, |a| a == Attributes::RAM)?;
    }
    Ok(Sample::time(seconds))
}

fn exchange_by(
    fixture: &Fixture<Arm64K4>,
    cpus: &[usize],
    arena: &mut Arena,
) -> anyhow::Result<Sample> {
    arena.reset();
    arena.set_stores(Stores::Plain);
    let arena = &*arena;
    let tables = fixture.live(arena, PageSize::SIZE_4K, Attributes::RAM)?;
    let ptes = fixture.entries(&tables, arena);
    let share = ptes.len() / cpus.len();
    let exchange = |tables: &[&[AtomicU64]]| -> u64 {
        tables.iter().map(|table| black_box(limit::exchange(table))).sum()
    };
    let works = ptes
        .chunks(share)
        .map(|tables| move |gate: &Gate| Ok(gate.pass(|| exchange(tables))))
        .collect();
    let (seconds, lost) = together(cpus, works)?;
    ensure!(lost.iter().all(|lost| *lost == 0), "an exchange was lost to nobody");
    Ok(Sample::time(seconds))
}
