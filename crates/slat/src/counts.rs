//! Exact costs of an operation: the same on every machine.

use core::ops::AddAssign;

/// What an operation did to the tables, counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Slots loaded by a walk, tables under construction included.
    pub slots_read: u64,
    /// Slots stored or exchanged, tables under construction included.
    pub slots_written: u64,
    /// Table pages filled and linked.
    pub tables_built: u64,
    /// Invalidations executed inside the operation (those still owed are in its
    /// [`Shootdown`](crate::Shootdown)).
    pub invalidations: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.slots_read += other.slots_read;
        self.slots_written += other.slots_written;
        self.tables_built += other.tables_built;
        self.invalidations += other.invalidations;
    }
}
