//! The `slat-bench` command: second-stage tables against the machine's limits and other people's
//! code.

pub mod cli;
mod contest;
pub mod engine;
pub mod guest;
pub mod peers;
pub mod replay;
mod scatter;
pub mod settings;
pub mod split;
mod tables;
mod touch;

pub use cli::main;
