//! Which cache lines are shared by threads that work on disjoint parts of one guest. The test
//! counts stores by thread and line; it measures no time.
#![cfg(all(not(loom), target_os = "linux"))]

use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::{Access, AgeOptions, Format, Gpa, GpaRange, Hpa, Memory, PageSize, Vmid};
use slat_guest::*;
use slat_sim::arch::Arch;
use slat_sim::fast::FastMachine;
use slat_sim::{Arm, Ept};
use std::cell::RefCell;
use std::collections::BTreeSet;

const M2: u64 = 2 << 20;
const K4: u64 = 4096;
/// The distance of two threads' parts: the range of a table of the second level.
const APART: u64 = 1 << 30;
const PAGES: u64 = 512;
/// Lines of 128 bytes, because CPUs fetch neighbouring lines in pairs.
const LINE: usize = 128;

thread_local! {
    static LINES: RefCell<BTreeSet<usize>> = const { RefCell::new(BTreeSet::new()) };
}

static WRITES: slat::observe::Writes = |address| {
    LINES.with_borrow_mut(|lines| _ = lines.insert(address / LINE));
};

/// Returns the lines to which this thread stores in `work`.
fn lines(work: impl FnOnce()) -> BTreeSet<usize> {
    LINES.take();
    work();
    LINES.take()
}

struct Ram(u64);

impl Backing for Ram {
    fn page(&self, host: Hva, _: Access) -> Result<Page, NoPage> {
        let (hpa, block) = (Hpa(self.0 + host.0 % M2), PageSize::SIZE_4K);
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

/// The lines to which one thread stores, for each operation on its part.
#[derive(Default)]
struct StoredLines {
    faults: BTreeSet<usize>,
    clear: BTreeSet<usize>,
    refaults: BTreeSet<usize>,
    age: BTreeSet<usize>,
}

fn work<F: Format, H: Host>(
    vcpu: &mut Vcpu<'_, F, H, Ram>,
    worker: &mut Worker<'_, F, H, Ram>,
    part: u64,
) -> StoredLines {
    let page = |number: u64| Gpa(part * APART + number * K4);
    // Prepares the table, a block of tokens, and table pages in the cache.
    vcpu.fault(page(0), Access::Write);
    let touch = |vcpu: &mut Vcpu<'_, F, H, Ram>| {
        for number in 1..PAGES {
            assert!(!matches!(vcpu.fault(page(number), Access::Write), Outcome::Refused(_)));
        }
    };
    let mut stored = StoredLines { faults: lines(|| touch(vcpu)), ..StoredLines::default() };
    let (first, all) = (part * APART / K4, [u64::MAX; PAGES as usize / 64]);
    stored.clear = lines(|| {
        let cleared = worker.clear_log(MemslotId(0), first, PAGES, &all).unwrap();
        assert_eq!(cleared.pages, PAGES);
    });
    stored.refaults = lines(|| touch(vcpu));
    let range = GpaRange::new(page(0), PAGES * K4).unwrap();
    let mut young = [0; PAGES as usize / 64];
    stored.age = lines(|| {
        worker.age(range, None, &mut young, AgeOptions::LEAVES).unwrap();
    });
    assert!(young.iter().all(|word| *word == u64::MAX));
    stored
}

fn two_threads_share_no_line<F: Format + Default, A: Arch>(arch: A) {
    let machine = FastMachine::new(arch, 2, M2, 8 << 20).unwrap();
    let base = machine.memory_base().0;
    let config = Config { caches: CachePolicy::Every, ..Config::new(2, PageSize::SIZE_4K) };
    let guest = Guest::new(F::default(), Vmid(1), 39, &machine, Ram(base), config).unwrap();
    let (mut one, mut two) = (Vcpu::new(&guest, 0).unwrap(), Vcpu::new(&guest, 1).unwrap());
    let (mut three, mut four) = (Worker::new(&guest).unwrap(), Worker::new(&guest).unwrap());
    let memslot = MemslotSpec::new(MemslotId(0), Gpa(0), 2 * APART, Hva(0));
    one.worker().set_memslot(MemslotSpec { log_dirty: true, ..memslot }).unwrap();
    slat::observe::writes(&WRITES);
    // One after the other: the threads store to the same lines at any time.
    let (first, second) = (work(&mut one, &mut three, 0), work(&mut two, &mut four, 1));
    for (what, first, second) in [
        ("faults that map", &first.faults, &second.faults),
        ("clears", &first.clear, &second.clear),
        ("faults that write what is protected", &first.refaults, &second.refaults),
        ("ageing", &first.age, &second.age),
    ] {
        // At least the lines of the leaves themselves.
        let least = PAGES as usize * 8 / LINE;
        assert!(first.len() >= least && second.len() >= least, "{what}: nothing was seen");
        let shared: Vec<_> = first.intersection(second).map(|line| line * LINE).collect();
        assert!(shared.is_empty(), "{what}: both threads store to the lines at {shared:x?}");
    }
}

#[test]
fn threads_on_disjoint_parts_of_a_guest_share_no_cache_line() {
    two_threads_share_no_line::<Ept1G, _>(Ept::default());
    two_threads_share_no_line::<Arm64K4, _>(Arm::new(12, 39));
}
