//! Work on a whole memslot pauses between pieces, outside the tables.

use crate::machine::*;
use slat::{Access, Gpa, PageSize};
use slat_guest::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

const PIECES: u64 = 4;

#[test]
fn changes_of_a_slot_rest_between_pieces_outside_the_tables() {
    for logging in [Logging::Protect, Logging::Hardware] {
        let machine = Counted::new();
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
            vcpu.worker().set_execute_huge(ExecuteHuge::Split).unwrap();
            assert!(rests.load(Ordering::Relaxed) >= PIECES);
            rests.store(0, Ordering::Relaxed);
            vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..moved }).unwrap();
            assert_eq!(rests.load(Ordering::Relaxed), PIECES);
        });
    }
}

#[test]
fn the_end_of_a_log_invalidates_for_each_gib_and_not_for_each_block() {
    for logging in [Logging::Protect, Logging::Hardware] {
        for (bytes, collapse) in [(M2, 1), (20 * M2, 1), (32 * M2, 2), (G1, 2), (3 * G1, 6)] {
            let machine = Counted::new();
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

/// While a deletion pauses, everything else goes on, except other changes of memslots.
#[test]
fn a_change_that_rests_holds_up_other_changes_alone() {
    let machine = Counted::new();
    let config = Config::new(1, PageSize::SIZE_2M);
    let guest = shared(&machine, 1, OnePiece(PageSize::SIZE_2M), config);
    let mut vcpu = guest.vcpu(0).unwrap();
    let (large, other) = (memslot(PIECES * G1), MemslotId(1));
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
        vcpu.fault(large.gpa, Access::Write);
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
        assert_eq!(vcpu.fault(large.gpa, Access::Read), Outcome::Retry(Retry::MemslotDeleting));
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
