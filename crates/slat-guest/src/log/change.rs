//! Changes of slots: their rules are in [`View::plan`], their order is here.

use crate::backing::Backing;
use crate::bits::{Bits, Kept};
use crate::blocks::pieces;
use crate::config::{ExecuteHuge, Logging};
use crate::eager::EagerSplit;
use crate::fault::MAY_WRITE;
use crate::guest::{Guest, Worker};
use crate::host::Host;
use crate::invalidate::widened;
use crate::recovery::Splits;
use crate::slots::{Plan, Slot, SlotChange, SlotError, SlotSpec, View};
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{Attributes, ChangeError, Format, GpaRange, Guard, Halted, Pages, Tables};

impl<'w, 'p, F: Format, H: Host, B: Backing> Worker<'w, 'p, F, H, B> {
    /// Makes the slot `spec.id` as `spec` says; with no bytes, deletes it.
    ///
    /// The rules are those of Linux's `KVM_SET_USER_MEMORY_REGION`. Waits until faults that saw the
    /// slots as they were have returned. A slot that begins to log: when this returns, every later
    /// write is in the log. One that is deleted or moved: the guest cannot reach its memory any
    /// more.
    ///
    /// # Errors
    /// [`SlotError`]; nothing was done.
    pub fn set_slot(&mut self, spec: SlotSpec) -> Result<SlotChange, SlotError> {
        let guest = self.guest;
        let _turn = guest.changing.lock();
        let bits = guest.tables.geometry().address_bits;
        // SAFETY: the lock is held, and `now` is not used after the first `replace`.
        let now = unsafe { guest.slots.view() };
        let plan = now.plan(&spec, guest.page(), bits)?;
        let mut view = now.clone();
        let change = match plan {
            Plan::Nothing => SlotChange::Same,
            Plan::Insert => {
                view.insert(self.new_slot(spec)?);
                self.replace(view);
                SlotChange::Inserted
            }
            Plan::Delete => {
                self.take_away(&mut view, &spec);
                self.replace(view);
                SlotChange::Deleted
            }
            Plan::Move => {
                let mut slot = self.new_slot(spec)?;
                let before = self.take_away(&mut view, &spec);
                // The memory is the same: what was written, and used, is still to be told.
                if let Some(before) = before {
                    slot.kept = before.kept;
                    if spec.log_dirty && before.log.is_some() {
                        slot.log = before.log;
                    }
                }
                view.insert(slot);
                self.replace(view);
                SlotChange::Moved
            }
            Plan::Flags if spec.log_dirty => {
                let log = self.new_log(&spec)?;
                let logs = |slot: &mut Slot| (slot.spec, slot.log) = (spec, Some(log));
                view.slots.iter_mut().find(|slot| slot.spec.id == spec.id).map(logs);
                let scratch = self.scratch(&spec)?;
                self.replace(view);
                SlotChange::LogOn(self.begin_log(&spec, scratch))
            }
            Plan::Flags => {
                let quiet = |slot: &mut Slot| (slot.spec, slot.log) = (spec, None);
                view.slots.iter_mut().find(|slot| slot.spec.id == spec.id).map(quiet);
                self.replace(view);
                SlotChange::LogOff { collapsed: self.end_log(&spec) }
            }
        };
        Ok(change)
    }

    /// The slots, by guest address.
    pub fn slots(&mut self) -> alloc::vec::Vec<SlotSpec> {
        self.look(|view| {
            view.slots.iter().filter(|slot| !slot.going).map(|slot| slot.spec).collect()
        })
    }

    /// The guest's memory vanishes: all slots are deleted. Other threads may go on faulting, ageing
    /// and reading logs meanwhile.
    pub fn teardown(&mut self) {
        for spec in self.slots() {
            match self.set_slot(SlotSpec { bytes: 0, ..spec }) {
                // Deleted by somebody else meanwhile: just as well.
                Ok(_) | Err(SlotError::Missing { .. }) => {}
                Err(error) => unreachable!("a slot can always be deleted: {error}"),
            }
        }
    }

    fn new_slot(&self, spec: SlotSpec) -> Result<Slot, SlotError> {
        let log = if spec.log_dirty { Some(self.new_log(&spec)?) } else { None };
        let splits = match self.guest.config.execute_huge {
            ExecuteHuge::Allowed => None,
            _ => Some(Arc::new(Splits::new::<F>(&spec).ok_or(SlotError::OutOfMemory)?)),
        };
        let guest = self.guest;
        let kept = match guest.config.keeps(guest.page(), guest.tables.format().forces_caches()) {
            false => None,
            true => {
                let kept = Kept::new(spec.pages(guest.page()));
                Some(Arc::new(kept.ok_or(SlotError::OutOfMemory)?))
            }
        };
        Ok(Slot { spec, going: false, log, kept, splits })
    }

    /// Room for what hardware has marked as a log begins, a piece of the slot at a time.
    fn scratch(&self, spec: &SlotSpec) -> Result<Vec<u64>, SlotError> {
        let mut words = Vec::new();
        if self.guest.config.logging == Logging::Hardware {
            let all = pieces(spec.range(), F::size(F::LARGEST_LEAF));
            let most = all.map(|piece| piece.size()).max();
            let pages = most.unwrap_or(0) >> F::PAGE_SHIFT;
            let len = pages.div_ceil(64) as usize;
            words.try_reserve_exact(len).map_err(|_| SlotError::OutOfMemory)?;
            words.resize(len, 0);
        }
        Ok(words)
    }

    fn new_log(&self, spec: &SlotSpec) -> Result<Arc<Bits>, SlotError> {
        let dirty = self.guest.config.initially_set;
        let log = Bits::new(spec.pages(self.guest.page()), dirty);
        log.map(Arc::new).ok_or(SlotError::OutOfMemory)
    }

    /// Makes `view` that of all, and waits for faults that saw another.
    fn replace(&mut self, view: View) {
        // SAFETY: called with the lock held; the faults are waited for.
        unsafe { self.guest.slots.replace(view) };
        self.guest.wait_for_faults();
    }

    /// No fault maps the slot any more; then it is unmapped, and an invalidation still finds it
    /// until then; then `view` is without it. Returns it as it was.
    fn take_away(&mut self, view: &mut View, spec: &SlotSpec) -> Option<Slot> {
        let guest = self.guest;
        let slot = view.slots.iter_mut().find(|slot| slot.spec.id == spec.id)?;
        slot.going = true;
        let slot = slot.clone();
        self.replace(view.clone());
        // A slot that moves keeps its memory.
        let _moving = guest.leaving.begin();
        for tables in guest.spaces() {
            for piece in pieces(slot.spec.range(), F::size(F::LARGEST_LEAF)) {
                self.inside(tables, |guard, _| {
                    guest.unmap(tables, guard, [piece], |removed| guest.keep_marks(view, &removed))
                });
            }
            guest.reclaim_in(tables);
        }
        view.remove(spec.id);
        Some(slot)
    }

    /// All faults log by now; takes from the leaves what was given before. `scratch` has room for a
    /// piece.
    fn begin_log(&mut self, spec: &SlotSpec, mut scratch: Vec<u64>) -> Option<crate::SplitReport> {
        let guest = self.guest;
        // A change of slots waits for a thread that holds an entry, as long as that takes.
        while self.cut_ends(spec).is_err() {}
        if guest.config.folds() {
            for tables in guest.spaces() {
                self.until_done(tables, spec.range(), |guard, rest| guard.unfold(rest));
            }
        }
        if guest.config.initially_set {
            return None;
        }
        let report = guest.config.eager_split.map(|to| {
            let split = EagerSplit::new(spec.range(), to);
            split.run(self, || false)
        });
        for tables in guest.spaces() {
            match guest.config.logging {
                Logging::Protect => self.protect(tables, spec.range()),
                Logging::Hardware => self.begin_hardware_log(tables, spec, &mut scratch),
            }
        }
        report
    }

    /// Takes the right to write from all of `range`, to completion.
    pub(crate) fn protect(&mut self, tables: &'w Tables<'p, F, H>, range: GpaRange) {
        self.until_done(tables, range, |guard, rest| guard.write_protect(rest));
    }

    /// Blocks lose the right to write, pages their marks, which the host is still to be told of.
    fn begin_hardware_log(
        &mut self,
        tables: &'w Tables<'p, F, H>,
        spec: &SlotSpec,
        scratch: &mut [u64],
    ) {
        self.until_done(tables, spec.range(), |guard, rest| {
            let mut from = rest;
            loop {
                let leaves = guard.leaves(from).map_err(|why| Halted { at: from.start(), why })?;
                // Blocks do not come to be in a slot that logs (`blocks`): none is behind this.
                let block = leaves.flatten().find(|leaf| leaf.size > F::size(0));
                let Some(block) = block else { break };
                let range = GpaRange::new(block.gpa, block.size.bytes());
                let range = range.expect("a leaf is not empty");
                guard.write_protect(range)?;
                let left = rest.end().0.saturating_sub(range.end().0);
                let Ok(behind) = GpaRange::new(range.end(), left) else { break };
                from = behind;
            }
            Ok(0)
        });
        let kept = self.look(|view| view.named(spec.id).and_then(|slot| slot.kept.clone()));
        for piece in pieces(spec.range(), F::size(F::LARGEST_LEAF)) {
            let _moving = kept.as_ref().map(|kept| kept.moves.begin());
            let words = &mut scratch[..(piece.size() >> F::PAGE_SHIFT).div_ceil(64) as usize];
            words.fill(0);
            loop {
                let result = self.inside(tables, |guard, _| {
                    guard.owe(piece).expect("a slot's pages");
                    guard.harvest(piece, words)
                });
                match result {
                    Ok(_) => break,
                    Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => {
                        while self.cut_ends(spec).is_err() {}
                    }
                    Err(Halted { why: ChangeError::Contended, .. }) => tables.platform().wait(),
                    Err(Halted { why, .. }) => unreachable!("a slot's pages, and bits: {why}"),
                }
            }
            let Some(kept) = &kept else { continue };
            for (first, count) in (Pages { start: piece.start(), bits: words }).runs() {
                let at = piece.start().0 + ((first as u64) << F::PAGE_SHIFT);
                kept.written.mark::<F>(spec, at, (count as u64) << F::PAGE_SHIFT);
            }
        }
    }

    /// Repeats `change` until all of `range` is done and invalidated, also what another thread has
    /// done there and not invalidated yet. Piece by piece: tables that others unlink wait for a
    /// piece alone. Entries are held briefly; this waits for them.
    pub(crate) fn until_done(
        &mut self,
        tables: &'w Tables<'p, F, H>,
        range: GpaRange,
        mut change: impl FnMut(&mut Guard<'_, 'p, F, H>, GpaRange) -> Result<u64, Halted<ChangeError>>,
    ) {
        let host = self.guest.tables.platform();
        for piece in pieces(range, F::size(F::LARGEST_LEAF)) {
            self.inside(tables, |guard, _| {
                let mut rest = piece;
                loop {
                    match change(guard, rest) {
                        Ok(_) => break,
                        Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => {
                            match widened(guard, rest) {
                                Ok(wider) => rest = wider,
                                Err(_) => host.wait(),
                            }
                        }
                        Err(Halted { at, why: ChangeError::Contended }) => {
                            let behind = GpaRange::new(at, rest.end().0.saturating_sub(at.0));
                            rest = behind.unwrap_or(rest);
                            host.wait();
                        }
                        Err(Halted { why, .. }) => unreachable!("a slot's pages: {why}"),
                    }
                }
                guard.owe(piece).expect("a slot's pages");
                guard.complete();
            });
        }
    }

    /// No fault logs any more: brings huge pages back in place. Those that may not be executed come
    /// back so, by recovery, where their pages may.
    fn end_log(&mut self, spec: &SlotSpec) -> u64 {
        let guest = self.guest;
        self.one_right_to_write(spec.range());
        let bytes = self.collapse_if(spec.range(), guest.config.largest, |_| true);
        self.hand_to_recovery(spec);
        bytes
    }

    /// Leaves that were protected differ from those that were not: all become writable that may be,
    /// or, where hardware would not mark the next write, none is, until a block is written again as
    /// a whole. In a slot that cannot begin to log meanwhile.
    fn one_right_to_write(&mut self, range: GpaRange) {
        let guest = self.guest;
        if guest.gives_writes_back() {
            let change = |guard: &mut Guard<'_, 'p, F, H>, rest| guard.allow_write(rest, MAY_WRITE);
            self.until_done(&guest.tables, range, change);
        } else {
            self.protect(&guest.tables, range);
        }
    }
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Whether a leaf can be writable that nobody wrote: hardware marks its first write.
    pub(crate) fn gives_writes_back(&self) -> bool {
        let clean = Attributes { dirty: false, ..Attributes::RAM };
        self.tables.format().encode(clean).is_ok()
    }
}
