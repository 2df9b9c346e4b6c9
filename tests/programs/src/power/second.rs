//! The second CPU, and invalidations that reach it or not.

use crate::machine::{Executes, FREE, Line, Machine, prepare, repeat, say, write_code};
use crate::pair::{Cpus, Pair, Part, addresses};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use slat::format::power::Power;
use slat::format::power::tlbie::{Instruction, Tlbie};
use slat::{Gpa, GpaRange, Invalidation, PageSize, Platform, Reader, TableCache, Tables, Vmid};

const PAGE: u64 = 4 << 10;
const LPID: Vmid = Vmid(8);
/// The guest's memory.
const MEMORY: u64 = FREE + (64 << 20);

/// The second CPU is there; the entries that it is asked for; its exits.
static PRESENT: AtomicU64 = AtomicU64::new(0);
static ENTRIES: AtomicU64 = AtomicU64::new(0);
static EXITS: AtomicU64 = AtomicU64::new(0);

/// The second CPU.
#[unsafe(no_mangle)]
extern "C" fn second() -> ! {
    PRESENT.store(1, SeqCst);
    let [code, page, report] = addresses(PAGE);
    loop {
        if ENTRIES.swap(0, SeqCst) == 0 {
            core::hint::spin_loop();
            continue;
        }
        prepare(LPID);
        // A fault or a call, it has left.
        repeat(code, page, report);
        EXITS.fetch_add(1, SeqCst);
    }
}

/// An invalidation of the page `pages` behind the one that changes.
fn page(pages: u64) -> Invalidation {
    let at = Gpa(addresses(PAGE)[1] + pages * PAGE);
    let range = GpaRange::new(at, PAGE).ok();
    Invalidation { vmid: LPID, range, leaf: Some(PageSize::SIZE_4K), tables: false }
}

/// Executes the invalidation of all, or its barriers.
fn all(machine: &Machine, barriers: bool) {
    let sequence =
        Tlbie::default().sequence(&Invalidation { range: None, tables: true, ..page(0) });
    let is_barrier = |each: &Instruction| !matches!(each, Instruction::All(_));
    machine.execute(sequence.filter(|each| is_barrier(each) == barriers));
}

/// Both CPUs; an invalidation of a page, or of all with its barriers apart.
struct Both<const BARRIERS: bool>;

impl<const BARRIERS: bool> Cpus for Both<BARRIERS> {
    type Format = Power<12>;
    type Platform = Machine;
    const PARTS: &'static [Part<Self>] = if BARRIERS {
        &[
            ("no invalidation", |_| ()),
            ("of all, without barriers", |pair| all(pair.platform, false)),
            ("with them", |pair| all(pair.platform, true)),
        ]
    } else {
        &[
            ("no invalidation", |_| ()),
            ("on this CPU alone", |pair| {
                pair.platform.execute(Tlbie::default().local_sequence(&page(0)));
            }),
            ("of another page", |pair| pair.platform.invalidate(&page(1))),
            ("of the page", |pair| pair.platform.invalidate(&page(0))),
        ]
    };

    fn ignore(machine: &Machine, ignore: bool) {
        machine.executes.set(if ignore { Executes::Nothing } else { Executes::All });
    }

    /// The CPU keeps its translations.
    fn enter(_: &Machine, _: bool) {
        ENTRIES.store(1, SeqCst);
    }

    fn exits() -> u64 {
        EXITS.load(SeqCst)
    }
}

/// Checks all changes, if there is a second CPU; returns whether all were right.
pub fn run(machine: &Machine) -> bool {
    if PRESENT.load(SeqCst) == 0 {
        say!("one CPU: no case of two");
        return true;
    }
    check::<false>(machine) && check::<true>(machine)
}

fn check<const BARRIERS: bool>(machine: &Machine) -> bool {
    let tables = Tables::new(Power::default(), LPID, 52, machine).expect("memory for the root");
    machine.load_root(LPID, tables.guest_root().partition_entry().expect("a value"));
    let mut storage = [const { None }; 16];
    let cache = TableCache::new(machine, &mut storage);
    let mut reader = Reader::register(machine).expect("the only one");
    let guard = tables.enter(&mut reader).expect("the machine's own tables");
    let mut pair = Pair::<Both<BARRIERS>>::new(machine, guard, cache, MEMORY);
    write_code(MEMORY + addresses(PAGE)[0]);
    pair.run(&mut Line)
}
