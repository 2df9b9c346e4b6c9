//! The machine: its serial line, the guest, and the engine's platform.

use crate::claims::{Does, Outcome, Stop, Why, put};
use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;
use slat::format::power::fault::{Kind, StorageFault};
use slat::format::power::tlbie::{Instruction, Operands, Tlbie};
use slat::{
    BreakBeforeMake, Frame, Gpa, GpaRange, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers,
    Vmid,
};

global_asm!(include_str!("boot.s"));

unsafe extern "C" {
    fn enter(pc: u64, r3: u64, r4: u64) -> u64;
    static guest_code: [u64; 14];
    static mut guest_r4: u64;
}

/// The pieces of `guest_code`, by their offset.
const LOAD: u64 = 0;
const STORE: u64 = 16;
const JUMP: u64 = 32;
/// A call of the hypervisor.
pub const CALL: u64 = 48;
const LOOP: u64 = 64;

/// Memory that neither the program nor its tables use.
pub const FREE: u64 = 0x1000_0000;
/// The partition table, of 64 KiB.
const PARTITIONS: u64 = 0x100_0000;
/// The memory for table frames.
const FRAMES: (u64, u64) = (0x200_0000, 0x800_0000);
/// The data register of the machine's first UART, on its LPC bus.
const UART: u64 = 0x6_0300_d001_03f8;

pub struct Line;

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: QEMU's UART is there, and always ready.
            unsafe { (UART as *mut u8).write_volatile(byte) };
        }
        Ok(())
    }
}

macro_rules! say {
    ($($arguments:tt)*) => {{
        use core::fmt::Write;
        let _ = writeln!($crate::machine::Line, $($arguments)*);
    }};
}
pub(crate) use say;

pub fn end(wrong: u32) -> ! {
    say!("{wrong} wrong");
    loop {
        core::hint::spin_loop();
    }
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    say!("wrong: {info}");
    end(1)
}

macro_rules! spr {
    ($number:literal) => {{
        let value: u64;
        // SAFETY: reads a register, which changes nothing.
        unsafe { asm!(concat!("mfspr {}, ", $number), out(reg) value, options(nomem, nostack)) };
        value
    }};
    ($number:literal, $value:expr) => {{
        let value: u64 = $value;
        // SAFETY: a register that affects only guests; this program runs in HV real mode.
        unsafe { asm!(concat!("mtspr ", $number, ", {}"), "isync", in(reg) value) };
    }};
}

/// Lets the guest do something, by code at its address 0.
pub fn run(does: Does) -> Outcome {
    let (piece, r3, r4) = match does {
        Does::Load(gpa) => (LOAD, gpa, 0),
        Does::Store(gpa, value) => (STORE, gpa, value),
        Does::Jump(gpa) => (JUMP, gpa, 0),
    };
    // SAFETY: `enter` keeps what the ABI asks for. The guest can only run its pieces of code, in
    // memory that its tables map; none of it belongs to this program, whose image ends far below.
    let vector = unsafe { enter(piece, r3, r4) };
    let fault = match vector {
        // SAFETY: written by the interrupt that has come back.
        0xc00 => return Ok(unsafe { (&raw const guest_r4).read_volatile() }),
        0xe00 => StorageFault::data(spr!("306"), spr!("307"), spr!("816")),
        0xe20 => StorageFault::instruction(spr!("315"), spr!("314"), spr!("816")),
        _ => return Err(Stop::Trap(vector)),
    };
    let why = match fault.kind {
        Kind::NotMapped => Why::Nothing,
        Kind::Permission => Why::Right,
        _ => Why::Other,
    };
    Err(Stop::Fault(fault.gpa, fault.access, why))
}

/// Uses a page over and over, by code at `code`, until a word of the report says so.
pub fn repeat(code: u64, page: u64, report: u64) {
    // SAFETY: as in `run`.
    unsafe { enter(code + LOOP, page, report) };
}

/// The guest's code, in a page of memory.
pub fn write_code(hpa: u64) {
    // SAFETY: the code is 112 bytes.
    let code = unsafe { (&raw const guest_code).read() };
    code.iter().zip((hpa..).step_by(8)).for_each(|(word, at)| put(at, *word));
    // SAFETY: fetches see the stores.
    unsafe { asm!("sync", "icbi 0, {}", "sync", "isync", in(reg) hpa) };
}

/// Prepares the first CPU, and an empty partition table.
pub fn start() {
    (PARTITIONS..PARTITIONS + 0x1_0000).step_by(8).for_each(|at| put(at, 0));
    prepare(Vmid(0));
}

/// Prepares a CPU for a guest with radix trees: LPCR.HR, PTCR, LPIDR.
pub fn prepare(lpid: Vmid) {
    spr!("318", spr!("318") | 1 << 20);
    spr!("464", PARTITIONS | 4);
    spr!("319", u64::from(lpid.0));
}

/// Returns the CPU's version.
pub fn version() -> u64 {
    spr!("287") & 0xffff_ffff
}

/// What the platform does of an invalidation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Executes {
    /// All of it.
    All,
    /// What this CPU alone needs, by `tlbiel`.
    Local,
    /// Nothing: a fault on purpose.
    Nothing,
    /// That of the page behind it: a fault on purpose.
    NextPage,
}

pub struct Machine {
    next: Cell<u64>,
    /// Frames handed out and not given back, in bytes.
    pub live: Cell<u64>,
    pub executes: Cell<Executes>,
    readers: Readers<[ReaderSlot; 1]>,
}

impl Machine {
    pub const fn new() -> Self {
        let readers = Readers::new([const { ReaderSlot::new() }; 1]);
        let (next, live, executes) = (Cell::new(FRAMES.0), Cell::new(0), Cell::new(Executes::All));
        Self { next, live, executes, readers }
    }

    /// Loads the partition table entry of the guest, and its LPID.
    pub fn load_root(&self, lpid: Vmid, entry: u64) {
        put(PARTITIONS + 16 * u64::from(lpid.0), entry);
        spr!("319", u64::from(lpid.0));
        self.flush(lpid);
    }

    /// Drops all that the CPU holds of a guest.
    pub fn flush(&self, lpid: Vmid) {
        let all = Invalidation { vmid: lpid, range: None, leaf: None, tables: true };
        self.execute(Tlbie::default().sequence(&all));
    }

    pub fn execute(&self, sequence: impl Iterator<Item = Instruction>) {
        for instruction in sequence {
            // SAFETY: invalidations and barriers change no memory and no register. The words are
            // `tlbie r3, r4, RIC, 0, 1` with RIC 0 and 2, and `tlbiel` so.
            unsafe {
                match instruction {
                    Instruction::Ptesync => asm!("ptesync"),
                    Instruction::Eieio => asm!("eieio"),
                    Instruction::Tlbsync => asm!("tlbsync"),
                    Instruction::Tlb(Operands { rb, rs }) => {
                        asm!(".long 0x7c811a64", in("r3") rb, in("r4") rs);
                    }
                    Instruction::All(Operands { rb, rs }) => {
                        asm!(".long 0x7c891a64", in("r3") rb, in("r4") rs);
                    }
                    Instruction::TlbLocal(Operands { rb, rs }) => {
                        asm!(".long 0x7c811a24", in("r3") rb, in("r4") rs);
                    }
                    Instruction::AllLocal(Operands { rb, rs }) => {
                        asm!(".long 0x7c891a24", in("r3") rb, in("r4") rs);
                    }
                }
            }
        }
    }
}

// SAFETY: frames are handed out once each, from memory that nothing else uses, at the address of
// the frame, as HV real mode translates nothing; `tlbie` reaches both CPUs, and `tlbiel` the one
// that alone uses the tables, except where a check of a fault on purpose asks for less; the rest
// are constants, and nothing unwinds.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let start = self.next.get().next_multiple_of(bytes as u64);
        let end = start + bytes as u64;
        if end > FRAMES.1 {
            return None;
        }
        self.next.set(end);
        self.live.set(self.live.get() + bytes as u64);
        // SAFETY: memory of that size and alignment, which no other frame has.
        unsafe { Frame::from_hpa(Hpa(start)) }
    }

    unsafe fn free(&self, _frame: Frame, bytes: usize) {
        self.live.set(self.live.get() - bytes as u64);
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("no frame is at address 0")
    }

    fn publish(&self) {
        // SAFETY: a barrier.
        unsafe { asm!("ptesync") };
    }

    fn invalidate(&self, what: &Invalidation) {
        let tlbie = Tlbie::default();
        match self.executes.get() {
            Executes::All => self.execute(tlbie.sequence(what)),
            Executes::Local => self.execute(tlbie.local_sequence(what)),
            Executes::Nothing => {}
            Executes::NextPage => {
                let range = what.range.expect("the checks' faults are of one page");
                let next = GpaRange::new(Gpa(range.end().0), range.size());
                let next = Invalidation { range: next.ok(), ..*what };
                self.execute(tlbie.sequence(&next));
            }
        }
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}
