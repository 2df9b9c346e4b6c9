//! Tokens of threads that have no reader slot.

use crate::format::Format;
use crate::readers::READERS_TOKENS;
use crate::sync::{AtomicU64, Ordering};

/// The next token of the guest, for threads without a reader slot and for calls that take one for
/// several entries. It is in another cache line than the words that every walk reads.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Tokens(AtomicU64);

impl Tokens {
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Returns the value to leave in entries that one call reserves or empties; no other call ever
    /// leaves the same.
    pub fn next<F: Format>(&self) -> u64 {
        let token = self.0.fetch_add(1, Ordering::Relaxed);
        F::reserved(READERS_TOKENS | token & (READERS_TOKENS - 1))
    }
}
