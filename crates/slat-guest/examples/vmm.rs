//! A small VMM: guests come and go while others run. Each guest has threads of its own, for its
//! vCPUs and for the other work; each thread owns its part, and ends when it wants to.

use slat::format::ept::Ept1G;
use slat::*;
use slat_guest::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::error::Error;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, spawn};
use std::time::Instant;

/// The number of threads that may work on guests at one time.
const READERS: usize = 64;
const RAM: u64 = 64 << 20;

/// The machine that all guests share. Table pages come from the allocator.
struct Machine {
    readers: Readers<[ReaderSlot; READERS]>,
    frames: AtomicU64,
    start: Instant,
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).expect("the engine asks for powers of two")
}

// SAFETY: by the numbers of `Platform`'s contract. 1, 2: `allocate` returns memory of that size and
// alignment that no other code uses, whose address is the frame's, and which stays until `free`. 3:
// no CPU loads these tables. 4: `readers` is a field.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.frames.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the size of the layout is not zero; the memory is the frame's alone.
        unsafe { Frame::from_hpa(Hpa(alloc_zeroed(layout(bytes)) as u64)) }
    }
    unsafe fn free(&self, frame: Frame, bytes: usize) {
        self.frames.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the frame came from `allocate` with this size.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("a frame is not at address 0")
    }
    fn publish(&self) {}
    // A real VMM makes the CPUs that run the guest execute INVEPT here, and waits for them.
    fn invalidate(&self, _: &Invalidation) {}
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }
    fn readers(&self) -> &Readers {
        &self.readers
    }
}

impl Host for Machine {
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
    fn wait(&self) {
        std::thread::yield_now();
    }
}

/// Each guest's memory is contiguous in the machine's.
struct OnePiece(Hpa);

impl Backing for OnePiece {
    fn page(&self, host: Hva, _access: Access) -> Result<Page, NoPage> {
        let (hpa, block) = (Hpa(self.0.0 + host.0), PageSize::SIZE_2M);
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

type Guest = SharedGuest<Ept1G, Machine, OnePiece>;

/// The VMM's part of a guest: the threads have the rest.
struct Vm {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<u64>>,
}

impl Vm {
    fn start(machine: &Arc<Machine>, number: u16, vcpus: u16) -> Result<Self, Box<dyn Error>> {
        let ram = OnePiece(Hpa((8 << 30) + u64::from(number) * RAM));
        let config = Config::new(vcpus, PageSize::SIZE_2M);
        let format = Ept1G::default();
        let guest = Guest::new(format, Vmid(number), 40, Arc::clone(machine), ram, config)?;
        let mut worker = guest.worker()?;
        let memslot = MemslotSpec::new(MemslotId(0), Gpa(0), RAM, Hva(0));
        worker.with(|worker| worker.set_memslot(memslot))?;
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for id in 0..vcpus {
            let (mut vcpu, stop) = (guest.vcpu(id)?, Arc::clone(&stop));
            threads.push(spawn(move || {
                let mut faults = 0;
                // A real VMM enters the guest here; this one makes up the guest's exits.
                while !stop.load(Ordering::Relaxed) && faults < 100_000 {
                    let gpa = Gpa(faults * 0x3_7000 % RAM);
                    vcpu.with(|vcpu| vcpu.fault(gpa, Access::Write));
                    faults += 1;
                }
                faults
            }));
        }
        let ends = Arc::clone(&stop);
        threads.push(spawn(move || {
            // The host invalidates memory, and the log of a migration begins and ends.
            let mut taken = 0;
            while !ends.load(Ordering::Relaxed) {
                for log_dirty in [true, false] {
                    let logs = MemslotSpec { log_dirty, ..memslot };
                    worker
                        .with(|worker| worker.set_memslot(logs))
                        .expect("a memslot that is there");
                }
                let host = HvaRange { start: Hva(0), bytes: RAM / 4 };
                worker.with(|worker| drop(worker.invalidate(host, |_| taken += 1)));
            }
            taken
        }));
        // This drops `guest`; the threads keep it alive.
        Ok(Self { stop, threads })
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|thread| thread.join().expect("it does not panic")).sum()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let readers = Readers::new([const { ReaderSlot::new() }; READERS]);
    let frames = AtomicU64::new(0);
    let machine = Arc::new(Machine { readers, frames, start: Instant::now() });
    let mut running = Vec::new();
    for number in 0..20 {
        running.push((number, Vm::start(&machine, number, 2)?));
        if running.len() > 5 {
            let (number, vm) = running.remove(0);
            println!("guest {number} ends after {} faults and pages taken", vm.stop());
        }
    }
    for (number, vm) in running {
        println!("guest {number} ends after {} faults and pages taken", vm.stop());
    }
    println!("table pages that are left: {}", machine.frames.load(Ordering::Relaxed));
    Ok(())
}
