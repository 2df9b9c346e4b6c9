//! Guests that have more memory than the host: which of their pages leave, and how these come back.
//!
//! [`Paged`] is the [`Backing`](slat_guest::Backing) of a guest's slots: a part of its pages is in
//! memory, the rest in a [`Swap`], for instance a [`SwapFile`]. Guests on one [`Pool`] share its
//! frames. A fault on a page that is not there comes to
//! [`Retry::NotYet`](slat_guest::Retry::NotYet); the vCPU's thread has a [`Pager`] bring the page
//! in, and runs the guest again. The same [`Pager`], on a separate thread or in that fault, gives
//! up pages: by generations, which walks over the accessed bits of the tables make without a lock.
//! `docs/reclaim.md` says what every switch costs.
//!
//! # No page is lost
//! Each page has a word that says where it is; a thread that moves the page claims it: `page`. A
//! page's content is written to swap after the guest was taken the page, and its frame is given to
//! others after it was written. Whether swap's copy of a page that came back is still good does not
//! depend on dirty bits, which a dirty log consumes: the guest may not write such a page before a
//! fault has dropped the copy.
#![cfg_attr(not(any(feature = "std", test)), no_std)]
// Documentation says which feature brings an item: where docs.rs builds it, with a nightly.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]

extern crate alloc;

mod arrivals;
mod buffer;
#[cfg(feature = "std")]
mod file;
mod frames;
mod limits;
mod order;
mod page;
mod paged;
mod pager;
mod pool;
mod slots;
mod stats;
mod swap;

#[cfg(feature = "std")]
pub use file::SwapFile;
pub use limits::{Load, choose};
pub use paged::{Config, Paged, PagedBacking, Places, Policy};
#[cfg(feature = "baselines")]
pub use pager::Gate;
pub use pager::{Generation, Idle, PageError, Pager, PagesPinned, ReclaimError, Reclaimed};
pub use pool::{Layout, Pool, PoolError, Ram};
pub use stats::{Part, Stats};
pub use swap::{Swap, SwapError};
