//! What can be set of the engine's operations and of other people's tables, which hold each
//! other's.

pub mod engine;
pub mod peers;
