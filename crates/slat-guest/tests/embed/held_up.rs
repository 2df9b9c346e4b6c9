//! A thread that is held up by another one calls `Host::wait`, wherever that is: a host with one
//! CPU, or with priorities, lets the other run there.

use crate::machine::*;
use slat::format::ept::Ept1G;
use slat::{Access, Gpa, GpaRange, Hpa, Memory, PageSize};
use slat_guest::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{spawn, yield_now};

type Work = SharedWorker<Ept1G, Counted, Gate>;

/// Memory in blocks. Faults on its last page stop in the backing until the gate opens.
#[derive(Clone)]
struct Gate {
    inside: Sender<()>,
    open: Arc<AtomicBool>,
}

const BYTES: u64 = 2 * G1;
const LAST: u64 = BYTES - K4;

impl Backing for Gate {
    fn page(&self, host: Hva, _: Access) -> Result<Page, NoPage> {
        if host.0 == HOST + LAST {
            _ = self.inside.send(());
            while !self.open.load(Ordering::SeqCst) {
                yield_now();
            }
        }
        let (hpa, block) = (Hpa(host.0 & ((1 << 40) - 1)), PageSize::SIZE_2M);
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

/// Holds up `second` by `first`, which stops in the backing or between pieces, and asserts that
/// `second` has called `Host::wait` before `first` goes on.
fn holds_up(
    what: &str,
    first: impl FnOnce(&mut Work) + Send + 'static,
    second: impl FnOnce(&mut Work) + Send + 'static,
) {
    let machine = Counted::new();
    let (inside, stopped): (_, Receiver<()>) = channel();
    let gate = Gate { inside: inside.clone(), open: Arc::default() };
    let open = gate.open.clone();
    let config = Config { execute_huge: ExecuteHuge::Split, ..Config::new(1, PageSize::SIZE_2M) };
    let guest: Shared<Gate> = shared(&machine, 1, gate, config);
    let mut one = guest.worker().unwrap();
    one.with(|worker| {
        worker.set_memslot(memslot(BYTES)).unwrap();
        worker.prefault(GpaRange::new(Gpa(BASE), K4).unwrap(), Access::Write, || false);
    });
    let mut vcpu = guest.vcpu(0).unwrap();
    vcpu.with(|vcpu| vcpu.fault(Gpa(BASE), Access::Execute));
    one.with(|worker| worker.recover_huge_pages());
    let (inside, stops) = (Mutex::new(inside), open.clone());
    machine.between(move || {
        _ = inside.lock().unwrap().send(());
        while !stops.load(Ordering::SeqCst) {
            yield_now();
        }
    });
    let mut two = guest.worker().unwrap();
    let first = spawn(move || first(&mut one));
    stopped.recv().unwrap();
    let before = machine.waits.load(Ordering::SeqCst);
    let ended = Arc::new(AtomicBool::new(false));
    let end = ended.clone();
    let second = spawn(move || {
        second(&mut two);
        end.store(true, Ordering::SeqCst);
    });
    // A thread that spins without `Host::wait` hangs the test here.
    while machine.waits.load(Ordering::SeqCst) == before {
        assert!(!ended.load(Ordering::SeqCst), "{what}: nothing held it up");
        yield_now();
    }
    open.store(true, Ordering::SeqCst);
    first.join().unwrap();
    second.join().unwrap();
    drop((vcpu, guest));
}

fn last() -> GpaRange {
    GpaRange::new(Gpa(BASE + LAST), K4).unwrap()
}

#[test]
fn a_thread_that_is_held_up_calls_the_hosts_wait() {
    let fault = |work: &mut Work| {
        work.with(|worker| worker.prefault(last(), Access::Write, || false));
    };
    let recover = |work: &mut Work| {
        work.with(|worker| worker.recover_huge_pages());
    };
    let log_dirty = MemslotSpec { log_dirty: true, ..memslot(BYTES) };
    let log = move |work: &mut Work| {
        work.with(|worker| worker.set_memslot(log_dirty)).unwrap();
    };
    let delete = |work: &mut Work| {
        work.with(|worker| worker.set_memslot(memslot(0))).unwrap();
    };
    let execute = |work: &mut Work| {
        work.with(|worker| worker.set_execute_huge(ExecuteHuge::Allowed)).unwrap();
    };
    let pin = |work: &mut Work| work.with(|worker| drop(worker.pin(last()).unwrap()));
    let hold = |work: &mut Work| {
        let host = HvaRange { start: Hva(HOST), bytes: BYTES };
        work.with(|worker| drop(worker.freeze_writes(host)));
    };
    holds_up("a recovery, by a recovery", recover, recover);
    holds_up("a log that begins, by a log that begins", log, delete);
    holds_up("a deletion, by a log that begins", log, delete);
    holds_up("a switch of execution, by a log that begins", log, execute);
    holds_up("a pin, by a log that begins", log, pin);
    holds_up("a deletion, by a fault", fault, delete);
    holds_up("a switch of execution, by a fault", fault, execute);
    holds_up("a pin, by a fault", fault, pin);
    holds_up("held writes, by a fault", fault, hold);
}
