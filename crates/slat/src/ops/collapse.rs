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
//! Between the first seal and the last release, nothing is allocated, and nothing is called except
//! the invalidation; a table's entries and one more are held.

use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize};
use crate::format::{Attributes, Format, Kind};
use crate::guard::{Guard, Sums};
use crate::platform::Platform;
use crate::retired::Chain;
use crate::shootdown::Owed;
use crate::sync::relax;
use crate::table::Pte;
use crate::tables::{Halted, Tables};
use crate::walk::{Entry, PATIENCE, Tally, Visitor, links};
use core::marker::PhantomData;

use super::folded;
use super::split::SplitError;

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Turns tables in `range`, where it covers them, back into blocks of at most `to`; returns
    /// the bytes of the blocks.
    ///
    /// A table becomes a block if all its leaves are there, map contiguous memory from an aligned
    /// address, and agree in rights, memory type and all software bits that are no consumer's mark;
    /// other tables stay as they are. The block is accessed, dirty, or dirty for a
    /// [consumer](crate::Consumer), if one of the leaves is. Translations stay as they are at every
    /// moment, except that on a CPU that demands break-before-make an access faults while the block
    /// stands broken. Each block costs an invalidation, executed inside.
    ///
    /// # Errors
    /// Nothing is done on [`SplitError::Range`], [`SplitError::LeafSize`] and, if a device that
    /// takes the engine's mark for another bit walks the tables, [`SplitError::Shared`]. On
    /// [`SplitError::Contended`] another thread held an entry of the table at that address for too
    /// long. All others before it that agree are done, and those behind it as well, unless a thread
    /// held an entry for so long that the walk ended. On [`SplitError::Paused`] all that precedes
    /// the address is done.
    pub fn collapse(&mut self, range: GpaRange, to: PageSize) -> Result<u64, Halted<SplitError>> {
        self.collapse_where(range, to, |_| true)
    }

    /// As [`Guard::collapse`], for those tables whose leaves, which agree but for accessed and
    /// dirty state, are accepted by `fits`. It is called with the attributes of the first leaf
    /// before any leaf is sealed, and a table whose leaves differ from these by then stays: so its
    /// answer cannot be out of date, and if it panics no leaf is held. It gets the user's software
    /// bits, and no marks of consumers.
    ///
    /// # Errors
    /// Those of [`Guard::collapse`].
    pub fn collapse_where(
        &mut self,
        range: GpaRange,
        to: PageSize,
        fits: impl Fn(&Attributes) -> bool,
    ) -> Result<u64, Halted<SplitError>> {
        let tables = self.tables;
        let to = match tables.check(&range) {
            Ok(()) if !tables.format.marks_valid() => Err(SplitError::Shared),
            Ok(()) => F::level_of(to).map_err(SplitError::LeafSize),
            Err(error) => Err(SplitError::Range(error)),
        };
        let to = match to {
            Ok(to) => to,
            Err(why) => return Self::halted(range.start(), why),
        };
        let before = self.sums.counts.bytes_changed;
        let sums = &mut self.sums;
        let patience = PATIENCE;
        let mut visitor = Collapse { tables, to, fits, sums, patience, contended: None };
        let mut budget = self.budget;
        let result = tables.walk_within(range.start().0, range.end().0, &mut visitor, &mut budget);
        let contended = visitor.contended;
        let paused = self.keep(budget);
        let bytes = self.sums.counts.bytes_changed - before;
        match (contended, result) {
            (Some(at), Ok(())) => Self::halted(Gpa(at), SplitError::Contended),
            // The tables behind it are not done either.
            (Some(at), Err(_)) => Self::ended(Gpa(at), paused, SplitError::Contended),
            (None, Err(at)) => Self::ended(at, paused, SplitError::Contended),
            (None, Ok(())) => Ok(bytes),
        }
    }
}

struct Collapse<'t, 'g, F: Format, P: Platform, W> {
    tables: &'t Tables<'t, F, P>,
    to: u8,
    /// Tells which leaves may become a block.
    fits: W,
    sums: &'g mut Sums,
    /// How many turns it still waits for leaves, of all tables.
    patience: u32,
    /// The first table that was skipped because another thread held an entry.
    contended: Option<u64>,
}

/// Reason why a table does not become a block.
enum Unfit {
    /// Its leaves do not agree.
    Differs,
    /// Another thread holds one of them.
    Held,
}

impl<'t, F: Format, P: Platform, W: Fn(&Attributes) -> bool> Visitor<'t, F>
    for Collapse<'_, '_, F, P, W>
{
    const LEVELS: Levels = Levels::above(0);
    const TABLES: bool = true;

    #[inline(always)]
    fn leave(&mut self, level: u8, entry: Entry<'t>, children: &'t [Pte]) {
        if level > self.to || level > F::LARGEST_LEAF || !entry.whole::<F>(level) {
            return;
        }
        match self.table(level, &entry, children) {
            Err(Unfit::Held) => _ = self.contended.get_or_insert(entry.start),
            Ok(()) | Err(Unfit::Differs) => {}
        }
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: Tally) {
        self.sums.counts.entries_read += tally.read;
    }
}

impl<F: Format, P: Platform, W: Fn(&Attributes) -> bool> Collapse<'_, '_, F, P, W> {
    fn table(&mut self, level: u8, entry: &Entry<'_>, children: &[Pte]) -> Result<(), Unfit> {
        // Reads before it seals: most tables that do not fit show it at once.
        let (first, state) = (children[0].load(), self.tables.state());
        self.sums.counts.entries_read += 1;
        if F::kind(first, level - 1) != Kind::Leaf || !continues::<F>(first, first, state, level, 0)
        {
            return Err(Unfit::Differs);
        }
        let plain = Plain::<F>::of(first, state, level);
        for (index, child) in children.iter().enumerate().skip(1) {
            let raw = child.load();
            if plain.has(index, raw) {
                continue;
            }
            if F::kind(raw, level - 1) == Kind::Leaf
                && !continues::<F>(first, raw, state, level, index)
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
        let mut attributes = self.tables.format.decode(first, level - 1);
        attributes.software = attributes.software.without(self.tables.consumers());
        if !(self.fits)(&attributes) {
            return Err(Unfit::Differs);
        }
        let result = self.sealed(level, entry, children, first);
        if let Err((sealed, _)) = result {
            // The thread that holds the first member of a group holds the group: it is released
            // last.
            for child in children[..sealed].iter().rev() {
                let _ = child.update(|raw| Some(raw & !F::MARK));
            }
        }
        result.map_err(|(_, unfit)| unfit)
    }

    /// Seals the leaves and replaces the table, if the leaves continue `first`; an error has the
    /// number of seals to be taken back.
    fn sealed(
        &mut self,
        level: u8,
        entry: &Entry<'_>,
        children: &[Pte],
        mut first: u64,
    ) -> Result<(), (usize, Unfit)> {
        let (mut status, state) = (0, self.tables.state());
        // Leaves that agree may be members of groups or not.
        let mut members = 0;
        let plain = Plain::<F>::of(first, state, level);
        for (index, child) in children.iter().enumerate() {
            let raw = child.load();
            if index != 0 && plain.has(index, raw) && child.exchange(raw, raw | F::MARK).is_ok() {
                status |= raw & state;
                continue;
            }
            let raw =
                seal::<F>(child, level - 1, &mut self.patience).map_err(|unfit| (index, unfit))?;
            let same = continues::<F>(first, raw, state, level, index);
            // Its state may have been cleared since the first read.
            first = if index == 0 { raw } else { first };
            if !same {
                return Err((index + 1, Unfit::Differs));
            }
            status |= raw & state;
            members += i64::from(folded::<F>(raw));
        }
        self.sums.counts.entries_written += 2 * children.len() as u64 + 2;
        let table = F::table_address(entry.raw);
        let breaks = self.tables.platform.break_before_make().breaks_size_change();
        let block = |status: u64| {
            let bits = F::attribute_bits(first, level - 1) | status;
            F::leaf(bits, level, F::leaf_address(first, level - 1))
        };
        // The value of the parent's entry while hardware may be in the table.
        let interim = |raw: u64| {
            if breaks {
                return F::frozen(table);
            }
            let block = block(status);
            let writable = raw & F::TABLE_WRITE == F::TABLE_WRITE;
            F::MARK | if writable { block } else { F::write_protected(block) }
        };
        let link = entry.pte.update(|raw| {
            let free = links::<F>(raw, level, entry.raw) && raw & F::MARK == 0;
            free.then(|| interim(raw))
        });
        let link = link.map_err(|_| (children.len(), Unfit::Held))?;

        let mut stale = Owed::NOTHING;
        stale.table(entry.start, entry.end);
        if let Some(what) = self.tables.invalidation(&stale) {
            self.tables.platform.invalidate(&what);
        }
        self.sums.counts.invalidations += 1;
        self.sums.counts.broken += u64::from(breaks);
        let retired = F::retired(Hpa(0));
        let status = children.iter().fold(0, |status, child| {
            // This update never fails: no other software changes a sealed leaf.
            status | child.update(|_| Some(retired)).unwrap_or(0) & state
        });
        if breaks {
            let writable = link & F::TABLE_WRITE == F::TABLE_WRITE;
            let block = block(status);
            let block = if writable { block } else { F::write_protected(block) };
            entry.pte.release(F::frozen(table), block);
        } else {
            let merged = if link & F::TABLE_WRITE == F::TABLE_WRITE {
                status
            } else {
                F::write_protected(block(status)) & state
            };
            let _ = entry.pte.update(|raw| Some((raw | merged) & !F::MARK));
        }
        self.tables.platform.publish();
        let mut chain = Chain::<F>::EMPTY;
        chain.add(table, &children[0]);
        self.tables.retired.invalidated(self.tables.platform, &chain);
        self.sums.counts.bytes_changed += entry.end - entry.start;
        self.sums.sizes.add(level, 1);
        self.sums.sizes.add(level - 1, members - children.len() as i64);
        self.sums.sizes.add_members(level - 1, -members);
        Ok(())
    }
}

/// A fast test that finds most leaves that continue the first leaf of a table.
struct Plain<F> {
    /// The bits of the first leaf that its neighbours have as well.
    bits: u64,
    base: u64,
    writable: bool,
    state: u64,
    /// The level of the leaves.
    level: u8,
    format: PhantomData<F>,
}

impl<F: Format> Plain<F> {
    /// Makes the test for a table linked at `level`, whose leaves may differ in the bits of
    /// `state`.
    #[inline(always)]
    fn of(first: u64, state: u64, level: u8) -> Self {
        let level = level - 1;
        let (bits, base) = (F::attribute_bits(first, level), F::leaf_address(first, level).0);
        Self { bits, base, writable: first & F::WRITE != 0, state, level, format: PhantomData }
    }

    /// Returns whether `raw`, child `index`, is a leaf on its own that no thread holds, and
    /// [`continues`] the first. If this returns false, [`continues`] may still be true.
    #[inline(always)]
    fn has(&self, index: usize, raw: u64) -> bool {
        let hpa = Hpa(self.base + ((index as u64) << F::shift(self.level)));
        let leaf = F::leaf(self.bits, self.level, hpa);
        (raw ^ leaf) & !self.state == 0 && (raw & F::WRITE != 0) == self.writable
    }
}

/// Seals a leaf, and returns it as it was.
#[cold]
#[inline(never)]
fn seal<F: Format>(pte: &Pte, level: u8, patience: &mut u32) -> Result<u64, Unfit> {
    for _ in 0..PATIENCE {
        let raw = pte.load();
        match F::kind(raw, level) {
            Kind::Leaf => {
                if pte.exchange(raw, raw | F::MARK).is_ok() {
                    return Ok(raw);
                }
            }
            Kind::Frozen | Kind::Sealed if *patience <= 1 => break,
            Kind::Frozen | Kind::Sealed => {
                *patience -= 1;
                relax();
            }
            // Retired: by another collapse, which has done the work, or by an unmap.
            Kind::Empty | Kind::Reserved | Kind::Owned | Kind::Table | Kind::Retired => {
                return Err(Unfit::Differs);
            }
        }
    }
    Err(Unfit::Held)
}

/// Returns whether `raw`, child `index` of a table linked at `level`, belongs to the block that
/// begins with `first`, regardless of the bits of `state`.
#[inline]
fn continues<F: Format>(first: u64, raw: u64, state: u64, level: u8, index: usize) -> bool {
    let base = F::leaf_address(first, level - 1).0;
    let bits = |raw| F::attribute_bits(raw, level - 1) & !state;
    base & ((1 << F::shift(level)) - 1) == 0
        && F::leaf_address(raw, level - 1).0 == base + ((index as u64) << F::shift(level - 1))
        && bits(raw) == bits(first)
        // The right to write may be a bit that also tells the dirty state.
        && (raw & F::WRITE == 0) == (first & F::WRITE == 0)
}
