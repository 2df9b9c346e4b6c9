//! The INVEPT that an [`Invalidation`] takes on an Intel CPU, as a value for a platform to execute.
//!
//! As in the Intel Software Developer's Manual, volume 3C: "INVEPT—Invalidate Translations Derived
//! from EPT" for type and descriptor, "Caching Translation Information" for what is cached under
//! which tag and what invalidates it. (Intel renumbers the chapters.)
//!
//! # What the platform does
//!
//! - **There is nothing by address.** INVEPT takes all guest-physical and combined mappings, and
//!   all paging-structure entries, under bits 51:12 of one EPT pointer, for every VPID and PCID; so
//!   range, leaf size and `tables` of the invalidation say nothing here, and INVVPID has no part in
//!   a change of these tables.
//! - **It reaches the CPU that executes it.** Every CPU that may hold entries executes it: those
//!   that run the guest, interrupted, and those that ran it since they last did so, before they
//!   next enter it. VM exits and VM entries leave guest-physical mappings as they are.
//!   [`Ran`](crate::Ran) keeps account of those CPUs.
//! - **Order.** The stores to the tables come before the interrupt: with an x2APIC, where a write
//!   to the ICR is ordered after nothing, `mfence; lfence` stand between. INVEPT is a serializing
//!   instruction; none is needed after it.
//! - **A new root at a former root's address** finds the old root's entries: INVEPT comes before
//!   such a root is loaded first. So it does where the bit for accessed and dirty state in the EPT
//!   pointer changes.
//! - **IOTLBs and device TLBs** of tables that VT-d shares are the platform's:
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

use crate::shootdown::Invalidation;
use core::fmt;

/// What INVEPT reaches: its register operand.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u64)]
pub enum Type {
    /// The mappings under the descriptor's EPT pointer.
    SingleContext = 1,
    /// Those under any EPT pointer: the descriptor is not looked at, but for its reserved bits.
    AllContexts = 2,
}

/// The 128 bits of memory that INVEPT reads.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[repr(C, align(16))]
pub struct Descriptor {
    /// Bits 63:0: the EPT pointer, as VM entry would take it; with another one INVEPT fails.
    pub eptp: u64,
    /// Bits 127:64, which are 0.
    pub reserved: u64,
}

/// An INVEPT with its operands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Instruction {
    /// What it reaches.
    pub kind: Type,
    /// Its operand in memory.
    pub descriptor: Descriptor,
}

impl Instruction {
    /// The register operand.
    pub const fn operand(&self) -> u64 {
        self.kind as u64
    }
}

impl fmt::Display for Instruction {
    /// As an assembler reads it, the operands' values in a comment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, Descriptor { eptp, reserved }) = (self.operand(), self.descriptor);
        write!(f, "invept rax, [rcx] ; rax = {kind}, [rcx] = {reserved:016x}:{eptp:016x}")
    }
}

/// How a machine invalidates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Invept {
    /// The CPU has the single-context type: else every guest's entries go.
    pub single_context: bool,
}

impl Invept {
    /// What IA32_VMX_EPT_VPID_CAP (0x48c) says, which
    /// [`Ept::from_capabilities`](super::Ept::from_capabilities) accepted: bit 25 is single-context
    /// INVEPT. (With bit 20, INVEPT, and not 25, there is bit 26, all-context.)
    pub const fn from_capabilities(capabilities: u64) -> Self {
        Self { single_context: capabilities >> 25 & 1 == 1 }
    }

    /// The instruction that `what` takes, on each CPU that may hold entries of the guest, whose EPT
    /// pointer is `eptp` ([`Ept::eptp`](super::Ept::eptp)).
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
