//! A guest-page fault, decoded from scause, stval, htval and htinst.
//!
//! Source: the RISC-V Instruction Set Manual, volume II, "Hypervisor Extension", sections "Trap
//! Cause Codes", "Hypervisor Trap Value (htval) Register" and "Transformed Instruction or
//! Pseudoinstruction for mtinst or htinst".
//!
//! The fault does not say whether nothing was mapped or a right was missing, nor, on a hart without
//! Svadu, whether A or D was clear. [`Guard::relax`](crate::Guard::relax) and
//! [`Guard::reserve`](crate::Guard::reserve) find out.
//!
//! ```
//! use slat::format::riscv::fault::GuestPageFault;
//! use slat::{Access, Gpa};
//!
//! let fault = GuestPageFault::decode(23, 0x3_f00b, 0x8000_100b >> 2, 0).expect("a store's");
//! assert_eq!((fault.gpa, fault.access), (Gpa(0x8000_100b), Access::Write));
//! ```

use crate::addr::Gpa;
use crate::format::Access;

/// A fault of the G-stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestPageFault {
    /// The guest physical address: of the access, or of the entry that the walk of the guest's own
    /// tables wanted.
    ///
    /// A hart without Shtvala may report 0 for any address. Its hypervisor takes an htval of 0 for
    /// unknown, and walks the guest's tables from stval.
    pub gpa: Gpa,
    /// What the tables have to permit.
    pub access: Access,
    /// The access of the guest that caused the fault, by scause. It differs from `access` where the
    /// walk of the guest's own tables faulted.
    pub cause: Cause,
    /// Whether the walk of the guest's own tables faulted, which htinst tells by a
    /// pseudoinstruction.
    pub walk: bool,
}

/// The cause of a guest-page fault: the access of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// An instruction fetch.
    Fetch = 20,
    /// A load.
    Load = 21,
    /// A store, or an atomic operation.
    Store = 23,
}

/// The pseudoinstructions have no bit in `[1:0]`, where every instruction has one; bit 5 tells the
/// write of an accessed or dirty bit (Svadu) from the read of an entry; the width of an entry, in
/// bit 12, is 64 bits where this format is used.
const INSTRUCTION: u64 = 0b11;
const PSEUDO_WRITE: u64 = 1 << 5;
/// htval has no place for the lowest two bits of the address.
const HTVAL_SHIFT: u32 = 2;

impl GuestPageFault {
    /// Decodes the registers, as the trap left them. Returns `None` for another trap.
    pub const fn decode(scause: u64, stval: u64, htval: u64, htinst: u64) -> Option<Self> {
        // An interrupt has bit 63, so its code is none of these.
        let cause = match scause {
            20 => Cause::Fetch,
            21 => Cause::Load,
            23 => Cause::Store,
            _ => return None,
        };
        let walk = htinst != 0 && htinst & INSTRUCTION == 0;
        let access = match cause {
            _ if walk && htinst & PSEUDO_WRITE != 0 => Access::Write,
            _ if walk => Access::Read,
            Cause::Fetch => Access::Execute,
            Cause::Load => Access::Read,
            Cause::Store => Access::Write,
        };
        // stval has the virtual address of the access. An entry of a table is aligned.
        let low = if walk { 0 } else { stval & ((1 << HTVAL_SHIFT) - 1) };
        Some(Self { gpa: Gpa(htval << HTVAL_SHIFT | low), access, cause, walk })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIRTUAL: u64 = 0xffff_ffc0_0000_1237;
    /// 0x8_7654_3210_1234, of 51 bits, without its lowest two.
    const HTVAL: u64 = 0x2_1d95_0c84_048d;

    fn decode(scause: u64, htinst: u64) -> GuestPageFault {
        GuestPageFault::decode(scause, VIRTUAL, HTVAL, htinst).unwrap()
    }

    #[test]
    fn an_access_has_its_lowest_two_bits_from_stval() {
        for (scause, cause, access) in [
            (20, Cause::Fetch, Access::Execute),
            (21, Cause::Load, Access::Read),
            (23, Cause::Store, Access::Write),
        ] {
            // No instruction; `lw a0, 0(a1)` and `sd a0, 0(a1)`, transformed; 16 bits wide.
            for htinst in [0, 0x0000_2503, 0x00a5_b023, 0x0000_2501] {
                let fault = decode(scause, htinst);
                assert_eq!(fault.gpa, Gpa(0x8_7654_3210_1237));
                assert_eq!((fault.cause, fault.access, fault.walk), (cause, access, false));
            }
        }
    }

    #[test]
    fn a_walk_reads_an_entry_or_sets_its_bits_for_any_access() {
        for scause in [20, 21, 23] {
            for (htinst, access) in [
                (0x0000_3000, Access::Read),
                (0x0000_3020, Access::Write),
                (0x0000_2000, Access::Read),
                (0x0000_2020, Access::Write),
            ] {
                let fault = decode(scause, htinst);
                assert_eq!(fault.gpa, Gpa(0x8_7654_3210_1234), "an entry is aligned");
                assert_eq!((fault.access, fault.walk), (access, true));
                assert_eq!(fault.cause as u64, scause);
            }
        }
    }

    #[test]
    fn other_traps_are_no_guest_page_faults() {
        // ecall of VS-mode, page faults of the guest's own stage, a virtual instruction; a timer
        // interrupt; an interrupt with the code of a fault.
        for scause in [10, 12, 13, 15, 22, 1 << 63 | 5, 1 << 63 | 21] {
            assert_eq!(GuestPageFault::decode(scause, 0, HTVAL, 0), None);
        }
    }
}
