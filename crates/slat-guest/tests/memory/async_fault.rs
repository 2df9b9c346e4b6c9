//! Memory that arrives late: which vCPUs wait and are woken, and what is mapped ahead of faults.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, PageSize};
use slat_guest::*;

/// The page of memslot 0 arrives; returns the number of vCPUs that were woken.
fn arrive<C: Case>(ram: &Ram, guest: &TheGuest<'_, C>, page: u64) -> u64 {
    ram.change(HOST + page * K4, |page| page.ready = true);
    guest.arrived(host_range(HOST + page * K4, K4))
}

fn late(ram: &Ram, pages: core::ops::Range<u64>) {
    pages.for_each(|page| ram.change(HOST + page * K4, |page| page.ready = false));
}

fn waits(outcome: Outcome) -> AsyncFault {
    match outcome {
        Outcome::Retry(Retry::Absent(Some(arrival))) => arrival,
        outcome => panic!("{outcome:?}"),
    }
}

on_all! {
    fn vcpus_that_wait_for_a_page_are_notified_when_it_arrives<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        let mut other = Vcpu::new(&guest, 1).unwrap();
        late(&ram, 3..6);
        let at = |page: u64| Gpa(BASE + page * K4);
        let first = waits(vcpu.fault(Gpa(at(3).0 + 8), Access::Write));
        let third = (MemslotId(0), at(3), Hva(HOST + 3 * K4));
        assert_eq!((first.memslot, first.gpa, first.host), third);
        assert_eq!(waits(vcpu.fault(at(3), Access::Read)), first, "one wait a page");
        let second = waits(vcpu.fault(at(4), Access::Read));
        assert_ne!(first.token, second.token);
        let others = waits(other.fault(at(3), Access::Read));
        assert_eq!(vcpu.waiting().count(), 2);

        assert_eq!(arrive::<C>(&ram, &guest, 5), 0, "nobody waits for it");
        assert!(vcpu.ready().is_none() && !vcpu.is_ready(&first));
        assert_eq!(arrive::<C>(&ram, &guest, 3), 2);
        assert_eq!(arrive::<C>(&ram, &guest, 3), 0, "each is told once");
        assert_eq!(vcpu.ready(), Some(first));
        assert_eq!(vcpu.ready(), None);
        assert_eq!(other.ready(), Some(others));
        attempt::<C>(&machine, &mut vcpu, at(3).0, Access::Write).unwrap();
        // A fault that finds the page needs no report.
        arrive::<C>(&ram, &guest, 4);
        attempt::<C>(&machine, &mut vcpu, at(4).0, Access::Write).unwrap();
        assert_eq!((vcpu.ready(), vcpu.waiting().count()), (None, 0));
        assert_eq!(guest.stats().late.count, 3);
        assert!(machine.finish().is_empty());
    }

    fn a_vcpu_waits_for_sixteen_pages_and_runs_on<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        late(&ram, 0..20);
        let mut tokens = Vec::new();
        for page in 0..16 {
            tokens.push(waits(vcpu.fault(Gpa(BASE + page * K4), Access::Read)).token);
            attempt::<C>(&machine, &mut vcpu, BASE + (20 + page) * K4, Access::Write).unwrap();
        }
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens.len(), 16);
        let full = vcpu.fault(Gpa(BASE + 16 * K4), Access::Read);
        assert_eq!(full, Outcome::Retry(Retry::Absent(None)));
        (0..20).for_each(|page| _ = arrive::<C>(&ram, &guest, page));
        let mut told: Vec<u32> = core::iter::from_fn(|| vcpu.ready()).map(|it| it.token).collect();
        told.sort_unstable();
        assert_eq!(told, tokens);
        let late = guest.stats().late;
        assert_eq!(late.count, 16);
        assert!(late.p50 <= late.p99 && late.p99 <= late.longest);
    }

    fn a_waiting_vcpu_is_notified_if_its_memslot_goes_or_moves<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        late(&ram, 0..2);
        let arrival = waits(vcpu.fault(Gpa(BASE), Access::Read));
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..memslot(0) }).unwrap();
        assert_eq!(vcpu.ready(), Some(arrival));
        assert_eq!(vcpu.fault(Gpa(BASE), Access::Read), Outcome::Mmio);
        vcpu.worker().set_memslot(memslot(M2)).unwrap();
        let arrival = waits(vcpu.fault(Gpa(BASE), Access::Read));
        vcpu.worker().set_memslot(MemslotSpec { gpa: Gpa(BASE + M2), ..memslot(M2) }).unwrap();
        assert_eq!(vcpu.ready(), Some(arrival));
        assert!(machine.finish().is_empty());
    }

    fn a_range_is_mapped_ahead_and_accounted_for_to_the_byte<C: Case>() {
        with_guest!(C, config(), memslot(8 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        // In the second block one page is late, and one is refused; the third is already mapped.
        for page in 512..1024 {
            ram.change(HOST + page * K4, |page| page.block = PageSize::SIZE_4K);
        }
        late(&ram, 600..610);
        ram.remove(HOST + 700 * K4);
        attempt::<C>(&machine, &mut vcpu, BASE + 2 * M2, Access::Write).unwrap();
        let held = vcpu.worker().invalidate(host_range(HOST + 3 * M2, K4), |_| {});
        let all = range(BASE - M2, 10 * M2);
        let done = vcpu.worker().prefault(all, Access::Write, || false);
        drop(held);
        assert_eq!(
            done,
            PrefaultBytes {
                // The block that is held is tried page by page, and each page counts as held.
                mapped: 5 * M2 + (512 - 11) * K4,
                there: M2,
                absent: 10 * K4,
                held: M2,
                refused: K4,
                no_memory: 2 * M2,
                stop: None,
            }
        );
        assert_eq!(vcpu.waiting().count(), 0, "nobody waits");
        let again = vcpu.worker().prefault(all, Access::Write, || false);
        assert_eq!((again.mapped, again.held), (M2, 0));
        assert_eq!(again.there, 6 * M2 + (512 - 11) * K4);
        // No page faults any more.
        let (_, outcomes) =
            attempt::<C>(&machine, &mut vcpu, BASE + 5 * M2 + K4, Access::Write).unwrap();
        assert_eq!(outcomes, []);
        let mut left = 3;
        let stopped = vcpu.worker().prefault(all, Access::Read, || {
            left -= 1;
            left == 0
        });
        assert_eq!(stopped.stop, Some((Gpa(BASE + M2), PrefaultStop::Asked)));
        assert!(machine.finish().is_empty());
    }

    fn a_prefault_for_writing_is_in_the_log<C: Case>() {
        let config = Config { ring: Some(128), ..config() };
        with_guest!(C, config, logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let done = vcpu.worker().prefault(range(BASE + 5 * K4 + 1, K4), Access::Write, || false);
        assert_eq!(done.mapped, 2 * K4, "whole pages");
        let mut bits = [0; 8];
        assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(2));
        assert_eq!(bits[0], 0b11 << 5);
    }
}

#[test]
fn no_arrival_is_lost_between_asking_and_waiting() {
    for answers in 0..2 {
        let machine = Intel::machine(1);
        give_all::<Intel>(&machine);
        let ram = Ram::new();
        ram.populate(HOST, M2, PageSize::SIZE_4K);
        late(&ram, 0..1);
        let backing = Asked::new(&ram);
        let guest = Guest::new(Intel::format(), VMID, BITS, &machine, &backing, config()).unwrap();
        let mut vcpu = Vcpu::new(&guest, 0).unwrap();
        machine.cpu(0).load(VMID, vcpu.root());
        vcpu.worker().set_memslot(memslot(M2)).unwrap();
        let arrives = || {
            ram.change(HOST, |page| page.ready = true);
            guest.arrived(host_range(HOST, K4));
        };
        // It arrives after the first answer, and the second has it; or after the second, when the
        // vCPU already waits, and is woken.
        let outcome = backing.then(answers, arrives, || vcpu.fault(Gpa(BASE), Access::Read));
        assert_eq!(outcome, Outcome::Mapped(PageSize::SIZE_4K), "{answers}");
        assert_eq!(vcpu.waiting().count(), 0);
    }
}

#[test]
fn all_waits_of_a_vcpu_end_that_one_arrival_is_for() {
    type C = Intel;
    with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let at = |page: u64| Gpa(BASE + page * K4);
    late(&ram, 0..17);
    let all: Vec<_> = (0..16).map(|page| waits(vcpu.fault(at(page), Access::Read))).collect();
    // One more than a vCPU can wait for: it is told to try again, and no wait is lost for it.
    let more = |vcpu: &mut TheVcpu<'_, C>| vcpu.fault(at(16), Access::Read);
    assert_eq!(more(&mut vcpu), Outcome::Retry(Retry::Absent(None)));
    (0..17).for_each(|page| ram.change(HOST + page * K4, |page| page.ready = true));
    assert_eq!(guest.arrived(host_range(HOST, 17 * K4)), 1, "the vCPU is woken once");
    assert!(all.iter().all(|wait| vcpu.is_ready(wait)), "a page has arrived, and it sleeps on");
    assert!(matches!(more(&mut vcpu), Outcome::Mapped(_)), "its places are taken until it asks");
    assert_eq!(core::iter::from_fn(|| vcpu.ready()).count(), 16);
    assert_eq!(vcpu.waiting().count(), 0);
    assert!(machine.finish().is_empty());
}
