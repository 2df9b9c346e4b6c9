//! What a guest is put through, one scenario a file.
//!
//! Each checks the guest's work: every page that was written carries the number of the step that
//! wrote it, and a log that lost a page, or a memory that is not what was written, is an error.

pub mod age;
pub mod boot_caches;
pub mod dirty_log;
pub mod execute;
mod harvest;
pub mod live;
pub mod memory_stress;
pub mod memslot;
pub mod migrate;
pub mod populate;
mod writes;
