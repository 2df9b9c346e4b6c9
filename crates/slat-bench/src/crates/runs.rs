//! The leaves of tables, in a form in which those of two tables can be compared.

use crate::crates::steps;

/// Leaves of one size and kind that follow each other in the guest and in the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its first guest address.
    pub gpa: u64,
    /// Its first host address.
    pub hpa: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes of each leaf.
    pub leaf: u64,
    /// Whether it may be written.
    pub writable: bool,
}

/// Appends `next`, or merges it with the last run if it continues that one.
pub(crate) fn push(runs: &mut Vec<Run>, next: Run) {
    match runs.last_mut() {
        Some(last)
            if last.gpa + last.bytes == next.gpa
                && last.hpa + last.bytes == next.hpa
                && (last.leaf, last.writable) == (next.leaf, next.writable) =>
        {
            last.bytes += next.bytes;
        }
        _ => runs.push(next),
    }
}

/// Returns the runs of a range, for a crate that can only look up single addresses: the host
/// address, the size of the leaf, and whether it is writable.
pub(crate) fn by_queries(
    gpa: u64,
    bytes: u64,
    query: impl Fn(u64) -> Option<(u64, u64, bool)>,
) -> Vec<Run> {
    let mut runs = Vec::new();
    for (gpa, _) in steps(gpa, bytes, 4096) {
        if let Some((hpa, leaf, writable)) = query(gpa) {
            push(&mut runs, Run { gpa, hpa, bytes: 4096, leaf, writable });
        }
    }
    runs
}

/// Refuses a range that begins or ends within a leaf, for a crate that would panic or go beyond
/// the range. `query` gives the size of the leaf at an address.
pub(crate) fn whole_leaves(
    gpa: u64,
    bytes: u64,
    query: impl Fn(u64) -> Option<u64>,
) -> Result<(), String> {
    let last = gpa + bytes - 4096;
    let cut = query(gpa).is_some_and(|leaf| !gpa.is_multiple_of(leaf))
        || query(last).is_some_and(|leaf| !(gpa + bytes).is_multiple_of(leaf));
    if cut { Err(format!("{bytes:#x} bytes at {gpa:#x} are a part of a block")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_kind_are_merged_and_others_are_not() {
        let query = |gpa| match gpa {
            0x1000 | 0x2000 => Some((0x8000 + gpa, 4096, true)),
            0x3000 => Some((0x8000 + gpa, 4096, false)),
            0x4000 => Some((0, 4096, false)),
            _ => None,
        };
        let run = |gpa, hpa, bytes, writable| Run { gpa, hpa, bytes, leaf: 4096, writable };
        assert_eq!(
            by_queries(0, 0x6000, query),
            [
                run(0x1000, 0x9000, 0x2000, true),
                run(0x3000, 0xb000, 0x1000, false),
                run(0x4000, 0, 0x1000, false),
            ]
        );
    }

    #[test]
    fn a_range_that_cuts_a_leaf_is_refused() {
        let query = |_| Some(2 << 20);
        assert!(whole_leaves(0, 2 << 20, query).is_ok());
        assert!(whole_leaves(0x1000, (2 << 20) - 0x1000, query).is_err());
        assert!(whole_leaves(0, (2 << 20) - 0x1000, query).is_err());
        assert!(whole_leaves(0, 0x1000, |_| None).is_ok());
    }
}
