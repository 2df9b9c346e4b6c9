//! Inactive tables, which no CPU walks: mapped and protected by plain stores, compared with plain
//! loops.

use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, Sample};
use crate::fill::Stores;
use crate::fixture::{CHUNK, Fixture, chunk_storage, steps};
use crate::format::TableFormat;
use crate::limit;
use crate::settings::engine::Part;
use crate::stopwatch::Stopwatch;
use anyhow::ensure;
use slat::format::arm64::Arm64K4;
use slat::{Attributes, PageSize, TableCache};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns the contests: map a range, and write-protect one.
pub fn contests<'a>(memory: u64) -> anyhow::Result<Vec<Contest<'a>>> {
    let fixture = Fixture::new(Arm64K4::default(), memory);
    let bytes = (memory >> 9) as usize;
    let protect =
        crate::contest::pose(Part::Inactive, TableFormat::Arm64K4, memory, "write-protect")
            .enter("protect", ENGINE, move |arena, check| protect(&fixture, arena, check))
            .enter("modify", MACHINE, move |arena, _| modify(&fixture, arena))
            .ratio("inactive: write-protect", &["protect"], &["modify"])
            .at_most(1.5);
    let map = crate::contest::pose(Part::Inactive, TableFormat::Arm64K4, memory, "map")
        .enter("map", ENGINE, move |arena, check| map(&fixture, bytes, arena, check))
        .enter("fill-plain", MACHINE, move |arena, _| {
            arena.reset();
            arena.warm(bytes);
            let watch = Stopwatch::start();
            limit::fill_by(arena.words(bytes), 512, Stores::Plain);
            Ok(Sample::time(watch.seconds()))
        })
        .ratio("inactive: map a range", &["map"], &["fill-plain"])
        .at_most(1.5);
    Ok(vec![protect, map])
}

fn protect(fixture: &Fixture<Arm64K4>, arena: &mut Arena, check: bool) -> anyhow::Result<Sample> {
    arena.reset();
    arena.set_stores(Stores::Plain);
    let mut tables =
        fixture.mapped(arena, fixture.range().size(), PageSize::SIZE_4K, Attributes::RAM)?;
    let watch = Stopwatch::start();
    let bytes = tables.write_protect(fixture.range())?;
    let seconds = watch.seconds();
    ensure!(bytes == fixture.range().size(), "{bytes} bytes changed");
    if check {
        let expected = Attributes { write: false, ..Attributes::RAM };
        fixture
            .check(&tables.enter_mut(), fixture.range(), PageSize::SIZE_4K, |a| a == expected)?;
    }
    Ok(Sample::time(seconds))
}

/// Loads and stores each entry in a plain loop.
fn modify(fixture: &Fixture<Arm64K4>, arena: &mut Arena) -> anyhow::Result<Sample> {
    arena.reset();
    arena.set_stores(Stores::Plain);
    let tables = fixture.live(arena, PageSize::SIZE_4K, Attributes::RAM)?;
    let ptes = fixture.entries(&tables, arena);
    let watch = Stopwatch::start();
    for table in &ptes {
        black_box(modify_each(table));
    }
    Ok(Sample::time(watch.seconds()))
}

fn modify_each(words: &[AtomicU64]) -> u64 {
    let mut any = 0;
    for word in words {
        let raw = word.load(Ordering::Relaxed);
        any |= raw;
        word.store(raw & !(1 << 7), Ordering::Relaxed);
    }
    any
}

/// Maps all memory in chunks. The time includes filling the cache.
fn map(
    fixture: &Fixture<Arm64K4>,
    bytes: usize,
    arena: &mut Arena,
    check: bool,
) -> anyhow::Result<Sample> {
    arena.reset();
    arena.set_stores(Stores::Plain);
    let arena = &*arena;
    let mut tables = fixture.empty(arena)?;
    arena.warm(bytes);
    let mut storage = chunk_storage();
    let mut cache = TableCache::new(arena, &mut storage);
    let mut mapped = 0;
    let watch = Stopwatch::start();
    for chunk in steps(fixture.range(), CHUNK) {
        cache.fill(usize::MAX)?;
        let hpa = Fixture::<Arm64K4>::host(&chunk);
        mapped += tables.map(chunk, hpa, Attributes::RAM, PageSize::SIZE_4K, &mut cache)?;
    }
    let seconds = watch.seconds();
    ensure!(mapped == fixture.range().size(), "{mapped} bytes were mapped");
    if check {
        fixture.check(&tables.enter_mut(), fixture.range(), PageSize::SIZE_4K, |a| {
            a == Attributes::RAM
        })?;
    }
    Ok(Sample::time(seconds))
}
