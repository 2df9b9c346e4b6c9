//! What the application does, in order.

use super::cpu;
use super::firmware;
use super::machine::Serial;
use core::fmt::Write;
use core::sync::atomic::{AtomicBool, Ordering};
use uefi::{Status, entry};

/// What a CPU can do.
pub struct Parts {
    /// Checks the claims on the CPU that calls it, and sets [`RIGHT`].
    pub claims: fn(),
    /// Checks the cases of two CPUs; returns whether all were right.
    pub second: fn() -> bool,
    /// Prints times of the engine's operations.
    pub times: fn(),
}

/// Whether the claims of the last CPU were right.
pub static RIGHT: AtomicBool = AtomicBool::new(false);

fn all() -> bool {
    let _ = write!(Serial, "slat {}: ", env!("CARGO_PKG_VERSION"));
    let parts = match cpu::find() {
        Ok(parts) => parts,
        Err(reason) => {
            let _ = writeln!(Serial, "refused: {reason}");
            return false;
        }
    };
    let _ = writeln!(Serial, "CPU 0");
    (parts.claims)();
    let mut right = RIGHT.swap(false, Ordering::SeqCst);
    firmware::save();
    for cpu in firmware::others() {
        let _ = writeln!(Serial, "CPU {cpu}");
        let done = firmware::on(cpu, parts.claims);
        if !done {
            let _ = writeln!(Serial, "wrong: CPU {cpu} does not end");
        }
        right &= done && RIGHT.swap(false, Ordering::SeqCst);
    }
    firmware::save();
    let _ = writeln!(Serial, "a second CPU stays in a guest");
    right &= (parts.second)();
    firmware::save();
    (parts.times)();
    right
}

#[entry]
fn start() -> Status {
    // No firmware resets a machine that works.
    let _ = uefi::boot::set_watchdog_timer(0, 0x1_0000, None);
    let right = all();
    let _ = writeln!(Serial, "{}", if right { "all right" } else { "something is wrong" });
    firmware::end()
}
