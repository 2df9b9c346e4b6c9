//! What the application does, in order.

use super::cpu;
use super::firmware::{self, ELSEWHERE};
use super::machine::{RIGHT, Serial};
use core::fmt::Write;
use core::panic::PanicInfo;
use core::sync::atomic::Ordering;
use uefi::{Status, entry};

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

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Serial, "wrong: {info}");
    if ELSEWHERE.load(Ordering::SeqCst) {
        // The first CPU sees that this one does not end.
        loop {
            core::hint::spin_loop();
        }
    }
    firmware::end()
}
