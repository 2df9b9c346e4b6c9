//! The interface to the machine. Every side effect beyond a page-table entry goes through it.

use crate::addr::Hpa;
use crate::invalidation::{BreakBeforeMake, Invalidation};
use crate::pte::{Frame, Pte};
use crate::readers::Readers;
use core::num::NonZeroUsize;
use core::ptr::NonNull;

/// The machine under the tables: a hypervisor, a simulator, a benchmark.
///
/// Threads that share tables share it, so it is `Sync` if there is more than one thread. No call of
/// the engine needs interrupts to be off; a thread that is interrupted inside tables keeps unlinked
/// tables allocated meanwhile.
///
/// # Safety
/// Implementations promise:
/// 1. [`Platform::allocate`] returns frames of the size asked for, aligned to it, that no other
///    code uses until they are given back.
/// 2. [`Platform::entries`] of an address inside such a frame is a pointer to that memory, valid
///    for reads and writes of the whole frame until it is given back, the same at every call. The
///    hypervisor's own mapping of it is Normal memory, cacheable as its walkers use it: tables
///    change by compare-and-swap (Arm: with the MMU off, exclusive accesses are not defined).
/// 3. [`Platform::invalidate`] returns only when no CPU can use a translation, or a walk-cache
///    entry, that the invalidation names.
/// 4. [`Platform::readers`] and [`Platform::break_before_make`] are the same at every call.
/// 5. [`Platform::fill`] stores exactly the sequence that it is asked for.
/// 6. No method unwinds: its caller may hold markers, or owe an invalidation.
pub unsafe trait Platform {
    /// Allocates a frame of `bytes` bytes (a power of two, at least 4 KiB), aligned to its size,
    /// with arbitrary content; `None` when memory is short.
    fn allocate(&self, bytes: usize) -> Option<Frame>;

    /// Takes back a frame.
    ///
    /// # Safety
    /// [`Platform::allocate`] of this platform returned the frame for the same `bytes`, and no
    /// software or hardware reaches it any more.
    unsafe fn free(&self, frame: Frame, bytes: usize);

    /// Returns a pointer to the entries of the table at `table`.
    fn entries(&self, table: Hpa) -> NonNull<Pte>;

    /// Makes all earlier stores to tables visible to the MMU's walkers (Arm: `dsb ishst`; RISC-V,
    /// where a hart may cache invalid entries: [`riscv`](crate::format::riscv)).
    fn publish(&self);

    /// Makes earlier stores to tables visible, invalidates, and waits for completion on every CPU
    /// that may hold entries of the guest. Arm: the instructions of
    /// [`tlbi`](crate::format::arm64::tlbi), which reach all CPUs. x86:
    /// [INVEPT](crate::format::ept::invept), or a flush of the [ASID](crate::format::npt::asid).
    /// RISC-V: [HFENCE.GVMA](crate::format::riscv::hfence).
    ///
    /// Where TLB entries are tagged by EPT root, ASID or VMID, CPUs that ran the guest earlier may
    /// hold entries as well, until they invalidate. The platform interrupts them too, or notes that
    /// such a CPU has to invalidate before it enters the guest again.
    ///
    /// Other walkers of the tables may hold entries, too: an IOMMU in its TLB and walk caches,
    /// devices by ATS. The platform invalidates and waits for them as for CPUs, because the engine
    /// hands out unmapped memory when this returns.
    fn invalidate(&self, what: &Invalidation);

    /// Invalidates the translations that `what` names on the *calling* CPU only, and returns once
    /// that has completed. [`LocalFlush::flush_local`](crate::LocalFlush::flush_local) calls it
    /// after a fault of this CPU got a right, or found it given, and before the guest goes on. The
    /// walks that follow see all earlier stores to tables that the caller knows of, also other
    /// threads'.
    ///
    /// It is called only where [`Format::KEEPS_FAULTING`](crate::Format::KEEPS_FAULTING), and never
    /// for unlinked tables. The default is [`Platform::invalidate`], which is right everywhere, but
    /// waits for all CPUs at each fault. Arm: the instructions of
    /// [`tlbi`](crate::format::arm64::tlbi) with
    /// [`Scope::Local`](crate::format::arm64::tlbi::Scope::Local). RISC-V: HFENCE.GVMA on this hart
    /// ([`hfence`](crate::format::riscv::hfence)); without Svvptc a hart may also cache an invalid
    /// entry above the page, so it executes HFENCE.GVMA without an address before it runs the guest
    /// again, for any result of the fault. On x86 and Power it is not called.
    fn invalidate_local(&self, what: &Invalidation) {
        self.invalidate(what);
    }

    /// Returns which changes of a live entry's size this machine's CPUs allow without a break.
    fn break_before_make(&self) -> BreakBeforeMake;

    /// Returns the reader slots of the threads that walk the tables of this platform's guests.
    fn readers(&self) -> &Readers;

    /// Makes guest memory coherent with the caches, before the guest sees it or after the guest
    /// used it uncached. The default does nothing; a platform whose machine needs maintenance
    /// implements it.
    ///
    /// Operations call it before they publish a leaf, or give one the right to execute, where the
    /// leaf's attributes require it ([`Guard::map`](crate::Guard::map)); so does
    /// [`Guard::clean_caches`](crate::Guard::clean_caches).
    #[inline(always)]
    fn maintain(&self, _memory: Hpa, _bytes: u64, _what: Maintenance) {}

    /// Returns a number that no other thread, or CPU, has at the same time; `None` if the platform
    /// does not tell threads apart.
    ///
    /// Only debug builds call this: a thread that is inside tables and would wait until all threads
    /// have left them panics with a message, where a release build waits for ever
    /// ([`Tables::caller_is_inside`](crate::Tables::caller_is_inside)). The default tells the
    /// threads of a process apart, with the feature `std`; otherwise it is `None`. A platform
    /// without an operating system returns the number of the CPU plus 1. A guard stays with the
    /// thread that entered.
    fn thread(&self) -> Option<NonZeroUsize> {
        crate::sync::thread()
    }

    /// Fills exclusively owned entries with `first`, `first + step`, `first + 2 * step`, ...
    ///
    /// An implementation may use vector or streaming stores. It orders them before the calling
    /// thread's next atomic read-modify-write with release, which links the table, and before what
    /// follows [`Platform::publish`] (x86: a locked instruction orders streaming stores as well, so
    /// no fence is needed here).
    #[inline]
    fn fill(&self, ptes: &mut [Pte], first: u64, step: u64) {
        #[cfg(not(any(loom, shuttle)))]
        let ptes = Pte::words(ptes);
        let mut raw = first;
        for pte in ptes {
            #[cfg(not(any(loom, shuttle)))]
            {
                *pte = raw;
            }
            #[cfg(any(loom, shuttle))]
            pte.set(raw);
            raw = raw.wrapping_add(step);
        }
    }
}

/// Returns whether two references are to one platform. Platforms without state are the same
/// wherever they are: their methods return the same at every call, so they cannot differ.
#[inline(always)]
pub(crate) fn same<P>(one: &P, other: &P) -> bool {
    size_of::<P>() == 0 || core::ptr::eq(one, other)
}

/// The caches to clean or invalidate for a range of memory. Translations that an IOMMU or a device
/// holds are not part of it: [`Platform::invalidate`] covers them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Maintenance {
    /// Data, cleaned and invalidated to the point of coherency: the guest may access the memory
    /// with another cacheability than the host (Arm: `dc civac`; not needed with FEAT_S2FWB).
    Data,
    /// Data as above, and instructions: the guest may fetch what the host has written (Arm: also
    /// `ic`; not needed with CTR_EL0.DIC; x86: nothing).
    Instructions,
}
