//! Pages that are given up.

use super::{Eyes, Gate, Pager, ranges};
use crate::order::{Order, Victims};
use crate::page::Place;
use crate::paged::Paged;
use crate::pool::Ram;
use crate::stats::Counters;
use crate::swap::{Swap, SwapError};
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;
use slat::Format;
use slat_guest::Host;

/// What was given up.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Reclaimed {
    /// Pages.
    pub pages: u32,
    /// Another thread gives up pages of this guest: wait for it.
    pub busy: bool,
}

/// Why nothing was given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReclaimError {
    /// Swap does not take pages: until [`Pool::resume`](crate::Pool::resume).
    Swap(SwapError),
    /// All pages came back too recently to be given up: the guest uses more than it may have. It
    /// should wait, or be given more.
    Thrashing,
    /// The guest has no page in memory.
    Nothing,
    /// All pages that were next were used meanwhile, or moved by others.
    InUse,
}

impl fmt::Display for ReclaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Swap(error) => write!(f, "pages cannot be sent to swap: {error}"),
            Self::Thrashing => f.write_str(
                "all of the guest's pages came back within the minimum residency; have the guest \
                 wait, raise its limit, or lower the residency",
            ),
            Self::Nothing => f.write_str("the guest has no page in memory that could be given up"),
            Self::InUse => f.write_str("all pages were used while they were about to be given up"),
        }
    }
}

impl core::error::Error for ReclaimError {}

/// A claimed page.
struct Claimed {
    page: u32,
    frame: u32,
    copy: Option<u32>,
    /// It was used after it was looked at last.
    used: bool,
}

impl<F: Format, H: Host, M: Ram, S: Swap, G: Gate> Pager<'_, '_, '_, '_, F, H, M, S, G> {
    /// Gives up `want` pages of the guest, one at least, or as many as it can; [`Config::batch`](crate::Config) at
    /// a time. While swap takes no pages, those of which it has a copy.
    ///
    /// # Errors
    /// [`ReclaimError`]: none was given up.
    pub fn reclaim(&mut self, want: u32) -> Result<Reclaimed, ReclaimError> {
        let paged = self.paged;
        let Some(mut order) = paged.order.try_lock() else {
            return Ok(Reclaimed { pages: 0, busy: true });
        };
        let begin = self.now();
        self.note_arrivals(&mut order);
        let victims = order.victims(want.max(1) as usize, &mut Eyes::new(self));
        let result = self.give_up(&mut order, victims);
        paged.counters.reclaim.add(self.now() - begin);
        result
    }

    /// Walks over all memory: what was used since the last walk begins a generation. For who wants to know
    /// ([`Paged::idle`]); reclaim walks by itself. `false` if somebody reclaims at the moment, or the policy
    /// has no walks.
    pub fn walk(&mut self) -> bool {
        let paged = self.paged;
        let Some(mut order) = paged.order.try_lock() else { return false };
        self.note_arrivals(&mut order);
        let Order::Generations(generations) = &mut *order else { return false };
        generations.walk(&mut Eyes::new(self));
        if paged.config.huge {
            let hot = self.hot_blocks(generations);
            drop(order);
            hot.into_iter().for_each(|block| _ = self.collapse(block));
        }
        true
    }

    fn note_arrivals(&self, order: &mut Order) {
        let paged = self.paged;
        let here = paged.resident();
        paged.arrivals.take(|page, distance| order.arrive(page, distance, here));
    }

    fn give_up(&mut self, order: &mut Order, victims: Victims) -> Result<Reclaimed, ReclaimError> {
        let (paged, counters) = (self.paged, &self.paged.counters);
        Counters::add(&counters.kept, victims.kept);
        Counters::add(&counters.held, victims.held);
        let mut pages = victims.pages;
        if pages.is_empty() {
            return Err(match victims.held {
                0 => ReclaimError::Nothing,
                _ => ReclaimError::Thrashing,
            });
        }
        pages.sort_unstable();
        let mut given_up = 0;
        // Faults on a page wait while it is claimed.
        for pages in pages.chunks(paged.config.batch.max(1) as usize) {
            let mut claimed = self.claim(order, pages);
            self.unmap(&mut claimed);
            let (used, idle): (Vec<_>, Vec<_>) = claimed.into_iter().partition(|page| page.used);
            Counters::add(&counters.rescued, used.len() as u64);
            used.iter().for_each(|page| self.keep(order, page));
            for page in &idle {
                match self.send_away(page) {
                    Ok(slot) => {
                        let since = paged.given_up.fetch_add(1, Ordering::Relaxed) as u32;
                        Counters::add(&counters.given_up, 1);
                        paged.words[page.page as usize].release(Place::Away { slot, since });
                        self.give(page.frame);
                        given_up += 1;
                    }
                    Err(error) => {
                        paged.pool.stop(error);
                        self.keep(order, page);
                    }
                }
            }
        }
        match (given_up, paged.pool.trouble()) {
            (0, Some(error)) => Err(ReclaimError::Swap(error)),
            (0, None) => Err(ReclaimError::InUse),
            (pages, _) => Ok(Reclaimed { pages, busy: false }),
        }
    }

    /// The page stays after all.
    fn keep(&self, order: &mut Order, page: &Claimed) {
        order.put_back(page.page, page.used);
        let here = Place::Here { frame: page.frame, copy: page.copy };
        self.paged.words[page.page as usize].release(here);
    }

    fn claim(&mut self, order: &mut Order, pages: &[u32]) -> Vec<Claimed> {
        let paged = self.paged;
        let stopped = paged.pool.trouble().is_some();
        let mut claimed = Vec::with_capacity(pages.len());
        for &page in pages {
            let word = &paged.words[page as usize];
            if stopped && matches!(word.load(), Place::Here { copy: None, .. }) {
                order.put_back(page, false);
                continue;
            }
            let here = |place: &Place| matches!(place, Place::Here { .. });
            match word.claim(here) {
                Ok(Place::Here { frame, copy }) => {
                    claimed.push(Claimed { page, frame, copy, used: false });
                }
                // Somebody copies it, or a device has it; or it is gone, and will arrive anew.
                _ => order.put_back(page, true),
            }
        }
        for page in &claimed {
            if self.break_block(page.page) {
                Counters::add(&paged.counters.split, 1);
            }
        }
        claimed
    }

    /// Takes the claimed pages from the guest.
    fn unmap(&mut self, claimed: &mut [Claimed]) {
        let paged = self.paged;
        let begin = self.now();
        let hosts = ranges(paged, claimed.iter().map(|claimed| claimed.page));
        let worker = &mut *self.worker;
        // Without, what says accessed is that it was mapped.
        let records = worker.guest().tables().format().records_accessed();
        self.gate.alone(|| {
            worker.evict(&hosts, |taken| {
                if !taken.accessed || !records {
                    return;
                }
                let first =
                    claimed.partition_point(|it| paged.host(it.page, 1).end() <= taken.host.start);
                let theirs = claimed[first..].iter_mut();
                theirs
                    .take_while(|it| paged.host(it.page, 1).start < taken.host.end())
                    .for_each(|it| it.used = true);
            });
        });
        paged.counters.unmap.add(self.now() - begin);
    }

    /// Has swap keep a page that nobody can reach; returns where.
    fn send_away(&mut self, page: &Claimed) -> Result<u32, SwapError> {
        let (paged, pool) = (self.paged, self.paged.pool);
        if let Some(slot) = page.copy {
            Counters::add(&paged.counters.clean, 1);
            return Ok(slot);
        }
        if let Some(error) = pool.trouble() {
            return Err(error);
        }
        let slot = pool.slots.take().or_else(|| self.spare_slot()).ok_or(SwapError::Full)?;
        let begin = self.now();
        let content = self.content.page(pool.layout.page.bytes());
        pool.ram.read(pool.hpa(page.frame), content);
        let written = pool.swap.write(slot, content);
        paged.counters.write.add(self.now() - begin);
        if let Err(error) = written {
            pool.slots.give(slot);
            return Err(error);
        }
        Ok(slot)
    }

    /// The slot of a copy whose page is in memory, and will be written should it leave.
    fn spare_slot(&self) -> Option<u32> {
        let paged = self.paged;
        let (pages, begin) = (paged.words.len() as u32, paged.spare.load(Ordering::Relaxed));
        (begin..pages).chain(0..begin).find_map(|page| {
            let word = &paged.words[page as usize];
            let place = word.load();
            let Place::Here { frame, copy: Some(slot) } = place else { return None };
            paged.spare.store(page, Ordering::Relaxed);
            word.exchange(place, Place::Here { frame, copy: None }).then_some(slot)
        })
    }
}

/// Pages by how long they were not used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Idle {
    /// The youngest generation first.
    pub generations: Vec<Generation>,
    /// Walks so far.
    pub walks: u64,
    /// Those before the first that `woken` is of.
    before: u64,
    /// Pages that walks found used again, by how many walks had found them idle before: the last place is
    /// for all beyond.
    pub woken: Vec<u64>,
}

/// Pages that were used last in one generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Generation {
    /// When it began, in ticks.
    pub began: u64,
    /// Pages in memory.
    pub pages: u64,
}

impl Idle {
    /// What taking all pages that were idle for `walks` walks or more would cost: how many of such woke up
    /// between two walks, on average. Walks that could not tell, as too few had been before, do not count.
    pub fn waking(&self, walks: usize) -> f64 {
        let woken = self.woken.iter().enumerate().skip(walks);
        let rate = |(idle, &pages): (usize, &u64)| pages as f64 / self.told(idle).max(1) as f64;
        woken.map(rate).sum()
    }

    /// Walks that could tell of a page that it had been idle for so many.
    fn told(&self, idle: usize) -> u64 {
        let told = |walks: u64| walks.saturating_sub(idle as u64);
        told(self.walks) - told(self.before)
    }

    /// Pages that were idle for `walks` walks or more.
    pub fn pages(&self, walks: usize) -> u64 {
        self.generations.iter().skip(walks).map(|generation| generation.pages).sum()
    }

    /// Pages that could be taken from the guest, if it may cost `refaults` pages between two walks at most:
    /// those that were idle for so many walks that no more than that woke up of them, on average, so far. Idle times
    /// of which there were fewer walks to tell than they are long are not asked: of 10 walks, none beyond 5.
    pub fn takeable(&self, refaults: f64) -> u64 {
        let known = |walks: &usize| self.told(*walks) >= *walks as u64;
        let mut walks = (1..self.generations.len()).take_while(known);
        let walks = walks.find(|&walks| self.waking(walks) <= refaults);
        walks.map_or(0, |walks| self.pages(walks))
    }

    /// What happened after `earlier`: a guest that changes what it does is told by what it did lately.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let woken =
            self.woken.iter().zip(&earlier.woken).map(|(now, then)| now.saturating_sub(*then));
        Self {
            generations: self.generations.clone(),
            walks: self.walks,
            before: earlier.walks,
            woken: woken.collect(),
        }
    }
}

impl<M: Ram, S: Swap> Paged<'_, M, S> {
    /// How long pages were idle, as of the last walk; nothing is given up. `None` where the policy keeps no
    /// generations. Waits for who reclaims.
    pub fn idle(&self) -> Option<Idle> {
        let order = self.order.lock();
        let Order::Generations(generations) = &*order else { return None };
        let is_here = |page: u32| self.words[page as usize].may_be_here();
        let census = generations.census(is_here);
        Some(Idle {
            generations: census
                .into_iter()
                .map(|(began, pages)| Generation { began, pages })
                .collect(),
            walks: generations.walks,
            before: 0,
            woken: generations.woken.to_vec(),
        })
    }
}
