//! Changes of slots: their rules are in [`View::plan`], their order is here.

use crate::backing::Backing;
use crate::bits::{Bits, Kept, Splits};
use crate::config::{ExecuteHuge, Logging};
use crate::eager::SplitReport;
use crate::events::Event;
use crate::host::Host;
use crate::ranges::pieces;
use crate::slots::kinds::Kinds;
use crate::slots::spec::{SlotError, SlotSpec};
use crate::slots::{Plan, Slot, View};
use crate::worker::{Inside, Worker};
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::Format;

/// What [`Worker::set_slot`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotChange {
    /// The slot was there, just so.
    Same,
    /// There is a new slot.
    Inserted,
    /// It is somewhere else in the guest's addresses.
    Moved,
    /// It logs: what was split eagerly, if that was asked for.
    LogOn(Option<SplitReport>),
    /// It does so no more: bytes of blocks that were put together again.
    LogOff {
        /// Bytes.
        collapsed: u64,
    },
    /// There is no such slot any more.
    Deleted,
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
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
        let _turn = guest.change_turn();
        let bits = guest.tables.geometry().address_bits;
        // SAFETY: the lock is held, and `now` is not used after the first `replace`.
        let now = unsafe { guest.slots.view() };
        let plan = now.plan(&spec, guest.page(), bits)?;
        let view = now.clone();
        if plan == Plan::Nothing {
            return Ok(SlotChange::Same);
        }
        let before = view.named(spec.id).map(|slot| slot.spec);
        guest.event(|| Event::SlotBegin { before, after: spec });
        let change = self.carry_out(plan, view, spec);
        guest.event(|| Event::SlotEnd { id: spec.id });
        change
    }

    fn carry_out(
        &mut self,
        plan: Plan,
        mut view: View,
        spec: SlotSpec,
    ) -> Result<SlotChange, SlotError> {
        let change = match plan {
            Plan::Nothing => SlotChange::Same,
            Plan::Insert => {
                let slot = self.new_slot(spec, view.execute_huge)?;
                if !view.aliases && view.backed_by(spec.host_range()).next().is_some() {
                    // Before the slot: no write that takes a page for the only one of its kind is
                    // under way then.
                    view.aliases = true;
                    self.replace(view.clone());
                }
                view.insert(slot);
                self.replace(view);
                SlotChange::Inserted
            }
            Plan::Delete => {
                self.take_away(&mut view, &spec);
                self.replace(view);
                SlotChange::Deleted
            }
            Plan::Move => {
                let mut slot = self.new_slot(spec, view.execute_huge)?;
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
                view.change(spec.id, logs);
                let scratch = self.scratch(&spec)?;
                self.replace(view);
                SlotChange::LogOn(self.begin_log(&spec, scratch))
            }
            Plan::Flags => {
                let quiet = |slot: &mut Slot| (slot.spec, slot.log) = (spec, None);
                view.change(spec.id, quiet);
                self.replace(view);
                SlotChange::LogOff { collapsed: self.end_log(&spec) }
            }
        };
        Ok(change)
    }

    /// The slots, by guest address.
    pub fn slots(&mut self) -> Vec<SlotSpec> {
        self.look(|view| view.iter().filter(|slot| !slot.going).map(|slot| slot.spec).collect())
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

    fn new_slot(&self, spec: SlotSpec, execute_huge: ExecuteHuge) -> Result<Slot, SlotError> {
        let log = if spec.log_dirty { Some(self.new_log(&spec)?) } else { None };
        if spec.private.is_some() && self.guest.caches.matters() {
            return Err(SlotError::PrivateUncached);
        }
        if spec.log_blocks && self.guest.config.logging != Logging::Protect {
            return Err(SlotError::LogBlocks);
        }
        let splits = match execute_huge {
            // Recovery takes rights from tables whose pages may be of two kinds.
            _ if spec.private.is_some() => None,
            ExecuteHuge::Allowed => None,
            _ => Some(Arc::new(Splits::new::<F>(&spec).ok_or(SlotError::OutOfMemory)?)),
        };
        let guest = self.guest;
        // Also where leaves are pages that say it all: a fault that comes late empties a leaf that
        // another fault has mapped meanwhile, and the guest has written.
        let kept = Kept::new(spec.pages(guest.page())).ok_or(SlotError::OutOfMemory)?;
        let kept = Arc::new(kept);
        let kinds = match spec.private {
            None => None,
            Some(_) => {
                let kinds = Kinds::new(spec.pages(guest.page()));
                Some(Arc::new(kinds.ok_or(SlotError::OutOfMemory)?))
            }
        };
        Ok(Slot { spec, going: false, log, kept, splits, kinds })
    }

    fn new_log(&self, spec: &SlotSpec) -> Result<Arc<Bits>, SlotError> {
        let dirty = self.guest.config.initially_set;
        let log = Bits::new(spec.pages(self.guest.page()), dirty);
        log.map(Arc::new).ok_or(SlotError::OutOfMemory)
    }

    /// Makes `view` that of all, and waits for faults that saw another.
    pub(crate) fn replace(&mut self, view: View) {
        // SAFETY: called with the lock held; the faults are waited for.
        unsafe { self.guest.slots.replace(view) };
        self.guest.wait_for_faults();
    }

    /// No fault maps the slot any more; then it is unmapped, and an invalidation still finds it
    /// until then; then `view` is without it. Returns it as it was.
    fn take_away(&mut self, view: &mut View, spec: &SlotSpec) -> Option<Slot> {
        let guest = self.guest;
        view.change(spec.id, |slot| slot.going = true);
        let slot = view.named(spec.id)?.clone();
        self.replace(view.clone());
        for tables in guest.spaces() {
            for piece in pieces(slot.spec.range(), F::size(F::LARGEST_LEAF)) {
                // A slot that moves keeps its memory.
                let moving = guest.leaving.begin();
                self.inside(tables, |Inside { guard, .. }| {
                    guest.unmap(tables, guard, [piece], |removed| {
                        guest.keep_marks(view, &removed);
                        guest.tell_private(&slot, &removed);
                    })
                });
                drop(moving);
                guest.piece_done(piece);
            }
            guest.reclaim_in(tables);
        }
        view.remove(spec.id);
        // Who waits for its memory asks again, and learns of the change: who took its place, and
        // asked, before faults were waited for is found here; who takes it later asks after that.
        guest.arrived(slot.spec.host_range());
        Some(slot)
    }
}
