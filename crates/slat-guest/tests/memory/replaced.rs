//! A write replaces a page that the backing shares for reading: no vCPU reads the old page any
//! more.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, PageSize};
use slat_guest::*;
use std::sync::{Mutex, mpsc};
use std::thread;

#[test]
fn a_page_replaced_by_a_write_leaves_the_views_of_other_vcpus() {
    for (first_reads, by_prefault) in [(false, false), (true, false), (false, true)] {
        with_guest!(ArmUncached, config(), memslot(M2), PageSize::SIZE_4K
            => machine, ram, guest, vcpu);
        let mut other = Vcpu::new(&guest, 1).unwrap();
        machine.cpu(1).load(VMID, other.root());
        ram.change(HOST, |page| page.write = false);
        let read = |vcpu: &mut _| attempt::<ArmUncached>(&machine, vcpu, BASE, Access::Read);
        let (shared, _) = read(&mut other).unwrap();
        if first_reads {
            assert_eq!(read(&mut vcpu).unwrap().0, shared);
        }
        if by_prefault {
            let done = vcpu.worker().prefault(range(BASE, K4), Access::Write, || false);
            assert_eq!(done.mapped, K4);
        } else {
            let own = attempt::<ArmUncached>(&machine, &mut vcpu, BASE, Access::Write).unwrap().0;
            assert_ne!(own, shared);
        }
        machine.take_back(shared, K4);
        assert_eq!(read(&mut other).unwrap().0.0, ram.get(HOST).unwrap().hpa);
        assert!(machine.finish().is_empty());
    }
}

on_all! {
    fn a_page_replaced_by_a_write_leaves_the_aliasing_memslot<C: Case>() {
        for writer_reads in [false, true] {
            with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
            let alias = MemslotSpec::new(MemslotId(1), Gpa(BASE + G1), M2, Hva(HOST));
            vcpu.worker().set_memslot(alias).unwrap();
            ram.change(HOST, |page| page.write = false);
            let (shared, _) = attempt::<C>(&machine, &mut vcpu, BASE + G1, Access::Read).unwrap();
            if writer_reads {
                attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
            }
            let (own, _) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
            assert_ne!(own, shared);
            machine.take_back(shared, K4);
            let (read, _) = attempt::<C>(&machine, &mut vcpu, BASE + G1, Access::Read).unwrap();
            assert_eq!(read, own);
            assert!(machine.finish().is_empty());
        }
    }

    fn a_waiting_vcpu_is_notified_when_its_page_becomes_private<C: Case>() {
        with_guest!(C, config(), hidden(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, M2, PageSize::SIZE_4K);
        ram.change(HOST, |page| page.ready = false);
        let outcome = vcpu.fault(Gpa(BASE), Access::Read);
        let Outcome::Retry(Retry::Absent(Some(arrival))) = outcome else { panic!("{outcome:?}") };
        assert!(!vcpu.is_ready(&arrival));
        let mut worker = Worker::new(&guest).unwrap();
        worker.convert(range(BASE, K4), MemoryKind::Private, |_| {}).unwrap();
        assert!(vcpu.is_ready(&arrival), "the shared page may never come");
        assert_eq!(vcpu.ready(), Some(arrival));
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        assert!(machine.finish().is_empty());
    }
}

/// The channels by which a thread reports that it has stopped, and by which it is released.
type Stop = (mpsc::Sender<()>, mpsc::Receiver<()>);

/// A backing that stops one thread: when it makes a page writable, then when it asks for a write.
#[derive(Debug)]
struct StoppingBacking {
    ram: Ram,
    /// One stop each: the thread reports that it has stopped, and waits.
    stops: [Mutex<Option<Stop>>; 2],
    /// The thread that is not stopped.
    whose: thread::ThreadId,
}

impl StoppingBacking {
    fn stop(&self, number: usize) {
        if thread::current().id() != self.whose {
            let stop = self.stops[number].lock().unwrap().take();
            if let Some((here, go)) = stop {
                here.send(()).unwrap();
                go.recv().unwrap();
            }
        }
    }
}

impl Backing for StoppingBacking {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        if access == Access::Write {
            self.stop(1);
        }
        self.ram.page(host, access)
    }

    fn make_writable<R>(&self, _host: Hva, _grant: impl FnOnce(Page) -> R) -> Option<R> {
        self.stop(0);
        None
    }
}

#[test]
fn a_written_page_emptied_by_a_late_fault_is_reported_dirty() {
    emptied_by_a_late_fault(config());
    // Also if all leaves are pages.
    emptied_by_a_late_fault(Config { largest: PageSize::SIZE_4K, ..config() });
}

fn emptied_by_a_late_fault(config: Config) {
    let machine = ArmPlain::machine(2);
    give_all::<ArmPlain>(&machine);
    let ram = Ram::from(ArmPlain::FIRST_HPA);
    ram.populate(HOST, M2, PageSize::SIZE_4K);
    ram.change(HOST, |page| page.write = false);
    let ((here, at), (go, gone)) = (mpsc::channel(), mpsc::channel());
    let ((here_too, at_page), (go_too, gone_too)) = (mpsc::channel(), mpsc::channel());
    let stops = [(here, gone), (here_too, gone_too)].map(|stop| Mutex::new(Some(stop)));
    let held = StoppingBacking { ram, stops, whose: thread::current().id() };
    let guest = Guest::new(ArmPlain::format(), VMID, BITS, &machine, held, config).unwrap();
    let mut vcpu = Vcpu::new(&guest, 0).unwrap();
    machine.here(0);
    vcpu.worker().set_memslot(memslot(M2)).unwrap();
    vcpu.fault(Gpa(BASE), Access::Read);
    thread::scope(|scope| {
        let (guest, machine) = (&guest, &machine);
        let late = scope.spawn(move || {
            machine.here(1);
            Vcpu::new(guest, 1).unwrap().fault(Gpa(BASE), Access::Write)
        });
        at.recv().unwrap();
        // Another vCPU's write replaces the page first, and is made.
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Write), Outcome::Mapped(PageSize::SIZE_4K));
        go.send(()).unwrap();
        at_page.recv().unwrap();
        // The late fault has emptied the leaf, and not mapped it again yet.
        assert_eq!(vcpu.worker().translate(Gpa(BASE)), Ok(None));
        let mut dirty = false;
        let invalidation =
            vcpu.worker().invalidate(host_range(HOST, K4), |taken| dirty |= taken.dirty);
        go_too.send(()).unwrap();
        let outcome = late.join().unwrap();
        drop(invalidation);
        assert!(dirty, "what the first vCPU wrote is lost");
        assert_eq!(outcome, Outcome::Retry(Retry::Invalidated));
    });
}
