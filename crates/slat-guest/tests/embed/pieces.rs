//! Work on a whole memslot pauses between pieces, outside the tables.

use crate::machine::*;
use slat::format::ept::Ept1G as Ept;
use slat::{Access, Gpa, GpaRange, PageSize, Reader};
use slat_guest::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

const PIECES: u64 = 4;

#[test]
fn changes_of_a_slot_rest_between_pieces_outside_the_tables() {
    for logging in [Logging::Protect, Logging::Hardware] {
        let machine = CountingMachine::new();
        let rests = Arc::new(AtomicU64::new(0));
        let counts = rests.clone();
        machine.between(move || _ = counts.fetch_add(1, Ordering::Relaxed));
        let config = Config { logging, ..Config::new(1, PageSize::SIZE_2M) };
        let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
        let mut vcpu = guest.vcpu(0).unwrap();
        vcpu.with(|vcpu| {
            let all = memslot(PIECES * G1);
            let mut change = |spec: MemslotSpec| {
                rests.store(0, Ordering::Relaxed);
                vcpu.worker().set_memslot(spec).unwrap();
                let rested = rests.load(Ordering::Relaxed);
                for piece in 0..PIECES {
                    vcpu.fault(Gpa(spec.gpa.0 + piece * G1), Access::Write);
                }
                rested
            };
            assert_eq!(change(all), 0, "there is nothing to do for a memslot that comes");
            assert!(change(MemslotSpec { log_dirty: true, ..all }) >= PIECES);
            assert!(change(all) >= PIECES, "a log that ends");
            let moved = MemslotSpec { gpa: Gpa(BASE + 64 * G1), ..all };
            assert_eq!(change(moved), PIECES);
            rests.store(0, Ordering::Relaxed);
            vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..moved }).unwrap();
            assert_eq!(rests.load(Ordering::Relaxed), PIECES);
        });
    }
}

#[test]
fn the_end_of_a_log_invalidates_per_gib_and_not_per_block() {
    for logging in [Logging::Protect, Logging::Hardware] {
        for (bytes, collapse) in [(M2, 1), (20 * M2, 1), (32 * M2, 2), (G1, 2), (3 * G1, 6)] {
            let machine = CountingMachine::new();
            let eager_split = Some(PageSize::SIZE_4K);
            let config = Config { logging, eager_split, ..Config::new(1, PageSize::SIZE_2M) };
            let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
            let mut vcpu = guest.vcpu(0).unwrap();
            vcpu.with(|vcpu| {
                let all = memslot(bytes);
                vcpu.worker().set_memslot(all).unwrap();
                for gpa in (0..bytes).step_by(M2 as usize) {
                    vcpu.fault(Gpa(BASE + gpa), Access::Write);
                }
                vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..all }).unwrap();
                vcpu.fault(Gpa(BASE + bytes - K4), Access::Write);
                machine.invalidations();
                let off = vcpu.worker().set_memslot(all).unwrap();
                assert_eq!(off, MemslotChange::LogOff { collapsed: bytes });
                assert_eq!(machine.invalidations(), collapse, "{bytes:#x}, {logging:?}");
            });
        }
    }
}

#[test]
fn tables_of_a_memslot_that_logs_stay_tables() {
    for logging in [Logging::Protect, Logging::Hardware] {
        let machine = CountingMachine::new();
        let config = Config { logging, ..Config::new(1, PageSize::SIZE_2M) };
        let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
        let mut vcpu = guest.vcpu(0).unwrap();
        vcpu.with(|vcpu| {
            let quiet = memslot(M2);
            let all = GpaRange::new(quiet.gpa, M2).unwrap();
            vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..quiet }).unwrap();
            for page in 0..512 {
                vcpu.fault(Gpa(BASE + page * K4), Access::Write);
            }
            assert_eq!(vcpu.worker().collapse(all, PageSize::SIZE_2M), 0, "{logging:?}");
        });
    }
}

/// A thread that protected the same pages may not have completed its invalidation.
#[test]
fn taking_rights_invalidates_though_another_thread_took_them() {
    type Take = fn(&mut Vcpu<'_, Ept, CountingMachine, OnePiece>);
    let takes: [(&str, Take); 4] = [
        ("a clear", |vcpu| _ = vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1]).unwrap()),
        ("a hold", |vcpu| {
            let host = HvaRange { start: Hva(HOST), bytes: M2 };
            drop(vcpu.worker().freeze_writes(host));
        }),
        ("a log that ends and begins", |vcpu| {
            let logs = MemslotSpec { log_dirty: true, ..memslot(M2) };
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            vcpu.worker().set_memslot(logs).unwrap();
        }),
        ("an invalidation", |vcpu| {
            let host = HvaRange { start: Hva(HOST), bytes: M2 };
            drop(vcpu.worker().invalidate(host, |_| ()));
        }),
    ];
    for (name, take) in takes {
        let machine = CountingMachine::new();
        let config = Config::new(1, PageSize::SIZE_4K);
        let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_4K), config);
        let mut vcpu = guest.vcpu(0).unwrap();
        vcpu.with(|vcpu| {
            let logs = MemslotSpec { log_dirty: true, ..memslot(M2) };
            vcpu.worker().set_memslot(logs).unwrap();
            vcpu.fault(Gpa(BASE), Access::Write);
        });
        let tables = guest.get().tables();
        let mut reader = Reader::register(tables.platform()).unwrap();
        let mut guard = tables.enter(&mut reader).unwrap();
        guard.write_protect(GpaRange::new(Gpa(BASE), K4).unwrap()).unwrap();
        let owed = guard.shootdown();
        drop(guard);
        machine.invalidations();
        vcpu.with(take);
        assert!(machine.invalidations() > 0, "{name}: another CPU may still write");
        owed.complete();
    }
}

/// Makes a guest of `bytes` where each block has an executable page, in a period that has ended.
fn split_by_fetches(
    machine: &Arc<CountingMachine>,
    bytes: u64,
) -> (CountingGuest, SharedVcpu<Ept, CountingMachine, OnePiece>) {
    let config = Config { execute_huge: ExecuteHuge::Split, ..Config::new(1, PageSize::SIZE_2M) };
    let guest = shared(machine, 1, OnePiece(PageSize::SIZE_2M), config);
    let mut vcpu = guest.vcpu(0).unwrap();
    vcpu.with(|vcpu| {
        vcpu.worker().set_memslot(memslot(bytes)).unwrap();
        for gpa in (0..bytes).step_by(M2 as usize) {
            vcpu.fault(Gpa(BASE + gpa), Access::Read);
            vcpu.fault(Gpa(BASE + gpa), Access::Execute);
        }
        vcpu.worker().recover_huge_pages();
    });
    (guest, vcpu)
}

#[test]
fn recovery_invalidates_for_each_gib_and_not_for_each_table() {
    for (bytes, most) in [(M2, 2), (32 * M2, 4), (G1, 4), (3 * G1, 12)] {
        let machine = CountingMachine::new();
        let (_guest, mut vcpu) = split_by_fetches(&machine, bytes);
        machine.invalidations();
        let recovered = vcpu.with(|vcpu| vcpu.worker().recover_huge_pages());
        assert_eq!(recovered, RecoveryCounts { bytes, left: 0 });
        let count = machine.invalidations();
        assert!(count <= most, "{bytes:#x}: {count}");
    }
}

#[test]
fn recovery_skips_a_pinned_table_and_takes_its_neighbours() {
    let machine = CountingMachine::new();
    let (guest, mut vcpu) = split_by_fetches(&machine, 3 * M2);
    let (mut other, mut pins) = (guest.worker().unwrap(), true);
    machine.between(move || {
        if std::mem::take(&mut pins) {
            let page = GpaRange::new(Gpa(BASE + M2), K4).unwrap();
            other.with(|worker| std::mem::forget(worker.pin(page).unwrap()));
        }
    });
    let recovered = vcpu.with(|vcpu| vcpu.worker().recover_huge_pages());
    assert_eq!(recovered, RecoveryCounts { bytes: 2 * M2, left: 1 });
    machine.between(|| ());
}

/// Recovery makes the right to write the same in pages that another thread protects for a log
/// meanwhile: that of their memslot, or of another that takes its place.
#[test]
fn recovery_gives_no_right_to_write_once_a_log_begins() {
    // The piece before the one that is recovered is where the panic is.
    let (gpa, host, bytes) = (Gpa(BASE - G1), Hva(HOST - G1), 2 * G1);
    let logs = MemslotSpec { log_dirty: true, log_blocks: true, gpa, host, ..memslot(bytes) };
    let quiet = MemslotSpec { log_dirty: false, ..logs };
    let other = MemslotSpec { id: MemslotId(1), ..logs };
    let away = MemslotSpec { gpa: Gpa(BASE + 64 * G1), host: Hva(HOST + 64 * G1), ..quiet };
    let gone = MemslotSpec { bytes: 0, ..quiet };
    let changes = [vec![logs], vec![gone, other, away]];
    // After the table has lost the right to be executed, and after it has become a block.
    for (piece, specs) in [1, 2].into_iter().flat_map(|piece| changes.clone().map(|to| (piece, to)))
    {
        let machine = CountingMachine::new();
        let config = Config::new(1, PageSize::SIZE_1G);
        let config = Config { execute_huge: ExecuteHuge::Split, ..config };
        let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
        let all = GpaRange::new(Gpa(BASE), G1).unwrap();
        let written = GpaRange::new(Gpa(BASE + 9 * M2), M2).unwrap();
        let mut vcpu = guest.vcpu(0).unwrap();
        vcpu.with(|vcpu| {
            vcpu.worker().set_memslot(quiet).unwrap();
            vcpu.worker().prefault(all, Access::Read, || false);
            vcpu.fault(Gpa(BASE), Access::Execute);
            vcpu.worker().set_memslot(logs).unwrap();
            vcpu.fault(Gpa(BASE + 7 * K4), Access::Write);
            vcpu.fault(written.start(), Access::Write);
            // Pages differ in the right to write until the log's end, which a panic of the VMM
            // breaks off, is complete.
            machine.between(|| std::panic::resume_unwind(Box::new(())));
            let ends = || vcpu.worker().set_memslot(quiet);
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(ends)).is_err());
            machine.between(|| ());
            // The blocks around it stay blocks of this size.
            let page = GpaRange::new(Gpa(BASE + 20 * M2), K4).unwrap();
            std::mem::forget(vcpu.worker().pin(page).unwrap());
            vcpu.worker().recover_huge_pages();
        });
        let (mut changes, mut pieces) = (guest.worker().unwrap(), 0);
        let name = format!("{specs:?}, at piece {piece}");
        machine.between(move || {
            pieces += 1;
            if pieces == piece {
                changes.with(|worker| {
                    specs.iter().for_each(|spec| _ = worker.set_memslot(*spec).unwrap());
                    worker.prefault(all, Access::Read, || false);
                    worker.prefault(written, Access::Write, || false);
                });
            }
        });
        vcpu.with(|vcpu| {
            vcpu.worker().recover_huge_pages();
            let id = vcpu.worker().memslots()[0].id;
            let mut log = vec![0; (bytes / K4 / 64) as usize];
            vcpu.worker().read_log(id, &mut log).unwrap();
            for block in 0..512_u64 {
                let at = Gpa(BASE + block * M2);
                let leaf = vcpu.worker().translate(at).unwrap().unwrap();
                let logged = log[(512 + block as usize) * 8] & 1 != 0;
                assert!(logged || !leaf.attributes.write, "{name}: {at:?}, block {block}");
            }
        });
        machine.between(|| ());
    }
}

#[test]
fn tables_that_a_panic_kept_recovery_from_are_tried_again() {
    let machine = CountingMachine::new();
    let (_guest, mut vcpu) = split_by_fetches(&machine, 2 * M2);
    machine.between(|| panic!("a VMM's callback"));
    let recover = || vcpu.with(|vcpu| vcpu.worker().recover_huge_pages());
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(recover)).is_err());
    machine.between(|| ());
    let bytes = [(); 2].map(|()| vcpu.with(|vcpu| vcpu.worker().recover_huge_pages().bytes));
    assert_eq!(bytes.iter().sum::<u64>(), 2 * M2);
}

/// While a deletion pauses, everything else goes on, except other changes of memslots.
#[test]
fn a_change_that_rests_holds_up_other_changes_alone() {
    let machine = CountingMachine::new();
    let config = Config { execute_huge: ExecuteHuge::Split, ..Config::new(1, PageSize::SIZE_2M) };
    let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
    let mut vcpu = guest.vcpu(0).unwrap();
    let (large, other) = (memslot(PIECES * G1), MemslotId(1));
    let piece = |piece: u64| GpaRange::new(Gpa(BASE + piece * G1), M2).unwrap();
    let other = MemslotSpec {
        id: other,
        gpa: Gpa(BASE + 64 * G1),
        host: Hva(HOST + 64 * G1),
        log_dirty: true,
        ..memslot(M2)
    };
    vcpu.with(|vcpu| {
        vcpu.worker().set_memslot(large).unwrap();
        vcpu.worker().set_memslot(other).unwrap();
        for at in 0..PIECES {
            vcpu.fault(piece(at).start(), Access::Write);
        }
        vcpu.fault(piece(3).start(), Access::Execute);
    });
    let (rests, rested) = sync_channel(16);
    let (go_on, goes_on) = sync_channel::<()>(16);
    machine.between(move || {
        rests.send(()).unwrap();
        goes_on.recv().unwrap();
    });
    let mut worker = guest.worker().unwrap();
    let gone = MemslotSpec { bytes: 0, ..large };
    let deletes = std::thread::spawn(move || worker.with(|worker| worker.set_memslot(gone)));
    rested.recv().unwrap();
    vcpu.with(|vcpu| {
        // Of the memslot that goes, the guest can still access what is not emptied yet: the host
        // takes it as before. Nothing new is mapped, and no table becomes a block.
        for at in [0, 1] {
            let outcome = vcpu.fault(Gpa(piece(at).end().0), Access::Read);
            assert_eq!(outcome, Outcome::Retry(Retry::MemslotDeleting));
            let left = vcpu.worker().translate(piece(at).start()).unwrap();
            assert_eq!(left.is_some(), at == 1);
        }
        assert_eq!(vcpu.worker().memslots(), [other]);
        let mut dirty = 0;
        let host = HvaRange { start: Hva(HOST + G1), bytes: M2 };
        drop(vcpu.worker().invalidate(host, |part| dirty += u64::from(part.dirty) * M2));
        assert_eq!(dirty, M2);
        assert_eq!(vcpu.worker().collapse(piece(3), PageSize::SIZE_2M), 0);
        let turns = [(); 3].map(|()| vcpu.worker().recover_huge_pages());
        assert_eq!(turns, [RecoveryCounts::default(); 3]);
        assert!(matches!(vcpu.fault(other.gpa, Access::Write), Outcome::Mapped(_)));
        let worker = vcpu.worker();
        assert_eq!(worker.take_log(other.id, &mut [0; 8]), Ok(1));
        let host = HvaRange { start: other.host, bytes: M2 };
        let mut taken = 0;
        drop(worker.invalidate(host, |page| taken += page.host.bytes));
        assert_eq!(taken, K4);
    });
    // Another change waits for its turn.
    let mut waits = guest.worker().unwrap();
    let waits = std::thread::spawn(move || {
        let quiet = MemslotSpec { gpa: Gpa(BASE + 128 * G1), id: MemslotId(2), ..memslot(M2) };
        waits.with(|worker| worker.set_memslot(quiet))
    });
    (0..PIECES).for_each(|_| go_on.send(()).unwrap());
    assert_eq!(deletes.join().unwrap(), Ok(MemslotChange::Deleted));
    assert_eq!(waits.join().unwrap(), Ok(MemslotChange::Inserted));
}

#[test]
fn a_log_has_writes_made_while_it_begins() {
    let machine = CountingMachine::new();
    let config = Config::new(2, PageSize::SIZE_4K);
    let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_4K), config);
    let [mut own, mut other] = [0, 1].map(|id| guest.vcpu(id).unwrap());
    let logs = MemslotSpec { log_dirty: true, ..memslot(2 * G1) };
    let write = |vcpu: &mut Vcpu<'_, _, _, _>, page: u64| {
        let outcome = vcpu.fault(Gpa(BASE + page * K4), Access::Write);
        assert!(!matches!(outcome, Outcome::Retry(_) | Outcome::Mmio), "{outcome:?}");
    };
    own.with(|vcpu| {
        vcpu.worker().set_memslot(memslot(2 * G1)).unwrap();
        (0..2).for_each(|page| write(vcpu, page));
    });
    // On both sides of the position, after the first of two pieces.
    let (new, mut pieces) = (G1 / K4 + 5, 0);
    machine.between(move || {
        pieces += 1;
        if pieces == 1 {
            other.with(|vcpu| {
                let (refused, mut bits) = (LogError::Beginning { id: MemslotId(0) }, [0; 8192]);
                assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Err(refused));
                assert_eq!(vcpu.worker().take_log(MemslotId(0), &mut bits), Err(refused));
                assert_eq!(vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1]), Err(refused));
                assert_eq!(refused.errno(), "EAGAIN");
                [0, new].into_iter().for_each(|page| write(vcpu, page));
            });
        }
    });
    own.with(|vcpu| {
        assert_eq!(vcpu.worker().set_memslot(logs), Ok(MemslotChange::LogOn(None)));
        write(vcpu, 1);
        let mut bits = [0; 8192];
        assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Ok(3));
        assert_eq!((bits[0], bits[new as usize / 64]), (0b11, 1 << (new % 64)));
    });
    machine.between(|| ());
}
