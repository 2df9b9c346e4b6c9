//! The functions that Linux calls on RISC-V, and those that they call (`arch/riscv/kvm/slat.c`).
//!
//! `slat kernel` compiles it with rustc. Cargo does not: it has a panic handler.
#![no_std]

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use slat::format::riscv::{Mode, RiscV};
use slat::{
    BreakBeforeMake, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers, RetiredTables,
    UnloadedTables,
};
use slat_linux::{Errno, Leaf, Stage2};

/// Base-2 logarithm of the size of a page.
const SHIFT: u32 = 12;

// SAFETY: `slat.c` defines them with these types.
unsafe extern "C" {
    /// Zeroed pages, physically contiguous and aligned to their size; 0 if there are none. May
    /// sleep.
    fn slat_c_alloc(bytes: usize) -> u64;
    fn slat_c_free(pa: u64, bytes: usize);
    /// A zeroed page of a `struct kvm_mmu_memory_cache`, which may be NULL; 0 if it has none.
    fn slat_c_take(mc: *mut c_void) -> u64;
    /// Fences of all vCPUs. They interrupt harts, and are not called with interrupts off.
    fn slat_c_fence_all(kvm: *mut c_void);
    fn slat_c_fence_range(kvm: *mut c_void, gpa: u64, bytes: u64, order: u64);
    /// Fences of this hart.
    fn slat_c_fence_local_all(kvm: *mut c_void);
    fn slat_c_fence_local(kvm: *mut c_void, gpa: u64, bytes: u64, order: u64);
    fn slat_c_panic() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: it may be called at any time.
    unsafe { slat_c_panic() }
}

/// The machine of one VM.
struct Kvm {
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
        // SAFETY: the frame is the caller's alone.
        unsafe { Frame::from_hpa(Hpa(slat_c_alloc(bytes))) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { slat_c_free(frame.hpa().0, bytes) }
    }

    #[inline(always)]
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        let address = table.0.wrapping_add(self.offset) as *mut Pte;
        // SAFETY: the linear map does not contain address 0.
        unsafe { NonNull::new_unchecked(address) }
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

enum State {
    Live(Stage2<'static, RiscV, Kvm>),
    Ended(UnloadedTables<'static, RiscV, Kvm>),
    None,
}

/// The tables of a VM. C allocates it, aligned to 128 bytes, and it does not move: the tables
/// borrow the platform beside them.
#[repr(C, align(128))]
pub struct Vm {
    kvm: Kvm,
    state: State,
}

impl Vm {
    fn live(&self) -> &Stage2<'static, RiscV, Kvm> {
        match &self.state {
            State::Live(stage2) => stage2,
            // SAFETY: it may be called at any time. Linux calls nothing after it has destroyed the
            // tables, or if it could not make them.
            _ => unsafe { slat_c_panic() },
        }
    }
}

fn code(result: Result<(), Errno>) -> c_int {
    result.map_or_else(|errno| errno.0, |()| 0)
}

/// Returns a source of table pages from a cache of KVM's.
fn source(mc: *mut c_void) -> impl FnMut() -> Option<Frame> + Send {
    // A number may go to another thread, as the type demands; none does.
    let mc = mc.expose_provenance();
    // SAFETY: the cache is the calling thread's, and its pages are nobody's.
    move || unsafe {
        Frame::from_hpa(Hpa(slat_c_take(core::ptr::with_exposed_provenance_mut(mc))))
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_bytes() -> usize {
    size_of::<Vm>()
}

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
/// `vm` is memory of [`slat_kvm_bytes`], aligned to 128.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_init(vm: *mut Vm, with: &Config, root: &mut u64) -> c_int {
    // SAFETY: the caller's contract. The platform lives, where it lies, as long as the tables.
    let vm = unsafe {
        vm.write(Vm { kvm: Kvm::new(with.kvm, with.offset), state: State::None });
        &mut *vm
    };
    // SAFETY: as above: `state` is ended before C frees the memory.
    let kvm: &'static Kvm = unsafe { &*(&raw const vm.kvm) };
    let modes = [Mode::Sv39x4, Mode::Sv48x4, Mode::Sv57x4];
    let Some(widest) = modes.into_iter().find(|mode| mode.address_bits() == with.gpa_bits) else {
        return Errno::INVALID.0;
    };
    let format = RiscV { widest, memory_types: with.memory_types, ..RiscV::default() };
    match Stage2::new(format, with.gpa_bits, kvm) {
        Ok(stage2) => {
            *root = stage2.tables().root().0;
            vm.state = State::Live(stage2);
            0
        }
        Err(errno) => errno.0,
    }
}

/// Gives back up to `most` tables; returns whether all are gone but the root.
///
/// # Safety
/// No CPU has the tables loaded, and no other thread knows them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_destroy_some(vm: &mut Vm, most: usize) -> bool {
    let mut unloaded = match core::mem::replace(&mut vm.state, State::None) {
        // SAFETY: the caller's contract.
        State::Live(stage2) => unsafe { stage2.into_unloaded() },
        State::Ended(unloaded) => unloaded,
        State::None => return true,
    };
    let all = unloaded.destroy_some(most);
    vm.state = State::Ended(unloaded);
    all
}

/// Gives back all tables.
///
/// # Safety
/// As [`slat_kvm_destroy_some`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_destroy(vm: &mut Vm) {
    // SAFETY: the caller's contract.
    while !unsafe { slat_kvm_destroy_some(vm, usize::MAX) } {}
    if let State::Ended(tables) = core::mem::replace(&mut vm.state, State::None) {
        tables.destroy();
    }
}

/// Handles a fault at `gpa`; returns a number of [`Given`](slat_linux::Given), or an error.
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
    let given = vm.live().fault(gpa, leaf, sees_valid, &mut source(mc));
    given.map_or_else(|errno| errno.0, |given| given as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_map(
    vm: &Vm,
    addr: u64,
    size: u64,
    phys: u64,
    prot: u64,
    mc: *mut c_void,
) -> c_int {
    code(vm.live().map(addr, size, phys, prot, &mut source(mc)))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_unmap(vm: &Vm, addr: u64, size: u64) -> c_int {
    code(vm.live().unmap(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_wrprotect(vm: &Vm, addr: u64, size: u64) -> c_int {
    code(vm.live().wrprotect(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_age(vm: &Vm, addr: u64, size: u64, clear: bool) -> bool {
    vm.live().age(addr, size, clear)
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_split(vm: &Vm, addr: u64, size: u64, mc: *mut c_void) -> c_int {
    code(vm.live().split(addr, size, &mut source(mc)))
}

/// Returns whether there are tables for [`slat_kvm_take_retired`].
#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_has_retired(vm: &Vm) -> bool {
    vm.live().has_retired()
}

/// Takes the tables that were unlinked as two words, which [`slat_kvm_free_retired`] takes after a
/// grace period.
#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_take_retired(vm: &Vm, words: &mut [u64; 2]) {
    *words = vm.live().take_retired().into_words();
}

/// Gives back tables; the VM may be gone.
///
/// # Safety
/// [`slat_kvm_take_retired`] made the words, which were not used since, and an RCU grace period has
/// passed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_free_retired(offset: u64, words: &[u64; 2]) {
    let kvm = Kvm::new(core::ptr::null_mut(), offset);
    // SAFETY: the caller's contract.
    unsafe { RetiredTables::<RiscV>::from_words(*words).free(&kvm) };
}
