//! Memory of one guest, part of which is in swap: the [`Backing`] for the guest's faults.

use crate::arrivals::Arrivals;
use crate::bits::Bits;
use crate::order::{Generations, Lists, Order, ScanOptions};
use crate::page::{Claim, NUMBERS, PageState, Word};
use crate::pool::{Pool, PoolError, Ram};
use crate::slots::Owner;
use crate::stats::Counters;
use crate::swap::Swap;
use alloc::boxed::Box;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use slat::{Access, Memory, TableBits};
use slat_guest::{Backing, Hva, HvaRange, NoPage, Page};
use spin::Mutex;

/// Order in which pages are given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// By the last walk that found a page used; with [`Config::frequency`], by how many walks did
    /// while that predicts better.
    Generations,
    /// By an active and an inactive list, as Linux had before its generations: a baseline.
    TwoLists,
}

/// Configuration of the reclaim of one guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Most pages that the guest may have in memory.
    pub limit: u32,
    /// Order in which the guest gives up pages.
    pub policy: Policy,
    /// Look-around: the accessed bit of a page about to be given up is tested together with those
    /// of the 64 pages around it, in one call.
    pub look_around: bool,
    /// Orders pages by how often they were used, while that predicts uses better than the time of
    /// the last use. Costs 17 bits a page.
    pub frequency: bool,
    /// Pages that one call of an ageing walk covers; with 1, a walk makes one call for each page in
    /// memory.
    pub window: u32,
    /// Which parts of the tables a walk skips, if non-leaf entries have accessed bits. With
    /// [`TableBits::Exact`] each call of a walk costs a TLB invalidation: windows should be large.
    pub table_bits: TableBits,
    /// Ends each call of a walk with a TLB invalidation; without it, a page that a TLB holds may
    /// look idle while it is used.
    pub fresh: bool,
    /// Uses huge pages: a first touch brings in a whole block if one is free, and
    /// [`Pager::walk`](crate::Pager::walk) collapses blocks that are in use.
    pub huge: bool,
    /// Minimum residency: ticks of the host's clock that a page stays in memory after it came in,
    /// at most 2^50. A page that no thread looks at for 2^51 ticks (26 days of nanoseconds) may
    /// look new once.
    pub residency: u64,
    /// Pages that are given up together.
    pub batch: u32,
    /// Most slots of swap that the guest may have, including those of copies of pages in memory. At
    /// this bound the guest's own pages stay in memory; other guests are not affected. `u32::MAX`:
    /// no bound.
    pub swap: u32,
    /// Pages that the guest keeps in memory when other guests want memory: at this number, it gives
    /// up a page only to bring in another of its own. 0: none. The guests of a pool cannot keep
    /// more pages than the pool has ([`PoolError::Protected`]).
    pub protected: u32,
}

impl Config {
    /// Returns the default configuration with this limit: generations with look-around and
    /// frequency, windows of 2^18 pages (1 GiB of 4 KiB pages), [`TableBits::Exact`], batches of 64
    /// pages, no huge pages, no minimum residency, no bound on swap, and no protected pages.
    pub const fn new(limit: u32) -> Self {
        Self {
            limit,
            policy: Policy::Generations,
            look_around: true,
            frequency: true,
            window: 1 << 18,
            table_bits: TableBits::Exact,
            fresh: false,
            huge: false,
            residency: 0,
            batch: 64,
            swap: u32::MAX,
            protected: 0,
        }
    }
}

/// Memory of one guest on a [`Pool`]: the [`Backing`] of its memslots.
///
/// A fault on a page that is not in memory is answered [`NoPage::Absent`]; the thread that runs the
/// vCPU then calls [`Pager::bring_in`](crate::Pager::bring_in).
///
/// It belongs to one guest only, because a pager unmaps pages from the guest that its worker
/// belongs to. When the guest ends, [`PagedMemory::release`] gives its memory back to the pool, or
/// [`Pager::discard`](crate::Pager::discard) does so page by page.
#[derive(Debug)]
pub struct PagedMemory<'h, M, S> {
    pub(crate) pool: &'h Pool<M, S>,
    /// The guest, as the slots of swap know it.
    pub(crate) owner: Owner,
    pub(crate) range: HvaRange,
    pub(crate) config: Config,
    pub(crate) words: Box<[Word]>,
    /// For each block of pages, 1 if its frames are a block too, which one leaf may map.
    pub(crate) whole: Box<[AtomicU8]>,
    /// For each page, when it came in: ticks, in units of 2^20.
    pub(crate) born: Box<[AtomicU32]>,
    /// For each page, how often it is pinned.
    pub(crate) pins: Box<[AtomicU16]>,
    /// Number of pages that are pinned.
    pub(crate) pinned: AtomicU32,
    pub(crate) limit: AtomicU32,
    /// Pages in memory, including those that are being brought in.
    pub(crate) here: AtomicU32,
    pub(crate) quota: AtomicU32,
    /// Changes only under `protecting`, which is held for no longer than a change takes.
    protected: AtomicU32,
    protecting: Mutex<()>,
    /// Slots of swap that the guest has, each in a word or held by the thread that gives up its
    /// pages. `charge` never takes it above the quota.
    pub(crate) slots: AtomicU32,
    /// Of those, slots of pages that are not in memory. Lowered before such a slot is freed, and
    /// raised after the page has left, so that `slots` minus `away` is never less than the number
    /// of copies.
    pub(crate) away: AtomicU32,
    /// Pages given up so far.
    pub(crate) evicted: AtomicU64,
    pub(crate) arrivals: Arrivals,
    /// Held by the one thread that gives up pages of the guest, or walks, for as long as it does.
    pub(crate) turn: Mutex<Turn>,
    pub(crate) order: Order,
    pub(crate) counters: Counters,
}

/// State of the thread that gives up pages.
#[derive(Debug)]
pub(crate) struct Turn {
    /// No page is old enough to be given up before this time: ticks, in units of 2^20.
    pub none_before: u64,
    /// Searches since a page was found: how many pages they passed over as too new, and when the
    /// first of these is old enough.
    pub held: u64,
    pub until: u64,
    /// Pages in memory with a copy in swap, and some whose copy was dropped: a fault drops copies
    /// without the turn. Pages that arrived and were not noted yet are missing.
    pub copies: Bits,
    /// Where the next search of `copies` begins.
    pub hand: u32,
    /// A callback unwound during a search or while pages were given up: the order may have lost
    /// pages that are in memory.
    pub torn: bool,
}

impl Turn {
    fn new(pages: u32) -> Self {
        let copies = Bits::new(pages);
        Self { none_before: 0, held: 0, until: u64::MAX, copies, hand: 0, torn: false }
    }
}

/// Numbers of a guest's pages by place.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Places {
    /// Pages that were never touched or were discarded: they read as zero.
    pub nowhere: u32,
    /// Pages that are only in memory.
    pub here: u32,
    /// Pages in memory that have a valid copy in swap.
    pub copied: u32,
    /// Pages that a thread has claimed, to move them or for another purpose.
    pub moving: u32,
    /// Pages that are only in swap.
    pub away: u32,
}

/// Base-2 logarithm of the unit in which ticks are kept: a millisecond, if ticks are nanoseconds.
pub(crate) const BORN_SHIFT: u32 = 20;

impl<'h, M: Ram, S: Swap> PagedMemory<'h, M, S> {
    /// Makes memory of `bytes` bytes on `pool`, which the guest's memslots have at the host's
    /// address `start`. `now` is the time, in ticks of the guest's host.
    ///
    /// # Errors
    /// [`PoolError`]; nothing was taken.
    pub fn new(
        pool: &'h Pool<M, S>,
        start: Hva,
        bytes: u64,
        config: Config,
        now: u64,
    ) -> Result<Self, PoolError> {
        let block = pool.layout.block;
        if !start.0.is_multiple_of(block.bytes()) {
            return Err(PoolError::Unaligned { size: block });
        }
        if !bytes.is_multiple_of(pool.layout.page.bytes()) || start.0.checked_add(bytes).is_none() {
            return Err(PoolError::Unaligned { size: pool.layout.page });
        }
        let pages = bytes >> pool.layout.page.shift();
        if pages >= NUMBERS {
            return Err(PoolError::TooMany { pages });
        }
        let pages = pages as u32;
        let looks = ScanOptions {
            window: config.window,
            around: config.look_around,
            frequency: config.frequency,
        };
        let order = match config.policy {
            Policy::Generations => Order::generations(Generations::new(pages, looks, now)),
            Policy::TwoLists => Order::lists(Lists::new(pages)),
        };
        let blocks = pages.div_ceil(1 << pool.frames.order());
        pool.protect(0, config.protected)?;
        Ok(Self {
            pool,
            owner: pool.slots.join(),
            range: HvaRange { start, bytes },
            config,
            words: (0..pages).map(|_| Word::default()).collect(),
            whole: (0..blocks).map(|_| AtomicU8::new(0)).collect(),
            born: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            pins: (0..pages).map(|_| AtomicU16::new(0)).collect(),
            pinned: AtomicU32::new(0),
            limit: AtomicU32::new(config.limit),
            here: AtomicU32::new(0),
            quota: AtomicU32::new(config.swap),
            protected: AtomicU32::new(config.protected),
            protecting: Mutex::new(()),
            slots: AtomicU32::new(0),
            away: AtomicU32::new(0),
            evicted: AtomicU64::new(0),
            arrivals: Arrivals::new(pages),
            turn: Mutex::new(Turn::new(pages)),
            order,
            counters: Counters::default(),
        })
    }

    /// Returns the pool that the memory is on.
    pub const fn pool(&self) -> &'h Pool<M, S> {
        self.pool
    }

    /// Returns the number of pages in memory.
    pub fn resident(&self) -> u32 {
        self.here.load(Ordering::Relaxed)
    }

    /// Returns how many pages the guest may have in memory.
    pub fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets the limit. [`Pager::reclaim`](crate::Pager::reclaim) gives up the pages above it;
    /// without such a call, each page that comes in gives up one batch, so that no fault pays for
    /// all of them.
    pub fn set_limit(&self, pages: u32) {
        self.limit.store(pages, Ordering::Relaxed);
    }

    /// Returns how many slots of swap the guest has, for pages that are not in memory and for
    /// copies of pages that are.
    pub fn swapped(&self) -> u32 {
        self.slots.load(Ordering::Relaxed)
    }

    /// Sets how many slots of swap the guest may have ([`Config::swap`]). Pages that are already in
    /// slots above that number stay there until they are used or discarded.
    pub fn set_swap(&self, slots: u32) {
        self.quota.store(slots, Ordering::Relaxed);
    }

    /// Returns how many pages the guest keeps in memory when other guests want memory
    /// ([`Config::protected`]).
    pub fn protected(&self) -> u32 {
        self.protected.load(Ordering::Relaxed)
    }

    /// Sets how many pages the guest keeps in memory when other guests want memory
    /// ([`Config::protected`]).
    ///
    /// # Errors
    /// [`PoolError::Protected`]: the pool does not have that many beyond the pages that other
    /// guests keep; nothing was changed.
    pub fn set_protected(&self, pages: u32) -> Result<(), PoolError> {
        let _changing = self.protecting.lock();
        self.pool.protect(self.protected(), pages)?;
        self.protected.store(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Returns how many pages in memory the guest may give up for other guests: those above the
    /// number that it keeps, or above its limit if that is lower.
    pub fn spare(&self) -> u32 {
        self.resident().saturating_sub(self.protected().min(self.limit()))
    }

    /// Returns the numbers of the guest's pages by place. While threads move pages, each page
    /// counts with its place when this method looks at it.
    pub fn places(&self) -> Places {
        let mut places = Places::default();
        for word in &self.words {
            *match word.load() {
                PageState::Empty => &mut places.nowhere,
                PageState::Resident { copy: None, .. } => &mut places.here,
                PageState::Resident { .. } => &mut places.copied,
                PageState::Moving => &mut places.moving,
                PageState::Swapped { .. } => &mut places.away,
            } += 1;
        }
        places
    }

    /// Gives all memory and slots of the guest back to the pool. Swap has forgotten their content
    /// when this returns, except what it could not forget ([`Pool::trouble`]).
    ///
    /// # Safety
    /// No CPU can reach the pages any more: the guest whose backing this was has been destroyed
    /// ([`Guest::destroy`](slat_guest::Guest::destroy)), and that function's own conditions held.
    pub unsafe fn release(self) {
        _ = self.pool.protect(self.protected(), 0);
        let mut slots = self.pool.withheld(self.owner);
        for word in &self.words {
            let slot = match word.load() {
                PageState::Resident { frame, copy } => {
                    self.pool.frames.give(frame);
                    copy
                }
                PageState::Swapped { slot, .. } => Some(slot),
                // No page is claimed: a thread that moves one borrows this.
                PageState::Empty | PageState::Moving => None,
            };
            slot.into_iter().for_each(|slot| slots.add(slot));
        }
        slots.wipe();
        // Older copies of the guest's pages may be in slots that no page has. No thread of this
        // guest has one in flight.
        _ = self.pool.slots.in_flight(self.owner);
        self.pool.wipe_stale(self.owner);
        self.pool.slots.leave(self.owner);
    }

    /// Gives `frame`, which no page has any more, back to the pool.
    pub(crate) fn give_frame(&self, frame: u32) {
        self.pool.frames.give(frame);
        self.here.fetch_sub(1, Ordering::AcqRel);
    }

    /// Adds the pages that arrived to the order.
    ///
    /// *Invariant*: a page in memory with a copy is in `Turn::copies`, or among the arrivals. It
    /// gets its copy when it comes in, after it was pushed: the taker finds the copy or the claim.
    pub(crate) fn note(&self, turn: &mut Turn) {
        self.order.note(&self.arrivals, self.resident(), |page| {
            let place = self.words[page as usize].load();
            if matches!(place, PageState::Moving | PageState::Resident { copy: Some(_), .. }) {
                turn.copies.add(page);
            }
        });
    }

    /// Adds a slot to the guest's account, if its quota allows one more.
    pub(crate) fn charge(&self) -> bool {
        let more = |slots: u32| Some(slots + 1).filter(|slots| *slots <= self.quota());
        self.slots.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    pub(crate) fn uncharge(&self) {
        self.slots.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn quota(&self) -> u32 {
        self.quota.load(Ordering::Relaxed)
    }

    /// Gives `slot` back to the pool, and takes it off the guest's account.
    pub(crate) fn give_slot(&self, slot: u32) {
        self.pool.give_slot(slot, self.owner);
        self.uncharge();
    }

    /// Returns whether a page in memory may have a copy in swap; `false` means that none has.
    pub(crate) fn may_have_copies(&self) -> bool {
        let slots = self.slots.load(Ordering::Acquire);
        slots > self.away.load(Ordering::Acquire)
    }

    /// Returns the statistics of reclaim so far.
    pub fn stats(&self) -> crate::Stats {
        self.counters.read()
    }

    pub(crate) fn number(&self, host: Hva) -> Option<u32> {
        let offset = host.0.checked_sub(self.range.start.0)?;
        (offset < self.range.bytes).then(|| (offset >> self.pool.layout.page.shift()) as u32)
    }

    pub(crate) fn host(&self, page: u32, pages: u32) -> HvaRange {
        let shift = self.pool.layout.page.shift();
        let start = Hva(self.range.start.0 + (u64::from(page) << shift));
        HvaRange { start, bytes: u64::from(pages) << shift }
    }

    pub(crate) const fn block_of(&self, page: u32) -> usize {
        (page >> self.pool.frames.order()) as usize
    }

    /// Ordered against [`Worker::evict`](slat_guest::Worker::evict) by the fences that order a
    /// page's word (see `page`).
    pub(crate) fn is_whole(&self, page: u32) -> bool {
        self.whole[self.block_of(page)].load(Ordering::Acquire) != 0
    }
}

impl<M: Ram, S: Swap> PagedMemory<'_, M, S> {
    fn page_of(&self, number: u32, frame: u32, write: bool) -> Page {
        let layout = &self.pool.layout;
        Page {
            hpa: self.pool.hpa(frame),
            block: if self.is_whole(number) { layout.block } else { layout.page },
            write,
            execute: true,
            memory: Memory::Normal,
        }
    }
}

/// [`Backing`] of a guest whose memory is [`PagedMemory`]; a [`Pager`](crate::Pager) moves its
/// pages.
pub trait PagedBacking: Backing {
    /// Memory that the frames are in.
    type Ram: Ram;
    /// Swap that the pages go to.
    type Swap: Swap;

    /// Returns the guest's memory.
    fn paged(&self) -> &PagedMemory<'_, Self::Ram, Self::Swap>;
}

impl<M: Ram, S: Swap> PagedBacking for &PagedMemory<'_, M, S> {
    type Ram = M;
    type Swap = S;

    fn paged(&self) -> &PagedMemory<'_, M, S> {
        self
    }
}

impl<M: Ram, S: Swap> Backing for &PagedMemory<'_, M, S> {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        let number = self.number(host).ok_or(NoPage::Never)?;
        let word = &self.words[number as usize];
        loop {
            let place = word.load();
            let PageState::Resident { frame, copy } = place else { return Err(NoPage::Absent) };
            if let (Access::Write, Some(slot)) = (access, copy) {
                // The guest may write the page from here on, which makes the copy in swap stale.
                if word.exchange(place, PageState::Resident { frame, copy: None }) {
                    self.give_slot(slot);
                }
                continue;
            }
            return Ok(self.page_of(number, frame, copy.is_none()));
        }
    }

    fn make_writable<R>(&self, host: Hva, grant: impl FnOnce(Page) -> R) -> Option<R> {
        let number = self.number(host)?;
        let word = &self.words[number as usize];
        let place = word.claim(|place| matches!(place, PageState::Resident { .. })).ok()?;
        let PageState::Resident { frame, copy } = place else { return None };
        let _claim = Claim { word, place: PageState::Resident { frame, copy: None } };
        copy.into_iter().for_each(|slot| self.give_slot(slot));
        Some(grant(self.page_of(number, frame, true)))
    }
}
