//! Decodes why a CPU left the guest, from ESR_EL2. See the Arm Architecture Reference Manual (DDI
//! 0487), D24.2, "ESR_EL2, Exception Syndrome Register (EL2)".

/// Reason of an exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// An access that stage 2 refused, or that an external abort ended.
    Abort(Abort),
    /// A call by HVC, or by SMC, which is trapped.
    Call {
        /// Whether it was SMC. The hypervisor has to skip an SMC: it was trapped before it was
        /// executed, unlike HVC.
        smc: bool,
        /// The immediate, which is 0 for calls of the SMC Calling Convention.
        immediate: u16,
    },
    /// An access to a system register, or an instruction of the same encoding.
    System(System),
    /// Anything else. The hypervisor enables no trap of that kind.
    Other {
        /// The exception class.
        class: u8,
    },
}

/// An abort that was taken to EL2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abort {
    /// Whether it was an instruction fetch.
    pub fetch: bool,
    /// Whether it was a write of data. An update of a stage-1 table by hardware is a write too.
    pub write: bool,
    /// Whether the walk of the guest's stage-1 tables caused it.
    pub stage1_walk: bool,
    /// Whether a data cache maintenance instruction caused it.
    pub maintenance: bool,
    /// The kind of the fault.
    pub kind: Kind,
    /// The load or store, if hardware describes it.
    pub data: Option<Data>,
}

/// The right that an access needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// The right to read.
    Read,
    /// The right to write.
    Write,
    /// The right to execute.
    Execute,
}

impl Abort {
    /// Returns the right that the access needs.
    ///
    /// A walk of the guest's stage-1 tables reads them, and writes to them only where hardware sets
    /// an accessed or dirty flag. A permission fault of a walk therefore asks for the right to
    /// write, for any access that caused the walk. Cache maintenance is reported as a write, but
    /// needs only the right to read. The exception is DC IVAC, which needs the right to write, and
    /// gets a permission fault without it.
    pub fn need(&self) -> Need {
        let denied = self.kind == Kind::Permission;
        match *self {
            Self { stage1_walk: true, .. } if denied => Need::Write,
            Self { stage1_walk: true, .. } => Need::Read,
            Self { fetch: true, .. } => Need::Execute,
            Self { maintenance: true, .. } if !denied => Need::Read,
            Self { write: true, .. } => Need::Write,
            _ => Need::Read,
        }
    }
}

/// Kind of a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Nothing is mapped.
    Translation,
    /// The access flag is clear, and hardware does not set it.
    AccessFlag,
    /// The right is missing.
    Permission,
    /// Two TLB entries matched, because the size of a leaf changed without break-before-make.
    TlbConflict,
    /// Another fault, with its status code.
    Other(u8),
}

/// A load or store of one general register, which hardware describes (ISV).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Data {
    /// Size of the access, in bytes.
    pub bytes: u8,
    /// The general register; 31 is XZR.
    pub register: u8,
    /// Whether a load extends the sign.
    pub sign_extend: bool,
    /// Whether the register has 64 bits, not 32.
    pub wide: bool,
}

/// An access to a system register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct System {
    /// Op0, Op1, CRn, CRm, Op2.
    pub name: (u8, u8, u8, u8, u8),
    /// The general register; 31 is XZR.
    pub register: u8,
    /// Whether the access is a read.
    pub read: bool,
}

/// Decodes a value of ESR_EL2.
pub const fn decode(esr: u64) -> Exit {
    match (esr >> 26 & 0x3f) as u8 {
        0x16 => Exit::Call { smc: false, immediate: esr as u16 },
        0x17 => Exit::Call { smc: true, immediate: esr as u16 },
        0x18 => Exit::System(System {
            name: (
                field(esr, 20, 2),
                field(esr, 14, 3),
                field(esr, 10, 4),
                field(esr, 1, 4),
                field(esr, 17, 3),
            ),
            register: field(esr, 5, 5),
            read: bit(esr, 0),
        }),
        0x20 => Exit::Abort(abort(esr, true)),
        0x24 => Exit::Abort(abort(esr, false)),
        class => Exit::Other { class },
    }
}

const fn abort(esr: u64, fetch: bool) -> Abort {
    let valid = bit(esr, 24) && !fetch;
    let data = Data {
        bytes: 1 << field(esr, 22, 2),
        register: field(esr, 16, 5),
        sign_extend: bit(esr, 21),
        wide: bit(esr, 15),
    };
    Abort {
        fetch,
        write: bit(esr, 6) && !fetch,
        stage1_walk: bit(esr, 7),
        maintenance: bit(esr, 8) && !fetch,
        // Bits 1:0 have the level. Level -1, which only 52-bit addresses have, has codes of its
        // own.
        kind: match field(esr, 0, 6) {
            0x04..=0x07 | 0x2b => Kind::Translation,
            0x08..=0x0b => Kind::AccessFlag,
            0x0c..=0x0f => Kind::Permission,
            0x30 => Kind::TlbConflict,
            code => Kind::Other(code),
        },
        data: if valid { Some(data) } else { None },
    }
}

const fn field(esr: u64, shift: u32, bits: u32) -> u8 {
    (esr >> shift) as u8 & ((1u16 << bits) - 1) as u8
}

const fn bit(esr: u64, at: u32) -> bool {
    esr >> at & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_found_nothing_names_its_register_and_size() {
        // ISV, SAS 2, SRT 3, WnR, translation fault at level 3.
        let esr = 0x24 << 26 | 1 << 25 | 1 << 24 | 2 << 22 | 3 << 16 | 1 << 6 | 0x07;
        let Exit::Abort(abort) = decode(esr) else { panic!("{:?}", decode(esr)) };
        assert_eq!((abort.kind, abort.write, abort.fetch), (Kind::Translation, true, false));
        let data = Data { bytes: 4, register: 3, sign_extend: false, wide: false };
        assert_eq!(abort.data, Some(data));
    }

    #[test]
    fn a_fetch_is_no_write_regardless_of_the_other_bits() {
        let Exit::Abort(abort) = decode(0x20 << 26 | 1 << 24 | 1 << 6 | 0x0f) else { panic!() };
        assert_eq!((abort.kind, abort.write, abort.data), (Kind::Permission, false, None));
        assert!(abort.fetch);
    }

    #[test]
    fn a_write_of_sctlr_is_named_by_its_five_numbers() {
        // MSR SCTLR_EL1, x7: Op0 3, Op1 0, CRn 1, CRm 0, Op2 0.
        let exit = decode(0x18 << 26 | 3 << 20 | 1 << 10 | 7 << 5);
        let system = System { name: (3, 0, 1, 0, 0), register: 7, read: false };
        assert_eq!(exit, Exit::System(system));
    }

    #[test]
    fn a_fetch_whose_walk_may_not_set_a_flag_needs_to_write_the_guests_table() {
        let need = |esr: u64| match decode(esr) {
            Exit::Abort(abort) => abort.need(),
            other => panic!("{other:?}"),
        };
        let walk = 1 << 7;
        assert_eq!(need(0x20 << 26 | walk | 0x0f), Need::Write);
        assert_eq!(need(0x20 << 26 | walk | 0x07), Need::Read);
        assert_eq!(need(0x20 << 26 | 0x0f), Need::Execute);
        // A store whose walk found no mapping for a table needs to read the table.
        assert_eq!(need(0x24 << 26 | 1 << 6 | walk | 0x07), Need::Read);
        // DC CIVAC of an address that is not mapped, and DC IVAC of one that is read-only.
        assert_eq!(need(0x24 << 26 | 1 << 8 | 1 << 6 | 0x07), Need::Read);
        assert_eq!(need(0x24 << 26 | 1 << 8 | 1 << 6 | 0x0f), Need::Write);
    }

    #[test]
    fn calls_carry_their_immediate() {
        assert_eq!(decode(0x16 << 26 | 0x1234), Exit::Call { smc: false, immediate: 0x1234 });
        assert_eq!(decode(0x17 << 26), Exit::Call { smc: true, immediate: 0 });
        assert_eq!(decode(0x3c << 26), Exit::Other { class: 0x3c });
    }
}
