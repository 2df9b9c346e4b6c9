//! Hardware that logs the addresses of leaves that it marks as dirty: Intel's page modification
//! log, Arm's FEAT_HDBSS. Only a walk that makes a leaf dirty logs it. If the buffer is full, the
//! walk does not mark, and the vCPU exits.

/// Addresses and levels in the order in which they were marked.
#[derive(Debug)]
pub(crate) struct MarkedEntries {
    pub entries: Vec<(u64, i8)>,
    pub room: usize,
}

impl MarkedEntries {
    pub fn is_full(&self) -> bool {
        self.entries.len() >= self.room
    }

    pub fn push(&mut self, gpa: u64, level: i8) {
        self.entries.push((gpa, level));
    }
}
