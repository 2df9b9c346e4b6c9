//! The job `private`: the guest and the manager convert pages of the guest to private and back to
//! shared, while vCPUs use them.
//!
//! Private memory is the machine's other region. The hypervisor removes it from its own table
//! before the guest runs, so that an access of its own would end the machine. A conversion
//! therefore neither copies nor clears: each of the two kinds of a page keeps what the guest last
//! wrote there, and the guest checks that. Before the first write, private memory has the word
//! `NEVER`, which a guest can have read only from private memory.

use super::cpu::{self, read};
use super::guest::{Behind, Hypervisor, Thread};
use super::keeper::{Keeper, answer};
use super::memory::{PAGE, Stage2};
use super::migrate::RUNS;
use super::platform::El2;
use super::report::{record, say};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use serde_json::json;
use slat::{Gpa, GpaRange};
use slat_guest::{ConvertError, Denial, MemoryKind, PinError, PrivateAt, PrivateRange, Worker};
use slat_hypervisor::layout::away;

/// Number of rounds in which the manager converts its pages to private and back. There are up to
/// `MOST_ROUNDS` if vCPUs have asked for fewer than `FEW` conversions by then, which depends on how
/// fast the emulator is.
const ROUNDS: u64 = 6;
const FEW: u64 = 500;
const MOST_ROUNDS: u64 = 60;
/// Time for which the guest uses the pages after a conversion, in milliseconds.
const USES: u64 = 30;

/// Converts a page as the guest's program asks: `word` is twice the number of its frame, plus 1 for
/// private. Returns the result for the program.
pub fn asked(worker: &mut Worker<'_, Stage2, El2, Behind>, word: u64) -> u64 {
    let to = if word & 1 == 1 { MemoryKind::Private } else { MemoryKind::Shared };
    let Ok(page) = GpaRange::new(Gpa((word >> 1) << 12), 1 << 12) else {
        return answer::NOT_PRIVATE;
    };
    match worker.convert(page, to, |_| {}).map_err(|stopped| stopped.reason) {
        Ok(_) => 0,
        Err(ConvertError::Denied(Denial(code))) => code,
        Err(ConvertError::NotPrivate) => answer::NOT_PRIVATE,
        Err(ConvertError::Pinned) => answer::PINNED,
        Err(_) => answer::OTHER,
    }
}

/// Counts of what the manager has done.
#[derive(Default)]
struct Done {
    conversions: u64,
    pages: u64,
    busy: u64,
    taken_back: u64,
    /// Rounds, each of which has one refusal because of a pin.
    rounds: u64,
}

/// Returns the number of conversions by vCPUs that were done or are in progress.
fn by_vcpus(keeper: &Keeper, done: &Done) -> u64 {
    let all: u64 = keeper.allowed.iter().map(|count| count.load(Ordering::Relaxed)).sum();
    all.saturating_sub(done.conversions)
}

/// Converts the manager's pages to private and back, and lets the guest check all pages.
///
/// # Errors
/// Returns in words what went wrong.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    hypervisor.wait_for(1)?;
    hypervisor.sleep(RUNS);
    let Some(keeper) = hypervisor.machine.keeper() else {
        return Err("the machine keeps no account of private memory".into());
    };
    let bytes = hypervisor.options.memory;
    unreachable(bytes)?;
    let runs = runs(&hypervisor.control.pages.lock())?;
    let mut done = Done::default();
    while done.rounds < ROUNDS || by_vcpus(keeper, &done) < FEW && done.rounds < MOST_ROUNDS {
        for &run in &runs {
            convert(thread, run, MemoryKind::Private, &mut done)?;
        }
        hypervisor.sleep(USES);
        // Private pages are unmapped, and faults map them again: the guest finds its content there.
        let all = PrivateRange { start: PrivateAt(0), bytes };
        let taken = thread
            .worker()
            .invalidate_private(all, |leaves| done.taken_back += leaves.bytes / PAGE);
        drop(taken.map_err(|stopped| stopped.to_string())?);
        hypervisor.sleep(USES);
        if thread.worker().pin(runs[0]).map(|_| ()) != Err(PinError::Private) {
            return Err(format!("private memory at {} was pinned", runs[0].start()));
        }
        for &run in &runs {
            // Conversions of parts of a run split its blocks.
            for part in parts(run)? {
                convert(thread, part, MemoryKind::Shared, &mut done)?;
            }
        }
        let pinned = thread.worker().pin(runs[0]).map_err(|error| error.to_string())?;
        let refused = thread.worker().convert(runs[0], MemoryKind::Private, |_| {});
        drop(pinned);
        if refused.map_err(|stopped| stopped.reason) != Err(ConvertError::Pinned) {
            return Err(format!("{} was pinned, and {refused:?}", runs[0].start()));
        }
        done.rounds += 1;
        hypervisor.sleep(USES);
    }
    hypervisor.control.stop.store(true, Ordering::Release);
    hypervisor.wait_for(2)?;
    unreachable(bytes)?;

    // The program has converted all of its pages to shared.
    let counts = keeper.pages.counts();
    let held = keeper.pages.held();
    let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let [busy, firm] = keeper.refused.each_ref().map(load);
    let [shared, private] = keeper.allowed.each_ref().map(load);
    let converted = hypervisor.memory.stats().totals.converted_pages;
    say!(
        "{converted} pages were converted, in {private} conversions to private and {shared} back; \
         {counts:?}, {held} held; refused: {busy} busy, {firm} firm, {} pinned",
        done.rounds
    );
    record(&json!({
        "record": "private",
        "pages": converted,
        "to_private": private,
        "to_shared": shared,
        "conversions_by_manager": done.conversions,
        "pages_by_manager": done.pages,
        "pages_taken_back": done.taken_back,
        "given": counts.given,
        "taken": counts.taken,
        "wrong": counts.wrong,
        "held": held,
        "splits": load(&keeper.splits),
        "refused_busy": busy,
        "refused_busy_manager": done.busy,
        "refused_firm": firm,
        "refused_pinned": done.rounds,
    }));
    if (held, counts.wrong) != (0, 0) || counts.given != counts.taken {
        return Err(format!("the machine's account does not close: {counts:?}, {held} held"));
    }
    Ok(())
}

/// Converts a run, and tries again while the machine is busy.
fn convert(
    thread: &mut Thread<'_>,
    run: GpaRange,
    to: MemoryKind,
    done: &mut Done,
) -> Result<(), String> {
    loop {
        match thread.worker().convert(run, to, |_| {}) {
            Ok(pages) => {
                done.conversions += 1;
                done.pages += pages;
                return Ok(());
            }
            Err(stopped) if stopped.reason == ConvertError::Denied(Denial(answer::BUSY)) => {
                done.busy += 1;
            }
            Err(stopped) => return Err(format!("{} to {to:?}: {stopped}", run.start())),
        }
    }
}

/// Returns the runs of adjacent pages among those that the program has named.
fn runs(frames: &[u64]) -> Result<Vec<GpaRange>, String> {
    let mut frames = frames.to_vec();
    frames.sort_unstable();
    let mut runs: Vec<GpaRange> = Vec::new();
    for frame in frames {
        let at = Gpa(frame << 12);
        match runs.last_mut().filter(|run| run.end() == at) {
            Some(run) => {
                *run = GpaRange::new(run.start(), run.size() + PAGE).map_err(|e| e.to_string())?;
            }
            None => runs.push(GpaRange::new(at, PAGE).map_err(|error| error.to_string())?),
        }
    }
    if runs.is_empty() {
        return Err("the guest's program has left no pages to convert: --work private,MIB".into());
    }
    Ok(runs)
}

/// Divides a run into its first quarter and the rest.
fn parts(run: GpaRange) -> Result<Vec<GpaRange>, String> {
    let quarter = (run.size() / 4) & !(PAGE - 1);
    let parts = [(run.start().0, quarter), (run.start().0 + quarter, run.size() - quarter)];
    let parts = parts.into_iter().filter(|(_, bytes)| *bytes != 0);
    parts.map(|(at, bytes)| GpaRange::new(Gpa(at), bytes).map_err(|e| e.to_string())).collect()
}

/// Checks that this CPU's MMU finds no translation at EL2 for any page of private memory, but one
/// for the guest's shared memory.
fn unreachable(bytes: u64) -> Result<(), String> {
    let start = away(bytes);
    match (start..start + bytes).step_by(PAGE as usize).find(|&page| reaches(page)) {
        Some(page) => Err(format!("the hypervisor reaches private memory at {page:#x}")),
        None if !reaches(slat_hypervisor::layout::HOME) => Err("it reaches nothing at all".into()),
        None => Ok(()),
    }
}

/// Returns whether EL2 can read at an address.
fn reaches(address: u64) -> bool {
    // SAFETY: the instruction translates by EL2's stage 1, and changes only PAR_EL1. No vCPU runs
    // on the manager's CPU, so no guest uses that register.
    unsafe {
        core::arch::asm!("at s1e2r, {}", in(reg) address, options(nostack));
    }
    cpu::isb();
    read!("par_el1") & 1 == 0
}
