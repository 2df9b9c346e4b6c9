//! Rights: taken from a range for dirty logging or against execution, and given back in a fault;
//! and the leaves' software bits.
//!
//! A leaf is rewritten by one compare-and-swap from the value that was read. It loses against
//! hardware that sets accessed or dirty, and against other software; either way the new value
//! decides. So if a protection and a fault meet, the later one decides the leaf's rights, and
//! neither loses its dirty state.

mod named;
mod rewrite;

use super::map::maintenance;
use super::rules::{
    Exactly, Executable, ForEach, ForExecute, ForRead, ForWrite, NoExecute, NoWrite, Rule,
    SoftwareBitsRule, Writable, WriteAt,
};
use super::{ChangeError, Pages};
use crate::addr::{Gpa, GpaRange, Hpa};
use crate::format::{Access, Accesses, Attributes, Execute, Format, Kind, Rights, Software};
use crate::guard::Guard;
use crate::local_flush::LocalFlush;
use crate::platform::Platform;
use crate::pte::{Atomically, Change};
use crate::table::{folded, pte};
use crate::tables::{Found, Interruption, Tables};
use core::marker::PhantomData;
use rewrite::Rewrite;

/// The way in which [`Guard::relax`] gives a right: for an access alone (`Access::Write.into()`),
/// as a fault does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Relax {
    access: Access,
    only_if: Software,
    mark_used: bool,
}

impl Relax {
    /// Gives the right that `access` needs to every leaf, and marks it as used, and for a write as
    /// written.
    #[inline]
    pub const fn new(access: Access) -> Self {
        Self { access, only_if: Software::NONE, mark_used: true }
    }

    /// Gives it to those leaves alone that have all bits of `software`: if these bits say what the
    /// guest may do, the decision cannot be out of date.
    #[must_use]
    pub const fn only_if(self, software: Software) -> Self {
        Self { only_if: software, ..self }
    }

    /// Marks nothing as used or written: if hardware marks writes, a clean leaf stays clean until a
    /// write. A read gets nothing in this way.
    #[must_use]
    pub const fn unmarked(self) -> Self {
        Self { mark_used: false, ..self }
    }
}

impl From<Access> for Relax {
    #[inline]
    fn from(access: Access) -> Self {
        Self::new(access)
    }
}

impl<'t, 'p, F: Format, P: Platform> Guard<'t, 'p, F, P> {
    /// Takes the right to write from every leaf in `range`; returns the bytes that had it.
    ///
    /// A leaf that was written keeps its dirty state. Until [`Guard::invalidate`], a vCPU may go on
    /// writing through an entry that its TLB holds: only then is every later write a fault. A
    /// leaf that another thread protected at the same time is owed by that thread, not by this one.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`], and on [`ChangeError::CutsBlock`] unless the
    /// block appeared meanwhile. [`ChangeError::Contended`] leaves everything protected that
    /// precedes the address where it stopped.
    #[inline]
    pub fn write_protect(&mut self, range: GpaRange) -> Result<u64, Interruption<ChangeError>> {
        self.write_protect_by::<Atomically>(range)
    }

    /// As [`Guard::write_protect`], for exactly the pages that a bitmap names.
    ///
    /// # Errors
    /// Those of [`Guard::write_protect`], at the address where it stopped: the pages before it are
    /// done.
    pub fn write_protect_pages(
        &mut self,
        pages: &Pages<'_>,
    ) -> Result<u64, Interruption<ChangeError>> {
        self.rewrite_pages(pages, NoWrite)
    }

    #[inline]
    pub(crate) fn write_protect_by<C: Change>(
        &mut self,
        range: GpaRange,
    ) -> Result<u64, Interruption<ChangeError>> {
        self.rewrite::<C, _>(range, NoWrite)
    }

    /// Takes the right to execute from every leaf in `range`; returns the bytes that changed.
    ///
    /// # Errors
    /// Those of [`Guard::write_protect`].
    pub fn execute_protect(&mut self, range: GpaRange) -> Result<u64, Interruption<ChangeError>> {
        self.rewrite::<Atomically, _>(range, NoExecute)
    }

    /// Sets the rights of every leaf in `range` to exactly `rights`; returns the bytes that
    /// changed.
    ///
    /// Accessed and dirty state, memory type and software bits stay; but a leaf that becomes
    /// writable is dirty from then on where hardware does not mark writes. Memory that becomes
    /// executable is made coherent first ([`Platform::maintain`]). Until [`Guard::invalidate`], a
    /// vCPU may go on with the rights that it had, be they more or fewer.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Attributes`], of rights that the format, as configured,
    /// cannot express; otherwise those of [`Guard::write_protect`].
    pub fn protect(
        &mut self,
        range: GpaRange,
        rights: Rights,
    ) -> Result<u64, Interruption<ChangeError>> {
        let format = self.tables.format;
        let Rights { read, write, execute } = rights;
        let leaf = Attributes { read, write, execute, ..Attributes::RAM };
        if let Err(reason) = format.encode(leaf) {
            return Self::stopped(range.start(), ChangeError::Attributes(reason));
        }
        self.rewrite::<Atomically, _>(range, Exactly(format, rights))
    }

    /// Gives every leaf that overlaps `range` the rights and the state that an [`Access`] needs, as
    /// a fault on a present leaf does; this also sets the accessed state if hardware does not. The
    /// caller knows whether the guest may do the access. A [`Relax`] names the leaves that get the
    /// right by their software bits, or leaves their state alone.
    ///
    /// Memory that becomes executable is made coherent first ([`Platform::maintain`]). The change
    /// is published to walkers, and nothing is owed to other CPUs: one that holds the old rights
    /// faults once more. The CPU that faulted has to drop them: see [`LocalFlush`]. A leaf that was
    /// not accessed is in no TLB. A caller that logs writes by faults reports the write after this,
    /// not before: if a round ends in between, the next one must find the write.
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Range`], and, but for a read, on
    /// [`ChangeError::CutsBlock`] unless the block appeared meanwhile: more than the range would
    /// get the right. A block that allows the access already, and for a write is dirty, is not
    /// refused: it becomes accessed, as it does for a read. For a fetch that is not marked, a block
    /// that would become executable is refused as well: huge pages that may not be executed stay
    /// so, even if another thread collapses pages meanwhile. Nothing is done on
    /// [`ChangeError::Attributes`], of software bits that the format lacks.
    /// [`ChangeError::Contended`] leaves everything done that precedes the address where it
    /// stopped.
    #[inline(always)]
    pub fn relax(
        &mut self,
        range: GpaRange,
        how: impl Into<Relax>,
    ) -> Result<LocalFlush<'t, 'p, F, P>, Interruption<ChangeError>> {
        let Relax { access, only_if, mark_used } = how.into();
        let format = self.tables.format;
        let needed = leaf_bits::<F>(&range, only_if)?;
        match access {
            Access::Write if mark_used => self.grant(range, ForWrite(format, needed)),
            Access::Write => self.allow_write(range, needed),
            access if mark_used => self.relax_to_look(range, access, needed),
            fetch => self.allow_execute(range, fetch, needed),
        }
    }

    /// [`Guard::relax`] for a write, unmarked. It is a function of its own, as the next one is, so
    /// that neither's frame is part of the other's.
    #[inline(never)]
    fn allow_write(
        &mut self,
        range: GpaRange,
        needed: u64,
    ) -> Result<LocalFlush<'t, 'p, F, P>, Interruption<ChangeError>> {
        let format = self.tables.format;
        self.grant(range, Writable(format, needed))
    }

    #[inline(never)]
    fn allow_execute(
        &mut self,
        range: GpaRange,
        fetch: Access,
        needed: u64,
    ) -> Result<LocalFlush<'t, 'p, F, P>, Interruption<ChangeError>> {
        let format = self.tables.format;
        self.grant(range, Executable(format, needed, fetch))
    }

    /// Gives the leaf that translates `gpa`, of whatever size, the rights and the state that all of
    /// `accesses` need, in one change. Returns `None` if no leaf is there. For a hypervisor whose
    /// fault handler knows the page, and by what rights, before it looks into the tables; a block
    /// gets the rights as a whole. Otherwise as [`Guard::relax`].
    ///
    /// # Errors
    /// [`ChangeError::Range`] and [`ChangeError::Contended`]: nothing is done.
    pub fn relax_leaf(
        &mut self,
        gpa: Gpa,
        accesses: Accesses,
    ) -> Result<Option<LocalFlush<'t, 'p, F, P>>, Interruption<ChangeError>> {
        let (tables, format, page) = (self.tables, self.tables.format, 1 << F::PAGE_SHIFT);
        let range = match GpaRange::new(Gpa(gpa.0 & !(page - 1)), page) {
            Ok(range) => range,
            Err(reason) => return Self::stopped(gpa, ChangeError::Range(reason)),
        };
        let bytes = self.rewrite::<Atomically, _>(range, ForEach(format, accesses))?;
        let found = bytes != 0 || {
            let Found { raw, level, .. } = tables.lookup_at_once(gpa.0);
            matches!(F::kind(raw, level), Kind::Leaf | Kind::Sealed)
        };
        Ok(found.then(|| LocalFlush::new(tables, range, bytes)))
    }

    /// [`Guard::relax`] for a read or a fetch. It is a function of its own, so that the path that
    /// most faults take is small enough to be inlined in any profile.
    #[inline(never)]
    fn relax_to_look(
        &mut self,
        range: GpaRange,
        access: Access,
        needed: u64,
    ) -> Result<LocalFlush<'t, 'p, F, P>, Interruption<ChangeError>> {
        let format = self.tables.format;
        if range.size() == 1 << F::PAGE_SHIFT && self.tables.check(&range).is_ok() {
            let (gpa, tables) = (range.start().0, self.tables);
            let bytes = match access {
                Access::Read => self.rewrite_page::<Atomically, _>(gpa, &ForRead(format, needed)),
                fetch => {
                    self.rewrite_page::<Atomically, _>(gpa, &ForExecute(format, needed, fetch))
                }
            };
            if let Some(bytes) = bytes {
                return Ok(LocalFlush::new(tables, range, bytes));
            }
        }
        match access {
            Access::Read => self.relax_walk::<false>(range, access, needed),
            _ => self.relax_walk::<true>(range, access, needed),
        }
    }

    /// As [`Guard::relax_to_look`], by a walk: its stack frame replaces that one's.
    #[inline(never)]
    fn relax_walk<const FETCH: bool>(
        &mut self,
        range: GpaRange,
        access: Access,
        needed: u64,
    ) -> Result<LocalFlush<'t, 'p, F, P>, Interruption<ChangeError>> {
        let (tables, format) = (self.tables, self.tables.format);
        let bytes = if FETCH {
            self.rewrite_many::<Atomically, _>(range, ForExecute(format, needed, access))
        } else {
            self.rewrite_many::<Atomically, _>(range, ForRead(format, needed))
        };
        Ok(LocalFlush::new(tables, range, bytes?))
    }

    /// Gives the page at `gpa` the right to write, as [`Guard::relax`] for a write does, and sets
    /// the bits `software` in its leaf. It is for a page whose software bits did not allow writes,
    /// and that may be written now. Nothing is done, and [`LocalFlush::is_changed`] is false,
    /// unless the leaf of that page, not a block, maps `hpa`. The caller ensures that the memory at
    /// `hpa` is still the page that may be written: no other thread may take it away, and map
    /// another page at the same address, meanwhile.
    ///
    /// # Errors
    /// [`ChangeError::Range`], [`ChangeError::Attributes`] of bits that the format lacks, and
    /// [`ChangeError::Contended`]: nothing is done.
    pub fn grant_write(
        &mut self,
        gpa: Gpa,
        hpa: Hpa,
        software: Software,
    ) -> Result<LocalFlush<'t, 'p, F, P>, Interruption<ChangeError>> {
        let page = 1 << F::PAGE_SHIFT;
        let range = match GpaRange::new(Gpa(gpa.0 & !(page - 1)), page) {
            Ok(range) => range,
            Err(reason) => return Self::stopped(gpa, ChangeError::Range(reason)),
        };
        let added = leaf_bits::<F>(&range, software)?;
        let rule = WriteAt(self.tables.format, hpa, added);
        match self.grant(range, rule) {
            Err(Interruption { reason: ChangeError::CutsBlock { .. }, .. }) => {
                Ok(LocalFlush::new(self.tables, range, 0))
            }
            result => result,
        }
    }

    /// As [`Guard::rewrite`], by a rule that gives rights.
    #[inline(always)]
    fn grant<R: Rule<F>>(
        &mut self,
        range: GpaRange,
        rule: R,
    ) -> Result<LocalFlush<'t, 'p, F, P>, Interruption<ChangeError>> {
        let bytes = self.rewrite::<Atomically, _>(range, rule)?;
        Ok(LocalFlush::new(self.tables, range, bytes))
    }

    /// Sets the software bits `set` of every leaf in `range`, and clears those of `clear`; a bit of
    /// both is set. Returns the bytes that changed.
    ///
    /// Rights, memory type and state stay. Hardware ignores the bits, so nothing is owed and
    /// nothing published; but a group that the range covers in part is unfolded first
    /// ([`Guard::map_contiguous`]).
    ///
    /// # Errors
    /// Nothing is done on [`ChangeError::Attributes`], of bits that the format lacks. A block that
    /// the range cuts and that has the bits already is not refused; otherwise those of
    /// [`Guard::write_protect`].
    pub fn set_software(
        &mut self,
        range: GpaRange,
        set: Software,
        clear: Software,
    ) -> Result<u64, Interruption<ChangeError>> {
        let (set, clear) = (leaf_bits::<F>(&range, set)?, leaf_bits::<F>(&range, clear)?);
        self.rewrite::<Atomically, _>(range, SoftwareBitsRule { set, clear })
    }

    /// Rewrites each leaf by `rule`.
    #[inline(always)]
    pub(super) fn rewrite<C: Change, R: Rule<F>>(
        &mut self,
        range: GpaRange,
        rule: R,
    ) -> Result<u64, Interruption<ChangeError>> {
        if range.size() == 1 << F::PAGE_SHIFT
            && self.tables.check(&range).is_ok()
            && let Some(bytes) = self.rewrite_page::<C, R>(range.start().0, &rule)
        {
            return Ok(bytes);
        }
        self.rewrite_walk::<C, R>(range, rule)
    }

    /// Rewrites the leaf of a page whose table is there, as a fault does, without a walk; returns
    /// the bytes that changed. Leaves all other cases to the walk.
    #[inline(always)]
    fn rewrite_page<C: Change, R: Rule<F>>(&mut self, gpa: u64, rule: &R) -> Option<u64> {
        let tables = self.tables;
        let mut above = [&tables.root_entries()[0]; 4];
        let (ptes, level) = tables.descend(gpa, 0, |level, link| {
            if R::TOUCHES && F::TABLE_ACCESSED != 0 {
                above[level as usize - 1] = link.pte;
            }
        });
        if level > 0 {
            return None;
        }
        let pte = pte::<F>(ptes, gpa, 0);
        let raw = pte.load();
        if F::kind(raw, 0) != Kind::Leaf || folded::<F>(raw) {
            return None;
        }
        let changed = rule.change(raw);
        if changed != raw {
            if R::EXECUTES {
                tables.make_coherent(0, raw, changed);
            }
            C::exchange(pte, raw, changed).ok()?;
        }
        if R::TOUCHES {
            tables.touched(gpa, &above);
        }
        self.sums.counts.entries_read += u64::from(tables.geometry().root_level) + 1;
        if changed == raw {
            return Some(0);
        }
        let page = 1 << F::PAGE_SHIFT;
        self.sums.counts.entries_written += 1;
        self.sums.counts.bytes_changed += page;
        if R::STALE {
            self.sums.owed.leaves(gpa, gpa + page, F::size(0));
            self.sums.owed.set_revoked();
        } else if R::SEEN {
            // Published, so that the vCPU that faulted finds the new leaf.
            tables.platform.publish();
        }
        Some(page)
    }

    #[inline(never)]
    fn rewrite_walk<C: Change, R: Rule<F>>(
        &mut self,
        range: GpaRange,
        rule: R,
    ) -> Result<u64, Interruption<ChangeError>> {
        self.rewrite_many::<C, R>(range, rule)
    }

    #[inline(always)]
    fn rewrite_many<C: Change, R: Rule<F>>(
        &mut self,
        range: GpaRange,
        rule: R,
    ) -> Result<u64, Interruption<ChangeError>> {
        let tables = self.tables;
        // One page cannot be half done: the walk itself finds the block that it would cut.
        let refusal = if R::WHOLE && range.size() > 1 << F::PAGE_SHIFT {
            let given = |found: &Found| gives_nothing::<F>(found.raw, rule.change(found.raw));
            tables
                .check_change_where(&range, |found| R::STALE || !given(found))
                .map_err(ChangeError::from)
        } else {
            tables.check(&range).map_err(ChangeError::Range)
        };
        if let Err(reason) = refusal {
            return Self::stopped(range.start(), reason);
        }
        let before = self.sums.counts.bytes_changed;
        let mut visitor = Rewrite::<'_, '_, F, P, R, C> {
            tables,
            rule,
            range,
            sums: &mut self.sums,
            cut: None,
            change: PhantomData,
        };
        let result = tables.walk(range.start().0, range.end().0, &mut visitor);
        let reason = match visitor.cut {
            Some(size) => ChangeError::CutsBlock { size },
            None => ChangeError::Contended,
        };
        let bytes = self.sums.counts.bytes_changed - before;
        if !R::STALE && R::SEEN && bytes != 0 {
            tables.platform.publish();
        }
        match result {
            Ok(()) => Ok(bytes),
            Err(at) => Self::stopped(at, reason),
        }
    }
}

/// Returns whether a leaf that becomes `changed` gets nothing but the accessed state, which a fault
/// on a part of a block gives all of it.
#[inline(always)]
fn gives_nothing<F: Format>(raw: u64, changed: u64) -> bool {
    (changed ^ raw) & !F::ACCESSED == 0
}

/// Returns the bits of a leaf that are `software`, for a call on `range`.
#[inline]
pub(crate) fn leaf_bits<F: Format>(
    range: &GpaRange,
    software: Software,
) -> Result<u64, Interruption<ChangeError>> {
    let refused =
        |reason| Interruption { at: range.start(), reason: ChangeError::Attributes(reason) };
    software.encode(F::SOFTWARE).map_err(refused)
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    /// Makes memory coherent before `raw` becomes `changed`, if `changed` may be executed and `raw`
    /// may not.
    #[cold]
    pub(crate) fn make_coherent(&self, level: u8, raw: u64, changed: u64) {
        let format = &self.format;
        let after = format.decode(changed, level);
        if format.decode(raw, level).execute != after.execute
            && after.execute != Execute::None
            && let Some(what) = maintenance(&after)
        {
            let hpa = F::leaf_address(raw, level);
            self.platform.maintain(hpa, F::size(level).bytes(), what);
        }
    }
}
