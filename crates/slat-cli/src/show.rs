//! Second-stage tables drawn: the engine's after a few operations, a dump's, or those that KVM has
//! for a running guest.
//!
//! Whatever they come from, they become a [`dump::Dump`]: runs of leaves. Text and picture are made
//! of that alone, so a drawing can be made again from its dump.

pub mod bins;
pub mod build;
pub mod dump;
pub mod kvm;
pub mod ops;
pub mod svg;
pub mod text;
