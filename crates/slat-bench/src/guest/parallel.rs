//! Work of one thread and of two, compared with plain compare-and-swaps of as many entries: clears
//! of the log, and faults.

use super::log_options::DirtyLogArgs;
use crate::format::TablesArgs;
use crate::guest::fixture::{Fixture, SLOT, Shape, TheGuest};
use crate::guest::runner::{Locks, Runner};
use crate::guest::tables::Figures;
use crate::guest::turns::{Counts, Recorder, counts, take_turns};
use crate::limit;
use crate::on_machine;
use crate::threads::{Gate, cpus, together};
use anyhow::ensure;
use serde_json::{Map, Value};
use slat::Format;
use slat_guest::{FaultKind, Worker};
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_sim::arch::Arch;
use std::sync::atomic::AtomicU64;

/// Columns of the table of clears.
pub const CLEARS: Figures = Figures {
    of: "guest-log-parallel",
    title: "Clearing with two threads",
    counts: &[("clear", "pages", "pages")],
    note: "Time of the thread that worked longest; each has half of the pages. cas: a \
           compare-and-swap of as many entries.",
    ..Figures::NONE
};

/// Columns of the table of faults.
pub const FAULTS: Figures = Figures {
    of: "guest-populate-parallel",
    title: "First touches by two vCPUs",
    counts: &[("fault", "pages", "pages")],
    note: "Time of the thread that worked longest; each has half of the pages. apart: two guests \
           of one vCPU each, on machines of their own, which share no memory: the most that the \
           host's CPUs allow.",
    ..Figures::NONE
};

/// Bytes of memory that make it worth starting two threads.
const LEAST: u64 = 1 << 30;
/// Rounds are short and vary, because threads meet by chance.
const LEAST_ROUNDS: u32 = 15;

/// What one thread does, and two.
struct Work {
    scenario: &'static str,
    figure: &'static str,
    variants: &'static [Variant],
    /// Names of ratios and of their two sides, as the places of variants in products.
    ratios: &'static [Ratio],
}

/// The name of what takes a turn, and whether the engine does it.
type Variant = (&'static str, bool);

/// A name, two sides, what each of them is the product of, and the most that is allowed.
type Ratio = ([&'static str; 3], [&'static [usize]; 2], Option<f64>);

const CLEAR: Work = Work {
    scenario: CLEARS.of,
    figure: "clear",
    variants: &[("clear-1", true), ("clear-2", true), ("cas-1", false), ("cas-2", false)],
    ratios: &[(
        ["clear, two threads by one", "clear-2 * cas-1", "clear-1 * cas-2"],
        [&[1, 2], &[0, 3]],
        Some(1.2),
    )],
};

const FAULT: Work = Work {
    scenario: FAULTS.of,
    figure: "fault",
    variants: &[("fault-1", true), ("fault-2", true), ("apart-2", true)],
    ratios: &[
        (["faults, one guest by two apart", "fault-2", "apart-2"], [&[1], &[2]], Some(1.1)),
        (["faults, two vCPUs by one", "fault-2", "fault-1"], [&[1], &[0]], None),
    ],
};

/// Returns the CPUs, if there are two.
fn two(what: &str, session: &mut Session) -> anyhow::Result<Option<Vec<usize>>> {
    let cpus = cpus()?;
    if cpus.len() < 2 {
        session.skip(what, "it takes two CPUs, and this process may use one");
    }
    Ok((cpus.len() >= 2).then_some(cpus))
}

/// Measures clears by two threads against those by one.
///
/// # Errors
/// Too little memory, or an incomplete clear.
pub fn clears(
    args: &DirtyLogArgs,
    memory: Size,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let Some(cpus) = two("clearing with two threads", session)? else { return Ok(Vec::new()) };
    let guest = if args.quick { memory.bytes() } else { memory.bytes().max(LEAST) };
    let page = args.tables.format.leaves()[0];
    let shape = Shape {
        // Each thread clears whole words of the log.
        memory: guest.next_multiple_of((2 * 64 * page.bytes()).max(4 << 20)),
        host: memory.bytes(),
        block: page,
        page,
        vcpus: 1,
        resident: true,
    };
    let rounds = if args.quick { 1 } else { args.runs.max(LEAST_ROUNDS) };
    on_machine!(&args.tables, |format, arch| {
        let fixture = Fixture::new(format, arch, &args.tables, shape, session)?;
        let entries: Vec<AtomicU64> = (0..fixture.pages()).map(AtomicU64::new).collect();
        let run = |place: usize| {
            let cpus = &cpus[..place % 2 + 1];
            if place < 2 { clear(&fixture, cpus) } else { exchange(&entries, cpus) }
        };
        measure(&fixture.params(), &CLEAR, run, rounds, session)
    })
}

/// Measures first touches by two vCPUs against those by one, and against those of two guests with
/// one vCPU each on machines of their own, which share no memory: this is the most that the host's
/// CPUs allow.
///
/// # Errors
/// Too little memory, or a fault that failed.
pub fn faults(
    tables: &TablesArgs,
    memory: Size,
    rounds: u32,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let Some(cpus) = two("faults of two vCPUs beside those of one", session)? else {
        return Ok(Vec::new());
    };
    let (bytes, page) = (memory.bytes(), tables.format.leaves()[0]);
    let shape = Shape { memory: bytes, host: bytes, block: page, page, vcpus: 2, resident: true };
    let half = Shape { memory: bytes / 2, host: bytes / 2, vcpus: 1, ..shape };
    let rounds = rounds.max(if rounds == 1 { 1 } else { LEAST_ROUNDS });
    on_machine!(tables, |format, arch| {
        let new = |shape| Fixture::new(format, arch, tables, shape, session);
        let (whole, halves) = (new(shape)?, [new(half)?, new(half)?]);
        let run = |place: usize| match place {
            2 => apart(&halves, &cpus),
            _ => fault(&whole, &cpus[..=place]),
        };
        measure(&whole.params(), &FAULT, run, rounds, session)
    })
}

fn measure(
    params: &Map<String, Value>,
    work: &Work,
    run: impl Fn(usize) -> anyhow::Result<(f64, Counts)>,
    rounds: u32,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start(work.ratios[0].0[0], u64::from(rounds) + 1);
    let samples = take_turns(session, rounds, work.variants.len(), |place, _| {
        session.say(work.variants[place].0);
        run(place)
    })?;
    session.finish();
    if samples[0].is_empty() {
        return Ok(Vec::new());
    }
    let recorder = Recorder { scenario: work.scenario, params: params.clone() };
    let mut results = Vec::new();
    for ((variant, engine), samples) in work.variants.iter().zip(&samples) {
        let target = if *engine { "engine" } else { "machine" };
        let seconds = samples.iter().map(|(seconds, _)| *seconds).collect();
        let counts = samples.iter().map(|(_, counts)| counts.clone());
        results.push(recorder.figure(variant, target, work.figure, "s", seconds, counts));
    }
    for ([what, of, against], sides, at_most) in work.ratios {
        let ratio = |round: usize| {
            let side = |places: &[usize]| places.iter().map(|&it| samples[it][round].0).product();
            let [of, by] = sides.map(side);
            let (of, by): (f64, f64) = (of, by);
            of / by
        };
        let ratios = (0..samples[0].len()).map(ratio).collect();
        results.push(recorder.ratio(*what, of, against, ratios, *at_most));
    }
    Ok(results)
}

/// Runs a guest of as many vCPUs as there are CPUs; each touches its share of the pages first.
fn fault<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    cpus: &[usize],
) -> anyhow::Result<(f64, Counts)> {
    fixture.with_guest(fixture.config(), |guest| {
        let share = fixture.pages() / cpus.len() as u64;
        let work = |vcpu: u16| move |gate: &Gate| touch(fixture, guest, vcpu, share, gate);
        let vcpus = 0..u16::try_from(cpus.len())?;
        let (seconds, _) = together(cpus, vcpus.map(work).collect())?;
        let mapped = all_mapped(fixture, guest)?;
        Ok((seconds, counts([("pages", mapped)])))
    })
}

/// Runs a guest of one vCPU on each of two machines; each touches all of its pages first.
fn apart<F: Format, A: Arch>(
    fixtures: &[Fixture<F, A>; 2],
    cpus: &[usize],
) -> anyhow::Result<(f64, Counts)> {
    let [first, second] = fixtures;
    first.with_guest(first.config(), |one| {
        second.with_guest(second.config(), |other| {
            let work = |(fixture, guest)| {
                move |gate: &Gate| touch(fixture, guest, 0, fixture.pages(), gate)
            };
            let guests = [(first, one), (second, other)];
            let (seconds, _) = together(cpus, guests.map(work).into())?;
            let mapped = all_mapped(first, one)? + all_mapped(second, other)?;
            Ok((seconds, counts([("pages", mapped)])))
        })
    })
}

/// Touches the vCPU's share of the pages.
fn touch<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    guest: &TheGuest<'_, F, A>,
    vcpu: u16,
    share: u64,
    gate: &Gate,
) -> anyhow::Result<(f64, ())> {
    let mut runner = Runner::new(guest, fixture.machine(), vcpu, Locks::Free)?;
    let first = u64::from(vcpu) * share;
    let mut pages = first..first + share;
    let (seconds, touched) =
        gate.pass(|| pages.try_for_each(|page| runner.write(fixture.gpa(page), page)));
    touched?;
    Ok((seconds, ()))
}

/// Returns the number of pages.
///
/// # Errors
/// Faults have mapped more or fewer.
fn all_mapped<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    guest: &TheGuest<'_, F, A>,
) -> anyhow::Result<u64> {
    let mapped = guest.stats().faults(FaultKind::Mapped).count;
    ensure!(mapped == fixture.pages(), "{mapped} of {} pages were mapped", fixture.pages());
    Ok(mapped)
}

/// Runs a guest whose pages are all dirty and writable; each thread clears its share.
fn clear<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    cpus: &[usize],
) -> anyhow::Result<(f64, Counts)> {
    fixture.with_guest(fixture.config(), |guest| {
        let mut vcpu = Runner::new(guest, fixture.machine(), 0, Locks::Free)?;
        vcpu.worker().set_memslot(fixture.memslot(true))?;
        (0..fixture.pages()).try_for_each(|page| vcpu.write(fixture.gpa(page), page))?;
        let share = fixture.pages() / cpus.len() as u64;
        let bitmap = &vec![u64::MAX; share.div_ceil(64) as usize];
        let work = |thread: u64| {
            move |gate: &Gate| {
                let mut worker = Worker::new(guest)?;
                let clear = || worker.clear_log(SLOT, thread * share, share, bitmap);
                let (seconds, cleared) = gate.pass(clear);
                Ok((seconds, cleared?.pages))
            }
        };
        let (seconds, pages) = together(cpus, (0..cpus.len() as u64).map(work).collect())?;
        let cleared = pages.iter().sum::<u64>();
        ensure!(cleared == fixture.pages(), "{cleared} of {} pages were cleared", fixture.pages());
        Ok((seconds, counts([("pages", cleared)])))
    })
}

fn exchange(entries: &[AtomicU64], cpus: &[usize]) -> anyhow::Result<(f64, Counts)> {
    let share = entries.len() / cpus.len();
    let works = entries
        .chunks(share)
        .map(|entries| move |gate: &Gate| Ok(gate.pass(|| limit::exchange(entries))))
        .collect();
    let (seconds, lost) = together(cpus, works)?;
    ensure!(lost.iter().all(|lost| *lost == 0), "an exchange was lost to nobody");
    Ok((seconds, counts([("pages", entries.len() as u64)])))
}
