//! Owners: words of the caller, stored in entries that translate nothing.
//!
//! A hypervisor that hands memory from one guest to another, or to itself, records the owner in
//! entries where nothing is mapped. An owned entry is invalid to hardware, and kept from other
//! software: it is mapped and reserved again only when the word has been taken back, an unmap
//! passes it by, and a table that holds one is not empty.
//!
//! # Protocol
//! A word is set, replaced and taken back by one compare-and-swap from the value that was read. So
//! if one thread maps an entry, and another gives it an owner, one of them finds the change of the
//! other. A word that is taken back leaves a token if the CPU demands a break, as an unmap does:
//! the thread that emptied the entry before it had an owner may not have completed its invalidation
//! (`Tables::break_before_fill`).

use super::map::MapError;
use super::{Owner, owner};
use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize, RangeError};
use crate::cache::TableCache;
use crate::format::{Format, Kind};
use crate::guard::{Guard, GuardState};
use crate::platform::Platform;
use crate::tables::{Contention, Interruption, Tables};
use crate::walk::{Budget, Entry, Flow, Visitor, WalkCounts};
use core::fmt;

/// Reason why a range got no owner, or not all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OwnerError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The cache was filled from another platform.
    ForeignCache,
    /// A leaf is mapped there.
    Occupied {
        /// The size of the leaf found.
        size: PageSize,
        /// The host address that the leaf maps to.
        hpa: Hpa,
    },
    /// The owner there is not the one that was to be replaced.
    Owned {
        /// The owner found; `None` if there is none.
        owner: Option<Owner>,
    },
    /// The cache ran out of table pages.
    CacheEmpty,
    /// Another thread held an entry for too long.
    Contended,
}

impl fmt::Display for OwnerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Range(error) => error.fmt(f),
            Self::ForeignCache => MapError::ForeignCache.fmt(f),
            Self::Occupied { size, hpa } => {
                write!(f, "a {size} leaf ({hpa}) is mapped there; unmap it first")
            }
            Self::Owned { owner: Some(Owner(word)) } => {
                write!(f, "the entry has another owner ({word:#x})")
            }
            Self::Owned { owner: None } => f.write_str("the entry has no owner"),
            Self::CacheEmpty => MapError::CacheEmpty.fmt(f),
            Self::Contended => MapError::Contended.fmt(f),
        }
    }
}

impl core::error::Error for OwnerError {}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Gives the addresses of `range`, where nothing is mapped, and whose owner is `from`, to the
    /// owner `to`. `None` is no owner, the state before the first call. Addresses that `to` owns
    /// already stay. Returns the bytes that changed owner.
    ///
    /// The largest entries that the range covers hold the word; one that it cuts becomes a table.
    /// Reservations are void where the owner changes. Nothing is owed: hardware caches nothing that
    /// is invalid (where it does, it caches an invalid entry as such).
    ///
    /// # Errors
    /// Nothing is done on [`OwnerError::Range`], [`OwnerError::ForeignCache`], and on
    /// [`OwnerError::Occupied`] and [`OwnerError::Owned`] unless that appeared meanwhile.
    /// [`OwnerError::CacheEmpty`] and [`OwnerError::Contended`] leave everything done that precedes
    /// the address where it stopped.
    pub fn set_owner(
        &mut self,
        range: GpaRange,
        from: Option<Owner>,
        to: Option<Owner>,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<u64, Interruption<OwnerError>> {
        let tables = self.tables;
        if let Err(error) = tables.check(&range) {
            return Self::stopped(range.start(), OwnerError::Range(error));
        }
        if !cache.serves(tables.platform) {
            return Self::stopped(range.start(), OwnerError::ForeignCache);
        }
        let (start, end) = (range.start().0, range.end().0);
        if to.is_some() {
            tables.owners.note();
        }
        let hand = Hand { from, to };
        let mut check = Check { hand, read: 0, reason: OwnerError::Contended };
        let mut budget = Budget::new();
        let result = tables.walk_within(start, end, &mut check, &mut budget);
        self.sums.counts.entries_read += check.read;
        match result {
            Ok(()) => {}
            // Nothing is done yet: the caller has to begin at the start again.
            Err(_) if check.reason == OwnerError::Contended => {
                return Self::stopped(range.start(), check.reason);
            }
            Err(at) => return Self::stopped(at, check.reason),
        }
        let before = self.sums.counts;
        let mut visitor =
            SetOwner { tables, hand, cache, sums: &mut self.sums, reason: OwnerError::Contended };
        let result = tables.walk_within(start, end, &mut visitor, &mut budget);
        let reason = visitor.reason;
        if self.sums.counts.tables_built != before.tables_built {
            tables.platform.publish();
        }
        let bytes = self.sums.counts.bytes_changed - before.bytes_changed;
        match result {
            Ok(()) => Ok(bytes),
            Err(at) => Self::stopped(at, reason),
        }
    }

    /// Returns the owner of `gpa` ([`Guard::set_owner`]); `None` if there is none, or if a leaf is
    /// mapped.
    ///
    /// # Errors
    /// [`Contention`] if another thread is changing the entry.
    pub fn owner(&self, gpa: Gpa) -> Result<Option<Owner>, Contention> {
        if gpa.0 >> self.geometry().address_bits != 0 {
            return Ok(None);
        }
        let found = self.tables.lookup(gpa.0);
        match F::kind(found.raw, found.level) {
            Kind::Frozen | Kind::Retired => Err(Contention { at: gpa }),
            kind => Ok(owner::<F>(kind, found.raw)),
        }
    }
}

/// The owner before, and the owner after.
#[derive(Clone, Copy)]
struct Hand {
    from: Option<Owner>,
    to: Option<Owner>,
}

impl Hand {
    /// Returns whether an entry is to change; an error if it may not.
    #[inline(always)]
    fn takes<F: Format>(self, level: u8, kind: Kind, raw: u64) -> Result<bool, OwnerError> {
        if kind == Kind::Leaf {
            return Err(OwnerError::Occupied {
                size: F::size(level),
                hpa: F::leaf_address(raw, level),
            });
        }
        let owner = owner::<F>(kind, raw);
        if owner == self.to {
            Ok(false)
        } else if owner == self.from {
            Ok(true)
        } else {
            Err(OwnerError::Owned { owner })
        }
    }
}

/// Finds entries that do not allow the operation, before anything is changed.
struct Check {
    hand: Hand,
    read: u64,
    reason: OwnerError,
}

impl<'t, F: Format> Visitor<'t, F> for Check {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, _: &mut WalkCounts) -> Flow {
        match self.hand.takes::<F>(level, kind, entry.raw) {
            Ok(_) => Flow::Next,
            Err(reason) => {
                self.reason = reason;
                Flow::Stop
            }
        }
    }

    #[inline]
    fn settle(&mut self, _level: u8, tally: WalkCounts) {
        self.read += tally.read;
    }
}

struct SetOwner<'t, 'a, 'c, F: Format, P: Platform> {
    tables: &'t Tables<'t, F, P>,
    hand: Hand,
    cache: &'a mut TableCache<'c, F, P>,
    sums: &'a mut GuardState,
    reason: OwnerError,
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for SetOwner<'_, '_, '_, F, P> {
    const LEVELS: Levels = Levels::ALL;
    const ONCE: bool = true;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        match self.hand.takes::<F>(level, kind, entry.raw) {
            Ok(true) => {}
            Ok(false) => return Flow::Next,
            Err(reason) => {
                self.reason = reason;
                return Flow::Stop;
            }
        }
        if !entry.whole::<F>(level) {
            return self.table(level, kind, &entry.apart());
        }
        let new = match self.hand.to {
            Some(Owner(word)) => F::owned(word),
            None if self.tables.refill_breaks() => self.tables.tokens.next::<F>(),
            None => 0,
        };
        if entry.pte.exchange(entry.raw, new).is_err() {
            return Flow::Again;
        }
        tally.change(&entry);
        Flow::Next
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        self.sums.settle::<F>(level, &tally, false);
    }
}

impl<F: Format, P: Platform> SetOwner<'_, '_, '_, F, P> {
    /// Replaces an entry that the range cuts by a table whose entries all have the state of that
    /// entry.
    #[cold]
    fn table(&mut self, level: u8, kind: Kind, entry: &Entry<'_>) -> Flow {
        let (tables, counts) = (self.tables, &mut self.sums.counts);
        let Some(mut frame) = self.cache.take() else {
            self.reason = OwnerError::CacheEmpty;
            return Flow::Stop;
        };
        let ptes = frame.entries_mut::<F>(tables.platform, level - 1);
        let all = ptes.len() as u64;
        tables.platform.fill(ptes, if kind == Kind::Owned { entry.raw } else { 0 }, 0);
        // The new table's entries are 0, without the token of an unmap that may not have completed.
        let broke = tables.break_before_fill(entry.raw, level, entry.base::<F>(level));
        counts.invalidations += u64::from(broke);
        if entry.pte.exchange(entry.raw, F::table(frame.hpa(), level)).is_ok() {
            frame.into_hpa();
            counts.tables_built += 1;
            counts.entries_written += all + 1;
        } else {
            self.cache.put(frame);
        }
        Flow::Again
    }
}
