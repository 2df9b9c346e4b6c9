//! The ideas that led to Slat, measured in the engine, on any format of tables.
//!
//! [`split`]: walks that skip levels and entries. [`guest::execute`]: a huge page that is split in
//! the fault. [`guest::age`]: ageing without a lock. [`guest::cache_toggle`]: one flush for all
//! vCPUs. The crate also has their foundation: memory for tables, limits of the machine, vCPUs as
//! threads.

pub mod arena;
pub mod fill;
pub mod fixture;
pub mod format;
pub mod guest;
pub mod limit;
pub mod lines;
pub mod published;
pub mod split;
pub mod stopwatch;
pub mod threads;
pub mod thresholds;
