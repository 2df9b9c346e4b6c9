//! The engine's tables under the IOMMUs that QEMU emulates: this process keeps the tables in the
//! machine's memory, a device of the machine reads and writes through them, and the unit's TLB
//! keeps stale entries until they are invalidated.
//!
//! A random history changes the tables; before and after each change the device reads and writes.
//! With a fault in the invalidations, made on purpose, some access must be wrong.
//!
//! The units of Arm and RISC-V need QEMU 10, which `cargo xtask test walkers` fetches.

mod arm;
mod history;
mod intel;
mod machine;
mod qemu;
mod riscv;
#[path = "../../../seed.rs"]
mod seed;
mod shared;
mod unit;

use history::{moves, run};
use machine::Fault;

/// Runs a history, and the same with each fault.
fn judge<U: unit::Unit>() {
    let seed = seed::seed();
    assert_eq!(run::<U>(Fault::None, seed), None);
    for fault in Fault::ALL {
        assert!(run::<U>(fault, seed).is_some(), "{fault:?} is not noticed");
    }
}

#[test]
fn intel_a_device_sees_each_change_and_each_fault() {
    judge::<intel::Intel<false>>();
}

#[test]
fn intel_scalable_mode_shows_each_change() {
    assert_eq!(run::<intel::Intel<true>>(Fault::None, seed::seed()), None);
    assert!(run::<intel::Intel<true>>(Fault::NoInvalidation, seed::seed()).is_some());
}

#[test]
fn arm_a_device_sees_each_change_and_each_fault() {
    judge::<arm::Arm<false>>();
}

#[test]
fn arm_ranges_reach_all_that_changed() {
    assert_eq!(run::<arm::Arm<true>>(Fault::None, seed::seed()), None);
}

#[test]
fn arm_a_vcpu_and_a_device_share_a_table() {
    shared::check();
}

#[test]
fn riscv_a_device_sees_each_change_and_each_fault() {
    judge::<riscv::Riscv>();
}

/// Moves memory that a device writes meanwhile; without an invalidation a write is lost.
fn judge_moves<U: unit::Unit>() {
    let seed = seed::seed();
    assert_eq!(moves::<U>(Fault::None, seed), 0);
    for fault in [Fault::NoInvalidation, Fault::OtherGuest, Fault::FirstPage] {
        assert!(moves::<U>(fault, seed) > 0, "{fault:?} is not noticed");
    }
}

#[test]
fn intel_memory_that_moves_loses_no_write_of_a_device() {
    judge_moves::<intel::Intel<false>>();
}

#[test]
fn arm_memory_that_moves_loses_no_write_of_a_device() {
    judge_moves::<arm::Arm<true>>();
}

#[test]
fn riscv_memory_that_moves_loses_no_write_of_a_device() {
    judge_moves::<riscv::Riscv>();
}
