//! A hypervisor storage interrupt, decoded from HDSISR, HDAR and ASDR, or HSRR1, HSRR0 and ASDR.
//!
//! Source: the Power ISA, Book III, "Hypervisor Data Storage Interrupt", "Hypervisor Instruction
//! Storage Interrupt" and "Access Segment Descriptor Register". The manual counts bits from the
//! highest, here 32 to 63; Linux has the same words as `DSISR_` and `SRR1_ISI_`.
//!
//! ```
//! use slat::format::power::fault::{Kind, StorageFault};
//! use slat::{Access, Gpa};
//!
//! // A store to an address where nothing is mapped.
//! let hdsisr = 0x4200_0000;
//! let fault = StorageFault::data(hdsisr, 0x7fff_1234_5678, 0x8000_5000);
//! assert_eq!(fault.fault(), Some((Gpa(0x8000_5678), Access::Write)));
//! assert_eq!(fault.kind, Kind::NotMapped);
//! ```

use crate::addr::Gpa;
use crate::format::Access;

/// A fault of the partition-scoped tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StorageFault {
    /// The guest real address: of the access, or of the page with the entry of the guest's own
    /// tables.
    pub gpa: Gpa,
    /// What the tables have to permit.
    pub access: Access,
    /// The kind of the fault.
    pub kind: Kind,
    /// Whether the walk of the guest's own tables, or of its process table, caused it.
    pub walk: bool,
}

/// The kind of a hypervisor storage interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Nothing is mapped.
    NotMapped,
    /// The right is missing.
    Permission,
    /// R, or C for a store, is clear, and hardware does not set it.
    ReferenceChange,
    /// The CPU does not walk trees of this shape. It walks those of this crate.
    Unsupported,
    /// Something else, which no change of the tables helps: an access that its memory's attributes
    /// forbid, a watchpoint, a key.
    Other,
}

/// Bits of HDSISR, and in the same places of HSRR1.
const NOT_MAPPED: u64 = 1 << (63 - 33);
/// HSRR1 only: no-execute or guarded.
const NO_EXECUTE: u64 = 1 << (63 - 35);
const PROTECTED: u64 = 1 << (63 - 36);
/// An access that the memory's attributes forbid; HDSISR only.
const BAD_ACCESS: u64 = 1 << (63 - 37);
/// HDSISR only: the access was a store.
const STORE: u64 = 1 << (63 - 38);
const UNSUPPORTED: u64 = 1 << (63 - 44);
const REFERENCE_CHANGE: u64 = 1 << (63 - 45);
/// The access was to the guest's own tables.
const TABLE: u64 = 1 << (63 - 46);
/// HSRR1 only: the walk for a fetch could not set a bit in the guest's own tables.
const FETCH_WRITES: u64 = 1 << (63 - 47);
/// ASDR has the guest real address from bit 51 of the manual's upwards; its highest bits are not
/// part of it.
const ASDR: u64 = (1 << 60) - (1 << 12);
const OFFSET: u64 = (1 << 12) - 1;

impl StorageFault {
    /// Decodes a hypervisor data storage interrupt (vector 0xe00).
    pub const fn data(hdsisr: u64, hdar: u64, asdr: u64) -> Self {
        let access = if hdsisr & STORE != 0 { Access::Write } else { Access::Read };
        Self::decode(hdsisr & !NO_EXECUTE, hdar, asdr, access)
    }

    /// Decodes a hypervisor instruction storage interrupt (vector 0xe20).
    pub const fn instruction(hsrr1: u64, hsrr0: u64, asdr: u64) -> Self {
        let access = if hsrr1 & FETCH_WRITES != 0 {
            Access::Write
        } else if hsrr1 & TABLE != 0 {
            Access::Read
        } else {
            Access::Execute
        };
        Self::decode(hsrr1, hsrr0, asdr, access)
    }

    const fn decode(bits: u64, effective: u64, asdr: u64, access: Access) -> Self {
        let kind = if bits & UNSUPPORTED != 0 {
            Kind::Unsupported
        } else if bits & BAD_ACCESS != 0 {
            Kind::Other
        } else if bits & NOT_MAPPED != 0 {
            Kind::NotMapped
        } else if bits & (PROTECTED | NO_EXECUTE) != 0 {
            Kind::Permission
        } else if bits & REFERENCE_CHANGE != 0 {
            Kind::ReferenceChange
        } else {
            Kind::Other
        };
        let walk = bits & TABLE != 0;
        // The offset is that of the access, not of an entry that a walk wanted.
        let offset = if walk { 0 } else { effective & OFFSET };
        Self { gpa: Gpa(asdr & ASDR | offset), access, kind, walk }
    }

    /// Returns what the tables have to permit for the guest to go on; `None` if no change of them
    /// helps.
    pub const fn fault(&self) -> Option<(Gpa, Access)> {
        match self.kind {
            Kind::NotMapped | Kind::Permission | Kind::ReferenceChange => {
                Some((self.gpa, self.access))
            }
            Kind::Unsupported | Kind::Other => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFFECTIVE: u64 = 0xc000_0000_0012_3abc;
    /// Bits above the address, and below its page.
    const ASDR: u64 = 0xf00a_bcde_f123_4567;
    const AT: Gpa = Gpa(0xa_bcde_f123_4abc);
    const PAGE: Gpa = Gpa(0xa_bcde_f123_4000);

    #[test]
    fn data_faults_have_kind_and_access_by_linuxs_words() {
        for (hdsisr, access, kind) in [
            (0x4000_0000, Access::Read, Kind::NotMapped),
            (0x4200_0000, Access::Write, Kind::NotMapped),
            (0x0800_0000, Access::Read, Kind::Permission),
            (0x0a00_0000, Access::Write, Kind::Permission),
            (0x0004_0000, Access::Read, Kind::ReferenceChange),
            (0x0204_0000, Access::Write, Kind::ReferenceChange),
        ] {
            let fault = StorageFault::data(hdsisr, EFFECTIVE, ASDR);
            assert_eq!(
                (fault.gpa, fault.access, fault.kind, fault.walk),
                (AT, access, kind, false)
            );
            assert_eq!(fault.fault(), Some((AT, access)));
        }
    }

    #[test]
    fn fetches_need_the_right_to_execute() {
        for (hsrr1, kind) in [
            (0x4000_0000, Kind::NotMapped),
            (0x1000_0000, Kind::Permission),
            (0x0800_0000, Kind::Permission),
            (0x0004_0000, Kind::ReferenceChange),
        ] {
            // The rest of HSRR1 is the guest's MSR: SF, EE, PR, IR, DR.
            let msr = 0x8000_0000_0000_c030;
            let fault = StorageFault::instruction(msr | hsrr1, EFFECTIVE, ASDR);
            assert_eq!((fault.kind, fault.fault()), (kind, Some((AT, Access::Execute))));
        }
    }

    #[test]
    fn a_walk_of_the_guests_tables_reads_them_or_sets_a_bit() {
        let of_load = StorageFault::data(0x4002_0000, EFFECTIVE, ASDR);
        assert_eq!((of_load.fault(), of_load.walk), (Some((PAGE, Access::Read)), true));
        let sets = StorageFault::data(0x0a02_0000, EFFECTIVE, ASDR);
        assert_eq!(sets.fault(), Some((PAGE, Access::Write)));
        let of_fetch = StorageFault::instruction(0x4002_0000, EFFECTIVE, ASDR);
        assert_eq!(of_fetch.fault(), Some((PAGE, Access::Read)));
        let sets = StorageFault::instruction(0x0803_0000, EFFECTIVE, ASDR);
        assert_eq!(sets.fault(), Some((PAGE, Access::Write)));
    }

    #[test]
    fn what_no_table_answers_is_told_apart() {
        for (hdsisr, kind) in [
            (0x0008_0000, Kind::Unsupported),
            // Attributes conflict; bad access to inhibited memory; a watchpoint; a key.
            (0x2000_0000, Kind::Other),
            (0x0400_0000, Kind::Other),
            (0x4400_0000, Kind::Other),
            (0x0240_0000, Kind::Other),
            (0x0020_0000, Kind::Other),
            // No-execute is a bit of HSRR1 alone.
            (0x1000_0000, Kind::Other),
        ] {
            let fault = StorageFault::data(hdsisr, EFFECTIVE, ASDR);
            assert_eq!((fault.kind, fault.fault()), (kind, None));
        }
    }
}
