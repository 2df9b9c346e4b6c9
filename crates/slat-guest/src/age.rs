//! Ageing: which pages were used, by guest or host addresses, without a lock.

use crate::backing::{Backing, HvaRange};
use crate::bits::each_word;
use crate::host::Host;
use crate::memslots::MemslotSnapshot;
use crate::private::MemoryKind;
use crate::ranges::cut_by;
use crate::worker::{Inside, Worker};
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use slat::{
    AgeBitmaps, AgeCounts, AgeOptions, ChangeError, Format, Gpa, GpaRange, Guard, Interruption,
    Pages,
};

/// Why pages were not aged. Nothing was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AgeError {
    /// The tables refuse the range or a bitmap, or do not record use.
    Refused(ChangeError),
    /// The host range does not begin and end at page boundaries.
    Unaligned,
}

impl fmt::Display for AgeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => error.fmt(f),
            Self::Unaligned => {
                f.write_str("host addresses to be aged are multiples of the page size")
            }
        }
    }
}

impl core::error::Error for AgeError {}

/// The number of times that the slow path looks again.
const SLOW_TRIES: u32 = 100;

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Finds out which pages of `range` are young (used since they were last aged) and, if `how`
    /// says so, makes them old. Bit 0 of `young` is the first page. `selected` has the pages to
    /// age; `None` means all.
    ///
    /// It takes no lock. If another thread is changing a page's entry, ageing looks at the page
    /// again, a bounded number of times: this is the slow path, and is counted. Pages that have no
    /// answer even then are counted in the result, and their bits are not set.
    ///
    /// # Errors
    /// [`AgeError::Refused`]: nothing was done.
    pub fn age(
        &mut self,
        range: GpaRange,
        selected: Option<&[u64]>,
        young: &mut [u64],
        how: AgeOptions,
    ) -> Result<AgeCounts, AgeError> {
        self.age_if(range, selected, young, how, |_| true)
    }

    /// As [`Worker::age`], if `wanted` accepts the memslots at the time of the look; otherwise the
    /// pages have no answer.
    fn age_if(
        &mut self,
        range: GpaRange,
        selected: Option<&[u64]>,
        young: &mut [u64],
        how: AgeOptions,
        wanted: impl Fn(&MemslotSnapshot) -> bool,
    ) -> Result<AgeCounts, AgeError> {
        let needed = words::<F>(&range);
        let shortest = selected.map_or(young.len(), |selected| selected.len().min(young.len()));
        if shortest < needed {
            return Err(AgeError::Refused(ChangeError::Bitmap { needed, given: shortest }));
        }
        let mut aged = AgeCounts::default();
        // Private pages are never young.
        let shared = self.look(|view| shared_pages::<F>(view, &range, selected));
        let selected = shared.as_deref().or(selected);
        let Some(selected) = selected else {
            self.age_run(range, young, how, &mut aged, &wanted)?;
            return Ok(aged);
        };
        let pages = Pages { start: range.start(), bits: &selected[..needed] };
        for (first, count) in pages.runs() {
            let offset = (first as u64) << F::PAGE_SHIFT;
            let bytes = ((count as u64) << F::PAGE_SHIFT).min(range.size().saturating_sub(offset));
            let Ok(run) = GpaRange::new(Gpa(range.start().0 + offset.min(range.size())), bytes)
            else {
                break;
            };
            let mut found = vec![0; count.div_ceil(64)];
            let mut one = AgeCounts::default();
            self.age_run(run, &mut found, how, &mut one, &wanted)?;
            aged.unanswered += one.unanswered;
            aged.young += shift_into(young, &found, first);
        }
        Ok(aged)
    }

    /// As [`Worker::age`], for the memory at `host`: bit 0 of `young` is its first page. Pages that
    /// are in no memslot are old; a page that is in several memslots is young if it is young in one
    /// of them. If a memslot is being deleted or moved, or was before ageing looks at it, its pages
    /// have no answer.
    ///
    /// # Errors
    /// [`AgeError`]; nothing was done.
    pub fn age_host(
        &mut self,
        host: HvaRange,
        selected: Option<&[u64]>,
        young: &mut [u64],
        how: AgeOptions,
    ) -> Result<AgeCounts, AgeError> {
        let page = (1 << F::PAGE_SHIFT) - 1;
        if (host.start.0 | host.bytes) & page != 0 {
            return Err(AgeError::Unaligned);
        }
        let words = (host.bytes >> F::PAGE_SHIFT).div_ceil(64) as usize;
        for given in [Some(young.len()), selected.map(<[u64]>::len)].into_iter().flatten() {
            if given < words {
                return Err(AgeError::Refused(ChangeError::Bitmap { needed: words, given }));
            }
        }
        let parts = self.look(|view| {
            let parts = view.backed_by(host);
            parts
                .map(|(memslot, range)| (memslot.spec, memslot.deleting, range))
                .collect::<Vec<_>>()
        });
        let mut aged = AgeCounts::default();
        for (spec, going, range) in parts {
            let first = (spec.host_of(range.start().0).0 - host.start.0) >> F::PAGE_SHIFT;
            let pages = range.size() >> F::PAGE_SHIFT;
            let mut found = vec![0; pages.div_ceil(64) as usize];
            let part = selected.map(|selected| cut(selected, first, pages));
            if going {
                // Marks of its leaves may be on their way to the memslot.
                let count =
                    |bits: &[u64]| bits.iter().map(|bits| u64::from(bits.count_ones())).sum();
                aged.unanswered += part.as_deref().map_or(pages, count);
                continue;
            }
            let there = |view: &MemslotSnapshot| {
                view.named(spec.id)
                    .is_some_and(|memslot| !memslot.deleting && memslot.spec.is_where(&spec))
            };
            let one = self.age_if(range, part.as_deref(), &mut found, how, there)?;
            aged.unanswered += one.unanswered;
            aged.young += shift_into(young, &found, first as usize);
        }
        Ok(aged)
    }

    /// Ages all pages of `range`, in all tables that may have leaves, and in the kept marks.
    ///
    /// A page was used if a leaf is marked so, or if the memslot's bits are
    /// ([`SpilledBits`](crate::bits::SpilledBits)). A block that crosses an end of the range is
    /// aged as a whole: if it is made old, its pages outside the range are kept as used.
    fn age_run(
        &mut self,
        range: GpaRange,
        young: &mut [u64],
        how: AgeOptions,
        aged: &mut AgeCounts,
        wanted: &impl Fn(&MemslotSnapshot) -> bool,
    ) -> Result<(), AgeError> {
        let guest = self.guest;
        let words = words::<F>(&range);
        // Pages without an answer: in one of the tables, and in all of them together.
        let (mut open, mut left) = (vec![0; words], Vec::new());
        for tables in guest.spaces() {
            open.fill(0);
            let found = self.age_in(tables, range, young, &mut open, how, wanted)?;
            aged.young += found.young;
            if found.unanswered == 0 {
                continue;
            }
            self.counters.ageing_slow.add(found.unanswered);
            left.resize(words, 0);
            // Run by run, so that a block is looked at as a whole.
            for (first, count) in (Pages { start: range.start(), bits: &open }).runs() {
                let at = Gpa(range.start().0 + ((first as u64) << F::PAGE_SHIFT));
                let run = GpaRange::new(at, (count as u64) << F::PAGE_SHIFT).expect("not empty");
                let words = count.div_ceil(64);
                let (mut is_young, mut open) = (vec![0; words], vec![0; words]);
                for _ in 0..SLOW_TRIES {
                    tables.platform().wait();
                    open.fill(0);
                    let found = self.age_in(tables, run, &mut is_young, &mut open, how, wanted)?;
                    if found.unanswered == 0 {
                        break;
                    }
                }
                shift_into(&mut left, &open, first);
                aged.young += shift_into(young, &is_young, first);
            }
        }
        match self.kept_in(range, young, how.clear, wanted) {
            Some(found) => aged.young += found,
            // The memslot was deleted or moved after its leaves were looked at.
            None => left = ones((range.size() >> F::PAGE_SHIFT) as usize),
        }
        let unanswered = left.iter().zip(young).map(|(left, young)| left & !*young);
        aged.unanswered += unanswered.map(|bits| u64::from(bits.count_ones())).sum::<u64>();
        Ok(())
    }

    fn age_in(
        &mut self,
        tables: &'w slat::Tables<'w, F, H>,
        range: GpaRange,
        young: &mut [u64],
        unanswered: &mut [u64],
        how: AgeOptions,
        wanted: &impl Fn(&MemslotSnapshot) -> bool,
    ) -> Result<AgeCounts, AgeError> {
        let found = self.with_memslots(tables, |view, Inside { guard, .. }| {
            let page = |at: Gpa| ((at.0 - range.start().0) >> F::PAGE_SHIFT) as usize;
            // The host does not age private pages. The caller has left out those that were private
            // when it looked.
            if !wanted(view) || view.has_private::<F>(&range) {
                let pages = page(range.end());
                return Ok(AgeCounts {
                    young: 0,
                    unanswered: shift_into(unanswered, &ones(pages), 0),
                });
            }
            let mut inner = range;
            let mut aged = AgeCounts::default();
            // The engine refuses a range that does not consist of whole pages.
            let page_mask = (1 << F::PAGE_SHIFT) - 1;
            if how.clear && (range.start().0 | range.size()) & page_mask == 0 {
                let (rest, held) = age_ends(view, guard, range, how.flush_tlb)?;
                for held in held.into_iter().flatten() {
                    let pages = ones((held.size() >> F::PAGE_SHIFT) as usize);
                    aged.unanswered += shift_into(unanswered, &pages, page(held.start()));
                }
                match rest {
                    Some(rest) => inner = rest,
                    None => return Ok(aged),
                }
            }
            let first = page(inner.start());
            let found = if first == 0 {
                guard.age(inner, &mut AgeBitmaps { young, unanswered }, how)?
            } else {
                let words = words::<F>(&inner);
                let (mut some, mut open) = (vec![0; words], vec![0; words]);
                let mut ages = AgeBitmaps { young: &mut some, unanswered: &mut open };
                guard.age(inner, &mut ages, how)?;
                let young = shift_into(young, &some, first);
                AgeCounts { young, unanswered: shift_into(unanswered, &open, first) }
            };
            aged.young += found.young;
            aged.unanswered += found.unanswered;
            Ok(aged)
        });
        found.map_err(|Interruption { reason, .. }| AgeError::Refused(reason))
    }

    /// Adds the pages of `range` that are kept as used, and clears these marks if `clear` is set.
    /// Returns the number of pages that were not young before, or `None` if the memslots are not
    /// `wanted`.
    fn kept_in(
        &mut self,
        range: GpaRange,
        young: &mut [u64],
        clear: bool,
        wanted: &impl Fn(&MemslotSnapshot) -> bool,
    ) -> Option<u64> {
        self.look(|view| {
            if !wanted(view) {
                return None;
            }
            let mut new = 0;
            for (memslot, part) in view.parts(&range) {
                let spilled_bits = &memslot.spilled_bits;
                let offset = (part.start().0 - range.start().0) >> F::PAGE_SHIFT;
                let before = (part.start().0 - memslot.spec.gpa.0) >> F::PAGE_SHIFT;
                each_word::<F>(&memslot.spec, part.start().0, part.size(), |word, mask| {
                    let used = match clear {
                        true => spilled_bits.used.swap_out(word, mask),
                        false => spilled_bits.used.get(word, mask),
                    };
                    // The bits of the word, from its first page in the range on.
                    let first = u64::from(mask.trailing_zeros());
                    let page = word as u64 * 64 + first - before + offset;
                    new += shift_into(young, &[used >> first], page as usize);
                });
            }
            Some(new)
        })
    }
}

/// Makes the leaves old that cross the ends of `range`, and keeps their use. Returns the part of
/// the range between these leaves, and the parts at the ends that have no answer.
#[expect(clippy::type_complexity, reason = "two ranges, which may not be")]
fn age_ends<F: Format, H: Host>(
    view: &MemslotSnapshot,
    guard: &mut Guard<'_, '_, F, H>,
    range: GpaRange,
    fresh: bool,
) -> Result<(Option<GpaRange>, [Option<GpaRange>; 2]), Interruption<ChangeError>> {
    let (mut start, mut end) = (range.start().0, range.end().0);
    let mut held = [None; 2];
    for (side, held) in held.iter_mut().enumerate() {
        let at = Gpa(if side == 0 { start } else { end });
        if start >= end {
            break;
        }
        let leaf = match cut_by(guard, at) {
            Ok(None) => continue,
            Ok(Some(leaf)) if !is_kept(view, &leaf) => continue,
            Ok(Some(_)) => guard.age_leaf(at, true),
            Err(_) => Err(Interruption { at, reason: ChangeError::Contended }),
        };
        let (leaf, used) = match leaf {
            // The leaf has become smaller, or is gone: the scan looks at what is there.
            Ok(None) => continue,
            Ok(Some((leaf, used))) => (leaf, used),
            Err(Interruption { reason: ChangeError::Contended, .. }) => {
                // The size of the leaf is not known: the page at the end has no answer, and the
                // scan looks at the rest.
                let page = if side == 0 { start } else { end - (1 << F::PAGE_SHIFT) };
                *held = GpaRange::new(Gpa(page), 1 << F::PAGE_SHIFT).ok();
                match side {
                    0 => start += 1 << F::PAGE_SHIFT,
                    _ => end -= 1 << F::PAGE_SHIFT,
                }
                continue;
            }
            Err(stopped) => return Err(stopped),
        };
        if used {
            for (memslot, part) in view.parts(&leaf) {
                memslot.spilled_bits.used.mark::<F>(&memslot.spec, part.start().0, part.size());
            }
        }
        if fresh {
            guard
                .defer_invalidation(leaf)
                .map_err(|reason| Interruption { at, reason: ChangeError::Range(reason) })?;
            guard.invalidate();
        }
        match side {
            0 => start = leaf.end().0.clamp(start, end),
            _ => end = leaf.start().0.clamp(start, end),
        }
    }
    let rest = end.checked_sub(start).and_then(|bytes| GpaRange::new(Gpa(start), bytes).ok());
    Ok((rest, held))
}

/// Returns whether the use of each page of a leaf can be kept: all of the leaf is in memslots.
fn is_kept(view: &MemslotSnapshot, leaf: &GpaRange) -> bool {
    view.parts(leaf).map(|(_, part)| part.size()).sum::<u64>() == leaf.size()
}

/// Returns the `selected` pages, or all, without private ones; `None` if no page is private.
fn shared_pages<F: Format>(
    view: &MemslotSnapshot,
    range: &GpaRange,
    selected: Option<&[u64]>,
) -> Option<Vec<u64>> {
    if !view.has_private::<F>(range) {
        return None;
    }
    let pages = (range.size() >> F::PAGE_SHIFT) as usize;
    let mut bits =
        selected.map_or_else(|| ones(pages), |selected| selected[..words::<F>(range)].to_vec());
    for (memslot, part) in view.parts(range) {
        for run in memslot.runs::<F>(part, MemoryKind::Private) {
            let first = (run.start().0 - range.start().0) >> F::PAGE_SHIFT;
            for page in first..first + (run.size() >> F::PAGE_SHIFT) {
                bits[(page / 64) as usize] &= !(1 << (page % 64));
            }
        }
    }
    Some(bits)
}

/// Returns the number of words of a bitmap of `range`.
fn words<F: Format>(range: &GpaRange) -> usize {
    (range.size() >> F::PAGE_SHIFT).div_ceil(64) as usize
}

/// Returns a bitmap of `bits` bits, all set.
fn ones(bits: usize) -> Vec<u64> {
    let mut all = vec![u64::MAX; bits.div_ceil(64)];
    if !bits.is_multiple_of(64)
        && let Some(last) = all.last_mut()
    {
        *last = (1 << (bits % 64)) - 1;
    }
    all
}

/// Sets `bits` in `to`, from bit `first` on; returns the number of bits that were clear before.
fn shift_into(to: &mut [u64], bits: &[u64], first: usize) -> u64 {
    let (word, shift) = (first / 64, first % 64);
    let mut new = 0;
    let mut add = |word: usize, bits: u64| {
        if bits != 0 {
            new += u64::from((bits & !to[word]).count_ones());
            to[word] |= bits;
        }
    };
    for (index, &bits) in bits.iter().enumerate() {
        add(word + index, bits << shift);
        if shift != 0 {
            add(word + index + 1, bits >> (64 - shift));
        }
    }
    new
}

/// Returns a copy of `pages` bits of `bits`, from bit `first` on.
fn cut(bits: &[u64], first: u64, pages: u64) -> Vec<u64> {
    let (word, shift) = ((first / 64) as usize, first % 64);
    let mut part: Vec<u64> = (0..pages.div_ceil(64) as usize)
        .map(|index| {
            let low = bits[word + index] >> shift;
            let high = bits.get(word + index + 1).filter(|_| shift != 0);
            low | high.map_or(0, |&high| high << (64 - shift))
        })
        .collect();
    if !pages.is_multiple_of(64)
        && let Some(last) = part.last_mut()
    {
        *last &= (1 << (pages % 64)) - 1;
    }
    part
}
