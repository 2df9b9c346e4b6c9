//! Table pages in memory: only this file turns an [`Hpa`] into entries.

use crate::addr::Hpa;
use crate::format::Format;
use crate::platform::Platform;
#[cfg(not(any(loom, shuttle)))]
pub(crate) use crate::pte::rewrite_run;
pub use crate::pte::{Frame, Pte};
pub(crate) use crate::pte::{any, load_run};

impl Frame {
    /// Returns the entries of an unlinked table at `level`.
    #[inline(always)]
    pub(crate) fn entries_mut<F: Format>(
        &mut self,
        platform: &impl Platform,
        level: u8,
    ) -> &mut [Pte] {
        // SAFETY: the platform allocated the frame with room for a table at `level` (the callers
        // ask for `F::TABLE_BYTES`, which suffice by point 4 of `Format`'s contract), and
        // `&mut self` keeps other code from it while the slice lives. `Pte` is valid for any
        // bytes.
        unsafe {
            core::slice::from_raw_parts_mut(
                platform.entries(self.hpa()).as_ptr(),
                F::entries(level),
            )
        }
    }
}

/// Returns whether the leaf `raw` is a member of a group.
#[inline(always)]
pub(crate) const fn folded<F: Format>(raw: u64) -> bool {
    F::CONTIGUOUS != 0 && raw & F::CONTIGUOUS != 0
}

/// Returns the entry of `gpa` in a table at `level`, which has a power of two of them.
#[inline(always)]
pub(crate) fn pte<F: Format>(ptes: &[Pte], gpa: u64, level: u8) -> &Pte {
    &ptes[(gpa >> F::shift(level)) as usize & (ptes.len() - 1)]
}

/// Returns the entries of a linked table at `hpa`.
///
/// # Safety
/// `hpa` is a table of `len` entries that `platform` allocated. It stays allocated while the
/// returned slice is in use.
#[inline(always)]
pub(crate) unsafe fn entries(platform: &impl Platform, hpa: Hpa, len: usize) -> &[Pte] {
    // SAFETY: the table is allocated and of that length by this function's contract; shared access
    // is sound because entries are atomics.
    unsafe { core::slice::from_raw_parts(platform.entries(hpa).as_ptr(), len) }
}
