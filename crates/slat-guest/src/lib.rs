//! One guest's memory: what a hypervisor does with the second-stage tables of [`slat`].
#![no_std]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod age;
mod backing;
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
pub use slots::{SlotChange, SlotError, SlotId, SlotSpec};
pub use stats::{FaultKind, Spent, Stats, Totals, VcpuStats};
pub use vcpu::{Vcpu, VcpuError};
