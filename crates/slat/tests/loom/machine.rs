//! The machine of the models: frames that know whether they are in use, a TLB that drops only what
//! was invalidated, and a log of uses and of reports.

use core::cell::{Cell, RefCell};
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};
use slat::*;
use std::boxed::Box;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::vec::Vec;

use crate::tlb::Tlb;

pub const PAGE: u64 = 0x1000;
pub const BLOCK: u64 = 0x2000;
pub const BIG: u64 = 0x4000;
/// Guest memory in host memory, far from the tables.
pub const MEMORY: u64 = 0x10_0000;
pub const ALWAYS: BreakBeforeMake = BreakBeforeMake::Always;
pub const NEVER: BreakBeforeMake = BreakBeforeMake::Never;

pub const RAM: Attributes = Attributes::RAM;
/// Writable, not yet written, not yet accessed: everything that hardware can set is clear.
pub const CLEAN: Attributes = Attributes { dirty: false, accessed: false, ..RAM };
/// Protected for dirty logging before it was used.
pub const PROTECTED: Attributes = Attributes { write: false, dirty: false, accessed: false, ..RAM };

/// A descriptor that no walker may follow.
const POISON: u64 = 0xdead_0000_0000 | 0b11;

struct Page {
    ptes: Box<[Pte]>,
    live: bool,
}

/// An event: a page was accessed, or made dirty, or reported as such.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub when: usize,
    pub page: u64,
    pub write: bool,
}

/// An event: software gave the right to write, or is about to.
pub struct Grant {
    pub range: Range<u64>,
    pub end: usize,
}

/// Frames, and the entries that CPUs hold of them.
pub struct World {
    bbm: BreakBeforeMake,
    readers: Readers<[ReaderSlot; 3]>,
    pages: RefCell<Vec<Page>>,
    /// Held during each access of a CPU and each invalidation, so an invalidation ends after every
    /// access that began before it.
    pub bus: loom::sync::Mutex<()>,
    /// Whether a CPU runs. If none does, an invalidation orders nothing, as locks hide missing
    /// orderings.
    pub running: Cell<bool>,
    pub loaded: Cell<Vmid>,
    pub tlb: RefCell<Tlb>,
    /// Host memory that was taken from the guest, and not mapped again.
    pub taken: RefCell<Vec<Range<u64>>>,
    /// Pages that no CPU can write to until a thread grants it.
    pub protected: RefCell<BTreeSet<u64>>,
    pub grants: RefCell<Vec<Grant>>,
    /// Counts events, so that the log is in the order in which they happened.
    clock: Cell<usize>,
    /// Uses by the guest, and leaves that software mapped as used.
    pub uses: RefCell<Vec<Event>>,
    /// State that an operation returned to its caller, or that is in the tables at the end.
    pub reports: RefCell<Vec<Event>>,
    /// Held when a grant ends, and when a protection begins: the later one sees the earlier.
    log: loom::sync::Mutex<()>,
    /// The number of frames that may still be allocated.
    pub budget: Cell<usize>,
}

impl World {
    pub fn new(bbm: BreakBeforeMake) -> &'static Self {
        Box::leak(Box::new(Self {
            bbm,
            readers: Readers::new([ReaderSlot::new(), ReaderSlot::new(), ReaderSlot::new()]),
            pages: RefCell::default(),
            bus: loom::sync::Mutex::new(()),
            running: Cell::new(false),
            loaded: Cell::new(Vmid(0)),
            tlb: RefCell::default(),
            taken: RefCell::default(),
            protected: RefCell::default(),
            grants: RefCell::default(),
            clock: Cell::new(0),
            uses: RefCell::default(),
            reports: RefCell::default(),
            log: loom::sync::Mutex::new(()),
            budget: Cell::new(usize::MAX),
        }))
    }

    /// Frames that were not given back.
    pub fn live(&self) -> usize {
        self.pages.borrow().iter().filter(|page| page.live).count()
    }

    /// The VMID that the CPU uses for the guest.
    pub fn loaded(&self) -> Vmid {
        self.loaded.get()
    }

    fn index(hpa: Hpa) -> usize {
        (hpa.0 / PAGE) as usize - 1
    }

    /// The next event.
    pub fn tick(&self) -> usize {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    /// Returns the next event, in the order of the threads that hold the log.
    pub fn tick_logged(&self) -> usize {
        let _log = self.running.get().then(|| self.log.lock().unwrap());
        self.tick()
    }

    pub fn used(&self, page: u64, write: bool) {
        self.uses.borrow_mut().push(Event { when: self.tick(), page, write });
    }

    /// Logs that a page was accessed (`write` unset), or made dirty.
    pub fn report(&self, page: u64, write: bool) {
        self.reports.borrow_mut().push(Event { when: self.tick(), page, write });
    }

    /// Checks that every use was reported after it, and every write as a write.
    pub fn account(&self) {
        let reports = self.reports.borrow();
        for used in self.uses.borrow().iter() {
            let told = |write| {
                reports
                    .iter()
                    .any(|r| (r.page, r.write) == (used.page, write) && r.when > used.when)
            };
            assert!(told(false), "lost that {:#x} was accessed", used.page);
            assert!(!used.write || told(true), "lost that {:#x} was written", used.page);
        }
    }
}

// SAFETY: pages are boxed, never moved, and not given back to the allocator before the model ends;
// the readers are a field.
unsafe impl Platform for World {
    fn allocate(&self, _bytes: usize) -> Option<Frame> {
        self.budget.set(self.budget.get().checked_sub(1)?);
        let ptes = Box::new([Pte::new(POISON), Pte::new(POISON)]);
        let mut pages = self.pages.borrow_mut();
        pages.push(Page { ptes, live: true });
        // SAFETY: a new page, of two entries, which is all that a table of these formats has.
        unsafe { Frame::from_hpa(Hpa(pages.len() as u64 * PAGE)) }
    }

    unsafe fn free(&self, frame: Frame, _bytes: usize) {
        let hpa = frame.hpa();
        assert!(!self.tlb.borrow().holds_table(hpa), "a walk cache holds a freed table");
        let page = &mut self.pages.borrow_mut()[Self::index(hpa)];
        assert!(page.live, "{hpa} was given back twice");
        page.live = false;
        // Loom fails the model if any access to these entries is not ordered before this one.
        page.ptes.iter_mut().for_each(|pte| pte.set(POISON));
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        let pages = self.pages.borrow();
        let page = pages.get(Self::index(table)).filter(|page| page.live);
        NonNull::from(&page.expect("a table that was given back").ptes[0])
    }

    fn publish(&self) {}

    fn invalidate(&self, what: &Invalidation) {
        if !self.running.get() {
            return;
        }
        let _bus = self.bus.lock().unwrap();
        self.tlb.borrow_mut().invalidate(what);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.bbm
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}

/// Explores a model, and prints how long that took.
pub fn explore(name: &str, model: impl Fn() + Send + Sync + 'static) {
    run(name, None, model);
}

/// Explores a model with at most `preemptions` preemptions in an execution.
pub fn bounded(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    run(name, Some(preemptions), model);
}

/// Returns the tighter of two bounds: `LOOM_MAX_PREEMPTIONS` can only lower a bound. It counts as
/// one less in models of three threads, since those switch more often anyway.
fn least(name: &str, asked: Option<usize>, own: Option<usize>) -> Option<usize> {
    let third = name.matches("||").count().saturating_sub(1);
    asked.map(|asked| asked.saturating_sub(third)).into_iter().chain(own).min()
}

pub fn run(name: &str, preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let executions = Arc::new(AtomicUsize::new(0));
    let count = executions.clone();
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    builder.preemption_bound = least(name, builder.preemption_bound, preemptions);
    let start = std::time::Instant::now();
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let seconds = start.elapsed().as_secs_f64();
    let bound = builder.preemption_bound.map_or("all".into(), |n| std::format!("<= {n}"));
    std::eprintln!("| {name} | {bound} | {} | {seconds:.2} |", executions.load(Ordering::Relaxed));
}

/// Bytes that were handed out, each exactly once.
pub fn bytes(removed: &[UnmappedRun]) -> u64 {
    let mut leaves: Vec<_> = removed.iter().map(|r| (r.gpa.0, r.size.bytes())).collect();
    leaves.sort();
    for pair in leaves.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "handed out twice: {leaves:x?}");
    }
    leaves.iter().map(|leaf| leaf.1).sum()
}
