//! Times for which faults delay vCPUs: from the first fault on an address until the guest
//! continues. They are recorded while a job asks for them.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem::take;
use core::sync::atomic::{AtomicBool, Ordering};
use slat_hypervisor::stalls::Stalls;
use spin::Mutex;

/// Largest number of times that are kept for each vCPU.
const MOST: usize = 1 << 18;

/// The recorded times of each vCPU.
pub struct Notes {
    asked: AtomicBool,
    /// Times in ticks. A vCPU locks its own list to add to it, and the manager to take it.
    times: Box<[Mutex<Vec<u64>>]>,
}

impl Notes {
    pub fn new(vcpus: u64) -> Self {
        let times = (0..vcpus).map(|_| Mutex::default()).collect();
        Self { asked: AtomicBool::new(false), times }
    }

    /// Records that a fault delayed vCPU `vcpu` for `ticks` ticks.
    pub fn note(&self, vcpu: u16, ticks: u64) {
        if self.asked.load(Ordering::Relaxed) {
            let mut times = self.times[vcpu as usize].lock();
            if times.len() < MOST {
                times.push(ticks);
            }
        }
    }

    /// Starts to record times.
    pub fn begin(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Stops recording, and returns a summary of the times.
    pub fn end(&self) -> Stalls {
        self.asked.store(false, Ordering::Relaxed);
        let mut all: Vec<u64> =
            self.times.iter().flat_map(|times| take(&mut *times.lock())).collect();
        Stalls::of(&mut all)
    }
}
