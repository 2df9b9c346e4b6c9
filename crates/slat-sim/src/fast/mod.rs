//! The fast machine: vCPUs are threads of the host's, which load from and store to real memory
//! through the tables that the engine under test keeps.
//!
//! The adversarial [`Machine`](crate::Machine) asks what a CPU *could* do; this one is for what it
//! costs, and for stress: millions of accesses a second, beside threads that change the tables. It
//! decodes by the same [`Arch`], written from the manuals. Where guest memory holds what nobody can
//! have written, some rule was broken.
//!
//! # Invalidation
//! Each access of a CPU is a *window*: its counter becomes odd; it looks at the global generation,
//! and if that has moved, forgets what was invalidated since; it goes through its TLB or walks, and
//! accesses memory; its counter becomes even. Who invalidates records the range, advances the
//! generation, executes a barrier on every CPU (`membarrier`), and waits for each counter that is
//! odd until it changes.
//!
//! That is sound. The barrier runs on a CPU's thread somewhere between two of its instructions:
//!
//! - Before a window looks at the generation: what precedes the barrier at the invalidator is seen
//!   after it, so the window finds the new generation, and its walks the new tables.
//! - After that: the odd counter was stored before the barrier, so the invalidator sees it, or what
//!   followed it, and returns only after the window has ended.
//!
//! No stale entry is lost on the way. A walk inside a window fills the TLB as of the generation
//! that the window *began* with. If tables changed under the walk, the generation moves after the
//! change, hence the next window finds another generation than the one that the entry belongs to,
//! and forgets the entry before it looks anything up. Looking at the generation after the walk
//! instead would take an entry from before for one from after.
//!
//! A walk, too, happens inside a window: once an invalidation has returned, no CPU is inside a
//! table that was unlinked before it. A CPU outside a window is not waited for, whatever its thread
//! does. Counters, not flags: a CPU that begins one window after the other holds nobody up.
//!
//! The fence is asymmetric: a window has compiler fences and plain stores, and who invalidates pays
//! for both sides. Where the kernel has no `membarrier` ([`FastMachine::set_membarrier`]), both
//! sides execute a sequentially consistent fence between their store and their load: of the two, at
//! least one sees the other's.
//!
//! # What a TLB does here
//! It keeps what walks found, until an invalidation names it, or another page needs its place.
//! Leaves are kept in pieces of 4 KiB or 2 MiB. A write needs an entry that is known to be dirty,
//! else the walk marks the leaf. There is no walk cache, no laziness, no speculation.
//!
//! # Example
//! ```
//! use slat::{Attributes, Gpa, GpaRange, Member, PageSize, TableCache, Tables, Vmid};
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
//! let mut member = Member::join(&machine)?;
//! let page = GpaRange::new(Gpa(0x8000_0000), 0x1000)?;
//! let memory = machine.memory_base();
//! tables.enter(&mut member)?.map(page, memory, Attributes::RAM, PageSize::SIZE_4K, &mut cache)?;
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
use slat::{BreakBeforeMake, Frame, Grace, Hpa, Invalidation, Maintenance, Platform, Seat, Slot};
use space::Space;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};
use window::{Barriers, Door};

/// Threads that may be inside tables at a time.
const SEATS: usize = 256;

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
    grace: Box<Grace<[Seat; SEATS]>>,
    counters: Counters,
    start: Instant,
}

/// What the engine asked for, on a cache line of its own.
#[derive(Default, Debug)]
#[repr(align(128))]
struct Counters {
    invalidations: AtomicU64,
    waited: AtomicU64,
    data: AtomicU64,
    instructions: AtomicU64,
}

/// What the engine asked of a machine, and what that cost.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Service {
    /// Invalidations executed.
    pub invalidations: u64,
    /// Time in which those who invalidated waited for CPUs, the barrier on them included; of all
    /// threads together.
    pub waited: Duration,
    /// Bytes of data made coherent.
    pub data: u64,
    /// Bytes of instructions made coherent.
    pub instructions: u64,
}

impl<A: Arch> FastMachine<A> {
    /// A machine of `cpus` CPUs, with `memory_bytes` of guest memory and `table_bytes` for tables,
    /// all zero. The host gives pages as they are touched.
    ///
    /// # Errors
    /// The host refuses the mapping, or it would need host addresses of more than 46 bits.
    pub fn new(arch: A, cpus: usize, memory_bytes: u64, table_bytes: u64) -> io::Result<Self> {
        let space = Space::new(memory_bytes, table_bytes)?;
        Ok(Self {
            arch,
            frames: Frames::new(space.tables()),
            space,
            doors: (0..cpus).map(|_| Door::default()).collect(),
            barriers: Barriers::register(),
            log: Log::default(),
            break_before_make: arch.break_before_make(),
            grace: Box::new(Grace::<[Seat; SEATS]>::new([const { Seat::new() }; SEATS])),
            start: Instant::now(),
            counters: Counters::default(),
        })
    }

    /// Declares another rule for changes of size than a correct platform of this architecture: CPUs
    /// here bear all of them.
    pub fn set_break_before_make(&mut self, declared: BreakBeforeMake) {
        self.break_before_make = declared;
    }

    /// Does without `membarrier`, or uses it if the kernel has it; returns whether it is in use.
    pub fn set_membarrier(&mut self, wanted: bool) -> bool {
        self.barriers = if wanted { Barriers::register() } else { Barriers::Symmetric };
        self.barriers == Barriers::Asymmetric
    }

    /// The architecture that CPUs walk by.
    pub const fn arch(&self) -> &A {
        &self.arch
    }

    /// How many CPUs there are.
    pub const fn cpus(&self) -> usize {
        self.doors.len()
    }

    /// A CPU, for one thread to drive. It comes back when it is dropped.
    ///
    /// # Errors
    /// There is no such CPU, or it is taken.
    pub fn cpu(&self, index: usize) -> Result<FastCpu<'_, A>, CpuError> {
        let door = self.doors.get(index).ok_or(CpuError::Unknown { cpus: self.doors.len() })?;
        let window = door.take().ok_or(CpuError::Taken)?;
        Ok(FastCpu::new(self, door, window))
    }

    /// What was asked of the machine so far.
    pub fn service(&self) -> Service {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Service {
            invalidations: read(&self.counters.invalidations),
            waited: Duration::from_nanos(read(&self.counters.waited)),
            data: read(&self.counters.data),
            instructions: read(&self.counters.instructions),
        }
    }

    /// Returns once no CPU is in a window that began before the generation moved.
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
// 2. `slots` adds the address to the base of one mapping, which lives as long as the machine.
// 3. By the protocol in the module's documentation no CPU uses, after `invalidate` has returned,
//    what it cached before the generation moved, nor is it in a walk that began before. Nothing
//    else is cached.
// 4. `grace` is a field; `break_before_make` changes by `&mut self` only, when no tables borrow the
//    machine.
// 5. `fill` is the engine's own.
// 6. Locks that were poisoned are taken all the same; nothing else could unwind.
unsafe impl<A: Arch> Platform for FastMachine<A> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let hpa = self.frames.take(bytes as u64)?;
        // SAFETY: inside the table region, which `slots` reaches; of that size and alignment, and
        // nobody else's; below 2^46, which all formats can hold.
        unsafe { Frame::from_hpa(Hpa(hpa)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        self.frames.give(frame.hpa().0, bytes as u64);
    }

    #[inline(always)]
    fn slots(&self, table: Hpa) -> NonNull<Slot> {
        // SAFETY: the engine asks for addresses inside frames that `allocate` returned: inside the
        // mapping.
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
    fn grace(&self) -> &Grace {
        &*self.grace
    }

    fn maintain(&self, _memory: Hpa, bytes: u64, what: Maintenance) {
        let counter = match what {
            Maintenance::Data => &self.counters.data,
            Maintenance::Instructions => &self.counters.instructions,
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }
}
