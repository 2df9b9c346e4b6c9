//! Loom models of reclaim: explore every interleaving, within a bound, of a thread that sends a
//! page away with a vCPU that writes the page, faults that bring it back, and a thread that copies
//! it. No write is lost. Tables have two entries.
//!
//! `RUSTFLAGS="--cfg loom -C debug-assertions" cargo test -p slat-reclaim --release --features
//! loom --test loom`
//!
//! The host is the one of the models of `slat-guest`. Memory has one word per page. A vCPU writes
//! while its leaf allows it, as a CPU does before an invalidation has completed.
#![cfg(loom)]

#[allow(dead_code, reason = "a part of it is for other models")]
#[path = "../../slat-guest/tests/loom/fixture.rs"]
mod fixture;

extern crate alloc;
#[path = "../src/arrivals.rs"]
mod arrivals;

use fixture::{BITS, BLOCK, HOST, PAGE, SendCell, World, bounded, memslot};
use loom::sync::Mutex;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TwoSlots};
use slat::{Access, AgeOptions, BreakBeforeMake, Gpa, GpaRange, Hpa, PageSize, Vmid};
use slat_guest::{Guest, Hva, Outcome, Retry, Vcpu, Worker};
use slat_reclaim::*;

const FRAMES: u64 = 0x100_0000;

/// Content of each frame, and of each slot of swap.
struct Content {
    frames: Mutex<[u64; 4]>,
    slots: Mutex<[u64; 4]>,
}

impl Ram for &'static Content {
    fn read(&self, hpa: Hpa, page: &mut [u8]) {
        let word = self.frames.lock().unwrap()[((hpa.0 - FRAMES) / PAGE) as usize];
        page[..8].copy_from_slice(&word.to_ne_bytes());
    }

    fn write(&self, hpa: Hpa, page: &[u8]) {
        let word = u64::from_ne_bytes(page[..8].try_into().unwrap());
        self.frames.lock().unwrap()[((hpa.0 - FRAMES) / PAGE) as usize] = word;
    }
}

impl Swap for &'static Content {
    fn slots(&self) -> u32 {
        4
    }

    fn page(&self) -> u64 {
        PAGE
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
        self.slots.lock().unwrap()[slot as usize] =
            u64::from_ne_bytes(page[..8].try_into().unwrap());
        Ok(())
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        page[..8].copy_from_slice(&self.slots.lock().unwrap()[slot as usize].to_ne_bytes());
        Ok(())
    }
}

type TestMemory = PagedMemory<'static, &'static Content, &'static Content>;
type TheGuest = Guest<'static, Tiny, World, &'static TestMemory>;
type TheVcpu = Vcpu<'static, Tiny, World, &'static TestMemory>;
type TheWorker = Worker<'static, Tiny, World, &'static TestMemory>;

/// A guest of two pages, which may have both.
fn guest() -> (&'static TheGuest, &'static Content) {
    let content: &'static Content = Box::leak(Box::new(Content {
        frames: Mutex::new([u64::MAX; 4]),
        slots: Mutex::new([u64::MAX; 4]),
    }));
    let layout = Layout {
        base: Hpa(FRAMES),
        bytes: 2 * PAGE,
        page: PageSize::from_bytes(PAGE).unwrap(),
        block: PageSize::from_bytes(BLOCK).unwrap(),
    };
    let pool = Box::leak(Box::new(Pool::new(content, layout, content).unwrap()));
    // Two lists, because walks are not part of these models.
    let config = Config { policy: Policy::TwoLists, batch: 1, ..Config::new(2) };
    let paged: &'static TestMemory =
        Box::leak(Box::new(PagedMemory::new(pool, Hva(HOST), 2 * PAGE, config, 0).unwrap()));
    let world = World::new(BreakBeforeMake::Never);
    let TwoSlots(arm) = Tiny::default();
    let format = TwoSlots(slat::format::arm64::Arm64K4 { forced_write_back: true, ..arm });
    let page = PageSize::from_bytes(PAGE).unwrap();
    let config = slat_guest::Config::new(2, page);
    let guest = Guest::new(format, Vmid(1), BITS, world, paged, config).unwrap();
    let guest: &'static TheGuest = Box::leak(Box::new(guest));
    worker(guest).set_memslot(memslot(false)).unwrap();
    (guest, content)
}

fn worker(guest: &'static TheGuest) -> TheWorker {
    Worker::new(guest).unwrap()
}

fn vcpu(guest: &'static TheGuest, id: u16) -> TheVcpu {
    Vcpu::new(guest, id).unwrap()
}

/// The vCPU writes its page, and has its faults answered.
fn write(vcpu: &mut TheVcpu, content: &Content, value: u64) {
    loop {
        {
            let mut frames = content.frames.lock().unwrap();
            let leaf = vcpu.worker().translate(Gpa(0)).ok().flatten();
            if let Some(leaf) = leaf.filter(|leaf| leaf.attributes.write) {
                frames[((leaf.hpa.0 - FRAMES) / PAGE) as usize] = value;
                return;
            }
        }
        match vcpu.fault(Gpa(0), Access::Write) {
            Outcome::Retry(Retry::Absent(_)) => {
                Pager::new(vcpu.worker()).bring_in(Hva(HOST), Access::Write).unwrap();
            }
            Outcome::Retry(_) => loom::thread::yield_now(),
            _ => {}
        }
    }
}

/// Returns the content of the guest's page, from memory or swap.
fn content(worker: &mut TheWorker) -> u64 {
    let mut page = [0; PAGE as usize];
    Pager::new(worker).copy(Hva(HOST), &mut page).unwrap();
    u64::from_ne_bytes(page[..8].try_into().unwrap())
}

/// `before` prepares the page, which holds 1; then the page leaves while a vCPU writes 2.
fn leaves_while_written(before: impl Fn(&mut TheVcpu)) {
    let (guest, memory) = guest();
    let mut writer = vcpu(guest, 0);
    write(&mut writer, memory, 1);
    before(&mut writer);
    let writer = SendCell(writer);
    let thread = spawn(move || {
        let mut vcpu = writer.get();
        write(&mut vcpu, memory, 2);
    });
    let mut worker = worker(guest);
    let _ = Pager::new(&mut worker).reclaim(1);
    thread.join().unwrap();
    assert_eq!(content(&mut worker), 2);
}

/// Sends the page away, and reads it: it is then in memory, with a copy in swap.
fn back_with_a_copy(vcpu: &mut TheVcpu) {
    // The first look finds it used.
    while Pager::new(vcpu.worker()).reclaim(1).is_err() {}
    loop {
        match vcpu.fault(Gpa(0), Access::Read) {
            Outcome::Retry(_) => {
                Pager::new(vcpu.worker()).bring_in(Hva(HOST), Access::Read).unwrap();
            }
            _ => return,
        }
    }
}

#[test]
fn a_write_while_its_page_leaves_is_not_lost() {
    bounded("write || reclaim", 3, || leaves_while_written(|_| {}));
    bounded("first write since it came back || reclaim", 3, || {
        leaves_while_written(back_with_a_copy);
    });
}

/// Between the backing's answer and the leaf's new right the page may leave, and come back to be
/// mapped by the same value.
#[test]
fn a_first_write_while_its_page_leaves_and_returns_is_kept() {
    bounded("first write || leaves, is read", 2, || {
        let (guest, memory) = guest();
        let mut writer = vcpu(guest, 0);
        let mut reader = vcpu(guest, 1);
        write(&mut writer, memory, 1);
        back_with_a_copy(&mut writer);
        // So that the first look finds it idle.
        let range = GpaRange::new(Gpa(0), PAGE).unwrap();
        let how =
            AgeOptions { clear: true, table_bits: slat::TableBits::Ignored, flush_tlb: false };
        writer.worker().age(range, None, &mut [0], how).unwrap();
        let writer = SendCell(writer);
        let thread = spawn(move || {
            let mut vcpu = writer.get();
            write(&mut vcpu, memory, 2);
        });
        if Pager::new(reader.worker()).reclaim(1).is_ok() {
            let _ = Pager::new(reader.worker()).bring_in(Hva(HOST), Access::Read);
            reader.fault(Gpa(0), Access::Read);
        }
        thread.join().unwrap();
        // A stale copy would be taken for a valid one here.
        (0..3).any(|_| Pager::new(reader.worker()).reclaim(1).is_ok());
        assert_eq!(content(reader.worker()), 2);
    });
}

/// A page comes back with a copy, while another thread notes arrivals. Then another page leaves,
/// and the guest may have no more slots: it gets that of the copy.
#[test]
fn the_slot_of_a_copy_is_found_once_its_page_has_come_back() {
    bounded("read of a page that is away || reclaim", 3, || {
        let (guest, memory) = guest();
        let mut first = vcpu(guest, 0);
        write(&mut first, memory, 1);
        while Pager::new(first.worker()).reclaim(1).is_err() {}
        Pager::new(first.worker()).bring_in(Hva(HOST + PAGE), Access::Write).unwrap();
        first.fault(Gpa(PAGE), Access::Write);
        let second = SendCell(vcpu(guest, 1));
        let thread = spawn(move || {
            let mut vcpu = second.get();
            Pager::new(vcpu.worker()).bring_in(Hva(HOST), Access::Read).unwrap();
            vcpu.fault(Gpa(0), Access::Read);
        });
        let _ = Pager::new(first.worker()).reclaim(1);
        thread.join().unwrap();
        let paged = guest.backing();
        let Places { here: 1, copied: 1, .. } = paged.places() else { return };
        paged.set_swap(1);
        // The page that came back is in use, and the other is not.
        let left = (0..3).any(|_| {
            first.fault(Gpa(0), Access::Read);
            Pager::new(first.worker()).reclaim(1).is_ok()
        });
        assert!(left, "{:?}", paged.places());
    });
}

#[test]
fn two_vcpus_bring_a_page_in_once() {
    bounded("write || read of a page that is away", 3, || {
        let (guest, memory) = guest();
        let mut first = vcpu(guest, 0);
        write(&mut first, memory, 1);
        while Pager::new(first.worker()).reclaim(1).is_err() {}
        let second = SendCell(vcpu(guest, 1));
        let thread = spawn(move || {
            let mut vcpu = second.get();
            Pager::new(vcpu.worker()).bring_in(Hva(HOST), Access::Read).unwrap();
        });
        write(&mut first, memory, 2);
        thread.join().unwrap();
        assert_eq!(content(first.worker()), 2);
        assert_eq!(guest.backing().pool().free() + guest.backing().resident(), 2);
    });
}

#[test]
fn a_copy_made_while_its_page_leaves_has_the_pages_content() {
    bounded("copy || reclaim", 3, || {
        let (guest, memory) = guest();
        let mut writer = vcpu(guest, 0);
        write(&mut writer, memory, 1);
        let sender = SendCell(worker(guest));
        let thread = spawn(move || assert_eq!(content(&mut sender.get()), 1));
        let _ = Pager::new(writer.worker()).reclaim(1);
        thread.join().unwrap();
    });
}

/// A page arrives twice while the holder of the order notes arrivals: it is noted after its last
/// arrival.
#[test]
fn a_page_that_came_is_noted_after_it_came() {
    use slat::sync::{AtomicU64, Ordering};
    bounded("arrive || arrive || note", 3, || {
        let arrivals: &'static arrivals::Arrivals = Box::leak(Box::new(arrivals::Arrivals::new(2)));
        let came: &'static [AtomicU64; 2] = Box::leak(Box::new([0, 0].map(AtomicU64::new)));
        let noted: &'static Mutex<[u64; 2]> = Box::leak(Box::new(Mutex::new([0; 2])));
        let come = |page: u32| {
            came[page as usize].fetch_add(1, Ordering::SeqCst);
            arrivals.push(page, None);
        };
        let note = || {
            let mut noted = noted.lock().unwrap();
            arrivals.take(|page, _| {
                noted[page as usize] = came[page as usize].load(Ordering::SeqCst);
            });
        };
        let first = spawn(move || [0, 1].into_iter().for_each(come));
        let second = spawn(move || come(0));
        note();
        first.join().unwrap();
        second.join().unwrap();
        note();
        let all = came.each_ref().map(|came| came.load(Ordering::SeqCst));
        assert_eq!(*noted.lock().unwrap(), all);
    });
}

/// A device uses a page that arrived after a long time away, and was not noted yet: it is noted as
/// used, at any interleaving with the thread that notes it.
#[test]
fn a_devices_use_is_noted_beside_another_threads_arrivals() {
    bounded("came || use || note", 3, || {
        let arrivals: &'static arrivals::Arrivals = Box::leak(Box::new(arrivals::Arrivals::new(2)));
        let noted: &'static Mutex<[u32; 2]> = Box::leak(Box::new(Mutex::new([u32::MAX; 2])));
        let note = || {
            arrivals.take(|page, distance| {
                let least = &mut noted.lock().unwrap()[page as usize];
                *least = distance.unwrap().min(*least);
            });
        };
        let came = spawn(move || {
            arrivals.push(0, Some(9));
            arrivals.push(1, Some(7));
        });
        let uses = spawn(move || arrivals.push(0, Some(0)));
        note();
        came.join().unwrap();
        uses.join().unwrap();
        note();
        assert_eq!(*noted.lock().unwrap(), [0, 7]);
    });
}
