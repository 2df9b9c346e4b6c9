//! A thread that would wait for itself panics with a message, and leaves the guest as it was.

use crate::machine::*;
use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::{Access, Format, Gpa, GpaRange, Hpa, Maintenance, Memory, PageSize, Reader, Vmid};
use slat_guest::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Runs `work` on a thread of its own; fails if that hangs.
fn in_time<R: Send + 'static>(what: &str, work: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, is_done) = sync_channel(1);
    let thread = std::thread::spawn(move || done.send(work()).unwrap());
    match is_done.recv_timeout(Duration::from_secs(60)) {
        Ok(result) => result,
        Err(_) if thread.is_finished() => panic!("{what}: {:?}", thread.join()),
        Err(_) => panic!("{what}: a thread waits for itself"),
    }
}

/// Asserts that `work` panics because its thread would wait for itself.
fn waits_for_itself<R>(what: &str, work: impl FnOnce() -> R) {
    let panic = catch_unwind(AssertUnwindSafe(work)).err();
    let panic = panic.unwrap_or_else(|| panic!("{what}: it did not panic"));
    let message = panic.downcast_ref::<&str>().copied().map(String::from);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap();
    assert!(message.contains("this thread would wait for itself"), "{what}: {message}");
}

type OneVcpu<'w, F> = Vcpu<'w, F, CountingMachine, OnePiece>;
type Work<F> = (&'static str, for<'v, 'w> fn(&'v mut OneVcpu<'w, F>));

fn page() -> GpaRange {
    GpaRange::new(Gpa(BASE), K4).unwrap()
}

fn private() -> MemslotSpec {
    MemslotSpec {
        private: Some(PrivateAt(0)),
        gpa: Gpa(BASE + G1),
        id: MemslotId(1),
        host: Hva(HOST + G1),
        ..memslot(M2)
    }
}

/// Every operation that waits until threads have left the tables, or for its turn to change them.
/// Each succeeds once the thread is outside.
fn on_ept() -> Vec<Work<Ept1G>> {
    vec![
        ("set_memslot", |vcpu| {
            vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..memslot(M2) }).unwrap();
        }),
        ("pin", |vcpu| drop(vcpu.worker().pin(page()).unwrap())),
        ("convert", |vcpu| {
            let range = GpaRange::new(private().gpa, K4).unwrap();
            vcpu.worker().convert(range, MemoryKind::Private, |_| {}).unwrap();
        }),
        ("freeze_writes", |vcpu| {
            drop(vcpu.worker().freeze_writes(HvaRange { start: Hva(HOST), bytes: K4 }));
        }),
    ]
}

/// The same where vCPUs switch their caches and hardware logs.
fn on_arm() -> Vec<Work<Arm64K4>> {
    vec![
        ("set_memslot", |vcpu| {
            vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..memslot(M2) }).unwrap();
        }),
        ("read_log", |vcpu| {
            vcpu.worker().read_log(MemslotId(0), &mut [0; 8]).unwrap();
        }),
        ("take_log", |vcpu| {
            vcpu.worker().take_log(MemslotId(0), &mut [0; 8]).unwrap();
        }),
        ("host_wrote", |vcpu| {
            vcpu.worker().host_wrote(page(), Maintenance::Instructions);
        }),
        ("Flush::new", |vcpu| drop(Flush::new(vcpu.worker()))),
        ("set_way", |vcpu| {
            vcpu.set_way();
        }),
        ("set_caches", |vcpu| {
            vcpu.set_caches(false);
        }),
        ("reset", |vcpu| {
            vcpu.reset();
        }),
    ]
}

fn each_waits<F: Format + 'static>(
    format: F,
    config: Config,
    memslots: &[MemslotSpec],
    works: Vec<Work<F>>,
) {
    let machine = CountingMachine::new();
    let ram = OnePiece(PageSize::SIZE_2M);
    let guest = SharedGuest::new(format, Vmid(1), 39, machine, ram, config).unwrap();
    let mut vcpu = guest.vcpu(0).unwrap();
    vcpu.with(|vcpu| {
        for &memslot in memslots {
            vcpu.worker().set_memslot(memslot).unwrap();
        }
        assert!(matches!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(_)));
    });
    for (what, work) in works {
        let tables = guest.get().tables();
        let mut reader = Reader::register(tables.platform()).unwrap();
        let guard = tables.enter(&mut reader).unwrap();
        vcpu.with(|vcpu| waits_for_itself(what, || work(vcpu)));
        drop(guard);
        // In the call that tells which pages were taken.
        let mut other = guest.worker().unwrap();
        vcpu.with(|vcpu| {
            let page = HvaRange { start: Hva(HOST), bytes: K4 };
            vcpu.fault(Gpa(BASE), Access::Write);
            let mut taken = 0;
            other.with(|other| {
                drop(other.invalidate(page, |_| {
                    taken += 1;
                    waits_for_itself(what, || work(vcpu));
                }));
            });
            assert_eq!(taken, 1, "{what}");
            // Outside it works.
            work(vcpu);
        });
    }
}

#[test]
fn a_thread_inside_the_tables_panics_before_a_self_deadlock() {
    in_time("EPT", || {
        let config = Config::new(1, PageSize::SIZE_2M);
        each_waits(Ept1G::default(), config, &[memslot(M2), private()], on_ept());
    });
    in_time("Arm", || {
        let format = Arm64K4 { hardware_dirty: true, ..Arm64K4::default() };
        let config = Config::new(1, PageSize::SIZE_2M);
        let config = Config { caches_on: true, logging: Logging::Hardware, ..config };
        each_waits(format, config, &[memslot(M2)], on_arm());
    });
}

#[test]
fn a_backing_that_changes_memslots_in_a_fault_panics() {
    /// Changes a memslot when it is asked for a page.
    struct Changes(Mutex<Option<SharedWorker<Ept1G, CountingMachine, Changes>>>);
    impl Backing for Changes {
        fn page(&self, _: Hva, _: Access) -> Result<Page, NoPage> {
            if let Some(mut worker) = self.0.lock().unwrap().take() {
                let change = || worker.with(|worker| worker.set_memslot(memslot(K4)));
                waits_for_itself("in the backing", change);
            }
            let (hpa, block) = (Hpa(G1), PageSize::SIZE_4K);
            Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
        }
    }
    in_time("the backing", || {
        let config = Config::new(1, PageSize::SIZE_2M);
        let guest = shared(&CountingMachine::new(), 1, Changes(Mutex::new(None)), config);
        let mut vcpu = guest.vcpu(0).unwrap();
        vcpu.with(|vcpu| vcpu.worker().set_memslot(memslot(M2))).unwrap();
        *guest.get().backing().0.lock().unwrap() = Some(guest.worker().unwrap());
        let outcome = vcpu.with(|vcpu| vcpu.fault(Gpa(BASE), Access::Write));
        assert_eq!(outcome, Outcome::Mapped(PageSize::SIZE_4K));
    });
}

/// Makes the machine do `work` between pieces and when it hears of a leaf, as a thread that would
/// wait for itself there.
fn meanwhile(
    machine: &CountingMachine,
    guest: &CountingGuest,
    mut work: impl FnMut(&mut Worker<'_, Ept1G, CountingMachine, OnePiece>) + Send + 'static,
) -> Arc<AtomicU64> {
    let (times, mut other) = (Arc::new(AtomicU64::new(0)), guest.worker().unwrap());
    let counts = times.clone();
    machine.between(move || {
        counts.fetch_add(1, Ordering::Relaxed);
        waits_for_itself("a turn", || other.with(&mut work));
    });
    times
}

/// The VMM is called while a thread has the turn to change memslots, to recover huge pages, or to
/// report to devices.
#[test]
fn a_vmm_that_is_called_in_a_turn_and_asks_for_another_panics() {
    in_time("recovery", || {
        let machine = CountingMachine::new();
        let split = ExecuteHuge::Split;
        let config = Config { execute_huge: split, ..Config::new(1, PageSize::SIZE_2M) };
        let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
        let mut vcpu = guest.vcpu(0).unwrap();
        let times = meanwhile(&machine, &guest, |other| _ = other.recover_huge_pages());
        vcpu.with(|vcpu| {
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            vcpu.fault(Gpa(BASE), Access::Execute);
            let recovered = [(); 3].map(|()| vcpu.worker().recover_huge_pages().bytes);
            assert!(recovered.contains(&M2));
        });
        assert!(times.load(Ordering::Relaxed) >= 1);
        machine.between(|| ());
    });
    in_time("devices", || {
        let machine = CountingMachine::new();
        let config = Config { devices: true, ..Config::new(1, PageSize::SIZE_2M) };
        let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
        let mut vcpu = guest.vcpu(0).unwrap();
        vcpu.with(|vcpu| vcpu.worker().set_memslot(memslot(2 * M2)).unwrap());
        let times = meanwhile(&machine, &guest, |other| {
            let next = GpaRange::new(Gpa(BASE + M2), K4).unwrap();
            other.prefault(next, Access::Write, || false);
        });
        let outcome = vcpu.with(|vcpu| vcpu.fault(Gpa(BASE), Access::Write));
        assert!(matches!(outcome, Outcome::Mapped(_)));
        assert_eq!(times.load(Ordering::Relaxed), 1);
        machine.between(|| ());
    });
    in_time("between pieces", || {
        let machine = CountingMachine::new();
        let config = Config::new(1, PageSize::SIZE_2M);
        let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
        let mut worker = guest.worker().unwrap();
        worker.with(|worker| worker.set_memslot(memslot(2 * G1))).unwrap();
        let times = meanwhile(&machine, &guest, |other| _ = other.set_memslot(memslot(K4)));
        let log = MemslotSpec { log_dirty: true, ..memslot(2 * G1) };
        worker.with(|worker| worker.set_memslot(log)).unwrap();
        assert!(times.load(Ordering::Relaxed) >= 2);
        machine.between(|| ());
    });
}

/// Invalidations that a thread holds, and other guests, keep it from nothing.
#[test]
fn what_a_thread_holds_outside_the_tables_keeps_no_change_back() {
    in_time("an invalidation", || {
        let machine = CountingMachine::new();
        let config = Config::new(1, PageSize::SIZE_2M);
        let make = |vmid| shared(&machine, vmid, OnePiece(PageSize::SIZE_2M), config);
        let (guest, other) = (make(1), make(2));
        let [mut worker, mut holds] = [(); 2].map(|()| guest.worker().unwrap());
        let tables = other.get().tables();
        let mut reader = Reader::register(tables.platform()).unwrap();
        let _elsewhere = tables.enter(&mut reader).unwrap();
        let log = |log_dirty| MemslotSpec { log_dirty, ..memslot(M2) };
        worker.with(|worker| worker.set_memslot(log(false))).unwrap();
        holds.with(|holds| {
            let host = HvaRange { start: Hva(HOST), bytes: M2 };
            let _invalidation = holds.invalidate(host, |_| {});
            worker.with(|worker| {
                let _held = worker.freeze_writes(host);
                worker.set_memslot(log(true)).unwrap();
                worker.set_memslot(log(false)).unwrap();
                worker.set_memslot(memslot(0)).unwrap();
            });
        });
    });
}
