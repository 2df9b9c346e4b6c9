//! The job `migrate`: a live migration within the machine. The manager copies the guest's memory to
//! another region, round by round, while the guest runs; then it switches the guest to the copy.
//!
//! The vCPUs are stopped by their memory. The manager invalidates all of it
//! ([`Worker::invalidate`]), as a host does to move a page. From then on each vCPU that accesses
//! RAM faults, and waits until the memory is back at its new address. A vCPU that waits for an
//! interrupt continues to wait.
//!
//! [`Worker::invalidate`]: slat_guest::Worker::invalidate

use super::cpu;
use super::guest::{Hypervisor, RAM_SLOT, Thread, ram};
use super::memory::{GUEST, PAGE, Run};
use super::report::{record, say};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};
use core::sync::atomic::Ordering;
use serde_json::json;
use slat::{Access, Gpa, GpaRange, Hpa};
use slat_guest::{Host, HvaRange, MemslotChange, MemslotSpec};
use slat_hypervisor::layout::{GUEST_RAM, away};

/// Largest number of rounds, because a guest that writes faster than it is copied never converges.
const ROUNDS: usize = 8;
/// Pages that may be left to copy while the guest stands still.
const FEW: u64 = 64;
/// Word with which the old memory is filled after the switch, so that the guest detects a vCPU that
/// still uses it.
pub const GONE: u64 = 0xdead_dead_dead_dead;
/// Time for which the guest runs before a migration, between rounds, and after it, in milliseconds.
/// Other jobs use it too.
pub const RUNS: u64 = 100;

/// Migrates the guest while it writes to its memory, and lets it check what it wrote.
///
/// # Errors
/// Returns in words what went wrong: the copies differ, the guest found something else than it
/// wrote, or it did not start.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    hypervisor.wait_for(1)?;
    hypervisor.sleep(RUNS);
    let options = &hypervisor.options;
    let (home, away) = (hypervisor.memory.backing().inner().home(), away(options.memory));
    let all = GpaRange::new(Gpa(GUEST_RAM), options.memory).map_err(|error| error.to_string())?;
    let pages = options.memory / PAGE;

    let begin = cpu::now();
    let logging = MemslotSpec { log_dirty: true, ..ram(options) };
    let change = thread.worker().set_memslot(logging).map_err(|error| error.to_string())?;
    let MemslotChange::LogOn(Some(split)) = change else { return Err(format!("{change:?}")) };
    let split_ticks = cpu::now() - begin;
    say!(
        "logs by {:?}: {} KiB split ahead, {split_ticks} ticks",
        options.logging,
        split.split >> 10
    );

    let mut bitmap = vec![0; pages.div_ceil(64) as usize];
    let mut rounds = Vec::new();
    let mut faults: Vec<Vec<u64>> = vec![faults_of(hypervisor)];
    let copy = |run: Run| {
        run.copy(home, away);
        // Instructions in the copy were written as data, so they have to be visible to fetches.
        hypervisor.machine.clean(Hpa(away + run.first * PAGE), run.pages * PAGE, true);
    };
    copy(Run { first: 0, pages });
    rounds.push(pages);
    for round in 1..=ROUNDS {
        let dirty = thread.worker().read_log(RAM_SLOT, &mut bitmap).map_err(|e| e.to_string())?;
        hypervisor.machine.clearing.store(true, Ordering::Relaxed);
        let cleared = thread.worker().clear_log(RAM_SLOT, 0, pages, &bitmap);
        hypervisor.machine.clearing.store(false, Ordering::Relaxed);
        cleared.map_err(|error| error.to_string())?;
        // vCPUs whose caches are off have written to memory directly.
        thread.worker().host_reads(all);
        runs(&bitmap, copy);
        say!("round {round}: {dirty} pages");
        rounds.push(dirty);
        faults.push(faults_of(hypervisor));
        if dirty <= FEW {
            break;
        }
        hypervisor.sleep(RUNS);
    }

    // After the invalidation no vCPU reaches its memory.
    let stop = cpu::now();
    hypervisor.stopped.store(true, Ordering::Release);
    let invalidation =
        thread.worker().invalidate(HvaRange { start: GUEST, bytes: options.memory }, |_| {});
    let left = thread.worker().read_log(RAM_SLOT, &mut bitmap).map_err(|e| e.to_string())?;
    runs(&bitmap, copy);
    hypervisor.machine.invalidate_instructions();
    hypervisor.memory.backing().inner().move_to(away);
    let downtime = cpu::now() - stop;
    let whole = Run { first: 0, pages };
    let equal = whole.compare(home, away);
    if equal.is_ok() {
        whole.fill(home, GONE);
    }
    drop(invalidation);
    hypervisor.stopped.store(false, Ordering::Release);
    equal?;
    say!("switched: {left} pages were left, downtime {downtime} ticks of {} Hz", cpu::frequency());

    // The guest runs again, on pages. The manager maps all of them ahead of faults, so that they
    // can be collapsed to blocks.
    for page in 0..pages {
        thread.fault(Gpa(GUEST_RAM + page * PAGE), Access::Read);
    }
    let change = thread.worker().set_memslot(ram(options)).map_err(|error| error.to_string())?;
    let MemslotChange::LogOff { collapsed } = change else { return Err(format!("{change:?}")) };
    say!("recovered {} KiB of huge pages", collapsed >> 10);
    faults.push(faults_of(hypervisor));
    hypervisor.sleep(RUNS);
    hypervisor.control.stop.store(true, Ordering::Release);
    hypervisor.wait_for(2)?;
    record(&json!({
        "record": "migration",
        "frequency": cpu::frequency(),
        "pages": pages,
        "split_bytes": split.split,
        "split_ticks": split_ticks,
        "rounds": rounds,
        "left": left,
        "downtime_ticks": downtime,
        "collapsed_bytes": collapsed,
        // Faults of each vCPU: before the first round, after each round, and after the collapse to
        // huge pages.
        "faults": faults,
    }));
    Ok(())
}

/// Returns the number of stage-2 faults of each vCPU so far.
fn faults_of(hypervisor: &Hypervisor) -> Vec<u64> {
    let stats = hypervisor.memory.stats();
    let all = |vcpu: &slat_guest::VcpuStats| {
        slat_guest::FaultKind::ALL.iter().map(|&kind| vcpu.of(kind).count).sum()
    };
    stats.vcpus[..hypervisor.options.vcpus as usize].iter().map(all).collect()
}

/// Calls `each` with the runs of pages in a bitmap.
fn runs(bitmap: &[u64], mut each: impl FnMut(Run)) {
    for (word, &bits) in bitmap.iter().enumerate() {
        let mut bits = bits;
        while bits != 0 {
            let first = bits.trailing_zeros();
            let pages = (bits >> first).trailing_ones();
            each(Run { first: word as u64 * 64 + u64::from(first), pages: pages.into() });
            bits &= !(u64::MAX >> (64 - pages) << first);
        }
    }
}
