//! A thread that is held up by another one calls `Host::wait`, wherever that is: a host with one
//! CPU, or with priorities, lets the other run there.

use crate::machine::*;
use slat::format::ept::Ept1G;
use slat::{Access, AgeOptions, Gpa, GpaRange, Hpa, Memory, PageSize, Reader};
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
    let two = guest.worker().unwrap();
    let first = spawn(move || first(&mut one));
    stopped.recv().unwrap();
    waits(what, &machine, two, second, &open);
    first.join().unwrap();
    drop((vcpu, guest));
}

/// Asserts that `second`, which is held up, calls `Host::wait`; then opens the gate.
fn waits(
    what: &str,
    machine: &Counted,
    mut two: Work,
    second: impl FnOnce(&mut Work) + Send + 'static,
    open: &AtomicBool,
) {
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
    second.join().unwrap();
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

/// The holder is in the invalidation of a collapse: all leaves of a table are sealed.
#[test]
fn a_thread_that_meets_held_leaves_calls_the_hosts_wait() {
    type Meets = fn(&mut Work);
    let all = || GpaRange::new(Gpa(BASE), M2).unwrap();
    let meets: [(&str, Logging, Meets); 4] = [
        ("a clear", Logging::Protect, |work| {
            work.with(|worker| _ = worker.clear_log(MemslotId(0), 0, 512, &[u64::MAX; 8]));
        }),
        ("a read of hardware's log", Logging::Hardware, |work| {
            work.with(|worker| _ = worker.read_log(MemslotId(0), &mut [0; 8]));
        }),
        ("ageing", Logging::Protect, |work| {
            let all = GpaRange::new(Gpa(BASE), M2).unwrap();
            work.with(|worker| _ = worker.age(all, None, &mut [0; 8], AgeOptions::LEAVES));
        }),
        ("an invalidation", Logging::Protect, |work| {
            let host = HvaRange { start: Hva(HOST), bytes: M2 };
            work.with(|worker| drop(worker.invalidate(host, |_| ())));
        }),
    ];
    for (what, logging, meets) in meets {
        let machine = Counted::new();
        let (inside, stopped) = channel();
        let gate = Gate { inside: inside.clone(), open: Arc::default() };
        let open = gate.open.clone();
        let config = Config { logging, ..Config::new(1, PageSize::SIZE_4K) };
        let guest: Shared<Gate> = shared(&machine, 1, gate, config);
        let mut one = guest.worker().unwrap();
        one.with(|worker| {
            worker.set_memslot(MemslotSpec { log_dirty: true, ..memslot(M2) }).unwrap();
            worker.prefault(all(), Access::Write, || false);
        });
        let stops = open.clone();
        machine.invalidating(move || {
            inside.send(()).unwrap();
            while !stops.load(Ordering::SeqCst) {
                yield_now();
            }
        });
        let first = spawn(move || {
            one.with(|worker| {
                let tables = worker.guest().tables();
                let mut reader = Reader::register(tables.platform()).unwrap();
                let mut guard = tables.enter(&mut reader).unwrap();
                assert_eq!(guard.collapse(all(), PageSize::SIZE_2M), Ok(M2));
            });
        });
        stopped.recv().unwrap();
        waits(what, &machine, guest.worker().unwrap(), meets, &open);
        first.join().unwrap();
    }
}
