//! Reserve and commit: the two halves of a fault, which asks the host for a page in between.
//!
//! # Protocol
//! A fault reserves the entry by a token, or finds it reserved, asks its backing for the page, and
//! maps it by a compare-and-swap from that very token. [`Guard::unmap`] empties leaves and
//! reservations alike. So a page that the host took away after the fault had asked for it is not
//! mapped: either the unmap found the reservation, and the commit fails, or it found the leaf. A
//! host that takes memory away stops handing it out first, then unmaps. A reservation excludes no
//! other thread: a map there replaces it, and the commit fails as well; if two faults share one,
//! the first commit succeeds. A reservation that is given up stays, and counts as empty.
//!
//! If another party has to be notified before the leaf is there, [`Reservation::commit_told`]
//! exchanges the token for a marker first, which excludes all other threads. *Invariant*: of faults
//! that share an entry, one is notified, and its leaf is there before another thread can take it
//! out.
//!
//! Tokens of threads that have a reader slot are the slot's ([`crate::readers`]), so that faults
//! share no counter; others are counted by the guest. Neither come back within 2^47 faults and
//! unmaps.

use super::Owner;
use super::map::{MapError, maintenance};
use super::unfold::Group;
use crate::addr::{Gpa, GpaRange, Hpa, PageSize};
use crate::cache::TableCache;
use crate::format::{Attributes, Format, Kind};
use crate::guard::{Guard, GuardState};
use crate::platform::Platform;
use crate::sync::relax;
use crate::table::{self, Pte};
use crate::tables::{Interruption, Tables};
use crate::walk::PATIENCE;

/// An empty entry that a fault has reserved.
///
/// It borrows the guard, which keeps the entry's table allocated.
#[derive(Debug)]
#[must_use = "a reservation that is not committed maps nothing"]
pub struct Reservation<'g, F: Format, P: Platform> {
    tables: &'g Tables<'g, F, P>,
    sums: &'g mut GuardState,
    /// One entry, or all entries of the group around it, with the same token.
    ptes: &'g [Pte],
    raw: u64,
    level: u8,
    base: u64,
}

impl<'t, 'p, F: Format, P: Platform> Guard<'t, 'p, F, P> {
    /// Reserves the entry in which a leaf of `largest`, or the largest size below it that the guest
    /// has room for and that is not split into a table, would translate `gpa`. Tables above it are
    /// built.
    ///
    /// # Errors
    /// [`MapError::Range`], [`MapError::LeafSize`], [`MapError::ForeignCache`];
    /// [`MapError::Occupied`] where a leaf is there already: another thread has answered the fault,
    /// or it needs [`Guard::relax`]; [`MapError::Owned`]; [`MapError::CacheEmpty`];
    /// [`MapError::Contended`]. Nothing was reserved.
    #[inline(always)]
    pub fn reserve<'g>(
        &'g mut self,
        gpa: Gpa,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<Reservation<'g, F, P>, Interruption<MapError>> {
        let found = match self.reserve_at_once(gpa.0, largest, cache) {
            Some(found) => found,
            None => match self.reserve_or_refuse(gpa.0, largest, cache) {
                Ok(found) => found,
                Err(reason) => return Self::stopped(gpa, reason),
            },
        };
        let (pte, raw, level) = found;
        let (ptes, base) = (core::slice::from_ref(pte), gpa.0 & !((1 << F::shift(level)) - 1));
        let Self { tables, sums, .. } = self;
        Ok(Reservation { tables, sums, ptes, raw, level, base })
    }

    /// As [`Guard::reserve`], but reserves the whole group around the entry, to be folded
    /// ([`Guard::map_contiguous`]), if all of it is empty. On formats without groups it is
    /// [`Guard::reserve`].
    ///
    /// Earlier reservations of single entries of the group become void. A fault whose reservation
    /// was void must begin anew by [`Guard::reserve`]: otherwise two faults could void each other's
    /// for ever.
    ///
    /// # Errors
    /// Those of [`Guard::reserve`].
    pub fn reserve_contiguous<'g>(
        &'g mut self,
        gpa: Gpa,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<Reservation<'g, F, P>, Interruption<MapError>> {
        let mut reserved = self.reserve(gpa, largest, cache)?;
        let Reservation { tables, sums, level, base, .. } = &mut reserved;
        if let Some((group, token)) = tables.reserve_group(*base, *level, &mut sums.counts) {
            (reserved.raw, reserved.base, reserved.ptes) = (token, group.start, group.ptes);
        }
        Ok(reserved)
    }

    /// Reserves the entry if its table is there, and the entry is empty or reserved, as in most
    /// faults. `None` in all other cases: [`Guard::reserve_or_refuse`] then begins anew.
    #[inline(always)]
    fn reserve_at_once(
        &mut self,
        gpa: u64,
        largest: PageSize,
        cache: &TableCache<'_, F, P>,
    ) -> Option<(&'t Pte, u64, u8)> {
        let tables = self.tables;
        let geometry = tables.geometry();
        if gpa >> geometry.address_bits != 0 || !cache.serves(tables.platform) {
            return None;
        }
        let level = F::level_of(largest).ok()?;
        // The guest is smaller than the leaf, or than a table of such leaves.
        if F::shift(level) > geometry.address_bits || level > geometry.root_level {
            return None;
        }
        let pte = tables.entry_at(gpa, level)?;
        let raw = pte.load();
        let counts = &mut self.sums.counts;
        let reserved = if raw == 0 {
            counts.entries_written += 1;
            let token = self.token();
            pte.exchange(raw, token).ok()?;
            token
        } else if F::kind(raw, level) == Kind::Reserved {
            let base = gpa & !((1 << F::shift(level)) - 1);
            counts.invalidations += u64::from(tables.break_before_fill(raw, level, base));
            raw
        } else {
            return None;
        };
        self.sums.counts.entries_read += u64::from(geometry.root_level - level) + 1;
        Some((pte, reserved, level))
    }

    #[cold]
    #[inline(never)]
    fn reserve_or_refuse(
        &mut self,
        gpa: u64,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<(&'t Pte, u64, u8), MapError> {
        let page = gpa & !((1 << F::PAGE_SHIFT) - 1);
        GpaRange::new(Gpa(page), 1 << F::PAGE_SHIFT)
            .and_then(|range| self.tables.check(&range))
            .map_err(MapError::Range)?;
        if !cache.serves(self.tables.platform) {
            return Err(MapError::ForeignCache);
        }
        let mut largest = F::level_of(largest).map_err(MapError::LeafSize)?;
        // Not past the end of a guest that is smaller than the leaf.
        while F::shift(largest) > self.tables.geometry().address_bits {
            largest -= 1;
        }
        self.reserve_entry(page, largest, cache)
    }

    fn reserve_entry(
        &mut self,
        gpa: u64,
        largest: u8,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<(&'t Pte, u64, u8), MapError> {
        let tables = self.tables;
        let root = (tables.root_entries(), tables.geometry().root_level);
        let (mut ptes, mut level) = root;
        let mut patience = PATIENCE;
        loop {
            let pte = table::pte::<F>(ptes, gpa, level);
            let raw = pte.load();
            self.sums.counts.entries_read += 1;
            match F::kind(raw, level) {
                Kind::Table => {
                    level -= 1;
                    // SAFETY: a linked table has that many entries, and stays allocated while the
                    // guard, which the reservation borrows, keeps it.
                    ptes = unsafe {
                        let hpa = F::table_address(raw);
                        table::entries(tables.platform, hpa, F::entries(level))
                    };
                    continue;
                }
                Kind::Leaf | Kind::Sealed => {
                    let hpa = F::leaf_address(raw, level);
                    return Err(MapError::Occupied { size: F::size(level), hpa });
                }
                Kind::Owned => return Err(MapError::Owned { owner: Owner::of::<F>(raw) }),
                // The token is another fault's, or an unmap left it: it is shared, and the first
                // commit succeeds. If a fault replaced it, two faults could void each other's for
                // ever.
                Kind::Reserved if level <= largest => {
                    let base = gpa & !((1 << F::shift(level)) - 1);
                    let broke = tables.break_before_fill(raw, level, base);
                    self.sums.counts.invalidations += u64::from(broke);
                    return Ok((pte, raw, level));
                }
                Kind::Empty | Kind::Reserved => {
                    self.sums.counts.entries_written += 1;
                    if level <= largest {
                        // Nothing was unmapped here: the entry has no token.
                        let reserved = self.token();
                        if pte.exchange(raw, reserved).is_ok() {
                            return Ok((pte, reserved, level));
                        }
                    } else {
                        let frame = cache.take_empty(level - 1).ok_or(MapError::CacheEmpty)?;
                        let base = gpa & !((1 << F::shift(level)) - 1);
                        let broke = tables.break_before_fill(raw, level, base);
                        self.sums.counts.invalidations += u64::from(broke);
                        if pte.exchange(raw, F::table(frame.hpa(), level)).is_ok() {
                            frame.into_hpa();
                            self.sums.counts.tables_built += 1;
                        } else {
                            cache.put(frame);
                        }
                    }
                }
                Kind::Frozen => relax(),
                Kind::Retired => {
                    relax();
                    (ptes, level) = root;
                }
            }
            patience -= 1;
            if patience == 0 {
                return Err(MapError::Contended);
            }
        }
    }
}

impl<'g, F: Format, P: Platform> Reservation<'g, F, P> {
    /// Returns the addresses that the leaf or the group would translate.
    #[inline(always)]
    pub fn range(&self) -> GpaRange {
        GpaRange::from_bounds(self.base, self.base + self.bytes())
    }

    #[inline(always)]
    fn bytes(&self) -> u64 {
        (self.ptes.len() as u64) << F::shift(self.level)
    }

    #[inline(always)]
    fn group(&self) -> Option<Group<'g, F>> {
        (self.ptes.len() > 1).then(|| Group::of(self.ptes, self.level, self.base))
    }

    /// Maps [`Reservation::range`] to the memory at `hpa`, and returns the bytes that it mapped.
    /// Returns `None` if the reservation is void, because an entry of it has changed: something was
    /// mapped there, a table was linked, an owner was set, an unmap covered it (even if nothing was
    /// mapped), another call reserved its group as a whole ([`Guard::reserve_contiguous`]), or
    /// another thread is doing one of these.
    ///
    /// # Errors
    /// [`MapError::HostAddress`], also for an address that is not a multiple of the leaf's or the
    /// group's size, and [`MapError::Attributes`]: nothing is mapped.
    #[inline(always)]
    pub fn commit(self, hpa: Hpa, attributes: Attributes) -> Result<Option<u64>, MapError> {
        let leaf = self.leaf(hpa, attributes)?;
        let bytes = self.bytes();
        if F::CONTIGUOUS != 0
            && let Some(group) = self.group()
        {
            if !Self::commit_group((self.tables, self.sums), &group, self.raw, leaf) {
                return Ok(None);
            }
        } else {
            let GuardState { counts, sizes, .. } = self.sums;
            counts.entries_written += 1;
            if self.ptes[0].exchange(self.raw, leaf).is_err() {
                return Ok(None);
            }
            sizes.add(self.level, 1);
        }
        self.sums.counts.bytes_changed += bytes;
        self.tables.touch_above(self.base, self.level);
        self.tables.platform.publish();
        Ok(Some(bytes))
    }

    #[cold]
    #[inline(never)]
    fn commit_group(
        (tables, sums): (&Tables<'g, F, P>, &mut GuardState),
        group: &Group<'g, F>,
        raw: u64,
        leaf: u64,
    ) -> bool {
        let GuardState { counts, sizes, .. } = sums;
        let mapped = tables.fill_group(group, Some(raw), leaf, counts).is_ok();
        if mapped {
            sizes.add_members(group.level(), group.ptes.len() as i64);
        }
        mapped
    }

    /// As [`Reservation::commit`], for memory that another party has to know of before it is
    /// mapped, and may refuse (SNP's RMP, TDX's secure EPT). Calls `tell` if the reservation is not
    /// void; the leaf is then there when this returns, unless `tell` refuses. While `tell` runs,
    /// the entry is frozen: no other thread maps, reserves, unmaps or looks up there; one that
    /// tries has to try again ([`MapError::Contended`], [`UnmapError::Contended`], [`Contention`]).
    ///
    /// An entry that an unmap has emptied can be reserved before its
    /// [`UnmapBatch`](crate::UnmapBatch) are completed. A caller that notifies another party of
    /// both, in order, keeps faults from committing until it has notified that party of the
    /// removal.
    ///
    /// `tell` runs inside the tables: it must not wait for what waits for threads inside.
    ///
    /// # Errors
    /// Those of [`Reservation::commit`], as the inner result; the outer one is `tell`'s. Nothing is
    /// mapped.
    ///
    /// [`UnmapError::Contended`]: crate::UnmapError::Contended
    /// [`Contention`]: crate::Contention
    #[inline(always)]
    pub fn commit_told<E>(
        self,
        hpa: Hpa,
        attributes: Attributes,
        tell: impl FnOnce() -> Result<(), E>,
    ) -> Result<Result<Option<u64>, MapError>, E> {
        // Destructured, because a pointer to it would keep every reservation of the caller in
        // memory.
        let Self { tables, sums, ptes, raw, level, base } = self;
        Self::commit_parts((tables, sums), (ptes, raw), (level, base), (hpa, attributes), tell)
    }

    #[inline(never)]
    fn commit_parts<E>(
        (tables, sums): (&'g Tables<'g, F, P>, &'g mut GuardState),
        (ptes, raw): (&'g [Pte], u64),
        (level, base): (u8, u64),
        (hpa, attributes): (Hpa, Attributes),
        tell: impl FnOnce() -> Result<(), E>,
    ) -> Result<Result<Option<u64>, MapError>, E> {
        let reserved = Self { tables, sums, ptes, raw, level, base };
        let leaf = match reserved.leaf(hpa, attributes) {
            Ok(leaf) => leaf,
            Err(reason) => return Ok(Err(reason)),
        };
        let group = reserved.group();
        let GuardState { counts, sizes, .. } = reserved.sums;
        let frozen = F::frozen(Hpa(0));
        let held = match &group {
            Some(group) => tables.freeze_group(group, Some(raw)).is_ok(),
            None => ptes[0].exchange(raw, frozen).is_ok(),
        };
        if !held {
            return Ok(Ok(None));
        }
        let held = FrozenEntries { ptes, raw, frozen };
        tell()?;
        core::mem::forget(held);
        let bytes = match &group {
            Some(group) => {
                tables.fill_frozen_group(group, leaf, counts);
                sizes.add_members(level, group.ptes.len() as i64);
                group.bytes()
            }
            None => {
                ptes[0].release(frozen, leaf);
                sizes.add(level, 1);
                counts.entries_written += 2;
                1 << F::shift(level)
            }
        };
        counts.bytes_changed += bytes;
        tables.touch_above(base, level);
        tables.platform.publish();
        Ok(Ok(Some(bytes)))
    }

    /// Returns the leaf for the entry. Maintains the memory, as its type demands.
    #[inline(always)]
    fn leaf(&self, hpa: Hpa, attributes: Attributes) -> Result<u64, MapError> {
        let tables = self.tables;
        let bytes = self.bytes();
        tables.check_host(hpa, bytes)?;
        if hpa.0 & (bytes - 1) != 0 {
            let bits = tables.format.output_bits();
            return Err(MapError::HostAddress { hpa, page: F::size(self.level), bits });
        }
        let bits = tables.format.encode(attributes).map_err(MapError::Attributes)?;
        if let Some(what) = maintenance(&attributes) {
            tables.platform.maintain(hpa, bytes, what);
        }
        Ok(F::leaf(bits, self.level, hpa))
    }
}

/// Entries that are frozen while `tell` runs: reserved again when this is dropped.
struct FrozenEntries<'g> {
    ptes: &'g [Pte],
    raw: u64,
    frozen: u64,
}

impl Drop for FrozenEntries<'_> {
    fn drop(&mut self) {
        self.ptes.iter().for_each(|pte| pte.release(self.frozen, self.raw));
    }
}
