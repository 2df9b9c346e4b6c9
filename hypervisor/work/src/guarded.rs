//! Single loads and stores that may be answered with a fault.
//!
//! One instruction each, with neither a pair nor a writeback: the syndrome of its abort then says
//! which register is meant, and a hypervisor need not decode it.

/// The access was answered with SIGBUS or SIGSEGV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusError;

#[cfg(target_arch = "aarch64")]
mod arm64 {
    use super::BusError;
    use std::arch::asm;
    use std::mem::{MaybeUninit, zeroed};
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Between these accesses a fault is a fault.
    static INSIDE: AtomicBool = AtomicBool::new(false);
    static FAULTED: AtomicBool = AtomicBool::new(false);

    extern "C" fn faulted(
        signal: libc::c_int,
        _: *mut libc::siginfo_t,
        context: *mut libc::c_void,
    ) {
        if !INSIDE.load(Ordering::SeqCst) {
            // SAFETY: signal is safe in a handler; the access then faults again, for good.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
            return;
        }
        FAULTED.store(true, Ordering::SeqCst);
        // SAFETY: with SA_SIGINFO the third argument is the interrupted thread's ucontext_t, which
        // nobody else uses before the handler returns.
        let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
        // The access is one instruction of 4 bytes, which is left out.
        context.uc_mcontext.pc += 4;
    }

    fn guard(access: impl FnOnce()) -> Result<(), BusError> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| {
            for signal in [libc::SIGBUS, libc::SIGSEGV] {
                // SAFETY: sigaction is made of integers, for which zero is a value.
                let mut action: libc::sigaction = unsafe { zeroed() };
                action.sa_sigaction = faulted as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO;
                let mut old = MaybeUninit::uninit();
                // SAFETY: both point to what they should, and the handler calls nothing but what
                // may be called in one.
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
    /// `address` is mapped for reading as long as this runs, and a multiple of 4.
    pub unsafe fn load(address: *const u32) -> Result<u32, BusError> {
        let mut value = 0_u32;
        // SAFETY: by the caller's promise; a fault leaves `value` as it was.
        guard(|| unsafe {
            asm!("ldr {value:w}, [{address}]", value = inout(reg) value,
                 address = in(reg) address, options(nostack, preserves_flags));
        })?;
        Ok(value)
    }

    /// Stores 4 bytes.
    ///
    /// # Safety
    /// `address` is mapped for writing as long as this runs, is a multiple of 4, and no Rust
    /// object.
    pub unsafe fn store(address: *mut u32, value: u32) -> Result<(), BusError> {
        // SAFETY: by the caller's promise.
        guard(|| unsafe {
            asm!("str {value:w}, [{address}]", value = in(reg) value,
                 address = in(reg) address, options(nostack, preserves_flags));
        })
    }
}

#[cfg(target_arch = "aarch64")]
pub use arm64::{load, store};

/// Never reached: no device is opened on other machines.
///
/// # Safety
/// None is needed.
#[cfg(not(target_arch = "aarch64"))]
pub unsafe fn load(_: *const u32) -> Result<u32, BusError> {
    Err(BusError)
}

/// Never reached: no device is opened on other machines.
///
/// # Safety
/// None is needed.
#[cfg(not(target_arch = "aarch64"))]
pub unsafe fn store(_: *mut u32, _: u32) -> Result<(), BusError> {
    Err(BusError)
}
