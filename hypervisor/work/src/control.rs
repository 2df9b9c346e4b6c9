//! The hypervisor's control page: what the guest tells it, and what it tells the guest.

use crate::device::Device;
use anyhow::anyhow;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where the page is in the guest's physical memory.
const PAGE: u64 = 0x0b00_0000;
/// Written: an [`Event`]. Read: 0 go on, 1 stop.
const EVENT: usize = 0x00;
/// Written: a number that the work counts by.
const DECLARE: usize = 0x04;
/// Read: how many pages of its set the work is to use; 0 for all.
const SIZE: usize = 0x08;

/// Written: the number of a page frame of the work's memory, one after the other.
const PAGES: usize = 0x0c;

/// Written: twice a page frame's number, and 1 for private, 0 for shared. Read: the answer.
const CONVERT: usize = 0x10;

/// Accesses to pages between two looks at the page: a look is an exit to the hypervisor.
pub const LOOK_EVERY: usize = 1024;

/// How long work goes on that nobody stops.
const ALONE: Duration = Duration::from_secs(3);

/// What the hypervisor is told.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// All is mapped, and the work begins.
    Started = 1,
    /// All was as expected.
    Passed = 2,
    /// Something was not.
    Failed = 3,
}

/// The control page, if there is one: one access at a time.
#[derive(Debug)]
pub struct Control(Option<Mutex<Device>>);

impl Control {
    /// Finds the page, or says why there is none.
    pub fn open() -> Self {
        let device = Device::open(PAGE).and_then(|device| match device.load(EVENT) {
            Ok(_) => Ok(device),
            Err(_) => Err(anyhow!("nothing answers at {PAGE:#x}")),
        });
        match device {
            Ok(device) => Self(Some(Mutex::new(device))),
            Err(error) => {
                println!("work: no control by a hypervisor: {error:#}");
                Self(None)
            }
        }
    }

    /// Tells the hypervisor.
    pub fn tell(&self, event: Event) {
        self.store(EVENT, event as u32);
    }

    /// Tells the hypervisor a number that the work counts by.
    pub fn declare(&self, number: u32) {
        self.store(DECLARE, number);
    }

    /// Whether there is a hypervisor to talk to.
    pub fn is_there(&self) -> bool {
        self.0.is_some()
    }

    /// Tells the hypervisor of one more page of the work's.
    pub fn page(&self, frame: u32) {
        self.store(PAGES, frame);
    }

    /// Has a page made private, or shared; what the hypervisor answers, 0 if it was done.
    pub fn convert(&self, frame: u32, private: bool) -> Option<u32> {
        let device = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        device.store(CONVERT, frame << 1 | u32::from(private)).ok()?;
        device.load(CONVERT).ok()
    }

    /// How many pages of its set the work is to use, if not all.
    pub fn size(&self) -> Option<usize> {
        self.load(SIZE).filter(|size| *size != 0).map(|size| size as usize)
    }

    /// From now on there are these seconds, or until the hypervisor says stop; with neither, a few.
    pub fn until(&self, seconds: Option<u64>) -> Until<'_> {
        let alone = self.0.is_none().then_some(ALONE);
        let time = seconds.map(Duration::from_secs).or(alone);
        Until { control: self, end: time.and_then(|time| Instant::now().checked_add(time)) }
    }

    fn load(&self, register: usize) -> Option<u32> {
        let device = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        device.load(register).ok()
    }

    fn store(&self, register: usize, value: u32) {
        let Some(device) = &self.0 else { return };
        let device = device.lock().unwrap_or_else(PoisonError::into_inner);
        if device.store(register, value).is_err() {
            eprintln!("work: the hypervisor took no {value} at {:#x}", PAGE + register as u64);
        }
    }

    /// As where there is no hypervisor.
    #[cfg(test)]
    pub fn absent() -> Self {
        Self(None)
    }
}

/// When work ends.
#[derive(Debug)]
pub struct Until<'a> {
    control: &'a Control,
    end: Option<Instant>,
}

impl Until<'_> {
    /// Whether it is to end now.
    pub fn over(&self) -> bool {
        self.control.load(EVENT) == Some(1) || self.end.is_some_and(|end| Instant::now() >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_nobody_stops_has_an_end() {
        let control = Control::absent();
        assert!(control.until(Some(0)).over());
        assert!(control.until(None).end.is_some());
        assert!(!control.until(None).over());
        assert_eq!(control.size(), None);
    }
}
