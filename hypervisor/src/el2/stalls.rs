//! How long faults hold up vCPUs: from the first fault on an address to the one after which the
//! guest goes on. Noted while a job asks.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem::take;
use core::sync::atomic::{AtomicBool, Ordering};
use slat_hypervisor::stalls::Stalls;
use spin::Mutex;

/// Times of each vCPU that are kept, at most.
const MOST: usize = 1 << 18;

/// What each vCPU has noted.
pub struct Notes {
    asked: AtomicBool,
    /// Locked by the vCPU, and by who asks.
    times: Box<[Mutex<Vec<u64>>]>,
}

impl Notes {
    pub fn new(vcpus: u64) -> Self {
        let times = (0..vcpus).map(|_| Mutex::default()).collect();
        Self { asked: AtomicBool::new(false), times }
    }

    /// vCPU `vcpu` was held up for so many ticks.
    pub fn note(&self, vcpu: u16, ticks: u64) {
        if self.asked.load(Ordering::Relaxed) {
            let mut times = self.times[vcpu as usize].lock();
            if times.len() < MOST {
                times.push(ticks);
            }
        }
    }

    /// From now on times are noted.
    pub fn begin(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// What was noted, and no more is.
    pub fn end(&self) -> Stalls {
        self.asked.store(false, Ordering::Relaxed);
        let mut all: Vec<u64> =
            self.times.iter().flat_map(|times| take(&mut *times.lock())).collect();
        Stalls::of(&mut all)
    }
}
