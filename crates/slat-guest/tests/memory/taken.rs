//! What the host takes from the guest, what it is told, and what a log that begins leaves as it is.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, BreakBeforeMake, Frame, Gpa, Grace, Hpa, PageSize, Platform, Pte, Vmid};
use slat_guest::*;
use slat_sim::{Ept, Machine};
use std::ptr::NonNull;
use std::sync::Mutex;

on_all! {
    fn what_the_backing_no_longer_has_is_evicted<C: Case>() {
        with_guest!(C, config(), slot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        for page in 0..8 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
        }
        let pages = [1, 2, 6];
        let memory = pages.map(|page| Hpa(ram.get(HOST + page * K4).unwrap().hpa));
        pages.iter().for_each(|page| ram.remove(HOST + page * K4));
        let mut taken = Vec::new();
        let hosts = [host_range(HOST + K4, 2 * K4), host_range(HOST + 6 * K4, K4)];
        vcpu.worker().evict(&hosts, |part| taken.push((part.gpa.0, part.host, part.dirty)));
        let expected = [(BASE + K4, hosts[0], true), (BASE + 6 * K4, hosts[1], true)];
        assert_eq!(taken, expected);
        memory.iter().for_each(|hpa| machine.take_back(*hpa, K4));
        let again = attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Read);
        assert_eq!(again, Err(Outcome::Refused(Refused::NoPage)));
        assert!(machine.cpu(0).read(BASE + 3 * K4).is_ok());
        assert!(machine.finish().is_empty());
    }

    fn an_invalidation_may_reach_to_the_end_of_64_bits<C: Case>() {
        // The last pages of which the end can be written in 64 bits, but for one.
        let last = u64::MAX - (3 * K4 - 1);
        let at_the_end = MemslotSpec { host: Hva(last), ..slot(2 * K4) };
        with_guest!(C, config(), at_the_end, PageSize::SIZE_4K => machine, ram, guest, vcpu);
        for page in [BASE, BASE + K4] {
            attempt::<C>(&machine, &mut vcpu, page, Access::Write).unwrap();
        }
        let mut taken = Vec::new();
        let rest = host_range(last + K4, u64::MAX);
        drop(vcpu.worker().invalidate(rest, |part| taken.push((part.gpa.0, part.host))));
        assert_eq!(taken, [(BASE + K4, host_range(last + K4, K4))]);
        assert!(machine.finish().is_empty());
    }

    fn a_log_that_is_all_set_begins_at_once<C: Case>() {
        let config = Config { initially_set: true, ..config() };
        with_guest!(C, config, slot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let work = vcpu.worker().begin_memslot(logged(M2)).unwrap();
        assert_eq!(work.change(), Some(MemslotChange::LogOn(None)));
        assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut [0; 8]), Ok(512));
    }

    fn a_log_that_refuses_says_why<C: Case>() {
        with_guest!(C, config(), logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let worker = vcpu.worker();
        let missing = worker.read_log(MemslotId(3), &mut [0; 8]).unwrap_err();
        assert_eq!(missing.to_string(), "slot 3 is not there, or does not log");
        let short = worker.read_log(MemslotId(0), &mut [0; 7]).unwrap_err();
        assert_eq!(short.to_string(), "the bitmap has 7 words; the slot takes 8");
    }
}

/// Pages that were written keep their right to write when hardware's log begins, and the host is
/// told of the writes when it takes the pages.
fn hardware_log_begins<C: Case>()
where
    C::A: 'static,
{
    let config = Config { logging: Logging::Hardware, ..config() };
    with_guest!(C, config, slot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let page = |page: u64| BASE + page * K4;
    for (at, access) in [(0, Access::Read), (5, Access::Write), (7, Access::Write)] {
        attempt::<C>(&machine, &mut vcpu, page(at), access).unwrap();
    }
    vcpu.worker().set_memslot(logged(M2)).unwrap();
    let (_, outcomes) = attempt::<C>(&machine, &mut vcpu, page(7), Access::Write).unwrap();
    assert_eq!(outcomes, []);
    let mut bits = [0; 8];
    assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(1));
    assert_eq!(bits[0], 1 << 7);
    let mut written = Vec::new();
    drop(vcpu.worker().invalidate(host_range(HOST, M2), |part| {
        written.extend(part.dirty.then_some((part.gpa.0, part.host.bytes)));
    }));
    assert_eq!(written, [(page(5), K4), (page(7), K4)]);
    assert!(machine.finish().is_empty());
}

#[test]
fn pages_that_were_written_before_hardwares_log_stay_writable_and_are_told() {
    hardware_log_begins::<Intel>();
    hardware_log_begins::<ArmDirty>();
}

/// A machine that hears events.
struct Hears {
    machine: Machine<Ept>,
    heard: Mutex<Vec<Event>>,
}

impl Events for Hears {
    fn event(&self, _: Vmid, event: Event) {
        self.heard.lock().unwrap().push(event);
    }
}

// SAFETY: the machine does all of it.
unsafe impl Platform for Hears {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.machine.allocate(bytes)
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the caller's.
        unsafe { self.machine.free(frame, bytes) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        self.machine.entries(table)
    }

    fn publish(&self) {
        self.machine.publish();
    }

    fn invalidate(&self, what: &slat::Invalidation) {
        Platform::invalidate(&self.machine, what);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        Platform::break_before_make(&self.machine)
    }

    fn grace(&self) -> &Grace {
        self.machine.grace()
    }
}

impl Host for Hears {
    fn now(&self) -> u64 {
        self.machine.now()
    }

    fn events(&self) -> impl Events {
        self
    }
}

#[test]
fn an_invalidation_reports_its_end_and_the_bytes_that_it_took() {
    let machine = Hears { machine: Intel::machine(1), heard: Mutex::default() };
    let ram = Ram::new();
    ram.populate(HOST, M2, PageSize::SIZE_4K);
    let guest = Guest::new(Intel::format(), VMID, BITS, &machine, ram, config()).unwrap();
    let mut room = room();
    let mut vcpu = Vcpu::new(&guest, 0, &mut room).unwrap();
    vcpu.worker().set_memslot(slot(M2)).unwrap();
    for page in 0..3 {
        vcpu.fault(Gpa(BASE + page * K4), Access::Write);
    }
    machine.heard.lock().unwrap().clear();
    let host = host_range(HOST + K4, 2 * K4);
    drop(vcpu.worker().invalidate(host, |_| {}));
    let heard = core::mem::take(&mut *machine.heard.lock().unwrap());
    let begin = Event::InvalidationBegin { host, ranges: 1 };
    assert_eq!(heard, [begin, Event::InvalidationEnd { bytes: 2 * K4 }]);
    vcpu.worker().evict(&[], |_| {});
    assert!(machine.heard.lock().unwrap().is_empty());
}
