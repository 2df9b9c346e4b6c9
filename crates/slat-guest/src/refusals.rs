//! What does not compile, and the program of the README, which does.
//!
//! No two names of this crate and of [`slat`] are the same:
//! ```
//! use slat::*;
//! use slat_guest::*;
//!
//! fn both<F: Format, H: Host, B: Backing>(worker: &mut Worker<'_, F, H, B>, what: &Invalidation) {
//!     let host = HvaRange { start: Hva(0), bytes: 0x1000 };
//!     let taken: InvalidationInProgress<'_> = worker.invalidate(host, |_| {});
//!     worker.guest().tables().platform().invalidate(what);
//!     drop(taken);
//! }
//! ```
//!
//! A guest is destroyed only when no thread can be inside its tables: a worker borrows its guest.
//! ```compile_fail,E0505
//! # use slat::{Access, Format, Gpa};
//! # use slat_guest::*;
//! fn end<F: Format, H: Host, B: Backing>(guest: Guest<'_, F, H, B>) {
//!     let mut vcpu = Vcpu::new(&guest, 0).unwrap();
//!     // SAFETY: no CPU has the tables loaded.
//!     unsafe { guest.destroy() };
//!     vcpu.fault(Gpa(0), Access::Read);
//! }
//! ```

/// The README.
#[doc = include_str!("../README.md")]
struct Readme;
