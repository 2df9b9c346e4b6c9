//! Tables that no CPU has loaded, which change by plain stores.

use crate::format::Format;
use crate::invalidation::Vmid;
use crate::platform::Platform;
use crate::tables::{NewError, Tables};

/// The second-stage translation tables of one guest while no CPU has them loaded, and no TLB or
/// walk cache holds entries of them.
///
/// `&mut` excludes threads but not the MMU; this type excludes the MMU as well. Its own methods
/// change entries by plain stores, at the speed of memory. All other operations are those of
/// [`UnloadedTables::enter_mut`].
///
/// Dropping them leaks their frames: [`UnloadedTables::destroy`] gives them back.
#[must_use = "dropped, the tables leak their frames"]
#[derive(Debug)]
pub struct UnloadedTables<'p, F: Format, P: Platform>(pub(crate) Tables<'p, F, P>);

impl<'p, F: Format, P: Platform> UnloadedTables<'p, F, P> {
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

    /// Gives back up to `most` tables, and with them all that was mapped below; returns whether
    /// only the root is left, which [`UnloadedTables::destroy`] gives back. For a guest so large
    /// that its destruction would keep the CPU for too long: the caller lets others run between the
    /// calls.
    pub fn destroy_some(&mut self, most: usize) -> bool {
        self.0.free_some(most)
    }

    /// Gives back every frame to the platform.
    pub fn destroy(self) {
        self.0.free_all();
    }
}

impl<'p, F: Format, P: Platform> Tables<'p, F, P> {
    /// Makes empty tables for guest physical addresses of `address_bits` bits, ready to be loaded.
    ///
    /// # Errors
    /// The errors of [`UnloadedTables::new`].
    pub fn new(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        platform: &'p P,
    ) -> Result<Self, NewError> {
        UnloadedTables::new(format, vmid, address_bits, platform).map(UnloadedTables::activate)
    }

    /// Takes the tables out of use.
    ///
    /// Invalidates all of the guest's translations. Afterwards no CPU and no other thread uses the
    /// tables.
    ///
    /// # Safety
    /// No CPU has the root loaded, nor will load it before [`UnloadedTables::activate`].
    pub unsafe fn deactivate(self) -> UnloadedTables<'p, F, P> {
        self.invalidate_all();
        self.pending.clear();
        UnloadedTables(self)
    }

    /// As [`Tables::deactivate`], without an invalidation of its own: for tables whose VMID others
    /// have too, of which one invalidation covers all.
    ///
    /// # Safety
    /// 1. As [`Tables::deactivate`].
    /// 2. Since no CPU has had the root loaded, all CPUs have dropped the entries that they held
    ///    under the VMID.
    pub unsafe fn deactivate_invalidated(self) -> UnloadedTables<'p, F, P> {
        self.pending.clear();
        UnloadedTables(self)
    }
}
