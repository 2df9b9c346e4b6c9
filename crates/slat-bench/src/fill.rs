//! Ways to store consecutive entries: plain, with the widest registers, and past the caches.

/// The kind of stores that fill a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// A loop of 8-byte stores.
    Plain,
    /// Stores from the widest registers that the CPU has.
    Wide,
    /// Streaming stores past the caches, from the widest registers that have them.
    /// [`Stores::fence`] orders them; on x86 a locked instruction, such as the exchange that links
    /// a table, does so too.
    Streaming,
}

impl Stores {
    /// All kinds.
    #[cfg(test)]
    pub const ALL: [Self; 3] = [Self::Plain, Self::Wide, Self::Streaming];

    /// Stores `first`, `first + step`, and so on. All stores but those of [`Stores::Streaming`] are
    /// ordered before later stores.
    #[inline]
    pub fn fill(self, words: &mut [u64], first: u64, step: u64) {
        match self {
            Self::Plain => plain(words, first, step),
            Self::Wide => wide(words, first, step),
            Self::Streaming => stream(words, first, step),
        }
    }

    /// Orders all earlier stores before later stores.
    #[inline]
    pub fn fence(self) {
        if self == Self::Streaming {
            fence();
        }
    }
}

#[inline]
fn plain(words: &mut [u64], first: u64, step: u64) {
    let mut raw = first;
    for word in words {
        *word = raw;
        raw = raw.wrapping_add(step);
    }
}

/// Runs the loop of `plain`, compiled for the widest registers.
#[cfg(target_arch = "x86_64")]
#[inline]
fn wide(words: &mut [u64], first: u64, step: u64) {
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

/// Stores past the caches, 64 bytes at a time where the CPU can, else 8.
#[cfg(target_arch = "x86_64")]
#[inline]
fn stream(words: &mut [u64], first: u64, step: u64) {
    if is_x86_feature_detected!("avx512f") && words.as_ptr().align_offset(64) == 0 {
        // SAFETY: the CPU has AVX-512F, and the words begin at a multiple of 64 bytes.
        unsafe { stream_avx512(words, first, step) }
    } else {
        stream_words(words, first, step);
    }
}

/// # Safety
/// `words` is aligned to 64 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(words: &mut [u64], first: u64, step: u64) {
    use std::arch::x86_64::*;
    let at = |i: u64| first.wrapping_add(i.wrapping_mul(step)) as i64;
    let mut raws = _mm512_setr_epi64(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
    let next = _mm512_set1_epi64(step.wrapping_mul(8) as i64);
    for line in words.chunks_exact_mut(8) {
        // SAFETY: the line has 64 writable bytes, and is aligned to 64 bytes, as the first one is.
        unsafe { _mm512_stream_si512(line.as_mut_ptr().cast(), raws) };
        raws = _mm512_add_epi64(raws, next);
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn stream_words(words: &mut [u64], first: u64, step: u64) {
    use std::arch::x86_64::_mm_stream_si64;
    let mut raw = first;
    for word in words {
        // SAFETY: a word is 8 aligned, writable bytes; SSE2 is part of x86-64.
        unsafe { _mm_stream_si64((word as *mut u64).cast(), raw as i64) };
        raw = raw.wrapping_add(step);
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn fence() {}

#[cfg(not(target_arch = "x86_64"))]
use plain as wide;
#[cfg(not(target_arch = "x86_64"))]
use plain as stream;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_stores_stores_the_same() {
        let mut memory = vec![0u64; 512 + 8];
        let aligned = memory.as_ptr().align_offset(64);
        // Aligned to 64 bytes, and not aligned.
        for skip in [aligned, aligned + 1] {
            let words = &mut memory[skip..skip + 504];
            for stores in Stores::ALL {
                words.fill(0);
                stores.fill(words, 0x7ff, 1 << 12);
                let right = words.iter().zip(0..).all(|(word, i)| *word == 0x7ff + (i << 12));
                assert!(right, "{stores:?}");
            }
        }
    }
}
