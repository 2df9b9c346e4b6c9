//! The second hart, and the fences of both.

use crate::machine::{FREE, Guest, Line, Machine, load_root, say, write_code};
use crate::pair::{Cpus, Pair, Part, addresses};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use slat::format::riscv::RiscV;
use slat::{Reader, TableCache, Tables, Vmid};

const PAGE: u64 = 4 << 10;
/// The guest's memory.
const MEMORY: u64 = FREE + (16 << 20);

/// The second hart is there; the root of its guest; the entries that it is asked for; its exits.
static PRESENT: AtomicU64 = AtomicU64::new(0);
static HGATP: AtomicU64 = AtomicU64::new(0);
static ENTRIES: AtomicU64 = AtomicU64::new(0);
static EXITS: AtomicU64 = AtomicU64::new(0);
/// What an interrupt of the second hart is for: 1 for a fence. It answers with 0.
#[unsafe(no_mangle)]
static ASKED: AtomicU64 = AtomicU64::new(0);

/// The second hart.
#[unsafe(no_mangle)]
extern "C" fn second() -> ! {
    PRESENT.store(1, SeqCst);
    loop {
        if ENTRIES.swap(0, SeqCst) == 0 {
            core::hint::spin_loop();
            continue;
        }
        load_root(HGATP.load(SeqCst));
        let [code, data, report] = addresses(PAGE);
        // A fault or a call, it has left.
        let _ = Guest { code }.repeat(data, report);
        EXITS.fetch_add(1, SeqCst);
    }
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

struct Harts;

impl Cpus for Harts {
    type Format = RiscV;
    type Platform = Machine;
    const PARTS: &'static [Part<Self>] = &[
        ("no invalidation", |_| ()),
        ("on this CPU alone", |pair| pair.platform.fence(VMID)),
        ("a fence there", |_| fence_there()),
    ];

    fn ignore(machine: &Machine, ignore: bool) {
        machine.ignores.set(ignore);
    }

    /// It fences always.
    fn enter(_: &Machine, _: bool) {
        ENTRIES.store(1, SeqCst);
    }

    fn exits() -> u64 {
        EXITS.load(SeqCst)
    }
}

const VMID: Vmid = Vmid(6);

/// Checks all changes, if there is a second hart; returns whether all were right.
pub fn run(machine: &Machine) -> bool {
    if PRESENT.load(SeqCst) == 0 {
        say!("one hart: no case of two");
        return true;
    }
    let tables = Tables::new(RiscV::default(), VMID, 41, machine).expect("memory for the root");
    let mut storage = [const { None }; 16];
    let cache = TableCache::new(machine, &mut storage);
    let mut reader = Reader::register(machine).expect("the only one");
    let guard = tables.enter(&mut reader).expect("the machine's own tables");
    let mut pair = Pair::<Harts>::new(machine, guard, cache, MEMORY);
    write_code(MEMORY + addresses(PAGE)[0]);
    HGATP.store(tables.guest_root().hgatp().expect("a value"), SeqCst);
    pair.run(&mut Line)
}
