//! A machine that notes a guest's events, and lets a test do something when the guest waits.

use slat::{Platform, Vmid};
use slat_guest::{Event, Events, Host};
use slat_sim::{Arch, Machine};
use std::sync::Mutex;

/// A machine that notes events, and whose waits do what a test says.
pub struct WatchedMachine<A: Arch> {
    pub machine: Machine<A>,
    events: Mutex<Vec<Event>>,
    pub wait: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl<A: Arch> WatchedMachine<A> {
    pub fn new(machine: Machine<A>) -> Self {
        Self { machine, events: Mutex::default(), wait: Mutex::new(None) }
    }

    /// Returns the events since the last call.
    pub fn take_events(&self) -> Vec<Event> {
        core::mem::take(&mut *self.events.lock().unwrap())
    }
}

// SAFETY: all is the machine's, which keeps the contract.
unsafe impl<A: Arch> Platform for WatchedMachine<A> {
    slat_sim::forward!(machine);
}

impl<A: Arch> Events for WatchedMachine<A> {
    fn event(&self, _: Vmid, event: Event) {
        self.events.lock().unwrap().push(event);
    }
}

impl<A: Arch> Host for WatchedMachine<A> {
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
