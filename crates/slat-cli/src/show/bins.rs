//! Divides a part of the address space into bins of equal size. A bin is a character of a map, or a
//! column of a picture.

use super::dump::{Dump, Run};

/// How much of a bin has a property.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// None of it.
    #[default]
    Nothing,
    /// Some of it.
    Some,
    /// All of it.
    All,
}

impl Part {
    fn and(self, on: bool, first: bool) -> Self {
        match (self, on, first) {
            (_, true, true) | (Self::All, true, _) => Self::All,
            (_, false, true) | (Self::Nothing, false, _) => Self::Nothing,
            _ => Self::Some,
        }
    }
}

/// The leaves of a bin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bin {
    /// How much of the bin is mapped.
    pub mapped: Part,
    /// Size of the smallest leaf that overlaps the bin, in bytes.
    pub least: u64,
    /// Size of the largest leaf that overlaps the bin, in bytes.
    pub most: u64,
    /// How much of the mapped memory is writable.
    pub write: Part,
    /// How much of the mapped memory is executable, by user programs, by the kernel or by both.
    pub execute: Part,
    /// How much of the mapped memory is marked accessed.
    pub accessed: Part,
    /// How much of the mapped memory is marked dirty, if that is known.
    pub dirty: Option<Part>,
    /// Bytes of the bin that are mapped.
    bytes: u64,
}

impl Bin {
    fn add(&mut self, run: &Run, bytes: u64) {
        let first = self.bytes == 0;
        self.bytes += bytes;
        self.least = if first { run.size } else { self.least.min(run.size) };
        self.most = self.most.max(run.size);
        self.write = self.write.and(run.rights.write, first);
        self.execute = self.execute.and(run.rights.execute != '-', first);
        self.accessed = self.accessed.and(run.accessed, first);
        if let Some(dirty) = run.dirty {
            self.dirty = Some(self.dirty.unwrap_or_default().and(dirty, first));
        }
    }
}

/// Returns `count` bins of `unit` bytes each, the first of which begins at `start`.
pub fn bins(dump: &Dump, start: u64, unit: u64, count: usize) -> Vec<Bin> {
    let end = start.saturating_add(unit.saturating_mul(count as u64));
    let mut bins = vec![Bin::default(); count];
    let first = dump.leaves.partition_point(|run| run.end() <= start);
    for run in dump.leaves[first..].iter().take_while(|run| run.gpa < end) {
        let (from, to) = (run.gpa.max(start), run.end().min(end));
        let mut at = from;
        while at < to {
            let place = (at - start) / unit;
            let next = (start + (place + 1) * unit).min(to);
            bins[place as usize].add(run, next - at);
            at = next;
        }
    }
    for bin in &mut bins {
        bin.mapped = match bin.bytes {
            0 => Part::Nothing,
            bytes if bytes == unit => Part::All,
            _ => Part::Some,
        };
    }
    bins
}

/// Divides the address space into parts of `bytes` each, and returns the starts of those that a
/// leaf overlaps.
pub fn parts(dump: &Dump, bytes: u64) -> Vec<u64> {
    let mut starts: Vec<u64> = Vec::new();
    for run in &dump.leaves {
        let (mut at, end) = (run.gpa - run.gpa % bytes, run.end());
        if let Some(last) = starts.last() {
            at = at.max(last + bytes);
        }
        while at < end {
            starts.push(at);
            at += bytes;
        }
    }
    starts
}

/// Returns the number of such parts without listing them.
pub fn count_parts(dump: &Dump, bytes: u64) -> u64 {
    let mut next = 0;
    let mut count = 0;
    for run in &dump.leaves {
        let (from, to) = ((run.gpa / bytes).max(next), run.end().div_ceil(bytes));
        count += to.saturating_sub(from);
        next = next.max(to);
    }
    count
}

#[cfg(test)]
mod tests {
    use super::super::dump::tests::run;
    use super::*;

    fn dump(runs: &[Run]) -> Dump {
        Dump { leaves: runs.to_vec(), ..Dump::new("ept", 4096) }
    }

    const M: u64 = 1 << 20;

    #[test]
    fn a_bin_says_what_all_of_it_has_and_what_some_of_it_has() {
        let dump = dump(&[
            run(0, 2 * M, 2, "rwx", "AD"),
            run(4 * M, 4096, 256, "r-x", "A"),
            run(5 * M, 4096, 1, "rwx", "AD"),
            run(64 * M, 32 * M, 1, "r", ""),
        ]);
        let bins = bins(&dump, 0, 2 * M, 64);
        let all = |bin: &Bin| (bin.mapped, bin.least, bin.most, bin.write, bin.dirty);
        assert_eq!(all(&bins[0]), (Part::All, 2 * M, 2 * M, Part::All, Some(Part::All)));
        assert_eq!(all(&bins[2]), (Part::Some, 4096, 4096, Part::Some, Some(Part::Some)));
        assert_eq!((bins[2].accessed, bins[2].execute), (Part::All, Part::All));
        assert_eq!(bins[3], Bin::default());
        assert_eq!(bins[47].mapped, Part::All);
        assert_eq!((bins[40].most, bins[40].accessed), (32 * M, Part::Nothing));
        assert_eq!(bins[48], Bin::default());
    }

    #[test]
    fn bins_begin_and_end_inside_leaves() {
        let bins = bins(&dump(&[run(0, 1 << 30, 1, "rwx", "A")]), 512 * M, 256 * M, 3);
        let mapped: Vec<_> = bins.iter().map(|bin| bin.mapped).collect();
        assert_eq!(mapped, [Part::All, Part::All, Part::Nothing]);
    }

    #[test]
    fn parts_without_a_leaf_are_left_out() {
        let dump = dump(&[
            run(0, 4096, 1, "r", ""),
            run(8192, 4096, 1, "r", ""),
            run(3 << 30, 1 << 30, 2, "r", ""),
        ]);
        let starts = parts(&dump, 1 << 30);
        assert_eq!(starts, [0, 3 << 30, 4 << 30]);
        assert_eq!(count_parts(&dump, 1 << 30), 3);
        assert_eq!(count_parts(&dump, 4096), 2 + (2 << 18));
    }
}
