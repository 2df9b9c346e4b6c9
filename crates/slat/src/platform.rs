//! What the engine asks of the machine. Every side effect beyond a slot goes through here.

use crate::addr::Hpa;
use crate::grace::Grace;
use crate::shootdown::Invalidation;
use crate::table::{Frame, Slot};
use core::ptr::NonNull;

/// The machine under the tables: a hypervisor, a simulator, a benchmark.
///
/// # Safety
/// Implementations promise:
/// 1. [`Platform::allocate`] returns frames of the size asked for, aligned to it, that nobody
///    else uses until they are given back.
/// 2. [`Platform::slots`] of an address inside such a frame is a pointer to that memory, valid for
///    reads and writes of the whole frame until it is given back, the same at every call.
/// 3. [`Platform::invalidate`] returns only when no CPU can use a translation, or a walk-cache
///    entry, that the invalidation names.
/// 4. [`Platform::grace`] and [`Platform::break_before_make`] are the same at every call.
/// 5. [`Platform::fill`] stores exactly the sequence that it is asked for.
/// 6. No method unwinds: its caller may hold markers, or owe an invalidation.
pub unsafe trait Platform {
    /// A frame of `bytes` bytes (a power of two, of 4 KiB at least) aligned to its size, its
    /// content arbitrary; `None` when memory is short.
    fn allocate(&self, bytes: usize) -> Option<Frame>;

    /// Takes back a frame.
    ///
    /// # Safety
    /// [`Platform::allocate`] of this platform returned the frame for the same `bytes`, and
    /// nobody, software or hardware, reaches it any more.
    unsafe fn free(&self, frame: Frame, bytes: usize);

    /// The slots of the table at `table`.
    fn slots(&self, table: Hpa) -> NonNull<Slot>;

    /// Makes all earlier stores to tables visible to the walkers of the MMU (Arm: `dsb ishst`;
    /// RISC-V, where a hart may hold what was invalid: [`riscv`](crate::format::riscv)).
    fn publish(&self);

    /// Makes earlier stores to tables visible, invalidates, and waits for completion on every CPU
    /// that may hold entries of the guest. Arm: the instructions of
    /// [`tlbi`](crate::format::arm64::tlbi), which reach all of them. x86:
    /// [INVEPT](crate::format::ept::invept), or a flush of the [ASID](crate::format::npt::asid);
    /// RISC-V: [HFENCE.GVMA](crate::format::riscv::hfence). Where entries are tagged, by EPT root,
    /// ASID or VMID, these are not only the CPUs that run the guest now but all that ran it since
    /// they last invalidated it: such a CPU may also be noted, and invalidate before it enters the
    /// guest again ([`Ran`](crate::Ran)).
    ///
    /// Whoever else walks the tables may hold entries, too: an IOMMU its TLB and walk caches,
    /// devices what they were given by ATS. They are invalidated and waited for as CPUs are: memory
    /// that was unmapped is handed out when this returns.
    fn invalidate(&self, what: &Invalidation);

    /// Makes the *calling* CPU forget the translations that `what` names, and returns once it has:
    /// after a fault of its own was given a right, or found it given, and before its guest goes on
    /// ([`Granted::flush_local`](crate::Granted::flush_local)). Earlier stores to tables, of any
    /// thread, that the caller knows of are seen by the walks that follow.
    ///
    /// Called only where [`Format::KEEPS_FAULTING`](crate::Format::KEEPS_FAULTING), never with
    /// tables unlinked. The default is [`Platform::invalidate`], which is right everywhere and
    /// waits for all CPUs, at each fault. Arm: the instructions of
    /// [`tlbi`](crate::format::arm64::tlbi) with
    /// [`Scope::Local`](crate::format::arm64::tlbi::Scope::Local). RISC-V: HFENCE.GVMA on this hart
    /// ([`hfence`](crate::format::riscv::hfence)); without Svvptc a slot above the page may be
    /// cached as invalid as well, so HFENCE.GVMA without an address comes before the guest is run
    /// again, whatever the fault came to. x86 and Power: nothing, as they are not asked.
    fn invalidate_local(&self, what: &Invalidation) {
        self.invalidate(what);
    }

    /// Which changes of a live entry's size this machine's CPUs allow without a break.
    fn break_before_make(&self) -> BreakBeforeMake;

    /// Who is walking the tables of this platform's guests.
    fn grace(&self) -> &Grace;

    /// Makes guest memory coherent, before it becomes visible to the guest or after the guest used
    /// it past the caches. Does nothing unless a platform whose machine needs it says so.
    ///
    /// Called by [`Guard::map`](crate::Guard::map) before a leaf is published, and by
    /// [`Guard::flush`](crate::Guard::flush).
    #[inline(always)]
    fn maintain(&self, _memory: Hpa, _bytes: u64, _what: Maintenance) {}

    /// Fills exclusively owned slots with `first`, `first + step`, `first + 2 * step`, ...
    ///
    /// An implementation may use vector or streaming stores. They must be ordered before the
    /// calling thread's next atomic read-modify-write with release, which links what was filled,
    /// and before what follows [`Platform::publish`] (x86: a locked instruction orders streaming
    /// stores as well, so no fence is needed here).
    #[inline]
    fn fill(&self, slots: &mut [Slot], first: u64, step: u64) {
        #[cfg(not(any(loom, shuttle)))]
        let slots = Slot::words(slots);
        let mut raw = first;
        for slot in slots {
            #[cfg(not(any(loom, shuttle)))]
            {
                *slot = raw;
            }
            #[cfg(any(loom, shuttle))]
            slot.set(raw);
            raw = raw.wrapping_add(step);
        }
    }
}

/// Whether two references are to one platform. One without state is the same wherever it lies: what
/// its methods answer, the same at every call, cannot differ.
#[inline(always)]
pub(crate) fn same<P>(one: &P, other: &P) -> bool {
    size_of::<P>() == 0 || core::ptr::eq(one, other)
}

/// What caches are to forget of a piece of memory. Translations that an IOMMU or a device holds are
/// not among them: those are [`Platform::invalidate`]'s.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Maintenance {
    /// Data, written back and forgotten, to the point of coherency: the guest may access the
    /// memory with another cacheability than the host (Arm: `dc civac`; not with FEAT_S2FWB).
    Data,
    /// Data as above, and instructions: the guest may fetch what the host has written (Arm:
    /// also `ic`; not with CTR_EL0.DIC; x86: nothing).
    Instructions,
}

/// Which changes of size a live entry may make without being invalid in between.
///
/// Only changes of *size*: a new address or memory type always breaks (Arm: D8.16.1,
/// "Using break-before-make when updating translation table entries").
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum BreakBeforeMake {
    /// Every change breaks: FEAT_BBM level 0, Power. Level 1 too: a block with its nT bit may be
    /// walked at every access or fault as a broken one does, as the CPU likes, and the bit costs
    /// one more invalidation.
    Always,
    /// FEAT_BBM level 2, declared only by a platform that handles the TLB conflict abort.
    ConflictHandled,
    /// FEAT_BBM level 3, x86, RISC-V: no break, no conflict.
    Never,
}

impl BreakBeforeMake {
    /// Whether a block has to be invalid before a table of the same translations replaces it.
    pub const fn breaks_size_change(self) -> bool {
        matches!(self, Self::Always)
    }
}
