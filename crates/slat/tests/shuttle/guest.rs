//! A guest's tables on the machine, and the operations on them.

use crate::hardware::{self, Use, WalkedFormat};
use crate::ledger::{ExpectedState, Ledger, PAGES, pages};
use crate::machine::{ALL, CLEAN, PAGE, World};
use slat::format::Kind;
use slat::*;

pub fn range(start: u64, end: u64) -> GpaRange {
    GpaRange::new(Gpa(start), end - start).unwrap()
}

const OWNER: Option<Owner> = Owner::new(7);

/// An operation, and how its caller goes on.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// Maps new memory, by one map, or page by page so that it may collapse.
    Map {
        at: GpaRange,
        attributes: Attributes,
        largest: u64,
        each: bool,
        fold: bool,
        frames: usize,
    },
    Unmap {
        at: GpaRange,
    },
    /// The host takes away the memory behind a page, then unmaps it.
    Evict {
        page: u64,
    },
    /// A fault: reserves, asks for the memory, commits.
    Fault {
        gpa: u64,
        largest: u64,
        fold: bool,
        frames: usize,
    },
    Protect {
        at: GpaRange,
        complete: bool,
    },
    Relax {
        at: GpaRange,
        access: Access,
        complete: bool,
    },
    Split {
        at: GpaRange,
        to: u64,
        frames: usize,
        complete: bool,
    },
    Collapse {
        at: GpaRange,
        to: u64,
    },
    Age {
        at: GpaRange,
        how: AgeOptions,
    },
    Harvest {
        at: GpaRange,
    },
    /// Gives addresses to an owner, or takes them back.
    Own {
        at: GpaRange,
        gives: bool,
        frames: usize,
    },
    /// Takes the right to write, by a leaf for new memory, or for the same with this type.
    Replace {
        at: GpaRange,
        moves: bool,
        memory: Memory,
    },
    Reclaim,
    Translate {
        gpa: u64,
    },
    /// Not an operation: the guest uses a page.
    Touch {
        gpa: u64,
        write: bool,
        held: Use,
    },
}

/// The outcome of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// It was completed, or refused for a permanent reason.
    Done,
    /// Another thread held an entry for too long.
    Contended,
}

pub struct Guest<'w, F: WalkedFormat> {
    pub world: &'w World,
    pub tables: Tables<'w, F, World>,
    traced: bool,
}

/// A reference that another thread of the model may take.
pub struct SharedRef<'a, T>(&'a T);

// SAFETY: shuttle's threads are coroutines of one thread. They switch only at accesses to shuttle's
// own atomics and locks, never while a `Cell` or `RefCell` is in use.
unsafe impl<T> Send for SharedRef<'_, T> {}

impl<'a, T> SharedRef<'a, T> {
    pub fn new(value: &'a T) -> Self {
        Self(value)
    }

    pub fn get(&self) -> &'a T {
        self.0
    }
}

fn size(bytes: u64) -> PageSize {
    PageSize::from_bytes(bytes).unwrap()
}

fn map_end<T>(result: Result<T, Interruption<MapError>>) -> End {
    match result.map_err(|stopped| stopped.reason) {
        Ok(_) | Err(MapError::Occupied { .. } | MapError::Owned { .. } | MapError::CacheEmpty) => {
            End::Done
        }
        Err(MapError::Contended) => End::Contended,
        Err(error) => panic!("{error}"),
    }
}

fn change_end<T>(result: &Result<T, Interruption<ChangeError>>) -> End {
    match result.as_ref().map_err(|stopped| stopped.reason) {
        Ok(_) | Err(ChangeError::CutsBlock { .. }) => End::Done,
        Err(ChangeError::Contended) => End::Contended,
        Err(error) => panic!("{error}"),
    }
}

fn split_end<T>(result: Result<T, Interruption<SplitError>>) -> End {
    match result.map_err(|stopped| stopped.reason) {
        Ok(_) | Err(SplitError::CacheEmpty) => End::Done,
        Err(SplitError::Contended) => End::Contended,
        Err(error) => panic!("{error}"),
    }
}

impl<'w, F: WalkedFormat> Guest<'w, F> {
    /// Makes empty tables; no CPU runs yet.
    pub fn new(world: &'w World) -> Self {
        let traced = crate::run::replay().is_some() || std::env::var_os("SLAT_TRACE").is_some();
        Self { world, tables: Tables::new(F::default(), Vmid(0), 15, world).unwrap(), traced }
    }

    /// The guest accesses `gpa` (see [`hardware::access`]).
    pub fn access(&self, gpa: u64, write: bool, held: Use) {
        let found = hardware::access(&self.tables, gpa, write, held);
        self.trace(format_args!("uses {gpa:x}, write {write}, held {held:?}: {found:x?}"));
    }

    fn ledger(&self) -> &Ledger {
        &self.world.ledger
    }

    pub fn perform(&self, reader: &mut Reader<'w, World>, op: Op) -> End {
        self.trace(format_args!("begins {op:x?}"));
        let end = self.execute(reader, op);
        self.trace(format_args!("ends {end:?}"));
        end
    }

    /// Prints what happens, if a schedule is replayed.
    pub fn trace(&self, what: core::fmt::Arguments<'_>) {
        if self.traced {
            let thread = shuttle::current::get_current_task();
            eprintln!("{:>4} {thread:?} {what}", self.world.ledger.tick());
        }
    }

    fn execute(&self, reader: &mut Reader<'w, World>, op: Op) -> End {
        match op {
            Op::Map { at, attributes, largest, each, fold, frames } => {
                self.map(reader, at, (attributes, largest), (each, fold), frames)
            }
            Op::Unmap { at } => self.unmap(reader, at).0,
            Op::Evict { page } => self.evict(reader, page),
            Op::Fault { gpa, largest, fold, frames } => {
                self.fault(reader, gpa, (largest, fold), frames)
            }
            Op::Protect { at, complete } => self.protect(reader, at, complete),
            Op::Relax { at, access, complete } => self.relax(reader, at, access, complete),
            Op::Split { at, to, frames, complete } => self.split(reader, at, to, frames, complete),
            Op::Collapse { at, to } => {
                let mut guard = self.tables.enter(reader).unwrap();
                split_end(guard.collapse(at, size(to)))
            }
            Op::Age { at, how } => self.age(reader, at, how),
            Op::Harvest { at } => self.harvest(reader, at),
            Op::Own { at, gives, frames } => self.own(reader, at, gives, frames),
            Op::Replace { at, moves, memory } => self.replace(reader, at, moves, memory),
            Op::Reclaim => {
                self.tables.reclaim();
                End::Done
            }
            Op::Translate { gpa } => {
                let guard = self.tables.enter(reader).unwrap();
                guard.translate(Gpa(gpa)).map_or(End::Contended, |_| End::Done)
            }
            Op::Touch { gpa, write, held } => {
                self.access(gpa, write, held);
                End::Done
            }
        }
    }

    fn map(
        &self,
        reader: &mut Reader<'w, World>,
        at: GpaRange,
        (attributes, largest): (Attributes, u64),
        (each, fold): (bool, bool),
        frames: usize,
    ) -> End {
        let region = self.ledger().fresh();
        let grant = self.ledger().grants(at);
        let mut cache = TableCache::filled(self.world, frames).unwrap();
        let mut guard = self.tables.enter(reader).unwrap();
        let step = if each { PAGE } else { at.size() };
        let mut end = End::Done;
        for start in (at.start().0..at.end().0).step_by(step as usize) {
            let piece = range(start, start + step);
            let hpa = Ledger::hpa(region, start);
            let result = match fold {
                true => guard.map_contiguous(piece, hpa, attributes, size(largest), &mut cache),
                false => guard.map(piece, hpa, attributes, size(largest), &mut cache),
            };
            if map_end(result) == End::Contended {
                end = End::Contended;
            }
        }
        self.ledger().granted(grant);
        self.ledger().mapped(region);
        end
    }

    /// Also returns whether no CPU and no thread can reach anything in the range that was there
    /// before.
    fn unmap(&self, reader: &mut Reader<'w, World>, at: GpaRange) -> (End, bool) {
        // Pages that it unmaps are not there to be protected, and may be written until it
        // completes.
        let begin = self.ledger().protects();
        self.ledger().takes();
        let mut storage = [const { UnmapEntry::EMPTY }; 8];
        let mut batch = UnmapBatch::new(&self.tables, &mut storage);
        let mut guard = self.tables.enter(reader).unwrap();
        let result = guard.unmap(at, &mut batch);
        // Only from here on may the memory be handed out, and is the state complete.
        let removed: Vec<_> = batch.complete().collect();
        drop(guard);
        for leaf in removed {
            let leaves = range(leaf.gpa.0, leaf.gpa.0 + leaf.bytes);
            for page in pages(leaves) {
                self.ledger().report(page, leaf.attributes.accessed, leaf.attributes.dirty);
            }
            self.ledger().handed_out(leaf.hpa, leaf.bytes, begin);
        }
        self.ledger().took();
        self.ledger().protected();
        let whole = result.is_ok();
        let end = match result.map_err(|stopped| stopped.reason) {
            Ok(_) | Err(UnmapError::CutsBlock { .. } | UnmapError::Full) => End::Done,
            Err(UnmapError::Contended) => End::Contended,
            Err(error) => panic!("{error}"),
        };
        (end, whole)
    }

    fn evict(&self, reader: &mut Reader<'w, World>, page: u64) -> End {
        let old = self.ledger().evict((page / PAGE) as usize);
        let (end, whole) = self.unmap(reader, range(page, page + PAGE));
        if whole {
            self.ledger().lose(old.0..old.0 + PAGE);
        }
        end
    }

    fn fault(
        &self,
        reader: &mut Reader<'w, World>,
        gpa: u64,
        (largest, fold): (u64, bool),
        frames: usize,
    ) -> End {
        let mut cache = TableCache::filled(self.world, frames).unwrap();
        let mut guard = self.tables.enter(reader).unwrap();
        let reserved = match fold {
            true => guard.reserve_contiguous(Gpa(gpa), size(largest), &mut cache),
            false => guard.reserve(Gpa(gpa), size(largest), &mut cache),
        };
        let reservation = match reserved {
            Ok(reservation) => reservation,
            Err(error) => return map_end::<()>(Err(error)),
        };
        let at = reservation.range();
        // The host answers late, by its state at that time.
        let Some(region) = self.ledger().backing(pages(at)) else { return End::Done };
        shuttle::thread::yield_now();
        let grant = self.ledger().grants(at);
        let hpa = Ledger::hpa(region, at.start().0);
        reservation.commit(hpa, CLEAN).unwrap();
        self.ledger().granted(grant);
        End::Done
    }

    fn protect(&self, reader: &mut Reader<'w, World>, at: GpaRange, complete: bool) -> End {
        let begin = self.ledger().protects();
        let mut guard = self.tables.enter(reader).unwrap();
        let result = guard.write_protect(at);
        let end = match result {
            Ok(_) => at.end(),
            Err(stopped) => stopped.at,
        };
        // Another thread invalidates what it took and has not invalidated yet.
        let alone = self.ledger().protects_alone();
        if complete {
            guard.invalidate();
        }
        drop(guard);
        if complete && alone && end > at.start() {
            self.ledger().promise(pages(range(at.start().0, end.0)), begin);
        }
        self.ledger().protected();
        change_end(&result)
    }

    fn relax(
        &self,
        reader: &mut Reader<'w, World>,
        at: GpaRange,
        access: Access,
        complete: bool,
    ) -> End {
        let grant = (access == Access::Write).then(|| self.ledger().grants(at));
        let mut guard = self.tables.enter(reader).unwrap();
        let result = guard.relax(at, access).map(slat::LocalFlush::not_needed_here);
        grant.into_iter().for_each(|grant| self.ledger().granted(grant));
        if complete {
            guard.invalidate();
        }
        change_end(&result)
    }

    fn split(
        &self,
        reader: &mut Reader<'w, World>,
        at: GpaRange,
        to: u64,
        frames: usize,
        complete: bool,
    ) -> End {
        let mut cache = TableCache::filled(self.world, frames).unwrap();
        let mut guard = self.tables.enter(reader).unwrap();
        let result = guard.split(at, size(to), &mut cache);
        if complete {
            guard.invalidate();
        }
        split_end(result)
    }

    fn own(&self, reader: &mut Reader<'w, World>, at: GpaRange, gives: bool, frames: usize) -> End {
        let mut cache = TableCache::filled(self.world, frames).unwrap();
        let (from, to) = if gives { (None, OWNER) } else { (OWNER, None) };
        let mut guard = self.tables.enter(reader).unwrap();
        match guard.set_owner(at, from, to, &mut cache).map_err(|stopped| stopped.reason) {
            Err(OwnerError::Contended) => End::Contended,
            Err(error @ (OwnerError::Range(_) | OwnerError::ForeignCache)) => panic!("{error}"),
            _ => End::Done,
        }
    }

    fn replace(
        &self,
        reader: &mut Reader<'w, World>,
        at: GpaRange,
        moves: bool,
        memory: Memory,
    ) -> End {
        let begin = self.ledger().protects();
        let mut guard = self.tables.enter(reader).unwrap();
        let Some(found) = guard.translate(at.start()).ok().flatten() else {
            self.ledger().protected();
            return End::Done;
        };
        let region = moves.then(|| self.ledger().fresh());
        let to = region.map_or(found.hpa, |region| Ledger::hpa(region, at.start().0));
        let new = Attributes { write: false, memory, ..CLEAN };
        let result = guard.replace(at, found.hpa, to, new);
        let alone = self.ledger().protects_alone();
        guard.invalidate();
        drop(guard);
        if let Some(region) = region {
            self.ledger().mapped(region);
            if result == Ok(at.size()) {
                self.ledger().handed_out(found.hpa, at.size(), begin);
            }
        }
        if alone && result.is_ok() {
            self.ledger().promise(pages(at), begin);
        }
        self.ledger().protected();
        match result.map_err(|stopped| stopped.reason) {
            Err(ReplaceError::Contended) => End::Contended,
            Err(error @ ReplaceError::Attributes(_)) => panic!("{error}"),
            _ => End::Done,
        }
    }

    fn age(&self, reader: &mut Reader<'w, World>, at: GpaRange, how: AgeOptions) -> End {
        if how.clear {
            self.ledger().takes();
        }
        let expected = how.clear.then(|| self.ledger().outstanding(false)).flatten();
        let (mut young, mut unanswered) = ([0], [0]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let mut guard = self.tables.enter(reader).unwrap();
        guard.age(at, &mut ages, how).unwrap();
        drop(guard);
        let first = pages(at).start;
        if how.clear {
            let answered = |page: usize| (young[0] | unanswered[0]) >> (page - first) & 1 == 1;
            self.check(expected.as_ref(), at, answered, "was used, and is said to be old");
            self.report(at, young[0], |page| self.ledger().report(page, true, false));
            self.ledger().took();
        }
        End::Done
    }

    fn harvest(&self, reader: &mut Reader<'w, World>, at: GpaRange) -> End {
        self.ledger().takes();
        let expected = self.ledger().outstanding(true);
        let mut bitmap = [0];
        let mut guard = self.tables.enter(reader).unwrap();
        let result = guard.harvest(at, &mut bitmap);
        drop(guard);
        if result.is_ok() {
            let named = |page: usize| bitmap[0] >> (page - pages(at).start) & 1 == 1;
            self.check(expected.as_ref(), at, named, "was written, and is said to be clean");
        }
        self.report(at, bitmap[0], |page| self.ledger().report(page, false, true));
        self.ledger().took();
        change_end(&result)
    }

    fn report(&self, at: GpaRange, bitmap: u64, report: impl Fn(usize)) {
        let first = pages(at).start;
        pages(at).filter(|page| bitmap >> (page - first) & 1 == 1).for_each(report);
    }

    fn check(
        &self,
        expected: Option<&ExpectedState>,
        at: GpaRange,
        found: impl Fn(usize) -> bool,
        what: &str,
    ) {
        let missed = expected.and_then(|e| self.ledger().missed(e, at, found));
        if let Some(page) = missed {
            panic!("page {page} {what}");
        }
    }

    /// Checks that no marker is left, nothing was forgotten, and every frame comes back.
    pub fn finish(self) {
        let world = self.world;
        world.running.set(false);
        let mut owned = Vec::new();
        self.whole(self.tables.root(), self.tables.geometry().root_level, 0, &mut owned);
        world.ledger.account();
        let mut reader = Reader::register(world).unwrap();
        for at in owned {
            assert_eq!(self.own(&mut reader, at, false, 0), End::Done);
        }
        let all = range(0, ALL);
        // A block is unmapped as a whole, and the storage has room for each page.
        assert_eq!(self.unmap(&mut reader, all).0, End::Done);
        while self.tables.reclaim() > 0 {}
        assert_eq!(world.live(), 1, "tables that are empty and were not given back");
        drop(reader);
        // SAFETY: CPUs have stopped, and only use these tables by `access`.
        unsafe { self.tables.deactivate() }.destroy();
        assert_eq!(world.live(), 0, "frames that were not given back");
    }

    /// Checks a table and all below it, reports the state of leaves, and finds what has an owner.
    fn whole(&self, table: Hpa, level: u8, base: u64, owned: &mut Vec<GpaRange>) {
        // SAFETY: the table is linked, and has two entries.
        let raw = |index| unsafe { self.world.entries(table).add(index).as_ref() }.load();
        let both = [raw(0), raw(1)];
        // The state of a group is that of any of its leaves.
        let group = |raw: &u64| F::reach(*raw, level) > 1 << F::shift(level);
        let folded = both.iter().all(|raw| F::kind(*raw, level) == Kind::Leaf && group(raw));
        for (index, mut raw) in both.into_iter().enumerate() {
            if folded {
                raw |= (both[0] | both[1]) & F::STATUS;
            }
            let at = base + ((index as u64) << F::shift(level));
            let kind = F::kind(raw, level);
            let marked = raw & F::MARK != 0;
            match kind {
                _ if marked && !matches!(kind, Kind::Reserved | Kind::Owned) => {
                    panic!("a marker is left at {at:#x}: {raw:#x}")
                }
                Kind::Table => self.whole(F::table_address(raw), level - 1, at, owned),
                Kind::Leaf => {
                    let state = self.tables.format().decode(raw, level);
                    let leaf = range(at, at + (1 << F::shift(level)));
                    pages(leaf).for_each(|page| {
                        assert!(page < PAGES);
                        self.world.ledger.report(page, state.accessed, state.dirty);
                    });
                }
                Kind::Owned => owned.push(range(at, at + (1 << F::shift(level)))),
                Kind::Empty | Kind::Reserved => {}
                other => panic!("{at:#x} is left {other:?}"),
            }
        }
    }
}
