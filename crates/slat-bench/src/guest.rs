//! Costs of a guest of the engine beyond the ideas of [`slat_ideas::guest`]: logs, first touches,
//! reclaim.

mod density;
pub mod dirty_log;
mod log_options;
mod migration;
mod parallel;
pub mod populate;
pub mod reclaim;
