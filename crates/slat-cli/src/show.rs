//! Shows the second-stage tables that Slat has after a few operations.

pub mod build;
pub mod leaf;
pub mod ops;
pub mod text;
