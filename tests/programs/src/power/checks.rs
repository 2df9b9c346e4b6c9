//! Claims about Power's tables alone, and the common ones.

use crate::claims::{
    Bits, CLEAN, Claims, Cpu, Does, Fault, M2, Outcome, Stop, Why, get, judge, put, range,
};
use crate::machine::{
    CALL, Executes, FREE, Line, Machine, end, run, say, start, version, write_code,
};
use crate::second;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use slat::format::power::Power;
use slat::{Attributes, Execute, PageSize, Reader, TableCache, Tables, UnmapEntry, Vmid};

const G1: u64 = 1 << 30;
const LPID: Vmid = Vmid(7);
/// The guest's code, pages of data and a block of data, in host memory.
const CODE: u64 = FREE;
const PAGES: u64 = FREE + 16 * M2;
const BLOCK: u64 = FREE + 8 * M2;
/// Guest address of four pages; the block is behind them.
const AT: u64 = 16 * M2;
/// Whether a clear R or C is an interrupt: QEMU 10 marks no leaf itself.
static INTERRUPTS: AtomicBool = AtomicBool::new(false);

#[unsafe(no_mangle)]
extern "C" fn boot() -> ! {
    start();
    say!("processor version {:#x}", version());
    let machine = Machine::new();
    let wrong = judge::<Power9<'_, 12>>(Line, |fault| check::<12>(&machine, "4K", fault))
        + judge::<Power9<'_, 16>>(Line, |fault| check::<16>(&machine, "64K", fault));
    if INTERRUPTS.load(Relaxed) {
        say!("left out: what its TLB keeps, and two CPUs, because it keeps a write's right to C");
        end(wrong);
    }
    end(wrong + u32::from(!second::run(&machine)))
}

struct Power9<'p, const SHIFT: u32>(&'p Machine);

impl<const SHIFT: u32> Cpu for Power9<'_, SHIFT> {
    type Format = Power<SHIFT>;
    type Platform = Machine;
    const SAYS_WHY: bool = true;
    const CALL: u64 = CALL;
    const FAULTS: &'static [Fault] = &[
        ("a leaf is invalid", Bits::Clear(1 << 63)),
        ("a leaf keeps the right to read alone", Bits::Clear(0b11)),
        ("a leaf keeps the right to write", Bits::Set(1 << 1)),
        ("a leaf keeps the right to execute", Bits::Set(1)),
        ("a leaf is referenced before", Bits::Set(1 << 8)),
        ("a leaf is changed before", Bits::Set(1 << 7)),
        ("a leaf's address is off by a leaf", Bits::Address),
    ];

    /// QEMU 10 lets a page that it holds from a read be written with C clear, so it holds none.
    fn run(&self, does: Does) -> Outcome {
        if INTERRUPTS.load(Relaxed) {
            self.forget();
        }
        let outcome = run(does);
        if let Err(Stop::Fault(_, _, Why::Other)) = outcome {
            INTERRUPTS.store(true, Relaxed);
        }
        outcome
    }

    fn write_code(&self, hpa: u64) {
        write_code(hpa);
    }

    fn forget(&self) {
        self.0.flush(LPID);
    }
}

type All<'t, 'p, const SHIFT: u32> = Claims<'t, 'p, Power9<'p, SHIFT>, Line>;

fn check<const SHIFT: u32>(machine: &Machine, name: &'static str, fault: Option<Fault>) -> u32 {
    let before = machine.live.get();
    let tables = Tables::new(Power::<SHIFT>::default(), LPID, 52, machine);
    let tables = tables.expect("memory for the root");
    machine.load_root(LPID, tables.guest_root().partition_entry().expect("a value"));
    let mut storage = [const { None }; 16];
    let mut reader = Reader::register(machine).expect("the only one");
    let mut wrong = {
        let mut claims = Claims {
            cpu: Power9::<SHIFT>(machine),
            tables: &tables,
            guard: tables.enter(&mut reader).expect("the machine's own tables"),
            cache: TableCache::new(machine, &mut storage),
            out: Line,
            name,
            at: AT,
            pages: PAGES,
            block: BLOCK,
            wrong: 0,
            fault,
            marked_by_faults: 0,
        };
        write_code(CODE);
        let code = Attributes { write: false, dirty: false, ..Attributes::RAM };
        claims.map(0, 1 << SHIFT, CODE, code);
        claims.check();
        if fault.is_none() {
            ends(&mut claims);
            if !INTERRUPTS.load(Relaxed) {
                caches(&mut claims, machine);
                left_out(&mut claims, machine);
            }
        }
        claims.wrong
    };
    drop(reader);
    machine.load_root(LPID, 0);
    // SAFETY: the only CPU has just unloaded the root.
    unsafe { tables.deactivate() }.destroy();
    if machine.live.get() != before {
        say!("wrong {name}: frames are lost");
        wrong += 1;
    }
    wrong
}

/// Checks the last page, and a block of 1 GiB.
fn ends<const SHIFT: u32>(claims: &mut All<'_, '_, SHIFT>) {
    let page = 1 << SHIFT;
    let top = (1 << 52) - page;
    claims.map(top, page, PAGES, Attributes::RAM);
    let found = claims.uses(Does::Load(top + 8));
    claims.is("the last page of 52 bits is read", found, Ok(0x1234));
    let data = Attributes { write: false, execute: Execute::None, ..CLEAN };
    claims.map(8 * G1, G1, 0, data);
    let found = (claims.size(8 * G1), claims.uses(Does::Load(8 * G1 + PAGES + 8)));
    claims.is("1g is one leaf", found, (Some(PageSize::SIZE_1G), Ok(0x1234)));
}

/// Checks invalidations that the CPU's own TLB needs, and does not need.
fn caches<const SHIFT: u32>(claims: &mut All<'_, '_, SHIFT>, machine: &Machine) {
    let at = AT + (1 << SHIFT);
    machine.executes.set(Executes::Local);
    claims.guard.clean(range(at, 1 << SHIFT)).expect("a page");
    claims.guard.invalidate();
    machine.executes.set(Executes::All);
    let found = (run(Does::Store(at, 5)), claims.state(at));
    claims.is("a write after tlbiel alone is not lost", found, (Ok(5), (true, true)));
    claims.age(true);
    let load = |_| run(Does::Load(at)).is_ok();
    let found = (load(0), claims.age(false), load(1), claims.age(true));
    claims.is("without a flush it seems old in use", found, (true, 0b10, true, 0));
}

/// Leaves out invalidations: the CPU does what the engine's own prevent.
fn left_out<const SHIFT: u32>(claims: &mut All<'_, '_, SHIFT>, machine: &Machine) {
    let (at, hpa) = (AT + (3 << SHIFT), PAGES + (3 << SHIFT));
    let page = range(at, 1 << SHIFT);
    let (load, refused) = (Does::Load(at), All::<SHIFT>::refused(Does::Load(at), Why::Nothing));
    put(hpa, 9);
    for executes in [Executes::Nothing, Executes::NextPage, Executes::Local, Executes::All] {
        // QEMU drops all large pages with any of them.
        if executes == Executes::NextPage && SHIFT > 12 {
            continue;
        }
        claims.is("a page is read", run(load), Ok(9));
        machine.executes.set(executes);
        let mut storage = [UnmapEntry::EMPTY; 1];
        let mut batch = claims.guard.unmap_batch(&mut storage);
        claims.guard.unmap(page, &mut batch).expect("a page");
        let was = batch.complete().map(|removed| removed.hpa.0).sum();
        claims.is("an unmapped page says where it was", was, hpa);
        machine.executes.set(Executes::All);
        match executes {
            Executes::Nothing => claims.is("not invalidated, it is still read", run(load), Ok(9)),
            Executes::NextPage => claims.is("nor if the next page was", run(load), Ok(9)),
            Executes::Local => claims.is("by tlbiel it is gone", run(load), refused),
            Executes::All => claims.is("by tlbie it is gone", run(load), refused),
        }
        claims.map(at, 1 << SHIFT, hpa, CLEAN);
        machine.flush(LPID);
    }
    let found = (run(Does::Store(at, 9)), claims.state(at));
    claims.is("a page is written", found, (Ok(9), (true, true)));
    machine.executes.set(Executes::Nothing);
    claims.guard.clean(page).expect("a page");
    claims.guard.invalidate();
    let found = (run(Does::Store(at, 10)), claims.state(at));
    claims.is("cleaned without it, a write is lost", found, (Ok(10), (true, false)));
    claims.guard.write_protect(page).expect("a page");
    claims.guard.invalidate();
    machine.executes.set(Executes::All);
    claims.is("protected without it, it is written", run(Does::Store(at, 11)), Ok(11));
    claims.guard.write_protect(page).expect("a page");
    claims.guard.invalidate();
    assert_eq!(get(hpa), 11);
}
