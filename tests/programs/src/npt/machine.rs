//! The bare machine: entry, serial port, end, and the platform that the engine asks for.

use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::fmt::{self, Write};
use core::panic::PanicInfo;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use slat::{BreakBeforeMake, Frame, Hpa, Invalidation, Platform, Pte, ReaderSlot, Readers};

global_asm!(include_str!("start.s"));

/// Memory that hardware and this program share, at its own physical address.
#[repr(C, align(2097152))]
pub struct Memory<const BYTES: usize>(UnsafeCell<[u8; BYTES]>);

// SAFETY: one CPU runs one program, which holds no reference into it.
unsafe impl<const BYTES: usize> Sync for Memory<BYTES> {}

impl<const BYTES: usize> Memory<BYTES> {
    pub const fn new() -> Self {
        Self(UnsafeCell::new([0; BYTES]))
    }

    /// Linear addresses are physical ones.
    pub fn hpa(&self) -> u64 {
        self.0.get() as u64
    }

    pub fn read(&self, at: u64) -> u64 {
        assert!(at.is_multiple_of(8) && at < BYTES as u64);
        // SAFETY: aligned and inside; hardware may change it at any time.
        unsafe { ((self.hpa() + at) as *const u64).read_volatile() }
    }

    pub fn write(&self, at: u64, value: u64) {
        assert!(at.is_multiple_of(8) && at < BYTES as u64);
        // SAFETY: aligned and inside, and no reference to it exists.
        unsafe { ((self.hpa() + at) as *mut u64).write_volatile(value) }
    }
}

const PAGE: usize = 4096;
const FRAMES: usize = 64;
pub static TABLES: Memory<{ FRAMES * PAGE }> = Memory::new();

/// The platform: takes table pages from a piece of memory that is large enough, and uses none
/// twice. An invalidation is a flush at the next entry of the guest: INVEPT, or TLB control in
/// VMRUN, because INVLPGA takes no guest physical address (15.16).
pub struct Machine {
    used: AtomicUsize,
    stale: AtomicBool,
    readers: Readers<[ReaderSlot; 2]>,
}

impl Machine {
    pub const fn new() -> Self {
        let readers = Readers::new([const { ReaderSlot::new() }; 2]);
        Self { used: AtomicUsize::new(0), stale: AtomicBool::new(false), readers }
    }

    /// Returns whether the next entry has to flush.
    pub fn take_stale(&self) -> bool {
        self.stale.swap(false, Ordering::Relaxed)
    }

    /// Makes the next entry flush.
    pub fn set_stale(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    /// Returns the entries that hardware reads for `gpa`, from the root down, with their addresses,
    /// computed only from the manuals' figures.
    pub fn entries(&self, root: u64, gpa: u64) -> impl Iterator<Item = (u64, u64)> {
        let mut table = Some(root);
        [39, 30, 21, 12].into_iter().map_while(move |shift| {
            let at = table? + 8 * (gpa >> shift & 511);
            let entry = TABLES.read(at - TABLES.hpa());
            let last = shift == 12 || entry & 1 << 7 != 0 || entry & 1 == 0;
            table = (!last).then_some(entry & 0xf_ffff_ffff_f000);
            Some((at, entry))
        })
    }
}

// SAFETY: each frame is a page of `TABLES` of its own, at its own address, and stays. A flush at
// the next entry drops all cached translations, and the guest does not run on the only CPU before
// that. `readers` is a field.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let frame = self.used.fetch_add(1, Ordering::Relaxed);
        if bytes != PAGE || frame >= FRAMES {
            return None;
        }
        // SAFETY: a page, aligned, and not handed out before.
        unsafe { Frame::from_hpa(Hpa(TABLES.hpa() + (frame * PAGE) as u64)) }
    }

    unsafe fn free(&self, _: Frame, _: usize) {}

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("a frame is not at address 0")
    }

    /// Stores are seen in order.
    fn publish(&self) {}

    fn invalidate(&self, _: &Invalidation) {
        self.set_stale();
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }
}

/// The first serial port, and Bochs's own.
pub struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: a byte to the port of QEMU's UART, which is always ready, and to Bochs's port
            // for output, which QEMU ignores.
            unsafe {
                asm!("out dx, al", in("dx") 0x3f8u16, in("al") byte);
                asm!("out 0xe9, al", in("al") byte);
            }
        }
        Ok(())
    }
}

/// Ends QEMU, with status 33 or 35, or Bochs.
pub fn end(right: bool) -> ! {
    let status: u32 = if right { 0x10 } else { 0x11 };
    // SAFETY: isa-debug-exit, at the address on QEMU's command line.
    unsafe { asm!("out dx, eax", in("dx") 0xf4u16, in("eax") status) }
    for byte in *b"Shutdown" {
        // SAFETY: Bochs's own port; QEMU has nothing there.
        unsafe { asm!("out dx, al", in("dx") 0x8900u16, in("al") byte) }
    }
    loop {
        // SAFETY: waits for nothing.
        unsafe { asm!("hlt") }
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Serial, "wrong: {info}");
    end(false)
}
