//! What one guest's tables have to remember of owners of addresses.

use crate::sync::{AtomicU64, Ordering};

/// Whether any address may have an owner, or have had one.
#[derive(Debug)]
pub(crate) struct Owners(AtomicU64);

impl Owners {
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub fn note(&self) {
        self.0.store(1, Ordering::Relaxed);
    }

    /// The caller has exclusive access to the tables, so all calls of [`Owners::note`] precede this
    /// one.
    pub fn are_known(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}
