//! The second CPU, which PSCI starts, and invalidations that reach it or not.

use super::el2::{Machine, clean, id_registers, load_root, read, repeat, write_code};
use super::{MEMORY, Tree, VMID};
use crate::firmware::can_call_psci;
use crate::machine::{Memory, Serial};
use crate::pair::{Cpus, Pair, Part, addresses};
use core::arch::asm;
use core::fmt::Write;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::SeqCst};
use slat::{
    Gpa, GpaRange, GuestRoot, Invalidation, PageSize, Platform, Reader, TableCache, Tables,
};

const PAGE: u64 = 4096;
/// PSCI's functions (DEN 0022), by SMC.
const CPU_ON: u64 = 0xc400_0003;
const CPU_OFF: u64 = 0x8400_0002;
/// The fields of MPIDR_EL1 by which CPUs differ.
const AFFINITY: u64 = 0xff_00ff_ffff;
static STACK: Memory<{ 16 * 4096 }> = Memory::new();
static REGISTERS: Memory<4096> = Memory::new();
/// The tables of the second CPU's guest; how often it has stopped, and what it is to do next.
static ROOT: AtomicPtr<GuestRoot<Tree>> = AtomicPtr::new(null_mut());
static EXITS: AtomicU64 = AtomicU64::new(0);
static NEXT: AtomicU64 = AtomicU64::new(0);
const ENTER: u64 = 1;
const END: u64 = 2;

unsafe extern "C" {
    fn started() -> !;
}

fn smc(function: u64, x1: u64, x2: u64, x3: u64) -> i64 {
    let result;
    // SAFETY: a call of the firmware below EL2, which keeps all but X0 to X17.
    unsafe {
        asm!("smc #0", inout("x0") function => result, in("x1") x1, in("x2") x2, in("x3") x3,
            clobber_abi("C"));
    }
    result
}

extern "C" fn second() -> ! {
    // SAFETY: `run` keeps it until this CPU is off.
    let root = unsafe { &*ROOT.load(SeqCst) };
    let [code, page, report] = addresses(PAGE);
    loop {
        match NEXT.swap(0, SeqCst) {
            ENTER => {
                load_root(root, &id_registers());
                // A fault or a call, it has left.
                repeat(code, page, report);
                EXITS.fetch_add(1, SeqCst);
            }
            END => {
                EXITS.fetch_add(1, SeqCst);
                smc(CPU_OFF, 0, 0, 0);
            }
            _ => core::hint::spin_loop(),
        }
    }
}

/// An invalidation of the page `pages` behind the one that changes.
fn page(pages: u64) -> Invalidation {
    let range = GpaRange::new(Gpa(addresses(PAGE)[1] + pages * PAGE), PAGE).ok();
    Invalidation { vmid: VMID, range, leaf: Some(PageSize::SIZE_4K), tables: false }
}

struct Both;

impl Cpus for Both {
    type Format = Tree;
    type Platform = Machine;
    const PARTS: &'static [Part<Self>] = &[
        ("no invalidation", |_| ()),
        ("on this CPU alone", |pair| pair.platform.execute(pair.platform.tlbi.local(), &page(0))),
        ("of another page", |pair| pair.platform.invalidate(&page(1))),
        ("of the page", |pair| pair.platform.invalidate(&page(0))),
    ];

    fn ignore(machine: &Machine, ignore: bool) {
        machine.ignores.set(ignore);
    }

    /// It drops its translations always.
    fn enter(_: &Machine, _: bool) {
        NEXT.store(ENTER, SeqCst);
    }

    fn exits() -> u64 {
        EXITS.load(SeqCst)
    }
}

/// Starts another CPU; returns whether there is one.
fn start() -> bool {
    let registers = [
        read!("ttbr0_el2"),
        read!("tcr_el2"),
        read!("mair_el2"),
        read!("sctlr_el2"),
        read!("cptr_el2"),
        STACK.hpa() + (16 << 12),
        second as *const () as u64,
    ];
    (0..).step_by(8).zip(registers).for_each(|(at, value)| REGISTERS.write(at, value));
    // It reads them without its caches, and its first instructions.
    clean(REGISTERS.hpa(), 4096);
    clean(started as *const () as u64, 256);
    let this = read!("mpidr_el1") & AFFINITY;
    let others = (0..8).flat_map(|n| [this & !0xff | n, this & !0xffff | n << 8]);
    let at = started as *const () as u64;
    others.filter(|other| *other != this).any(|other| smc(CPU_ON, other, at, REGISTERS.hpa()) == 0)
}

/// Checks all changes with this CPU and another; returns whether all were right.
pub fn run() -> bool {
    let _ = match can_call_psci() {
        Ok(tables) => writeln!(Serial, "PSCI is by SMC, says the firmware's {tables}"),
        Err(reason) => {
            let _ = writeln!(Serial, "no case of two CPUs: {reason}");
            return true;
        }
    };
    let id = id_registers();
    let Ok(format) = id.format() else { return false };
    let machine = Machine::new(&id, &format);
    let tables = Tables::new(format, VMID, super::ADDRESS_BITS, &machine).expect("a frame");
    let mut storage = [const { None }; 16];
    let cache = TableCache::new(&machine, &mut storage);
    let mut reader = Reader::register(&machine).expect("a reader slot");
    let guard = tables.enter(&mut reader).expect("the same platform");
    let mut pair = Pair::<Both>::new(&machine, guard, cache, MEMORY.hpa());
    write_code(MEMORY.hpa() + addresses(PAGE)[0]);
    let mut root = tables.guest_root();
    load_root(&root, &id);
    ROOT.store(&raw mut root, SeqCst);
    if !start() {
        let _ = writeln!(Serial, "no case of two CPUs: PSCI starts no second one");
        return true;
    }
    let right = pair.run(&mut Serial);
    let exits = EXITS.load(SeqCst);
    NEXT.store(END, SeqCst);
    while EXITS.load(SeqCst) == exits {
        core::hint::spin_loop();
    }
    right
}
