//! Collapse: a table whose leaves continue each other becomes one block, in place.
//!
//! # Protocol
//! 1. Each child is sealed by compare-and-swap: it stays valid, hardware goes on setting accessed
//!    and dirty, other software waits. Agreement is decided on the sealed values, and for the first
//!    child also by comparison with the value that the caller has accepted: so a child that was
//!    unmapped or protected meanwhile is found, and all seals are taken back.
//! 2. The parent's entry changes from the link to the block, sealed as well; or, where the CPU
//!    demands a break, to a frozen marker.
//! 3. The invalidation of the leaves and of walk caches completes. Until then a vCPU may be in the
//!    table, and set bits there.
//! 4. The children are swapped for retired markers; what hardware has set in them goes into the
//!    block, whose seal goes with the same compare-and-swap, or which takes the marker's place.
//! 5. The table is retired; it is given back once no walker can be in it.
//!
//! # Batches
//! Neighbouring tables, of up to 1 GiB, share steps 3 to 5: one invalidation covers all of them.
//! Step 2 of a table follows its step 1; with a break it waits for the last table of the batch, so
//! that no block stands broken while leaves are sealed.
//!
//! *Invariants*: (a) every leaf of a table of the batch is sealed until step 4 of that table, and
//! step 4 of none precedes the invalidation, which follows step 2 of all: so no leaf's state is
//! lost, and no other software changes what a block is made of. (b) The table that holds the
//! parents' entries stays: nothing unlinks a table before its entries are its own, and those of the
//! batch are this thread's. (c) A thread that waits for another's entry has no batch: it finishes
//! its batch first. So threads do not wait for each other in a circle.
//!
//! The addresses of the batch's tables are kept on the stack, or, once a batch has retired a table,
//! in the retired markers of that table. Between the first seal and the last release nothing is
//! allocated, and nothing is called except the invalidation and the caller's `fits`.

use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize};
use crate::format::{Attributes, Format, Kind};
use crate::guard::{Guard, GuardState};
use crate::invalidation::PendingFlush;
use crate::platform::Platform;
use crate::retired::Chain;
use crate::sync::relax;
use crate::table::{self, Pte, folded, pte};
use crate::tables::{Interruption, Tables};
use crate::walk::{Entry, Flow, PATIENCE, Visitor, WalkCounts, links};
use core::marker::PhantomData;

use super::split::SplitError;
use super::split::way::MOST_MERGED;

/// The most guest memory whose tables share an invalidation: other threads wait for its leaves.
const MOST_BYTES: u64 = 1 << 30;

/// The most tables of a batch whose addresses are on the stack.
const FEW: usize = MOST_MERGED;

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Turns tables in `range`, where it covers them, back into blocks of at most `to`; returns
    /// the bytes of the blocks.
    ///
    /// A table becomes a block if all its leaves are there, map contiguous memory from an aligned
    /// address, and agree in rights, memory type and software bits; other tables stay as they are.
    /// The block is accessed, or dirty, if one of the leaves is. Translations stay as they are at
    /// every moment, except that on a CPU that demands break-before-make an access faults while the
    /// block stands broken.
    ///
    /// Blocks of up to 1 GiB together cost an invalidation, executed inside; the first 20 blocks of
    /// a call cost one of their own, and where the CPU demands a break, each 20 do. Until it has
    /// completed, other threads that change these leaves wait, and may find them *contended*.
    ///
    /// A call waits for entries that other threads hold, leaves and links together, for as long as
    /// any operation waits for one entry.
    ///
    /// # Errors
    /// Nothing is done on [`SplitError::Range`], [`SplitError::LeafSize`] and, if a device that
    /// takes the engine's mark for another bit walks the tables, [`SplitError::Shared`]. On
    /// [`SplitError::Contended`] another thread held an entry of the table at that address for too
    /// long. All others before it that agree are done, and those behind it as well, unless a thread
    /// held an entry for so long that the walk ended.
    pub fn collapse(
        &mut self,
        range: GpaRange,
        to: PageSize,
    ) -> Result<u64, Interruption<SplitError>> {
        self.collapse_where(range, to, |_| true)
    }

    /// As [`Guard::collapse`], for those tables whose leaves, which agree but for accessed and
    /// dirty state, are accepted by `fits`. It is called with the attributes of the first leaf
    /// before any leaf of that table is sealed, and a table whose leaves differ from these by then
    /// stays: so its answer cannot be out of date. If it panics, the blocks before it are made, and
    /// no leaf stays held. It does not change the range: this thread holds leaves of tables that it
    /// accepted before.
    ///
    /// # Errors
    /// Those of [`Guard::collapse`].
    pub fn collapse_where(
        &mut self,
        range: GpaRange,
        to: PageSize,
        fits: impl Fn(&Attributes) -> bool,
    ) -> Result<u64, Interruption<SplitError>> {
        let tables = self.tables;
        let to = match tables.check(&range) {
            Ok(()) if !tables.format.marks_valid() => Err(SplitError::Shared),
            Ok(()) => F::level_of(to).map_err(SplitError::LeafSize),
            Err(error) => Err(SplitError::Range(error)),
        };
        let to = match to {
            Ok(to) => to,
            Err(reason) => return Self::stopped(range.start(), reason),
        };
        let before = self.sums.counts.bytes_changed;
        let (contended, result) = {
            let sums = &mut self.sums;
            let (patience, contended, batch) = (PATIENCE, None, None);
            let (few, spare, waited) = ([0; FEW], None, 0);
            let mut visitor =
                Collapse { tables, to, fits, sums, patience, waited, contended, batch, few, spare };
            let (start, end) = (range.start().0, range.end().0);
            let result = tables.walk(start, end, &mut visitor);
            visitor.finish();
            (visitor.contended, result)
        };
        let bytes = self.sums.counts.bytes_changed - before;
        match (contended, result) {
            // After an error the tables behind it are not done either.
            (Some(at), _) => Self::stopped(Gpa(at), SplitError::Contended),
            (None, Err(at)) => Self::stopped(at, SplitError::Contended),
            (None, Ok(())) => Ok(bytes),
        }
    }
}

struct Collapse<'t, 'g, F: Format, P: Platform, W> {
    tables: &'t Tables<'t, F, P>,
    to: u8,
    /// Tells which leaves may become a block.
    fits: W,
    sums: &'g mut GuardState,
    /// The turns that the call may still wait: for leaves here, and for entries in the walk.
    patience: u32,
    /// The turns that it has waited for leaves.
    waited: u32,
    /// The first table that was skipped because another thread held an entry.
    contended: Option<u64>,
    batch: Option<Batch<'t>>,
    /// The addresses of the batch's tables, by place; 0 where there is none.
    few: [u64; FEW],
    /// An unlinked table of pages that holds them, in retired markers, in place of `few`.
    spare: Option<Hpa>,
}

/// Tables below one table whose leaves are sealed. A table's place is its distance from the first.
struct Batch<'t> {
    /// The entry that links the first, or holds its block.
    first: &'t Pte,
    /// The first address that the first covers.
    start: u64,
    /// The place of the last.
    last: usize,
    /// The level of the entries.
    level: u8,
}

/// Reason why a table does not become a block.
enum Unfit {
    /// Its leaves do not agree.
    Differs,
    /// Another thread holds one of them.
    Held,
}

impl<'t, F: Format, P: Platform, W: Fn(&Attributes) -> bool> Visitor<'t, F>
    for Collapse<'t, '_, F, P, W>
{
    const LEVELS: Levels = Levels::above(0);
    const TABLES: bool = true;

    #[inline(always)]
    fn leave(&mut self, level: u8, entry: Entry<'t>, children: &'t [Pte]) {
        let fits = level <= self.to && level <= F::LARGEST_LEAF && entry.whole::<F>(level);
        if fits || self.batch.is_some() {
            self.left(level, &entry, children, fits);
        }
    }

    #[inline(always)]
    fn held(&mut self, _level: u8, _entry: &Entry<'t>) -> Flow {
        self.patience = self.patience.saturating_sub(1);
        self.finish();
        Flow::Wait
    }

    #[inline(always)]
    fn again(&mut self) {
        self.patience = self.patience.saturating_sub(1);
        self.finish();
    }

    #[inline(always)]
    fn waited(&self) -> u32 {
        self.waited
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: WalkCounts) {
        self.sums.counts.entries_read += tally.read;
    }
}

impl<'t, F: Format, P: Platform, W: Fn(&Attributes) -> bool> Collapse<'t, '_, F, P, W> {
    #[inline(never)]
    fn left(&mut self, level: u8, entry: &Entry<'t>, children: &'t [Pte], fits: bool) {
        if self.batch.as_ref().is_some_and(|batch| !self.joins(batch, level, entry)) {
            self.finish();
        }
        if !fits {
            return;
        }
        let mut result = self.table(level, entry, children);
        if matches!(result, Err(Unfit::Held)) && self.batch.is_some() {
            self.finish();
            result = self.table(level, entry, children);
        }
        match result {
            Err(Unfit::Held) => _ = self.contended.get_or_insert(entry.start),
            Ok(()) => self.add(level, entry),
            Err(Unfit::Differs) => {}
        }
    }

    fn table(&mut self, level: u8, entry: &Entry<'_>, children: &[Pte]) -> Result<(), Unfit> {
        // Reads before it seals: most tables that do not fit show it at once.
        let first = children[0].load();
        self.sums.counts.entries_read += 1;
        if F::kind(first, level - 1) != Kind::Leaf || !continues::<F>(first, first, level, 0) {
            return Err(Unfit::Differs);
        }
        let plain = Plain::<F>::of(first, level);
        for (index, child) in children.iter().enumerate().skip(1) {
            let raw = child.load();
            if plain.has(index, raw) {
                continue;
            }
            if F::kind(raw, level - 1) == Kind::Leaf && !continues::<F>(first, raw, level, index)
                || matches!(
                    F::kind(raw, level - 1),
                    Kind::Empty | Kind::Reserved | Kind::Owned | Kind::Retired | Kind::Table
                )
            {
                self.sums.counts.entries_read += index as u64;
                return Err(Unfit::Differs);
            }
        }
        self.sums.counts.entries_read += children.len() as u64 - 1;
        if !(self.fits)(&self.tables.format.decode(first, level - 1)) {
            return Err(Unfit::Differs);
        }
        let result = self.sealed(level, entry, children, first);
        if let Err((sealed, _)) = result {
            unseal::<F>(&children[..sealed]);
        }
        result.map_err(|(_, unfit)| unfit)
    }

    /// Seals the leaves, if they continue `first`. Without a break it also replaces the table. An
    /// error has the number of seals to be taken back.
    fn sealed(
        &mut self,
        level: u8,
        entry: &Entry<'_>,
        children: &[Pte],
        mut first: u64,
    ) -> Result<(), (usize, Unfit)> {
        let mut status = 0;
        let alone = self.batch.is_none();
        let plain = Plain::<F>::of(first, level);
        for (index, child) in children.iter().enumerate() {
            let raw = child.load();
            if index != 0 && plain.has(index, raw) && child.exchange(raw, raw | F::MARK).is_ok() {
                status |= raw & F::STATUS;
                continue;
            }
            let before = self.patience;
            let patience = if alone { Some(&mut self.patience) } else { None };
            let raw = seal::<F>(child, level - 1, patience);
            self.waited += before - self.patience;
            let raw = raw.map_err(|unfit| (index, unfit))?;
            let same = continues::<F>(first, raw, level, index);
            // Its state may have been cleared since the first read.
            first = if index == 0 { raw } else { first };
            if !same {
                return Err((index + 1, Unfit::Differs));
            }
            status |= raw & F::STATUS;
        }
        if self.breaks() {
            return Ok(());
        }
        let link = entry.pte.update(|raw| {
            links::<F>(raw, level, entry.raw).then(|| {
                let bits = F::attribute_bits(first, level - 1) | status;
                F::MARK | F::leaf(bits, level, F::leaf_address(first, level - 1))
            })
        });
        link.map(drop).map_err(|_| (children.len(), Unfit::Held))
    }
}

impl<'t, F: Format, P: Platform, W> Collapse<'t, '_, F, P, W> {
    fn breaks(&self) -> bool {
        self.tables.platform.break_before_make().breaks_size_change()
    }

    /// Returns the most places of a batch whose entries are at `level`.
    fn most(&self, level: u8) -> usize {
        let places = match self.spare {
            _ if self.breaks() => MOST_MERGED,
            Some(_) => F::entries(0),
            None => FEW,
        };
        places.min((MOST_BYTES >> F::shift(level)) as usize).max(1)
    }

    /// Returns whether the table that `entry` links may be one of the batch.
    fn joins(&self, batch: &Batch<'_>, level: u8, entry: &Entry<'_>) -> bool {
        level == batch.level
            && (entry.start ^ batch.start) >> F::shift(level + 1) == 0
            && ((entry.start - batch.start) >> F::shift(level)) < self.most(level) as u64
    }

    /// Returns the entries of a table at `level`, whose leaves this thread has sealed or retired.
    fn children(&self, table: Hpa, level: u8) -> &'t [Pte] {
        // SAFETY: a table that was linked has that many entries. It is not given back: this thread
        // is inside the tables, or has unlinked it, and has not handed it on.
        unsafe { table::entries(self.tables.platform, table, F::entries(level)) }
    }

    /// Notes the table of `place`, or takes the note back: address 0.
    fn note(&mut self, place: usize, table: Hpa) {
        match self.spare {
            None => self.few[place] = table.0,
            Some(spare) => {
                let pte = &self.children(spare, 0)[place];
                pte.release(pte.load(), F::retired(table));
            }
        }
    }

    /// Returns the table of `place`, if there is one.
    fn noted(&self, place: usize) -> Option<Hpa> {
        let table = match self.spare {
            None => Hpa(self.few[place]),
            Some(spare) => F::table_address(self.children(spare, 0)[place].load()),
        };
        Some(table).filter(|table| table.0 != 0)
    }

    /// Adds a table whose leaves are sealed, and finishes the batch if it is full.
    fn add(&mut self, level: u8, entry: &Entry<'t>) {
        let first = Batch { first: entry.pte, start: entry.start, last: 0, level };
        let batch = self.batch.get_or_insert(first);
        let place = ((entry.start - batch.start) >> F::shift(level)) as usize;
        batch.last = place;
        self.note(place, F::table_address(entry.raw));
        if place + 1 == self.most(level) {
            self.finish();
        }
    }

    /// Does what is left of the protocol for the tables of the batch.
    #[inline(never)]
    fn finish(&mut self) {
        let Some(Batch { first, start, last, level }) = self.batch.take() else { return };
        let (tables, breaks, size) = (self.tables, self.breaks(), F::size(level).bytes());
        let mut read = 0;
        let ptes = if last == 0 {
            core::slice::from_ref(first)
        } else {
            let (ptes, at) = tables.descend(start, level, |_, _| read += 1);
            debug_assert_eq!(at, level, "a table that holds entries of a batch was unlinked");
            ptes
        };
        self.sums.counts.entries_read += read;
        let base = |place: usize| start + place as u64 * size;
        let mut stale = PendingFlush::NOTHING;
        for place in 0..=last {
            let Some(table) = self.noted(place) else { continue };
            if breaks {
                // The link is still there.
                let link = pte::<F>(ptes, base(place), level).update(|raw| {
                    let there =
                        F::kind(raw, level) == Kind::Table && F::table_address(raw) == table;
                    there.then(|| F::frozen(table))
                });
                if link.is_err() {
                    unseal::<F>(self.children(table, level - 1));
                    self.note(place, Hpa(0));
                    let _ = self.contended.get_or_insert(base(place));
                    continue;
                }
                self.sums.counts.broken += 1;
            }
            stale.table(base(place), base(place) + size);
        }
        let Some(what) = tables.invalidation(&stale) else { return };
        tables.platform.invalidate(&what);
        self.sums.counts.invalidations += 1;
        let mut chain = Chain::<F>::EMPTY;
        let mut spare = None;
        for place in 0..=last {
            let Some(table) = self.noted(place) else { continue };
            self.note(place, Hpa(0));
            let pte = pte::<F>(ptes, base(place), level);
            let children = self.replace(table, pte, level);
            if spare.is_none() && self.spare.is_none() && level == 1 && last + 1 == FEW {
                spare = Some(table);
            } else {
                chain.add(table, &children[0]);
            }
        }
        tables.platform.publish();
        self.spare = self.spare.or(spare);
        tables.retired.invalidated(tables.platform, &chain);
    }

    /// Retires the entries of a table that no hardware is in any more, and completes its block at
    /// `pte`.
    fn replace(&mut self, table: Hpa, pte: &Pte, level: u8) -> &'t [Pte] {
        let children = self.children(table, level - 1);
        let (mut first, mut status, mut members) = (None, 0, 0);
        for child in children {
            // This update never fails: no other software changes a sealed leaf.
            let raw = child.update(|_| Some(F::retired(Hpa(0)))).unwrap_or(0) & !F::MARK;
            first = first.or(Some(raw));
            status |= raw & F::STATUS;
            // Leaves that agree may be members of groups or not.
            members += i64::from(folded::<F>(raw));
        }
        let first = first.unwrap_or(0);
        if self.breaks() {
            let bits = F::attribute_bits(first, level - 1) | status;
            let block = F::leaf(bits, level, F::leaf_address(first, level - 1));
            pte.release(F::frozen(table), block);
        } else {
            let _ = pte.update(|raw| Some((raw | status) & !F::MARK));
        }
        let GuardState { counts, sizes, .. } = &mut *self.sums;
        counts.entries_written += 2 * children.len() as u64 + 2;
        counts.bytes_changed += F::size(level).bytes();
        sizes.add(level, 1);
        sizes.add(level - 1, members - children.len() as i64);
        sizes.add_members(level - 1, -members);
        children
    }
}

/// Also where the caller's `fits` panics.
impl<F: Format, P: Platform, W> Drop for Collapse<'_, '_, F, P, W> {
    fn drop(&mut self) {
        self.finish();
        if let Some(spare) = self.spare.take() {
            let mut chain = Chain::<F>::EMPTY;
            chain.add(spare, &self.children(spare, 0)[0]);
            self.tables.retired.invalidated(self.tables.platform, &chain);
        }
    }
}

/// Releases sealed leaves. The thread that holds the first member of a group holds the group: it is
/// released last.
fn unseal<F: Format>(children: &[Pte]) {
    for child in children.iter().rev() {
        let _ = child.update(|raw| Some(raw & !F::MARK));
    }
}

/// A fast test that finds most leaves that continue the first leaf of a table.
struct Plain<F> {
    /// The bits of the first leaf that its neighbours have as well.
    bits: u64,
    base: u64,
    writable: bool,
    /// The level of the leaves.
    level: u8,
    format: PhantomData<F>,
}

impl<F: Format> Plain<F> {
    /// Makes the test for a table linked at `level`.
    #[inline(always)]
    fn of(first: u64, level: u8) -> Self {
        let level = level - 1;
        let (bits, base) = (F::attribute_bits(first, level), F::leaf_address(first, level).0);
        Self { bits, base, writable: first & F::WRITE != 0, level, format: PhantomData }
    }

    /// Returns whether `raw`, child `index`, is a leaf on its own that no thread holds, and
    /// [`continues`] the first. If this returns false, [`continues`] may still be true.
    #[inline(always)]
    fn has(&self, index: usize, raw: u64) -> bool {
        let hpa = Hpa(self.base + ((index as u64) << F::shift(self.level)));
        let leaf = F::leaf(self.bits, self.level, hpa);
        (raw ^ leaf) & !F::STATUS == 0 && (raw & F::WRITE != 0) == self.writable
    }
}

/// Seals a leaf, and returns it as it was. Waits for another thread only with patience.
#[cold]
#[inline(never)]
fn seal<F: Format>(pte: &Pte, level: u8, mut patience: Option<&mut u32>) -> Result<u64, Unfit> {
    for _ in 0..PATIENCE {
        let raw = pte.load();
        match F::kind(raw, level) {
            Kind::Leaf => {
                if pte.exchange(raw, raw | F::MARK).is_ok() {
                    return Ok(raw);
                }
            }
            Kind::Frozen | Kind::Sealed => match &mut patience {
                Some(turns) if **turns > 1 => {
                    **turns -= 1;
                    relax();
                }
                _ => return Err(Unfit::Held),
            },
            // Retired: by another collapse, which has done the work, or by an unmap.
            Kind::Empty | Kind::Reserved | Kind::Owned | Kind::Table | Kind::Retired => {
                return Err(Unfit::Differs);
            }
        }
    }
    Err(Unfit::Held)
}

/// Returns whether `raw`, child `index` of a table linked at `level`, belongs to the block that
/// begins with `first`, regardless of its state.
#[inline]
fn continues<F: Format>(first: u64, raw: u64, level: u8, index: usize) -> bool {
    let base = F::leaf_address(first, level - 1).0;
    let bits = |raw| F::attribute_bits(raw, level - 1) & !F::STATUS;
    base & ((1 << F::shift(level)) - 1) == 0
        && F::leaf_address(raw, level - 1).0 == base + ((index as u64) << F::shift(level - 1))
        && bits(raw) == bits(first)
        // The right to write may be a bit that also tells the dirty state.
        && (raw & F::WRITE == 0) == (first & F::WRITE == 0)
}
