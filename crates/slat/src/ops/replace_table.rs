//! Replace table: a block takes the place of a table and of all that is below it, in one step.
//!
//! # Protocol
//! 1. The table is held. A table of pages is held by its first entry alone, a higher one by all of
//!    its entries: a leaf is sealed, an entry without a leaf retired, a link held by its table. If
//!    another thread holds an entry for too long, all are given back, and nothing has changed.
//! 2. The link is frozen: hardware faults, other software waits.
//! 3. The invalidation of leaves and walk caches completes. No hardware marks the old leaves any
//!    more; what it has marked goes into the block.
//! 4. The entries that are held are retired, and the block takes the marker's place.
//! 5. The tables are retired; they are given back once no walker can be in them.
//!
//! *Invariant*: the thread that has sealed or retired the first entry of a table owns the table's
//! link: a collapse and an unmap hold that entry first as well, and a link changes its address only
//! when they have it. So the table is unlinked once.
//!
//! # Threads in a table of pages meanwhile
//! All entries but the first stay as they are, so the step is as short for a full table as for an
//! empty one. A thread that came in before step 2 goes on there, and leaves at the end of the
//! table, or at the first entry. What it does took effect before the block. *Invariant*: it can
//! lose nothing. No table hangs below a page. A leaf that it maps is replaced, as it would be a
//! moment later. A leaf that it takes out is its own, because this step hands out none. A state
//! that it clears, it reports. A mark that it sets after step 3 is for an access that comes again,
//! through the block. Marks that are not in the table, because a thread has a leaf frozen, are
//! assumed. No thread comes in after step 2.

use super::map::{MapError, maintenance};
use crate::addr::{Gpa, GpaRange, Hpa, PageSize};
use crate::format::{Attributes, Format, Kind};
use crate::guard::Guard;
use crate::invalidation::PendingFlush;
use crate::platform::Platform;
use crate::retired::Chain;
use crate::sync::relax;
use crate::table::{self, Pte};
use crate::tables::Interruption;
use crate::walk::PATIENCE;

impl<'t, F: Format, P: Platform> Guard<'t, '_, F, P> {
    /// Puts a leaf of `size`, which maps the memory at `hpa`, in place of the table around `gpa`,
    /// with all that is mapped below; returns the bytes of the leaf. This is how a fault answers
    /// that finds a block where there were pages. It takes as long for a full table of pages as for
    /// an empty one.
    ///
    /// Returns `None`, and does nothing, if no table has the place of such a leaf, if addresses of
    /// these tables have, or had, owners, or if a device that takes the engine's mark for another
    /// bit walks the tables. Then, [`Guard::unmap`] and [`Guard::map`].
    ///
    /// An invalidation is executed inside, between the old leaves and the new one, and accesses
    /// fault until it has completed. Afterwards the guest does not reach the memory of the old
    /// leaves, which is not handed out: the caller knows it, or unmaps it instead. The new leaf is
    /// accessed or dirty if `attributes` say so or if one of the old leaves is; where they say
    /// both, no old leaf is read. All else is as `attributes` say.
    ///
    /// It is an unmap and a map, of which other threads see nothing in between. A thread that is in
    /// the table already may go on there: it is told that it mapped a page, which the block has
    /// replaced. The caller keeps other threads from unmapping the memory between its decision
    /// and the end of the call, for instance by a lock; or it asks its host once more afterwards,
    /// behind a sequentially consistent fence. Memory that the guest may write through the old
    /// leaves, and that the new leaf does not map, loses what is written during the call.
    /// [`Guard::leaf_delta`] gets the new leaf, and not those that it replaces.
    ///
    /// # Errors
    /// Nothing is done on [`MapError::Range`], [`MapError::HostAddress`], [`MapError::LeafSize`],
    /// [`MapError::Attributes`], and on [`MapError::Contended`]: another thread held an entry of
    /// the table for too long.
    #[inline]
    pub fn replace_table(
        &mut self,
        gpa: Gpa,
        size: PageSize,
        hpa: Hpa,
        attributes: Attributes,
    ) -> Result<Option<u64>, Interruption<MapError>> {
        match self.table_to_replace(gpa, size) {
            Ok(Some(level)) => self.replaced(gpa, level, hpa, attributes),
            Ok(None) => Ok(None),
            Err(reason) => Self::stopped(gpa, reason),
        }
    }

    /// Returns the level of a leaf of `size`, if a table may be in its place.
    #[inline(always)]
    fn table_to_replace(&self, gpa: Gpa, size: PageSize) -> Result<Option<u8>, MapError> {
        let (tables, page) = (self.tables, 1 << F::PAGE_SHIFT);
        GpaRange::new(Gpa(gpa.0 & !(page - 1)), page)
            .and_then(|range| tables.check(&range))
            .map_err(MapError::Range)?;
        let level = F::level_of(size).map_err(MapError::LeafSize)?;
        // Not in a guest that is smaller than the leaf, or than a table of such leaves.
        let geometry = tables.geometry();
        if level > geometry.root_level || F::shift(level) > geometry.address_bits {
            return Ok(None);
        }
        let kind = tables.entry_at(gpa.0, level).map(|pte| F::kind(pte.load(), level));
        let may_be = matches!(kind, Some(Kind::Table | Kind::Frozen | Kind::Retired));
        Ok(may_be.then_some(level).filter(|_| level > 0))
    }

    #[inline(never)]
    fn replaced(
        &mut self,
        gpa: Gpa,
        level: u8,
        hpa: Hpa,
        attributes: Attributes,
    ) -> Result<Option<u64>, Interruption<MapError>> {
        let (tables, size) = (self.tables, F::size(level));
        let block = match tables.check_host(hpa, size.bytes()) {
            Ok(()) if hpa.0 & (size.bytes() - 1) == 0 => {
                tables.format.encode(attributes).map_err(MapError::Attributes)
            }
            Ok(()) => {
                let bits = tables.format.output_bits();
                Err(MapError::HostAddress { hpa, page: size, bits })
            }
            Err(error) => Err(error),
        };
        let plain = match block {
            Ok(bits) => bits,
            Err(reason) => return Self::stopped(gpa, reason),
        };
        if !tables.format.marks_valid() {
            return Ok(None);
        }
        if let Some(what) = maintenance(&attributes) {
            tables.platform.maintain(hpa, size.bytes(), what);
        }
        let (pte, link) = match self.break_link(gpa.0, level) {
            Ok(Some(broken)) => broken,
            Ok(None) => return Ok(None),
            Err(reason) => return Self::stopped(gpa, reason),
        };
        let (base, table) = (gpa.0 & !(size.bytes() - 1), F::table_address(link));
        let mut stale = PendingFlush::NOTHING;
        stale.table(base, base + size.bytes());
        let what = tables.invalidation(&stale);
        // Read after the fence before the VMID is read, which follows the break: a thread that sets
        // an owner in the table has noted it before, or does not find the table.
        if tables.owners.are_known() {
            pte.release(F::frozen(table), link);
            self.let_go(self.below(table, level - 1), level - 1);
            return Ok(None);
        }
        what.iter().for_each(|what| tables.platform.invalidate(what));
        let all = attributes.accessed && attributes.dirty;
        let mut old = Old { read: !all, ..Old::default() };
        let mut chain = Chain::<F>::EMPTY;
        self.retire_table(table, level - 1, &mut old, &mut chain);
        let bits = if all {
            plain
        } else {
            let accessed = attributes.accessed || old.has(F::ACCESSED);
            let dirty = attributes.dirty || old.has(F::DIRTY);
            let attributes = Attributes { accessed, dirty, ..attributes };
            tables.format.encode(attributes).unwrap_or(plain)
        };
        pte.release(F::frozen(table), F::leaf(bits, level, hpa));
        let counts = &mut self.sums.counts;
        counts.invalidations += 1;
        counts.broken += 1;
        counts.entries_written += 2;
        counts.bytes_changed += size.bytes();
        self.sums.sizes.add(level, 1);
        tables.touch_above(base, level);
        tables.platform.publish();
        tables.retired.invalidated(tables.platform, &chain);
        Ok(Some(size.bytes()))
    }

    /// Holds the table that the entry for `gpa` at `level` links, and freezes the entry; returns
    /// the entry and the link. `None` if there is no such table.
    fn break_link(&mut self, gpa: u64, level: u8) -> Result<Option<(&'t Pte, u64)>, MapError> {
        let tables = self.tables;
        let mut patience = PATIENCE;
        loop {
            if tables.owners.are_known() {
                return Ok(None);
            }
            let Some(pte) = tables.entry_at(gpa, level) else { return Ok(None) };
            let raw = pte.load();
            self.sums.counts.entries_read += u64::from(tables.geometry().root_level - level) + 1;
            match F::kind(raw, level) {
                Kind::Table => {
                    let table = F::table_address(raw);
                    let ptes = self.below(table, level - 1);
                    if self.hold(ptes, level - 1, &mut patience) {
                        // It never fails: the thread that holds a table owns its link.
                        if let Ok(link) = pte.update(|_| Some(F::frozen(table))) {
                            return Ok(Some((pte, link)));
                        }
                    }
                }
                Kind::Frozen | Kind::Retired => {}
                _ => return Ok(None),
            }
            if !wait(&mut patience) {
                return Err(MapError::Contended);
            }
        }
    }

    /// Returns those entries of a table at `level` by which it is held.
    fn below(&self, table: Hpa, level: u8) -> &'t [Pte] {
        &self.all_below(table, level)[..if level == 0 { 1 } else { F::entries(level) }]
    }

    fn all_below(&self, table: Hpa, level: u8) -> &'t [Pte] {
        // SAFETY: a table that was linked has that many entries. It is not given back: this thread
        // is inside the tables, and found it linked, or owns it and has not handed it on.
        unsafe { table::entries(self.tables.platform, table, F::entries(level)) }
    }

    /// Holds all entries, or none.
    fn hold(&self, ptes: &[Pte], level: u8, patience: &mut u32) -> bool {
        let free = ptes.iter().position(|pte| !self.hold_entry(pte, level, patience));
        if let Some(held) = free {
            self.let_go(&ptes[..held], level);
        }
        free.is_none()
    }

    fn hold_entry(&self, pte: &Pte, level: u8, patience: &mut u32) -> bool {
        loop {
            let raw = pte.load();
            let held = match F::kind(raw, level) {
                Kind::Leaf => pte.exchange(raw, raw | F::MARK).is_ok(),
                Kind::Empty | Kind::Reserved => pte.exchange(raw, F::retired(Hpa(0))).is_ok(),
                Kind::Table => {
                    self.hold(self.below(F::table_address(raw), level - 1), level - 1, patience)
                }
                Kind::Frozen | Kind::Sealed => false,
                Kind::Owned | Kind::Retired => return false,
            };
            if held || !wait(patience) {
                return held;
            }
        }
    }

    /// Gives back entries that are held. The first is given back last: it holds the table, and the
    /// group that it is a member of.
    fn let_go(&self, ptes: &[Pte], level: u8) {
        // With a new token, so that changes of other threads are not hidden.
        let empty = self.token();
        for pte in ptes.iter().rev() {
            let raw = pte.load();
            match F::kind(raw, level) {
                Kind::Table => self.let_go(self.below(F::table_address(raw), level - 1), level - 1),
                Kind::Retired => pte.release(raw, empty),
                _ => _ = pte.update(|raw| Some(raw & !F::MARK)),
            }
        }
    }

    /// Retires the entries by which a table, where no hardware is any more, is held, and adds it
    /// and those below it to `chain`.
    fn retire_table(&mut self, table: Hpa, level: u8, old: &mut Old, chain: &mut Chain<F>) {
        let (all, retired) = (self.all_below(table, level), F::retired(Hpa(0)));
        let held = self.below(table, level);
        for pte in held {
            // This never fails: other software sets bits in a link at most.
            let raw = pte.update(|_| Some(retired)).unwrap_or(retired);
            match F::kind(raw, level) {
                Kind::Table => self.retire_table(F::table_address(raw), level - 1, old, chain),
                kind => old.add(kind, raw),
            }
        }
        self.sums.counts.entries_written += 2 * held.len() as u64;
        self.sums.counts.entries_read += held.len() as u64;
        if old.read {
            for pte in &all[held.len()..] {
                let raw = pte.load();
                old.add(F::kind(raw, level), raw);
            }
            self.sums.counts.entries_read += (all.len() - held.len()) as u64;
        }
        chain.add(table, &all[0]);
    }
}

/// What is left of the leaves that are replaced.
#[derive(Default)]
struct Old {
    /// Whether tables of pages are read for it.
    read: bool,
    /// The bits of all leaves.
    bits: u64,
    /// Another thread had a leaf frozen, whose state is not known.
    hidden: bool,
}

impl Old {
    fn add(&mut self, kind: Kind, raw: u64) {
        match kind {
            Kind::Leaf | Kind::Sealed => self.bits |= raw,
            Kind::Frozen => self.hidden = true,
            _ => {}
        }
    }

    fn has(&self, bits: u64) -> bool {
        self.hidden || self.bits & bits != 0
    }
}

/// Waits for one turn; returns false if the call has waited for long enough.
fn wait(patience: &mut u32) -> bool {
    *patience = patience.saturating_sub(1);
    if *patience != 0 {
        relax();
    }
    *patience != 0
}
