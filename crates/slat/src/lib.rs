//! Second-level address translation: the page tables that a hypervisor puts under a guest.
//!
//! The engine keeps the tables of a guest in the formats of real hardware, and does to them what a
//! hypervisor must: map, unmap, write-protect and relax, split huge pages. It has no lock, needs neither
//! `std` nor `alloc`, and executes no instruction of any architecture: everything beyond the
//! tables goes through [`Platform`].
//!
//! - [`Tables`] are one guest's tables, [`Format`] the bits of an architecture.
//! - An operation takes the table pages it may need from a [`TableCache`] that its caller filled,
//!   and says where it stopped if they ran out.
//! - What may be stale afterwards comes back as a [`Shootdown`], which must be completed.
//!
//! Levels count upwards from 0, the level of pages.

#![no_std]
#![warn(missing_docs)]

#[cfg(any(test, loom))]
extern crate std;

mod addr;
mod build;
mod cache;
mod counts;
pub mod format;
mod grace;
mod guard;
mod inactive;
mod ops;
mod platform;
mod shootdown;
mod sync;
mod table;
mod tables;
mod walk;

pub use addr::{Gpa, GpaRange, Hpa, LeafSizeError, Levels, PageSize, RangeError};
pub use cache::{OutOfFrames, TableCache};
pub use counts::Counts;
pub use format::{Access, Attributes, Execute, Format, Memory};
pub use grace::{Grace, Member, NoSeat, Seat};
pub use guard::{Foreign, Guard};
pub use inactive::Inactive;
pub use ops::{
    Aged, Ageing, Ages, Batched, Bounded, ChangeError, Dump, EveryEntry, Leaf, Leaves, MapError,
    Pages, Removals, Removed, Reservation, Skip, SplitError, SplitWalk, UnmapError,
};
pub use platform::{BreakBeforeMake, Maintenance, Platform};
pub use shootdown::{Invalidation, Shootdown, Vmid};
pub use table::{Frame, Slot};
pub use tables::{Contended, Halted, NewError, Tables, Translation};
