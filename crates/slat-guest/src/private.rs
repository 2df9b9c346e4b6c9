//! Private memory: pages that the guest has and the host cannot read, and what the machine is asked
//! about them.
//!
//! Each page of a slot that has private memory ([`SlotSpec::private`](crate::SlotSpec::private)) is
//! *shared*, with the host's memory behind it, or *private*, with memory that no process of the
//! host has mapped. All are shared at first. Which kind an access wants, and whether it is the
//! page's, is in [`Outcome::Convert`](crate::Outcome::Convert); who converts is
//! [`Worker::convert`](crate::Worker::convert).

use core::fmt;
use slat::{Gpa, GpaRange, Hpa, PageSize};

/// Whose a page is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MemoryKind {
    /// Guest and host both reach it: [`Backing::page`](crate::Backing::page).
    Shared,
    /// The guest alone does: [`Backing::private_page`](crate::Backing::private_page).
    Private,
}

impl MemoryKind {
    /// What a conversion to this kind finds.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Shared => Self::Private,
            Self::Private => Self::Shared,
        }
    }
}

/// An address in the space of private memory, which no host mapping has: an offset into a file that
/// is never mapped (Linux: of a `guest_memfd`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PrivateAt(pub u64);

/// A range of private memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrivateRange {
    /// Its first byte.
    pub start: PrivateAt,
    /// How many bytes it has.
    pub bytes: u64,
}

/// A page of private memory. The guest may read, write and execute it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrivatePage {
    /// Its address, a multiple of the format's page size.
    pub hpa: Hpa,
    /// The largest leaf that it may be part of: all of the aligned block of that size around it is
    /// private memory of this guest, without gaps.
    pub block: PageSize,
}

/// Private memory as the tables have it: a leaf, or several that are neighbours in the guest and in
/// the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PrivateLeaves {
    /// Where the guest has them.
    pub gpa: Gpa,
    /// The memory behind them.
    pub hpa: Hpa,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// The machine refuses: a code of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Denied(pub u64);

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the machine refuses the change of private memory, with code {:#x}", self.0)
    }
}

impl core::error::Error for Denied {}

/// What a machine that protects private memory is told, and may refuse: where AMD's RMP, Intel's
/// secure EPT (of which the guest's tables are a copy then) and Arm's granules are changed. Nothing
/// by default: pages are private by agreement, as far as this host is trusted.
///
/// # Order
/// - [`PrivateHooks::map`] comes before the leaf is there, and while nobody else can map, reserve or
///   unmap there; if it agrees the leaf is there when the fault has been answered.
/// - [`PrivateHooks::split`] comes before the block is split.
/// - [`PrivateHooks::removed`] comes after the leaves have gone and their invalidation has
///   completed, and before memory of the other kind is mapped at these addresses.
/// - Of one page, `map` and `removed` take turns, however many vCPUs fault on it at once.
///
/// They run inside the guest's tables, `convert`, `split` and those `removed` that conversions cause
/// also under the lock under which slots change. They must not call the guest, nor wait for what
/// waits for faults.
pub trait PrivateHooks {
    /// `range` is about to become `to`. No fault maps any of it meanwhile, the leaves are still
    /// there.
    ///
    /// # Errors
    /// [`Denied`]: the pages stay what they are.
    fn convert(&self, _range: GpaRange, _to: MemoryKind) -> Result<(), Denied> {
        Ok(())
    }

    /// Private memory is about to be mapped. (SNP: `RMPUPDATE`, assigned; TDX: `TDH.MEM.PAGE.AUG`;
    /// CCA: `RMI_GRANULE_DELEGATE`, `RMI_DATA_CREATE_UNKNOWN`.)
    ///
    /// # Errors
    /// [`Denied`]: it is not mapped, and the fault is refused.
    fn map(&self, _leaf: PrivateLeaves) -> Result<(), Denied> {
        Ok(())
    }

    /// A private block is about to be split, along the path to one page, so that the page beside
    /// can be converted or taken. Of one block it may be asked again, if table pages were short.
    /// (SNP: `PSMASH`; TDX: `TDH.MEM.PAGE.DEMOTE`; CCA: `RMI_RTT_CREATE`.)
    ///
    /// # Errors
    /// [`Denied`]: the block stays, and what needed the split is refused.
    fn split(&self, _block: PrivateLeaves) -> Result<(), Denied> {
        Ok(())
    }

    /// Private memory is mapped no more, and no CPU can reach it by these addresses. (TDX:
    /// `TDH.MEM.PAGE.REMOVE`; CCA: `RMI_DATA_DESTROY`, `RMI_GRANULE_UNDELEGATE`; SNP: `RMPUPDATE`,
    /// the hypervisor's.) It cannot be refused: a machine that fails here keeps the memory from
    /// being used.
    fn removed(&self, _leaves: PrivateLeaves) {}
}

/// A machine that is told nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoHooks;

impl PrivateHooks for NoHooks {}
