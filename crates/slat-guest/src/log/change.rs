//! Changes of slots: their rules are in [`View::plan`], their order is here.

use super::{Log, pages};
use crate::backing::Backing;
use crate::config::{ExecuteHuge, Logging};
use crate::eager::EagerSplit;
use crate::fault::MAY_WRITE;
use crate::guest::Worker;
use crate::host::Host;
use crate::invalidate::widened;
use crate::recovery::Splits;
use crate::slots::{Plan, Slot, SlotChange, SlotError, SlotSpec, View};
use alloc::sync::Arc;
use slat::{Attributes, ChangeError, Execute, Format, GpaRange, Guard, Halted, PageSize, Tables};

impl<'w, 'p, F: Format, H: Host, B: Backing> Worker<'w, 'p, F, H, B> {
    /// Makes the slot `spec.id` as `spec` says; with no bytes, deletes it.
    ///
    /// The rules are those of Linux's `KVM_SET_USER_MEMORY_REGION`. Waits until faults that saw the
    /// slots as they were have returned. A slot that begins to log: when this returns, every later
    /// write is in the log. One that is deleted or moved: the guest cannot reach its memory any more.
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
                // The memory is the same: what was written is still to be told.
                if spec.log_dirty
                    && let Some(log) = before
                {
                    slot.log = Some(log);
                }
                view.insert(slot);
                self.replace(view);
                SlotChange::Moved
            }
            Plan::Flags if spec.log_dirty => {
                let log = self.new_log(&spec)?;
                let logs = |slot: &mut Slot| (slot.spec, slot.log) = (spec, Some(log));
                view.slots.iter_mut().find(|slot| slot.spec.id == spec.id).map(logs);
                self.replace(view);
                SlotChange::LogOn(self.begin_log(&spec))
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
            // Deleted by somebody else meanwhile: just as well.
            let _ = self.set_slot(SlotSpec { bytes: 0, ..spec });
        }
    }

    fn new_slot(&self, spec: SlotSpec) -> Result<Slot, SlotError> {
        let log = if spec.log_dirty { Some(self.new_log(&spec)?) } else { None };
        let splits = match self.guest.config.execute_huge {
            ExecuteHuge::Allowed => None,
            _ => Some(Arc::new(Splits::new::<F>(&spec).ok_or(SlotError::OutOfMemory)?)),
        };
        Ok(Slot { spec, going: false, log, splits })
    }

    fn new_log(&self, spec: &SlotSpec) -> Result<Arc<Log>, SlotError> {
        let dirty = self.guest.config.initially_set;
        let log = Log::new(pages(spec, self.guest.page()), dirty);
        log.map(Arc::new).ok_or(SlotError::OutOfMemory)
    }

    /// Makes `view` that of all, and waits for faults that saw another.
    fn replace(&mut self, view: View) {
        // SAFETY: called with the lock held; the faults are waited for.
        unsafe { self.guest.slots.replace(view) };
        self.guest.wait_for_faults();
    }

    /// No fault maps the slot any more; then it is unmapped, and an invalidation still finds it until
    /// then; then `view` is without it. Returns its log.
    fn take_away(&mut self, view: &mut View, spec: &SlotSpec) -> Option<Arc<Log>> {
        let guest = self.guest;
        let slot = view.slots.iter_mut().find(|slot| slot.spec.id == spec.id)?;
        slot.going = true;
        let slot = slot.clone();
        self.replace(view.clone());
        for tables in guest.spaces() {
            self.inside(tables, |guard, _| {
                guest.unmap(tables, guard, [slot.spec.range()], |removed| {
                    guest.keep_dirty(&slot, &removed);
                })
            });
            tables.reclaim();
        }
        view.remove(spec.id);
        slot.log
    }

    /// All faults log by now; takes from the leaves what was given before.
    fn begin_log(&mut self, spec: &SlotSpec) -> Option<crate::SplitReport> {
        let guest = self.guest;
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
                Logging::Hardware => self.begin_hardware_log(tables, spec.range()),
            }
        }
        report
    }

    /// Takes the right to write from all of `range`, to completion.
    pub(crate) fn protect(&mut self, tables: &'w Tables<'p, F, H>, range: GpaRange) {
        self.until_done(tables, range, |guard, rest| guard.write_protect(rest));
    }

    fn begin_hardware_log(&mut self, tables: &'w Tables<'p, F, H>, range: GpaRange) {
        self.until_done(tables, range, |guard, rest| {
            let mut from = rest;
            loop {
                let leaves = guard.leaves(from).map_err(|why| Halted { at: from.start(), why })?;
                // Whoever changes an entry knows that the slot logs: it does not become a block.
                let block = leaves.flatten().find(|leaf| leaf.size > F::size(0));
                let Some(block) = block else { break };
                let range = GpaRange::new(block.gpa, block.size.bytes());
                let range = range.expect("a leaf is not empty");
                guard.write_protect(range)?;
                let left = rest.end().0.saturating_sub(range.end().0);
                let Ok(behind) = GpaRange::new(range.end(), left) else { break };
                from = behind;
            }
            guard.clean(rest)
        });
    }

    /// Repeats `change` until all of `range` is done and invalidated, also what another thread has done
    /// there and not invalidated yet. Entries are held briefly.
    pub(crate) fn until_done(
        &mut self,
        tables: &'w Tables<'p, F, H>,
        range: GpaRange,
        mut change: impl FnMut(&mut Guard<'_, 'p, F, H>, GpaRange) -> Result<u64, Halted<ChangeError>>,
    ) {
        let host = self.guest.tables.platform();
        self.inside(tables, |guard, _| {
            let mut rest = range;
            loop {
                match change(guard, rest) {
                    Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => {
                        rest = widened(guard, rest);
                    }
                    Err(Halted { at, why: ChangeError::Contended }) => {
                        let behind = GpaRange::new(at, rest.end().0.saturating_sub(at.0));
                        rest = behind.unwrap_or(rest);
                        host.wait();
                    }
                    Ok(_) | Err(_) => break,
                }
            }
            let _ = guard.owe(range);
            guard.complete();
        });
    }

    /// No fault logs any more: brings huge pages back in place. Leaves that were protected differ
    /// from those that were not: all become writable that may be, or, where hardware would not mark
    /// the next write, none is, until a block is written again as a whole.
    fn end_log(&mut self, spec: &SlotSpec) -> u64 {
        let guest = self.guest;
        let clean = Attributes { dirty: false, ..Attributes::RAM };
        if guest.tables.format().encode(clean).is_ok() {
            self.until_done(&guest.tables, spec.range(), |guard, rest| {
                guard.allow_write(rest, MAY_WRITE)
            });
        } else {
            self.protect(&guest.tables, spec.range());
        }
        self.collapse_if(spec.range(), guest.config.largest, |_| true)
    }

    /// Puts tables in `range` together to blocks of at most `to`, where the pages behind them are
    /// neighbours of one kind; returns the bytes. Nothing where a slot in the range logs: the log is of
    /// pages.
    pub fn collapse(&mut self, range: GpaRange, to: PageSize) -> u64 {
        self.collapse_if(range, to, |view| {
            let inside = |slot: &&crate::slots::Slot| {
                let slot = slot.spec.range();
                slot.start() < range.end() && range.start() < slot.end()
            };
            view.slots.iter().filter(inside).all(|slot| slot.log.is_none() && !slot.going)
        })
    }

    /// [`Worker::collapse`], if `wanted` by what the slots are then.
    pub(crate) fn collapse_if(
        &mut self,
        range: GpaRange,
        to: PageSize,
        wanted: impl FnOnce(&View) -> bool,
    ) -> u64 {
        let guest = self.guest;
        // A huge page that may be executed does not come to be by the back door.
        let huge = guest.config.execute_huge == ExecuteHuge::Allowed;
        let bytes = self.with_slots(&guest.tables, |view, guard, _| {
            if !wanted(view) {
                return 0;
            }
            // Where somebody holds an entry, the table stays as it is.
            let _ = guard.collapse_where(range, to, |leaf| leaf.execute == Execute::None || huge);
            guard.counts().bytes_changed
        });
        guest.counters.collapsed_bytes.add(bytes);
        guest.tables.reclaim();
        bytes
    }
}
