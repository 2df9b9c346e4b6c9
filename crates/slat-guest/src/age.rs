//! Ageing: which pages were used, over guest or host addresses, without a lock.

use crate::backing::{Backing, HvaRange};
use crate::guest::Worker;
use crate::host::Host;
use crate::slots::View;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use slat::{Aged, Ageing, Ages, ChangeError, Format, Gpa, GpaRange, Halted, Pages};

/// Why pages were not aged. Nothing was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AgeError {
    /// The tables refuse the range or a bitmap, or do not record what is used.
    Refused(ChangeError),
    /// The host range is not a multiple of pages.
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

/// How often the slow path asks again.
const SLOW_TRIES: u32 = 100;

impl<'w, 'p, F: Format, H: Host, B: Backing> Worker<'w, 'p, F, H, B> {
    /// Finds out which pages of `range` are young, and, if asked, makes them old: bit 0 of `young` is
    /// the first page. `selected` names the pages to ask about; without, all.
    ///
    /// Lock-free. A page whose entry somebody was changing is asked about again, a bounded number of
    /// times: that is the slow path, and is counted. What has no answer even then is counted in what
    /// is returned, and is in no bitmap.
    ///
    /// # Errors
    /// [`AgeError::Refused`]: nothing was done.
    pub fn age(
        &mut self,
        range: GpaRange,
        selected: Option<&[u64]>,
        young: &mut [u64],
        how: Ageing,
    ) -> Result<Aged, AgeError> {
        self.age_if(range, selected, young, how, |_| true)
    }

    /// [`Worker::age`], if `wanted` by what the slots are when it looks.
    fn age_if(
        &mut self,
        range: GpaRange,
        selected: Option<&[u64]>,
        young: &mut [u64],
        how: Ageing,
        wanted: impl Fn(&View) -> bool,
    ) -> Result<Aged, AgeError> {
        let needed = (range.size() >> F::PAGE_SHIFT).div_ceil(64) as usize;
        let shortest = selected.map_or(young.len(), |selected| selected.len().min(young.len()));
        if shortest < needed {
            return Err(AgeError::Refused(ChangeError::Bitmap { needed, given: shortest }));
        }
        let mut aged = Aged::default();
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
            let mut one = Aged::default();
            self.age_run(run, &mut found, how, &mut one, &wanted)?;
            aged.unanswered += one.unanswered;
            aged.young += shift_into(young, &found, first);
        }
        Ok(aged)
    }

    /// [`Worker::age`] of the memory at `host`: bit 0 of `young` is its first page. What no slot has is
    /// old; a page that several slots have is young if it is so in one.
    ///
    /// # Errors
    /// [`AgeError`]; nothing was done.
    pub fn age_host(
        &mut self,
        host: HvaRange,
        selected: Option<&[u64]>,
        young: &mut [u64],
        how: Ageing,
    ) -> Result<Aged, AgeError> {
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
            let part = |slot: &crate::slots::Slot| Some((slot.spec, slot.spec.guest_of(&host)?));
            view.slots.iter().filter(|slot| !slot.going).filter_map(part).collect::<Vec<_>>()
        });
        let mut aged = Aged::default();
        for (spec, range) in parts {
            let first = (spec.host_of(range.start().0).0 - host.start.0) >> F::PAGE_SHIFT;
            let pages = range.size() >> F::PAGE_SHIFT;
            let mut found = vec![0; pages.div_ceil(64) as usize];
            let part = selected.map(|selected| cut(selected, first, pages));
            let there = |view: &View| view.named(spec.id).is_some_and(|slot| slot.spec == spec);
            let one = self.age_if(range, part.as_deref(), &mut found, how, there)?;
            aged.unanswered += one.unanswered;
            aged.young += shift_into(young, &found, first as usize);
        }
        Ok(aged)
    }

    /// All pages of `range`, in all tables that may have leaves.
    fn age_run(
        &mut self,
        range: GpaRange,
        young: &mut [u64],
        how: Ageing,
        aged: &mut Aged,
        wanted: &impl Fn(&View) -> bool,
    ) -> Result<(), AgeError> {
        let guest = self.guest;
        let words = (range.size() >> F::PAGE_SHIFT).div_ceil(64) as usize;
        let mut open = vec![0; words];
        for tables in guest.spaces() {
            open.fill(0);
            let found = self.age_in(tables, range, young, &mut open, how, wanted)?;
            aged.young += found.young;
            if found.unanswered == 0 {
                continue;
            }
            guest.counters.ageing_slow.add(found.unanswered);
            // Run by run, so that a block is asked about as a whole.
            for (first, count) in (Pages { start: range.start(), bits: &open }).runs() {
                let at = Gpa(range.start().0 + ((first as u64) << F::PAGE_SHIFT));
                let run = GpaRange::new(at, (count as u64) << F::PAGE_SHIFT).expect("not empty");
                let (mut is_young, mut left) = (vec![0; count.div_ceil(64)], count as u64);
                for _ in 0..SLOW_TRIES {
                    tables.platform().wait();
                    let mut open = vec![0; count.div_ceil(64)];
                    left =
                        self.age_in(tables, run, &mut is_young, &mut open, how, wanted)?.unanswered;
                    if left == 0 {
                        break;
                    }
                }
                aged.unanswered += left;
                aged.young += shift_into(young, &is_young, first);
            }
        }
        Ok(())
    }

    fn age_in(
        &mut self,
        tables: &'w slat::Tables<'p, F, H>,
        range: GpaRange,
        young: &mut [u64],
        unanswered: &mut [u64],
        how: Ageing,
        wanted: &impl Fn(&View) -> bool,
    ) -> Result<Aged, AgeError> {
        let found = self.with_slots(tables, |view, guard, _| {
            if !wanted(view) {
                return Ok(Aged::default());
            }
            guard.age(range, &mut Ages { young, unanswered }, how)
        });
        found.map_err(|Halted { why, .. }| AgeError::Refused(why))
    }
}

/// Adds `bits` to `to`, from bit `first` on; returns how many were not there.
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

/// `pages` bits of `bits`, from bit `first` on.
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
