//! The machine under the models: frames that know whether they are in use, a TLB that forgets only
//! what was invalidated, and the operations with their shootdowns.

use core::cell::{Cell, RefCell};
use core::ops::Range;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};
use slat::format::tiny::Tiny;
use slat::*;
use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

use crate::hardware::Tlb;

pub const PAGE: u64 = 0x1000;
pub const BLOCK: u64 = 0x2000;
pub const BIG: u64 = 0x4000;
/// Guest memory in host memory: far from the tables.
pub const MEMORY: u64 = 0x10_0000;
pub const ALWAYS: BreakBeforeMake = BreakBeforeMake::Always;
pub const NEVER: BreakBeforeMake = BreakBeforeMake::Never;

/// Writable, not yet written, not yet accessed: all that hardware can set is unset.
pub const CLEAN: Attributes = Attributes { dirty: false, accessed: false, ..Attributes::RAM };

/// A descriptor that no walker may follow.
const POISON: u64 = 0xdead_0000_0000 | 0b11;

struct Page {
    slots: Box<[Slot]>,
    live: bool,
}

/// Frames, and what the CPUs hold of them.
pub struct World {
    bbm: BreakBeforeMake,
    pages: RefCell<Vec<Page>>,
    /// Held during each access of a CPU and each invalidation: an invalidation ends when every
    /// access that began before it has ended.
    pub bus: loom::sync::Mutex<()>,
    /// Whether a CPU runs. If not, an invalidation orders nothing: locks hide missing orderings.
    pub running: Cell<bool>,
    pub tlb: RefCell<Tlb>,
    /// Host memory that was taken from the guest for good.
    pub taken: RefCell<Vec<Range<u64>>>,
    /// Guest memory that was write-protected for good.
    pub protected: RefCell<Vec<Range<u64>>>,
    /// Frames still to be had.
    pub budget: Cell<usize>,
}

impl World {
    fn live(&self) -> usize {
        self.pages.borrow().iter().filter(|page| page.live).count()
    }

    fn index(hpa: Hpa) -> usize {
        (hpa.0 / PAGE) as usize - 1
    }
}

// SAFETY: pages are boxed, never moved, and not given back to the allocator before the model ends.
unsafe impl Platform for World {
    fn allocate(&self, _bytes: usize) -> Option<Frame> {
        self.budget.set(self.budget.get().checked_sub(1)?);
        let slots = Box::new([Slot::new(POISON), Slot::new(POISON)]);
        let mut pages = self.pages.borrow_mut();
        pages.push(Page { slots, live: true });
        // SAFETY: a new page, of two slots, which is all that a table of this format has.
        unsafe { Frame::from_hpa(Hpa(pages.len() as u64 * PAGE)) }
    }

    unsafe fn free(&self, frame: Frame, _bytes: usize) {
        let hpa = frame.hpa();
        assert!(!self.tlb.borrow().holds_table(hpa), "a walk cache holds a freed table");
        let page = &mut self.pages.borrow_mut()[Self::index(hpa)];
        assert!(page.live, "{hpa} was given back twice");
        page.live = false;
        // Loom fails the model if any access to these slots is not ordered before this one.
        page.slots.iter_mut().for_each(|slot| slot.set(POISON));
    }

    fn slots(&self, table: Hpa) -> NonNull<Slot> {
        let pages = self.pages.borrow();
        let page = pages.get(Self::index(table)).filter(|page| page.live);
        NonNull::from(&page.expect("a table that was given back").slots[0])
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
}

/// Table pages for one thread.
pub struct Cache {
    pages: Option<TableCache<'static, Tiny, World>>,
    storage: *mut [Option<Frame>],
}

impl Cache {
    pub fn len(&self) -> usize {
        self.pages.as_ref().unwrap().len()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.pages = None;
        // SAFETY: from `Box::into_raw` in `Guest::cache`; its only user is gone.
        drop(unsafe { Box::from_raw(self.storage) });
    }
}

/// The part of a range that an operation did not get to, and why.
#[derive(Debug)]
#[must_use]
pub struct Rest<E> {
    pub range: Range<u64>,
    pub why: E,
}

pub type Outcome<E> = Option<Rest<E>>;

fn range(range: &Range<u64>) -> GpaRange {
    GpaRange::new(Gpa(range.start), range.end - range.start).unwrap()
}

/// What an operation left undone; and the range that it did.
fn ended<E: core::fmt::Debug>(
    world: &World,
    range: &Range<u64>,
    result: Result<Done, Stopped<E>>,
) -> (Range<u64>, Outcome<E>) {
    let (end, why, done) = match result {
        Ok(done) => (range.end, None, done),
        Err(Stopped { at, why, done }) => (at.0, Some(why), done),
    };
    assert!((range.start..=range.end).contains(&end), "stopped outside: {end:#x}");
    let _ = done.shootdown.complete(world);
    (range.start..end, why.map(|why| Rest { range: end..range.end, why }))
}

/// One guest of one execution. Copied into its threads.
#[derive(Clone, Copy)]
pub struct Guest {
    pub world: &'static World,
    tables: *mut Tables<'static, Tiny, World>,
}

impl Guest {
    /// `bits` as for [`Tiny`]: 14 for two levels, 15 for three.
    pub fn new(bits: u32, bbm: BreakBeforeMake) -> Self {
        let world: &World = Box::leak(Box::new(World {
            bbm,
            pages: RefCell::default(),
            bus: loom::sync::Mutex::new(()),
            running: Cell::new(false),
            tlb: RefCell::default(),
            taken: RefCell::default(),
            protected: RefCell::default(),
            budget: Cell::new(usize::MAX),
        }));
        let tables = Tables::new(Tiny::default(), Vmid(0), bits, world).unwrap();
        Self { world, tables: Box::into_raw(Box::new(tables)) }
    }

    /// The same with a CPU that runs the guest.
    pub fn running(self) -> Self {
        self.world.running.set(true);
        self
    }

    pub fn tables(&self) -> &'static Tables<'static, Tiny, World> {
        // SAFETY: leaked in `new`; borrowed exclusively, and freed, after all threads were joined.
        unsafe { &*self.tables }
    }

    pub fn cache(&self, pages: usize) -> Cache {
        let storage = Box::into_raw((0..8).map(|_| None).collect::<Vec<_>>().into_boxed_slice());
        // SAFETY: just leaked; reclaimed after the cache is dropped.
        let mut cache = TableCache::new(self.world, unsafe { &mut *storage });
        cache.fill(pages).unwrap();
        Cache { pages: Some(cache), storage }
    }

    /// Maps to the memory at `MEMORY + gpa`.
    pub fn map(
        &self,
        at: Range<u64>,
        attributes: Attributes,
        size: u64,
        cache: &mut Cache,
    ) -> Outcome<MapError> {
        self.map_to(MEMORY, at, attributes, size, cache)
    }

    pub fn map_to(
        &self,
        memory: u64,
        at: Range<u64>,
        attributes: Attributes,
        size: u64,
        cache: &mut Cache,
    ) -> Outcome<MapError> {
        let size = PageSize::from_bytes(size).unwrap();
        let hpa = Hpa(memory + at.start);
        let cache = cache.pages.as_mut().unwrap();
        let result = self.tables().map(range(&at), hpa, attributes, size, cache);
        ended(self.world, &at, result).1
    }

    /// Maps from the main thread, where nothing can be in the way.
    pub fn mapped(self, at: Range<u64>, attributes: Attributes, size: u64) -> Self {
        assert!(self.map(at, attributes, size, &mut self.cache(3)).is_none());
        self
    }

    pub fn split(
        &self,
        at: Range<u64>,
        to: u64,
        cache: &mut Cache,
    ) -> (Range<u64>, Outcome<SplitError>) {
        let to = PageSize::from_bytes(to).unwrap();
        let result = self.tables().split(range(&at), to, cache.pages.as_mut().unwrap());
        ended(self.world, &at, result)
    }

    /// Afterwards, no CPU can write to what was done.
    pub fn protect(&self, at: Range<u64>) -> Outcome<ChangeError> {
        let (done, rest) = ended(self.world, &at, self.tables().write_protect(range(&at)));
        self.world.protected.borrow_mut().push(done);
        rest
    }

    pub fn relax(&self, at: Range<u64>, access: slat::Access) -> Outcome<ChangeError> {
        ended(self.world, &at, self.tables().relax(range(&at), access)).1
    }

    pub fn relax_rest(&self, rest: Outcome<ChangeError>, access: slat::Access) {
        if let Some(rest) = rest {
            let rest = self.relax(rest.range, access);
            assert!(rest.is_none(), "{rest:?}");
        }
    }

    /// Afterwards, no CPU can reach the memory that was handed out.
    pub fn unmap(&self, at: Range<u64>) -> (Vec<Removed>, Outcome<ChangeError>) {
        let mut removed = Vec::new();
        let result = self.tables().unmap(range(&at), |leaf| removed.push(leaf));
        let (_, rest) = ended(self.world, &at, result);
        for leaf in &removed {
            assert_eq!(leaf.hpa.0, MEMORY + leaf.gpa.0);
            let end = leaf.hpa.0 + leaf.size.bytes();
            self.world.taken.borrow_mut().push(leaf.hpa.0..end);
        }
        (removed, rest)
    }

    /// Goes on where an unmap gave up, now that everybody else has ended.
    pub fn unmap_rest(
        &self,
        (mut removed, rest): (Vec<Removed>, Outcome<ChangeError>),
    ) -> Vec<Removed> {
        if let Some(rest) = rest {
            let (more, rest) = self.unmap(rest.range);
            assert!(rest.is_none(), "{rest:?}");
            removed.extend(more);
        }
        removed
    }

    pub fn split_rest(&self, rest: Outcome<SplitError>, to: u64, cache: &mut Cache) {
        if let Some(rest) = rest {
            let (_, rest) = self.split(rest.range, to, cache);
            assert!(rest.is_none(), "{rest:?}");
        }
    }

    pub fn protect_rest(&self, rest: Outcome<ChangeError>) {
        if let Some(rest) = rest {
            let rest = self.protect(rest.range);
            assert!(rest.is_none(), "{rest:?}");
        }
    }

    pub fn map_rest(
        &self,
        rest: Outcome<MapError>,
        attributes: Attributes,
        size: u64,
        cache: &mut Cache,
    ) {
        if let Some(rest) = rest {
            let rest = self.map(rest.range, attributes, size, cache);
            assert!(rest.is_none(), "{rest:?}");
        }
    }

    /// What stands there, when nobody holds anything any more.
    pub fn at(&self, gpa: u64) -> Option<Translation> {
        let found = self.tables().translate(Gpa(gpa)).expect("a marker was left behind");
        if let Some(found) = found {
            assert_eq!(found.hpa.0, MEMORY + gpa);
        }
        found
    }

    pub fn leaf(&self, gpa: u64) -> (u64, Attributes) {
        let found = self.at(gpa).expect("a mapping was lost");
        (found.size.bytes(), found.attributes)
    }

    /// Pages that are handed to nobody: in no cache, and not given back.
    pub fn pages(&self) -> usize {
        self.world.live()
    }

    /// As [`Guest::unmap_rest`], but leaves `beside`, which somebody else may have mapped since.
    pub fn unmap_rest_unless(
        &self,
        (mut removed, rest): (Vec<Removed>, Outcome<ChangeError>),
        beside: Range<u64>,
    ) -> Vec<Removed> {
        let Some(rest) = rest else { return removed };
        for at in rest.range.step_by(PAGE as usize).filter(|at| !beside.contains(at)) {
            removed =
                self.unmap_rest((removed, Some(Rest { range: at..at + PAGE, why: rest.why })));
        }
        removed
    }

    /// Tables linked below the root.
    pub fn linked(&self) -> usize {
        fn below(world: &World, table: Hpa, level: u8) -> usize {
            let tables = (0..2).filter_map(|index| {
                // SAFETY: a linked table of two slots.
                let raw = unsafe { world.slots(table).add(index).as_ref() }.load();
                (Tiny::kind(raw, level) == slat::format::Kind::Table && level > 0)
                    .then(|| 1 + below(world, Tiny::table_address(raw), level - 1))
            });
            tables.sum()
        }
        below(self.world, self.tables().root(), self.tables().geometry().root_level)
    }

    /// Reclaims `retired` tables, then gives everything back. All threads have been joined.
    pub fn end(self, retired: usize) {
        // SAFETY: all threads were joined, so this is the only reference.
        let mut tables = *unsafe { Box::from_raw(self.tables) };
        assert_eq!(tables.reclaim(), retired, "retired tables");
        // What is left is still whole.
        for gpa in [0, PAGE, BLOCK, BLOCK + PAGE] {
            tables.translate(Gpa(gpa)).expect("a marker was left behind");
        }
        tables.destroy();
        assert_eq!(self.world.live(), 0, "frames were lost");
        // SAFETY: leaked in `new`; the tables, and every cache, are gone.
        drop(unsafe { Box::from_raw(core::ptr::from_ref(self.world).cast_mut()) });
    }
}

/// Bytes handed out, each exactly once.
pub fn bytes(removed: &[Removed]) -> u64 {
    let mut leaves: Vec<_> = removed.iter().map(|r| (r.gpa.0, r.size.bytes())).collect();
    leaves.sort();
    for pair in leaves.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "handed out twice: {leaves:x?}");
    }
    leaves.iter().map(|leaf| leaf.1).sum()
}

/// Explores a model, and says what that took.
pub fn explore(name: &str, model: impl Fn() + Send + Sync + 'static) {
    run(name, None, model);
}

/// Explores a model with at most so many preemptions an execution.
pub fn bounded(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    run(name, Some(preemptions), model);
}

fn run(name: &str, preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let executions = Arc::new(AtomicUsize::new(0));
    let count = executions.clone();
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    builder.preemption_bound = builder.preemption_bound.or(preemptions);
    let start = std::time::Instant::now();
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let seconds = start.elapsed().as_secs_f64();
    let bound = builder.preemption_bound.map_or("all".into(), |n| std::format!("<= {n}"));
    std::eprintln!("| {name} | {bound} | {} | {seconds:.2} |", executions.load(Ordering::Relaxed));
}
