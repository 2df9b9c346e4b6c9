//! The operations of vCPUs on their caches.

use crate::backing::Backing;
use crate::caches::{Event, Work};
use crate::host::Host;
use crate::ranges::pieces;
use crate::sync::Ordering;
use crate::vcpu::Vcpu;
use crate::worker::{Inside, PATIENCE};
use slat::{Format, Gpa, GpaRange, Maintenance, Translation};

/// What the caller that runs the vCPU has to do after a switch of caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheSwitch {
    /// [`Vcpu::root`] has changed: the CPU invalidates its TLB entries of the guest, and loads the
    /// new root, before the vCPU runs.
    pub root_changed: bool,
    /// The vCPU's writes of the registers that switch caches (Arm: HCR_EL2.TVM) are to be trapped
    /// from now on, and reported by [`Vcpu::set_caches`]. If it is not set they may still be
    /// trapped: a machine that traps SCTLR_EL1 alone (FEAT_FGT) can afford that.
    pub trap: bool,
    /// Bytes maintained for the switch.
    pub maintained: u64,
}

impl<'w, F: Format, H: Host, B: Backing> Vcpu<'w, F, H, B> {
    /// Whether the vCPU's caches are on, as far as was reported.
    pub fn is_cached(&self) -> bool {
        self.worker.guest.caches.is_on(self.id)
    }

    /// Records that the vCPU wrote a register that switches caches: they are on now (Arm: M and C
    /// of SCTLR_EL1 both set), or not. The vCPU stands still; the work that the policy asks for is
    /// done when this returns.
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
    /// by HCR_EL2.TSW), which is meaningless on a machine that the vCPU shares. A guest does so for
    /// every set and way: only the first counts, until it writes a register that switches caches.
    pub fn set_way(&mut self) -> CacheSwitch {
        self.announce();
        let caches = &self.worker.guest.caches;
        if !caches.matters() || caches.traps(self.id) {
            return self.unchanged();
        }
        self.switch(Event::SetWay)
    }

    /// Restarts the vCPU with its caches off: it is initialised again, or was switched on by
    /// another (PSCI CPU_ON). It sees what the host wrote before, data and instructions.
    ///
    /// A vCPU that never ran has left nothing behind, so nothing is done.
    pub fn reset(&mut self) -> CacheSwitch {
        let guest = self.worker.guest;
        if !guest.caches.has_run(self.id) {
            // It is about to run: its accesses need not fault.
            guest.caches.runs(self.id);
            return self.unchanged();
        }
        let switch = self.switch(Event::Reset);
        guest.tables.platform().forget_instructions();
        switch
    }

    /// What `gpa` translates to in the tables that the vCPU runs on. Waits where an entry is being
    /// changed.
    pub fn translate(&mut self, gpa: Gpa) -> Option<Translation> {
        let tables = self.worker.guest.space(self.view);
        loop {
            match self.worker.inside(tables, |Inside { guard, .. }| guard.translate(gpa)) {
                Ok(found) => return found,
                Err(_) => tables.platform().wait(),
            }
        }
    }

    /// Reports that the vCPU runs, and its view is live, before it maps anything: see
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
        let begin = guest.tables.platform().now();
        guest.caches.begin(self.id, event);
        // A write that saw no vCPU with a view does not look for any: see `replacing`.
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

    /// Maintains the memory that vCPUs whose caches are off have touched: a guest that maintains by
    /// set and way wants those vCPUs to see it.
    fn maintain_views(&mut self) -> u64 {
        let guest = self.worker.guest;
        let all = GpaRange::new(Gpa(0), 1 << guest.tables.geometry().address_bits);
        let all = all.expect("a guest has an address");
        // A fault that maintained a page before the guest did so may not have mapped it yet.
        guest.wait_for_faults();
        let views = guest.spaces().skip(1);
        views.map(|tables| self.worker.maintain(tables, all, Maintenance::Data)).sum()
    }

    /// Maintains and empties the view; returns the bytes that were in it.
    ///
    /// Maintained first, then unmapped: an invalidation that finds a page gone finds it maintained.
    /// An invalidation that takes a page before maintains it itself, and keeps it out of the shared
    /// tables until it has done so.
    pub(crate) fn leave(&mut self) -> u64 {
        let guest = self.worker.guest;
        let Some(view) = self.view.map(|view| &guest.views[view as usize]) else { return 0 };
        if view.live.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let all = GpaRange::new(Gpa(0), 1 << view.tables.geometry().address_bits);
        let all = all.expect("a guest has an address");
        let bytes = self.worker.maintain(&view.tables, all, Maintenance::Data);
        // The pages stay the guest's: the marks of their leaves are kept.
        let moving = guest.leaving.begin();
        let parts = self.worker.look(|slots| {
            slots.iter().map(|slot| slot.spec.range()).collect::<alloc::vec::Vec<_>>()
        });
        // The last range, `all`, finds only tables left to unlink.
        let parts = parts.into_iter().flat_map(|part| pieces(part, F::size(0)));
        for part in parts.chain([all]) {
            // The log has the marks of what is unmapped once a reader that waits for this guard
            // looks at it.
            self.worker.with_slots(&view.tables, |slots, Inside { guard, .. }| {
                guest.remove(&view.tables, guard, [part], |removed| {
                    guest.keep_marks(slots, &removed);
                });
            });
        }
        drop(moving);
        guest.reclaim_in(&view.tables);
        view.live.swap(0, Ordering::AcqRel);
        self.announced = false;
        bytes
    }

    /// Empties the view, which has too many tables; what is used of it faults again. The tables are
    /// free when the threads that were in them have left, which takes moments: this waits no longer
    /// than that.
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
