//! Why a CPU left the guest: ESR_EL2, as in the Arm Architecture Reference Manual (DDI 0487),
//! D24.2, "ESR_EL2, Exception Syndrome Register (EL2)".

/// What the guest did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// An access that stage 2 refused, or that an external abort ended.
    Abort(Abort),
    /// HVC, or SMC, which is trapped.
    Call {
        /// It was SMC, and is to be skipped: unlike HVC it has not been executed.
        smc: bool,
        /// Its immediate: calls by the SMC Calling Convention have 0.
        immediate: u16,
    },
    /// An access to a system register, or an instruction of the same encoding.
    System(System),
    /// Anything else: nothing that was asked for.
    Other {
        /// The exception class.
        class: u8,
    },
}

/// A fault of stage 2.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abort {
    /// An instruction was fetched.
    pub fetch: bool,
    /// Data was written; hardware's update of a stage-1 table is a write too.
    pub write: bool,
    /// By the walk of the guest's own tables.
    pub stage1_walk: bool,
    /// By a data cache maintenance instruction.
    pub maintenance: bool,
    /// Why.
    pub kind: Kind,
    /// What a load or store did, where hardware says so.
    pub data: Option<Data>,
}

/// What an access needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// To read.
    Read,
    /// To write.
    Write,
    /// To execute.
    Execute,
}

impl Abort {
    /// The right that the access needs.
    ///
    /// The walk of the guest's own tables reads them, and writes where hardware sets an accessed or
    /// dirty flag: that is what a missing right is about, whatever access it was that walked. Cache
    /// maintenance is reported as a write, and needs the right to read; DC IVAC, which needs the
    /// right to write, has a permission fault.
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

/// Why an access was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Nothing is mapped.
    Translation,
    /// The accessed flag is clear, and hardware does not set it.
    AccessFlag,
    /// The right is missing.
    Permission,
    /// Two entries matched: a size was changed without a break.
    TlbConflict,
    /// Anything else, by its code.
    Other(u8),
}

/// A single load or store of a general register (ISV).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Data {
    /// Bytes.
    pub bytes: u8,
    /// The register; 31 is zero.
    pub register: u8,
    /// A load extends the sign.
    pub sign_extend: bool,
    /// The register has 64 bits, not 32.
    pub wide: bool,
}

/// An access to a system register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct System {
    /// Op0, Op1, CRn, CRm, Op2.
    pub name: (u8, u8, u8, u8, u8),
    /// The general register; 31 is zero.
    pub register: u8,
    /// It is read.
    pub read: bool,
}

/// Reads ESR_EL2.
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
        // The level is in bits 1:0, but for level -1, which only 52-bit addresses have.
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
    fn a_fetch_is_no_write_whatever_the_other_bits_say() {
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
        // A store whose walk found no table: the table is to be read.
        assert_eq!(need(0x24 << 26 | 1 << 6 | walk | 0x07), Need::Read);
        // DC CIVAC of what is not mapped; DC IVAC of what is read-only.
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
