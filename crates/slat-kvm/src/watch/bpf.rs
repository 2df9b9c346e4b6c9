//! Programs for the kernel's eBPF machine (Documentation/bpf): assembles, loads and attaches them.
//!
//! The watch needs little of it: maps of two kinds, a dozen instructions, and descriptors that
//! release everything when they are closed.

pub(crate) mod asm;
pub(crate) mod sys;
