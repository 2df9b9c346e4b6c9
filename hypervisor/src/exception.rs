//! How a CPU takes an exception to EL1. See `AArch64.TakeException` in the pseudocode of DDI 0487,
//! and its D1.3, "Exceptions".

/// Mode field of SPSR_EL1 and SPSR_EL2, with the bit that selects AArch32.
const MODE: u64 = 0b1_1111;
const EL0: u64 = 0b0_0000;
const EL1_SP0: u64 = 0b0_0100;
const EL1_SPX: u64 = 0b0_0101;
/// User mode of AArch32, its only mode if EL1 is AArch64.
const USER: u64 = 0b1_0000;

const FLAGS: u64 = 0b1111 << 28;
const TCO: u64 = 1 << 25;
const DIT: u64 = 1 << 24;
const PAN: u64 = 1 << 22;
/// DIT of a state in AArch32.
const DIT_USER: u64 = 1 << 21;
const SSBS: u64 = 1 << 12;
const DAIF: u64 = 0b1111 << 6;

/// Fields of SCTLR_EL1. DSSBS is the value of SSBS after an exception; SPAN leaves PAN unchanged.
const DSSBS: u64 = 1 << 44;
const SPAN: u64 = 1 << 23;

/// The state of the guest when it takes an exception.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct State {
    /// The processor state, as in SPSR_EL2.
    pub pstate: u64,
    /// SCTLR_EL1.
    pub sctlr: u64,
    /// Whether the CPU has FEAT_MTE2, so that it checks tags.
    pub tags: bool,
}

impl State {
    /// Returns whether the exception is taken from EL0.
    pub const fn from_el0(&self) -> bool {
        matches!(self.pstate & MODE, EL0 | USER)
    }

    /// Returns the address of the handler of synchronous exceptions, for a value of VBAR_EL1. The
    /// lowest bits of that register are ignored, but keep what the guest wrote.
    pub const fn handler(&self, vbar: u64) -> u64 {
        let entry = match self.pstate & MODE {
            EL1_SP0 => 0x000,
            EL0 => 0x400,
            USER => 0x600,
            _ => 0x200,
        };
        vbar & !0x7ff | entry
    }

    /// Returns the processor state at the start of the handler: interrupts are masked, and EL1 uses
    /// its own stack.
    pub const fn after(&self) -> u64 {
        let Self { pstate, sctlr, tags } = *self;
        let user = pstate & MODE == USER;
        let timing = if user { (pstate & DIT_USER) << 3 } else { pstate & DIT };
        let pan = if sctlr & SPAN == 0 { PAN } else { pstate & PAN };
        let ssbs = if sctlr & DSSBS != 0 { SSBS } else { 0 };
        let unchecked = if tags { TCO } else { 0 };
        pstate & FLAGS | timing | pan | ssbs | unchecked | DAIF | EL1_SPX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESET: u64 = 0x30d0_0800;

    fn state(pstate: u64) -> State {
        State { pstate, sctlr: RESET, tags: false }
    }

    #[test]
    fn each_mode_has_an_entry_of_its_own() {
        let entries = [0b0100, 0b0101, 0b0000, 0b1_0000].map(|mode| state(mode).handler(0x8000));
        assert_eq!(entries, [0x8000, 0x8200, 0x8400, 0x8600]);
        assert!(state(0b1_0000).from_el0() && state(0).from_el0() && !state(0b0101).from_el0());
    }

    #[test]
    fn a_handler_at_the_end_of_all_addresses_is_one() {
        assert_eq!(state(0b0101).handler(u64::MAX), 0xffff_ffff_ffff_fa00);
    }

    #[test]
    fn flags_and_timing_stay_and_the_rest_is_the_handlers() {
        // N and C, UAO, DIT, SS, IL, BTYPE 1.
        let before = 0xa000_0000 | 1 << 24 | 1 << 23 | 1 << 21 | 1 << 20 | 1 << 10;
        assert_eq!(state(before).after(), 0xa100_03c5);
        // Thumb in user mode: GE, E, T, and IT, which are not flags; DIT.
        let user = 0x6000_0000 | 0x0600_0000 | 0xf_0000 | 1 << 21 | 1 << 9 | 1 << 5 | 0b1_0000;
        assert_eq!(state(user).after(), 0x6100_03c5);
    }

    #[test]
    fn pan_is_set_unless_span_leaves_it() {
        assert_eq!(state(0).after() & PAN, 0);
        assert_eq!(state(PAN).after() & PAN, PAN);
        assert_eq!(State { sctlr: RESET & !SPAN, ..state(0) }.after() & PAN, PAN);
    }

    #[test]
    fn ssbs_is_what_sctlr_has_and_tags_are_not_checked() {
        assert_eq!(state(SSBS).after() & SSBS, 0);
        assert_eq!(State { sctlr: RESET | DSSBS, ..state(0) }.after() & SSBS, SSBS);
        assert_eq!(State { tags: true, ..state(0) }.after() & TCO, TCO);
    }
}
