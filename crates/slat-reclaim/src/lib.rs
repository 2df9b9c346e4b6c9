//! Memory overcommit: sends pages that guests do not use to swap, and brings them back on a fault.
//!
//! [`PagedMemory`] is the [`Backing`](slat_guest::Backing) of a guest's memslots: a part of its
//! pages is in memory, the rest in a [`Swap`], for instance a [`SwapFile`]. Guests on one [`Pool`]
//! share its frames. A fault on a page that is not in memory is answered
//! [`Retry::Absent`](slat_guest::Retry::Absent); the vCPU's thread calls [`Pager::bring_in`], and
//! runs the guest again. A [`Pager`] also gives up pages, on a separate thread or while it handles
//! such a fault. It orders pages by generations, for which walks read the accessed bits of the
//! tables without a lock. `docs/reclaim.md` has the cost of each option of [`Config`].
//!
//! # No page is lost
//! Each page has a word that says where the page is; a thread claims the word before it moves the
//! page (module `page`). A page is unmapped from the guest before its content is written to swap,
//! and its frame is reused only after that write. Whether the copy in swap of a page that came back
//! is still good does not depend on dirty bits, because a dirty log clears them: the guest cannot
//! write such a page before a fault has dropped the copy.
#![cfg_attr(not(any(feature = "std", test)), no_std)]
// docs.rs, which builds with nightly, shows the feature that each item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs)]

extern crate alloc;

mod arrivals;
mod bits;
#[cfg(any(test, feature = "baselines"))]
pub mod bounds;
mod buffer;
#[cfg(feature = "std")]
mod file;
mod frames;
mod limits;
mod lists;
mod order;
mod page;
mod paged;
mod pager;
mod pool;
#[cfg(test)]
#[path = "../../../tests/seed.rs"]
mod seed;
mod slots;
mod stats;
mod swap;
mod undo;
mod work;

#[cfg(feature = "std")]
pub use file::SwapFile;
pub use limits::{Load, choose};
pub use paged::{Config, PagedBacking, PagedMemory, Places, Policy};
#[cfg(feature = "baselines")]
pub use pager::Gate;
pub use pager::{Generation, Idle, PageError, Pager, PagesPinned, ReclaimCounts, ReclaimError};
pub use pool::{Layout, Pool, PoolError, Ram};
pub use stats::{Part, Stats};
pub use swap::{Swap, SwapError};
