//! The engine beside the flat model: each operation is done to both, predicted, and compared by the
//! independent walker and the lazy TLB.

use super::flat::Flat;
use super::hardware::{Access, Regime, Run, Tree};
use super::machine::Machine;
use super::{Event, TestPlatform};
use slat::format::arm64::Arm64;
use slat::{
    Attributes, BreakBeforeMake, ChangeError, Done, Execute, Gpa, GpaRange, Hpa, MapError,
    PageSize, RangeError, Removed, SplitError, SplitWalk, Stopped, TableCache, Tables, Vmid,
};
use std::cell::RefCell;
use std::rc::Rc;

pub const VMID: Vmid = Vmid(0x1234);

pub struct World<'p, const G: u32> {
    pub platform: &'p TestPlatform,
    pub tables: Tables<'p, Arm64<G>, TestPlatform>,
    pub regime: Regime,
    bbm: BreakBeforeMake,
    flat: Rc<RefCell<Flat>>,
    /// Tables unlinked and not reclaimed yet.
    retired: usize,
}

/// What to map.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    pub hpa: u64,
    pub attributes: Attributes,
    pub largest: PageSize,
}

/// Sizes of leaves, largest first.
pub fn sizes(granule: u32) -> Vec<u64> {
    let levels = if granule == 12 { 3 } else { 2 };
    (0..levels).rev().map(|level| 1 << (granule + level * (granule - 3))).collect()
}

fn floor(at: u64, size: u64) -> u64 {
    at & !(size - 1)
}

fn same_but_state(a: Attributes, b: Attributes) -> bool {
    Attributes { accessed: b.accessed, dirty: b.dirty, ..a } == b
}

impl<'p, const G: u32> World<'p, G> {
    pub fn new(
        platform: &'p TestPlatform,
        bbm: BreakBeforeMake,
        format: Arm64<G>,
        bits: u32,
    ) -> Self {
        let tables = Tables::new(format, VMID, bits, platform).unwrap();
        let regime = Regime::of(&tables, format.forced_write_back);
        *platform.machine.borrow_mut() = Some(Machine::new(regime, VMID));
        Self { platform, tables, regime, bbm, flat: Rc::default(), retired: 0 }
    }

    pub fn tree(&self) -> Tree {
        self.regime.tree(self.platform)
    }

    pub fn cache<'a>(
        &self,
        storage: &'a mut [Option<slat::Frame>],
        frames: usize,
    ) -> TableCache<'a, Arm64<G>, TestPlatform>
    where
        'p: 'a,
    {
        let mut cache = TableCache::new(self.platform, storage);
        cache.fill(frames).unwrap();
        cache
    }

    /// While the engine builds tables, hardware uses these addresses, one at each fill.
    pub fn meanwhile(&self, accesses: Vec<(u64, bool)>) {
        let (flat, regime, mut accesses) = (self.flat.clone(), self.regime, accesses.into_iter());
        self.platform.meanwhile(Some(Box::new(move |platform| {
            if let Some((gpa, write)) = accesses.next() {
                access(&regime, platform, &flat, gpa, write);
            }
        })));
    }

    pub fn access(&self, gpa: u64, write: bool) {
        access(&self.regime, self.platform, &self.flat, gpa, write);
    }

    fn range_errors(&self, range: &GpaRange) -> Vec<RangeError> {
        let (start, end, bits) = (range.start().0, range.end().0, self.regime.address_bits);
        let mut errors = Vec::new();
        if !start.is_multiple_of(1 << G) || !end.is_multiple_of(1 << G) {
            errors.push(RangeError::Unaligned { range: *range, page: 1 << G });
        }
        if end > 1 << bits {
            errors.push(RangeError::BeyondAddressSize { end: Gpa(end), bits });
        }
        errors
    }

    fn leaf_size_error(&self, size: PageSize) -> Option<(PageSize, PageSize)> {
        let all = sizes(G);
        let of = |bytes: u64| PageSize::from_bytes(bytes).unwrap();
        (!all.contains(&size.bytes())).then(|| (of(all[all.len() - 1]), of(all[0])))
    }

    /// A refusal: at the start of the range, nothing done, nothing changed, nothing called.
    fn refused<E: PartialEq + std::fmt::Debug>(
        &self,
        before: &Tree,
        range: &GpaRange,
        result: Result<Done, Stopped<E>>,
        at: u64,
        legal: &[E],
    ) {
        let Err(stopped) = result else { panic!("{range} was accepted, not refused: {legal:?}") };
        assert!(legal.contains(&stopped.why), "{:?} is not of {legal:?}", stopped.why);
        assert_eq!(stopped.at, Gpa(at));
        // A look may have cost a read.
        let slots_read = stopped.done.counts.slots_read;
        let mut nothing = Done::nothing(VMID);
        nothing.counts.slots_read = slots_read;
        assert_eq!(stopped.done, nothing);
        assert_eq!(self.tree().runs, before.runs);
        assert_eq!(self.tree().tables, before.tables);
        let quiet = self.platform.take_events().iter().all(|event| *event == Event::Publish);
        assert!(quiet, "an invalidation for nothing");
    }

    /// What holds after every operation, and once its shootdown has completed.
    fn settle(&mut self, done: Done) -> Tree {
        let tree = self.tree();
        assert_eq!(tree.markers, 0, "a slot was left frozen");
        self.machine(|machine| machine.check_conflicts(&tree, self.bbm));
        let _proof = done.shootdown.complete(self.platform);
        self.machine(|machine| machine.check_fresh(&tree));
        assert_eq!(Flat::of(&tree, &self.regime), self.flat.borrow().merged());
        assert_eq!(self.platform.live(), 1 + tree.tables.len() + self.retired, "frames");
        self.platform.take_events();
        tree
    }

    fn machine<R>(&self, use_it: impl FnOnce(&mut Machine) -> R) -> R {
        use_it(self.platform.machine.borrow_mut().as_mut().unwrap())
    }

    pub fn begin(&self) -> Tree {
        self.platform.observe();
        self.platform.take_events();
        self.tree()
    }

    /// Maps; returns where it stopped if the cache ran dry.
    pub fn map(&mut self, range: GpaRange, what: Mapping, frames: usize) -> Option<u64> {
        let before = self.begin();
        let mut storage: Vec<_> = std::iter::repeat_with(|| None).take(frames).collect();
        let mut cache = self.cache(&mut storage, frames);
        let Mapping { hpa, attributes, largest } = what;
        let result = self.tables.map(range, Hpa(hpa), attributes, largest, &mut cache);
        let left = cache.len();
        drop(cache);

        let (start, end) = (range.start().0, range.end().0);
        let mut legal: Vec<_> =
            self.range_errors(&range).into_iter().map(MapError::Range).collect();
        let page = PageSize::from_bytes(1 << G).unwrap();
        if !hpa.is_multiple_of(1 << G)
            || hpa.checked_add(range.size()).is_none_or(|end| end > 1 << 48)
        {
            legal.push(MapError::HostAddress { hpa: Hpa(hpa), page, bits: 48 });
        }
        if let Some((smallest, most)) = self.leaf_size_error(largest) {
            legal.push(MapError::LeafSize { size: largest, smallest, largest: most });
        }
        let format = self.tables.format();
        if attributes.write && !attributes.dirty && !format.hardware_dirty {
            legal.push(MapError::Attributes(slat::format::AttributeError::CleanNeedsHardwareDirty));
        }
        if matches!(attributes.execute, Execute::User | Execute::Kernel) && !format.split_execute {
            legal.push(MapError::Attributes(slat::format::AttributeError::ExecuteNeedsSplitRights));
        }
        if !legal.is_empty() {
            self.refused(&before, &range, result, start, &legal);
            return None;
        }
        let conflict = before.within(start, end).find(|run| {
            let there = self.regime.attributes(&run.leaf);
            run.leaf.oa != hpa + (run.start - start) || !same_but_state(there, attributes)
        });
        if let Some(run) = conflict {
            let into = run.start - floor(run.start, run.size);
            let size = PageSize::from_bytes(run.size).unwrap();
            let why = MapError::Occupied { size, hpa: Hpa(run.leaf.oa - into) };
            let before = Tree { runs: self.tree().runs, ..before };
            self.refused(&before, &range, result, run.start, &[why]);
            return None;
        }

        let (done, stopped) = match result {
            Ok(done) => (done, None),
            Err(Stopped { at, why, done }) => {
                assert_eq!((why, left), (MapError::CacheEmpty, 0));
                assert!(start <= at.0 && at.0 < end && before.at(at.0).is_none(), "{at}");
                (done, Some(at.0))
            }
        };
        let reached = stopped.unwrap_or(end);
        self.flat.borrow_mut().map(start, reached, hpa, attributes);
        let new: u64 = reached
            - start
            - before.within(start, reached).map(|run| run.end - run.start).sum::<u64>();
        assert_eq!(done.bytes, new, "bytes mapped");
        assert_eq!(done.shootdown.owed(), None, "nothing invalid is cached");
        assert_eq!(self.platform.events.borrow().last(), Some(&Event::Publish));
        let built = done.counts.tables_built as usize;
        let tree = self.settle(done);
        assert_eq!(tree.tables.len() - before.tables.len(), built);
        assert_eq!(built + left, frames);
        self.check_largest(&before, &tree, (start, end), what, stopped);
        stopped
    }

    /// New leaves are the largest that the range, alignment, `largest` and the tables that were
    /// there already allow.
    fn check_largest(
        &self,
        before: &Tree,
        tree: &Tree,
        (start, end): (u64, u64),
        what: Mapping,
        stopped: Option<u64>,
    ) {
        for run in tree.within(start, stopped.unwrap_or(end)) {
            let new = before.at(run.start).is_none();
            assert!(!new || run.size <= what.largest.bytes(), "{run:x?} is too large");
            let Some(&larger) = sizes(G).iter().rev().find(|&&size| size > run.size) else {
                continue;
            };
            if !new || larger > what.largest.bytes() || larger > 1 << self.root_shift() {
                continue;
            }
            for base in (floor(run.start, larger)..run.end).step_by(larger as usize) {
                let inside = base >= start && base + larger <= end;
                let aligned =
                    (what.hpa.wrapping_sub(start).wrapping_add(base)).is_multiple_of(larger);
                let empty = before.within(base, base + larger).next().is_none()
                    && !before.has_table(base, larger);
                assert!(
                    !(inside && aligned && empty && tree.at(base).is_some_and(|r| r.size < larger)),
                    "{run:x?} could be of {larger:#x}"
                );
            }
        }
    }

    fn root_shift(&self) -> u32 {
        self.regime.shift(self.regime.start_level)
    }

    /// Splits; returns where it stopped if the cache ran dry.
    pub fn split<W: SplitWalk>(
        &mut self,
        range: GpaRange,
        to: PageSize,
        frames: usize,
    ) -> Option<u64> {
        let before = self.begin();
        let mut storage: Vec<_> = std::iter::repeat_with(|| None).take(frames).collect();
        let mut cache = self.cache(&mut storage, frames);
        let result = self.tables.split_by::<W>(range, to, &mut cache);
        let left = cache.len();
        drop(cache);

        let (start, end) = (range.start().0, range.end().0);
        let mut legal: Vec<_> =
            self.range_errors(&range).into_iter().map(SplitError::Range).collect();
        if let Some((smallest, largest)) = self.leaf_size_error(to) {
            legal.push(SplitError::LeafSize { size: to, smallest, largest });
        }
        if !legal.is_empty() {
            self.refused(&before, &range, result, start, &legal);
            return None;
        }
        let (done, stopped) = match result {
            Ok(done) => (done, None),
            Err(Stopped { at, why, done }) => {
                assert_eq!((why, left), (SplitError::CacheEmpty, 0));
                assert!(start <= at.0 && at.0 < end, "{at}");
                (done, Some(at.0))
            }
        };
        let events = self.platform.take_events();
        let invalidations =
            events.iter().filter(|event| matches!(event, Event::Invalidate(_))).count();
        assert_eq!(done.counts.invalidations, invalidations as u64);
        if self.bbm == BreakBeforeMake::Always {
            assert_eq!(done.shootdown.owed(), None, "completed inside");
            assert!(done.bytes == 0 || events.last() == Some(&Event::Publish), "new tables unseen");
        } else {
            assert_eq!((invalidations, done.shootdown.owed().is_some()), (0, done.bytes != 0));
        }
        let bytes = done.bytes;
        let tree = self.settle(done);
        assert_eq!(before.tables.len() + frames - left, tree.tables.len(), "frames taken");

        let mut split = 0;
        for run in before.runs.iter().filter(|run| run.size > to.bytes()) {
            for base in (run.start..run.end).step_by(run.size as usize) {
                split += if tree.at(base).unwrap().size == run.size { 0 } else { run.size };
            }
        }
        assert_eq!(bytes, split, "bytes split");
        for run in &tree.runs {
            for at in [run.start, run.end - run.size] {
                let old = before.at(at).unwrap().size;
                let wanted = split_size::<G>(old, at, (start, end), to.bytes());
                match stopped {
                    Some(stopped) if at + run.size > stopped => {
                        assert!(wanted <= run.size && run.size <= old, "{run:x?}, was {old:#x}");
                    }
                    _ => assert_eq!(run.size, wanted, "{run:x?}, was {old:#x}"),
                }
            }
        }
        if let Some(at) = stopped {
            assert!(tree.at(at).unwrap().size > to.bytes(), "{at:#x} is split already");
        }
        stopped
    }

    /// The block that an end of the range cuts.
    fn cuts(&self, before: &Tree, range: &GpaRange) -> Vec<PageSize> {
        let edges = [range.start().0, range.end().0].into_iter();
        let cut = |edge: u64| before.at(edge).filter(|run| !edge.is_multiple_of(run.size));
        edges.filter_map(cut).map(|run| PageSize::from_bytes(run.size).unwrap()).collect()
    }

    /// The errors that an operation on the leaves of a range may answer, before it does anything.
    fn change_errors(&self, before: &Tree, range: &GpaRange, whole: bool) -> Vec<ChangeError> {
        let mut legal: Vec<_> =
            self.range_errors(range).into_iter().map(ChangeError::Range).collect();
        if legal.is_empty() && whole {
            let cut = self.cuts(before, range).into_iter();
            legal.extend(cut.map(|size| ChangeError::CutsBlock { size }));
        }
        legal
    }

    pub fn unmap(&mut self, range: GpaRange) {
        let before = self.begin();
        let mut removed: Vec<Removed> = Vec::new();
        let result = self.tables.unmap(range, |leaf| removed.push(leaf));
        let (start, end) = (range.start().0, range.end().0);
        let legal = self.change_errors(&before, &range, true);
        if !legal.is_empty() {
            assert_eq!(removed, []);
            self.refused(&before, &range, result, start, &legal);
            return;
        }
        let done = result.unwrap();
        self.flat.borrow_mut().unmap(start, end);
        let mut expected = before.within(start, end).flat_map(|run| {
            let attributes = self.regime.attributes(&run.leaf);
            let size = PageSize::from_bytes(run.size).unwrap();
            (run.start..run.end).step_by(run.size as usize).map(move |gpa| Removed {
                gpa: Gpa(gpa),
                size,
                hpa: Hpa(run.oa(gpa)),
                attributes,
            })
        });
        assert!(removed.iter().all(|leaf| expected.next() == Some(*leaf)), "removed, in order");
        assert_eq!(expected.next(), None, "all of them");
        assert_eq!(done.bytes, removed.iter().map(|leaf| leaf.size.bytes()).sum::<u64>());
        let inside =
            before.tables.values().filter(|table| start <= table.0 && table.1 <= end).count();
        self.retired += inside;
        let owed = done.shootdown.owed();
        assert_eq!(owed.is_some_and(|owed| owed.tables), inside != 0, "walk caches");
        assert_eq!(owed.is_some(), !removed.is_empty() || inside != 0);
        let tree = self.settle(done);
        assert_eq!(tree.tables.len(), before.tables.len() - inside, "tables left");
    }

    pub fn write_protect(&mut self, range: GpaRange) {
        let before = self.begin();
        let result = self.tables.write_protect(range);
        let (start, end) = (range.start().0, range.end().0);
        let legal = self.change_errors(&before, &range, true);
        if !legal.is_empty() {
            self.refused(&before, &range, result, start, &legal);
            return;
        }
        let done = result.unwrap();
        let mut bytes = 0;
        for (at, piece) in self.flat.borrow_mut().within(start, end) {
            bytes += if piece.attributes.write { piece.end - at } else { 0 };
            piece.attributes.write = false;
        }
        assert_eq!(done.bytes, bytes, "bytes protected");
        assert_eq!(done.shootdown.owed().is_some(), bytes != 0);
        let tree = self.settle(done);
        let shape = |tree: &Tree| tree.runs.iter().map(|r| (r.end - r.start) / r.size).sum::<u64>();
        assert_eq!((shape(&tree), tree.tables), (shape(&before), before.tables), "sizes");
    }

    pub fn relax(&mut self, range: GpaRange, write: bool) {
        let before = self.begin();
        let access = if write { slat::Access::Write } else { slat::Access::Read };
        let result = self.tables.relax(range, access);
        let (start, end) = (range.start().0, range.end().0);
        let legal = self.change_errors(&before, &range, write);
        if !legal.is_empty() {
            self.refused(&before, &range, result, start, &legal);
            return;
        }
        let done = result.unwrap();
        // A leaf that the range cuts is relaxed whole.
        let first = before.at(start).map_or(start, |run| floor(start, run.size));
        let last = before.at(end - 1).map_or(end, |run| floor(end - 1, run.size) + run.size);
        let mut rights = false;
        for (_, piece) in self.flat.borrow_mut().within(first, last) {
            piece.attributes.accessed = true;
            if write {
                // A leaf that hardware may mark is not stale when it is marked beforehand, but
                // owed all the same: its rights are one bit.
                rights |= !piece.attributes.write || !piece.attributes.dirty;
                piece.attributes.write = true;
                piece.attributes.dirty = true;
            }
        }
        assert!(done.shootdown.owed().is_some() || !rights, "rights that changed are owed");
        assert!(write || done.shootdown.owed().is_none(), "an access owes nothing");
        let tree = self.settle(done);
        assert_eq!(tree.tables, before.tables, "tables");
    }

    pub fn translate(&self, gpa: u64) {
        let found = self.tables.translate(Gpa(gpa)).unwrap();
        let expected = self.flat.borrow().at(gpa);
        assert_eq!(found.map(|t| (t.hpa.0, t.attributes)), expected);
        let tree = self.tree();
        let run: Option<&Run> = tree.at(gpa);
        assert_eq!(found.map(|t| t.size.bytes()), run.map(|run| run.size));
    }

    pub fn reclaim(&mut self) {
        let before = self.begin();
        assert_eq!(self.tables.reclaim(), std::mem::take(&mut self.retired));
        self.settle(Done::nothing(VMID));
        assert_eq!(self.tree().tables, before.tables);
    }

    pub fn destroy(self) {
        self.platform.meanwhile(None);
        self.platform.observe();
        self.machine(Machine::unload);
        self.tables.destroy();
        assert_eq!(self.platform.live(), 0, "frames leaked");
    }
}

/// The size that a leaf of `old` bytes around `at` is to have after a split of `start..end`: of
/// what lies outside, the largest that a table on the path can hold.
fn split_size<const G: u32>(old: u64, at: u64, (start, end): (u64, u64), to: u64) -> u64 {
    let overlaps = |size| floor(at, size) < end && floor(at, size) + size > start;
    let allowed = |size: &u64| *size <= to || !overlaps(*size);
    if allowed(&old) {
        return old;
    }
    sizes(G).into_iter().filter(|&size| size < old).find(allowed).unwrap()
}

/// Hardware uses an address, and the model knows of it.
fn access(regime: &Regime, platform: &TestPlatform, flat: &RefCell<Flat>, gpa: u64, write: bool) {
    if gpa >> regime.address_bits != 0 {
        return;
    }
    let mut flat = flat.borrow_mut();
    let there = flat.at(gpa).map(|(_, attributes)| attributes);
    let allowed = there.is_some_and(|a| if write { a.write } else { a.read });
    match regime.access(platform, gpa, write) {
        Access::Fault => assert!(!allowed, "{gpa:#x} faults"),
        Access::Done { start, end } => {
            assert!(allowed, "{gpa:#x} does not fault");
            for (_, piece) in flat.within(start, end) {
                piece.attributes.accessed = true;
                piece.attributes.dirty |= write;
            }
        }
    }
}
