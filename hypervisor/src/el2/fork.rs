//! A running guest is forked, twice: its memory as it is at one moment stays, while the guest goes
//! on writing, and what the two do not share any more is copied.
//!
//! The first time nothing but the fork itself holds the guest up. What its program wrote tells
//! whether the fork is of one moment (`slat_hypervisor::cut`), and checksums of all words, at once
//! and later, whether anybody writes to it still. The second time the guest's writes are held while
//! the checksums are taken of its own memory: they are the fork's. Then all that the two share is
//! copied in the background, beside the copies that its faults make.

use super::cpu;
use super::guest::{Hypervisor, MOST_PAGES, PAGE};
use super::manager::{Thread, sleep, wait_for};
use super::memory::{Forkable, GUEST, Regions};
use super::migrate::RUNS;
use super::report::{record, say};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use serde_json::{Value, json};
use slat::Access;
use slat_guest::{Backing, Cow, Frames, Hva, HvaRange, NoPage};
use slat_hypervisor::cut::{self, Stamped};
use slat_hypervisor::layout::GUEST_RAM;
use slat_hypervisor::stalls::Stalls;

/// Pages that are copied together in the background. An emulator that runs CPUs in turns takes a
/// turn of each between two such runs.
const TOGETHER: u64 = 2048;
/// Pages of the guest's program, as it tells them.
const GUEST_PAGE: u64 = 4096;

/// The guest's memory, or a fork of it.
type Shared = Cow<'static, Regions>;

/// Does all of that, and has the guest check what it wrote.
///
/// # Errors
/// What went wrong, in words.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    wait_for(hypervisor, 1)?;
    sleep(hypervisor, RUNS);
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
    sleep(hypervisor, RUNS);
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
    let held = thread.worker().hold_writes(all);
    let truth = sums(here, &here.memory, pages)?;
    let fork = here.memory.fork(thread.worker()).map_err(|error| error.to_string())?;
    drop(held);
    let still = cpu::now() - begin;
    let mut waits = 0u64;
    for first in (0..pages).step_by(TOGETHER as usize) {
        for page in first..pages.min(first + TOGETHER) {
            let host = Hva(GUEST.0 + page * PAGE);
            // No guest has it mapped: it is a writer without leaves.
            while let Err(why) = fork.page(host, Access::Write) {
                // Of the last page that the two share the guest may be making a copy of its own.
                if why != NoPage::NotYet {
                    return Err(format!("page {page}: {why:?}"));
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
    sleep(hypervisor, RUNS);
    hypervisor.control.stop.store(true, Ordering::Release);
    wait_for(hypervisor, 2)?;
    record(&json!({
        "record": "fork",
        "pages": pages,
        "frequency": cpu::frequency(),
        // The first time.
        "fork_ticks": forked,
        "stamps": written,
        "alone": told(&alone),
        "alone_copied": copied,
        // The second.
        "held_ticks": still,
        "stamps_then": moment,
        "copied_by_faults": by_faults,
        "copied_in_background": background,
        "beside": told(&beside),
    }));
    Ok(())
}

/// How long faults held vCPUs up.
fn told(stalls: &Stalls) -> Value {
    let Stalls { count, p50, p99, longest } = *stalls;
    json!({ "stalls": count, "p50_ticks": p50, "p99_ticks": p99, "longest_ticks": longest })
}

/// Where a page of the memory is, which has all of its pages.
fn place(here: &Forkable, memory: &Shared, page: u64) -> Result<u64, String> {
    let frame = memory.frame(Hva(GUEST.0 + page * PAGE));
    let frame = frame.ok_or_else(|| format!("page {page} is nowhere"))?;
    Ok(here.frames.memory().hpa(frame).0)
}

/// A checksum of each page's words.
fn sums(here: &Forkable, memory: &Shared, pages: u64) -> Result<Vec<u64>, String> {
    (0..pages).map(|page| Ok(sum(place(here, memory, page)?))).collect()
}

/// Each word goes in, by its place: a word that differs makes another sum, whatever follows it.
fn sum(at: u64) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    (at..at + PAGE)
        .step_by(8)
        .fold(0, |sum: u64, word| (sum ^ load(word)).wrapping_mul(ODD).rotate_left(29))
}

/// A word of the guest's memory.
fn load(at: u64) -> u64 {
    // SAFETY: RAM that EL2 maps at its own address, aligned, and no memory of this program's: a
    // deliberate fault may have the guest write to it.
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

/// Threads of the guest's program, the pages of each, and what their pages begin with in `memory`.
fn stamps(
    hypervisor: &Hypervisor,
    here: &Forkable,
    memory: &Shared,
) -> Result<(u64, u64, Vec<Stamped>), String> {
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
        pages.push(Stamped { stamp: load(at), seen: load(at + 8) });
    }
    Ok((threads, each, pages))
}

/// Waits until each thread of the guest's program has written beyond its first numbers.
fn until_it_writes(hypervisor: &Hypervisor, here: &Forkable) -> Result<(), String> {
    loop {
        let (_, each, pages) = stamps(hypervisor, here, &here.memory)?;
        if pages.chunks(each as usize).all(|pages| pages[0].number() >= each) {
            return Ok(());
        }
        if hypervisor.ended() || cpu::now() > hypervisor.deadline {
            return Err("the guest's program writes nothing".into());
        }
        sleep(hypervisor, 1);
    }
}

/// What the guest's program wrote is of one moment in the fork; how many stamps it had written.
fn whole(hypervisor: &Hypervisor, here: &Forkable, fork: &Shared) -> Result<u64, String> {
    let (threads, each, pages) = stamps(hypervisor, here, fork)?;
    let at = |thread, page| pages[(thread * each + page) as usize];
    cut::check(threads, each, at).map_err(|torn| format!("the fork is of no moment: {torn}"))
}
