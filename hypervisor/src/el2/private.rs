//! Pages of the guest's become private and shared again, as it asks and as the manager does, while
//! its vCPUs use them.
//!
//! Private memory is the machine's other region. The hypervisor's own table does not map it from
//! before the guest runs: an access of its own would end the machine. So nothing is ever carried
//! over between the two kinds of a page, nor wiped: each keeps what the guest last had there, which
//! the guest checks, and private memory begins with a word that only its owner can have read.

use super::cpu::{self, read};
use super::guest::{Behind, Hypervisor, PAGE, Stage2};
use super::manager::{Thread, sleep, wait_for};
use super::memory;
use super::migrate::{RUNS, Run};
use super::platform::El2;
use super::report::{record, say};
use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use serde_json::json;
use slat::{Gpa, GpaRange, Hpa};
use slat_guest::{
    ConvertError, Denied, MemoryKind, PinError, PrivateAt, PrivateHooks, PrivateLeaves,
    PrivateRange, Worker,
};
use slat_hypervisor::granules::Granules;
use slat_hypervisor::layout::{DEVICE_TREE, GUEST_RAM, away};

/// What private memory holds before the guest writes to it: `NEVER` of the guest's program.
const NEVER: u64 = 0x6e65_7665_7220_7365;
/// How often the manager converts what the program has left to it, there and back; more often if
/// vCPUs have not asked for `FEW` conversions by then, which is up to how busy the emulator is.
const ROUNDS: u64 = 6;
const FEW: u64 = 500;
const MOST_ROUNDS: u64 = 60;
/// How long the guest uses what was converted, in milliseconds.
const USES: u64 = 30;
/// Of so many conversions the machine refuses one.
const BUSY_EVERY: u64 = 16;
/// Bytes of the guest's that stay shared, from its device tree on.
const FIRM: u64 = 2 << 20;

/// The answers, other than 0, that the guest reads after a conversion: `private.rs` of the program
/// in `hypervisor/work` has the same.
mod answer {
    pub const BUSY: u64 = 1;
    pub const FIRM: u64 = 2;
    pub const NOT_PRIVATE: u64 = 3;
    pub const PINNED: u64 = 4;
    pub const OTHER: u64 = 5;
}

/// A machine that protects private memory, as far as it keeps accounts.
#[derive(Debug)]
pub struct Keeper {
    /// Where private memory is.
    start: u64,
    bytes: u64,
    pages: Granules<Box<[AtomicU64]>>,
    asked: AtomicU64,
    /// Conversions that were allowed, by kind.
    allowed: [AtomicU64; 2],
    /// Refused, by code.
    refused: [AtomicU64; 2],
    splits: AtomicU64,
}

impl Keeper {
    /// For a guest with so much memory.
    pub fn new(bytes: u64) -> Self {
        let words = (bytes / PAGE).div_ceil(64);
        let zero = || AtomicU64::new(0);
        Self {
            start: away(bytes),
            bytes,
            pages: Granules::new((0..words).map(|_| zero()).collect()),
            asked: zero(),
            allowed: [zero(), zero()],
            refused: [zero(), zero()],
            splits: zero(),
        }
    }

    /// Whether it is private memory.
    pub fn keeps(&self, memory: Hpa) -> bool {
        memory.0 >= self.start && memory.0 - self.start < self.bytes
    }

    /// The page numbers of leaves, whose place in private memory is that in the guest's.
    fn numbers(&self, leaves: &PrivateLeaves) -> Option<(u64, u64)> {
        let offset = leaves.gpa.0.checked_sub(GUEST_RAM)?;
        (leaves.hpa.0 == self.start + offset).then_some((offset / PAGE, leaves.bytes / PAGE))
    }
}

impl PrivateHooks for Keeper {
    fn convert(&self, range: GpaRange, to: MemoryKind) -> Result<(), Denied> {
        let firm = GUEST_RAM + DEVICE_TREE..GUEST_RAM + DEVICE_TREE + FIRM;
        let code = if range.start().0 < firm.end && firm.start < range.end().0 {
            answer::FIRM
        } else if (self.asked.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(BUSY_EVERY) {
            answer::BUSY
        } else {
            self.allowed[usize::from(to == MemoryKind::Private)].fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        self.refused[code as usize - 1].fetch_add(1, Ordering::Relaxed);
        Err(Denied(code))
    }

    fn map(&self, leaf: PrivateLeaves) -> Result<(), Denied> {
        match self.numbers(&leaf) {
            Some((first, pages)) => self.pages.give(first, pages),
            None => self.pages.is_wrong(),
        }
        Ok(())
    }

    fn split(&self, _block: PrivateLeaves) -> Result<(), Denied> {
        self.splits.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn removed(&self, leaves: PrivateLeaves) {
        match self.numbers(&leaves) {
            Some((first, pages)) => self.pages.take(first, pages),
            None => self.pages.is_wrong(),
        }
    }
}

/// Private memory begins with what nobody wrote, and is the hypervisor's no more. Before other CPUs
/// are on.
pub fn prepare(machine: &El2, bytes: u64) {
    let start = away(bytes);
    Run { first: 0, pages: bytes / PAGE }.fill(start, NEVER);
    machine.clean(Hpa(start), bytes, true);
    memory::hide(start, bytes);
}

/// Converts a page as the guest's program asks: its frame's number, and in bit 0 the kind. What it
/// reads as the answer.
pub fn asked(worker: &mut Worker<'_, Stage2, El2, Behind>, word: u64) -> u64 {
    let to = if word & 1 == 1 { MemoryKind::Private } else { MemoryKind::Shared };
    let Ok(page) = GpaRange::new(Gpa((word >> 1) << 12), 1 << 12) else {
        return answer::NOT_PRIVATE;
    };
    match worker.convert(page, to, |_| {}).map_err(|halted| halted.why) {
        Ok(_) => 0,
        Err(ConvertError::Denied(Denied(code))) => code,
        Err(ConvertError::NotPrivate) => answer::NOT_PRIVATE,
        Err(ConvertError::Pinned) => answer::PINNED,
        Err(_) => answer::OTHER,
    }
}

/// What the manager has done.
#[derive(Default)]
struct Done {
    conversions: u64,
    pages: u64,
    busy: u64,
    taken_back: u64,
    /// Each of which has one refusal for a pin.
    rounds: u64,
}

/// Conversions for which vCPUs asked, and which were done or are under way.
fn by_vcpus(keeper: &Keeper, done: &Done) -> u64 {
    let all: u64 = keeper.allowed.iter().map(|count| count.load(Ordering::Relaxed)).sum();
    all.saturating_sub(done.conversions)
}

/// Converts what the program has left to the manager, there and back, and has it check all.
///
/// # Errors
/// What went wrong, in words.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    wait_for(hypervisor, 1)?;
    sleep(hypervisor, RUNS);
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
        sleep(hypervisor, USES);
        // Taken, and mapped again by faults: the guest finds what it had there.
        let all = PrivateRange { start: PrivateAt(0), bytes };
        let taken = thread
            .worker()
            .invalidate_private(all, |leaves| done.taken_back += leaves.bytes / PAGE);
        drop(taken.map_err(|halted| halted.to_string())?);
        sleep(hypervisor, USES);
        if thread.worker().pin(runs[0]).map(|_| ()) != Err(PinError::Private) {
            return Err(format!("private memory at {} was pinned", runs[0].start()));
        }
        for &run in &runs {
            // By parts: blocks are split.
            for part in parts(run)? {
                convert(thread, part, MemoryKind::Shared, &mut done)?;
            }
        }
        let pinned = thread.worker().pin(runs[0]).map_err(|error| error.to_string())?;
        let refused = thread.worker().convert(runs[0], MemoryKind::Private, |_| {});
        drop(pinned);
        if refused.map_err(|halted| halted.why) != Err(ConvertError::Pinned) {
            return Err(format!("{} was pinned, and {refused:?}", runs[0].start()));
        }
        done.rounds += 1;
        sleep(hypervisor, USES);
    }
    hypervisor.control.stop.store(true, Ordering::Release);
    wait_for(hypervisor, 2)?;
    unreachable(bytes)?;

    // The program has left nothing private.
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

/// Converts once more if the machine is busy.
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
            Err(halted) if halted.why == ConvertError::Denied(Denied(answer::BUSY)) => {
                done.busy += 1;
            }
            Err(halted) => return Err(format!("{} to {to:?}: {halted}", run.start())),
        }
    }
}

/// Pages beside each other, of those that the program has told.
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

/// A quarter of a run, and the rest.
fn parts(run: GpaRange) -> Result<Vec<GpaRange>, String> {
    let quarter = (run.size() / 4) & !(PAGE - 1);
    let parts = [(run.start().0, quarter), (run.start().0 + quarter, run.size() - quarter)];
    let parts = parts.into_iter().filter(|(_, bytes)| *bytes != 0);
    parts.map(|(at, bytes)| GpaRange::new(Gpa(at), bytes).map_err(|e| e.to_string())).collect()
}

/// This CPU's MMU finds no translation of EL2's for any page of private memory, and one for the
/// guest's shared memory.
fn unreachable(bytes: u64) -> Result<(), String> {
    let start = away(bytes);
    match (start..start + bytes).step_by(PAGE as usize).find(|&page| reaches(page)) {
        Some(page) => Err(format!("the hypervisor reaches private memory at {page:#x}")),
        None if !reaches(slat_hypervisor::layout::HOME) => Err("it reaches nothing at all".into()),
        None => Ok(()),
    }
}

/// Whether EL2 may read there.
fn reaches(address: u64) -> bool {
    // SAFETY: asks EL2's stage 1 for a translation; the answer goes to PAR_EL1, in which the
    // manager's CPU has nothing of a guest's.
    unsafe {
        core::arch::asm!("at s1e2r, {}", in(reg) address, options(nostack));
    }
    cpu::isb();
    read!("par_el1") & 1 == 0
}
