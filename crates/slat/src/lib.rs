//! Second-level address translation: the page tables that a hypervisor puts under a guest.
//!
//! The engine keeps the tables of one guest in the formats of real hardware, and has the operations
//! that a hypervisor needs: map, unmap, protect and relax, split and collapse huge pages, age,
//! harvest dirty state, invalidate. Any number of threads call them at once, while hardware walks
//! the tables and sets accessed and dirty bits. The engine has no lock, needs neither `std` nor
//! `alloc`, and executes no instruction of any architecture: every effect beyond the tables goes
//! through [`Platform`].
//!
//! - [`Tables`] are the tables of one guest, and a [`Format`] has the bits of one architecture
//!   (each is a cargo feature).
//! - A thread takes a seat once ([`Participant::register`]), and enters the tables by
//!   [`Tables::enter`]. This gives it a [`Guard`], whose methods are the operations. Tables that
//!   the thread may meet stay allocated until it drops the guard.
//! - A caller fills a [`TableCache`] before an operation, which takes its table pages from there.
//!   If they run out, the operation returns the address where it stopped.
//! - The guard gathers the TLB invalidation that its operations owe. The thread
//!   [completes](Guard::complete) it, or hands it on as a [`Shootdown`].
//! - An unmap hands out the memory of a leaf only after the guest cannot reach it any more
//!   ([`Removals::complete`]). A harvest reports dirty pages only after no later write can go
//!   unrecorded ([`Guard::harvest`]).
//! - [`Inactive`] tables, which no CPU has loaded, change by plain stores.
//!
//! Levels count upwards from 0, the level of pages. `examples/minimal.rs` is a complete user.
//!
//! # What does not compile
//! A caller cannot read the memory behind an unmapped leaf before the invalidation has completed:
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
//! A caller cannot free live tables. It can free inactive ones, and to make tables inactive it
//! promises that no CPU has them loaded:
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
//! A caller cannot free tables while any thread is inside them:
//! ```compile_fail,E0505
//! # use slat::*;
//! fn end<F: Format, P: Platform>(tables: Tables<'_, F, P>, participant: &mut Participant<'_, P>) {
//!     let walker = tables.enter(participant).unwrap();
//!     // SAFETY: no CPU has the root loaded.
//!     unsafe { tables.deactivate() }.destroy();
//!     walker.dump();
//! }
//! ```
//! A guard cannot refresh, and so let its tables go, while a reservation holds one of their
//! entries:
//! ```
//! # use slat::*;
//! fn fault<F: Format, P: Platform>(
//!     guard: &mut Guard<'_, '_, F, P>,
//!     cache: &mut TableCache<'_, F, P>,
//! ) {
//!     let entry = guard.reserve(Gpa(0), PageSize::SIZE_4K, cache).unwrap();
//!     entry.commit(Hpa(0), Attributes::RAM).unwrap();
//!     guard.refresh();
//! }
//! ```
//! ```compile_fail,E0499
//! # use slat::*;
//! fn fault<F: Format, P: Platform>(
//!     guard: &mut Guard<'_, '_, F, P>,
//!     cache: &mut TableCache<'_, F, P>,
//! ) {
//!     let entry = guard.reserve(Gpa(0), PageSize::SIZE_4K, cache).unwrap();
//!     guard.refresh();
//!     entry.commit(Hpa(0), Attributes::RAM).unwrap();
//! }
//! ```
//! Only the engine gives a table page back to the platform: a [`Frame`] cannot be copied, nor taken
//! out of a cache or a table.
//! ```compile_fail,E0599
//! # use slat::*;
//! fn twice(frame: Frame) -> (Frame, Frame) {
//!     (frame.clone(), frame)
//! }
//! ```

#![no_std]
// docs.rs, which builds with a nightly compiler, says which feature brings an item.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]

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
mod grace;
mod granted;
mod guard;
mod inactive;
mod invalidation;
#[cfg(feature = "observed")]
pub mod observe;
#[cfg(not(feature = "observed"))]
mod observe;
mod ops;
mod participant;
mod platform;
mod pte;
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
pub use grace::{Grace, Moment, NoSeat, Seat};
pub use granted::Granted;
pub use guard::{Foreign, Guard};
pub use inactive::Inactive;
pub use invalidation::{BreakBeforeMake, Invalidation, Vmid};
pub use ops::{
    Aged, Ageing, Ages, ChangeError, Consumer, ConsumerError, Dump, Leaf, Leaves, MapError, Owner,
    OwnerError, Pages, Place, Removals, Removed, ReplaceError, Reservation, Skip, SplitError,
    UnmapError,
};
#[cfg(feature = "baselines")]
pub use ops::{Batched, Bounded, Childless, EveryEntry, PerEntry, SplitWalk, Tested};
pub use participant::Participant;
pub use platform::{Maintenance, Platform};
#[cfg(loom)]
#[doc(hidden)]
pub use ran::Broken;
pub use ran::{Announced, NoCpu, Ran};
pub use shootdown::Shootdown;
pub use sizes::Sizes;
pub use space::{AddressSpace, SpaceError};
pub use table::{Frame, Pte};
pub use tables::{Contended, Halted, NewError, Tables, Translation};
