//! What the host takes from the guest, what it is told, and what a log that begins leaves as it is.

use crate::fixture::*;
use crate::watched::WatchedMachine;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, Hpa, PageSize};
use slat_guest::*;

on_all! {
    fn what_the_backing_no_longer_has_is_evicted<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
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
        assert_eq!(again, Err(Outcome::Refused(Refusal::NoPage)));
        assert!(machine.cpu(0).read(BASE + 3 * K4).is_ok());
        assert!(machine.finish().is_empty());
    }

    fn an_invalidation_may_reach_to_the_end_of_64_bits<C: Case>() {
        // The last pages of which the end can be written in 64 bits, but for one.
        let last = u64::MAX - (3 * K4 - 1);
        let at_the_end = MemslotSpec { host: Hva(last), ..memslot(2 * K4) };
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

    fn a_log_that_is_all_set_has_every_page<C: Case>() {
        let config = Config { initially_set: true, ..config() };
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        assert_eq!(vcpu.worker().set_memslot(logged(M2)), Ok(MemslotChange::LogOn(None)));
        assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut [0; 8]), Ok(512));
    }

    fn a_log_that_refuses_says_why<C: Case>() {
        with_guest!(C, config(), logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let worker = vcpu.worker();
        let missing = worker.read_log(MemslotId(3), &mut [0; 8]).unwrap_err();
        assert_eq!(missing.to_string(), "memslot 3 is not there, or does not log");
        let short = worker.read_log(MemslotId(0), &mut [0; 7]).unwrap_err();
        assert_eq!(short.to_string(), "the bitmap has 7 words; the memslot takes 8");
    }
}

/// Pages that were written keep their right to write when hardware's log begins, and the host is
/// told of the writes when it takes the pages.
fn hardware_log_begins<C: Case>() {
    let config = Config { logging: Logging::Hardware, ..config() };
    with_guest!(C, config, memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
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
fn pages_written_before_a_hardware_log_stay_writable_and_dirty() {
    hardware_log_begins::<Intel>();
    hardware_log_begins::<ArmDirty>();
}

#[test]
fn an_invalidation_reports_its_end_and_the_bytes_that_it_took() {
    let machine = WatchedMachine::new(Intel::machine(1));
    let ram = Ram::new();
    ram.populate(HOST, M2, PageSize::SIZE_4K);
    let guest = Guest::new(Intel::format(), VMID, BITS, &machine, ram, config()).unwrap();
    let mut vcpu = Vcpu::new(&guest, 0).unwrap();
    vcpu.worker().set_memslot(memslot(M2)).unwrap();
    for page in 0..3 {
        vcpu.fault(Gpa(BASE + page * K4), Access::Write);
    }
    machine.take_events();
    let host = host_range(HOST + K4, 2 * K4);
    drop(vcpu.worker().invalidate(host, |_| {}));
    let heard = machine.take_events();
    let begin = Event::InvalidationBegin { host, ranges: 1 };
    assert_eq!(heard, [begin, Event::InvalidationEnd { bytes: 2 * K4 }]);
    vcpu.worker().evict(&[], |_| {});
    assert!(machine.take_events().is_empty());
}
