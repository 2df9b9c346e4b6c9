//! Checks of claims about the tables, each by the behaviour of the hart.

use crate::machine::{
    CALL, FREE, Guest, IS_SPIKE, Machine, Outcome, Stop, end, load_root, say, word, write_code,
};
use crate::second;
use crate::walk::last_entry;
use core::sync::atomic::Ordering::Relaxed;
use slat::format::riscv::{Mode, RiscV};
use slat::{
    Access, Attributes, Execute, Format, Gpa, GpaRange, Guard, Hpa, PageSize, Reader, TableCache,
    Tables, UnmapEntry, Vmid,
};

const K4: u64 = 4 << 10;
const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;
const RAM: Attributes = Attributes::RAM;
const VMID: Vmid = Vmid(5);
/// The guest's code, a block of data and a page of data, in host memory.
const CODE: u64 = FREE;
const BLOCK: u64 = FREE + M2;
const PAGE: u64 = FREE + 3 * M2;

#[unsafe(no_mangle)]
extern "C" fn boot(architecture: u64) -> ! {
    IS_SPIKE.store(architecture == 5, Relaxed);
    let machine = Machine::new();
    let modes = [Mode::Sv39x4, Mode::Sv48x4, Mode::Sv57x4];
    let wrong: u32 = modes.into_iter().map(|mode| Checks { mode, wrong: 0 }.run(&machine)).sum();
    let is_seen = second::run(&machine);
    say!("{wrong} wrong");
    end(wrong == 0 && is_seen)
}

struct Checks {
    mode: Mode,
    wrong: u32,
}

type In<'t, 'p> = Guard<'t, 'p, RiscV, Machine>;
type Cache<'a> = TableCache<'a, RiscV, Machine>;

fn range(gpa: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), bytes).expect("a range of the checks' own")
}

fn fault(access: Access, gpa: u64) -> Outcome {
    Err(Stop::Fault(Gpa(gpa), access))
}

fn put(hpa: u64, value: u64) {
    // SAFETY: memory that only the guest and these checks use.
    unsafe { word(hpa).write_volatile(value) };
}

fn get(hpa: u64) -> u64 {
    // SAFETY: as above.
    unsafe { word(hpa).read_volatile() }
}

fn map(guard: &mut In<'_, '_>, at: GpaRange, hpa: u64, a: Attributes, cache: &mut Cache<'_>) {
    guard.map(at, Hpa(hpa), a, PageSize::SIZE_1G, cache).expect("nothing is in the way");
}

/// Flips the bit by which the engine seals a leaf, as a collapse does while vCPUs run.
fn seal(tables: &Tables<'_, RiscV, Machine>, gpa: u64) {
    let pte = last_entry(tables, gpa, get);
    put(pte, get(pte) ^ RiscV::MARK);
}

impl Checks {
    fn is<T: PartialEq + core::fmt::Debug>(&mut self, claim: &str, found: T, expected: T) {
        if found == expected {
            say!("right {:?}: {claim}", self.mode);
        } else {
            say!("wrong {:?}: {claim}: {found:x?}, not {expected:x?}", self.mode);
            self.wrong += 1;
        }
    }

    /// Runs the checks in tables of the mode. The guest uses the upper end of its addresses: every
    /// index is above 0, and the root's is above 511. QEMU 7.2 takes the highest address bit for a
    /// sign, so there it is the end of their lower half.
    fn run(mut self, machine: &Machine) -> u32 {
        let format = RiscV { widest: Mode::Sv57x4, ..Default::default() };
        let bits = self.mode.address_bits();
        let before = machine.live.get();
        let tables = Tables::new(format, VMID, bits, machine).expect("memory for the root");
        let hgatp = tables.guest_root().hgatp().expect("a value");
        self.is("hgatp holds what it is given", load_root(hgatp), hgatp);
        let mut storage = [const { None }; 16];
        let mut cache = TableCache::new(machine, &mut storage);
        let mut reader = Reader::register(machine).expect("the only one");
        {
            let mut guard = tables.enter(&mut reader).expect("the machine's own tables");
            let half = u32::from(!IS_SPIKE.load(Relaxed));
            let guest = Guest { code: (1 << (bits - half)) - M2 };
            cache.fill(16).expect("memory for tables");
            write_code(CODE);
            let code = Attributes { write: false, dirty: false, ..RAM };
            map(&mut guard, range(guest.code, K4), CODE, code, &mut cache);
            self.translates(&guest, &mut guard, &mut cache);
            cache.fill(16).expect("memory for tables");
            self.rights(&guest, &mut guard, &mut cache);
            self.state(&guest, &mut guard, &mut cache);
            let page = guest.code + 8 * K4;
            seal(&tables, page);
            self.is("the mark is nothing to hardware", guest.store(page, 9), Ok(9));
            seal(&tables, page);
            cache.fill(16).expect("memory for tables");
            self.sizes(&guest, &mut guard, &mut cache);
        }
        drop((cache, reader));
        load_root(0);
        // SAFETY: the only hart has just unloaded the root.
        unsafe { tables.deactivate() }.destroy();
        self.is("all frames come back", machine.live.get(), before);
        self.wrong
    }

    fn translates(&mut self, guest: &Guest, guard: &mut In<'_, '_>, cache: &mut Cache<'_>) {
        let at = guest.code + 8 * K4;
        self.is("what is not mapped faults when read", guest.load(at), fault(Access::Read, at));
        let last = at + K4 - 8;
        self.is("or written", guest.store(last, 1), fault(Access::Write, last));
        self.is("or executed", guest.jump(at), fault(Access::Execute, at));
        let beyond = 1 << self.mode.address_bits();
        let found = guest.load(beyond);
        self.is("so does what the mode does not reach", found, fault(Access::Read, beyond));
        map(guard, range(at, K4), PAGE, RAM, cache);
        put(PAGE + 8, 0x1234);
        self.is("a page is read where it was mapped", guest.load(at + 8), Ok(0x1234));
        self.is("and written", (guest.store(last, 77), get(PAGE + K4 - 8)), (Ok(77), 77));
    }

    fn rights(&mut self, guest: &Guest, guard: &mut In<'_, '_>, cache: &mut Cache<'_>) {
        let at = guest.code + 8 * K4;
        let page = range(at, K4);
        guard.write_protect(page).expect("a page");
        guard.invalidate();
        self.is("a protected page is read", guest.load(at + 8), Ok(0x1234));
        self.is("and not written", guest.store(at, 1), fault(Access::Write, at));
        guard.relax(page, Access::Write).expect("a page").flush_local();
        self.is("until the fault is answered", guest.store(at, 2), Ok(2));

        // The guest's code under another address, in a block: without R, W and X it would be a
        // table.
        let at = guest.code - 2 * M2;
        let (block, call) = (range(at, M2), at + CALL);
        map(guard, block, CODE, Attributes { read: false, write: false, ..RAM }, cache);
        self.is("a block may be executed and not read", guest.jump(call), Ok(0));
        self.is("read, it faults", guest.load(call), fault(Access::Read, call));
        guard.execute_protect(block).expect("a block");
        guard.invalidate();
        let found = [guest.load(call), guest.store(call, 1), guest.jump(call)];
        let all = [Access::Read, Access::Write, Access::Execute].map(|access| fault(access, call));
        self.is("a block without rights is for nothing", found, all);
        guard.relax(block, Access::Execute).expect("a block").flush_local();
        let found = (guest.jump(call), guest.load(call));
        self.is("executable again, and no more", found, (Ok(0), fault(Access::Read, call)));
    }

    /// Checks accessed and dirty, which the hart sets, or the handler of its fault.
    fn state(&mut self, guest: &Guest, guard: &mut In<'_, '_>, cache: &mut Cache<'_>) {
        let at = guest.code + 24 * K4;
        let page = range(at, K4);
        let clean = Attributes { accessed: false, dirty: false, ..RAM };
        map(guard, page, PAGE + K4, clean, cache);
        let state = |guard: &In<'_, '_>| {
            let there = guard.translate(Gpa(at)).ok().flatten().expect("it is mapped");
            (there.attributes.accessed, there.attributes.dirty)
        };
        self.is("a new page is neither accessed nor dirty", state(guard), (false, false));
        let mut faults = 0;
        let mut used = |guard: &mut In<'_, '_>, access, used: &dyn Fn() -> Outcome| {
            let mut outcome = used();
            if outcome == fault(access, at) {
                faults += 1;
                guard.relax(page, access).expect("a page").flush_local();
                outcome = used();
            }
            (outcome.is_ok(), state(guard))
        };
        let (load, store) = (|| guest.load(at), || guest.store(at, 3));
        let found = used(guard, Access::Read, &load);
        self.is("a read makes it accessed", found, (true, (true, false)));
        let found = used(guard, Access::Write, &store);
        self.is("a write makes it dirty", found, (true, (true, true)));
        let mut bitmap = [0];
        let found = (guard.harvest(page, &mut bitmap), bitmap, state(guard));
        self.is("a harvest hands it out, clean", found, (Ok(1), [1], (true, false)));
        let found = used(guard, Access::Write, &store);
        self.is("the next write is not lost", found, (true, (true, true)));
        guard.write_protect(page).expect("a page");
        guard.invalidate();
        self.is("a protected page stays dirty", state(guard), (true, true));
        let by = ["the hart", "its faults (Svade)"];
        say!("{:?}: marked by {}", self.mode, by.get(faults / 3).unwrap_or(&"both"));
        self.is("the hart marks, or faults, always", faults % 3, 0);
    }

    fn sizes(&mut self, guest: &Guest, guard: &mut In<'_, '_>, cache: &mut Cache<'_>) {
        let at = guest.code - 4 * M2;
        let block = range(at, M2);
        (0..512).for_each(|n| put(BLOCK + n * K4 + 8 * n % K4, n));
        map(guard, block, BLOCK, RAM, cache);
        let pages = || (0..512).filter(|n| guest.load(at + n * K4 + 8 * n % K4) == Ok(*n)).count();
        let size = |guard: &In<'_, '_>| guard.descriptor(Gpa(at)).map(|(_, size)| size);
        self.is("a block is one leaf", size(guard), Some(PageSize::SIZE_2M));
        self.is("all of it is read where it was mapped", pages(), 512);
        guard.split(block, PageSize::SIZE_4K, cache).expect("tables at hand");
        guard.invalidate();
        self.is("split, it is pages", size(guard), Some(PageSize::SIZE_4K));
        self.is("and reads the same", pages(), 512);
        let hole = range(at + 5 * K4, K4);
        let mut storage = [UnmapEntry::EMPTY; 1];
        let mut batch = guard.unmap_batch(&mut storage);
        guard.unmap(hole, &mut batch).expect("a page");
        let freed = batch.complete().next().map(|removed| removed.hpa.0);
        self.is("an unmapped page says where it was", freed, Some(BLOCK + 5 * K4));
        let gone = at + 5 * K4;
        let found = (pages(), guest.store(gone, 0));
        self.is("and it alone is gone", found, (511, fault(Access::Write, gone)));
        map(guard, hole, BLOCK + 5 * K4, RAM, cache);
        self.is("filled again", pages(), 512);
        guard.collapse(block, PageSize::SIZE_2M).expect("all leaves agree");
        self.is("collapsed, it is a block", size(guard), Some(PageSize::SIZE_2M));
        self.is("that reads the same", pages(), 512);

        // RAM begins at a multiple of 1 GiB, and so does this.
        let at = (guest.code & !(G1 - 1)) - G1;
        let data = Attributes { write: false, execute: Execute::None, ..RAM };
        map(guard, range(at, G1), FREE & !(G1 - 1), data, cache);
        let found =
            (guard.descriptor(Gpa(at)).map(|(_, size)| size), guest.load(at + PAGE % G1 + 8));
        self.is("1g is one leaf", found, (Some(PageSize::SIZE_1G), Ok(0x1234)));
    }
}
