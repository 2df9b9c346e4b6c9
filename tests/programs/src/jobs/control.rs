//! The hypervisor's control page, through which this program and the hypervisor communicate.

use crate::device::Device;
use anyhow::anyhow;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Guest physical address of the page.
const PAGE: u64 = 0x0b00_0000;
/// A write is an [`Event`]. A read is 1 if the job is to stop, and 0 if not.
const EVENT: usize = 0x00;
/// A write is a number that the hypervisor's job needs, such as a number of pages.
const DECLARE: usize = 0x04;
/// A read is the number of pages of its set that the job is to use; 0 is all.
const SIZE: usize = 0x08;

/// Each write is the number of a page frame of the job's memory.
const PAGES: usize = 0x0c;

/// A write is twice the number of a page frame, plus 1 for private or plus 0 for shared. A read is
/// the result.
const CONVERT: usize = 0x10;

/// Accesses to memory between two reads of the control page, each of which is an exit to the
/// hypervisor.
pub const LOOK_EVERY: usize = 1024;

/// Duration of a job that has neither a hypervisor nor a time limit.
const ALONE: Duration = Duration::from_secs(3);

/// A state that the program reports to the hypervisor.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// All memory is mapped, and the job begins.
    Started = 1,
    /// All results were right.
    Passed = 2,
    /// A result was wrong, or the job failed.
    Failed = 3,
}

/// The control page, if there is one. A lock allows one access at a time.
#[derive(Debug)]
pub struct Control(Option<Mutex<Device>>);

impl Control {
    /// Maps the page, or prints why there is none.
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

    /// Reports an event to the hypervisor.
    pub fn tell(&self, event: Event) {
        self.store(EVENT, event as u32);
    }

    /// Tells the hypervisor the number that its job needs.
    pub fn declare(&self, number: u32) {
        self.store(DECLARE, number);
    }

    /// Returns whether there is a control page.
    pub fn is_there(&self) -> bool {
        self.0.is_some()
    }

    /// Tells the hypervisor the frame of one more page of the job's memory.
    pub fn page(&self, frame: u32) {
        self.store(PAGES, frame);
    }

    /// Asks the hypervisor to make a page private or shared. Returns the result, which is 0 if it
    /// was done, or `None` if there is no control page.
    pub fn convert(&self, frame: u32, private: bool) -> Option<u32> {
        let device = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        device.store(CONVERT, frame << 1 | u32::from(private)).ok()?;
        device.load(CONVERT).ok()
    }

    /// Returns how many pages of its set the job is to use, or `None` for all.
    pub fn size(&self) -> Option<usize> {
        self.load(SIZE).filter(|size| *size != 0).map(|size| size as usize)
    }

    /// Returns the end of a job that begins now: after these seconds, or when the hypervisor stops
    /// it. Without both, it ends after `ALONE`.
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

    /// Returns a control without a hypervisor.
    #[cfg(test)]
    pub fn absent() -> Self {
        Self(None)
    }
}

/// The end of a job.
#[derive(Debug)]
pub struct Until<'a> {
    control: &'a Control,
    end: Option<Instant>,
}

impl Until<'_> {
    /// Returns whether the job is to end now.
    pub fn over(&self) -> bool {
        self.control.load(EVENT) == Some(1) || self.end.is_some_and(|end| Instant::now() >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_no_hypervisor_stops_has_a_time_limit() {
        let control = Control::absent();
        assert!(control.until(Some(0)).over());
        assert!(control.until(None).end.is_some());
        assert!(!control.until(None).over());
        assert_eq!(control.size(), None);
    }
}
