//! Tables that no CPU has loaded, which change by plain stores.

use crate::addr::{GpaRange, Hpa, PageSize};
use crate::cache::TableCache;
use crate::format::{Attributes, Format};
use crate::guard::Guard;
use crate::ops::{ChangeError, MapError, Plainly};
use crate::platform::Platform;
use crate::shootdown::Vmid;
use crate::tables::{Halted, NewError, Tables};

/// The second-stage translation tables of one guest while no CPU has them loaded, and no TLB or
/// walk cache holds entries of them.
///
/// `&mut` excludes threads but not the MMU; this type excludes the MMU as well. Its own methods
/// change entries by plain stores, at the speed of memory. All other operations are those of
/// [`Inactive::guard`].
///
/// Dropping them leaks their frames: [`Inactive::destroy`] gives them back.
#[must_use = "dropped, the tables leak their frames"]
#[derive(Debug)]
pub struct Inactive<'p, F: Format, P: Platform>(pub(crate) Tables<'p, F, P>);

impl<'p, F: Format, P: Platform> Inactive<'p, F, P> {
    /// Makes empty tables for guest physical addresses of `address_bits` bits.
    ///
    /// # Errors
    /// [`NewError::Geometry`] for a width that the format cannot have; [`NewError::OutOfFrames`] if
    /// the platform has no frame for the root.
    pub fn new(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        platform: &'p P,
    ) -> Result<Self, NewError> {
        Tables::empty(format, vmid, address_bits, platform).map(Self)
    }

    /// Makes the tables ready to be loaded: walkers see all that was stored.
    pub fn activate(self) -> Tables<'p, F, P> {
        self.0.platform.publish();
        self.0
    }

    /// Returns a guard with all operations, which change entries atomically, and owe no
    /// invalidation.
    pub fn guard(&mut self) -> Guard<'_, 'p, F, P> {
        Guard::new(&self.0, None, false)
    }

    /// As [`Guard::map`].
    ///
    /// # Errors
    /// The errors of [`Guard::map`] except [`MapError::Contended`].
    pub fn map(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<u64, Halted<MapError>> {
        self.guard().map_by::<Plainly>(range, (hpa, false), attributes, largest, cache)
    }

    /// As [`Guard::map_contiguous`].
    ///
    /// # Errors
    /// The errors of [`Guard::map`] except [`MapError::Contended`].
    pub fn map_contiguous(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
        cache: &mut TableCache<'_, F, P>,
    ) -> Result<u64, Halted<MapError>> {
        self.guard().map_by::<Plainly>(range, (hpa, true), attributes, largest, cache)
    }

    /// As [`Guard::write_protect`].
    ///
    /// # Errors
    /// The errors of [`Guard::write_protect`] except [`ChangeError::Contended`].
    pub fn write_protect(&mut self, range: GpaRange) -> Result<u64, Halted<ChangeError>> {
        self.guard().write_protect_by::<Plainly>(range)
    }

    /// Gives back every frame to the platform.
    pub fn destroy(self) {
        self.0.free_all();
    }
}
