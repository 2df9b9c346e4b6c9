//! A CPU at EL2: its guest, and the engine's platform.

use crate::claims::{Does, Outcome, Stop, Why, put};
use crate::machine::Memory;
use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::ptr::NonNull;
use slat::format::arm64::Arm64;
use slat::format::arm64::fault::{Abort, Kind};
use slat::format::arm64::id::IdRegisters;
use slat::format::arm64::tlbi::Tlbi;
use slat::{
    BreakBeforeMake, Frame, Gpa, GuestRoot, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers,
};

global_asm!(include_str!("el2.s"));

unsafe extern "C" {
    fn enter(pc: u64, x0: u64, x1: u64, hcr: u64) -> u64;
    static guest_code: [u64; 14];
}

/// The pieces of `guest_code`, by their offset.
const LOAD: u64 = 0;
const STORE: u64 = 16;
const JUMP: u64 = 32;
/// A call of the hypervisor.
pub const CALL: u64 = 48;
const LOOP: u64 = 64;

macro_rules! read {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: reads a register, which changes nothing.
        unsafe { core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nomem)) };
        value
    }};
}
pub(super) use read;

macro_rules! write {
    ($name:literal, $value:expr) => {{
        let value: u64 = $value;
        // SAFETY: a register that concerns guests alone; the firmware has none.
        unsafe { asm!(concat!("msr ", $name, ", {}"), "isb", in(reg) value) };
    }};
}

/// HCR_EL2: AArch64, stage 2, data cached although stage 1 is off, memory types of stage 2 alone.
const HCR_RW: u64 = 1 << 31;
const HCR_VM: u64 = 1 << 0;
const HCR_DC: u64 = 1 << 12;
const HCR_FWB: u64 = 1 << 46;
/// SCTLR_EL1: what is reserved as 1; the MMU is off.
const SCTLR_EL1: u64 = 0x30d0_0800;
/// CTR_EL0.DminLine: words of the smallest line of a data cache, as a power of two.
const DATA_LINE: u32 = 16;

/// Returns the registers that say what the CPU has.
pub fn id_registers() -> IdRegisters {
    IdRegisters {
        mmfr0: read!("id_aa64mmfr0_el1"),
        mmfr1: read!("id_aa64mmfr1_el1"),
        mmfr2: read!("id_aa64mmfr2_el1"),
        isar0: read!("id_aa64isar0_el1"),
        midr: read!("midr_el1"),
    }
}

/// Loads a guest's tables on this CPU.
pub fn load_root<const SHIFT: u32, const WIDE: bool>(
    root: &GuestRoot<Arm64<SHIFT, WIDE>>,
    id: &IdRegisters,
) {
    write!("vtcr_el2", root.vtcr(id).expect("the CPU's own format"));
    write!("vttbr_el2", root.vttbr(id).expect("the CPU's own format"));
    write!("sctlr_el1", SCTLR_EL1);
    // An exception within the guest ends it, by a fault where nothing is mapped.
    write!("vbar_el1", 1 << 38);
    // SAFETY: drops translations of the guest alone.
    unsafe { asm!("tlbi vmalls12e1", "dsb nsh", "isb") };
}

fn run_at(pc: u64, x0: u64, x1: u64) -> u64 {
    let fwb = if id_registers().forced_write_back() { HCR_FWB } else { 0 };
    // SAFETY: `enter` keeps what the ABI asks for. The guest can only run its pieces of code, in
    // memory that its tables map; none of it belongs to this program or to the firmware.
    unsafe { enter(pc, x0, x1, HCR_RW | HCR_VM | HCR_DC | fwb) }
}

/// Lets the guest do something, by code at its address 0.
pub fn run(does: Does) -> Outcome {
    let (piece, x0, x1) = match does {
        Does::Load(gpa) => (LOAD, gpa, 0),
        Does::Store(gpa, value) => (STORE, gpa, value),
        Does::Jump(gpa) => (JUMP, gpa, 0),
    };
    let value = run_at(piece, x0, x1);
    let (esr, far) = (read!("esr_el2"), read!("far_el2"));
    let Some(abort) = Abort::decode(esr, far, read!("hpfar_el2")) else {
        // 0x16: HVC.
        return if esr >> 26 == 0x16 { Ok(value) } else { Err(Stop::Trap(esr)) };
    };
    let why = match abort.kind {
        Kind::Translation => Why::Nothing,
        Kind::Permission => Why::Right,
        Kind::AccessFlag => Why::Other,
        _ => return Err(Stop::Trap(esr)),
    };
    // The guest translates nothing itself.
    Err(Stop::Fault(abort.gpa.unwrap_or(Gpa(far)), abort.access(), why))
}

/// Uses a page over and over, by code at `code`, until a word of the report says so.
pub fn repeat(code: u64, page: u64, report: u64) {
    run_at(code + LOOP, page, report);
}

/// Writes what data caches hold of this memory to where every observer sees it.
pub fn clean(hpa: u64, bytes: u64) {
    let line = 4 << (read!("ctr_el0") >> DATA_LINE & 0xf);
    let lines = (hpa & !(line - 1)..hpa + bytes).step_by(line as usize);
    // SAFETY: changes no memory.
    lines.for_each(|line| unsafe { asm!("dc civac, {}", in(reg) line) });
    // SAFETY: a barrier.
    unsafe { asm!("dsb sy") };
}

/// The guest's code, in a page of memory.
pub fn write_code(hpa: u64) {
    // SAFETY: the code is 112 bytes.
    let code = unsafe { (&raw const guest_code).read_unaligned() };
    code.iter().zip((hpa..).step_by(8)).for_each(|(word, at)| put(at, *word));
    clean(hpa, 112);
    // SAFETY: fetches see the stores.
    unsafe { asm!("ic ialluis", "dsb ish", "isb") };
}

/// Tables of 64K are the largest.
const FRAMES: u64 = 1024;
static TABLES: Memory<{ FRAMES as usize * 4096 }> = Memory::new();

/// The platform: takes table pages from a piece of memory that is large enough, and uses none
/// twice.
pub struct Machine {
    used: Cell<u64>,
    pub tlbi: Tlbi,
    /// `invalidate` does nothing: the cases of two CPUs execute its parts.
    pub ignores: Cell<bool>,
    break_before_make: BreakBeforeMake,
    readers: Readers<[ReaderSlot; 1]>,
}

impl Machine {
    /// The platform. No other is in use.
    pub fn new<const SHIFT: u32, const WIDE: bool>(
        id: &IdRegisters,
        format: &Arm64<SHIFT, WIDE>,
    ) -> Self {
        TABLES.clear();
        Self {
            used: Cell::new(0),
            tlbi: id.tlbi(format),
            ignores: Cell::new(false),
            break_before_make: id.break_before_make(false),
            readers: Readers::new([const { ReaderSlot::new() }; 1]),
        }
    }

    /// Executes an invalidation for the VMID that is loaded, on all CPUs or on this one.
    pub fn execute(&self, tlbi: Tlbi, what: &Invalidation) {
        tlbi.sequence(what).for_each(super::execute::execute);
    }
}

// SAFETY: each frame is a part of `TABLES` of its own, at its own address, and stays. The sequence
// is the one for this CPU's features; it acts on all CPUs, and ends with the barrier that waits for
// them, except where cases leave it out. The rest are constants and a field, and nothing unwinds.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let at = self.used.get().next_multiple_of(bytes as u64);
        self.used.set(at + bytes as u64);
        if self.used.get() > FRAMES * 4096 {
            return None;
        }
        // SAFETY: inside, aligned, and not handed out before.
        unsafe { Frame::from_hpa(Hpa(TABLES.hpa() + at)) }
    }

    unsafe fn free(&self, _: Frame, _: usize) {}

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("a frame is not at address 0")
    }

    fn publish(&self) {
        // SAFETY: a barrier.
        unsafe { asm!("dsb ishst") };
    }

    fn invalidate(&self, what: &Invalidation) {
        if !self.ignores.get() {
            self.execute(self.tlbi, what);
        }
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.break_before_make
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}
