//! The global generation, and the ranges of recent invalidations.

use slat::Invalidation;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of invalidations that are recorded. A CPU that missed more than half of them flushes its
/// TLB.
const RECENT: u64 = 64;

/// Every window reads the generation, so its cache line holds nothing that is written more often.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Log {
    /// Number of invalidations that have begun.
    now: AtomicU64,
    recent: Box<[Record]>,
    order: Mutex<()>,
}

#[derive(Default, Debug)]
struct Record {
    vmid: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            now: AtomicU64::new(0),
            recent: (0..RECENT).map(|_| Record::default()).collect(),
            order: Mutex::new(()),
        }
    }
}

impl Log {
    /// Acquire: a thread that sees the generation also sees its records, and the changes of tables
    /// before it.
    #[inline(always)]
    pub fn now(&self) -> u64 {
        self.now.load(Ordering::Acquire)
    }

    fn record_of(&self, generation: u64) -> &Record {
        &self.recent[(generation % RECENT) as usize]
    }

    /// Begins an invalidation.
    pub fn record(&self, what: &Invalidation) {
        let bounds = what.range.map_or((0, u64::MAX), |range| (range.start().0, range.end().0));
        let _order = self.order.lock().unwrap_or_else(|poison| poison.into_inner());
        let next = self.now.load(Ordering::Relaxed) + 1;
        let record = self.record_of(next);
        // Release: a thread that reads the new record instead of the old one also finds that the
        // generation has reached `next - 1`.
        record.vmid.store(what.vmid.0.into(), Ordering::Release);
        record.start.store(bounds.0, Ordering::Release);
        record.end.store(bounds.1, Ordering::Release);
        self.now.store(next, Ordering::Release);
    }

    /// Visits VMID, start and end of each invalidation after `seen` and up to `now`. Returns
    /// `false` if some records are missing: the visited ones may be wrong then, and are not all.
    #[must_use]
    pub fn since(&self, seen: u64, now: u64, mut visit: impl FnMut(u64, u64, u64)) -> bool {
        if now - seen > RECENT / 2 {
            return false;
        }
        for generation in seen + 1..=now {
            let record = self.record_of(generation);
            let word = |word: &AtomicU64| word.load(Ordering::Acquire);
            visit(word(&record.vmid), word(&record.start), word(&record.end));
        }
        // The first of these records is overwritten by generation `seen + 1 + RECENT`, by a thread
        // that has seen the generation before it.
        self.now() < seen + RECENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat::{Gpa, GpaRange, Vmid};

    fn invalidation(page: u64) -> Invalidation {
        let range = GpaRange::new(Gpa(page << 12), 0x1000).ok();
        Invalidation { vmid: Vmid(1), range, leaf: None, tables: false }
    }

    #[test]
    fn missed_invalidations_are_reported_in_order_unless_too_many() {
        let log = Log::default();
        (0..5).for_each(|page| log.record(&invalidation(page)));
        let mut told = Vec::new();
        assert!(log.since(2, 5, |_, start, end| told.push((start, end))));
        assert_eq!(told, [(0x2000, 0x3000), (0x3000, 0x4000), (0x4000, 0x5000)]);
        (0..RECENT).for_each(|page| log.record(&invalidation(page)));
        assert!(!log.since(5, log.now(), |_, _, _| ()));
    }

    #[test]
    fn a_record_that_was_overwritten_meanwhile_is_not_believed() {
        let log = Log::default();
        log.record(&invalidation(0));
        let overtaken = |_, _, _| (0..RECENT).for_each(|page| log.record(&invalidation(page)));
        assert!(!log.since(0, 1, overtaken));
    }
}
