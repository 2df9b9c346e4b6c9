//! Costs of a guest of the engine: vCPUs as threads that load and store through its tables.
//!
//! Memory is real, and resident before the measurement. Each sample has a new guest, on the same
//! machine. Variants and their baselines take turns, a different one begins each round, and one
//! round warms up.

pub mod age;
pub mod cache_toggle;
#[cfg(feature = "command")]
mod density;
#[cfg(feature = "command")]
pub mod dirty_log;
pub mod execute;
pub mod fixture;
pub mod lock;
#[cfg(feature = "command")]
mod log_options;
#[cfg(feature = "command")]
mod migration;
#[cfg(feature = "command")]
mod parallel;
#[cfg(feature = "command")]
pub mod populate;
#[cfg(feature = "command")]
pub mod reclaim;
pub mod runner;
pub mod tables;
pub mod times;
pub mod turns;
pub mod vcpus;
