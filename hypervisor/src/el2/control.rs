//! The control page, through which the guest's program and the manager communicate. Nothing is
//! mapped there, so each access leaves the guest, and is emulated.

use super::cpu::Registers;
use super::guest::Control;
use core::sync::atomic::Ordering;
use slat::Gpa;
use slat::format::arm64::fault::Abort;
use slat_hypervisor::layout::{
    CONTROL, CONTROL_CONVERT, CONTROL_DECLARE, CONTROL_EVENT, CONTROL_PAGES, CONTROL_SIZE,
};

/// Emulates a load or store of the guest. Registers that do not exist read as zero and ignore
/// writes. `convert` does a conversion, and returns its result.
pub fn access(
    control: &Control,
    abort: &Abort,
    gpa: Gpa,
    registers: &mut Registers,
    convert: impl FnOnce(u64) -> u64,
) {
    let Some(transfer) = abort.transfer else { return };
    let register = gpa.0 - CONTROL.base;
    if abort.write {
        let value = registers.get(transfer.register) & u64::from(u32::MAX);
        match register {
            CONTROL_EVENT => control.event.store(value, Ordering::Release),
            CONTROL_DECLARE => control.declared.store(value, Ordering::Release),
            CONTROL_PAGES => control.add_page(value),
            CONTROL_CONVERT => control.converted.store(convert(value), Ordering::Release),
            _ => {}
        }
        return;
    }
    let value = match register {
        CONTROL_EVENT => control.stop.load(Ordering::Acquire).into(),
        CONTROL_CONVERT => control.converted.load(Ordering::Acquire),
        CONTROL_SIZE => control.size.load(Ordering::Acquire),
        _ => 0,
    };
    registers.set(transfer.register, value);
}
