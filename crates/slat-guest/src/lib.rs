//! The memory of one guest, on the second-stage tables of [`slat`].
//!
//! ```
//! use slat::format::ept::Ept1G;
//! use slat::*;
//! use slat_guest::*;
//!
//! /// The guest's memory: contiguous memory of the host, from 8 GiB on, in blocks of 2 MiB.
//! struct Ram;
//!
//! impl Backing for Ram {
//!     fn page(&self, host: Hva, _access: Access) -> Result<Page, NoPage> {
//!         let (hpa, block) = (Hpa((8 << 30) + host.0), PageSize::SIZE_2M);
//!         Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
//!     }
//! }
//!
//! let (host, config) = (AllocPlatform::new(), Config::new(1, PageSize::SIZE_2M));
//! let guest = Guest::new(Ept1G::default(), Vmid(1), 40, &host, Ram, config)?;
//! let mut vcpu = Vcpu::new(&guest, 0)?;
//! let ram = MemslotSpec::new(MemslotId(0), Gpa(0), 64 << 20, Hva(0));
//! vcpu.worker().set_memslot(ram)?;
//! assert_eq!(vcpu.fault(Gpa(0x1234), Access::Write), Outcome::Mapped(PageSize::SIZE_2M));
//! // A dirty log begins. The next write faults, splits the block, and is logged.
//! vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..ram })?;
//! vcpu.fault(Gpa(0x5678), Access::Write);
//! let mut log = [0; 256];
//! assert_eq!(vcpu.worker().read_log(ram.id, &mut log)?, 1);
//! vcpu.worker().clear_log(ram.id, 0, 64, &log[..1])?; // then copy page 5
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! It implements memslots, faults, dirty logging (by write protection, by hardware dirty bits, into
//! rings), eager splits, huge pages that may not be executed, ageing, invalidations by the host,
//! and the cache maintenance that is due when vCPUs switch their caches on or off. Any number of
//! threads work on a [`Guest`]: a thread that runs a vCPU as [`Vcpu`], any other thread as
//! [`Worker`]. Faults, clears of the log, ageing and invalidations take no lock, unless devices
//! have tables that follow the guest's ([`Config::devices`]).
//!
//! A VMM begins here; of [`slat`] it needs a [`Platform`](slat::Platform) and a format. On Arm
//! without FEAT_S2FWB a vCPU is in tables of its own, in the smallest pages, while its caches are
//! off, as they are at first: [`Config::caches_on`], [`Vcpu::set_caches`], `examples/arm.rs`.
//!
//! The machine is a [`Host`]: the engine's [`Platform`](slat::Platform) with a clock. The host
//! memory behind the guest's addresses is a [`Backing`]. `examples/guest.rs` is a complete program
//! that uses the crate; `docs/guest.md` compares the crate with Linux's KVM.

#![no_std]
// On docs.rs, which builds with a nightly compiler, each item's page names the feature it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod age;
mod async_fault;
mod backing;
mod bits;
mod blocks;
mod caches;
mod config;
mod convert;
mod cow;
mod device_notifier;
mod devices;
mod eager;
mod epochs;
mod events;
mod fault;
mod freeze;
mod guest;
mod host;
mod identity;
mod invalidate;
mod invalidations;
mod log;
mod mapped;
mod memslots;
mod outcome;
mod pins;
mod postcopy;
mod prefault;
mod private;
mod ranges;
mod readers;
mod recovery;
#[cfg(doctest)]
mod refusals;
mod replacing;
mod ring;
#[cfg(test)]
#[path = "../../../tests/seed.rs"]
mod seed;
mod shared;
mod stalls;
mod stats;
mod sync;
mod turn;
mod unmap;
mod vcpu;
mod waits;
mod worker;

pub use age::AgeError;
pub use backing::{Backing, Hva, HvaRange, NoPage, Page};
pub use caches::Flush;
pub use caches::switch::CacheSwitch;
pub use config::{CachePolicy, Config, ExecuteHuge, Logging};
pub use convert::ConvertError;
pub use cow::{Cow, ForkError, Frames, SharedFrames};
pub use device_notifier::{DeviceLeaf, DeviceTables, NoDevices};
pub use devices::PinError;
pub use eager::EagerSplit;
pub use epochs::{Epoch, EpochError, Epochs};
pub use events::{Event, Events};
pub use guest::{Guest, GuestError};
pub use host::Host;
pub use invalidate::UnmappedPages;
pub use invalidations::InvalidationInProgress;
pub use log::{ClearCounts, LogError, PML_ENTRIES, hdbss_addresses, pml_addresses};
pub use mapped::MappedBytes;
pub use memslots::change::MemslotChange;
pub use memslots::spec::{Kvm, MemslotError, MemslotId, MemslotSpec};
pub use outcome::{Outcome, Refusal, Retry, SplitReport, SplitStop};
pub use pins::PagePin;
pub use postcopy::{Fetch, PostCopy, PostCopyCounts, PostCopyError};
pub use prefault::{PrefaultBytes, PrefaultStop};
pub use private::{
    Denial, MemoryKind, NoHooks, PrivateAt, PrivateHooks, PrivateLeaves, PrivatePage, PrivateRange,
};
pub use readers::OwnReaders;
pub use recovery::RecoveryCounts;
pub use ring::DirtyPage;
pub use shared::{SharedGuest, SharedVcpu, SharedWorker};
pub use stalls::Stalls;
pub use stats::{FaultKind, FaultTime, GuestTotals, Stats, VcpuStats};
pub use vcpu::{Vcpu, VcpuError};
pub use waits::AsyncFault;
pub use worker::{TABLE_PAGES, Worker};
