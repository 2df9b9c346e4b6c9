//! Private memory: pages that only the guest can access, and the machine's hooks for them.
//!
//! Each page of a memslot that has private memory
//! ([`MemslotSpec::private`](crate::MemslotSpec::private)) is either *shared*, with host memory
//! behind it, or *private*, with memory that no process of the host has mapped. All pages are
//! shared at first; [`Worker::convert`](crate::Worker::convert) converts pages.

use core::fmt;
use slat::{Gpa, GpaRange, Hpa, PageSize};

/// The kind of a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MemoryKind {
    /// Guest and host can both access it: [`Backing::page`](crate::Backing::page).
    Shared,
    /// Only the guest can access it: [`Backing::private_page`](crate::Backing::private_page).
    Private,
}

impl MemoryKind {
    /// Returns the other kind.
    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Shared => Self::Private,
            Self::Private => Self::Shared,
        }
    }
}

/// An address in the space of private memory, which no process of the host maps: an offset into a
/// file that is never mapped (Linux: of a `guest_memfd`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PrivateAt(pub u64);

/// A range of private memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrivateRange {
    /// The first byte.
    pub start: PrivateAt,
    /// The size in bytes.
    pub bytes: u64,
}

impl PrivateRange {
    /// Returns whether the two ranges have a byte in common.
    pub(crate) const fn overlaps(&self, other: &Self) -> bool {
        self.bytes != 0
            && other.bytes != 0
            && self.start.0 < other.start.0.saturating_add(other.bytes)
            && other.start.0 < self.start.0.saturating_add(self.bytes)
    }
}

/// A page of private memory. The guest may read, write and execute it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrivatePage {
    /// Its address, a multiple of the format's page size.
    pub hpa: Hpa,
    /// The largest leaf that it may be part of: the aligned block of that size around it is all
    /// private memory of this guest, and physically contiguous.
    pub block: PageSize,
}

/// Private memory in the tables: one leaf, or several that are neighbours in the guest and in the
/// host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PrivateLeaves {
    /// The first guest address.
    pub gpa: Gpa,
    /// The first host physical address.
    pub hpa: Hpa,
    /// The size of all of them in bytes.
    pub bytes: u64,
}

/// The machine's refusal, with a code of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Denial(pub u64);

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the machine refuses the change of private memory, with code {:#x}", self.0)
    }
}

impl core::error::Error for Denial {}

/// The hooks of a machine that protects private memory: they follow it, and may refuse it. An
/// implementation changes AMD's RMP, Intel's secure EPT (of which the guest's tables are then a
/// copy) or Arm's granules here. By default they do nothing: pages are private by agreement, as far
/// as this host is trusted.
///
/// # Order
/// - [`PrivateHooks::map`] is called before the leaf exists, and while no other thread can map,
///   reserve or unmap there; if it agrees, the leaf exists when the fault has been answered.
/// - [`PrivateHooks::split`] is called before the block is split.
/// - [`PrivateHooks::removed`] is called after the leaves have been unmapped and their TLB
///   invalidation has completed, and before memory of the other kind is mapped at these addresses.
/// - For each page, `map` and `removed` alternate, however many vCPUs fault on it at once.
///
/// They run inside the guest's tables. `convert`, `split`, and the calls of `removed` that
/// conversions cause also run under the lock for changes of memslots. They must not call the guest,
/// or wait for anything that waits for faults.
///
/// If `convert`, `split` or `map` panics, this counts as a refusal: pages keep their kind, blocks
/// stay, nothing is mapped. `removed` cannot be called again for the same memory, so where it
/// panics the machine keeps that memory; it must not panic again for what was removed with it.
pub trait PrivateHooks {
    /// `range` is about to become `to`. No fault maps any of it meanwhile; its leaves still exist.
    ///
    /// # Errors
    /// [`Denial`]: the pages keep their kind.
    fn convert(&self, _range: GpaRange, _to: MemoryKind) -> Result<(), Denial> {
        Ok(())
    }

    /// Private memory is about to be mapped. (SNP: `RMPUPDATE`, assigned; TDX: `TDH.MEM.PAGE.AUG`;
    /// CCA: `RMI_GRANULE_DELEGATE`, `RMI_DATA_CREATE_UNKNOWN`.)
    ///
    /// # Errors
    /// [`Denial`]: it is not mapped, and the fault is refused.
    fn map(&self, _leaf: PrivateLeaves) -> Result<(), Denial> {
        Ok(())
    }

    /// A private block is about to be split, along the path to one page, so that the neighbouring
    /// page can be converted or unmapped, or because a fetch may not execute from a huge page. It
    /// may be called again for the same block, if table pages were short. (SNP: `PSMASH`; TDX:
    /// `TDH.MEM.PAGE.DEMOTE`; CCA: `RMI_RTT_CREATE`.)
    ///
    /// # Errors
    /// [`Denial`]: the block stays, and the operation that needed the split is refused.
    fn split(&self, _block: PrivateLeaves) -> Result<(), Denial> {
        Ok(())
    }

    /// Private memory is no longer mapped, and no CPU can access it by these addresses. (TDX:
    /// `TDH.MEM.PAGE.REMOVE`; CCA: `RMI_DATA_DESTROY`, `RMI_GRANULE_UNDELEGATE`; SNP: `RMPUPDATE`,
    /// hypervisor-owned.) It cannot be refused: a machine that fails here keeps the memory from
    /// being used.
    fn removed(&self, _leaves: PrivateLeaves) {}
}

/// The hooks of a machine that does not protect private memory.
#[derive(Clone, Copy, Debug)]
pub struct NoHooks;

impl PrivateHooks for NoHooks {}
