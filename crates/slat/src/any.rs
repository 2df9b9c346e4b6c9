//! An address space whose format is chosen at run time.

use crate::addr::{Gpa, GpaRange, Hpa, PageSize};
use crate::format::{Attributes, Geometry, Rights, Software};
use crate::ops::UnmappedRun;
use crate::platform::Platform;
use crate::space::{AddressSpace, SpaceError};
use crate::tables::{Contention, Interruption, Translation};

macro_rules! any_address_space {
    ($($(#[$feature:meta])* $format:ident: $of:ty;)*) => {
        /// An [`AddressSpace`] of any format that this build has, made [from](From) one. It is for
        /// a hypervisor that finds out at boot which format it needs. Each call selects the format
        /// once.
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum AnyAddressSpace<'p, P: Platform> {
            $(
                #[allow(missing_docs, reason = "named like the format")]
                $(#[$feature])*
                $format(AddressSpace<'p, $of, P>),
            )*
        }

        $(
            $(#[$feature])*
            impl<'p, P: Platform> From<AddressSpace<'p, $of, P>> for AnyAddressSpace<'p, P> {
                fn from(space: AddressSpace<'p, $of, P>) -> Self {
                    Self::$format(space)
                }
            }
        )*

        macro_rules! of_each {
            ($self:expr, $space:ident => $body:expr) => {
                match $self {
                    $($(#[$feature])* AnyAddressSpace::$format($space) => $body,)*
                }
            };
        }
    };
}

any_address_space! {
    #[cfg(feature = "arm64")] Arm64K4: crate::format::arm64::Arm64K4;
    #[cfg(feature = "arm64")] Arm64K16: crate::format::arm64::Arm64K16;
    #[cfg(feature = "arm64")] Arm64K64: crate::format::arm64::Arm64K64;
    #[cfg(feature = "arm64")] Arm64Lpa2K4: crate::format::arm64::Arm64Lpa2K4;
    #[cfg(feature = "arm64")] Arm64Lpa2K16: crate::format::arm64::Arm64Lpa2K16;
    #[cfg(feature = "arm64")] Arm64LpaK64: crate::format::arm64::Arm64LpaK64;
    #[cfg(feature = "ept")] Ept1G: crate::format::ept::Ept1G;
    #[cfg(feature = "ept")] Ept2M: crate::format::ept::Ept2M;
    #[cfg(feature = "npt")] Npt1G: crate::format::npt::Npt1G;
    #[cfg(feature = "npt")] Npt2M: crate::format::npt::Npt2M;
    #[cfg(feature = "power")] PowerK4: crate::format::power::PowerK4;
    #[cfg(feature = "power")] PowerK64: crate::format::power::PowerK64;
    #[cfg(feature = "riscv")] RiscV: crate::format::riscv::RiscV;
}

impl<P: Platform> AnyAddressSpace<'_, P> {
    /// Returns the address of the root, for the register that hardware starts from.
    pub fn root(&self) -> Hpa {
        of_each!(self, space => space.root())
    }

    /// Returns the level at which hardware starts its walks, and the size of the root.
    pub fn geometry(&self) -> Geometry {
        of_each!(self, space => space.geometry())
    }

    /// As [`AddressSpace::map`].
    ///
    /// # Errors
    /// The errors of [`AddressSpace::map`].
    pub fn map(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: PageSize,
    ) -> Result<(), Interruption<SpaceError>> {
        of_each!(self, space => space.map(range, hpa, attributes, largest))
    }

    /// As [`AddressSpace::protect`].
    ///
    /// # Errors
    /// The errors of [`AddressSpace::protect`].
    pub fn protect(
        &mut self,
        range: GpaRange,
        rights: Rights,
    ) -> Result<u64, Interruption<SpaceError>> {
        of_each!(self, space => space.protect(range, rights))
    }

    /// As [`AddressSpace::set_software`].
    ///
    /// # Errors
    /// The errors of [`AddressSpace::set_software`].
    pub fn set_software(
        &mut self,
        range: GpaRange,
        set: Software,
        clear: Software,
    ) -> Result<u64, Interruption<SpaceError>> {
        of_each!(self, space => space.set_software(range, set, clear))
    }

    /// Returns [`Attributes::device`] of the format.
    pub fn device(&self) -> Attributes {
        of_each!(self, space => Attributes::device(space.format()))
    }

    /// As [`AddressSpace::unmap`].
    ///
    /// # Errors
    /// The errors of [`AddressSpace::unmap`].
    pub fn unmap(
        &mut self,
        range: GpaRange,
        removed: impl FnMut(UnmappedRun),
    ) -> Result<u64, Interruption<SpaceError>> {
        of_each!(self, space => space.unmap(range, removed))
    }

    /// As [`AddressSpace::discard`].
    ///
    /// # Errors
    /// The errors of [`AddressSpace::discard`].
    pub fn discard(&mut self, range: GpaRange) -> Result<(), Interruption<SpaceError>> {
        of_each!(self, space => space.discard(range))
    }

    /// As [`AddressSpace::unmap_leaf`].
    ///
    /// # Errors
    /// The errors of [`AddressSpace::unmap_leaf`].
    pub fn unmap_leaf(
        &mut self,
        gpa: Gpa,
    ) -> Result<Option<UnmappedRun>, Interruption<SpaceError>> {
        of_each!(self, space => space.unmap_leaf(gpa))
    }

    /// As [`AddressSpace::translate`].
    ///
    /// # Errors
    /// The errors of [`AddressSpace::translate`].
    pub fn translate(&self, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        of_each!(self, space => space.translate(gpa))
    }

    /// As [`AddressSpace::query`].
    pub fn query(&self, gpa: Gpa) -> Option<Translation> {
        of_each!(self, space => space.query(gpa))
    }

    /// Gives back every table to the platform.
    ///
    /// # Safety
    /// As [`AddressSpace::destroy`].
    pub unsafe fn destroy(self) {
        // SAFETY: the caller's promise is the callee's.
        of_each!(self, space => unsafe { space.destroy() });
    }
}
