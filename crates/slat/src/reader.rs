//! A thread's right to walk the tables of a platform's guests.

use crate::invalidation::Vmid;
use crate::platform::{Platform, same};
use crate::readers::{Inside, ReaderSlot, TooManyReaders};

/// A thread's right to walk the tables of a platform's guests: a slot, taken once and kept.
#[derive(Debug)]
pub struct Reader<'p, P: Platform> {
    platform: &'p P,
    slot: &'p ReaderSlot,
}

impl<'p, P: Platform> Reader<'p, P> {
    /// Takes a slot.
    ///
    /// # Errors
    /// [`TooManyReaders`] if all are taken.
    pub fn register(platform: &'p P) -> Result<Self, TooManyReaders> {
        platform.readers().take_slot().map(|slot| Self { platform, slot })
    }

    /// Returns whether the slot belongs to `platform`.
    #[inline(always)]
    pub(crate) fn serves(&self, platform: &P) -> bool {
        same(self.platform, platform)
    }

    #[inline(always)]
    pub(crate) fn enter(&mut self, guest: Vmid) -> Inside<'_> {
        #[cfg(debug_assertions)]
        self.slot.enters(self.platform.thread());
        self.slot.enter(self.platform.readers(), guest)
    }
}

impl<P: Platform> Drop for Reader<'_, P> {
    fn drop(&mut self) {
        self.slot.give_back();
    }
}
