//! The table at which hardware starts its walks.

use super::NewError;
use crate::addr::Hpa;
use crate::format::{Format, Geometry};
use crate::platform::Platform;
use crate::table::{self, Pte};
use core::fmt;

/// The root of a guest's tables: its address, and where its entries are. They are asked of the
/// platform once, so that a walk begins with the load of an entry.
pub(super) struct Root<'p> {
    hpa: Hpa,
    entries: &'p [Pte],
}

impl<'p> Root<'p> {
    /// Makes an empty root.
    pub fn allocate<F: Format, P: Platform>(
        geometry: &Geometry,
        platform: &'p P,
    ) -> Result<Self, NewError> {
        let bytes = geometry.root_bytes(F::PAGE_SHIFT);
        let hpa = platform.allocate(bytes).ok_or(NewError::OutOfFrames { bytes })?.into_hpa();
        // Where the root has several parts, hardware may read all of the page that an address
        // selects.
        let all = geometry.root_entries.max(F::entries(geometry.root_level));
        // SAFETY: the frame was allocated with at least that many entries. It is given back when
        // the tables end (`Tables::free_all`), with which this borrow ends; the platform, whose
        // memory it is, lives for `'p`.
        let all = unsafe { table::entries(platform, hpa, all) };
        all.iter().for_each(|pte| pte.init(0));
        Ok(Self { hpa, entries: &all[..geometry.root_entries] })
    }

    pub const fn hpa(&self) -> Hpa {
        self.hpa
    }

    #[inline(always)]
    pub fn entries(&self) -> &[Pte] {
        // SAFETY: a root has a power of two of entries (`Format`, 3), so it is not empty. With this
        // hint, a lookup has no index that could panic, and its guard stays in registers.
        unsafe { core::hint::assert_unchecked(!self.entries.is_empty()) };
        self.entries
    }
}

impl fmt::Debug for Root<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.hpa.fmt(f)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_root_is_shown_by_its_address_and_not_with_all_its_entries() {
        let root = Root { hpa: Hpa(0x5000), entries: &[] };
        assert_eq!(std::format!("{root:?}"), std::format!("{:?}", Hpa(0x5000)));
    }
}
