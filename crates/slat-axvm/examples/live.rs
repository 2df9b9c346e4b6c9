//! Work that axaddrspace's page table cannot do while a vCPU runs: changes of tables that CPUs
//! walk, on EPT, and a dirty log, by write protection and by the dirty bits of hardware.
//!
//! The vCPU is a thread of the simulator, which loads and stores memory through a TLB and the
//! tables.

use ax_memory_addr::{PhysAddr, VirtAddr};
use axaddrspace::{AddrSpace, MappingFlags};
use slat::format::ept::Ept2M;
use slat::{
    Access, AddressSpace, Attributes, Gpa, GpaRange, Hpa, PageSize, Pages, TableCache, UnmapEntry,
    Vmid,
};
use slat_axvm::{GuestMemory, NestedPageTable};
use slat_sim::Ept;
use slat_sim::fast::{FastCpu, FastMachine};
use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};

type Machine = FastMachine<Ept>;
type Space<'m> = AddrSpace<NestedPageTable<'m, Ept2M, Machine, Memory<'m>>>;

const PAGE: u64 = 4 << 10;
const BLOCK: u64 = 2 << 20;
/// Guest memory that is mapped from the beginning, in blocks.
const RAM: u64 = 0x8000_0000;
const RAM_BYTES: u64 = 4 * BLOCK;
/// Addresses where nothing is mapped.
const SPARE: u64 = 0xe000_0000;
/// A window, parts of which are mapped and unmapped.
const WINDOW: u64 = 0xc000_0000;
const WINDOW_BYTES: u64 = 2 * BLOCK;
const VMID: Vmid = Vmid(1);

/// The guest pages after those of [`RAM`], which are never given back.
struct Memory<'m> {
    machine: &'m Machine,
    next: Mutex<u64>,
}

impl GuestMemory for Memory<'_> {
    fn allocate(&self) -> Option<PhysAddr> {
        let mut next = self.next.lock().ok()?;
        let end = self.machine.memory_base().0 + self.machine.memory_bytes();
        let page = (*next < end).then_some(*next)?;
        *next += PAGE;
        Some(PhysAddr::from(page as usize))
    }

    fn free(&self, _: PhysAddr) {}

    fn address(&self, address: PhysAddr) -> VirtAddr {
        let word = self.machine.address(Hpa(address.as_usize() as u64 & !7), 8);
        VirtAddr::from(word.expose_provenance() | address.as_usize() & 7)
    }
}

fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(start), bytes).expect("a range of constants")
}

/// A guest with memory in blocks, and an area that nothing has populated.
fn guest(machine: &Machine) -> Result<Space<'_>, Box<dyn Error>> {
    let base = machine.memory_base().0;
    let memory = Memory { machine, next: Mutex::new(base + RAM_BYTES + WINDOW_BYTES) };
    let table = AddressSpace::new(Ept2M::default(), VMID, 48, machine)?;
    let table = NestedPageTable::new(table, memory);
    let mut space = AddrSpace::new_empty(table, 0.into(), 1 << 40)?;
    let all = MappingFlags::READ | MappingFlags::WRITE | MappingFlags::EXECUTE;
    space.map_linear((RAM as usize).into(), (base as usize).into(), RAM_BYTES as usize, all)?;
    space.map_alloc((WINDOW as usize).into(), WINDOW_BYTES as usize, all, false)?;
    Ok(space)
}

/// Counts of what happened while the tables changed.
#[derive(Debug)]
pub struct Beside {
    /// How often all of the guest's memory was split into pages and collapsed again. A window of it
    /// was mapped and unmapped ten times as often.
    pub rounds: u64,
    /// Accesses of the vCPU to the memory that was split.
    pub accesses: u64,
    /// The number of those accesses that were refused, or found other content than the guest had
    /// left there.
    pub faults: u64,
    /// The vCPU's accesses to memory that is mapped and unmapped, while it was mapped.
    pub window: u64,
    /// The number of those accesses that found other memory than is mapped there.
    pub strangers: u64,
    /// Lookups of another thread, through `AddrSpace`.
    pub lookups: u64,
    /// The number of those lookups that had no answer, or a wrong one.
    pub wrong: u64,
}

/// A vCPU uses its memory, a thread looks addresses up, and two threads change the tables, all at
/// once.
///
/// The lock is the one that a hypervisor has around its `AddrSpace`: threads with a guard share it.
/// The vCPU does not take it.
///
/// # Errors
/// The refusals of the engine.
pub fn beside(rounds: u64) -> Result<Beside, Box<dyn Error>> {
    let machine = Machine::new(Ept::default(), 1, 64 << 20, 4 << 20)?;
    let space = guest(&machine)?;
    let root = space.page_table().space().root();
    let base = machine.memory_base().0;
    for page in 0..(RAM_BYTES + WINDOW_BYTES) / PAGE {
        machine.write_host(Hpa(base + page * PAGE), page);
    }
    let stop = AtomicBool::new(false);
    let (met, gone) = (AtomicU64::new(0), AtomicU64::new(0));
    let (space, machine) = (&RwLock::new(space), &machine);
    let running = || !stop.load(Ordering::Relaxed);
    let mut seen =
        Beside { rounds: 0, accesses: 0, faults: 0, window: 0, strangers: 0, lookups: 0, wrong: 0 };
    let mut cpu = machine.cpu(0)?;
    cpu.load(VMID, root);
    std::thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let vcpu = scope.spawn(|| {
            let (mut accesses, mut faults, mut window, mut strangers) = (0, 0, 0, 0);
            while running() {
                for page in 0..RAM_BYTES / PAGE {
                    accesses += 2;
                    faults += u64::from(cpu.read(RAM + page * PAGE) != Ok(page));
                    faults += u64::from(cpu.write(RAM + page * PAGE + 8, page).is_err());
                }
                // It unmaps a few pages many times, so that they are in the TLB when they go.
                for page in (0..1024).map(|access| access % 8) {
                    let Ok(found) = cpu.read(WINDOW + page * PAGE) else { continue };
                    window += 1;
                    strangers += u64::from(found != RAM_BYTES / PAGE + page);
                }
                met.store(window, Ordering::Relaxed);
            }
            (accesses, faults, window, strangers)
        });
        let looker = scope.spawn(|| {
            let (mut lookups, mut wrong) = (0, 0);
            while running() {
                let space = space.read().unwrap();
                for page in 0..RAM_BYTES / PAGE {
                    let hpa = PhysAddr::from((base + page * PAGE) as usize);
                    let found = space.translate(((RAM + page * PAGE) as usize).into());
                    lookups += 1;
                    wrong += u64::from(found != Some(hpa));
                }
            }
            (lookups, wrong)
        });
        let mapper = scope.spawn(|| {
            let result = window_comes_and_goes(space, machine, &gone, running);
            result.map_err(|error| error.to_string())
        });
        let mut storage = [const { None }; 8];
        let mut cache = TableCache::new(machine, &mut storage);
        let mut result = Ok(());
        // All threads meet here, however they are scheduled.
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let enough = || count(&met) > 4096 && count(&gone) >= 10 * rounds;
        while result.is_ok() && (seen.rounds < rounds || !enough() && !mapper.is_finished()) {
            result = split_and_collapse(space, &mut cache, seen.rounds % 32 == 31);
            seen.rounds += 1;
        }
        stop.store(true, Ordering::Relaxed);
        (seen.accesses, seen.faults, seen.window, seen.strangers) = vcpu.join().expect("the vCPU");
        (seen.lookups, seen.wrong) = looker.join().expect("the lookups");
        mapper.join().expect("the window")?;
        result
    })?;
    Ok(seen)
}

/// Splits all blocks into pages, and collapses them again.
fn split_and_collapse(
    space: &RwLock<Space<'_>>,
    cache: &mut TableCache<'_, Ept2M, Machine>,
    reclaims: bool,
) -> Result<(), Box<dyn Error>> {
    cache.fill(8)?;
    let (shared, all) = (space.read().unwrap(), range(RAM, RAM_BYTES));
    let mut guard = shared.page_table().enter();
    guard.split(all, PageSize::SIZE_4K, cache)?;
    guard.collapse(all, PageSize::SIZE_2M)?;
    guard.invalidate();
    drop(guard);
    drop(shared);
    if reclaims {
        // axaddrspace makes its own changes under the exclusive lock; they give back tables that
        // were unlinked.
        let mut alone = space.write().unwrap();
        alone.map_alloc((SPARE as usize).into(), 4096, MappingFlags::READ, false)?;
        alone.unmap((SPARE as usize).into(), 4096)?;
    }
    Ok(())
}

/// The content of the memory behind the window while it has another owner.
const TAKEN: u64 = !0;

/// Maps the window by pages and unmaps a part of it, again and again. The batch hands out the
/// memory once no vCPU can reach it, and this function uses it for something else at once.
fn window_comes_and_goes(
    space: &RwLock<Space<'_>>,
    machine: &Machine,
    gone: &AtomicU64,
    running: impl Fn() -> bool,
) -> Result<(), Box<dyn Error>> {
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(machine, &mut storage);
    let (window, memory) = (range(WINDOW, WINDOW_BYTES), machine.memory_base().0 + RAM_BYTES);
    // The range cuts both tables.
    let (part, mut places) = (range(WINDOW + PAGE, WINDOW_BYTES / 2), [UnmapEntry::EMPTY; 64]);
    while running() {
        cache.fill(4)?;
        let shared = space.read().unwrap();
        let mut guard = shared.page_table().enter();
        guard.map(window, Hpa(memory), Attributes::RAM, PageSize::SIZE_4K, &mut cache)?;
        let (mut left, mut batch) = (part, guard.unmap_batch(&mut places));
        loop {
            let result = guard.unmap(left, &mut batch);
            for run in batch.complete() {
                for page in (run.hpa.0..run.hpa.0 + run.bytes).step_by(PAGE as usize) {
                    machine.write_host(Hpa(page), TAKEN);
                }
            }
            let Err(stopped) = result else { break };
            left = range(stopped.at.0, part.end().0 - stopped.at.0);
        }
        for page in 0..WINDOW_BYTES / PAGE {
            machine.write_host(Hpa(memory + page * PAGE), RAM_BYTES / PAGE + page);
        }
        gone.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Handles a fault of the guest.
///
/// A page that is mapped, but protected by the log, gets the right back, and is logged after that.
/// Such a fault must not go to [`AddrSpace::handle_page_fault`], which would put another page in
/// its place.
fn fault(space: &mut Space<'_>, gpa: u64, log: &mut [u64]) -> Result<bool, Box<dyn Error>> {
    let page = range(gpa & !(PAGE - 1), PAGE);
    let mut guard = space.page_table().enter();
    if guard.translate(Gpa(gpa))?.is_none() {
        drop(guard);
        return Ok(space.handle_page_fault((gpa as usize).into(), MappingFlags::WRITE));
    }
    guard.relax(page, Access::Write)?.flush_local();
    let bit = (page.start().0 - RAM) / PAGE;
    log[bit as usize / 64] |= 1 << (bit % 64);
    Ok(true)
}

/// The guest writes to pages of its memory; returns how often it faulted.
fn write(
    space: &mut Space<'_>,
    cpu: &mut FastCpu<'_, Ept>,
    pages: &[u64],
    log: &mut [u64],
) -> Result<u64, Box<dyn Error>> {
    let mut faults = 0;
    for page in pages {
        let gpa = RAM + page * PAGE + 16;
        while cpu.write(gpa, *page).is_err() {
            faults += 1;
            if !fault(space, gpa, log)? {
                return Err(format!("a fault at {gpa:#x} that nobody answers").into());
            }
        }
    }
    Ok(faults)
}

/// Returns the pages that a bitmap names.
fn named(log: &[u64]) -> Vec<u64> {
    (0..64 * log.len() as u64)
        .filter(|bit| log[*bit as usize / 64] >> (bit % 64) & 1 == 1)
        .collect()
}

/// The pages that a log found in each round, and the faults that it took.
pub type Rounds = Vec<(Vec<u64>, u64)>;

/// The pages of its memory that the guest writes in each round.
pub const WRITTEN: [&[u64]; 3] = [&[3, 500, 3, 513, 2047], &[500, 7], &[]];

/// A dirty log by write protection.
///
/// # Errors
/// The refusals of the engine.
pub fn log_by_faults() -> Result<Rounds, Box<dyn Error>> {
    let machine = Machine::new(Ept::default(), 1, 64 << 20, 4 << 20)?;
    let mut space = guest(&machine)?;
    let mut cpu = machine.cpu(0)?;
    cpu.load(VMID, space.page_table().space().root());
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(&machine, &mut storage);
    cache.fill(8)?;
    // The log begins: once this has completed, the memory is in pages, and every write to them
    // faults.
    let all = range(RAM, RAM_BYTES);
    let mut guard = space.page_table().enter();
    guard.split(all, PageSize::SIZE_4K, &mut cache)?;
    guard.write_protect(all)?;
    guard.invalidate();
    drop(guard);
    let mut rounds = Vec::new();
    for pages in WRITTEN {
        let mut log = [0; (RAM_BYTES / PAGE) as usize / 64];
        let faults = write(&mut space, &mut cpu, pages, &mut log)?;
        // A round: it protects the pages that it sends first, and copies them after that.
        let mut guard = space.page_table().enter();
        guard.write_protect_pages(&Pages { start: Gpa(RAM), bits: &log })?;
        guard.invalidate();
        rounds.push((named(&log), faults));
    }
    Ok(rounds)
}

/// A dirty log by the dirty bits of hardware: no fault, and no thread except the one that reads the
/// log.
///
/// # Errors
/// The refusals of the engine.
pub fn log_by_hardware() -> Result<Rounds, Box<dyn Error>> {
    let machine = Machine::new(Ept::default(), 1, 64 << 20, 4 << 20)?;
    let mut space = guest(&machine)?;
    let mut cpu = machine.cpu(0)?;
    cpu.load(VMID, space.page_table().space().root());
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(&machine, &mut storage);
    cache.fill(8)?;
    let all = range(RAM, RAM_BYTES);
    let mut guard = space.page_table().enter();
    guard.split(all, PageSize::SIZE_4K, &mut cache)?;
    // Mapped memory counts as written: the first round has all of it.
    let mut log = [0; (RAM_BYTES / PAGE) as usize / 64];
    guard.harvest(all, &mut log)?;
    drop(guard);
    let mut rounds = vec![(named(&log), 0)];
    for pages in WRITTEN {
        let mut log = [0; (RAM_BYTES / PAGE) as usize / 64];
        let faults = write(&mut space, &mut cpu, pages, &mut log)?;
        space.page_table().enter().harvest(all, &mut log)?;
        rounds.push((named(&log), faults));
    }
    Ok(rounds)
}

#[allow(dead_code, reason = "the test has one of its own")]
fn main() -> Result<(), Box<dyn Error>> {
    println!("Tables that a vCPU walks, changed by two threads while a third looks: EPT");
    println!("  {:?}", beside(200)?);
    println!("A dirty log by write protection: pages that were found written, and faults");
    log_by_faults()?.iter().for_each(|round| println!("  {round:?}"));
    println!("A dirty log by EPT's dirty flags: the first round is all of the memory");
    for (pages, faults) in &log_by_hardware()? {
        println!("  {} pages {:?}, {faults} faults", pages.len(), &pages[..pages.len().min(4)]);
    }
    Ok(())
}
