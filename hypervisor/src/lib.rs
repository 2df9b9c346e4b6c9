//! What the hypervisor knows that needs no machine: its options, the guest's addresses, and how exits
//! are read.

#![no_std]
#![warn(missing_docs)]

#[cfg(test)]
extern crate std;

pub mod layout;
pub mod options;
pub mod syndrome;
