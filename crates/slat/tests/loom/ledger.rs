//! The accounts of the uses of pages, of their reports, and of the rights that the guest has lost.
//!
//! Pages are pages of the guest, by number. No step is in this file: between two accesses to an
//! atomic a thread runs alone.
#![allow(dead_code, reason = "each explorer has its own part")]

use crate::machine::{ALL, PAGE};
use core::cell::{Cell, RefCell};
use core::ops::Range;
use slat::{GpaRange, Hpa};
use std::collections::{BTreeMap, BTreeSet};
use std::vec::Vec;

pub const PAGES: usize = (ALL / PAGE) as usize;
/// Guest memory in host memory, far from the tables.
const MEMORY: u64 = 0x100_0000;

/// Accessed or dirty state of each page: when it last arose, and when it was last reported.
#[derive(Default)]
struct State {
    arose: Cell<[usize; PAGES]>,
    reported: Cell<[usize; PAGES]>,
}

impl State {
    fn set(times: &Cell<[usize; PAGES]>, page: usize, when: usize) {
        let mut new = times.get();
        new[page] = new[page].max(when);
        times.set(new);
    }

    /// Returns the pages whose state arose and was not reported since.
    fn outstanding(&self) -> [bool; PAGES] {
        let (arose, reported) = (self.arose.get(), self.reported.get());
        core::array::from_fn(|page| arose[page] > reported[page])
    }
}

pub fn pages(range: GpaRange) -> Range<usize> {
    (range.start().0 / PAGE) as usize..(range.end().0 / PAGE) as usize
}

/// An event: software gave the right to write, or is about to.
struct Grant {
    pages: Range<usize>,
    end: usize,
}

/// The state that was outstanding when a harvest or a scan began, if no other thread was reporting.
pub struct ExpectedState {
    pages: [bool; PAGES],
    started: usize,
}

#[derive(Default)]
pub struct Ledger {
    clock: Cell<usize>,
    accessed: State,
    written: State,
    /// The number of operations that take accessed or dirty state and have not reported it yet, and
    /// the number that began.
    takers: Cell<usize>,
    started: Cell<usize>,
    /// When the last completed write protection of a page began.
    protected: RefCell<[Option<usize>; PAGES]>,
    grants: RefCell<Vec<Grant>>,
    /// Write protections and unmaps that have neither completed nor been handed over.
    protecting: Cell<usize>,
    /// Pieces of host memory, each as large as the guest, and when each was mapped last.
    mapped: RefCell<BTreeMap<u64, usize>>,
    /// The memory that faults find behind each page.
    backing: RefCell<[u64; PAGES]>,
    /// Host pages that were taken from the guest.
    lost: RefCell<BTreeSet<u64>>,
}

impl Ledger {
    pub fn tick(&self) -> usize {
        self.clock.set(self.clock.get() + 1);
        self.clock.get()
    }

    /// The guest used a page of the host.
    pub fn used(&self, gpa: u64, hpa: u64, write: bool, walked: bool) {
        let page = (gpa / PAGE) as usize;
        assert!(
            !self.lost.borrow().contains(&(hpa & !(PAGE - 1))),
            "the guest reached freed memory"
        );
        if let Some(begin) = self.protected.borrow()[page].filter(|_| write) {
            let granted = |g: &Grant| g.pages.contains(&page) && g.end > begin;
            let granted = self.grants.borrow().iter().any(granted);
            assert!(granted, "the guest wrote to page {page}, which is protected");
        }
        // An access through the TLB sets no mark that is set already.
        self.made_used(self.tick(), page..page + 1, walked, write);
    }

    /// Hardware or software has made leaves accessed or dirty.
    pub fn made_used(&self, when: usize, pages: Range<usize>, accessed: bool, dirty: bool) {
        for page in pages {
            for (state, _) in self.states(accessed, dirty) {
                State::set(&state.arose, page, when);
            }
        }
    }

    fn states(&self, accessed: bool, dirty: bool) -> impl Iterator<Item = (&State, bool)> {
        let both = [(&self.accessed, accessed), (&self.written, dirty)];
        both.into_iter().filter(|(_, chosen)| *chosen)
    }

    pub fn report(&self, page: usize, accessed: bool, dirty: bool) {
        let now = self.tick();
        self.states(accessed, dirty).for_each(|(it, _)| State::set(&it.reported, page, now));
    }

    /// Returns when the page was last written.
    pub fn last_write(&self, page: usize) -> usize {
        self.written.arose.get()[page]
    }

    /// Checks that all state was reported after it arose, by an operation or in the tables at the
    /// end.
    pub fn account(&self) {
        assert_eq!(self.accessed.outstanding(), [false; PAGES], "pages whose use was forgotten");
        assert_eq!(self.written.outstanding(), [false; PAGES], "pages whose writes were forgotten");
    }

    /// Called before accessed or dirty state is taken out of the tables.
    pub fn takes(&self) {
        self.takers.set(self.takers.get() + 1);
        self.started.set(self.started.get() + 1);
    }

    pub fn took(&self) {
        self.takers.set(self.takers.get() - 1);
    }

    /// Returns what the calling taker has to find, unless another thread takes at the same time.
    pub fn outstanding(&self, write: bool) -> Option<ExpectedState> {
        let pages = if write { &self.written } else { &self.accessed }.outstanding();
        (self.takers.get() == 1).then(|| ExpectedState { pages, started: self.started.get() })
    }

    /// Returns whether no other thread took since.
    pub fn alone(&self, expected: &ExpectedState) -> bool {
        self.started.get() == expected.started
    }

    /// Returns the page of `range` that the taker missed, by what it `found`.
    pub fn missed(
        &self,
        expected: &ExpectedState,
        range: GpaRange,
        found: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let alone = self.alone(expected);
        pages(range).find(|&page| alone && expected.pages[page] && !found(page))
    }

    /// Called when the right to write is about to be given; returns a value that ends this.
    pub fn grants(&self, range: GpaRange) -> usize {
        let mut grants = self.grants.borrow_mut();
        grants.push(Grant { pages: pages(range), end: usize::MAX });
        grants.len() - 1
    }

    pub fn granted(&self, grant: usize) {
        self.grants.borrow_mut()[grant].end = self.tick();
    }

    pub fn protects(&self) -> usize {
        self.protecting.set(self.protecting.get() + 1);
        self.tick()
    }

    /// Returns whether only the caller owes the invalidation of a protection.
    pub fn protects_alone(&self) -> bool {
        self.protecting.get() == 1
    }

    pub fn protected(&self) {
        self.protecting.set(self.protecting.get() - 1);
    }

    /// From now on no page can be written unless the right was given after `begin`.
    pub fn promise(&self, pages: Range<usize>, begin: usize) {
        for page in pages {
            let promise = &mut self.protected.borrow_mut()[page];
            *promise = (*promise).max(Some(begin));
        }
    }

    /// Returns new memory, as large as the guest, for a map that begins.
    pub fn fresh(&self) -> u64 {
        let mut mapped = self.mapped.borrow_mut();
        let region = mapped.len() as u64 + 1;
        mapped.insert(region, usize::MAX);
        region
    }

    /// Called when the map has ended: from now on a thread that unmaps the memory has it alone.
    pub fn mapped(&self, region: u64) {
        self.mapped.borrow_mut().insert(region, self.tick());
    }

    pub fn hpa(region: u64, gpa: u64) -> Hpa {
        Hpa(MEMORY + region * ALL + gpa)
    }

    /// An unmap that began at `begin` handed out these host pages. The guest has lost them, unless
    /// faults may map them, or they were being mapped at the time.
    pub fn handed_out(&self, hpa: Hpa, bytes: u64, begin: usize) {
        for hpa in (hpa.0..hpa.0 + bytes).step_by(PAGE as usize) {
            let region = (hpa - MEMORY) / ALL;
            let last = self.mapped.borrow().get(&region).copied();
            if last.is_some_and(|last| last < begin) {
                self.lose(hpa..hpa + PAGE);
            }
        }
    }

    /// Returns the memory that a fault at a page is to map; `None` if the pages have no memory in
    /// common.
    pub fn backing(&self, pages: Range<usize>) -> Option<u64> {
        let backing = self.backing.borrow();
        let region = backing[pages.start];
        backing[pages].iter().all(|&other| other == region).then_some(region)
    }

    /// The host takes the memory behind a page away; returns that memory's address.
    pub fn evict(&self, page: usize) -> Hpa {
        let fresh = self.fresh();
        let old = core::mem::replace(&mut self.backing.borrow_mut()[page], fresh);
        Self::hpa(old, page as u64 * PAGE)
    }

    /// From here on the guest may not reach this memory of the host.
    pub fn lose(&self, memory: Range<u64>) {
        self.lost.borrow_mut().extend(memory.step_by(PAGE as usize));
    }

    /// It may be mapped again.
    pub fn regain(&self, memory: Range<u64>) {
        self.lost.borrow_mut().retain(|page| !memory.contains(page));
    }

    pub fn has_lost(&self) -> bool {
        !self.lost.borrow().is_empty()
    }
}
