//! Memory that hardware and a program share, at its own physical address.

use super::Place;

/// So many bytes, aligned to 2 MiB; a page may be aligned to its own size.
pub struct Memory<const BYTES: usize>(Place<BYTES>);

impl<const BYTES: usize> Memory<BYTES> {
    pub const fn new() -> Self {
        Self(Place::new())
    }

    /// Its address. Where firmware lends memory, the first call is the first CPU's.
    pub fn hpa(&self) -> u64 {
        self.0.hpa()
    }

    /// The word at a place.
    fn word(&self, at: u64) -> *mut u64 {
        assert!(at.is_multiple_of(8) && at < BYTES as u64);
        (self.hpa() + at) as *mut u64
    }

    #[cfg(target_arch = "x86_64")]
    pub fn read(&self, at: u64) -> u64 {
        // SAFETY: aligned and inside; hardware may change it at any time.
        unsafe { self.word(at).read_volatile() }
    }

    pub fn write(&self, at: u64, value: u64) {
        // SAFETY: aligned and inside, and no reference to it exists.
        unsafe { self.word(at).write_volatile(value) }
    }

    /// Fills it with zeroes.
    pub fn clear(&self) {
        (0..BYTES as u64).step_by(8).for_each(|at| self.write(at, 0));
    }
}
