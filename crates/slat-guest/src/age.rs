//! Ageing: which pages were used, over guest or host addresses, without a lock.

use crate::backing::{Backing, HvaRange};
use crate::guest::Worker;
use crate::host::Host;
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
        let words = (range.size() >> F::PAGE_SHIFT).div_ceil(64) as usize;
        if let Some(selected) = selected.filter(|selected| selected.len() < words) {
            let short = ChangeError::Bitmap { needed: words, given: selected.len() };
            return Err(AgeError::Refused(short));
        }
        let mut aged = Aged::default();
        let Some(selected) = selected else {
            self.age_run(range, young, how, &mut aged)?;
            return Ok(aged);
        };
        let (needed, given) = (words, young.len());
        if given < needed {
            return Err(AgeError::Refused(ChangeError::Bitmap { needed, given }));
        }
        let pages = Pages { start: range.start(), bits: &selected[..words] };
        for (first, count) in pages.runs() {
            let start = Gpa(range.start().0 + ((first as u64) << F::PAGE_SHIFT));
            let bytes =
                ((count as u64) << F::PAGE_SHIFT).min(range.end().0.saturating_sub(start.0));
            let Ok(run) = GpaRange::new(start, bytes) else { break };
            let mut found = vec![0; count.div_ceil(64)];
            self.age_run(run, &mut found, how, &mut aged)?;
            shift_into(young, &found, first);
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
            let one = self.age(range, part.as_deref(), &mut found, how)?;
            aged.young += one.young;
            aged.unanswered += one.unanswered;
            shift_into(young, &found, first as usize);
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
    ) -> Result<(), AgeError> {
        let guest = self.guest;
        let words = (range.size() >> F::PAGE_SHIFT).div_ceil(64) as usize;
        let mut unanswered = vec![0; words];
        for tables in guest.spaces() {
            unanswered.fill(0);
            let found = self.inside(tables, |guard, _| {
                let mut ages = Ages { young: &mut *young, unanswered: &mut unanswered };
                guard.age(range, &mut ages, how)
            });
            let found = found.map_err(|Halted { why, .. }| AgeError::Refused(why))?;
            aged.young += found.young;
            if found.unanswered != 0 {
                guest.counters.ageing_slow.add(found.unanswered);
                self.age_slowly(tables, range, young, &unanswered, how, aged);
            }
        }
        Ok(())
    }

    /// Asks about each page that has no answer until it has one.
    fn age_slowly(
        &mut self,
        tables: &'w slat::Tables<'p, F, H>,
        range: GpaRange,
        young: &mut [u64],
        unanswered: &[u64],
        how: Ageing,
        aged: &mut Aged,
    ) {
        let pages = Pages { start: range.start(), bits: unanswered };
        let asked = pages.runs().flat_map(|(first, count)| first..first + count);
        for page in asked {
            let at = Gpa(range.start().0 + ((page as u64) << F::PAGE_SHIFT));
            let one = GpaRange::new(at, 1 << F::PAGE_SHIFT).expect("a page");
            let mut tries = 0;
            loop {
                let (mut is_young, mut open) = ([0], [0]);
                let guard = tables.enter(&mut self.member);
                let mut guard = guard.expect("the worker joined this platform");
                let mut ages = Ages { young: &mut is_young, unanswered: &mut open };
                let done = guard.age(one, &mut ages, how).is_ok_and(|one| one.unanswered == 0);
                if done {
                    let word = &mut young[page / 64];
                    let bit = is_young[0] << (page % 64);
                    aged.young += u64::from(bit & !*word != 0);
                    *word |= bit;
                    break;
                }
                tries += 1;
                if tries == SLOW_TRIES {
                    aged.unanswered += 1;
                    break;
                }
                tables.platform().wait();
            }
        }
    }
}

/// Adds `bits` to `to`, from bit `first` on.
fn shift_into(to: &mut [u64], bits: &[u64], first: usize) {
    let (word, shift) = (first / 64, first % 64);
    for (index, &bits) in bits.iter().enumerate() {
        if bits == 0 {
            continue;
        }
        to[word + index] |= bits << shift;
        if shift != 0 && bits >> (64 - shift) != 0 {
            to[word + index + 1] |= bits >> (64 - shift);
        }
    }
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
    if pages % 64 != 0
        && let Some(last) = part.last_mut()
    {
        *last &= (1 << (pages % 64)) - 1;
    }
    part
}
