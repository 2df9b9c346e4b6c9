//! What vCPUs do to their caches.

use crate::backing::Backing;
use crate::caches::{Event, Work};
use crate::host::Host;
use crate::ranges::pieces;
use crate::sync::Ordering;
use crate::vcpu::Vcpu;
use crate::worker::{Inside, PATIENCE};
use slat::{Format, Gpa, GpaRange, Maintenance, Translation};

/// What a switch of caches comes to for who runs the vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheSwitch {
    /// [`Vcpu::root`] is another one: the CPU forgets what it holds of the guest, and loads it,
    /// before the vCPU runs.
    pub root_changed: bool,
    /// The vCPU's writes of the registers that switch caches (Arm: HCR_EL2.TVM) are to be trapped
    /// from now on, and reported by [`Vcpu::set_caches`]. If not, they may be: a machine that traps
    /// SCTLR_EL1 alone (FEAT_FGT) can afford to.
    pub trap: bool,
    /// Bytes maintained for it.
    pub maintained: u64,
}

impl<'w, F: Format, H: Host, B: Backing> Vcpu<'w, F, H, B> {
    /// Whether its caches are on, as far as it was said.
    pub fn is_cached(&self) -> bool {
        self.worker.guest.caches.is_on(self.id)
    }

    /// The vCPU wrote a register that switches caches: now they are on (Arm: M and C of SCTLR_EL1
    /// both set), or not. It stands still; what the policy asks for is done when this returns.
    pub fn set_caches(&mut self, on: bool) -> CacheSwitch {
        self.announce();
        let caches = &self.worker.guest.caches;
        if on == self.is_cached() {
            caches.set_traps(self.id, !on);
            return self.unchanged();
        }
        self.switch(if on { Event::On } else { Event::Off })
    }

    /// The vCPU maintained a cache by set and way (Arm: `dc csw` and the like, trapped by
    /// HCR_EL2.TSW), which means nothing on a machine that it has not for itself. A guest does so
    /// for every set and way: the first counts, until it writes a register that switches caches.
    pub fn set_way(&mut self) -> CacheSwitch {
        self.announce();
        let caches = &self.worker.guest.caches;
        if !caches.matters() || caches.traps(self.id) {
            return self.unchanged();
        }
        self.switch(Event::SetWay)
    }

    /// The vCPU begins anew, with its caches off: it is initialised again, or was switched on by
    /// another (PSCI CPU_ON). What the host wrote before is seen by it, data and instructions.
    ///
    /// Of a vCPU that never ran nothing is left, so nothing is done.
    pub fn reset(&mut self) -> CacheSwitch {
        let guest = self.worker.guest;
        if !guest.caches.has_run(self.id) {
            // It is about to: what it uses need not fault.
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

    /// Before it maps anything, or what it maps is asked for: see `Guest::spaces`.
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
        // A write that saw no vCPU with a view looks for none: see `replacing`.
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

    /// What vCPUs whose caches are off have touched: who maintains by set and way means it to be
    /// seen by them.
    fn maintain_views(&mut self) -> u64 {
        let guest = self.worker.guest;
        let all = GpaRange::new(Gpa(0), 1 << guest.tables.geometry().address_bits);
        let all = all.expect("a guest has an address");
        // A fault that maintained a page before the guest did so may not have mapped it yet.
        guest.wait_for_faults();
        let views = guest.spaces().skip(1);
        views.map(|tables| self.worker.maintain(tables, all, Maintenance::Data)).sum()
    }

    /// Empties the view; returns the bytes that were in it.
    ///
    /// Maintained first, then unmapped: an invalidation that finds a page gone finds it maintained.
    /// One that takes a page before maintains it itself, and keeps it out of the shared tables
    /// until it has.
    pub(crate) fn leave(&mut self) -> u64 {
        let guest = self.worker.guest;
        let Some(view) = self.view.map(|view| &guest.views[view as usize]) else { return 0 };
        if view.live.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let all = GpaRange::new(Gpa(0), 1 << view.tables.geometry().address_bits);
        let all = all.expect("a guest has an address");
        let bytes = self.worker.maintain(&view.tables, all, Maintenance::Data);
        // Its pages stay the guest's: what their leaves knew is kept.
        let moving = guest.leaving.begin();
        let parts = self.worker.look(|slots| {
            slots.iter().map(|slot| slot.spec.range()).collect::<alloc::vec::Vec<_>>()
        });
        // The last: nothing is left but tables.
        let parts = parts.into_iter().flat_map(|part| pieces(part, F::size(0)));
        for part in parts.chain([all]) {
            // What is unmapped is in the log that a reader finds who waits for this guard.
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

    /// Empties the view, whose tables are too many; what is used of it faults again. The tables are
    /// free when those who were in them have left, which takes moments: no longer is waited for
    /// them.
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
