//! Measures how long faults take while another thread ages.
//!
//! One thread maps pages, and records its time for each 64 of them; a sample is the 99th percentile
//! of these times. Meanwhile another thread, on its own CPU, repeatedly makes pages old and young
//! again with the engine, or only reads their entries.

use super::faults::{map_each, tables_of};
use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, Sample};
use crate::fill::Stores;
use crate::fixture::{Fixture, steps};
use crate::format::TableFormat;
use crate::limit;
use crate::settings::engine::Part;
use crate::threads::{Gate, together};
use anyhow::ensure;
use slat::format::arm64::Arm64K4;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, GpaRange, PageSize, Reader,
    TableCache, Tables, UnloadedTables,
};
use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// Number of faults that are timed together, and of pages that are aged under one lock.
const BATCH: u64 = 64;

/// Bytes of memory that faults map. One batch in a hundred is forty batches.
const FAULTED: u64 = 1 << 30;

/// The work of the other thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// There is no other thread.
    Nobody,
    /// It reads the entries of other memory.
    Reads,
    /// It ages other memory.
    Ages,
    /// It ages the memory that is being mapped.
    AgesShared,
    /// It ages other memory, under a lock that each fault takes, 64 pages at a time.
    AgesLocked,
}

/// Returns the contest of faults with each kind of neighbour.
pub fn contest(memory: u64, cpus: &[usize]) -> anyhow::Result<Contest<'_>> {
    let entrant =
        |beside| move |arena: &mut Arena, check: bool| sample(memory, cpus, beside, arena, check);
    Ok(crate::contest::pose(Part::Beside, TableFormat::Arm64K4, memory, "p99 of 64 faults")
        .enter("alone", ENGINE, entrant(Beside::Nobody))
        .enter("beside-reading", ENGINE, entrant(Beside::Reads))
        .enter("beside-ageing", ENGINE, entrant(Beside::Ages))
        .enter("beside-ageing-shared", ENGINE, entrant(Beside::AgesShared))
        .enter("beside-ageing-locked", MACHINE, entrant(Beside::AgesLocked))
        .ratio("64 faults beside ageing, p99", &["beside-ageing"], &["beside-reading"])
        .at_most(1.15)
        .ratio("  alone", &["alone"], &["beside-reading"])
        .ratio("  shared range", &["beside-ageing-shared"], &["beside-reading"])
        .ratio("  a lock for 64 pages", &["beside-ageing-locked"], &["beside-reading"])
        .rounds_at_least(10))
}

/// A spin lock, like a kernel's.
#[derive(Default)]
struct Lock(AtomicBool);

impl Lock {
    fn with<R>(&self, work: impl FnOnce() -> R) -> R {
        while self.0.swap(true, Ordering::Acquire) {
            while self.0.load(Ordering::Relaxed) {
                spin_loop();
            }
        }
        let result = work();
        self.0.store(false, Ordering::Release);
        result
    }
}

/// State that both threads share.
struct Scene<'a, 'p> {
    fixture: Fixture<Arm64K4>,
    arena: &'p Arena,
    tables: &'a Tables<'p, Arm64K4, Arena>,
    ptes: &'a [&'a [AtomicU64]],
    /// Memory that is mapped from the start; the faults map the memory after it.
    other: GpaRange,
    beside: Beside,
    lock: Lock,
    /// Number of pages that the other thread has looked at.
    looked: AtomicU64,
    over: AtomicBool,
}

fn sample(
    memory: u64,
    cpus: &[usize],
    beside: Beside,
    arena: &mut Arena,
    check: bool,
) -> anyhow::Result<Sample> {
    let arena = arena.begin(BreakBeforeMake::Always, Stores::Plain);
    let fixture = Fixture::new(Arm64K4::default(), memory + FAULTED);
    let mapped = fixture.mapped(arena, memory, PageSize::SIZE_4K, Attributes::RAM)?;
    let tables = UnloadedTables::activate(mapped);
    let ptes = Fixture::new(Arm64K4::default(), memory).entries(&tables, arena);
    let scene = Scene {
        fixture,
        arena,
        tables: &tables,
        ptes: &ptes,
        other: fixture.part(0, memory),
        beside,
        lock: Lock::default(),
        looked: AtomicU64::new(0),
        over: AtomicBool::new(false),
    };
    let works = if beside == Beside::Nobody { 1 } else { 2 };
    let work = |thread: usize| {
        let scene = &scene;
        move |gate: &Gate| if thread == 0 { scene.faults(gate) } else { scene.neighbour(gate) }
    };
    let (_, mut times) = together(cpus, (0..works).map(work).collect())?;
    let mut times = times.swap_remove(0);
    ensure!(times.len() as u64 == FAULTED / 4096 / BATCH, "{} batches", times.len());
    if check {
        let mut reader = Reader::register(arena)?;
        let guard = tables.enter(&mut reader)?;
        let right = |a| Attributes { accessed: true, ..a } == Attributes::RAM;
        fixture.check(&guard, fixture.range(), PageSize::SIZE_4K, right)?;
    }
    times.sort_unstable();
    let p99 = times[times.len() * 99 / 100];
    let nanoseconds = |part: usize| times[part];
    let counts = vec![
        ("median_ns", nanoseconds(times.len() / 2)),
        ("worst_ns", nanoseconds(times.len() - 1)),
        ("pages_looked_at", scene.looked.load(Ordering::Relaxed)),
    ];
    Ok(Sample { seconds: p99 as f64 / 1e9, counts })
}

type Times = anyhow::Result<(f64, Vec<u64>)>;

impl<'p> Scene<'_, 'p> {
    /// Maps the memory after `other`, and records the nanoseconds of each batch.
    fn faults(&self, gate: &Gate) -> Times {
        let first = self.other.size() / 4096;
        let pages = FAULTED / 4096;
        let mut storage = crate::fixture::storage(tables_of(pages));
        let mut cache = TableCache::new(self.arena, &mut storage);
        cache.fill(usize::MAX)?;
        let mut reader = Reader::register(self.arena)?;
        let mut times = Vec::with_capacity((pages / BATCH) as usize);
        let (seconds, done) = gate.pass(|| {
            while self.beside != Beside::Nobody && self.looked.load(Ordering::Relaxed) == 0 {
                spin_loop();
            }
            for batch in (first..first + pages).step_by(BATCH as usize) {
                let begin = Instant::now();
                let all = batch..batch + BATCH;
                if self.beside == Beside::AgesLocked {
                    for page in all {
                        self.lock.with(|| self.map(&mut reader, &mut cache, page..page + 1))?;
                    }
                } else {
                    self.map(&mut reader, &mut cache, all)?;
                }
                times.push(begin.elapsed().as_nanos() as u64);
            }
            anyhow::Ok(())
        });
        self.over.store(true, Ordering::Relaxed);
        done?;
        Ok((seconds, times))
    }

    fn map(
        &self,
        reader: &mut Reader<'p, Arena>,
        cache: &mut TableCache<'_, Arm64K4, Arena>,
        pages: std::ops::Range<u64>,
    ) -> anyhow::Result<()> {
        let expected = (pages.end - pages.start) * 4096;
        let mapped = map_each(&self.fixture, self.tables, reader, cache, pages)?;
        ensure!(mapped == expected, "{mapped} bytes of {expected} were mapped");
        Ok(())
    }

    /// Does the other thread's work until the faults are over.
    fn neighbour(&self, gate: &Gate) -> Times {
        let mut reader = Reader::register(self.arena)?;
        let (mut young, mut unanswered) = (self.fixture.bitmap(), self.fixture.bitmap());
        let (seconds, done) = gate.pass(|| {
            if self.beside == Beside::Reads {
                self.read();
                return Ok(());
            }
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            self.age(&mut reader, &mut ages)
        });
        done?;
        Ok((seconds, Vec::new()))
    }

    fn over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn read(&self) {
        for table in self.ptes.iter().cycle() {
            black_box(limit::read(table));
            self.looked.fetch_add(table.len() as u64, Ordering::Relaxed);
            if self.over() {
                return;
            }
        }
    }

    /// Makes pages old, then young again; each is an atomic exchange of an entry.
    fn age(&self, reader: &mut Reader<'p, Arena>, ages: &mut AgeBitmaps<'_>) -> anyhow::Result<()> {
        let (range, step) = match self.beside {
            Beside::AgesShared => (self.fixture.part(self.other.size(), FAULTED), 2 << 20),
            Beside::AgesLocked => (self.other, BATCH * 4096),
            _ => (self.other, 2 << 20),
        };
        loop {
            for step in steps(range, step) {
                let mut turn = || -> anyhow::Result<()> {
                    let mut guard = self.tables.enter(reader)?;
                    guard.age(step, ages, AgeOptions::LEAVES)?;
                    guard.relax(step, Access::Read).map(slat::LocalFlush::not_needed_here)?;
                    guard.invalidate();
                    Ok(())
                };
                match self.beside {
                    Beside::AgesLocked => self.lock.with(turn)?,
                    _ => turn()?,
                }
                self.looked.fetch_add(step.size() / 4096, Ordering::Relaxed);
                if self.over() {
                    return Ok(());
                }
            }
        }
    }
}
