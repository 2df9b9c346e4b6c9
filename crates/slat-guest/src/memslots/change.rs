//! Changes of memslots, in order. [`MemslotSnapshot::plan`] has the rules; [`work`](super::work)
//! keeps the rest of a change while other threads change memslots.

use crate::backing::Backing;
use crate::bits::{Bits, SpilledBits, Splits};
use crate::config::{ExecuteHuge, Logging};
use crate::events::Event;
use crate::host::Host;
use crate::memslots::kinds::Kinds;
use crate::memslots::progress::{MemslotChange, MemslotWork};
use crate::memslots::spec::{MemslotError, MemslotId, MemslotSpec};
use crate::memslots::work::{Unfinished, Work};
use crate::memslots::{Memslot, MemslotSnapshot, Plan};
use crate::outcome::SplitReport;
use crate::worker::{Inside, Worker};
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{Format, GpaRange};

impl MemslotWork {
    /// Works on the next `pieces` pieces of the memslot, or on those that are left; then lets other
    /// threads change memslots. A piece is 1 GiB of guest addresses, or the largest leaf if that is
    /// larger. The call that does the last piece ends the change and returns its result; calls
    /// before it return `None`. Later calls return the result again, at no cost.
    ///
    /// `worker` is any worker of the same guest, on any thread. Threads that run one change take
    /// turns, as changes of memslots do. [`Host::between_pieces`] runs between pieces.
    ///
    /// # Errors
    /// [`MemslotError::Missing`]: the change is of another guest than the worker's; nothing was
    /// done.
    pub fn run<F: Format, H: Host, B: Backing>(
        &self,
        worker: &mut Worker<'_, F, H, B>,
        pieces: u64,
    ) -> Result<Option<MemslotChange>, MemslotError> {
        let guest = worker.guest;
        if self.guest != guest.identity {
            return Err(MemslotError::Missing { id: self.id });
        }
        let mut turn = guest.change_turn();
        if let Some(change) = self.change() {
            return Ok(Some(change));
        }
        let at = turn.iter().position(|unfinished| unfinished.is_of(self));
        let at = at.ok_or(MemslotError::Missing { id: self.id })?;
        Ok(worker.work_on(&mut turn, at, pieces))
    }
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
    /// # Errors
    /// [`MemslotError`]; nothing was done.
    pub fn set_memslot(&mut self, spec: MemslotSpec) -> Result<MemslotChange, MemslotError> {
        let guest = self.guest;
        let mut turn = guest.change_turn();
        let work = self.begin(&mut turn, spec)?;
        if let Some(at) = turn.iter().position(|unfinished| unfinished.is_of(&work)) {
            self.work_on(&mut turn, at, u64::MAX);
        }
        Ok(work.change().expect("all of it is done"))
    }

    /// Begins what [`Worker::set_memslot`] does; [`MemslotWork::run`] does the work on the
    /// memslot's memory piece by piece, so that the caller can do other things in between. When
    /// this returns, all faults see that the memslot is going, that it logs, or that it no longer
    /// logs.
    ///
    /// A caller that asks again for an unfinished change continues it. A caller that asks for
    /// another change of the memslot, or for addresses or private memory that a memslot is about to
    /// leave, completes the unfinished change first, in this call. So each change has the same
    /// effect as if it were completed when it was asked for.
    ///
    /// # Errors
    /// Those of [`Worker::set_memslot`]; nothing was done.
    pub fn begin_memslot(&mut self, spec: MemslotSpec) -> Result<MemslotWork, MemslotError> {
        let guest = self.guest;
        let mut turn = guest.change_turn();
        self.begin(&mut turn, spec)
    }

    fn begin(
        &mut self,
        turn: &mut Vec<Unfinished>,
        spec: MemslotSpec,
    ) -> Result<MemslotWork, MemslotError> {
        let guest = self.guest;
        if let Some(unfinished) = turn.iter().find(|unfinished| unfinished.does(&spec)) {
            return Ok(unfinished.ticket(&guest.identity));
        }
        while let Some(at) = turn.iter().position(|unfinished| unfinished.precedes(&spec)) {
            self.work_on(turn, at, u64::MAX);
        }
        let bits = guest.tables.geometry().address_bits;
        // SAFETY: the lock is held, and `now` is not used after the first `replace`.
        let now = unsafe { guest.memslots.snapshot() };
        let plan = now.plan(&spec, guest.page(), bits)?;
        if let Some(other) = turn.iter().find(|unfinished| unfinished.takes(&spec)) {
            return Err(MemslotError::Overlaps { id: other.id() });
        }
        let view = now.clone();
        if plan == Plan::Nothing {
            return Ok(MemslotWork::over(&guest.identity, spec.id, MemslotChange::Same));
        }
        let before = view.named(spec.id).map(|memslot| memslot.spec);
        guest.event(|| Event::MemslotBegin { before, after: spec });
        let begun = self.begin_plan(turn, plan, view, (spec, before));
        if !matches!(&begun, Ok(work) if work.change().is_none()) {
            guest.event(|| Event::MemslotEnd { id: spec.id });
        }
        begun
    }

    /// Makes faults see `plan`, and prepares the remaining work.
    fn begin_plan(
        &mut self,
        turn: &mut Vec<Unfinished>,
        plan: Plan,
        mut view: MemslotSnapshot,
        (spec, before): (MemslotSpec, Option<MemslotSpec>),
    ) -> Result<MemslotWork, MemslotError> {
        let guest = self.guest;
        let Some(before) = before else {
            let memslot = self.new_memslot(spec, view.execute_huge)?;
            if !view.aliases && view.backed_by(spec.host_range()).next().is_some() {
                // Set before the memslot is there: `replace` waits for writes that assume that no
                // other memslot has the page.
                view.aliases = true;
                self.replace(view.clone());
            }
            view.insert(memslot);
            self.replace(view);
            return Ok(MemslotWork::over(&guest.identity, spec.id, MemslotChange::Inserted));
        };
        let new = |work| Unfinished::new(spec, &before, work);
        let unfinished = match plan {
            Plan::Delete => {
                view.change(spec.id, |memslot| memslot.deleting = true);
                self.replace(view);
                new(Work::Delete)
            }
            Plan::Move => {
                let memslot = self.new_memslot(spec, view.execute_huge)?;
                view.change(spec.id, |memslot| memslot.deleting = true);
                self.replace(view);
                new(Work::Move(memslot))
            }
            Plan::Flags if spec.log_dirty => {
                let log = self.new_log(&spec)?;
                let scratch = self.scratch(&spec)?;
                let mut work = new(Work::LogOn { split: None, scratch });
                if !self.begins_in_leaves() {
                    work.done_to(before.range().end());
                }
                let begins = Some(work.progress().clone());
                let logs = |memslot: &mut Memslot| {
                    (memslot.spec, memslot.log, memslot.begins) = (spec, Some(log), begins);
                };
                view.change(spec.id, logs);
                self.replace(view);
                let to = self.begin_log(&spec);
                if let Work::LogOn { split, .. } = &mut work.work {
                    let none = SplitReport { split: 0, done: 0, stopped: None };
                    *split = to.map(|to| (to, none));
                }
                work
            }
            _ => {
                let quiet = |memslot: &mut Memslot| (memslot.spec, memslot.log) = (spec, None);
                view.change(spec.id, quiet);
                self.replace(view);
                new(Work::LogOff { collapsed: 0 })
            }
        };
        let work = unfinished.ticket(&guest.identity);
        turn.push(unfinished);
        self.work_on(turn, turn.len() - 1, 0);
        Ok(work)
    }

    /// Works on up to `pieces` pieces of a change; returns its result if nothing is left.
    fn work_on(
        &mut self,
        turn: &mut Vec<Unfinished>,
        at: usize,
        pieces: u64,
    ) -> Option<MemslotChange> {
        let guest = self.guest;
        let unfinished = &mut turn[at];
        let spec = *unfinished.spec();
        for _ in 0..pieces {
            let Some(piece) = unfinished.piece(F::size(F::LARGEST_LEAF)) else { break };
            match &mut unfinished.work {
                Work::Delete | Work::Move(_) => self.unmap_piece(spec.id, piece),
                Work::LogOn { split, scratch } => self.begin_log_in(&spec, piece, split, scratch),
                Work::LogOff { collapsed } => *collapsed += self.end_log_in(&spec, piece),
            }
            unfinished.done_to(piece.end());
        }
        let goes = matches!(unfinished.work, Work::Delete | Work::Move(_));
        if goes && pieces != 0 {
            for tables in guest.spaces() {
                guest.reclaim_in(tables);
            }
        }
        if unfinished.piece(F::size(F::LARGEST_LEAF)).is_some() {
            return None;
        }
        let ended = turn.swap_remove(at);
        let progress = ended.progress().clone();
        let host = ended.host();
        let change = self.end(ended);
        progress.end(change);
        if goes {
            // vCPUs that wait for its memory ask again, and see the change: those that took a place
            // before the end are found here, and those that take one later ask after it. It comes
            // last, because it calls the VMM.
            guest.arrived(host);
        }
        // If a change begins and ends in one call, `begin` reports its end.
        if pieces != 0 {
            guest.event(|| Event::MemslotEnd { id: spec.id });
        }
        Some(change)
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

    /// Ends a change whose pieces are all done.
    fn end(&mut self, unfinished: Unfinished) -> MemslotChange {
        let id = unfinished.id();
        match unfinished.work {
            Work::Delete => {
                self.take_out(id, None);
                MemslotChange::Deleted
            }
            Work::Move(memslot) => {
                self.take_out(id, Some(memslot));
                MemslotChange::Moved
            }
            Work::LogOn { split, .. } => MemslotChange::LogOn(split.map(|(_, report)| report)),
            Work::LogOff { collapsed } => MemslotChange::LogOff { collapsed },
        }
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

    /// Deletes all memslots. Other threads may fault, age and read logs meanwhile.
    pub fn teardown(&mut self) {
        // Includes memslots that are being deleted or moved.
        for spec in self.look(|view| view.iter().map(|memslot| memslot.spec).collect::<Vec<_>>()) {
            match self.set_memslot(MemslotSpec { bytes: 0, ..spec }) {
                // Another thread has deleted it meanwhile.
                Ok(_) | Err(MemslotError::Missing { .. }) => {}
                Err(error) => unreachable!("a memslot can always be deleted: {error}"),
            }
        }
    }

    fn new_memslot(
        &self,
        spec: MemslotSpec,
        execute_huge: ExecuteHuge,
    ) -> Result<Memslot, MemslotError> {
        let log = if spec.log_dirty { Some(self.new_log(&spec)?) } else { None };
        if spec.private.is_some() && self.guest.caches.matters() {
            return Err(MemslotError::PrivateUncached);
        }
        if spec.log_blocks && self.guest.config.logging != Logging::Protect {
            return Err(MemslotError::LogBlocks);
        }
        let splits = match execute_huge {
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
