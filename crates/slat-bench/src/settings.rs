//! Options of the engine's operations and of the comparison with Linux and crates.

pub mod engine;
pub mod peers;
