//! The record of a machine that is traced: the events of all threads in one order.
//!
//! The engine's stores reach the record through [`slat::observe`], which holds the record's lock
//! around each store: stores are recorded in the order in which they happen. Nothing else is locked
//! meanwhile, because other threads may wait for the record while they hold the machine's state.

use crate::instruction::{Barrier, Tlbi};
use slat::Vmid;
use slat::observe::{Observer, Order, observe};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::ThreadId;

/// An event that a checker of traces may need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    Allocate {
        table: u64,
        bytes: usize,
    },
    Free {
        table: u64,
        bytes: usize,
    },
    /// A CPU loads a root.
    Load {
        cpu: usize,
        vmid: Vmid,
        root: u64,
    },
    Unload {
        cpu: usize,
    },
    /// The guest that the thread's invalidations are for now.
    Guest(Vmid),
    Store {
        address: u64,
        value: u64,
        order: Order,
    },
    Tlbi(Tlbi, u64),
    Dsb(Barrier),
    Isb,
}

#[derive(Debug)]
struct Tracked {
    bytes: usize,
    hpa: u64,
    events: Arc<Events>,
}

type Events = Mutex<Vec<(ThreadId, Event)>>;

/// The tables of all traced machines, by their address in this process.
static TABLES: RwLock<BTreeMap<usize, Tracked>> = RwLock::new(BTreeMap::new());

static OBSERVER: Observer = |pte, raw, order, store| {
    let tables = TABLES.read().unwrap_or_else(PoisonError::into_inner);
    let found = tables.range(..=pte).next_back().filter(|(start, it)| pte - *start < it.bytes);
    let Some((start, tracked)) = found else {
        _ = store();
        return;
    };
    let (address, events) = (tracked.hpa + (pte - start) as u64, Arc::clone(&tracked.events));
    drop(tables);
    let mut events = events.lock().unwrap_or_else(PoisonError::into_inner);
    if store() {
        events.push((std::thread::current().id(), Event::Store { address, value: raw, order }));
    }
};

/// The record of one machine.
#[derive(Debug)]
pub(crate) struct Recorder {
    events: Arc<Events>,
}

impl Recorder {
    pub fn new() -> Self {
        observe(&OBSERVER);
        Self { events: Arc::default() }
    }

    pub fn push(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push((std::thread::current().id(), event));
    }

    /// Records stores to the `bytes` at `memory` as stores to `hpa`.
    pub fn track(&self, memory: usize, bytes: usize, hpa: u64) {
        let tracked = Tracked { bytes, hpa, events: Arc::clone(&self.events) };
        TABLES.write().unwrap_or_else(PoisonError::into_inner).insert(memory, tracked);
    }

    /// Returns the events, with threads numbered in the order in which they appear.
    pub fn events(&self) -> Vec<(usize, Event)> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut threads: Vec<ThreadId> = Vec::new();
        let number = |&(thread, event): &(ThreadId, Event)| {
            let known = threads.iter().position(|known| *known == thread);
            let number = known.unwrap_or(threads.len());
            if known.is_none() {
                threads.push(thread);
            }
            (number, event)
        };
        events.iter().map(number).collect()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let mut tables = TABLES.write().unwrap_or_else(PoisonError::into_inner);
        tables.retain(|_, tracked| !Arc::ptr_eq(&tracked.events, &self.events));
    }
}
