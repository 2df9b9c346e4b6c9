//! One guest's memory: what a hypervisor does with the second-stage tables of [`slat`].
//!
//! Slots, faults, dirty logging (by protection, by hardware dirty bits, into rings), eager splits, huge
//! pages that may not be executed, ageing, invalidation from the host's side, and what happens to
//! memory when vCPUs switch their caches. Any number of threads work on a [`Guest`]: those that run
//! its vCPUs as [`Vcpu`], others as [`Worker`]. Faults, clears, ageing and invalidations take no lock.
//!
//! A machine is a [`Host`], the engine's [`Platform`](slat::Platform) with a clock; what is behind
//! the guest's addresses a [`Backing`]. `examples/guest.rs` is a whole user; `docs/guest.md` holds this
//! beside Linux's KVM.
//!
//! # What does not compile
//! Tables are given back when nobody can be in them: a worker borrows its guest.
//! ```compile_fail,E0505
//! # use slat::{Access, Format, Gpa};
//! # use slat_guest::*;
//! fn end<'g, F: Format, H: Host, B: Backing>(
//!     guest: Guest<'_, F, H, B>,
//!     room: &'g mut TableRoom,
//! ) {
//!     let mut vcpu = Vcpu::new(&guest, 0, room).unwrap();
//!     // SAFETY: no CPU has the tables loaded.
//!     unsafe { guest.destroy() };
//!     vcpu.fault(Gpa(0), Access::Read);
//! }
//! ```
#![no_std]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod age;
mod backing;
mod bits;
mod blocks;
mod budget;
mod caches;
mod config;
mod eager;
mod fault;
mod guest;
mod host;
mod invalidate;
mod log;
mod recovery;
mod ring;
mod slots;
mod stats;
mod sync;
mod vcpu;

pub use age::AgeError;
pub use backing::{Backing, Hva, HvaRange, NoPage, Page};
pub use budget::TableLimit;
pub use caches::{CachePolicy, CacheSwitch, Flush};
pub use config::{Config, ExecuteHuge, Logging};
pub use eager::{EagerSplit, SplitReport, SplitStop};
pub use fault::{Outcome, Refused, Retry};
pub use guest::{Guest, GuestError, TABLE_PAGES, TableRoom, Worker};
pub use host::Host;
pub use invalidate::{Invalidation, Taken};
pub use log::{Cleared, LogError};
pub use recovery::Recovered;
pub use ring::DirtyPage;
pub use slots::{Kvm, SlotChange, SlotError, SlotId, SlotSpec};
pub use stats::{FaultKind, Spent, Stats, Totals, VcpuStats};
pub use vcpu::{Vcpu, VcpuError};
