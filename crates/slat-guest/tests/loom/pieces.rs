//! Changes of memslots in pieces, while faults, logs and the host go on.
//!
//! Pieces end at multiples of 16 KiB on tables of two entries; the memslot has a page on each side
//! of one.

use crate::fixture::*;
use core::cell::Cell;
use slat::{Access, BreakBeforeMake, Gpa, GpaRange, Hpa, PageSize, Platform, Pte};
use slat_guest::*;
use std::rc::Rc;

pub const FIRST: u64 = 2 * BLOCK - PAGE;
pub const SECOND: u64 = 2 * BLOCK;
pub const ID: MemslotId = MemslotId(0);

pub fn is() -> MemslotSpec {
    MemslotSpec::new(ID, Gpa(FIRST), 2 * PAGE, Hva(HOST))
}

pub fn logs() -> MemslotSpec {
    MemslotSpec { log_dirty: true, ..is() }
}

fn gone() -> MemslotSpec {
    MemslotSpec { bytes: 0, ..is() }
}

pub fn moved(spec: MemslotSpec) -> MemslotSpec {
    MemslotSpec { gpa: Gpa(0), ..spec }
}

/// A guest whose memslot is `spec`.
pub struct Fixture {
    pub world: &'static World,
    pub ram: &'static Ram,
    pub guest: &'static TheGuest,
}

impl Fixture {
    pub fn new(logging: Logging, spec: MemslotSpec) -> (Self, TheWorker) {
        Self::of(Config { logging, ..config() }, spec)
    }

    pub fn of(config: Config, spec: MemslotSpec) -> (Self, TheWorker) {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let page = PageSize::from_bytes(PAGE).unwrap();
        let guest = wide(world, ram, Config { largest: page, ..config });
        let mut worker = worker(guest);
        worker.set_memslot(spec).unwrap();
        // Pages around the memslot keep the tables of its pages linked: the engine's models cover
        // the retirement of tables.
        for (id, gpa) in [(8, FIRST - PAGE), (9, SECOND + PAGE)] {
            let host = Hva(HOST + u64::from(id) * PAGE);
            worker.set_memslot(MemslotSpec::new(MemslotId(id), Gpa(gpa), PAGE, host)).unwrap();
            while at(&mut worker, gpa).is_none() {
                worker.prefault(GpaRange::new(Gpa(gpa), PAGE).unwrap(), Access::Read, || false);
            }
        }
        (Self { world, ram, guest }, worker)
    }

    /// Returns a vCPU that writes these values to these addresses in a thread of its own.
    pub fn writer(
        &self,
        values: &'static [(u64, u64)],
    ) -> impl FnOnce() -> SendCell<TheVcpu> + use<> {
        let (world, ram, vcpu) = (self.world, self.ram, SendCell(vcpu(self.guest)));
        move || {
            let mut vcpu = vcpu.get();
            for &(gpa, value) in values {
                store(world, ram, &mut vcpu, gpa, value);
            }
            SendCell(vcpu)
        }
    }

    pub fn content(&self) -> [u64; 4] {
        *self.ram.content.lock().unwrap()
    }
}

/// The vCPU writes, and its faults are handled, until an outcome says that there is no memory.
pub fn store(world: &World, ram: &Ram, vcpu: &mut TheVcpu, gpa: u64, value: u64) {
    for _ in 0..4 {
        if hardware((world, ram), vcpu, (gpa, value), || {}) {
            return;
        }
        if let Outcome::Mmio | Outcome::Retry(Retry::MemslotDeleting) =
            vcpu.fault(Gpa(gpa), Access::Write)
        {
            return;
        }
    }
}

/// A CPU with FEAT_HAFDBS: marks the leaf, and stores while the leaf exists. `marked` is called if
/// the leaf was not marked dirty before.
pub fn hardware(
    (world, ram): (&World, &Ram),
    vcpu: &TheVcpu,
    (gpa, value): (u64, u64),
    marked: impl FnOnce(),
) -> bool {
    let mut content = ram.content.lock().unwrap();
    loop {
        let (mut table, mut level) = (vcpu.root(), 2);
        let (memslot, raw) = loop {
            let index = (gpa >> (12 + level)) as usize & 1;
            // SAFETY: every table of the format has two entries, which stay until the model ends.
            let memslot: &Pte = unsafe { world.entries(table).add(index).as_ref() };
            let raw = memslot.load();
            let address = raw & 0xffff_f000;
            if level == 0 || raw & 0b11 != 0b11 {
                break (memslot, raw);
            }
            (table, level) = (Hpa(address), level - 1);
        };
        if raw & 1 == 0 || raw & (1 << 7 | 1 << 51) == 0 {
            return false;
        }
        if memslot.exchange(raw, raw | 1 << 7 | 1 << 10).is_ok() {
            assert_eq!(level, 0, "the memslot fits no block");
            content[((raw & 0xffff_f000) - OLD) as usize / PAGE as usize] = value;
            if raw & 1 << 7 == 0 {
                marked();
            }
            return true;
        }
    }
}

/// Keeps the copy of the host's memory up to date by means of the log.
pub fn follow(fixture: &Fixture, worker: &mut TheWorker, copy: &mut [u64; 4]) {
    let mut bits = [0];
    worker.read_log(ID, &mut bits).unwrap();
    worker.clear_log(ID, 0, 2, &bits).unwrap();
    let content = fixture.content();
    for page in (0..2).filter(|page| bits[0] >> page & 1 == 1) {
        copy[page] = content[page];
    }
}

/// The memslot is deleted, or moves, while a vCPU writes `values`. `mapped`: it also wrote them
/// before.
fn written_as_it_goes(to: MemslotSpec, mapped: bool, values: &'static [(u64, u64)]) {
    let (fixture, mut worker) = Fixture::new(Logging::Protect, is());
    if mapped {
        fixture.writer(values)();
    }
    let thread = spawn(fixture.writer(values));
    // From its end on the host may use the memory of the first piece.
    let half = Rc::new(Cell::new(0));
    let (seen, ram) = (half.clone(), fixture.ram);
    fixture.world.after_a_piece(move || seen.set(ram.content.lock().unwrap()[0]));
    worker.set_memslot(to).unwrap();
    let all = fixture.content();
    drop(thread.join().unwrap());
    assert_eq!(half.get(), all[0], "written behind its piece");
    assert_eq!(all, fixture.content(), "written behind the change");
    for gpa in [FIRST, SECOND] {
        assert_eq!(at(&mut worker, gpa), None);
    }
}

#[test]
fn a_piece_of_a_slot_that_goes_stays_empty() {
    for (name, to) in [("is deleted", gone()), ("moves", moved(is()))] {
        bounded(&format!("writes || a memslot that {name} in pieces"), 3, move || {
            written_as_it_goes(to, false, &[(FIRST, 1), (SECOND, 2)]);
        });
    }
    bounded("writes to what is there || a piece that is emptied, then rest", 3, || {
        written_as_it_goes(gone(), true, &[(FIRST, 1)]);
    });
    bounded("writes to what is there || rest, then a piece that is emptied", 3, || {
        written_as_it_goes(gone(), true, &[(SECOND, 1)]);
    });
}

#[test]
fn nor_does_a_view_keep_what_has_gone_in_pieces() {
    bounded("write in a view || a memslot that is deleted in pieces", 1, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let guest = wide_uncached(world, ram);
        let mut worker = worker(guest);
        worker.set_memslot(is()).unwrap();
        let fixture = Fixture { world, ram, guest };
        let thread = spawn(fixture.writer(&[(FIRST, 1)]));
        worker.set_memslot(gone()).unwrap();
        let all = fixture.content();
        let mut vcpu = thread.join().unwrap().get();
        assert_eq!(vcpu.translate(Gpa(FIRST)), None);
        assert_eq!(fixture.content(), all);
    });
}

/// A reader that reads the log as soon as it can finds all later writes in it.
fn log_begins(logging: Logging) {
    let (fixture, mut worker) = Fixture::new(logging, is());
    fixture.writer(&[(SECOND, 7)])();
    // The test is of pages behind the position; if faults log, also of pages before it.
    let thread = spawn(fixture.writer(match logging {
        Logging::Protect => &[(FIRST, 1), (SECOND, 2)],
        Logging::Hardware => &[(SECOND, 2)],
    }));
    let copy = Rc::new(Cell::new(None));
    let (early, ram) = (copy.clone(), fixture.ram);
    let mut reader = crate::fixture::worker(fixture.guest);
    fixture.world.after_a_piece(move || {
        if reader.read_log(ID, &mut [0]).is_ok() {
            early.set(Some(*ram.content.lock().unwrap()));
        }
    });
    worker.set_memslot(logs()).unwrap();
    let mut copy = copy.get().unwrap_or_else(|| fixture.content());
    follow(&fixture, &mut worker, &mut copy);
    drop(thread.join().unwrap());
    follow(&fixture, &mut worker, &mut copy);
    assert_eq!(copy, fixture.content());
}

#[test]
fn a_log_that_begins_in_pieces_loses_no_write() {
    bounded("writes || log on, in pieces, by protection", 3, || log_begins(Logging::Protect));
    bounded("writes || log on, in pieces, by marks", 3, || log_begins(Logging::Hardware));
}

/// A log that moves with its memslot keeps earlier writes, even if another thread reads it
/// meanwhile.
#[test]
fn a_log_that_moves_in_pieces_keeps_what_leaves_knew() {
    bounded("read of a log || its memslot moves in pieces", 3, || {
        let (fixture, mut worker) = Fixture::new(Logging::Hardware, logs());
        fixture.writer(&[(FIRST, 1), (SECOND, 2)])();
        let reader = SendCell(crate::fixture::worker(fixture.guest));
        let thread = spawn(move || {
            let mut reader = reader.get();
            let mut bits = [0];
            match reader.read_log(ID, &mut bits) {
                Ok(pages) => assert_eq!((pages, bits), (2, [0b11])),
                Err(error) => assert_eq!(error, LogError::Missing { id: ID }),
            }
        });
        worker.set_memslot(moved(logs())).unwrap();
        let mut bits = [0];
        assert_eq!(worker.read_log(ID, &mut bits), Ok(2), "{bits:?}");
        thread.join().unwrap();
    });
}

/// A thread that takes a page finds that it was written, wherever its mark is.
#[test]
fn a_taker_sees_a_pages_dirty_bit_while_its_memslot_moves() {
    for (name, page) in [("first", 0), ("second", 1)] {
        bounded(
            &format!("invalidation of the {name} page || its memslot moves in pieces"),
            3,
            move || {
                let (fixture, mut worker) = Fixture::new(Logging::Protect, is());
                fixture.writer(if page == 0 { &[(FIRST, 1)] } else { &[(SECOND, 2)] })();
                let taker = SendCell(crate::fixture::worker(fixture.guest));
                let thread = spawn(move || {
                    let mut taker = taker.get();
                    let host = HvaRange { start: Hva(HOST + page * PAGE), bytes: PAGE };
                    let mut dirty = false;
                    drop(taker.invalidate(host, |part| dirty |= part.dirty));
                    assert!(dirty, "a page that was written");
                });
                worker.set_memslot(moved(is())).unwrap();
                thread.join().unwrap();
            },
        );
    }
}

#[test]
fn pages_of_a_half_deleted_memslot_stay_protected_under_a_hold() {
    bounded("writes held || a memslot that is deleted in pieces", 3, || {
        let (fixture, mut worker) = Fixture::new(Logging::Protect, is());
        fixture.writer(&[(FIRST, 1), (SECOND, 2)])();
        let holder = SendCell(crate::fixture::worker(fixture.guest));
        let thread = spawn(move || {
            let mut holder = holder.get();
            let held = holder.freeze_writes(HvaRange { start: Hva(HOST), bytes: 2 * PAGE });
            for gpa in [FIRST, SECOND] {
                assert!(!writable(&mut holder, gpa), "{gpa:x} while they are held");
            }
            drop(held);
        });
        worker.set_memslot(gone()).unwrap();
        thread.join().unwrap();
    });
}
