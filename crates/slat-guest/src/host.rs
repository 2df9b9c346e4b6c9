//! What a guest's memory asks of the machine beyond what its tables do.

use slat::{Platform, Vmid};

/// The machine, as [`Platform`], with a clock.
pub trait Host: Platform {
    /// A clock that never goes back, in ticks of its own: what [`Stats`](crate::Stats) are in.
    fn now(&self) -> u64;

    /// Makes all CPUs forget the instructions that they hold (Arm without CTR_EL0.DIC: `ic
    /// ialluis`, `dsb ish`, `isb`; x86: nothing), for a vCPU that begins anew.
    fn forget_instructions(&self) {}

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
