//! What a guest's memory asks of the machine beyond what its tables do.

use crate::events::Events;
use crate::follow::{DeviceTables, NoDevices};
use crate::private::{NoHooks, PrivateHooks};
use slat::{Platform, Vmid};

/// The machine, as [`Platform`], with a clock.
pub trait Host: Platform {
    /// A clock that never goes back, in ticks of its own: what [`Stats`](crate::Stats) are in.
    fn now(&self) -> u64;

    /// Makes all CPUs forget the instructions that they hold (Arm without CTR_EL0.DIC: `ic
    /// ialluis`, `dsb ish`, `isb`; x86: nothing), for a vCPU that begins anew.
    fn forget_instructions(&self) {}

    /// Who takes note of what happens to the guests' memory; nobody, unless a machine says so.
    ///
    /// An implementation that has a field for it answers `&self.events`.
    #[inline(always)]
    fn events(&self) -> impl Events {}

    /// Called between pieces of work on a whole slot (1 GiB, or the largest leaf), by the thread
    /// that does it: a slot that is deleted or moves, a log that begins or ends, huge pages that
    /// lose the right to be executed. The thread is outside the tables, so nobody waits for it but
    /// threads that want to change slots: faults, reads and clears of logs, ageing and invalidations go on,
    /// and unlinked tables are given back. It may stay here as long as it likes, and give its CPU
    /// to others; work goes on when this returns. How far it is, [`Event::Piece`] says.
    ///
    /// [`Event::Piece`]: crate::Event::Piece
    fn between_pieces(&self) {}

    /// What is told of private memory, and may refuse it: nothing, by default.
    fn private_hooks(&self) -> &dyn PrivateHooks {
        &NoHooks
    }

    /// Tables of devices that follow the guest's: none, by default.
    fn device_tables(&self) -> &dyn DeviceTables {
        &NoDevices
    }

    /// The guest that CPUs know by `vmid` may go on with its vCPU `vcpu`: a page that it waits for
    /// is there ([`Vcpu::ready`](crate::Vcpu::ready)). A host whose vCPUs sleep meanwhile, or that
    /// run something else, wakes it. A wake-up that comes before the sleep must end it at once, as
    /// with `std::thread::unpark`.
    fn wake(&self, _vmid: Vmid, _vcpu: u16) {}

    /// Lets others go on while the caller waits for them.
    fn wait(&self) {
        core::hint::spin_loop();
    }
}
