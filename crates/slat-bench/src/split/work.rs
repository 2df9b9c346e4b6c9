//! Takes one sample: builds tables, splits them as a VMM's call would, and checks them.

use super::{Case, Cost, Sample, SplitMoment, Walk, What};
use crate::arena::Arena;
use crate::fixture::{split_range, steps};
use crate::limit::{self, Limit, TablePages};
use crate::stopwatch::Stopwatch;
use anyhow::{Context, ensure};
use slat::{
    Attributes, BatchedSplit, BoundedWalk, ChildlessWalk, EveryEntry, FlaggedWalk, Format, Frame,
    Gpa, GpaRange, Guard, Hpa, PageSize, Reader, SplitWalk, TableCache, Tables, UnloadedTables,
    Vmid,
};

/// Guest address at which RAM begins, as on arm64's `virt` machines.
const GUEST_BASE: u64 = 1 << 30;

/// Host address at which the guest's memory would be; none of it is touched.
const HOST_BASE: u64 = 1 << 40;

/// Bytes of an entry that are split at a time, and for which the cache of table pages is filled:
/// the largest chunk of Linux's eager split.
const CHUNK: u64 = 1 << 30;

/// Number of pages that one word of a dirty log covers.
pub const WORD: u64 = 64;

/// Widths of guest addresses: those that arm64's ID registers have.
pub const ADDRESS_BITS: [u32; 8] = [32, 36, 40, 42, 44, 48, 52, 56];

/// The tables of one guest, and the size to split them down to.
pub struct Work<F> {
    format: F,
    memory: u64,
    target: PageSize,
    address_bits: u32,
}

type Cache<'a, F> = TableCache<'a, F, Arena>;

impl<F: Format> Work<F> {
    /// Makes a guest of `memory` bytes whose tables are split down to `target`.
    pub fn new(format: F, memory: u64, target: PageSize) -> anyhow::Result<Self> {
        let top = GUEST_BASE + memory;
        let bits = ADDRESS_BITS.into_iter().find(|bits| top <= 1 << bits);
        let address_bits = bits.context("no address size of the format reaches that far")?;
        Ok(Self { format, memory, target, address_bits })
    }

    /// Returns the bytes of table memory that the smallest pages need, with room for a cache that
    /// is full when the work is done.
    pub fn table_bytes(&self) -> u64 {
        let spare = Self::chunk_tables() + 64;
        (self.all_tables() + spare) << F::PAGE_SHIFT
    }

    /// Returns the number of tables if everything is mapped by pages, with some more for the root.
    fn all_tables(&self) -> u64 {
        let tables = |level| (self.memory >> F::shift(level)) + 2;
        // Above the largest leaf: the root, concatenated or not, and a table or two.
        (1..=F::LARGEST_LEAF + 1).map(tables).sum::<u64>() + 64
    }

    /// Returns the number of table pages that splitting one chunk may take.
    fn chunk_tables() -> u64 {
        (1..=F::LARGEST_LEAF).map(|level| (CHUNK >> F::shift(level)) + 1).sum()
    }

    fn pte(&self) -> anyhow::Result<GpaRange> {
        Ok(GpaRange::new(Gpa(GUEST_BASE), self.memory)?)
    }

    fn build<'a>(
        &self,
        arena: &'a Arena,
        leaves: PageSize,
    ) -> anyhow::Result<Tables<'a, F, Arena>> {
        let mut tables = UnloadedTables::new(self.format, Vmid(1), self.address_bits, arena)?;
        let mut storage: Vec<Option<Frame>> = Vec::new();
        storage.resize_with(Self::chunk_tables() as usize + 4, || None);
        let mut cache = TableCache::new(arena, &mut storage);
        for chunk in steps(self.pte()?, CHUNK) {
            cache.fill(usize::MAX)?;
            let hpa = Hpa(chunk.start().0 - GUEST_BASE + HOST_BASE);
            tables.map(chunk, hpa, Attributes::RAM, leaves, &mut cache)?;
        }
        Ok(tables.activate())
    }

    /// Builds the tables of the case and splits them by `walk`; the split is timed.
    pub fn split(
        &self,
        arena: &mut Arena,
        case: &Case,
        walk: Walk,
        check: bool,
    ) -> anyhow::Result<Sample> {
        arena.reset();
        let tables = self.build(arena, case.backing)?;
        let run = match walk {
            Walk::EveryEntry => run::<F, EveryEntry>,
            Walk::Bounded => run::<F, BoundedWalk>,
            Walk::Childless => run::<F, ChildlessWalk>,
            Walk::Tested => run::<F, FlaggedWalk>,
            Walk::Batched => run::<F, BatchedSplit>,
        };
        let mut storage: Vec<Option<Frame>> = Vec::new();
        storage.resize_with(Self::chunk_tables() as usize, || None);
        let mut cache = TableCache::new(arena, &mut storage);
        let before = arena.invalidations();
        let mut reader = Reader::register(&*arena)?;
        let watch = Stopwatch::start();
        let mut guard = tables.enter(&mut reader)?;
        run(&mut guard, self.pte()?, self.target, case, &mut cache)?;
        guard.invalidate();
        let seconds = watch.seconds();
        let invalidations = arena.invalidations() - before;
        let counts = guard.counts();
        drop(cache);
        if check {
            self.check(&guard, case)?;
        }
        Ok(Sample { seconds, cost: Cost::Split { counts, invalidations } })
    }

    /// Measures a limit of the machine for the same bytes.
    pub fn limit(&self, arena: &mut Arena, case: &Case, limit: Limit) -> anyhow::Result<Sample> {
        let table = F::entries(0);
        if matches!(limit, Limit::FillPlain | Limit::FillBest) {
            let words = arena.words(self.built_bytes(case.backing) as usize);
            let ptes = words.len() as u64;
            return Ok(Sample {
                seconds: limit::fill(words, table, limit),
                cost: Cost::Limit { ptes },
            });
        }
        arena.reset();
        let pages = TablePages::of(&self.build(arena, F::size(0))?, arena, self.pte()?);
        // Builds the tables again at the same places, so that the caches are as cold as for the
        // engine.
        arena.reset();
        let _tables = self.build(arena, F::size(0))?;
        // SAFETY: tables built the same way in an arena just reset are at the same places.
        let (seconds, ptes) = unsafe { pages.sample(arena, limit) };
        Ok(Sample { seconds, cost: Cost::Limit { ptes } })
    }

    /// Returns the bytes of the tables that splitting `backing` builds.
    fn built_bytes(&self, backing: PageSize) -> u64 {
        let levels = (1..=F::LARGEST_LEAF)
            .filter(|&level| F::size(level) <= backing && F::size(level) > self.target);
        levels.map(|level| self.memory >> F::shift(level)).sum::<u64>() << F::PAGE_SHIFT
    }

    /// Checks every block of the result: its size, its address, and whether it is writable.
    fn check(&self, tables: &Guard<'_, '_, F, Arena>, case: &Case) -> anyhow::Result<()> {
        let most = self.target.max(F::size(0)).min(case.backing);
        // The step is an odd number of pages, so that every place in a table is checked.
        let stride = F::size(0).bytes() * 509;
        for offset in (0..self.memory).step_by(stride as usize) {
            let gpa = Gpa(GUEST_BASE + offset);
            let found = tables.translate(gpa)?.with_context(|| format!("{gpa} is not mapped"))?;
            ensure!(found.hpa.0 == HOST_BASE + offset, "{gpa} moved to {}", found.hpa);
            ensure!(found.size == most, "{gpa} is in a leaf of {}, not {most}", found.size);
            let protected = case.what == What::Call;
            let expected = Attributes { write: !protected, ..Attributes::RAM };
            ensure!(found.attributes == expected, "{gpa} has {:?}", found.attributes);
        }
        Ok(())
    }
}

/// Does what the VMM's call does; this part is timed.
#[inline(never)]
fn run<F: Format, W: SplitWalk>(
    guard: &mut Guard<'_, '_, F, Arena>,
    pte: GpaRange,
    target: PageSize,
    case: &Case,
    cache: &mut Cache<'_, F>,
) -> anyhow::Result<()> {
    match case.when {
        SplitMoment::Enable => {
            if case.what == What::Call {
                guard.write_protect(pte)?;
                guard.invalidate();
            }
            for chunk in steps(pte, CHUNK) {
                split_range::<F, W>(guard, chunk, target, cache)?;
            }
        }
        SplitMoment::Clear => {
            for word in steps(pte, WORD << F::PAGE_SHIFT) {
                split_range::<F, W>(guard, word, target, cache)?;
                // Protects after the split, so that only the pages asked for are protected.
                if case.what == What::Call {
                    guard.write_protect(word)?;
                }
            }
        }
    }
    Ok(())
}
