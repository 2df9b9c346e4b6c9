//! The machine's memory: the hypervisor's own, and the backing of the guest.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use buddy_system_allocator::LockedHeap;
use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};
use slat::format::arm64::Arm64;
use slat::{Access, Hpa, Memory, PageSize};
use slat_guest::{
    Backing, Cow, Frames, Hva, HvaRange, NoPage, Page, PrivateAt, PrivatePage, SharedFrames,
};
use slat_hypervisor::layout::{GUEST_RAM, HOME, RAM, away};
use slat_hypervisor::options::Options;

/// Format of the guest's tables. It is chosen at build time, because nearly all of the program is
/// generic over it, and two formats would double the program.
pub type Stage2 = Arm64<GRANULE_SHIFT, { cfg!(feature = "lpa2") }>;

/// Base-2 logarithm of the granule.
const GRANULE_SHIFT: u32 = match (cfg!(feature = "granule-16k"), cfg!(feature = "granule-64k")) {
    (false, false) => 12,
    (true, false) => 14,
    (false, true) => 16,
    (true, true) => panic!("one of the features granule-16k and granule-64k"),
};
const _: () = assert!(
    GRANULE_SHIFT < 16 || !cfg!(feature = "lpa2"),
    "FEAT_LPA2 is of the granules of 4k and 16k"
);

/// Size of the smallest leaf, in bytes. The guest's memory is copied, logged and aged by these
/// pages.
pub const PAGE: u64 = 1 << GRANULE_SHIFT;
/// [`PAGE`] as a [`PageSize`].
pub const PAGE_SIZE: PageSize = PageSize::from_bytes(PAGE).expect("a power of two");

/// The heap. A buddy allocator returns blocks that are aligned to their size, as tables need.
#[global_allocator]
static HEAP: LockedHeap<33> = LockedHeap::empty();

/// Start of the heap, behind the program, which `link.ld` places 2 MiB behind the start of RAM.
const HEAP_START: u64 = RAM + (32 << 20);
const HEAP_BYTES: u64 = 256 << 20;

/// Stacks of all CPUs, 64 KiB each, by the number of the CPU.
#[unsafe(no_mangle)]
static mut STACKS: [[u128; 4096]; CPUS] = [[0; 4096]; CPUS];

/// Number of CPUs: those of vCPUs, and the manager's.
const CPUS: usize = Options::MOST_VCPUS as usize + 1;

/// The hypervisor's own stage-1 table at EL2. It maps 512 GiB, each GiB by a block at its own
/// address; the first is for devices. It changes only before other CPUs are on.
#[unsafe(no_mangle)]
static IDENTITY: Table = Table({
    const VALID: u64 = 1 << 0;
    const NORMAL: u64 = 1 << 2;
    const WRITABLE: u64 = 1 << 6;
    const INNER_SHAREABLE: u64 = 0b11 << 8;
    const ACCESSED: u64 = 1 << 10;
    const NEVER_EXECUTE: u64 = 1 << 54;
    let mut table = [const { AtomicU64::new(0) }; 512];
    table[0] = AtomicU64::new(VALID | WRITABLE | ACCESSED | NEVER_EXECUTE);
    let mut gib = 1;
    while gib < 512 {
        let block = (gib as u64) << 30 | VALID | NORMAL | WRITABLE | INNER_SHAREABLE | ACCESSED;
        table[gib] = AtomicU64::new(block);
        gib += 1;
    }
    table
});

#[repr(align(4096))]
struct Table([AtomicU64; 512]);

/// Removes these whole GiB from the hypervisor's own table.
pub fn hide(start: u64, bytes: u64) {
    for gib in start >> 30..(start + bytes).div_ceil(1 << 30) {
        IDENTITY.0[gib as usize].store(0, Ordering::Release);
    }
    // SAFETY: it invalidates translations by entries that were just cleared, and no memory of this
    // program is there.
    unsafe {
        asm!("dsb ishst", "tlbi alle2is", "dsb ish", "isb", options(nostack));
    }
}

/// Initialises the heap.
pub fn init() {
    // SAFETY: the boot CPU calls this once, before anything is allocated. The range is RAM of the
    // machine that has no other use: the program ends below it, and the guest's memory starts
    // above.
    unsafe { HEAP.lock().init(HEAP_START as usize, HEAP_BYTES as usize) }
}

/// Start of the guest's RAM in the backing's addresses. Lower addresses are those of devices.
pub const GUEST: Hva = Hva(1 << 40);

/// A run of adjacent pages of the guest's RAM.
pub struct Run {
    pub first: u64,
    pub pages: u64,
}

impl Run {
    /// Copies the pages from one region to the other.
    pub fn copy(&self, from: u64, to: u64) {
        let (offset, bytes) = (self.first * PAGE, self.pages * PAGE);
        // SAFETY: both are RAM that EL2 maps, `bytes` long, and do not overlap. Neither is memory
        // of this program. The guest may write to the first meanwhile; what it writes is copied
        // again.
        unsafe {
            asm!(
                "2:",
                "ldp {a}, {b}, [{from}], #16",
                "ldp {c}, {d}, [{from}], #16",
                "stp {a}, {b}, [{to}], #16",
                "stp {c}, {d}, [{to}], #16",
                "subs {bytes}, {bytes}, #32",
                "b.ne 2b",
                from = inout(reg) from + offset => _,
                to = inout(reg) to + offset => _,
                bytes = inout(reg) bytes => _,
                a = out(reg) _, b = out(reg) _, c = out(reg) _, d = out(reg) _,
                options(nostack),
            );
        }
    }

    /// Checks that both regions have the same content.
    pub fn compare(&self, one: u64, other: u64) -> Result<(), String> {
        let words = (self.pages * PAGE / 8) as usize;
        // SAFETY: both are RAM that EL2 maps at its own address, aligned, and initialised by the
        // machine. No vCPU has it mapped while the caller holds the invalidation, so nothing writes
        // to it.
        let [one, other] = [one, other].map(|start| unsafe {
            core::slice::from_raw_parts((start + self.first * PAGE) as *const u64, words)
        });
        // Eight words at a time, because this is slow in an emulator otherwise.
        let differ = |(one, other): (&[u64], &[u64])| {
            one.iter().zip(other).fold(0, |bits, (one, other)| bits | (one ^ other)) != 0
        };
        let Some(eight) = one.chunks_exact(8).zip(other.chunks_exact(8)).position(differ) else {
            return Ok(());
        };
        let word = (8 * eight..).find(|&word| one[word] != other[word]).unwrap_or_default();
        Err(format!(
            "the copy differs at {:#x}: {:#x} there, {:#x} here",
            GUEST_RAM + word as u64 * 8,
            one[word],
            other[word]
        ))
    }

    /// Fills the pages with a word.
    pub fn fill(&self, start: u64, with: u64) {
        let words = (self.pages * PAGE / 8) as usize;
        let first = start + self.first * PAGE;
        // SAFETY: as above, and the guest does not use these pages at this address any more.
        unsafe { core::slice::from_raw_parts_mut(first as *mut u64, words) }.fill(with);
    }
}

/// Backing of the guest's addresses: devices at their own addresses, and RAM, which can move.
#[derive(Debug)]
pub struct Machine {
    /// Address of the guest's RAM.
    home: AtomicU64,
    bytes: u64,
    /// A bit for each page, which is set if the page has moved from there to the other region.
    away: Box<[AtomicU64]>,
    /// Memory that is shared with forks, which replaces all of the above.
    forkable: Option<Forkable>,
}

impl Machine {
    pub fn new(bytes: u64) -> Self {
        let words = (bytes / PAGE_SIZE.bytes()).div_ceil(64);
        let away = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { home: AtomicU64::new(HOME), bytes, away, forkable: None }
    }

    /// Creates the backing of a guest that is forked, and that `arrived` wakes.
    ///
    /// # Errors
    /// Returns an error if there is too little memory for the state of each page.
    pub fn forked(ram: HvaRange, arrived: fn(HvaRange)) -> Result<Self, String> {
        Ok(Self { forkable: Some(Forkable::new(ram, arrived)?), ..Self::new(ram.bytes) })
    }

    /// Returns the guest's memory if it can be forked.
    pub fn forkable(&self) -> Option<&Forkable> {
        self.forkable.as_ref()
    }

    /// Records that these bytes of the guest's RAM have moved to the other region.
    pub fn moved(&self, offset: u64, bytes: u64) {
        let pages = |at: u64| at / PAGE_SIZE.bytes();
        for page in pages(offset)..pages(offset + bytes) {
            self.away[page as usize / 64].fetch_or(1 << (page % 64), Ordering::AcqRel);
        }
    }

    /// Returns the address of a byte of the guest's RAM, and the size of the aligned block around
    /// it that is contiguous.
    fn place(&self, offset: u64) -> (u64, PageSize) {
        let page = offset / PAGE_SIZE.bytes();
        let moved = self.away[page as usize / 64].load(Ordering::Acquire) >> (page % 64) & 1 == 1;
        let start = if moved { away(self.bytes) } else { self.home() };
        let alone = self.away.iter().any(|word| word.load(Ordering::Acquire) != 0);
        (start + offset, if alone { PAGE_SIZE } else { PageSize::SIZE_1G })
    }

    /// Address of the guest's RAM.
    pub fn home(&self) -> u64 {
        self.home.load(Ordering::Acquire)
    }

    /// Sets another address for the guest's RAM. The caller holds an invalidation of all of it.
    pub fn move_to(&self, home: u64) {
        self.home.store(home, Ordering::Release);
    }
}

impl Backing for Machine {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        if let Some(forkable) = self.forkable.as_ref().filter(|_| host >= GUEST) {
            return forkable.memory.page(host, access);
        }
        match host.0.checked_sub(GUEST.0) {
            Some(offset) if offset < self.bytes => {
                let (hpa, block) = self.place(offset);
                let memory = Memory::Normal;
                Ok(Page { hpa: Hpa(hpa), block, write: true, execute: true, memory })
            }
            Some(_) => Err(NoPage::Never),
            None => Ok(Page {
                hpa: Hpa(host.0),
                block: PAGE_SIZE,
                write: true,
                execute: false,
                memory: Memory::Device,
            }),
        }
    }

    fn private_page(&self, at: PrivateAt) -> Result<PrivatePage, NoPage> {
        if at.0 >= self.bytes {
            return Err(NoPage::Never);
        }
        Ok(PrivatePage { hpa: Hpa(away(self.bytes) + at.0), block: PageSize::SIZE_1G })
    }
}

/// Frames that the guest shares with a fork: those of its own region, into which the machine has
/// loaded the guest, and as many in the other region.
///
/// These are as many as guest and fork can need, and no more. If both copy their last common page
/// at once, one of them finds no frame, and waits until the other has its own page.
#[derive(Debug)]
pub struct Regions {
    bytes: u64,
    arrived: fn(HvaRange),
}

impl Frames for Regions {
    fn hpa(&self, frame: u32) -> Hpa {
        let offset = u64::from(frame) * PAGE_SIZE.bytes();
        match offset / self.bytes {
            0 => Hpa(HOME + offset),
            _ => Hpa(away(self.bytes) + offset - self.bytes),
        }
    }

    fn copy(&self, from: u32, to: u32) {
        let [from, to] = [from, to].map(|frame| self.hpa(frame).0);
        // SAFETY: both are RAM that EL2 maps at its own address, a page each, and they differ.
        // `SharedFrames` copies only from a frame that nothing writes, to a frame that has no other
        // user.
        unsafe {
            (to as *mut u64)
                .copy_from_nonoverlapping(from as *const u64, PAGE_SIZE.bytes() as usize / 8);
        }
    }

    /// Called for each page of the guest before the guest runs. The page keeps what the machine
    /// loaded there, so this does nothing.
    fn zero(&self, _frame: u32) {}

    /// Wakes the guest's vCPUs. The fork has none: the job that copies its pages tries again by
    /// itself.
    fn freed(&self) {
        (self.arrived)(HvaRange { start: GUEST, bytes: self.bytes });
    }
}

/// Backing of a guest that is forked.
#[derive(Debug)]
pub struct Forkable {
    /// All frames.
    pub frames: &'static SharedFrames<Regions>,
    /// Memory of the guest.
    pub memory: Cow<'static, Regions>,
}

impl Forkable {
    /// Creates the guest's memory from the frames into which the machine has loaded it.
    fn new(ram: HvaRange, arrived: fn(HvaRange)) -> Result<Self, String> {
        let (bytes, page) = (ram.bytes, PAGE_SIZE.bytes());
        let regions = Regions { bytes, arrived };
        let count = u32::try_from(2 * (bytes / page)).map_err(|_| "too much to be forked")?;
        let frames = Box::leak(Box::new(SharedFrames::new(regions, PAGE_SIZE, count)));
        let memory = Cow::new(frames, ram).map_err(|error| error.to_string())?;
        for offset in (0..bytes).step_by(page as usize) {
            let own = memory.page(Hva(ram.start.0 + offset), Access::Write);
            if !own.is_ok_and(|own| own.hpa.0 == HOME + offset) {
                return Err(format!("the guest's page at {offset:#x} is {own:?}"));
            }
        }
        Ok(Self { frames, memory })
    }
}
