//! An abort from stage 2, decoded from ESR_EL2, FAR_EL2 and HPFAR_EL2.
//!
//! Source: the Arm Architecture Reference Manual (DDI 0487), D24.2, "ESR_EL2, Exception Syndrome
//! Register (EL2)", with the encodings of the ISS for Data Aborts and Instruction Aborts;
//! "HPFAR_EL2, Hypervisor IPA Fault Address Register"; "FAR_EL2"; "PAR_EL1".
//!
//! ```
//! use slat::format::arm64::fault::Abort;
//! use slat::{Access, Gpa};
//!
//! // A store of X3 to a page that is not mapped: translation fault at level 3.
//! let esr = 0x24 << 26 | 1 << 25 | 1 << 24 | 3 << 22 | 3 << 16 | 1 << 15 | 1 << 6 | 0x07;
//! let abort = Abort::decode(esr, 0xffff_8000_1234_5678, 0x4_0056 << 4).expect("an abort");
//! assert_eq!(abort.fault(), Some((Gpa(0x4005_6678), Access::Write)));
//! ```

use crate::addr::Gpa;
use crate::format::Access;

/// An abort that the guest's access caused and that was taken to EL2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abort {
    /// Whether it was an instruction fetch.
    pub fetch: bool,
    /// Whether it was a write of data (WnR). An update of a stage-1 table by hardware is a write
    /// too.
    pub write: bool,
    /// Whether the walk of the guest's stage-1 tables caused it (S1PTW).
    pub stage1_walk: bool,
    /// Whether a cache maintenance or address translation instruction caused it (CM).
    pub maintenance: bool,
    /// The kind of the fault.
    pub kind: Kind,
    /// The level of the tables at which it stopped, as the manual counts, if the fault has one.
    pub level: Option<i8>,
    /// The load or store, if hardware describes it (ISV).
    pub transfer: Option<Transfer>,
    /// The guest physical address. `None` if HPFAR_EL2 does not have it: for a permission fault of
    /// the access itself. Then the CPU translates FAR_EL2 by the guest's stage 1 (`AT S1E1R`), and
    /// [`translated`] reads the result. `None` also for faults that are not of stage 2.
    pub gpa: Option<Gpa>,
}

/// The kind of a fault, by its status code (DFSC, IFSC).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// An address is wider than the tables translate, or an entry holds one that is too wide.
    AddressSize,
    /// Nothing is mapped.
    Translation,
    /// The access flag is clear, and hardware does not set it.
    AccessFlag,
    /// The right is missing.
    Permission,
    /// A synchronous external abort, or an error of parity or ECC. With a [level](Abort::level) it
    /// hit a walk of tables.
    External,
    /// Two TLB entries matched, because the size of a leaf changed without break-before-make.
    TlbConflict,
    /// Another fault, with its status code.
    Other(u8),
}

/// A load or store of one general register, which hardware describes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The size of the access in bytes (SAS).
    pub bytes: u8,
    /// The general register; 31 is XZR (SRT).
    pub register: u8,
    /// Whether a load extends the sign (SSE).
    pub sign_extend: bool,
    /// Whether the register has 64 bits, not 32 (SF).
    pub wide: bool,
}

/// The exception classes of an abort from a lower exception level (EC).
const FETCH: u64 = 0x20;
const DATA: u64 = 0x24;
/// Bits of the ISS.
const WNR: u32 = 6;
const S1PTW: u32 = 7;
const CM: u32 = 8;
const SF: u32 = 15;
const SRT: u32 = 16;
const SSE: u32 = 21;
const SAS: u32 = 22;
const ISV: u32 = 24;
/// `FIPA[47:4]` of HPFAR_EL2 is the guest physical address from bit 12 on; bit 63 is NS.
const FIPA: u64 = (1 << 48) - (1 << 4);
const FIPA_SHIFT: u32 = 8;
/// The part of an address that stage 1 does not translate, for every granule.
const OFFSET: u64 = (1 << 12) - 1;
/// `PA[51:12]` of PAR_EL1.
const PAR_PA: u64 = (1 << 52) - (1 << 12);

const fn bit(word: u64, at: u32) -> bool {
    word >> at & 1 != 0
}

const fn field(word: u64, from: u32, bits: u32) -> u8 {
    (word >> from & ((1 << bits) - 1)) as u8
}

impl Abort {
    /// Decodes the registers, as the exception left them. Returns `None` for an exception of
    /// another class: the guest called, trapped, or was interrupted.
    pub const fn decode(esr: u64, far: u64, hpfar: u64) -> Option<Self> {
        let fetch = match esr >> 26 & 0x3f {
            FETCH => true,
            DATA => false,
            _ => return None,
        };
        let (kind, level) = status(field(esr, 0, 6));
        let stage1_walk = bit(esr, S1PTW);
        let transfer = Transfer {
            bytes: 1 << field(esr, SAS, 2),
            register: field(esr, SRT, 5),
            sign_extend: bit(esr, SSE),
            wide: bit(esr, SF),
        };
        // HPFAR_EL2 has the page. FAR_EL2 has the offset, but of the access: the descriptor that a
        // walk of stage 1 wanted is elsewhere in its page.
        let page = (hpfar & FIPA) << FIPA_SHIFT;
        let gpa = match kind {
            Kind::Permission if !stage1_walk => None,
            Kind::AddressSize | Kind::Translation | Kind::AccessFlag | Kind::Permission => {
                Some(Gpa(if stage1_walk { page } else { page | far & OFFSET }))
            }
            _ => None,
        };
        Some(Self {
            fetch,
            write: bit(esr, WNR) && !fetch,
            stage1_walk,
            maintenance: bit(esr, CM) && !fetch,
            kind,
            level,
            transfer: if bit(esr, ISV) && !fetch { Some(transfer) } else { None },
            gpa,
        })
    }

    /// Returns what the tables have to permit for the guest to go on: the address, and the access.
    /// `None` if no change of the tables helps, or if the address has to be [`translated`] first.
    pub const fn fault(&self) -> Option<(Gpa, Access)> {
        match (self.kind, self.gpa) {
            (Kind::Translation | Kind::AccessFlag | Kind::Permission, Some(gpa)) => {
                Some((gpa, self.access()))
            }
            _ => None,
        }
    }

    /// Returns the right that the access needs.
    ///
    /// A walk of the guest's stage-1 tables reads them, and writes to them only where hardware sets
    /// an accessed or dirty flag. A permission fault of a walk therefore asks for the right to
    /// write, for any access that caused the walk. Cache maintenance is reported as a write, but
    /// needs only the right to read. The exception is DC IVAC, which needs the right to write, and
    /// gets a permission fault without it.
    pub const fn access(&self) -> Access {
        let denied = matches!(self.kind, Kind::Permission);
        match *self {
            Self { stage1_walk: true, .. } if denied => Access::Write,
            Self { stage1_walk: true, .. } => Access::Read,
            Self { fetch: true, .. } => Access::Execute,
            Self { maintenance: true, .. } if !denied => Access::Read,
            Self { write: true, .. } => Access::Write,
            _ => Access::Read,
        }
    }
}

/// Decodes the status code. Level -1, which only addresses of 52 bits have, has codes of its own.
const fn status(code: u8) -> (Kind, Option<i8>) {
    let level = Some((code & 0b11) as i8);
    match code {
        0x00..=0x03 => (Kind::AddressSize, level),
        0x29 => (Kind::AddressSize, Some(-1)),
        0x04..=0x07 => (Kind::Translation, level),
        0x2b => (Kind::Translation, Some(-1)),
        0x08..=0x0b => (Kind::AccessFlag, level),
        0x0c..=0x0f => (Kind::Permission, level),
        0x10 | 0x18 => (Kind::External, None),
        0x14..=0x17 | 0x1c..=0x1f => (Kind::External, level),
        0x13 | 0x1b => (Kind::External, Some(-1)),
        0x30 => (Kind::TlbConflict, None),
        code => (Kind::Other(code), None),
    }
}

/// Returns the guest physical address of `far`, from PAR_EL1 after an `AT S1E1R` of it; `None` if
/// the guest's stage 1 does not translate it any more: the guest tries again.
pub const fn translated(far: u64, par: u64) -> Option<Gpa> {
    if bit(par, 0) { None } else { Some(Gpa(par & PAR_PA | far & OFFSET)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: u64 = 0xffff_8000_0012_3abc;
    /// NS, and the page 0x8_7654_3210_0 of 52 bits.
    const HPFAR: u64 = 1 << 63 | 0x0087_6543_2100;

    fn data(iss: u64) -> Abort {
        Abort::decode(0x24 << 26 | 1 << 25 | iss, FAR, HPFAR).unwrap()
    }

    fn fetch(iss: u64) -> Abort {
        Abort::decode(0x20 << 26 | 1 << 25 | iss, FAR, HPFAR).unwrap()
    }

    #[test]
    fn a_store_that_found_nothing_names_its_register_and_size() {
        // ISV, SAS 2, SRT 3, WnR, translation fault at level 3.
        let abort = data(1 << 24 | 2 << 22 | 3 << 16 | 1 << 6 | 0x07);
        assert_eq!((abort.kind, abort.level), (Kind::Translation, Some(3)));
        let transfer = Transfer { bytes: 4, register: 3, sign_extend: false, wide: false };
        assert_eq!(abort.transfer, Some(transfer));
        assert_eq!(abort.fault(), Some((Gpa(0x8765_4321_0abc), Access::Write)));
        // SSE, SF, XZR, 8 bytes; a load.
        let abort = data(1 << 24 | 3 << 22 | 1 << 21 | 31 << 16 | 1 << 15 | 0x05);
        let transfer = Transfer { bytes: 8, register: 31, sign_extend: true, wide: true };
        assert_eq!((abort.transfer, abort.level), (Some(transfer), Some(1)));
        assert_eq!(abort.access(), Access::Read);
        // Without ISV the other fields say nothing.
        assert_eq!(data(3 << 22 | 0x07).transfer, None);
    }

    #[test]
    fn a_fetch_is_no_write_regardless_of_the_other_bits() {
        let abort = fetch(1 << 24 | 1 << 8 | 1 << 6 | 0x0f);
        assert_eq!((abort.kind, abort.write, abort.transfer), (Kind::Permission, false, None));
        assert!(abort.fetch && !abort.maintenance);
        assert_eq!((abort.access(), abort.gpa), (Access::Execute, None));
    }

    #[test]
    fn a_permission_fault_has_an_address_only_if_a_walk_caused_it() {
        let abort = data(1 << 6 | 0x0f);
        assert_eq!((abort.gpa, abort.fault(), abort.access()), (None, None, Access::Write));
        // The offset of FAR_EL2 is not that of the descriptor.
        let abort = data(1 << 7 | 0x0f);
        assert_eq!(abort.fault(), Some((Gpa(0x8765_4321_0000), Access::Write)));
        assert_eq!(translated(FAR, 0xff00_0000_8765_4200 | 0x180), Some(Gpa(0x8765_4abc)));
        assert_eq!(translated(FAR, 0x8765_4001), None);
    }

    #[test]
    fn walks_and_maintenance_need_what_they_do_to_memory() {
        let walk = 1 << 7;
        assert_eq!(fetch(walk | 0x0f).access(), Access::Write);
        assert_eq!(fetch(walk | 0x07).access(), Access::Read);
        // A store whose walk found no mapping for a table needs to read the table.
        assert_eq!(data(1 << 6 | walk | 0x07).access(), Access::Read);
        // DC CIVAC of an address that is not mapped, and DC IVAC of one that is read-only.
        assert_eq!(data(1 << 8 | 1 << 6 | 0x07).access(), Access::Read);
        assert_eq!(data(1 << 8 | 1 << 6 | 0x0f).access(), Access::Write);
    }

    #[test]
    fn each_status_code_has_its_kind_and_level() {
        let kinds = |codes: [u64; 4]| codes.map(|code| (data(code).kind, data(code).level));
        let levels = |kind| [0, 1, 2, 3].map(|level| (kind, Some(level)));
        assert_eq!(kinds([0b000000, 0b000001, 0b000010, 0b000011]), levels(Kind::AddressSize));
        assert_eq!(kinds([0b000100, 0b000101, 0b000110, 0b000111]), levels(Kind::Translation));
        assert_eq!(kinds([0b001000, 0b001001, 0b001010, 0b001011]), levels(Kind::AccessFlag));
        assert_eq!(kinds([0b001100, 0b001101, 0b001110, 0b001111]), levels(Kind::Permission));
        assert_eq!(kinds([0b010100, 0b010101, 0b010110, 0b010111]), levels(Kind::External));
        assert_eq!(kinds([0b011100, 0b011101, 0b011110, 0b011111]), levels(Kind::External));
        let below = kinds([0b101001, 0b101011, 0b010011, 0b011011]);
        let kind = [Kind::AddressSize, Kind::Translation, Kind::External, Kind::External];
        assert_eq!(below, kind.map(|kind| (kind, Some(-1))));
        let none = kinds([0b010000, 0b011000, 0b110000, 0b100001]);
        let kind = [Kind::External, Kind::External, Kind::TlbConflict, Kind::Other(0x21)];
        assert_eq!(none, kind.map(|kind| (kind, None)));
    }

    #[test]
    fn only_what_tables_can_answer_is_a_fault() {
        for code in [0x00, 0x10, 0x14, 0x21, 0x30] {
            assert_eq!(data(code).fault(), None, "{code:#x}");
        }
        assert_eq!(data(0x00).gpa, Some(Gpa(0x8765_4321_0abc)));
        // HVC, a trapped MSR, an abort of EL2 itself.
        for class in [0x16, 0x18, 0x21, 0x25] {
            assert_eq!(Abort::decode(class << 26 | 0x07, FAR, HPFAR), None);
        }
    }
}
