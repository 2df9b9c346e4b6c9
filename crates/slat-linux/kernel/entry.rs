//! The functions that Linux calls, and those of Linux that they call (`arch/arm64/kvm/slat.c`).
//!
//! `slat kernel` compiles it with rustc, for a kernel with pages of 4 KiB; with `--cfg page_16k` or
//! `--cfg page_64k` for others. Cargo does not: it has a panic handler.
#![no_std]

/// Calls a method of the live tables.
macro_rules! live {
    ($vm:expr, $stage2:ident => $call:expr) => {
        match &$vm.any {
            $crate::Any::Narrow($crate::common::State::Live($stage2)) => $call,
            $crate::Any::Wide($crate::common::State::Live($stage2)) => $call,
            _ => $crate::common::never(),
        }
    };
}

mod common;

use common::{State, Vm, code, slat_kvm_destroy};
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use slat::format::arm64::{Arm64, Shareability};
use slat::{
    BreakBeforeMake, Frame, Hpa, Invalidation, Maintenance, Platform, Pte, ReaderSlot, Readers,
};
use slat_linux::{Errno, Stage2};

const SHIFT: u32 = if cfg!(page_64k) {
    16
} else if cfg!(page_16k) {
    14
} else {
    12
};

/// Descriptors without the wide addresses of FEAT_LPA2 or, with 64K pages, FEAT_LPA; and with.
type Narrow = Arm64<SHIFT>;
type Wide = Arm64<SHIFT, true>;

/// `TLBI_TTL_UNKNOWN`
const UNKNOWN: c_int = i8::MAX as c_int;

// SAFETY: `slat.c` defines them with these types.
unsafe extern "C" {
    fn slat_c_flush_all(mmu: *mut c_void);
    fn slat_c_flush_range(mmu: *mut c_void, ipa: u64, bytes: u64);
    fn slat_c_flush_ipa(mmu: *mut c_void, ipa: u64, level: c_int);
    fn slat_c_flush_local(mmu: *mut c_void, ipa: u64, level: c_int);
    fn slat_c_maintain(pa: u64, bytes: u64, instructions: bool);
}

/// The machine of one VM.
pub struct Kvm {
    /// `struct kvm_s2_mmu`, whose VMID Linux reads when it invalidates.
    mmu: *mut c_void,
    /// The linear map: a virtual address less its physical one.
    offset: u64,
    readers: Readers<[ReaderSlot; 0]>,
}

impl Kvm {
    const fn new(mmu: *mut c_void, offset: u64) -> Self {
        Self { mmu, offset, readers: Readers::<[ReaderSlot; 0]>::new([]) }
    }
}

/// The level of a leaf for a TLB hint.
fn level(leaf: Option<slat::PageSize>) -> c_int {
    let below = leaf.map(|leaf| (leaf.shift() - SHIFT) / (SHIFT - 3));
    below.map_or(UNKNOWN, |below| 3 - below as c_int)
}

// SAFETY: by the promises of `Platform`:
// 1. `slat_c_alloc` is `alloc_pages_exact`, of powers of two, which are aligned to their size.
// 2. The linear map has all of the kernel's memory, cacheable.
// 3. KVM's functions for TLBs return when all CPUs have finished.
// 4. Both are constant.
// 5. `fill` is the default's, or `memset` for zeros.
// 6. A panic does not return.
unsafe impl Platform for Kvm {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        common::allocate(bytes)
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { common::free(frame, bytes) }
    }

    #[inline(always)]
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        common::entries(table, self.offset)
    }

    #[inline(always)]
    fn publish(&self) {
        // KVM relies on it, too: it marks a page in the log after a fault has made it writable, and
        // a clear may run beside the fault (`litmus`).
        // SAFETY: a barrier. It is no `nomem`: stores stay before it.
        unsafe { core::arch::asm!("dsb ishst", options(nostack, preserves_flags)) }
    }

    fn invalidate(&self, what: &Invalidation) {
        // SAFETY: `mmu` lives as long as the VM.
        unsafe {
            let Some(range) = what.range else { return slat_c_flush_all(self.mmu) };
            let (start, bytes) = (range.start().0, range.size());
            if bytes == 1 << SHIFT || what.leaf.is_some_and(|leaf| leaf.bytes() == bytes) {
                let leaf = if what.tables { None } else { what.leaf };
                slat_c_flush_ipa(self.mmu, start, level(leaf))
            } else {
                slat_c_flush_range(self.mmu, start, bytes)
            }
        }
    }

    fn invalidate_local(&self, what: &Invalidation) {
        match what.range {
            // SAFETY: as in `invalidate`.
            Some(range) => unsafe {
                slat_c_flush_local(self.mmu, range.start().0, level(what.leaf))
            },
            None => self.invalidate(what),
        }
    }

    #[inline(always)]
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }

    #[inline(always)]
    fn readers(&self) -> &Readers {
        &self.readers
    }

    #[inline(always)]
    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        // SAFETY: the memory is the guest's, and in the linear map.
        unsafe { slat_c_maintain(memory.0, bytes, what == Maintenance::Instructions) }
    }
}

/// The tables of a VM.
pub enum Any {
    Narrow(State<Narrow>),
    Wide(State<Wide>),
    None,
}

impl Any {
    /// As [`State::destroy_some`].
    ///
    /// # Safety
    /// As there.
    unsafe fn destroy_some(self, most: usize) -> (Self, bool) {
        // SAFETY: the caller's contract.
        match self {
            Self::Narrow(state) => {
                let (state, all) = unsafe { state.destroy_some(most) };
                (Self::Narrow(state), all)
            }
            Self::Wide(state) => {
                let (state, all) = unsafe { state.destroy_some(most) };
                (Self::Wide(state), all)
            }
            Self::None => (Self::None, true),
        }
    }

    fn destroy(self) {
        match self {
            Self::Narrow(state) => state.destroy(),
            Self::Wide(state) => state.destroy(),
            Self::None => {}
        }
    }
}

/// A format by which links of tables are read; it is the same for both.
type Links = Wide;

/// What Linux knows of a VM's tables.
#[repr(C)]
pub struct Config {
    mmu: *mut c_void,
    offset: u64,
    ipa_bits: u32,
    output_bits: u32,
    /// Descriptors have addresses of 52 bits.
    wide: bool,
    forced_write_back: bool,
    /// The level at which the hardware's walk begins.
    start_level: i8,
}

/// Makes tables, and writes the root's physical address.
///
/// # Safety
/// As [`Vm::begin`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_init(vm: *mut Vm, with: &Config, root: &mut u64) -> c_int {
    // SAFETY: the caller's contract.
    let (any, kvm) = unsafe { Vm::begin(vm, Kvm::new(with.mmu, with.offset)) };
    macro_rules! tables {
        ($tables:path, $format:ty) => {{
            let format = <$format>::new_for(with);
            match Stage2::new(format, with.ipa_bits, kvm) {
                Ok(stage2) => {
                    let tables = stage2.tables();
                    let is_same = 3 - tables.geometry().root_level as i8 == with.start_level;
                    *root = tables.root().0;
                    *any = $tables(State::Live(stage2));
                    if is_same {
                        0
                    } else {
                        // SAFETY: nothing has loaded the root.
                        unsafe { slat_kvm_destroy(&mut *vm) };
                        Errno::INVALID.0
                    }
                }
                Err(errno) => errno.0,
            }
        }};
    }
    if with.wide { tables!(Any::Wide, Wide) } else { tables!(Any::Narrow, Narrow) }
}

trait NewFor {
    fn new_for(with: &Config) -> Self;
}

impl<const WIDE: bool> NewFor for Arm64<SHIFT, WIDE> {
    fn new_for(with: &Config) -> Self {
        Self {
            forced_write_back: with.forced_write_back,
            hardware_dirty: false,
            split_execute: false,
            shareability: Shareability::Inner,
            output_bits: with.output_bits,
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_relax(vm: &Vm, addr: u64, prot: u64) -> c_int {
    live!(vm, stage2 => code(stage2.relax(addr, prot)))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_mkyoung(vm: &Vm, addr: u64) -> u64 {
    live!(vm, stage2 => stage2.mkyoung(addr))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_flush(vm: &Vm, addr: u64, size: u64) -> c_int {
    live!(vm, stage2 => code(stage2.flush(addr, size)))
}
