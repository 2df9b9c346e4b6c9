//! The job `move`: sets the owner of an address that is not mapped, moves leaves under a running
//! guest, and gives the guest another VMID.
//!
//! Some of the guest's memory moves leaf by leaf to another region of the machine, while vCPUs
//! write to it. Leaves are write-protected, copied, and replaced in place, unless a vCPU has
//! written in between. Then the guest gets another VMID, as when a hypervisor runs out of VMIDs.
//! Meanwhile the vCPUs are stopped as in a migration: all memory is invalidated, so each of them
//! faults and waits.

use super::guest::{Hypervisor, Thread};
use super::memory::{GUEST, PAGE, PAGE_SIZE, Run};
use super::migrate::{GONE, RUNS};
use super::psci::is_on;
use super::report::{record, say};
use super::{cpu, vcpu};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use serde_json::json;
use slat::{
    Attributes, Gpa, GpaRange, Hpa, Interruption, Invalidation, Leaf, MapError, Owner, Platform,
    Reader, ReplaceError, TableCache, Vmid,
};
use slat_guest::HvaRange;
use slat_hypervisor::layout::{GUEST_RAM, away};

/// Bytes after which no more leaves are moved.
const MOST: u64 = 8 << 20;
/// Largest number of bytes in leaves that are protected, copied and replaced together.
const TOGETHER: u64 = 256 << 10;
/// Number of copies of a leaf that may fail, because a vCPU has written to it, before it stays
/// where it is.
const TRIES: u64 = 4;
/// Owner of an address that the guest does not have.
const HYPERVISOR: Owner = Owner::new(0x5_1a7).expect("a word of 48 bits");
/// The guest's VMID afterwards.
const RENEWED: Vmid = Vmid(2);
/// Time within which vCPUs have to leave the guest, in milliseconds.
const LEAVE: u64 = 5000;

/// Runs the job, and lets the guest check what it wrote.
///
/// # Errors
/// Returns in words what went wrong.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    hypervisor.wait_for(1)?;
    hypervisor.sleep(RUNS);
    let (home, away) =
        (hypervisor.memory.backing().inner().home(), away(hypervisor.options.memory));
    own(hypervisor)?;
    let moved = move_leaves(hypervisor, home, away)?;
    hypervisor.sleep(RUNS);
    let still = set_vmid(hypervisor, thread)?;
    hypervisor.sleep(RUNS);
    hypervisor.control.stop.store(true, Ordering::Release);
    hypervisor.wait_for(2)?;
    record(&json!({
        "record": "moves",
        "bytes": moved.bytes,
        "copied_anew": moved.anew,
        "left": moved.left,
        "vmid": hypervisor.memory.tables().vmid().0,
        "still_ticks": still,
        "frequency": cpu::frequency(),
        "owner": HYPERVISOR.word(),
    }));
    Ok(())
}

/// Sets the owner of an address behind the guest's RAM, checks that a mapping there is refused, and
/// clears the owner.
fn own(hypervisor: &'static Hypervisor) -> Result<(), String> {
    let machine = hypervisor.machine;
    let tables = hypervisor.memory.tables();
    let mut reader = Reader::register(machine).map_err(|error| error.to_string())?;
    let mut guard = tables.enter(&mut reader).map_err(|error| error.to_string())?;
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(machine, &mut storage);
    cache.fill(8).map_err(|error| error.to_string())?;
    let behind = Gpa(GUEST_RAM + hypervisor.options.memory);
    let page = GpaRange::new(behind, PAGE).map_err(|error| error.to_string())?;
    let said = |stopped: Interruption<slat::OwnerError>| stopped.to_string();
    guard.set_owner(page, None, Some(HYPERVISOR), &mut cache).map_err(said)?;
    let found = guard.owner(behind).map_err(|error| error.to_string())?;
    let mapped = guard.map(page, Hpa(0), Attributes::RAM, PAGE_SIZE, &mut cache);
    let refused =
        mapped == Err(Interruption { at: behind, reason: MapError::Owned { owner: HYPERVISOR } });
    if found != Some(HYPERVISOR) || !refused {
        return Err(format!("{behind} is {found:?}'s, and a mapping there came to {mapped:?}"));
    }
    guard.set_owner(page, Some(HYPERVISOR), None, &mut cache).map_err(said)?;
    let tables = guard.prune(page).map_err(|stopped| stopped.to_string())?;
    say!(
        "{behind} was owner {:#x}'s, and a mapping there was refused; {tables} tables pruned",
        HYPERVISOR.word()
    );
    Ok(())
}

/// Counts of moved leaves.
#[derive(Default)]
struct MoveCounts {
    /// Bytes of leaves that were moved.
    bytes: u64,
    /// Copies that failed, because a vCPU wrote to the leaf.
    anew: u64,
    /// Leaves that stayed where they were, because a vCPU wrote during every copy.
    left: u64,
}

/// Adjacent leaves of one size, whose attributes differ only in what vCPUs and logs change: the
/// right to write, accessed and dirty.
struct Alike {
    first: Leaf,
    bytes: u64,
}

impl Alike {
    fn takes(&self, leaf: &Leaf) -> bool {
        let plain =
            |of: &Leaf| Attributes { write: false, accessed: true, dirty: true, ..of.attributes };
        let bytes = self.bytes + leaf.size.bytes();
        self.first.gpa.0 + self.bytes == leaf.gpa.0
            && (self.first.size, plain(&self.first)) == (leaf.size, plain(leaf))
            && bytes <= TOGETHER
    }
}

/// Moves leaves of the guest's RAM from one region to the other while the guest runs.
fn move_leaves(hypervisor: &Hypervisor, from: u64, to: u64) -> Result<MoveCounts, String> {
    let mut reader = Reader::register(hypervisor.machine).map_err(|error| error.to_string())?;
    let tables = hypervisor.memory.tables();
    let mut guard = tables.enter(&mut reader).map_err(|error| error.to_string())?;
    let ram = GpaRange::new(Gpa(GUEST_RAM), hypervisor.options.memory);
    let ram = ram.map_err(|error| error.to_string())?;
    let leaves = guard.leaves(ram).map_err(|error| error.to_string())?;
    let here = |leaf: &Leaf| leaf.hpa.0 == from + (leaf.gpa.0 - GUEST_RAM);
    let mut runs: Vec<Alike> = Vec::new();
    for leaf in leaves.filter_map(Result::ok).filter(here) {
        match runs.last_mut().filter(|run| run.takes(&leaf)) {
            Some(run) => run.bytes += leaf.size.bytes(),
            None => runs.push(Alike { first: leaf, bytes: leaf.size.bytes() }),
        }
    }
    let mut moved = MoveCounts::default();
    // The last leaves come first, because Linux puts programs at the end of RAM.
    for Alike { first, bytes } in runs.into_iter().rev() {
        if moved.bytes >= MOST || hypervisor.ended() {
            break;
        }
        let held = Attributes { write: false, ..first.attributes };
        let (mut at, end, mut tries) =
            (first.gpa.0 - GUEST_RAM, first.gpa.0 - GUEST_RAM + bytes, 0);
        while at < end {
            let pages = Run { first: at / PAGE, pages: (end - at) / PAGE };
            let range = GpaRange::new(Gpa(GUEST_RAM + at), end - at).map_err(|e| e.to_string())?;
            guard.write_protect(range).map_err(|stopped| stopped.to_string())?;
            // This job has no log, so nothing else takes away the right to write. Otherwise a leaf
            // could be write-protected again after a vCPU wrote during the copy, and the write
            // would be lost.
            guard.defer_invalidation(range).map_err(|error| error.to_string())?;
            guard.invalidate();
            pages.copy(from, to);
            let replaced = guard.replace(range, Hpa(from + at), Hpa(to + at), held);
            guard.invalidate();
            let reached = match replaced {
                Ok(_) => end,
                Err(Interruption {
                    at: Gpa(gpa),
                    reason: ReplaceError::Writable | ReplaceError::Contended,
                }) => gpa - GUEST_RAM,
                Err(stopped) => return Err(stopped.to_string()),
            };
            if at < reached {
                hypervisor.memory.backing().inner().moved(at, reached - at);
                // A vCPU that still uses the old memory finds this word and fails its check.
                Run { first: at / PAGE, pages: (reached - at) / PAGE }.fill(from, GONE);
                (moved.bytes, tries) = (moved.bytes + (reached - at), 0);
            }
            at = reached;
            if at < end {
                (moved.anew, tries) = (moved.anew + 1, tries + 1);
                if tries == TRIES {
                    (moved.left, tries) = (moved.left + 1, 0);
                    at += first.size.bytes();
                }
            }
        }
        guard.refresh();
    }
    say!(
        "moved {} KiB from {from:#x} to {to:#x} beside vCPUs, {} times anew; {} leaves stayed",
        moved.bytes >> 10,
        moved.anew,
        moved.left
    );
    Ok(moved)
}

/// Gives the guest another VMID. Returns for how many ticks its vCPUs stood still.
fn set_vmid(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<u64, String> {
    let begin = cpu::now();
    hypervisor.stopped.store(true, Ordering::Release);
    let all = HvaRange { start: GUEST, bytes: hypervisor.options.memory };
    let invalidation = thread.worker().invalidate(all, |_| {});
    // A vCPU that waits for an interrupt is woken, and then faults as well.
    cpu::wake_others();
    let until = begin + LEAVE * cpu::frequency() / 1000;
    let on = || (0..hypervisor.options.vcpus).filter(|vcpu| is_on(*vcpu)).count() as u64;
    while hypervisor.waiting.load(Ordering::Acquire) < on() {
        if cpu::now() > until {
            return Err(format!("vCPUs did not leave the guest within {LEAVE} ms"));
        }
        cpu::relax();
    }
    // SAFETY:
    // 1. All vCPUs wait in `Hypervisor::pause` with VMID 0 loaded, and load the new VMID before
    //    they run again. This CPU loads it below.
    // 2. There is no other guest, and this guest never had the new VMID.
    // 3. The old VMID is invalidated below on all CPUs, before any guest could get it.
    let old = unsafe { hypervisor.memory.set_vmid(RENEWED) };
    let left = Invalidation { vmid: old, range: None, leaf: None, tables: true };
    hypervisor.machine.invalidate(&left);
    vcpu::load(hypervisor, hypervisor.memory.tables().guest_root());
    drop(invalidation);
    hypervisor.stopped.store(false, Ordering::Release);
    let still = cpu::now() - begin;
    say!("VMID {} became {}: vCPUs stood still for {still} ticks", old.0, RENEWED.0);
    Ok(still)
}
