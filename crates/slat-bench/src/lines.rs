//! Flushes lines of the host's data cache with the CPU's own instruction.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;

/// Returns the bytes of a cache line.
pub fn line_bytes() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        // CPUID leaf 1, EBX bits 15:8: the line of CLFLUSH in units of 8 bytes.
        let line = (std::arch::x86_64::__cpuid(1).ebx >> 8 & 0xff) as usize * 8;
        if line == 0 { 64 } else { line }
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ctr: u64;
        // SAFETY: reads a register that Linux lets programs read.
        unsafe { asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack)) };
        // DminLine, bits 19:16: base-2 logarithm of the smallest line, in words of 4 bytes.
        4 << (ctr >> 16 & 0xf)
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    64
}

/// Returns the name of the instruction that `flush` executes.
pub fn instruction() -> &'static str {
    match () {
        #[cfg(target_arch = "x86_64")]
        () if has_clflushopt() => "clflushopt",
        #[cfg(target_arch = "x86_64")]
        () => "clflush",
        #[cfg(target_arch = "aarch64")]
        () => "dc civac",
        // No instruction that every program may execute flushes a line.
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        () => "none",
    }
}

/// Returns whether CPUID leaf 7, EBX bit 23 is set: flushes that need not wait for each other. The
/// result is kept, because CPUID makes a virtual machine exit.
#[cfg(target_arch = "x86_64")]
fn has_clflushopt() -> bool {
    static HAS: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *HAS.get_or_init(|| {
        let leaves = std::arch::x86_64::__cpuid(0).eax;
        leaves >= 7 && std::arch::x86_64::__cpuid_count(7, 0).ebx >> 23 & 1 == 1
    })
}

/// Writes back and invalidates all lines of `bytes` from `start` on; returns when that is complete.
///
/// # Safety
/// The memory is mapped, and stays so. (Its content does not change.)
pub unsafe fn flush(start: *const u8, bytes: usize, line: usize) {
    let first = start.wrapping_sub(start as usize % line);
    let lines = (start as usize - first as usize + bytes).div_ceil(line);
    #[cfg(target_arch = "x86_64")]
    if has_clflushopt() {
        for number in 0..lines {
            let at = first.wrapping_add(number * line);
            // SAFETY: by this function's contract; the CPU has the instruction.
            unsafe { asm!("clflushopt [{}]", in(reg) at, options(nostack)) };
        }
        // SAFETY: a fence.
        unsafe { std::arch::x86_64::_mm_sfence() };
        return;
    }
    for number in 0..lines {
        let at = first.wrapping_add(number * line);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: by this function's contract.
        unsafe {
            std::arch::x86_64::_mm_clflush(at);
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: by this function's contract; Linux lets programs execute it (SCTLR_EL1.UCI).
        unsafe {
            asm!("dc civac, {}", in(reg) at, options(nostack));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        std::hint::black_box(at);
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier.
    unsafe {
        asm!("dsb ish", options(nostack));
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence.
    unsafe {
        std::arch::x86_64::_mm_mfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_keeps_what_was_written() {
        let line = line_bytes();
        assert!(line.is_power_of_two() && (16..=2048).contains(&line), "{line}");
        let mut memory: Vec<u8> = (0..100_000u32).map(|byte| byte as u8).collect();
        // SAFETY: the range lies in the vector.
        unsafe { flush(memory.as_ptr().wrapping_add(33), 70_000, line) };
        assert!(memory.iter().enumerate().all(|(at, &byte)| byte == at as u8));
        memory[5] = 0;
        assert!(!instruction().is_empty());
    }
}
