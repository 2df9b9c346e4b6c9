//! The engine's tables under the IOMMU that QEMU emulates: this process keeps the tables in the
//! machine's memory, a device of the machine reads and writes through them, and the unit's IOTLB
//! keeps stale entries until they are invalidated.
//!
//! A random history changes the tables; before and after each change the device reads and writes.
//! With a fault in the invalidations, made on purpose, some access must be wrong.

mod intel;
mod machine;
mod qemu;
#[path = "../../../seed.rs"]
mod seed;

use fastrand::Rng;
use intel::{DEVICE, DOMAIN, Fault, Intel};
use machine::Machine;
use qemu::{Edu, Qemu};
use slat::format::ept::Ept;
use slat::format::ept::vtd::Vtd;
use slat::{
    Access, AddressSpace, Attributes, Gpa, GpaRange, Hpa, Invalidation, PageSize, Rights,
    TableCache, Vmid,
};

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;
const BLOCKS: u64 = 4;
const PAGES: u64 = BLOCKS * 512;
/// Memory that the device's addresses map to.
const MEMORY: u64 = 0x100_0000;
/// A page of the device that stays mapped, and its memory.
const SCRATCH: u64 = 64 << 20;
const SCRATCH_AT: u64 = MEMORY + BLOCKS * BLOCK;
/// What the device writes where an access is refused.
const NOTHING: u64 = 0x5151_5151;
/// Changes of a history.
const STEPS: usize = 200;

type Space<'m, 'q> = AddressSpace<'m, Ept<true>, Machine<'q>>;

/// What the device may do with a page: the memory, and whether it may write.
type Model = Vec<Option<(u64, bool)>>;

fn range(first: u64, pages: u64) -> GpaRange {
    GpaRange::new(Gpa(first * PAGE), pages * PAGE).unwrap()
}

/// A history, and the accesses of the device.
struct History<'m, 'q> {
    qemu: &'q Qemu,
    machine: &'m Machine<'q>,
    space: Space<'m, 'q>,
    device: Edu<'q>,
    model: Model,
    random: Rng,
    written: u64,
}

impl<'m, 'q> History<'m, 'q> {
    fn new(qemu: &'q Qemu, machine: &'m Machine<'q>, seed: u64) -> Self {
        let [capability, extended] = Intel::capabilities(qemu);
        let vtd = Vtd::with_coherent_walks(capability, extended, true).unwrap();
        let format = Ept { accessed_dirty: true, vtd: Some(vtd), ..Ept::default() };
        let mut space = AddressSpace::new(format, Vmid(DOMAIN), 48, machine).unwrap();
        let scratch = range(SCRATCH / PAGE, 1);
        space.map(scratch, Hpa(SCRATCH_AT), Attributes::RAM, PageSize::SIZE_4K).unwrap();
        machine.unit.switch_on(space.tables().root());
        for page in 0..PAGES {
            qemu.put(MEMORY + page * PAGE + 8, 0x1000 + page);
        }
        let device = Edu::new(qemu, DEVICE);
        let random = Rng::with_seed(seed);
        let model = vec![None; PAGES as usize];
        Self { qemu, machine, space, device, model, random, written: 1 << 40 }
    }

    /// Returns what the device reads at offset 8 of a page.
    fn read(&self, page: u64) -> u64 {
        self.qemu.put(SCRATCH_AT + 16, NOTHING);
        self.device.fill(SCRATCH + 16);
        self.device.fill(page * PAGE + 8);
        self.device.spill(SCRATCH + 24);
        self.qemu.get(SCRATCH_AT + 24)
    }

    /// Returns why the device's read of a page is wrong, if it is.
    fn wrong_read(&self, page: u64) -> Option<String> {
        self.machine.unit.take_refused();
        let found = self.read(page);
        let is_refused = self.machine.unit.take_refused();
        let expected = self.model[page as usize].map(|(memory, _)| self.qemu.get(memory + 8));
        let is_right = match expected {
            Some(content) => found == content && !is_refused,
            // An access through an old entry is not refused.
            None => is_refused,
        };
        (!is_right).then(|| format!("page {page:#x} reads {found:#x}, refused {is_refused}"))
    }

    /// Lets the device write to a page; returns why that is wrong, if it is.
    fn wrong_write(&mut self, page: u64) -> Option<String> {
        self.written += 1;
        let (qemu, new) = (self.qemu, self.written);
        qemu.put(SCRATCH_AT + 16, new);
        self.device.fill(SCRATCH + 16);
        self.device.spill(page * PAGE + 32);
        self.machine.unit.take_refused();
        let at = |place: u64| qemu.get(MEMORY + place * PAGE + 32);
        let mut places = (0..PAGES).filter(|&place| at(place) == new);
        let found = places.next().map(|place| MEMORY + place * PAGE);
        let allowed = self.model[page as usize].filter(|(_, may_write)| *may_write);
        let expected = allowed.map(|(memory, _)| memory);
        (found != expected).then(|| format!("page {page:#x} is written at {found:x?}"))
    }

    fn is_free(&self, first: u64, pages: u64) -> bool {
        self.model[first as usize..(first + pages) as usize].iter().all(Option::is_none)
    }

    fn map(&mut self, first: u64, pages: u64, memory: u64, size: PageSize) {
        let mapped = self.space.map(range(first, pages), Hpa(memory), Attributes::RAM, size);
        mapped.unwrap();
        for page in 0..pages {
            self.model[(first + page) as usize] = Some((memory + page * PAGE, true));
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
        self.model[first as usize..(first + pages) as usize].fill(None);
    }

    /// Lets a device write that was write-protected. It does not walk again by itself before it
    /// faults, so this owes an invalidation, as the page on formats says.
    fn relax(&mut self, page: u64) {
        self.split(page, 1);
        let mut guard = self.space.enter();
        guard.relax(range(page, 1), Access::Write).unwrap().flush_local();
        guard.invalidate();
        let stale = Some(range(page, 1));
        let what = Invalidation { vmid: Vmid(DOMAIN), range: stale, leaf: None, tables: false };
        self.machine.unit.invalidate_whole(&what);
        self.model[page as usize].as_mut().unwrap().1 = true;
    }

    /// Puts a block together if its pages allow it; the format refuses that for VT-d.
    fn collapse(&mut self, block: u64) {
        let mut guard = self.space.enter();
        let collapsed = guard.collapse(range(block * 512, 512), PageSize::SIZE_2M);
        assert!(collapsed.is_err() || collapsed == Ok(0), "{collapsed:?}");
        guard.invalidate();
    }

    /// Changes the tables once, at the pages from `first` on.
    fn change(&mut self, first: u64, pages: u64) {
        let block = first / 512;
        match self.random.u8(..7) {
            0 | 1 if self.is_free(first, pages) => {
                let memory = MEMORY + self.random.u64(..PAGES - pages) * PAGE;
                self.map(first, pages, memory, PageSize::SIZE_4K);
            }
            0 | 1 if self.is_free(block * 512, 512) => {
                let memory = MEMORY + self.random.u64(..BLOCKS) * BLOCK;
                self.map(block * 512, 512, memory, PageSize::SIZE_2M);
            }
            2 => self.unmap(first, pages),
            3 => {
                self.split(first, pages);
                let read_only = Rights { write: false, ..Rights::ALL };
                self.space.protect(range(first, pages), read_only).unwrap();
                let protected = &mut self.model[first as usize..(first + pages) as usize];
                protected.iter_mut().flatten().for_each(|(_, may_write)| *may_write = false);
            }
            4 if self.model[first as usize].is_some() => self.relax(first),
            5 => {
                // All of a block goes, and comes back as a block elsewhere.
                self.unmap(block * 512, 512);
                let memory = MEMORY + self.random.u64(..BLOCKS) * BLOCK;
                self.map(block * 512, 512, memory, PageSize::SIZE_2M);
            }
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
        wrong.or_else(|| self.wrong_write(page))
    }
}

/// Runs a history; returns the step that was wrong, and why.
fn history(fault: Fault, seed: u64) -> Option<(usize, String)> {
    let qemu = Qemu::start("qemu-system-x86_64", &intel::OPTIONS);
    let machine = Machine::new(&qemu);
    let mut history = History::new(&qemu, &machine, seed);
    machine.unit.fault.set(fault);
    (0..STEPS).find_map(|step| history.step().map(|wrong| (step, wrong)))
}

#[test]
fn a_device_sees_each_change_once_it_is_invalidated() {
    let seed = seed::seed();
    assert_eq!(history(Fault::None, seed), None);
}

#[test]
fn a_device_shows_invalidations_that_are_left_out() {
    let seed = seed::seed();
    for fault in [Fault::NoInvalidation, Fault::OtherDomain, Fault::FirstOnly] {
        let wrong = history(fault, seed);
        println!("{fault:?}: {wrong:?}");
        assert!(wrong.is_some(), "{fault:?} is not noticed");
    }
}
