//! Memory that arrives late: vCPUs wait for a page, and are woken when it has arrived.

use crate::backing::{Backing, Hva, HvaRange};
use crate::guest::Guest;
use crate::host::Host;
use crate::memslots::spec::MemslotId;
use crate::outcome::{Outcome, Retry};
use crate::vcpu::Vcpu;
use crate::waits::AsyncFault;
use slat::{Format, Gpa};

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Reports that the backing's answer for `host` has changed: pages have arrived, or will never
    /// arrive. It makes the arrival known to each vCPU that waits for one of them
    /// ([`Vcpu::ready`]), and wakes the vCPU ([`Host::wake`]); returns the number of these vCPUs.
    ///
    /// Any thread calls this, after each change of the backing's answer. No arrival is lost,
    /// whatever a fault does meanwhile, if the backing keeps its answer under a lock, or in atomics
    /// with sequentially consistent stores and loads.
    pub fn arrived(&self, host: HvaRange) -> u64 {
        let (platform, vmid) = (self.tables.platform(), self.tables.vmid());
        let page = F::size(0).bytes();
        let start = host.start.0 & !(page - 1);
        let whole = HvaRange { start: Hva(start), bytes: host.bytes + (host.start.0 - start) };
        let mut told = 0;
        self.waits.wake(&whole, |vcpu| {
            told += 1;
            platform.wake(vmid, vcpu);
        });
        told
    }
}

impl<F: Format, H: Host, B: Backing> Vcpu<'_, F, H, B> {
    /// Returns a page that the vCPU has waited for and that has arrived, or will never arrive: the
    /// access may be repeated. Each arrival is returned once. If a fault of the vCPU has already
    /// found the page, the arrival is not returned.
    pub fn ready(&mut self) -> Option<AsyncFault> {
        let guest = self.worker.guest;
        let (arrival, since) = self.waits.end(&guest.waits, self.id, |_, ready| ready)?;
        guest.stalls.record(guest.tables.platform().now() - since);
        Some(arrival)
    }

    /// Returns whether the wait is over: [`Vcpu::ready`] returns the arrival, or has returned it.
    pub fn is_ready(&self, arrival: &AsyncFault) -> bool {
        self.waits.is_ready(&self.worker.guest.waits, self.id, arrival)
    }

    /// Returns the pages that the vCPU waits for, including those that have arrived.
    pub fn waiting(&self) -> impl Iterator<Item = AsyncFault> + '_ {
        self.waits.all()
    }

    /// Begins to wait for the page, for which the backing has answered *not yet*. Returns `Err` if
    /// the fault has to ask the backing once more.
    pub(crate) fn wait_for(
        &mut self,
        memslot: MemslotId,
        gpa: Gpa,
        host: Hva,
    ) -> Result<Outcome, ()> {
        let guest = self.worker.guest;
        let now = guest.tables.platform().now();
        match self.waits.begin(&guest.waits, self.id, (memslot, gpa, host), now) {
            Some((_, true)) => Err(()),
            wait => Ok(Outcome::Retry(Retry::Absent(wait.map(|(arrival, _)| arrival)))),
        }
    }

    /// Ends the vCPU's wait for the page, if there was one, after a fault on it.
    #[inline]
    pub(crate) fn waited(&mut self, gpa: Gpa, outcome: &Outcome) {
        if self.waits.any() && !matches!(outcome, Outcome::Retry(_) | Outcome::RingFull) {
            self.has_waited(gpa, outcome);
        }
    }

    #[cold]
    fn has_waited(&mut self, gpa: Gpa, outcome: &Outcome) {
        let guest = self.worker.guest;
        let page = Gpa(gpa.0 & !(F::size(0).bytes() - 1));
        let this = |wait: &AsyncFault, _| wait.gpa == page;
        if let Some((_, since)) = self.waits.end(&guest.waits, self.id, this)
            && !matches!(outcome, Outcome::Refused(_) | Outcome::Mmio)
        {
            guest.stalls.record(guest.tables.platform().now() - since);
        }
    }

    /// Ends all waits: the thread no longer runs the vCPU.
    pub(crate) fn wait_for_nothing(&mut self) {
        while self.waits.end(&self.worker.guest.waits, self.id, |_, _| true).is_some() {}
    }
}
