//! Compares the leaf entries of two sets of tables bit by bit.

use super::known::{Difference, MADE_YOUNG, PROTECTED_IN_HULL, SOFTWARE_BITS};
use super::work::Op;
use crate::arena::Arena;
use crate::linux::{Leaf, Run};
use anyhow::bail;
use slat::format::Kind;
use slat::{Format, GpaRange, Hpa, Platform, Tables};

/// Returns every leaf in `range`, read from the raw tables.
pub fn of<F: Format>(tables: &Tables<'_, F, Arena>, arena: &Arena, range: GpaRange) -> Vec<Run> {
    let geometry = tables.geometry();
    let mut found = Vec::new();
    let root = (tables.root(), geometry.root_entries);
    table::<F>(arena, root, geometry.root_level, 0, range, &mut found);
    found
}

fn table<F: Format>(
    arena: &Arena,
    (hpa, ptes): (Hpa, usize),
    level: u8,
    base: u64,
    range: GpaRange,
    found: &mut Vec<Run>,
) {
    let size = 1u64 << F::shift(level);
    for index in 0..ptes {
        let gpa = base + index as u64 * size;
        if gpa + size <= range.start().0 || gpa >= range.end().0 {
            continue;
        }
        // SAFETY: the index is below the table's number of entries, and the table stays while the
        // caller, which has the only access, borrows its guest's tables.
        let raw = unsafe { arena.entries(hpa).add(index).as_ref() }.load();
        match F::kind(raw, level) {
            Kind::Leaf => push(found, Leaf { gpa, size, raw }),
            Kind::Table => {
                let child = (F::table_address(raw), F::entries(level - 1));
                table::<F>(arena, child, level - 1, gpa, range, found);
            }
            _ => {}
        }
    }
}

fn push(runs: &mut Vec<Run>, leaf: Leaf) {
    if let Some(Run { first, count }) = runs.last_mut() {
        let ahead = *count * first.size;
        let next = Leaf { gpa: first.gpa + ahead, size: first.size, raw: first.raw + ahead };
        if next == leaf {
            *count += 1;
            return;
        }
    }
    runs.push(Run { first: leaf, count: 1 });
}

/// An allowed difference between leaf entries.
pub struct Allowance {
    /// The bits that may differ.
    pub bits: u64,
    /// Returns whether the difference is allowed, given the operation, and these bits of the
    /// engine's entry and of the other.
    pub right: fn(Op, u64, u64) -> bool,
    /// Its name, and the reason why it is right.
    pub known: Difference,
}

/// `S2AP[1]`, AF, and the software bits of the engine: see the manual's D8.3.2.
pub const WRITE: u64 = 1 << 7;
pub const ACCESSED: u64 = 1 << 10;
pub const SOFTWARE: u64 = 0b1111 << 55;

/// All allowed differences.
pub const ALLOWED: [Allowance; 3] = [
    Allowance {
        bits: WRITE,
        right: |op, ours, theirs| {
            matches!(op, Op::Clear(word) if word != u64::MAX) && ours != 0 && theirs == 0
        },
        known: PROTECTED_IN_HULL,
    },
    Allowance {
        bits: ACCESSED,
        right: |op, ours, theirs| op.splits() && ours == 0 && theirs != 0,
        known: MADE_YOUNG,
    },
    Allowance { bits: SOFTWARE, right: |_, _, theirs| theirs == 0, known: SOFTWARE_BITS },
];

/// Number of leaves that were compared, and how many differed in each allowed way.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LeafComparison {
    /// All leaves.
    pub leaves: u64,
    /// Leaves with a difference, in the order of [`ALLOWED`].
    pub differing: [u64; ALLOWED.len()],
}

/// Compares the entries leaf by leaf.
///
/// # Errors
/// The first leaf that one side lacks, or that differs in another way than [`ALLOWED`] has.
pub fn compare(
    ours: &[Run],
    theirs: &[Run],
    after: Op,
    whose: &str,
) -> anyhow::Result<LeafComparison> {
    let mut compared = LeafComparison::default();
    let (mut ours, mut theirs) = (ours.iter().copied(), theirs.iter().copied());
    let (mut our, mut their) = (ours.next(), theirs.next());
    loop {
        let (Some(a), Some(b)) = (our, their) else {
            if our.is_none() && their.is_none() {
                return Ok(compared);
            }
            let (who, run) = if let Some(run) = our {
                ("the engine", run)
            } else {
                (whose, their.unwrap_or_else(|| unreachable!()))
            };
            bail!("only {who} maps {:#x}, by {:#x}", run.first.gpa, run.first.raw);
        };
        let (x, y) = (a.first, b.first);
        if (x.gpa, x.size) != (y.gpa, y.size) {
            bail!(
                "the engine has a leaf of {:#x} bytes at {:#x}, {whose} one of {:#x} at {:#x}",
                x.size,
                x.gpa,
                y.size,
                y.gpa
            );
        }
        let count = a.count.min(b.count);
        let differing = x.raw ^ y.raw;
        let mut left = differing;
        for (allowed, seen) in ALLOWED.iter().zip(&mut compared.differing) {
            let (ours, theirs) = (x.raw & allowed.bits, y.raw & allowed.bits);
            if ours != theirs && (allowed.right)(after, ours, theirs) {
                left &= !allowed.bits;
                *seen += count;
            }
        }
        if left != 0 {
            bail!(
                "{:#x}: the engine's descriptor is {:#x}, that of {whose} {:#x}; {left:#x} should \
                 not differ",
                x.gpa,
                x.raw,
                y.raw
            );
        }
        compared.leaves += count;
        our = rest(a, count).or_else(|| ours.next());
        their = rest(b, count).or_else(|| theirs.next());
    }
}

/// Returns the rest of a run after `count` of its leaves.
pub fn rest(run: Run, count: u64) -> Option<Run> {
    let ahead = count * run.first.size;
    let first = Leaf { gpa: run.first.gpa + ahead, raw: run.first.raw + ahead, ..run.first };
    (run.count > count).then(|| Run { first, count: run.count - count })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn run(gpa: u64, raw: u64, count: u64) -> Run {
        Run { first: Leaf { gpa, size: PAGE, raw }, count }
    }

    #[test]
    fn leaves_are_compared_one_by_one_whatever_their_runs() {
        let whole = [run(0, 0x8000_03ff, 4)];
        let parts =
            [run(0, 0x8000_03ff, 1), run(PAGE, 0x8000_17ff, 2), run(3 * PAGE, 0x8000_33ff, 1)];
        let compared = compare(&whole, &parts, Op::Split, "linux").unwrap();
        assert_eq!((compared.leaves, compared.differing), (4, [0, 2, 0]));
        let text = compare(&whole, &parts, Op::Protect, "linux").unwrap_err().to_string();
        assert!(text.contains("0x1000") && text.contains("0x400 should not differ"), "{text}");
    }

    #[test]
    fn a_leaf_that_one_lacks_or_has_in_another_size_is_an_error() {
        let two = [run(0, 3, 2)];
        let text = compare(&two, &[run(0, 3, 1)], Op::Split, "linux").unwrap_err().to_string();
        assert!(text.contains("only the engine maps 0x1000"), "{text}");
        let text = compare(&[], &two, Op::Split, "linux").unwrap_err().to_string();
        assert!(text.contains("only linux maps 0x0"), "{text}");
        let block = Run { first: Leaf { gpa: 0, size: 2 * PAGE, raw: 3 }, count: 1 };
        assert!(compare(&[block], &two, Op::Split, "linux").is_err());
        // A difference of addresses is never allowed.
        assert!(compare(&[run(0, PAGE | 3, 1)], &[run(0, 3, 1)], Op::Split, "linux").is_err());
    }

    #[test]
    fn every_difference_that_is_right_has_its_reason() {
        for allowed in ALLOWED {
            assert!(allowed.known.reason.len() > 20 && allowed.bits != 0, "{}", allowed.known.name);
        }
    }
}
