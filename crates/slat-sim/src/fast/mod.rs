//! The fast machine: vCPUs are threads of the host, which access real memory through the engine's
//! tables.
//!
//! The adversarial [`Machine`](crate::Machine) checks what a CPU *could* do. This machine is for
//! performance and for stress: millions of accesses a second, while other threads change the
//! tables. It decodes entries by the same [`Arch`], written from the manuals. If guest memory holds
//! a value that was never written there, a rule was broken.
//!
//! # Invalidation
//! Each access of a CPU is a *window*. The CPU makes its counter odd. It reads the global
//! generation, and if that has changed, drops what was invalidated since. It uses its TLB or walks,
//! and accesses memory. It makes its counter even. An invalidating thread records the range,
//! advances the generation, executes a barrier on every CPU (`membarrier`), and waits for each odd
//! counter until it changes.
//!
//! This is sound. The barrier runs on a CPU's thread between two of its instructions:
//!
//! - Before the window reads the generation: the CPU sees after the barrier what the invalidating
//!   thread did before it. So the window finds the new generation, and its walks find the new
//!   tables.
//! - After that: the CPU stored the odd counter before the barrier. So the invalidating thread sees
//!   that value, or a later one, and returns only after the window has ended.
//!
//! No stale entry escapes. A walk inside a window fills the TLB as of the generation that the
//! window *began* with. If tables change during the walk, the generation changes afterwards. So the
//! next window finds another generation than that of the entry, and drops the entry before it uses
//! the TLB. If the CPU read the generation after the walk, it could take an older entry for a newer
//! one.
//!
//! A walk, too, is inside a window: once an invalidation has returned, no CPU reads a table that
//! was unlinked before it. An invalidation does not wait for a CPU outside a window, even if its
//! thread is blocked. Counters instead of flags: a CPU that begins one window after another delays
//! no invalidation.
//!
//! The fence is asymmetric: a window has compiler fences and plain stores, and the invalidating
//! thread pays for both sides. If the kernel has no `membarrier` ([`FastMachine::set_membarrier`]),
//! both sides execute a sequentially consistent fence between their store and their load: at least
//! one of the two sees the other's store.
//!
//! # What a TLB does here
//! It keeps what walks found, until an invalidation covers it, or another page needs its place.
//! Leaves are kept in pieces of 4 KiB or 2 MiB. A write needs an entry that is known to be dirty;
//! otherwise a walk marks the leaf. There is no walk cache, no laziness and no speculation.
//!
//! # Example
//! ```
//! use slat::{Attributes, Gpa, GpaRange, Reader, PageSize, TableCache, Tables, Vmid};
//! use slat_sim::{Ept, fast::FastMachine};
//!
//! let machine = FastMachine::new(Ept::default(), 1, 2 << 20, 2 << 20)?;
//! let tables = Tables::new(slat::format::ept::Ept2M::default(), Vmid(1), 48, &machine)?;
//! let mut cpu = machine.cpu(0)?;
//! cpu.load(Vmid(1), tables.root());
//!
//! let mut storage = [const { None }; 4];
//! let mut cache = TableCache::new(&machine, &mut storage);
//! cache.fill(4)?;
//! let mut reader = Reader::register(&machine)?;
//! let page = GpaRange::new(Gpa(0x8000_0000), 0x1000)?;
//! let memory = machine.memory_base();
//! let mut guard = tables.enter(&mut reader)?;
//! guard.map(page, memory, Attributes::RAM, PageSize::SIZE_4K, &mut cache)?;
//! cpu.write(0x8000_0008, 7)?;
//! assert_eq!(machine.read_host(slat::Hpa(memory.0 + 8)), 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cpu;
mod error;
mod frames;
mod host;
mod log;
mod moment;
mod space;
#[cfg(test)]
mod tests;
mod tlb;
mod window;

pub use cpu::FastCpu;
pub use error::{AccessError, CpuError, Why};

use crate::arch::Arch;
use frames::Frames;
use log::Log;
use slat::{
    BreakBeforeMake, Frame, Hpa, Invalidation, Maintenance, Platform, Pte, ReaderSlot, Readers,
};
use space::Space;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};
use window::{Barriers, Door};

/// Number of threads that may be inside tables at a time.
const READERS: usize = 256;

/// A machine whose memory is real and whose CPUs are threads.
#[derive(Debug)]
pub struct FastMachine<A: Arch> {
    arch: A,
    space: Space,
    frames: Frames,
    doors: Box<[Door]>,
    barriers: Barriers,
    log: Log,
    break_before_make: BreakBeforeMake,
    readers: Box<Readers<[ReaderSlot; READERS]>>,
    counters: Counters,
    start: Instant,
}

/// The counters behind [`Service`], on a cache line of their own.
#[derive(Default, Debug)]
#[repr(align(128))]
struct Counters {
    invalidations: AtomicU64,
    waited: AtomicU64,
    data: AtomicU64,
    instructions: AtomicU64,
}

/// The engine's calls of a machine, and their cost.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Service {
    /// Invalidations executed.
    pub invalidations: u64,
    /// Time in which threads waited in invalidations for CPUs, including the barrier on them; the
    /// sum over all threads.
    pub waited: Duration,
    /// Bytes of data made coherent.
    pub data: u64,
    /// Bytes of instructions made coherent.
    pub instructions: u64,
}

impl<A: Arch> FastMachine<A> {
    /// Creates a machine of `cpus` CPUs, with `memory_bytes` of guest memory and `table_bytes` for
    /// tables, all zero. The host allocates pages when they are first touched.
    ///
    /// # Errors
    /// The host refuses the mapping, or it would need host addresses of more than 46 bits.
    pub fn new(arch: A, cpus: usize, memory_bytes: u64, table_bytes: u64) -> io::Result<Self> {
        let space = Space::new(memory_bytes, table_bytes)?;
        Ok(Self {
            frames: Frames::new(space.tables()),
            space,
            doors: (0..cpus).map(|_| Door::default()).collect(),
            barriers: Barriers::register(),
            log: Log::default(),
            break_before_make: arch.break_before_make(),
            arch,
            readers: Box::new(Readers::<[ReaderSlot; READERS]>::new(
                [const { ReaderSlot::new() }; READERS],
            )),
            start: Instant::now(),
            counters: Counters::default(),
        })
    }

    /// Declares another rule for break-before-make than a correct platform of this architecture.
    /// CPUs of this machine tolerate all of them.
    pub fn set_break_before_make(&mut self, declared: BreakBeforeMake) {
        self.break_before_make = declared;
    }

    /// Uses `membarrier` if it is wanted and the kernel has it; returns whether it is in use.
    pub fn set_membarrier(&mut self, wanted: bool) -> bool {
        self.barriers = if wanted { Barriers::register() } else { Barriers::Symmetric };
        self.barriers == Barriers::Asymmetric
    }

    /// Returns the architecture of the CPUs.
    pub const fn arch(&self) -> &A {
        &self.arch
    }

    /// Returns the number of CPUs.
    pub const fn cpus(&self) -> usize {
        self.doors.len()
    }

    /// Returns a CPU for one thread, which gives it back when it drops it.
    ///
    /// # Errors
    /// There is no such CPU, or it is taken.
    pub fn cpu(&self, index: usize) -> Result<FastCpu<'_, A>, CpuError> {
        let door = self.doors.get(index).ok_or(CpuError::Unknown { cpus: self.doors.len() })?;
        let window = door.take().ok_or(CpuError::Taken)?;
        Ok(FastCpu::new(self, door, window))
    }

    /// Returns the engine's calls so far, and their cost.
    pub fn service(&self) -> Service {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Service {
            invalidations: read(&self.counters.invalidations),
            waited: Duration::from_nanos(read(&self.counters.waited)),
            data: read(&self.counters.data),
            instructions: read(&self.counters.instructions),
        }
    }

    /// Returns when no CPU is in a window that began before the generation changed.
    fn wait_for_cpus(&self) {
        let start = Instant::now();
        self.barriers.everywhere();
        self.doors.iter().for_each(Door::wait);
        let waited = start.elapsed().as_nanos() as u64;
        self.counters.waited.fetch_add(waited, Ordering::Relaxed);
    }
}

// SAFETY:
// 1. `Frames` hands out disjoint, aligned parts of the table region, and a part again only after it
//    was given back. Guest memory is another region.
// 2. `ptes` adds the address to the base of one mapping, which lives as long as the machine.
// 3. By the protocol in the module's documentation, after `invalidate` has returned, no CPU uses
//    what it cached before the generation changed, nor is it in a walk that began before. CPUs
//    cache nothing else.
// 4. `readers` is a field; `break_before_make` changes by `&mut self` only, when no tables borrow
//    the machine.
// 5. `fill` is the trait's default.
// 6. Poisoned locks are taken as well; nothing else can unwind.
unsafe impl<A: Arch> Platform for FastMachine<A> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let hpa = self.frames.take(bytes as u64)?;
        // SAFETY: the frame is inside the table region, which `ptes` reaches. It is of that size
        // and alignment, no other code uses it, and it is below 2^46, which all formats can hold.
        unsafe { Frame::from_hpa(Hpa(hpa)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        self.frames.give(frame.hpa().0, bytes as u64);
    }

    #[inline(always)]
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        // SAFETY: the engine passes addresses inside frames that `allocate` returned, which are
        // inside the mapping.
        unsafe { self.space.base().add(table.0 as usize).cast() }
    }

    fn publish(&self) {
        fence(Ordering::SeqCst);
    }

    fn invalidate(&self, what: &Invalidation) {
        self.log.record(what);
        self.wait_for_cpus();
        self.counters.invalidations.fetch_add(1, Ordering::Relaxed);
    }

    #[inline(always)]
    fn break_before_make(&self) -> BreakBeforeMake {
        self.break_before_make
    }

    #[inline(always)]
    fn readers(&self) -> &Readers {
        &*self.readers
    }

    fn maintain(&self, _memory: Hpa, bytes: u64, what: Maintenance) {
        let counter = match what {
            Maintenance::Data => &self.counters.data,
            Maintenance::Instructions => &self.counters.instructions,
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
}
