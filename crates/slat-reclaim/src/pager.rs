//! The pager, which brings a guest's pages in for faults, and gives up pages to make room.

mod blocks;
mod idle;
mod pin;
mod reclaim;
#[cfg(all(test, target_os = "linux", not(loom)))]
mod tests;

pub use idle::{Generation, Idle};
pub use pin::PagesPinned;
pub use reclaim::{ReclaimCounts, ReclaimError};

use crate::buffer::Buffer;
use crate::order::{AccessedBits, Look};
use crate::page::{Claim, PageState};
use crate::paged::{BORN_SHIFT, PagedBacking, PagedMemory};
use crate::pool::Ram;
use crate::stats::Counters;
use crate::swap::{Swap, SwapError};
use crate::undo::Undo;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;
use slat::{Access, AgeOptions, ChangeError, Format, Hpa, PageSize, TableBits};
use slat_guest::{AgeError, Host, Hva, HvaRange, PinError, Worker};

/// Lock under which pages are aged and unmapped: a baseline, to measure the cost of such a lock.
#[cfg(feature = "baselines")]
pub trait Gate: Sync {
    /// Calls `work` once, while it holds the lock.
    fn alone(&self, work: &mut dyn FnMut());
}

/// Brings in and gives up pages of one guest, on a separate thread or on the thread of a vCPU whose
/// fault waits for a page.
///
/// Any number of threads may bring pages in. Only one at a time gives up pages of a guest; the
/// others get [`ReclaimCounts::busy`].
pub struct Pager<'a, 'w, F: Format, H: Host, B: PagedBacking> {
    worker: &'a mut Worker<'w, F, H, B>,
    paged: &'w PagedMemory<'w, B::Ram, B::Swap>,
    #[cfg(feature = "baselines")]
    gate: Option<&'a dyn Gate>,
    content: Buffer,
}

/// Reason why a page could not be brought in. No content is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PageError {
    /// The guest's memory has no such address.
    Outside {
        /// The address.
        host: Hva,
    },
    /// The guest's tables have pages of another size than the pool.
    PageSize {
        /// Page size of the pool.
        pool: PageSize,
        /// Page size of the tables.
        tables: PageSize,
    },
    /// The buffer is not of a page's size.
    Length {
        /// Size of the buffer, in bytes.
        bytes: usize,
    },
    /// Swap did not return the page. It still has the page, and a later attempt may succeed.
    Read {
        /// The page.
        host: Hva,
        /// The error of swap.
        error: SwapError,
    },
    /// The page cannot be pinned.
    NotPinned(PinError),
    /// There is no free frame, and no page can be given up: the guest has to wait.
    NoRoom {
        /// Why no page can be given up.
        reason: ReclaimError,
    },
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside { host } => write!(f, "{host} is not memory of this guest"),
            Self::PageSize { pool, tables } => write!(
                f,
                "the pool has pages of {pool}, the guest's tables of {tables}; make the pool for \
                 those"
            ),
            Self::Length { bytes } => {
                write!(f, "a buffer of {bytes} bytes for one page; take one of a page's size")
            }
            Self::Read { host, error } => {
                write!(f, "the page at {host} does not come back from swap: {error}")
            }
            Self::NotPinned(reason) => reason.fmt(f),
            Self::NoRoom { reason } => write!(f, "no room for a page: {reason}"),
        }
    }
}

impl core::error::Error for PageError {}

/// Number of attempts that give up no page, after which a fault gets no frame: other threads may be
/// bringing pages in, which can be given up soon.
const ATTEMPTS: u32 = 16;

impl<'a, 'w, F: Format, H: Host, B: PagedBacking> Pager<'a, 'w, F, H, B> {
    /// Makes a pager that works on `worker`'s reader slot.
    pub fn new(worker: &'a mut Worker<'w, F, H, B>) -> Self {
        Self {
            paged: worker.guest().backing().paged(),
            worker,
            #[cfg(feature = "baselines")]
            gate: None,
            content: Buffer::default(),
        }
    }

    /// Makes a pager that ages and unmaps pages under `gate`.
    #[cfg(feature = "baselines")]
    pub fn gated(worker: &'a mut Worker<'w, F, H, B>, gate: &'a dyn Gate) -> Self {
        Self { gate: Some(gate), ..Self::new(worker) }
    }

    /// Returns the guest's memory.
    pub const fn paged(&self) -> &'w PagedMemory<'w, B::Ram, B::Swap> {
        self.paged
    }

    /// Calls `work`, which ages or unmaps pages, under the gate if there is one.
    fn alone<R>(&mut self, work: impl FnOnce(&mut Worker<'w, F, H, B>) -> R) -> R {
        #[cfg(feature = "baselines")]
        if let Some(gate) = self.gate {
            let (mut work, mut result) = (Some(work), None);
            gate.alone(&mut || result = work.take().map(|work| work(self.worker)));
            return result.expect("a gate does the work");
        }
        work(self.worker)
    }

    fn now(&self) -> u64 {
        self.worker.guest().tables().platform().now()
    }

    fn wait(&self) {
        self.worker.guest().tables().platform().wait();
    }

    /// Brings in the page at `host` for `access`, after a fault that was answered
    /// [`Retry::Absent`](slat_guest::Retry::Absent). Makes room by giving up other pages of the
    /// guest if need be. Waits, by [`Host::wait`], while another thread moves the page, and, if no
    /// frame is free, while another thread gives up pages of this guest: as long as swap takes for
    /// a batch.
    ///
    /// # Errors
    /// [`PageError`]; the page is where it was.
    pub fn bring_in(&mut self, host: Hva, access: Access) -> Result<(), PageError> {
        let paged = self.paged;
        let (pool, tables) = (paged.pool.layout.page, F::size(0));
        if pool != tables {
            // A leaf would reach beyond its frame.
            return Err(PageError::PageSize { pool, tables });
        }
        let page = paged.number(host).ok_or(PageError::Outside { host })?;
        self.bring(page, access)?;
        self.worker.guest().arrived(paged.host(page, 1));
        Ok(())
    }

    fn bring(&mut self, page: u32, access: Access) -> Result<(), PageError> {
        let paged = self.paged;
        let word = &paged.words[page as usize];
        loop {
            match word.load() {
                PageState::Resident { .. } => return Ok(()),
                PageState::Moving => {
                    self.wait();
                    continue;
                }
                PageState::Empty if paged.config.huge && self.bring_block(page) => return Ok(()),
                PageState::Empty | PageState::Swapped { .. } => {}
            }
            let frame = self.frame()?;
            let away =
                |place: &PageState| matches!(place, PageState::Empty | PageState::Swapped { .. });
            match word.claim(away) {
                Ok(place) => return self.fill(page, place, frame, access),
                // Another thread is bringing it in.
                Err(_) => paged.give_frame(frame),
            }
        }
    }

    /// Fills `frame` with the claimed page.
    fn fill(
        &mut self,
        page: u32,
        place: PageState,
        frame: u32,
        access: Access,
    ) -> Result<(), PageError> {
        let (paged, pool) = (self.paged, self.paged.pool);
        let word = &paged.words[page as usize];
        let undo = Undo::new(|| {
            word.release(place);
            paged.give_frame(frame);
        });
        let bytes = pool.layout.page.bytes();
        let mut copy = None;
        let mut distance = None;
        let result = match place {
            PageState::Swapped { slot, since } => {
                let begin = self.now();
                let result = pool.swap.read(slot, self.content.page(bytes));
                paged.counters.read.add(self.now() - begin);
                copy = Some(slot);
                let evicted = paged.evicted.load(Ordering::Relaxed) as u32;
                distance = Some(evicted.wrapping_sub(since) & (crate::page::NUMBERS - 1) as u32);
                result
            }
            _ => {
                self.content.page(bytes).fill(0);
                Ok(())
            }
        };
        if let Err(error) = result {
            return Err(PageError::Read { host: paged.host(page, 1).start, error });
        }
        pool.ram.write(pool.hpa(frame), self.content.page(bytes));
        self.arrived(page, distance);
        undo.done();
        let kept = copy.filter(|_| access != Access::Write && !pool.slots.scarce());
        if copy.is_some() {
            paged.away.fetch_sub(1, Ordering::Release);
        }
        word.release(PageState::Resident { frame, copy: kept });
        if let (Some(slot), None) = (copy, kept) {
            paged.give_slot(slot);
        }
        Ok(())
    }

    fn arrived(&self, page: u32, distance: Option<u32>) {
        let paged = self.paged;
        paged.born[page as usize].store((self.now() >> BORN_SHIFT) as u32, Ordering::Relaxed);
        match distance {
            None => Counters::add(&paged.counters.first_touches, 1),
            Some(distance) => {
                Counters::add(&paged.counters.refaults, 1);
                Counters::add(
                    &paged.counters.refaults_within_set,
                    u64::from(distance <= paged.resident()),
                );
            }
        }
        paged.arrivals.push(page, distance);
    }

    /// Takes a frame within the guest's limit. If there is none, counts the reason in the
    /// statistics.
    fn frame(&mut self) -> Result<u32, PageError> {
        let frame = self.find_frame();
        if let Err(PageError::NoRoom { reason }) = frame {
            let counters = &self.paged.counters;
            Counters::add(
                match reason {
                    ReclaimError::Quota { .. } => &counters.over_quota,
                    ReclaimError::Protected { .. } => &counters.below_protected,
                    ReclaimError::Thrashing => &counters.thrashing,
                    _ => &counters.no_room,
                },
                1,
            );
        }
        frame
    }

    fn find_frame(&mut self) -> Result<u32, PageError> {
        let paged = self.paged;
        // A batch was given up for this page, which may then come in even above a lowered limit.
        let mut made_room = false;
        let mut attempts = 0;
        loop {
            let within = paged.here.fetch_add(1, Ordering::AcqRel) < paged.limit();
            if (within || made_room)
                && let Some(frame) = paged.pool.frames.take()
            {
                return Ok(frame);
            }
            paged.here.fetch_sub(1, Ordering::AcqRel);
            let want = if within { self.share() } else { paged.config.batch };
            match self.reclaim_of(want, 1) {
                Ok(ReclaimCounts { busy: true, .. }) => self.wait(),
                Ok(_) => made_room = true,
                Err(reason @ (ReclaimError::Nothing | ReclaimError::InUse)) => {
                    attempts += 1;
                    if attempts == ATTEMPTS || paged.all_pinned() {
                        return Err(PageError::NoRoom { reason });
                    }
                    self.wait();
                }
                Err(reason) => return Err(PageError::NoRoom { reason }),
            }
        }
    }

    /// Returns how many pages a fault gives up if the guest is within its limit, and the pool has
    /// no free frame: a batch times the guest's share of the pool, and one page at least. The fault
    /// needs one of them; any guest may take the others. A guest that has the whole pool gives up a
    /// batch for each fault, as a guest above its limit does. A guest whose share of a batch is one
    /// page gives up one, and so keeps its amount of memory however many faults other guests have.
    fn share(&self) -> u32 {
        let (paged, pool) = (self.paged, self.paged.pool);
        let part = u64::from(paged.config.batch) * u64::from(paged.resident());
        (part / u64::from(pool.total().max(1))).max(1) as u32
    }

    /// Copies the content of the page at `host` to `to`, from memory or from swap, without bringing
    /// the page in; a migration sends pages this way. If the guest writes the page meanwhile, the
    /// copy may be partly new, and the dirty log has the page. `to` must have the size of a page.
    ///
    /// # Errors
    /// [`PageError`].
    pub fn copy(&mut self, host: Hva, to: &mut [u8]) -> Result<(), PageError> {
        let (paged, pool) = (self.paged, self.paged.pool);
        if to.len() as u64 != pool.layout.page.bytes() {
            return Err(PageError::Length { bytes: to.len() });
        }
        let page = paged.number(host).ok_or(PageError::Outside { host })?;
        let word = &paged.words[page as usize];
        let place = loop {
            match word.claim(|_| true) {
                Ok(place) => break place,
                Err(_) => self.wait(),
            }
        };
        let _claim = Claim { word, place };
        let result = match place {
            PageState::Resident { frame, .. } => {
                pool.ram.read(pool.hpa(frame), to);
                Ok(())
            }
            PageState::Swapped { slot, .. } => {
                let page = self.content.page(pool.layout.page.bytes());
                pool.swap.read(slot, page).map(|()| to.copy_from_slice(page))
            }
            _ => {
                to.fill(0);
                Ok(())
            }
        };
        result.map_err(|error| PageError::Read { host, error })
    }

    /// Brings in the page at `host`, and calls `work`, which accesses it as a device does. The page
    /// stays in memory until `work` returns. With `write`, `work` may write the page, and the dirty
    /// log has it. Faults on the page wait until `work` returns: `work` must not wait for a vCPU,
    /// nor move pages itself (two threads that each hold a page which the other wants would wait
    /// for ever). The call counts as a use of the page.
    ///
    /// # Errors
    /// [`PageError`]; `work` was not called.
    pub fn with_page<R>(
        &mut self,
        host: Hva,
        write: bool,
        work: impl FnOnce(Hpa) -> R,
    ) -> Result<R, PageError> {
        let paged = self.paged;
        let page = paged.number(host).ok_or(PageError::Outside { host })?;
        let word = &paged.words[page as usize];
        loop {
            self.bring_in(host, if write { Access::Write } else { Access::Read })?;
            let Ok(place) = word.claim(|place| matches!(place, PageState::Resident { .. })) else {
                self.wait();
                continue;
            };
            let PageState::Resident { frame, copy } = place else { continue };
            let kept = copy.filter(|_| !write);
            // A device sets no accessed bit, so this use is recorded here.
            paged.arrivals.push(page, Some(0));
            let _claim = Claim { word, place: PageState::Resident { frame, copy: kept } };
            if write {
                copy.into_iter().for_each(|slot| paged.give_slot(slot));
                // A thread that finds the page in the log and copies it waits for the claim.
                self.mark_written(page);
            }
            return Ok(work(paged.pool.hpa(frame)));
        }
    }

    fn mark_written(&mut self, page: u32) {
        for range in self.worker.guest_ranges(self.paged.host(page, 1)) {
            self.worker.mark_written(range);
        }
    }

    /// Discards the pages of `host`, for a balloon or a truncated file: they read as zero from now
    /// on, and the dirty log has them. Skips pages that are only partly in the range, pinned pages
    /// ([`Pager::pin`]), and addresses that are not memory of the guest. Swap has forgotten the
    /// pages when this returns; if it could not, [`Pool::trouble`](crate::Pool::trouble) says why.
    /// Only if no slot of swap was clean may it have old content of them still, in slots to which
    /// pages of other guests are about to be written: this does not wait for other guests' disks.
    /// It waits, by [`Host::wait`], for threads of the same guest that move one of the pages, or
    /// have a slot with old content.
    pub fn discard(&mut self, host: HvaRange) {
        let (paged, pool) = (self.paged, self.paged.pool);
        let size = pool.layout.page.bytes();
        let start = host.start.max(paged.range.start).0.saturating_add(size - 1) & !(size - 1);
        let end = host.end().min(paged.range.end()).0 & !(size - 1);
        let mut slots = pool.withheld(paged.owner);
        let mut any = false;
        for host in (start..end).step_by(size as usize) {
            let Some(page) = paged.number(Hva(host)) else { continue };
            let word = &paged.words[page as usize];
            let place = loop {
                match word.claim(|place| *place != PageState::Empty) {
                    Ok(place) => break place,
                    Err(PageState::Empty) => break PageState::Empty,
                    // The thread that has claimed the page may wait for a slot.
                    Err(_) => {
                        slots.wipe();
                        self.wait();
                    }
                }
            };
            if place == PageState::Empty {
                continue;
            }
            let mut claim = Claim { word, place };
            let slot = match place {
                // A device uses it.
                PageState::Resident { .. } if paged.is_pinned(page) => continue,
                PageState::Resident { frame, copy } => {
                    self.break_block(page);
                    self.worker.evict(&[paged.host(page, 1)], |_| {});
                    self.mark_written(page);
                    claim.place = PageState::Empty;
                    drop(claim);
                    paged.give_frame(frame);
                    copy
                }
                PageState::Swapped { slot, .. } => {
                    self.mark_written(page);
                    paged.away.fetch_sub(1, Ordering::Release);
                    claim.place = PageState::Empty;
                    Some(slot)
                }
                _ => continue,
            };
            any = true;
            if let Some(slot) = slot {
                // No page may get the slot before its content is wiped.
                paged.uncharge();
                slots.add(slot);
            }
        }
        slots.wipe();
        if !any {
            return;
        }
        // Older copies of these pages may be in slots that no page has.
        pool.forget_leftovers(paged.owner, || self.wait());
    }
}

/// The guest as the order of its pages sees it: an implementation of [`AccessedBits`].
struct GuestView<'e, P> {
    pager: &'e mut P,
    /// The time, in the units of [`PagedMemory::born`].
    now: u64,
}

impl<'e, 'a, 'w, F: Format, H: Host, B: PagedBacking> GuestView<'e, Pager<'a, 'w, F, H, B>> {
    fn new(pager: &'e mut Pager<'a, 'w, F, H, B>) -> Self {
        let now = pager.now() >> BORN_SHIFT;
        Self { pager, now }
    }
}

impl<F: Format, H: Host, B: PagedBacking> AccessedBits for GuestView<'_, Pager<'_, '_, F, H, B>> {
    fn pages(&self) -> u32 {
        self.pager.paged.words.len() as u32
    }

    fn is_here(&self, page: u32) -> bool {
        // `Pager::claim` fails for a page that is being copied, and the page is put back. A page
        // that is pinned arrives again once it is not.
        let paged = self.pager.paged;
        paged.words[page as usize].may_be_here() && !paged.is_pinned(page)
    }

    fn new_until(&self, page: u32) -> Option<u64> {
        let paged = self.pager.paged;
        let residency = paged.config.residency;
        if residency == 0 {
            return None;
        }
        let born = paged.born[page as usize].load(Ordering::Relaxed);
        let age = u64::from((self.now as u32).wrapping_sub(born));
        let stays = residency.div_ceil(1 << BORN_SHIFT);
        if age >= stays {
            // Before the age is 2^32 and looks like 0, the page arrives anew, as long ago as it has
            // to stay.
            if age >= 1 << 31 {
                let born = (self.now as u32).wrapping_sub(stays as u32);
                paged.born[page as usize].store(born, Ordering::Relaxed);
            }
            return None;
        }
        Some(self.now.saturating_add(stays - age))
    }

    fn young(&mut self, look: Look, first: u32, count: u32, young: &mut [u64]) {
        let pager = &mut *self.pager;
        let paged = pager.paged;
        let begin = pager.now();
        let walk = look == Look::Walk;
        let how = AgeOptions {
            clear: true,
            table_bits: if walk { paged.config.table_bits } else { TableBits::Ignored },
            flush_tlb: walk && paged.config.fresh,
        };
        let range = paged.host(first, count);
        let unanswered = match pager.alone(|worker| worker.age_host(range, None, young, how)) {
            Ok(aged) => aged.unanswered,
            // The tables record no accesses: pages are given up in the order in which they came in.
            Err(AgeError::Refused(ChangeError::NotRecorded)) => 0,
            // Another thread held an entry for too long: pages behind it were not tested.
            Err(_) => count.into(),
        };
        Counters::add(&paged.counters.unanswered, unanswered);
        let part = match look {
            Look::Walk => &paged.counters.walk,
            Look::Check => &paged.counters.check,
            Look::Around => &paged.counters.around,
        };
        part.add(pager.now() - begin);
    }

    fn progress(&self) -> u64 {
        let paged = self.pager.paged;
        let counters = &paged.counters;
        let came = [&counters.first_touches, &counters.refaults, &paged.evicted];
        came.iter().map(|counter| counter.load(Ordering::Relaxed)).sum()
    }

    fn now(&self) -> u64 {
        self.pager.now()
    }
}

/// Returns the pages of a sorted list as ranges.
fn ranges<M: Ram, S: Swap>(
    paged: &PagedMemory<'_, M, S>,
    pages: impl Iterator<Item = u32>,
) -> Vec<HvaRange> {
    let mut ranges: Vec<HvaRange> = vec![];
    for page in pages {
        let one = paged.host(page, 1);
        match ranges.last_mut() {
            Some(last) if last.end() == one.start => last.bytes += one.bytes,
            _ => ranges.push(one),
        }
    }
    ranges
}
