//! Work of one thread and of two, compared with plain compare-and-swaps of as many entries: clears
//! of the log, and faults.

use super::log_options::DirtyLogArgs;
use anyhow::ensure;
use slat::Format;
use slat_guest::{FaultKind, Worker};
use slat_ideas::format::TablesArgs;
use slat_ideas::guest::fixture::{Fixture, SLOT, Shape, room};
use slat_ideas::guest::runner::{Locks, Runner};
use slat_ideas::guest::tables::Figures;
use slat_ideas::guest::turns::{Counts, Recorder, counts, take_turns};
use slat_ideas::limit;
use slat_ideas::on_machine;
use slat_ideas::threads::{Gate, cpus, together};
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_sim::arch::Arch;
use std::sync::atomic::AtomicU64;

const NOTE: &str = "Time of the thread that worked longest; each has half of the pages. cas: a \
                    compare-and-swap of as many entries.";

/// Columns of the table of clears.
pub const CLEARS: Figures = Figures {
    of: "guest-log-parallel",
    title: "Clearing with two threads",
    counts: &[("clear", "pages", "pages")],
    note: NOTE,
    ..Figures::NONE
};

/// Columns of the table of faults.
pub const FAULTS: Figures = Figures {
    of: "guest-populate-parallel",
    title: "First touches by two vCPUs",
    counts: &[("fault", "pages", "pages")],
    note: NOTE,
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
    /// By one thread, by two; the plain loop by one, by two.
    variants: [&'static str; 4],
    /// The name of the ratio, its two sides.
    ratio: [&'static str; 3],
}

const CLEAR: Work = Work {
    scenario: CLEARS.of,
    figure: "clear",
    variants: ["clear-1", "clear-2", "cas-1", "cas-2"],
    ratio: ["clear, two threads by one", "clear-2 * cas-1", "clear-1 * cas-2"],
};

const FAULT: Work = Work {
    scenario: FAULTS.of,
    figure: "fault",
    variants: ["fault-1", "fault-2", "cas-1", "cas-2"],
    ratio: ["faults, two vCPUs by one", "fault-2 * cas-1", "fault-1 * cas-2"],
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
        measure(&fixture, &CLEAR, clear, rounds, &cpus, session)
    })
}

/// Measures first touches by two vCPUs against those by one.
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
    on_machine!(tables, |format, arch| {
        let fixture = Fixture::new(format, arch, tables, shape, session)?;
        measure(&fixture, &FAULT, fault, rounds, &cpus, session)
    })
}

/// A guest's work by the threads of these CPUs: its time, and counts.
type Run<F, A> = fn(&Fixture<F, A>, &[usize]) -> anyhow::Result<(f64, Counts)>;

fn measure<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    work: &Work,
    run: Run<F, A>,
    rounds: u32,
    cpus: &[usize],
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start(work.ratio[0], u64::from(rounds) + 1);
    let entries: Vec<AtomicU64> = (0..fixture.pages()).map(AtomicU64::new).collect();
    let samples = take_turns(session, rounds, work.variants.len(), |place, _| {
        session.say(work.variants[place]);
        let cpus = &cpus[..place % 2 + 1];
        if place < 2 { run(fixture, cpus) } else { exchange(&entries, cpus) }
    })?;
    session.finish();
    if samples[0].is_empty() {
        return Ok(Vec::new());
    }
    let recorder = Recorder { scenario: work.scenario, params: fixture.params() };
    let mut results = Vec::new();
    for (place, samples) in samples.iter().enumerate() {
        let target = if place < 2 { "engine" } else { "machine" };
        let seconds = samples.iter().map(|(seconds, _)| *seconds).collect();
        let counts = samples.iter().map(|(_, counts)| counts.clone());
        let variant = work.variants[place];
        results.push(recorder.figure(variant, target, work.figure, "s", seconds, counts));
    }
    let of = |place: usize, round: usize| samples[place][round].0;
    let ratio = |round| of(1, round) * of(2, round) / of(0, round) / of(3, round);
    let [what, of, against] = work.ratio;
    let ratios = (0..samples[0].len()).map(ratio).collect();
    results.push(recorder.ratio(what, of, against, ratios));
    Ok(results)
}

/// Runs a guest of as many vCPUs as there are CPUs; each touches its share of the pages first.
fn fault<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    cpus: &[usize],
) -> anyhow::Result<(f64, Counts)> {
    fixture.with_guest(fixture.config(), |guest| {
        Worker::new(guest, &mut room())?.set_memslot(fixture.slot(false))?;
        let share = fixture.pages() / cpus.len() as u64;
        let work = |thread: u64| {
            move |gate: &Gate| {
                let mut room = room();
                let id = u16::try_from(thread)?;
                let mut vcpu = Runner::new(guest, fixture.machine(), id, &mut room, Locks::Free)?;
                let mut pages = thread * share..(thread + 1) * share;
                let touch = || pages.try_for_each(|page| vcpu.write(fixture.gpa(page), page));
                let (seconds, touched) = gate.pass(touch);
                touched?;
                Ok((seconds, ()))
            }
        };
        let (seconds, _) = together(cpus, (0..cpus.len() as u64).map(work).collect())?;
        let mapped = guest.stats().faults(FaultKind::Mapped).count;
        ensure!(mapped == fixture.pages(), "{mapped} of {} pages were mapped", fixture.pages());
        Ok((seconds, counts([("pages", mapped)])))
    })
}

/// Runs a guest whose pages are all dirty and writable; each thread clears its share.
fn clear<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    cpus: &[usize],
) -> anyhow::Result<(f64, Counts)> {
    fixture.with_guest(fixture.config(), |guest| {
        let mut room_of_vcpu = room();
        let mut vcpu = Runner::new(guest, fixture.machine(), 0, &mut room_of_vcpu, Locks::Free)?;
        vcpu.worker().set_memslot(fixture.slot(true))?;
        (0..fixture.pages()).try_for_each(|page| vcpu.write(fixture.gpa(page), page))?;
        let share = fixture.pages() / cpus.len() as u64;
        let bitmap = &vec![u64::MAX; share.div_ceil(64) as usize];
        let work = |thread: u64| {
            move |gate: &Gate| {
                let mut room = room();
                let mut worker = Worker::new(guest, &mut room)?;
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
