//! A nested page fault, decoded from EXITINFO1 and EXITINFO2 of the VMCB.
//!
//! Source: the AMD64 Architecture Programmer's Manual, volume 2: 15.25.6 "Nested versus Guest Page
//! Faults, Fault Ordering", 15.36.10 "RMP and VMPL Access Checks", and appendix C for the exit
//! code.
//!
//! ```
//! use slat::format::npt::fault::{Kind, NestedPageFault};
//! use slat::{Access, Gpa};
//!
//! // A write by the guest to a page that is mapped without the right.
//! let fault = NestedPageFault::decode(0x400, 1 << 32 | 0b111, 0x1234_5678).expect("a fault");
//! assert_eq!(fault.fault(), Some((Gpa(0x1234_5678), Access::Write)));
//! assert_eq!(fault.kind, Kind::Permission);
//! ```

use crate::addr::Gpa;
use crate::format::Access;

/// A fault of the nested tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NestedPageFault {
    /// The guest physical address: of the access, or of the entry of the guest's own tables.
    pub gpa: Gpa,
    /// What the tables have to permit. The walk of the guest's own tables counts as a write.
    pub access: Access,
    /// The kind of the fault.
    pub kind: Kind,
    /// Whether the walk of the guest's own tables caused it.
    pub walk: bool,
}

/// The kind of a nested page fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Nothing is mapped.
    NotPresent,
    /// The right is missing.
    Permission,
    /// An entry on the way has a bit that this CPU reserves. Tables of this crate have none, if
    /// their format is that of the CPU.
    Reserved,
    /// The reverse map table refused the access (SEV-SNP), not these tables.
    ReverseMap,
}

/// VMEXIT_NPF.
const EXIT_CODE: u64 = 0x400;
/// Bits of EXITINFO1: those of a page fault's error code, of which bit 2, user, is always set, and
/// the place of the fault.
const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const RESERVED: u64 = 1 << 3;
const FETCH: u64 = 1 << 4;
const REVERSE_MAP: u64 = 1 << 31;
const GUEST_WALK: u64 = 1 << 33;

impl NestedPageFault {
    /// Decodes the fields EXITCODE, EXITINFO1 and EXITINFO2. Returns `None` for another exit.
    pub const fn decode(exit_code: u64, info1: u64, info2: u64) -> Option<Self> {
        if exit_code != EXIT_CODE {
            return None;
        }
        let access = match (info1 & WRITE != 0, info1 & FETCH != 0) {
            (true, _) => Access::Write,
            (_, true) => Access::Execute,
            _ => Access::Read,
        };
        let kind = if info1 & REVERSE_MAP != 0 {
            Kind::ReverseMap
        } else if info1 & RESERVED != 0 {
            Kind::Reserved
        } else if info1 & PRESENT != 0 {
            Kind::Permission
        } else {
            Kind::NotPresent
        };
        Some(Self { gpa: Gpa(info2), access, kind, walk: info1 & GUEST_WALK != 0 })
    }

    /// Returns what the tables have to permit for the guest to go on; `None` if no change of a
    /// right or of what is mapped helps.
    pub const fn fault(&self) -> Option<(Gpa, Access)> {
        match self.kind {
            Kind::NotPresent | Kind::Permission => Some((self.gpa, self.access)),
            Kind::Reserved | Kind::ReverseMap => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0xf_edcb_a987_6543;
    const FINAL: u64 = 1 << 32;

    fn decode(info1: u64) -> NestedPageFault {
        NestedPageFault::decode(0x400, info1, AT).unwrap()
    }

    #[test]
    fn the_error_code_tells_access_and_kind() {
        for (code, access, kind) in [
            (0b00100, Access::Read, Kind::NotPresent),
            (0b00110, Access::Write, Kind::NotPresent),
            (0b10100, Access::Execute, Kind::NotPresent),
            (0b00101, Access::Read, Kind::Permission),
            (0b00111, Access::Write, Kind::Permission),
            (0b10101, Access::Execute, Kind::Permission),
        ] {
            let fault = decode(FINAL | code);
            assert_eq!((fault.access, fault.kind, fault.walk), (access, kind, false));
            assert_eq!(fault.fault(), Some((Gpa(AT), access)));
        }
    }

    #[test]
    fn a_walk_of_the_guests_tables_asks_for_a_write() {
        let fault = decode(1 << 33 | 0b00111);
        assert_eq!((fault.access, fault.walk), (Access::Write, true));
        assert_eq!(fault.fault(), Some((Gpa(AT), Access::Write)));
        // A fetch's walk, that would set the accessed bit.
        assert_eq!(decode(1 << 33 | 0b10111).access, Access::Write);
    }

    #[test]
    fn reserved_bits_and_the_reverse_map_are_not_answered() {
        let fault = decode(FINAL | 0b01101);
        assert_eq!((fault.kind, fault.fault()), (Kind::Reserved, None));
        let fault = decode(1 << 31 | FINAL | 0b00111);
        assert_eq!((fault.kind, fault.fault()), (Kind::ReverseMap, None));
    }

    #[test]
    fn other_exits_are_no_nested_page_faults() {
        // VMEXIT_VMMCALL, VMEXIT_EXCP14 (the guest's own page fault), VMEXIT_INVALID.
        for code in [0x81, 0x4e, u64::MAX] {
            assert_eq!(NestedPageFault::decode(code, FINAL | 0b00111, AT), None);
        }
    }
}
