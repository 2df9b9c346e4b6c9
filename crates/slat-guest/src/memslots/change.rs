//! Changes of memslots, in order. [`MemslotSnapshot::plan`] has the rules; [`work`](super::work)
//! has the protocol.

use crate::backing::Backing;
use crate::bits::{Bits, SpilledBits, Splits};
use crate::config::{ExecuteHuge, Logging};
use crate::events::Event;
use crate::host::Host;
use crate::memslots::kinds::Kinds;
use crate::memslots::spec::{MemslotError, MemslotId, MemslotSpec};
use crate::memslots::work::{UnfinishedChange, Work};
use crate::memslots::{Memslot, MemslotSnapshot, Plan};
use crate::outcome::SplitReport;
use crate::sync::{AtomicU64, Ordering};
use crate::worker::{Inside, Worker};
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{Format, GpaRange};

/// The result of a change of a memslot ([`Worker::set_memslot`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemslotChange {
    /// The memslot was already as asked for.
    Same,
    /// There is a new memslot.
    Inserted,
    /// The memslot is at another guest address.
    Moved,
    /// The memslot logs. The report is of eager splits, if they were asked for.
    LogOn(Option<SplitReport>),
    /// The memslot no longer logs.
    LogOff {
        /// The bytes of blocks that were collapsed from tables. A table stays a table if its pages
        /// cannot be a block, or if another thread held an entry of it, as a fault does while it
        /// asks the backing: [`Worker::collapse`] collapses it later.
        collapsed: u64,
    },
    /// The memslot is deleted.
    Deleted,
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Inserts, moves or changes the memslot `spec.id` so that it is as `spec` says, or deletes it
    /// if `spec.bytes` is 0.
    ///
    /// The rules are those of Linux's `KVM_SET_USER_MEMORY_REGION`. This waits until faults that
    /// saw the previous memslots have returned. When it returns, the log of a memslot that begins
    /// to log has every later write, and the guest cannot access the memory of a memslot that was
    /// deleted, or moved, at its old addresses.
    ///
    /// The work on the memslot's memory is done in pieces of 1 GiB, or of the largest leaf;
    /// [`Host::between_pieces`] runs between them. Until it is done, a memslot that is being
    /// deleted or moved answers faults by
    /// [`Retry::MemslotDeleting`](crate::Retry::MemslotDeleting), and the log of a memslot that
    /// begins to log cannot be read ([`LogError::Beginning`](crate::LogError::Beginning)). If the
    /// VMM panics between pieces, the next call completes the change before its own.
    ///
    /// # Errors
    /// [`MemslotError`]; nothing was done.
    pub fn set_memslot(&mut self, spec: MemslotSpec) -> Result<MemslotChange, MemslotError> {
        let guest = self.guest;
        let mut turn = guest.change_turn();
        if let Some(unfinished) = &*turn {
            let asked_again = unfinished.does(&spec);
            let change = self.finish(&mut turn);
            if asked_again {
                return Ok(change);
            }
        }
        let bits = guest.tables.geometry().address_bits;
        // SAFETY: the lock is held, and `now` is not used after the first `replace`.
        let now = unsafe { guest.memslots.snapshot() };
        let plan = now.plan(&spec, guest.page(), bits)?;
        if plan == Plan::Nothing {
            return Ok(MemslotChange::Same);
        }
        let view = now.clone();
        let before = view.named(spec.id).map(|memslot| memslot.spec);
        guest.event(|| Event::MemslotBegin { before, after: spec });
        let begun = self.begin(plan, view, (spec, before));
        if let Ok(Some(unfinished)) = begun {
            *turn = Some(unfinished);
            return Ok(self.finish(&mut turn));
        }
        guest.event(|| Event::MemslotEnd { id: spec.id });
        begun.map(|_| MemslotChange::Inserted)
    }

    /// Makes faults see `plan`. Returns the remaining work, if there is any.
    fn begin(
        &mut self,
        plan: Plan,
        mut view: MemslotSnapshot,
        (spec, before): (MemslotSpec, Option<MemslotSpec>),
    ) -> Result<Option<UnfinishedChange>, MemslotError> {
        let Some(before) = before else {
            let memslot = self.new_memslot(spec)?;
            if !view.aliases && view.backed_by(spec.host_range()).next().is_some() {
                // Set before the memslot is there: `replace` waits for writes that assume that no
                // other memslot has the page.
                view.aliases = true;
                self.replace(view.clone());
            }
            view.insert(memslot);
            self.replace(view);
            return Ok(None);
        };
        let new = |work| UnfinishedChange::new(spec, &before, work);
        Ok(Some(match plan {
            Plan::Delete => {
                view.change(spec.id, |memslot| memslot.deleting = true);
                self.replace(view);
                new(Work::Delete)
            }
            Plan::Move => {
                let memslot = self.new_memslot(spec)?;
                view.change(spec.id, |memslot| memslot.deleting = true);
                self.replace(view);
                new(Work::Move(memslot))
            }
            Plan::Flags if spec.log_dirty => {
                let log = self.new_log(&spec)?;
                let scratch = self.scratch(&spec)?;
                let readable = Arc::new(AtomicU64::new(0));
                let begins = Some(readable.clone());
                let logs = |memslot: &mut Memslot| {
                    (memslot.spec, memslot.log, memslot.begins) = (spec, Some(log), begins);
                };
                view.change(spec.id, logs);
                self.replace(view);
                let none = SplitReport { split: 0, done: 0, stopped: None };
                let split = self.begin_log(&spec).map(|to| (to, none));
                let mut unfinished = new(Work::LogOn { split, scratch, readable });
                if !self.begins_in_leaves() {
                    unfinished.next = before.range().end();
                }
                unfinished
            }
            _ => {
                let quiet = |memslot: &mut Memslot| (memslot.spec, memslot.log) = (spec, None);
                view.change(spec.id, quiet);
                self.replace(view);
                new(Work::LogOff { collapsed: 0 })
            }
        }))
    }

    /// Does the remaining work of a change; returns its result.
    fn finish(&mut self, turn: &mut Option<UnfinishedChange>) -> MemslotChange {
        let guest = self.guest;
        let unfinished = turn.as_mut().expect("a change has begun");
        let spec = unfinished.spec;
        while let Some(piece) = unfinished.piece(F::size(F::LARGEST_LEAF)) {
            match &mut unfinished.work {
                Work::Delete | Work::Move(_) => self.unmap_piece(spec.id, piece),
                Work::LogOn { split, scratch, .. } => {
                    self.begin_log_in(&spec, piece, split, scratch)
                }
                Work::LogOff { collapsed } => *collapsed += self.end_log_in(&spec, piece),
            }
            unfinished.next = piece.end();
        }
        let goes = matches!(unfinished.work, Work::Delete | Work::Move(_));
        if goes {
            for tables in guest.spaces() {
                tables.reclaim();
            }
        }
        let ended = turn.take().expect("as above");
        let change = match ended.work {
            Work::Delete => {
                self.take_out(spec.id, None);
                MemslotChange::Deleted
            }
            Work::Move(memslot) => {
                self.take_out(spec.id, Some(memslot));
                MemslotChange::Moved
            }
            Work::LogOn { split, readable, .. } => {
                // A thread that finds the log readable sees all that was done before.
                readable.store(1, Ordering::Release);
                MemslotChange::LogOn(split.map(|(_, report)| report))
            }
            Work::LogOff { collapsed } => MemslotChange::LogOff { collapsed },
        };
        if goes {
            // vCPUs that wait for its memory ask again, and see the change: those that took a place
            // before the end are found here, and those that take one later ask after it. It comes
            // last, because it calls the VMM.
            guest.arrived(ended.host);
        }
        guest.event(|| Event::MemslotEnd { id: spec.id });
        change
    }

    /// Empties a piece. No fault maps the memslot any more; an invalidation still finds it.
    fn unmap_piece(&mut self, id: MemslotId, piece: GpaRange) {
        let guest = self.guest;
        for tables in guest.spaces() {
            // A memslot that moves keeps its memory, and so the marks of its pages.
            let moving = guest.marks_in_flight.begin();
            self.with_memslots(tables, |view, Inside { guard, .. }| {
                let memslot = view.named(id).expect("it stays until it is empty");
                guest.unmap(view, tables, guard, [piece], |removed| {
                    guest.spill_marks(view, &removed);
                    guest.report_private(memslot, &removed);
                })
            });
            drop(moving);
        }
        guest.piece_done(piece);
    }

    /// Removes an empty memslot from the list, or replaces it by `instead`.
    fn take_out(&mut self, id: MemslotId, instead: Option<Memslot>) {
        // SAFETY: the lock is held, and `view` is a copy.
        let mut view = unsafe { self.guest.memslots.snapshot() }.clone();
        let before = view.named(id).expect("it stays until it is empty").clone();
        view.remove(id);
        if let Some(mut memslot) = instead {
            // The memory is the same: its marks of use and of writes are yet to be reported.
            memslot.spilled_bits = before.spilled_bits;
            if memslot.spec.log_dirty && before.log.is_some() {
                memslot.log = before.log;
            }
            view.insert(memslot);
        }
        self.replace(view);
    }

    /// Returns the memslots, by guest address.
    pub fn memslots(&mut self) -> Vec<MemslotSpec> {
        self.look(|view| {
            view.iter().filter(|memslot| !memslot.deleting).map(|memslot| memslot.spec).collect()
        })
    }

    fn new_memslot(&self, spec: MemslotSpec) -> Result<Memslot, MemslotError> {
        let log = if spec.log_dirty { Some(self.new_log(&spec)?) } else { None };
        if spec.private.is_some() && self.guest.caches.matters() {
            return Err(MemslotError::PrivateUncached);
        }
        if spec.log_blocks && self.guest.config.logging != Logging::Protect {
            return Err(MemslotError::LogBlocks);
        }
        let splits = match self.guest.config.execute_huge {
            // Recovery does not know private pages: it takes rights from whole tables.
            _ if spec.private.is_some() => None,
            ExecuteHuge::Allowed => None,
            _ => Some(Arc::new(Splits::new::<F>(&spec).ok_or(MemslotError::OutOfMemory)?)),
        };
        let guest = self.guest;
        // Also where leaves are pages, which hold all marks themselves: a late fault may empty a
        // leaf that another fault has mapped, and the guest has written, meanwhile.
        let spilled_bits =
            SpilledBits::new(spec.pages(guest.page())).ok_or(MemslotError::OutOfMemory)?;
        let spilled_bits = Arc::new(spilled_bits);
        let kinds = match spec.private {
            None => None,
            Some(_) => {
                let kinds = Kinds::new(spec.pages(guest.page()));
                Some(Arc::new(kinds.ok_or(MemslotError::OutOfMemory)?))
            }
        };
        Ok(Memslot { spec, deleting: false, log, begins: None, spilled_bits, splits, kinds })
    }

    fn new_log(&self, spec: &MemslotSpec) -> Result<Arc<Bits>, MemslotError> {
        let dirty = self.guest.config.initially_set;
        let log = Bits::new(spec.pages(self.guest.page()), dirty);
        log.map(Arc::new).ok_or(MemslotError::OutOfMemory)
    }

    /// Makes `view` current, and waits for faults that saw the previous one.
    pub(crate) fn replace(&mut self, view: MemslotSnapshot) {
        // Before the old list is one that the next change overwrites.
        self.guest.assert_outside();
        // SAFETY:
        // 1. The callers hold the lock.
        // 2. `view` is owned, and no caller uses a reference from before.
        // 3. This waits for the faults, and the callers release the lock after it returns.
        unsafe { self.guest.memslots.replace(view) };
        self.guest.wait_for_faults();
    }
}
