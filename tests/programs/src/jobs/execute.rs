//! The job `execute`: calls code in every page of some memory.

use crate::Verdict;
use crate::control::Control;

/// Calls every page twice. A hypervisor may trap the fetches of the first round.
///
/// # Errors
/// Returns an error if the machine is not arm64, or if the memory cannot be mapped.
#[cfg(target_arch = "aarch64")]
pub fn run(mib: usize, control: &Control) -> anyhow::Result<Verdict> {
    use crate::control::Event;
    use crate::memory::{Memory, PAGE};

    const ROUNDS: usize = 2;
    /// `ret`
    const RET: u32 = 0xd65f_03c0;

    let memory = Memory::executable(mib)?;
    let entries: Vec<*mut u32> = (0..memory.pages())
        // SAFETY: the word is inside its page.
        .map(|page| unsafe { memory.page(page).cast::<u32>().add(fastrand::usize(..PAGE / 4)) })
        .collect();
    for entry in &entries {
        // SAFETY: the word is mapped for writing and aligned, and nothing else uses it.
        unsafe { entry.write_volatile(RET) };
    }
    publish(&entries);
    control.tell(Event::Started);
    for _ in 0..ROUNDS {
        for entry in &entries {
            // SAFETY: at this address is a function that only returns, and `publish` has made it
            // visible to fetches.
            unsafe { std::mem::transmute::<*mut u32, extern "C" fn()>(*entry)() };
        }
    }
    println!("work: execute: {ROUNDS} rounds, {} pages called", entries.len());
    Ok(Verdict::Right)
}

/// Makes instructions that were written visible to fetches (Arm ARM, B2.4.4).
#[cfg(target_arch = "aarch64")]
fn publish(instructions: &[*mut u32]) {
    use std::arch::asm;

    // SAFETY: cache maintenance changes no memory, and the addresses are mapped.
    unsafe {
        for at in instructions {
            asm!("dc cvau, {at}", at = in(reg) *at, options(nostack, preserves_flags));
        }
        asm!("dsb ish", options(nostack, preserves_flags));
        for at in instructions {
            asm!("ic ivau, {at}", at = in(reg) *at, options(nostack, preserves_flags));
        }
        asm!("dsb ish", "isb", options(nostack, preserves_flags));
    }
}

/// Refuses the job, because the code is for arm64.
///
/// # Errors
/// Always returns an error.
#[cfg(not(target_arch = "aarch64"))]
pub fn run(_: usize, _: &Control) -> anyhow::Result<Verdict> {
    anyhow::bail!("execute: the code is arm64's, and this machine is not")
}
