//! What the application does, in order.

use super::machine::Serial;
use super::{amd, firmware, intel};
use core::arch::asm;
use core::arch::x86_64::__cpuid;
use core::fmt::Write;
use core::sync::atomic::{AtomicBool, Ordering};
use uefi::{Status, entry};

/// Whether the claims of the last CPU were right.
static RIGHT: AtomicBool = AtomicBool::new(false);

fn npt() {
    RIGHT.store(amd::cases::run(), Ordering::SeqCst);
}

fn ept() {
    RIGHT.store(intel::cases::run(), Ordering::SeqCst);
}

/// Returns why the program must not touch this machine's virtualisation.
fn refusal() -> Option<&'static str> {
    let cr4: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr4", out(reg) cr4) };
    if cr4 >> 23 & 1 == 1 {
        return Some("the firmware uses shadow stacks (CR4.CET), which an exit would lose");
    }
    if cr4 >> 13 & 1 == 1 {
        return Some("the firmware uses VMX itself (CR4.VMXE)");
    }
    None
}

fn all() -> bool {
    let (one, amd) = (__cpuid(1), __cpuid(0x8000_0001).ecx);
    let name = [0x8000_0002, 0x8000_0003, 0x8000_0004].map(|leaf| {
        let found = __cpuid(leaf);
        [found.eax, found.ebx, found.ecx, found.edx].map(u32::to_le_bytes)
    });
    let name = name.as_flattened().as_flattened();
    let name = core::str::from_utf8(name).unwrap_or("a CPU without a name");
    let name = name.trim_matches(['\0', ' ']);
    let _ =
        writeln!(Serial, "slat {}: {name}, CPUID.1.EAX {:#x}", env!("CARGO_PKG_VERSION"), one.eax);
    if one.ecx >> 31 == 1 {
        let _ = writeln!(Serial, "a hypervisor is below: this is no proof of hardware");
    }
    if let Some(reason) = refusal() {
        let _ = writeln!(Serial, "refused: {reason}");
        return false;
    }
    let (claims, pair, times): (fn(), fn(usize) -> bool, fn()) =
        match (amd >> 2 & 1, one.ecx >> 5 & 1) {
            (1, _) => (npt, amd::second::run, amd::times::run),
            (_, 1) => (ept, intel::second::run, intel::times::run),
            _ => {
                let _ = writeln!(Serial, "refused: no SVM and no VMX, or the firmware hides them");
                return false;
            }
        };
    let mut right = true;
    let _ = writeln!(Serial, "CPU 0");
    claims();
    right &= RIGHT.swap(false, Ordering::SeqCst);
    firmware::save();
    for cpu in firmware::others() {
        let _ = writeln!(Serial, "CPU {cpu}");
        let done = firmware::on(cpu, claims);
        if !done {
            let _ = writeln!(Serial, "wrong: CPU {cpu} does not end");
        }
        right &= done && RIGHT.swap(false, Ordering::SeqCst);
    }
    firmware::save();
    if let Some(cpu) = firmware::others().next() {
        let _ = writeln!(Serial, "CPU {cpu} stays in a guest");
        right &= pair(cpu);
        firmware::save();
    } else {
        let _ = writeln!(Serial, "one CPU: no case of two");
    }
    times();
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
