//! A thread that is held up by another one calls `Host::wait`, wherever that is: a host with one
//! CPU, or with priorities, lets the other run there.

use crate::machine::*;
use slat::format::ept::Ept1G;
use slat::{Access, AgeOptions, Gpa, GpaRange, Hpa, Maintenance, Memory, PageSize, Reader, Vmid};
use slat_guest::*;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{scope, spawn, yield_now};

type Work = SharedWorker<Ept1G, CountingMachine, Gate>;

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

    fn private_page(&self, at: PrivateAt) -> Result<PrivatePage, NoPage> {
        Ok(PrivatePage { hpa: Hpa((1 << 41) + at.0), block: PageSize::SIZE_2M })
    }
}

/// Holds up `second` by `first`, which stops in the backing or between pieces, and asserts that
/// `second` has called `Host::wait` before `first` goes on.
fn holds_up(
    what: &str,
    first: impl FnOnce(&mut Work) + Send + 'static,
    second: impl FnOnce(&mut Work) + Send + 'static,
) {
    let machine = CountingMachine::new();
    let (inside, stopped): (_, Receiver<()>) = channel();
    let gate = Gate { inside: inside.clone(), open: Arc::default() };
    let open = gate.open.clone();
    let config = Config { execute_huge: ExecuteHuge::Split, ..Config::new(1, PageSize::SIZE_2M) };
    let guest: CountingGuest<Gate> = shared(&machine, 1, gate, config);
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
fn waits<T: Send + 'static>(
    what: &str,
    machine: &CountingMachine,
    mut two: T,
    second: impl FnOnce(&mut T) + Send + 'static,
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
    let pin = |work: &mut Work| work.with(|worker| drop(worker.pin(last()).unwrap()));
    let hold = |work: &mut Work| {
        let host = HvaRange { start: Hva(HOST), bytes: BYTES };
        work.with(|worker| drop(worker.freeze_writes(host)));
    };
    holds_up("a recovery, by a recovery", recover, recover);
    holds_up("a log that begins, by a log that begins", log, delete);
    holds_up("a deletion, by a log that begins", log, delete);
    holds_up("a pin, by a log that begins", log, pin);
    holds_up("a deletion, by a fault", fault, delete);
    holds_up("a pin, by a fault", fault, pin);
    holds_up("held writes, by a fault", fault, hold);
}

type Cpu = SharedVcpu<Ept1G, CountingMachine, Gate>;

/// A thread that stops in an invalidation, and one that it holds up.
struct Meets {
    what: &'static str,
    /// The first thread begins when the second is here, or before it.
    moment: Option<Moment>,
    config: Config,
    memslot: MemslotSpec,
    prepare: fn(&mut Cpu),
    first: fn(&mut Work),
    second: fn(&mut Cpu),
}

impl Meets {
    fn check(self) {
        let machine = CountingMachine::new();
        machine.breaks.store(true, Ordering::Relaxed);
        let (inside, stopped) = channel();
        let gate = Gate { inside: inside.clone(), open: Arc::default() };
        let open = gate.open.clone();
        let guest: CountingGuest<Gate> = shared(&machine, 1, gate, self.config);
        let mut vcpu = guest.vcpu(0).unwrap();
        vcpu.with(|vcpu| vcpu.worker().set_memslot(self.memslot)).unwrap();
        (self.prepare)(&mut vcpu);
        let (mut one, first, stops) = (guest.worker().unwrap(), self.first, open.clone());
        let stop = move || {
            inside.send(()).unwrap();
            while !stops.load(Ordering::SeqCst) {
                yield_now();
            }
        };
        let (go, gone) = channel();
        let first = spawn(move || {
            gone.recv().unwrap();
            first(&mut one);
        });
        let held = machine.clone();
        let begin = move || {
            held.at(Moment::Invalidation, stop);
            go.send(()).unwrap();
            stopped.recv().unwrap();
        };
        match self.moment {
            Some(moment) => machine.at(moment, begin),
            None => begin(),
        }
        waits(self.what, &machine, vcpu, self.second, &open);
        first.join().unwrap();
    }
}

fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(BASE + start), bytes).unwrap()
}

/// Stops in the invalidation of a collapse: all leaves of a table are sealed.
fn collapse<H: Host, B: Backing>(worker: &Worker<'_, Ept1G, H, B>, range: GpaRange, to: PageSize) {
    let tables = worker.guest().tables();
    let mut reader = Reader::register(tables.platform()).unwrap();
    let mut guard = tables.enter(&mut reader).unwrap();
    assert_eq!(guard.collapse(range, to), Ok(range.size()));
}

#[test]
fn a_thread_that_meets_held_pages_calls_the_hosts_wait() {
    let held = |what, logging, second| Meets {
        what,
        moment: None,
        config: Config { logging, ..Config::new(1, PageSize::SIZE_4K) },
        memslot: MemslotSpec { log_dirty: true, ..memslot(M2) },
        prepare: |vcpu| {
            vcpu.with(|vcpu| vcpu.worker().prefault(range(0, M2), Access::Write, || false));
        },
        first: |work| work.with(|worker| collapse(worker, range(0, M2), PageSize::SIZE_2M)),
        second,
    };
    held("a translation by a vCPU", Logging::Protect, |vcpu| {
        vcpu.with(|vcpu| _ = vcpu.translate(Gpa(BASE)));
    })
    .check();
    held("a clear", Logging::Protect, |vcpu| {
        vcpu.with(|vcpu| _ = vcpu.worker().clear_log(MemslotId(0), 0, 512, &[u64::MAX; 8]));
    })
    .check();
    held("a read of hardware's log", Logging::Hardware, |vcpu| {
        vcpu.with(|vcpu| _ = vcpu.worker().read_log(MemslotId(0), &mut [0; 8]));
    })
    .check();
    held("ageing", Logging::Protect, |vcpu| {
        let leaves = AgeOptions::LEAVES;
        vcpu.with(|vcpu| _ = vcpu.worker().age(range(0, M2), None, &mut [0; 8], leaves));
    })
    .check();
    held("an invalidation", Logging::Protect, |vcpu| {
        let host = HvaRange { start: Hva(HOST), bytes: M2 };
        vcpu.with(|vcpu| drop(vcpu.worker().invalidate(host, |_| ())));
    })
    .check();
}

#[test]
fn a_thread_that_meets_held_blocks_calls_the_hosts_wait() {
    // The second GiB, in blocks.
    let held = |what, prepare, second| Meets {
        what,
        moment: None,
        config: Config::new(1, PageSize::SIZE_2M),
        memslot: MemslotSpec { private: Some(PrivateAt(0)), ..memslot(BYTES) },
        prepare,
        first: |work| work.with(|worker| collapse(worker, range(G1, G1), PageSize::SIZE_1G)),
        second,
    };
    let shared: fn(&mut Cpu) = |vcpu| {
        vcpu.with(|vcpu| vcpu.worker().prefault(range(G1, G1), Access::Write, || false));
    };
    let private: fn(&mut Cpu) = |vcpu| {
        vcpu.with(|vcpu| {
            vcpu.worker().convert(range(0, BYTES), MemoryKind::Private, |_| ()).unwrap();
            vcpu.worker().prefault(range(G1, G1), Access::Write, || false);
        });
    };
    held("an eager split", shared, |vcpu| {
        let split = EagerSplit::new(range(G1, G1), PageSize::SIZE_4K);
        vcpu.with(|vcpu| _ = split.run(vcpu.worker(), || false));
    })
    .check();
    let page: fn(&mut Cpu) = |vcpu| {
        let page = range(G1 + K4, K4);
        vcpu.with(|vcpu| vcpu.worker().convert(page, MemoryKind::Shared, |_| ())).unwrap();
    };
    held("a conversion that splits a block", private, page).check();
    held("a conversion that unmaps", private, |vcpu| {
        let all = range(0, BYTES);
        vcpu.with(|vcpu| vcpu.worker().convert(all, MemoryKind::Shared, |_| ())).unwrap();
    })
    .check();
}

fn begin_log(vcpu: &mut Cpu) {
    let logs = MemslotSpec { log_dirty: true, ..memslot(BYTES) };
    vcpu.with(|vcpu| vcpu.worker().set_memslot(logs)).unwrap();
}

/// The second GiB is collapsed while another thread is at work on the first.
#[test]
fn a_thread_that_meets_blocks_held_before_calls_the_hosts_wait() {
    let held = |what, moment, second| Meets {
        what,
        moment: Some(moment),
        config: Config { devices: true, ..Config::new(1, PageSize::SIZE_2M) },
        memslot: memslot(BYTES),
        prepare: |vcpu| {
            vcpu.with(|vcpu| vcpu.worker().prefault(range(0, BYTES), Access::Write, || false));
        },
        first: |work| work.with(|worker| collapse(worker, range(G1, G1), PageSize::SIZE_1G)),
        second,
    };
    let hardware = Config { logging: Logging::Hardware, ..Config::new(1, PageSize::SIZE_2M) };
    let log = held("hardware's log that begins", Moment::Piece, begin_log);
    Meets { config: hardware, ..log }.check();
    held("held writes", Moment::Devices, |vcpu| {
        let host = HvaRange { start: Hva(HOST), bytes: BYTES };
        vcpu.with(|vcpu| drop(vcpu.worker().freeze_writes(host)));
    })
    .check();
    held("code that the host wrote", Moment::Maintenance, |vcpu| {
        let all = range(0, BYTES);
        vcpu.with(|vcpu| _ = vcpu.worker().host_wrote(all, Maintenance::Instructions));
    })
    .check();
    let private = held("the split of a private block", Moment::PrivateSplit, |vcpu| {
        let page = range(G1 + K4, K4);
        vcpu.with(|vcpu| vcpu.worker().convert(page, MemoryKind::Shared, |_| ())).unwrap();
    });
    let prepare: fn(&mut Cpu) = |vcpu| {
        vcpu.with(|vcpu| {
            vcpu.worker().convert(range(0, BYTES), MemoryKind::Private, |_| ()).unwrap();
            vcpu.worker().prefault(range(0, BYTES), Access::Write, || false);
        });
    };
    let memslot = MemslotSpec { private: Some(PrivateAt(0)), ..memslot(BYTES) };
    Meets { memslot, prepare, ..private }.check();
}

/// The pages `from..to` of [`BASE`], as a memslot.
fn part(id: u16, from: u64, to: u64) -> MemslotSpec {
    let (gpa, host) = (Gpa(BASE + from * K4), Hva(HOST + from * K4));
    MemslotSpec::new(MemslotId(id), gpa, (to - from) * K4, host)
}

/// A block lies across the start of the memslot, pages are held at its end.
#[test]
fn a_starting_log_with_held_pages_at_its_end_calls_hosts_wait() {
    Meets {
        what: "the ends of a log that begins",
        moment: Some(Moment::Invalidation),
        config: Config::new(1, PageSize::SIZE_4K),
        memslot: part(0, 1, 768),
        prepare: |vcpu| {
            vcpu.with(|vcpu| {
                vcpu.worker().set_memslot(part(1, 0, 1)).unwrap();
                vcpu.worker().set_memslot(part(2, 768, 1024)).unwrap();
                vcpu.worker().prefault(range(0, 2 * M2), Access::Write, || false);
                collapse(vcpu.worker(), range(0, M2), PageSize::SIZE_2M);
            });
        },
        first: |work| work.with(|worker| collapse(worker, range(M2, M2), PageSize::SIZE_2M)),
        second: |vcpu| {
            let logs = MemslotSpec { log_dirty: true, ..part(0, 1, 768) };
            vcpu.with(|vcpu| vcpu.worker().set_memslot(logs)).unwrap();
        },
    }
    .check();
}

#[test]
fn a_ring_reset_beside_another_reset_calls_the_hosts_wait() {
    Meets {
        what: "a reset of rings",
        moment: None,
        config: Config { ring: Some(1024), ..Config::new(1, PageSize::SIZE_4K) },
        memslot: MemslotSpec { log_dirty: true, ..memslot(M2) },
        prepare: |vcpu| {
            vcpu.with(|vcpu| {
                vcpu.fault(Gpa(BASE), Access::Write);
                let page = DirtyPage { memslot: MemslotId(0), page: 0 };
                assert_eq!(vcpu.worker().harvest_ring(0, &mut [page]), 1);
            });
        },
        first: |work| assert_eq!(work.with(|worker| worker.reset_rings()), Ok(1)),
        second: |vcpu| assert_eq!(vcpu.with(|vcpu| vcpu.worker().reset_rings()), Ok(0)),
    }
    .check();
}

/// Frames whose filling stops until the gate opens. The first wait of a thread panics, if so.
#[derive(Debug)]
struct GatedFrames {
    inside: Mutex<Sender<()>>,
    open: AtomicBool,
    waits: AtomicU64,
    panics: AtomicBool,
}

impl Frames for GatedFrames {
    fn hpa(&self, frame: u32) -> Hpa {
        Hpa(u64::from(frame) * K4)
    }

    fn copy(&self, _: u32, _: u32) {}

    fn zero(&self, _: u32) {
        self.inside.lock().unwrap().send(()).unwrap();
        while !self.open.load(Ordering::SeqCst) {
            yield_now();
        }
    }

    fn wait(&self) {
        self.waits.fetch_add(1, Ordering::SeqCst);
        if self.panics.swap(false, Ordering::SeqCst) {
            resume_unwind(Box::new(()));
        }
        yield_now();
    }
}

fn fork(memory: &Cow<'_, GatedFrames>) {
    let machine = CountingMachine::new();
    let config = Config::new(1, PageSize::SIZE_4K);
    let backing = OnePiece(PageSize::SIZE_4K);
    let guest = Guest::new(Ept1G::default(), Vmid(1), 39, &*machine, backing, config).unwrap();
    let child = memory.fork(&mut Worker::new(&guest).unwrap()).unwrap();
    assert_eq!(child.frame(Hva(HOST)), memory.frame(Hva(HOST)));
}

/// A panic of its own passes through it, and the page is usable.
#[test]
fn a_thread_that_meets_a_page_being_filled_calls_frames_wait() {
    type Meets = fn(&Cow<'_, GatedFrames>);
    let meets: [(&str, Meets); 3] = [
        ("a fault", |memory| assert!(memory.page(Hva(HOST), Access::Read).is_ok())),
        ("a reader", |memory| assert!(memory.frame(Hva(HOST)).is_some())),
        ("a fork", fork),
    ];
    for (what, second) in meets {
        let (inside, stopped) = channel();
        let (open, waits, panics) = (false.into(), 0.into(), true.into());
        let frames = GatedFrames { inside: Mutex::new(inside), open, waits, panics };
        let shared = SharedFrames::new(frames, PageSize::SIZE_4K, 4);
        let memory = Cow::new(&shared, HvaRange { start: Hva(HOST), bytes: K4 }).unwrap();
        let waits = &shared.memory().waits;
        scope(|threads| {
            threads.spawn(|| memory.page(Hva(HOST), Access::Write).unwrap());
            stopped.recv().unwrap();
            assert!(catch_unwind(AssertUnwindSafe(|| second(&memory))).is_err(), "{what}");
            let held = threads.spawn(|| second(&memory));
            while waits.load(Ordering::SeqCst) < 2 {
                assert!(!held.is_finished(), "{what}: nothing held it up");
                yield_now();
            }
            shared.memory().open.store(true, Ordering::SeqCst);
        });
        assert!(memory.page(Hva(HOST), Access::Write).is_ok_and(|page| page.write), "{what}");
        drop(memory);
        assert_eq!(shared.free(), 4, "{what}: a frame is leaked");
    }
}
