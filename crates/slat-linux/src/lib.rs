//! KVM's stage-2 page tables on Slat's engine: what the functions `kvm_pgtable_stage2_*` of Linux
//! do for arm64, one method each, and on RISC-V a fault.
//!
//! Linux calls it through `kernel/entry.rs` or `kernel/riscv.rs`, which `slat kernel` builds into
//! an object of a kernel with the edits `linux/slat-engine`. It knows nothing of Linux but its
//! conventions, so that its tests run on any machine.
//!
//! # Locks
//! KVM holds `mmu_lock` around each call, for reading in a fault (map, relax, mkyoung) and for
//! writing otherwise. The engine needs neither: threads do not register with it, and tables that an
//! operation unlinks stay allocated until the kernel has waited for an RCU grace period
//! ([`Stage2::take_retired`]). So each caller is in an RCU read-side critical section, or holds
//! `mmu_lock`, which on a kernel that is not PREEMPT_RT is one.
#![no_std]

mod fault;
mod protection;
mod stage2;

pub use fault::{FaultAnswer, Leaf};
pub use protection::{DEVICE, EXECUTE, NORMAL_NC, READ, WRITE};
pub use stage2::{Errno, Stage2};
