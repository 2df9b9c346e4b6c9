//! What happens on a machine that is traced, in one order of all threads.
//!
//! Stores of the engine reach the record through [`slat::observe`]: the record's lock is held
//! around each, so no two of them are recorded in another order than they happened in. Nothing
//! else is locked meanwhile; everybody else may hold the machine's state already.

use crate::instruction::{Barrier, Tlbi};
use slat::Vmid;
use slat::observe::{Observer, Order, observe};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::ThreadId;

/// Something that a checker of traces may want to know.
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
    /// The guest that the thread's invalidations are for.
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

/// Where tables of traced machines lie.
static TABLES: RwLock<BTreeMap<usize, Tracked>> = RwLock::new(BTreeMap::new());

static OBSERVER: Observer = |slot, raw, order, store| {
    let tables = TABLES.read().unwrap_or_else(PoisonError::into_inner);
    let found = tables.range(..=slot).next_back().filter(|(start, it)| slot - *start < it.bytes);
    let Some((start, tracked)) = found else {
        _ = store();
        return;
    };
    let (address, events) = (tracked.hpa + (slot - start) as u64, Arc::clone(&tracked.events));
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

    /// Stores to the `bytes` at `memory` are recorded as ones to `hpa`.
    pub fn track(&self, memory: usize, bytes: usize, hpa: u64) {
        let tracked = Tracked { bytes, hpa, events: Arc::clone(&self.events) };
        TABLES.write().unwrap_or_else(PoisonError::into_inner).insert(memory, tracked);
    }

    /// Threads by the order in which they appear.
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
