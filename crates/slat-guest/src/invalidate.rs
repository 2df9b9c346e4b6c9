//! Invalidation from the host's side: memory that the host is about to take back, or to change.
//!
//! # Protocol
//! An invalidation begins, empties leaves and reservations, and ends when the host is done. A fault
//! reserves its slot, then looks whether an invalidation of that memory is under way, then asks the
//! backing, then commits.
//!
//! *Invariant*: no page is committed that the backing named before an invalidation of it ended.
//! - The fault reserves before the invalidation's walk comes by: the walk empties the reservation, and
//!   the commit fails, whatever size the reservation has, and also where a table took its place.
//! - It reserves after that: reserving and looking, beginning and walking, are crosswise (`agreed`),
//!   so the fault sees the invalidation, and lets the guest try again; or the invalidation has ended,
//!   and the backing, asked only now, answers as the host left it.

use crate::backing::{Backing, Hva, HvaRange};
use crate::bits::each_word;
use crate::blocks::cut_by;
use crate::config::Logging;
use crate::guest::{Guest, Worker};
use crate::host::Host;
use crate::slots::{Slot, View};
use crate::sync::{AtomicU64, Ordering, agreed};
use slat::{
    Attributes, Contended, Format, Gpa, GpaRange, Guard, Halted, Maintenance, Memory, Place,
    Removals, Removed, Tables, UnmapError,
};

/// A place that nobody has.
const FREE: u64 = u64::MAX;
/// A place whose bounds are not known yet: it covers everything.
const TAKEN: u64 = u64::MAX - 1;
/// Invalidations whose bounds are known; more at a time count as covering everything.
#[cfg(not(loom))]
const PLACES: usize = 16;
#[cfg(loom)]
const PLACES: usize = 1;

/// Those under way.
#[derive(Debug)]
pub(crate) struct Invalidations {
    active: AtomicU64,
    /// Of those, how many have no place.
    unplaced: AtomicU64,
    places: [(AtomicU64, AtomicU64); PLACES],
}

impl Invalidations {
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            active: zero(),
            unplaced: zero(),
            places: core::array::from_fn(|_| (AtomicU64::new(FREE), zero())),
        }
    }

    fn begin(&self, range: &HvaRange) -> Option<usize> {
        let place = self.places.iter().position(|(start, _)| {
            start.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        match place {
            Some(place) => {
                let (start, end) = &self.places[place];
                end.store(range.end().0, Ordering::Release);
                start.store(range.start.0.min(TAKEN), Ordering::Release);
            }
            None => _ = self.unplaced.fetch_add(1, Ordering::AcqRel),
        }
        self.active.fetch_add(1, Ordering::SeqCst);
        agreed();
        place
    }

    fn end(&self, place: Option<usize>) {
        self.active.fetch_sub(1, Ordering::AcqRel);
        match place {
            Some(place) => self.places[place].0.store(FREE, Ordering::Release),
            None => _ = self.unplaced.fetch_sub(1, Ordering::AcqRel),
        }
    }

    /// Whether one may be under way in `range`. A caller who reserved a slot before sees all that
    /// do not see the reservation.
    ///
    /// Bounds that belong to two, one after the other, in the same place: then the second began
    /// after this looked, and will find the reservation.
    pub fn cover(&self, range: &HvaRange) -> bool {
        agreed();
        if self.active.load(Ordering::SeqCst) == 0 {
            return false;
        }
        self.unplaced.load(Ordering::Acquire) != 0
            || self.places.iter().any(|(start, end)| match start.load(Ordering::Acquire) {
                FREE => false,
                TAKEN => true,
                start => start < range.end().0 && range.start.0 < end.load(Ordering::Acquire),
            })
    }
}

/// An invalidation that is under way: faults on the memory wait, by asking the guest to try again.
/// Dropped, it ends.
#[must_use = "dropped, the invalidation ends: the backing must have changed by then"]
#[derive(Debug)]
pub struct Invalidation<'i> {
    /// `None`: of nothing.
    invalidations: Option<&'i Invalidations>,
    place: Option<usize>,
}

impl Drop for Invalidation<'_> {
    fn drop(&mut self) {
        if let Some(invalidations) = self.invalidations {
            invalidations.end(self.place);
        }
    }
}

/// Neighbouring pages that the guest cannot reach any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Where the guest had them.
    pub gpa: Gpa,
    /// Where the host has them.
    pub host: HvaRange,
    /// The guest wrote them, or may have, since they were taken last: also where a log has taken
    /// the mark from the leaf since.
    pub dirty: bool,
    /// It used them since they were aged last.
    pub accessed: bool,
}

/// How many kinds of neighbouring leaves are unmapped for one invalidation.
const BATCH: usize = 64;

impl<'w, 'p, F: Format, H: Host, B: Backing> Worker<'w, 'p, F, H, B> {
    /// Takes the memory at `host` from the guest; `taken` learns of what was mapped there, once the
    /// guest cannot reach it, and of what was used or written and is not mapped any more. Blocks
    /// that the range touches are taken whole; of a range of no bytes nothing is.
    ///
    /// When this returns the host may take the memory back, or change it. Until the value is
    /// dropped no fault maps any of it. It may be called with locks that [`Backing::page`] takes.
    ///
    /// `taken` runs inside the tables: it takes no lock under which somebody changes slots, reads a log
    /// that hardware keeps, switches caches, or says what the host wrote, which all wait for this.
    pub fn invalidate(&mut self, host: HvaRange, mut taken: impl FnMut(Taken)) -> Invalidation<'w> {
        if host.bytes == 0 {
            return Invalidation { invalidations: None, place: None };
        }
        let invalidations = &self.guest.invalidations;
        let place = invalidations.begin(&host);
        let invalidation = Invalidation { invalidations: Some(invalidations), place };
        self.take_pages(&[host], &mut taken);
        invalidation
    }

    /// Takes memory from the guest that its [`Backing`] has stopped to hand out: of all `hosts`,
    /// with one invalidation for every few dozen leaves, wherever they are. `taken` learns of what
    /// was mapped, as in [`Worker::invalidate`]; blocks that a range touches are taken whole.
    ///
    /// The backing must answer [`NoPage`](crate::NoPage) for these pages from before this is called
    /// until the memory may be mapped again. Faults on other pages are not held up, which is the
    /// difference to [`Worker::invalidate`]. When this returns, the guest cannot reach what `hosts`
    /// named.
    ///
    /// *Invariant*: the caller changes what the backing answers, then this walks; a fault reserves its
    /// slot, then asks the backing. The two are crosswise (`agreed`): the fault is refused, or the
    /// walk finds its reservation or leaf. So the backing keeps its answer where a lock is held or,
    /// in atomics, by sequentially consistent exchanges and loads.
    pub fn evict(&mut self, hosts: &[HvaRange], mut taken: impl FnMut(Taken)) {
        agreed();
        self.take_pages(hosts, &mut taken);
    }

    fn take_pages(&mut self, hosts: &[HvaRange], taken: &mut impl FnMut(Taken)) {
        // Pages are taken whole.
        let page = F::size(0).bytes();
        let whole = |host: &HvaRange| {
            let start = host.start.0 & !(page - 1);
            let end = host.end().0.checked_next_multiple_of(page).unwrap_or(!(page - 1));
            HvaRange { start: Hva(start), bytes: end.saturating_sub(start) }
        };
        let some = |host: &&HvaRange| host.bytes != 0;
        let guest = self.guest;
        let mut spaces = guest.spaces().peekable();
        while let Some(tables) = spaces.next() {
            let last = spaces.peek().is_none();
            // What is unmapped is in the log that a reader finds who waits for this guard.
            let bytes = self.with_slots(tables, |view, guard, _| {
                let mut bytes = 0;
                for slot in &view.slots {
                    let ranges = hosts.iter().filter(some).map(whole);
                    let ranges = ranges.filter_map(|host| slot.spec.guest_of(&host));
                    bytes += guest.unmap(tables, guard, ranges.clone(), |removed| {
                        guest.keep_dirty(view, &removed);
                        let Removed { gpa, bytes, attributes, .. } = removed;
                        // Each slot's own part, as that slot has it.
                        let all = GpaRange::new(gpa, bytes).expect("a leaf is not empty");
                        for (slot, part) in view.parts(&all) {
                            guest.tell(slot, part, Some(attributes), taken);
                        }
                    });
                    // Of all tables, or a view's leaf would be told as one that is not there.
                    if last {
                        ranges.for_each(|part| guest.tell(slot, part, None, taken));
                    }
                }
                bytes
            });
            guest.counters.invalidated_bytes.add(bytes);
            guest.reclaim_in(tables);
        }
    }
}

impl<'p, F: Format, H: Host, B: Backing> Guest<'p, F, H, B> {
    /// Tells of pages of a slot that were taken from the guest: as their leaves had it, if there
    /// were any, and what is kept about them ([`Kept`](crate::bits::Kept)). Without leaves, of
    /// those alone about which something is.
    fn tell(
        &self,
        slot: &Slot,
        part: GpaRange,
        leaves: Option<Attributes>,
        taken: &mut impl FnMut(Taken),
    ) {
        let spec = &slot.spec;
        let mut tell = |first: u64, end: u64, (dirty, accessed): (bool, bool)| {
            if leaves.is_none() && !(dirty || accessed) {
                return;
            }
            let gpa = Gpa(spec.gpa.0 + (first << F::PAGE_SHIFT));
            let bytes = (end - first) << F::PAGE_SHIFT;
            taken(Taken {
                gpa,
                host: HvaRange { start: spec.host_of(gpa.0), bytes },
                dirty,
                accessed,
            });
        };
        let of_leaf = leaves.map_or((false, false), |leaf| (leaf.dirty, leaf.accessed));
        let first = (part.start().0 - spec.gpa.0) >> F::PAGE_SHIFT;
        let end = first + (part.size() >> F::PAGE_SHIFT);
        let Some(kept) = &slot.kept else { return tell(first, end, of_leaf) };
        // Neighbours that are alike, and where they begin.
        let mut run = (first, None);
        each_word::<F>(spec, part.start().0, part.size(), |word, mask| {
            let (written, used) = kept.take(word, mask, leaves.is_some(), &self.leaving);
            let of = |bits: u64, leaf: bool| if leaf { mask } else { bits };
            let (written, used) = (of(written, of_leaf.0), of(used, of_leaf.1));
            let alike = |bits: u64| bits == 0 || bits == mask;
            let first = mask.trailing_zeros();
            let step = if alike(written) && alike(used) { mask.count_ones() } else { 1 };
            for bit in (first..first + mask.count_ones()).step_by(step as usize) {
                let state = (written >> bit & 1 != 0, used >> bit & 1 != 0);
                let page = word as u64 * 64 + u64::from(bit);
                match run {
                    (_, Some(now)) if now == state => {}
                    (begin, Some(now)) => {
                        tell(begin, page, now);
                        run = (page, Some(state));
                    }
                    (_, None) => run = (page, Some(state)),
                }
            }
        });
        if let (begin, Some(state)) = run {
            tell(begin, end, state);
        }
    }

    /// Where the log is in the leaves, what was unmapped takes a part of it along: keeps it, in the
    /// log of every slot that has some of it.
    pub(crate) fn keep_dirty(&self, view: &View, removed: &Removed) {
        if self.config.logging != Logging::Hardware || !removed.attributes.dirty {
            return;
        }
        let all = GpaRange::new(removed.gpa, removed.bytes).expect("a leaf is not empty");
        for (slot, part) in view.parts(&all) {
            if let Some(log) = &slot.log {
                log.mark::<F>(&slot.spec, part.start().0, part.size());
            }
        }
    }

    /// Keeps all that the leaves knew, of pages that stay the guest's. The caller has begun to move
    /// it ([`Guest::leaving`]) before it unmapped them.
    pub(crate) fn keep_marks(&self, view: &View, removed: &Removed) {
        self.keep_dirty(view, removed);
        let all = GpaRange::new(removed.gpa, removed.bytes).expect("a leaf is not empty");
        for (slot, part) in view.parts(&all) {
            let Some(kept) = &slot.kept else { continue };
            if removed.attributes.dirty {
                kept.written.mark::<F>(&slot.spec, part.start().0, part.size());
            }
            if removed.attributes.accessed {
                kept.used.mark::<F>(&slot.spec, part.start().0, part.size());
            }
        }
    }

    /// Unmaps `ranges`, and blocks that they cut through; hands out what was there once nobody can
    /// reach it, and it was maintained: a vCPU may have written it past the caches.
    pub(crate) fn unmap(
        &self,
        tables: &Tables<'p, F, H>,
        guard: &mut Guard<'_, 'p, F, H>,
        ranges: impl IntoIterator<Item = GpaRange>,
        mut removed: impl FnMut(Removed),
    ) -> u64 {
        self.remove(tables, guard, ranges, |leaves| {
            if self.caches.matters() && leaves.attributes.memory == Memory::Normal {
                tables.platform().maintain(leaves.hpa, leaves.bytes, Maintenance::Data);
                self.counters.flushed_bytes.add(leaves.bytes);
            }
            removed(leaves);
        })
    }

    /// [`Guest::unmap`] of what is maintained already. Waits for threads that hold an entry: none
    /// does for long.
    pub(crate) fn remove(
        &self,
        tables: &Tables<'p, F, H>,
        guard: &mut Guard<'_, 'p, F, H>,
        ranges: impl IntoIterator<Item = GpaRange>,
        mut removed: impl FnMut(Removed),
    ) -> u64 {
        let mut storage = [const { Place::EMPTY }; BATCH];
        let mut removals = Removals::new(tables, &mut storage);
        let mut bytes = 0;
        let mut complete = |removals: &mut Removals<'_, '_, F, H>| {
            let before = bytes;
            bytes +=
                removals.complete().map(|leaves| (removed(leaves), leaves.bytes).1).sum::<u64>();
            self.counters.invalidations.add(u64::from(bytes != before));
            bytes
        };
        for range in ranges {
            let mut rest = range;
            loop {
                let at = match guard.unmap(rest, &mut removals) {
                    Err(Halted { why: UnmapError::CutsBlock { .. }, .. }) => {
                        complete(&mut removals);
                        match widened(guard, rest) {
                            Ok(wider) => rest = wider,
                            Err(_) => tables.platform().wait(),
                        }
                        continue;
                    }
                    Err(Halted { at, why: UnmapError::Full }) => {
                        complete(&mut removals);
                        at
                    }
                    Err(Halted { at, why: UnmapError::Contended }) => {
                        complete(&mut removals);
                        tables.platform().wait();
                        at
                    }
                    Ok(_) => break,
                    Err(Halted { why, .. }) => unreachable!("a slot's pages, these tables': {why}"),
                };
                match GpaRange::new(at, rest.end().0.saturating_sub(at.0)) {
                    Ok(behind) => rest = behind,
                    Err(_) => break,
                }
            }
        }
        complete(&mut removals)
    }
}

/// `range`, with the leaves that its ends cut through: of each end on its own, as what is beyond
/// may be another slot's. A caller that counts its pages clips it to the slot.
pub(crate) fn widened<F: Format, H: Host>(
    guard: &Guard<'_, '_, F, H>,
    range: GpaRange,
) -> Result<GpaRange, Contended> {
    let start = cut_by(guard, range.start())?.map_or(range.start(), |leaf| leaf.start());
    let end = cut_by(guard, range.end())?.map_or(range.end(), |leaf| leaf.end());
    Ok(GpaRange::new(start, end.0 - start.0).expect("wider than a range"))
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Whether the host is taking back memory at `host`.
    pub(crate) fn being_invalidated(&self, host: &HvaRange) -> bool {
        self.invalidations.cover(host)
    }
}
