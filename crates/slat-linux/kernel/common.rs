//! What the entry points of all architectures share. The parent module has the format and the
//! machine: `Kvm`, `Any` with its tables, and the macro `live!`, which calls a method of them.

use crate::{Any, Kvm};
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use slat::format::Format;
use slat::{Frame, Hpa, Pte, RetiredTables, UnloadedTables};
use slat_linux::{Errno, Stage2};

// SAFETY: `slat.c` defines them with these types.
unsafe extern "C" {
    /// Zeroed pages, physically contiguous and aligned to their size, a power of two; 0 if there
    /// are none. May sleep.
    fn slat_c_alloc(bytes: usize) -> u64;
    fn slat_c_free(pa: u64, bytes: usize);
    /// A zeroed page of a `struct kvm_mmu_memory_cache`, which may be NULL; 0 if it has none.
    fn slat_c_take(mc: *mut c_void) -> u64;
    fn slat_c_panic() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    never()
}

/// For calls that Linux does not make: after it has destroyed the tables, or could not make them.
pub fn never() -> ! {
    // SAFETY: it may be called at any time.
    unsafe { slat_c_panic() }
}

/// [`slat::Platform::allocate`].
pub fn allocate(bytes: usize) -> Option<Frame> {
    // SAFETY: the frame is the caller's alone.
    unsafe { Frame::from_hpa(Hpa(slat_c_alloc(bytes))) }
}

/// [`slat::Platform::free`].
///
/// # Safety
/// As there.
pub unsafe fn free(frame: Frame, bytes: usize) {
    // SAFETY: the caller's contract.
    unsafe { slat_c_free(frame.hpa().0, bytes) }
}

/// [`slat::Platform::entries`], by the linear map, a virtual address less its physical one.
#[inline(always)]
pub fn entries(table: Hpa, offset: u64) -> NonNull<Pte> {
    let address = table.0.wrapping_add(offset) as *mut Pte;
    // SAFETY: the linear map does not contain address 0.
    unsafe { NonNull::new_unchecked(address) }
}

/// Tables of one format.
pub enum State<F: Format> {
    Live(Stage2<'static, F, Kvm>),
    Ended(UnloadedTables<'static, F, Kvm>),
}

impl<F: Format> State<F> {
    /// Gives back up to `most` tables; returns whether all are gone but the root.
    ///
    /// # Safety
    /// No CPU has the tables loaded, and no other thread knows them.
    pub unsafe fn destroy_some(self, most: usize) -> (Self, bool) {
        let mut unloaded = match self {
            // SAFETY: the caller's contract.
            Self::Live(stage2) => unsafe { stage2.into_unloaded() },
            Self::Ended(unloaded) => unloaded,
        };
        let all = unloaded.destroy_some(most);
        (Self::Ended(unloaded), all)
    }

    pub fn destroy(self) {
        if let Self::Ended(unloaded) = self {
            unloaded.destroy();
        }
    }
}

/// The tables of a VM. C allocates it, aligned to 128 bytes, and it does not move: the tables
/// borrow the platform beside them.
#[repr(C, align(128))]
pub struct Vm {
    kvm: Kvm,
    pub any: Any,
}

impl Vm {
    /// Writes a VM without tables to `vm`; returns the platform for them.
    ///
    /// # Safety
    /// `vm` is memory of [`slat_kvm_bytes`], aligned to 128. Its tables are destroyed before C
    /// frees it.
    pub unsafe fn begin<'a>(vm: *mut Self, kvm: Kvm) -> (&'a mut Any, &'static Kvm) {
        // SAFETY: the caller's contract. The platform lives, where it lies, as long as the tables.
        unsafe {
            vm.write(Self { kvm, any: Any::None });
            (&mut (*vm).any, &*(&raw const (*vm).kvm))
        }
    }
}

pub fn code(result: Result<(), Errno>) -> c_int {
    result.map_or_else(|errno| errno.0, |()| 0)
}

/// Returns a source of table pages from a cache of KVM's.
pub fn source(mc: *mut c_void) -> impl FnMut() -> Option<Frame> + Send {
    // A number may go to another thread, as the type demands; none does.
    let mc = mc.expose_provenance();
    // SAFETY: the cache is the calling thread's, and its pages are nobody's.
    move || unsafe { Frame::from_hpa(Hpa(slat_c_take(core::ptr::with_exposed_provenance_mut(mc)))) }
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_bytes() -> usize {
    size_of::<Vm>()
}

/// Gives back up to `most` tables; returns whether all are gone but the root.
///
/// # Safety
/// No CPU has the tables loaded, and no other thread knows them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_kvm_destroy_some(vm: &mut Vm, most: usize) -> bool {
    let any = core::mem::replace(&mut vm.any, Any::None);
    // SAFETY: the caller's contract.
    let (any, all) = unsafe { any.destroy_some(most) };
    vm.any = any;
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
    core::mem::replace(&mut vm.any, Any::None).destroy();
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
pub extern "C" fn slat_kvm_wrprotect(vm: &Vm, addr: u64, size: u64) -> c_int {
    live!(vm, stage2 => code(stage2.wrprotect(addr, size)))
}

#[unsafe(no_mangle)]
pub extern "C" fn slat_kvm_age(vm: &Vm, addr: u64, size: u64, clear: bool) -> bool {
    live!(vm, stage2 => stage2.age(addr, size, clear))
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
    // SAFETY: the caller's contract. Links of all formats of an architecture are read in the
    // same way.
    unsafe { RetiredTables::<crate::Links>::from_words(*words).free(&kvm) };
}
