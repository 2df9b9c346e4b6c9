//! Runs of neighbouring pages, which are loaded before they are visited.

use super::{Entry, Flow, Tally, Visitor};
use crate::format::{Format, Kind, RUN};
use crate::ops::folded;
use crate::table::{self, Pte, Run};

/// Changes the pages of a run for which `change` returns a value, by an exchange where that
/// differs. Returns how many entries, from the start of the run, are done, and for which of them
/// `change` returned a value, as a bitmap.
#[inline(always)]
pub(crate) fn change_run<F: Format>(
    run: &[Pte; RUN],
    raws: &[u64; RUN],
    at: u64,
    tally: &mut Tally,
    change: impl Fn(u64) -> Option<u64>,
) -> (usize, u64) {
    let mut named = 0;
    for index in 0..RUN {
        let (pte, raw) = (&run[index], raws[index]);
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

/// Visits each page of a run; returns how many entries, from its start, are done.
#[inline(always)]
pub(crate) fn visit_each<'t, F: Format, V: Visitor<'t, F> + ?Sized>(
    visitor: &mut V,
    run: &'t [Pte; RUN],
    raws: &[u64; RUN],
    mut at: u64,
    tally: &mut Tally,
) -> usize {
    for index in 0..RUN {
        let (pte, raw) = (&run[index], raws[index]);
        let entry = Entry { pte, raw, start: at, end: at + (1 << F::PAGE_SHIFT) };
        at = entry.end;
        if !matches!(visitor.visit(0, F::kind(raw, 0), entry, tally), Flow::Next) {
            return index;
        }
    }
    RUN
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
    tally: &mut Tally,
) -> usize {
    if LEVEL > 0 {
        let enters = V::LEVELS.any_below(LEVEL) || V::TABLES;
        if enters && (V::TABLES_QUIET.is_none() || !visitor.quiet()) {
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

    type F = crate::format::ept::Ept<true>;

    #[test]
    fn a_run_reports_the_hull_of_the_pages_that_it_changed_and_where_it_ended() {
        let page = |number: u64| F::leaf(F::WRITE, 0, Hpa(number << 12));
        let raws: [u64; RUN] = core::array::from_fn(|number| page(number as u64));
        let run = raws.map(Pte::new);
        let chosen = [page(2), page(5)];
        let change = |raw| chosen.contains(&raw).then(|| F::write_protected(raw));
        let mut tally = Tally::NONE;
        let done = change_run::<F>(&run, &raws, 0x10_0000, &mut tally, change);
        assert_eq!(done, (RUN, 0b10_0100));
        let Tally { changed, start, end, .. } = tally;
        assert_eq!((changed, start, end), (2, 0x10_2000, 0x10_6000));
        // Another thread has changed a page since the run was loaded.
        let done = change_run::<F>(&run, &raws, 0x10_0000, &mut tally, change);
        assert_eq!((done, tally.changed), ((2, 0), 2));
    }
}
