//! Private memory: conversions, operations that leave it alone, and the hooks that are called.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, AgeOptions, Gpa, Hpa, Interruption, PageSize, TableBits};
use slat_guest::*;
use slat_sim::{Kind, PrivateCall};
use std::sync::atomic::{AtomicBool, Ordering};

const ALL: AgeOptions = AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb: true };

/// Converts pages, and makes the machine check that the guest uses them so.
fn convert<C: Case>(
    machine: &slat_sim::Machine<C::A>,
    worker: &mut TheWorker<'_, C>,
    gpa: u64,
    bytes: u64,
    to: MemoryKind,
) -> u64 {
    let pages = worker.convert(range(gpa, bytes), to, |_| {}).unwrap();
    machine.claim_kind(VMID, range(gpa, bytes), to);
    pages
}

on_all! {
    fn a_page_is_mapped_as_the_kind_that_it_is<C: Case>() {
        with_guest!(C, config(), hidden(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, 4 * M2, PageSize::SIZE_2M);
        let shared = ram.get(HOST).unwrap().hpa;
        let hidden = ram.private(HIDDEN).unwrap().hpa;
        assert_eq!(attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap().0.0, shared);
        let to = MemoryKind::Private;
        assert_eq!(convert::<C>(&machine, vcpu.worker(), BASE, M2, to), 512);
        assert!(machine.cpu(0).read(BASE).is_err(), "what was shared is out of reach");
        let (hpa, outcomes) = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        assert_eq!((hpa, &outcomes[..]), (hidden, &[Outcome::Mapped(PageSize::SIZE_2M)][..]));
        assert_eq!(machine.assigned(), 512);
        assert_eq!(convert::<C>(&machine, vcpu.worker(), BASE, M2, to), 0, "it is so already");
        let to = MemoryKind::Shared;
        assert_eq!(convert::<C>(&machine, vcpu.worker(), BASE, M2, to), 512);
        assert_eq!(machine.assigned(), 0);
        assert_eq!(attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap().0.0, shared);
        let totals = guest.stats().totals;
        assert_eq!((totals.converted_pages, totals.private_bytes_taken), (1024, M2));
        assert!(machine.finish().is_empty());
    }

    fn no_leaf_has_pages_of_both_kinds<C: Case>() {
        with_guest!(C, config(), hidden(2 * G1), PageSize::SIZE_1G => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, 2 * G1, PageSize::SIZE_1G);
        convert::<C>(&machine, vcpu.worker(), BASE + M2, K4, MemoryKind::Private);
        convert::<C>(&machine, vcpu.worker(), BASE + G1, G1, MemoryKind::Private);
        // Pages in the table of one private page; blocks around it.
        let mapped = |vcpu: &mut TheVcpu<'_, C>, gpa: u64| {
            attempt::<C>(&machine, vcpu, gpa, Access::Write).unwrap().1
        };
        let of = |size| vec![Outcome::Mapped(size)];
        assert_eq!(mapped(&mut vcpu, BASE + M2), of(PageSize::SIZE_4K));
        assert_eq!(mapped(&mut vcpu, BASE + M2 + K4), of(PageSize::SIZE_4K));
        assert_eq!(mapped(&mut vcpu, BASE), of(PageSize::SIZE_2M));
        assert_eq!(mapped(&mut vcpu, BASE + G1), of(PageSize::SIZE_1G));
        // A shared page in it: the block is split along the path, and its neighbours stay.
        machine.private_calls();
        let page = BASE + G1 + 3 * M2 + 7 * K4;
        convert::<C>(&machine, vcpu.worker(), page, K4, MemoryKind::Shared);
        let calls = machine.private_calls();
        let kinds: Vec<_> = calls.iter().map(|(call, leaves)| (*call, leaves.bytes)).collect();
        // The next page is a single page by now.
        let asked = PrivateCall::Convert(MemoryKind::Shared);
        assert_eq!(kinds, [(PrivateCall::Split, G1), (asked, K4), (PrivateCall::Removed, K4)]);
        assert_eq!(calls[0].1.gpa, Gpa(BASE + G1));
        assert_eq!(machine.assigned() as u64, G1 / K4 - 1 + 1);
        for beside in [page - K4, page + K4, BASE + G1] {
            assert!(machine.cpu(0).write(beside).is_ok(), "{beside:#x}");
        }
        assert_eq!(mapped(&mut vcpu, page), of(PageSize::SIZE_4K));
        // The first page of a block, which only the end of the range cuts.
        let first = BASE + G1 + 5 * M2;
        convert::<C>(&machine, vcpu.worker(), first, K4, MemoryKind::Shared);
        assert!(machine.cpu(0).write(first + K4).is_ok());
        // No operation collapses them.
        assert_eq!(vcpu.worker().collapse(range(BASE, 2 * G1), PageSize::SIZE_1G), 0);
        machine.claim_kind(VMID, range(page, K4), MemoryKind::Shared);
        machine.claim_kind(VMID, range(page + K4, M2), MemoryKind::Private);
        assert!(machine.finish().is_empty());
    }

    fn the_hosts_side_leaves_private_memory_alone<C: Case>() {
        with_guest!(C, config(), hidden(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, 2 * M2, PageSize::SIZE_2M);
        convert::<C>(&machine, vcpu.worker(), BASE, M2, MemoryKind::Private);
        for block in [0, M2] {
            attempt::<C>(&machine, &mut vcpu, BASE + block, Access::Write).unwrap();
        }
        let all = range(BASE, 2 * M2);
        let mut young = [0; 16];
        let aged = vcpu.worker().age(all, None, &mut young, ALL).unwrap();
        assert_eq!((aged.young, aged.unanswered), (512, 0));
        assert_eq!((&young[..8], &young[8..]), (&[0; 8][..], &[u64::MAX; 8][..]));
        let host = host_range(HOST, 2 * M2);
        let aged = vcpu.worker().age_host(host, None, &mut young, ALL).unwrap();
        assert_eq!(aged.unanswered, 0);
        let mut taken = Vec::new();
        drop(vcpu.worker().invalidate(host, |part| taken.push((part.gpa, part.host.bytes))));
        assert_eq!(taken, [(Gpa(BASE + M2), M2)]);
        let split = EagerSplit::new(all, PageSize::SIZE_4K);
        let report = split.run(vcpu.worker(), || false);
        assert_eq!((report.split, report.stopped), (0, None), "it has the machine's consent only");
        assert!(machine.cpu(0).write(BASE).is_ok());
        assert_eq!(vcpu.worker().translate(Gpa(BASE)).unwrap().unwrap().size, PageSize::SIZE_2M);
        assert!(machine.finish().is_empty());
    }

    fn private_memory_has_pages_where_huge_pages_may_not_execute<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
        with_guest!(C, config, hidden(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, 4 * M2, PageSize::SIZE_2M);
        convert::<C>(&machine, vcpu.worker(), BASE, 4 * M2, MemoryKind::Private);
        let fetch = |vcpu: &mut TheVcpu<'_, C>, gpa| {
            attempt::<C>(&machine, vcpu, gpa, Access::Execute).map(drop)
        };
        // By a fetch, and by a write.
        fetch(&mut vcpu, BASE + 3 * M2).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 3 * M2 + K4, Access::Write).unwrap();
        let size = |worker: &mut TheWorker<'_, C>, at| {
            worker.translate(Gpa(at)).unwrap().unwrap().size
        };
        assert_eq!(size(vcpu.worker(), BASE + 3 * M2 + K4), PageSize::SIZE_4K);
        // Shared memory asks nobody.
        convert::<C>(&machine, vcpu.worker(), BASE + 3 * M2, M2, MemoryKind::Shared);
        machine.private_calls();
        attempt::<C>(&machine, &mut vcpu, BASE + 3 * M2, Access::Write).unwrap();
        fetch(&mut vcpu, BASE + 3 * M2).unwrap();
        assert!(machine.private_calls().is_empty());
        assert!(machine.finish().is_empty());
    }

    fn a_reset_of_a_ring_leaves_another_slot_of_the_name_alone<C: Case>() {
        let page = PageSize::SIZE_4K;
        let config = Config { ring: Some(128), eager_split: Some(page), ..config() };
        with_guest!(C, config, logged(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, M2, PageSize::SIZE_2M);
        attempt::<C>(&machine, &mut vcpu, BASE + 5 * K4, Access::Write).unwrap();
        let mut pages = [DirtyPage { memslot: MemslotId(9), page: 0 }; 8];
        assert_eq!(vcpu.worker().harvest_ring(0, &mut pages), 1);
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..memslot(0) }).unwrap();
        vcpu.worker().set_memslot(hidden(M2)).unwrap();
        convert::<C>(&machine, vcpu.worker(), BASE, M2, MemoryKind::Private);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        vcpu.worker().reset_rings().unwrap();
        let leaf = vcpu.worker().translate(Gpa(BASE)).unwrap().unwrap();
        assert_eq!((leaf.size, leaf.attributes.write), (PageSize::SIZE_2M, true));
        assert!(machine.finish().is_empty());
    }

    fn device_writes_to_private_pages_are_not_reported_to_the_host<C: Case>() {
        let config = Config { devices: true, ..config() };
        with_guest!(C, config, hidden(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        convert::<C>(&machine, vcpu.worker(), BASE, K4, MemoryKind::Private);
        vcpu.worker().device_used(range(BASE, 2 * K4), true);
        let mut told = vec![];
        let both = host_range(HOST, 2 * K4);
        drop(vcpu.worker().invalidate(both, |taken| told.push((taken.gpa, taken.dirty))));
        assert_eq!(told, [(Gpa(BASE + K4), true)]);
        // Nor is it told once the page is shared again.
        vcpu.worker().device_used(range(BASE, K4), true);
        convert::<C>(&machine, vcpu.worker(), BASE, K4, MemoryKind::Shared);
        drop(vcpu.worker().invalidate(both, |taken| panic!("{taken:?}")));
        assert!(machine.finish().is_empty());
    }

    fn a_conversion_that_stops_counts_what_it_converted<C: Case>() {
        with_guest!(C, config(), hidden(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, 2 * M2, PageSize::SIZE_2M);
        convert::<C>(&machine, vcpu.worker(), BASE, K4, MemoryKind::Private);
        convert::<C>(&machine, vcpu.worker(), BASE + M2, M2, MemoryKind::Private);
        attempt::<C>(&machine, &mut vcpu, BASE + M2, Access::Write).unwrap();
        let before = guest.stats().totals.converted_pages;
        machine.refuse_private(Some((PrivateCall::Split, 7)));
        let part = range(BASE, M2 + K4);
        let stopped = vcpu.worker().convert(part, MemoryKind::Shared, |_| {}).unwrap_err();
        assert_eq!(stopped.at, Gpa(BASE + M2));
        assert_eq!(guest.stats().totals.converted_pages - before, 1);
        machine.refuse_private(None);
        assert!(machine.finish().is_empty());
    }

    fn private_memory_leaves_by_its_own_addresses<C: Case>() {
        with_guest!(C, config(), hidden(2 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, 2 * M2, PageSize::SIZE_2M);
        convert::<C>(&machine, vcpu.worker(), BASE, M2, MemoryKind::Private);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let hpa = ram.private(HIDDEN + 5 * K4).unwrap().hpa;
        let mut gone = Vec::new();
        let part = private_range(HIDDEN + 5 * K4, 2 * K4);
        let held = vcpu.worker().invalidate_private(part, |leaves| gone.push(leaves)).unwrap();
        assert_eq!(gone, [PrivateLeaves { gpa: Gpa(BASE + 5 * K4), hpa, bytes: 2 * K4 }]);
        machine.take_back(hpa, 2 * K4);
        assert!(!machine.is_assigned(hpa) && machine.is_assigned(Hpa(hpa.0 + 2 * K4)));
        let during = attempt::<C>(&machine, &mut vcpu, BASE + 5 * K4, Access::Read);
        assert_eq!(during.unwrap_err(), Outcome::Retry(Retry::Invalidated));
        ram.remove_private(HIDDEN + 5 * K4);
        drop(held);
        let never = attempt::<C>(&machine, &mut vcpu, BASE + 5 * K4, Access::Read);
        assert_eq!(never.unwrap_err(), Outcome::Refused(Refusal::NoPage));
        assert!(machine.cpu(0).write(BASE + 4 * K4).is_ok(), "what is beside it stays");
        // Deleting the memslot unmaps all of it.
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..hidden(0) }).unwrap();
        assert_eq!(machine.assigned(), 0);
        assert_eq!(guest.stats().totals.private_bytes_taken, M2);
        assert!(machine.finish().is_empty());
    }

    fn shared_pages_are_reported_as_they_become_private<C: Case>() {
        with_guest!(C, config(), hidden(2 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Write).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 3 * K4, Access::Read).unwrap();
        let mut taken = Vec::new();
        let some = range(BASE, 8 * K4);
        vcpu.worker().convert(some, MemoryKind::Private, |part| taken.push(part)).unwrap();
        let written: Vec<_> = taken.iter().map(|part| (part.gpa.0, part.dirty)).collect();
        // If hardware marks no writes, writable pages count as written.
        let writable = !C::HARDWARE_DIRTY;
        assert_eq!(written, [(BASE + K4, true), (BASE + 3 * K4, writable)]);
    }

    fn what_the_machine_refuses_stays_as_it_was<C: Case>() {
        with_guest!(C, config(), hidden(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.populate_private(HIDDEN, 4 * M2, PageSize::SIZE_2M);
        let (shared, private) = (MemoryKind::Shared, MemoryKind::Private);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        machine.refuse_private(Some((PrivateCall::Convert(private), 5)));
        let refused = vcpu.worker().convert(range(BASE, M2), private, |_| {}).unwrap_err();
        assert_eq!(refused.at, Gpa(BASE));
        assert_eq!(refused.reason, ConvertError::Denied(Denial(5)));
        assert!(machine.cpu(0).write(BASE).is_ok());
        machine.refuse_private(Some((PrivateCall::Map, 6)));
        convert::<C>(&machine, vcpu.worker(), BASE, 2 * M2, private);
        let denied = attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap_err();
        assert_eq!(denied, Outcome::Refused(Refusal::Private(Denial(6))));
        machine.refuse_private(Some((PrivateCall::Split, 7)));
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        let refused = vcpu.worker().convert(range(BASE + K4, K4), shared, |_| {}).unwrap_err();
        let denied = ConvertError::Denied(Denial(7));
        assert_eq!(refused, Interruption { at: Gpa(BASE + K4), reason: denied });
        assert_eq!(refused.reason.to_string().matches("0x7").count(), 1);
        assert!(machine.cpu(0).write(BASE + K4).is_ok());
        let part = private_range(HIDDEN + K4, K4);
        let refused = vcpu.worker().invalidate_private(part, |_| {}).map(drop).unwrap_err();
        assert_eq!(refused.reason, ConvertError::Denied(Denial(7)));
        machine.refuse_private(None);
        convert::<C>(&machine, vcpu.worker(), BASE + K4, K4, shared);
        assert!(machine.finish().is_empty());
    }
}

#[test]
fn what_cannot_be_private_says_why() {
    let machine = Intel::machine(1);
    let ram = Ram::new();
    let guest = guest::<Intel>(&machine, &ram, config());
    let mut worker = Worker::new(&guest).unwrap();
    let odd = MemslotSpec { private: Some(PrivateAt(0x800)), ..hidden(M2) };
    assert!(matches!(worker.set_memslot(odd), Err(MemslotError::Unaligned { .. })));
    let wraps = MemslotSpec { private: Some(PrivateAt(!0xfff)), ..hidden(M2) };
    assert_eq!(worker.set_memslot(wraps), Err(MemslotError::Wraps));
    for refused in [
        MemslotSpec { read_only: true, ..hidden(M2) },
        MemslotSpec { log_dirty: true, ..hidden(M2) },
    ] {
        assert_eq!(worker.set_memslot(refused), Err(MemslotError::Private));
        assert_eq!(MemslotError::Private.errno(Kvm::X86), "EINVAL");
    }
    worker.set_memslot(hidden(M2)).unwrap();
    for refused in [
        MemslotSpec { log_dirty: true, ..hidden(M2) },
        MemslotSpec { gpa: Gpa(BASE + G1), ..hidden(M2) },
    ] {
        assert_eq!(worker.set_memslot(refused), Err(MemslotError::Private));
    }
    let plain = MemslotSpec { id: MemslotId(1), gpa: Gpa(BASE + M2), ..memslot(M2) };
    worker.set_memslot(plain).unwrap();
    let mut refused = |gpa, bytes| {
        let to = MemoryKind::Private;
        worker.convert(range(gpa, bytes), to, |_| {}).unwrap_err()
    };
    assert_eq!(refused(BASE + 1, K4).reason, ConvertError::Unaligned);
    let beyond = Interruption { at: Gpa(BASE + M2), reason: ConvertError::NotPrivate };
    assert_eq!(refused(BASE, 2 * M2), beyond);
    assert_eq!(refused(BASE + G1, K4).at, Gpa(BASE + G1));
    let unaligned = worker.invalidate_private(private_range(1, K4), |_| {}).map(drop);
    assert_eq!(unaligned.unwrap_err().reason, ConvertError::Unaligned);
    assert!(worker.invalidate_private(private_range(G1, K4), |_| {}).is_ok(), "nobody's");
}

#[test]
fn memory_that_vcpus_reach_past_their_caches_is_not_private() {
    let machine = ArmUncached::machine(1);
    let ram = Ram::new();
    let guest = guest::<ArmUncached>(&machine, &ram, config());
    let mut worker = Worker::new(&guest).unwrap();
    assert_eq!(worker.set_memslot(hidden(M2)), Err(MemslotError::PrivateUncached));
}

#[test]
fn a_host_that_reaches_a_private_page_is_seen() {
    with_guest!(Intel, config(), hidden(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    ram.populate_private(HIDDEN, M2, PageSize::SIZE_4K);
    convert::<Intel>(&machine, vcpu.worker(), BASE, M2, MemoryKind::Private);
    attempt::<Intel>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
    assert!(machine.violations().is_empty());
    let hpa = ram.private(HIDDEN).unwrap().hpa;
    machine.host_read(hpa);
    machine.host_write(hpa);
    let found = machine.violations();
    let kinds: Vec<_> = found.iter().map(|violation| violation.kind).collect();
    assert_eq!(kinds, [Kind::PrivateExposed; 2], "{found:?}");
}

/// Makes a guest whose first page is private, with vCPUs, on a backing that can run a closure.
macro_rules! with_asked {
    ($machine:ident, $backing:ident, $guest:ident, $vcpu:ident) => {
        let $machine = Intel::machine(2);
        give_all::<Intel>(&$machine);
        let ram = Ram::new();
        ram.populate(HOST, M2, PageSize::SIZE_4K);
        ram.populate_private(HIDDEN, M2, PageSize::SIZE_4K);
        let $backing = Asked::new(&ram);
        let $guest =
            Guest::new(Intel::format(), VMID, BITS, &$machine, &$backing, config()).unwrap();
        let mut $vcpu = Vcpu::new(&$guest, 0).unwrap();
        $machine.cpu(0).load(VMID, $vcpu.root());
        $vcpu.worker().set_memslot(hidden(M2)).unwrap();
        $vcpu.worker().convert(range(BASE, K4), MemoryKind::Private, |_| {}).unwrap();
        $machine.private_calls();
    };
}

/// Asserts that `wait` waits for faults: another thread begins it while a fault asks, and it has
/// not ended when the fault goes on, however long that takes.
fn waits(
    wait: impl for<'w> Fn(
        &mut Worker<'w, <Intel as Case>::F, slat_sim::Machine<slat_sim::Ept>, &Asked<'_>>,
    ) + Send
    + Sync,
) {
    with_asked!(machine, backing, guest, vcpu);
    let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut worker = Worker::new(&guest).unwrap();
    std::thread::scope(|threads| {
        let (begun, ended, wait) = (&begun, &ended, &wait);
        threads.spawn(move || {
            while !begun.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            wait(&mut worker);
            ended.store(true, Ordering::SeqCst);
        });
        let then = move || {
            begun.store(true, Ordering::SeqCst);
            for _ in 0..20_000 {
                std::thread::yield_now();
            }
            assert!(!ended.load(Ordering::SeqCst), "the fault has not returned");
        };
        let _either = backing.then(0, then, || vcpu.fault(Gpa(BASE), Access::Write));
    });
    drop(vcpu);
    assert!(machine.finish().is_empty());
}

#[test]
fn two_faults_on_a_private_page_tell_the_machine_once() {
    with_asked!(machine, backing, guest, vcpu);
    let mut other = Vcpu::new(&guest, 1).unwrap();
    machine.cpu(1).load(VMID, other.root());
    let mapped = Outcome::Mapped(PageSize::SIZE_4K);
    let first = || assert_eq!(other.fault(Gpa(BASE), Access::Write), mapped);
    let fault = backing.then(0, first, || vcpu.fault(Gpa(BASE), Access::Write));
    assert_ne!(fault, mapped, "the other has mapped it");
    let told: Vec<_> = machine.private_calls().iter().map(|(call, _)| *call).collect();
    assert_eq!(told, [PrivateCall::Map]);
    assert!(machine.is_assigned(backing.ram.private(HIDDEN).unwrap().hpa));
    assert!(machine.finish().is_empty());
}

#[test]
fn a_fault_whose_page_is_taken_meanwhile_reports_no_mapping() {
    with_asked!(machine, backing, guest, vcpu);
    let mut worker = Worker::new(&guest).unwrap();
    let take = || drop(worker.invalidate_private(private_range(HIDDEN, K4), |_| {}).unwrap());
    let _either = backing.then(0, take, || vcpu.fault(Gpa(BASE), Access::Write));
    let told: Vec<_> = machine.private_calls().iter().map(|(call, _)| *call).collect();
    assert!(told.is_empty() || told == [PrivateCall::Map], "as it tries again: {told:?}");
    assert_eq!(machine.assigned(), told.len());
    assert!(machine.finish().is_empty());
}

#[test]
fn a_conversion_waits_for_faults_that_saw_the_pages_before() {
    waits(|worker| {
        worker.convert(range(BASE, K4), MemoryKind::Shared, |_| {}).unwrap();
    });
}

#[test]
fn a_pin_waits_for_faults_that_were_inside_the_tables() {
    waits(|worker| {
        drop(worker.pin(range(BASE + K4, K4)).unwrap());
    });
}

/// Threads convert pages of two blocks back and forth, and take private memory, while vCPUs use all
/// of it; each thread is one of the machine's CPUs.
#[test]
fn conversions_race_with_faults() {
    for seed in crate::seed::seeds(3) {
        race::<ArmDirty>(seed);
        race::<ArmBreaks>(seed);
        race::<Intel>(seed);
    }
}

fn race<C: Case>(seed: u64) {
    with_guest!(C, config(), hidden(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
    ram.populate_private(HIDDEN, 2 * M2, PageSize::SIZE_2M);
    let done = std::sync::atomic::AtomicBool::new(false);
    let page = |rng: &mut fastrand::Rng| (rng.u64(..2) * 512 + rng.u64(..24)).saturating_sub(8);
    std::thread::scope(|threads| {
        let (machine, guest, done) = (&machine, &guest, &done);
        threads.spawn(move || {
            let _done = EndFlag(done);
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut worker = Worker::new(guest).unwrap();
            for _ in 0..40 {
                let first = page(&mut rng);
                let bytes = rng.u64(1..=16) * K4;
                let bytes = [M2 - first % 512 * K4, bytes][usize::from(rng.u8(..3) != 0)];
                if rng.u8(..4) == 0 {
                    let part = private_range(HIDDEN + first * K4, bytes);
                    drop(worker.invalidate_private(part, |_| {}).unwrap());
                    continue;
                }
                let to = [MemoryKind::Private, MemoryKind::Shared][usize::from(rng.bool())];
                convert::<C>(machine, &mut worker, BASE + first * K4, bytes, to);
            }
        });
        let other = Vcpu::new(guest, 1).unwrap();
        machine.cpu(1).load(VMID, other.root());
        std::thread::scope(|threads| {
            for mut vcpu in [vcpu, other] {
                threads.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed + 1 + u64::from(vcpu.id()));
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        let gpa = BASE + page(&mut rng) * K4;
                        machine.here(vcpu.id() as usize);
                        // Tries once: another thread that does not run now may be in the way.
                        if machine.cpu(vcpu.id() as usize).write(gpa).is_err() {
                            let _any = vcpu.fault(Gpa(gpa), Access::Write);
                        }
                    }
                });
            }
        });
    });
    let mut worker = Worker::new(&guest).unwrap();
    let found: Vec<_> = machine.violations().iter().map(ToString::to_string).collect();
    assert_eq!(found, [""; 0], "seed {seed}");
    convert::<C>(&machine, &mut worker, BASE, 2 * M2, MemoryKind::Shared);
    assert_eq!(machine.assigned(), 0, "what was told as mapped was told as removed: seed {seed}");
    let found: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
    assert_eq!(found, [""; 0], "seed {seed}");
}
