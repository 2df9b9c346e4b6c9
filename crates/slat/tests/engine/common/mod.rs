//! A machine for tests: memory that is counted, an MMU written from the manual, and a TLB that
//! drops only what an invalidation names.

// Each test target uses its own part.
#![allow(dead_code)]

pub mod beside;
pub mod flat;
#[macro_use]
pub mod formats;
pub mod hardware;
pub mod history;
pub mod machine;
pub mod space;
pub mod stage;
pub mod world;

use machine::Machine;
use slat::{
    BreakBeforeMake, Format, Frame, GpaRange, Guard, Hpa, Invalidation, Maintenance, Platform, Pte,
    Reader, ReaderSlot, Readers, Tables, UnmapEntry, UnmappedRun,
};
use std::alloc::Layout;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// The content of a frame before it is filled and after it is freed: a valid descriptor with
/// reserved bits set, so that a walk into it fails.
const POISON: u64 = 0xdead_beef_dead_beef;

/// The calls of the engine to the machine, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    Publish,
    Invalidate(Invalidation),
    Maintain { hpa: u64, bytes: u64, what: Maintenance },
}

/// The moments at which the machine runs while the engine works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// A new table is filled; the entry that it is to replace is still in use.
    Fill,
    /// An invalidation begins, and has not completed.
    Invalidating,
    /// An invalidation has completed, and has not returned to the engine yet.
    Invalidated,
    /// Memory is made coherent.
    Maintain { hpa: u64, bytes: u64 },
}

/// Gives back tables that no CPU has loaded.
pub fn destroy<F: Format>(tables: Tables<'_, F, TestPlatform>) {
    // SAFETY: no test that calls this gave the root to a machine.
    unsafe { tables.deactivate() }.destroy();
}

/// Unmaps, completes, and returns the leaves that were mapped.
pub fn unmap<F: Format>(
    guard: &mut Guard<'_, '_, F, TestPlatform>,
    range: GpaRange,
) -> Vec<UnmappedRun> {
    let mut storage = [const { UnmapEntry::EMPTY }; 64];
    let mut batch = guard.unmap_batch(&mut storage);
    guard.unmap(range, &mut batch).unwrap();
    batch.complete().collect()
}

struct Memory {
    words: NonNull<AtomicU64>,
    layout: Layout,
    live: bool,
}

impl Memory {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: allocated with that layout, initialised at once, and kept until the platform is
        // dropped.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.layout.size() / 8) }
    }

    fn poison(&self) {
        self.words()
            .iter()
            .for_each(|word| word.store(POISON, std::sync::atomic::Ordering::Relaxed));
    }
}

pub type Meanwhile = Box<dyn FnMut(&TestPlatform, Moment)>;
/// Gets the address of the table.
pub type OnEntry = Box<dyn FnMut(&TestPlatform, u64)>;

pub struct TestPlatform {
    bbm: BreakBeforeMake,
    /// Frames by address. Freed frames stay, poisoned, so that a use after free is noticed.
    memory: RefCell<BTreeMap<u64, Memory>>,
    live: Cell<usize>,
    limit: Cell<usize>,
    pub events: RefCell<Vec<Event>>,
    pub machine: RefCell<Option<Machine>>,
    meanwhile: RefCell<Option<Meanwhile>>,
    entered: RefCell<Option<OnEntry>>,
    readers: Readers<[ReaderSlot; 4]>,
}

impl TestPlatform {
    pub fn new(bbm: BreakBeforeMake) -> Self {
        Self {
            bbm,
            memory: RefCell::default(),
            live: Cell::new(0),
            limit: Cell::new(usize::MAX),
            events: RefCell::default(),
            machine: RefCell::default(),
            meanwhile: RefCell::default(),
            entered: RefCell::default(),
            readers: Readers::new([const { ReaderSlot::new() }; 4]),
        }
    }

    /// Returns the number of frames that were allocated and not given back.
    pub fn live(&self) -> usize {
        self.live.get()
    }

    /// Sets the number of frames that may be live from now on.
    pub fn limit(&self, frames: usize) {
        self.limit.set(frames);
    }

    pub fn take_events(&self) -> Vec<Event> {
        self.events.take()
    }

    /// Returns the invalidations since the events were taken.
    pub fn take_invalidations(&self) -> Vec<Invalidation> {
        world::invalidations(&self.take_events())
    }

    pub fn meanwhile(&self, hook: Option<Meanwhile>) -> Option<Meanwhile> {
        self.meanwhile.replace(hook)
    }

    /// Sets what runs whenever the engine has followed a link, and has not read the table yet: what
    /// another thread does meanwhile.
    pub fn entered(&self, hook: Option<OnEntry>) -> Option<OnEntry> {
        self.entered.replace(hook)
    }

    fn pass(&self, moment: Moment) {
        let hook = self.meanwhile.borrow_mut().take();
        if let Some(mut hook) = hook {
            hook(self, moment);
            *self.meanwhile.borrow_mut() = Some(hook);
        }
    }

    pub fn register(&self) -> Reader<'_, Self> {
        Reader::register(self).unwrap()
    }

    /// Makes the MMU look at all of the tables: from now on it may cache every valid translation.
    pub fn observe(&self) {
        if let Some(machine) = self.machine.borrow_mut().as_mut() {
            machine.observe(self, (0, u64::MAX));
        }
    }

    /// Returns memory as a table walk reads it.
    pub fn table(&self, hpa: u64, ptes: usize) -> &[AtomicU64] {
        let memory = self.memory.borrow();
        let frame = memory.get(&hpa).unwrap_or_else(|| panic!("no table at {hpa:#x}"));
        assert!(frame.live, "the table at {hpa:#x} was freed");
        let words = &frame.words()[..ptes];
        // SAFETY: the frame has its own heap memory, kept until the platform is dropped; `self` is
        // borrowed for as long as the slice.
        unsafe { std::slice::from_raw_parts(words.as_ptr(), ptes) }
    }
}

// SAFETY: frames are heap memory of the size and alignment asked for, each handed out once and kept
// mapped until the platform is dropped; `invalidate` empties the only TLB.
unsafe impl Platform for TestPlatform {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        if self.live.get() >= self.limit.get() {
            return None;
        }
        let layout = Layout::from_size_align(bytes, bytes).unwrap();
        // SAFETY: the size is not zero.
        let words = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }.cast()).unwrap();
        let frame = Memory { words, layout, live: true };
        frame.poison();
        self.live.set(self.live.get() + 1);
        let hpa = words.as_ptr() as u64;
        self.memory.borrow_mut().insert(hpa, frame);
        // SAFETY: memory of that size and alignment, which no other code has.
        unsafe { Frame::from_hpa(Hpa(hpa)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        let hpa = frame.hpa().0;
        let mut memory = self.memory.borrow_mut();
        let frame = memory.get_mut(&hpa).unwrap_or_else(|| panic!("{hpa:#x} is no frame"));
        assert!(frame.live, "{hpa:#x} was freed twice");
        assert_eq!(frame.layout.size(), bytes, "{hpa:#x} was freed with another size");
        if let Some(machine) = self.machine.borrow().as_ref() {
            machine.check_free(hpa);
        }
        frame.live = false;
        frame.poison();
        self.live.set(self.live.get() - 1);
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        let memory = self.memory.borrow();
        let frame = memory.get(&table.0).unwrap_or_else(|| panic!("no frame at {table}"));
        assert!(frame.live, "the frame at {table} is used after it was freed");
        let ptes = frame.words.cast();
        drop(memory);
        let hook = self.entered.borrow_mut().take();
        if let Some(mut hook) = hook {
            hook(self, table.0);
            *self.entered.borrow_mut() = Some(hook);
        }
        ptes
    }

    fn publish(&self) {
        self.events.borrow_mut().push(Event::Publish);
    }

    fn invalidate(&self, what: &Invalidation) {
        self.pass(Moment::Invalidating);
        self.events.borrow_mut().push(Event::Invalidate(*what));
        let range = what.range.map_or((0, u64::MAX), |range| (range.start().0, range.end().0));
        if let Some(machine) = self.machine.borrow_mut().as_mut() {
            machine.forget(what);
            // vCPUs run on: every translation that is valid at this moment is cached again.
            machine.observe(self, range);
        }
        self.pass(Moment::Invalidated);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.bbm
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }

    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        self.pass(Moment::Maintain { hpa: memory.0, bytes });
        self.events.borrow_mut().push(Event::Maintain { hpa: memory.0, bytes, what });
    }

    fn fill(&self, ptes: &mut [Pte], first: u64, step: u64) {
        let words = ptes.iter_mut().zip((0..).map(|n| first.wrapping_add(step.wrapping_mul(n))));
        words.for_each(|(pte, raw)| pte.set(raw));
        self.pass(Moment::Fill);
    }
}

impl Drop for TestPlatform {
    fn drop(&mut self) {
        for (hpa, frame) in self.memory.get_mut() {
            let poisoned =
                |word: &AtomicU64| word.load(std::sync::atomic::Ordering::Relaxed) == POISON;
            let intact = frame.live || frame.words().iter().all(poisoned);
            // SAFETY: allocated with that layout, and no code can reach it any more.
            unsafe { std::alloc::dealloc(frame.words.as_ptr().cast(), frame.layout) };
            if !std::thread::panicking() {
                assert!(intact, "the frame at {hpa:#x} was written after it was freed");
            }
        }
    }
}
