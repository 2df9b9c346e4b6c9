//! One guest, and the operations on its tables with their shootdowns, logged for the accounts that
//! the models check at their end.

use crate::hardware::{self, Use, WalkedFormat};
use crate::ledger;
use crate::machine::*;
use core::ops::Range;
use slat::format::Kind;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::*;
use std::boxed::Box;
use std::vec::Vec;

/// Table pages for one thread.
pub type Cache<F> = TableCache<'static, F, World>;

/// The part of a range that an operation did not reach, and the reason.
#[derive(Debug)]
#[must_use]
pub struct Rest<E> {
    pub range: Range<u64>,
    pub reason: E,
}

pub type Outcome<E> = Option<Rest<E>>;

pub fn range(range: &Range<u64>) -> GpaRange {
    GpaRange::new(Gpa(range.start), range.end - range.start).unwrap()
}

pub fn pages(range: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
    range.clone().step_by(PAGE as usize)
}

/// The rest of an operation that ended early, and the range that it did.
fn ended<T, E: core::fmt::Debug>(
    range: &Range<u64>,
    result: Result<T, Interruption<E>>,
) -> (Range<u64>, Outcome<E>) {
    let Err(Interruption { at, reason }) = result else { return (range.clone(), None) };
    assert!((range.start..=range.end).contains(&at.0), "stopped outside: {at}");
    (range.start..at.0, Some(Rest { range: at.0..range.end, reason }))
}

/// One guest of one execution. Threads get copies of it.
pub struct On<F: Format> {
    pub world: &'static World,
    tables: *mut Tables<'static, F, World>,
}

/// A guest with Arm's descriptors.
pub type Guest = On<Tiny>;
/// A guest with Intel's entries: tables have rights and accessed bits.
pub type X86 = On<TinyEpt>;

impl<F: Format> Clone for On<F> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<F: Format> Copy for On<F> {}

/// A thread inside the tables of a guest.
pub struct In<'m, F: Format> {
    pub on: On<F>,
    pub guard: Guard<'m, 'static, F, World>,
}

impl<F: WalkedFormat> On<F> {
    /// `bits` as for [`Tiny`]: 14 for two levels, 15 for three.
    pub fn new(bits: u32, bbm: BreakBeforeMake) -> Self {
        let world = Box::leak(Box::new(World::new(bbm, false)));
        Self::of(world, Vmid(0), bits)
    }

    fn of(world: &'static World, vmid: Vmid, bits: u32) -> Self {
        let tables = Tables::new(F::default(), vmid, bits, world).unwrap();
        Self { world, tables: Box::into_raw(Box::new(tables)) }
    }

    /// As `new`, with a CPU that runs the guest.
    pub fn running(self) -> Self {
        self.world.running.set(true);
        self
    }

    pub fn tables(&self) -> &'static Tables<'static, F, World> {
        // SAFETY: leaked in `of`; borrowed exclusively, and freed, after all threads were joined.
        unsafe { &*self.tables }
    }

    /// Enters without a reader slot.
    pub fn inside(&self) -> In<'static, F> {
        // SAFETY: models that reclaim while other threads run enter by `enter`; the others reclaim
        // after all threads were joined.
        In { on: *self, guard: unsafe { self.tables().enter_unchecked() } }
    }

    pub fn reader(&self) -> Reader<'static, World> {
        Reader::register(self.world).expect("there are reader slots for all threads")
    }

    pub fn enter<'m>(&self, reader: &'m mut Reader<'static, World>) -> In<'m, F> {
        In { on: *self, guard: self.tables().enter(reader).expect("one platform") }
    }

    pub fn cache(&self, pages: usize) -> Cache<F> {
        TableCache::filled(self.world, pages).unwrap()
    }

    /// Maps from the main thread, where no other thread interferes.
    pub fn mapped(self, at: Range<u64>, attributes: Attributes, size: u64) -> Self {
        assert!(self.map(at, attributes, size, &mut self.cache(3)).is_none());
        self
    }

    /// Has the table of the page at `gpa`, in which a fault left a token and nothing is mapped.
    pub fn with_empty_table(self, gpa: u64) -> Self {
        let mut cache = self.cache(3);
        let page = PageSize::from_bytes(PAGE).unwrap();
        let mut inside = self.inside();
        assert!(inside.guard.reserve(Gpa(gpa), page, &mut cache).is_ok());
        drop(inside);
        drop(cache);
        self
    }

    /// As [`On::mapped`], with groups folded.
    pub fn folded(self, at: Range<u64>, attributes: Attributes, size: u64) -> Self {
        assert!(self.fold(at, attributes, size, &mut self.cache(3)).is_none());
        self
    }

    /// Returns what is mapped there, once no thread holds any entry.
    pub fn at(&self, gpa: u64) -> Option<Translation> {
        let found = self.inside().guard.translate(Gpa(gpa)).expect("a marker was left behind");
        if let Some(found) = found {
            assert_eq!(found.hpa.0, MEMORY + gpa);
        }
        found
    }

    pub fn leaf(&self, gpa: u64) -> (u64, Attributes) {
        let found = self.at(gpa).expect("a mapping was lost");
        (found.size.bytes(), found.attributes)
    }

    /// Table pages that are neither in a cache nor given back.
    pub fn pages(&self) -> usize {
        self.world.live()
    }

    /// Tables linked below the root.
    pub fn linked(&self) -> usize {
        fn below<F: WalkedFormat>(world: &World, table: Hpa, level: u8) -> usize {
            let tables = (0..2).filter_map(|index| {
                // SAFETY: a linked table of two entries.
                let raw = unsafe { world.entries(table).add(index).as_ref() }.load();
                (F::kind(raw, level) == Kind::Table && level > 0)
                    .then(|| 1 + below::<F>(world, F::table_address(raw), level - 1))
            });
            tables.sum()
        }
        below::<F>(self.world, self.tables().root(), self.tables().geometry().root_level)
    }

    /// The guest accesses `gpa`; `None` if that faults.
    pub fn access(&self, gpa: u64, write: bool, held: Use) -> Option<Hpa> {
        assert!(self.world.running.get(), "no CPU runs");
        hardware::access(self.tables(), gpa, write, held).map(Hpa)
    }

    /// A write by a CPU that always walks.
    pub fn write(&self, gpa: u64) -> bool {
        self.access(gpa, true, Use::Never).is_some()
    }

    /// Takes the accessed and dirty state that is left, as the next scan and the next harvest would
    /// find it, and checks the accounts. All threads have been joined.
    pub fn settle(&self) {
        let all = 0..1 << self.tables().geometry().address_bits;
        let unanswered = self.inside().age(all.clone(), EXACT).1;
        assert_eq!(unanswered, [], "nobody else is at work");
        for gpa in pages(&all) {
            if let Some(found) = self.at(gpa) {
                assert!(!found.attributes.accessed, "an exact scan left {gpa:#x} out");
            }
        }
        assert!(self.inside().harvest(all).is_none());
        self.world.ledger.account();
    }

    /// Reclaims `retired` tables, then gives everything back. All threads have been joined.
    pub fn end(self, retired: usize) {
        assert_eq!(self.tables().reclaim(), retired, "retired tables");
        self.close();
    }

    /// Makes tables of two levels for another guest of the same machine, to be destroyed first.
    pub fn another(&self) -> Self {
        Self::of(self.world, Vmid(1), 14)
    }

    pub fn destroy(self) {
        // SAFETY: all threads were joined, so this is the only reference, and no CPU runs.
        unsafe { Box::from_raw(self.tables).deactivate() }.destroy();
    }

    /// Gives everything back.
    pub fn close(self) {
        // The remaining tables are still consistent.
        for gpa in pages(&(0..1 << self.tables().geometry().address_bits)) {
            self.inside().guard.translate(Gpa(gpa)).expect("a marker was left behind");
        }
        self.destroy();
        assert_eq!(self.world.live(), 0, "frames were lost");
        // SAFETY: leaked in `On::new`; the tables, and every cache, are gone.
        drop(unsafe { Box::from_raw(core::ptr::from_ref(self.world).cast_mut()) });
    }
}

pub const EXACT: AgeOptions =
    AgeOptions { clear: true, table_bits: TableBits::Exact, flush_tlb: true };

impl<F: WalkedFormat> In<'_, F> {
    /// Maps to the memory at `MEMORY + gpa`.
    pub fn map(
        &mut self,
        at: Range<u64>,
        attributes: Attributes,
        size: u64,
        cache: &mut Cache<F>,
    ) -> Outcome<MapError> {
        self.map_to(MEMORY, at, attributes, size, cache)
    }

    /// As [`In::map`], with groups folded.
    pub fn fold(
        &mut self,
        at: Range<u64>,
        attributes: Attributes,
        size: u64,
        cache: &mut Cache<F>,
    ) -> Outcome<MapError> {
        self.map_as(true, MEMORY, at, attributes, size, cache)
    }

    pub fn map_to(
        &mut self,
        memory: u64,
        at: Range<u64>,
        attributes: Attributes,
        size: u64,
        cache: &mut Cache<F>,
    ) -> Outcome<MapError> {
        self.map_as(false, memory, at, attributes, size, cache)
    }

    fn map_as(
        &mut self,
        fold: bool,
        memory: u64,
        at: Range<u64>,
        attributes: Attributes,
        size: u64,
        cache: &mut Cache<F>,
    ) -> Outcome<MapError> {
        let size = PageSize::from_bytes(size).unwrap();
        self.on.world.ledger.regain(memory + at.start..memory + at.end);
        let (when, grant) = self.grant(&at);
        let hpa = Hpa(memory + at.start);
        let all = range(&at);
        let result = if fold {
            self.guard.map_contiguous(all, hpa, attributes, size, cache)
        } else {
            self.guard.map(all, hpa, attributes, size, cache)
        };
        self.granted(grant);
        if result.is_ok_and(|bytes| bytes == at.end - at.start) && attributes.accessed {
            self.made_used(when, &at, attributes.dirty);
        }
        ended(&at, result).1
    }

    /// Logs that software has made leaves accessed or dirty, as hardware does.
    fn made_used(&self, when: usize, at: &Range<u64>, write: bool) {
        self.on.world.ledger.made_used(when, ledger::pages(range(at)), true, write);
    }

    /// Logs that the guest may write from here on; returns when, and a value that ends this.
    fn grant(&self, at: &Range<u64>) -> (usize, usize) {
        let ledger = &self.on.world.ledger;
        (ledger.tick(), ledger.grants(range(at)))
    }

    fn granted(&self, grant: usize) {
        let _log = self.log();
        self.on.world.ledger.granted(grant);
    }

    /// Returns the lock of the log: what is logged is in the order of the threads that hold it.
    fn log(&self) -> Option<loom::sync::MutexGuard<'static, ()>> {
        let world = self.on.world;
        world.running.get().then(|| world.bus.log.lock().unwrap())
    }

    /// Logs that an operation returned that a page was accessed (`write` unset), or made dirty.
    fn report(&self, gpa: u64, write: bool) {
        self.on.world.ledger.report((gpa / PAGE) as usize, !write, write);
    }

    pub fn split(
        &mut self,
        at: Range<u64>,
        to: u64,
        cache: &mut Cache<F>,
    ) -> (Range<u64>, Outcome<SplitError>) {
        let to = PageSize::from_bytes(to).unwrap();
        let result = self.guard.split(range(&at), to, cache);
        self.guard.invalidate();
        ended(&at, result)
    }

    pub fn collapse(&mut self, at: Range<u64>, to: u64) -> Outcome<SplitError> {
        let result = self.guard.collapse(range(&at), PageSize::from_bytes(to).unwrap());
        self.guard.invalidate();
        ended(&at, result).1
    }

    /// Puts a leaf that covers the range in place of a table; returns whether there was one.
    pub fn replace_table(
        &mut self,
        at: Range<u64>,
        attributes: Attributes,
    ) -> Result<bool, MapError> {
        let (start, size) = (at.start, PageSize::from_bytes(at.end - at.start).unwrap());
        let last = Gpa(at.end - PAGE);
        self.on.world.ledger.regain(MEMORY + start..MEMORY + at.end);
        let (when, grant) = self.grant(&at);
        let done = self.guard.replace_table(last, size, Hpa(MEMORY + start), attributes);
        self.granted(grant);
        assert_eq!(self.guard.pending_invalidation(), None);
        if matches!(done, Ok(Some(_))) {
            if attributes.accessed {
                self.made_used(when, &at, attributes.dirty);
            }
        }
        let bytes = done.map_err(|stopped| stopped.reason)?;
        assert!(bytes.is_none_or(|bytes| bytes == at.end - at.start));
        Ok(bytes.is_some())
    }

    /// Write-protects. Afterwards no CPU can write to what was protected, unless a thread grants it
    /// meanwhile.
    pub fn protect(&mut self, at: Range<u64>) -> Outcome<ChangeError> {
        self.protect_by(at, |guard, range| guard.write_protect(range))
    }

    fn protect_by(
        &mut self,
        at: Range<u64>,
        protect: impl FnOnce(
            &mut Guard<'_, 'static, F, World>,
            GpaRange,
        ) -> Result<u64, Interruption<ChangeError>>,
    ) -> Outcome<ChangeError> {
        let ledger = &self.on.world.ledger;
        let log = self.log();
        let begin = ledger.tick();
        drop(log);
        let result = protect(&mut self.guard, range(&at));
        self.guard.invalidate();
        let (done, rest) = ended(&at, result);
        if !done.is_empty() {
            ledger.promise(ledger::pages(range(&done)), begin);
        }
        rest
    }

    /// Relaxes as a fault does, and reports a write that it answers.
    pub fn relax(&mut self, at: Range<u64>, access: Access) -> Outcome<ChangeError> {
        let write = access == Access::Write;
        let grant = write.then(|| self.grant(&at));
        let when = self.on.world.ledger.tick();
        let result = self.guard.relax(range(&at), access).map(slat::LocalFlush::not_needed_here);
        self.guard.invalidate();
        if result.is_ok_and(|bytes| bytes == at.end - at.start) {
            self.made_used(when, &at, write);
        }
        let (_, rest) = ended(&at, result);
        if let Some((_, grant)) = grant {
            self.granted(grant);
        }
        rest
    }

    /// Sets rights without the right to write: no CPU writes from here on.
    pub fn set(&mut self, at: Range<u64>, rights: Rights) -> Outcome<ChangeError> {
        if rights.write {
            let grant = self.grant(&at);
            let result = self.guard.protect(range(&at), rights);
            self.guard.invalidate();
            self.granted(grant.1);
            return ended(&at, result).1;
        }
        self.protect_by(at, |guard, range| guard.protect(range, rights))
    }

    /// Changes the memory type, where the format has several, and leaves only the right to read.
    pub fn retype(&mut self, at: Range<u64>) -> Outcome<ChangeError> {
        let memory = Hpa(MEMORY + at.start);
        let normal = Attributes { execute: Execute::None, ..PROTECTED };
        let device = Attributes { memory: Memory::Device, ..normal };
        let typed = self.guard.format().encode(device).is_ok();
        let new = if typed { device } else { normal };
        let replace = |guard: &mut Guard<'_, 'static, F, World>, range| {
            let done = guard.replace(range, memory, memory, new);
            done.map_err(|Interruption { at, reason }| {
                assert_eq!(reason, ReplaceError::Contended);
                Interruption { at, reason: ChangeError::Contended }
            })
        };
        self.protect_by(at, replace)
    }

    /// Sets a software bit, which hardware and other operations leave alone.
    pub fn mark(&mut self, at: Range<u64>) -> Outcome<ChangeError> {
        let result = self.guard.set_software(range(&at), Software::B, Software::NONE);
        assert_eq!(self.guard.pending_invalidation(), None);
        ended(&at, result).1
    }

    pub fn execute_protect(&mut self, at: Range<u64>) -> Outcome<ChangeError> {
        let result = self.guard.execute_protect(range(&at));
        self.guard.invalidate();
        ended(&at, result).1
    }

    /// Unmaps, leaf by leaf. Afterwards no CPU can reach the memory that was handed out.
    pub fn unmap(&mut self, at: Range<u64>) -> (Vec<UnmappedRun>, Outcome<UnmapError>) {
        let world = self.on.world;
        let mut storage = [const { UnmapEntry::EMPTY }; 4];
        let mut batch = UnmapBatch::new(self.on.tables(), &mut storage);
        let result = self.guard.unmap(range(&at), &mut batch);
        let mut removed = Vec::new();
        for run in batch.complete() {
            let size = run.size.bytes();
            removed.extend((0..run.bytes / size).map(|n| UnmappedRun {
                gpa: Gpa(run.gpa.0 + n * size),
                hpa: Hpa(run.hpa.0 + n * size),
                bytes: size,
                ..run
            }));
        }
        let left: u64 = removed.iter().map(|leaf| leaf.bytes).sum();
        assert!(result.is_err() || result == Ok(left));
        for leaf in &removed {
            assert_eq!(leaf.hpa.0, MEMORY + leaf.gpa.0);
            world.ledger.lose(leaf.hpa.0..leaf.hpa.0 + leaf.bytes);
            for page in pages(&(leaf.gpa.0..leaf.gpa.0 + leaf.bytes)) {
                let states = [(leaf.attributes.accessed, false), (leaf.attributes.dirty, true)];
                states.iter().filter(|state| state.0).for_each(|&(_, w)| self.report(page, w));
            }
        }
        (removed, ended(&at, result).1)
    }

    /// Returns the pages that are young, and those without an answer.
    pub fn age(&mut self, at: Range<u64>, how: AgeOptions) -> (Vec<u64>, Vec<u64>) {
        let (mut young, mut unanswered) = ([0], [0]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let aged = self.guard.age(range(&at), &mut ages, how).expect("ageing stops nowhere");
        assert_eq!(aged.young, u64::from(young[0].count_ones()));
        let named = |bits: u64| {
            let set = pages(&at).enumerate().filter(move |(bit, _)| bits >> bit & 1 == 1);
            set.map(|(_, page)| page).collect::<Vec<_>>()
        };
        let (young, unanswered) = (named(young[0]), named(unanswered[0]));
        young.iter().for_each(|&page| self.report(page, false));
        (young, unanswered)
    }

    /// Returns whether the leaf at `gpa` was young; `None` if another thread holds it.
    pub fn age_leaf(&mut self, gpa: u64) -> Option<bool> {
        let (leaf, young) = self.guard.age_leaf(Gpa(gpa), true).ok()?.expect("it is mapped");
        let reported = pages(&(leaf.start().0..leaf.end().0)).filter(|_| young);
        reported.for_each(|page| self.report(page, false));
        Some(young)
    }

    /// The caller's log has what this returns.
    pub fn harvest(&mut self, at: Range<u64>) -> Outcome<ChangeError> {
        let mut bitmap = [0];
        let result = self.guard.harvest(range(&at), &mut bitmap);
        for (bit, page) in pages(&at).enumerate() {
            if bitmap[0] >> bit & 1 == 1 {
                self.report(page, true);
            }
        }
        ended(&at, result).1
    }

    /// Cleans, completes, and copies the pages that it cleaned; returns when that was.
    pub fn clean(&mut self, at: Range<u64>) -> usize {
        // If it was contended, it cleaned nothing, and nothing has to be copied.
        let _ = self.guard.clean(range(&at));
        self.guard.invalidate();
        let _bus = self.on.world.bus.shared();
        self.on.world.ledger.tick()
    }

    /// Returns what software sees; `None` if it has to try again.
    pub fn look(&mut self, gpa: u64) -> Option<Option<Hpa>> {
        self.guard.translate(Gpa(gpa)).ok().map(|found| found.map(|found| found.hpa))
    }
}

macro_rules! unregistered {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        /// Single operations, without a reader slot.
        impl<F: WalkedFormat> On<F> {
            $(pub fn $name(&self, $($arg: $type),*) -> $result {
                self.inside().$name($($arg),*)
            })*
        }
    };
}
unregistered! {
    fn map(at: Range<u64>, a: Attributes, size: u64, cache: &mut Cache<F>) -> Outcome<MapError>;
    fn fold(at: Range<u64>, a: Attributes, size: u64, cache: &mut Cache<F>) -> Outcome<MapError>;
    fn split(at: Range<u64>, to: u64, cache: &mut Cache<F>)
        -> (Range<u64>, Outcome<SplitError>);
    fn collapse(at: Range<u64>, to: u64) -> Outcome<SplitError>;
    fn replace_table(at: Range<u64>, a: Attributes) -> Result<bool, MapError>;
    fn protect(at: Range<u64>) -> Outcome<ChangeError>;
    fn relax(at: Range<u64>, access: Access) -> Outcome<ChangeError>;
    fn unmap(at: Range<u64>) -> (Vec<UnmappedRun>, Outcome<UnmapError>);
    fn age(at: Range<u64>, how: AgeOptions) -> (Vec<u64>, Vec<u64>);
    fn age_leaf(gpa: u64) -> Option<bool>;
    fn look(gpa: u64) -> Option<Option<Hpa>>;
    fn mark(at: Range<u64>) -> Outcome<ChangeError>;
    fn clean(at: Range<u64>) -> usize;
}
