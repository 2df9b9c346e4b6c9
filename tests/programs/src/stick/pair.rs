//! Two CPUs: another one stays in the guest, where it reads and writes a page over and over, while
//! this one changes the page's leaf by the engine. Each change is looked at without any
//! invalidation, after one on this CPU alone, after the other's exit and entry, and after an
//! invalidation there. Only the last has to be right; what is stale before is printed.

use super::cases::{MEMORY, range};
use super::cpu::{self, ACCESSED, DIRTY, Does, EXIT_CALL, Tree, VCPUS};
use super::firmware;
use super::machine::Serial;
use super::platform::Machine;
use core::fmt::Write;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::SeqCst};
use slat::{
    AgeBitmaps, AgeOptions, Attributes, Guard, GuestRoot, Hpa, PageSize, Reader, TableCache,
    Tables, UnmapEntry, Vmid,
};

/// The other CPU's program, its page, its reports, and memory for the page to move to.
const LOOP: u64 = 0x5000;
const DATA: u64 = 0x8000;
const REPORT: u64 = 0x9000;
const ELSEWHERE: u64 = 0xa000;
/// Words of the report: what was read, whether to leave, the rounds so far.
const FOUND: u64 = REPORT;
const LEAVE: u64 = REPORT + 8;
const ROUNDS: u64 = REPORT + 16;
/// mov rax, [rdi]; mov [rsi], rax; inc qword [rdi + 16]; inc qword [rsi + 16];
/// cmp qword [rsi + 8], 0; je LOOP.
const CODE: [u8; 21] = [
    0x48, 0x8b, 0x07, 0x48, 0x89, 0x06, 0x48, 0xff, 0x47, 0x10, 0x48, 0xff, 0x46, 0x10, 0x48, 0x83,
    0x7e, 0x08, 0x00, 0x74, 0xeb,
];
/// What the page has, and what the other memory has.
const OLD: u64 = 1111;
const NEW: u64 = 2222;

/// The tables that the other CPU runs its guest on.
static ROOT: AtomicPtr<GuestRoot<Tree>> = AtomicPtr::new(null_mut());
/// How often its guest has stopped, and what it is to do next.
static EXITS: AtomicU64 = AtomicU64::new(0);
static NEXT: AtomicU64 = AtomicU64::new(NOTHING);
const NOTHING: u64 = 0;
const ENTER: u64 = 1;
const FLUSH: u64 = 2;
const END: u64 = 3;

/// The other CPU.
fn other() {
    // SAFETY: `run` keeps it until this function has ended.
    let root = unsafe { &*ROOT.load(SeqCst) };
    let vcpu = &VCPUS[1];
    vcpu.create(root);
    loop {
        let next = NEXT.swap(NOTHING, SeqCst);
        match next {
            NOTHING => core::hint::spin_loop(),
            END => break cpu::off(),
            _ => {
                vcpu.enter(LOOP, DATA, REPORT, next == FLUSH);
                EXITS.fetch_add(1, SeqCst);
            }
        }
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
    guard: Guard<'t, 'p, Tree, Machine>,
    cache: TableCache<'p, Tree, Machine>,
    machine: &'p Machine,
    root: u64,
    levels: usize,
    is_in: bool,
    exits: u64,
}

impl Pair<'_, '_> {
    fn enter(&mut self, how: u64) {
        MEMORY.write(LEAVE, 0);
        self.exits = EXITS.load(SeqCst);
        self.is_in = true;
        NEXT.store(how, SeqCst);
    }

    /// Lets the other CPU's guest run for a while; returns whether it is still running.
    fn runs(&mut self) -> bool {
        let until = MEMORY.read(ROUNDS) + 2000;
        let mut spins = 0_u64;
        while self.is_in && MEMORY.read(ROUNDS) < until {
            self.is_in = EXITS.load(SeqCst) == self.exits;
            spins += 1;
            assert!(spins < 1 << 34, "the other CPU does not run its guest");
        }
        self.is_in
    }

    fn leave(&mut self) {
        MEMORY.write(LEAVE, 1);
        while self.is_in {
            self.is_in = EXITS.load(SeqCst) == self.exits;
        }
    }

    fn map(&mut self, to: u64) {
        let at = Hpa(MEMORY.hpa() + to);
        self.cache.fill(8).expect("frames");
        let page = range(DATA, 4096);
        self.guard
            .map(page, at, Attributes::RAM, PageSize::SIZE_4K, &mut self.cache)
            .expect("frames");
    }

    /// Unmaps the page; whether CPUs know is the caller's business.
    fn unmap(&mut self) {
        let mut storage = [UnmapEntry::EMPTY; 1];
        let mut batch = self.guard.unmap_batch(&mut storage);
        self.guard.unmap(range(DATA, 4096), &mut batch).expect("room");
        // This notes that the next entry here has to flush, as `invalidate` does.
        batch.complete().for_each(drop);
    }

    fn change(&mut self, change: Change) {
        let page = range(DATA, 4096);
        match change {
            Change::Unmap => self.unmap(),
            Change::Move => {
                self.unmap();
                self.map(ELSEWHERE);
            }
            Change::Protect => drop(self.guard.write_protect(page).expect("mapped")),
            Change::Clean => drop(self.guard.clean(page).expect("mapped")),
            Change::Age => {
                let mut ages = AgeBitmaps { young: &mut [0], unanswered: &mut [0] };
                self.guard.age(page, &mut ages, AgeOptions::LEAVES).expect("mapped");
            }
        }
        self.guard.invalidate();
    }

    /// Returns whether the other CPU uses the leaf as it was.
    fn is_stale(&mut self, change: Change) -> bool {
        let runs = self.runs();
        let leaf = self.machine.entries(self.root, self.levels, DATA).last();
        let leaf = leaf.map_or(0, |(_, leaf)| leaf);
        match change {
            Change::Unmap | Change::Protect => runs,
            Change::Move => MEMORY.read(FOUND) == OLD,
            Change::Clean => leaf & DIRTY == 0,
            Change::Age => leaf & ACCESSED == 0,
        }
    }

    /// Checks one change; returns whether it was right.
    fn check(&mut self, change: Change) -> bool {
        self.leave();
        self.unmap();
        self.guard.invalidate();
        MEMORY.write(DATA, OLD);
        MEMORY.write(ELSEWHERE, NEW);
        self.map(DATA);
        self.enter(FLUSH);
        let runs = self.runs() && MEMORY.read(FOUND) == OLD;
        self.change(change);
        let nothing = self.is_stale(change);
        let here = VCPUS[0].run(Does::Read(REPORT), true).code == EXIT_CALL;
        let alone = self.is_stale(change);
        let again = alone && {
            self.leave();
            self.enter(ENTER);
            self.is_stale(change)
        };
        self.leave();
        self.enter(FLUSH);
        let right = runs && here && !self.is_stale(change);
        let word = |stale| if stale { "STALE" } else { "new" };
        let (nothing, alone, again) = (word(nothing), word(alone), word(again));
        let _ = writeln!(
            Serial,
            "{change:?}: no invalidation: {nothing}; on this CPU alone: {alone}; exit and entry \
             there: {again}"
        );
        let right_or = if right { "right" } else { "wrong" };
        let _ = writeln!(Serial, "{right_or}: {change:?} is seen after an invalidation there");
        right
    }
}

/// Checks all changes with this CPU and another; returns whether all were right.
pub fn run(number: usize) -> bool {
    let Some(format) = cpu::format(false) else { return false };
    let machine = Machine::new();
    MEMORY.clear();
    let bits = if format.five_levels { 52 } else { 48 };
    let bits = format.output_bits.min(bits);
    let tables = Tables::new(format, Vmid(1), bits, &machine).expect("a frame");
    let mut storage = [const { None }; 16];
    let mut cache = TableCache::new(&machine, &mut storage);
    cache.fill(16).expect("frames");
    let mut reader = Reader::register(&machine).expect("a reader slot");
    let mut guard = tables.enter(&mut reader).expect("the same platform");
    let low = range(0, 0x10_000);
    let at = Hpa(MEMORY.hpa());
    guard.map(low, at, Attributes::RAM, PageSize::SIZE_4K, &mut cache).expect("frames");
    cpu::prepare(&MEMORY);
    // The program, and the call behind it.
    let mut code = [0; 24];
    code[..21].copy_from_slice(&CODE);
    code[21..].copy_from_slice(&cpu::CALL.to_le_bytes()[..3]);
    for (n, word) in (0..).zip(code.as_chunks::<8>().0) {
        MEMORY.write(LOOP + 8 * n, u64::from_le_bytes(*word));
    }
    let mut root = tables.guest_root();
    // Takes the second's memory from the firmware, which serves this CPU only.
    VCPUS[1].create(&root);
    cpu::off();
    VCPUS[0].create(&root);
    ROOT.store(&raw mut root, SeqCst);
    let Some(ended) = firmware::beside(number, other) else {
        let _ = writeln!(Serial, "wrong: the firmware does not start CPU {number}");
        return false;
    };
    let levels = usize::from(tables.geometry().root_level) + 1;
    let root = tables.root().0;
    let (is_in, exits) = (false, 0);
    let mut pair = Pair { guard, cache, machine: &machine, root, levels, is_in, exits };
    let changes = [Change::Unmap, Change::Move, Change::Protect, Change::Clean, Change::Age];
    let right = changes.into_iter().fold(true, |right, change| pair.check(change) && right);
    pair.leave();
    NEXT.store(END, SeqCst);
    firmware::wait(ended);
    cpu::off();
    right
}
