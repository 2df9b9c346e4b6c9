//! What one guest's tables have to remember of owners of addresses.

use crate::sync::{AtomicU64, Ordering, agreed};

/// Whether any address may have an owner, or have had one.
#[derive(Debug)]
pub(crate) struct Owners(AtomicU64);

impl Owners {
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Called before a thread walks to the entry that gets an owner.
    pub fn note(&self) {
        self.0.store(1, Ordering::Relaxed);
        agreed();
    }

    /// The caller has exclusive access to the tables, so that all calls of [`Owners::note`] precede
    /// this one; or it has made a table unreachable and passed a fence (`sync::agreed`) since: then
    /// a thread whose call it does not see does not find the table.
    pub fn are_known(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}
