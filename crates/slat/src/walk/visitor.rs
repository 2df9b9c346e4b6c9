//! What one operation does at each entry that a walk shows it.

use crate::addr::Levels;
use crate::format::{Format, Kind, RUN};
use crate::table::Pte;

/// An entry that the walk shows to a visitor, and the part of the walk's range that the entry
/// covers.
pub(crate) struct Entry<'t> {
    pub pte: &'t Pte,
    /// The value that was loaded.
    pub raw: u64,
    /// The part of the range that the entry covers.
    pub start: u64,
    pub end: u64,
}

impl Entry<'_> {
    /// Returns a copy, for a call that is not inlined. If such a call could see the entry itself,
    /// the entry would be in memory: it would be stored for every page, and each exchange would
    /// wait for the stores.
    #[inline(always)]
    pub fn apart(&self) -> Self {
        Self { pte: self.pte, raw: self.raw, start: self.start, end: self.end }
    }

    /// Returns whether the range covers all that the entry covers.
    #[inline(always)]
    pub fn whole<F: Format>(&self, level: u8) -> bool {
        self.end - self.start == 1 << F::shift(level)
    }

    /// The first address that the entry covers.
    #[inline(always)]
    pub fn base<F: Format>(&self, level: u8) -> u64 {
        self.start & !((1 << F::shift(level)) - 1)
    }
}

/// The next step of the walk after a visit.
pub(crate) enum Flow {
    /// Goes on after the entry.
    Next,
    /// Loads the entry again: it changed, or now links a table that the walk is to enter.
    Again,
    /// Loads the entry again after a while: another thread holds it.
    Wait,
    /// Ends here, for a reason that the visitor keeps.
    Stop,
    /// Leaves all tables, and calls [`Visitor::aside`] for work that needs more stack than the walk
    /// may still use.
    Aside,
}

/// Counts of a walk's accesses to the entries of one table. It is apart from the visitor, so that
/// it stays in registers across atomic exchanges.
pub(crate) struct WalkCounts {
    pub read: u64,
    /// Entries exchanged or stored.
    pub changed: u64,
    /// The range that covers the changed entries, if any.
    pub start: u64,
    pub end: u64,
}

impl WalkCounts {
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

    /// Counts those of the pages from `at` on as changed that have a bit in `places`.
    #[inline(always)]
    pub fn change_pages<F: Format>(&mut self, at: u64, places: u64) {
        if places == 0 {
            return;
        }
        let page = |place: u32| at + (u64::from(place) << F::PAGE_SHIFT);
        if self.changed == 0 {
            self.start = page(places.trailing_zeros());
        }
        self.end = page(u64::BITS - places.leading_zeros());
        self.changed += u64::from(places.count_ones());
    }
}

/// The work of one operation at each entry that a walk shows.
pub(crate) trait Visitor<'t, F: Format> {
    /// The levels whose entries the visitor is shown; no table that holds none of them is read.
    const LEVELS: Levels;
    /// Whether the walk calls `leave` also for tables below which no level is wanted.
    const TABLES: bool = false;
    /// A run of pages in which no entry has any of these bits, or a marker, needs no visit. `None`
    /// if every entry needs one.
    const QUIET: Option<u64> = None;
    /// With `TABLES`, the walk skips a run of tables in which no link has any of these bits.
    const TABLES_QUIET: Option<u64> = None;
    /// Whether the visitor may leave accessed leaves behind, so that the tables above must be
    /// accessed.
    const TOUCHES: bool = false;

    /// Whether an entry that was done may not be visited again: a walk that began anew would do
    /// once more what another thread has undone. It begins anew at the entry where it stopped.
    const ONCE: bool = false;

    /// Handles one entry of a wanted level; returns the walk's next step. `kind` is neither a table
    /// nor a marker. `level` is a constant wherever this is inlined. A visitor of tables alone does
    /// nothing here.
    #[inline(always)]
    fn visit(
        &mut self,
        _level: u8,
        _kind: Kind,
        _entry: Entry<'t>,
        _tally: &mut WalkCounts,
    ) -> Flow {
        Flow::Next
    }

    /// Does `visit` for a run of pages whose values are `raws`, without a marker. Returns how many
    /// entries, from the start of the run, are done.
    #[inline(always)]
    fn visit_run(
        &mut self,
        run: &'t [Pte; RUN],
        raws: &[u64; RUN],
        at: u64,
        tally: &mut WalkCounts,
    ) -> usize {
        visit_each(self, run, raws, at, tally)
    }

    /// Does all the work on a run of pages, and counts the changes; or does nothing, and returns
    /// false.
    #[cfg(not(any(loom, shuttle)))]
    #[inline(always)]
    fn rewrite_run(&mut self, _run: &'t [Pte; RUN], _tally: &mut WalkCounts) -> bool {
        false
    }

    /// Called before the walk begins anew.
    #[inline(always)]
    fn again(&mut self) {}

    /// Called for an entry that another thread has marked.
    #[inline(always)]
    fn held(&mut self, _level: u8, _entry: &Entry<'t>) -> Flow {
        Flow::Wait
    }

    /// Handles a member of a group whose table is not on the way to its address any more. A table
    /// that was replaced keeps such entries, which nobody changes back: it is as if held.
    #[cold]
    fn apart(&mut self, level: u8, entry: &Entry<'t>) -> Flow {
        if entry.pte.load() == entry.raw { self.held(level, entry) } else { Flow::Again }
    }

    /// Returns for how many turns the visitor has waited by itself: the walk waits for so many
    /// fewer.
    #[inline(always)]
    fn waited(&self) -> u32 {
        0
    }

    /// Called before the walk descends into a table. `None` descends, `Next` skips the table,
    /// `Again` and `Wait` are as for a visit.
    #[inline(always)]
    fn enter(&mut self, _level: u8, _entry: &Entry<'t>, _children: &'t [Pte]) -> Option<Flow> {
        None
    }

    /// Called after everything below an entry that links a table was visited.
    #[inline(always)]
    fn leave(&mut self, _level: u8, _entry: Entry<'t>, _children: &'t [Pte]) {}

    /// Does the work that the visitor asked for by [`Flow::Aside`], at an entry at `level` of
    /// `gpa`; returns what a visit does. The walk may skip `leave` and the accessed marks of tables
    /// around an entry that this finishes.
    #[inline(always)]
    fn aside(&mut self, _level: u8, _gpa: u64) -> Flow {
        Flow::Stop
    }

    /// Adds what the walk did to entries of one table at `level`.
    fn settle(&mut self, level: u8, tally: WalkCounts);
}

/// Visits each page of a run; returns how many entries, from its start, are done.
#[inline(always)]
pub(crate) fn visit_each<'t, F: Format, V: Visitor<'t, F> + ?Sized>(
    visitor: &mut V,
    run: &'t [Pte; RUN],
    raws: &[u64; RUN],
    mut at: u64,
    tally: &mut WalkCounts,
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
