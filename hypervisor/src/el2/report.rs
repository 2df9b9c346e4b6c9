//! Output of the hypervisor: lines of text for people, and lines of JSON for the report. They go to
//! the emulator by semihosting, because the guest has the serial line. Hardware would need a second
//! serial line.

use super::cpu;
use alloc::ffi::CString;
use alloc::format;
use alloc::string::String;
use core::arch::asm;
use core::fmt;
use spin::Mutex;

/// Lock that keeps lines of several CPUs apart.
static LINE: Mutex<()> = Mutex::new(());

/// Prints a line of text, with the machine's time.
pub fn line(arguments: fmt::Arguments<'_>) {
    let milliseconds = cpu::now() / (cpu::frequency() / 1000).max(1);
    // The line is formatted before `print` takes the lock, because formatting an argument may print
    // as well.
    print(format!("{:>4}.{:03}  {arguments}\n", milliseconds / 1000, milliseconds % 1000));
}

/// Prints a value as a line of JSON.
pub fn record(value: &serde_json::Value) {
    print(format!("{value}\n"));
}

fn print(text: String) {
    let Ok(text) = CString::new(text.replace('\0', "")) else { return };
    let _turn = LINE.lock();
    // SAFETY: HLT 0xf000 is a semihosting call. Its operation 4, SYS_WRITE0, reads the string at x1
    // up to the terminating zero, and changes only x0. QEMU is started with semihosting enabled.
    unsafe {
        asm!("hlt #0xf000", inout("x0") 4u64 => _, in("x1") text.as_ptr(), options(nostack));
    }
}

macro_rules! say {
    ($($arguments:tt)*) => { $crate::el2::report::line(format_args!($($arguments)*)) };
}
pub(crate) use say;
