//! What the ageing scans of one guest have to know of each other.

use crate::sync::{AtomicU64, Ordering, Turn};

/// State that the ageing scans of one guest share.
///
/// *Invariant*: a scan that clears tables has the turn. While no hint was given since the last
/// exact scan of all of the guest, a table without its mark has no accessed leaf below.
#[derive(Debug)]
pub(crate) struct Scans {
    /// Tables may have been marked as not accessed while walk caches held them.
    hinted: AtomicU64,
    pub turn: Turn,
}

impl Scans {
    pub fn new() -> Self {
        Self { hinted: AtomicU64::new(0), turn: Turn::new() }
    }

    pub fn hinted(&self) -> bool {
        self.hinted.load(Ordering::Acquire) != 0
    }

    /// Called before a scan clears its first table without an invalidation.
    pub fn hint(&self) {
        self.hinted.store(1, Ordering::Release);
    }

    /// Called when an exact scan has covered all of the guest, and reads no leaf any more.
    pub fn forget_hints(&self) {
        self.hinted.store(0, Ordering::Release);
    }
}
