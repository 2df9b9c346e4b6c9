//! Devices: pinned pages, tables that follow the guest's, and the log of their writes.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, AgeOptions, Gpa, Hpa, PageSize, TableBits};
use slat_guest::*;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

fn with_devices() -> Config {
    Config { devices: true, ..config() }
}

on_all! {
    fn a_devices_tables_follow_the_guests<C: Case>() {
        with_guest!(C, with_devices(), memslot(4 * M2), PageSize::SIZE_2M
            => machine, ram, guest, vcpu);
        ram.change(HOST + 2 * M2, |page| page.block = PageSize::SIZE_4K);
        for page in [0, M2, 2 * M2] {
            attempt::<C>(&machine, &mut vcpu, BASE + page, Access::Read).unwrap();
        }
        machine.claim_followed(VMID);
        assert!(machine.device_access(VMID, Gpa(BASE + 9 * K4), true).is_some());
        assert_eq!(machine.device_access(VMID, Gpa(BASE + 3 * M2), true), None);
        let mut told = Vec::new();
        drop(vcpu.worker().invalidate(host_range(HOST + M2, K4), |part| {
            // At this point no device can access it.
            told.push(machine.device_access(VMID, part.gpa, false));
        }));
        assert_eq!(told, [None]);
        machine.take_back(Hpa(ram.get(HOST + M2).unwrap().hpa), M2);
        machine.claim_followed(VMID);
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..memslot(0) }).unwrap();
        machine.claim_followed(VMID);
        assert_eq!(machine.device_access(VMID, Gpa(BASE), false), None);
        assert!(machine.finish().is_empty());
    }

    fn a_device_may_write_a_page_once_the_guest_has_its_own<C: Case>() {
        with_guest!(C, with_devices(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        for (page, own) in [(0, false), (1, true)] {
            ram.change(HOST + page * K4, |page| (page.write, page.own) = (false, own));
            let at = BASE + page * K4;
            attempt::<C>(&machine, &mut vcpu, at, Access::Read).unwrap();
            assert_eq!(machine.device_access(VMID, Gpa(at), true), None);
            let (hpa, _) = attempt::<C>(&machine, &mut vcpu, at, Access::Write).unwrap();
            assert_eq!(machine.device_access(VMID, Gpa(at), true), Some(hpa));
            machine.claim_followed(VMID);
        }
        assert!(machine.finish().is_empty());
    }

    fn while_writes_are_held_devices_do_not_write_either<C: Case>() {
        let config = with_devices();
        with_guest!(C, config, memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        ram.change(HOST + M2, |page| page.block = PageSize::SIZE_4K);
        let pages = [BASE, BASE + M2, BASE + M2 + K4, BASE + 2 * M2];
        for at in pages {
            attempt::<C>(&machine, &mut vcpu, at, Access::Write).unwrap();
        }
        let writes = |at| machine.device_access(VMID, Gpa(at), true);
        // The last page of the first block, and all pages of the second.
        let held = vcpu.worker().freeze_writes(host_range(HOST + M2 - K4, M2 + K4));
        for at in pages {
            let read = machine.device_access(VMID, Gpa(at), false);
            assert_eq!(read.map(|hpa| hpa.0), ram.get(at - BASE + HOST).map(|page| page.hpa));
            assert_eq!(writes(at).is_some(), at == BASE + 2 * M2, "{at:#x} while they are held");
        }
        machine.claim_followed(VMID);
        drop(held);
        for at in pages {
            let (hpa, _) = attempt::<C>(&machine, &mut vcpu, at, Access::Write).unwrap();
            assert_eq!(writes(at), Some(hpa), "{at:#x} after the guest has written it");
        }
        machine.claim_followed(VMID);
        assert!(machine.finish().is_empty());
    }

    fn pages_written_by_a_device_are_logged_young_and_dirty<C: Case>() {
        with_guest!(C, with_devices(), logged(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        for page in 0..8 {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Read).unwrap();
        }
        let all = range(BASE, M2);
        let how = AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb: true };
        let mut bits = [0; 8];
        vcpu.worker().age(all, None, &mut bits, how).unwrap();
        vcpu.worker().take_log(MemslotId(0), &mut bits).unwrap();
        machine.copy(VMID, all);
        machine.seen(VMID, all);
        for (page, write) in [(3, true), (5, false)] {
            machine.device_access(VMID, Gpa(BASE + page * K4), write).unwrap();
            vcpu.worker().device_used(range(BASE + page * K4, K4), write);
        }
        let mut log = [0; 8];
        assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut log), Ok(1));
        machine.claim_clean(VMID, all, |gpa| log[0] >> ((gpa.0 - BASE) / K4) & 1 == 1);
        let mut young = [0; 8];
        vcpu.worker().age(all, None, &mut young, how).unwrap();
        machine.claim_old(VMID, all, |gpa| young[0] >> ((gpa.0 - BASE) / K4) & 1 == 1);
        assert_eq!((log[0], young[0]), (1 << 3, 1 << 3 | 1 << 5));
        vcpu.worker().clear_log(MemslotId(0), 0, 512, &log).unwrap();
        let mut written = Vec::new();
        drop(vcpu.worker().invalidate(host_range(HOST, M2), |part| {
            written.extend(part.dirty.then_some(part.gpa));
        }));
        assert_eq!(written, [Gpa(BASE + 3 * K4)]);
        assert!(machine.finish().is_empty());
    }

    fn pinned_pages_stay_as_they_are<C: Case>() {
        with_guest!(C, config(), memslot(4 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for block in 0..4 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Write).unwrap();
        }
        let all = range(BASE, 4 * M2);
        EagerSplit::new(all, PageSize::SIZE_4K).run(vcpu.worker(), || false);
        let page = range(BASE + M2 + 7 * K4, K4);
        let pinned = vcpu.worker().pin(page).unwrap();
        let again = vcpu.worker().pin(page).unwrap();
        assert_eq!(pinned.range(), page);
        assert_eq!(vcpu.worker().collapse(all, PageSize::SIZE_2M), 3 * M2);
        assert!(vcpu.worker().is_pinned(all) && !vcpu.worker().is_pinned(range(BASE, M2)));
        drop(pinned);
        assert_eq!(vcpu.worker().collapse(all, PageSize::SIZE_2M), 0);
        drop(again);
        assert_eq!(vcpu.worker().collapse(all, PageSize::SIZE_2M), M2);
        assert!(machine.finish().is_empty());
    }
}

#[test]
fn recovery_leaves_pinned_tables() {
    let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
    with_guest!(Intel, config, memslot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
    for block in [0, M2] {
        attempt::<Intel>(&machine, &mut vcpu, BASE + block, Access::Execute).unwrap();
    }
    let pinned = vcpu.worker().pin(range(BASE, K4)).unwrap();
    vcpu.worker().recover_huge_pages();
    let left = vcpu.worker().recover_huge_pages();
    assert_eq!(left, RecoveryCounts { bytes: M2, left: 1 });
    let (_, outcomes) = attempt::<Intel>(&machine, &mut vcpu, BASE, Access::Execute).unwrap();
    assert_eq!(outcomes, [], "a pinned page keeps its rights");
    drop(pinned);
    vcpu.worker().recover_huge_pages();
    assert_eq!(vcpu.worker().recover_huge_pages().bytes, M2);
}

#[test]
fn what_cannot_be_pinned_says_why() {
    with_guest!(Intel, config(), hidden(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let worker = vcpu.worker();
    assert_eq!(worker.pin(range(BASE + 1, K4)).unwrap_err(), PinError::Unaligned);
    let beyond = worker.pin(range(BASE, 2 * M2)).unwrap_err();
    assert_eq!(beyond, PinError::Missing { at: Gpa(BASE + M2) });
    let pinned = worker.pin(range(BASE, K4)).unwrap();
    let refused = worker.convert(range(BASE, M2), MemoryKind::Private, |_| {}).unwrap_err();
    assert_eq!(refused.reason, ConvertError::Pinned);
    drop(pinned);
    worker.convert(range(BASE, K4), MemoryKind::Private, |_| {}).unwrap();
    assert_eq!(worker.pin(range(BASE, M2)).unwrap_err(), PinError::Private);
    assert!(machine.finish().is_empty());
}

/// vCPUs map, write to shared pages, and split; other threads invalidate the memory, and a device
/// accesses all that it can.
#[test]
fn no_pair_of_maps_and_unmaps_is_lost_under_races() {
    for seed in crate::seed::seeds(3) {
        race::<ArmDirty>(seed);
        race::<ArmBreaks>(seed);
        race::<Intel>(seed);
    }
}

fn race<C: Case>(seed: u64) {
    with_guest!(C, with_devices(), memslot(2 * M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    for page in (0..1024).step_by(3) {
        ram.change(HOST + page * K4, |host| (host.write, host.own) = (false, page % 2 == 0));
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    let page = |rng: &mut fastrand::Rng| rng.u64(..2) * 512 + rng.u64(..16);
    let other = Vcpu::new(&guest, 1).unwrap();
    machine.cpu(1).load(VMID, other.root());
    std::thread::scope(|threads| {
        let (machine, guest, done, ram) = (&machine, &guest, &done, &ram);
        threads.spawn(move || {
            let _done = EndFlag(done);
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut worker = Worker::new(guest).unwrap();
            for _ in 0..60 {
                let first = page(&mut rng);
                let bytes = rng.u64(1..=8) * K4;
                let host = host_range(HOST + first * K4, bytes);
                let held = worker.invalidate(host, |_| {});
                for page in first..(first + bytes / K4).min(1024) {
                    let (old, _) = ram.migrate(HOST + page * K4);
                    ram.change(HOST + page * K4, |host| {
                        (host.write, host.own) = (page % 3 != 0, page % 2 == 0);
                    });
                    machine.take_back(Hpa(old), K4);
                }
                drop(held);
                for page in 0..1024 / 64 {
                    machine.device_access(VMID, Gpa(BASE + page * K4), rng.bool());
                }
            }
        });
        for mut vcpu in [vcpu, other] {
            threads.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed + 1 + u64::from(vcpu.id()));
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    let gpa = BASE + page(&mut rng) * K4;
                    let access = [Access::Read, Access::Write][usize::from(rng.bool())];
                    let _any = attempt_briefly::<C>(machine, &mut vcpu, gpa, access);
                }
            });
        }
    });
    machine.claim_followed(VMID);
    let found: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
    assert_eq!(found, [""; 0], "seed {seed}");
}

/// Tries once: under load another thread may always be in the way.
fn attempt_briefly<C: Case>(
    machine: &slat_sim::Machine<C::A>,
    vcpu: &mut TheVcpu<'_, C>,
    gpa: u64,
    access: Access,
) -> Outcome {
    machine.here(vcpu.id() as usize);
    vcpu.fault(Gpa(gpa), access)
}

#[test]
fn a_callback_for_taken_pages_may_wait_for_a_fault() {
    with_guest!(Intel, with_devices(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    let mut other = Vcpu::new(&guest, 1).unwrap();
    ram.change(HOST + K4, |page| (page.write, page.own) = (false, true));
    for page in [0, K4] {
        attempt::<Intel>(&machine, &mut vcpu, BASE + page, Access::Read).unwrap();
    }
    let ((done, is_done), (go, gone)) = (mpsc::channel(), mpsc::channel());
    thread::scope(|scope| {
        let (machine, other) = (&machine, &mut other);
        scope.spawn(move || {
            machine.here(1);
            gone.recv().unwrap();
            done.send(other.fault(Gpa(BASE + K4), Access::Write)).unwrap();
        });
        let mut outcome = None;
        drop(vcpu.worker().invalidate(host_range(HOST, K4), |_| {
            go.send(()).unwrap();
            outcome = is_done.recv_timeout(Duration::from_secs(20)).ok();
        }));
        assert_eq!(outcome, Some(Outcome::MadeWritable(PageSize::SIZE_4K)));
    });
}
