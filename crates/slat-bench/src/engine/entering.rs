//! Entering and leaving tables, with one thread and with two, each on its own CPU.

use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, MACHINE, Sample};
use crate::fill::Stores;
use crate::fixture::Fixture;
use crate::format::TableFormat;
use crate::settings::engine::Part;
use crate::threads::{Gate, together};
use anyhow::ensure;
use slat::format::arm64::Arm64K4;
use slat::{BreakBeforeMake, Reader};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of stays of each thread in one turn.
const STAYS: u64 = 1 << 20;

/// A word on a cache line of its own.
#[repr(align(128))]
pub struct Line(AtomicU64);

impl Line {
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Runs `work` after an exchange of the word, and before a store to it: the least that entering
    /// and leaving can take where a thread has to tell others before its next load.
    #[inline(always)]
    pub fn around<R>(&self, work: impl FnOnce() -> R) -> R {
        self.0.swap(1, Ordering::AcqRel);
        let result = work();
        self.0.store(0, Ordering::Release);
        result
    }
}

/// Returns the contest of stays that do nothing, with exchanges of a word as limit.
pub fn contest(memory: u64, cpus: &[usize]) -> anyhow::Result<Contest<'_>> {
    let enter = move |threads: usize| {
        move |arena: &mut Arena, _: bool| enter_by(memory, &cpus[..threads], arena)
    };
    let exchange =
        move |threads: usize| move |_: &mut Arena, _: bool| exchange_by(&cpus[..threads]);
    let contest = crate::contest::pose(Part::Enter, TableFormat::Arm64K4, memory, "empty stays")
        .enter("enter-1", ENGINE, enter(1))
        .enter("exchange-1", MACHINE, exchange(1))
        .each("enter and leave", &["enter-1"], STAYS)
        .at_most(5.0)
        .each("  an exchange and a store", &["exchange-1"], STAYS);
    Ok(if cpus.len() < 2 {
        contest
    } else {
        contest
            .enter("enter-2", ENGINE, enter(2))
            .enter("exchange-2", MACHINE, exchange(2))
            .ratio(
                "enter and leave, two threads by one",
                &["enter-2", "exchange-1"],
                &["enter-1", "exchange-2"],
            )
            .at_most(1.2)
    })
}

fn enter_by(memory: u64, cpus: &[usize], arena: &mut Arena) -> anyhow::Result<Sample> {
    let arena = arena.begin(BreakBeforeMake::Always, Stores::Plain);
    let tables = &Fixture::new(Arm64K4::default(), memory).empty(arena)?.activate();
    let work = |_| {
        move |gate: &Gate| {
            let mut reader = Reader::register(arena)?;
            let (seconds, stays) = gate.pass(|| {
                (0..STAYS)
                    .filter(|_| {
                        tables.enter(&mut reader).map(|guard| black_box(guard.vmid())).is_ok()
                    })
                    .count()
            });
            ensure!(stays as u64 == STAYS, "{stays} stays of {STAYS}");
            Ok((seconds, ()))
        }
    };
    let (seconds, _) = together(cpus, cpus.iter().map(work).collect())?;
    Ok(Sample::time(seconds))
}

fn exchange_by(cpus: &[usize]) -> anyhow::Result<Sample> {
    let work = |_| {
        move |gate: &Gate| {
            let line = Line::new();
            let line = black_box(&line);
            Ok(gate.pass(|| (0..STAYS).for_each(|_| line.around(|| ()))))
        }
    };
    let (seconds, _) = together(cpus, cpus.iter().map(work).collect())?;
    Ok(Sample::time(seconds))
}
