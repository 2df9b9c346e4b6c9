//! The job `restore`: a running guest is restored from a snapshot, and runs at once. Its memory
//! comes back page by page, and the pages that it faults on come first.
//!
//! The guest is stopped as in a migration, and the snapshot is a copy in the machine's other
//! region. The guest's own region is filled with a word that no guest writes, so that the guest
//! detects a page that is mapped before its content is there.

use super::cpu;
use super::guest::{Hypervisor, Thread};
use super::memory::{GUEST, PAGE, Run};
use super::migrate::{GONE, RUNS};
use super::report::{record, say};
use alloc::format;
use alloc::string::String;
use core::sync::atomic::Ordering;
use serde_json::json;
use slat::Hpa;
use slat_guest::{Host, HvaRange};
use slat_hypervisor::layout::away;

/// Largest number of pages that are restored together in the background.
const TOGETHER: u64 = 64;
/// Time between two such runs in which only faults are served, in milliseconds.
const BETWEEN: u64 = 1;

/// Runs the job, and lets the guest check what it wrote.
///
/// # Errors
/// Returns in words what went wrong.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    hypervisor.wait_for(1)?;
    hypervisor.sleep(RUNS);
    let late = hypervisor.memory.backing();
    let bytes = hypervisor.options.memory;
    let (home, away) = (late.inner().home(), away(bytes));
    let (all, pages) = (HvaRange { start: GUEST, bytes }, bytes / PAGE);

    let begin = cpu::now();
    hypervisor.stopped.store(true, Ordering::Release);
    let taken = thread.worker().invalidate(all, |_| {});
    let whole = Run { first: 0, pages };
    whole.copy(home, away);
    whole.fill(home, GONE);
    hypervisor.machine.clean(Hpa(home), bytes, true);
    hypervisor.machine.invalidate_instructions();
    late.lose(all, &taken);
    drop(taken);
    hypervisor.stopped.store(false, Ordering::Release);
    let still = cpu::now() - begin;

    // Restores pages that vCPUs wait for first. Others follow once `BETWEEN` has passed since the
    // last run in the background.
    let begin = cpu::now();
    let mut due = begin;
    while late.counts().missing != 0 {
        if hypervisor.ended() {
            return Err(format!("the guest was over before {:?}", late.counts()));
        }
        let now = cpu::now();
        let Some(fetch) = late.next(if now < due { 0 } else { TOGETHER }) else {
            cpu::relax();
            continue;
        };
        if !fetch.asked() {
            due = now + BETWEEN * cpu::frequency() / 1000;
        }
        let host = fetch.host();
        let (offset, bytes) = (host.start.0 - GUEST.0, host.bytes);
        Run { first: offset / PAGE, pages: bytes / PAGE }.copy(away, home);
        hypervisor.machine.clean(Hpa(home + offset), bytes, true);
        fetch.arrived(thread.worker());
    }
    let restored = cpu::now() - begin;
    let (counts, stalls) = (late.counts(), hypervisor.memory.stats().late);
    say!("restored {pages} pages in {restored} ticks beside the guest: {counts:?}, {stalls:?}");
    hypervisor.sleep(RUNS);
    hypervisor.control.stop.store(true, Ordering::Release);
    hypervisor.wait_for(2)?;
    record(&json!({
        "record": "restore",
        "pages": pages,
        "asked": counts.asked,
        "background": counts.background,
        "blocks": counts.blocks,
        "frequency": cpu::frequency(),
        "still_ticks": still,
        "restore_ticks": restored,
        // Times for which vCPUs waited for pages.
        "stalls": stalls.count,
        "stall_p50_ticks": stalls.p50,
        "stall_p99_ticks": stalls.p99,
        "stall_longest_ticks": stalls.longest,
    }));
    Ok(())
}
