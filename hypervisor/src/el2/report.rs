//! What the hypervisor says: lines of text for people, lines of JSON for the report. They go to the
//! emulator by semihosting, which leaves the serial line to the guest; on hardware it would be a
//! second line.

use super::cpu;
use alloc::ffi::CString;
use alloc::format;
use alloc::string::String;
use core::arch::asm;
use core::fmt;
use spin::Mutex;

/// One line at a time.
static LINE: Mutex<()> = Mutex::new(());

/// Prints a line for people, with the machine's time.
pub fn line(arguments: fmt::Arguments<'_>) {
    let milliseconds = cpu::now() / (cpu::frequency() / 1000).max(1);
    // Formatted before the lock: an argument may have something to say.
    print(format!("{:>4}.{:03}  {arguments}\n", milliseconds / 1000, milliseconds % 1000));
}

/// Prints a value as a line of JSON.
pub fn record(value: &serde_json::Value) {
    print(format!("{value}\n"));
}

fn print(text: String) {
    let Ok(text) = CString::new(text.replace('\0', "")) else { return };
    let _turn = LINE.lock();
    // SAFETY: HLT 0xf000 is semihosting's call; operation 4, SYS_WRITE0, reads the string at x1 up
    // to its zero and changes x0 only. QEMU is started with semihosting on.
    unsafe {
        asm!("hlt #0xf000", inout("x0") 4u64 => _, in("x1") text.as_ptr(), options(nostack));
    }
}

macro_rules! say {
    ($($arguments:tt)*) => { $crate::el2::report::line(format_args!($($arguments)*)) };
}
pub(crate) use say;
