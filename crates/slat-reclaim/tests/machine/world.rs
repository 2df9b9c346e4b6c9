//! The machine with memory and swap behind it, which other threads may do something at every moment
//! that they see, and what each page of the guest must hold.

use crate::turns::Turns;
use slat::{BreakBeforeMake, Frame, Grace, Hpa, Invalidation, Maintenance, Platform, Slot};
use slat_guest::Host;
use slat_reclaim::{Ram, Swap, SwapError};
use slat_sim::{Arch, Machine};
use std::cell::Cell;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

thread_local! {
    /// The calling thread reads pages that the guest may have.
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

/// What is where: of each page a stamp, the first word.
struct Content {
    frames: HashMap<u64, u64>,
    swap: HashMap<u32, u64>,
    /// Slots that are read or written at the moment.
    busy: Vec<u32>,
    rng: fastrand::Rng,
    /// One in so many reads or writes of swap fails.
    fails: Option<u32>,
    pages: Vec<Page>,
    stamp: u64,
}

/// What a page of the guest must hold.
#[derive(Clone, Copy, Default)]
struct Page {
    last: u64,
    /// It is being discarded by so many, and was so often.
    discards: u32,
    discarded: u32,
    /// It was discarded, and nobody has looked since: zero, or what was written meanwhile.
    unsure: bool,
}

const NUMBER: u32 = 32;

impl<A: Arch> World<A> {
    /// A machine whose guest has `pages` pages of `page` bytes, swap of `slots`, and `threads` that
    /// share it.
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

    /// One in so many operations of swap fails from now on.
    pub fn swap_fails(&self, one_in: Option<u32>) {
        self.content().fails = one_in;
    }

    /// Slots of swap that hold something.
    pub fn holds(&self) -> usize {
        self.content().swap.len()
    }

    pub fn fail(&self, why: String) {
        self.turns.fail(why);
    }

    /// `page`, which whoever looked found at `hpa`, holds what was written last.
    pub fn read(&self, page: u64, hpa: Hpa, who: &str) {
        let found = self.at(hpa);
        self.is(page, found, || format!("{who} reads it at {hpa}"));
    }

    fn at(&self, hpa: Hpa) -> u64 {
        self.content().frames.get(&(hpa.0 & !(self.page - 1))).copied().unwrap_or(u64::MAX)
    }

    /// Whoever looked found `found` in `page`.
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

    /// `page` is written at `hpa`.
    pub fn write(&self, page: u64, hpa: Hpa) {
        let mut content = self.content();
        content.stamp += 1;
        let stamp = page << NUMBER | content.stamp;
        content.frames.insert(hpa.0 & !(self.page - 1), stamp);
        let it = &mut content.pages[page as usize];
        it.last = stamp;
        it.unsure &= it.discards != 0;
    }

    /// Does `discard`, which takes these pages from the guest.
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

    /// Does `copy`, which reads `page` while the guest may write it: of what it held meanwhile,
    /// anything.
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

    /// The frame at `hpa` is reached by nobody but the caller.
    fn is_alone(&self, hpa: Hpa) {
        self.machine.take_back(hpa, self.page);
        self.machine.give(hpa, self.page);
    }

    /// Of pages of the host's, the parts that the machine counts in.
    fn parts(&self, hpa: Hpa) -> impl Iterator<Item = Hpa> {
        (hpa.0..hpa.0 + self.page).step_by(4096).map(Hpa)
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes[..8].try_into().expect("a page has eight bytes"))
}

// SAFETY: the machine keeps its promises; moments change none of it. A history that has failed may
// unwind from `Host::wait` alone.
unsafe impl<A: Arch> Platform for World<A> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.machine.allocate(bytes)
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: by the same contract.
        unsafe { self.machine.free(frame, bytes) }
    }

    fn slots(&self, table: Hpa) -> NonNull<Slot> {
        self.turns.moment();
        self.machine.slots(table)
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

    fn fill(&self, slots: &mut [Slot], first: u64, step: u64) {
        self.machine.fill(slots, first, step);
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
    /// Pages that leave, or become part of a block, are nobody's any more.
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

    /// Pages that come are nobody's yet.
    fn write(&self, hpa: Hpa, page: &[u8]) {
        self.turns.moment();
        self.is_alone(hpa);
        self.parts(hpa).for_each(|part| self.machine.host_write(part));
        self.content().frames.insert(hpa.0, word(page));
        self.turns.moment();
    }
}

impl<A: Arch> World<A> {
    /// Uses the slot, which nobody else does meanwhile; fails when swap does.
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
            // What is there by now is not what was asked for.
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
