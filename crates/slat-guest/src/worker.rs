//! Threads that work on a guest's memory, and how they enter the tables.

use crate::backing::{Backing, HvaRange};
use crate::guest::Guest;
use crate::host::Host;
use crate::memslots::MemslotSnapshot;
use crate::ranges::{pieces, widened};
use crate::stats::Counters;
use alloc::vec::Vec;
use slat::{
    ChangeError, Contention, Format, Gpa, GpaRange, Guard, Interruption, OutOfFrames, PageSize,
    Reader, TableCache, Tables, TooManyReaders, Translation,
};

/// How often a call tries an entry that another thread holds before it reports contention.
pub(crate) const PATIENCE: u32 = 1000;

/// The number of table pages that a worker has room for: enough for two splits of the largest
/// block, and a map. Models have tables of few entries.
pub const TABLE_PAGES: usize = if cfg!(loom) { 4 } else { 64 };

/// A worker inside tables of its guest.
pub(crate) struct Inside<'t, 'w, F: Format, H: Host, B: Backing> {
    pub guest: &'w Guest<'w, F, H, B>,
    pub tables: &'w Tables<'w, F, H>,
    pub guard: Guard<'t, 'w, F, H>,
    pub cache: &'t mut TableCache<'w, F, H>,
    /// The worker's counters.
    pub counters: &'w Counters,
}

impl<F: Format, H: Host, B: Backing> Drop for Inside<'_, '_, F, H, B> {
    /// Counts what was mapped, even if a call to the VMM panics.
    #[inline]
    fn drop(&mut self) {
        let sizes = self.guard.leaf_delta();
        let shared = core::ptr::eq(self.tables, &raw const *self.guest.tables);
        let cells = if shared { &self.counters.mapped } else { &self.counters.views };
        cells.add(sizes);
    }
}

/// A thread that works on a guest's memory. It has one reader slot of the platform
/// [`Readers`](slat::Readers); [`Vcpu::worker`](crate::Vcpu::worker) uses that of its vCPU.
///
/// - Memslots: [`set_memslot`](Self::set_memslot), [`memslots`](Self::memslots)
/// - The log: [`read_log`](Self::read_log), [`clear_log`](Self::clear_log),
///   [`take_log`](Self::take_log), [`log_addresses`](Self::log_addresses)
/// - Rings: [`harvest_ring`](Self::harvest_ring), [`reset_rings`](Self::reset_rings)
/// - What the host writes and reads: [`host_wrote`](Self::host_wrote),
///   [`mark_written`](Self::mark_written), [`host_reads`](Self::host_reads),
///   [`help_flush`](Self::help_flush)
/// - Memory that the host takes: [`invalidate`](Self::invalidate), [`evict`](Self::evict),
///   [`freeze_writes`](Self::freeze_writes), [`age`](Self::age), [`age_host`](Self::age_host)
/// - Huge pages: [`collapse`](Self::collapse), [`recover_huge_pages`](Self::recover_huge_pages);
///   [`EagerSplit`](crate::EagerSplit) splits
/// - Memory before its use: [`prefault`](Self::prefault)
/// - Private memory: [`convert`](Self::convert), [`invalidate_private`](Self::invalidate_private)
/// - Devices: [`pin`](Self::pin), [`is_pinned`](Self::is_pinned),
///   [`device_used`](Self::device_used)
/// - Look-ups: [`translate`](Self::translate), [`guest_ranges`](Self::guest_ranges),
///   [`leaves_by_size`](Self::leaves_by_size), [`guest`](Self::guest)
///
/// A round of a migration:
/// ```
/// # use slat::*;
/// # use slat_guest::*;
/// # fn send(_page: u64) {}
/// fn round<F: Format, H: Host, B: Backing>(
///     worker: &mut Worker<'_, F, H, B>,
///     memslot: MemslotId,
///     pages: u64,
///     log: &mut [u64],
/// ) -> Result<(), LogError> {
///     worker.read_log(memslot, log)?;
///     worker.clear_log(memslot, 0, pages, log)?; // clear, then copy
///     for (word, bits) in (0..).zip(log) {
///         (0..64).filter(|bit| *bits >> bit & 1 != 0).for_each(|bit| send(word * 64 + bit));
///     }
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct Worker<'w, F: Format, H: Host, B: Backing> {
    pub(crate) guest: &'w Guest<'w, F, H, B>,
    pub(crate) reader: Reader<'w, H>,
    pub(crate) cache: TableCache<'w, F, H>,
    /// The vCPU's counters, or counters that workers without a vCPU share.
    pub(crate) counters: &'w Counters,
}

/// The result of an operation of the engine on a piece of a range.
type ChangeResult = Result<u64, Interruption<ChangeError>>;

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Makes the thread's handle for the guest: takes a reader slot among the threads that walk the
    /// host's tables, and allocates room for [`TABLE_PAGES`] table pages.
    ///
    /// # Errors
    /// [`TooManyReaders`] if all are taken.
    pub fn new(guest: &'w Guest<'w, F, H, B>) -> Result<Self, TooManyReaders> {
        let platform = guest.tables.platform();
        let reader = Reader::register(platform)?;
        let cache = TableCache::with_capacity(platform, TABLE_PAGES);
        Ok(Self { guest, reader, cache, counters: guest.counters.take() })
    }

    /// Returns the guest.
    pub const fn guest(&self) -> &'w Guest<'w, F, H, B> {
        self.guest
    }

    /// Runs `work` inside `tables`, and counts what it mapped there.
    #[inline]
    pub(crate) fn inside<R>(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        work: impl FnOnce(&mut Inside<'_, 'w, F, H, B>) -> R,
    ) -> R {
        let (guest, counters, host) = (self.guest, self.counters, tables.platform());
        // The clock is read only if entries are broken before they are made (break-before-make).
        let breaks = host.break_before_make().breaks_size_change();
        let begin = if breaks { host.now() } else { 0 };
        let guard =
            tables.enter(&mut self.reader).expect("the worker registered with this platform");
        let mut inside = Inside { guest, tables, guard, cache: &mut self.cache, counters };
        let result = work(&mut inside);
        counters.engine(&inside.guard.counts(), || host.now() - begin);
        result
    }

    /// Runs `work` inside `tables` with the current memslots. Changes of memslots wait until it
    /// returns.
    #[inline]
    pub(crate) fn with_memslots<R>(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        work: impl FnOnce(&MemslotSnapshot, &mut Inside<'_, 'w, F, H, B>) -> R,
    ) -> R {
        let guest = self.guest;
        // SAFETY:
        // 1. The thread is inside tables of the guest's platform until `work` returns.
        // 2. `work` cannot keep the view.
        // 3. Nothing in this crate refreshes or replaces a guard.
        self.inside(tables, |inside| work(unsafe { guest.memslots.snapshot() }, inside))
    }

    /// Returns the result of `look` on the current memslots.
    pub(crate) fn look<R>(&mut self, look: impl FnOnce(&MemslotSnapshot) -> R) -> R {
        self.with_memslots(&self.guest.tables, |view, _| look(view))
    }

    /// Returns the guest addresses of the host memory at `host`: a range for each memslot that has
    /// some of it.
    pub fn guest_ranges(&mut self, host: HvaRange) -> Vec<GpaRange> {
        self.look(|view| {
            let parts = view.backed_by(host).filter(|(memslot, _)| !memslot.deleting);
            parts.map(|(_, range)| range).collect()
        })
    }

    /// Translates `gpa` in the tables that vCPUs share; returns `None` if nothing is mapped there.
    ///
    /// # Errors
    /// [`Contention`] if the entry is being changed.
    pub fn translate(&mut self, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        self.inside(&self.guest.tables, |Inside { guard, .. }| guard.translate(gpa))
    }

    /// Counts the guest's leaves by size, for statistics. If faults fold leaves, groups come last,
    /// counted as leaves of their own size.
    ///
    /// This walks all memory. A leaf whose entry is being changed is not counted.
    /// [`Stats::mapped`](crate::Stats) has numbers without a walk.
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

    /// Repeats `change` until all of `range` is changed and invalidated, including changes by other
    /// threads that they have not invalidated yet. It works piece by piece, so that unlinked tables
    /// wait for one piece only. It waits for threads that hold an entry.
    pub(crate) fn until_done(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        range: GpaRange,
        change: impl FnMut(&mut Guard<'_, 'w, F, H>, GpaRange) -> ChangeResult,
    ) {
        self.until_done_in(tables, range, |_, piece, run| run(piece), change);
    }

    /// As [`Worker::until_done`], for a change that gives rights: a CPU that holds the old ones
    /// faults once, and need not be interrupted.
    pub(crate) fn until_given(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        range: GpaRange,
        change: impl FnMut(&mut Guard<'_, 'w, F, H>, GpaRange) -> ChangeResult,
    ) {
        self.repeat(tables, range, false, |_, piece, run| run(piece), change);
    }

    /// As [`Worker::until_done`], for the parts of each piece that `parts` calls its last argument
    /// with, by the memslots as the thread finds them inside the tables.
    pub(crate) fn until_done_in(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        range: GpaRange,
        parts: impl Fn(&MemslotSnapshot, GpaRange, &mut dyn FnMut(GpaRange)),
        change: impl FnMut(&mut Guard<'_, 'w, F, H>, GpaRange) -> ChangeResult,
    ) {
        self.repeat(tables, range, true, parts, change);
    }

    fn repeat(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        range: GpaRange,
        takes: bool,
        parts: impl Fn(&MemslotSnapshot, GpaRange, &mut dyn FnMut(GpaRange)),
        mut change: impl FnMut(&mut Guard<'_, 'w, F, H>, GpaRange) -> ChangeResult,
    ) {
        let host = self.guest.tables.platform();
        for piece in pieces(range, F::size(F::LARGEST_LEAF)) {
            self.with_memslots(tables, |view, Inside { guard, .. }| {
                parts(view, piece, &mut |part| {
                    let mut rest = part;
                    loop {
                        match change(guard, rest) {
                            Ok(_) => break,
                            Err(Interruption { reason: ChangeError::CutsBlock { .. }, .. }) => {
                                match widened(guard, rest) {
                                    Ok(wider) => rest = wider,
                                    Err(_) => host.wait(),
                                }
                            }
                            Err(Interruption { at, reason: ChangeError::Contended }) => {
                                let behind = GpaRange::new(at, rest.end().0.saturating_sub(at.0));
                                rest = behind.unwrap_or(rest);
                                host.wait();
                            }
                            Err(Interruption { reason, .. }) => {
                                unreachable!("a memslot's pages: {reason}")
                            }
                        }
                    }
                });
                if takes {
                    guard.defer_invalidation(piece).expect("a memslot's pages");
                    guard.invalidate();
                }
            });
            self.guest.piece_done(piece);
        }
    }

    /// Makes sure that at least `pages` table pages are in the worker's cache. If there are fewer,
    /// it takes more than that.
    #[inline]
    pub(crate) fn top_up(&mut self, pages: usize) -> Result<(), OutOfFrames> {
        if self.cache.len() >= pages { Ok(()) } else { self.fill(pages) }
    }

    #[cold]
    fn fill(&mut self, pages: usize) -> Result<(), OutOfFrames> {
        match fill(&mut self.cache, pages) {
            // Unlinked tables that no thread is inside any more make room.
            Err(_) if self.guest.reclaim() != 0 => fill(&mut self.cache, pages),
            result => result,
        }
    }
}

/// Fills `cache` to at least `pages` table pages, or as many as it has room for. If it has to take
/// any, it takes more than that.
pub(crate) fn fill<F: Format, H: Host>(
    cache: &mut TableCache<'_, F, H>,
    pages: usize,
) -> Result<(), OutOfFrames> {
    let filled = cache.fill(pages.max(TABLE_PAGES));
    match filled {
        _ if cache.len() >= pages => Ok(()),
        Ok(()) if cache.is_empty() => Err(OutOfFrames { wanted: pages, available: 0 }),
        filled => filled,
    }
}
