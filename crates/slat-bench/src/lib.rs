//! The `slat-bench` command: compares second-stage tables of the engine with the machine's limits,
//! Linux's own code and other crates.

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
