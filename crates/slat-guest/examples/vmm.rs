//! A small VMM: guests come and go while others run. Each has threads of its own, for its vCPUs and
//! for the work beside them, which own their part and end when they like.

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

/// Threads that may work on guests at a time.
const SEATS: usize = 64;
const RAM: u64 = 64 << 20;

/// The machine that all guests share: table pages from the allocator.
struct Machine {
    grace: Grace<[Seat; SEATS]>,
    frames: AtomicU64,
    start: Instant,
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).expect("the engine asks for powers of two")
}

// SAFETY: `allocate` returns memory of that size and alignment that is nobody else's, and whose
// address is the frame's; it stays until `free`. No CPU loads these tables. `grace` is a field.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.frames.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the layout has a size that is not zero; the memory is the frame's alone.
        unsafe { Frame::from_hpa(Hpa(alloc_zeroed(layout(bytes)) as u64)) }
    }
    unsafe fn free(&self, frame: Frame, bytes: usize) {
        self.frames.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the frame came from `allocate` with these bytes.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }
    fn slots(&self, table: Hpa) -> NonNull<Slot> {
        NonNull::new(table.0 as *mut Slot).expect("a frame is not at address 0")
    }
    fn publish(&self) {}
    // Here a VMM has the CPUs that run the guest execute INVEPT, and waits for them.
    fn invalidate(&self, _: &slat::Invalidation) {}
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Never
    }
    fn grace(&self) -> &Grace {
        &self.grace
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

/// Each guest's memory is in one piece of the machine's.
struct OnePiece(Hpa);

impl Backing for OnePiece {
    fn page(&self, host: Hva, _access: Access) -> Result<Page, NoPage> {
        let (hpa, block) = (Hpa(self.0.0 + host.0), PageSize::SIZE_2M);
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

type Guest = SharedGuest<Ept1G, Machine, OnePiece>;

/// What the VMM keeps of a guest: the threads have the rest.
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
        let slot = MemslotSpec::new(MemslotId(0), Gpa(0), RAM, Hva(0));
        worker.with(|worker| worker.set_memslot(slot))?;
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for id in 0..vcpus {
            let (mut vcpu, stop) = (guest.vcpu(id)?, Arc::clone(&stop));
            threads.push(spawn(move || {
                let mut faults = 0;
                // Here a VMM enters the guest; this one makes up what its exits say.
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
            // The host takes memory back, and a migration's log begins and ends.
            let mut taken = 0;
            while !ends.load(Ordering::Relaxed) {
                for log_dirty in [true, false] {
                    let logs = MemslotSpec { log_dirty, ..slot };
                    worker.with(|worker| worker.set_memslot(logs)).expect("a slot that is there");
                }
                let host = HvaRange { start: Hva(0), bytes: RAM / 4 };
                worker.with(|worker| drop(worker.invalidate(host, |_| taken += 1)));
            }
            taken
        }));
        // `guest` goes here: the threads hold it.
        Ok(Self { stop, threads })
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|thread| thread.join().expect("it does not panic")).sum()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let grace = Grace::new([const { Seat::new() }; SEATS]);
    let frames = AtomicU64::new(0);
    let machine = Arc::new(Machine { grace, frames, start: Instant::now() });
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
