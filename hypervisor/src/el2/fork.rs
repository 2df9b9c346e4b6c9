//! The job `fork`: forks a running guest twice. A fork keeps the guest's memory as it was at one
//! moment, while the guest continues to write; a page is copied before the guest changes it.
//!
//! The first time, only the fork itself delays the guest. The stamps of the guest's program show
//! whether the fork has the state of one moment (`slat_hypervisor::cut`). Checksums of all pages,
//! at once and later, show whether the fork still changes.
//!
//! The second time, the guest's writes are held while checksums of its own memory are computed; the
//! fork must have the same. Then the manager copies all pages that the two share, while the guest's
//! faults copy pages as well.

use super::cpu;
use super::guest::{Hypervisor, MOST_PAGES, Thread};
use super::memory::{Forkable, GUEST, PAGE, Regions};
use super::migrate::RUNS;
use super::report::{record, say};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use serde_json::{Value, json};
use slat::Access;
use slat_guest::{Backing, Cow, Frames, Hva, HvaRange, NoPage};
use slat_hypervisor::cut::{self, StampedPage};
use slat_hypervisor::layout::GUEST_RAM;
use slat_hypervisor::stalls::Stalls;

/// Pages that the manager copies before it yields. An emulator that runs CPUs in turns then runs
/// the others.
const TOGETHER: u64 = 2048;
/// Size of the pages that the guest's program names, in bytes.
const GUEST_PAGE: u64 = 4096;

/// The guest's memory, or a fork of it.
type ForkedMemory = Cow<'static, Regions>;

/// Runs the job, and lets the guest check what it wrote.
///
/// # Errors
/// Returns in words what went wrong.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    hypervisor.wait_for(1)?;
    hypervisor.sleep(RUNS);
    let machine = hypervisor.memory.backing().inner();
    let here = machine.forkable().ok_or("the guest's memory was not made to be forked")?;
    until_it_writes(hypervisor, here)?;
    let bytes = hypervisor.options.memory;
    let (all, pages) = (HvaRange { start: GUEST, bytes }, bytes / PAGE);

    hypervisor.stalls.begin();
    let begin = cpu::now();
    let fork = here.memory.fork(thread.worker()).map_err(|error| error.to_string())?;
    let forked = cpu::now() - begin;
    let written = whole(hypervisor, here, &fork)?;
    let at_once = sums(here, &fork, pages)?;
    hypervisor.sleep(RUNS);
    same(&at_once, &sums(here, &fork, pages)?, "has changed since it was made")?;
    let alone = hypervisor.stalls.end();
    let copied = here.memory.copied();
    say!(
        "forked {pages} pages in {forked} ticks, after {written} stamps; {copied} copied by \
         faults; {alone:?}"
    );
    drop(fork);

    let begin = cpu::now();
    hypervisor.stalls.begin();
    let held = thread.worker().freeze_writes(all);
    let truth = sums(here, &here.memory, pages)?;
    let fork = here.memory.fork(thread.worker()).map_err(|error| error.to_string())?;
    drop(held);
    let still = cpu::now() - begin;
    let mut waits = 0u64;
    for first in (0..pages).step_by(TOGETHER as usize) {
        for page in first..pages.min(first + TOGETHER) {
            let host = Hva(GUEST.0 + page * PAGE);
            // No guest maps the fork, so the manager asks its backing for a page to write to.
            while let Err(reason) = fork.page(host, Access::Write) {
                // There may be no frame, because the guest copies the last page that the two share.
                if reason != NoPage::Absent {
                    return Err(format!("page {page}: {reason:?}"));
                }
                waits += 1;
                cpu::relax();
            }
        }
        cpu::relax();
    }
    let (background, by_faults) = (fork.copied(), here.memory.copied() - copied);
    let beside = hypervisor.stalls.end();
    let (own, shared) = fork.pages();
    if (own, shared) != (pages, 0) {
        return Err(format!("of {pages} pages the fork has {own}, and shares {shared}"));
    }
    let moment = whole(hypervisor, here, &fork)?;
    same(&truth, &sums(here, &fork, pages)?, "is not what the guest had when it was forked")?;
    say!(
        "forked again, after {moment} stamps: as the guest's by {pages} checksums; {by_faults} \
         pages copied by faults and {background} in the background, which waited {waits} times for \
         a frame; {beside:?}"
    );
    drop(fork);
    let free = u64::from(here.frames.free());
    if free != pages {
        return Err(format!("{free} frames are free where the fork had {pages}"));
    }
    hypervisor.sleep(RUNS);
    hypervisor.control.stop.store(true, Ordering::Release);
    hypervisor.wait_for(2)?;
    record(&json!({
        "record": "fork",
        "pages": pages,
        "frequency": cpu::frequency(),
        // Figures of the first fork.
        "fork_ticks": forked,
        "stamps": written,
        "alone": told(&alone),
        "alone_copied": copied,
        // Figures of the second fork.
        "held_ticks": still,
        "stamps_then": moment,
        "copied_by_faults": by_faults,
        "copied_in_background": background,
        "beside": told(&beside),
    }));
    Ok(())
}

/// Returns the JSON of a summary of stalls.
fn told(stalls: &Stalls) -> Value {
    let Stalls { count, p50, p99, longest } = *stalls;
    json!({ "stalls": count, "p50_ticks": p50, "p99_ticks": p99, "longest_ticks": longest })
}

/// Returns the address of a page of `memory`. A page without a frame is an error.
fn place(here: &Forkable, memory: &ForkedMemory, page: u64) -> Result<u64, String> {
    let frame = memory.frame(Hva(GUEST.0 + page * PAGE));
    let frame = frame.ok_or_else(|| format!("page {page} is nowhere"))?;
    Ok(here.frames.memory().hpa(frame).0)
}

/// Returns a checksum of each page.
fn sums(here: &Forkable, memory: &ForkedMemory, pages: u64) -> Result<Vec<u64>, String> {
    (0..pages).map(|page| Ok(sum(place(here, memory, page)?))).collect()
}

/// Returns a checksum of the words of a page and of their order: if one word differs, the checksum
/// differs.
fn sum(at: u64) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    (at..at + PAGE)
        .step_by(8)
        .fold(0, |sum: u64, word| (sum ^ load(word)).wrapping_mul(ODD).rotate_left(29))
}

/// Reads a word of the guest's memory.
fn load(at: u64) -> u64 {
    // SAFETY: the address is aligned, and in RAM that EL2 maps at its own address. It is not memory
    // of this program. The read is volatile, because with a deliberate fault the guest may write
    // there.
    unsafe { (at as *const u64).read_volatile() }
}

fn same(before: &[u64], after: &[u64], what: &str) -> Result<(), String> {
    match before.iter().zip(after).position(|(before, after)| before != after) {
        None => Ok(()),
        Some(page) => {
            Err(format!("the fork's page at {:#x} {what}", GUEST_RAM + page as u64 * PAGE))
        }
    }
}

/// Returns the number of threads of the guest's program, the number of pages of each, and the first
/// words of their pages in `memory`.
fn stamps(
    hypervisor: &Hypervisor,
    here: &Forkable,
    memory: &ForkedMemory,
) -> Result<(u64, u64, Vec<StampedPage>), String> {
    let frames = hypervisor.control.pages.lock();
    let each = hypervisor.control.declared.load(Ordering::Acquire);
    let threads = (frames.len() as u64).checked_div(each).unwrap_or_default();
    if threads == 0 || frames.len() as u64 != threads * each || frames.len() == MOST_PAGES {
        return Err(format!(
            "the guest's program has told of {} pages, {each} for each thread: --work crew,MIB, of \
             less than 4096",
            frames.len()
        ));
    }
    let mut pages = Vec::with_capacity(frames.len());
    for frame in frames.iter() {
        let outside = || format!("the guest's program has no page frame {frame:#x}");
        let offset = (frame * GUEST_PAGE).checked_sub(GUEST_RAM).ok_or_else(outside)?;
        if offset >= hypervisor.options.memory {
            return Err(outside());
        }
        let at = place(here, memory, offset / PAGE)? + offset % PAGE;
        pages.push(StampedPage { stamp: load(at), seen: load(at + 8) });
    }
    Ok((threads, each, pages))
}

/// Waits until each thread of the guest's program has overwritten its first number.
fn until_it_writes(hypervisor: &Hypervisor, here: &Forkable) -> Result<(), String> {
    loop {
        let (_, each, pages) = stamps(hypervisor, here, &here.memory)?;
        if pages.chunks(each as usize).all(|pages| pages[0].number() >= each) {
            return Ok(());
        }
        if hypervisor.ended() || cpu::now() > hypervisor.deadline {
            return Err("the guest's program writes nothing".into());
        }
        hypervisor.sleep(1);
    }
}

/// Checks that the stamps in the fork are of one moment. Returns how many numbers the guest's
/// program had written.
fn whole(hypervisor: &Hypervisor, here: &Forkable, fork: &ForkedMemory) -> Result<u64, String> {
    let (threads, each, pages) = stamps(hypervisor, here, fork)?;
    let at = |thread, page| pages[(thread * each + page) as usize];
    cut::check(threads, each, at).map_err(|torn| format!("the fork is of no moment: {torn}"))
}
