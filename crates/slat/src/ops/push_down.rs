//! Write protection of whole subtrees by one store each, pushed down on demand.
//!
//! Where the rights of a walk are those that all of its levels have (x86), a table without the
//! right to write protects all below it. A round of dirty logging then costs a store a table; the
//! first write below one pays for its children.
//!
//! # Protocol
//! A round takes the right from a table by compare-and-swap; it begins when its invalidation has
//! completed. A push-down marks the table, which stays valid and without the right; takes the right
//! from each child; and gives it to the table, with the mark gone, by a compare-and-swap. A round
//! that meets the mark adds [`Format::RENEWED`] (`protect_table`): the push-down finds it, removes
//! both and begins again. Only the thread that set the mark removes it, so no thread takes it for
//! another's.
//!
//! *Invariant.* From the end of a round's invalidation on, no write below the table succeeds that
//! is not recorded after the round began. Before the table has the right again, each child that it
//! had when the mark was set lost its own; a child that got the right meanwhile got it from
//! [`Guard::relax`] or [`Guard::map`], in the same exchange that made it dirty, by a thread that
//! reports the write it answers after it.

use super::ChangeError;
use crate::addr::{GpaRange, Levels};
use crate::counts::OpCounts;
use crate::format::{Format, Kind, RUN};
use crate::guard::{Guard, GuardState};
use crate::platform::Platform;
use crate::pte::Atomically;
use crate::pte::Run;
use crate::sync::agreed;
use crate::table::{Pte, load_run};
use crate::tables::Stopped;
use crate::walk::{Entry, Flow, PATIENCE, Visitor, WalkCounts, change_pages, links};

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// As [`Guard::write_protect`], by the tables as far up as `range` covers them, where the
    /// format can; by the leaves elsewhere ([`Format::marks_valid`]). Returns the bytes of the
    /// leaves and tables that had the right.
    ///
    /// A table that another thread protected at the same time is owed by that thread.
    /// [`Guard::relax`] for a write pushes the protection down to the tables next to its path.
    /// Leaves that are mapped below such a table meanwhile get its protection as well. Until then
    /// [`Guard::leaves`] and [`Guard::translate`] show leaves as protected.
    ///
    /// # Errors
    /// Those of [`Guard::write_protect`].
    pub fn write_protect_subtrees(&mut self, range: GpaRange) -> Result<u64, Stopped<ChangeError>> {
        if F::TABLE_WRITE == 0 || !self.tables.format.marks_valid() {
            return self.write_protect(range);
        }
        let tables = self.tables;
        if let Err(reason) = tables.check_change(&range) {
            return Self::stopped(range.start(), reason.into());
        }
        // Orders the faults that were reported before this call, and the reads of marks below; a
        // thread that pushes down sets a mark, then reads the leaves.
        agreed();
        let before = self.sums.counts.bytes_changed;
        let mut visitor = Protect { sums: &mut self.sums, reason: ChangeError::Contended };
        let result = tables.walk(range.start().0, range.end().0, &mut visitor);
        let reason = visitor.reason;
        let bytes = self.sums.counts.bytes_changed - before;
        match result {
            Ok(()) => Ok(bytes),
            Err(at) => Self::stopped(at, reason),
        }
    }
}

struct Protect<'g> {
    sums: &'g mut GuardState,
    reason: ChangeError,
}

impl<'t, F: Format> Visitor<'t, F> for Protect<'_> {
    const LEVELS: Levels = Levels::ALL;
    const QUIET: Option<u64> = Some(F::WRITE);

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        if kind != Kind::Leaf || entry.raw & F::WRITE == 0 {
            return Flow::Next;
        }
        if level > 0 && !entry.whole::<F>(level) {
            self.reason = ChangeError::CutsBlock { size: F::size(level) };
            return Flow::Stop;
        }
        if entry.pte.exchange(entry.raw, F::write_protected(entry.raw)).is_err() {
            return Flow::Again;
        }
        tally.change(&entry);
        Flow::Next
    }

    #[inline(always)]
    fn enter(&mut self, level: u8, entry: &Entry<'t>, _children: &'t [Pte]) -> Option<Flow> {
        if !entry.whole::<F>(level) {
            return None;
        }
        match protect_table::<F>(entry.pte, level, entry.raw) {
            Ok(old) => {
                self.sums.counts.entries_written += 1;
                // A protection that a push-down has found stays.
                if old & F::TABLE_WRITE != 0 {
                    self.sums.counts.bytes_changed += entry.end - entry.start;
                    self.sums.owed.table(entry.start, entry.end);
                    self.sums.owed.set_revoked();
                }
                Some(Flow::Next)
            }
            Err(found) if links::<F>(found, level, entry.raw) => Some(Flow::Next),
            Err(_) => Some(Flow::Again),
        }
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        self.sums.settle::<F>(level, &tally, true);
    }
}

/// Takes the right to write from the table that `table` links, also where a push-down is about to
/// give it back. Returns the old value, or, as an error, the value that needed no change.
#[inline]
fn protect_table<F: Format>(pte: &Pte, level: u8, table: u64) -> Result<u64, u64> {
    pte.update(|raw| {
        if !links::<F>(raw, level, table) {
            None
        } else if raw & F::TABLE_WRITE != 0 {
            Some(raw & !F::TABLE_WRITE)
        } else {
            (raw & F::MARK != 0 && raw & F::RENEWED == 0).then_some(raw | F::RENEWED)
        }
    })
}

/// The push-downs of one call.
#[derive(Default)]
pub(super) struct Pushed<'t> {
    /// The entries that were read and that the walk has not counted.
    pub(super) read: u64,
    /// The link of the last table that could not be pushed down, and the child that was not this
    /// thread's to change: the walk waits for that child, without the mark.
    held: Option<(&'t Pte, &'t Pte)>,
}

/// Takes the right to write from all `children` of a table without it, and gives it to the table.
/// The walk then loads the table again.
#[cold]
#[inline(never)]
pub(super) fn push_down<'t, F: Format>(
    level: u8,
    entry: &Entry<'t>,
    children: &'t [Pte],
    counts: &mut OpCounts,
    down: &mut Pushed<'t>,
) -> Flow {
    let table = entry.raw;
    if table & F::MARK != 0 {
        return Flow::Wait;
    }
    if let Some((link, child)) = down.held.take()
        && core::ptr::eq(link, entry.pte)
    {
        counts.entries_read += 1;
        if is_held::<F>(child.load(), level - 1) {
            down.held = Some((link, child));
            return Flow::Wait;
        }
    }
    if entry.pte.exchange(table, table | F::MARK).is_err() {
        return Flow::Again;
    }
    counts.entries_written += 2;
    // Orders the store of the mark before the reads of the children.
    agreed();
    let before = counts.entries_read;
    let pushed = children.chunks(RUN).all(|run| {
        level == 1 && run.try_into().is_ok_and(|run| protect_run::<F>(run, counts))
            || run.iter().all(|child| {
                let protected = protect_child::<F>(child, level - 1, counts);
                if !protected {
                    down.held = Some((entry.pte, child));
                }
                protected
            })
    });
    down.read += counts.entries_read - before;
    let unmarked = |raw: u64| raw & !(F::MARK | F::RENEWED);
    let _ = entry.pte.update(|raw| {
        let mine = links::<F>(raw, level, table) && raw & F::MARK != 0;
        let whole = pushed && raw & F::RENEWED == 0;
        mine.then(|| unmarked(raw) | if whole { F::TABLE_WRITE } else { 0 })
    });
    if pushed { Flow::Again } else { Flow::Wait }
}

/// Takes the right to write from a run of pages; returns whether none of them has it any more. If
/// not, each is to be visited.
fn protect_run<F: Format>(run: &[Pte; RUN], counts: &mut OpCounts) -> bool {
    let Run { raws, any, .. } = load_run(run);
    let mut tally = WalkCounts::NONE;
    let done = match any & F::MARK {
        0 => change_pages::<F, Atomically>(run, &raws, 0, &mut tally, |raw| {
            Some(F::write_protected(raw))
        }),
        _ => None,
    };
    let done = done.map_or(0, |(done, _)| done);
    counts.entries_read += done as u64;
    counts.entries_written += tally.changed;
    done == RUN
}

/// Returns whether only another thread may change the entry. A table with an entry that is retired
/// is about to be unlinked.
fn is_held<F: Format>(raw: u64, level: u8) -> bool {
    matches!(F::kind(raw, level), Kind::Frozen | Kind::Sealed | Kind::Retired)
}

/// Returns whether the child, a leaf or a table, has no right to write any more. It does not wait,
/// as other threads wait for the table meanwhile.
fn protect_child<F: Format>(pte: &Pte, level: u8, counts: &mut OpCounts) -> bool {
    for _ in 0..PATIENCE {
        let raw = pte.load();
        counts.entries_read += 1;
        let protected = match F::kind(raw, level) {
            Kind::Leaf => F::write_protected(raw),
            Kind::Table => match protect_table::<F>(pte, level, raw) {
                Err(found) if !links::<F>(found, level, raw) => continue,
                changed => {
                    counts.entries_written += u64::from(changed.is_ok());
                    return true;
                }
            },
            Kind::Empty | Kind::Reserved | Kind::Owned => return true,
            Kind::Retired | Kind::Frozen | Kind::Sealed => return false,
        };
        if protected == raw {
            return true;
        }
        if pte.exchange(raw, protected).is_ok() {
            counts.entries_written += 1;
            return true;
        }
    }
    false
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::addr::Hpa;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    type F = crate::format::ept::Ept<true>;

    /// The other thread comes in between within a few of them.
    const TRIES: u32 = 1_000_000;

    #[test]
    fn an_entry_that_another_thread_takes_during_a_push_down_keeps_its_marker() {
        let link = F::table(Hpa(0x5000), 1) & !F::TABLE_WRITE;
        let marker = F::frozen(Hpa(0));
        let pte = Pte::new(link);
        // The table is marked until the push-down has come to the child that is held.
        let mut children: std::vec::Vec<_> = (1..1 << 12).map(|_| Pte::new(0)).collect();
        children.push(Pte::new(marker));
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ended.load(Relaxed) && pte.exchange(link | F::MARK, marker).is_err() {
                    std::hint::spin_loop();
                }
            });
            for _ in 0..TRIES {
                let entry = Entry { pte: &pte, raw: link, start: 0, end: 1 << F::shift(1) };
                let (counts, down) = (&mut OpCounts::default(), &mut Pushed::default());
                push_down::<F>(1, &entry, &children, counts, down);
                if pte.load() == marker {
                    break;
                }
            }
            ended.store(true, Relaxed);
        });
        assert_eq!(pte.load(), marker);
    }
}
