//! What a guest's memory asks of the machine beyond what its tables do.

use crate::follow::{DeviceTables, NoDevices};
use crate::private::{NoHooks, PrivateHooks};
use slat::Platform;

/// The machine, as [`Platform`], with a clock.
pub trait Host: Platform {
    /// A clock that never goes back, in ticks of its own: what [`Stats`](crate::Stats) are in.
    fn now(&self) -> u64;

    /// Makes all CPUs forget the instructions that they hold (Arm without CTR_EL0.DIC: `ic
    /// ialluis`, `dsb ish`, `isb`; x86: nothing), for a vCPU that begins anew.
    fn forget_instructions(&self) {}

    /// What is told of private memory, and may refuse it: nothing, by default.
    fn private_hooks(&self) -> &dyn PrivateHooks {
        &NoHooks
    }

    /// Tables of devices that follow the guest's: none, by default.
    fn device_tables(&self) -> &dyn DeviceTables {
        &NoDevices
    }

    /// Lets others go on while the caller waits for them.
    fn wait(&self) {
        core::hint::spin_loop();
    }
}
