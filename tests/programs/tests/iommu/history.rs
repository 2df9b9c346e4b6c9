//! A random history of changes, and a device that reads and writes before and after each.

use crate::machine::{Fault, Machine};
use crate::qemu::{Edu, Qemu};
use crate::unit::{GUEST, Old, Unit};
use fastrand::Rng;
use slat::{
    Access, AddressSpace, AgeBitmaps, AgeOptions, Attributes, Format, Gpa, GpaRange, Hpa,
    Invalidation, PageSize, Rights, TableCache, Vmid,
};
use std::rc::Rc;

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
const BLOCKS: u64 = 4;
const PAGES: u64 = BLOCKS * 512;
/// Memory that the device's addresses map to, from the begin of the machine's on.
const MEMORY: u64 = 0x100_0000;
/// A page of the device that stays mapped. Its memory is behind the others'.
const SCRATCH: u64 = 64 << 20;
/// What the device writes where an access is refused.
const NOTHING: u64 = 0x5151_5151;
/// Changes of a history.
const STEPS: usize = 200;

/// What the device finds at a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Page {
    memory: u64,
    write: bool,
    old: bool,
}

fn range(first: u64, pages: u64) -> GpaRange {
    GpaRange::new(Gpa(first * PAGE), pages * PAGE).unwrap()
}

/// A history, and the accesses of the device.
struct History<'m, U: Unit> {
    qemu: Rc<Qemu>,
    machine: &'m Machine<U>,
    space: AddressSpace<'m, U::Format, Machine<U>>,
    device: Edu,
    memory: u64,
    model: Vec<Option<Page>>,
    random: Rng,
    written: u64,
    collapsed: u64,
}

impl<'m, U: Unit> History<'m, U> {
    fn new(qemu: Rc<Qemu>, machine: &'m Machine<U>, seed: u64) -> Self {
        let memory = U::board().memory + MEMORY;
        let format = machine.unit.format();
        let mut space = AddressSpace::new(format, Vmid(GUEST), U::ADDRESS_BITS, machine).unwrap();
        let (scratch, at) = (range(SCRATCH / PAGE, 1), Hpa(memory + BLOCKS * BLOCK));
        space.map(scratch, at, Attributes::RAM, PageSize::SIZE_4K).unwrap();
        let registers = machine.unit.switch_on(space.root(), &space.geometry());
        for page in 0..PAGES {
            qemu.put(memory + page * PAGE + 8, 0x1000 + page);
        }
        let device = Edu::new(Rc::clone(&qemu), registers);
        let random = Rng::with_seed(seed);
        let model = vec![None; PAGES as usize];
        let (written, collapsed) = (1 << 40, 0);
        Self { qemu, machine, space, device, memory, model, random, written, collapsed }
    }

    /// Returns the pages of the model in a range.
    fn pages(&mut self, first: u64, pages: u64) -> &mut [Option<Page>] {
        &mut self.model[first as usize..(first + pages) as usize]
    }

    /// Returns what the device may use at a page.
    fn usable(&self, page: u64) -> Option<Page> {
        self.model[page as usize].filter(|page| U::OLD == Old::Used || !page.old)
    }

    /// Returns what the device reads at offset 8 of a page.
    fn read(&self, page: u64) -> u64 {
        let scratch = self.memory + BLOCKS * BLOCK;
        self.qemu.put(scratch + 16, NOTHING);
        self.device.fill(SCRATCH + 16);
        self.device.fill(page * PAGE + 8);
        self.device.spill(SCRATCH + 24);
        self.qemu.get(scratch + 24)
    }

    /// Returns why the device's read of a page is wrong, if it is.
    fn wrong_read(&self, page: u64) -> Option<String> {
        self.machine.unit.take_refused();
        let found = self.read(page);
        let is_refused = self.machine.unit.take_refused();
        let is_right = match self.usable(page) {
            Some(Page { memory, .. }) => found == self.qemu.get(memory + 8) && !is_refused,
            // An access through an old entry is not refused.
            None => is_refused,
        };
        (!is_right).then(|| format!("page {page:#x} reads {found:#x}, refused {is_refused}"))
    }

    /// Lets the device write to a page; returns why that is wrong, if it is.
    fn wrong_write(&mut self, page: u64) -> Option<String> {
        self.written += 1;
        let (new, memory) = (self.written, self.memory);
        self.qemu.put(memory + BLOCKS * BLOCK + 16, new);
        self.device.fill(SCRATCH + 16);
        self.device.spill(page * PAGE + 32);
        self.machine.unit.take_refused();
        let at = |place: u64| self.qemu.get(memory + place * PAGE + 32);
        let mut places = (0..PAGES).filter(|&place| at(place) == new);
        let found = places.next().map(|place| memory + place * PAGE);
        let expected = self.usable(page).filter(|page| page.write).map(|page| page.memory);
        (found != expected).then(|| format!("page {page:#x} is written at {found:x?}"))
    }

    fn map(&mut self, first: u64, pages: u64, size: PageSize) {
        let leaf = size.bytes() / PAGE;
        let memory = self.random.u64(..=(PAGES - pages) / leaf) * leaf * PAGE + self.memory;
        self.space.map(range(first, pages), Hpa(memory), Attributes::RAM, size).unwrap();
        for (page, memory) in self.pages(first, pages).iter_mut().zip((memory..).step_by(4096)) {
            *page = Some(Page { memory, write: true, old: false });
        }
    }

    fn split(&mut self, first: u64, pages: u64) {
        let mut cache = TableCache::filled(self.machine, 4).unwrap();
        let (first, end) = (first / 512 * 512, (first + pages).next_multiple_of(512));
        let mut guard = self.space.enter();
        guard.split(range(first, end - first), PageSize::SIZE_4K, &mut cache).unwrap();
        guard.invalidate();
    }

    fn unmap(&mut self, first: u64, pages: u64) {
        self.split(first, pages);
        self.space.unmap(range(first, pages), |_| ()).unwrap();
        self.pages(first, pages).fill(None);
    }

    fn protect(&mut self, first: u64, pages: u64) {
        self.split(first, pages);
        let read_only = Rights { write: false, ..Rights::ALL };
        self.space.protect(range(first, pages), read_only).unwrap();
        self.pages(first, pages).iter_mut().flatten().for_each(|page| page.write = false);
    }

    /// Lets a device use a page that it was refused. It does not walk again by itself before it
    /// faults, so this owes an invalidation, as the page on formats says.
    fn relax(&mut self, page: u64, access: Access) {
        self.split(page, 1);
        let mut guard = self.space.enter();
        guard.relax(range(page, 1), access).unwrap().flush_local();
        guard.invalidate();
        let stale = Some(range(page, 1));
        let what = Invalidation { vmid: Vmid(GUEST), range: stale, leaf: None, tables: false };
        self.machine.unit.invalidate(&what, GUEST);
        let page = self.model[page as usize].as_mut().unwrap();
        page.old = false;
        page.write |= access == Access::Write;
    }

    /// Makes pages old.
    fn age(&mut self, first: u64, pages: u64) {
        self.split(first, pages);
        let (mut young, mut unanswered) = ([0], [0]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let how = AgeOptions { flush_tlb: true, ..AgeOptions::LEAVES };
        self.space.enter().age(range(first, pages), &mut ages, how).unwrap();
        self.pages(first, pages).iter_mut().flatten().for_each(|page| page.old = true);
    }

    /// Moves a page to other memory: the device's writes are kept off meanwhile.
    fn replace(&mut self, page: u64) {
        self.protect(page, 1);
        let old = self.model[page as usize].unwrap();
        let to = self.memory + self.random.u64(..PAGES) * PAGE;
        let mut guard = self.space.enter();
        guard.replace(range(page, 1), Hpa(old.memory), Hpa(to), Attributes::RAM).unwrap();
        guard.invalidate();
        self.model[page as usize] = Some(Page { memory: to, write: true, old: false });
    }

    /// Puts a block together if its pages allow it, which a format may refuse.
    fn collapse(&mut self, block: u64) {
        let pages = self.pages(block * 512, 512).to_vec();
        let first = pages[0];
        let follows = |(n, page): (usize, &Option<Page>)| {
            let place = first.map(|first| (first.memory + n as u64 * PAGE, first.write));
            place.is_some_and(|(memory, _)| n > 0 || memory.is_multiple_of(BLOCK))
                && page.map(|page| (page.memory, page.write)) == place
        };
        let fits = pages.iter().enumerate().all(follows);
        let mut guard = self.space.enter();
        let is_block =
            guard.descriptor(Gpa(block * BLOCK)).is_some_and(|(_, s)| s.bytes() == BLOCK);
        let collapsed = guard.collapse(range(block * 512, 512), PageSize::SIZE_2M);
        guard.invalidate();
        drop(guard);
        if !self.space.format().marks_valid() {
            assert!(collapsed.is_err());
            return;
        }
        let expected = if fits && !is_block { BLOCK } else { 0 };
        assert_eq!(collapsed, Ok(expected));
        if expected > 0 {
            self.collapsed += 1;
            let old = pages.iter().flatten().all(|page| page.old);
            self.pages(block * 512, 512).iter_mut().flatten().for_each(|page| page.old = old);
        }
    }

    /// Changes the tables once, at the pages from `first` on.
    fn change(&mut self, first: u64, pages: u64) {
        let (block, page) = (first / 512, self.model[first as usize]);
        match self.random.u8(..10) {
            0 | 1 if self.pages(first, pages).iter().all(Option::is_none) => {
                self.map(first, pages, PageSize::SIZE_4K);
            }
            0 | 1 if self.pages(block * 512, 512).iter().all(Option::is_none) => {
                self.map(block * 512, 512, PageSize::SIZE_2M);
            }
            2 => self.unmap(first, pages),
            3 => self.protect(first, pages),
            4 if page.is_some() => self.relax(first, Access::Write),
            5 => {
                // All of a block goes, and comes back as a block elsewhere.
                self.unmap(block * 512, 512);
                self.map(block * 512, 512, PageSize::SIZE_2M);
            }
            6 => self.age(first, pages),
            7 if page.is_some() => self.relax(first, Access::Read),
            8 if page.is_some() => self.replace(first),
            9 => self.split(first, pages),
            _ => self.collapse(block),
        }
    }

    /// Runs a step; returns what is wrong after it.
    fn step(&mut self) -> Option<String> {
        let first = self.random.u64(..PAGES);
        let pages = self.random.u64(1..=8).min(PAGES - first);
        let block = first / 512 * 512;
        let looked = [first, first + pages - 1, block, block + self.random.u64(..512)];
        // The unit caches what it walks.
        for page in looked {
            self.read(page);
        }
        self.change(first, pages);
        let wrong = looked.into_iter().find_map(|page| self.wrong_read(page));
        let page = looked[self.random.usize(..4)];
        let is_old = self.model[page as usize].is_some_and(|page| page.old);
        match wrong {
            None if U::OLD == Old::NotRead && is_old => None,
            None => self.wrong_write(page),
            wrong => wrong,
        }
    }
}

/// Moves of a test, and the pages of each.
const MOVES: usize = 16;
const MOVED: u64 = 4;

impl<U: Unit> History<'_, U> {
    /// Lets the device write a new value to a page, as the `turn`th of a move; returns the value,
    /// and whether it arrived in this memory.
    fn device_writes(&mut self, page: u64, turn: u64, memory: [u64; 2]) -> Option<u64> {
        self.written += 1;
        self.qemu.put(self.memory + BLOCKS * BLOCK + 16, self.written);
        self.device.fill(SCRATCH + 16);
        self.device.spill(page * PAGE + 64 + 8 * turn);
        let is_there = |memory| self.qemu.get(memory + 64 + 8 * turn) == self.written;
        memory.into_iter().any(is_there).then_some(self.written)
    }

    /// Moves four pages to other memory, while the device writes to one of them between any two
    /// steps. It may be refused, and tries again later; returns how many of its writes arrived and
    /// are not there afterwards.
    ///
    /// The units here set no dirty state, so the writes are kept off by protection.
    fn moves_under_writes(&mut self) -> usize {
        let first = self.random.u64(..PAGES / MOVED) * MOVED;
        let (page, range) = (first + self.random.u64(..MOVED), range(first, MOVED));
        let from = self.model[first as usize].unwrap().memory;
        // Memory of no page.
        let to = self.memory + BLOCKS * BLOCK + (16 << 12);
        let places = [from, to].map(|memory| memory + (page - first) * PAGE);
        let mut arrived = Vec::new();
        let mut writes = |history: &mut Self, turn| {
            arrived.push(history.device_writes(page, turn, places).map(|value| (turn, value)));
        };
        writes(self, 0);
        {
            let mut guard = self.space.enter();
            guard.write_protect(range).unwrap();
            guard.invalidate();
        }
        writes(self, 1);
        for word in (0..MOVED * PAGE).step_by(8) {
            self.qemu.put(to + word, self.qemu.get(from + word));
        }
        writes(self, 2);
        {
            let mut guard = self.space.enter();
            guard.replace(range, Hpa(from), Hpa(to), Attributes::RAM).unwrap();
            guard.invalidate();
        }
        writes(self, 3);
        let is_lost =
            |&(turn, value): &(u64, u64)| self.qemu.get(places[1] + 64 + 8 * turn) != value;
        let lost = arrived.iter().flatten().filter(|write| is_lost(write)).count();
        // The last one has the right again, and the first one had it.
        let refused = [0, 3].into_iter().filter(|&turn| arrived[turn as usize].is_none()).count();
        // Back, so that a later move of the same pages finds them.
        let pages = self.pages(first, MOVED).to_vec();
        self.unmap(first, MOVED);
        self.machine.unit.invalidate(
            &Invalidation { vmid: Vmid(GUEST), range: None, leaf: None, tables: true },
            GUEST,
        );
        let size = PageSize::SIZE_4K;
        self.space.map(range, Hpa(from), Attributes::RAM, size).unwrap();
        self.pages(first, MOVED).copy_from_slice(&pages);
        lost + refused
    }
}

/// Moves memory under a device's writes; returns how many writes were lost, or refused for no
/// reason.
pub fn moves<U: Unit>(fault: Fault, seed: u64) -> usize {
    let qemu = Rc::new(Qemu::start(U::board()));
    let machine = Machine::<U>::new(Rc::clone(&qemu));
    let mut history = History::new(qemu, &machine, seed);
    history.map(0, PAGES, PageSize::SIZE_4K);
    machine.fault.set(fault);
    (0..MOVES).map(|_| history.moves_under_writes()).sum()
}

/// Runs a history; returns the step that was wrong, and why.
pub fn run<U: Unit>(fault: Fault, seed: u64) -> Option<(usize, String)> {
    let qemu = Rc::new(Qemu::start(U::board()));
    let machine = Machine::<U>::new(Rc::clone(&qemu));
    let mut history = History::new(qemu, &machine, seed);
    machine.fault.set(fault);
    let wrong = (0..STEPS).find_map(|step| history.step().map(|wrong| (step, wrong)));
    println!("{fault:?}: {wrong:?}, {} collapses", history.collapsed);
    wrong
}
