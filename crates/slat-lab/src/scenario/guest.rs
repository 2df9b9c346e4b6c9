//! What a guest of the engine's pays: vCPUs as threads that load and store through its tables.
//!
//! Memory is real and resident before anything is timed; guests are made anew for each sample, on
//! the same machine. Variants and their baselines take turns, the turn's first place goes round, and
//! one round warms up.

pub mod age;
mod bed;
pub mod cache_toggle;
mod density;
pub mod dirty_log;
pub mod execute;
mod lock;
mod migration;
mod parallel;
pub mod populate;
pub mod reclaim;
mod runner;
mod times;
mod turns;
mod vcpus;
