//! The machine, as the guest's memory needs it beyond its tables.

use crate::events::Events;
use crate::follow::{DeviceTables, NoDevices};
use crate::private::{NoHooks, PrivateHooks};
use slat::{Platform, Vmid};

/// The machine: a [`Platform`] with a clock.
pub trait Host: Platform {
    /// A clock that never goes back, in ticks of its own: the unit of [`Stats`](crate::Stats).
    fn now(&self) -> u64;

    /// Makes all CPUs forget the instructions that they hold (Arm without CTR_EL0.DIC: `ic
    /// ialluis`, `dsb ish`, `isb`; x86: nothing), for a vCPU that begins anew.
    fn forget_instructions(&self) {}

    /// The receiver of events of the guests' memory; by default there is none.
    ///
    /// An implementation that has a field for it answers `&self.events`.
    #[inline(always)]
    fn events(&self) -> impl Events {}

    /// Called between pieces of work on a whole memslot (1 GiB, or the largest leaf), by the thread
    /// that does the work: when a memslot is deleted or moves, a log begins or ends, or huge pages
    /// lose the right to be executed. The thread is outside the tables, so only threads that want
    /// to change memslots wait for it: faults, reads and clears of logs, ageing and invalidations
    /// go on, and unlinked tables are given back. It may stay here as long as it likes, and give
    /// its CPU to others; work goes on when this returns. [`Event::Piece`] reports the progress.
    ///
    /// [`Event::Piece`]: crate::Event::Piece
    fn between_pieces(&self) {}

    /// The hooks that are told of private memory, and may refuse it; by default they do nothing.
    fn private_hooks(&self) -> &dyn PrivateHooks {
        &NoHooks
    }

    /// Devices' tables that follow the guest's; by default there are none.
    fn device_tables(&self) -> &dyn DeviceTables {
        &NoDevices
    }

    /// Reports that vCPU `vcpu` of the guest that CPUs know by `vmid` may go on: a page that it
    /// waits for is there ([`Vcpu::ready`](crate::Vcpu::ready)). A host whose vCPUs sleep
    /// meanwhile, or run something else, wakes it. A wake-up that comes before the sleep must end
    /// it at once, as with `std::thread::unpark`.
    fn wake(&self, _vmid: Vmid, _vcpu: u16) {}

    /// Lets other threads go on while the caller waits for them.
    fn wait(&self) {
        core::hint::spin_loop();
    }
}
