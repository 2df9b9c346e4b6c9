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
//! to write in one, needs more than acquire ([`agreed`]): formats without either
//! (`TABLE_ACCESSED`, `TABLE_WRITE` of 0) compile none of it.

use crate::addr::{Gpa, Levels};
use crate::format::{Format, Kind, RUN};
use crate::ops::folded;
use crate::platform::Platform;
use crate::sync::{acquired, agreed, relax};
use crate::table::{self, Run, Slot};

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
}

/// Whether a walk came to its end, or else where it stopped: at the visitor's will, or because
/// somebody else held a slot for too long.
pub(crate) type Outcome = Result<(), Gpa>;

/// Slots that walks may still read before they end early.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    left: u64,
    /// The last walk ended early, as nothing was left.
    pub spent: bool,
}

impl Budget {
    pub const fn unbounded() -> Self {
        Self::of(u64::MAX)
    }

    pub const fn of(slots: u64) -> Self {
        Self { left: slots, spent: false }
    }

    /// Whether somebody set it: no walk is as long as what none begins with.
    #[inline(always)]
    pub const fn is_bounded(&self) -> bool {
        self.left < u64::MAX / 2
    }

    /// Whether nothing is left after so many slots.
    #[inline(always)]
    fn spend(&mut self, slots: u64) -> bool {
        self.left = self.left.saturating_sub(slots);
        self.spent = self.left == 0;
        self.spent
    }
}

/// Why a walk of one tree ended early. Small, so that it travels in registers.
#[derive(Clone, Copy)]
struct End {
    at: u64,
    /// The table that it was in was retired; `at` is where it began.
    retired: bool,
}

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

    /// After everything below a slot that links a table was visited. `Stop` ends the walk.
    #[inline(always)]
    fn leave(&mut self, _level: u8, _entry: Entry<'t>, _children: &'t [Slot]) {}

    /// Adds what was done to the slots of one table at `level`.
    fn settle(&mut self, level: u8, tally: Tally);
}

/// Changes the pages of a run that `change` names, by an exchange where the value is another;
/// returns how many slots, from its start, are done with, and which of them were named.
#[inline(always)]
pub(crate) fn change_run<F: Format>(
    run: &[Slot; RUN],
    raws: &[u64; RUN],
    at: u64,
    tally: &mut Tally,
    change: impl Fn(u64) -> Option<u64>,
) -> (usize, u64) {
    let mut named = 0;
    for index in 0..RUN {
        let (slot, raw) = (&run[index], raws[index]);
        if F::kind(raw, 0) != Kind::Leaf {
            continue;
        }
        // One leaf with its neighbours: for `visit`.
        if folded::<F>(raw) {
            return (index, named);
        }
        let Some(changed) = change(raw) else { continue };
        if changed != raw {
            if slot.exchange(raw, changed).is_err() {
                return (index, named);
            }
            let start = at + ((index as u64) << F::PAGE_SHIFT);
            tally.change(&Entry { slot, raw, start, end: start + (1 << F::PAGE_SHIFT) });
        }
        named |= 1 << index;
    }
    (RUN, named)
}

/// Visits each page of a run; returns how many, from its start, are done with.
#[inline(always)]
pub(crate) fn visit_each<'t, F: Format, V: Visitor<'t, F> + ?Sized>(
    visitor: &mut V,
    run: &'t [Slot; RUN],
    raws: &[u64; RUN],
    mut at: u64,
    tally: &mut Tally,
) -> usize {
    for index in 0..RUN {
        let (slot, raw) = (&run[index], raws[index]);
        let entry = Entry { slot, raw, start: at, end: at + (1 << F::PAGE_SHIFT) };
        at = entry.end;
        if !matches!(visitor.visit(0, F::kind(raw, 0), entry, tally), Flow::Next) {
            return index;
        }
    }
    RUN
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
    budget.spent = false;
    for _ in 0..PATIENCE {
        match tree::<F, P, V>(platform, slots, level, (from, end), visitor, budget) {
            Ok(()) => return Ok(()),
            // Spent in the last table.
            Err(End { at, .. }) if at == end => return Ok(()),
            Err(End { at, retired: true }) => {
                from = at.max(start);
                visitor.again();
            }
            Err(End { at, .. }) => return Err(Gpa(at)),
        }
        relax();
    }
    Err(Gpa(from))
}

/// A range inside one slot, and smaller than it, begins in the table below: short calls skip the
/// loops of the levels above.
#[inline]
fn tree<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    mut slots: &'t [Slot],
    mut level: u8,
    (start, end): (u64, u64),
    visitor: &mut V,
    budget: &mut Budget,
) -> Result<(), End> {
    let mut above = [const { None }; 4];
    let mut tally = Tally::NONE;
    while V::LEVELS.any_below(level) && (start ^ (end - 1)) >> F::shift(level) == 0 {
        let slot = table::slot::<F>(slots, start, level);
        let raw = slot.load();
        if F::kind(raw, level) != Kind::Table
            || end - start == 1 << F::shift(level)
            || !visitor.passes(raw)
        {
            break;
        }
        tally.read += 1;
        if V::TOUCHES && F::TABLE_ACCESSED != 0 {
            above[level as usize - 1] = Some((slot, raw));
        }
        level -= 1;
        // SAFETY: as in `one` below.
        slots = unsafe { table::slots(platform, F::table_address(raw), F::slots(level)) };
    }
    // A page's walk is settled once.
    let is_page = level == 0 && end - start == 1 << F::PAGE_SHIFT;
    if !is_page {
        visitor.settle(level, core::mem::replace(&mut tally, Tally::NONE));
    }
    let result = match level {
        0 if is_page => page::<F, P, V>(platform, slots, start, visitor, tally),
        0 => table::<F, P, V, 0>(platform, slots, start, end, visitor, budget),
        1 => table::<F, P, V, 1>(platform, slots, start, end, visitor, budget),
        2 => table::<F, P, V, 2>(platform, slots, start, end, visitor, budget),
        3 => table::<F, P, V, 3>(platform, slots, start, end, visitor, budget),
        _ => table::<F, P, V, 4>(platform, slots, start, end, visitor, budget),
    };
    if !is_page {
        acquired();
    }
    if V::TOUCHES && F::TABLE_ACCESSED != 0 {
        touch_all::<F>(&above);
    }
    result
}

/// Marks a table accessed below which a leaf may have become so, the lowest table first.
///
/// Who ages clears a table's mark before it looks below. If it does so before this looks, the mark
/// is set again, and the next to age looks below; if after, it finds the leaf itself. The caller
/// fences (`agreed`) between the leaf and the marks of all tables above it.
#[inline(always)]
fn touch<F: Format>(slot: &Slot, level: u8, table: u64) {
    let _ = slot.update(|raw| {
        (links::<F>(raw, level, table) && raw & F::TABLE_ACCESSED == 0)
            .then_some(raw | F::TABLE_ACCESSED)
    });
}

/// [`touch`] of the tables on a path, by their level less one.
pub(crate) fn touch_all<F: Format>(above: &[Option<(&Slot, u64)>; 4]) {
    agreed();
    for (below, table) in above.iter().enumerate() {
        table.inspect(|&(slot, raw)| touch::<F>(slot, below as u8 + 1, raw));
    }
}

/// Whether `raw` still links the table that `table` links: other bits may differ.
#[inline(always)]
pub(crate) fn links<F: Format>(raw: u64, level: u8, table: u64) -> bool {
    F::kind(raw, level) == Kind::Table && F::table_address(raw) == F::table_address(table)
}

/// One page of a table, as a fault concerns; `tally` has what was read above it.
#[inline(always)]
fn page<'t, F: Format, P: Platform, V: Visitor<'t, F>>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    visitor: &mut V,
    mut tally: Tally,
) -> Result<(), End> {
    let slot = table::slot::<F>(slots, start, 0);
    let end = start + (1 << F::PAGE_SHIFT);
    let budget = &mut Budget::unbounded();
    let result = one::<F, P, V, 0, true>(platform, slot, start, end, visitor, &mut tally, budget);
    visitor.settle(0, tally);
    result
}

#[inline]
fn table<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    end: u64,
    visitor: &mut V,
    budget: &mut Budget,
) -> Result<(), End> {
    let shift = F::shift(LEVEL);
    let mask = slots.len() - 1;
    let first = (start >> shift) as usize & mask;
    let last = ((end - 1) >> shift) as usize & mask;
    let mut slots = &slots[first..=last];
    let mut at = start;
    let mut tally = Tally::NONE;
    let mut result = Ok(());
    // Most tables in which nothing needs a visit show it from the start. Apart from the runs that
    // are looked into, whose values take registers.
    if LEVEL == 0
        && let Some(wanted) = V::QUIET
    {
        while let Some((run, rest)) = slots.split_first_chunk::<RUN>()
            && table::any(run) & (wanted | F::MARK) == 0
        {
            tally.read += RUN as u64;
            at += (RUN as u64) << shift;
            slots = rest;
        }
    }
    loop {
        if let Some(run) = slots.first_chunk::<RUN>() {
            let passed = pass_run::<F, V, LEVEL>(run, at, visitor, &mut tally);
            at = if passed == 0 { at } else { ((at >> shift) + passed as u64) << shift };
            slots = &slots[passed..];
            if passed == RUN {
                continue;
            }
        }
        let Some((slot, rest)) = slots.split_first() else { break };
        let next = (((at >> shift) + 1) << shift).min(end);
        result =
            one::<F, P, V, LEVEL, false>(platform, slot, at, next, visitor, &mut tally, budget);
        if V::TABLES && result.is_ok() && budget.spent {
            result = Err(End { at: next, retired: false });
        }
        if result.is_err() {
            break;
        }
        (slots, at) = (rest, next);
    }
    if result.is_ok() && budget.spend(tally.read) {
        result = Err(End { at: end, retired: false });
    }
    visitor.settle(LEVEL, tally);
    result
}

/// Passes as many slots of a run, from its start, as need no second look.
///
/// Tables that nobody wants to enter are stepped over at the speed of loads. Pages are loaded a
/// run ahead: a visitor that exchanges each then waits for the exchanges alone, and they find
/// out if a value is no longer the one that was loaded. Pages that a visitor has no business with
/// are stepped over together.
#[inline(always)]
fn pass_run<'t, F: Format, V: Visitor<'t, F>, const LEVEL: u8>(
    run: &'t [Slot; RUN],
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

/// Visits one slot until it is done with, and everything below it. `ALONE`: no fence follows, so
/// each load acquires.
#[inline(always)]
fn one<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8, const ALONE: bool>(
    platform: &'t P,
    slot: &'t Slot,
    start: u64,
    end: u64,
    visitor: &mut V,
    tally: &mut Tally,
    budget: &mut Budget,
) -> Result<(), End> {
    for _ in 0..PATIENCE {
        let raw = if ALONE { slot.load() } else { slot.peek() };
        tally.read += 1;
        let entry = Entry { slot, raw, start, end };
        let flow = match F::kind(raw, LEVEL) {
            Kind::Table if LEVEL > 0 => {
                if !V::LEVELS.any_below(LEVEL) && !V::TABLES {
                    return Ok(());
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
                    None => {
                        let result = descend::<F, P, V, LEVEL>(
                            platform, children, start, end, visitor, budget,
                        );
                        if V::TOUCHES && F::TABLE_ACCESSED != 0 {
                            agreed();
                            touch::<F>(slot, LEVEL, raw);
                        }
                        // Also where the budget was spent in the last table below.
                        if result.as_ref().map_or_else(|early| early.at == end, |()| true) {
                            visitor.leave(LEVEL, entry, children);
                            if V::TABLES {
                                budget.spend(children.len() as u64);
                            }
                        }
                        return result;
                    }
                }
            }
            Kind::Retired => {
                let above = F::shift(LEVEL + 1);
                return Err(End { at: start >> above << above, retired: true });
            }
            _ if !V::LEVELS.contains(LEVEL) => return Ok(()),
            Kind::Frozen | Kind::Sealed => visitor.held(LEVEL, &entry),
            kind => visitor.visit(LEVEL, kind, entry, tally),
        };
        match flow {
            Flow::Next => return Ok(()),
            Flow::Again => {}
            Flow::Wait => relax(),
            Flow::Stop => break,
        }
    }
    Err(End { at: start, retired: false })
}

/// `LEVEL - 1`, which constant generics cannot say; all arms but one vanish.
#[inline(always)]
fn descend<'t, F: Format, P: Platform, V: Visitor<'t, F>, const LEVEL: u8>(
    platform: &'t P,
    slots: &'t [Slot],
    start: u64,
    end: u64,
    visitor: &mut V,
    budget: &mut Budget,
) -> Result<(), End> {
    if !V::LEVELS.any_below(LEVEL) {
        return Ok(());
    }
    match LEVEL {
        4 => table::<F, P, V, 3>(platform, slots, start, end, visitor, budget),
        3 => table::<F, P, V, 2>(platform, slots, start, end, visitor, budget),
        2 => table::<F, P, V, 1>(platform, slots, start, end, visitor, budget),
        1 => table::<F, P, V, 0>(platform, slots, start, end, visitor, budget),
        _ => Ok(()),
    }
}
