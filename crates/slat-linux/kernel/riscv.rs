//! The functions that Linux calls on RISC-V, and those that they call (`arch/riscv/kvm/slat.c`).
//!
//! `slat kernel` compiles it with rustc. Cargo does not: it has a panic handler.
#![no_std]

/// Calls a method of the live tables.
macro_rules! live {
    ($vm:expr, $stage2:ident => $call:expr) => {
        match &$vm.any {
            $crate::Any::Tables($crate::common::State::Live($stage2)) => $call,
            _ => $crate::common::never(),
        }
    };
}

mod common;

use common::{State, Vm, source};
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use slat::format::riscv::{Mode, RiscV};
use slat::{BreakBeforeMake, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers};
use slat_linux::{Errno, Leaf, Stage2};

/// Base-2 logarithm of the size of a page.
const SHIFT: u32 = 12;

// SAFETY: `slat.c` defines them with these types.
unsafe extern "C" {
    /// Fences of all vCPUs. They interrupt harts, and are not called with interrupts off.
    fn slat_c_fence_all(kvm: *mut c_void);
    fn slat_c_fence_range(kvm: *mut c_void, gpa: u64, bytes: u64, order: u64);
    /// Fences of this hart.
    fn slat_c_fence_local_all(kvm: *mut c_void);
    fn slat_c_fence_local(kvm: *mut c_void, gpa: u64, bytes: u64, order: u64);
}

/// The machine of one VM.
pub struct Kvm {
    /// `struct kvm`, whose VMID harts read when they fence.
    kvm: *mut c_void,
    /// The linear map: a virtual address less its physical one.
    offset: u64,
    readers: Readers<[ReaderSlot; 0]>,
}

impl Kvm {
    const fn new(kvm: *mut c_void, offset: u64) -> Self {
        Self { kvm, offset, readers: Readers::<[ReaderSlot; 0]>::new([]) }
    }
}

/// The address, the bytes and the step of a fence by address; `None` where it has to cover the
/// guest: by address a hart orders reads of leaves only.
fn addresses(what: &Invalidation) -> Option<(u64, u64, u64)> {
    let range = what.range.filter(|_| !what.tables)?;
    let shift = what.leaf.map_or(SHIFT, |leaf| leaf.shift());
    let below = (1 << shift) - 1;
    let start = range.start().0 & !below;
    let end = range.end().0.checked_add(below)? & !below;
    Some((start, end - start, u64::from(shift)))
}

// SAFETY: by the promises of `Platform`:
// 1. `slat_c_alloc` is `alloc_pages`, whose pages are aligned to their size.
// 2. The linear map has all of the kernel's memory, cacheable.
// 3. KVM's fences return when all harts that run the VM have left the guest, and have the request
//    to fence before they enter it again. A hart that a vCPU comes to fences as well.
// 4. Both are constant.
// 5. `fill` is the default's.
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
        // SAFETY: a barrier. It is no `nomem`: stores stay before it.
        unsafe { core::arch::asm!("fence w, w", options(nostack, preserves_flags)) }
    }

    fn invalidate(&self, what: &Invalidation) {
        // SAFETY: `kvm` lives as long as the VM.
        unsafe {
            match addresses(what) {
                Some((gpa, bytes, order)) => slat_c_fence_range(self.kvm, gpa, bytes, order),
                None => slat_c_fence_all(self.kvm),
            }
        }
    }

    fn invalidate_local(&self, what: &Invalidation) {
        // SAFETY: as in `invalidate`.
        unsafe {
            match addresses(what) {
                Some((gpa, bytes, order)) => slat_c_fence_local(self.kvm, gpa, bytes, order),
                None => slat_c_fence_local_all(self.kvm),
            }
        }
    }

    #[inline(always)]
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }

    #[inline(always)]
    fn readers(&self) -> &Readers {
        &self.readers
    }
}

/// The tables of a VM.
pub enum Any {
    Tables(State<RiscV>),
    None,
}

impl Any {
    /// As [`State::destroy_some`].
    ///
    /// # Safety
    /// As there.
    unsafe fn destroy_some(self, most: usize) -> (Self, bool) {
        let Self::Tables(state) = self else { return (self, true) };
        // SAFETY: the caller's contract.
        let (state, all) = unsafe { state.destroy_some(most) };
        (Self::Tables(state), all)
    }

    fn destroy(self) {
        if let Self::Tables(state) = self {
            state.destroy();
        }
    }
}

/// The format by which links of tables are read.
type Links = RiscV;

/// What Linux knows of a VM's tables.
#[repr(C)]
pub struct Config {
    kvm: *mut c_void,
    offset: u64,
    /// The bits of a guest physical address in the mode of hgatp.
    gpa_bits: u32,
    /// Svpbmt.
    memory_types: bool,
}

/// Makes tables, and writes the root's physical address.
///
/// # Safety
/// As [`Vm::begin`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_init(vm: *mut Vm, with: &Config, root: &mut u64) -> c_int {
    // SAFETY: the caller's contract.
    let (any, kvm) = unsafe { Vm::begin(vm, Kvm::new(with.kvm, with.offset)) };
    let modes = [Mode::Sv39x4, Mode::Sv48x4, Mode::Sv57x4];
    let Some(widest) = modes.into_iter().find(|mode| mode.address_bits() == with.gpa_bits) else {
        return Errno::INVALID.0;
    };
    let format = RiscV { widest, memory_types: with.memory_types, ..RiscV::default() };
    match Stage2::new(format, with.gpa_bits, kvm) {
        Ok(stage2) => {
            *root = stage2.tables().root().0;
            *any = Any::Tables(State::Live(stage2));
            0
        }
        Err(errno) => errno.0,
    }
}

/// Handles a fault at `gpa`; returns a number of [`FaultAnswer`](slat_linux::FaultAnswer), or an
/// error.
#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_fault(
    vm: &Vm,
    gpa: u64,
    size: u64,
    hpa: u64,
    prot: u64,
    sees_valid: bool,
    mc: *mut c_void,
) -> c_int {
    let below = size.wrapping_sub(1);
    let leaf = Leaf { gpa: gpa & !below, size, hpa: hpa & !below, prot };
    let given = live!(vm, stage2 => stage2.fault(gpa, leaf, sees_valid, &mut source(mc)));
    given.map_or_else(|errno| errno.0, |given| given as c_int)
}
