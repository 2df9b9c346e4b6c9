//! The machine with the content of memory and swap, where another thread may run at every
//! operation, and what each page of the guest must hold.

use crate::turns::Turns;
use slat::{Hpa, Invalidation, Platform, Pte};
use slat_guest::Host;
use slat_reclaim::{Ram, Swap, SwapError};
use slat_sim::{Arch, Machine};
use std::cell::Cell;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

thread_local! {
    /// The calling thread copies a page that the guest may have mapped.
    static COPIES: Cell<bool> = const { Cell::new(false) };
}

pub struct World<A: Arch> {
    pub machine: Machine<A>,
    pub turns: Turns,
    /// Bytes of a page.
    page: u64,
    slots: u32,
    content: Mutex<Content>,
}

/// Content of frames and of swap: for each page a stamp, its first word.
struct Content {
    frames: HashMap<u64, u64>,
    swap: HashMap<u32, u64>,
    /// Slots of swap that are being read or written.
    busy: Vec<u32>,
    rng: fastrand::Rng,
    /// One in this number of operations of swap fails.
    fails: Option<u32>,
    pages: Vec<Page>,
    stamp: u64,
}

/// The content that a page of the guest must have.
#[derive(Clone, Copy, Default)]
struct Page {
    last: u64,
    /// The number of threads that are discarding it, and of discards so far.
    discards: u32,
    discarded: u32,
    /// It was discarded, and not accessed since: it holds zero, or what was written meanwhile.
    unsure: bool,
}

const NUMBER: u32 = 32;

impl<A: Arch> World<A> {
    /// Makes a world whose guest has `pages` pages of `page` bytes, with `slots` slots of swap, for
    /// `threads` threads.
    pub fn new(
        machine: Machine<A>,
        threads: usize,
        seed: u64,
        page: u64,
        pages: u64,
        slots: u32,
    ) -> Self {
        let content = Content {
            frames: HashMap::new(),
            swap: HashMap::new(),
            busy: Vec::new(),
            rng: fastrand::Rng::with_seed(seed ^ 0x5eed),
            fails: None,
            pages: vec![Page::default(); pages as usize],
            stamp: 0,
        };
        let turns = Turns::new(threads, seed);
        Self { machine, turns, page, slots, content: Mutex::new(content) }
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has one in `one_in` operations of swap fail from now on.
    pub fn swap_fails(&self, one_in: Option<u32>) {
        self.content().fails = one_in;
    }

    /// Returns the number of slots of swap that hold a page.
    pub fn holds(&self) -> usize {
        self.content().swap.len()
    }

    pub fn fail(&self, reason: String) {
        self.turns.fail(reason);
    }

    /// Checks that `page`, which `who` found at `hpa`, holds what was written last.
    pub fn read(&self, page: u64, hpa: Hpa, who: &str) {
        let found = self.at(hpa);
        self.is(page, found, || format!("{who} reads it at {hpa}"));
    }

    fn at(&self, hpa: Hpa) -> u64 {
        self.content().frames.get(&(hpa.0 & !(self.page - 1))).copied().unwrap_or(u64::MAX)
    }

    /// Checks `found`, which `who` found in `page`.
    pub fn is(&self, page: u64, found: u64, who: impl FnOnce() -> String) {
        let mut content = self.content();
        let it = &mut content.pages[page as usize];
        if it.unsure && found == 0 {
            it.last = 0;
        }
        let wanted = it.last;
        it.unsure &= it.discards != 0;
        drop(content);
        if found != wanted {
            self.fail(format!("page {page} has {found:#x}, not {wanted:#x}: {}", who()));
        }
    }

    /// Writes a new stamp to `page`, at `hpa`.
    pub fn write(&self, page: u64, hpa: Hpa) {
        let mut content = self.content();
        content.stamp += 1;
        let stamp = page << NUMBER | content.stamp;
        content.frames.insert(hpa.0 & !(self.page - 1), stamp);
        let it = &mut content.pages[page as usize];
        it.last = stamp;
        it.unsure &= it.discards != 0;
    }

    /// Calls `discard`, which discards these pages.
    pub fn discards(&self, pages: std::ops::Range<u64>, discard: impl FnOnce()) {
        for it in &mut self.content().pages[pages.start as usize..pages.end as usize] {
            it.discards += 1;
            it.discarded += 1;
            it.unsure = true;
        }
        discard();
        for it in &mut self.content().pages[pages.start as usize..pages.end as usize] {
            it.discards -= 1;
        }
    }

    /// Calls `copy`, which copies `page` while the guest may write it, and checks that the copy is
    /// one of the states that the page had meanwhile.
    pub fn copies<E>(
        &self,
        page: u64,
        copy: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<u64, E> {
        let before = self.content().pages[page as usize];
        let mut bytes = vec![0xaa; self.page as usize];
        COPIES.set(true);
        let done = copy(&mut bytes);
        COPIES.set(false);
        done?;
        let found = word(&bytes);
        let after = self.content().pages[page as usize];
        let known = !before.unsure && before.discarded == after.discarded;
        if known && !(before.last..=after.last).contains(&found) {
            let (first, last) = (before.last, after.last);
            self.fail(format!("page {page} was copied as {found:#x}: {first:#x} to {last:#x}"));
        }
        Ok(found)
    }

    /// Has the machine check that only the caller can reach the frame at `hpa`.
    fn is_alone(&self, hpa: Hpa) {
        self.machine.take_back(hpa, self.page);
        self.machine.give(hpa, self.page);
    }

    /// Returns the 4 KiB parts of a page, the unit in which the machine tracks memory.
    fn parts(&self, hpa: Hpa) -> impl Iterator<Item = Hpa> {
        (hpa.0..hpa.0 + self.page).step_by(4096).map(Hpa)
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes[..8].try_into().expect("a page has eight bytes"))
}

// SAFETY: the machine keeps the contract, and this only adds moments, which change no state of it.
// Of the methods, `Host::wait` alone may unwind, in a history that has failed.
unsafe impl<A: Arch> Platform for World<A> {
    slat_sim::forward!(
        machine: allocate free invalidate_local break_before_make readers maintain fill
    );

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        self.turns.moment();
        self.machine.entries(table)
    }

    fn publish(&self) {
        self.turns.moment();
        self.machine.publish();
    }

    fn invalidate(&self, what: &Invalidation) {
        self.turns.moment();
        self.machine.invalidate(what);
        self.turns.moment();
    }
}

impl<A: Arch> Host for World<A> {
    fn now(&self) -> u64 {
        self.turns.moment();
        Host::now(&self.machine)
    }

    fn wait(&self) {
        self.turns.wait_for_others();
    }
}

impl<A: Arch> Ram for World<A> {
    /// A page that leaves, or becomes part of a block, must not be reachable by any CPU any more.
    fn read(&self, hpa: Hpa, page: &mut [u8]) {
        self.turns.moment();
        if !COPIES.get() {
            self.is_alone(hpa);
        }
        self.parts(hpa).for_each(|part| self.machine.host_read(part));
        page.fill(0);
        page[..8].copy_from_slice(&self.at(hpa).to_ne_bytes());
        self.turns.moment();
    }

    /// A page that comes in must not be reachable by any CPU yet.
    fn write(&self, hpa: Hpa, page: &[u8]) {
        self.turns.moment();
        self.is_alone(hpa);
        self.parts(hpa).for_each(|part| self.machine.host_write(part));
        self.content().frames.insert(hpa.0, word(page));
        self.turns.moment();
    }
}

impl<A: Arch> World<A> {
    /// Does `work` on the slot, which no other thread may use meanwhile; returns false if swap
    /// fails.
    fn with_slot(&self, slot: u32, work: impl FnOnce(&mut HashMap<u32, u64>)) -> bool {
        let mut content = self.content();
        if content.busy.contains(&slot) {
            drop(content);
            self.fail(format!("slot {slot} of swap is read and written at a time"));
            return true;
        }
        content.busy.push(slot);
        drop(content);
        self.turns.moment();
        let mut content = self.content();
        work(&mut content.swap);
        drop(content);
        self.turns.moment();
        let mut content = self.content();
        content.busy.retain(|busy| *busy != slot);
        let fails = content.fails;
        fails.is_none_or(|one_in| content.rng.u32(..one_in) != 0)
    }
}

impl<A: Arch> Swap for World<A> {
    fn slots(&self) -> u32 {
        self.slots
    }

    fn page(&self) -> u64 {
        self.page
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
        let done = self.with_slot(slot, |swap| _ = swap.insert(slot, word(page)));
        if !done {
            // After a failure, the content of the slot is unspecified.
            self.content().swap.insert(slot, u64::MAX - 1);
        }
        if done { Ok(()) } else { Err(SwapError::Full) }
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        page.fill(0);
        let mut found = u64::MAX;
        let done = self.with_slot(slot, |swap| found = swap.get(&slot).copied().unwrap_or(found));
        page[..8].copy_from_slice(&found.to_ne_bytes());
        if done { Ok(()) } else { Err(SwapError::Short { bytes: 7 }) }
    }

    fn forget(&self, slots: std::ops::Range<u32>) -> Result<(), SwapError> {
        for slot in slots {
            self.with_slot(slot, |swap| _ = swap.remove(&slot));
        }
        Ok(())
    }
}
