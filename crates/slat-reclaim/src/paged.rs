//! One guest's memory, of which a part is in swap: the [`Backing`] that its faults ask.

use crate::arrivals::Arrivals;
use crate::order::{Generations, Lists, Looks, Order};
use crate::page::{Claim, NUMBERS, Place, Word};
use crate::pool::{Pool, PoolError, Ram};
use crate::stats::Counters;
use crate::swap::Swap;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use slat::{Access, Memory, Skip};
use slat_guest::{Backing, Hva, HvaRange, NoPage, Page};
use spin::Mutex;

/// The order in which pages are given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// By the last walk that found them used; or by how many did, where that tells better.
    Generations,
    /// By two lists, page by page: a baseline.
    TwoLists,
}

/// How a guest's memory is reclaimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Pages that the guest may have in memory.
    pub limit: u32,
    /// The order in which it gives them up.
    pub policy: Policy,
    /// Look-around: a page about to be given up is asked about with the 64 around it, in one call.
    pub look_around: bool,
    /// How often pages were used counts, too, where it has told better than when they were used
    /// last. Costs 17 bits a page.
    pub frequency: bool,
    /// Pages of one call of an ageing walk; 1 asks for each page that is there.
    pub window: u32,
    /// The parts of the tables that walks leave out where tables have accessed bits. With
    /// [`Skip::Exact`] each call of a walk costs an invalidation: windows should be large.
    pub skip: Skip,
    /// Walks end with an invalidation: without, a page that a TLB holds may look idle while it is
    /// used.
    pub fresh: bool,
    /// First touches take a whole block, where one is free.
    pub huge: bool,
    /// Ticks of the host's clock that a page stays after it came back.
    pub residency: u64,
    /// Pages that are given up together.
    pub batch: u32,
    /// Slots of swap that the guest may have, copies of pages in memory included: should it want
    /// more, pages of this guest stay, and no other guest's. `u32::MAX`: as many as there are.
    pub swap: u32,
    /// Pages that the guest keeps in memory when others want memory: it gives up no page below
    /// that, unless another of its pages comes in for it. 0: none. The pool has all the pages that
    /// its guests keep.
    pub protected: u32,
}

impl Config {
    /// Generations with look-around, in which frequency counts, walks of 1 GiB of 4 KiB pages at a
    /// time that skip what is exactly known to be idle, no huge pages, no bound on swap, no page
    /// protected.
    pub const fn new(limit: u32) -> Self {
        Self {
            limit,
            policy: Policy::Generations,
            look_around: true,
            frequency: true,
            window: 1 << 18,
            skip: Skip::Exact,
            fresh: false,
            huge: false,
            residency: 0,
            batch: 64,
            swap: u32::MAX,
            protected: 0,
        }
    }
}

/// One guest's memory on a [`Pool`]: the [`Backing`] of its slots.
///
/// A fault on a page that is not in memory is answered [`NoPage::NotYet`]; the thread that runs the
/// vCPU then has [`Pager::bring_in`](crate::Pager::bring_in) fetch it.
///
/// It is of one guest: a pager takes pages from the guest that its worker belongs to. The memory of
/// a guest that ends goes back to the pool by [`Paged::release`], or page by page by
/// [`Pager::discard`](crate::Pager::discard).
#[derive(Debug)]
pub struct Paged<'h, M, S> {
    pub(crate) pool: &'h Pool<M, S>,
    pub(crate) range: HvaRange,
    pub(crate) config: Config,
    pub(crate) words: Box<[Word]>,
    /// Of each block: whether its frames are a block, too, that may be one leaf.
    pub(crate) whole: Box<[AtomicU8]>,
    /// Of each page, when it came in: ticks, in units of 2^20.
    pub(crate) born: Box<[AtomicU32]>,
    /// Of each page, how often it is pinned.
    pub(crate) pins: Box<[AtomicU16]>,
    pub(crate) limit: AtomicU32,
    /// Pages in memory, those on their way in included.
    pub(crate) here: AtomicU32,
    pub(crate) quota: AtomicU32,
    /// Under `turn` for changes.
    protected: AtomicU32,
    /// Slots of swap that the guest has: a word has each, or the thread that gives up its pages.
    /// Never above the quota.
    pub(crate) slots: AtomicU32,
    /// Of those, slots of pages that are not in memory. A slot is counted here before it is freed,
    /// so that one less the other is never less than there are copies.
    pub(crate) away: AtomicU32,
    /// Pages that were given up so far.
    pub(crate) given_up: AtomicU64,
    pub(crate) arrivals: Arrivals,
    /// Where swap's copies of pages in memory are looked for next, should there be no other slot.
    pub(crate) spare: AtomicU32,
    /// A thread that gives up pages of the guest, or walks, holds it throughout: one at a time.
    pub(crate) turn: Mutex<Turn>,
    pub(crate) order: Order,
    pub(crate) counters: Counters,
}

/// The state of the thread that gives up pages.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    /// No page is old enough to be given up before: ticks, in units of 2^20.
    pub none_before: u64,
}

/// The numbers of a guest's pages by place.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Places {
    /// Nowhere: they read as zero.
    pub nowhere: u32,
    /// In memory alone.
    pub here: u32,
    /// In memory, and as it is there in swap.
    pub copied: u32,
    /// On their way, or claimed by a thread for something else.
    pub moving: u32,
    /// In swap alone.
    pub away: u32,
}

/// Ticks are kept in units of this, as a base-2 logarithm: a millisecond, if they are nanoseconds.
pub(crate) const BORN_SHIFT: u32 = 20;

impl<'h, M: Ram, S: Swap> Paged<'h, M, S> {
    /// `bytes` of memory, which the guest's slots have at `start` in the host's addresses. `now` is
    /// the time, in ticks of the guest's host.
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
        let looks = Looks {
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
            range: HvaRange { start, bytes },
            config,
            words: (0..pages).map(|_| Word::default()).collect(),
            whole: (0..blocks).map(|_| AtomicU8::new(0)).collect(),
            born: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            pins: (0..pages).map(|_| AtomicU16::new(0)).collect(),
            limit: AtomicU32::new(config.limit),
            here: AtomicU32::new(0),
            quota: AtomicU32::new(config.swap),
            protected: AtomicU32::new(config.protected),
            slots: AtomicU32::new(0),
            away: AtomicU32::new(0),
            given_up: AtomicU64::new(0),
            arrivals: Arrivals::new(pages),
            spare: AtomicU32::new(0),
            turn: Mutex::default(),
            order,
            counters: Counters::default(),
        })
    }

    /// The pool that it is on.
    pub const fn pool(&self) -> &'h Pool<M, S> {
        self.pool
    }

    /// Pages in memory.
    pub fn resident(&self) -> u32 {
        self.here.load(Ordering::Relaxed)
    }

    /// Pages that it may have in memory.
    pub fn limit(&self) -> u32 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets the limit. What is above it goes by [`Pager::reclaim`](crate::Pager::reclaim); without,
    /// a batch goes for each page that comes in, so that no fault pays for all of it.
    pub fn set_limit(&self, pages: u32) {
        self.limit.store(pages, Ordering::Relaxed);
    }

    /// Slots of swap that it has: of pages that are not in memory, and of copies of pages that are.
    pub fn swapped(&self) -> u32 {
        self.slots.load(Ordering::Relaxed)
    }

    /// Sets how many slots of swap it may have ([`Config::swap`]). What it has above that stays
    /// there until it is used or discarded.
    pub fn set_swap(&self, slots: u32) {
        self.quota.store(slots, Ordering::Relaxed);
    }

    /// Pages that it keeps in memory when others want memory ([`Config::protected`]).
    pub fn protected(&self) -> u32 {
        self.protected.load(Ordering::Relaxed)
    }

    /// Sets how many pages it keeps in memory when others want memory ([`Config::protected`]).
    ///
    /// # Errors
    /// [`PoolError::Protected`]: the pool does not have that many beyond the pages that other
    /// guests keep; nothing was changed.
    pub fn set_protected(&self, pages: u32) -> Result<(), PoolError> {
        let _turn = self.turn.lock();
        self.pool.protect(self.protected(), pages)?;
        self.protected.store(pages, Ordering::Relaxed);
        Ok(())
    }

    /// Pages in memory that it may give up for others: those above the pages that it keeps, or
    /// above its limit where that is lower.
    pub fn spare(&self) -> u32 {
        self.resident().saturating_sub(self.protected().min(self.limit()))
    }

    /// The numbers of its pages by place. While threads move pages, each page counts as of when it
    /// is looked at.
    pub fn places(&self) -> Places {
        let mut places = Places::default();
        for word in &self.words {
            *match word.load() {
                Place::Nowhere => &mut places.nowhere,
                Place::Here { copy: None, .. } => &mut places.here,
                Place::Here { .. } => &mut places.copied,
                Place::Moving => &mut places.moving,
                Place::Away { .. } => &mut places.away,
            } += 1;
        }
        places
    }

    /// Gives all memory and slots of the guest back to the pool. Swap has forgotten their content
    /// when this returns, except what it could not forget ([`Pool::trouble`]).
    ///
    /// # Safety
    /// No CPU can reach the pages any more: the guest that this was the backing of has been
    /// destroyed ([`Guest::destroy`](slat_guest::Guest::destroy)), under what that asks for.
    pub unsafe fn release(self) {
        _ = self.pool.protect(self.protected(), 0);
        let mut slots = Vec::new();
        for word in &self.words {
            let slot = match word.load() {
                Place::Here { frame, copy } => {
                    self.pool.frames.give(frame);
                    copy
                }
                Place::Away { slot, .. } => Some(slot),
                // No page is claimed: a thread that moves one borrows this.
                Place::Nowhere | Place::Moving => None,
            };
            slots.extend(slot.inspect(|&slot| self.pool.slots.withhold(slot)));
        }
        self.pool.wipe(&mut slots);
        // What it freed earlier is stale.
        loop {
            if let Some(wiper) = self.pool.wiper() {
                return wiper.wipe();
            }
            #[cfg(feature = "std")]
            std::thread::yield_now();
            core::hint::spin_loop();
        }
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
        self.pool.give_slot(slot);
        self.uncharge();
    }

    /// Whether some page in memory has a copy in swap; it may be that none has, if pages move.
    pub(crate) fn may_have_copies(&self) -> bool {
        let slots = self.slots.load(Ordering::Acquire);
        slots > self.away.load(Ordering::Acquire)
    }

    /// Statistics of reclaim so far.
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

    /// Crosswise with [`Worker::evict`](slat_guest::Worker::evict), as a page's word is.
    pub(crate) fn is_whole(&self, page: u32) -> bool {
        self.whole[self.block_of(page)].load(Ordering::Acquire) != 0
    }
}

impl<M: Ram, S: Swap> Paged<'_, M, S> {
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

/// A [`Backing`] that is a guest's [`Paged`] memory; a [`Pager`](crate::Pager) moves its pages.
pub trait PagedBacking: Backing {
    /// The memory that its frames are in.
    type Ram: Ram;
    /// The swap that its pages go to.
    type Swap: Swap;

    /// The memory.
    fn paged(&self) -> &Paged<'_, Self::Ram, Self::Swap>;
}

impl<M: Ram, S: Swap> PagedBacking for &Paged<'_, M, S> {
    type Ram = M;
    type Swap = S;

    fn paged(&self) -> &Paged<'_, M, S> {
        self
    }
}

impl<M: Ram, S: Swap> Backing for &Paged<'_, M, S> {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        let number = self.number(host).ok_or(NoPage::Never)?;
        let word = &self.words[number as usize];
        loop {
            let place = word.load();
            let Place::Here { frame, copy } = place else { return Err(NoPage::NotYet) };
            if let (Access::Write, Some(slot)) = (access, copy) {
                // From here on what is in swap is not what the guest has.
                if word.exchange(place, Place::Here { frame, copy: None }) {
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
        let place = word.claim(|place| matches!(place, Place::Here { .. })).ok()?;
        let Place::Here { frame, copy } = place else { return None };
        let _claim = Claim { word, place: Place::Here { frame, copy: None } };
        copy.into_iter().for_each(|slot| self.give_slot(slot));
        Some(grant(self.page_of(number, frame, true)))
    }
}
