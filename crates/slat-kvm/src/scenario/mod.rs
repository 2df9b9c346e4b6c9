//! Scenarios, one per file: a guest's phases and the checks of its work.
//!
//! Each scenario checks the guest's work: a page that was written must hold the number of the step
//! that wrote it. A log without a written page, or memory with other contents than those written,
//! is an error.

pub mod age;
pub mod boot_caches;
pub mod dirty_log;
pub mod execute;
pub mod fork;
mod handler;
mod harvest;
mod link;
pub mod live;
pub mod memory_stress;
pub mod memslot;
pub mod migrate;
pub mod pace;
pub mod populate;
pub mod postcopy;
pub mod reclaim;
pub mod restore;
pub mod snapshot;
mod times;
pub mod visits;
mod writes;
