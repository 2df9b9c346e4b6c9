//! The INVEPT that an [`Invalidation`] needs on an Intel CPU, as a value for a platform to execute.
//!
//! Source: the Intel Software Developer's Manual, volume 3C, "INVEPT—Invalidate Translations
//! Derived from EPT" for type and descriptor, and "Caching Translation Information" for what is
//! cached under which tag and what invalidates it. (Intel renumbers the chapters.)
//!
//! # What the platform does
//!
//! - **No invalidation by address.** INVEPT invalidates all guest-physical and combined mappings,
//!   and all paging-structure entries, under bits 51:12 of one EPT pointer, for every VPID and
//!   PCID. So the range, leaf size and `tables` of the invalidation have no effect here, and a
//!   change of these tables needs no INVVPID.
//! - **INVEPT acts on the CPU that executes it.** Every CPU that may hold entries executes it: the
//!   CPUs that run the guest, after an interrupt, and the CPUs that ran it since their last INVEPT,
//!   before they enter it again. VM exits and VM entries do not invalidate guest-physical mappings.
//! - **Order.** The stores to the tables come before the interrupt. With an x2APIC, where a write
//!   to the ICR is not ordered after earlier stores, `mfence; lfence` precede it. INVEPT is a
//!   serializing instruction; no other is needed after it.
//! - **A new root at a former root's address** would use the old root's entries: the platform
//!   executes INVEPT before it first loads such a root, and also where the bit for accessed and
//!   dirty state in the EPT pointer changes.
//! - **IOTLBs and device TLBs** of tables that VT-d shares are invalidated by the platform: see
//!   [`vtd`](super::vtd).
//!
//! # Example
//!
//! ```
//! use slat::format::ept::{Ept1G, invept::Invept};
//! use slat::{Format, Hpa, Invalidation, Vmid};
//!
//! let cpu = Invept { single_context: true };
//! let format = Ept1G::default();
//! let eptp = format.eptp(&format.geometry(48)?, Hpa(0x1234_5000));
//! let what = Invalidation { vmid: Vmid(1), range: None, leaf: None, tables: true };
//! let instruction = cpu.instruction(&what, eptp);
//! // asm!("invept {}, [{}]", in(reg) instruction.operand(), in(reg) &instruction.descriptor)
//! assert_eq!(instruction.operand(), 1);
//! assert_eq!(instruction.descriptor.eptp, 0x1234_505e);
//! # Ok::<(), slat::format::GeometryError>(())
//! ```

use crate::invalidation::Invalidation;
use core::fmt;

/// The type of an INVEPT: its register operand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u64)]
pub enum Type {
    /// Invalidates the mappings under the descriptor's EPT pointer.
    SingleContext = 1,
    /// Invalidates the mappings under any EPT pointer. The CPU checks only the reserved bits of the
    /// descriptor.
    AllContexts = 2,
}

/// The 128 bits of memory that INVEPT reads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[repr(C, align(16))]
pub struct Descriptor {
    /// Bits 63:0: the EPT pointer. INVEPT fails for a value that VM entry would refuse.
    pub eptp: u64,
    /// Bits 127:64, which are 0.
    pub reserved: u64,
}

/// An INVEPT with its operands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Instruction {
    /// The type.
    pub kind: Type,
    /// The operand in memory.
    pub descriptor: Descriptor,
}

impl Instruction {
    /// Returns the register operand.
    pub const fn operand(&self) -> u64 {
        self.kind as u64
    }
}

impl fmt::Display for Instruction {
    /// Formats the instruction for an assembler, with the operands' values in a comment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, Descriptor { eptp, reserved }) = (self.operand(), self.descriptor);
        write!(f, "invept rax, [rcx] ; rax = {kind}, [rcx] = {reserved:016x}:{eptp:016x}")
    }
}

/// How a machine invalidates entries of EPT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invept {
    /// The CPU has the single-context type. Without it, the entries of every guest are invalidated.
    pub single_context: bool,
}

impl Invept {
    /// Reads IA32_VMX_EPT_VPID_CAP (0x48c), in which bit 25 is single-context INVEPT.
    /// [`Ept::from_capabilities`](super::Ept::from_capabilities) has accepted the value: if it has
    /// bit 20, INVEPT, and not bit 25, it has bit 26, all-context.
    pub const fn from_capabilities(capabilities: u64) -> Self {
        Self { single_context: capabilities >> 25 & 1 == 1 }
    }

    /// Returns the instruction that `what` needs on each CPU that may hold entries of the guest.
    /// `eptp` is the guest's EPT pointer ([`Ept::eptp`](super::Ept::eptp)).
    pub const fn instruction(&self, _what: &Invalidation, eptp: u64) -> Instruction {
        match self.single_context {
            true => Instruction {
                kind: Type::SingleContext,
                descriptor: Descriptor { eptp, reserved: 0 },
            },
            false => Instruction {
                kind: Type::AllContexts,
                descriptor: Descriptor { eptp: 0, reserved: 0 },
            },
        }
    }
}

#[cfg(test)]
mod tests;
