//! The operations of vCPUs on their caches.

use crate::backing::Backing;
use crate::caches::{Event, Work};
use crate::host::Host;
use crate::ranges::pieces;
use crate::sync::Ordering;
use crate::vcpu::Vcpu;
use crate::worker::{Inside, PATIENCE};
use slat::{Format, Gpa, GpaRange, Maintenance, Translation};

/// The result of a switch of a vCPU's caches: what the caller has to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheSwitch {
    /// [`Vcpu::root`] has changed. The CPU invalidates its TLB entries of the guest, and loads the
    /// new root, before it runs the vCPU.
    pub root_changed: bool,
    /// The VMM traps the vCPU's writes to the registers that switch caches (Arm: HCR_EL2.TVM) from
    /// now on, and reports them by [`Vcpu::set_caches`]. If this is `false` the VMM may still trap
    /// them: a machine that traps SCTLR_EL1 alone (FEAT_FGT) can afford that.
    pub trap: bool,
    /// The bytes that were maintained for the switch.
    pub maintained: u64,
}

impl<'w, F: Format, H: Host, B: Backing> Vcpu<'w, F, H, B> {
    /// Returns whether the vCPU's caches are on, as last reported; at first as
    /// [`Config::caches_on`](crate::Config::caches_on) says.
    pub fn is_cached(&self) -> bool {
        self.worker.guest.caches.is_on(self.id)
    }

    /// Returns whether the vCPU is in tables of its own, a *view*: its caches are off, and the
    /// policy is [`CachePolicy::Exact`](crate::CachePolicy::Exact) on a format that does not force
    /// it to use them. Its faults then map pages of the smallest size, in the view only:
    /// [`Stats::views`](crate::Stats::views) counts them,
    /// [`Worker::translate`](crate::Worker::translate) does not find them, and [`Vcpu::root`] is
    /// not the root of [`Guest::tables`](crate::Guest::tables).
    pub const fn has_view(&self) -> bool {
        self.view.is_some()
    }

    /// Records that the vCPU wrote a register that switches caches, and whether they are now on
    /// (Arm: M and C of SCTLR_EL1 both set). The vCPU does not run meanwhile; when this returns,
    /// the work that the policy needs is done.
    pub fn set_caches(&mut self, on: bool) -> CacheSwitch {
        self.announce();
        let caches = &self.worker.guest.caches;
        if on == self.is_cached() {
            caches.set_traps(self.id, !on);
            return self.unchanged();
        }
        self.switch(if on { Event::On } else { Event::Off })
    }

    /// Records that the vCPU maintained a cache by set and way (Arm: `dc csw` and the like, trapped
    /// by HCR_EL2.TSW), which has no useful meaning on a machine that the vCPU shares. A guest does
    /// this for every set and way: only the first counts, until the guest writes a register that
    /// switches caches.
    pub fn set_way(&mut self) -> CacheSwitch {
        self.announce();
        let caches = &self.worker.guest.caches;
        if !caches.matters() || caches.traps(self.id) {
            return self.unchanged();
        }
        self.switch(Event::SetWay)
    }

    /// Restarts the vCPU with its caches off: it was reset, or another vCPU switched it on (PSCI
    /// CPU_ON). It sees data and instructions that the host wrote before.
    ///
    /// Does nothing if the vCPU has never run and its caches are off: it has left nothing behind.
    pub fn reset(&mut self) -> CacheSwitch {
        let guest = self.worker.guest;
        if !guest.caches.has_run(self.id) && !self.is_cached() {
            // The vCPU is about to run, and may do so without a fault.
            guest.caches.runs(self.id);
            return self.unchanged();
        }
        let switch = self.switch(Event::Reset);
        guest.tables.platform().invalidate_instructions();
        switch
    }

    /// Translates `gpa` in the tables that the vCPU runs on; returns `None` if nothing is mapped
    /// there. Waits for a thread that changes an entry.
    pub fn translate(&mut self, gpa: Gpa) -> Option<Translation> {
        let tables = self.worker.guest.space(self.view);
        loop {
            match self.worker.inside(tables, |Inside { guard, .. }| guard.translate(gpa)) {
                Ok(found) => return found,
                Err(_) => tables.platform().wait(),
            }
        }
    }

    /// Reports that the vCPU runs, and makes its view live, before it maps anything: see
    /// `Guest::spaces`.
    #[inline]
    pub(crate) fn announce(&mut self) {
        if !core::mem::replace(&mut self.announced, true) {
            self.announce_first();
        }
    }

    #[cold]
    fn announce_first(&self) {
        let guest = self.worker.guest;
        guest.caches.runs(self.id);
        if let Some(view) = self.view {
            guest.views[view as usize].live.swap(1, Ordering::AcqRel);
        }
    }

    fn unchanged(&self) -> CacheSwitch {
        let trap = self.worker.guest.caches.traps(self.id);
        CacheSwitch { root_changed: false, trap, maintained: 0 }
    }

    fn switch(&mut self, event: Event) -> CacheSwitch {
        let guest = self.worker.guest;
        // It waits for faults, or flushes, and a flush waits for them.
        if guest.caches.matters() && (event != Event::On || !guest.caches.is_exact()) {
            guest.assert_outside();
        }
        let begin = guest.tables.platform().now();
        guest.caches.begin(self.id, event);
        // A write that saw no vCPU with a view does not search the views: see `replacing`. And a
        // fault that maintained a page before the guest's maintenance by set and way may not have
        // mapped it yet.
        if event != Event::On && !guest.views.is_empty() {
            guest.wait_for_faults();
        }
        let work = guest.caches.work(self.id, event);
        let maintained = match work {
            Work::Nothing => 0,
            Work::All { .. } => self.worker.flush_all(),
            Work::Views => self.maintain_views(),
            Work::Leave => self.leave(),
        };
        guest.caches.end(self.id, event, work);
        let view = guest.caches.view(self.id);
        let root_changed = core::mem::replace(&mut self.view, view) != view;
        if root_changed {
            self.announced = false;
        }
        let ticks = guest.tables.platform().now() - begin;
        guest.vcpus[self.id as usize].caches.record(ticks);
        CacheSwitch { root_changed, trap: guest.caches.traps(self.id), maintained }
    }

    /// Maintains the memory that vCPUs whose caches are off have used. A guest that maintains by
    /// set and way wants these vCPUs to see its memory.
    fn maintain_views(&mut self) -> u64 {
        let guest = self.worker.guest;
        let all = GpaRange::new(Gpa(0), 1 << guest.tables.geometry().address_bits);
        let all = all.expect("a guest has an address");
        let views = guest.spaces().skip(1);
        views.map(|tables| self.worker.maintain(tables, all, Maintenance::Data)).sum()
    }

    /// Maintains the memory in the view, then empties the view; returns the bytes.
    ///
    /// The order matters: an invalidation that finds a page unmapped may assume that it was
    /// maintained. An invalidation that unmaps a page first maintains it itself, and keeps it out
    /// of the shared tables until it has done so.
    pub(crate) fn leave(&mut self) -> u64 {
        let guest = self.worker.guest;
        let Some(view) = self.view.map(|view| &guest.views[view as usize]) else { return 0 };
        if view.live.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let all = GpaRange::new(Gpa(0), 1 << view.tables.geometry().address_bits);
        let all = all.expect("a guest has an address");
        let bytes = self.worker.maintain(&view.tables, all, Maintenance::Data);
        // The pages stay the guest's, so the marks of their leaves are kept.
        let moving = guest.marks_in_flight.begin();
        let parts = self.worker.look(|memslots| {
            memslots.iter().map(|memslot| memslot.spec.range()).collect::<alloc::vec::Vec<_>>()
        });
        // For the last range, `all`, only tables are left to unlink.
        let parts = parts.into_iter().flat_map(|part| pieces(part, F::size(0)));
        for part in parts.chain([all]) {
            // A reader of the log waits for this guard, and after that finds in the log the marks
            // of what is unmapped here.
            self.worker.with_memslots(&view.tables, |memslots, Inside { guard, .. }| {
                guest.remove(memslots, &view.tables, guard, [part], |removed| {
                    guest.spill_marks(memslots, &removed);
                });
            });
        }
        drop(moving);
        view.tables.reclaim();
        view.live.swap(0, Ordering::AcqRel);
        self.announced = false;
        bytes
    }

    /// Empties the view, which has too many tables; pages that the vCPU still uses fault again. The
    /// tables are freed when the threads that were inside them have left, which does not take long;
    /// this waits for a bounded time.
    pub(crate) fn leave_for_room(&mut self) {
        self.leave();
        for _ in 0..PATIENCE {
            if self.worker.top_up(1).is_ok() {
                break;
            }
            self.worker.guest.tables.platform().wait();
        }
        self.announce();
    }
}
