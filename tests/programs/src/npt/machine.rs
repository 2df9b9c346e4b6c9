//! The bare machine: entry, memory, serial port, end.

#[path = "../memory.rs"]
mod memory;

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::fmt::{self, Write};
use core::panic::PanicInfo;
pub use memory::Memory;

global_asm!(include_str!("start.s"));
global_asm!(include_str!("rom.s"));

/// A part of this program's image, whose linear addresses are physical ones.
#[repr(C, align(2097152))]
pub struct Place<const BYTES: usize>(UnsafeCell<[u8; BYTES]>);

// SAFETY: one CPU runs one program, which holds no reference into it.
unsafe impl<const BYTES: usize> Sync for Place<BYTES> {}

impl<const BYTES: usize> Place<BYTES> {
    pub const fn new() -> Self {
        Self(UnsafeCell::new([0; BYTES]))
    }

    pub fn hpa(&self) -> u64 {
        self.0.get() as u64
    }
}

/// The first serial port, and Bochs's own.
pub struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: a byte to the port of QEMU's UART, which is always ready, and to Bochs's port
            // for output, which QEMU ignores.
            unsafe {
                asm!("out dx, al", in("dx") 0x3f8u16, in("al") byte);
                asm!("out 0xe9, al", in("al") byte);
            }
        }
        Ok(())
    }
}

/// Prints whether all was right, and ends the machine.
pub fn finish(right: bool) -> ! {
    let _ = writeln!(Serial, "{}", if right { "all right" } else { "something is wrong" });
    end(right)
}

/// Ends QEMU, with status 33 or 35, or Bochs.
fn end(right: bool) -> ! {
    let status: u32 = if right { 0x10 } else { 0x11 };
    // SAFETY: isa-debug-exit, at the address on QEMU's command line.
    unsafe { asm!("out dx, eax", in("dx") 0xf4u16, in("eax") status) }
    for byte in *b"Shutdown" {
        // SAFETY: Bochs's own port; QEMU has nothing there.
        unsafe { asm!("out dx, al", in("dx") 0x8900u16, in("al") byte) }
    }
    loop {
        // SAFETY: waits for nothing.
        unsafe { asm!("hlt") }
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Serial, "wrong: {info}");
    end(false)
}
