//! A scan that only tests, beside an exact scan of another thread, after a hint. The threads stop
//! where the test wants them to.

use slat::format::ept::Ept1G;
use slat::{
    AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, Format, Frame, Gpa, GpaRange, Hpa,
    Invalidation, PageSize, Platform, Pte, Reader, ReaderSlot, Readers, TableBits, TableCache,
    Tables, Vmid,
};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

const M: u64 = 1 << 20;
const CLEAN: Attributes = Attributes { accessed: false, dirty: false, ..Attributes::RAM };

/// The part of a thread.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    None,
    /// Notes which table it enters last.
    Looks,
    /// Only tests: stops in the table at 4m.
    Tests,
    /// Clears: stops in the first table behind its invalidation.
    Clears,
}

thread_local!(static ROLE: Cell<Role> = const { Cell::new(Role::None) });

/// A place where one thread says that it is there, and waits until it may go on.
struct Stop {
    there: Mutex<Option<Sender<()>>>,
    on: Mutex<Receiver<()>>,
}

impl Stop {
    /// Returns the place, and the other thread's ends of it.
    fn new() -> (Self, Receiver<()>, Sender<()>) {
        let ((there, seen), (go, on)) = (channel(), channel());
        (Self { there: Mutex::new(Some(there)), on: Mutex::new(on) }, seen, go)
    }

    /// Stops the first time that a thread comes here.
    fn pass(&self) {
        if let Some(there) = self.there.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The other thread may have failed.
            let _ = there.send(());
            let _ = self.on.lock().unwrap_or_else(PoisonError::into_inner).recv();
        }
    }
}

/// Heap frames, which are never given back.
struct Staged {
    readers: Readers<[ReaderSlot; 2]>,
    last: AtomicU64,
    at_4m: AtomicU64,
    invalidated: AtomicU64,
    tests: Stop,
    clears: Stop,
}

// SAFETY: heap frames, never given back, which no CPU walks.
unsafe impl Platform for Staged {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let layout = std::alloc::Layout::from_size_align(bytes, bytes).unwrap();
        // SAFETY: the size is not zero; the frame is this allocation.
        unsafe { Frame::from_hpa(Hpa(std::alloc::alloc_zeroed(layout) as u64)) }
    }

    unsafe fn free(&self, _: Frame, _: usize) {}

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        match ROLE.get() {
            Role::Looks => self.last.store(table.0, SeqCst),
            Role::Tests if table.0 == self.at_4m.load(SeqCst) => self.tests.pass(),
            Role::Clears if self.invalidated.load(SeqCst) != 0 => self.clears.pass(),
            _ => {}
        }
        NonNull::new(table.0 as *mut Pte).unwrap()
    }

    fn publish(&self) {}

    fn invalidate(&self, _: &Invalidation) {
        if ROLE.get() == Role::Clears {
            self.invalidated.store(1, SeqCst);
        }
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}

#[test]
fn an_exact_test_finds_a_page_that_a_hint_hid() {
    let (tests, tester_stands, tester_goes) = Stop::new();
    let (clears, clearer_stands, clearer_goes) = Stop::new();
    let platform: &'static _ = Box::leak(Box::new(Staged {
        readers: Readers::new([const { ReaderSlot::new() }; 2]),
        last: 0.into(),
        at_4m: 0.into(),
        invalidated: 0.into(),
        tests,
        clears,
    }));
    let format = Ept1G { output_bits: 48, ..Default::default() };
    let tables = Tables::new(format, Vmid(1), 24, platform).unwrap();
    let all = GpaRange::new(Gpa(0), 16 * M).unwrap();
    let mut one = Reader::register(platform).unwrap();
    let mut two = Reader::register(platform).unwrap();
    let scan = |reader: &mut Reader<'static, Staged>, clear, skip| {
        let (mut young, mut unanswered) = ([0; 64], [0; 64]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let how = AgeOptions { clear, table_bits: skip, flush_tlb: false };
        tables.enter(reader).unwrap().age(all, &mut ages, how).unwrap();
        [512, 1025].map(|page: usize| young[page / 64] >> (page % 64) & 1 == 1)
    };
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(platform, &mut storage);
    cache.fill(8).unwrap();
    let mut map = |reader: &mut Reader<'static, Staged>, at, attributes| {
        let page = GpaRange::new(Gpa(at), 4096).unwrap();
        let mut guard = tables.enter(reader).unwrap();
        guard.map(page, Hpa(0), attributes, PageSize::SIZE_4K, &mut cache).unwrap();
        ROLE.set(Role::Looks);
        assert!(guard.translate(Gpa(at)).unwrap().is_some());
        ROLE.set(Role::None);
        platform.last.load(SeqCst)
    };
    let at_2m = map(&mut one, 2 * M, CLEAN);
    platform.at_4m.store(map(&mut one, 4 * M, CLEAN), SeqCst);
    // The hint clears the marks of both tables, whose links a walk cache still holds.
    scan(&mut one, true, TableBits::Hint);
    // The guest uses the page at 2m through that walk cache: hardware marks the leaf alone.
    // SAFETY: the first entry of the table at 2m, which stays allocated.
    unsafe { &*(at_2m as *const AtomicU64) }.fetch_or(Ept1G::ACCESSED, SeqCst);
    // It uses another page, whose table is marked.
    map(&mut one, 4 * M + 4096, Attributes { accessed: true, ..CLEAN });
    let (tested, cleared) = std::thread::scope(|scope| {
        let scan = &scan;
        let tester = scope.spawn(move || {
            ROLE.set(Role::Tests);
            scan(&mut one, false, TableBits::Exact)
        });
        // The tester has passed the table at 2m by, and stands in that at 4m.
        tester_stands.recv().unwrap();
        let clearer = scope.spawn(move || {
            ROLE.set(Role::Clears);
            scan(&mut two, true, TableBits::Exact)
        });
        // The clearer has noted all tables, and has read no leaf.
        clearer_stands.recv().unwrap();
        tester_goes.send(()).unwrap();
        let tested = tester.join().unwrap();
        clearer_goes.send(()).unwrap();
        (tested, clearer.join().unwrap())
    });
    assert_eq!(tested, [true; 2], "nobody had cleared them");
    assert_eq!(cleared, [true; 2]);
}
