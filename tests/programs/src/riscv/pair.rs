//! Two harts: the second stays in the guest, where it reads and writes a page over and over, while
//! the first changes the page's leaf by the engine. Without a fence, and with one on the first hart
//! alone, the second must use what it has cached: else a missing fence would not be noticed. With a
//! fence on the second it must not.

use crate::machine::{FREE, Guest, Machine, load_root, say, word, write_code};
use crate::walk::last_entry;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use slat::format::riscv::RiscV;
use slat::{
    AgeBitmaps, AgeOptions, Attributes, Gpa, GpaRange, Guard, Hpa, PageSize, Reader, TableCache,
    Tables, UnmapEntry, Vmid,
};

const PAGE: u64 = 4 << 10;
/// In the guest: its code, the page, the report.
const CODE: u64 = 0x1_0000;
const DATA: u64 = 0x2_0000;
const REPORT: u64 = 0x2_1000;
/// In host memory: the same, and where the page moves to.
const CODE_AT: u64 = FREE + (16 << 20);
const DATA_AT: u64 = CODE_AT + PAGE;
const ELSEWHERE: u64 = DATA_AT + PAGE;
const REPORT_AT: u64 = ELSEWHERE + PAGE;
/// Words of the report: what was read, whether to leave, the rounds so far.
const FOUND: u64 = REPORT_AT;
const LEAVE: u64 = REPORT_AT + 8;
const ROUNDS: u64 = REPORT_AT + 16;
/// What the page has, and what the other memory has.
const OLD: u64 = 1111;
const NEW: u64 = 2222;
/// Bits of a leaf (volume II, "Sv39"): accessed, dirty.
const ACCESSED: u64 = 1 << 6;
const DIRTY: u64 = 1 << 7;

/// The second hart is there; hgatp that it enters its guest with, once for each store; its exits.
static PRESENT: AtomicU64 = AtomicU64::new(0);
static HGATP: AtomicU64 = AtomicU64::new(0);
static EXITS: AtomicU64 = AtomicU64::new(0);
/// What an interrupt of the second hart is for: 1 for a fence. It answers with 0.
#[unsafe(no_mangle)]
static ASKED: AtomicU64 = AtomicU64::new(0);

/// The second hart.
#[unsafe(no_mangle)]
extern "C" fn second() -> ! {
    PRESENT.store(1, SeqCst);
    loop {
        match HGATP.swap(0, SeqCst) {
            0 => core::hint::spin_loop(),
            hgatp => {
                load_root(hgatp);
                // A fault or a call, it has left.
                let _ = Guest { code: CODE }.repeat(DATA, REPORT);
                EXITS.fetch_add(1, SeqCst);
            }
        }
    }
}

fn get(hpa: u64) -> u64 {
    // SAFETY: memory that only the guest and this module use, or an entry, which is only read.
    unsafe { word(hpa).read_volatile() }
}

fn put(hpa: u64, value: u64) {
    // SAFETY: memory that only the guest and this module use.
    unsafe { word(hpa).write_volatile(value) };
}

/// Makes the second hart fence.
fn fence_there() {
    ASKED.store(1, SeqCst);
    // SAFETY: the interrupt of hart 1 in the virt machine's CLINT.
    unsafe { (0x200_0004 as *mut u32).write_volatile(1) };
    while ASKED.load(SeqCst) != 0 {
        core::hint::spin_loop();
    }
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Unmap,
    Move,
    Protect,
    Clean,
    Age,
}

struct Pair<'t, 'p> {
    guard: Guard<'t, 'p, RiscV, Machine>,
    cache: TableCache<'p, RiscV, Machine>,
    tables: &'t Tables<'p, RiscV, Machine>,
    hgatp: u64,
    is_in: bool,
    exits: u64,
}

impl Pair<'_, '_> {
    fn enter(&mut self) {
        put(LEAVE, 0);
        self.exits = EXITS.load(SeqCst);
        self.is_in = true;
        HGATP.store(self.hgatp, SeqCst);
    }

    fn leave(&mut self) {
        put(LEAVE, 1);
        while self.is_in {
            self.is_in = EXITS.load(SeqCst) == self.exits;
        }
    }

    /// Lets the guest run for a while; returns whether it is still running.
    fn runs(&mut self) -> bool {
        let until = get(ROUNDS) + 2000;
        while self.is_in && get(ROUNDS) < until {
            self.is_in = EXITS.load(SeqCst) == self.exits;
        }
        self.is_in
    }

    fn map(&mut self, to: u64) {
        self.cache.fill(8).expect("memory for tables");
        let (page, size) = (range(DATA), PageSize::SIZE_4K);
        let mapped = self.guard.map(page, Hpa(to), Attributes::RAM, size, &mut self.cache);
        mapped.expect("nothing is in the way");
    }

    fn unmap(&mut self) {
        let mut storage = [UnmapEntry::EMPTY; 1];
        let mut batch = self.guard.unmap_batch(&mut storage);
        self.guard.unmap(range(DATA), &mut batch).expect("room");
        batch.complete().for_each(drop);
    }

    /// Changes the leaf, with a fence on this hart.
    fn change(&mut self, change: Change) {
        let page = range(DATA);
        match change {
            Change::Unmap => self.unmap(),
            Change::Move => {
                self.unmap();
                self.map(ELSEWHERE);
            }
            Change::Protect => _ = self.guard.write_protect(page).expect("mapped"),
            Change::Clean => _ = self.guard.clean(page).expect("mapped"),
            Change::Age => {
                let mut ages = AgeBitmaps { young: &mut [0], unanswered: &mut [0] };
                self.guard.age(page, &mut ages, AgeOptions::LEAVES).expect("mapped");
            }
        }
        self.guard.invalidate();
    }

    /// Returns whether the second hart uses the leaf as it was.
    fn is_stale(&mut self, change: Change) -> bool {
        let runs = self.runs();
        let leaf = get(last_entry(self.tables, DATA, get));
        match change {
            Change::Unmap | Change::Protect => runs,
            Change::Move => get(FOUND) == OLD,
            // Where the hart does not mark, it faults.
            Change::Clean => runs && leaf & DIRTY == 0,
            Change::Age => runs && leaf & ACCESSED == 0,
        }
    }

    /// Checks one change; returns how many claims were wrong.
    fn check(&mut self, change: Change) -> u32 {
        self.leave();
        self.unmap();
        put(DATA_AT, OLD);
        put(ELSEWHERE, NEW);
        self.map(DATA_AT);
        self.enter();
        let runs = self.runs() && get(FOUND) == OLD;
        let mut wrong = 0;
        let mut is = |claim: &str, right: bool| {
            let word = if right { "right" } else { "wrong" };
            say!("{word} two harts, {change:?}: {claim}");
            wrong += u32::from(!right);
        };
        is("the guest runs", runs);
        self.change(change);
        is("a fence on the first hart alone is noticed", self.is_stale(change));
        fence_there();
        is("with one on the second it is seen", !self.is_stale(change));
        wrong
    }
}

fn range(gpa: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), PAGE).expect("a page")
}

/// Checks all changes, if there is a second hart; returns how many claims were wrong.
pub fn run(machine: &Machine) -> u32 {
    if PRESENT.load(SeqCst) == 0 {
        say!("one hart: no case of two");
        return 0;
    }
    let tables = Tables::new(RiscV::default(), Vmid(6), 41, machine).expect("memory for the root");
    let mut storage = [const { None }; 16];
    let mut cache = TableCache::new(machine, &mut storage);
    let mut reader = Reader::register(machine).expect("the only one");
    let mut guard = tables.enter(&mut reader).expect("the machine's own tables");
    cache.fill(16).expect("memory for tables");
    for (gpa, hpa) in [(CODE, CODE_AT), (REPORT, REPORT_AT)] {
        guard
            .map(range(gpa), Hpa(hpa), Attributes::RAM, PageSize::SIZE_4K, &mut cache)
            .expect("nothing is in the way");
    }
    write_code(CODE_AT);
    let hgatp = tables.guest_root().hgatp().expect("a value");
    let mut pair = Pair { guard, cache, tables: &tables, hgatp, is_in: false, exits: 0 };
    let changes = [Change::Unmap, Change::Move, Change::Protect, Change::Clean, Change::Age];
    let wrong = changes.into_iter().map(|change| pair.check(change)).sum();
    pair.leave();
    wrong
}
