//! Clears the log with one thread and with two, compared with plain compare-and-swaps of as many
//! entries.

use super::log_options::DirtyLogArgs;
use anyhow::ensure;
use slat::Format;
use slat_guest::Worker;
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

/// Columns of the table.
pub const FIGURES: Figures = Figures {
    of: "guest-log-parallel",
    title: "Clearing with two threads",
    counts: &[("clear", "pages", "pages")],
    note: "Time of the thread that worked longest; each has half of the pages. cas: a \
           compare-and-swap of as many entries.",
    ..Figures::NONE
};

/// Bytes of memory that make it worth starting two threads.
const LEAST: u64 = 1 << 30;
/// Rounds are short and vary, because threads meet by chance.
const LEAST_ROUNDS: u32 = 15;
const VARIANTS: [&str; 4] = ["clear-1", "clear-2", "cas-1", "cas-2"];

/// Measures two threads against one.
///
/// # Errors
/// Too little memory, or an incomplete clear.
pub fn run(
    args: &DirtyLogArgs,
    memory: Size,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let cpus = cpus()?;
    if cpus.len() < 2 {
        session
            .skip("clearing with two threads", "it takes two CPUs, and this process may use one");
        return Ok(Vec::new());
    }
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
        measure(&fixture, rounds, &cpus, session)
    })
}

fn measure<F: Format, A: Arch>(
    fixture: &Fixture<F, A>,
    rounds: u32,
    cpus: &[usize],
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    session.start("parallel clears", u64::from(rounds) + 1);
    let entries: Vec<AtomicU64> = (0..fixture.pages()).map(AtomicU64::new).collect();
    let samples = take_turns(session, rounds, VARIANTS.len(), |place, _| {
        session.say(VARIANTS[place]);
        let cpus = &cpus[..place % 2 + 1];
        if place < 2 { clear(fixture, cpus) } else { exchange(&entries, cpus) }
    })?;
    session.finish();
    if samples[0].is_empty() {
        return Ok(Vec::new());
    }
    let recorder = Recorder { scenario: "guest-log-parallel", params: fixture.params() };
    let mut results = Vec::new();
    for (place, samples) in samples.iter().enumerate() {
        let target = if place < 2 { "engine" } else { "machine" };
        let seconds = samples.iter().map(|(seconds, _)| *seconds).collect();
        let counts = samples.iter().map(|(_, counts)| counts.clone());
        results.push(recorder.figure(VARIANTS[place], target, "clear", "s", seconds, counts));
    }
    let of = |place: usize, round: usize| samples[place][round].0;
    let ratio = |round| of(1, round) * of(2, round) / of(0, round) / of(3, round);
    results.push(recorder.ratio(
        "clear, two threads by one",
        "clear-2 * cas-1",
        "clear-1 * cas-2",
        (0..samples[0].len()).map(ratio).collect(),
    ));
    Ok(results)
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
