//! What a guest of the engine's pays: vCPUs as threads that load and store through its tables.
//!
//! Memory is real and resident before anything is timed; guests are made anew for each sample, on
//! the same machine. Variants and their baselines take turns, the turn's first place goes round,
//! and one round warms up.

pub mod age;
pub mod bed;
pub mod cache_toggle;
pub mod execute;
pub mod lock;
pub mod runner;
pub mod tables;
pub mod times;
pub mod turns;
pub mod vcpus;
