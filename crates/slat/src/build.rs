//! Builds a subtree before it is linked. No other code can reach it, so plain stores suffice.

use crate::addr::Hpa;
use crate::cache::TableCache;
use crate::counts::OpCounts;
use crate::format::{Format, Kind};
use crate::leaf_delta::LeafDelta;
use crate::platform::Platform;
use crate::table::{self, Frame, Pte};

/// The translations of a subtree.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    /// Attribute bits of blocks; those of pages are `page_bits`.
    pub bits: u64,
    pub page_bits: u64,
    /// The difference to add to a guest physical address to get the host's.
    pub delta: u64,
    /// The range whose leaves are at level `largest` at most.
    pub start: u64,
    pub end: u64,
    pub largest: u8,
    /// The entries outside the range, and those from where the cache ran out.
    pub outside: Outside,
    /// Whether groups that the range covers whole are folded.
    pub contiguous: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outside {
    /// No leaf.
    Empty,
    /// The same translation, by leaves as large as the table allows.
    Leaf,
}

impl Plan {
    fn leaf<F: Format>(&self, level: u8, base: u64) -> u64 {
        let bits = if level == 0 { self.page_bits } else { self.bits };
        F::leaf(bits, level, Hpa(base.wrapping_add(self.delta)))
    }

    /// Returns whether a leaf at `level` can hold these host addresses.
    pub fn aligned<F: Format>(&self, level: u8) -> bool {
        level <= F::LARGEST_LEAF && self.delta & ((1 << F::shift(level)) - 1) == 0
    }

    /// Returns the addresses of the group of the leaf at `base`, if all leaves of the group are in
    /// the range, so that it is to be folded.
    #[inline(always)]
    pub fn group<F: Format>(&self, level: u8, base: u64) -> Option<(u64, u64)> {
        if F::CONTIGUOUS == 0 || !self.contiguous || level > self.largest || F::group(level) == 1 {
            return None;
        }
        let bytes = (F::group(level) as u64) << F::shift(level);
        let start = base & !(bytes - 1);
        let whole = start >= self.start && start + bytes <= self.end;
        (whole && self.delta & (bytes - 1) == 0).then_some((start, start + bytes))
    }

    /// Returns, for `pages` pages from `start`, all in the range, the first page that belongs to a
    /// group to be folded, and the first page behind the last such page.
    #[inline(always)]
    fn folded<F: Format>(&self, start: u64, pages: usize) -> (usize, usize) {
        let bytes = (F::group(0) as u64) << F::PAGE_SHIFT;
        if F::CONTIGUOUS == 0 || !self.contiguous || self.delta & (bytes - 1) != 0 {
            return (0, 0);
        }
        let index = |at: u64| ((at - start) >> F::PAGE_SHIFT) as usize;
        let (first, end) =
            (start.next_multiple_of(bytes), start + ((pages as u64) << F::PAGE_SHIFT));
        let last = end & !(bytes - 1);
        if first < last { (index(first), index(last)) } else { (0, 0) }
    }

    /// Adds the leaves of a subtree whose top is at `level` to `sizes`, from `start` to `reached`:
    /// `end`, or the address where the cache ran out. There are none outside the range. At each
    /// level they are the entries that the range covers whole, except those below larger leaves.
    pub fn count<F: Format>(&self, level: u8, reached: u64, sizes: &mut LeafDelta) {
        let covered = |bytes: u64| {
            let (first, end) = (self.start.next_multiple_of(bytes), reached & !(bytes - 1));
            end.saturating_sub(first)
        };
        let mut larger = 0;
        for level in (0..=level.min(self.largest)).rev().filter(|&at| self.aligned::<F>(at)) {
            let shift = F::shift(level);
            let all = covered(1 << shift);
            let group = (F::group(level) as u64) << shift;
            let folds = F::CONTIGUOUS != 0
                && self.contiguous
                && F::group(level) > 1
                && self.delta & (group - 1) == 0;
            let folded = if folds { covered(group) - larger } else { 0 };
            sizes.add_members(level, (folded >> shift) as i64);
            sizes.add(level, ((all - larger - folded) >> shift) as i64);
            larger = all;
        }
    }

    pub fn outside<F: Format>(&self, level: u8, base: u64) -> u64 {
        match self.outside {
            Outside::Empty => 0,
            Outside::Leaf => self.leaf::<F>(level, base),
        }
    }

    /// Returns the value of the entry `base..base + size` at `level`; `None` if it links a table.
    pub fn pte<F: Format>(&self, level: u8, base: u64) -> Option<u64> {
        let end = base + (1 << F::shift(level));
        if end <= self.start || base >= self.end {
            return Some(self.outside::<F>(level, base));
        }
        let whole = base >= self.start && end <= self.end;
        let leaf = level <= self.largest
            && self.aligned::<F>(level)
            && (whole || self.outside == Outside::Leaf);
        let contiguous = if self.group::<F>(level, base).is_some() { F::CONTIGUOUS } else { 0 };
        leaf.then(|| self.leaf::<F>(level, base) | contiguous)
    }
}

/// The means of building: the cache of tables, and the counts.
pub(crate) struct Builder<'b, 'c, F: Format, P: Platform> {
    pub platform: &'b P,
    pub cache: &'b mut TableCache<'c, F, P>,
    pub counts: &'b mut OpCounts,
    /// The address where the cache ran out, if it did. Everything before it is done.
    pub dry: Option<u64>,
}

impl<F: Format, P: Platform> Builder<'_, '_, F, P> {
    /// Fills the table at `level` whose first entry covers `base`: runs of leaves at the speed of
    /// memory, without a read.
    #[inline]
    pub fn fill(&mut self, frame: &mut Frame, level: u8, base: u64, plan: &Plan) {
        self.counts.tables_built += 1;
        self.counts.entries_written += F::entries(level) as u64;
        if level == 0 {
            self.fill_pages(frame, base, plan);
        } else {
            self.fill_tables(frame, level, base, plan);
        }
    }

    /// [`Builder::fill`] of a table of pages.
    #[inline(never)]
    fn fill_pages(&self, frame: &mut Frame, base: u64, plan: &Plan) {
        let ptes = frame.entries_mut::<F>(self.platform, 0);
        let shift = F::PAGE_SHIFT;
        let all = ptes.len();
        let index = |gpa: u64| (gpa.saturating_sub(base) >> shift).min(all as u64) as usize;
        let (first, last) = match plan.outside {
            Outside::Leaf => (0, all),
            Outside::Empty => (index(plan.start), index(plan.end)),
        };
        self.platform.fill(&mut ptes[..first], 0, 0);
        self.platform.fill(&mut ptes[last..], 0, 0);
        let start = base + ((first as u64) << shift);
        let pages = &mut ptes[first..last];
        let (head, tail) = plan.folded::<F>(start, pages.len());
        if F::CONTIGUOUS != 0 && head < tail {
            let (rest, after) = pages.split_at_mut(tail);
            let (before, groups) = rest.split_at_mut(head);
            let at = |page: usize| start + ((page as u64) << shift);
            self.pages(before, start, plan, 0);
            self.pages(groups, at(head), plan, F::CONTIGUOUS);
            self.pages(after, at(tail), plan, 0);
        } else {
            self.pages(pages, start, plan, 0);
        }
    }

    /// [`Builder::fill`] of a table whose entries may link tables, which are filled as well.
    #[inline(never)]
    fn fill_tables(&mut self, frame: &mut Frame, level: u8, base: u64, plan: &Plan) {
        let ptes = frame.entries_mut::<F>(self.platform, level);
        let mut next = base;
        for pte in ptes {
            let at = next;
            next += 1 << F::shift(level);
            pte.set(match plan.pte::<F>(level, at) {
                // Nothing is done behind the address where the cache ran out.
                _ if self.dry.is_some() => plan.outside::<F>(level, at),
                Some(raw) => raw,
                None => self.child(level, at, plan),
            });
        }
    }

    /// Fills a run of pages from `start` on, and sets `bit` in each.
    #[inline(always)]
    fn pages(&self, mut pages: &mut [Pte], mut start: u64, plan: &Plan, bit: u64) {
        let shift = F::PAGE_SHIFT;
        let step = F::leaf(0, 0, Hpa(1 << shift)) - F::leaf(0, 0, Hpa(0));
        if F::CARRY != 0 {
            // One run up to each multiple of `CARRY`, where an address field in the middle of the
            // entry overflows.
            let before = |start: u64| {
                let hpa = start.wrapping_add(plan.delta);
                ((F::CARRY - (hpa & (F::CARRY - 1))) >> shift) as usize
            };
            while before(start) < pages.len() {
                let (low, high) = pages.split_at_mut(before(start));
                self.platform.fill(low, plan.leaf::<F>(0, start) | bit, step);
                (start, pages) = (start + ((low.len() as u64) << shift), high);
            }
        }
        self.platform.fill(pages, plan.leaf::<F>(0, start) | bit, step);
    }

    /// Builds a child table and returns its link, or what is outside the range where the cache ran
    /// out.
    fn child(&mut self, level: u8, base: u64, plan: &Plan) -> u64 {
        match self.table(base, plan) {
            Some(mut frame) => {
                self.fill(&mut frame, level - 1, base, plan);
                F::table(frame.into_hpa(), level)
            }
            None => plan.outside::<F>(level, base),
        }
    }

    /// Takes a table page from the cache. If that is empty, returns `None`, and keeps the address
    /// in `dry`.
    pub fn table(&mut self, base: u64, plan: &Plan) -> Option<Frame> {
        if self.dry.is_none() {
            match self.cache.take() {
                Some(frame) => return Some(frame),
                None => self.dry = Some(base.max(plan.start)),
            }
        }
        None
    }

    /// Gives a subtree that was not linked, with its root at `level`, back to the cache. Returns
    /// how many tables it had.
    pub fn recycle(&mut self, mut frame: Frame, level: u8) -> u64 {
        let mut tables = 1;
        if level > 0 {
            for pte in frame.entries_mut::<F>(self.platform, level) {
                let raw = pte.get();
                if F::kind(raw, level) == Kind::Table {
                    // SAFETY: the subtree was never linked, so it alone owns the frame that
                    // `child`, or a baseline's visitor, linked in this entry.
                    if let Some(child) = unsafe { Frame::from_hpa(F::table_address(raw)) } {
                        tables += self.recycle(child, level - 1);
                    }
                }
            }
        }
        self.cache.put(frame);
        tables
    }
}

/// Passes every frame of a subtree that neither hardware nor software can reach any more to `free`.
///
/// # Safety
/// `ptes` are those of a table at `level`. No walker, hardware or software, is in it or below, or
/// can get there.
pub(crate) unsafe fn dismantle<F: Format, P: Platform>(
    platform: &P,
    ptes: &[Pte],
    level: u8,
    free: &mut impl FnMut(Frame),
) {
    if level == 0 {
        return;
    }
    for pte in ptes {
        let raw = pte.load();
        if F::kind(raw, level) == Kind::Table {
            let hpa = F::table_address(raw);
            // SAFETY: a linked table is allocated with that many entries; the caller's contract
            // covers everything below.
            unsafe {
                let children = table::entries(platform, hpa, F::entries(level - 1));
                dismantle::<F, P>(platform, children, level - 1, free);
            }
            // SAFETY: the table was linked, so the tree owned it, and only this code has it from
            // here on.
            if let Some(frame) = unsafe { Frame::from_hpa(hpa) } {
                free(frame);
            }
        }
    }
}

/// Gives back frames of tables below `ptes`, the lowest first, up to `most`, which counts down, and
/// empties the entries that linked them. Returns whether none is left.
///
/// # Safety
/// That of [`dismantle`]. Tables came from caches of this platform, and no other software reads
/// `ptes`.
pub(crate) unsafe fn dismantle_some<F: Format, P: Platform>(
    platform: &P,
    ptes: &[Pte],
    level: u8,
    most: &mut usize,
) -> bool {
    for pte in ptes {
        let raw = pte.load();
        if level == 0 || F::kind(raw, level) != Kind::Table {
            continue;
        }
        let hpa = F::table_address(raw);
        // SAFETY: a linked table is allocated with that many entries; the caller's contract covers
        // everything below.
        let empty = unsafe {
            let children = table::entries(platform, hpa, F::entries(level - 1));
            dismantle_some::<F, P>(platform, children, level - 1, most)
        };
        if !empty || *most == 0 {
            return false;
        }
        *most -= 1;
        pte.init(0);
        // SAFETY: caches allocate `TABLE_BYTES`; the table was linked by this entry alone, which is
        // empty now, and nothing is linked below it.
        unsafe {
            if let Some(frame) = Frame::from_hpa(hpa) {
                platform.free(frame, F::TABLE_BYTES);
            }
        }
    }
    true
}
