//! The pages that a bitmap names, rewritten entry by entry within their table.

use crate::format::{Format, Kind};
use crate::guard::Guard;
use crate::ops::pages::{run_end, run_start, seek};
use crate::ops::rules::Rule;
use crate::ops::{ChangeError, Pages};
use crate::platform::Platform;
use crate::pte::Atomically;
use crate::sync::acquired;
use crate::table::{Pte, folded, pte};
use crate::tables::{Interruption, Tables};
use crate::walk::WalkCounts;
use core::marker::PhantomData;

impl<'t, F: Format, P: Platform> Guard<'t, '_, F, P> {
    /// [`Guard::rewrite`] of each page that a bitmap names: entry by entry where there is a table
    /// of pages and a word of the bitmap is not full, otherwise run by run.
    #[inline]
    pub(in crate::ops) fn rewrite_pages<R: Rule<F> + Copy>(
        &mut self,
        pages: &Pages<'_>,
        rule: R,
    ) -> Result<u64, Interruption<ChangeError>> {
        const {
            assert!(!R::TOUCHES && !R::EXECUTES, "rules that give no right");
            assert!(R::STALE || !R::SEEN, "nothing is published");
        }
        let before = self.sums.counts.bytes_changed;
        let mut table = PageTable::NONE;
        let result = self.rewrite_named(pages, &mut table, rule);
        acquired();
        self.settle_table::<R>(&mut table);
        result.map(|()| self.sums.counts.bytes_changed - before)
    }

    /// As [`Guard::rewrite_pages`]; `table` is the last table, which is not settled yet.
    #[inline(always)]
    fn rewrite_named<R: Rule<F> + Copy>(
        &mut self,
        pages: &Pages<'_>,
        table: &mut PageTable<'t, F>,
        rule: R,
    ) -> Result<(), Interruption<ChangeError>> {
        let aligned = pages.start.0 & ((1 << F::PAGE_SHIFT) - 1) == 0;
        let mut next = 0;
        while let Some(first) = seek(pages.bits, next, |word| word) {
            let word = pages.bits[first / 64] >> (first % 64);
            // The walk reads many entries at once.
            if word != u64::MAX && aligned {
                let start = pages.part::<F>(first, 1)?.start().0;
                if !table.has(start) {
                    self.settle_table::<R>(table);
                    *table = self.tables.page_table(start);
                }
                let left = if table.has(start) { table.rewrite(start, word, &rule) } else { word };
                let done = (left.trailing_zeros() as usize).min(64 - first % 64);
                if done > 0 {
                    next = first + done;
                    continue;
                }
            }
            // Here is no table of pages, or an entry changes meanwhile: the walk decides.
            self.settle_table::<R>(table);
            *table = PageTable::NONE;
            next = run_end(pages.bits, first);
            let run = pages.part::<F>(first, next - first)?;
            if let Err(stopped) = self.rewrite_walk::<Atomically, R>(run, rule) {
                self.rewrite_again(pages, first, next, rule, stopped)?;
            }
        }
        Ok(())
    }

    /// Continues after the walk of the named pages `first..end` ended with `stopped`. Pages of the
    /// same run may precede them that were done entry by entry. If another thread has put these
    /// together with the others to a block, the run may cover the block whole.
    #[cold]
    #[inline(never)]
    fn rewrite_again<R: Rule<F> + Copy>(
        &mut self,
        pages: &Pages<'_>,
        first: usize,
        end: usize,
        rule: R,
        stopped: Interruption<ChangeError>,
    ) -> Result<(), Interruption<ChangeError>> {
        let start = run_start(pages.bits, first);
        if start == first || !matches!(stopped.reason, ChangeError::CutsBlock { .. }) {
            return Err(stopped);
        }
        let run = pages.part::<F>(start, end - start)?;
        self.rewrite_walk::<Atomically, R>(run, rule).map(drop).map_err(|_| stopped)
    }

    /// Adds the account of a table's changes to the guard's.
    #[inline]
    fn settle_table<R: Rule<F>>(&mut self, table: &mut PageTable<'_, F>) {
        let tally = core::mem::replace(&mut table.tally, WalkCounts::NONE);
        self.sums.settle::<F>(0, &tally, R::STALE);
    }
}

/// A table of pages, its addresses, and the account of its changes. All are empty if there is no
/// table.
struct PageTable<'t, F> {
    ptes: &'t [Pte],
    start: u64,
    end: u64,
    tally: WalkCounts,
    format: PhantomData<F>,
}

impl<F: Format> PageTable<'_, F> {
    const NONE: Self =
        Self { ptes: &[], start: 0, end: 0, tally: WalkCounts::NONE, format: PhantomData };

    #[inline(always)]
    fn has(&self, gpa: u64) -> bool {
        self.start <= gpa && gpa < self.end
    }

    /// Rewrites the pages from `start` on that have a bit in `word`. It stops at the end of the
    /// table, at an entry that is neither vacant nor a leaf outside groups, and at an exchange that
    /// fails. Returns the bits of those that are left. It is not inlined, so that its loop has all
    /// registers.
    #[inline(never)]
    fn rewrite<R: Rule<F>>(&mut self, start: u64, word: u64, rule: &R) -> u64 {
        let (mut left, mut places) = (word, 0);
        let (ptes, end) = (self.ptes, self.end);
        while left != 0 {
            let at = start + (u64::from(left.trailing_zeros()) << F::PAGE_SHIFT);
            if at >= end {
                break;
            }
            let pte = pte::<F>(ptes, at, 0);
            let raw = pte.peek();
            let kind = F::kind(raw, 0);
            if kind == Kind::Leaf && !folded::<F>(raw) {
                let changed = rule.change(raw);
                if changed != raw {
                    if pte.exchange(raw, changed).is_err() {
                        break;
                    }
                    places |= left & left.wrapping_neg();
                }
            } else if !kind.is_vacant() {
                break;
            }
            left &= left - 1;
        }
        self.tally.read += u64::from((word ^ left).count_ones());
        self.tally.change_pages::<F>(start, places);
        left
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Returns the table of pages around an address. The caller is inside a guard, as for a walk.
    #[inline(never)]
    fn page_table(&self, gpa: u64) -> PageTable<'_, F> {
        let limit = 1 << self.geometry().address_bits;
        if gpa >= limit {
            return PageTable::NONE;
        }
        let (ptes, level) = self.descend(gpa, 0, |_, _| ());
        let start = gpa >> F::shift(1) << F::shift(1);
        let end = limit.min(start + (1 << F::shift(1)));
        if level == 0 { PageTable { ptes, start, end, ..PageTable::NONE } } else { PageTable::NONE }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::addr::Hpa;
    use crate::ops::rules::NoWrite;
    use std::vec::Vec;

    type F = crate::format::ept::Ept<true>;

    /// Protects; before the exchange of one page hardware marks that page as written.
    #[derive(Clone, Copy)]
    struct LateWrite<'t>(&'t Pte);

    impl Rule<F> for LateWrite<'_> {
        fn change(&self, raw: u64) -> u64 {
            if raw == self.0.load() {
                self.0.exchange(raw, raw | F::DIRTY).unwrap();
            }
            Rule::<F>::change(&NoWrite, raw)
        }
    }

    #[test]
    fn a_protection_stops_at_a_page_that_hardware_marks_meanwhile() {
        let page = |number: u64| F::leaf(F::WRITE, 0, Hpa(number << 12));
        let ptes: Vec<Pte> = (0..512).map(|number| Pte::new(page(number))).collect();
        let mut table = PageTable::<F> { ptes: &ptes, start: 0, end: 2 << 20, ..PageTable::NONE };
        assert_eq!(table.rewrite(0x1000, 0b1101, &LateWrite(&ptes[3])), 0b1100);
        let WalkCounts { read, changed, start, end } = table.tally;
        assert_eq!((read, changed, start, end), (1, 1, 0x1000, 0x2000));
        let found = [1, 3, 4].map(|number| ptes[number].load());
        assert_eq!(found, [F::write_protected(page(1)), page(3) | F::DIRTY, page(4)]);
    }
}
