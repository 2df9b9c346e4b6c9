//! The instructions, or the SBI call, that an [`Invalidation`] needs on RISC-V, as values for a
//! platform to execute.
//!
//! Sources: the RISC-V Instruction Set Manual, volume II: "Hypervisor Memory-Management Fence
//! Instructions" (HFENCE.GVMA), "Svinval" (HINVAL.GVMA); the Supervisor Binary Interface
//! Specification, "RFENCE Extension".
//!
//! # What the platform does
//!
//! - **The fence acts on the hart that executes it.** Every hart that may hold entries of the VMID
//!   executes it: the harts that run the guest, after an interrupt ([`Hfence::remote`] asks the
//!   firmware for it), and the harts that ran it since, before they enter it again.
//! - **Order.** HFENCE.GVMA orders stores that are *visible to its own hart* before the walks that
//!   follow. So the hart that stored executes `fence rw, rw` before it sends the interrupt; the
//!   firmware does the same for its call. A sequence on the hart that stored, or on a hart that has
//!   read the other's stores, needs no data fence.
//! - **By address it orders only reads of leaves.** Where tables were unlinked, and after a map
//!   without Svvptc, the fence has to cover all of the guest. An entry that a fault found invalid
//!   and that links a table by now is such a case.
//! - **Both stages.** It invalidates entries that combine both stages. HFENCE.VVMA is not needed.
//! - **A change of hgatp.MODE** for a VMID also needs an HFENCE.GVMA with rs1 = x0.
//!
//! # When all of the guest is cheaper
//!
//! Each instruction by address may walk what the hart has cached, while one for all of the guest
//! costs a refill of the entries in use. Linux uses the second beyond 64 pages for its own
//! addresses (`tlb_flush_all_threshold`), and beyond a table of 512 for a guest's;
//! [`Hfence::default`] has the first limit. Firmware may decide again: OpenSBI fences by address
//! for 4 KiB and less unless it is configured otherwise.
//!
//! # Example
//!
//! ```
//! use slat::format::riscv::hfence::Hfence;
//! use slat::{Gpa, GpaRange, Invalidation, Vmid};
//!
//! let what = Invalidation {
//!     vmid: Vmid(7),
//!     range: Some(GpaRange::new(Gpa(0x8020_0000), 0x1000)?),
//!     leaf: None,
//!     tables: false,
//! };
//! let text: Vec<_> = Hfence::default().sequence(&what).map(|i| i.to_string()).collect();
//! assert_eq!(text, ["hfence.gvma a0, a1 # a0 = 0x20080000, a1 = 0x7"]);
//! # Ok::<(), slat::RangeError>(())
//! ```

use crate::addr::GpaRange;
use crate::invalidation::{Invalidation, Vmid};
use core::fmt;
use core::iter::FusedIterator;

/// Registers of a fence; `None` is x0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Operands {
    /// rs1: a guest physical address, shifted right by 2; `None` for all addresses.
    pub rs1: Option<u64>,
    /// rs2: the VMID; `None` for all guests.
    pub rs2: Option<Vmid>,
}

/// One instruction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Instruction {
    /// `hfence.gvma`.
    HfenceGvma(Operands),
    /// `sfence.w.inval`: walks after the following invalidations see the stores before it
    /// (Svinval).
    SfenceWInval,
    /// `hinval.gvma` (Svinval).
    HinvalGvma(Operands),
    /// `sfence.inval.ir`: invalidations before it come before the walks after it (Svinval).
    SfenceInvalIr,
}

/// Register numbers: a0 holds rs1, a1 holds rs2.
const A0: u32 = 10;
const A1: u32 = 11;

impl Instruction {
    /// Returns the instruction as 32 bits, for assemblers that do not know it (`.insn`): rs1 is a0
    /// and rs2 is a1, or x0.
    pub const fn encoding(&self) -> u32 {
        const SYSTEM: u32 = 0x73;
        const fn registers(operands: &Operands) -> u32 {
            let rs1 = if operands.rs1.is_some() { A0 } else { 0 };
            let rs2 = if operands.rs2.is_some() { A1 } else { 0 };
            rs2 << 20 | rs1 << 15
        }
        match self {
            Self::HfenceGvma(operands) => 0b011_0001 << 25 | registers(operands) | SYSTEM,
            Self::HinvalGvma(operands) => 0b011_0011 << 25 | registers(operands) | SYSTEM,
            Self::SfenceWInval => 0b000_1100 << 25 | SYSTEM,
            Self::SfenceInvalIr => 0b000_1100 << 25 | 1 << 20 | SYSTEM,
        }
    }
}

impl fmt::Display for Instruction {
    /// Formats the instruction for an assembler, with the registers' values in a comment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, Operands { rs1, rs2 }) = match *self {
            Self::HfenceGvma(operands) => ("hfence.gvma", operands),
            Self::HinvalGvma(operands) => ("hinval.gvma", operands),
            Self::SfenceWInval => return f.write_str("sfence.w.inval"),
            Self::SfenceInvalIr => return f.write_str("sfence.inval.ir"),
        };
        let registers = (rs1.map_or("x0", |_| "a0"), rs2.map_or("x0", |_| "a1"));
        write!(f, "{name} {}, {}", registers.0, registers.1)?;
        match (rs1, rs2) {
            (Some(rs1), Some(rs2)) => write!(f, " # a0 = {rs1:#x}, a1 = {:#x}", rs2.0),
            (Some(rs1), None) => write!(f, " # a0 = {rs1:#x}"),
            (None, Some(rs2)) => write!(f, " # a1 = {:#x}", rs2.0),
            (None, None) => Ok(()),
        }
    }
}

/// A call of the SBI's RFENCE extension: registers a7, a6, and a0 to a4.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RemoteFence {
    /// a7: the extension, "RFNC".
    pub extension: u64,
    /// a6: the function, `sbi_remote_hfence_gvma_vmid`.
    pub function: u64,
    /// a0 to a4: mask of the harts and its base, start and size in bytes (the address is *not*
    /// shifted), VMID.
    pub arguments: [u64; 5],
}

/// A set of harts as the SBI encodes it: bit `n` of the mask is hart `base + n`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Harts {
    /// One bit for each hart from `base` on.
    pub mask: u64,
    /// The hart ID of bit 0.
    pub base: u64,
}

impl Harts {
    /// All harts of the supervisor.
    pub const ALL: Self = Self { mask: 0, base: u64::MAX };
}

/// How a machine invalidates: features of its harts, and choices of its hypervisor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hfence {
    /// Svinval: a sequence orders its invalidations by address once for all of them.
    pub svinval: bool,
    /// The most instructions by address; an invalidation that needs more takes the whole guest.
    pub most_by_address: u64,
}

impl Default for Hfence {
    /// Without Svinval, and with the limit that Linux has for its own addresses.
    fn default() -> Self {
        Self { svinval: false, most_by_address: 64 }
    }
}

const PAGE_SHIFT: u32 = 12;
/// rs1 is a guest physical address shifted right by this many bits.
const RS1_SHIFT: u32 = 2;
const RFENCE: u64 = 0x5246_4e43;
const REMOTE_HFENCE_GVMA_VMID: u64 = 3;

impl Hfence {
    /// Returns the instructions that `what` needs, in order, on each hart that may hold entries.
    ///
    /// They cover its range, rounded outwards to pages or, with a leaf size, to leaves; or the
    /// whole guest.
    pub fn sequence(&self, what: &Invalidation) -> Sequence {
        let addresses = self.addresses(what);
        let step = if self.svinval { Step::Begin } else { Step::Fence };
        Sequence { step, vmid: what.vmid, svinval: self.svinval, addresses }
    }

    /// Returns the SBI call that makes other harts do the same. The call returns when they have
    /// done it.
    ///
    /// The caller orders its stores before it (`fence rw, rw`), unless the firmware is known to do
    /// so.
    pub fn remote(&self, what: &Invalidation, harts: Harts) -> RemoteFence {
        let (start, size) = match self.addresses(what) {
            Some(Addresses { at, end, .. }) => (at, end - at),
            // "Applies to the entire address space".
            None => (0, u64::MAX),
        };
        RemoteFence {
            extension: RFENCE,
            function: REMOTE_HFENCE_GVMA_VMID,
            arguments: [harts.mask, harts.base, start, size, u64::from(what.vmid.0)],
        }
    }

    fn addresses(&self, what: &Invalidation) -> Option<Addresses> {
        let range: GpaRange = what.range.filter(|_| !what.tables)?;
        let shift = what.leaf.map_or(PAGE_SHIFT, |leaf| leaf.shift());
        let below = (1 << shift) - 1;
        let at = range.start().0 & !below;
        let end = range.end().0.checked_add(below)? & !below;
        let few = (end - at) >> shift <= self.most_by_address;
        few.then_some(Addresses { at, end, shift })
    }
}

/// The instructions by address of a sequence.
#[derive(Clone, Debug)]
struct Addresses {
    at: u64,
    end: u64,
    shift: u32,
}

/// The instructions of one invalidation, as [`Hfence::sequence`] returns them.
#[derive(Clone, Debug)]
pub struct Sequence {
    step: Step,
    vmid: Vmid,
    svinval: bool,
    addresses: Option<Addresses>,
}

/// The next step of a sequence.
#[derive(Clone, Copy, Debug)]
enum Step {
    Begin,
    Fence,
    End,
    Done,
}

impl Sequence {
    /// Returns whether the guest loses all of its entries, and not only those of a range.
    pub const fn is_whole_guest(&self) -> bool {
        self.addresses.is_none()
    }
}

impl Iterator for Sequence {
    type Item = Instruction;

    fn next(&mut self) -> Option<Instruction> {
        let after = if self.svinval { Step::End } else { Step::Done };
        let rs1 = loop {
            match (self.step, &mut self.addresses) {
                (Step::Begin, _) => {
                    self.step = Step::Fence;
                    return Some(Instruction::SfenceWInval);
                }
                (Step::Fence, None) => {
                    self.step = after;
                    break None;
                }
                (Step::Fence, Some(left)) if left.at < left.end => {
                    let at = left.at;
                    left.at += 1 << left.shift;
                    break Some(at >> RS1_SHIFT);
                }
                (Step::Fence, Some(_)) => self.step = after,
                (Step::End, _) => {
                    self.step = Step::Done;
                    return Some(Instruction::SfenceInvalIr);
                }
                (Step::Done, _) => return None,
            }
        };
        let operands = Operands { rs1, rs2: Some(self.vmid) };
        Some(match self.svinval {
            true => Instruction::HinvalGvma(operands),
            false => Instruction::HfenceGvma(operands),
        })
    }
}

impl FusedIterator for Sequence {}

#[cfg(test)]
mod tests;
