//! Shows second-stage tables: those that Slat has after a few operations, those of a dump, or those
//! that KVM has for a running guest.
//!
//! Tables from each source become a [`dump::Dump`], which has runs of leaves. The text
//! depends on the dump alone, so a dump is enough to print them again.

pub mod bins;
pub mod build;
pub mod dump;
pub mod kvm;
pub mod ops;
pub mod text;
