//! A thread that works on a guest's memory: how it gets into the tables, and with what.

use crate::backing::{Backing, HvaRange};
use crate::budget::{NoPages, TABLE_PAGES};
use crate::guest::Guest;
use crate::host::Host;
use crate::ranges::{pieces, widened};
use crate::slots::View;
use crate::stats::Counters;
use alloc::vec::Vec;
use slat::{
    ChangeError, Contended, Format, Frame, Gpa, GpaRange, Guard, Halted, Member, NoSeat, PageSize,
    TableCache, Tables, Translation,
};

/// How often a call tries an entry that somebody holds, before it says so.
pub(crate) const PATIENCE: u32 = 1000;

/// Room for a worker's table pages.
pub type TableRoom = [Option<Frame>; TABLE_PAGES];

/// A worker inside tables of its guest.
pub(crate) struct Inside<'t, 'w, F: Format, H: Host, B: Backing> {
    pub guest: &'w Guest<'w, F, H, B>,
    pub tables: &'w Tables<'w, F, H>,
    pub guard: Guard<'t, 'w, F, H>,
    pub cache: &'t mut TableCache<'w, F, H>,
    /// The worker's.
    pub counters: &'w Counters,
}

impl<F: Format, H: Host, B: Backing> Drop for Inside<'_, '_, F, H, B> {
    /// Also where what is asked of the VMM panics: what was mapped is counted.
    #[inline]
    fn drop(&mut self) {
        let sizes = self.guard.sizes();
        let shared = core::ptr::eq(self.tables, &raw const *self.guest.tables);
        let cells = if shared { &self.counters.mapped } else { &self.counters.views };
        cells.add(sizes);
    }
}

/// A thread that works on a guest's memory.
#[derive(Debug)]
pub struct Worker<'w, F: Format, H: Host, B: Backing> {
    pub(crate) guest: &'w Guest<'w, F, H, B>,
    pub(crate) member: Member<'w, H>,
    pub(crate) cache: TableCache<'w, F, H>,
    /// A vCPU's own, or those that all others share.
    pub(crate) counters: &'w Counters,
}

/// What an operation of the engine's on a piece of a range answers.
type Changed = Result<u64, Halted<ChangeError>>;

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Takes a seat among the threads that walk the host's tables.
    ///
    /// # Errors
    /// [`NoSeat`] if all are taken.
    pub fn new(
        guest: &'w Guest<'w, F, H, B>,
        room: &'w mut [Option<Frame>],
    ) -> Result<Self, NoSeat> {
        let platform = guest.tables.platform();
        let member = Member::join(platform)?;
        let cache = TableCache::new(platform, room);
        Ok(Self { guest, member, cache, counters: guest.counters.take() })
    }

    /// The guest.
    pub const fn guest(&self) -> &'w Guest<'w, F, H, B> {
        self.guest
    }

    /// Inside `tables`; what happens there is counted.
    #[inline]
    pub(crate) fn inside<R>(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        work: impl FnOnce(&mut Inside<'_, 'w, F, H, B>) -> R,
    ) -> R {
        let (guest, counters, host) = (self.guest, self.counters, tables.platform());
        // Only entries that stand broken are timed.
        let breaks = host.break_before_make().breaks_size_change();
        let begin = if breaks { host.now() } else { 0 };
        let guard = tables.enter(&mut self.member).expect("the worker joined this platform");
        let mut inside = Inside { guest, tables, guard, cache: &mut self.cache, counters };
        let result = work(&mut inside);
        counters.engine(&inside.guard.counts(), || host.now() - begin);
        result
    }

    /// Inside `tables`, with the slots as they are: changes of slots wait until `work` has
    /// returned.
    #[inline]
    pub(crate) fn with_slots<R>(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        work: impl FnOnce(&View, &mut Inside<'_, 'w, F, H, B>) -> R,
    ) -> R {
        let guest = self.guest;
        // SAFETY: inside tables of the guest's platform until `work`, which cannot keep the view,
        // has returned; nobody in this crate refreshes a guard, or replaces one.
        self.inside(tables, |inside| work(unsafe { guest.slots.view() }, inside))
    }

    /// What `look` finds among the slots of now.
    pub(crate) fn look<R>(&mut self, look: impl FnOnce(&View) -> R) -> R {
        self.with_slots(&self.guest.tables, |view, _| look(view))
    }

    /// Where the guest has the memory at `host`: a range of each slot that has some of it.
    pub fn guest_ranges(&mut self, host: HvaRange) -> Vec<GpaRange> {
        self.look(|view| {
            let parts = view.backed_by(host).filter(|(slot, _)| !slot.going);
            parts.map(|(_, range)| range).collect()
        })
    }

    /// What `gpa` translates to in the tables that vCPUs share; `None` if nothing is mapped there.
    ///
    /// # Errors
    /// [`Contended`] if the entry is being changed.
    pub fn translate(&mut self, gpa: Gpa) -> Result<Option<Translation>, Contended> {
        self.inside(&self.guest.tables, |Inside { guard, .. }| guard.translate(gpa))
    }

    /// Leaves of the guest's tables by size, and how many there are, for statistics; groups, where
    /// faults fold, as leaves of their own size, last.
    ///
    /// A walk over all memory; where an entry is being changed its leaf is left out. Without a
    /// walk: [`Stats::mapped`](crate::Stats).
    pub fn leaves_by_size(&mut self) -> Vec<(PageSize, u64)> {
        let tables = &self.guest.tables;
        let bits = tables.geometry().address_bits;
        let mut sizes: Vec<(PageSize, u64)> =
            (0..=F::LARGEST_LEAF).map(|level| (F::size(level), 0)).collect();
        if self.guest.config.contiguous {
            let groups = (0..=F::LARGEST_LEAF).filter(|&level| F::group(level) > 1);
            let bytes = groups.map(|level| (F::group(level) as u64) << F::shift(level));
            sizes.extend(bytes.filter_map(PageSize::from_bytes).map(|size| (size, 0)));
        }
        let all = GpaRange::new(Gpa(0), 1 << bits).expect("a guest has an address");
        self.inside(tables, |Inside { guard, .. }| {
            let leaves = guard.leaves(all).into_iter().flatten();
            for leaf in leaves.flatten() {
                if let Some(size) = sizes.iter_mut().find(|(size, _)| *size == leaf.size) {
                    size.1 += 1;
                }
            }
        });
        sizes
    }

    /// Repeats `change` until all of `range` is done and invalidated, also what another thread has
    /// done there and not invalidated yet. Piece by piece: tables that others unlink wait for a
    /// piece alone. Entries are held briefly; this waits for them.
    pub(crate) fn until_done(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        range: GpaRange,
        mut change: impl FnMut(&mut Guard<'_, 'w, F, H>, GpaRange) -> Changed,
    ) {
        let host = self.guest.tables.platform();
        for piece in pieces(range, F::size(F::LARGEST_LEAF)) {
            self.inside(tables, |Inside { guard, .. }| {
                let mut rest = piece;
                loop {
                    match change(guard, rest) {
                        Ok(_) => break,
                        Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => {
                            match widened(guard, rest) {
                                Ok(wider) => rest = wider,
                                Err(_) => host.wait(),
                            }
                        }
                        Err(Halted { at, why: ChangeError::Contended }) => {
                            let behind = GpaRange::new(at, rest.end().0.saturating_sub(at.0));
                            rest = behind.unwrap_or(rest);
                            host.wait();
                        }
                        Err(Halted { why, .. }) => unreachable!("a slot's pages: {why}"),
                    }
                }
                guard.owe(piece).expect("a slot's pages");
                guard.complete();
            });
            self.guest.piece_done(piece);
        }
    }

    /// Has at least `pages` table pages at hand, and more while it is about it.
    #[inline]
    pub(crate) fn top_up(&mut self, pages: usize) -> Result<(), NoPages> {
        if self.cache.len() >= pages { Ok(()) } else { self.fill(pages) }
    }

    #[cold]
    fn fill(&mut self, pages: usize) -> Result<(), NoPages> {
        let (budget, vcpus) = (&self.guest.budget, self.guest.config.vcpus);
        let result = budget.fill(&mut self.cache, pages, vcpus);
        let result = match result {
            Err(NoPages::Limit(_)) if self.guest.reclaim() != 0 => {
                budget.fill(&mut self.cache, pages, vcpus)
            }
            result => result,
        };
        // What little is at hand will do for most.
        if self.cache.is_empty() && matches!(result, Err(NoPages::Limit(_))) {
            self.counters.table_limit.add(1);
        }
        result
    }
}

impl<F: Format, H: Host, B: Backing> Drop for Worker<'_, F, H, B> {
    /// The pages at hand go back with the cache, right after this.
    fn drop(&mut self) {
        self.guest.budget.give_back(self.cache.len() as u64);
    }
}
