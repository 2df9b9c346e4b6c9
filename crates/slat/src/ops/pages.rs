//! Pages that a bitmap names: exactly these, and not the range that spans them.

use super::ChangeError;
use crate::addr::{Gpa, GpaRange, RangeError};
use crate::format::Format;
use crate::tables::Interruption;

/// Bitmap of pages: bit `i` of word `w` names the page `64 * w + i` pages behind `start`, as in
/// KVM's dirty log.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'b> {
    /// The page that bit 0 names.
    pub start: Gpa,
    /// The bits.
    pub bits: &'b [u64],
}

impl<'b> Pages<'b> {
    /// Returns the maximal runs of set bits: the first bit of each, and its number of bits.
    #[inline]
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize)> + use<'b> {
        Runs { bits: self.bits, next: 0 }
    }

    /// Returns the addresses of `pages` pages from that of bit `first` on.
    #[inline(always)]
    pub(super) fn part<F: Format>(
        &self,
        first: usize,
        pages: usize,
    ) -> Result<GpaRange, Interruption<ChangeError>> {
        let refused = |error| Interruption { at: self.start, reason: ChangeError::Range(error) };
        let (offset, size) = ((first as u64) << F::PAGE_SHIFT, (pages as u64) << F::PAGE_SHIFT);
        let start = self.start.0.checked_add(offset);
        let start = start.ok_or(refused(RangeError::Overflow { start: self.start, size }))?;
        GpaRange::new(Gpa(start), size).map_err(refused)
    }
}

/// Iterator of the maximal runs of set bits: the first bit of each, and its length.
struct Runs<'b> {
    bits: &'b [u64],
    next: usize,
}

impl Iterator for Runs<'_> {
    type Item = (usize, usize);

    #[inline]
    fn next(&mut self) -> Option<(usize, usize)> {
        let first = seek(self.bits, self.next, |word| word)?;
        self.next = run_end(self.bits, first);
        Some((first, self.next - first))
    }
}

/// Returns the first bit from `at` on that `wanted` sets.
#[inline(always)]
pub(super) fn seek(bits: &[u64], mut at: usize, wanted: impl Fn(u64) -> u64) -> Option<usize> {
    while let Some(&word) = bits.get(at / 64) {
        let rest = wanted(word) >> (at % 64);
        if rest != 0 {
            return Some(at + rest.trailing_zeros() as usize);
        }
        at = (at / 64 + 1) * 64;
    }
    None
}

/// Returns the first bit from `first` on that is clear, or the end of the bits.
#[inline(always)]
pub(super) fn run_end(bits: &[u64], first: usize) -> usize {
    seek(bits, first, |word| !word).unwrap_or(bits.len() * 64)
}

/// Returns the first bit of the run of set bits that bit `at` is in.
pub(super) fn run_start(bits: &[u64], mut at: usize) -> usize {
    while at > 0 && bits[(at - 1) / 64] >> ((at - 1) % 64) & 1 == 1 {
        at -= 1;
    }
    at
}

/// Sets `count` bits from `first` on; returns how many were not set before. Leaves out bits past
/// the end.
#[inline]
pub(super) fn set_bits(bits: &mut [u64], first: usize, count: usize) -> u64 {
    let mut new = 0;
    let (mut at, end) = (first, (first + count).min(bits.len() * 64));
    while at < end {
        let many = (64 - at % 64).min(end - at);
        new += or_bits(bits, at, u64::MAX >> (64 - many));
        at += many;
    }
    new
}

/// Sets the bits of `mask`, whose bit 0 is that at `first`; returns how many were not set before.
#[inline(always)]
pub(super) fn or_bits(bits: &mut [u64], first: usize, mask: u64) -> u64 {
    let (word, shift) = (first / 64, first % 64);
    let mut or = |word: usize, mask: u64| match bits.get_mut(word) {
        Some(bits) => {
            let new = mask & !*bits;
            *bits |= mask;
            u64::from(new.count_ones())
        }
        None => 0,
    };
    let low = or(word, mask << shift);
    let rest = (mask >> 1) >> (63 - shift);
    if rest == 0 { low } else { low + or(word + 1, rest) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    proptest! {
        #![proptest_config(crate::properties::config())]

        #[test]
        fn runs_name_exactly_the_bits_that_are_set(bits in proptest::collection::vec(
            prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 0..5)) {
            let mut rebuilt = std::vec![0u64; bits.len()];
            let mut last = None;
            for (first, count) in (Runs { bits: &bits, next: 0 }) {
                prop_assert!(count > 0 && last.is_none_or(|last| last < first));
                prop_assert_eq!(run_start(&bits, first + count - 1), first);
                prop_assert_eq!(run_start(&bits, first), first);
                last = Some(first + count);
                prop_assert_eq!(set_bits(&mut rebuilt, first, count), count as u64);
                prop_assert_eq!(set_bits(&mut rebuilt, first, count), 0);
            }
            prop_assert_eq!(rebuilt, bits);
        }

        #[test]
        fn a_mask_is_written_at_its_offset_and_never_past_the_end(
            first in 0usize..140, mask: u64) {
            let mut bits = [0u64; 2];
            let new = or_bits(&mut bits, first, mask);
            let set = |at: usize| bits.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1);
            let wanted: Vec<usize> =
                (0..64).filter(|i| mask >> i & 1 == 1).map(|i| first + i).collect();
            prop_assert!((0..128).all(|at| set(at) == wanted.contains(&at)));
            prop_assert_eq!(new, wanted.iter().filter(|at| **at < 128).count() as u64);
        }
    }
}
