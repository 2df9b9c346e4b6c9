//! Changes of memslots that stay unfinished between pieces while everything else goes on.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, Gpa, Hpa, PageSize};
use slat_guest::*;

/// Four blocks, two on each side of the boundary of two pieces.
const BYTES: u64 = 4 * M2;
const GPA: u64 = BASE + G1 - 2 * M2;
const MEMORY: u64 = HOST + G1 - 2 * M2;

fn over_two_pieces() -> MemslotSpec {
    MemslotSpec::new(MemslotId(0), Gpa(GPA), BYTES, Hva(MEMORY))
}

fn gone(spec: MemslotSpec) -> MemslotSpec {
    MemslotSpec { bytes: 0, ..spec }
}

fn logs(spec: MemslotSpec) -> MemslotSpec {
    MemslotSpec { log_dirty: true, ..spec }
}

/// The changes of a memslot that work on its memory: the memslot before, and after.
fn changes() -> [(MemslotSpec, MemslotSpec); 5] {
    let is = over_two_pieces();
    let moved = MemslotSpec { gpa: Gpa(GPA + 8 * G1), ..is };
    [(is, gone(is)), (is, moved), (logs(is), logs(moved)), (is, logs(is)), (logs(is), is)]
}

/// The way in which a change is carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum How {
    AtOnce,
    InPieces,
    /// Dropped after the first piece, and asked for again.
    Dropped,
    /// Dropped before the first piece, and completed by a call of `set_memslot`.
    Completed,
}

fn carry_out<C: Case>(vcpu: &mut TheVcpu<'_, C>, to: MemslotSpec, how: How) -> MemslotChange {
    let worker = vcpu.worker();
    if how == How::AtOnce {
        return worker.set_memslot(to).unwrap();
    }
    let work = worker.begin_memslot(to).unwrap();
    assert_eq!((work.id(), work.done(), work.bytes()), (MemslotId(0), 0, BYTES));
    assert_eq!(work.run(worker, 0), Ok(None), "a budget of nothing");
    match how {
        How::Completed => {
            drop(work);
            worker.set_memslot(to).unwrap()
        }
        _ => {
            assert_eq!(work.run(worker, 1), Ok(None));
            assert_eq!((work.done(), work.change()), (BYTES / 2, None));
            let work = match how {
                How::Dropped => {
                    drop(work);
                    worker.begin_memslot(to).unwrap()
                }
                _ => work,
            };
            assert_eq!(work.done(), BYTES / 2, "it goes on from there");
            let change = work.run(worker, 1).unwrap().expect("the last piece");
            assert_eq!((work.done(), work.change()), (BYTES, Some(change)));
            assert_eq!(work.run(worker, 9), Ok(Some(change)), "and says so again");
            change
        }
    }
}

/// Everything that can differ between two ends.
type End = (MemslotChange, Vec<MemslotSpec>, Vec<(PageSize, u64)>, String, Vec<u64>);

fn end_of<C: Case>(config: &Config, (is, to): (MemslotSpec, MemslotSpec), how: How) -> End {
    with_guest!(C, *config, is, PageSize::SIZE_2M => machine, ram, guest, vcpu);
    for block in 0..4 {
        let access = if block % 2 == 0 { Access::Write } else { Access::Read };
        attempt::<C>(&machine, &mut vcpu, GPA + block * M2 + 5 * K4, access).unwrap();
    }
    let change = carry_out::<C>(&mut vcpu, to, how);
    check_mapped(vcpu.worker());
    let (memslots, leaves) = (vcpu.worker().memslots(), vcpu.worker().leaves_by_size());
    let mut bits = vec![0; BYTES as usize / K4 as usize / 64];
    let logged = vcpu.worker().read_log(MemslotId(0), &mut bits);
    assert_eq!(logged.is_ok(), to.bytes != 0 && to.log_dirty);
    guest.reclaim();
    let totals = format!("{:?}", guest.stats().totals);
    assert!(machine.finish().is_empty());
    (change, memslots, leaves, totals, bits)
}

on_all! {
    /// Compares the state, the log and every counter.
    fn a_change_in_pieces_ends_as_one_at_once_does<C: Case>() {
        let hardware = C::HARDWARE_DIRTY.then_some((Logging::Hardware, None));
        let eager = (Logging::Protect, Some(PageSize::SIZE_4K));
        for (logging, eager) in [Some(eager), hardware].into_iter().flatten() {
            let config = Config { logging, eager_split: eager, ..config() };
            for change in changes() {
                let at_once = end_of::<C>(&config, change, How::AtOnce);
                for how in [How::InPieces, How::Dropped, How::Completed] {
                    let end = end_of::<C>(&config, change, how);
                    assert_eq!(end.0, at_once.0, "{change:?}, {how:?}");
                    assert_eq!(end.1, at_once.1, "{change:?}, {how:?}");
                    assert_eq!(end.2, at_once.2, "{change:?}, {how:?}");
                    assert_eq!(end.3, at_once.3, "{change:?}, {how:?}");
                    assert_eq!(end.4, at_once.4, "{change:?}, {how:?}");
                }
            }
        }
    }

    /// The part that is not emptied yet can be accessed, and invalidated, as before; nothing new is
    /// mapped.
    fn a_slot_that_is_half_gone_answers_no_fault_and_gives_its_memory_back<C: Case>() {
        let is = over_two_pieces();
        with_guest!(C, config(), is, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for block in 0..4 {
            attempt::<C>(&machine, &mut vcpu, GPA + block * M2, Access::Write).unwrap();
        }
        let work = vcpu.worker().begin_memslot(gone(is)).unwrap();
        assert_eq!(work.run(vcpu.worker(), 1), Ok(None));
        for block in 0..2 {
            machine.take_back(Hpa(ram.get(MEMORY + block * M2).unwrap().hpa), M2);
        }
        for block in [0, 2] {
            let outcome = vcpu.fault(Gpa(GPA + block * M2), Access::Read);
            assert_eq!(outcome, Outcome::Retry(Retry::MemslotDeleting));
        }
        assert_eq!(vcpu.worker().memslots(), []);
        assert!(vcpu.worker().pin(range(GPA + 2 * M2, K4)).is_err());
        // The host invalidates a block of the rest.
        let mut dirty = 0;
        drop(vcpu.worker().invalidate(host_range(MEMORY + 3 * M2, M2), |part| {
            dirty += if part.dirty { part.host.bytes } else { 0 };
        }));
        assert_eq!(dirty, M2);
        machine.take_back(Hpa(ram.get(MEMORY + 3 * M2).unwrap().hpa), M2);
        assert_eq!(work.run(vcpu.worker(), 9), Ok(Some(MemslotChange::Deleted)));
        machine.take_back(Hpa(ram.get(MEMORY + 2 * M2).unwrap().hpa), M2);
        assert_eq!(vcpu.fault(Gpa(GPA), Access::Read), Outcome::Mmio);
        assert!(machine.finish().is_empty());
    }

    /// The log has the writes of the time between pieces, on both sides of the position.
    fn a_log_that_begins_in_pieces_has_all_that_is_written_after_it_has_begun<C: Case>() {
        let hardware = C::HARDWARE_DIRTY.then_some(Logging::Hardware);
        for logging in [Some(Logging::Protect), hardware].into_iter().flatten() {
            let is = over_two_pieces();
            let config = Config { logging, ..config() };
            with_guest!(C, config, is, PageSize::SIZE_4K => machine, ram, guest, vcpu);
            let page = |page: u64| GPA + page * K4;
            for at in [0, 1, 1024, 1025] {
                attempt::<C>(&machine, &mut vcpu, page(at), Access::Write).unwrap();
            }
            let work = vcpu.worker().begin_memslot(logs(is)).unwrap();
            assert_eq!(work.run(vcpu.worker(), 1), Ok(None));
            let mut bits = [0; 32];
            let refused = LogError::Beginning { id: MemslotId(0) };
            assert_eq!(vcpu.worker().read_log(MemslotId(0), &mut bits), Err(refused));
            assert_eq!(vcpu.worker().take_log(MemslotId(0), &mut bits), Err(refused));
            assert_eq!(vcpu.worker().clear_log(MemslotId(0), 0, 2048, &bits), Err(refused));
            assert_eq!(refused.errno(), "EAGAIN");
            // One page is write-protected by now; one, on the far side, is not mapped yet; one is
            // still writable, from before.
            for at in [0, 1030, 1024] {
                attempt::<C>(&machine, &mut vcpu, page(at), Access::Write).unwrap();
            }
            assert_eq!(work.run(vcpu.worker(), 1), Ok(Some(MemslotChange::LogOn(None))));
            for at in [1, 1025] {
                attempt::<C>(&machine, &mut vcpu, page(at), Access::Write).unwrap();
            }
            vcpu.worker().read_log(MemslotId(0), &mut bits).unwrap();
            let pages: Vec<u64> = (0..2048)
                .filter(|page| bits[*page as usize / 64] >> (page % 64) & 1 == 1)
                .collect();
            // A mark that hardware set before the end, and that was not taken yet, is of an earlier
            // write.
            let all = [0, 1, 1025, 1030];
            let without = [0, 1, 1025];
            let early = logging == Logging::Hardware;
            assert_eq!(pages, if early { &without[..] } else { &all[..] });
            assert!(machine.finish().is_empty());
        }
    }

    /// Each memslot at another place; the changes end in the other order.
    fn two_changes_rest_at_once<C: Case>() {
        let (is, other) = (over_two_pieces(), MemslotId(1));
        with_guest!(C, config(), is, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        let other = MemslotSpec { id: other, gpa: Gpa(GPA + 4 * G1), ..is };
        let other = MemslotSpec { host: Hva(MEMORY + 4 * G1), ..other };
        ram.populate(other.host.0, BYTES, PageSize::SIZE_2M);
        vcpu.worker().set_memslot(other).unwrap();
        for block in 0..4 {
            attempt::<C>(&machine, &mut vcpu, GPA + block * M2, Access::Write).unwrap();
            attempt::<C>(&machine, &mut vcpu, other.gpa.0 + block * M2, Access::Write).unwrap();
        }
        let moved = MemslotSpec { gpa: Gpa(GPA + 8 * G1), ..is };
        let one = vcpu.worker().begin_memslot(moved).unwrap();
        let two = vcpu.worker().begin_memslot(logs(other)).unwrap();
        assert_eq!(one.run(vcpu.worker(), 1), Ok(None));
        assert_eq!(two.run(vcpu.worker(), 1), Ok(None));
        assert_eq!((one.done(), two.done()), (BYTES / 2, BYTES / 2));
        // A third memslot is inserted and deleted.
        let third = MemslotSpec { id: MemslotId(2), gpa: Gpa(BASE + 16 * G1), ..is };
        assert_eq!(vcpu.worker().set_memslot(third), Ok(MemslotChange::Inserted));
        assert_eq!(vcpu.worker().set_memslot(gone(third)), Ok(MemslotChange::Deleted));
        assert!(vcpu.worker().set_execute_huge(ExecuteHuge::Split).unwrap() > 0);
        assert_eq!(two.run(vcpu.worker(), 1), Ok(Some(MemslotChange::LogOn(None))));
        assert_eq!(one.run(vcpu.worker(), 1), Ok(Some(MemslotChange::Moved)));
        assert_eq!(vcpu.worker().memslots(), [logs(other), moved]);
        // In the memslot that moved, huge pages may not be executed: fetches split, and recovery
        // has the tables.
        for block in 0..4 {
            let at = moved.gpa.0 + block * M2;
            attempt::<C>(&machine, &mut vcpu, at, Access::Execute).unwrap();
            attempt::<C>(&machine, &mut vcpu, other.gpa.0 + block * M2, Access::Write).unwrap();
        }
        vcpu.worker().recover_huge_pages();
        assert!(vcpu.worker().recover_huge_pages().bytes >= BYTES);
        let mut bits = [0; 32];
        assert_eq!(vcpu.worker().read_log(other.id, &mut bits), Ok(4));
        check_mapped(vcpu.worker());
        assert!(machine.finish().is_empty());
    }

    fn what_is_in_the_way_of_a_change_is_completed_first<C: Case>() {
        let is = over_two_pieces();
        with_guest!(C, config(), is, PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, GPA, Access::Write).unwrap();
        let worker = vcpu.worker();
        let moved = MemslotSpec { gpa: Gpa(GPA + 8 * G1), ..is };
        let moves = worker.begin_memslot(moved).unwrap();
        // The addresses to which it moves already belong to it.
        let there = MemslotSpec { id: MemslotId(1), gpa: Gpa(moved.gpa.0 + M2), ..is };
        assert_eq!(worker.set_memslot(there), Err(MemslotError::Overlaps { id: MemslotId(0) }));
        assert_eq!(moves.change(), None);
        // The addresses that it leaves go to the next memslot.
        let here = MemslotSpec { id: MemslotId(1), ..is };
        assert_eq!(worker.set_memslot(here), Ok(MemslotChange::Inserted));
        assert_eq!((moves.change(), moves.done()), (Some(MemslotChange::Moved), BYTES));
        assert_eq!(worker.memslots(), [here, moved]);
        // Another change of the same memslot.
        let begins = worker.begin_memslot(logs(moved)).unwrap();
        assert_eq!(worker.set_memslot(moved), Ok(MemslotChange::LogOff { collapsed: 0 }));
        assert_eq!(begins.change(), Some(MemslotChange::LogOn(None)));
        assert_eq!(begins.run(worker, 1), Ok(Some(MemslotChange::LogOn(None))));
        // A change that begins and ends in one call.
        let same = worker.begin_memslot(moved).unwrap();
        assert_eq!((same.change(), same.bytes()), (Some(MemslotChange::Same), 0));
        // Back to addresses that another memslot is about to leave; then all are deleted, even
        // unfinished.
        let goes = worker.begin_memslot(gone(here)).unwrap();
        let back = worker.begin_memslot(is).unwrap();
        assert_eq!((goes.change(), back.change()), (Some(MemslotChange::Deleted), None));
        worker.teardown();
        assert_eq!(back.change(), Some(MemslotChange::Moved));
        assert_eq!(worker.memslots(), []);
        assert!(worker.leaves_by_size().iter().all(|&(_, count)| count == 0));
        assert!(machine.finish().is_empty());
    }
}

/// The machine counts a private page once: two memslots that had it would each report its removal.
#[test]
fn two_memslots_have_no_private_memory_in_common() {
    let is = MemslotSpec { private: Some(PrivateAt(HIDDEN)), ..over_two_pieces() };
    with_guest!(Intel, config(), is, PageSize::SIZE_2M => machine, ram, guest, vcpu);
    ram.populate_private(HIDDEN, BYTES, PageSize::SIZE_2M);
    let at = |private| MemslotSpec {
        id: MemslotId(1),
        gpa: Gpa(GPA + 8 * G1),
        private: Some(PrivateAt(private)),
        ..is
    };
    for private in [HIDDEN, HIDDEN - M2, HIDDEN + BYTES - M2] {
        let refused = vcpu.worker().set_memslot(at(private));
        assert_eq!(refused, Err(MemslotError::Overlaps { id: is.id }), "{private:#x}");
    }
    for private in [HIDDEN - BYTES, HIDDEN + BYTES] {
        let beside = at(private);
        assert_eq!(vcpu.worker().set_memslot(beside), Ok(MemslotChange::Inserted));
        vcpu.worker().set_memslot(gone(beside)).unwrap();
    }
    // A memslot that is being deleted has its private memory until all of that is removed.
    let convert = |vcpu: &mut TheVcpu<'_, Intel>, gpa| {
        vcpu.worker().convert(range(gpa, BYTES), MemoryKind::Private, |_| {}).unwrap();
        machine.claim_kind(VMID, range(gpa, BYTES), MemoryKind::Private);
    };
    convert(&mut vcpu, GPA);
    for block in 0..4 {
        attempt::<Intel>(&machine, &mut vcpu, GPA + block * M2, Access::Write).unwrap();
    }
    let goes = vcpu.worker().begin_memslot(gone(is)).unwrap();
    assert_eq!(goes.run(vcpu.worker(), 1), Ok(None));
    assert_ne!(machine.assigned(), 0);
    assert_eq!(vcpu.worker().set_memslot(at(HIDDEN)), Ok(MemslotChange::Inserted));
    assert_eq!((goes.change(), machine.assigned()), (Some(MemslotChange::Deleted), 0));
    machine.claim_kind(VMID, range(GPA, BYTES), MemoryKind::Shared);
    convert(&mut vcpu, at(HIDDEN).gpa.0);
    attempt::<Intel>(&machine, &mut vcpu, at(HIDDEN).gpa.0, Access::Write).unwrap();
    assert_eq!(machine.assigned() as u64, M2 / K4);
    assert!(machine.finish().is_empty());
}

#[test]
fn a_change_is_run_by_workers_of_its_guest_alone_and_goes_with_it() {
    let is = over_two_pieces();
    with_guest!(Intel, config(), is, PageSize::SIZE_2M => machine, ram, guest, vcpu);
    attempt::<Intel>(&machine, &mut vcpu, GPA, Access::Write).unwrap();
    let work = vcpu.worker().begin_memslot(gone(is)).unwrap();
    let other_machine = Intel::machine(1);
    let other = crate::fixture::guest::<Intel>(&other_machine, &ram, config());
    let mut second = crate::fixture::storage();
    let mut stranger = Worker::new(&other, &mut second).unwrap();
    stranger.set_memslot(is).unwrap();
    assert_eq!(work.run(&mut stranger, 1), Err(MemslotError::Missing { id: is.id }));
    assert_eq!((work.done(), stranger.memslots()), (0, vec![is]));
    // The guest is dropped with a memslot that is half deleted.
    assert_eq!(work.run(vcpu.worker(), 1), Ok(None));
    drop(vcpu);
    assert!(machine.finish().is_empty());
    // SAFETY: the machine's CPUs no longer run.
    unsafe { guest.destroy() };
    assert_eq!((work.done(), work.change()), (BYTES / 2, None));
    assert_eq!(work.run(&mut stranger, 1), Err(MemslotError::Missing { id: is.id }));
}
