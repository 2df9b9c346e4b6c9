//! The manager: a CPU that runs no vCPU, and works on the guest's memory while the guest runs.

use super::guest::{Hypervisor, Memory, Thread};
use super::memory::GUEST;
use super::report::{record, say};
use super::{age, cpu, fork, migrate, moves, private, psci, restore, vcpu};
use aarch64_cpu::registers::*;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use serde_json::{Map, Value, json};
use slat_guest::{FaultKind, HvaRange, Vcpu};
use slat_hypervisor::options::{Caches, Job};

/// Time within which vCPUs have to print their registers, in milliseconds.
const LEAVE: u64 = 500;

/// Runs the job, waits for the guest's end, reports, and switches the machine off.
pub fn run(hypervisor: &'static Hypervisor) -> ! {
    // TLB invalidations act on the VMID that is loaded, so this CPU loads the guest's.
    HCR_EL2.write(HCR_EL2::VM::Enable + HCR_EL2::RW::EL1IsAarch64);
    vcpu::load(hypervisor, hypervisor.memory.tables().guest_root());
    match Vcpu::new(&hypervisor.memory, hypervisor.options.vcpus as u16) {
        Ok(mut thread) => {
            // The manager maps into the tables of vCPUs whose caches are on. Other policies have no
            // other tables, and would count this as a switch of a vCPU.
            if hypervisor.options.caches == Caches::Exact {
                thread.set_caches(true);
            }
            let done = match hypervisor.options.job {
                Job::Boot => Ok(()),
                Job::Migrate => migrate::run(hypervisor, &mut thread),
                Job::Age => age::run(hypervisor, &mut thread),
                Job::Move => moves::run(hypervisor, &mut thread),
                Job::Restore => restore::run(hypervisor, &mut thread),
                Job::Fork => fork::run(hypervisor, &mut thread),
                Job::Private => private::run(hypervisor, &mut thread),
            };
            let over = done.and_then(|()| wait_for_end(hypervisor));
            let leaves = thread.worker().leaves_by_size();
            if let Err(reason) = over {
                stop(hypervisor, &mut thread, reason);
            }
            report(&hypervisor.memory, hypervisor, &leaves);
        }
        Err(error) => say!("the manager cannot work: {error}"),
    }
    psci::system_off()
}

/// Waits until the guest has ended.
///
/// # Errors
/// Returns an error if its time is over before.
fn wait_for_end(hypervisor: &Hypervisor) -> Result<(), String> {
    while !hypervisor.ended() {
        if cpu::now() > hypervisor.deadline {
            return Err(format!("it took more than {} s", hypervisor.options.seconds));
        }
        cpu::relax();
    }
    Ok(())
}

/// Ends a guest that has not ended by itself, and lets each vCPU print its registers. The memory is
/// invalidated, so a vCPU leaves the guest with its next instruction. One that waits for an
/// interrupt may have no next instruction.
fn stop(hypervisor: &Hypervisor, thread: &mut Thread<'_>, reason: String) {
    if hypervisor.ended() {
        return;
    }
    hypervisor.cut_short.store(true, Ordering::Release);
    hypervisor.end(reason);
    let all = HvaRange { start: GUEST, bytes: hypervisor.options.memory };
    let invalidation = thread.worker().invalidate(all, |_| {});
    cpu::wake_others();
    let vcpus = 0..hypervisor.options.vcpus;
    let until = cpu::now() + LEAVE * cpu::frequency() / 1000;
    while vcpus.clone().any(psci::is_on) && cpu::now() < until {
        cpu::relax();
    }
    for vcpu in vcpus.filter(|vcpu| psci::is_on(*vcpu)) {
        say!("vCPU {vcpu} has not left within {LEAVE} ms: it has memory still, or needs none");
    }
    drop(invalidation);
}

fn report(memory: &Memory, hypervisor: &Hypervisor, leaves: &[(slat::PageSize, u64)]) {
    let stats = memory.stats();
    let reason = hypervisor.end.lock().clone().unwrap_or_default();
    say!("the guest is over: {reason}");
    let mut faults = Map::new();
    for &kind in FaultKind::ALL {
        let spent = stats.faults(kind);
        if spent.count != 0 {
            let each: Vec<u64> = stats.vcpus.iter().map(|vcpu| vcpu.of(kind).count).collect();
            say!("  {:<16} {:>8}  {:?}, {} ticks", kind.name(), spent.count, each, spent.ticks);
            faults.insert(kind.name().into(), json!(each));
        }
    }
    let leaves: Map<String, Value> =
        leaves.iter().map(|(size, count)| (format!("{size}"), json!(count))).collect();
    let totals = stats.totals;
    say!("  leaves: {}", Value::Object(leaves.clone()));
    say!("  {totals:?}");
    record(&json!({
        "record": "end",
        "why": reason,
        "event": hypervisor.control.event.load(Ordering::Acquire),
        "faults": faults,
        "leaves": leaves,
        "invalidations": totals.invalidations,
        "broken": totals.broken,
        "tables_built": totals.tables_built,
        "flushes": totals.flushes,
        "flushed_bytes": totals.flushed_bytes,
        "touched_bytes": totals.touched_bytes,
        "mapped_bytes": totals.mapped_bytes,
        "split_bytes": totals.split_bytes,
        "collapsed_bytes": totals.collapsed_bytes,
    }));
}
