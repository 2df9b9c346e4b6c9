//! Exact costs of operations, which are the same on every machine.

use core::ops::AddAssign;

/// Counts of what operations did to the tables.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OpCounts {
    /// Entries that walks loaded, including tables under construction.
    pub entries_read: u64,
    /// Entries that were stored or exchanged, including tables under construction.
    pub entries_written: u64,
    /// Table pages that were filled and linked.
    pub tables_built: u64,
    /// Invalidations that operations executed inside (not those that they owe).
    pub invalidations: u64,
    /// Live entries that were invalid to hardware until such an invalidation had completed. A vCPU
    /// that uses one meanwhile faults.
    pub broken: u64,
    /// Bytes of guest memory whose leaves changed.
    pub bytes_changed: u64,
}

impl OpCounts {
    /// No cost.
    pub const NONE: Self = Self {
        entries_read: 0,
        entries_written: 0,
        tables_built: 0,
        invalidations: 0,
        broken: 0,
        bytes_changed: 0,
    };
}

impl AddAssign for OpCounts {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        self.entries_read += other.entries_read;
        self.entries_written += other.entries_written;
        self.tables_built += other.tables_built;
        self.invalidations += other.invalidations;
        self.broken += other.broken;
        self.bytes_changed += other.bytes_changed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_added_one_by_one() {
        let of = |first| OpCounts {
            entries_read: first,
            entries_written: first + 1,
            tables_built: first + 2,
            invalidations: first + 3,
            broken: first + 4,
            bytes_changed: first + 5,
        };
        let mut sum = of(10);
        sum += of(100);
        let right = [110, 112, 114, 116, 118, 120];
        let OpCounts { entries_read, entries_written, tables_built, .. } = sum;
        let OpCounts { invalidations, broken, bytes_changed, .. } = sum;
        let found = [entries_read, entries_written, tables_built];
        assert_eq!([found, [invalidations, broken, bytes_changed]].concat(), right);
    }
}
