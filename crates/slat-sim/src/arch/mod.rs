//! What an MMU does, written from its manual and from nothing in the engine.

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
/// Levels carry the names that the manual gives them: Arm's grow towards the pages (level 3),
/// Intel's and AMD's towards the root (level 1 is that of pages), as RISC-V's (level 0).
pub trait Arch: Copy + Debug + Send + Sync + 'static {
    /// Bits of a guest physical address.
    fn address_bits(&self) -> u32;
    /// The level at which a walk starts.
    fn root_level(&self) -> i8;
    /// The level that a table at `level` links.
    fn below(&self, level: i8) -> i8;
    /// Base-2 logarithm of the bytes that a slot of `level` covers.
    fn shift(&self, level: i8) -> u32;
    /// Slots of a table of `level`.
    fn slots(&self, level: i8) -> usize;
    /// What the MMU makes of `raw` at `level`.
    fn decode(&self, raw: u64, level: i8) -> Descriptor;
    /// Base-2 logarithm of how many neighbours make a group that a TLB may hold as one, where
    /// leaves of `2^shift` bytes say that they are of one.
    fn group(&self, _shift: u32) -> u32 {
        0
    }
    /// Whether the leaf `raw` is of such a group.
    fn grouped(&self, _raw: u64) -> bool {
        false
    }
    /// What the MMU writes back to a leaf or table at `level` that it used: accessed, and for a
    /// write that found a leaf, dirty.
    ///
    /// # Errors
    /// The fault of an MMU that leaves this to software.
    fn mark(&self, raw: u64, level: i8, write: bool) -> Result<u64, Fault>;
    /// Stores to tables reach walkers late, and invalidations take effect late.
    fn late(&self) -> bool;
    /// Replacing a live entry by another address, memory type or table needs a break.
    fn breaks(&self) -> bool;
    /// What two sizes of one page in a TLB are.
    fn sizes(&self) -> Sizes;
    /// A permission fault drops what was cached for the address.
    fn fault_forgets(&self) -> bool;
    /// A slot that was found invalid may be cached: it goes on faulting after it was filled, until
    /// an invalidation.
    fn caches_invalid(&self) -> bool {
        false
    }
    /// A leaf that waits for software to mark it may be cached: it goes on faulting after it was
    /// marked, until an invalidation.
    fn caches_unmarked(&self) -> bool {
        false
    }
    /// The guest's walks of its own tables are writes to the pages that they lie in.
    fn walks_write(&self) -> bool {
        false
    }
    /// Whether an access with a leaf's memory type bypasses the host's caches; `uncached` is the
    /// guest's own wish (Arm: MMU or caches off).
    fn bypasses(&self, memory: u8, uncached: bool) -> bool;
    /// Instruction fetches may be older than what the host wrote.
    fn stale_fetch(&self) -> bool;
    /// The level at which leaves have `2^shift` bytes.
    fn leaf_level(&self, shift: u32) -> Option<i8>;
    /// What a correct platform declares.
    fn break_before_make(&self) -> BreakBeforeMake;
    /// How a correct platform of this architecture serves the engine.
    fn firmware() -> crate::Firmware<Self>;
}

/// What a slot holds, to an MMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Descriptor {
    /// A translation fault; cached where [`Arch::caches_invalid`].
    Invalid,
    /// The next table.
    Table {
        /// Its address.
        table: u64,
        /// What the walk may still do below it.
        rights: Rights,
    },
    /// A page or block.
    Leaf(Leaf),
    /// Reserved by the manual; says why.
    Reserved(&'static str),
}

/// A page or block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Where it points.
    pub hpa: u64,
    /// What the guest may do. A right to write that hardware will grant, by marking the leaf
    /// dirty, is one.
    pub rights: Rights,
    /// The memory type, in the architecture's encoding.
    pub memory: u8,
    /// The shareability, in the architecture's encoding; 0 where there is none.
    pub shareability: u8,
    /// May be cached.
    pub accessed: bool,
    /// A write needs no marking.
    pub dirty: bool,
}

/// What a guest may do.
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

    /// Those of both.
    pub const fn and(self, other: Self) -> Self {
        Self {
            read: self.read && other.read,
            write: self.write && other.write,
            execute: self.execute && other.execute,
        }
    }

    /// Whether `access` is one of them.
    pub const fn allow(self, access: Access) -> bool {
        match access {
            Access::Read => self.read,
            Access::Write => self.write,
            Access::Execute => self.execute,
        }
    }
}

/// What a guest does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[expect(missing_docs, reason = "read, write, execute")]
pub enum Access {
    Read,
    Write,
    Execute,
}

/// Why an access did not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// No root is loaded, or a slot is invalid.
    Translation,
    /// The leaf is not accessed, or for a write not dirty, and hardware does not set that.
    Accessed,
    /// A right is missing.
    Permission,
    /// Two sizes of one page are in the TLB, and the platform does not handle that.
    Conflict,
    /// A reserved encoding.
    Reserved,
    /// The buffer of addresses is full: nothing was marked, and the vCPU exits.
    LogFull,
}

/// Two sizes of one page in one TLB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sizes {
    /// Must not happen.
    Forbidden,
    /// May raise a conflict abort, which the platform then has to handle.
    MayAbort,
    /// May not happen with the right to execute (Intel's "machine check on page size change").
    ForbiddenForCode,
    /// Harmless.
    Allowed,
}
