//! Runs of neighbouring pages, which are loaded before they are visited.

use super::{Entry, Visitor, WalkCounts};
use crate::format::{Format, Kind, RUN};
use crate::pte::Change;
use crate::pte::Run;
use crate::table::{self, Pte, folded};

/// Changes the pages of a run for which `change` returns a value, by an exchange where that
/// differs. Returns how many entries, from the start of the run, are done, and for which of them
/// `change` returned a value, as a bitmap.
///
/// It loads each entry again, so that a caller that uses the values of a run in another way first
/// can keep them in registers.
#[inline(always)]
pub(crate) fn change_run<F: Format>(
    run: &[Pte; RUN],
    at: u64,
    tally: &mut WalkCounts,
    change: impl Fn(u64) -> Option<u64>,
) -> (usize, u64) {
    let mut named = 0;
    for (index, pte) in run.iter().enumerate() {
        let raw = pte.load();
        // The walk handles an entry that another thread holds.
        if raw & F::MARK != 0 {
            return (index, named);
        }
        if F::kind(raw, 0) != Kind::Leaf {
            continue;
        }
        // A group of contiguous leaves is one leaf: `visit` handles it.
        if folded::<F>(raw) {
            return (index, named);
        }
        let Some(changed) = change(raw) else { continue };
        if changed != raw {
            if pte.exchange(raw, changed).is_err() {
                return (index, named);
            }
            let start = at + ((index as u64) << F::PAGE_SHIFT);
            tally.change(&Entry { pte, raw, start, end: start + (1 << F::PAGE_SHIFT) });
        }
        named |= 1 << index;
    }
    (RUN, named)
}

/// As [`change_run`], with one account of all pages. Does nothing, and returns `None`, unless all
/// entries are pages, and none is in a group.
#[inline(always)]
pub(crate) fn change_pages<F: Format, C: Change>(
    run: &[Pte; RUN],
    raws: &[u64; RUN],
    at: u64,
    tally: &mut WalkCounts,
    change: impl Fn(u64) -> Option<u64>,
) -> Option<(usize, u64)> {
    pages_alone::<F>(raws)?;
    let ExchangeOutcome { done, named, places } = exchange_each::<C>(run, raws, change);
    tally.change_pages::<F>(at, places);
    Some((done, named))
}

/// Returns the bits that all entries of a run have, if all are pages and none is in a group.
#[inline(always)]
pub(crate) fn pages_alone<F: Format>(raws: &[u64; RUN]) -> Option<u64> {
    let (mut common, mut any) = (!0, 0);
    for raw in raws {
        common &= raw;
        any |= raw;
    }
    (F::all_pages(common) && any & F::CONTIGUOUS == 0).then_some(common)
}

/// The outcome of the exchanges of a run.
pub(crate) struct ExchangeOutcome {
    /// How many, from the start of the run, are done.
    pub done: usize,
    /// Those for which there was a value, as a bitmap.
    pub named: u64,
    /// Those that were exchanged, as a bitmap.
    places: u64,
}

/// Exchanges the entries of a run for which `change` returns another value.
#[inline(always)]
pub(crate) fn exchange_each<C: Change>(
    run: &[Pte; RUN],
    raws: &[u64; RUN],
    change: impl Fn(u64) -> Option<u64>,
) -> ExchangeOutcome {
    let (mut named, mut places) = (0, 0);
    for index in 0..RUN {
        let (pte, raw) = (&run[index], raws[index]);
        let Some(changed) = change(raw) else { continue };
        if changed != raw {
            if C::exchange(pte, raw, changed).is_err() {
                return ExchangeOutcome { done: index, named, places };
            }
            places |= 1 << index;
        }
        named |= 1 << index;
    }
    ExchangeOutcome { done: RUN, named, places }
}

/// Passes as many entries of a run, from its start, as need no second look; returns how many.
///
/// Tables that the visitor does not enter are skipped at the speed of loads. Pages are loaded a run
/// ahead: a visitor that exchanges each of them waits for the exchanges alone, and an exchange
/// fails if the value changed since it was loaded. Runs of pages that need no visit are skipped
/// whole.
#[inline(always)]
pub(super) fn pass_run<'t, F: Format, V: Visitor<'t, F>, const LEVEL: u8>(
    run: &'t [Pte; RUN],
    at: u64,
    visitor: &mut V,
    tally: &mut WalkCounts,
) -> usize {
    if LEVEL > 0 {
        let enters = V::LEVELS.any_below(LEVEL) || V::TABLES;
        if enters && V::TABLES_QUIET.is_none() {
            return 0;
        }
        let Run { common, any, .. } = table::load_run(run);
        if !F::all_tables(common, any, LEVEL) || enters && any & V::TABLES_QUIET.unwrap_or(0) != 0 {
            return 0;
        }
        tally.read += RUN as u64;
        return RUN;
    }
    #[cfg(not(any(loom, shuttle)))]
    if visitor.rewrite_run(run, tally) {
        tally.read += RUN as u64;
        return RUN;
    }
    let Run { raws, any, .. } = table::load_run(run);
    if V::QUIET.is_some_and(|wanted| any & (wanted | F::MARK) == 0) {
        tally.read += RUN as u64;
        return RUN;
    }
    if any & F::MARK != 0 {
        return 0;
    }
    let passed = visitor.visit_run(run, &raws, at, tally);
    tally.read += passed as u64;
    passed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Hpa;
    use crate::pte::Atomically;
    use std::vec::Vec;

    type F = crate::format::ept::Ept<true>;

    #[test]
    fn a_run_reports_the_hull_of_its_changes_and_its_end() {
        let page = |number: u64| F::leaf(F::WRITE, 0, Hpa(number << 12));
        let raws: [u64; RUN] = core::array::from_fn(|number| page(number as u64));
        let run = raws.map(Pte::new);
        let chosen = [page(2), page(5)];
        let change = |raw| chosen.contains(&raw).then(|| F::write_protected(raw));
        let mut tally = WalkCounts::NONE;
        let done = change_run::<F>(&run, 0x10_0000, &mut tally, change);
        assert_eq!(done, (RUN, 0b10_0100));
        let WalkCounts { changed, start, end, .. } = tally;
        assert_eq!((changed, start, end), (2, 0x10_2000, 0x10_6000));
        // Another thread changes a page after it was loaded.
        let change = |raw| {
            run[6].update(|raw| Some(raw ^ F::ACCESSED)).ok();
            (raw == page(1) || raw & !F::ACCESSED == page(6)).then(|| F::write_protected(raw))
        };
        let mut tally = WalkCounts::NONE;
        let done = change_run::<F>(&run, 0x10_0000, &mut tally, change);
        assert_eq!((done, tally.changed), ((6, 0b10), 1));
        // Another thread holds a page.
        let run = raws.map(Pte::new);
        run[3].update(|raw| Some(raw | F::MARK)).ok();
        let change = |raw| Some(F::write_protected(raw));
        let mut tally = WalkCounts::NONE;
        let done = change_run::<F>(&run, 0x10_0000, &mut tally, change);
        assert_eq!((done, tally.changed), ((3, 0b111), 3));
    }

    #[test]
    fn entries_are_exchanged_up_to_one_that_another_thread_changed() {
        let page = |number: u64| F::leaf(F::WRITE, 0, Hpa(number << 12));
        let raws: [u64; RUN] = core::array::from_fn(|number| page(number as u64));
        let run = raws.map(Pte::new);
        assert_eq!(exchange_each::<Atomically>(&run, &raws, Some).done, RUN);
        run[4].update(|_| Some(0)).ok();
        let protect = |raw| Some(F::write_protected(raw));
        let ExchangeOutcome { done, named, places } =
            exchange_each::<Atomically>(&run, &raws, protect);
        assert_eq!((done, named, places), (4, 0b1111, 0b1111));
        let now: Vec<u64> = run.iter().map(Pte::load).collect();
        let protected = F::write_protected;
        let wanted = [0, 1, 2, 3].map(|number| protected(page(number)));
        assert_eq!((&now[..4], &now[4..6]), (&wanted[..], &[0, page(5)][..]));
    }

    #[test]
    fn pages_change_up_to_a_foreign_change_with_one_account() {
        let page = |number: u64| F::leaf(F::WRITE, 0, Hpa(number << 12));
        let raws: [u64; RUN] = core::array::from_fn(|number| page(number as u64));
        let run = raws.map(Pte::new);
        let protect = |first: u64, last: u64| {
            move |raw| {
                let number = F::leaf_address(raw, 0).0 >> 12;
                Some(if (first..=last).contains(&number) { F::write_protected(raw) } else { raw })
            }
        };
        let change = |first, last, tally: &mut WalkCounts| {
            change_pages::<F, Atomically>(&run, &raws, 0x10_0000, tally, protect(first, last))
        };
        let mut tally = WalkCounts::NONE;
        assert_eq!(change(4, 4, &mut tally), Some((RUN, 0xff)));
        assert_eq!((tally.changed, tally.start, tally.end), (1, 0x10_4000, 0x10_5000));
        // The values that were loaded are older than the change.
        let mut tally = WalkCounts::NONE;
        assert_eq!(change(1, 6, &mut tally), Some((4, 0b1111)));
        assert_eq!((tally.changed, tally.start, tally.end), (3, 0x10_1000, 0x10_4000));
        assert_eq!(F::write_protected(page(3)), run[3].load());
        assert_eq!((run[0].load(), run[5].load()), (page(0), page(5)));
    }

    #[test]
    fn a_run_with_an_entry_that_is_no_page_is_left_to_the_visits() {
        let mut raws = [F::leaf(F::WRITE, 0, Hpa(0)); RUN];
        raws[RUN - 1] = 0;
        let run = raws.map(Pte::new);
        let mut tally = WalkCounts::NONE;
        let done = change_pages::<F, Atomically>(&run, &raws, 0, &mut tally, |raw| {
            Some(F::write_protected(raw))
        });
        assert_eq!((done, tally.changed, run[0].load()), (None, 0, raws[0]));
    }
}
