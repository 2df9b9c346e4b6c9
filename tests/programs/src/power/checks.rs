//! Checks of claims about the tables, each by the behaviour of the CPU.

use crate::machine::{
    CALL, Does, FREE, Machine, Outcome, Stop, end, get, jump, load, put, say, start, store,
    version, write_code,
};
use crate::second;
use crate::walk::last_entry;
use slat::format::power::Power;
use slat::format::power::fault::Kind;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, Execute, Format, Gpa, GpaRange, Guard, Hpa,
    PageSize, Reader, TableBits, TableCache, Tables, UnmapEntry, Vmid,
};

const M2: u64 = 2 << 20;
const G1: u64 = 1 << 30;
const LPID: Vmid = Vmid(7);
const CLEAN: Attributes = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
/// The guest's code, pages of data and a block of data, in host memory.
const CODE: u64 = FREE;
const PAGES: u64 = FREE + 16 * M2;
const BLOCK: u64 = FREE + 8 * M2;

#[unsafe(no_mangle)]
extern "C" fn boot() -> ! {
    start();
    say!("processor version {:#x}", version());
    let machine = Machine::new();
    let wrong = check::<12>(&machine) + check::<16>(&machine);
    end(wrong + u32::from(!second::run(&machine)))
}

fn check<const SHIFT: u32>(machine: &Machine) -> u32 {
    let before = machine.live.get();
    let tables = Tables::new(Power::<SHIFT>::default(), LPID, 52, machine);
    let tables = tables.expect("memory for the root");
    machine.load_root(LPID, tables.guest_root().partition_entry().expect("a value"));
    let mut storage = [const { None }; 16];
    let mut cache = TableCache::new(machine, &mut storage);
    let mut reader = Reader::register(machine).expect("the only one");
    let mut checks = Checks::<SHIFT> { machine, wrong: 0 };
    {
        let mut guard = tables.enter(&mut reader).expect("the machine's own tables");
        write_code(CODE);
        let code = Attributes { write: false, dirty: false, ..Attributes::RAM };
        checks.map(&mut guard, range(0, 1 << SHIFT), CODE, code, &mut cache);
        checks.translates(&mut guard, &mut cache);
        checks.state(&mut guard);
        checks.rights(&mut guard);
        checks.ages(&mut guard);
        checks.mark(&tables);
        checks.left_out(&mut guard, &mut cache);
        checks.sizes(&mut guard, &mut cache);
    }
    drop((cache, reader));
    machine.load_root(LPID, 0);
    // SAFETY: the only CPU has just unloaded the root.
    unsafe { tables.deactivate() }.destroy();
    checks.is("all frames come back", machine.live.get(), before);
    checks.wrong
}

struct Checks<'p, const SHIFT: u32> {
    machine: &'p Machine,
    wrong: u32,
}

type In<'t, 'p, const SHIFT: u32> = Guard<'t, 'p, Power<SHIFT>, Machine>;
type Cache<'p, const SHIFT: u32> = TableCache<'p, Power<SHIFT>, Machine>;

fn range(gpa: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), bytes).expect("a range of the checks' own")
}

fn missing(access: Access, gpa: u64) -> Outcome {
    Err(Stop::Fault(Gpa(gpa), access, Kind::NotMapped))
}

fn refused(access: Access, gpa: u64) -> Outcome {
    Err(Stop::Fault(Gpa(gpa), access, Kind::Permission))
}

/// Accessed and dirty of the leaf at `gpa`.
fn state<const SHIFT: u32>(guard: &In<'_, '_, SHIFT>, gpa: u64) -> (bool, bool) {
    let there = guard.translate(Gpa(gpa)).ok().flatten().expect("it is mapped");
    (there.attributes.accessed, there.attributes.dirty)
}

impl<'p, const SHIFT: u32> Checks<'p, SHIFT> {
    const PAGE: u64 = 1 << SHIFT;
    /// Guest address of four pages.
    const AT: u64 = 64 << SHIFT;

    fn is<T: PartialEq + core::fmt::Debug>(&mut self, claim: &str, found: T, expected: T) {
        if found == expected {
            say!("right {}K: {claim}", Self::PAGE >> 10);
        } else {
            say!("wrong {}K: {claim}: {found:x?}, not {expected:x?}", Self::PAGE >> 10);
            self.wrong += 1;
        }
    }

    fn map(
        &self,
        guard: &mut In<'_, 'p, SHIFT>,
        at: GpaRange,
        hpa: u64,
        attributes: Attributes,
        cache: &mut Cache<'p, SHIFT>,
    ) {
        cache.fill(16).expect("memory for tables");
        let mapped = guard.map(at, Hpa(hpa), attributes, PageSize::SIZE_1G, cache);
        mapped.expect("nothing is in the way");
    }

    fn translates(&mut self, guard: &mut In<'_, 'p, SHIFT>, cache: &mut Cache<'p, SHIFT>) {
        let (at, page) = (Self::AT, Self::PAGE);
        self.is("what is not mapped faults when read", load(at + 8), missing(Access::Read, at + 8));
        let last = at + page - 8;
        self.is("or written", store(last, 1), missing(Access::Write, last));
        self.is("or executed", jump(at), missing(Access::Execute, at));
        self.map(guard, range(at, 4 * page), PAGES, CLEAN, cache);
        put(PAGES + 8, 0x1234);
        self.is("a new page is neither accessed nor dirty", state(guard, at), (false, false));
        self.is("a page is read where it was mapped", load(at + 8), Ok(0x1234));
        let found = (store(last, 77), get(PAGES + page - 8));
        self.is("and written", found, (Ok(77), 77));
        let top = (1 << 52) - page;
        self.map(guard, range(top, page), PAGES, Attributes::RAM, cache);
        self.is("the last page of 52 bits is read", load(top + 8), Ok(0x1234));
    }

    /// Checks R and C, which the CPU sets.
    fn state(&mut self, guard: &mut In<'_, 'p, SHIFT>) {
        let at = Self::AT + Self::PAGE;
        let page = range(at, Self::PAGE);
        let found = (load(at), state(guard, at));
        self.is("a read makes it accessed", found, (Ok(0), (true, false)));
        let found = (store(at, 3), state(guard, at));
        self.is("a write makes it dirty", found, (Ok(3), (true, true)));
        let mut bitmap = [0];
        let harvested = guard.harvest(page, &mut bitmap);
        guard.invalidate();
        let found = (harvested, bitmap, state(guard, at));
        self.is("a harvest hands it out, clean", found, (Ok(1), [1], (true, false)));
        let found = (store(at, 4), state(guard, at));
        self.is("the next write is not lost", found, (Ok(4), (true, true)));
        self.machine.does.set(Does::Local);
        guard.clean(page).expect("a page");
        guard.invalidate();
        self.machine.does.set(Does::All);
        let found = (store(at, 5), state(guard, at));
        self.is("nor is it after tlbiel alone", found, (Ok(5), (true, true)));
    }

    fn rights(&mut self, guard: &mut In<'_, 'p, SHIFT>) {
        let at = Self::AT + Self::PAGE;
        let page = range(at, Self::PAGE);
        guard.write_protect(page).expect("a page");
        guard.invalidate();
        self.is("a protected page is read", load(at), Ok(5));
        self.is("and not written", store(at, 1), refused(Access::Write, at));
        self.is("it stays dirty", state(guard, at), (true, true));
        guard.relax(page, Access::Write).expect("a page").flush_local();
        self.is("until the fault is answered", store(at, 2), Ok(2));
        write_code(PAGES + 2 * Self::PAGE);
        let at = Self::AT + 2 * Self::PAGE;
        self.is("code is executed", jump(at + CALL).is_ok(), true);
        guard.execute_protect(range(at, Self::PAGE)).expect("a page");
        guard.invalidate();
        let found = jump(at + CALL);
        self.is("without the right it is not", found, refused(Access::Execute, at + CALL));
        self.is("and read", load(at + CALL).is_ok(), true);
        guard.relax(range(at, Self::PAGE), Access::Execute).expect("a page").flush_local();
        self.is("until that fault is answered", jump(at + CALL).is_ok(), true);
    }

    fn ages(&mut self, guard: &mut In<'_, 'p, SHIFT>) {
        let age = |guard: &mut In<'_, 'p, SHIFT>, flush_tlb| {
            let (mut young, mut unanswered) = ([0], [0]);
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            let how = AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb };
            guard.age(range(Self::AT, 4 * Self::PAGE), &mut ages, how).expect("pages");
            guard.invalidate();
            young[0]
        };
        let at = Self::AT + Self::PAGE;
        self.is("three pages were used", age(guard, true), 0b111);
        let found = (load(at).is_ok(), age(guard, true));
        self.is("then one", found, (true, 0b10));
        let found = (load(at).is_ok(), age(guard, false), load(at).is_ok(), age(guard, true));
        self.is("without a flush it seems old in use", found, (true, 0b10, true, 0));
    }

    /// Flips the bit by which the engine seals a leaf, as a collapse does while vCPUs run.
    fn mark(&mut self, tables: &Tables<'p, Power<SHIFT>, Machine>) {
        let entry = last_entry(tables, Self::AT, get);
        put(entry, get(entry) ^ Power::<SHIFT>::MARK);
        self.machine.flush(LPID);
        self.is("the mark is nothing to hardware", load(Self::AT + 8), Ok(0x1234));
        put(entry, get(entry) ^ Power::<SHIFT>::MARK);
    }

    /// Leaves out invalidations: the CPU does what the engine's own prevent.
    fn left_out(&mut self, guard: &mut In<'_, 'p, SHIFT>, cache: &mut Cache<'p, SHIFT>) {
        let (at, hpa) = (Self::AT + 3 * Self::PAGE, PAGES + 3 * Self::PAGE);
        let page = range(at, Self::PAGE);
        let unmap = |guard: &mut In<'_, 'p, SHIFT>| {
            let mut storage = [UnmapEntry::EMPTY; 1];
            let mut batch = guard.unmap_batch(&mut storage);
            guard.unmap(page, &mut batch).expect("a page");
            batch.complete().map(|removed| removed.hpa.0).sum::<u64>()
        };
        put(hpa, 9);
        for does in [Does::Nothing, Does::NextPage, Does::Local, Does::All] {
            // QEMU drops all large pages with any of them.
            if does == Does::NextPage && SHIFT > 12 {
                continue;
            }
            self.is("a page is read", load(at), Ok(9));
            self.machine.does.set(does);
            self.is("an unmapped page says where it was", unmap(guard), hpa);
            self.machine.does.set(Does::All);
            match does {
                Does::Nothing => self.is("not invalidated, it is still read", load(at), Ok(9)),
                Does::NextPage => self.is("nor if the next page was", load(at), Ok(9)),
                Does::Local => self.is("by tlbiel it is gone", load(at), missing(Access::Read, at)),
                Does::All => self.is("by tlbie it is gone", load(at), missing(Access::Read, at)),
            }
            self.map(guard, page, hpa, CLEAN, cache);
            self.machine.flush(LPID);
        }
        self.is("a page is written", (store(at, 9), state(guard, at)), (Ok(9), (true, true)));
        self.machine.does.set(Does::Nothing);
        guard.clean(page).expect("a page");
        guard.invalidate();
        let found = (store(at, 10), state(guard, at));
        self.is("cleaned without it, a write is lost", found, (Ok(10), (true, false)));
        guard.write_protect(page).expect("a page");
        guard.invalidate();
        self.machine.does.set(Does::All);
        self.is("protected without it, it is written", store(at, 11), Ok(11));
        guard.write_protect(page).expect("a page");
        guard.invalidate();
    }

    fn sizes(&mut self, guard: &mut In<'_, 'p, SHIFT>, cache: &mut Cache<'p, SHIFT>) {
        let (at, count) = (16 * M2 + G1, M2 >> SHIFT);
        let block = range(at, M2);
        (0..count).for_each(|n| put(BLOCK + n * Self::PAGE + 8, 1000 + n));
        self.map(guard, block, BLOCK, CLEAN, cache);
        let read =
            || (0..count).filter(|n| load(at + n * Self::PAGE + 8) == Ok(1000 + n)).count() as u64;
        let size = |guard: &In<'_, 'p, SHIFT>| guard.descriptor(Gpa(at)).map(|(_, size)| size);
        self.is("a block is one leaf", size(guard), Some(PageSize::SIZE_2M));
        self.is("all of it is read where it was mapped", read(), count);
        cache.fill(16).expect("memory for tables");
        let page = PageSize::from_bytes(Self::PAGE).expect("a size");
        guard.split(block, page, cache).expect("tables at hand");
        guard.invalidate();
        self.is("split, it is pages", size(guard), Some(page));
        self.is("and reads the same", read(), count);
        let stored = [0, 5, count - 1].map(|n| store(at + n * Self::PAGE + 32, n).is_ok());
        let harvested = guard.harvest(block, &mut [0; 8]);
        guard.invalidate();
        self.is("a harvest finds three pages", (stored, harvested), ([true; 3], Ok(3)));
        guard.collapse(block, PageSize::SIZE_2M).expect("all leaves agree");
        guard.invalidate();
        self.is("collapsed, it is a block", size(guard), Some(PageSize::SIZE_2M));
        self.is("that reads the same", read(), count);
        let data = Attributes { write: false, execute: Execute::None, ..CLEAN };
        self.map(guard, range(8 * G1, G1), 0, data, cache);
        let size = guard.descriptor(Gpa(8 * G1)).map(|(_, size)| size);
        let found = (size, load(8 * G1 + PAGES + 8));
        self.is("1g is one leaf", found, (Some(PageSize::SIZE_1G), Ok(0x1234)));
    }
}
