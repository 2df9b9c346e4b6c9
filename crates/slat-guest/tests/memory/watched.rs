//! A machine that notes a guest's events, and lets a test do something when the guest waits.

use slat::{BreakBeforeMake, Frame, Grace, Hpa, Invalidation, Maintenance, Platform, Pte, Vmid};
use slat_guest::{Event, Events, Host};
use slat_sim::{Arch, Machine};
use std::ptr::NonNull;
use std::sync::Mutex;

/// A machine that notes events, and whose waits do what a test says.
pub struct Watched<A: Arch> {
    pub machine: Machine<A>,
    events: Mutex<Vec<Event>>,
    pub wait: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl<A: Arch> Watched<A> {
    pub fn new(machine: Machine<A>) -> Self {
        Self { machine, events: Mutex::default(), wait: Mutex::new(None) }
    }

    /// Returns the events since the last call.
    pub fn take_events(&self) -> Vec<Event> {
        core::mem::take(&mut *self.events.lock().unwrap())
    }
}

// SAFETY: all is the machine's, which keeps the contract.
unsafe impl<A: Arch> Platform for Watched<A> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.machine.allocate(bytes)
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: as for this function.
        unsafe { self.machine.free(frame, bytes) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        self.machine.entries(table)
    }

    fn publish(&self) {
        self.machine.publish();
    }

    fn invalidate(&self, what: &Invalidation) {
        self.machine.invalidate(what);
    }

    fn invalidate_local(&self, what: &Invalidation) {
        self.machine.invalidate_local(what);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.machine.break_before_make()
    }

    fn grace(&self) -> &Grace {
        self.machine.grace()
    }

    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        self.machine.maintain(memory, bytes, what);
    }

    fn fill(&self, entries: &mut [Pte], first: u64, step: u64) {
        self.machine.fill(entries, first, step);
    }
}

impl<A: Arch> Events for Watched<A> {
    fn event(&self, _: Vmid, event: Event) {
        self.events.lock().unwrap().push(event);
    }
}

impl<A: Arch> Host for Watched<A> {
    fn now(&self) -> u64 {
        self.machine.now()
    }

    fn events(&self) -> impl Events {
        self
    }

    fn wait(&self) {
        if let Some(wait) = &mut *self.wait.lock().unwrap() {
            wait();
        }
    }
}
