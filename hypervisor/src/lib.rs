//! The parts of the hypervisor that need no machine: its options, the guest's addresses, decoding
//! of exits, exceptions to EL1, and checks of what the guest's program wrote.

#![no_std]
#![warn(missing_docs)]

#[cfg(test)]
extern crate std;

pub mod cut;
pub mod exception;
pub mod granules;
pub mod layout;
pub mod options;
pub mod progress;
pub mod stalls;
pub mod syndrome;
