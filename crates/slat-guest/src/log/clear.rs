//! Clearing the log: exactly the pages that a bitmap names, by any number of threads.
//!
//! Of each table's worth of pages the bits are taken, the blocks that hold them are split, and exactly
//! those pages lose the right to write (or their dirty mark). One invalidation completes all of it. What
//! cannot be done goes back into the log. See the invariant of [`log`](super).

use super::{Log, LogError, PATIENCE, pages};
use crate::backing::Backing;
use crate::config::Logging;
use crate::guest::{Guest, TABLE_PAGES, Worker};
use crate::host::Host;
use crate::invalidate::widened;
use crate::slots::{SlotId, SlotSpec};
use slat::{Format, Gpa, GpaRange, Guard, Halted, Pages, SplitError, TableCache};

/// What a clear did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Cleared {
    /// Pages that were dirty, and are not any more.
    pub pages: u64,
    /// Bytes of blocks that were split for it.
    pub split: u64,
    /// Bytes of blocks that were protected whole, as table pages were short: each write there faults
    /// once more than needed.
    pub whole: u64,
}

/// Words of which the bits are taken together.
const CHUNK: usize = 512;

impl<'w, 'p, F: Format, H: Host, B: Backing> Worker<'w, 'p, F, H, B> {
    /// Clears those of `pages` of slot `id`, from page `first` on, that `bitmap` names and that are
    /// dirty (Linux: `KVM_CLEAR_DIRTY_LOG`).
    ///
    /// When this returns, every later write to them is in the log; copy them after it. Exactly they are
    /// protected, however sparse they are. Any number of threads clear at once; a page that two clear
    /// at once is cleared when both have returned.
    ///
    /// # Errors
    /// [`LogError`]. Nothing was done but on [`LogError::Contended`], when all pages before the
    /// address are cleared, and the others dirty as before; and on [`LogError::Missing`] of a slot
    /// that was deleted or moved meanwhile, when pages at the beginning may be cleared.
    pub fn clear_log(
        &mut self,
        id: SlotId,
        first: u64,
        count: u64,
        bitmap: &[u64],
    ) -> Result<Cleared, LogError> {
        let (spec, log) = self.logging(id, usize::MAX)?;
        let all = pages(&spec, self.guest.page());
        let end = first.checked_add(count).filter(|&end| end <= all);
        let Some(end) = end else { return Err(LogError::Beyond { pages: all }) };
        if !first.is_multiple_of(64) || !(count.is_multiple_of(64) || end == all) {
            return Err(LogError::Unaligned);
        }
        let needed = count.div_ceil(64) as usize;
        if bitmap.len() < needed {
            return Err(LogError::Bitmap { needed, given: bitmap.len() });
        }
        self.clear_words(&spec, &log, (first / 64) as usize, &bitmap[..needed])
    }

    /// Clears the pages that `words` name, of which the first is number `from` of the log.
    pub(super) fn clear_words(
        &mut self,
        spec: &SlotSpec,
        log: &Log,
        from: usize,
        words: &[u64],
    ) -> Result<Cleared, LogError> {
        let guest = self.guest;
        let mut cleared = Cleared::default();
        let mut shootdown = None;
        let mut result = Ok(());
        for (at, words) in words.chunks(CHUNK).enumerate() {
            let from = from + at * CHUNK;
            let mut bits = [0; CHUNK];
            let taken = &mut bits[..words.len()];
            let start = Gpa(spec.gpa.0 + ((from as u64) << (F::PAGE_SHIFT + 6)));
            // Groups that are done in all tables.
            let mut done = taken.len();
            for tables in guest.spaces() {
                let shared = core::ptr::eq(tables, &guest.tables);
                let one = self.with_slots(tables, |view, guard, cache| {
                    if !view.logs_into(spec, log) {
                        return Err(LogError::Missing { id: spec.id });
                    }
                    if shared {
                        taken.iter_mut().zip(words).enumerate().for_each(|(at, (taken, &word))| {
                            *taken = log.take(from + at, word);
                        });
                    }
                    let mut call = Clear { guest, guard, cache, cleared: &mut cleared };
                    let result = call.pages(start, taken);
                    match shared {
                        true => {
                            let owed = tables.shootdown(guard).expect("a guard of these tables");
                            match &mut shootdown {
                                None => shootdown = Some(owed),
                                Some(all) => all.merge(owed),
                            }
                        }
                        false => guard.complete(),
                    }
                    result.map_err(|at| LogError::Contended { at })
                });
                match one {
                    Ok(()) => {}
                    Err(LogError::Contended { at }) => {
                        done = done.min(((at.0 - start.0) >> (F::PAGE_SHIFT + 6)) as usize);
                        result = Err(LogError::Contended { at });
                    }
                    // It is gone, or somewhere else with the same log.
                    Err(error) => {
                        (result, done) = (Err(error), 0);
                        break;
                    }
                }
            }
            // Back into the log, from the group on that is not done.
            let ones = taken[..done].iter().map(|bits| u64::from(bits.count_ones()));
            cleared.pages += ones.sum::<u64>();
            taken.iter().enumerate().skip(done).for_each(|(at, &bits)| log.add(from + at, bits));
            if result.is_err() {
                break;
            }
        }
        if let Some(shootdown) = shootdown {
            shootdown.complete();
        }
        guest.counters.log_clears.add(1);
        guest.counters.log_cleared_pages.add(cleared.pages);
        guest.counters.split_bytes.add(cleared.split);
        result.map(|()| cleared)
    }
}

/// A clear inside one set of tables.
pub(crate) struct Clear<'c, 'w, 'p, 'g, 't, F: Format, H: Host, B: Backing> {
    pub guest: &'c Guest<'p, F, H, B>,
    pub guard: &'g mut Guard<'t, 'p, F, H>,
    pub cache: &'g mut TableCache<'w, F, H>,
    pub cleared: &'c mut Cleared,
}

impl<F: Format, H: Host, B: Backing> Clear<'_, '_, '_, '_, '_, F, H, B> {
    /// Takes the right to write, or the dirty mark, from exactly the pages named. Where somebody held
    /// an entry for too long: the start of the group, which is not done.
    pub fn pages(&mut self, start: Gpa, words: &[u64]) -> Result<(), Gpa> {
        // Groups are those of tables, not of slots.
        let word_bytes = 64u64 << F::PAGE_SHIFT;
        let group = (F::slots(0) / 64).max(1);
        let mut word = 0;
        while word < words.len() {
            let at = Gpa(start.0 + word as u64 * word_bytes);
            let lead = (at.0 / word_bytes) as usize % group;
            let len = (group - lead).min(words.len() - word);
            self.group(at, &words[word..word + len]).map_err(|()| at)?;
            word += len;
        }
        Ok(())
    }

    fn group(&mut self, start: Gpa, bits: &[u64]) -> Result<(), ()> {
        let Some(first) = bits.iter().position(|&bits| bits != 0) else { return Ok(()) };
        let last = bits.iter().rposition(|&bits| bits != 0).unwrap_or(first);
        let first = first as u64 * 64 + u64::from(bits[first].trailing_zeros());
        let last = last as u64 * 64 + 63 - u64::from(bits[last].leading_zeros());
        let page = 1 << F::PAGE_SHIFT;
        let hull = GpaRange::new(Gpa(start.0 + first * page), (last - first + 1) * page);
        let hull = hull.expect("a page at least");
        // Who protected one of them before may not have completed it.
        let _ = self.guard.owe(hull);
        for _ in 0..PATIENCE {
            let pages = Pages { start, bits };
            let result = match (self.split(hull), self.guest.config.logging) {
                (Err(()), _) => self.whole(hull),
                (Ok(false), _) => Err(()),
                (Ok(true), Logging::Protect) => {
                    self.guard.write_protect_pages(&pages).map(drop).map_err(drop)
                }
                (Ok(true), Logging::Hardware) => {
                    self.guard.clean_pages(&pages).map(drop).map_err(drop)
                }
            };
            if result.is_ok() {
                return Ok(());
            }
            self.guest.tables.platform().wait();
        }
        Err(())
    }

    /// Splits what holds `range`; whether it is split, or an error if table pages are short.
    fn split(&mut self, range: GpaRange) -> Result<bool, ()> {
        let before = self.guard.counts().bytes_changed;
        let mut result = self.guard.split(range, F::size(0), self.cache);
        while let Err(Halted { why: SplitError::CacheEmpty, .. }) = result {
            let _ = self.cache.fill(TABLE_PAGES);
            if self.cache.is_empty() {
                break;
            }
            result = self.guard.split(range, F::size(0), self.cache);
        }
        self.cleared.split += self.guard.counts().bytes_changed - before;
        match result {
            Ok(_) => Ok(true),
            Err(Halted { why: SplitError::CacheEmpty, .. }) => Err(()),
            Err(_) => Ok(false),
        }
    }

    /// Protects the blocks that hold `range`.
    fn whole(&mut self, range: GpaRange) -> Result<(), ()> {
        let range = widened(self.guard, range);
        let bytes = self.guard.write_protect(range).map_err(drop)?;
        self.cleared.whole += bytes;
        Ok(())
    }
}
