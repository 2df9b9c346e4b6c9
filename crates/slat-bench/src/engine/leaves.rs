//! Write protection and ageing leaf by leaf, compared with one atomic exchange or one load of each
//! entry.

use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, Sample, is_large};
use crate::fill::Stores;
use crate::fixture::{Fixture, counted};
use crate::format::TableFormat;
use crate::limit;
use crate::settings::engine::Part;
use crate::stopwatch::Stopwatch;
use anyhow::ensure;
use slat::format::arm64::Arm64K4;
use slat::{
    AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, Format, PageSize, Platform, Reader, Tables,
};
use std::hint::black_box;
use std::sync::atomic::AtomicU64;

/// The operation on all leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    Protect,
    Age,
}

/// Bitmaps for ageing, touched before the measurement.
struct Bits {
    young: Vec<u64>,
    unanswered: Vec<u64>,
}

impl Bits {
    fn of<F: Format>(fixture: &Fixture<F>) -> Self {
        Self { young: fixture.bitmap(), unanswered: fixture.bitmap() }
    }

    fn clear(&mut self) {
        self.young.fill(0);
        self.unanswered.fill(0);
    }

    fn young(&self) -> u64 {
        self.young.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// Returns the contests of write protection, of a writable range and of one already protected.
pub fn protect<'a>(memory: u64) -> anyhow::Result<Vec<Contest<'a>>> {
    Ok(vec![
        contest(memory, Op::Protect, false)
            .ratio("write-protect", &["protect"], &["cas"])
            .at_most(1.25),
        contest(memory, Op::Protect, true)
            .ratio("write-protect, protected already", &["protect"], &["read"])
            .at_most(of_reads(memory)),
    ])
}

/// Returns the contests of ageing, of a young range and of an old one.
pub fn age<'a>(memory: u64) -> anyhow::Result<Vec<Contest<'a>>> {
    Ok(vec![
        contest(memory, Op::Age, false).ratio("age, all young", &["age"], &["cas"]).at_most(1.25),
        contest(memory, Op::Age, true)
            .ratio("age, all old", &["age"], &["read"])
            .at_most(of_reads(memory)),
    ])
}

/// Returns the most time that work which changes nothing may take, by that of reading.
fn of_reads(memory: u64) -> f64 {
    if is_large(memory) { 1.5 } else { 2.0 }
}

fn contest<'a>(memory: u64, op: Op, again: bool) -> Contest<'a> {
    let fixture = Fixture::new(Arm64K4::default(), memory);
    let (part, name, of) = match (op, again) {
        (Op::Protect, false) => (Part::Protect, "protect", "writable"),
        (Op::Protect, true) => (Part::Protect, "protect", "protected already"),
        (Op::Age, false) => (Part::Age, "age", "young"),
        (Op::Age, true) => (Part::Age, "age", "old"),
    };
    let (limit, each): (_, fn(&[AtomicU64]) -> u64) =
        if again { ("read", limit::read) } else { ("cas", limit::exchange) };
    let mut bits = Bits::of(&fixture);
    let mut more = Bits::of(&fixture);
    crate::contest::pose(part, TableFormat::Arm64K4, memory, of)
        .enter(name, ENGINE, move |arena, check| {
            ready(arena);
            let arena = &*arena;
            let tables = prepared(&fixture, arena, op, again, &mut bits)?;
            let mut reader = Reader::register(arena)?;
            let before = arena.invalidations();
            bits.clear();
            let watch = Stopwatch::start();
            let mut guard = tables.enter(&mut reader)?;
            let pages = done(&fixture, &mut guard, op, &mut bits)?;
            let counts = guard.counts();
            guard.invalidate();
            drop(guard);
            let seconds = watch.seconds();
            let expected = if again { 0 } else { fixture.pages() };
            ensure!(pages == expected, "{pages} pages changed, not {expected}");
            let invalidations = arena.invalidations() - before;
            if op == Op::Age {
                ensure!(bits.young() == expected, "{} bits, not {expected}", bits.young());
            }
            if check {
                let guard = tables.enter(&mut reader)?;
                fixture.check(&guard, fixture.range(), PageSize::SIZE_4K, |a| match op {
                    Op::Protect => a == Attributes { write: false, ..Attributes::RAM },
                    Op::Age => a == Attributes { accessed: false, ..Attributes::RAM },
                })?;
            }
            Ok(Sample { seconds, counts: counted(counts, invalidations) })
        })
        .enter(limit, MACHINE, move |arena, _| {
            ready(arena);
            let tables = prepared(&fixture, arena, op, again, &mut more)?;
            let ptes = fixture.entries(&tables, arena);
            more.clear();
            let watch = Stopwatch::start();
            for table in &ptes {
                black_box(each(table));
            }
            let seconds = watch.seconds();
            let ptes: usize = ptes.iter().map(|table| table.len()).sum();
            ensure!(ptes as u64 == fixture.pages(), "{ptes} entries of {} pages", fixture.pages());
            Ok(Sample { seconds, counts: vec![("entries", ptes as u64)] })
        })
}

fn ready(arena: &mut Arena) {
    arena.begin(BreakBeforeMake::Always, Stores::Plain);
}

/// Builds tables; with `again`, it also does the operation once. The last pass over all entries
/// decides what is in the caches.
fn prepared<'a, F: Format>(
    fixture: &Fixture<F>,
    arena: &'a Arena,
    op: Op,
    again: bool,
    bits: &mut Bits,
) -> anyhow::Result<Tables<'a, F, Arena>> {
    let tables = fixture.live(arena, PageSize::SIZE_4K, Attributes::RAM)?;
    if again {
        let mut reader = Reader::register(arena)?;
        let mut guard = tables.enter(&mut reader)?;
        done(fixture, &mut guard, op, bits)?;
        guard.invalidate();
    }
    Ok(tables)
}

/// Does the operation on all of the memory; returns the number of pages that changed.
fn done<F: Format, P: Platform>(
    fixture: &Fixture<F>,
    guard: &mut slat::Guard<'_, '_, F, P>,
    op: Op,
    bits: &mut Bits,
) -> anyhow::Result<u64> {
    Ok(match op {
        Op::Protect => guard.write_protect(fixture.range())? >> F::PAGE_SHIFT,
        Op::Age => {
            let mut ages = AgeBitmaps { young: &mut bits.young, unanswered: &mut bits.unanswered };
            let aged = guard.age(fixture.range(), &mut ages, AgeOptions::LEAVES)?;
            ensure!(aged.unanswered == 0, "{} pages without an answer", aged.unanswered);
            aged.young
        }
    })
}
