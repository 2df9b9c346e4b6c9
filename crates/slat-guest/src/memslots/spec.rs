//! A memslot as a VMM asks for it, and the errors of changing one.

use crate::backing::{Hva, HvaRange};
use crate::private::{MemoryKind, PrivateAt, PrivateRange};
use core::fmt;
use slat::{Gpa, GpaRange, PageSize};

/// The name of a memslot, chosen by the VMM.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemslotId(pub u16);

/// A memslot, as a VMM asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemslotSpec {
    /// The memslot's name.
    pub id: MemslotId,
    /// The first guest address.
    pub gpa: Gpa,
    /// The size in bytes; 0 asks for the memslot to be deleted.
    pub bytes: u64,
    /// The first address in the backing.
    pub host: Hva,
    /// The guest may not write it: writes are answered by [`Outcome::Mmio`](crate::Outcome::Mmio).
    pub read_only: bool,
    /// Writes are logged.
    pub log_dirty: bool,
    /// Where the backing has the memslot's private pages, if pages may be private; all pages are
    /// shared at first. No other memslot has any of it. Such a memslot cannot be read-only, log or
    /// move; it can be deleted (Linux: `KVM_MEM_GUEST_MEMFD`).
    pub private: Option<PrivateAt>,
    /// Blocks stay blocks while the memslot logs: the first write to a block makes all of it
    /// writable, and logs all of it as dirty. This suits memory that is written all over, or copied
    /// in blocks; without it the log is of pages. Needs
    /// [`Logging::Protect`](crate::Logging::Protect).
    pub log_blocks: bool,
}

impl MemslotSpec {
    /// Makes the spec of memory that may be read and written, does not log, and is shared.
    pub const fn new(id: MemslotId, gpa: Gpa, bytes: u64, host: Hva) -> Self {
        Self {
            id,
            gpa,
            bytes,
            host,
            read_only: false,
            log_dirty: false,
            private: None,
            log_blocks: false,
        }
    }

    /// Returns the address of the first byte in the backing's memory of `kind`, as a number; 0 if
    /// the memslot has no private memory.
    const fn number_of(&self, kind: MemoryKind) -> u64 {
        match (kind, self.private) {
            (MemoryKind::Private, Some(at)) => at.0,
            (MemoryKind::Private, None) => 0,
            (MemoryKind::Shared, _) => self.host.0,
        }
    }

    /// Returns the address of `gpa` in private memory.
    pub(crate) const fn private_of(&self, gpa: u64) -> PrivateAt {
        PrivateAt(self.number_of(MemoryKind::Private) + (gpa - self.gpa.0))
    }

    /// Returns the memslot's private memory, if it has any.
    pub(crate) fn private_range(&self) -> Option<PrivateRange> {
        self.private.map(|start| PrivateRange { start, bytes: self.bytes })
    }

    /// Returns the guest addresses of the memslot's private memory in `range`.
    pub(crate) fn guest_of_private(&self, range: &PrivateRange) -> Option<GpaRange> {
        let own = self.private?.0;
        let start = range.start.0.max(own);
        let end = range.start.0.saturating_add(range.bytes).min(own + self.bytes);
        let bytes = end.checked_sub(start).filter(|&bytes| bytes != 0)?;
        GpaRange::new(Gpa(self.gpa.0 + (start - own)), bytes).ok()
    }

    /// As [`MemslotSpec::fits`], for memory of `kind`.
    pub(crate) const fn fits_in(&self, kind: MemoryKind, gpa: u64, bytes: u64) -> bool {
        (self.gpa.0 ^ self.number_of(kind)) & (bytes - 1) == 0 && self.has(gpa, bytes)
    }

    /// Returns the memslot's guest addresses, which were checked when it was inserted.
    pub(crate) fn range(&self) -> GpaRange {
        GpaRange::new(self.gpa, self.bytes).expect("a memslot is not empty, and does not wrap")
    }

    pub(crate) const fn host_range(&self) -> HvaRange {
        HvaRange { start: self.host, bytes: self.bytes }
    }

    pub(crate) const fn host_of(&self, gpa: u64) -> Hva {
        Hva(self.host.0 + (gpa - self.gpa.0))
    }

    /// Returns the guest addresses of the memslot's memory in `host`, if there is any.
    pub(crate) fn guest_of(&self, host: &HvaRange) -> Option<GpaRange> {
        let start = host.start.max(self.host);
        let end = host.end().min(self.host_range().end());
        let bytes = end.0.checked_sub(start.0).filter(|&bytes| bytes != 0)?;
        GpaRange::new(Gpa(self.gpa.0 + (start.0 - self.host.0)), bytes).ok()
    }

    /// Returns whether a leaf of `bytes` around `gpa` lies in the memslot, and has the same
    /// alignment in the host as in the guest.
    pub(crate) const fn fits(&self, gpa: u64, bytes: u64) -> bool {
        self.is_aligned(bytes) && self.has(gpa, bytes)
    }

    /// Returns whether leaves of `bytes` have the same alignment in the host as in the guest.
    pub(crate) const fn is_aligned(&self, bytes: u64) -> bool {
        (self.gpa.0 ^ self.host.0) & (bytes - 1) == 0
    }

    /// Returns whether a leaf of `bytes` around `gpa` lies in the memslot.
    pub(crate) const fn has(&self, gpa: u64, bytes: u64) -> bool {
        let start = gpa & !(bytes - 1);
        start >= self.gpa.0
            && match start.checked_add(bytes) {
                Some(end) => end <= self.gpa.0 + self.bytes,
                None => false,
            }
    }

    /// Returns the part of `range` that lies in the memslot, if there is any.
    pub(crate) fn common(&self, range: &GpaRange) -> Option<GpaRange> {
        let start = range.start().max(self.gpa);
        let end = range.end().0.min(self.gpa.0 + self.bytes);
        GpaRange::new(start, end.checked_sub(start.0)?).ok()
    }

    /// Returns whether both are the same memory at the same place; logging may differ.
    pub(crate) fn is_where(&self, other: &Self) -> bool {
        let place = |spec: &Self| (spec.id, spec.gpa, spec.bytes, spec.host);
        place(self) == place(other)
    }

    /// Returns the number of its pages.
    pub(crate) const fn pages(&self, page: PageSize) -> u64 {
        self.bytes >> page.shift()
    }

    pub(super) fn checked(&self, page: PageSize, bits: u32) -> Result<(), MemslotError> {
        let private = self.number_of(MemoryKind::Private);
        if (self.gpa.0 | self.host.0 | self.bytes | private) & (page.bytes() - 1) != 0 {
            return Err(MemslotError::Unaligned { page });
        }
        let Some(end) = self.gpa.0.checked_add(self.bytes) else { return Err(MemslotError::Wraps) };
        if [self.host.0, private].iter().any(|at| at.checked_add(self.bytes).is_none()) {
            return Err(MemslotError::Wraps);
        }
        if self.private.is_some() && (self.read_only || self.log_dirty) {
            return Err(MemslotError::Private);
        }
        if end > 1 << bits {
            return Err(MemslotError::Beyond { bits });
        }
        let pages = self.bytes >> page.shift();
        if pages > (1 << 31) - 1 {
            return Err(MemslotError::TooManyPages { pages });
        }
        Ok(())
    }
}

/// Why a memslot was not changed. Nothing was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MemslotError {
    /// Size, guest or host address is not a multiple of the page size.
    Unaligned {
        /// The page size.
        page: PageSize,
    },
    /// The memslot reaches beyond the guest's addresses.
    Beyond {
        /// The number of bits of a guest address.
        bits: u32,
    },
    /// The memslot's guest or host addresses go beyond 64 bits.
    Wraps,
    /// The memslot has more pages than a log can number: 2^31 - 1.
    TooManyPages {
        /// The number of pages that was asked for.
        pages: u64,
    },
    /// Another memslot has some of these guest addresses, or some of this private memory.
    Overlaps {
        /// That memslot.
        id: MemslotId,
    },
    /// The memslot exists, and its size, host address, rights and kind of log cannot change: delete
    /// it first.
    Differs {
        /// The memslot as it is.
        is: MemslotSpec,
    },
    /// There is no such memslot.
    Missing {
        /// The name.
        id: MemslotId,
    },
    /// A memslot with private memory cannot be read-only, log or move; it can be deleted.
    Private,
    /// A log of blocks needs write protection: the log of hardware's marks is of pages.
    LogBlocks,
    /// The memslot has private memory, and the guest can bypass its caches
    /// ([`Format::forces_caches`](slat::Format::forces_caches) is `false`): memory is maintained by
    /// host addresses, which private memory does not have.
    PrivateUncached,
    /// There is no memory for the log, or for the other state of each page.
    OutOfMemory,
}

impl MemslotError {
    /// Returns the name of the error that Linux's `KVM_SET_USER_MEMORY_REGION` returns, on that
    /// architecture, for the same mistake.
    pub const fn errno(&self, kvm: Kvm) -> &'static str {
        match (self, kvm) {
            (Self::Overlaps { .. }, _) => "EEXIST",
            (Self::OutOfMemory, _) => "ENOMEM",
            (Self::Beyond { .. }, Kvm::Arm64 | Kvm::RiscV) => "EFAULT",
            _ => "EINVAL",
        }
    }
}

/// An architecture of Linux's KVM, where its errors differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kvm {
    /// Intel and AMD.
    X86,
    /// Arm.
    Arm64,
    /// RISC-V.
    RiscV,
}

impl fmt::Display for MemslotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned { page } => {
                write!(f, "size, guest and host address of a memslot are multiples of {page}")
            }
            Self::Beyond { bits } => {
                write!(f, "the memslot ends beyond the {bits} bits of a guest address")
            }
            Self::Wraps => f.write_str("the memslot's guest or host addresses go beyond 64 bits"),
            Self::TooManyPages { pages } => {
                write!(
                    f,
                    "{pages} pages are too many for a memslot; use several of at most 2^31 - 1"
                )
            }
            Self::Overlaps { id } => {
                write!(f, "memslot {} has some of these addresses or private pages", id.0)
            }
            Self::Differs { is } => write!(
                f,
                "memslot {} is {:#x} bytes at {} backed by {}{}; only its guest address and its \
                 logging can change: delete it first",
                is.id.0,
                is.bytes,
                is.gpa,
                is.host,
                if is.read_only { ", read-only" } else { "" }
            ),
            Self::Missing { id } => write!(f, "there is no memslot {}", id.0),
            Self::Private => f.write_str(
                "a memslot with private memory cannot be read-only, log or move: delete it first",
            ),
            Self::LogBlocks => {
                f.write_str("a log of blocks goes with write protection; log this memslot in pages")
            }
            Self::PrivateUncached => f.write_str(
                "the guest can get past its caches; have the format force them (FEAT_S2FWB) for \
                 private memory",
            ),
            Self::OutOfMemory => f.write_str("no memory for what is kept of each page"),
        }
    }
}

impl core::error::Error for MemslotError {}
