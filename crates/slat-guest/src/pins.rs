//! Pins: ranges of guest memory whose pages keep their place and kind.
//!
//! *Invariant*: once a pin exists, no thread changes the memory that it covers. A thread that
//! changes memory in place looks for pins inside the guest's tables, and completes the change
//! before it leaves them. A thread that pins adds the range, then waits until all threads that were
//! inside have left.

use crate::sync::{AtomicU64, Lock, Ordering, agreed};
use alloc::vec::Vec;
use core::fmt;
use slat::{Gpa, GpaRange};

#[derive(Debug)]
pub(crate) struct Pins {
    /// The pinned ranges, each with its own number.
    ranges: Lock<Vec<(u64, GpaRange)>>,
    count: AtomicU64,
    next: AtomicU64,
}

impl Pins {
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { ranges: Lock::new(Vec::new()), count: zero(), next: zero() }
    }

    pub fn add(&self, range: GpaRange) -> PagePin<'_> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.ranges.lock().push((number, range));
        self.count.fetch_add(1, Ordering::SeqCst);
        agreed();
        PagePin { pins: self, number, range }
    }

    fn some(&self) -> bool {
        agreed();
        self.count.load(Ordering::SeqCst) != 0
    }

    pub fn overlap(&self, range: &GpaRange) -> bool {
        let overlaps = |pin: &GpaRange| pin.start() < range.end() && range.start() < pin.end();
        self.some() && self.ranges.lock().iter().any(|(_, pin)| overlaps(pin))
    }

    /// Returns the parts of `range` that are not pinned, in ascending order.
    pub fn free(&self, range: GpaRange) -> Vec<GpaRange> {
        if !self.some() {
            return Vec::from([range]);
        }
        let mut pinned: Vec<_> = self.ranges.lock().iter().map(|(_, pin)| *pin).collect();
        pinned.sort_unstable_by_key(|pin| pin.start());
        let mut start = range.start();
        let mut free = Vec::new();
        let mut add = |start: Gpa, end: Gpa| {
            let bytes = end.min(range.end()).0.saturating_sub(start.0);
            free.extend(GpaRange::new(start, bytes));
        };
        for pin in pinned {
            add(start, pin.start());
            start = start.max(pin.end());
        }
        add(start, range.end());
        free
    }
}

/// A pin: its pages keep their place and kind until it is dropped.
#[must_use = "dropped, the pages are pinned no more"]
pub struct PagePin<'g> {
    pins: &'g Pins,
    number: u64,
    range: GpaRange,
}

impl PagePin<'_> {
    /// Returns the guest addresses of the pages.
    pub const fn range(&self) -> GpaRange {
        self.range
    }
}

impl fmt::Debug for PagePin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pinned").field(&self.range).finish()
    }
}

impl Drop for PagePin<'_> {
    fn drop(&mut self) {
        self.pins.ranges.lock().retain(|(number, _)| *number != self.number);
        self.pins.count.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> GpaRange {
        GpaRange::new(Gpa(start << 12), (end - start) << 12).unwrap()
    }

    #[test]
    fn what_is_free_is_what_no_pin_has() {
        let pins = Pins::new();
        assert_eq!(pins.free(range(0, 9)), [range(0, 9)]);
        let (_low, middle) = (pins.add(range(2, 4)), pins.add(range(3, 6)));
        assert_eq!(pins.free(range(0, 9)), [range(0, 2), range(6, 9)]);
        assert_eq!(pins.free(range(2, 5)), []);
        assert!(pins.overlap(&range(5, 9)) && !pins.overlap(&range(6, 9)));
        drop(middle);
        assert_eq!(pins.free(range(0, 9)), [range(0, 2), range(4, 9)]);
    }
}
