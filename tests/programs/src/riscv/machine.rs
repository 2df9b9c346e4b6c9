//! The machine: its serial line, its end, the guest, and the engine's platform.

use crate::claims::{Does, Outcome, Stop, Why};
use core::arch::{asm, global_asm};
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use slat::format::riscv::fault::GuestPageFault;
use slat::{BreakBeforeMake, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers, Vmid};

global_asm!(include_str!("boot.s"));

unsafe extern "C" {
    fn enter(pc: u64, a0: u64, a1: u64) -> u64;
    static guest_code: [u64; 14];
}

/// The pieces of `guest_code`, by their offset.
const LOAD: u64 = 0;
const STORE: u64 = 16;
const JUMP: u64 = 32;
/// An `ecall`.
pub const CALL: u64 = 48;
const LOOP: u64 = 64;

/// Memory that neither the program nor its tables use.
pub const FREE: u64 = 0x8400_0000;
/// The memory for table frames.
const FRAMES: (u64, u64) = (0x8200_0000, 0x8300_0000);

pub struct Line;

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the transmit register of the machine's UART.
            unsafe { (0x1000_0000 as *mut u8).write_volatile(byte) };
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

/// Whether the machine is Spike's; else it is QEMU's `virt`.
pub static IS_SPIKE: AtomicBool = AtomicBool::new(false);

/// Spike's ways to the host, which it finds by their names. A number in the first ends it.
#[unsafe(no_mangle)]
#[used]
static tohost: AtomicU64 = AtomicU64::new(0);
#[unsafe(no_mangle)]
#[used]
static fromhost: AtomicU64 = AtomicU64::new(0);

pub fn end(well: bool) -> ! {
    let code: u32 = if well { 0x5555 } else { 1 << 16 | 0x3333 };
    if IS_SPIKE.load(Relaxed) {
        tohost.store(if well { 1 } else { 3 }, Relaxed);
    } else {
        // SAFETY: the virt machine's test device is there; the write ends the machine.
        unsafe { (0x10_0000 as *mut u32).write_volatile(code) };
    }
    loop {
        core::hint::spin_loop();
    }
}

#[unsafe(no_mangle)]
extern "C" fn unexpected(cause: u64, pc: u64, value: u64) -> ! {
    say!("wrong: a trap of the program's own, cause {cause} at {pc:#x}, {value:#x}");
    end(false)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    say!("wrong: {info}");
    end(false)
}

macro_rules! csr {
    ($number:literal) => {{
        let value: u64;
        // SAFETY: reads a CSR of HS-mode, which changes nothing.
        unsafe { asm!(concat!("csrr {}, ", $number), out(reg) value, options(nomem, nostack)) };
        value
    }};
}

pub fn word(hpa: u64) -> *mut u64 {
    hpa as *mut u64
}

/// The guest, whose code is mapped at `code`.
#[derive(Clone, Copy)]
pub struct Guest {
    pub code: u64,
}

impl Guest {
    pub fn run(&self, does: Does) -> Outcome {
        match does {
            Does::Load(gpa) => self.enter(LOAD, gpa, 0),
            Does::Store(gpa, value) => self.enter(STORE, gpa, value),
            Does::Jump(gpa) => self.enter(JUMP, gpa, 0),
        }
    }

    /// Uses a page over and over, until a word of the report says so.
    pub fn repeat(&self, gpa: u64, report: u64) -> Outcome {
        self.enter(LOOP, gpa, report)
    }

    fn enter(&self, piece: u64, a0: u64, a1: u64) -> Outcome {
        // SAFETY: `enter` keeps what the C ABI asks for. The guest can only run its pieces of code,
        // in memory that its tables map; none of it belongs to this program, whose image ends far
        // below.
        let value = unsafe { enter(self.code + piece, a0, a1) };
        let cause = csr!("scause");
        match GuestPageFault::decode(cause, csr!("stval"), csr!("0x643"), csr!("0x64a")) {
            Some(fault) => Err(Stop::Fault(fault.gpa, fault.access, Why::Other)),
            None if cause == 10 => Ok(value),
            None => Err(Stop::Trap(cause)),
        }
    }
}

/// The guest's code, in a page of memory.
pub fn write_code(hpa: u64) {
    // SAFETY: the code is at least 112 bytes less padding, and nothing else uses the page.
    unsafe { word(hpa).cast::<[u64; 14]>().write(guest_code) };
    // SAFETY: orders the stores before later fetches of this hart.
    unsafe { asm!("fence.i", options(nostack)) };
}

/// Loads the root, and returns the value that the register then has.
pub fn load_root(hgatp: u64) -> u64 {
    // SAFETY: hgatp does not affect this program's own translations in HS-mode; HFENCE.GVMA x0, x0
    // drops all cached translations of any guest.
    unsafe { asm!("csrw 0x680, {}", ".insn r 0x73, 0, 0x31, x0, x0, x0", in(reg) hgatp) };
    csr!("0x680")
}

pub struct Machine {
    next: Cell<u64>,
    /// Frames handed out and not given back, in pages.
    pub live: Cell<u64>,
    /// `invalidate` does nothing: the cases of two harts execute its parts.
    pub ignores: Cell<bool>,
    readers: Readers<[ReaderSlot; 1]>,
}

impl Machine {
    pub const fn new() -> Self {
        let readers = Readers::new([const { ReaderSlot::new() }; 1]);
        let (next, live, ignores) = (Cell::new(FRAMES.0), Cell::new(0), Cell::new(false));
        Self { next, live, ignores, readers }
    }

    /// Drops what this hart holds of a guest.
    pub fn fence(&self, vmid: Vmid) {
        // SAFETY: HFENCE.GVMA x0, vmid; a fence changes no memory and no register.
        unsafe { asm!(".insn r 0x73, 0, 0x31, x0, x0, {}", in(reg) u64::from(vmid.0)) };
    }
}

// SAFETY: frames are handed out once each, from memory that nothing else uses, at the address of
// the frame, as HS-mode translates nothing (satp: Bare); the fence in `invalidate` covers this
// hart, and those who let another one use tables make it execute a fence; the rest are constants,
// and nothing unwinds.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let start = self.next.get().next_multiple_of(bytes as u64);
        let end = start + bytes as u64;
        if end > FRAMES.1 {
            return None;
        }
        self.next.set(end);
        self.live.set(self.live.get() + (bytes as u64 >> 12));
        // SAFETY: memory of that size and alignment, which no other frame has.
        unsafe { Frame::from_hpa(Hpa(start)) }
    }

    unsafe fn free(&self, _frame: Frame, bytes: usize) {
        self.live.set(self.live.get() - (bytes as u64 >> 12));
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("no frame is at address 0")
    }

    /// This hart runs the guest: it drops cached invalid entries.
    fn publish(&self) {
        load_root(csr!("0x680"));
    }

    fn invalidate(&self, what: &Invalidation) {
        if !self.ignores.get() {
            self.fence(what.vmid);
        }
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}
