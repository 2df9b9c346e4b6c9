//! The engine's side of an operation.

use super::leaves;
use super::work::{LOOKUPS, Op, Setting, Work};
use crate::arena::Arena;
use crate::contest::Sample;
use crate::fill::Stores;
use crate::fixture::{
    CHUNK, Fixture, breaks_of, chunk_storage, counted, look_up, split_range, steps, storage,
};
use crate::limit::{self, Limit};
use crate::linux::Run;
use crate::settings::peers::Caches;
use crate::stopwatch::Stopwatch;
use anyhow::ensure;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, BatchedSplit, Format, GpaRange, Guard, OpCounts,
    Pages, Reader, TableCache, Tables, UnmapBatch, UnmapEntry,
};
use std::cell::RefCell;
use std::hint::black_box;
use std::rc::Rc;

/// The leaves that the engine left behind in the round that warms up, for comparison with others.
pub type Left = Rc<RefCell<Vec<Run>>>;

/// The engine's turns at one work.
#[derive(Clone)]
pub struct Turns<F> {
    pub fixture: Fixture<F>,
    pub work: Work,
    pub setting: Setting,
    pub left: Left,
}

/// Bitmaps of all pages, touched before the measurement.
#[derive(Clone)]
struct Bitmaps {
    young: Vec<u64>,
    unanswered: Vec<u64>,
    named: Vec<u64>,
}

impl<F: Format> Turns<F> {
    /// Returns the addresses that all entrants look up, if that is the operation.
    pub fn addresses(&self) -> Vec<u64> {
        if self.work.op == Op::Lookup { self.fixture.addresses(LOOKUPS) } else { Vec::new() }
    }

    /// Returns a turn that fills tables with this kind of stores.
    pub fn turn(self, stores: Stores) -> impl FnMut(&mut Arena, bool) -> anyhow::Result<Sample> {
        let word = if let Op::Clear(word) = self.work.op { word } else { u64::MAX };
        let mut named = self.fixture.bitmap();
        named.fill(word);
        let mut bitmaps =
            Bitmaps { young: self.fixture.bitmap(), unanswered: self.fixture.bitmap(), named };
        let addresses = self.addresses();
        move |arena, check| self.once(stores, &mut bitmaps, &addresses, arena, check)
    }

    fn once(
        &self,
        stores: Stores,
        bitmaps: &mut Bitmaps,
        addresses: &[u64],
        arena: &mut Arena,
        check: bool,
    ) -> anyhow::Result<Sample> {
        ready::<F>(arena);
        arena.set_stores(stores);
        let arena = &*arena;
        match self.work.op {
            Op::BuildInactive | Op::ProtectInactive => return self.inactive(arena, check),
            _ => {}
        }
        let tables = match self.work.op {
            Op::Map => self.fixture.empty(arena)?.activate(),
            _ => self.fixture.live(arena, self.work.leaf, Attributes::RAM)?,
        };
        let mut reader = Reader::register(arena)?;
        self.prepare(&tables, &mut reader, bitmaps)?;
        let caches = self.setting.caches;
        bitmaps.young.fill(0);
        bitmaps.unanswered.fill(0);
        temper(arena, self.work.table_bytes(), caches);
        let before = arena.invalidations();
        let mut doer = Doer { turns: self, arena, tables: &tables, counts: OpCounts::NONE };
        let seconds = doer.timed(&mut reader, bitmaps, addresses)?;
        let counts = counted(doer.counts, arena.invalidations() - before);
        if check {
            *self.left.borrow_mut() = leaves::of(&tables, arena, self.fixture.range());
        }
        Ok(Sample { seconds, counts })
    }

    /// Prepares the tables; not timed.
    fn prepare<'p>(
        &self,
        tables: &Tables<'p, F, Arena>,
        reader: &mut Reader<'p, Arena>,
        bitmaps: &mut Bitmaps,
    ) -> anyhow::Result<()> {
        let mut guard = tables.enter(reader)?;
        match self.work.op {
            Op::ProtectAgain | Op::Relax => {
                guard.write_protect(self.fixture.range())?;
            }
            Op::AgeOld => {
                age(&mut guard, self.fixture.range(), bitmaps)?;
            }
            _ => {}
        }
        guard.invalidate();
        Ok(())
    }

    /// Takes a turn with inactive tables, which no CPU walks.
    fn inactive(&self, arena: &Arena, check: bool) -> anyhow::Result<Sample> {
        let mut tables = self.fixture.empty(arena)?;
        let mut storage = chunk_storage();
        let mut cache = TableCache::new(arena, &mut storage);
        let build = self.work.op == Op::BuildInactive;
        if build {
            temper(arena, self.work.table_bytes(), self.setting.caches);
        }
        let watch = Stopwatch::start();
        for chunk in steps(self.fixture.range(), CHUNK) {
            cache.fill(usize::MAX)?;
            let hpa = Fixture::<F>::host(&chunk);
            tables.map(chunk, hpa, Attributes::RAM, self.work.leaf, &mut cache)?;
        }
        let mut seconds = watch.seconds();
        if !build {
            temper(arena, self.work.table_bytes(), self.setting.caches);
            let watch = Stopwatch::start();
            let bytes = tables.write_protect(self.fixture.range())?;
            seconds = watch.seconds();
            ensure!(bytes == self.work.memory, "{bytes} bytes changed");
        }
        let counts = counted(tables.enter_mut().counts(), 0);
        if check {
            let tables = tables.activate();
            *self.left.borrow_mut() = leaves::of(&tables, arena, self.fixture.range());
        }
        Ok(Sample { seconds, counts })
    }

    /// Returns a limit: a plain loop over the same entries, or the same bytes filled; `None` if no
    /// limit applies.
    pub fn limit(
        &self,
    ) -> Option<(&'static str, impl FnMut(&mut Arena, bool) -> anyhow::Result<Sample> + use<F>)>
    {
        let (op, fills) = (self.work.op, self.work.op == Op::BuildInactive);
        let limit = match op {
            _ if self.work.is_split_already() => Limit::ReadUpper,
            Op::Split | Op::BuildInactive => Limit::FillPlain,
            Op::Protect | Op::Clear(u64::MAX) | Op::AgeYoung => Limit::Cas,
            Op::ProtectAgain | Op::AgeOld => Limit::Read,
            _ => return None,
        };
        let turns = self.clone();
        let built = turns.built_bytes() as usize;
        let turn = move |arena: &mut Arena, _: bool| {
            ready::<F>(arena);
            if fills || limit == Limit::FillPlain {
                temper(arena, built as u64, turns.setting.caches);
                let watch = Stopwatch::start();
                limit::fill_by(arena.words(built), F::entries(0), Stores::Plain);
                return Ok(Sample::time(watch.seconds()));
            }
            let arena = &*arena;
            let tables = turns.fixture.live(arena, turns.work.page, Attributes::RAM)?;
            let pages = limit::TablePages::of(&tables, arena, turns.fixture.range());
            temper(arena, turns.work.table_bytes(), turns.setting.caches);
            // SAFETY: the tables exist, and no other thread uses them.
            let (seconds, ptes) = unsafe { pages.sample(arena, limit) };
            Ok(Sample { seconds, counts: vec![("entries", ptes)] })
        };
        Some((limit.name(), turn))
    }

    /// Returns the bytes of the tables that the operation builds.
    fn built_bytes(&self) -> u64 {
        let above =
            if self.work.op == Op::BuildInactive { u64::MAX } else { self.work.leaf.bytes() };
        let levels = (1..=F::LARGEST_LEAF).filter(|&level| F::size(level).bytes() <= above);
        levels.map(|level| self.work.memory >> F::shift(level)).sum::<u64>() << F::PAGE_SHIFT
    }
}

fn ready<F: Format>(arena: &mut Arena) {
    arena.begin(breaks_of::<F>(), Stores::Plain);
}

/// Puts the first bytes of table memory into the caches, or out of them, before an operation.
pub fn temper(arena: &Arena, bytes: u64, caches: Caches) {
    match caches {
        Caches::Warm => arena.warm(bytes as usize),
        Caches::Cold => arena.cool(bytes as usize),
    }
}

fn age<F: Format>(
    guard: &mut Guard<'_, '_, F, Arena>,
    range: GpaRange,
    bitmaps: &mut Bitmaps,
) -> anyhow::Result<u64> {
    let mut ages = AgeBitmaps { young: &mut bitmaps.young, unanswered: &mut bitmaps.unanswered };
    let aged = guard.age(range, &mut ages, AgeOptions::LEAVES)?;
    ensure!(aged.unanswered == 0, "{} pages without an answer", aged.unanswered);
    Ok(aged.young)
}

/// The timed part.
struct Doer<'d, 'p, F: Format> {
    turns: &'d Turns<F>,
    arena: &'p Arena,
    tables: &'d Tables<'p, F, Arena>,
    counts: OpCounts,
}

impl<'p, F: Format> Doer<'_, 'p, F> {
    fn timed(
        &mut self,
        reader: &mut Reader<'p, Arena>,
        bitmaps: &mut Bitmaps,
        addresses: &[u64],
    ) -> anyhow::Result<f64> {
        let Turns { fixture, work, .. } = self.turns;
        let pages = work.memory / work.page.bytes();
        let range = fixture.range();
        match work.op {
            Op::Map => self.map(reader),
            Op::Unmap => self.unmap(reader),
            Op::Split => self.split(reader, false),
            Op::Enable => self.split(reader, true),
            Op::ClearSplit => self.clear_split(reader, bitmaps),
            Op::Protect => self.whole(reader, work.memory, |guard| Ok(guard.write_protect(range)?)),
            Op::ProtectAgain => self.whole(reader, 0, |guard| Ok(guard.write_protect(range)?)),
            Op::Clear(word) => {
                let named = Pages { start: range.start(), bits: &bitmaps.named };
                let bytes = pages / 64 * u64::from(word.count_ones()) * work.page.bytes();
                self.whole(reader, bytes, |guard| Ok(guard.write_protect_pages(&named)?))
            }
            Op::AgeYoung => self.whole(reader, pages, |guard| age(guard, range, bitmaps)),
            Op::AgeOld => self.whole(reader, 0, |guard| age(guard, range, bitmaps)),
            Op::AgeEach => self.each(reader, pages, |guard, page| {
                let (mut young, mut unanswered) = ([0], [0]);
                let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
                Ok(guard.age(page, &mut ages, AgeOptions::LEAVES)?.young)
            }),
            Op::Relax => self.each(reader, work.memory, |guard, page| {
                Ok(guard.relax(page, Access::Write).map(slat::LocalFlush::not_needed_here)?)
            }),
            Op::Flush => self.whole(reader, work.memory, |guard| Ok(guard.clean_caches(range)?)),
            Op::Lookup => {
                let watch = Stopwatch::start();
                let guard = self.tables.enter(reader)?;
                let sum = black_box(look_up(&guard, addresses)?);
                let seconds = watch.seconds();
                ensure!(sum == fixture.sum(addresses), "other addresses were found");
                Ok(seconds)
            }
            Op::BuildInactive | Op::ProtectInactive => unreachable!("these have no live tables"),
        }
    }

    /// Does it with one call for all memory, and checks the answer.
    fn whole(
        &mut self,
        reader: &mut Reader<'p, Arena>,
        expected: u64,
        mut call: impl FnMut(&mut Guard<'_, 'p, F, Arena>) -> anyhow::Result<u64>,
    ) -> anyhow::Result<f64> {
        let watch = Stopwatch::start();
        let mut guard = self.tables.enter(reader)?;
        let done = call(&mut guard)?;
        self.counts += guard.counts();
        guard.invalidate();
        drop(guard);
        let seconds = watch.seconds();
        ensure!(done == expected, "{done} in place of {expected}");
        Ok(seconds)
    }

    /// Does it with a call for each page.
    fn each(
        &mut self,
        reader: &mut Reader<'p, Arena>,
        expected: u64,
        mut call: impl FnMut(&mut Guard<'_, 'p, F, Arena>, GpaRange) -> anyhow::Result<u64>,
    ) -> anyhow::Result<f64> {
        let Turns { fixture, work, .. } = self.turns;
        let watch = Stopwatch::start();
        let mut done = 0;
        for page in 0..work.pieces() {
            let mut guard = self.tables.enter(reader)?;
            done += call(&mut guard, fixture.page(page))?;
            self.counts += guard.counts();
            guard.invalidate();
        }
        let seconds = watch.seconds();
        ensure!(done == expected, "{done} in place of {expected}");
        Ok(seconds)
    }

    fn map(&mut self, reader: &mut Reader<'p, Arena>) -> anyhow::Result<f64> {
        let work = &self.turns.work;
        let (per, pages) = (F::entries(0) as u64, work.pieces());
        let tables = pages.div_ceil(per) + pages.div_ceil(per * per) + 4;
        let mut storage = storage(tables as usize);
        let mut cache = TableCache::new(self.arena, &mut storage);
        cache.fill(usize::MAX)?;
        self.each(reader, work.memory, |guard, page| {
            let hpa = Fixture::<F>::host(&page);
            Ok(guard.map(page, hpa, Attributes::RAM, work.page, &mut cache)?)
        })
    }

    fn unmap(&mut self, reader: &mut Reader<'p, Arena>) -> anyhow::Result<f64> {
        let mut places = [UnmapEntry::EMPTY; 64];
        let watch = Stopwatch::start();
        let mut batch = UnmapBatch::new(self.tables, &mut places);
        let mut guard = self.tables.enter(reader)?;
        let bytes = guard.unmap(self.turns.fixture.range(), &mut batch)?;
        self.counts += guard.counts();
        guard.invalidate();
        drop(guard);
        let removed: u64 = batch.complete().map(|removed| removed.bytes).sum();
        let seconds = watch.seconds();
        drop(batch);
        let all = self.turns.work.memory;
        ensure!((bytes, removed) == (all, all), "{bytes} bytes unmapped, {removed} handed out");
        Ok(seconds)
    }

    /// Splits in steps of the largest chunk. The time includes filling the cache.
    fn split(&mut self, reader: &mut Reader<'p, Arena>, protect: bool) -> anyhow::Result<f64> {
        let Turns { fixture, work, .. } = self.turns;
        let mut storage = chunk_storage();
        let mut cache = TableCache::new(self.arena, &mut storage);
        let watch = Stopwatch::start();
        if protect {
            let mut guard = self.tables.enter(reader)?;
            guard.write_protect(fixture.range())?;
            self.counts += guard.counts();
            guard.invalidate();
        }
        for chunk in steps(fixture.range(), CHUNK) {
            let mut guard = self.tables.enter(reader)?;
            split_range::<F, BatchedSplit>(&mut guard, chunk, work.page, &mut cache)?;
            self.counts += guard.counts();
            guard.invalidate();
        }
        Ok(watch.seconds())
    }

    /// Clears like a VMM's call that clears all of a chunk's log.
    fn clear_split(
        &mut self,
        reader: &mut Reader<'p, Arena>,
        bitmaps: &Bitmaps,
    ) -> anyhow::Result<f64> {
        let Turns { fixture, work, .. } = self.turns;
        let words = (CHUNK / work.page.bytes() / 64) as usize;
        let mut storage = chunk_storage();
        let mut cache = TableCache::new(self.arena, &mut storage);
        let watch = Stopwatch::start();
        for (chunk, bits) in steps(fixture.range(), CHUNK).zip(bitmaps.named.chunks(words)) {
            let mut guard = self.tables.enter(reader)?;
            split_range::<F, BatchedSplit>(&mut guard, chunk, work.page, &mut cache)?;
            guard.write_protect_pages(&Pages { start: chunk.start(), bits })?;
            self.counts += guard.counts();
            guard.invalidate();
        }
        Ok(watch.seconds())
    }
}
