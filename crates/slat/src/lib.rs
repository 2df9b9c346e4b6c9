//! Second-level address translation: the page tables that a hypervisor puts under a guest.
//!
//! The engine keeps the tables of a guest in the formats of real hardware, and does to them what a
//! hypervisor must: map, unmap, protect and relax, split and collapse huge pages, age, harvest
//! dirty state, flush. Any number of threads do so at once, beside the hardware that walks the
//! tables and marks them. It has no lock, needs neither `std` nor `alloc`, and executes no
//! instruction of any architecture: everything beyond the tables goes through [`Platform`].
//!
//! - [`Tables`] are one guest's tables, [`Format`] the bits of an architecture (each a cargo
//!   feature).
//! - A thread takes a seat once ([`Member::join`]) and enters the tables by [`Tables::enter`]:
//!   operations are methods of the [`Guard`]. What it may meet there stays allocated until it
//!   leaves.
//! - An operation takes the table pages it may need from a [`TableCache`] that its caller filled,
//!   and says where it stopped if they ran out.
//! - What may be stale afterwards gathers in the guard, which [completes](Guard::complete) it or
//!   hands it on as a [`Shootdown`].
//! - What was unmapped is known once the guest cannot reach it ([`Removals::complete`]), what was
//!   dirty once no later write can be missing ([`Guard::harvest`]).
//! - [`Inactive`] tables, which no CPU has loaded, change by plain stores.
//!
//! Levels count upwards from 0, the level of pages. `examples/minimal.rs` is a whole user.
//!
//! # What does not compile
//! The memory behind an unmapped leaf is not known before the invalidation has completed:
//! ```
//! # use slat::*;
//! fn memory<F: Format, P: Platform>(removals: &mut Removals<'_, '_, F, P>) -> Option<Hpa> {
//!     removals.complete().next().map(|leaves| leaves.hpa)
//! }
//! ```
//! ```compile_fail,E0616
//! # use slat::*;
//! fn memory<F: Format, P: Platform>(removals: &mut Removals<'_, '_, F, P>) -> Option<Hpa> {
//!     removals.storage[0].0.map(|leaves| leaves.hpa)
//! }
//! ```
//! ```compile_fail,E0616
//! # use slat::*;
//! fn memory(storage: &[Place]) -> Option<Hpa> {
//!     storage[0].0.map(|leaves| leaves.hpa)
//! }
//! ```
//! Live tables are not given back; inactive ones are, and becoming inactive takes a promise that no
//! CPU has them loaded:
//! ```
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: Inactive<'_, F, P>) {
//!     tables.destroy();
//! }
//! ```
//! ```compile_fail,E0599
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: Tables<'_, F, P>) {
//!     tables.destroy();
//! }
//! ```
//! ```compile_fail,E0133
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: Tables<'_, F, P>) {
//!     tables.deactivate().destroy();
//! }
//! ```
//! Nor while a walker is inside, of whichever thread:
//! ```compile_fail,E0505
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: Tables<'_, F, P>, member: &mut Member<'_, P>) {
//!     let walker = tables.enter(member).unwrap();
//!     // SAFETY: no CPU has the root loaded.
//!     unsafe { tables.deactivate() }.destroy();
//!     walker.dump();
//! }
//! ```
//! A guard does not let its tables go while a reservation holds one of their slots:
//! ```
//! # use slat::*;
//! fn fault<F: Format, P: Platform>(guard: &mut Guard<'_, '_, F, P>, cache: &mut TableCache<'_, F, P>) {
//!     let slot = guard.reserve(Gpa(0), PageSize::SIZE_4K, cache).unwrap();
//!     slot.commit(Hpa(0), Attributes::RAM).unwrap();
//!     guard.refresh();
//! }
//! ```
//! ```compile_fail,E0499
//! # use slat::*;
//! fn fault<F: Format, P: Platform>(guard: &mut Guard<'_, '_, F, P>, cache: &mut TableCache<'_, F, P>) {
//!     let slot = guard.reserve(Gpa(0), PageSize::SIZE_4K, cache).unwrap();
//!     guard.refresh();
//!     slot.commit(Hpa(0), Attributes::RAM).unwrap();
//! }
//! ```
//! A table page goes back to the platform by the engine alone: a [`Frame`] is neither copied nor
//! taken out of a cache or a table.
//! ```compile_fail,E0599
//! # use slat::*;
//! fn twice(frame: Frame) -> (Frame, Frame) {
//!     (frame.clone(), frame)
//! }
//! ```

#![no_std]
// Documentation says which feature brings an item: where docs.rs builds it, with a nightly.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]

#[cfg(any(test, loom, shuttle))]
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
mod grace;
mod granted;
mod guard;
mod inactive;
#[cfg(feature = "observed")]
pub mod observe;
#[cfg(not(feature = "observed"))]
mod observe;
mod ops;
mod platform;
mod ran;
mod retired;
mod shootdown;
mod sizes;
mod space;
#[doc(hidden)]
pub mod sync;
mod table;
mod tables;
mod underway;
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
pub use counts::Counts;
pub use format::{Access, Attributes, Execute, Format, Memory, Rights, Software};
pub use grace::{Grace, Member, Moment, NoSeat, Seat};
pub use granted::Granted;
pub use guard::{Foreign, Guard};
pub use inactive::Inactive;
pub use ops::{
    Aged, Ageing, Ages, ChangeError, Consumer, ConsumerError, Dump, Leaf, Leaves, MapError, Owner,
    OwnerError, Pages, Place, Removals, Removed, ReplaceError, Reservation, Skip, SplitError,
    UnmapError,
};
#[cfg(feature = "baselines")]
pub use ops::{Batched, Bounded, Childless, EveryEntry, PerEntry, SplitWalk, Tested};
pub use platform::{BreakBeforeMake, Maintenance, Platform};
#[cfg(loom)]
#[doc(hidden)]
pub use ran::Broken;
pub use ran::{Announced, NoCpu, Ran};
pub use shootdown::{Invalidation, Shootdown, Vmid};
pub use sizes::Sizes;
pub use space::{AddressSpace, SpaceError};
pub use table::{Frame, Slot};
pub use tables::{Contended, Halted, NewError, Tables, Translation};
