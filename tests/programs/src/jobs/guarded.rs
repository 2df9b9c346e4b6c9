//! Single loads and stores that may fault.
//!
//! Each is one instruction without a pair of registers and without writeback. The syndrome of its
//! abort then names the register, so a hypervisor need not decode the instruction.

/// Error of an access that got SIGBUS or SIGSEGV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusError;

#[cfg(target_arch = "aarch64")]
mod arm64 {
    use super::BusError;
    use std::arch::asm;
    use std::mem::{MaybeUninit, zeroed};
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Whether a guarded access is in progress. Faults at other times are real.
    static INSIDE: AtomicBool = AtomicBool::new(false);
    static FAULTED: AtomicBool = AtomicBool::new(false);

    extern "C" fn faulted(
        signal: libc::c_int,
        _: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        if !INSIDE.load(Ordering::SeqCst) {
            // SAFETY: `signal` is async-signal-safe. The access then faults again, and ends the
            // process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
            return;
        }
        FAULTED.store(true, Ordering::SeqCst);
        // SAFETY: with SA_SIGINFO the third argument is the ucontext_t of the interrupted thread,
        // which nothing else uses before the handler returns.
        let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
        // Skips the access, which is one instruction of 4 bytes.
        context.uc_mcontext.pc += 4;
    }

    fn guard(access: impl FnOnce()) -> Result<(), BusError> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| {
            for signal in [libc::SIGBUS, libc::SIGSEGV] {
                // SAFETY: `sigaction` consists of integers, for which zero is a valid value.
                let mut action: libc::sigaction = unsafe { zeroed() };
                action.sa_sigaction = faulted as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO;
                let mut old = MaybeUninit::uninit();
                // SAFETY: both pointers are valid, and the handler calls only async-signal-safe
                // functions.
                unsafe { libc::sigaction(signal, &action, old.as_mut_ptr()) };
            }
        });
        FAULTED.store(false, Ordering::SeqCst);
        INSIDE.store(true, Ordering::SeqCst);
        access();
        INSIDE.store(false, Ordering::SeqCst);
        if FAULTED.load(Ordering::SeqCst) { Err(BusError) } else { Ok(()) }
    }

    /// Loads 4 bytes.
    ///
    /// # Safety
    /// 1. `address` is mapped for reading while this runs.
    /// 2. It is a multiple of 4.
    pub unsafe fn load(address: *const u32) -> Result<u32, BusError> {
        let mut value = 0_u32;
        // SAFETY: the caller promises 1 and 2. A fault leaves `value` unchanged.
        guard(|| unsafe {
            asm!("ldr {value:w}, [{address}]", value = inout(reg) value,
                 address = in(reg) address, options(nostack, preserves_flags));
        })?;
        Ok(value)
    }

    /// Stores 4 bytes.
    ///
    /// # Safety
    /// 1. `address` is mapped for writing while this runs.
    /// 2. It is a multiple of 4.
    /// 3. It is not part of a Rust object.
    pub unsafe fn store(address: *mut u32, value: u32) -> Result<(), BusError> {
        // SAFETY: the caller promises 1 to 3.
        guard(|| unsafe {
            asm!("str {value:w}, [{address}]", value = in(reg) value,
                 address = in(reg) address, options(nostack, preserves_flags));
        })
    }
}

#[cfg(target_arch = "aarch64")]
pub use arm64::{load, store};

/// Never called, because no device is opened on other machines.
///
/// # Safety
/// There is no requirement.
#[cfg(not(target_arch = "aarch64"))]
pub unsafe fn load(_: *const u32) -> Result<u32, BusError> {
    Err(BusError)
}

/// Never called, because no device is opened on other machines.
///
/// # Safety
/// There is no requirement.
#[cfg(not(target_arch = "aarch64"))]
pub unsafe fn store(_: *mut u32, _: u32) -> Result<(), BusError> {
    Err(BusError)
}
