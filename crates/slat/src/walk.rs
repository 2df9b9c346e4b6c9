//! The one walk of the tables: over a range, for levels that are known at compile time, with a
//! visitor that is inlined.
//!
//! A table is read entry by entry in ascending order. The walk descends into an entry that links a
//! table if any wanted level lies below; it shows every other entry of a wanted level to the
//! visitor, which may change it. The code of each level is compiled for that level, so tables of
//! pages are not touched for a visitor that does not want them.
//!
//! # Concurrency
//! The walk holds no lock. It loads an entry once, and the visitor works on that
//! value: the visitor changes the entry by [`Pte::exchange`] from that very value, and asks for the
//! entry to be loaded again where the exchange failed. An entry that another thread has marked goes
//! to [`Visitor::held`], not to [`Visitor::visit`]; unless the visitor decides otherwise, the walk
//! loads it again after a turn of waiting ([`PATIENCE`]). A table that was unlinked while the walk
//! was in it stays allocated until the guard lets it go, and all of its entries, or if a block
//! took the place of a table of pages the first alone (`ops/replace_table`), say that it
//! was retired. The walk then begins anew at the first address that the table covered. Visitors are
//! idempotent, so it does no harm to visit an entry twice; those that fill entries, and might fill
//! one again that another thread has emptied meanwhile, go on where they were ([`Visitor::ONCE`]).
//!
//! Entries are loaded relaxed. A visitor that changes an entry acquires its value by the exchange.
//! Other code that relies on a value comes after a fence, one for many entries: before the walk
//! descends into a table, before a visitor takes a reservation for an emptied entry
//! (`Tables::break_before_fill`), and at the end of a walk, for its caller. The descent to one
//! address, which follows every link, loads with acquire. An accessed mark in a table needs more
//! than acquire (`sync::agreed`); formats without it (`TABLE_ACCESSED` of 0) compile none of that.

mod budget;
mod climb;
mod marks;
mod runs;
mod visitor;

use crate::addr::Gpa;
use crate::format::{Format, Kind, RUN};
use crate::platform::Platform;
use crate::sync::acquired;
use crate::table::{self, Pte};
pub(crate) use budget::Budget;
use budget::End;
use climb::{Climb, left};
pub(crate) use marks::{links, touch_each};
use marks::{touch, touch_path};
use runs::pass_run;
pub(crate) use runs::{change_pages, change_run, exchange_each, pages_alone};
pub(crate) use visitor::{Entry, Flow, Visitor, WalkCounts, visit_each};

/// How many turns the walks of one call wait for markers, all together, before the call gives up;
/// and how often a walk loses one entry to other threads.
///
/// A thread holds a marker for one invalidation at most, and for cache maintenance where a memory
/// type changes. A turn is a pause of the CPU (x86: 40 to 140 cycles; arm64: an `isb`, some tens)
/// and a few loads, so this is 50 to 200 us: longer than a broadcast for the 20 blocks takes that
/// one thread breaks at a time, also on a CPU that virtualises it. Where a hypervisor below stops
/// the holder's CPU, no number is enough: a caller whose operation returned *contended* should let
/// the holder run.
#[cfg(not(any(loom, shuttle)))]
pub(crate) const PATIENCE: u32 = 1 << 12;
#[cfg(loom)]
pub(crate) const PATIENCE: u32 = 2;
#[cfg(shuttle)]
pub(crate) const PATIENCE: u32 = 8;

/// Result of a walk: `Ok` if it reached its end, otherwise the address where it stopped, because
/// the visitor stopped it, or another thread held an entry for too long.
pub(crate) type Outcome = Result<(), Gpa>;

/// Walks `start..end` from the root, which has `ptes` at `level`.
///
/// The caller stays inside these tables, by a guard or as the only user, while it uses a reference
/// of `'t` that the visitor got.
#[inline]
pub(crate) fn walk<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    ptes: &'t [Pte],
    level: u8,
    (start, end): (u64, u64),
    visitor: &mut V,
    budget: &mut Budget,
) -> Outcome {
    let mut from = start;
    let mut tries = PATIENCE;
    loop {
        let End { at, reason } =
            tree::<F, P, V>(platform, ptes, level, (start, from, end), visitor, budget);
        if reason == End::DONE.reason {
            return Ok(());
        }
        if reason == End::STOPPED {
            return Err(Gpa(at));
        }
        // A try that made progress does not count.
        tries = if at > from { PATIENCE } else { tries - 1 };
        from = at.max(start);
        if reason == End::RETIRED {
            visitor.again();
        } else {
            match visitor.aside(reason - End::ASIDE, at) {
                Flow::Next => {
                    let shift = F::shift(reason - End::ASIDE);
                    from = ((at >> shift) + 1) << shift;
                    if from >= end {
                        return Ok(());
                    }
                    tries = PATIENCE;
                    continue;
                }
                Flow::Again => {
                    if tries == 0 {
                        return Err(Gpa(from));
                    }
                    continue;
                }
                Flow::Wait => {}
                Flow::Stop | Flow::Aside => return Err(Gpa(at)),
            }
        }
        if !budget.wait(visitor.waited()) {
            return Err(Gpa(from));
        }
    }
}

/// Walks from `from` on; what precedes it is done. A range that lies within one entry, and is
/// smaller than what that entry covers, begins in the table below, so that short calls skip the
/// loops of the levels above.
#[inline(always)]
fn tree<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    root: &'t [Pte],
    mut level: u8,
    (start, from, end): (u64, u64, u64),
    visitor: &mut V,
    budget: &mut Budget,
) -> End {
    let (mut ptes, top) = (root, level);
    let mut read = 0;
    while V::LEVELS.any_below(level) && (from ^ (end - 1)) >> F::shift(level) == 0 {
        let pte = table::pte::<F>(ptes, from, level);
        let raw = pte.load();
        if F::kind(raw, level) != Kind::Table || end - from == 1 << F::shift(level) {
            break;
        }
        read += 1;
        level -= 1;
        // SAFETY: as in `one` below.
        ptes = unsafe { table::entries(platform, F::table_address(raw), F::entries(level)) };
    }
    // The walk of one page calls `settle` once, for all that it read.
    let is_page = level == 0 && end - from == 1 << F::PAGE_SHIFT;
    if !is_page {
        visitor.settle(level, WalkCounts { read, ..WalkCounts::NONE });
    }
    let result = match level {
        0 if is_page => page::<F, P, V>(platform, ptes, from, visitor, budget, read),
        0 => pages::<F, P, V>(platform, ptes, from, end, visitor, budget),
        1 => parents::<F, P, V>(platform, ptes, start, from, end, visitor, budget),
        _ => {
            let mut climb = Climb { top: level, level, start, at: from, end, raws: [0; 3] };
            let mut below = End::DONE;
            loop {
                let step = climb.on::<F, P, V>(platform, ptes, below, visitor, budget);
                if step.reason != End::BELOW {
                    break step;
                }
                let table = climb.linked::<F, P>(platform, 1);
                below =
                    parents::<F, P, V>(platform, table, start, climb.at, step.at, visitor, budget);
            }
        }
    };
    acquired();
    if V::TOUCHES && F::TABLE_ACCESSED != 0 && level < top {
        touch_path::<F, P>(platform, root, (top, level), from);
    }
    result
}

/// Walks one page of a table, after `read` entries were read above it. It is not inlined, as
/// operations that faults call have their own code for a page whose table exists.
#[inline(never)]
fn page<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    ptes: &'t [Pte],
    start: u64,
    visitor: &mut V,
    budget: &mut Budget,
    read: u64,
) -> End {
    let mut tally = WalkCounts { read, ..WalkCounts::NONE };
    let pte = table::pte::<F>(ptes, start, 0);
    let end = start + (1 << F::PAGE_SHIFT);
    let met = one::<F, P, V, 0, true>(platform, pte, start, end, visitor, &mut tally, budget);
    visitor.settle(0, tally);
    met.done()
}

/// Walks a range of a table of pages. It is not inlined, so that its loop has all registers.
#[inline(never)]
fn pages<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    ptes: &'t [Pte],
    start: u64,
    end: u64,
    visitor: &mut V,
    budget: &mut Budget,
) -> End {
    let shift = F::PAGE_SHIFT;
    let mut ptes = part_of::<F>(ptes, 0, start, end);
    let mut at = start;
    let mut tally = WalkCounts::NONE;
    // In most tables where nothing needs a visit, the first runs already show it. This loop is
    // apart from the one below, which keeps the values of a run in registers.
    if let Some(wanted) = V::QUIET {
        let all = ptes.len();
        while let Some((run, rest)) = ptes.split_first_chunk::<RUN>()
            && table::any(run) & (wanted | F::MARK) == 0
        {
            ptes = rest;
        }
        tally.read = (all - ptes.len()) as u64;
        at += tally.read << shift;
    }
    let result = loop {
        if let Some(run) = ptes.first_chunk::<RUN>() {
            let passed = pass_run::<F, V, 0>(run, at, visitor, &mut tally);
            at += (passed as u64) << shift;
            ptes = &ptes[passed..];
            if passed == RUN {
                continue;
            }
        }
        let Some((pte, rest)) = ptes.split_first() else { break End::DONE };
        let next = at + (1 << shift);
        let met = one::<F, P, V, 0, false>(platform, pte, at, next, visitor, &mut tally, budget);
        let met = met.done();
        if !met.is_done() {
            break met;
        }
        (ptes, at) = (rest, next);
    };
    visitor.settle(0, tally);
    result
}

/// Returns the entries of a table at `level` for a range within the table.
#[inline(always)]
fn part_of<F: Format>(ptes: &[Pte], level: u8, start: u64, end: u64) -> &[Pte] {
    let (shift, mask) = (F::shift(level), ptes.len() - 1);
    &ptes[(start >> shift) as usize & mask..=((end - 1) >> shift) as usize & mask]
}

/// Walks a range of a table at level 1, and the tables of pages below. What lies between `start`
/// and `from` is done.
#[inline(never)]
#[allow(clippy::too_many_arguments, reason = "as many as registers take")]
fn parents<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    ptes: &'t [Pte],
    start: u64,
    from: u64,
    end: u64,
    visitor: &mut V,
    budget: &mut Budget,
) -> End {
    let shift = F::shift(1);
    let mut ptes = part_of::<F>(ptes, 1, from, end);
    let mut at = from;
    let mut tally = WalkCounts::NONE;
    let result = loop {
        if let Some(run) = ptes.first_chunk::<RUN>() {
            let passed = pass_run::<F, V, 1>(run, at, visitor, &mut tally);
            at = if passed == 0 { at } else { ((at >> shift) + passed as u64) << shift };
            ptes = &ptes[passed..];
            if passed == RUN {
                continue;
            }
        }
        let Some((pte, rest)) = ptes.split_first() else { break End::DONE };
        let next = (((at >> shift) + 1) << shift).min(end);
        let met = one::<F, P, V, 1, false>(platform, pte, at, next, visitor, &mut tally, budget);
        let result = match met {
            Met::Done(result) => result,
            Met::Table { children, raw } => {
                let below = if V::LEVELS.any_below(1) {
                    pages::<F, P, V>(platform, children, at, next, visitor, budget)
                } else {
                    End::DONE
                };
                let entry = Entry { pte, raw, start: at, end: next };
                left::<F, V>(1, start, entry, children, below, visitor)
            }
        };
        if !result.is_done() {
            break result;
        }
        (ptes, at) = (rest, next);
    };
    visitor.settle(1, tally);
    result
}

/// The outcome for one entry.
enum Met<'t> {
    Done(End),
    /// The link of a table that is to be descended into.
    Table {
        children: &'t [Pte],
        raw: u64,
    },
}

impl Met<'_> {
    /// Returns how the walk of a page ended.
    #[inline(always)]
    fn done(self) -> End {
        match self {
            Met::Done(result) => result,
            Met::Table { .. } => End::DONE,
        }
    }
}

/// Visits one entry until it is done, or links a table that the walk is to descend into. With
/// `ALONE` no fence follows, so each load acquires.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "it is inlined")]
fn one<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8, const ALONE: bool>(
    platform: &'t P,
    pte: &'t Pte,
    start: u64,
    end: u64,
    visitor: &mut V,
    tally: &mut WalkCounts,
    budget: &mut Budget,
) -> Met<'t> {
    for _ in 0..PATIENCE {
        let raw = if ALONE { pte.load() } else { pte.peek() };
        tally.read += 1;
        let entry = Entry { pte, raw, start, end };
        let flow = match F::kind(raw, LEVEL) {
            Kind::Table if LEVEL > 0 => {
                if !V::LEVELS.any_below(LEVEL) && !V::TABLES {
                    return Met::Done(End::DONE);
                }
                if !ALONE {
                    acquired();
                }
                // SAFETY: the walk's platform allocated the table that an entry links, with the
                // entries of its level. It was linked when the entry was read, so it is not given
                // back while the walk's caller is inside these tables (see `walk`).
                let children = unsafe {
                    table::entries(platform, F::table_address(raw), F::entries(LEVEL - 1))
                };
                match visitor.enter(LEVEL, &entry, children) {
                    Some(flow) => flow,
                    None => return Met::Table { children, raw },
                }
            }
            Kind::Retired => {
                let above = F::shift(LEVEL + 1);
                let at = if V::ONCE { start } else { start >> above << above };
                return Met::Done(End { at, reason: End::RETIRED });
            }
            _ if !V::LEVELS.contains(LEVEL) => return Met::Done(End::DONE),
            Kind::Frozen | Kind::Sealed => visitor.held(LEVEL, &entry),
            kind => visitor.visit(LEVEL, kind, entry, tally),
        };
        match flow {
            Flow::Next => return Met::Done(End::DONE),
            Flow::Again => {}
            Flow::Wait => {
                if !budget.wait(visitor.waited()) {
                    break;
                }
            }
            Flow::Stop => break,
            Flow::Aside => return Met::Done(End { at: start, reason: End::ASIDE + LEVEL }),
        }
    }
    Met::Done(End::stopped(start))
}
