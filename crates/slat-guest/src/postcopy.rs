//! Memory whose content arrives while the guest already runs on it: the second phase of a post-copy
//! migration, or a snapshot that is restored on demand.
//!
//! # Protocol
//! Each page has three bits: its content is *here*; it is *claimed*, because a thread fetches it;
//! it is *asked* for by a fault. A thread claims a page before it fetches it. It writes the
//! content, then sets *here* and ends its claim, then wakes vCPUs that wait
//! ([`Guest::arrived`](crate::Guest::arrived)). Another thread may decide meanwhile what the page
//! holds: it discards the page, which is here from then on, or loses it. This *overtakes* the
//! fetch.
//!
//! One lock, of the queue and of the fetches under way, guards all changes of these bits. Faults
//! read *here* without it.
//!
//! *Invariants*:
//! - All pages of a leaf are *here*: the block size in the backing's answer grows from the page, as
//!   long as all of the larger block is here.
//! - If a fault has asked for a page, the page is in the queue, or a thread fetches it, until it is
//!   here. The fault puts the page into the queue. A thread that takes it from there skips it if it
//!   is claimed. A thread whose fetch ends, and has not brought a page that a fault has asked for,
//!   puts it at the front of the queue.
//! - A page is claimed by at most one [`Fetch`], until that fetch ends. So no fetch is taken for a
//!   later one of the same page, and to be overtaken is a state of the fetch.
//! - No content of a fetch that was overtaken gets into a page. A fetch writes ([`Fetch::place`])
//!   only pages for which it was not overtaken, and is *placing* meanwhile. A thread that overtakes
//!   it waits until it is not placing. Only then does its caller change the memory; and no fault
//!   maps the memory before, because the caller holds an [`InvalidationInProgress`] of it.
//! - Only one thread brings the last page of each block: each block has a count of its pages that
//!   are not here.

mod fetch;

pub use self::fetch::Fetch;
use crate::backing::{Backing, Hva, HvaRange, NoPage, Page};
use crate::host::Host;
use crate::invalidations::InvalidationInProgress;
use crate::private::{PrivateAt, PrivatePage};
use crate::sync::{AtomicU64, Lock, Ordering};
use crate::worker::{Inside, Worker};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;
use slat::{Access, Format, PageSize};

/// A [`Backing`] whose pages arrive late. `inner` has the memory; it is asked for a page only when
/// the page's content is there.
#[derive(Debug)]
pub struct PostCopy<B> {
    inner: B,
    range: HvaRange,
    page: PageSize,
    block: PageSize,
    here: Box<[AtomicU64]>,
    /// Pages that a thread fetches.
    claimed: Box<[AtomicU64]>,
    asked: Box<[AtomicU64]>,
    /// The number of pages of each block that are not here.
    left: Box<[AtomicU64]>,
    missing: AtomicU64,
    work: Lock<Work>,
    /// The word from which background fetches continue: near the last page that a fault asked for.
    cursor: AtomicU64,
    counts: [AtomicU64; 4],
}

/// What is to be fetched, and what is being fetched.
#[derive(Debug, Default)]
struct Work {
    queue: VecDeque<u64>,
    fetches: Vec<UnderWay>,
}

/// A [`Fetch`] that has not ended.
#[derive(Debug)]
struct UnderWay {
    /// Its first page, by which it is found: no two fetches have a page in common.
    first: u64,
    /// One bit for each of its pages.
    pages: u64,
    overtaken: u64,
    placing: bool,
}

impl UnderWay {
    /// Returns the bits of the pages that it has among `pages`, from number `first` on.
    fn common(&self, first: u64, pages: u64) -> u64 {
        let end = first.saturating_add(pages);
        let (from, to) = (first.saturating_sub(self.first), end.saturating_sub(self.first));
        let below = |n: u64| if n >= 64 { u64::MAX } else { (1 << n) - 1 };
        self.pages & below(to) & !below(from)
    }
}

/// The numbers of the memory's pages so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PostCopyCounts {
    /// Pages whose content is not there yet.
    pub missing: u64,
    /// Pages that were fetched because a fault asked for them.
    pub asked: u64,
    /// Pages that were fetched in the background.
    pub background: u64,
    /// Pages that were handed out to be fetched, and given back.
    pub given_back: u64,
    /// Blocks that were formed when their last page arrived.
    pub blocks: u64,
}

const ASKED: usize = 0;
const BACKGROUND: usize = 1;
const GIVEN_BACK: usize = 2;
const BLOCKS: usize = 3;

/// Why a `PostCopy` could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PostCopyError {
    /// The range's bounds are not multiples of the page size, its end exceeds 64 bits, or a block
    /// is smaller than a page.
    Unaligned {
        /// The page size.
        page: PageSize,
    },
    /// There is no memory for three bits for each page.
    OutOfMemory,
}

impl fmt::Display for PostCopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned { page } => {
                write!(f, "memory that comes late begins and ends at multiples of {page}")
            }
            Self::OutOfMemory => f.write_str("no memory for what is known of each page"),
        }
    }
}

impl core::error::Error for PostCopyError {}

/// Allocates `len` words, all zero.
fn words(len: u64) -> Result<Box<[AtomicU64]>, PostCopyError> {
    let mut words = Vec::new();
    words.try_reserve_exact(len as usize).map_err(|_| PostCopyError::OutOfMemory)?;
    words.extend((0..len).map(|_| AtomicU64::new(0)));
    Ok(words.into_boxed_slice())
}

fn get(bits: &[AtomicU64], page: u64) -> bool {
    bits[(page / 64) as usize].load(Ordering::SeqCst) >> (page % 64) & 1 == 1
}

/// Calls `each` with the words that hold the bits of some pages, and with these bits.
fn each(first: u64, pages: u64, mut each: impl FnMut(usize, u64)) {
    let (mut page, end) = (first, first + pages);
    while page < end {
        let count = (64 - page % 64).min(end - page);
        each((page / 64) as usize, (u64::MAX >> (64 - count)) << (page % 64));
        page += count;
    }
}

impl<B> PostCopy<B> {
    /// Makes memory at `range` of which no page is there yet, in pages of size `page`. When the
    /// last page of a `block` arrives, the guest's small leaves in the block are collapsed. Memory
    /// of `inner` outside `range` is there.
    ///
    /// # Errors
    /// [`PostCopyError`].
    pub fn new(
        inner: B,
        range: HvaRange,
        page: PageSize,
        block: PageSize,
    ) -> Result<Self, PostCopyError> {
        let bounds = range.start.0 | range.bytes;
        if bounds & (page.bytes() - 1) != 0
            || range.start.0.checked_add(range.bytes).is_none()
            || block < page
        {
            return Err(PostCopyError::Unaligned { page });
        }
        let pages = range.bytes >> page.shift();
        let len = pages.div_ceil(64);
        let first = range.start.0 >> block.shift();
        let blocks = range.end().0.div_ceil(block.bytes()).saturating_sub(first);
        let late = Self {
            inner,
            range,
            page,
            block,
            here: words(len)?,
            claimed: words(len)?,
            asked: words(len)?,
            left: words(blocks)?,
            missing: AtomicU64::new(pages),
            work: Lock::new(Work::default()),
            cursor: AtomicU64::new(0),
            counts: core::array::from_fn(|_| AtomicU64::new(0)),
        };
        for (index, left) in late.left.iter().enumerate() {
            let start = Hva((first + index as u64) << block.shift());
            let (_, count) = late.pages(&HvaRange { start, bytes: block.bytes() });
            left.store(count, Ordering::Relaxed);
        }
        Ok(late)
    }

    /// Returns the backing that has the memory.
    pub const fn inner(&self) -> &B {
        &self.inner
    }

    /// Returns the numbers of pages that have arrived, by cause, and of those that are missing.
    pub fn counts(&self) -> PostCopyCounts {
        let [asked, background, given_back, blocks] =
            self.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        let missing = self.missing.load(Ordering::Acquire);
        PostCopyCounts { missing, asked, background, given_back, blocks }
    }

    /// Returns the pages that `host` and the memory have in common: the number of the first, and
    /// how many. Pages that `host` overlaps in part are included.
    fn pages(&self, host: &HvaRange) -> (u64, u64) {
        let start = host.start.max(self.range.start).0 - self.range.start.0;
        let end = host.end().min(self.range.end()).0.saturating_sub(self.range.start.0);
        let first = start >> self.page.shift();
        (first, end.div_ceil(self.page.bytes()).saturating_sub(first))
    }

    /// As `pages`, but without pages that `host` overlaps in part.
    fn whole_pages(&self, host: &HvaRange) -> (u64, u64) {
        let page = self.page.bytes();
        let start = host.start.max(self.range.start).0 - self.range.start.0;
        let end = host.end().min(self.range.end()).0.saturating_sub(self.range.start.0);
        let first = start.div_ceil(page);
        (first, (end / page).saturating_sub(first))
    }

    fn number(&self, host: Hva) -> Option<u64> {
        let offset = host.0.checked_sub(self.range.start.0)?;
        (offset < self.range.bytes).then_some(offset >> self.page.shift())
    }

    fn host(&self, first: u64, pages: u64) -> HvaRange {
        let shift = self.page.shift();
        HvaRange { start: Hva(self.range.start.0 + (first << shift)), bytes: pages << shift }
    }

    /// Records that the content of `host` is there because it came before: by a round of pre-copy,
    /// or as a page of zeroes. A page of which only a part came is still to be fetched. It is for
    /// memory that no guest uses yet; [`PostCopy::discard`] is for a guest that runs.
    pub fn have(&mut self, host: HvaRange) {
        let (first, pages) = self.whole_pages(&host);
        self.land(first, pages, |_| {});
    }

    fn block_of(&self, page: u64) -> usize {
        let at = self.host(page, 1).start.0 >> self.block.shift();
        (at - (self.range.start.0 >> self.block.shift())) as usize
    }

    /// Marks the pages as here; calls `whole` with each block whose last page is among them.
    /// Returns how many were not here.
    fn land(&self, first: u64, pages: u64, mut whole: impl FnMut(Hva)) -> u64 {
        let mut landed = 0;
        for page in first..first + pages {
            let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
            if self.here[word].fetch_or(bit, Ordering::SeqCst) & bit != 0 {
                continue;
            }
            landed += 1;
            if self.left[self.block_of(page)].fetch_sub(1, Ordering::SeqCst) == 1 {
                whole(Hva(self.host(page, 1).start.0 & !(self.block.bytes() - 1)));
            }
        }
        self.missing.fetch_sub(landed, Ordering::SeqCst);
        landed
    }

    fn is_here(&self, first: u64, pages: u64) -> bool {
        let mut all = true;
        each(first, pages, |word, mask| {
            all = all && self.here[word].load(Ordering::SeqCst) & mask == mask;
        });
        all
    }

    /// Returns the largest block around `host`, at most `most`, whose pages are all here. The page
    /// itself is here.
    fn whole(&self, host: Hva, most: PageSize) -> PageSize {
        let mut size = self.page;
        while size < most {
            let other = HvaRange {
                start: Hva(host.0 & !(size.bytes() - 1) ^ size.bytes()),
                bytes: size.bytes(),
            };
            let (first, pages) = self.pages(&other);
            let inside = other.start >= self.range.start && other.end() <= self.range.end();
            let double = PageSize::from_bytes(2 * size.bytes());
            match double.filter(|_| inside && self.is_here(first, pages)) {
                Some(double) => size = double,
                None => break,
            }
        }
        size.min(most)
    }

    /// Asks for the page, which a fault needs.
    fn ask(&self, page: u64) {
        let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
        let mut work = self.work.lock();
        if self.asked[word].fetch_or(bit, Ordering::SeqCst) & bit == 0 {
            work.queue.push_back(page);
        }
    }

    /// Returns the pages to fetch next: the page that a fault asked for first; or, if there is
    /// none, up to `most` pages, at most 64, that no fault has asked for, close behind the last
    /// page asked for. Returns `None` if all pages are there or other threads fetch the rest; with
    /// `most` 0, if each page that a fault waits for is being fetched.
    ///
    /// Any number of threads call this. A page is handed out again only after its [`Fetch`] has
    /// ended without it.
    pub fn next(&self, most: u64) -> Option<Fetch<'_, B>> {
        loop {
            let mut work = self.work.lock();
            let Some(page) = work.queue.pop_front() else { break };
            // If it is claimed, it comes back to the queue when that fetch ends without it.
            if self.claim(&mut work, page, 1) != 0 {
                self.cursor.store(page / 64, Ordering::Relaxed);
                return Some(Fetch { late: self, first: page, pages: 1, asked: true });
            }
        }
        let (len, most) = (self.claimed.len() as u64, most.min(64) as u32);
        if most == 0 {
            return None;
        }
        let start = self.cursor.load(Ordering::Relaxed);
        for step in 0..len {
            let word = (start + step) % len;
            let valid = (self.range.bytes >> self.page.shift()) - word * 64;
            let valid = if valid >= 64 { u64::MAX } else { (1 << valid) - 1 };
            loop {
                let free = !self.taken(word as usize) & valid;
                if free == 0 {
                    break;
                }
                let first = free.trailing_zeros();
                let pages = (free >> first).trailing_ones().min(most);
                let first = word * 64 + u64::from(first);
                let pages = self.claim(&mut self.work.lock(), first, pages.into());
                if pages != 0 {
                    self.cursor.store(word, Ordering::Relaxed);
                    return Some(Fetch { late: self, first, pages, asked: false });
                }
            }
        }
        None
    }

    /// Returns the pages of a word that are here or claimed.
    fn taken(&self, word: usize) -> u64 {
        let claimed = self.claimed[word].load(Ordering::SeqCst);
        claimed | self.here[word].load(Ordering::SeqCst)
    }

    /// Claims the pages from `first` on, up to the first that is here or claimed, at most `most`,
    /// which are in one word; returns their number.
    fn claim(&self, work: &mut Work, first: u64, most: u64) -> u64 {
        let word = (first / 64) as usize;
        let free = !self.taken(word) >> (first % 64);
        let pages = u64::from(free.trailing_ones()).min(most);
        if pages != 0 {
            let bits = u64::MAX >> (64 - pages);
            self.claimed[word].fetch_or(bits << (first % 64), Ordering::SeqCst);
            work.fetches.push(UnderWay { first, pages: bits, overtaken: 0, placing: false });
        }
        pages
    }

    /// Ends the fetch of the pages from `first` on, and marks those as here that have `arrived`,
    /// except where it was overtaken. Returns how many are here by this. Calls `whole` as `land`
    /// does.
    fn end(&self, first: u64, arrived: bool, mut whole: impl FnMut(Hva)) -> u64 {
        let mut work = self.work.lock();
        let at = work.fetches.iter().position(|fetch| fetch.first == first);
        let ended = work.fetches.swap_remove(at.expect("it is under way until it ends"));
        let lands = if arrived { ended.pages & !ended.overtaken } else { 0 };
        let mut landed = 0;
        for bit in (0..64).filter(|bit| ended.pages >> bit & 1 != 0).rev() {
            let page = first + bit;
            if lands >> bit & 1 != 0 {
                landed += self.land(page, 1, &mut whole);
            }
            self.claimed[(page / 64) as usize].fetch_and(!(1 << (page % 64)), Ordering::SeqCst);
            if !get(&self.here, page) && get(&self.asked, page) {
                work.queue.push_front(page);
            }
        }
        landed
    }

    /// Returns the page with the largest block that may be mapped. The page is here.
    fn lowered(&self, host: Hva, page: Page) -> Page {
        Page { block: self.whole(host, page.block), ..page }
    }
}

impl<B: Backing> PostCopy<B> {
    /// Records that the content of `host` no longer matters, whether it was there or not: the guest
    /// has given the memory away (a balloon, free page reporting), and reads zeroes when it uses it
    /// again. Nobody fetches these pages from then on. If they are being fetched, what that thread
    /// brings is ignored ([`Fetch::place`]). A page of which `host` has only a part stays as it is.
    ///
    /// The caller
    /// 1. unmaps the memory, and holds `_taken`, which [`Worker::invalidate`] returned for it;
    /// 2. calls this;
    /// 3. empties the memory;
    /// 4. drops `_taken`, and calls [`Guest::arrived`](crate::Guest::arrived) for the memory,
    ///    because a vCPU may wait for a page of it.
    ///
    /// It waits for a thread that is in [`Fetch::place`] of some of it, by [`Backing::wait`]. Pages
    /// of a block that this completes stay pages until [`Worker::collapse`].
    pub fn discard(&self, host: HvaRange, _taken: &InvalidationInProgress<'_>) {
        let (first, pages) = self.whole_pages(&host);
        self.overtake(first, pages, || _ = self.land(first, pages, |_| {}));
    }

    /// Records that the content of `host` is no longer there, and has to be fetched again, with
    /// pages that `host` overlaps in part: the guest goes back to a snapshot. If some of it is
    /// being fetched, what that thread brings is ignored, and fetched once more.
    ///
    /// The caller has unmapped the memory from the guest and holds `_taken`, which
    /// [`Worker::invalidate`] returned for all of it. This waits as [`PostCopy::discard`] does.
    pub fn lose(&self, host: HvaRange, _taken: &InvalidationInProgress<'_>) {
        let (first, pages) = self.pages(&host);
        self.overtake(first, pages, || {
            let mut lost = 0;
            for page in first..first + pages {
                let (word, bit) = ((page / 64) as usize, 1 << (page % 64));
                // A page that is not here keeps its bit: if a fault has asked for it, a vCPU waits.
                if self.here[word].fetch_and(!bit, Ordering::SeqCst) & bit != 0 {
                    self.asked[word].fetch_and(!bit, Ordering::SeqCst);
                    self.left[self.block_of(page)].fetch_add(1, Ordering::SeqCst);
                    lost += 1;
                }
            }
            self.missing.fetch_add(lost, Ordering::SeqCst);
        });
    }

    /// Overtakes all fetches of the pages, and changes the pages' state under the same lock.
    fn overtake(&self, first: u64, pages: u64, change: impl FnOnce()) {
        loop {
            let mut work = self.work.lock_patiently(|| self.inner.wait());
            let mut placing = false;
            for fetch in &mut work.fetches {
                let common = fetch.common(first, pages);
                fetch.overtaken |= common;
                placing |= common != 0 && fetch.placing;
            }
            if !placing {
                return change();
            }
            drop(work);
            self.inner.wait();
        }
    }
}

impl<B: Backing> Backing for PostCopy<B> {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        let Some(page) = self.number(host) else { return self.inner.page(host, access) };
        if self.missing.load(Ordering::SeqCst) == 0 {
            return self.inner.page(host, access);
        }
        if !get(&self.here, page) {
            self.ask(page);
            return Err(NoPage::Absent);
        }
        self.inner.page(host, access).map(|page| self.lowered(host, page))
    }

    /// All private memory is in `inner`, and none of it arrives late.
    fn private_page(&self, at: PrivateAt) -> Result<PrivatePage, NoPage> {
        self.inner.private_page(at)
    }

    fn make_writable<R>(&self, host: Hva, grant: impl FnOnce(Page) -> R) -> Option<R> {
        match self.number(host) {
            Some(page) if !get(&self.here, page) => None,
            _ => self.inner.make_writable(host, grant),
        }
    }
}

impl<F: Format, H: Host, B: Backing> Worker<'_, F, H, B> {
    /// Forms a block whose pages are all here: if the guest has some of it mapped in small leaves,
    /// this maps the others, and collapses the block. If nothing of it is mapped, a fault maps it
    /// whole. Returns the number of blocks it made.
    #[inline(never)]
    fn put_together(&mut self, host: HvaRange, block: PageSize) -> u64 {
        let mut formed = 0;
        for range in self.guest_ranges(host) {
            if range.size() != host.bytes || !range.start().0.is_multiple_of(host.bytes) {
                continue;
            }
            let tables = &self.guest.tables;
            let some = self.inside(tables, |Inside { guard, .. }| {
                guard.leaves(range).is_ok_and(|mut leaves| leaves.next().is_some())
            });
            if some {
                self.prefault(range, Access::Read, || false);
                formed += self.collapse(range, block) / host.bytes;
            }
        }
        formed
    }
}
