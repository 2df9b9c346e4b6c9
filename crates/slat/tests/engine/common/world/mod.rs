//! The engine compared with the flat model: each operation is done to both and predicted, and then
//! compared through the independent walker and the lazy TLB.

mod age;
mod collapse;
mod dirty;
mod links;
mod look;
mod replace_table;
mod reserve;
pub mod rights;
mod shape;

pub use age::Scan;
pub use links::{clipped, filled};
pub use reserve::{Between, Commit};
pub use rights::Rule;
pub use shape::{gaps, maintained, maintenance};

use super::flat::Flat;
use super::hardware::{Access, Hardware, Root, Run, Tree};
use super::machine::Machine;
use super::{Event, Moment, TestPlatform};
use slat::{
    Attributes, BreakBeforeMake, ChangeError, Frame, Gpa, GpaRange, Guard, Interruption,
    Invalidation, LeafDelta, LeafSizeError, MapError, OpCounts, PageSize, RangeError, Reader,
    TableCache, Tables, Vmid,
};
use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::rc::Rc;

pub const VMID: Vmid = Vmid(0x1234);

/// The invalidation that covers dropped shootdowns, or unlinked tables: all of the guest.
pub const ALL: Invalidation = Invalidation { vmid: VMID, range: None, leaf: None, tables: true };

pub type TablesOf<'p, H> = Tables<'p, <H as Hardware>::Format, TestPlatform>;
pub type GuardOf<'t, 'p, H> = Guard<'t, 'p, <H as Hardware>::Format, TestPlatform>;
pub type CacheOf<'a, H> = TableCache<'a, <H as Hardware>::Format, TestPlatform>;

pub struct World<'p, H: Hardware> {
    pub platform: &'p TestPlatform,
    pub tables: TablesOf<'p, H>,
    pub hardware: H,
    reader: Reader<'p, TestPlatform>,
    /// Another thread's reader, which is not inside.
    other: Option<Reader<'p, TestPlatform>>,
    pub bbm: BreakBeforeMake,
    pub flat: Rc<RefCell<Flat>>,
    /// Tables that were unlinked and not reclaimed yet; and those of them whose invalidation was
    /// dropped.
    pub retired: usize,
    unlinked: usize,
    /// The operation only splits, so what it owes may be dropped.
    pub splits: bool,
    /// The next operation drops what it owes.
    pub drops: bool,
    /// A shootdown was dropped: the TLB may be stale until the next thread completes.
    pending: bool,
    /// removals were dropped, too.
    removing: bool,
    /// Hardware uses the range of the next operation, which may have to begin anew.
    beside: Cell<bool>,
    /// Leaves that guards have counted as added and removed.
    sizes: LeafDelta,
    /// Leaves whose table was replaced: no guard counts them.
    replaced: Vec<Run>,
}

/// A mapping to make.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    pub hpa: u64,
    pub attributes: Attributes,
    pub largest: PageSize,
}

/// The outcome of an operation, before what it owes is completed.
pub struct Outcome<R> {
    pub result: R,
    pub counts: OpCounts,
    owed: Option<Invalidation>,
    pub events: Vec<Event>,
    pub tree: Tree,
}

pub fn floor(at: u64, size: u64) -> u64 {
    at & !(size - 1)
}

pub fn size(bytes: u64) -> PageSize {
    PageSize::from_bytes(bytes).unwrap()
}

pub fn cache<'a, H: Hardware>(
    platform: &'a TestPlatform,
    storage: &'a mut Vec<Option<Frame>>,
    frames: usize,
) -> CacheOf<'a, H> {
    storage.resize_with(frames, || None);
    let mut cache = TableCache::new(platform, storage);
    cache.fill(frames).unwrap();
    cache
}

/// Checks that the leaves that guards have counted are the leaves that are mapped.
pub fn check_sizes<H: Hardware>(tree: &Tree, sizes: LeafDelta) {
    check_sizes_of::<H>(&tree.runs, sizes);
}

fn check_sizes_of<'r, H: Hardware>(
    all: impl IntoIterator<Item = &'r Run> + Clone,
    sizes: LeafDelta,
) {
    for (level, pte) in H::sizes().into_iter().rev().enumerate() {
        let ptes = |groups: bool| -> u64 {
            let of_slots = |run: &&Run| H::entry_size(run.size) == pte;
            let runs = all.clone().into_iter().filter(of_slots);
            let runs = runs.filter(|run| (run.size != pte) == groups);
            runs.map(|run| (run.end - run.start) / pte).sum()
        };
        let counted = (sizes.leaves(level as u8), sizes.members(level as u8));
        assert_eq!(counted, (ptes(false) as i64, ptes(true) as i64), "leaves of {pte:#x}");
    }
}

fn same_but_state(a: Attributes, b: Attributes) -> bool {
    Attributes { accessed: b.accessed, dirty: b.dirty, ..a } == b
}

/// Returns the invalidation of these leaves, and of tables that cover these addresses.
fn owes(
    leaves: impl IntoIterator<Item = Run>,
    tables: &[(u64, u64)],
    bbm: BreakBeforeMake,
) -> Option<Invalidation> {
    let leaves: Vec<_> = leaves.into_iter().collect();
    let all = leaves.iter().map(|run| (run.start, run.end)).chain(tables.iter().copied());
    let (start, end) = all.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
    let range = GpaRange::new(Gpa(start), end - start).unwrap();
    let one = leaves.first().filter(|one| leaves.iter().all(|run| run.size == one.size));
    let one = one.filter(|_| tables.is_empty() && bbm == BreakBeforeMake::Always);
    Some(Invalidation {
        vmid: VMID,
        range: Some(range),
        leaf: one.map(|run| size(run.size)),
        tables: !tables.is_empty(),
    })
}

impl<'p, H: Hardware> World<'p, H> {
    pub fn new(
        platform: &'p TestPlatform,
        bbm: BreakBeforeMake,
        format: H::Format,
        bits: u32,
    ) -> Self {
        Self::adopt(platform, bbm, Tables::new(format, VMID, bits, platform).unwrap())
    }

    /// Adds tables that hold nothing.
    pub fn adopt(
        platform: &'p TestPlatform,
        bbm: BreakBeforeMake,
        tables: TablesOf<'p, H>,
    ) -> Self {
        let hardware = H::of(&tables);
        *platform.machine.borrow_mut() = Some(Machine::new(hardware, VMID));
        Self {
            platform,
            tables,
            hardware,
            reader: platform.register(),
            other: Some(platform.register()),
            bbm,
            flat: Rc::default(),
            retired: 0,
            unlinked: 0,
            splits: false,
            drops: false,
            pending: false,
            removing: false,
            beside: Cell::new(false),
            sizes: LeafDelta::NONE,
            replaced: Vec::new(),
        }
    }

    pub fn tree(&self) -> Tree {
        self.hardware.tree(self.platform)
    }

    /// Makes hardware use these addresses while the engine works: one whenever a table is filled,
    /// and one in each invalidation, either before it completes, through a walk cache, or late,
    /// when it has completed and has not returned to the engine yet.
    pub fn meanwhile(&self, accesses: Vec<(u64, bool, bool)>) {
        self.beside.set(!accesses.is_empty());
        let (flat, hardware) = (self.flat.clone(), self.hardware);
        let mut accesses = accesses.into_iter().peekable();
        self.platform.meanwhile(Some(Box::new(move |platform, moment| {
            let through = match (moment, accesses.peek()) {
                (Moment::Fill, Some(_)) => Through::Root,
                (Moment::Invalidating, Some((.., false))) => Through::Stale,
                (Moment::Invalidated, Some((.., true))) => Through::Broken,
                _ => return,
            };
            if let Some((gpa, write, _)) = accesses.next() {
                access(&hardware, platform, &flat, (gpa, write), through);
            }
        })));
    }

    /// Hardware uses an address, from the root, or from the lowest table that a walk cache holds.
    pub fn access(&self, gpa: u64, write: bool, lazily: bool) {
        let through = if lazily && !self.pending { Through::Cache } else { Through::Root };
        access(&self.hardware, self.platform, &self.flat, (gpa, write), through);
    }

    /// Makes hardware stop using addresses.
    pub fn alone(&self) {
        self.platform.meanwhile(None);
        self.beside.set(false);
    }

    fn range_errors(&self, range: &GpaRange) -> Vec<RangeError> {
        let (start, end, bits) = (range.start().0, range.end().0, self.hardware.address_bits());
        let mut errors = Vec::new();
        if !start.is_multiple_of(1 << H::PAGE) || !end.is_multiple_of(1 << H::PAGE) {
            errors.push(RangeError::Unaligned { range: *range, page: 1 << H::PAGE });
        }
        if end > 1 << bits {
            errors.push(RangeError::BeyondAddressSize { end: Gpa(end), bits });
        }
        errors
    }

    /// Returns the errors of an operation on the page at `page`, for leaves of at most `largest`.
    fn page_errors(&self, page: u64, largest: PageSize) -> Vec<MapError> {
        let (bits, mut errors) = (self.hardware.address_bits(), Vec::new());
        if page >> bits != 0 || page.checked_add(1 << H::PAGE).is_none() {
            let end = Gpa(page.wrapping_add(1 << H::PAGE));
            errors.push(MapError::Range(RangeError::BeyondAddressSize { end, bits }));
            let (start, size) = (Gpa(page), 1 << H::PAGE);
            errors.push(MapError::Range(RangeError::Overflow { start, size }));
        }
        errors.extend(self.leaf_size_error(largest).map(MapError::LeafSize));
        errors
    }

    fn leaf_size_error(&self, wanted: PageSize) -> Option<LeafSizeError> {
        let all = H::sizes();
        let (smallest, largest) = (size(all[all.len() - 1]), size(all[0]));
        let error = LeafSizeError { size: wanted, smallest, largest };
        (!all.contains(&wanted.bytes())).then_some(error)
    }

    /// Returns the block that an end of the range cuts.
    fn cuts(&self, before: &Tree, range: &GpaRange) -> Vec<PageSize> {
        let edges = [range.start().0, range.end().0].into_iter();
        let cut = |edge: u64| before.at(edge).filter(|run| !edge.is_multiple_of(run.size));
        edges.filter_map(cut).map(|run| size(run.size)).collect()
    }

    /// Returns the errors with which an operation on the leaves of a range may be refused.
    fn change_errors(&self, before: &Tree, range: &GpaRange, whole: bool) -> Vec<ChangeError> {
        let mut legal: Vec<_> =
            self.range_errors(range).into_iter().map(ChangeError::Range).collect();
        if legal.is_empty() && whole {
            let cut = self.cuts(before, range).into_iter();
            legal.extend(cut.map(|size| ChangeError::CutsBlock { size }));
        }
        legal
    }

    /// As above, for an operation that answers by bitmap.
    fn bitmap_errors(
        &self,
        before: &Tree,
        range: &GpaRange,
        whole: bool,
        given: usize,
    ) -> Vec<ChangeError> {
        let mut legal = self.change_errors(before, range, whole);
        let needed = (range.size() >> H::PAGE).div_ceil(64) as usize;
        if given < needed {
            legal.push(ChangeError::Bitmap { needed, given });
        }
        legal
    }

    /// Checks a refusal: at that address, with nothing done, changed or called.
    fn refused<R: Debug, E: PartialEq + Debug>(
        &self,
        before: &Tree,
        outcome: &Outcome<Result<R, Interruption<E>>>,
        at: u64,
        legal: &[E],
    ) {
        let stopped = match &outcome.result {
            Ok(done) => panic!("{done:?} at {at:#x}, not refused: {legal:?}"),
            Err(stopped) => stopped,
        };
        assert!(legal.contains(&stopped.reason), "{:?} is not of {legal:?}", stopped.reason);
        assert_eq!(stopped.at, Gpa(at));
        // A refusal may have read entries.
        let entries_read = outcome.counts.entries_read;
        assert_eq!(outcome.counts, OpCounts { entries_read, ..OpCounts::NONE });
        assert_eq!(outcome.owed, None);
        // A lookup in a table may mark it accessed.
        assert_eq!(outcome.tree.plain(), before.plain());
        assert_eq!(outcome.tree.shape(), before.shape());
        let quiet = outcome.events.iter().all(|event| *event == Event::Publish);
        assert!(quiet, "something was done for nothing: {:?}", outcome.events);
    }

    pub fn begin(&self) -> Tree {
        self.platform.observe();
        self.platform.take_events();
        self.tree()
    }

    /// Runs an operation in a guard; then completes or drops what it owes.
    fn run<R>(&mut self, op: impl for<'t> FnOnce(&mut GuardOf<'t, 'p, H>) -> R) -> Outcome<R> {
        let out = self.run_removing(|_, guard, _| op(guard));
        let executed = invalidations(&out.events).len() as u64;
        assert_eq!(out.counts.invalidations, executed, "invalidations inside");
        out
    }

    /// Returns whether an emptied entry is filled only after an invalidation.
    pub fn refill_breaks(&self) -> bool {
        H::REFILL_BREAKS || self.bbm == BreakBeforeMake::Always
    }

    /// As `run`, with batches, and whether they were dropped.
    pub fn run_removing<R>(
        &mut self,
        op: impl for<'t> FnOnce(&'t TablesOf<'p, H>, &mut GuardOf<'t, 'p, H>, &Cell<bool>) -> R,
    ) -> Outcome<R> {
        let dropped = Cell::new(false);
        let refill_breaks = self.refill_breaks();
        let platform = self.platform;
        let mut guard = self.tables.enter(&mut self.reader).unwrap();
        assert_eq!((guard.counts(), guard.pending_invalidation()), (OpCounts::NONE, None));
        let result = op(&self.tables, &mut guard, &dropped);
        let hook = platform.meanwhile(None);
        let (counts, owed) = (guard.counts(), guard.pending_invalidation());
        self.sizes += *guard.leaf_delta();
        let events = platform.take_events();
        let tree = self.hardware.tree(platform);
        assert_eq!(tree.marks, 0, "an entry was left marked");
        let executed = invalidations(&events);
        let machine = || platform.machine.borrow_mut();
        // Where an emptied entry may be filled at any time, anything may still be cached.
        if refill_breaks || !self.pending {
            machine().as_mut().unwrap().check_conflicts(&tree, self.bbm);
        }

        if executed.contains(&ALL) {
            assert!(self.pending, "more was invalidated than was owed");
            self.pending = false;
        }
        if self.drops && (self.splits || owed.is_none()) {
            drop(guard);
            assert_eq!(platform.take_events(), []);
            self.pending |= owed.is_some() || dropped.get();
        } else if self.drops {
            // Rights or dirty state were taken: the guard completes when it is dropped.
            drop(guard);
            let expected = if self.pending { Some(ALL) } else { owed };
            assert_eq!(invalidations(&platform.take_events()), Vec::from_iter(expected));
            self.pending = false;
        } else {
            guard.invalidate();
            assert_eq!((guard.pending_invalidation(), guard.counts()), (None, counts));
            let expected = if self.pending { Some(ALL) } else { owed };
            assert_eq!(invalidations(&platform.take_events()), Vec::from_iter(expected));
            self.pending = false;
        }
        self.removing = self.pending && (self.removing || dropped.get());
        if !self.pending {
            machine().as_mut().unwrap().check_fresh(&tree);
        }
        platform.meanwhile(hook);
        Outcome { result, counts, owed, events, tree }
    }

    /// Checks what has to hold after every operation.
    pub fn settle(&mut self, tree: &Tree) {
        assert_eq!(Flat::of(tree), self.flat.borrow().merged());
        check_sizes_of::<H>(tree.runs.iter().chain(&self.replaced), self.sizes);
        let guard = self.tables.enter_mut();
        for run in tree.runs.iter().take(64) {
            for gpa in [run.start, run.end - 1] {
                let found = guard.translate(Gpa(gpa)).unwrap().unwrap();
                let (hpa, attributes) = (run.oa(gpa), run.leaf.own);
                assert_eq!((found.hpa.0, found.attributes), (hpa, attributes), "{gpa:#x}");
            }
        }
        drop(guard);
        assert_eq!(self.platform.live(), 1 + tree.tables.len() + self.retired, "frames");
        if H::TABLES_COUNT && self.hardware.records_accessed() {
            self.machine(|machine| machine.check_unmarked(tree));
        }
    }

    fn machine<R>(&self, use_it: impl FnOnce(&mut Machine) -> R) -> R {
        use_it(self.platform.machine.borrow_mut().as_mut().unwrap())
    }

    pub fn destroy(self) {
        self.platform.meanwhile(None);
        self.platform.observe();
        self.machine(Machine::unload);
        self.platform.take_events();
        // SAFETY: the machine has just unloaded the root.
        let unloaded = unsafe { self.tables.deactivate() };
        assert_eq!(self.platform.take_events(), [Event::Invalidate(ALL)]);
        unloaded.destroy();
        assert_eq!(self.platform.live(), 0, "frames leaked");
    }
}

pub fn invalidations(events: &[Event]) -> Vec<Invalidation> {
    let only = |event: &Event| match event {
        Event::Invalidate(what) => Some(*what),
        _ => None,
    };
    events.iter().filter_map(only).collect()
}

/// Returns whether the invalidation covers a leaf.
pub fn covers(what: &Invalidation, gpa: u64, size: u64) -> bool {
    what.range.is_none_or(|of| of.start().0 <= gpa && gpa + size <= of.end().0)
}

/// The table where an access begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Through {
    Root,
    /// A walk cache whose entries are all up to date.
    Cache,
    /// A walk cache that may point to an unlinked table.
    Stale,
    /// The root, while blocks may stand broken.
    Broken,
}

/// Makes hardware use an address, and updates the model.
fn access<H: Hardware>(
    hardware: &H,
    platform: &TestPlatform,
    flat: &RefCell<Flat>,
    (gpa, write): (u64, bool),
    through: Through,
) {
    if gpa >> hardware.address_bits() != 0 {
        return;
    }
    let from: Option<Root> = match through {
        Through::Cache | Through::Stale => {
            platform.machine.borrow().as_ref().unwrap().walk::<H>(gpa)
        }
        Through::Root | Through::Broken => None,
    };
    let mut flat = flat.borrow_mut();
    let there = flat.at(gpa).map(|(_, attributes)| attributes);
    let right = there.is_some_and(|a| if write { a.write } else { a.read });
    let marked = there.is_some_and(|a| !hardware.faults(&a, write));
    let broken = through == Through::Broken || through == Through::Stale;
    match hardware.access(platform, from.unwrap_or(hardware.root()), gpa, write) {
        Access::Fault => {
            assert!(!(right && marked) || broken, "{gpa:#x} faults");
        }
        Access::Done { start, end } => {
            // A collapse may have marked it together with its neighbours.
            assert!(right && (marked || broken), "{gpa:#x} does not fault");
            if hardware.records_accessed() {
                for (_, piece) in flat.within(start, end) {
                    piece.attributes.accessed = true;
                    piece.attributes.dirty |= write;
                }
            }
        }
    }
}
