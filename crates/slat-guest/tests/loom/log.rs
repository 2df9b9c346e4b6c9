//! Writes while a thread reads, clears or begins a log, or harvests a ring.

use crate::fixture::*;
use loom::thread::{JoinHandle, spawn};
use slat::{Access, BreakBeforeMake, Gpa};
use slat_guest::*;

const ALL: u64 = 0b11;

/// The copy that is made by means of the log.
struct Copy {
    pages: [u64; 4],
}

impl Copy {
    fn take(&mut self, ram: &Ram, bits: u64) {
        let content = ram.content.lock().unwrap();
        for page in 0..4 {
            if bits >> page & 1 == 1 {
                self.pages[page] = content[page];
            }
        }
    }
}

/// Returns a thread that writes these values to these addresses, one after the other.
fn writes<const N: usize>(
    writer: TheVcpu,
    ram: &'static Ram,
    values: [(u64, u64); N],
) -> JoinHandle<SendCell<TheVcpu>> {
    let writer = SendCell(writer);
    spawn(move || {
        let mut vcpu = writer.get();
        for (gpa, value) in values {
            write(&mut vcpu, ram, gpa, value);
        }
        SendCell(vcpu)
    })
}

/// One round: reads the log, clears it, copies the pages.
fn round(worker: &mut TheWorker, ram: &Ram, copy: &mut Copy) {
    let mut bits = [0];
    worker.read_log(MemslotId(0), &mut bits).unwrap();
    worker.clear_log(MemslotId(0), 0, 4, &bits).unwrap();
    copy.take(ram, bits[0]);
}

fn rounds(config: Config, block: u64, mapped: bool, bbm: BreakBeforeMake) {
    let (world, ram) = (World::new(bbm), Ram::new(block));
    let guest = guest(world, ram, config);
    let mut worker = worker(guest);
    worker.set_memslot(memslot(false)).unwrap();
    let mut writer = vcpu(guest);
    if mapped {
        write(&mut writer, ram, 0, 7);
    }
    worker.set_memslot(memslot(true)).unwrap();
    let mut copy = Copy { pages: *ram.content.lock().unwrap() };
    let thread = writes(writer, ram, [(0, 1), (PAGE, 2)]);
    round(&mut worker, ram, &mut copy);
    drop(thread.join().unwrap());
    round(&mut worker, ram, &mut copy);
    assert_eq!(copy.pages, *ram.content.lock().unwrap());
    let left: Vec<_> = (0..2).filter(|page| writable(&mut worker, page * PAGE)).collect();
    assert_eq!(left, [0; 0], "cleared pages that the guest may write");
}

#[test]
fn a_clear_during_faults_loses_no_write() {
    bounded("faults || clear, pages", 4, || {
        rounds(config(), PAGE, true, BreakBeforeMake::Never);
    });
    bounded("faults || clear, a block, initially set", 4, || {
        let config = Config { initially_set: true, ..config() };
        rounds(config, BLOCK, true, BreakBeforeMake::Never);
    });
    bounded("faults || clear, a block, breaking", 4, || {
        rounds(config(), BLOCK, true, BreakBeforeMake::Always);
    });
}

#[test]
fn logging_that_begins_during_faults_loses_no_write() {
    bounded("fault || log on", 4, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let guest = guest(world, ram, config());
        let mut worker = worker(guest);
        worker.set_memslot(memslot(false)).unwrap();
        let thread = writes(vcpu(guest), ram, [(0, 1), (0, 2)]);
        worker.set_memslot(memslot(true)).unwrap();
        let mut copy = Copy { pages: [0; 4] };
        copy.take(ram, ALL);
        drop(thread.join().unwrap());
        round(&mut worker, ram, &mut copy);
        assert_eq!(copy.pages, *ram.content.lock().unwrap());
    });
}

#[test]
fn a_ring_reset_during_splits_loses_no_write() {
    bounded("faults that split || ring reset", 4, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(BLOCK));
        let guest = guest(world, ram, Config { ring: Some(4), ..config() });
        let mut worker = worker(guest);
        worker.set_memslot(memslot(false)).unwrap();
        let mut writer = vcpu(guest);
        write(&mut writer, ram, 0, 7);
        worker.set_memslot(memslot(true)).unwrap();
        let mut copy = Copy { pages: *ram.content.lock().unwrap() };
        let thread = writes(writer, ram, [(0, 1), (PAGE, 2)]);
        let mut reset = |worker: &mut TheWorker| {
            let none = DirtyPage { memslot: MemslotId(9), page: 0 };
            let mut pages = [none; 4];
            let count = worker.harvest_ring(0, &mut pages);
            worker.reset_rings().unwrap();
            let bits = pages[..count].iter().fold(0, |bits, page| bits | 1 << page.page);
            copy.take(ram, bits);
        };
        reset(&mut worker);
        drop(thread.join().unwrap());
        reset(&mut worker);
        assert_eq!(copy.pages, *ram.content.lock().unwrap());
        assert_eq!(at(&mut worker, 0).map(|leaf| leaf.attributes.write), Some(false));
    });
}

#[test]
fn a_ring_that_wraps_around_loses_no_write() {
    bounded("faults || ring reset, two entries", 4, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let guest = guest(world, ram, Config { ring: Some(2), ..config() });
        let mut worker = worker(guest);
        worker.set_memslot(memslot(true)).unwrap();
        let mut writer = vcpu(guest);
        assert!(write(&mut writer, ram, 0, 1) && write(&mut writer, ram, PAGE, 2));
        let none = DirtyPage { memslot: MemslotId(9), page: 0 };
        let mut pages = [none; 2];
        assert_eq!(worker.harvest_ring(0, &mut pages), 2);
        let writer = SendCell(writer);
        let thread = spawn(move || {
            let mut vcpu = writer.get();
            // The ring is full until the reset is done: it must not take another page before.
            if let Outcome::MadeWritable(_) | Outcome::Mapped(_) =
                vcpu.fault(Gpa(2 * PAGE), Access::Write)
            {
                write(&mut vcpu, ram, 2 * PAGE, 3);
            }
            write(&mut vcpu, ram, 0, 4);
            SendCell(vcpu)
        });
        let mut copy = Copy { pages: [0; 4] };
        let mut collect = |worker: &mut TheWorker, pages: &[DirtyPage]| {
            worker.reset_rings().unwrap();
            copy.take(ram, pages.iter().fold(0, |bits, page| bits | 1 << page.page));
        };
        collect(&mut worker, &pages);
        drop(thread.join().unwrap());
        let count = worker.harvest_ring(0, &mut pages);
        collect(&mut worker, &pages[..count]);
        assert_eq!(copy.pages, *ram.content.lock().unwrap());
        assert!((0..3).all(|page| !writable(&mut worker, page * PAGE)));
    });
}

#[test]
fn two_clears_and_a_fault_lose_no_write() {
    bounded("clear || clear || fault", 4, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let guest = guest(world, ram, config());
        let mut first = worker(guest);
        first.set_memslot(memslot(true)).unwrap();
        let mut writer = vcpu(guest);
        write(&mut writer, ram, 0, 1);
        let mut bits = [0];
        first.read_log(MemslotId(0), &mut bits).unwrap();
        assert_eq!(bits, [1]);
        let writes = writes(writer, ram, [(0, 2)]);
        let second = SendCell(worker(guest));
        let clears = spawn(move || {
            let mut second = second.get();
            second.clear_log(MemslotId(0), 0, 4, &[1]).unwrap();
            SendCell(second)
        });
        first.clear_log(MemslotId(0), 0, 4, &[1]).unwrap();
        drop(clears.join().unwrap());
        let mut copy = Copy { pages: [0; 4] };
        copy.take(ram, 1);
        drop(writes.join().unwrap());
        round(&mut first, ram, &mut copy);
        assert_eq!(copy.pages, *ram.content.lock().unwrap());
    });
}

/// A thread that takes a page finds that the guest wrote it, while the log takes its mark in a read
/// or a clear.
#[test]
fn a_taker_of_a_page_sees_its_dirty_bit_on_its_way_to_the_log() {
    for clears in [false, true] {
        let name = if clears { "clear || invalidation" } else { "harvest || invalidation" };
        bounded(name, 3, move || {
            let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
            let guest = marked(world, ram);
            let mut setup = worker(guest);
            setup.set_memslot(memslot(true)).unwrap();
            vcpu(guest).fault(Gpa(0), Access::Write);
            if clears {
                setup.mark_written(slat::GpaRange::new(Gpa(0), PAGE).unwrap());
            }
            let logs = SendCell(worker(guest));
            let thread = spawn(move || {
                let mut worker = logs.get();
                if clears {
                    worker.clear_log(MemslotId(0), 0, 4, &[1]).unwrap();
                } else {
                    worker.read_log(MemslotId(0), &mut [0]).unwrap();
                }
            });
            let mut dirty = false;
            let range = HvaRange { start: Hva(HOST), bytes: PAGE };
            drop(setup.invalidate(range, |part| dirty |= part.dirty));
            assert!(dirty, "a page that was written");
            thread.join().unwrap();
        });
    }
}

/// As above, for a page that the vCPU wrote in its own view, which it empties as it switches its
/// caches on: the page has no leaf when it is taken.
#[test]
fn a_taker_sees_a_dirty_bit_the_log_took_from_an_emptied_view() {
    for clears in [false, true] {
        let name = if clears { "clear || caches on" } else { "harvest || caches on, invalidation" };
        bounded(name, 3, move || {
            let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
            let guest = marked_uncached(world, ram);
            let mut logs = worker(guest);
            logs.set_memslot(memslot(true)).unwrap();
            let mut vcpu = vcpu(guest);
            vcpu.fault(Gpa(0), Access::Write);
            if clears {
                logs.mark_written(slat::GpaRange::new(Gpa(0), PAGE).unwrap());
            }
            let take = |vcpu: &mut TheVcpu| {
                let mut dirty = false;
                let range = HvaRange { start: Hva(HOST), bytes: PAGE };
                drop(vcpu.worker().invalidate(range, |part| dirty |= part.dirty));
                assert!(dirty, "a page that was written");
            };
            let vcpu = SendCell(vcpu);
            let thread = spawn(move || {
                let mut vcpu = vcpu.get();
                vcpu.set_caches(true);
                if !clears {
                    take(&mut vcpu);
                }
                SendCell(vcpu)
            });
            if clears {
                logs.clear_log(MemslotId(0), 0, 4, &[1]).unwrap();
            } else {
                logs.read_log(MemslotId(0), &mut [0]).unwrap();
            }
            let mut vcpu = thread.join().unwrap().get();
            if clears {
                take(&mut vcpu);
            }
        });
    }
}

/// A clear protects a block as a whole, and cleans it, while a fault splits it for a page that the
/// clear does not name: only the mark of the page's leaf says that the guest wrote it.
#[test]
fn a_clear_of_a_block_loses_no_write_to_its_other_pages() {
    bounded("write that splits || clear of a block, by marks", 3, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(BLOCK));
        let guest = wide(world, ram, Config { logging: Logging::Hardware, ..config() });
        let mut worker = worker(guest);
        worker.set_memslot(memslot(false)).unwrap();
        let mut writer = vcpu(guest);
        writer.fault(Gpa(0), Access::Write);
        worker.set_memslot(memslot(true)).unwrap();
        worker.mark_written(slat::GpaRange::new(Gpa(0), PAGE).unwrap());
        let writer = SendCell(writer);
        let thread = spawn(move || {
            let mut vcpu = writer.get();
            crate::pieces::store(world, ram, &mut vcpu, PAGE, 2);
            SendCell(vcpu)
        });
        worker.clear_log(MemslotId(0), 0, 4, &[1]).unwrap();
        drop(thread.join().unwrap());
        let mut copy = Copy { pages: [0; 4] };
        round(&mut worker, ram, &mut copy);
        assert_eq!(copy.pages, *ram.content.lock().unwrap());
    });
}

/// The log of a memslot ends and begins again while an epoch begins: an epoch that is no base has
/// what was written since the last one.
#[test]
fn an_epoch_lacks_no_page_of_a_log_that_is_replaced_meanwhile() {
    bounded("epoch begins || log off, log on", 2, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::new(PAGE));
        let guest = guest(world, ram, config());
        let mut worker = worker(guest);
        worker.set_memslot(memslot(true)).unwrap();
        let mut epochs = Epochs::new(MemslotId(0));
        epochs.begin(&mut worker).unwrap().commit();
        vcpu(guest).fault(Gpa(0), Access::Write);
        let changes = SendCell(crate::fixture::worker(guest));
        let thread = spawn(move || {
            let mut worker = changes.get();
            worker.set_memslot(memslot(false)).unwrap();
            worker.set_memslot(memslot(true)).unwrap();
        });
        match epochs.begin(&mut worker) {
            Ok(epoch) => assert!(epoch.is_base() || epoch.bitmap() == [1], "{epoch:?}"),
            Err(EpochError::Log(LogError::Missing { .. } | LogError::Beginning { .. })) => {}
            Err(error) => panic!("{error:?}"),
        }
        thread.join().unwrap();
    });
}
