//! Limits of the machine: a plain loop that fills, reads or exchanges the same bytes.
//!
//! Each limit runs in the same rounds as the work that it is compared with, on the same warm
//! memory.

use crate::fill::Stores;
use crate::stopwatch::Stopwatch;
use slat::format::Kind;
use slat::{Format, GpaRange, Hpa, Platform, Pte, Tables};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

/// The work of a plain loop on table memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Stores of consecutive entries, in a plain loop.
    FillPlain,
    /// The same with the widest stores that the CPU has, through its caches or past them, whichever
    /// is faster.
    FillBest,
    /// One load of each entry, in tables of the last level.
    Read,
    /// One load of each entry, in tables above the last level.
    ReadUpper,
    /// One compare-and-swap of each entry, in tables of the last level.
    Cas,
}

impl Limit {
    /// Returns its name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FillPlain => "fill-plain",
            Self::FillBest => "fill-best",
            Self::Read => "read",
            Self::ReadUpper => "read-upper",
            Self::Cas => "cas",
        }
    }
}

/// The tables of a guest by level: addresses, and numbers of entries in use.
#[derive(Debug, Default)]
pub struct TablePages {
    upper: Vec<(Hpa, usize)>,
    last: Vec<(Hpa, usize)>,
}

impl TablePages {
    /// Finds every table, including the part of the root that translates `guest`.
    pub fn of<F: Format, P: Platform>(
        tables: &Tables<'_, F, P>,
        platform: &P,
        guest: GpaRange,
    ) -> Self {
        let geometry = tables.geometry();
        let shift = F::shift(geometry.root_level);
        let first = (guest.start().0 >> shift) as usize;
        let used = ((guest.end().0 - 1) >> shift) as usize + 1 - first;
        let mut found = Self::default();
        let root = Hpa(tables.root().0 + first as u64 * 8);
        found.table::<F, P>(platform, root, used, geometry.root_level);
        found
    }

    fn table<F: Format, P: Platform>(&mut self, platform: &P, hpa: Hpa, len: usize, level: u8) {
        if level == 0 {
            self.last.push((hpa, len));
            return;
        }
        self.upper.push((hpa, len));
        // SAFETY: a table in use has that many entries, and stays while the tables are borrowed.
        let entries = unsafe { std::slice::from_raw_parts(platform.entries(hpa).as_ptr(), len) };
        for raw in entries.iter().map(Pte::load) {
            if F::kind(raw, level) == Kind::Table {
                let child = F::table_address(raw);
                self.table::<F, P>(platform, child, F::entries(level - 1), level - 1);
            }
        }
    }

    /// Returns the tables of the last level, in ascending order of the addresses that they
    /// translate.
    pub fn last(&self) -> &[(Hpa, usize)] {
        &self.last
    }

    /// Reads or exchanges each entry once; returns seconds, and the number of entries.
    ///
    /// # Safety
    /// The tables that `of` found, or others at the same places, are still in `platform`.
    pub unsafe fn sample<P: Platform>(&self, platform: &P, limit: Limit) -> (f64, u64) {
        let pages = if limit == Limit::ReadUpper { &self.upper } else { &self.last };
        let watch = Stopwatch::start();
        for &(hpa, len) in pages {
            let table = platform.entries(hpa).cast::<AtomicU64>();
            // SAFETY: the caller's contract; a `Pte` is one atomic word.
            let words = unsafe { std::slice::from_raw_parts(table.as_ptr(), len) };
            black_box(if limit == Limit::Cas { exchange(words) } else { read(words) });
        }
        let seconds = watch.seconds();
        (seconds, pages.iter().map(|&(_, len)| len as u64).sum())
    }
}

/// Reads each word; returns their exclusive or.
#[inline]
pub fn read(words: &[AtomicU64]) -> u64 {
    words.iter().fold(0, |sum, word| sum ^ word.load(Ordering::Acquire))
}

/// Changes a bit of each word by compare-and-swap, after a load, as write protection does.
#[inline]
pub fn exchange(words: &[AtomicU64]) -> u64 {
    words.iter().fold(0, |lost, word| {
        let raw = word.load(Ordering::Acquire);
        let new = raw ^ (1 << 55);
        lost + u64::from(
            word.compare_exchange(raw, new, Ordering::AcqRel, Ordering::Acquire).is_err(),
        )
    })
}

/// Fills `words` with consecutive entries, table by table; returns seconds.
#[inline]
pub fn fill(words: &mut [u64], table_entries: usize, limit: Limit) -> f64 {
    match limit {
        Limit::FillBest => {
            let stream = fill_by(words, table_entries, Stores::Streaming);
            fill_by(words, table_entries, Stores::Wide).min(stream)
        }
        _ => fill_by(words, table_entries, Stores::Plain),
    }
}

/// As [`fill`], with one kind of stores.
#[inline]
pub fn fill_by(words: &mut [u64], table_entries: usize, stores: Stores) -> f64 {
    let watch = Stopwatch::start();
    for (index, table) in words.chunks_exact_mut(table_entries).enumerate() {
        stores.fill(table, (index as u64) << 21 | 0x7ff, 1 << 12);
    }
    stores.fence();
    // Keeps the compiler from moving stores past the reading of the clock.
    black_box(words);
    watch.seconds()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_of_filling_stores_the_same_descriptors() {
        let mut memory = vec![0u64; 2048 + 8];
        let skip = memory.as_ptr().align_offset(64);
        let words = &mut memory[skip..skip + 2048];
        let expected: Vec<u64> =
            (0..2048u64).map(|i| ((i / 512) << 21) + 0x7ff + ((i % 512) << 12)).collect();
        for limit in [Limit::FillPlain, Limit::FillBest] {
            words.fill(0);
            fill(words, 512, limit);
            assert!(words == expected, "{limit:?}");
        }
        for stores in Stores::ALL {
            words.fill(0);
            fill_by(words, 512, stores);
            assert!(words == expected, "{stores:?}");
        }
    }

    #[test]
    fn reading_and_exchanging_touch_each_word_once() {
        let words: Vec<AtomicU64> = (0..512).map(AtomicU64::new).collect();
        assert_eq!(read(&words), (0..512).fold(0, |a, b| a ^ b));
        assert_eq!(exchange(&words), 0);
        assert!(
            words
                .iter()
                .enumerate()
                .all(|(i, w)| w.load(Ordering::Relaxed) == (i as u64 | 1 << 55))
        );
    }
}
