//! Leaves that move under a running guest, an owner of what is not mapped, and another VMID.
//!
//! Leaf by leaf some of the guest's memory goes to another region of the machine, while its vCPUs
//! write to it: leaves are write-protected, copied, and replaced in place, unless a vCPU has written
//! in between. Then the guest gets another VMID, as when a hypervisor's VMIDs run out. For
//! that its vCPUs stand still, as in a migration: the memory stops them.

use super::guest::{Hypervisor, PAGE};
use super::manager::{Thread, is_on, sleep, wait_for};
use super::memory::GUEST;
use super::migrate::{GONE, RUNS, Run};
use super::report::{record, say};
use super::{cpu, vcpu};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use serde_json::json;
use slat::{
    Attributes, Gpa, GpaRange, Halted, Hpa, Invalidation, Leaf, MapError, Member, Owner, Platform,
    ReplaceError, TableCache, Vmid,
};
use slat_guest::HvaRange;
use slat_hypervisor::layout::{GUEST_RAM, away};

/// Bytes that are moved, at most.
const MOST: u64 = 8 << 20;
/// Bytes of leaves that are protected, copied and replaced together, at most.
const TOGETHER: u64 = 256 << 10;
/// How often a leaf is copied anew, because a vCPU has written to it, before it stays where it is.
const TRIES: u64 = 4;
/// Whose an address is that the guest does not have.
const HYPERVISOR: Owner = Owner::new(0x5_1a7).expect("a word of 48 bits");
/// What CPUs know the guest by afterwards.
const RENEWED: Vmid = Vmid(2);
/// How long vCPUs have to come out of the guest, in milliseconds.
const LEAVE: u64 = 5000;

/// Does all of that, and has the guest check what it wrote.
///
/// # Errors
/// What went wrong, in words.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    wait_for(hypervisor, 1)?;
    sleep(hypervisor, RUNS);
    let (home, away) =
        (hypervisor.memory.backing().inner().home(), away(hypervisor.options.memory));
    own(hypervisor)?;
    let moved = move_leaves(hypervisor, home, away)?;
    sleep(hypervisor, RUNS);
    let still = renew(hypervisor, thread)?;
    sleep(hypervisor, RUNS);
    hypervisor.control.stop.store(true, Ordering::Release);
    wait_for(hypervisor, 2)?;
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

/// Gives an address behind the guest's RAM an owner, sees that it keeps a mapping out, and takes it
/// back.
fn own(hypervisor: &'static Hypervisor) -> Result<(), String> {
    let machine = hypervisor.machine;
    let tables = hypervisor.memory.tables();
    let mut member = Member::join(machine).map_err(|error| error.to_string())?;
    let mut guard = tables.enter(&mut member).map_err(|error| error.to_string())?;
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(machine, &mut storage);
    cache.fill(8).map_err(|error| error.to_string())?;
    let behind = Gpa(GUEST_RAM + hypervisor.options.memory);
    let page = GpaRange::new(behind, PAGE).map_err(|error| error.to_string())?;
    let said = |halted: Halted<slat::OwnerError>| halted.to_string();
    guard.set_owner(page, None, Some(HYPERVISOR), &mut cache).map_err(said)?;
    let found = guard.owner(behind).map_err(|error| error.to_string())?;
    let mapped = guard.map(page, Hpa(0), Attributes::RAM, super::guest::PAGE_SIZE, &mut cache);
    let refused = mapped == Err(Halted { at: behind, why: MapError::Owned { owner: HYPERVISOR } });
    if found != Some(HYPERVISOR) || !refused {
        return Err(format!("{behind} is {found:?}'s, and a mapping there came to {mapped:?}"));
    }
    guard.set_owner(page, Some(HYPERVISOR), None, &mut cache).map_err(said)?;
    let tables = guard.prune(page).map_err(|halted| halted.to_string())?;
    say!(
        "{behind} was owner {:#x}'s, and a mapping there was refused; {tables} tables pruned",
        HYPERVISOR.word()
    );
    Ok(())
}

/// What came of the leaves of the guest's RAM.
#[derive(Default)]
struct Moved {
    /// Bytes of those that were moved.
    bytes: u64,
    /// Copies that were in vain, as a vCPU wrote to the leaf.
    anew: u64,
    /// Leaves that stayed where they were: a vCPU always did.
    left: u64,
}

/// Leaves beside each other, of one size and alike but for what vCPUs and logs change in them.
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

/// Moves leaves of the guest's RAM from one region to the other while it runs.
fn move_leaves(hypervisor: &Hypervisor, from: u64, to: u64) -> Result<Moved, String> {
    let mut member = Member::join(hypervisor.machine).map_err(|error| error.to_string())?;
    let tables = hypervisor.memory.tables();
    let mut guard = tables.enter(&mut member).map_err(|error| error.to_string())?;
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
    let mut moved = Moved::default();
    // From the end, where Linux puts programs.
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
            guard.write_protect(range).map_err(|halted| halted.to_string())?;
            // Nobody else takes rights in this job, as there is no log; else what was written beside
            // the copy could look as if it had not been.
            guard.owe(range).map_err(|error| error.to_string())?;
            guard.complete();
            pages.copy(from, to);
            let replaced = guard.replace(range, Hpa(from + at), Hpa(to + at), held);
            guard.complete();
            let reached = match replaced {
                Ok(_) => end,
                Err(Halted {
                    at: Gpa(gpa),
                    why: ReplaceError::Writable | ReplaceError::Contended,
                }) => gpa - GUEST_RAM,
                Err(halted) => return Err(halted.to_string()),
            };
            if at < reached {
                hypervisor.memory.backing().inner().moved(at, reached - at);
                // Who still used it would be noticed.
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

/// Gives the guest another VMID; returns for how long its vCPUs stood still.
fn renew(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<u64, String> {
    let begin = cpu::now();
    hypervisor.stopped.store(true, Ordering::Release);
    let all = HvaRange { start: GUEST, bytes: hypervisor.options.memory };
    let invalidation = thread.worker().invalidate(all, |_| {});
    // One that waits for an interrupt is woken, and faults.
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
    // 1. All vCPUs wait in `Hypervisor::pause`, under VMID 0, and load the new one before they run
    //    again; this CPU does so below.
    // 2. There is no other guest, and this one never had the new VMID.
    // 3. The old one is invalidated below, on all CPUs, before anybody could get it.
    let old = unsafe { hypervisor.memory.renew(RENEWED) };
    let left = Invalidation { vmid: old, range: None, leaf: None, tables: true };
    hypervisor.machine.invalidate(&left);
    vcpu::load(hypervisor, &hypervisor.memory, hypervisor.memory.tables().root());
    drop(invalidation);
    hypervisor.stopped.store(false, Ordering::Release);
    let still = cpu::now() - begin;
    say!("VMID {} became {}: vCPUs stood still for {still} ticks", old.0, RENEWED.0);
    Ok(still)
}
