//! What the hypervisor knows that needs no machine: its options, the guest's addresses, how exits
//! are read, and how exceptions are taken.

#![no_std]
#![warn(missing_docs)]

#[cfg(test)]
extern crate std;

pub mod exception;
pub mod layout;
pub mod options;
pub mod progress;
pub mod syndrome;
