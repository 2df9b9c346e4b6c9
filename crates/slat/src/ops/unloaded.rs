//! Operations on tables that no CPU has loaded: they change entries by plain stores.

use super::{ChangeError, MapError};
use crate::addr::{GpaRange, Hpa, PageSize};
use crate::cache::TableCache;
use crate::format::{Attributes, Format};
use crate::guard::Guard;
use crate::platform::Platform;
use crate::pte::Plainly;
use crate::tables::Interruption;
use crate::unloaded::UnloadedTables;

impl<'p, F: Format, P: Platform> UnloadedTables<'p, F, P> {
    /// Returns a guard with all operations, which change entries atomically, and owe no
    /// invalidation.
    pub fn enter_mut(&mut self) -> Guard<'_, 'p, F, P> {
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
    ) -> Result<u64, Interruption<MapError>> {
        self.enter_mut().map_by::<Plainly>(range, (hpa, false), attributes, largest, cache)
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
    ) -> Result<u64, Interruption<MapError>> {
        self.enter_mut().map_by::<Plainly>(range, (hpa, true), attributes, largest, cache)
    }

    /// As [`Guard::write_protect`].
    ///
    /// # Errors
    /// The errors of [`Guard::write_protect`] except [`ChangeError::Contended`].
    pub fn write_protect(&mut self, range: GpaRange) -> Result<u64, Interruption<ChangeError>> {
        self.enter_mut().write_protect_by::<Plainly>(range)
    }
}
