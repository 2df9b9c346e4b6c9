//! Ageing scans.

use super::super::hardware::{Hardware, Run, Table, Tree};
use super::dirty::set;
use super::{ALL, VMID, World, floor, invalidations};
use slat::{AgeBitmaps, AgeCounts, AgeOptions, ChangeError, GpaRange, Invalidation, TableBits};

/// How to scan, and the content of the bitmaps before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scan {
    pub how: AgeOptions,
    /// The value of every word of the bitmaps.
    pub seed: u64,
    /// The number of words that a bitmap lacks.
    pub missing: (usize, usize),
}

impl<H: Hardware> World<'_, H> {
    pub fn age(&mut self, range: GpaRange, scan: Scan) {
        let Scan { how, seed, missing } = scan;
        let skip = if H::TABLES_COUNT { how.table_bits } else { TableBits::Ignored };
        let before = self.begin();
        let was = vec![seed; Self::words(&range, missing.0)];
        let nobody = vec![0; Self::words(&range, missing.1)];
        let (mut young, mut unanswered) = (was.clone(), nobody.clone());
        let pending = self.pending;
        let out = self.run(|guard| {
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            guard.age(range, &mut ages, how)
        });
        assert_eq!(unanswered, nobody, "nobody holds an entry");
        let (start, end) = (range.start().0, range.end().0);
        let mut legal = self.bitmap_errors(&before, &range, false, was.len().min(nobody.len()));
        if legal.is_empty() && !self.hardware.records_accessed() {
            legal.push(ChangeError::NotRecorded);
        }
        if !legal.is_empty() {
            assert_eq!(young, was);
            self.refused(&before, &out, start, &legal);
            return;
        }
        let page = |at: u64| ((at - start) >> H::PAGE) as usize;
        let mut expected = was.clone();
        {
            let mut flat = self.flat.borrow_mut();
            let used = flat.within(start, end).filter(|(_, piece)| piece.attributes.accessed);
            let used: Vec<_> = used.map(|(at, piece)| (at, piece.end)).collect();
            let pages = used.iter().flat_map(|&(at, end)| page(at)..page(end));
            set(&mut expected, pages);
            if how.clear {
                // A block that the range covers in part is only tested.
                let (from, to) = whole(&before, start, end);
                if from < to {
                    let leaves = flat.within(from, to);
                    leaves.for_each(|(_, piece)| piece.attributes.accessed = false);
                }
            }
        }
        assert!(young == expected, "exactly the pages that were used");
        let count =
            |bits: &[u64]| bits.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        let new = count(&young) - count(&was);
        assert_eq!(out.result, Ok(AgeCounts { young: new, unanswered: 0 }));
        assert_eq!(out.owed, None);

        let mut expected = Vec::new();
        if how.clear && skip == TableBits::Exact && notes(&before, start, end) {
            expected.push(Invalidation { range: Some(range), ..ALL });
        }
        if how.flush_tlb && how.clear {
            let range = Some(range);
            expected.push(Invalidation { vmid: VMID, range, leaf: None, tables: false });
        }
        if pending && let Some(first) = expected.first_mut() {
            *first = ALL;
        }
        assert_eq!(invalidations(&out.events), expected, "invalidations inside");
        if how.clear && how.flush_tlb && !self.pending {
            let tree = self.tree();
            self.machine(|machine| machine.check_old(&tree, start, end));
        }
        if skip == TableBits::Ignored {
            let (from, to) = whole(&before, start, end);
            let old = before.within(from, to.max(from)).filter(|run| run.leaf.own.accessed);
            let old: Vec<_> = old.filter(|_| how.clear).collect();
            let leaves = old.iter().map(Run::leaves).sum::<u64>();
            assert_eq!(out.counts.entries_written, leaves, "a store a leaf");
            assert_eq!(out.counts.bytes_changed, old.iter().map(Run::bytes).sum::<u64>());
        }
        self.settle(&out.tree);
    }
}

/// Returns whether an exact scan finds tables that it has to clear.
fn notes(before: &Tree, start: u64, end: u64) -> bool {
    let whole: Vec<_> = before.tables.values().filter(|table| table.within(start, end)).collect();
    let ruled_out = |hidden: &&&Table| {
        whole.iter().any(|table| {
            !table.accessed && table.height > hidden.height && hidden.within(table.start, table.end)
        })
    };
    whole.iter().filter(|table| table.accessed).any(|table| !ruled_out(&table))
}

/// Returns the part of the range that cuts no leaf.
fn whole(before: &Tree, start: u64, end: u64) -> (u64, u64) {
    let up = |at: u64| match before.at(at) {
        Some(run) if !at.is_multiple_of(run.size) => floor(at, run.size) + run.size,
        _ => at,
    };
    let down = |at: u64| before.at(at).map_or(at, |run| floor(at, run.size));
    (up(start), down(end))
}
