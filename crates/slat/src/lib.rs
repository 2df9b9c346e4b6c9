//! Second-level address translation: the page tables that a hypervisor puts under a guest.
//!
//! The engine keeps the tables of one guest in the formats of real hardware, and has the operations
//! that a hypervisor needs: map, unmap, protect and relax, split and collapse huge pages, age,
//! harvest dirty state, invalidate. Any number of threads call them at once, while hardware walks
//! the tables and sets accessed and dirty bits. The engine has no lock, needs neither `std` nor
//! `alloc`, and executes no instruction of any architecture: every effect beyond the tables goes
//! through [`Platform`].
//!
//! ```
//! use slat::format::ept::Ept1G;
//! use slat::*;
//!
//! // A platform has the table pages and the invalidations. This one is for tests and user space.
//! let host = AllocPlatform::new();
//! let mut space = AddressSpace::new(Ept1G::default(), Vmid(1), 48, &host)?;
//! // Map 2 MiB of guest memory, as one block.
//! let ram = GpaRange::new(Gpa(0), 2 << 20)?;
//! space.map(ram, Hpa(8 << 30), Attributes::RAM, PageSize::SIZE_2M)?;
//! assert_eq!(space.query(Gpa(0x1234)).unwrap().hpa, Hpa(0x2_0000_1234));
//! // Begin a dirty log: split the block into pages, and protect them. No write goes unnoticed now.
//! let mut cache = TableCache::filled(&host, 1)?;
//! let mut guest = space.enter();
//! guest.split(ram, PageSize::SIZE_4K, &mut cache)?;
//! guest.write_protect(ram)?;
//! guest.harvest(ram, &mut [0; 8])?;
//! // The guest writes to page 5, and faults: allow it.
//! let page = GpaRange::new(Gpa(0x5000), 0x1000)?;
//! guest.relax(page, Access::Write)?.flush_local();
//! // Read the log, which has a bit for each page.
//! let mut log = [0; 8];
//! assert_eq!(guest.harvest(ram, &mut log)?, 1);
//! assert_eq!(log[0], 1 << 5);
//! # drop(guest);
//! # // SAFETY: no CPU has ever loaded these tables.
//! # unsafe { space.destroy() };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`AddressSpace`] is for one owner. Where threads share tables:
//!
//! - [`Tables`] are the tables of one guest, and a [`Format`] has the bits of one architecture
//!   (each is a cargo feature).
//! - A thread takes a reader slot once ([`Reader::register`]), and enters the tables by
//!   [`Tables::enter`]. This gives it a [`Guard`], whose methods are the operations. Tables that
//!   the thread may meet stay allocated until it drops the guard.
//! - A caller fills a [`TableCache`] before an operation, which takes its table pages from there.
//!   If they run out, the operation returns the address where it stopped.
//! - The guard gathers the TLB invalidation that its operations owe. The thread
//!   [invalidates](Guard::invalidate) it, or hands it on as a [`Shootdown`].
//! - An unmap hands out the memory of a leaf only after the guest cannot reach it any more
//!   ([`UnmapBatch::complete`]). A harvest reports dirty pages only after no later write can go
//!   unrecorded ([`Guard::harvest`]).
//! - [`UnloadedTables`], which no CPU has loaded, change by plain stores.
//! - [`GuestRoot`] has the values of a CPU's registers. The module `fault` of each format decodes
//!   why a guest stopped, into an address and an [`Access`].
//!
//! Levels count upwards from 0, the level of pages. `examples/minimal.rs` is a similar program,
//! which prints what it does.

#![no_std]
// docs.rs, which builds with a nightly compiler, says which feature brings an item.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]

#[cfg(any(feature = "alloc", all(feature = "std", any(unix, windows))))]
extern crate alloc;
#[cfg(any(
    test,
    loom,
    shuttle,
    // See `sync::thread`.
    all(feature = "std", debug_assertions, any(unix, windows))
))]
extern crate std;

mod addr;
#[cfg(any(
    feature = "arm64",
    feature = "ept",
    feature = "npt",
    feature = "power",
    feature = "riscv"
))]
mod any;
mod build;
mod cache;
mod counts;
pub mod format;
mod guard;
#[cfg(all(not(loom), any(feature = "alloc", all(feature = "std", any(unix, windows)))))]
mod heap;
mod invalidation;
mod leaf_delta;
mod local_flush;
#[cfg(feature = "observed")]
pub mod observe;
#[cfg(not(feature = "observed"))]
mod observe;
mod ops;
mod platform;
#[cfg(test)]
#[path = "../../../tests/properties.rs"]
mod properties;
mod pte;
mod reader;
mod readers;
#[cfg(doctest)]
mod refusals;
mod retired;
#[cfg(test)]
#[path = "../../../tests/seed.rs"]
mod seed;
mod shootdown;
mod space;
#[doc(hidden)]
pub mod sync;
mod table;
mod tables;
mod underway;
mod unloaded;
mod walk;

pub use addr::{Gpa, GpaRange, Hpa, LeafSizeError, Levels, PageSize, RangeError};
#[cfg(any(
    feature = "arm64",
    feature = "ept",
    feature = "npt",
    feature = "power",
    feature = "riscv"
))]
pub use any::AnyAddressSpace;
pub use cache::{OutOfFrames, TableCache};
pub use counts::OpCounts;
pub use format::{
    Access, Accesses, Attributes, Execute, Format, GuestRoot, Memory, Rights, Software,
};
pub use guard::{Guard, WrongPlatform, WrongTables};
#[cfg(all(not(loom), any(feature = "alloc", all(feature = "std", any(unix, windows)))))]
pub use heap::AllocPlatform;
pub use invalidation::{BreakBeforeMake, Invalidation, Vmid};
pub use leaf_delta::LeafDelta;
pub use local_flush::LocalFlush;
pub use ops::{
    AgeBitmaps, AgeCounts, AgeOptions, ChangeError, Dump, Leaf, Leaves, MapError, Owner,
    OwnerError, Pages, Relax, ReplaceError, Reservation, SplitError, TableBits, UnmapBatch,
    UnmapEntry, UnmapError, UnmappedRun,
};
#[cfg(feature = "baselines")]
pub use ops::{
    BatchedSplit, BoundedWalk, ChildlessWalk, EveryEntry, FlaggedWalk, PerEntry, SplitWalk,
};
pub use platform::{Maintenance, Platform};
pub use reader::Reader;
pub use readers::{GracePeriod, ReaderSlot, Readers, TooManyReaders};
pub use retired::RetiredTables;
pub use shootdown::Shootdown;
pub use space::{AddressSpace, SpaceError};
pub use table::{Frame, Pte};
pub use tables::{Contention, Interruption, NewError, Tables, Translation};
pub use unloaded::UnloadedTables;
