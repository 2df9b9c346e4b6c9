//! An EPT violation or misconfiguration, decoded from fields of the VMCS.
//!
//! Source: the Intel Software Developer's Manual, volume 3C, "Exit Qualification for EPT
//! Violations" (a table), "EPT Violations" and "EPT Misconfigurations", and volume 3D, "VMX Basic
//! Exit Reasons".
//!
//! ```
//! use slat::format::ept::fault::Exit;
//! use slat::{Access, Gpa};
//!
//! let Some(Exit::Violation(it)) = Exit::decode(48, 1 << 1 | 1 << 7 | 1 << 8, 0x1234_5678) else {
//!     panic!("a write to an address where nothing is mapped");
//! };
//! assert_eq!((it.gpa, it.access, it.is_mapped(false)), (Gpa(0x1234_5678), Access::Write, false));
//! ```

use crate::addr::Gpa;
use crate::format::Access;

/// A VM exit that EPT caused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// An EPT violation: nothing is mapped, or a right is missing.
    Violation(Violation),
    /// An EPT misconfiguration: an entry on the way to the address has a value that this CPU does
    /// not allow. Tables of this crate cause none, if their format is that of the CPU.
    Misconfiguration {
        /// The guest physical address of the access.
        gpa: Gpa,
    },
}

/// An EPT violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The guest physical address: of the access, or of the entry of the guest's own tables.
    pub gpa: Gpa,
    /// What the tables have to permit. With accessed and dirty flags in use, the walk of the
    /// guest's own tables counts as a write.
    pub access: Access,
    /// The entries on the way permit reads.
    pub readable: bool,
    /// They permit writes.
    pub writable: bool,
    /// They permit fetches; with mode-based execute control, the kernel's.
    pub executable: bool,
    /// With mode-based execute control: they permit user programs' fetches. Undefined without.
    pub user_executable: bool,
    /// The guest linear address field of the VMCS is valid.
    pub linear: bool,
    /// The walk of the guest's own tables caused it, or an update of their accessed and dirty
    /// flags.
    pub walk: bool,
    /// IRET had removed the blocking of NMIs before the fault (unless the exit was during the
    /// delivery of an event): the hypervisor blocks them again.
    pub nmi_unblocked: bool,
}

/// Basic exit reasons.
const VIOLATION: u32 = 48;
const MISCONFIGURATION: u32 = 49;
/// The basic reason; the rest of the field are flags.
const BASIC: u32 = 0xffff;

const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const FETCH: u64 = 1 << 2;
const READABLE: u64 = 1 << 3;
const WRITABLE: u64 = 1 << 4;
const EXECUTABLE: u64 = 1 << 5;
const USER_EXECUTABLE: u64 = 1 << 6;
const LINEAR: u64 = 1 << 7;
/// With [`LINEAR`]: the access itself, not the walk to it.
const FINAL: u64 = 1 << 8;
const NMI_UNBLOCKED: u64 = 1 << 12;

const fn is(word: u64, bit: u64) -> bool {
    word & bit != 0
}

impl Exit {
    /// Decodes the exit reason, the exit qualification and the guest-physical address. Returns
    /// `None` for an exit of another reason, and for a violation of no kind of access, which is not
    /// one that these tables can answer (guest-paging verification).
    pub const fn decode(reason: u32, qualification: u64, guest_physical: u64) -> Option<Self> {
        let gpa = Gpa(guest_physical);
        match reason & BASIC {
            MISCONFIGURATION => return Some(Self::Misconfiguration { gpa }),
            VIOLATION => {}
            _ => return None,
        }
        // A read-modify-write, and the walk of the guest's tables, are a read and a write.
        let access = if is(qualification, WRITE) {
            Access::Write
        } else if is(qualification, FETCH) {
            Access::Execute
        } else if is(qualification, READ) {
            Access::Read
        } else {
            return None;
        };
        Some(Self::Violation(Violation {
            gpa,
            access,
            readable: is(qualification, READABLE),
            writable: is(qualification, WRITABLE),
            executable: is(qualification, EXECUTABLE),
            user_executable: is(qualification, USER_EXECUTABLE),
            linear: is(qualification, LINEAR),
            walk: is(qualification, LINEAR) && !is(qualification, FINAL),
            nmi_unblocked: is(qualification, NMI_UNBLOCKED),
        }))
    }
}

impl Violation {
    /// Returns whether all entries on the way are present: a right is missing. Otherwise nothing is
    /// mapped. `split_execute` is that of the [format](super::Ept).
    pub const fn is_mapped(&self, split_execute: bool) -> bool {
        let user = self.user_executable && split_execute;
        self.readable || self.writable || self.executable || user
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0xf_edcb_a987_6543;

    fn violation(qualification: u64) -> Violation {
        match Exit::decode(48, qualification, AT) {
            Some(Exit::Violation(violation)) => violation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_violation_has_its_access_and_what_the_entries_permit() {
        // A read of nothing.
        let it = violation(0b1_1000_0001);
        assert_eq!((it.gpa, it.access), (Gpa(AT), Access::Read));
        assert!(!it.is_mapped(true) && it.linear && !it.walk);
        // A write where reads and fetches are permitted.
        let it = violation(0b1_1010_1010);
        assert_eq!((it.access, it.is_mapped(false)), (Access::Write, true));
        assert_eq!((it.readable, it.writable, it.executable), (true, false, true));
        // A locked instruction reads and writes.
        assert_eq!(violation(0b1_1000_1011).access, Access::Write);
        // A fetch where reads and writes are permitted.
        let it = violation(0b1_1001_1100);
        assert_eq!((it.access, it.executable), (Access::Execute, false));
        assert!(it.readable && it.writable);
    }

    #[test]
    fn a_walk_of_the_guests_tables_is_told_from_the_access() {
        // With accessed and dirty flags it counts as a read and a write.
        let it = violation(0b0_1010_1011);
        assert_eq!((it.access, it.walk), (Access::Write, true));
        // Without, a read; and without a linear address, bit 8 means nothing.
        assert_eq!(violation(0b0_1000_0001).access, Access::Read);
        assert!(!violation(0b0_0000_0001).walk && !violation(0b1_0000_0001).linear);
        assert!(violation(1 << 12 | 0b1_1000_0001).nmi_unblocked);
    }

    #[test]
    fn users_right_to_execute_counts_only_in_mode_based_control() {
        let it = violation(0b1_1100_0001);
        assert!(it.user_executable && it.is_mapped(true) && !it.is_mapped(false));
    }

    #[test]
    fn a_misconfiguration_is_no_violation_and_has_no_access() {
        let misconfigured = Some(Exit::Misconfiguration { gpa: Gpa(AT) });
        assert_eq!(Exit::decode(49, 0b1_1000_0001, AT), misconfigured);
        // Flags of the field: the exit was during the delivery of an event, or in an enclave.
        assert_eq!(Exit::decode(1 << 27 | 49, 0, AT), misconfigured);
        assert!(matches!(Exit::decode(1 << 27 | 48, 1, AT), Some(Exit::Violation(_))));
        // An external interrupt, a #VE's page fault, a failed entry, a violation of no access.
        for (reason, qualification) in [(1, 1), (0, 1), (1 << 31 | 33, 1), (48, 0b1_1000_0000)] {
            assert_eq!(Exit::decode(reason, qualification, AT), None);
        }
    }
}
