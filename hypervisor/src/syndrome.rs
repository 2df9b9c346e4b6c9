//! Decodes why a CPU left the guest, from ESR_EL2, unless it was an abort: `slat` decodes those.
//! See the Arm Architecture Reference Manual (DDI 0487), D24.2, "ESR_EL2, Exception Syndrome
//! Register (EL2)".

/// Reason of an exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
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
        class => Exit::Other { class },
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
    fn a_write_of_sctlr_is_named_by_its_five_numbers() {
        // MSR SCTLR_EL1, x7: Op0 3, Op1 0, CRn 1, CRm 0, Op2 0.
        let exit = decode(0x18 << 26 | 3 << 20 | 1 << 10 | 7 << 5);
        let system = System { name: (3, 0, 1, 0, 0), register: 7, read: false };
        assert_eq!(exit, Exit::System(system));
    }

    #[test]
    fn calls_carry_their_immediate() {
        assert_eq!(decode(0x16 << 26 | 0x1234), Exit::Call { smc: false, immediate: 0x1234 });
        assert_eq!(decode(0x17 << 26), Exit::Call { smc: true, immediate: 0 });
        assert_eq!(decode(0x3c << 26), Exit::Other { class: 0x3c });
    }
}
