//! What differs between architectures: the guest's code, its registers, its own page tables.
//!
//! Each has the same items; the rest of the crate names none of them.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
mod unsupported;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) use unsupported::*;

/// A stretch of pages that the guest's code walks between two exits.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no guest code reads it"))]
pub(crate) struct Stretch {
    /// Address of the first page.
    pub gpa: u64,
    /// Pages to walk.
    pub pages: u64,
    /// Per cent of them that are written.
    pub share: u64,
    /// The share's accumulator before the first page.
    pub accumulator: u64,
    /// Added to a page's address to make its stamp.
    pub tag: u64,
}

/// How far the guest's code came, by its registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Address after the last page walked.
    pub gpa: u64,
    /// Pages still to walk.
    pub left: u64,
    /// Pages written since the stretch was set.
    pub written: u64,
}
