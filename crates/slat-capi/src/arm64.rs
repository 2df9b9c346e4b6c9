//! Arm's registers and instructions.

#[cfg(feature = "arm64-4k")]
use crate::abi::slat_format_kind as kind;
use crate::abi::{slat_format, slat_invalidation, slat_status};
use crate::handle::slat_space;
use core::ffi::c_void;

/// ID registers of a CPU. Where CPUs differ, each field has the least that any of them offers.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct slat_arm64_id {
    /// ID_AA64MMFR0_EL1.
    pub mmfr0: u64,
    /// ID_AA64MMFR1_EL1.
    pub mmfr1: u64,
    /// ID_AA64MMFR2_EL1.
    pub mmfr2: u64,
    /// ID_AA64ISAR0_EL1.
    pub isar0: u64,
    /// MIDR_EL1, for errata of invalidations; 0 without.
    pub midr: u64,
}

/// An instruction of an invalidation. The operand, if it has one, is the value of its register.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum slat_tlbi {
    /// `dsb ishst`
    DsbIshst = 0,
    /// `dsb ish`
    DsbIsh,
    /// `dsb nshst`
    DsbNshst,
    /// `dsb nsh`
    DsbNsh,
    /// `isb`
    Isb,
    /// `tlbi ipas2e1is, operand`
    Ipas2e1is,
    /// `tlbi ipas2le1is, operand`
    Ipas2le1is,
    /// `tlbi ripas2e1is, operand` (FEAT_TLBIRANGE)
    Ripas2e1is,
    /// `tlbi ripas2le1is, operand` (FEAT_TLBIRANGE)
    Ripas2le1is,
    /// `tlbi vmalle1is`
    Vmalle1is,
    /// `tlbi vmalls12e1is`
    Vmalls12e1is,
    /// `tlbi ipas2e1, operand`
    Ipas2e1,
    /// `tlbi ipas2le1, operand`
    Ipas2le1,
    /// `tlbi ripas2e1, operand` (FEAT_TLBIRANGE)
    Ripas2e1,
    /// `tlbi ripas2le1, operand` (FEAT_TLBIRANGE)
    Ripas2le1,
    /// `tlbi vmalle1`
    Vmalle1,
    /// `tlbi vmalls12e1`
    Vmalls12e1,
}

/// Provides the granule and FEAT_LPA2 as constants, for each kind of Arm format.
#[cfg(feature = "arm64-4k")]
macro_rules! of_kind {
    ($number:expr, |$shift:ident, $ds:ident| $body:expr) => {{
        macro_rules! with {
            ($s:literal, $d:literal) => {{
                const $shift: u32 = $s;
                const $ds: bool = $d;
                $body
            }};
        }
        const K4: u32 = kind::Arm64K4 as u32;
        const K16: u32 = kind::Arm64K16 as u32;
        const K64: u32 = kind::Arm64K64 as u32;
        const LPA2_K4: u32 = kind::Arm64Lpa2K4 as u32;
        const LPA2_K16: u32 = kind::Arm64Lpa2K16 as u32;
        match $number {
            K4 => with!(12, false),
            #[cfg(feature = "arm64")]
            K16 => with!(14, false),
            #[cfg(feature = "arm64")]
            K64 => with!(16, false),
            #[cfg(feature = "arm64")]
            LPA2_K4 => with!(12, true),
            #[cfg(feature = "arm64")]
            LPA2_K16 => with!(14, true),
            #[cfg(not(feature = "arm64"))]
            K16 | K64 | LPA2_K4 | LPA2_K16 => Err(slat_status::Format),
            _ => Err(slat_status::Argument),
        }
    }};
}

#[cfg(feature = "arm64-4k")]
mod with {
    use super::{c_void, kind, slat_arm64_id, slat_format, slat_invalidation, slat_status};
    use super::{slat_space, slat_tlbi};
    use crate::abi::{
        SLAT_FORMAT_FORCED_WRITE_BACK, SLAT_FORMAT_HARDWARE_DIRTY, SLAT_FORMAT_SPLIT_EXECUTE,
    };
    use crate::handle::{Any, EnteredSpace};
    use crate::space::{load, store};
    use slat::format::arm64::id::IdRegisters;
    use slat::format::arm64::tlbi::Instruction;
    use slat::{BreakBeforeMake, Gpa, GpaRange, Invalidation, PageSize, Vmid};

    impl From<slat_arm64_id> for IdRegisters {
        fn from(of: slat_arm64_id) -> Self {
            Self {
                mmfr0: of.mmfr0,
                mmfr1: of.mmfr1,
                mmfr2: of.mmfr2,
                isar0: of.isar0,
                midr: of.midr,
            }
        }
    }

    pub unsafe fn format(
        id: *const slat_arm64_id,
        number: u32,
        format: *mut slat_format,
    ) -> Result<(), slat_status> {
        // SAFETY: null or a value, by the caller's promise.
        let id = IdRegisters::from(unsafe { load(id) }?);
        let unsupported = |_| slat_status::Unsupported;
        let of = of_kind!(number, |SHIFT, DS| {
            let of = id.format::<SHIFT, DS>().map_err(unsupported)?;
            let flag = |on: bool, flag: u32| if on { flag } else { 0 };
            Ok(slat_format {
                kind: number,
                flags: flag(of.forced_write_back, SLAT_FORMAT_FORCED_WRITE_BACK)
                    | flag(of.hardware_dirty, SLAT_FORMAT_HARDWARE_DIRTY)
                    | flag(of.split_execute, SLAT_FORMAT_SPLIT_EXECUTE),
                output_bits: of.output_bits,
            })
        })?;
        // SAFETY: null or writable, by the caller's promise.
        match unsafe { store(format, of) } {
            slat_status::Ok => Ok(()),
            reason => Err(reason),
        }
    }

    pub unsafe fn registers(
        space: *mut slat_space,
        id: *const slat_arm64_id,
        vttbr: *mut u64,
        vtcr: *mut u64,
    ) -> Result<(), slat_status> {
        // SAFETY: null or values, by the caller's promise.
        let (entered, id) = unsafe { (EnteredSpace::new(space)?, IdRegisters::from(load(id)?)) };
        macro_rules! of {
            ($space:expr) => {{
                let root = $space.guest_root();
                (root.vttbr(&id), root.vtcr(&id))
            }};
        }
        let (root, control) = match entered.space() {
            Any::Arm64K4(space) => of!(space),
            Any::Arm64K16(space) => of!(space),
            Any::Arm64K64(space) => of!(space),
            Any::Arm64Lpa2K4(space) => of!(space),
            Any::Arm64Lpa2K16(space) => of!(space),
            _ => return Err(slat_status::Argument),
        };
        let unsupported = |_| slat_status::Unsupported;
        let (root, control) = (root.map_err(unsupported)?, control.map_err(unsupported)?);
        // SAFETY: null or writable, by the caller's promise.
        let stored = unsafe { [store(vttbr, root), store(vtcr, control)] };
        match stored.into_iter().find(|status| *status != slat_status::Ok) {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    pub unsafe fn break_before_make(
        id: *const slat_arm64_id,
        handles_conflicts: bool,
        answer: *mut u32,
    ) -> slat_status {
        // SAFETY: null or a value, by the caller's promise.
        let id = match unsafe { load(id) } {
            Ok(id) => IdRegisters::from(id),
            Err(reason) => return reason,
        };
        let number = match id.break_before_make(handles_conflicts) {
            BreakBeforeMake::Always => 0,
            BreakBeforeMake::ConflictHandled => 1,
            BreakBeforeMake::Never => 2,
        };
        // SAFETY: null or writable, by the caller's promise.
        unsafe { store(answer, number) }
    }

    fn numbered(instruction: Instruction) -> (slat_tlbi, u64) {
        match instruction {
            Instruction::DsbIshst => (slat_tlbi::DsbIshst, 0),
            Instruction::DsbIsh => (slat_tlbi::DsbIsh, 0),
            Instruction::DsbNshst => (slat_tlbi::DsbNshst, 0),
            Instruction::DsbNsh => (slat_tlbi::DsbNsh, 0),
            Instruction::Isb => (slat_tlbi::Isb, 0),
            Instruction::Ipas2e1is(operand) => (slat_tlbi::Ipas2e1is, operand),
            Instruction::Ipas2le1is(operand) => (slat_tlbi::Ipas2le1is, operand),
            Instruction::Ripas2e1is(operand) => (slat_tlbi::Ripas2e1is, operand),
            Instruction::Ripas2le1is(operand) => (slat_tlbi::Ripas2le1is, operand),
            Instruction::Vmalle1is => (slat_tlbi::Vmalle1is, 0),
            Instruction::Vmalls12e1is => (slat_tlbi::Vmalls12e1is, 0),
            Instruction::Ipas2e1(operand) => (slat_tlbi::Ipas2e1, operand),
            Instruction::Ipas2le1(operand) => (slat_tlbi::Ipas2le1, operand),
            Instruction::Ripas2e1(operand) => (slat_tlbi::Ripas2e1, operand),
            Instruction::Ripas2le1(operand) => (slat_tlbi::Ripas2le1, operand),
            Instruction::Vmalle1 => (slat_tlbi::Vmalle1, 0),
            Instruction::Vmalls12e1 => (slat_tlbi::Vmalls12e1, 0),
        }
    }

    pub unsafe fn sequence(
        id: *const slat_arm64_id,
        number: u32,
        what: *const slat_invalidation,
        execute: Option<unsafe extern "C" fn(*mut c_void, slat_tlbi, u64)>,
        context: *mut c_void,
        local: bool,
    ) -> Result<(), slat_status> {
        let execute = execute.ok_or(slat_status::NullPointer)?;
        // SAFETY: null or values, by the caller's promise.
        let (id, what) = unsafe { (IdRegisters::from(load(id)?), load(what)?) };
        let range = match what.bytes {
            0 => None,
            bytes => Some(GpaRange::new(Gpa(what.start), bytes)?),
        };
        let leaf = match what.leaf {
            0 => None,
            bytes => Some(PageSize::from_bytes(bytes).ok_or(slat_status::Argument)?),
        };
        let what = Invalidation { vmid: Vmid(what.vmid), range, leaf, tables: what.tables };
        let tlbi = of_kind!(number, |SHIFT, DS| {
            let format = id.format::<SHIFT, DS>().map_err(|_| slat_status::Unsupported)?;
            let tlbi = id.tlbi(&format);
            Ok(if local { tlbi.local() } else { tlbi })
        })?;
        for instruction in tlbi.sequence(&what) {
            let (instruction, operand) = numbered(instruction);
            // SAFETY: the caller's function, called as it is declared.
            unsafe { execute(context, instruction, operand) };
        }
        Ok(())
    }
}

/// Fills `format` with all features that a CPU offers for a kind of Arm format (one of
/// `slat_format_kind`).
///
/// Returns `SLAT_STATUS_UNSUPPORTED` where stage 2 lacks the granule, or its FEAT_LPA2;
/// `SLAT_STATUS_ARGUMENT` for a kind that is not Arm's; `SLAT_STATUS_FORMAT` in a build without
/// that format.
///
/// # Safety
/// `id` is null or points to a value, `format` is null or may be written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_arm64_format(
    id: *const slat_arm64_id,
    kind: u32,
    format: *mut slat_format,
) -> slat_status {
    #[cfg(feature = "arm64-4k")]
    // SAFETY: the caller's promises are the callee's.
    return unsafe { with::format(id, kind, format) }.err().unwrap_or(slat_status::Ok);
    #[cfg(not(feature = "arm64-4k"))]
    {
        _ = (id, kind, format);
        slat_status::Format
    }
}

/// Writes the value of `enum slat_break_before_make` that a CPU allows to `answer`. FEAT_BBM level
/// 2 counts only if the hypervisor handles the TLB conflict abort.
///
/// # Safety
/// `id` is null or points to a value, `answer` is null or may be written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_arm64_break_before_make(
    id: *const slat_arm64_id,
    handles_conflicts: bool,
    answer: *mut u32,
) -> slat_status {
    #[cfg(feature = "arm64-4k")]
    // SAFETY: the caller's promises are the callee's.
    return unsafe { with::break_before_make(id, handles_conflicts, answer) };
    #[cfg(not(feature = "arm64-4k"))]
    {
        _ = (id, handles_conflicts, answer);
        slat_status::Format
    }
}

/// Writes the values of VTTBR_EL2 and VTCR_EL2 for tables of an Arm format.
///
/// Returns `SLAT_STATUS_UNSUPPORTED` where the CPU lacks what the format was configured for, or
/// cannot have this VMID or root; `SLAT_STATUS_ARGUMENT` for tables that are not Arm's.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `id` is null or points to a value;
/// `vttbr` and `vtcr` are null or may be written.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_arm64_registers(
    space: *mut slat_space,
    id: *const slat_arm64_id,
    vttbr: *mut u64,
    vtcr: *mut u64,
) -> slat_status {
    #[cfg(feature = "arm64-4k")]
    // SAFETY: the caller's promises are the callee's.
    return unsafe { with::registers(space, id, vttbr, vtcr) }.err().unwrap_or(slat_status::Ok);
    #[cfg(not(feature = "arm64-4k"))]
    {
        _ = (space, id, vttbr, vtcr);
        slat_status::Format
    }
}

/// Calls `execute` for each instruction of an invalidation, in order. The platform's `invalidate`
/// has to execute them on a CPU whose VTTBR_EL2 holds the guest's VMID.
///
/// Returns `SLAT_STATUS_ARGUMENT` for a kind that is not Arm's or a leaf size that is not a power
/// of two, `SLAT_STATUS_FORMAT` in a build without that format, `SLAT_STATUS_UNSUPPORTED` for a
/// kind that the CPU lacks, `SLAT_STATUS_RANGE` for a range that is not valid: it calls nothing
/// then.
///
/// # Safety
/// `id` and `what` are null or point to values. `execute` may be called with `context`, and does
/// not unwind.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_arm64_tlbi(
    id: *const slat_arm64_id,
    kind: u32,
    what: *const slat_invalidation,
    execute: Option<
        unsafe extern "C" fn(context: *mut c_void, instruction: slat_tlbi, operand: u64),
    >,
    context: *mut c_void,
) -> slat_status {
    #[cfg(feature = "arm64-4k")]
    // SAFETY: the caller's promises are the callee's.
    return unsafe { with::sequence(id, kind, what, execute, context, false) }
        .err()
        .unwrap_or(slat_status::Ok);
    #[cfg(not(feature = "arm64-4k"))]
    {
        _ = (id, kind, what, execute, context);
        slat_status::Format
    }
}

/// Does `slat_arm64_tlbi` for the calling CPU alone, as `invalidate_local` needs it.
///
/// Returns what `slat_arm64_tlbi` does.
///
/// # Safety
/// `id` and `what` are null or point to values. `execute` may be called with `context`, and does
/// not unwind.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_arm64_tlbi_local(
    id: *const slat_arm64_id,
    kind: u32,
    what: *const slat_invalidation,
    execute: Option<
        unsafe extern "C" fn(context: *mut c_void, instruction: slat_tlbi, operand: u64),
    >,
    context: *mut c_void,
) -> slat_status {
    #[cfg(feature = "arm64-4k")]
    // SAFETY: the caller's promises are the callee's.
    return unsafe { with::sequence(id, kind, what, execute, context, true) }
        .err()
        .unwrap_or(slat_status::Ok);
    #[cfg(not(feature = "arm64-4k"))]
    {
        _ = (id, kind, what, execute, context);
        slat_status::Format
    }
}
