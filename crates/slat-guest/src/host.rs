//! What a guest's memory asks of the machine beyond what its tables do.

use slat::{Gpa, Platform, Vmid};

/// The machine, as [`Platform`], with a clock.
pub trait Host: Platform {
    /// A clock that never goes back, in ticks of its own: what [`Stats`](crate::Stats) are in.
    fn now(&self) -> u64;

    /// Makes the calling CPU forget what it holds of the page at `gpa`, after a fault of its own gave
    /// a right (Arm: `tlbi ipas2e1`, `dsb nsh`; x86: nothing, the fault has done so). A CPU that
    /// does not only faults once more.
    fn forget(&self, _vmid: Vmid, _gpa: Gpa) {}

    /// Lets others go on while the caller waits for them.
    fn wait(&self) {
        core::hint::spin_loop();
    }
}
