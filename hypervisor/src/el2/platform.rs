//! What the engine asks of the machine: TLB invalidation, barriers, cache maintenance, table pages.
//! All of it that is special about EL2 is here.

use super::cpu;
use super::guest::Stage2;
use super::private::Keeper;
use alloc::alloc::{alloc, dealloc};
use core::alloc::Layout;
use core::arch::asm;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, Ordering};
use slat::format::arm64::id::IdRegisters;
use slat::format::arm64::tlbi::{Instruction, Tlbi};
use slat::{
    BreakBeforeMake, Frame, Grace, Hpa, Invalidation, Maintenance, Platform, Seat, Slot, Vmid,
};
use slat_guest::{Host, NoHooks, PrivateHooks};
use slat_hypervisor::options::{Fault, Options};

/// Threads that walk tables: a vCPU each, and the manager, which has a second seat for what it does
/// to the tables themselves.
const SEATS: usize = Options::MOST_VCPUS as usize + 2;

/// Instructions by address at most, before the whole guest is invalidated. Each stops all CPUs for
/// a moment where they are emulated.
const MOST_BY_ADDRESS: u64 = 16;

/// The machine under the guest's tables.
#[derive(Debug)]
pub struct El2 {
    grace: Grace<[Seat; SEATS]>,
    tlbi: Tlbi,
    break_before_make: BreakBeforeMake,
    /// FEAT_S2FWB: nothing gets past the data caches.
    forced_write_back: bool,
    fault: Fault,
    /// For a guest with private memory.
    keeper: Option<Keeper>,
    /// The manager is clearing the log: for [`Fault::KeepDirty`].
    pub clearing: AtomicBool,
}

/// The ID registers of this CPU. Those of QEMU's `virt` machine are all the same.
pub fn id_registers() -> IdRegisters {
    IdRegisters {
        mmfr0: cpu::read!("id_aa64mmfr0_el1"),
        mmfr1: cpu::read!("id_aa64mmfr1_el1"),
        mmfr2: cpu::read!("id_aa64mmfr2_el1"),
        isar0: cpu::read!("id_aa64isar0_el1"),
    }
}

impl El2 {
    /// The machine as its ID registers have it, and a fault on purpose.
    pub fn new(id: &IdRegisters, format: &Stage2, fault: Fault, keeper: Option<Keeper>) -> Self {
        let tlbi = Tlbi { most_by_address: MOST_BY_ADDRESS, ..id.tlbi(format) };
        Self {
            grace: Grace::new([const { Seat::new() }; SEATS]),
            tlbi: if fault == Fault::Local { tlbi.local() } else { tlbi },
            // `vcpu` handles conflicts.
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

    /// Who keeps account of private memory.
    pub fn keeper(&self) -> Option<&Keeper> {
        self.keeper.as_ref()
    }

    /// Writes back and forgets what data caches hold of a piece of memory; with FEAT_S2FWB, where
    /// nothing gets past them, just enough for it to be `fetched`. By address, through EL2's own
    /// mapping: a line is the same under every address of its memory.
    pub fn clean(&self, memory: Hpa, bytes: u64, fetched: bool) {
        let ctr = cpu::read!("ctr_el0");
        let lines = memory.0..memory.0 + bytes;
        let lines = lines.step_by(4 << (ctr >> CTR_DATA_LINE_SHIFT & 0xf));
        // SAFETY: what is in memory, seen from anywhere, stays.
        unsafe {
            if !self.forced_write_back {
                lines.for_each(|line| asm!("dc civac, {}", in(reg) line, options(nostack)));
            } else if fetched && ctr & CTR_IDC == 0 {
                lines.for_each(|line| asm!("dc cvau, {}", in(reg) line, options(nostack)));
            }
            asm!("dsb ish", options(nostack));
        }
    }

    /// Forgets all that this CPU holds of the guest: before it loads another root for the same
    /// VMID, and after a TLB conflict.
    pub fn forget_all(&self, vmid: Vmid) {
        let all = Invalidation { vmid, range: None, leaf: None, tables: true };
        self.tlbi.local().sequence(&all).for_each(execute);
    }
}

/// CTR_EL0: the smallest line of data caches, as a power of two of words; whether data need not be
/// cleaned, and instructions not be invalidated, to be fetched.
const CTR_DATA_LINE_SHIFT: u32 = 16;
const CTR_IDC: u64 = 1 << 28;
const CTR_DIC: u64 = 1 << 29;
/// Where VTTBR_EL2 has the VMID.
const VTTBR_VMID: u32 = 48;

/// Calls `invalidate` with this VMID in VTTBR_EL2, which says whose entries instructions are about.
/// Nothing of the guest runs on this CPU meanwhile.
fn with_vmid(vmid: Vmid, invalidate: impl FnOnce()) {
    let loaded = load_vmid(vmid);
    invalidate();
    load_vmid(loaded);
}

/// Loads a VMID beside the root that is loaded; returns the one before.
pub fn load_vmid(vmid: Vmid) -> Vmid {
    let loaded = cpu::read!("vttbr_el2");
    let wanted = loaded & !(0xffff << VTTBR_VMID) | u64::from(vmid.0) << VTTBR_VMID;
    if wanted != loaded {
        cpu::write!("vttbr_el2", wanted);
        cpu::isb();
    }
    Vmid((loaded >> VTTBR_VMID) as u16)
}

/// Executes one instruction of a sequence, about the VMID in VTTBR_EL2.
fn execute(instruction: Instruction) {
    macro_rules! plain {
        ($text:literal) => {
            // SAFETY: a barrier, or an invalidation of the guest's translations: it removes what is
            // cached, and changes nothing else.
            unsafe { asm!($text, options(nostack)) }
        };
    }
    macro_rules! with {
        ($text:literal, $operand:expr) => {
            // SAFETY: as above.
            unsafe { asm!(concat!($text, ", {}"), in(reg) $operand, options(nostack)) }
        };
    }
    match instruction {
        Instruction::DsbIshst => plain!("dsb ishst"),
        Instruction::DsbIsh => plain!("dsb ish"),
        Instruction::DsbNshst => plain!("dsb nshst"),
        Instruction::DsbNsh => plain!("dsb nsh"),
        Instruction::Isb => plain!("isb"),
        Instruction::Ipas2e1is(x) => with!("tlbi ipas2e1is", x),
        Instruction::Ipas2le1is(x) => with!("tlbi ipas2le1is", x),
        // RIPAS2E1IS, RIPAS2LE1IS, and those without IS: assemblers know them with FEAT_TLBIRANGE
        // only.
        Instruction::Ripas2e1is(x) => with!("sys #4, c8, c0, #2", x),
        Instruction::Ripas2le1is(x) => with!("sys #4, c8, c0, #6", x),
        Instruction::Vmalle1is => plain!("tlbi vmalle1is"),
        Instruction::Vmalls12e1is => plain!("tlbi vmalls12e1is"),
        Instruction::Ipas2e1(x) => with!("tlbi ipas2e1", x),
        Instruction::Ipas2le1(x) => with!("tlbi ipas2le1", x),
        Instruction::Ripas2e1(x) => with!("sys #4, c8, c4, #2", x),
        Instruction::Ripas2le1(x) => with!("sys #4, c8, c4, #6", x),
        Instruction::Vmalle1 => plain!("tlbi vmalle1"),
        Instruction::Vmalls12e1 => plain!("tlbi vmalls12e1"),
    }
}

/// What a deliberate fault makes of an instruction. For the whole guest there is one instruction
/// for both stages: without stage 2 it is that of stage 1, without stage 1 there is none.
fn spoiled(fault: Fault, instruction: Instruction) -> Option<Instruction> {
    use Instruction::*;
    match (fault, instruction) {
        (Fault::NoTlbi, DsbIshst | DsbIsh | DsbNshst | DsbNsh | Isb) => Some(instruction),
        (Fault::NoTlbi, _) => None,
        // QEMU 7.2 broadcasts this one whatever its scope.
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
// 1. The buddy allocator returns blocks of that size and alignment, nobody else's until `dealloc`.
// 2. EL2 maps all RAM at its own address, writable, for good: the address is the pointer.
// 3. The sequence is the one for this CPU's features, on all CPUs of the inner shareable domain,
//    and ends with the barrier that waits for it; a deliberate fault breaks this promise on
//    purpose.
// 4. Both are fields that nobody changes.
// 5. `fill` is the one that is provided.
// 6. Nothing here panics but on sizes that are no powers of two, which the engine does not ask for.
unsafe impl Platform for El2 {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        // SAFETY: the size is not 0. Alignment and ownership are those of `Frame::from_hpa`'s
        // contract.
        unsafe { Frame::from_hpa(Hpa(alloc(layout(bytes)) as u64)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the frame is from `allocate`, with that size, and nobody reaches it any more.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }

    fn slots(&self, table: Hpa) -> NonNull<Slot> {
        NonNull::new(table.0 as *mut Slot).expect("no table is at address 0")
    }

    fn publish(&self) {
        // An entry that was invalid is in no TLB: only the store has to be seen by walks. No ISB,
        // since this CPU returns to the guest by an exception return before it uses the entry.
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

    fn grace(&self) -> &Grace {
        &self.grace
    }

    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        if self.fault == Fault::NoMaintenance {
            return;
        }
        let fetched = what == Maintenance::Instructions;
        // What it cannot reach it has not written since that was cleaned, before the guest ran.
        if !self.keeper().is_some_and(|keeper| keeper.keeps(memory)) {
            self.clean(memory, bytes, fetched);
        }
        if fetched {
            self.forget_instructions();
        }
    }
}

impl Host for El2 {
    fn now(&self) -> u64 {
        cpu::now()
    }

    fn forget_instructions(&self) {
        if cpu::read!("ctr_el0") & CTR_DIC == 0 {
            // SAFETY: instructions are fetched again. By address would not reach the aliases of a
            // cache that is indexed by virtual addresses.
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
