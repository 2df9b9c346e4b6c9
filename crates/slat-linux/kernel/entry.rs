//! The functions that Linux calls, and those of Linux that they call (`arch/arm64/kvm/slat.c`).
//!
//! `slat kernel` compiles it with rustc, for a kernel with pages of 4 KiB; with `--cfg page_16k` or
//! `--cfg page_64k` for others. Cargo does not: it has a panic handler.
#![no_std]

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use slat::format::arm64::{Arm64, Shareability};
use slat::{
    BreakBeforeMake, Frame, Hpa, Invalidation, Maintenance, Platform, Pte, ReaderSlot, Readers,
    RetiredTables, UnloadedTables,
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
    /// Zeroed pages, physically contiguous; 0 if there are none. May sleep.
    fn slat_c_alloc(bytes: usize) -> u64;
    fn slat_c_free(pa: u64, bytes: usize);
    /// A zeroed page of a `struct kvm_mmu_memory_cache`, which may be NULL; 0 if it has none.
    fn slat_c_take(mc: *mut c_void) -> u64;
    fn slat_c_flush_all(mmu: *mut c_void);
    fn slat_c_flush_range(mmu: *mut c_void, ipa: u64, bytes: u64);
    fn slat_c_flush_ipa(mmu: *mut c_void, ipa: u64, level: c_int);
    fn slat_c_flush_local(mmu: *mut c_void, ipa: u64, level: c_int);
    fn slat_c_maintain(pa: u64, bytes: u64, instructions: bool);
    fn slat_c_panic() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: it may be called at any time.
    unsafe { slat_c_panic() }
}

/// The machine of one VM.
struct Kvm {
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

enum State<F: slat::format::Format> {
    Live(Stage2<'static, F, Kvm>),
    Ended(UnloadedTables<'static, F, Kvm>),
}

enum Any {
    Narrow(State<Narrow>),
    Wide(State<Wide>),
    None,
}

/// The tables of a VM. C allocates it, aligned to 128 bytes, and it does not move: the tables
/// borrow the platform beside them.
#[repr(C, align(128))]
pub struct Vm {
    kvm: Kvm,
    any: Any,
}

/// Calls a method of the live tables.
macro_rules! live {
    ($vm:expr, $stage2:ident => $call:expr) => {
        match &$vm.any {
            Any::Narrow(State::Live($stage2)) => $call,
            Any::Wide(State::Live($stage2)) => $call,
            // SAFETY: it may be called at any time. Linux calls nothing after it has destroyed the
            // tables, or if it could not make them.
            _ => unsafe { slat_c_panic() },
        }
    };
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
/// `vm` is memory of [`slat_kvm_bytes`], aligned to 128.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_init(vm: *mut Vm, with: &Config, root: &mut u64) -> c_int {
    // SAFETY: the caller's contract. The platform lives, where it lies, as long as the tables.
    let vm = unsafe {
        vm.write(Vm { kvm: Kvm::new(with.mmu, with.offset), any: Any::None });
        &mut *vm
    };
    // SAFETY: as above: `any` is dropped, or ended, before C frees the memory.
    let kvm: &'static Kvm = unsafe { &*(&raw const vm.kvm) };
    macro_rules! tables {
        ($any:path, $format:ty) => {{
            let format = <$format>::new_for(with);
            match Stage2::new(format, with.ipa_bits, kvm) {
                Ok(stage2) => {
                    let tables = stage2.tables();
                    let is_same = 3 - tables.geometry().root_level as i8 == with.start_level;
                    *root = tables.root().0;
                    vm.any = $any(State::Live(stage2));
                    if is_same {
                        0
                    } else {
                        // SAFETY: nothing has loaded the root.
                        unsafe { slat_kvm_destroy(vm) };
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

/// Gives back up to `most` tables; returns whether all are gone but the root.
///
/// # Safety
/// No CPU has the tables loaded, and no other thread knows them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_destroy_some(vm: &mut Vm, most: usize) -> bool {
    macro_rules! some {
        ($any:path, $state:expr) => {{
            let mut inactive = match $state {
                // SAFETY: the caller's contract.
                State::Live(stage2) => unsafe { stage2.into_unloaded() },
                State::Ended(inactive) => inactive,
            };
            let all = inactive.destroy_some(most);
            vm.any = $any(State::Ended(inactive));
            all
        }};
    }
    match core::mem::replace(&mut vm.any, Any::None) {
        Any::Narrow(state) => some!(Any::Narrow, state),
        Any::Wide(state) => some!(Any::Wide, state),
        Any::None => true,
    }
}

/// Gives back all tables.
///
/// # Safety
/// As [`slat_kvm_destroy_some`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_destroy(vm: &mut Vm) {
    // SAFETY: the caller's contract.
    while !unsafe { slat_kvm_destroy_some(vm, usize::MAX) } {}
    match core::mem::replace(&mut vm.any, Any::None) {
        Any::Narrow(State::Ended(tables)) => tables.destroy(),
        Any::Wide(State::Ended(tables)) => tables.destroy(),
        _ => {}
    }
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
    live!(vm, stage2 => code(stage2.map(addr, size, phys, prot, &mut source(mc))))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_unmap(vm: &Vm, addr: u64, size: u64) -> c_int {
    live!(vm, stage2 => code(stage2.unmap(addr, size)))
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
pub extern "C" fn slat_kvm_wrprotect(vm: &Vm, addr: u64, size: u64) -> c_int {
    live!(vm, stage2 => code(stage2.wrprotect(addr, size)))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_age(vm: &Vm, addr: u64, size: u64, clear: bool) -> bool {
    live!(vm, stage2 => stage2.age(addr, size, clear))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_flush(vm: &Vm, addr: u64, size: u64) -> c_int {
    live!(vm, stage2 => code(stage2.flush(addr, size)))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_split(vm: &Vm, addr: u64, size: u64, mc: *mut c_void) -> c_int {
    live!(vm, stage2 => code(stage2.split(addr, size, &mut source(mc))))
}

/// Returns whether there are tables for [`slat_kvm_take_retired`].
#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_has_retired(vm: &Vm) -> bool {
    live!(vm, stage2 => stage2.has_retired())
}

/// Takes the tables that were unlinked as two words, which [`slat_kvm_free_retired`] takes after a
/// grace period.
#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_take_retired(vm: &Vm, words: &mut [u64; 2]) {
    *words = live!(vm, stage2 => stage2.take_retired().into_words());
}

/// Gives back tables; the VM may be gone.
///
/// # Safety
/// [`slat_kvm_take_retired`] made the words, which were not used since, and an RCU grace period has
/// passed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_free_retired(offset: u64, words: &[u64; 2]) {
    let kvm = Kvm::new(core::ptr::null_mut(), offset);
    // SAFETY: the caller's contract. Links of both formats are read in the same way.
    unsafe { RetiredTables::<Wide>::from_words(*words).free(&kvm) };
}
