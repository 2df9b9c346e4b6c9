//! Tables of a guest, newly built before each turn.

use crate::arena::Arena;
use crate::limit::TablePages;
use anyhow::{Context, ensure};
use slat::format::Kind;
use slat::{
    Attributes, BreakBeforeMake, Contention, Format, Frame, Gpa, GpaRange, Guard, Hpa,
    Interruption, OpCounts, PageSize, SplitError, SplitWalk, TableCache, Tables, Translation,
    UnloadedTables, Vmid,
};
use slat_lab::failure::bad_input;
use slat_lab::size::Size;
use std::sync::atomic::AtomicU64;

/// Guest memory must be a multiple of this, for the largest blocks.
pub const STEP: u64 = 1 << 30;

/// The most guest memory that fits into 40 bits of guest addresses above its start.
const MOST: u64 = 512 << 30;

/// Checks that memory consists of whole blocks of the largest size, and that guest addresses reach
/// it.
///
/// # Errors
/// Names the sizes that are allowed.
pub fn whole_blocks(memory: Size) -> anyhow::Result<Size> {
    if !memory.bytes().is_multiple_of(STEP) || memory.bytes() > MOST {
        return Err(bad_input(format!(
            "--memory {memory} is not a number of 1g blocks up to {}; take a multiple of 1g",
            Size(MOST)
        )));
    }
    Ok(memory)
}

/// Guest address at which RAM begins.
const GUEST_BASE: u64 = 1 << 30;

/// Host address at which the guest's memory would be; none of it is touched.
const HOST_BASE: u64 = 1 << 40;

/// Bytes of a step of an operation that needs table pages: the cache is filled for one step.
pub const CHUNK: u64 = 1 << 30;

/// Table pages that a chunk may take: 512 of the last level, one of the next level, and two above.
const CHUNK_TABLES: usize = 512 + 1 + 2;

/// A guest of some memory, in one format.
#[derive(Clone, Copy)]
pub struct Fixture<F> {
    format: F,
    memory: u64,
}

impl<F: Format> Fixture<F> {
    /// Makes a guest of `memory` bytes.
    pub fn new(format: F, memory: u64) -> Self {
        Self { format, memory }
    }

    /// Returns the format.
    pub fn format(&self) -> &F {
        &self.format
    }

    /// Returns the range of all memory.
    pub fn range(&self) -> GpaRange {
        self.part(0, self.memory)
    }

    /// Returns the range of `bytes` from `offset` on.
    pub fn part(&self, offset: u64, bytes: u64) -> GpaRange {
        GpaRange::new(Gpa(GUEST_BASE + offset), bytes).expect("memory is not empty and not huge")
    }

    /// Returns the range of the page with that number.
    pub fn page(&self, number: u64) -> GpaRange {
        self.part(number << F::PAGE_SHIFT, 1 << F::PAGE_SHIFT)
    }

    /// Returns the number of pages of the memory.
    pub fn pages(&self) -> u64 {
        self.memory >> F::PAGE_SHIFT
    }

    /// Returns an empty bitmap of the pages.
    pub fn bitmap(&self) -> Vec<u64> {
        vec![0; self.pages().div_ceil(64) as usize]
    }

    /// Returns the host address of `range`.
    pub fn host(range: &GpaRange) -> Hpa {
        Hpa(range.start().0 - GUEST_BASE + HOST_BASE)
    }

    /// Returns empty tables.
    pub fn empty<'a>(&self, arena: &'a Arena) -> anyhow::Result<UnloadedTables<'a, F, Arena>> {
        Ok(UnloadedTables::new(self.format, Vmid(1), 40, arena)?)
    }

    /// Returns tables that map `bytes` from the start by leaves of at most `leaves`.
    pub fn mapped<'a>(
        &self,
        arena: &'a Arena,
        bytes: u64,
        leaves: PageSize,
        attributes: Attributes,
    ) -> anyhow::Result<UnloadedTables<'a, F, Arena>> {
        let mut tables = self.empty(arena)?;
        let mut storage = storage(CHUNK_TABLES);
        let mut cache = TableCache::new(arena, &mut storage);
        for chunk in steps(self.part(0, bytes), CHUNK) {
            cache.fill(usize::MAX)?;
            tables.map(chunk, Self::host(&chunk), attributes, leaves, &mut cache)?;
        }
        Ok(tables)
    }

    /// Returns live tables that map all memory by leaves of at most `leaves`.
    pub fn live<'a>(
        &self,
        arena: &'a Arena,
        leaves: PageSize,
        attributes: Attributes,
    ) -> anyhow::Result<Tables<'a, F, Arena>> {
        Ok(self.mapped(arena, self.memory, leaves, attributes)?.activate())
    }

    /// Returns random addresses of the memory: the same ones each time.
    pub fn addresses(&self, count: usize) -> Vec<u64> {
        let mut rng = fastrand::Rng::with_seed(3);
        let start = self.range().start().0;
        (0..count).map(|_| start + rng.u64(..self.memory)).collect()
    }

    /// Returns the sum that [`look_up`] must return for `addresses`: of their translations, and of
    /// one for each, as all are writable.
    pub fn sum(&self, addresses: &[u64]) -> u64 {
        let delta = HOST_BASE - GUEST_BASE;
        addresses.iter().fold(0, |sum, gpa| sum.wrapping_add(gpa + delta).wrapping_add(1))
    }

    /// Returns the entries of the last level.
    pub fn entries<'t>(
        &self,
        tables: &'t Tables<'_, F, Arena>,
        arena: &'t Arena,
    ) -> Vec<&'t [AtomicU64]> {
        use slat::Platform;
        let pages = TablePages::of(tables, arena, self.range());
        let ptes = |&(hpa, len): &(Hpa, usize)| {
            let table = arena.entries(hpa).cast::<AtomicU64>();
            // SAFETY: a table in use has that many entries, each an atomic word, and stays while
            // the tables are borrowed, because no thread retires one here.
            unsafe { std::slice::from_raw_parts(table.as_ptr().cast_const(), len) }
        };
        pages.last().iter().map(ptes).collect()
    }

    /// Checks pages all over `range`: their translations, sizes and attributes.
    pub fn check(
        &self,
        tables: &Guard<'_, '_, F, Arena>,
        range: GpaRange,
        size: PageSize,
        right: impl Fn(Attributes) -> bool,
    ) -> anyhow::Result<()> {
        // The step is an odd number of pages, so that every place in a table is checked.
        for gpa in (range.start().0..range.end().0).step_by(509 << F::PAGE_SHIFT) {
            let gpa = Gpa(gpa);
            let found = tables.translate(gpa)?.with_context(|| format!("{gpa} is not mapped"))?;
            ensure!(found.hpa.0 == gpa.0 - GUEST_BASE + HOST_BASE, "{gpa} moved to {}", found.hpa);
            ensure!(found.size == size, "{gpa} is in a leaf of {}, not {size}", found.size);
            ensure!(right(found.attributes), "{gpa} has {:?}", found.attributes);
        }
        Ok(())
    }
}

/// Looks up all addresses; returns the sum of their translations, and of one for each that is
/// writable.
#[inline]
pub fn look_up<F: Format>(
    guard: &Guard<'_, '_, F, Arena>,
    addresses: &[u64],
) -> Result<u64, Contention> {
    let mut sum = 0u64;
    for &gpa in addresses {
        sum = sum.wrapping_add(value(guard.translate(Gpa(gpa))?));
    }
    Ok(sum)
}

/// Returns what a lookup adds to the sum of [`look_up`].
#[inline(always)]
pub fn value(found: Option<Translation>) -> u64 {
    found.map_or(0, |found| found.hpa.0.wrapping_add(found.attributes.write.into()))
}

/// As [`look_up`], by a walk that promises less than the engine's: the root is at level `ROOT`, all
/// addresses are within it, tables withhold no right, and no other thread changes an entry.
#[inline]
pub fn look_up_plainly<F: Format, const ROOT: u8>(
    tables: &Tables<'_, F, Arena>,
    arena: &Arena,
    addresses: &[u64],
) -> u64 {
    use slat::Platform;
    let entry = |table: Hpa, gpa: u64, level: u8| {
        let index = (gpa >> F::shift(level)) as usize & (F::entries(level) - 1);
        // SAFETY: a table in use has that many entries, and stays while the tables are borrowed,
        // because no thread retires one here.
        unsafe { arena.entries(table).add(index).as_ref() }.load()
    };
    let walk = |gpa: u64| {
        let mut table = tables.root();
        for level in (1..=ROOT).rev() {
            let raw = entry(table, gpa, level);
            if F::kind(raw, level) != Kind::Table {
                return 0;
            }
            table = F::table_address(raw);
        }
        let raw = entry(table, gpa, 0);
        if F::kind(raw, 0) != Kind::Leaf {
            return 0;
        }
        let hpa = F::leaf_address(raw, 0).0 | gpa & (F::size(0).bytes() - 1);
        hpa.wrapping_add(tables.format().decode(raw, 0).write.into())
    };
    addresses.iter().fold(0, |sum, &gpa| sum.wrapping_add(walk(gpa)))
}

/// Splits `range`, as any caller can: it fills the cache once table pages are needed, and tops it
/// up once some are used.
#[inline]
pub fn split_range<F: Format, W: SplitWalk>(
    guard: &mut Guard<'_, '_, F, Arena>,
    range: GpaRange,
    target: PageSize,
    cache: &mut TableCache<'_, F, Arena>,
) -> anyhow::Result<()> {
    if !cache.is_empty() {
        cache.fill(usize::MAX)?;
    }
    let mut rest = range;
    loop {
        match guard.split_by::<W>(rest, target, cache, W::MERGED) {
            Ok(_) => return Ok(()),
            Err(Interruption { at, reason: SplitError::CacheEmpty }) => {
                rest = GpaRange::new(at, rest.end().0 - at.0)?;
                cache.fill(usize::MAX)?;
            }
            Err(stopped) => return Err(stopped.into()),
        }
    }
}

/// Returns what CPUs of the format require when a live entry changes its size, unless they report
/// more.
pub fn breaks_of<F: Format>() -> BreakBeforeMake {
    if F::REFILL_BREAKS { BreakBeforeMake::Always } else { BreakBeforeMake::Never }
}

/// Returns storage for a cache of that many table pages.
pub fn storage(pages: usize) -> Vec<Option<Frame>> {
    let mut storage = Vec::new();
    storage.resize_with(pages, || None);
    storage
}

/// Returns storage for the table pages of a chunk.
pub fn chunk_storage() -> Vec<Option<Frame>> {
    storage(CHUNK_TABLES)
}

/// Returns `range` in steps of `step` bytes; the last may be shorter.
pub fn steps(range: GpaRange, step: u64) -> impl Iterator<Item = GpaRange> {
    let end = range.end().0;
    (range.start().0..end)
        .step_by(step as usize)
        .map(move |at| GpaRange::new(Gpa(at), step.min(end - at)).expect("a step is not empty"))
}

/// Returns what a guard counted, and the number of invalidations.
pub fn counted(counts: OpCounts, invalidations: u64) -> Vec<(&'static str, u64)> {
    vec![
        ("entries_read", counts.entries_read),
        ("entries_written", counts.entries_written),
        ("tables_built", counts.tables_built),
        ("invalidations", invalidations),
    ]
}
