//! Replace: changes the memory or the memory type of leaves, which go on translating the same
//! addresses.
//!
//! # Protocol
//! A leaf that gets other memory, or another memory type, is broken on every format: a
//! compare-and-swap from the value that was read freezes it, so that no other software maps
//! anything there and hardware faults; the invalidation completes; memory whose type changes is
//! maintained, when no CPU uses it any more; then the new leaf takes the marker's place. So no two
//! CPUs ever use the old memory and the new at once: otherwise one CPU might not see what another
//! wrote. Rights alone change by one compare-and-swap. Up to [`RUN`] neighbouring pages stand
//! broken together. Between the first marker and the last release nothing is allocated, and nothing
//! is called except the platform's invalidation and maintenance.
//!
//! *Invariant*: all that the guest wrote is in the memory that the new leaf maps. Other memory
//! takes the place only of a leaf that the guest cannot write (`Replace::plan`): to move a page,
//! the caller protects it, completes, copies, and then replaces it. A write fault that was answered
//! in between has given the right back, and the leaf is refused. The leaf has no history, so the
//! caller keeps other threads from taking rights from the page, and from unmapping it, from the
//! protection on: a round of a log that protected the page again would hide the write. Accessed and
//! dirty state goes from the old leaf to the new one.

use super::ChangeError;
use super::map::{MapError, maintenance};
use crate::addr::{GpaRange, Hpa, Levels, PageSize, RangeError};
use crate::format::{AttributeError, Attributes, Format, Kind, Memory, RUN};
use crate::guard::{Guard, GuardState};
use crate::invalidation::PendingFlush;
use crate::platform::Platform;
use crate::table::{Pte, folded};
use crate::tables::{Interruption, Tables};
use crate::walk::{Entry, Flow, Visitor, WalkCounts};
use core::fmt;

/// Reason why the leaves of a range were not replaced, or not all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReplaceError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The new host address is not a multiple of the page size, or reaches beyond what a descriptor
    /// can hold.
    HostAddress {
        /// The address.
        hpa: Hpa,
        /// The page size.
        page: PageSize,
        /// Bits of a host address.
        bits: u32,
    },
    /// The format, as configured, cannot express the attributes.
    Attributes(AttributeError),
    /// The range ends inside a block.
    CutsBlock {
        /// The size of the block.
        size: PageSize,
    },
    /// The new memory does not begin at a multiple of this leaf's size.
    Unaligned {
        /// The size of the leaf.
        size: PageSize,
    },
    /// The memory mapped there is not the memory that was to be replaced.
    Differs {
        /// The size of the leaf found.
        size: PageSize,
        /// The host address that the leaf maps to.
        hpa: Hpa,
    },
    /// The guest may write the leaf, so that what it writes now would be lost.
    Writable,
    /// Another thread held an entry for too long.
    Contended,
}

impl fmt::Display for ReplaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Range(error) => error.fmt(f),
            Self::HostAddress { hpa, page, bits } => {
                MapError::HostAddress { hpa, page, bits }.fmt(f)
            }
            Self::Attributes(error) => error.fmt(f),
            Self::CutsBlock { size } => ChangeError::CutsBlock { size }.fmt(f),
            Self::Unaligned { size } => write!(
                f,
                "the new memory does not begin at a multiple of {size}, the size of the leaf; \
                 split it first"
            ),
            Self::Differs { size, hpa } => {
                write!(f, "a {size} leaf that points elsewhere ({hpa}) is mapped there")
            }
            Self::Writable => f.write_str(
                "the guest may write the leaf; write-protect it, complete, copy, then replace it",
            ),
            Self::Contended => ChangeError::Contended.fmt(f),
        }
    }
}

impl core::error::Error for ReplaceError {}

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Makes the leaves of `range`, which map the memory from `from` on, map that from `to` on,
    /// with the rights, memory type and software bits of `attributes`; returns the bytes that
    /// changed. Addresses where nothing is mapped stay so.
    ///
    /// At no moment does the range translate to anything but the old memory or the new, nor one CPU
    /// to the old and another to the new. With `from` equal to `to` this changes the memory type,
    /// or rights alone, in place. Accessed and dirty are those of `attributes` or of the old leaf;
    /// all else is as `attributes` say, even if another thread changed it since the caller looked.
    ///
    /// Memory is made coherent first ([`Platform::maintain`]); if its type changes, after the
    /// invalidation, which takes long for a block. Unless rights alone change, each leaf faults
    /// until an invalidation, executed inside, has completed, and that maintenance, of the leaf or
    /// of the up to eight neighbouring pages that share the invalidation: a guest that uses it
    /// meanwhile faults again. Other memory is the only one in use when this returns; rights that
    /// were taken are gone after [`Guard::invalidate`].
    ///
    /// To move a page that the guest may write: [`Guard::write_protect`],
    /// [`Guard::defer_invalidation`] (another thread may have protected it, and not completed),
    /// [`Guard::invalidate`], copy, replace. From the first step to the last, no other thread may
    /// take rights from the page, as a round of a log does, or unmap it: the page would look as if
    /// it had not been written in between. To share it: the same, with memory that another guest
    /// maps as well; to end the sharing, in the write fault: copy, replace with the right to write,
    /// and report the write after it, as [`Guard::relax`] has it.
    ///
    /// # Errors
    /// Nothing is done on [`ReplaceError::Range`], [`ReplaceError::HostAddress`],
    /// [`ReplaceError::Attributes`], and on [`ReplaceError::CutsBlock`] unless the block appeared
    /// meanwhile. [`ReplaceError::Unaligned`], [`ReplaceError::Differs`],
    /// [`ReplaceError::Writable`] (only where `from` and `to` differ) and
    /// [`ReplaceError::Contended`] leave everything replaced that precedes the address where it
    /// stopped.
    #[inline(always)]
    pub fn replace(
        &mut self,
        range: GpaRange,
        from: Hpa,
        to: Hpa,
        attributes: Attributes,
    ) -> Result<u64, Interruption<ReplaceError>> {
        if range.size() == 1 << F::PAGE_SHIFT
            && let Some(bytes) = self.replace_page(range, from, to, attributes)
        {
            return Ok(bytes);
        }
        self.replace_walk(range, from, to, attributes)
    }

    /// [`Guard::replace`] of a page whose table is there, without a walk, by way of a break;
    /// returns the bytes that changed. Does nothing in all other cases, which the walk handles.
    #[inline(always)]
    fn replace_page(
        &mut self,
        range: GpaRange,
        from: Hpa,
        to: Hpa,
        attributes: Attributes,
    ) -> Option<u64> {
        let (tables, page, gpa) = (self.tables, F::size(0).bytes(), range.start().0);
        tables.check(&range).ok()?;
        tables.check_host(to, page).ok()?;
        let pte = tables.entry_at(gpa, 0)?;
        let raw = pte.load();
        if F::kind(raw, 0) != Kind::Leaf || folded::<F>(raw) {
            return None;
        }
        let mut replace = Replace::of(tables, &range, (from, to, attributes), &mut self.sums);
        let new = replace.plan(0, raw, gpa).ok()??;
        if !new.breaks {
            return None;
        }
        if !new.retyped {
            replace.maintain(gpa, page, false);
        }
        let ptes = core::slice::from_ref(pte);
        if replace.broken::<true>(0, ptes, (&[raw], &[new.raw]), new.retyped.into(), gpa) != 1 {
            return None;
        }
        tables.touch_above(gpa, 0);
        tables.platform.publish();
        self.sums.counts.entries_read += u64::from(tables.geometry().root_level) + 1;
        Some(page)
    }

    #[inline(never)]
    fn replace_walk(
        &mut self,
        range: GpaRange,
        from: Hpa,
        to: Hpa,
        attributes: Attributes,
    ) -> Result<u64, Interruption<ReplaceError>> {
        let tables = self.tables;
        if let Err(reason) = tables.check_replace(&range, to, attributes) {
            return Self::stopped(range.start(), reason);
        }
        let before = self.sums.counts.bytes_changed;
        let mut visitor = Replace::of(tables, &range, (from, to, attributes), &mut self.sums);
        let result = tables.walk(range.start().0, range.end().0, &mut visitor);
        let reason = visitor.reason;
        let bytes = self.sums.counts.bytes_changed - before;
        if bytes != 0 {
            tables.platform.publish();
        }
        match result {
            Ok(()) => Ok(bytes),
            Err(at) => Self::stopped(at, reason),
        }
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Invalidates leaves of one size in a range, if CPUs may have them.
    #[inline(always)]
    fn invalidate_leaves(&self, start: u64, end: u64, size: PageSize) -> bool {
        let mut stale = PendingFlush::NOTHING;
        stale.leaves(start, end, size);
        let what = self.invalidation(&stale);
        what.as_ref().inspect(|what| self.platform.invalidate(what)).is_some()
    }

    #[inline(never)]
    fn invalidate_apart(&self, start: u64, end: u64, size: PageSize) -> bool {
        self.invalidate_leaves(start, end, size)
    }

    fn check_replace(
        &self,
        range: &GpaRange,
        to: Hpa,
        attributes: Attributes,
    ) -> Result<(), ReplaceError> {
        self.check(range).map_err(ReplaceError::Range)?;
        if let Err(MapError::HostAddress { hpa, page, bits }) = self.check_host(to, range.size()) {
            return Err(ReplaceError::HostAddress { hpa, page, bits });
        }
        self.format.encode(attributes).map_err(ReplaceError::Attributes)?;
        match self.cut_block(range, |_| true) {
            Some(size) => Err(ReplaceError::CutsBlock { size }),
            None => Ok(()),
        }
    }
}

struct Replace<'t, 'g, F: Format, P: Platform> {
    tables: &'t Tables<'t, F, P>,
    start: u64,
    from: Hpa,
    to: Hpa,
    attributes: Attributes,
    sums: &'g mut GuardState,
    reason: ReplaceError,
}

/// The leaf that replaces another.
struct New {
    raw: u64,
    /// The new leaf may replace the old one only after an invalidation.
    breaks: bool,
    /// The memory's type changes: it is maintained when no CPU uses it any more.
    retyped: bool,
}

impl<'t, 'g, F: Format, P: Platform> Replace<'t, 'g, F, P> {
    #[inline(always)]
    fn of(
        tables: &'t Tables<'t, F, P>,
        range: &GpaRange,
        (from, to, attributes): (Hpa, Hpa, Attributes),
        sums: &'g mut GuardState,
    ) -> Self {
        let (start, reason) = (range.start().0, ReplaceError::Contended);
        Self { tables, start, from, to, attributes, sums, reason }
    }

    /// Returns the host address that is to be mapped at `gpa`.
    fn target(&self, gpa: u64) -> Hpa {
        Hpa(self.to.0.wrapping_add(gpa - self.start))
    }

    /// Returns the new leaf for `raw` at `level`, which the range covers whole; `None` if it needs
    /// no change.
    #[inline(always)]
    fn plan(&self, level: u8, raw: u64, gpa: u64) -> Result<Option<New>, ReplaceError> {
        let (size, hpa) = (F::size(level), F::leaf_address(raw, level));
        let target = self.target(gpa);
        let moves = self.from != self.to;
        let there = hpa.0 == self.from.0.wrapping_add(gpa - self.start);
        // Replaced before the walk began anew, or by another thread.
        if !there && hpa != target {
            return Err(ReplaceError::Differs { size, hpa });
        }
        if target.0 & (size.bytes() - 1) != 0 {
            return Err(ReplaceError::Unaligned { size });
        }
        let old = self.tables.format.decode(raw, level);
        let attributes = Attributes {
            accessed: self.attributes.accessed || old.accessed,
            dirty: self.attributes.dirty || old.dirty,
            ..self.attributes
        };
        let bits = self.tables.format.encode(attributes).map_err(ReplaceError::Attributes)?;
        let new = F::leaf(bits, level, target);
        if new == raw {
            return Ok(None);
        }
        if moves && there && old.write {
            return Err(ReplaceError::Writable);
        }
        let retyped = old.memory != attributes.memory;
        let breaks = retyped || moves && there;
        Ok(Some(New { raw: new, breaks, retyped }))
    }

    /// Maintains the caches for the memory of a leaf. Memory whose type changes needs it even if
    /// the new type is a device's, because caches may hold it by the old type.
    #[inline(always)]
    fn maintain(&self, gpa: u64, bytes: u64, retyped: bool) {
        let memory = if retyped { Memory::Normal } else { self.attributes.memory };
        if let Some(what) = maintenance(&Attributes { memory, ..self.attributes }) {
            self.tables.platform.maintain(self.target(gpa), bytes, what);
        }
    }

    /// Replaces leaves at `level`, neighbours from `gpa` on, by way of a break; returns how many.
    /// `raws` are their values, `news` the new ones, and `retyped` has a bit for each whose memory
    /// changes its type. `APART`: the invalidation is not to take stack of the caller's.
    #[inline(always)]
    fn broken<const APART: bool>(
        &mut self,
        level: u8,
        ptes: &[Pte],
        (raws, news): (&[u64], &[u64]),
        retyped: u64,
        gpa: u64,
    ) -> usize {
        let size = F::size(level);
        let frozen = F::frozen(Hpa(0));
        let most = ptes.len().min(raws.len()).min(news.len());
        // By index, because `zip` is a call if crates are not optimised together.
        let mut held = 0;
        while held < most && ptes[held].exchange(raws[held], frozen).is_ok() {
            held += 1;
        }
        let bytes = held as u64 * size.bytes();
        if held != 0 {
            let invalidated = if APART {
                self.tables.invalidate_apart(gpa, gpa + bytes, size)
            } else {
                self.tables.invalidate_leaves(gpa, gpa + bytes, size)
            };
            self.sums.counts.invalidations += u64::from(invalidated);
        }
        for index in 0..held {
            if retyped >> index & 1 == 1 {
                self.maintain(gpa + index as u64 * size.bytes(), size.bytes(), true);
            }
            ptes[index].release(frozen, news[index]);
        }
        self.sums.counts.broken += held as u64;
        self.sums.counts.entries_written += 2 * held as u64;
        self.sums.counts.bytes_changed += bytes;
        held
    }

    /// Replaces one leaf of any level; returns whether it was changed in place. Not inlined, and by
    /// value: its frame is on the stack once, and the walk's are small.
    #[inline(never)]
    fn leaf(
        &mut self,
        level: u8,
        pte: &Pte,
        raw: u64,
        (start, end): (u64, u64),
    ) -> Result<bool, Flow> {
        let entry = Entry { pte, raw, start, end };
        if !entry.whole::<F>(level) {
            return Err(self.stop(ReplaceError::CutsBlock { size: F::size(level) }));
        }
        if folded::<F>(raw) {
            return Err(Flow::Aside);
        }
        let new = match self.plan(level, raw, start) {
            Ok(Some(new)) => new,
            Ok(None) => return Ok(false),
            Err(reason) => return Err(self.stop(reason)),
        };
        if !new.retyped {
            self.maintain(start, end - start, false);
        }
        let replaced = if new.breaks {
            let (ptes, retyped) = (core::slice::from_ref(pte), new.retyped.into());
            self.broken::<false>(level, ptes, (&[raw], &[new.raw]), retyped, start) == 1
        } else {
            pte.exchange(raw, new.raw).is_ok()
        };
        if replaced { Ok(!new.breaks) } else { Err(Flow::Again) }
    }

    /// Replaces the first pages of a run, those that need a break; returns how many. All others,
    /// and pages that are refused, are visited one by one.
    #[inline(never)]
    fn run(&mut self, run: &[Pte; RUN], raws: &[u64; RUN], at: u64) -> usize {
        let page = F::size(0).bytes();
        let (mut news, mut retyped) = ([0; RUN], 0);
        let mut count = 0;
        for (index, &raw) in raws.iter().enumerate() {
            let gpa = at + index as u64 * page;
            if F::kind(raw, 0) != Kind::Leaf || folded::<F>(raw) {
                break;
            }
            let Ok(Some(new)) = self.plan(0, raw, gpa) else { break };
            if !new.breaks {
                break;
            }
            if !new.retyped {
                self.maintain(gpa, page, false);
            }
            news[index] = new.raw;
            retyped |= u64::from(new.retyped) << index;
            count = index + 1;
        }
        if count == 0 {
            return 0;
        }
        self.broken::<false>(0, &run[..count], (raws, &news), retyped, at)
    }

    fn stop(&mut self, reason: ReplaceError) -> Flow {
        self.reason = reason;
        Flow::Stop
    }
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for Replace<'t, '_, F, P> {
    const LEVELS: Levels = Levels::ALL;
    const TOUCHES: bool = true;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, tally: &mut WalkCounts) -> Flow {
        if kind != Kind::Leaf {
            return Flow::Next;
        }
        match self.leaf(level, entry.pte, entry.raw, (entry.start, entry.end)) {
            Ok(in_place) => {
                if in_place {
                    tally.change(&entry);
                }
                Flow::Next
            }
            Err(flow) => flow,
        }
    }

    /// Pages that are broken together share one invalidation.
    #[inline]
    fn visit_run(
        &mut self,
        run: &'t [Pte; RUN],
        raws: &[u64; RUN],
        at: u64,
        _: &mut WalkCounts,
    ) -> usize {
        self.run(run, raws, at)
    }

    #[inline(always)]
    fn aside(&mut self, level: u8, gpa: u64) -> Flow {
        self.tables.unfold(gpa, level, self.sums)
    }

    #[inline]
    fn settle(&mut self, level: u8, tally: WalkCounts) {
        self.sums.settle::<F>(level, &tally, true);
    }
}
