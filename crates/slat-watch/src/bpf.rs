//! Programs for the kernel's own machine (Documentation/bpf): assembled, loaded, attached.
//!
//! What the watch needs of it is small: maps of two kinds, a dozen instructions, and descriptors
//! that take everything with them when they are closed (docs/adr/0043-programs-are-assembled.md).

pub(crate) mod asm;
pub(crate) mod sys;
