//! The `slat-bench` command: compares second-stage tables of the engine with the machine's limits,
//! Linux's own code and other crates.
//!
//! Without the feature `command` the crate is a library of what both commands measure: splits
//! ([`split`]), faults that execute ([`guest::execute`]), ageing ([`guest::age`]), flushes
//! ([`guest::cache_toggle`]); and of what these stand on: memory for tables, limits of the machine,
//! vCPUs as threads.

pub mod arena;
#[cfg(feature = "command")]
pub mod cli;
#[cfg(feature = "command")]
mod contest;
#[cfg(feature = "peers")]
pub mod crates;
#[cfg(feature = "command")]
pub mod engine;
pub mod fill;
pub mod fixture;
pub mod format;
pub mod guest;
pub mod limit;
pub mod lines;
#[cfg(feature = "command")]
pub mod linux;
pub mod params;
#[cfg(feature = "command")]
pub mod peers;
pub mod published;
#[cfg(feature = "command")]
pub mod replay;
#[cfg(feature = "command")]
mod scatter;
#[cfg(feature = "command")]
pub mod settings;
pub mod split;
pub mod stopwatch;
#[cfg(feature = "command")]
mod tables;
pub mod threads;
#[cfg(feature = "command")]
mod touch;

#[cfg(feature = "command")]
pub use cli::main;
