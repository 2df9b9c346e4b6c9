//! MMUs of the architectures, written from their manuals without the engine's code.

pub mod arm;
pub mod ept;
pub mod npt;
pub mod power;
pub mod riscv;

use slat::BreakBeforeMake;
use std::fmt::Debug;

pub use arm::Arm;
pub use ept::Ept;
pub use npt::Npt;
pub use power::Power;
pub use riscv::RiscV;

/// The second-stage MMU of one architecture, as configured.
///
/// Levels are numbered as in the manual: Arm's grow towards the pages (3 is that of pages), Intel's
/// and AMD's towards the root (1 is that of pages), RISC-V's likewise (0 is that of pages).
///
/// Methods with a default have that of Intel and AMD, whose tables are long mode's.
pub trait Arch: Debug + Send + Sync + 'static {
    /// Returns the number of bits of a guest physical address.
    fn address_bits(&self) -> u32;
    /// Returns the level at which a walk starts.
    fn root_level(&self) -> i8;
    /// Returns the level of the tables that a table of `level` links.
    fn below(&self, level: i8) -> i8 {
        level - 1
    }
    /// Returns the base-2 logarithm of the bytes that an entry of `level` covers.
    fn shift(&self, level: i8) -> u32 {
        12 + 9 * (level - 1) as u32
    }
    /// Returns the number of entries of a table of `level`.
    fn entries(&self, _level: i8) -> usize {
        512
    }
    /// Decodes the entry `raw` of `level`.
    fn decode(&self, raw: u64, level: i8) -> Descriptor;
    /// Returns the base-2 logarithm of the number of adjacent leaves, of `2^shift` bytes each, that
    /// make a group, which a TLB may hold as one translation; 0 if there are no groups of that
    /// size.
    fn group(&self, _shift: u32) -> u32 {
        0
    }
    /// Returns whether the leaf `raw` is in such a group.
    fn grouped(&self, _raw: u64) -> bool {
        false
    }
    /// Returns the value that the MMU writes back to the leaf or link `raw` after it has used it:
    /// with the accessed mark, and for a write through a leaf, with the dirty mark.
    ///
    /// # Errors
    /// The fault that the MMU raises if software has to set the mark.
    fn mark(&self, raw: u64, level: i8, write: bool) -> Result<u64, Fault>;
    /// Returns whether stores to tables reach walkers late, and invalidations take effect late.
    /// Intel's and AMD's CPUs see stores in order; INVEPT is serializing, and a thread that
    /// requests a flush from AMD's waits until the CPU has left its guest.
    fn late(&self) -> bool {
        false
    }
    /// Returns whether a live entry needs a break before it gets another address, memory type or
    /// table.
    fn breaks(&self) -> bool {
        false
    }
    /// Returns what happens if a TLB holds two sizes of one page.
    fn sizes(&self) -> Sizes {
        Sizes::Allowed
    }
    /// Returns whether a permission fault drops the cached entries for the address.
    fn fault_forgets(&self) -> bool;
    /// Returns whether stores may be under way when the invalidation of their translation is
    /// complete.
    fn late_stores(&self) -> bool {
        false
    }
    /// Returns whether the CPU may cache an invalid entry, and so continue to fault after the entry
    /// was filled, until an invalidation.
    fn caches_invalid(&self) -> bool {
        false
    }
    /// Returns whether the CPU may cache a leaf that software has to mark, and so continue to fault
    /// after that, until an invalidation.
    fn caches_unmarked(&self) -> bool {
        false
    }
    /// Returns whether the guest's walks of its own tables count as writes to the pages that hold
    /// them.
    fn walks_write(&self) -> bool {
        false
    }
    /// Returns whether an access with a leaf's memory type bypasses the host's caches. `uncached`
    /// is the guest's own choice (Arm: MMU or caches off).
    fn bypasses(&self, _memory: u8, _uncached: bool) -> bool {
        false
    }
    /// Returns whether instruction fetches may see older memory than what the host wrote.
    fn stale_fetch(&self) -> bool {
        false
    }
    /// Returns the level at which leaves have `2^shift` bytes, if there is one.
    fn leaf_level(&self, shift: u32) -> Option<i8> {
        (1..=3).find(|&level| self.shift(level) == shift)
    }
    /// Returns what a correct platform declares.
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }
}

/// An entry as an MMU decodes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Descriptor {
    /// Raises a translation fault; may be cached if [`Arch::caches_invalid`].
    Invalid,
    /// A link to a table.
    Table {
        /// The address of the table.
        table: u64,
        /// The rights that remain below it.
        rights: Rights,
    },
    /// A page or block.
    Leaf(Leaf),
    /// An encoding that the manual reserves, and the reason.
    Reserved(&'static str),
}

/// A page or block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// The host address that it maps to.
    pub hpa: u64,
    /// The guest's rights. They include a right to write that hardware grants when it marks the
    /// leaf dirty.
    pub rights: Rights,
    /// The memory type, in the architecture's encoding.
    pub memory: u8,
    /// The shareability, in the architecture's encoding; 0 where there is none.
    pub shareability: u8,
    /// Hardware has used the leaf, so that it may be cached.
    pub accessed: bool,
    /// The leaf is marked dirty, so that a write needs no mark.
    pub dirty: bool,
}

/// A guest's rights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "read, write, execute")]
pub struct Rights {
    pub read: bool,
    pub write: bool,
    pub execute: bool,
}

impl Rights {
    /// All of them.
    pub const ALL: Self = Self { read: true, write: true, execute: true };

    /// Returns the rights that both have.
    pub const fn and(self, other: Self) -> Self {
        Self {
            read: self.read && other.read,
            write: self.write && other.write,
            execute: self.execute && other.execute,
        }
    }

    /// Returns whether they allow `access`.
    pub const fn allow(self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
            Access::Execute => self.execute,
        }
    }
}

/// An access of a guest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[expect(missing_docs, reason = "read, write, execute")]
pub enum Access {
    Read,
    Write,
    Execute,
}

/// Reason why an access did not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// No root is loaded, or an entry is invalid.
    Translation,
    /// The leaf has no accessed mark, or no dirty mark for a write, and hardware does not set it.
    Accessed,
    /// A right is missing.
    Permission,
    /// The TLB holds two sizes of one page, and the platform does not handle that.
    Conflict,
    /// A reserved encoding.
    Reserved,
    /// The log of dirty pages is full: nothing was marked, and the vCPU exits.
    LogFull,
}

/// The effect of two sizes of one page in one TLB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sizes {
    /// It must not happen.
    Forbidden,
    /// It may raise a conflict abort, which the platform has to handle.
    MayAbort,
    /// It must not happen for executable pages (Intel's "machine check on page size change").
    ForbiddenForCode,
    /// It has no effect.
    Allowed,
}
