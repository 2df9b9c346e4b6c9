//! What the hypervisor knows that needs no machine: its options, the guest's addresses, how exits
//! are read, how exceptions are taken, and what the guest's program wrote.

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
