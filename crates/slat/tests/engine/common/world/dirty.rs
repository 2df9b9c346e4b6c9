//! Harvests of dirty state.

use super::super::hardware::{Hardware, Run};
use super::{ALL, World, invalidations, owes};
use slat::GpaRange;

/// Sets bits of a bitmap; returns how many are new.
pub fn set(bits: &mut [u64], pages: impl Iterator<Item = usize>) -> u64 {
    let mut new = 0;
    for page in pages {
        new += u64::from(bits[page / 64] >> (page % 64) & 1 == 0);
        bits[page / 64] |= 1 << (page % 64);
    }
    new
}

impl<H: Hardware> World<'_, H> {
    /// Enough words for the range, within reason, less `missing`.
    pub fn words(range: &GpaRange, missing: usize) -> usize {
        let needed = (range.size() >> H::PAGE).div_ceil(64) as usize;
        needed.min(1 << 14).saturating_sub(missing)
    }

    pub fn harvest(&mut self, range: GpaRange, missing: usize, seed: u64) {
        let before = self.begin();
        let was = vec![seed; Self::words(&range, missing)];
        let mut bitmap = was.clone();
        let (platform, hardware, pending) = (self.platform, self.hardware, self.pending);
        let out = self.run_removing(|_, guard, _| {
            let result = guard.harvest(range, &mut bitmap);
            // Pages that it does not name are clean already.
            if result.is_ok() && !invalidations(&platform.events.borrow()).is_empty() {
                let tree = hardware.tree(platform);
                platform.machine.borrow_mut().as_mut().unwrap().check_fresh(&tree);
            }
            result
        });
        let (start, end) = (range.start().0, range.end().0);
        let legal = self.bitmap_errors(&before, &range, true, was.len());
        if !legal.is_empty() {
            assert_eq!(bitmap, was);
            self.refused(&before, &out, start, &legal);
            return;
        }
        let dirty: Vec<Run> = before.within(start, end).filter(|run| run.leaf.own.dirty).collect();
        let mut expected = was;
        let page = |at: u64| ((at - start) >> H::PAGE) as usize;
        let pages = dirty.iter().flat_map(|run| page(run.start)..page(run.end));
        let new = set(&mut expected, pages);
        assert_eq!(out.result, Ok(new), "pages that were not in the bitmap");
        assert!(bitmap == expected, "exactly the pages that are dirty");
        // A page that can be written without a trace stays dirty.
        let cleaned: Vec<_> =
            dirty.into_iter().filter(|run| !run.leaf.own.write || run.leaf.marks).collect();
        let mut flat = self.flat.borrow_mut();
        for run in &cleaned {
            flat.within(run.start, run.end).for_each(|(_, piece)| piece.attributes.dirty = false);
        }
        drop(flat);
        assert_eq!(out.counts.entries_written, cleaned.iter().map(Run::leaves).sum::<u64>());
        assert_eq!(out.counts.bytes_changed, cleaned.iter().map(Run::bytes).sum::<u64>());
        let owed = owes(cleaned, &[], self.bbm);
        assert_eq!(out.counts.invalidations, u64::from(owed.is_some()));
        let expected = if pending { Some(ALL) } else { owed };
        assert_eq!(invalidations(&out.events), Vec::from_iter(expected), "completed inside");
        assert_eq!(out.owed, None);
        self.settle(&out.tree);
    }
}
