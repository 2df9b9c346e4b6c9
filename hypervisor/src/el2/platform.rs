//! The platform of `slat` at EL2: TLB invalidation, barriers, cache maintenance and table pages.

use super::cpu;
use super::execute::execute;
use super::keeper::Keeper;
use super::memory::Stage2;
use alloc::alloc::{alloc, dealloc};
use core::alloc::Layout;
use core::arch::asm;
use core::num::NonZeroUsize;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};
use slat::format::arm64::id::IdRegisters;
use slat::format::arm64::tlbi::{Instruction, Tlbi};
use slat::{
    BreakBeforeMake, Frame, Hpa, Invalidation, Maintenance, Platform, Pte, ReaderSlot, Readers,
    Vmid,
};
use slat_guest::{Host, NoHooks, PrivateHooks};
use slat_hypervisor::options::{Fault, Options};

/// Slots of threads that walk tables: one for each vCPU, and two for the manager, which also works
/// on the tables directly.
const READERS: usize = Options::MOST_VCPUS as usize + 2;

/// Largest number of invalidations by address; beyond it the whole guest is invalidated. In an
/// emulator, each such instruction stops all CPUs for a moment.
const MOST_BY_ADDRESS: u64 = 16;

/// The machine that the guest's tables are for.
#[derive(Debug)]
pub struct El2 {
    readers: Readers<[ReaderSlot; READERS]>,
    tlbi: Tlbi,
    break_before_make: BreakBeforeMake,
    /// FEAT_S2FWB: the guest's accesses always use the data caches.
    forced_write_back: bool,
    fault: Fault,
    /// Accounts of private memory, for a guest that has it.
    keeper: Option<Keeper>,
    /// Set while the manager clears the log, for [`Fault::KeepDirty`].
    pub clearing: AtomicBool,
}

/// Returns the ID registers of this CPU. All CPUs of QEMU's `virt` machine have the same values.
pub fn id_registers() -> IdRegisters {
    IdRegisters {
        mmfr0: cpu::read!("id_aa64mmfr0_el1"),
        mmfr1: cpu::read!("id_aa64mmfr1_el1"),
        mmfr2: cpu::read!("id_aa64mmfr2_el1"),
        isar0: cpu::read!("id_aa64isar0_el1"),
        midr: cpu::read!("midr_el1"),
    }
}

impl El2 {
    /// Creates the platform from the ID registers, with a deliberate fault.
    pub fn new(id: &IdRegisters, format: &Stage2, fault: Fault, keeper: Option<Keeper>) -> Self {
        let tlbi = Tlbi { most_by_address: MOST_BY_ADDRESS, ..id.tlbi(format) };
        Self {
            readers: Readers::new([const { ReaderSlot::new() }; READERS]),
            tlbi: if fault == Fault::Local { tlbi.local() } else { tlbi },
            // `true`, because `vcpu` handles TLB conflicts.
            break_before_make: match fault {
                Fault::NoBreak => BreakBeforeMake::Never,
                _ => id.break_before_make(true),
            },
            forced_write_back: id.forced_write_back(),
            fault,
            keeper,
            clearing: AtomicBool::new(false),
        }
    }

    /// Returns the accounts of private memory.
    pub fn keeper(&self) -> Option<&Keeper> {
        self.keeper.as_ref()
    }

    /// Cleans and invalidates data caches for a range of memory. With FEAT_S2FWB, where the guest
    /// always uses the caches, it only cleans the range to the point of unification, and only if it
    /// is to be `fetched`. It works by EL2's own addresses: a data cache line is the same under
    /// every address of its memory.
    pub fn clean(&self, memory: Hpa, bytes: u64, fetched: bool) {
        let ctr = cpu::read!("ctr_el0");
        let lines = memory.0..memory.0 + bytes;
        let lines = lines.step_by(4 << (ctr >> CTR_DATA_LINE_SHIFT & 0xf));
        // SAFETY: cleaning, with or without invalidation, loses no data: every observer sees the
        // same content of memory as before.
        unsafe {
            if !self.forced_write_back {
                lines.for_each(|line| asm!("dc civac, {}", in(reg) line, options(nostack)));
            } else if fetched && ctr & CTR_IDC == 0 {
                lines.for_each(|line| asm!("dc cvau, {}", in(reg) line, options(nostack)));
            }
            asm!("dsb ish", options(nostack));
        }
    }

    /// Invalidates all entries of a VMID in this CPU's TLB. This is needed when it loads another
    /// root for the same VMID, and after a TLB conflict.
    pub fn forget_all(&self, vmid: Vmid) {
        let all = Invalidation { vmid, range: None, leaf: None, tables: true };
        self.tlbi.local().sequence(&all).for_each(execute);
    }
}

/// Fields of CTR_EL0: the smallest data cache line, as a power of two in words; whether a fetch
/// needs no cleaning of data caches; and whether it needs no invalidation of instruction caches.
const CTR_DATA_LINE_SHIFT: u32 = 16;
const CTR_IDC: u64 = 1 << 28;
const CTR_DIC: u64 = 1 << 29;
/// The fields of MPIDR_EL1 by which CPUs differ.
const MPIDR_AFFINITY: u64 = 0xff_00ff_ffff;
/// Position of the VMID in VTTBR_EL2.
const VTTBR_VMID: u32 = 48;

/// Calls `invalidate` with this VMID in VTTBR_EL2, because invalidations act on the VMID that is
/// loaded. This CPU runs nothing of the guest meanwhile.
fn with_vmid(vmid: Vmid, invalidate: impl FnOnce()) {
    let loaded = load_vmid(vmid);
    invalidate();
    load_vmid(loaded);
}

/// Loads a VMID, and keeps the root that is loaded. Returns the VMID before.
pub fn load_vmid(vmid: Vmid) -> Vmid {
    let loaded = cpu::read!("vttbr_el2");
    let wanted = loaded & !(0xffff << VTTBR_VMID) | u64::from(vmid.0) << VTTBR_VMID;
    if wanted != loaded {
        cpu::write!("vttbr_el2", wanted);
        cpu::isb();
    }
    Vmid((loaded >> VTTBR_VMID) as u16)
}

/// Returns the instruction that a deliberate fault executes in place of another, if any. One
/// instruction invalidates both stages of the whole guest: without stage 2, that of stage 1
/// replaces it; without stage 1, it is left out.
fn spoiled(fault: Fault, instruction: Instruction) -> Option<Instruction> {
    use Instruction::*;
    match (fault, instruction) {
        (Fault::NoTlbi, DsbIshst | DsbIsh | DsbNshst | DsbNsh | Isb) => Some(instruction),
        (Fault::NoTlbi, _) => None,
        // QEMU 7.2 broadcasts this instruction although it is local.
        (Fault::Local, Vmalls12e1) => Some(Vmalle1),
        (Fault::NoStage1, Vmalle1 | Vmalle1is | Vmalls12e1 | Vmalls12e1is) => None,
        (Fault::NoStage2, Vmalls12e1is) => Some(Vmalle1is),
        (Fault::NoStage2, Ipas2e1is(_) | Ipas2le1is(_) | Ripas2e1is(_) | Ripas2le1is(_)) => None,
        (Fault::NoBarrier, DsbIsh | DsbNsh | Isb) => None,
        _ => Some(instruction),
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).expect("the engine asks for powers of two")
}

// SAFETY:
// 1. The buddy allocator returns blocks of that size and alignment, which have no other user until
//    `dealloc`.
// 2. EL2 maps all RAM of the heap at its own address, writable, and never changes that: the address
//    is the pointer.
// 3. The sequence is the one for this CPU's features. It acts on all CPUs of the inner shareable
//    domain, and ends with the barrier that waits for it. A deliberate fault breaks this promise on
//    purpose.
// 4. Both are fields that never change.
// 5. `fill` is the provided method.
// 6. No method here panics, except for sizes that are not powers of two, which `slat` does not ask
//    for.
unsafe impl Platform for El2 {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        // SAFETY: the size is not 0. The block is aligned and owned as the contract of
        // `Frame::from_hpa` requires.
        unsafe { Frame::from_hpa(Hpa(alloc(layout(bytes)) as u64)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the caller promises that the frame is from `allocate` with that size, and that
        // nothing reaches it any more.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("no table is at address 0")
    }

    fn publish(&self) {
        // No TLB has an entry that was invalid, so only walks have to see the store. An ISB is not
        // needed, because this CPU uses the entry only after an exception return to the guest.
        aarch64_cpu::asm::barrier::dsb(aarch64_cpu::asm::barrier::ISHST);
    }

    fn invalidate(&self, what: &Invalidation) {
        if self.fault == Fault::KeepDirty && self.clearing.load(Ordering::Relaxed) {
            return;
        }
        let wrong = self.fault == Fault::WrongVmid;
        let vmid = Vmid(if wrong { what.vmid.0 ^ 0b10 } else { what.vmid.0 });
        with_vmid(vmid, || {
            let sequence = self.tlbi.sequence(what);
            sequence.filter_map(|instruction| spoiled(self.fault, instruction)).for_each(execute);
        });
    }

    fn invalidate_local(&self, what: &Invalidation) {
        with_vmid(what.vmid, || self.tlbi.local().sequence(what).for_each(execute));
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.break_before_make
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }

    fn thread(&self) -> Option<NonZeroUsize> {
        NonZeroUsize::new((cpu::read!("mpidr_el1") & MPIDR_AFFINITY) as usize + 1)
    }

    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        if self.fault == Fault::NoMaintenance {
            return;
        }
        let fetched = what == Maintenance::Instructions;
        // The hypervisor cannot reach private memory. It was cleaned before the guest ran, and the
        // hypervisor has not written to it since.
        if !self.keeper().is_some_and(|keeper| keeper.keeps(memory)) {
            self.clean(memory, bytes, fetched);
        }
        if fetched {
            self.invalidate_instructions();
        }
    }
}

impl Host for El2 {
    fn now(&self) -> u64 {
        cpu::now()
    }

    fn invalidate_instructions(&self) {
        if cpu::read!("ctr_el0") & CTR_DIC == 0 {
            // SAFETY: it only makes CPUs fetch instructions again. An invalidation by address would
            // not reach aliases in a cache that is indexed by virtual addresses.
            unsafe { asm!("ic ialluis", "dsb ish", "isb", options(nostack)) }
        }
    }

    fn private_hooks(&self) -> &dyn PrivateHooks {
        match &self.keeper {
            Some(keeper) => keeper,
            None => &NoHooks,
        }
    }

    fn wait(&self) {
        cpu::relax();
    }
}
