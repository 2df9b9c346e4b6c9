//! The one walk: a range, the levels wanted (known at compile time), a visitor that is inlined.
//!
//! A table is read slot by slot in ascending order. A slot that links a table is descended into if
//! any wanted level lies below; every other slot of a wanted level is shown to the visitor, which
//! may change it. The code of each level is compiled for that level, so a visitor that wants no
//! last level costs nothing there: its tables are not touched.
//!
//! # Concurrency
//! The walk holds no lock. A slot is loaded once and the visitor works on that value; it
//! changes the slot by [`Slot::exchange`] from that very value, and asks for the slot to be loaded
//! again where it lost. A slot that somebody else has marked is not shown: the walk waits a bounded
//! number of times. A table that was unlinked while the walk was in it stays allocated until the
//! walk's guard lets it go, and all of its slots say that it was retired: the walk begins anew at
//! the first address that the table covered. Visitors are idempotent, so what was done twice
//! was done once.
//!
//! Slots are loaded relaxed. A visitor that changes a slot acquires its value by the exchange; what
//! else goes by a value comes behind a fence, one for many slots: before a table that a slot links
//! is looked at, before a reservation is taken for an emptied slot (`Tables::break_before_fill`),
//! and at the end of a walk, for what its caller does next. The descent to one address, where every
//! slot is a link that is followed, loads with acquire. An accessed mark in a table, or the right
//! to write in one, needs more than acquire (`sync::agreed`): formats without either
//! (`TABLE_ACCESSED`, `TABLE_WRITE` of 0) compile none of it.

mod budget;
mod climb;
mod marks;
mod runs;

use crate::addr::{Gpa, Levels};
use crate::format::{Format, Kind, RUN};
use crate::platform::Platform;
use crate::sync::{acquired, relax};
use crate::table::{self, Slot};
pub(crate) use budget::Budget;
use budget::End;
use climb::{Climb, left};
pub(crate) use marks::{links, touch_each};
use marks::{touch, touch_path};
use runs::pass_run;
pub(crate) use runs::{change_run, visit_each};

/// How often a walk waits for a marker, or loses a slot, before it gives up.
///
/// A marker is held for one invalidation at most, and for cache maintenance where a memory type
/// changes. A turn is a pause of the CPU (x86: 40 to 140
/// cycles; arm64: an `isb`, some tens), so this is 50 to 200 us: as long as a broadcast for 64
/// blocks takes, also on a CPU that virtualises it. Where a hypervisor below stops the holder's
/// CPU, no number is enough, and who is told *contended* should let that one run.
#[cfg(not(any(loom, shuttle)))]
pub(crate) const PATIENCE: u32 = 1 << 12;
#[cfg(loom)]
pub(crate) const PATIENCE: u32 = 2;
#[cfg(shuttle)]
pub(crate) const PATIENCE: u32 = 8;

/// A slot that a visitor is shown, and the part of the walk's range that it covers.
pub(crate) struct Entry<'t> {
    pub slot: &'t Slot,
    /// Its value when it was loaded.
    pub raw: u64,
    /// The part of the range that the slot covers.
    pub start: u64,
    pub end: u64,
}

impl Entry<'_> {
    /// The same once more, for a call that is seldom made. An entry that a call may look at stands
    /// in memory: it is stored for every page, and each exchange waits for the stores.
    #[inline(always)]
    pub fn apart(&self) -> Self {
        Self { slot: self.slot, raw: self.raw, start: self.start, end: self.end }
    }

    /// Whether the range covers all of the slot.
    #[inline(always)]
    pub fn whole<F: Format>(&self, level: u8) -> bool {
        self.end - self.start == 1 << F::shift(level)
    }

    /// The first address that the slot covers.
    #[inline(always)]
    pub fn base<F: Format>(&self, level: u8) -> u64 {
        self.start & !((1 << F::shift(level)) - 1)
    }
}

/// What the walk does after a visit.
pub(crate) enum Flow {
    /// Goes on behind the slot.
    Next,
    /// Loads the slot again: it changed, or links a table now that is to be entered.
    Again,
    /// Loads it again after a while: somebody else holds it.
    Wait,
    /// Ends here, for a reason that the visitor keeps.
    Stop,
    /// Leaves all tables, and has the visitor do what takes more stack than may come on top of the
    /// walk's ([`Visitor::aside`]).
    Aside,
}

/// Whether a walk came to its end, or else where it stopped: the visitor stopped it, another thread
/// held an entry for too long, or the budget was spent.
pub(crate) type Outcome = Result<(), Gpa>;

/// What a walk did to the slots of one table: kept apart from the visitor, so that it stays in
/// registers across atomic exchanges.
pub(crate) struct Tally {
    pub read: u64,
    /// Slots exchanged or stored.
    pub changed: u64,
    /// The hull of the changed slots, if any.
    pub start: u64,
    pub end: u64,
}

impl Tally {
    pub const NONE: Self = Self { read: 0, changed: 0, start: 0, end: 0 };

    /// Counts the entry as changed.
    #[inline(always)]
    pub fn change(&mut self, entry: &Entry<'_>) {
        if self.changed == 0 {
            self.start = entry.start;
        }
        self.end = entry.end;
        self.changed += 1;
    }
}

pub(crate) trait Visitor<'t, F: Format> {
    /// The levels whose slots the visitor is shown; no table that holds none of them is read.
    const LEVELS: Levels;
    /// Whether `leave` is called for tables, too, below which nothing is wanted.
    const TABLES: bool = false;
    /// A run of pages that holds none of these bits, and no marker, needs no visit. `None` if every
    /// slot does.
    const QUIET: Option<u64> = None;
    /// With `TABLES`, a run of tables that holds none of these bits is passed by, if `quiet`.
    const TABLES_QUIET: Option<u64> = None;
    /// Whether leaves that it leaves behind may be accessed, so that the tables above must be.
    const TOUCHES: bool = false;

    /// `level` is a constant wherever this is inlined. `kind` is neither a table nor a marker.
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut Tally) -> Flow;

    /// `visit` of a run of pages whose values are `raws`, without a marker; returns how many, from
    /// its start, are done with.
    #[inline(always)]
    fn visit_run(
        &mut self,
        run: &'t [Slot; RUN],
        raws: &[u64; RUN],
        at: u64,
        tally: &mut Tally,
    ) -> usize {
        visit_each(self, run, raws, at, tally)
    }

    /// Does all that there is to do to a run of pages, of which it counts the changes; or nothing.
    #[cfg(not(any(loom, shuttle)))]
    #[inline(always)]
    fn rewrite_run(&mut self, _run: &'t [Slot; RUN], _tally: &mut Tally) -> bool {
        false
    }

    /// Whether runs of tables may be passed by.
    #[inline(always)]
    fn quiet(&self) -> bool {
        true
    }

    /// Before the walk begins anew.
    #[inline(always)]
    fn again(&mut self) {}

    /// At a slot that somebody else has marked.
    #[inline(always)]
    fn held(&mut self, _level: u8, _entry: &Entry<'t>) -> Flow {
        Flow::Wait
    }

    /// Whether a table that covers more than the range may be walked through without `enter`.
    #[inline(always)]
    fn passes(&self, _raw: u64) -> bool {
        true
    }

    /// Before a table is descended into: `Next` passes by it, `Again` and `Wait` as for a visit,
    /// `None` descends.
    #[inline(always)]
    fn enter(&mut self, _level: u8, _entry: &Entry<'t>, _children: &'t [Slot]) -> Option<Flow> {
        None
    }

    /// After everything below a slot that links a table was visited.
    #[inline(always)]
    fn leave(&mut self, _level: u8, _entry: Entry<'t>, _children: &'t [Slot]) {}

    /// What it asked for by [`Flow::Aside`], at a slot at `level` of `gpa`; returns what a visit
    /// does. What the walk is to do to tables around a slot that is done with, it does not do.
    #[inline(always)]
    fn aside(&mut self, _level: u8, _gpa: u64) -> Flow {
        Flow::Stop
    }

    /// Adds what was done to slots of one table at `level`.
    fn settle(&mut self, level: u8, tally: Tally);
}

/// Walks `start..end` from the root, of `slots` at `level`. Ends early behind the table in which
/// `budget` was spent; a page alone is none of its business.
#[inline]
pub(crate) fn walk<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    slots: &'t [Slot],
    level: u8,
    (start, end): (u64, u64),
    visitor: &mut V,
    budget: &mut Budget,
) -> Outcome {
    let mut from = start;
    let mut patience = PATIENCE;
    budget.spent = false;
    while patience > 0 {
        let End { at, why } =
            tree::<F, P, V>(platform, slots, level, (start, from, end), visitor, budget);
        // Also where the budget was spent in the last table.
        if why == 0 || at == end {
            return Ok(());
        }
        if why == End::STOPPED {
            return Err(Gpa(at));
        }
        // What was gone on with is no try.
        patience = if at > from { PATIENCE } else { patience - 1 };
        from = at.max(start);
        if why == End::RETIRED {
            visitor.again();
        } else {
            match visitor.aside(why - End::ASIDE, at) {
                Flow::Next => {
                    let shift = F::shift(why - End::ASIDE);
                    from = ((at >> shift) + 1) << shift;
                    if from >= end {
                        return Ok(());
                    }
                    // No table has ended in which the budget would have been looked at.
                    if budget.spend(0) {
                        return Err(Gpa(from));
                    }
                    patience = PATIENCE;
                    continue;
                }
                Flow::Again => continue,
                Flow::Wait => {}
                Flow::Stop | Flow::Aside => return Err(Gpa(at)),
            }
        }
        relax();
    }
    Err(Gpa(from))
}

/// A range inside one slot, and smaller than it, begins in the table below: short calls skip the
/// loops of the levels above. What lies before `from` is done with.
#[inline(always)]
fn tree<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    root: &'t [Slot],
    mut level: u8,
    (start, from, end): (u64, u64, u64),
    visitor: &mut V,
    budget: &mut Budget,
) -> End {
    let (mut slots, top) = (root, level);
    let mut read = 0;
    while V::LEVELS.any_below(level) && (from ^ (end - 1)) >> F::shift(level) == 0 {
        let slot = table::slot::<F>(slots, from, level);
        let raw = slot.load();
        if F::kind(raw, level) != Kind::Table
            || end - from == 1 << F::shift(level)
            || !visitor.passes(raw)
        {
            break;
        }
        read += 1;
        level -= 1;
        // SAFETY: as in `one` below.
        slots = unsafe { table::slots(platform, F::table_address(raw), F::slots(level)) };
    }
    // A page's walk is settled once.
    let is_page = level == 0 && end - from == 1 << F::PAGE_SHIFT;
    if !is_page {
        visitor.settle(level, Tally { read, ..Tally::NONE });
    }
    let result = match level {
        0 if is_page => page::<F, P, V>(platform, slots, from, visitor, read),
        0 => pages::<F, P, V>(platform, slots, from, end, visitor, budget),
        1 => parents::<F, P, V>(platform, slots, start, from, end, visitor, budget),
        _ => {
            let mut climb = Climb { top: level, level, start, at: from, end, raws: [0; 3] };
            let mut below = End::DONE;
            loop {
                let step = climb.on::<F, P, V>(platform, slots, below, visitor, budget);
                if step.why != End::BELOW {
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

/// One page of a table; so many slots were `read` above it. Not inlined, as operations that faults
/// call have a way of their own to a page whose table is there.
#[inline(never)]
fn page<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    visitor: &mut V,
    read: u64,
) -> End {
    let mut tally = Tally { read, ..Tally::NONE };
    let slot = table::slot::<F>(slots, start, 0);
    let end = start + (1 << F::PAGE_SHIFT);
    let met = one::<F, P, V, 0, true>(platform, slot, start, end, visitor, &mut tally);
    visitor.settle(0, tally);
    met.done()
}

/// A range of a table of pages. Apart, so that its loop has all registers.
#[inline(never)]
fn pages<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    end: u64,
    visitor: &mut V,
    budget: &mut Budget,
) -> End {
    let shift = F::PAGE_SHIFT;
    let mut slots = part_of::<F>(slots, 0, start, end);
    let mut at = start;
    let mut tally = Tally::NONE;
    // Most tables in which nothing needs a visit show it from the start. Apart from the runs that
    // are looked into, whose values take registers.
    if let Some(wanted) = V::QUIET {
        let all = slots.len();
        while let Some((run, rest)) = slots.split_first_chunk::<RUN>()
            && table::any(run) & (wanted | F::MARK) == 0
        {
            slots = rest;
        }
        tally.read = (all - slots.len()) as u64;
        at += tally.read << shift;
    }
    let result = loop {
        if let Some(run) = slots.first_chunk::<RUN>() {
            let passed = pass_run::<F, V, 0>(run, at, visitor, &mut tally);
            at += (passed as u64) << shift;
            slots = &slots[passed..];
            if passed == RUN {
                continue;
            }
        }
        let Some((slot, rest)) = slots.split_first() else { break End::DONE };
        let next = at + (1 << shift);
        let met = one::<F, P, V, 0, false>(platform, slot, at, next, visitor, &mut tally).done();
        if !met.is_done() {
            break met;
        }
        (slots, at) = (rest, next);
    };
    let result = budget.end(result, tally.read, end);
    visitor.settle(0, tally);
    result
}

/// The slots of a table at `level` that a range which it covers concerns.
#[inline(always)]
fn part_of<F: Format>(slots: &[Slot], level: u8, start: u64, end: u64) -> &[Slot] {
    let (shift, mask) = (F::shift(level), slots.len() - 1);
    &slots[(start >> shift) as usize & mask..=((end - 1) >> shift) as usize & mask]
}

/// A range of a table above those of pages, and these. What lies before `from`, from `start` on, is
/// done with.
#[inline(never)]
#[allow(clippy::too_many_arguments, reason = "as many as registers take")]
fn parents<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    from: u64,
    end: u64,
    visitor: &mut V,
    budget: &mut Budget,
) -> End {
    let shift = F::shift(1);
    let mut slots = part_of::<F>(slots, 1, from, end);
    let mut at = from;
    let mut tally = Tally::NONE;
    let result = loop {
        if let Some(run) = slots.first_chunk::<RUN>() {
            let passed = pass_run::<F, V, 1>(run, at, visitor, &mut tally);
            at = if passed == 0 { at } else { ((at >> shift) + passed as u64) << shift };
            slots = &slots[passed..];
            if passed == RUN {
                continue;
            }
        }
        let Some((slot, rest)) = slots.split_first() else { break End::DONE };
        let next = (((at >> shift) + 1) << shift).min(end);
        let result = match one::<F, P, V, 1, false>(platform, slot, at, next, visitor, &mut tally) {
            Met::Done(result) => result,
            Met::Table { children, raw } => {
                let below = if V::LEVELS.any_below(1) {
                    pages::<F, P, V>(platform, children, at, next, visitor, budget)
                } else {
                    End::DONE
                };
                let entry = Entry { slot, raw, start: at, end: next };
                left::<F, V>(1, start, entry, children, below, visitor, budget)
            }
        };
        if !result.is_done() {
            break result;
        }
        (slots, at) = (rest, next);
    };
    let result = budget.end(result, tally.read, end);
    visitor.settle(1, tally);
    result
}

/// What a slot was.
enum Met<'t> {
    Done(End),
    /// The link of a table that is to be descended into.
    Table {
        children: &'t [Slot],
        raw: u64,
    },
}

impl Met<'_> {
    /// Of a page.
    #[inline(always)]
    fn done(self) -> End {
        match self {
            Met::Done(result) => result,
            Met::Table { .. } => End::DONE,
        }
    }
}

/// Visits one slot until it is done with, or links a table that is to be descended into. `ALONE`:
/// no fence follows, so each load acquires.
#[inline(always)]
fn one<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8, const ALONE: bool>(
    platform: &'t P,
    slot: &'t Slot,
    start: u64,
    end: u64,
    visitor: &mut V,
    tally: &mut Tally,
) -> Met<'t> {
    for _ in 0..PATIENCE {
        let raw = if ALONE { slot.load() } else { slot.peek() };
        tally.read += 1;
        let entry = Entry { slot, raw, start, end };
        let flow = match F::kind(raw, LEVEL) {
            Kind::Table if LEVEL > 0 => {
                if !V::LEVELS.any_below(LEVEL) && !V::TABLES {
                    return Met::Done(End::DONE);
                }
                if !ALONE {
                    acquired();
                }
                // SAFETY: a table that a slot links is allocated by the walk's platform with
                // the slots of its level. It was linked when the slot was read, so it is given
                // back only when the walk's guard, which outlives `'t`, is gone or refreshed.
                let children =
                    unsafe { table::slots(platform, F::table_address(raw), F::slots(LEVEL - 1)) };
                match visitor.enter(LEVEL, &entry, children) {
                    Some(flow) => flow,
                    None => return Met::Table { children, raw },
                }
            }
            Kind::Retired => {
                let above = F::shift(LEVEL + 1);
                return Met::Done(End { at: start >> above << above, why: End::RETIRED });
            }
            _ if !V::LEVELS.contains(LEVEL) => return Met::Done(End::DONE),
            Kind::Frozen | Kind::Sealed => visitor.held(LEVEL, &entry),
            kind => visitor.visit(LEVEL, kind, entry, tally),
        };
        match flow {
            Flow::Next => return Met::Done(End::DONE),
            Flow::Again => {}
            Flow::Wait => relax(),
            Flow::Stop => break,
            Flow::Aside => return Met::Done(End { at: start, why: End::ASIDE + LEVEL }),
        }
    }
    Met::Done(End::stopped(start))
}
