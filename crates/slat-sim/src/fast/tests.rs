//! An invalidation between two steps of an access.

use super::moment::{Moment, next};
use super::{FastCpu, FastMachine, Why};
use crate::arch::{Ept, Fault};
use slat::{Gpa, GpaRange, Hpa, Invalidation, Platform, Vmid};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

const VMID: Vmid = Vmid(1);

/// Creates a machine, and a root that maps the first page through tables made by hand.
fn machine() -> (Arc<FastMachine<Ept>>, Hpa) {
    let machine = FastMachine::new(Ept::default(), 1, 2 << 20, 1 << 20).unwrap();
    let [root, l3, l2, l1] = [(); 4].map(|()| machine.allocate(0x1000).unwrap().hpa());
    for (table, entry) in [(root, l3.0), (l3, l2.0), (l2, l1.0), (l1, machine.memory_base().0)] {
        let rights = if table == l1 { 0b111 | 6 << 3 } else { 0b111 };
        set(&machine, table, entry | rights);
    }
    (Arc::new(machine), root)
}

fn set(machine: &FastMachine<Ept>, table: Hpa, raw: u64) {
    let pte = machine.space.pte(table.0, 0).unwrap();
    while pte.exchange(pte.load(), raw).is_err() {}
}

/// Starts a thread that clears the entry in `root`, invalidates, and sets `done`. Returns after the
/// invalidation has begun and has had time to end.
fn unmap(machine: &Arc<FastMachine<Ept>>, root: Hpa, done: &Arc<AtomicBool>) {
    let before = machine.log.now();
    let (other, done) = (machine.clone(), done.clone());
    thread::spawn(move || {
        set(&other, root, 0);
        let range = GpaRange::new(Gpa(0), 0x1000).ok();
        other.invalidate(&Invalidation { vmid: VMID, range, leaf: None, tables: true });
        done.store(true, SeqCst);
    });
    while machine.log.now() == before {
        thread::yield_now();
    }
    thread::sleep(Duration::from_millis(20));
}

fn unmapped_at(moment: Moment, warm: bool, membarrier: bool) {
    let (mut machine, root) = machine();
    Arc::get_mut(&mut machine).unwrap().set_membarrier(membarrier);
    let mut cpu: FastCpu<'_, _> = machine.cpu(0).unwrap();
    cpu.load(VMID, root);
    if warm {
        cpu.write(0, 1).unwrap();
    }
    let done = Arc::new(AtomicBool::new(false));
    let waits = Arc::new(AtomicBool::new(false));
    let other = (machine.clone(), done.clone(), waits.clone());
    next(moment, move || {
        unmap(&other.0, root, &other.1);
        other.2.store(!other.1.load(SeqCst), SeqCst);
    });
    let result = cpu.write(0, 2);
    assert!(waits.load(SeqCst), "the invalidation waits for the access");
    // If the walk began before the change, it may have found the page or not.
    assert!(result.is_ok() || moment == Moment::Looked && !warm);
    while !done.load(SeqCst) {
        thread::yield_now();
    }
    let reason = Why::Mmu(Fault::Translation);
    assert_eq!(cpu.write(0, 3).map_err(|error| error.reason), Err(reason), "nothing stale is left");
    assert_ne!(machine.read_host(machine.memory_base()), 3);
}

#[test]
fn an_invalidation_waits_for_an_access_and_drops_its_entry() {
    for membarrier in [true, false] {
        unmapped_at(Moment::Looked, false, membarrier);
        unmapped_at(Moment::Looked, true, membarrier);
        unmapped_at(Moment::Walked, false, membarrier);
    }
}
