//! EPT or NPT, whichever the CPU has.

mod amd;
mod intel;

use super::machine::{Parts, RIGHT, Serial};
use core::arch::asm;
use core::arch::x86_64::__cpuid;
use core::fmt::Write;
use core::sync::atomic::Ordering;

fn npt() {
    RIGHT.store(amd::cases::run(amd::wide::cases), Ordering::SeqCst);
}

fn ept() {
    RIGHT.store(intel::cases::run(intel::maps::cases), Ordering::SeqCst);
}

/// Returns what this CPU can do, or why the program must not touch its virtualisation.
pub fn find() -> Result<Parts, &'static str> {
    let (one, amd) = (__cpuid(1), __cpuid(0x8000_0001).ecx);
    let name = [0x8000_0002, 0x8000_0003, 0x8000_0004].map(|leaf| {
        let found = __cpuid(leaf);
        [found.eax, found.ebx, found.ecx, found.edx].map(u32::to_le_bytes)
    });
    let name = name.as_flattened().as_flattened();
    let name = core::str::from_utf8(name).unwrap_or("a CPU without a name");
    let name = name.trim_matches(['\0', ' ']);
    let _ = writeln!(Serial, "{name}, CPUID.1.EAX {:#x}", one.eax);
    if one.ecx >> 31 == 1 {
        let _ = writeln!(Serial, "a hypervisor is below: this is no proof of hardware");
    }
    let cr4: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, cr4", out(reg) cr4) };
    if cr4 >> 23 & 1 == 1 {
        return Err("the firmware uses shadow stacks (CR4.CET), which an exit would lose");
    }
    if cr4 >> 13 & 1 == 1 {
        return Err("the firmware uses VMX itself (CR4.VMXE)");
    }
    match (amd >> 2 & 1, one.ecx >> 5 & 1) {
        (1, _) => Ok(Parts { claims: npt, second: amd::second::run, times: amd::times::run }),
        (_, 1) => Ok(Parts { claims: ept, second: intel::second::run, times: intel::times::run }),
        _ => Err("no SVM and no VMX, or the firmware hides them"),
    }
}
