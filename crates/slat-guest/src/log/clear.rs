//! Clears of the log: of exactly the pages that a bitmap names, by any number of threads.
//!
//! A clear takes the bits of one chunk of the bitmap at a time. For the pages of each table it
//! splits the blocks around them, unless faults are to split them
//! ([`Config::eager_split`](crate::Config)), and takes the right to write (or the dirty mark) from
//! exactly those pages. One TLB invalidation completes all of it. Bits of pages that cannot be done
//! go back into the log. See the invariant of [`log`](super).

use super::LogError;
use super::read::Logs;
use crate::backing::{Backing, MAY_WRITE};
use crate::bits::{Bits, SpilledBits};
use crate::config::Logging;
use crate::guest::Guest;
use crate::host::Host;
use crate::memslots::spec::{MemslotId, MemslotSpec};
use crate::ranges::widened;
use crate::worker::{Inside, PATIENCE, Worker, fill};
use alloc::vec::Vec;
use slat::{
    ChangeError, Contention, Format, Gpa, GpaRange, Guard, Interruption, PageSize, Pages,
    SplitError,
};

/// The result of a clear.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ClearCounts {
    /// Pages that were dirty, and are now clean.
    pub pages: u64,
    /// Bytes of blocks that were split for the clear.
    pub split: u64,
    /// Bytes of blocks that were write-protected whole, because faults are to split them, or table
    /// pages were short: the first write in each block splits it.
    pub whole: u64,
}

/// The number of words whose bits are taken together.
const CHUNK: usize = 512;

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Clears the pages of memslot `id` that are dirty and whose bits `bitmap` has set. Its first
    /// bit is page `first`, and it has `count` bits (Linux: `KVM_CLEAR_DIRTY_LOG`).
    ///
    /// When this returns, the log has every later write to these pages; copy them after it. Exactly
    /// these pages are write-protected, however sparse they are. Any number of threads may clear at
    /// once; if two of them clear a page, it is clear when both have returned.
    ///
    /// # Errors
    /// [`LogError`]. Nothing was done, except:
    /// - On [`LogError::Contended`], [`LogError::Change`] and [`LogError::Split`] all pages before
    ///   the table of the address are cleared, and the others are dirty as before.
    /// - On [`LogError::Missing`] of a memslot that was deleted or moved meanwhile, pages at the
    ///   beginning may be cleared.
    pub fn clear_log(
        &mut self,
        id: MemslotId,
        first: u64,
        count: u64,
        bitmap: &[u64],
    ) -> Result<ClearCounts, LogError> {
        // In Linux's order.
        if !first.is_multiple_of(64) {
            return Err(LogError::Unaligned);
        }
        let logging = self.logging(id, usize::MAX)?;
        let all = logging.spec.pages(self.guest.page());
        let end = first.checked_add(count).filter(|&end| end <= all);
        let Some(end) = end else { return Err(LogError::Beyond { pages: all }) };
        if !count.is_multiple_of(64) && end != all {
            return Err(LogError::Unaligned);
        }
        let needed = count.div_ceil(64) as usize;
        if bitmap.len() < needed {
            return Err(LogError::Bitmap { needed, given: bitmap.len() });
        }
        self.clear_words(&logging, (first / 64) as usize, &bitmap[..needed])
    }

    /// Clears the pages whose bits are set in `words`; the first word is number `from` of the log.
    pub(super) fn clear_words(
        &mut self,
        logging: &Logs,
        from: usize,
        words: &[u64],
    ) -> Result<ClearCounts, LogError> {
        let guest = self.guest;
        let Logs { spec, log, spilled_bits } = logging;
        let spilled_bits =
            spilled_bits.as_deref().filter(|_| guest.config.logging == Logging::Hardware);
        let mut cleared = ClearCounts::default();
        let mut shootdown = None;
        let mut result = Ok(());
        for (at, words) in words.chunks(CHUNK).enumerate() {
            let from = from + at * CHUNK;
            let mut taken = TakenBits { log, from, bits: [0; CHUNK], done: 0 };
            // The number of words that are done in all tables.
            let mut done = words.len();
            let start = Gpa(spec.gpa.0 + ((from as u64) << (F::PAGE_SHIFT + 6)));
            for tables in guest.spaces() {
                let shared = core::ptr::eq(tables, &*guest.tables);
                let one = self.with_memslots(tables, |view, inside| {
                    if !view.logs_into(spec, log) {
                        return Err(LogError::Missing { id: spec.id });
                    }
                    if shared {
                        let bits = taken.bits.iter_mut().zip(words).enumerate();
                        bits.for_each(|(at, (taken, &word))| {
                            *taken = log.swap_out(from + at, word)
                        });
                    }
                    // The log takes the leaves' marks, which are yet to be reported to the host.
                    let moving = spilled_bits.map(|spilled_bits| spilled_bits.moves.begin());
                    let marks = spilled_bits.map(|spilled_bits| (spec, spilled_bits, &**log));
                    let split = guest.config.eager_split.filter(|_| !spec.log_blocks);
                    let mut clear = Clear { cleared: &mut cleared, marks, split };
                    let bits = &taken.bits[..words.len()];
                    let result = inside.clear(&mut clear, start, bits);
                    let guard = &mut inside.guard;
                    if let Some(spilled_bits) = spilled_bits {
                        keep(guest, (spec, spilled_bits), guard, start, bits);
                    }
                    drop(moving);
                    match shared {
                        true => {
                            let owed = tables.shootdown(guard).expect("a guard of these tables");
                            match &mut shootdown {
                                None => shootdown = Some(owed),
                                Some(all) => all.merge(owed),
                            }
                        }
                        false => guard.invalidate(),
                    }
                    Ok(result)
                });
                match one {
                    Ok(Ok(())) => {}
                    Ok(Err((at, error))) => {
                        // A word is done if it is done in all tables.
                        done = done.min(((at.0 - start.0) >> (F::PAGE_SHIFT + 6)) as usize);
                        result = Err(error);
                    }
                    // The memslot was deleted, or moved with the same log.
                    Err(error) => {
                        (result, done) = (Err(error), 0);
                        break;
                    }
                }
            }
            taken.done = done;
            cleared.pages +=
                taken.bits[..done].iter().map(|bits| u64::from(bits.count_ones())).sum::<u64>();
            drop(taken);
            if result.is_err() {
                break;
            }
        }
        if let Some(shootdown) = shootdown {
            shootdown.complete();
        }
        self.counters.log_clears.add(1);
        self.counters.log_cleared_pages.add(cleared.pages);
        let at = Gpa(spec.gpa.0 + ((from as u64) << (F::PAGE_SHIFT + 6)));
        guest.count_split(self.counters, at, cleared.split);
        result.map(|()| cleared)
    }
}

/// The bits of a chunk, which a clear has taken from the log. Dropped, also by a panic, it puts
/// them back from the first word on that is not done in all tables.
struct TakenBits<'l> {
    log: &'l Bits,
    /// The number of the first word.
    from: usize,
    bits: [u64; CHUNK],
    /// The number of words that are done.
    done: usize,
}

impl Drop for TakenBits<'_> {
    fn drop(&mut self) {
        let words = self.bits.iter().enumerate().skip(self.done);
        words.for_each(|(at, &bits)| self.log.add(self.from + at, bits));
    }
}

/// Keeps for the host that pages which were cleared, and are mapped, may have been written. This
/// runs after they were cleaned, because the guest may have written them until then. A thread that
/// takes a page before that sees that marks are being moved.
///
/// A leaf may also be gone that was clean already when it was removed. Its remover announces itself
/// first: either it has looked for moves, and seen this one, or its announcement is seen here.
fn keep<F: Format, H: Host, B: Backing>(
    guest: &Guest<'_, F, H, B>,
    (spec, spilled_bits): (&MemslotSpec, &SpilledBits),
    guard: &Guard<'_, '_, F, H>,
    start: Gpa,
    words: &[u64],
) {
    for (first, count) in (Pages { start, bits: words }).runs() {
        let at = start.0 + ((first as u64) << F::PAGE_SHIFT);
        let run =
            spec.common(&GpaRange::new(Gpa(at), (count as u64) << F::PAGE_SHIFT).expect("a run"));
        let Some(run) = run else { continue };
        let leaves = guard.leaves(run).expect("a memslot's pages");
        for leaf in leaves {
            // An entry that another thread is changing counts as a leaf: there was one, or will be
            // one.
            let (at, bytes) = match leaf {
                Ok(leaf) if !leaf.attributes.software.contains(MAY_WRITE) => continue,
                Ok(leaf) => (leaf.gpa.0, leaf.size.bytes()),
                Err(Contention { at }) => (at.0, 1 << F::PAGE_SHIFT),
            };
            let leaf = GpaRange::new(Gpa(at), bytes).expect("a leaf");
            // Only the named pages of a block: `whole` keeps the rest if it cleans the block as a
            // whole.
            if let Some(part) = common(&run, &leaf) {
                spilled_bits.written.mark::<F>(spec, part.start().0, part.size());
            }
        }
        if guest.marks_in_flight.any() || guest.host_unmaps.any() {
            spilled_bits.written.mark::<F>(spec, run.start().0, run.size());
        }
    }
}

fn common(one: &GpaRange, other: &GpaRange) -> Option<GpaRange> {
    let (start, end) = (one.start().max(other.start()), one.end().min(other.end()));
    GpaRange::new(start, end.0.checked_sub(start.0)?).ok()
}

/// The state of a clear, over one set of tables or several.
pub(crate) struct Clear<'c> {
    pub cleared: &'c mut ClearCounts,
    /// If hardware logs: the places for the marks of blocks that are cleaned as a whole.
    pub marks: Option<(&'c MemslotSpec, &'c SpilledBits, &'c Bits)>,
    /// The size to which blocks are split; `None` if faults split them.
    pub split: Option<PageSize>,
}

/// Where a clear stopped, and why.
type ClearStop = (Gpa, LogError);

/// A step of a clear.
enum Step {
    Done,
    /// Another thread is in the way. The error is the result if it stays in the way.
    Again(LogError),
}

impl<F: Format, H: Host, B: Backing> Inside<'_, '_, F, H, B> {
    /// Takes the right to write, or the dirty mark, from exactly the named pages. If a block stays
    /// whole, because faults are to split it or table pages are short, all of it is protected. An
    /// error has the start of the group that is not done.
    pub(crate) fn clear(
        &mut self,
        clear: &mut Clear<'_>,
        start: Gpa,
        words: &[u64],
    ) -> Result<(), ClearStop> {
        // Groups are aligned like tables, not like memslots.
        let word_bytes = 64u64 << F::PAGE_SHIFT;
        let group = (F::entries(0) / 64).max(1);
        let mut word = 0;
        while word < words.len() {
            let at = Gpa(start.0 + word as u64 * word_bytes);
            let lead = (at.0 / word_bytes) as usize % group;
            let len = (group - lead).min(words.len() - word);
            self.clear_group(clear, at, &words[word..word + len]).map_err(|error| (at, error))?;
            word += len;
        }
        Ok(())
    }

    fn clear_group(
        &mut self,
        clear: &mut Clear<'_>,
        start: Gpa,
        bits: &[u64],
    ) -> Result<(), LogError> {
        let Some(first) = bits.iter().position(|&bits| bits != 0) else { return Ok(()) };
        let last = bits.iter().rposition(|&bits| bits != 0).unwrap_or(first);
        let first = first as u64 * 64 + u64::from(bits[first].trailing_zeros());
        let last = last as u64 * 64 + 63 - u64::from(bits[last].leading_zeros());
        let page = 1 << F::PAGE_SHIFT;
        let hull = GpaRange::new(Gpa(start.0 + first * page), (last - first + 1) * page);
        let hull = hull.expect("a page at least");
        // A thread that protected one of these pages before may not have completed its
        // invalidation.
        self.guard.defer_invalidation(hull).expect("a memslot's pages");
        let mut patience = PATIENCE;
        loop {
            match self.attempt(clear, hull, &Pages { start, bits })? {
                Step::Done => return Ok(()),
                Step::Again(error) if patience == 0 => return Err(error),
                Step::Again(_) => patience -= 1,
            }
            self.guest.tables.platform().wait();
        }
    }

    fn attempt(
        &mut self,
        clear: &mut Clear<'_>,
        hull: GpaRange,
        pages: &Pages<'_>,
    ) -> Result<Step, LogError> {
        // Blocks are split to pages, to a larger size, or not at all.
        let to = clear.split;
        if let Some(to) = to {
            match self.split_for(clear, hull, to) {
                Ok(()) => {}
                Err(Interruption { reason: SplitError::CacheEmpty, .. }) => {
                    return self.whole(clear, hull);
                }
                Err(Interruption { at, reason: SplitError::Contended }) => {
                    return Ok(Step::Again(LogError::Contended { at }));
                }
                Err(Interruption { at, reason }) => return Err(LogError::splitting(at, reason)),
            }
        }
        let result = match self.guest.config.logging {
            // A block must not stay writable here, even if all of its pages are named: the next
            // write would mark all of it.
            Logging::Hardware if to != Some(F::size(0)) && self.has_block(hull) => {
                return self.whole(clear, hull);
            }
            Logging::Protect => self.guard.write_protect_pages(pages),
            Logging::Hardware => self.guard.clean_pages(pages),
        };
        match result {
            Ok(_) => Ok(Step::Done),
            Err(Interruption { at, reason: ChangeError::CutsBlock { .. } }) => match to {
                // Another thread has made a block there after the split.
                Some(to) if to == F::size(0) => Ok(Step::Again(LogError::Contended { at })),
                _ => self.whole(clear, hull),
            },
            Err(stopped) => again(stopped),
        }
    }

    /// Returns whether a leaf larger than a page maps a part of `range`.
    fn has_block(&self, range: GpaRange) -> bool {
        let table = F::size(1).bytes();
        let tables = (range.start().0 & !(table - 1)..range.end().0).step_by(table as usize);
        let leaf = |at: u64| self.guard.translate(Gpa(at.max(range.start().0))).ok().flatten();
        tables.filter_map(leaf).any(|leaf| leaf.size > F::size(0))
    }

    /// Splits the blocks that overlap `range`, as far as there are table pages.
    fn split_for(
        &mut self,
        clear: &mut Clear<'_>,
        range: GpaRange,
        to: PageSize,
    ) -> Result<(), Interruption<SplitError>> {
        let before = self.guard.counts().bytes_changed;
        let mut result = self.guard.split(range, to, self.cache);
        while let Err(Interruption { reason: SplitError::CacheEmpty, .. }) = result {
            if fill(self.cache, 1).is_err() {
                break;
            }
            result = self.guard.split(range, to, self.cache);
        }
        clear.cleared.split += self.guard.counts().bytes_changed - before;
        result.map(drop)
    }

    /// Write-protects the blocks that overlap `range`, and the leaves between them. If hardware
    /// logs, it cleans the blocks as well: otherwise the first write would find all pages of the
    /// block marked.
    ///
    /// This loses no page that was not named:
    /// 1. No thread makes a block in a memslot that logs, so the block is older than the log.
    /// 2. If the log began with all pages dirty, the block's other pages are still dirty, unless
    ///    the block was write-protected here before.
    /// 3. In all other cases, and from then on, the guest cannot write to the block: its mark is of
    ///    an earlier write, which the log has.
    /// 4. If the block is gone after it was cleaned, a fault may have split it before, or mapped
    ///    pages in its place, and the guest may have written them: all of it is dirty again.
    fn whole(&mut self, clear: &mut Clear<'_>, range: GpaRange) -> Result<Step, LogError> {
        let Ok(range) = widened(&self.guard, range) else {
            return Ok(Step::Again(LogError::Contended { at: range.start() }));
        };
        match self.guard.write_protect(range) {
            Ok(bytes) => clear.cleared.whole += bytes,
            Err(stopped) => return again(stopped),
        }
        if self.guest.config.logging == Logging::Protect {
            return Ok(Step::Done);
        }
        let blocks: Vec<_> = match self.guard.leaves(range) {
            Ok(leaves) => leaves.flatten().filter(|leaf| leaf.size > F::size(0)).collect(),
            Err(reason) => return Err(LogError::changing(range.start(), reason)),
        };
        for block in blocks {
            let range = GpaRange::new(block.gpa, block.size.bytes()).expect("a leaf is not empty");
            let result = self.guard.clean(range);
            let found = self.guard.translate(block.gpa);
            let stays = matches!(found, Ok(Some(leaf)) if leaf.size == block.size);
            if let Some((memslot, spilled_bits, log)) = clear.marks {
                if !stays {
                    log.mark::<F>(memslot, range.start().0, range.size());
                }
                if !stays || block.attributes.dirty {
                    spilled_bits.written.mark::<F>(memslot, range.start().0, range.size());
                }
            }
            if let Err(stopped) = result {
                return again(stopped);
            }
        }
        Ok(Step::Done)
    }
}

fn again(stopped: Interruption<ChangeError>) -> Result<Step, LogError> {
    match stopped {
        Interruption { at, reason: ChangeError::Contended | ChangeError::CutsBlock { .. } } => {
            Ok(Step::Again(LogError::Contended { at }))
        }
        Interruption { at, reason } => Err(LogError::changing(at, reason)),
    }
}
