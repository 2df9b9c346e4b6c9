//! What a guest's memory asks of the machine beyond what its tables do.

use slat::{GpaRange, Platform, Vmid};

/// The machine, as [`Platform`], with a clock.
pub trait Host: Platform {
    /// A clock that never goes back, in ticks of its own: what [`Stats`](crate::Stats) are in.
    fn now(&self) -> u64;

    /// Makes the calling CPU forget what it holds of the pages in `range`, after a fault of its own
    /// gave a right, or found it given (Arm: `tlbi ipas2e1` for each, `dsb nsh`, `tlbi vmalle1`,
    /// `dsb nsh`, `isb`; x86: nothing, the fault has done so). One that does not, and whose TLB
    /// keeps what a right is missing in, faults for ever: every host says what its own CPUs need.
    /// On RISC-V without Svvptc that is not enough: a slot above the page may be cached as invalid,
    /// so HFENCE.GVMA without an address comes before the guest is run again, whatever the fault
    /// came to (see `slat::format::riscv`).
    fn forget(&self, vmid: Vmid, range: GpaRange);

    /// Makes all CPUs forget the instructions that they hold (Arm without CTR_EL0.DIC: `ic
    /// ialluis`, `dsb ish`, `isb`; x86: nothing), for a vCPU that begins anew.
    fn forget_instructions(&self) {}

    /// Lets others go on while the caller waits for them.
    fn wait(&self) {
        core::hint::spin_loop();
    }
}
