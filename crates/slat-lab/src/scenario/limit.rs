//! What the machine allows: the same bytes filled, read or exchanged by a plain loop.
//!
//! Each limit runs in the same rounds as what is held against it, on the same warm memory.

use slat::format::Kind;
use slat::{Format, GpaRange, Hpa, Platform, Slot, Tables};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A thing that a plain loop does to table memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Stores of consecutive descriptors, by a plain loop.
    FillPlain,
    /// The same by the widest stores that the CPU has, through its caches or around them: the
    /// faster of the two.
    FillBest,
    /// One load a slot, of the last level's tables.
    Read,
    /// One load a slot, of the tables above the last level.
    ReadUpper,
    /// One compare-and-swap a slot, of the last level's tables.
    Cas,
}

impl Limit {
    /// Its name in results.
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

/// The tables of a guest by where their slots stand in the tree: address, and slots in use.
#[derive(Debug, Default)]
pub struct TablePages {
    upper: Vec<(Hpa, usize)>,
    last: Vec<(Hpa, usize)>,
}

impl TablePages {
    /// Finds every table, the part of the root that translates `guest` included.
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
        // SAFETY: a table in use has that many slots, and stays while the tables are borrowed.
        let slots = unsafe { std::slice::from_raw_parts(platform.slots(hpa).as_ptr(), len) };
        for raw in slots.iter().map(Slot::load) {
            if F::kind(raw, level) == Kind::Table {
                let child = F::table_address(raw);
                self.table::<F, P>(platform, child, 1 << F::INDEX_BITS, level - 1);
            }
        }
    }

    /// Reads or exchanges each slot once; seconds, and slots touched.
    ///
    /// # Safety
    /// The tables that were found still stand in `platform`, or others at the same places.
    pub unsafe fn sample<P: Platform>(&self, platform: &P, limit: Limit) -> (f64, u64) {
        let pages = if limit == Limit::ReadUpper { &self.upper } else { &self.last };
        let begin = Instant::now();
        for &(hpa, len) in pages {
            let table = platform.slots(hpa).cast::<AtomicU64>();
            // SAFETY: the caller's contract; a `Slot` is one atomic word.
            let words = unsafe { std::slice::from_raw_parts(table.as_ptr(), len) };
            black_box(if limit == Limit::Cas { exchange(words) } else { read(words) });
        }
        let seconds = begin.elapsed().as_secs_f64();
        (seconds, pages.iter().map(|&(_, len)| len as u64).sum())
    }
}

fn read(words: &[AtomicU64]) -> u64 {
    words.iter().fold(0, |sum, word| sum ^ word.load(Ordering::Acquire))
}

/// Changes a bit of each word, as write protection does; the value is loaded first, as there.
fn exchange(words: &[AtomicU64]) -> u64 {
    words.iter().fold(0, |lost, word| {
        let raw = word.load(Ordering::Acquire);
        let new = raw ^ (1 << 55);
        lost + u64::from(
            word.compare_exchange(raw, new, Ordering::AcqRel, Ordering::Acquire).is_err(),
        )
    })
}

/// Fills `words` with consecutive descriptors, table by table; seconds.
pub fn fill(words: &mut [u64], table_slots: usize, limit: Limit) -> f64 {
    match limit {
        Limit::FillBest => {
            let stream = fill_by(words, table_slots, stream);
            fill_by(words, table_slots, vector).min(stream)
        }
        _ => fill_by(words, table_slots, plain),
    }
}

fn fill_by(words: &mut [u64], table_slots: usize, way: impl Fn(&mut [u64], u64, u64)) -> f64 {
    let begin = Instant::now();
    for (index, table) in words.chunks_exact_mut(table_slots).enumerate() {
        way(table, (index as u64) << 21 | 0x7ff, 1 << 12);
    }
    // Before the clock is read: what is stored must not be put off past it.
    black_box(words);
    begin.elapsed().as_secs_f64()
}

fn plain(words: &mut [u64], first: u64, step: u64) {
    let mut raw = first;
    for word in words {
        *word = raw;
        raw = raw.wrapping_add(step);
    }
}

/// The loop of `plain`, compiled for the widest registers.
#[cfg(target_arch = "x86_64")]
fn vector(words: &mut [u64], first: u64, step: u64) {
    #[target_feature(enable = "avx512f")]
    fn avx512(words: &mut [u64], first: u64, step: u64) {
        plain(words, first, step);
    }
    #[target_feature(enable = "avx2")]
    fn avx2(words: &mut [u64], first: u64, step: u64) {
        plain(words, first, step);
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has AVX-512F.
        unsafe { avx512(words, first, step) }
    } else if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        unsafe { avx2(words, first, step) }
    } else {
        plain(words, first, step);
    }
}

/// Around the caches, 64 bytes a store where the CPU can, else 8.
#[cfg(target_arch = "x86_64")]
fn stream(words: &mut [u64], first: u64, step: u64) {
    if is_x86_feature_detected!("avx512f") && words.as_ptr().align_offset(64) == 0 {
        // SAFETY: the CPU has AVX-512F, and the words begin at a multiple of 64 bytes.
        unsafe { stream_avx512(words, first, step) }
    } else {
        stream_words(words, first, step);
    }
}

/// # Safety
/// `words` begins at a multiple of 64 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(words: &mut [u64], first: u64, step: u64) {
    use std::arch::x86_64::*;
    let at = |i: u64| first.wrapping_add(i.wrapping_mul(step)) as i64;
    let mut raws = _mm512_setr_epi64(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
    let next = _mm512_set1_epi64(step.wrapping_mul(8) as i64);
    for line in words.chunks_exact_mut(8) {
        // SAFETY: the line has 64 writable bytes; it is aligned to them, as the first one is.
        unsafe { _mm512_stream_si512(line.as_mut_ptr().cast(), raws) };
        raws = _mm512_add_epi64(raws, next);
    }
    _mm_sfence();
}

#[cfg(target_arch = "x86_64")]
fn stream_words(words: &mut [u64], first: u64, step: u64) {
    use std::arch::x86_64::{_mm_sfence, _mm_stream_si64};
    let mut raw = first;
    for word in words {
        // SAFETY: a word is 8 aligned, writable bytes; SSE2 is part of x86-64.
        unsafe { _mm_stream_si64((word as *mut u64).cast(), raw as i64) };
        raw = raw.wrapping_add(step);
    }
    // SAFETY: SSE is part of x86-64.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
use plain as stream;
#[cfg(not(target_arch = "x86_64"))]
use plain as vector;

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
        #[cfg(target_arch = "x86_64")]
        {
            for way in [stream, vector, stream_words] {
                words.fill(0);
                fill_by(words, 512, way);
                assert!(words == expected);
            }
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
