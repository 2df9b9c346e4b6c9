//! Clears of a log, and ageing by host addresses, of a memslot that moves meanwhile: both look the
//! memslot up, and then enter the tables once or several times.

use crate::fixture::*;
use crate::pieces::{FIRST, Fixture, ID, SECOND, follow, is, logs, moved, store};
use slat::{AgeCounts, AgeOptions, BreakBeforeMake, Gpa, GpaRange, TableBits};
use slat_guest::*;

/// Clears `bits` in a thread of its own; returns the memory as it is after that, or `None` if the
/// memslot has moved.
fn clears(
    guest: &'static TheGuest,
    ram: &'static Ram,
    (pages, bits): (u64, u64),
) -> Thread<Option<[u64; 4]>> {
    let clears = SendCell(worker(guest));
    spawn(move || match clears.get().clear_log(ID, 0, pages, &[bits]) {
        Ok(_) => Some(*ram.content.lock().unwrap()),
        Err(error) => {
            assert_eq!(error, LogError::Missing { id: ID });
            None
        }
    })
}

/// A clear that goes on where the memslot was would take bits of pages that stay writable.
#[test]
fn a_clear_takes_no_bit_of_a_slot_that_has_moved() {
    bounded("clear || its memslot moves, writes", 2, || {
        let (fixture, mut worker) = Fixture::new(Logging::Protect, logs());
        fixture.writer(&[(FIRST, 1), (SECOND, 2)])();
        let clears = clears(fixture.guest, fixture.ram, (2, 0b11));
        assert_eq!(worker.set_memslot(moved(logs())), Ok(MemslotChange::Moved));
        let mut vcpu = fixture.writer(&[(0, 3)])().get();
        let mut copy = clears.join().unwrap().unwrap_or_default();
        store(fixture.world, fixture.ram, &mut vcpu, 0, 4);
        follow(&fixture, &mut worker, &mut copy);
        assert_eq!(copy, fixture.content());
    });
}

/// The clear is done in the tables that vCPUs share, and not in the vCPU's own.
#[test]
fn a_clear_that_its_slot_left_half_done_gives_its_bits_back() {
    bounded("clear in two sets of tables || its memslot moves", 2, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let guest = uncached(world, ram);
        let mut worker = worker(guest);
        let spec = MemslotSpec { bytes: PAGE, ..memslot(true) };
        worker.set_memslot(spec).unwrap();
        let mut vcpu = vcpu(guest);
        vcpu.fault(Gpa(0), slat::Access::Write);
        let clears = clears(guest, ram, (1, 1));
        worker.set_memslot(MemslotSpec { gpa: Gpa(BLOCK), ..spec }).unwrap();
        let cleared = clears.join().unwrap().is_some();
        assert!(cleared || worker.read_log(ID, &mut [0]) == Ok(1));
    });
}

/// The clear takes the leaf's mark, and the move the leaf.
#[test]
fn a_dirty_bit_taken_by_a_clear_as_its_memslot_moves_is_kept() {
    bounded("clear, by marks || its memslot moves", 2, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let guest = marked(world, ram);
        let mut worker = worker(guest);
        let spec = MemslotSpec { bytes: PAGE, ..memslot(true) };
        worker.set_memslot(spec).unwrap();
        vcpu(guest).fault(Gpa(0), slat::Access::Write);
        worker.mark_written(GpaRange::new(Gpa(0), PAGE).unwrap());
        let clears = clears(guest, ram, (1, 1));
        worker.set_memslot(MemslotSpec { gpa: Gpa(BLOCK), ..spec }).unwrap();
        clears.join().unwrap();
        let (mut dirty, host) = (false, HvaRange { start: Hva(HOST), bytes: PAGE });
        drop(worker.invalidate(host, |part| dirty |= part.dirty));
        assert!(dirty, "a page that was written");
    });
}

fn young(worker: &mut TheWorker, page: u64) -> AgeCounts {
    let host = HvaRange { start: Hva(HOST + page * PAGE), bytes: PAGE };
    let how = AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb: false };
    worker.age_host(host, None, &mut [0], how).unwrap()
}

/// Another memslot comes to the addresses that the first leaves.
#[test]
fn ageing_of_a_moving_memslot_reports_no_used_page_as_old() {
    for (name, kept) in [("in its leaf", false), ("as the memslot keeps it", true)] {
        bounded(
            &format!("ageing of use {name} || its memslot moves, another comes"),
            2,
            move || {
                let (fixture, mut worker) = Fixture::new(Logging::Protect, is());
                fixture.writer(&[(FIRST, 1)])();
                if kept {
                    worker.set_memslot(moved(is())).unwrap();
                    worker.set_memslot(is()).unwrap();
                }
                let ages = SendCell(crate::fixture::worker(fixture.guest));
                let thread = spawn(move || {
                    let aged = young(&mut ages.get(), 0);
                    assert_eq!(aged.young + aged.unanswered, 1, "{aged:?}");
                });
                worker.set_memslot(moved(is())).unwrap();
                let other = MemslotSpec { id: MemslotId(1), host: Hva(HOST + 2 * PAGE), ..is() };
                worker.set_memslot(other).unwrap();
                fixture.writer(&[(FIRST, 2)])();
                thread.join().unwrap();
                assert_eq!(young(&mut worker, 2).young, 1, "the other memslot's page was used");
            },
        );
    }
}
