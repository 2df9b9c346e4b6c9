//! Claims about tables, each by the behaviour of a CPU: what the programs for several architectures
//! have in common. A claim is one line, `right` or `wrong`.

use core::fmt::{Debug, Write};
use slat::format::Kind;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, Format, Gpa, GpaRange, Guard, Hpa, PageSize,
    Platform, TableBits, TableCache, Tables, UnmapEntry,
};

pub const M2: u64 = 2 << 20;
pub const CLEAN: Attributes = Attributes { accessed: false, dirty: false, ..Attributes::RAM };

/// An access of the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Does {
    Load(u64),
    Store(u64, u64),
    /// A jump to a call of the hypervisor.
    Jump(u64),
}

impl Does {
    const fn access(self) -> Access {
        match self {
            Self::Load(_) => Access::Read,
            Self::Store(..) => Access::Write,
            Self::Jump(_) => Access::Execute,
        }
    }

    const fn gpa(self) -> u64 {
        let (Self::Load(gpa) | Self::Store(gpa, _) | Self::Jump(gpa)) = self;
        gpa
    }
}

/// What a fault says of its cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// Nothing is mapped.
    Nothing,
    /// A right is missing.
    Right,
    /// Nothing, because the architecture does not say, or something else.
    Other,
}

/// What stopped the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    Fault(Gpa, Access, Why),
    /// Something else, by its number.
    Trap(u64),
}

/// The value that the guest read or wrote, or what stopped it.
pub type Outcome = Result<u64, Stop>;

/// What a fault made on purpose does to each leaf while the guest uses it, as a format might.
#[derive(Clone, Copy)]
pub enum Bits {
    Set(u64),
    Clear(u64),
    /// Its address is off by a leaf.
    Address,
}

/// A fault made on purpose.
pub type Fault = (&'static str, Bits);

/// The CPU that walks the tables.
pub trait Cpu {
    type Format: Format;
    type Platform: Platform;
    /// Whether faults say why they happen.
    const SAYS_WHY: bool;
    /// Where a page of the guest's code has a call of the hypervisor.
    const CALL: u64;

    /// Faults that some claim has to notice.
    const FAULTS: &'static [Fault];
    /// How far an address is shifted to the right in a leaf.
    const ADDRESS_SHIFT: u32 = 0;

    /// Lets the guest do something.
    fn run(&self, does: Does) -> Outcome;

    /// Writes the guest's code to a page of memory.
    fn write_code(&self, hpa: u64);

    /// Drops all that the CPU holds of the guest.
    fn forget(&self);
}

/// Memory of the guest, which is at its own address.
pub fn get(hpa: u64) -> u64 {
    // SAFETY: memory that only the guest, its tables and the claims use.
    unsafe { (hpa as *const u64).read_volatile() }
}

pub fn put(hpa: u64, value: u64) {
    // SAFETY: as above.
    unsafe { (hpa as *mut u64).write_volatile(value) };
}

pub fn range(gpa: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), bytes).expect("a range of the claims' own")
}

/// The tables of a guest, a CPU that walks them, and how many claims were wrong.
pub struct Claims<'t, 'p, C: Cpu, W> {
    pub cpu: C,
    pub tables: &'t Tables<'p, C::Format, C::Platform>,
    pub guard: Guard<'t, 'p, C::Format, C::Platform>,
    pub cache: TableCache<'p, C::Format, C::Platform>,
    pub out: W,
    /// What each line begins with.
    pub name: &'static str,
    /// A guest address with nothing in the 4 MiB from it on, a multiple of 2 MiB.
    pub at: u64,
    /// Memory for four pages, and a multiple of 2 MiB with so much memory.
    pub pages: u64,
    pub block: u64,
    pub wrong: u32,
    /// Nothing is printed with one.
    pub fault: Option<Fault>,
    /// Marks that the CPU left to the handler of its fault.
    pub marked_by_faults: u32,
}

/// Checks all by `check`, and that each fault is noticed; returns how many claims were wrong.
pub fn judge<C: Cpu>(mut out: impl Write, mut check: impl FnMut(Option<Fault>) -> u32) -> u32 {
    let mut wrong = check(None);
    for fault in C::FAULTS {
        let is_noticed = check(Some(*fault)) > 0;
        let word = if is_noticed { "right" } else { "wrong" };
        let _ = writeln!(out, "{word}: a fault made on purpose is noticed: {}", fault.0);
        wrong += u32::from(!is_noticed);
    }
    wrong
}

impl<C: Cpu, W: Write> Claims<'_, '_, C, W> {
    pub fn page_bytes() -> u64 {
        1 << C::Format::shift(0)
    }

    pub fn is<T: PartialEq + Debug>(&mut self, claim: &str, found: T, expected: T) {
        let (name, is_right) = (self.name, found == expected);
        self.wrong += u32::from(!is_right);
        let _ = match self.fault {
            Some(_) => Ok(()),
            None if is_right => writeln!(self.out, "right {name}: {claim}"),
            None => writeln!(self.out, "wrong {name}: {claim}: {found:x?}, not {expected:x?}"),
        };
    }

    /// Returns the address of the entry at the end of the walk for `gpa`, and the bytes of its leaf
    /// if it is one.
    fn last_entry(&self, gpa: u64) -> (u64, Option<u64>) {
        let geometry = self.tables.geometry();
        let (mut table, mut ptes) = (self.tables.root(), geometry.root_entries as u64);
        for level in (0..=geometry.root_level).rev() {
            let at = table.0 + 8 * ((gpa >> C::Format::shift(level)) % ptes);
            match C::Format::kind(get(at), level) {
                Kind::Table => {}
                Kind::Leaf => return (at, Some(1 << C::Format::shift(level))),
                _ => return (at, None),
            }
            let one = level == 1;
            let bits = if one { C::Format::LAST_INDEX_BITS } else { C::Format::INDEX_BITS };
            (table, ptes) = (C::Format::table_address(get(at)), 1 << bits);
        }
        unreachable!("no table is at level 0")
    }

    /// Lets the guest do something, under the fault if there is one.
    pub fn run(&self, does: Does) -> Outcome {
        let Some((_, bits)) = self.fault else { return self.cpu.run(does) };
        let (at, leaf) = self.last_entry(does.gpa());
        let Some(bytes) = leaf else { return self.cpu.run(does) };
        let entry = get(at);
        let changed = match bits {
            Bits::Set(bits) => bits & !entry,
            Bits::Clear(bits) => bits & entry,
            Bits::Address => bytes >> C::ADDRESS_SHIFT,
        };
        put(at, entry ^ changed);
        self.cpu.forget();
        let outcome = self.cpu.run(does);
        // The CPU's marks stay.
        put(at, get(at) ^ changed);
        self.cpu.forget();
        outcome
    }

    /// What an access that the tables refuse has to end with.
    pub fn refused(does: Does, why: Why) -> Outcome {
        let why = if C::SAYS_WHY { why } else { Why::Other };
        Err(Stop::Fault(Gpa(does.gpa()), does.access(), why))
    }

    pub fn map(&mut self, gpa: u64, bytes: u64, hpa: u64, attributes: Attributes) {
        self.cache.fill(16).expect("memory for tables");
        // The largest up to 1 GiB.
        let largest = [2, 1].map(C::Format::shift).into_iter().find(|shift| *shift <= 30);
        let size = PageSize::from_bytes(1 << largest.expect("a block")).expect("a size");
        let at = range(gpa, bytes);
        let mapped = self.guard.map(at, Hpa(hpa), attributes, size, &mut self.cache);
        mapped.expect("nothing is in the way");
    }

    /// Runs an access that the tables permit. Where the CPU does not mark leaves, it faults, and
    /// the handler does.
    pub fn uses(&mut self, does: Does) -> Outcome {
        let outcome = self.run(does);
        let Err(Stop::Fault(gpa, access, Why::Right | Why::Other)) = outcome else {
            return outcome;
        };
        let size = self.size(gpa.0).map_or(0, PageSize::bytes);
        if (gpa.0, access) != (does.gpa(), does.access()) || size == 0 {
            return outcome;
        }
        self.marked_by_faults += 1;
        let leaf = range(gpa.0 & !(size - 1), size);
        self.guard.relax(leaf, access).expect("a leaf").flush_local();
        self.run(does)
    }

    /// Accessed and dirty of the leaf at `gpa`.
    pub fn state(&self, gpa: u64) -> (bool, bool) {
        let there = self.guard.translate(Gpa(gpa)).ok().flatten().expect("it is mapped");
        (there.attributes.accessed, there.attributes.dirty)
    }

    pub fn size(&self, gpa: u64) -> Option<PageSize> {
        self.guard.descriptor(Gpa(gpa)).map(|(_, size)| size)
    }

    /// Checks all.
    pub fn check(&mut self) {
        self.translates();
        self.marks();
        self.rights();
        self.ages();
        self.sealed();
        // Arm's larger granules have no block that fits into the claims' memory.
        if 1 << C::Format::shift(1) == M2 {
            self.sizes();
        }
    }

    fn translates(&mut self) {
        let (at, page) = (self.at, Self::page_bytes());
        let last = at + page - 8;
        let nothing = [
            ("what is not mapped faults when read", Does::Load(at + 8)),
            ("or written", Does::Store(last, 1)),
            ("or executed", Does::Jump(at)),
        ];
        for (claim, does) in nothing {
            let found = self.run(does);
            self.is(claim, found, Self::refused(does, Why::Nothing));
        }
        self.map(at, 4 * page, self.pages, CLEAN);
        put(self.pages + 8, 0x1234);
        self.is("a new page is neither accessed nor dirty", self.state(at), (false, false));
        let found = self.uses(Does::Load(at + 8));
        self.is("a page is read where it was mapped", found, Ok(0x1234));
        let found = (self.uses(Does::Store(last, 77)), get(self.pages + page - 8));
        self.is("and written", found, (Ok(77), 77));
    }

    /// Checks accessed and dirty, which the CPU sets, or the handler of its fault.
    fn marks(&mut self) {
        let at = self.at + Self::page_bytes();
        let page = range(at, Self::page_bytes());
        put(self.pages + Self::page_bytes(), 0);
        let before = self.marked_by_faults;
        let found = (self.uses(Does::Load(at)), self.state(at));
        self.is("a read makes it accessed", found, (Ok(0), (true, false)));
        let found = (self.uses(Does::Store(at, 3)), self.state(at));
        self.is("a write makes it dirty", found, (Ok(3), (true, true)));
        let mut bitmap = [0];
        let harvested = self.guard.harvest(page, &mut bitmap);
        self.guard.invalidate();
        let found = (harvested, bitmap, self.state(at));
        self.is("a harvest hands it out, clean", found, (Ok(1), [1], (true, false)));
        let found = (self.uses(Does::Store(at, 4)), self.state(at));
        self.is("the next write is not lost", found, (Ok(4), (true, true)));
        let by = match self.marked_by_faults - before {
            0 => "the CPU",
            3 => "the handlers of its faults",
            _ => "both",
        };
        if self.fault.is_none() {
            let _ = writeln!(self.out, "{}: leaves are marked by {by}", self.name);
        }
    }

    fn rights(&mut self) {
        let (at, bytes) = (self.at + Self::page_bytes(), Self::page_bytes());
        let page = range(at, bytes);
        self.guard.write_protect(page).expect("a page");
        self.guard.invalidate();
        let (load, store) = (Does::Load(at), Does::Store(at, 2));
        let found = self.run(load);
        self.is("a protected page is read", found, Ok(4));
        let found = self.run(store);
        self.is("and not written", found, Self::refused(store, Why::Right));
        self.is("it stays dirty", self.state(at), (true, true));
        self.guard.relax(page, Access::Write).expect("a page").flush_local();
        let found = self.run(store);
        self.is("until the fault is answered", found, Ok(2));

        self.cpu.write_code(self.pages + 2 * bytes);
        let (page, call) = (range(at + bytes, bytes), at + bytes + C::CALL);
        let jump = Does::Jump(call);
        let found = self.uses(jump).is_ok();
        self.is("code is executed", found, true);
        self.guard.execute_protect(page).expect("a page");
        self.guard.invalidate();
        let found = self.run(jump);
        self.is("without the right it is not", found, Self::refused(jump, Why::Right));
        let found = self.run(Does::Load(call)).is_ok();
        self.is("and read", found, true);
        self.guard.relax(page, Access::Execute).expect("a page").flush_local();
        let found = self.run(jump).is_ok();
        self.is("until that fault is answered", found, true);
    }

    /// Returns which of the four pages were used, and makes them old.
    pub fn age(&mut self, flush_tlb: bool) -> u64 {
        let mut young = [0];
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut [0] };
        let how = AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb };
        let pages = range(self.at, 4 * Self::page_bytes());
        self.guard.age(pages, &mut ages, how).expect("pages");
        self.guard.invalidate();
        young[0]
    }

    fn ages(&mut self) {
        let at = self.at + Self::page_bytes();
        let found = self.age(true);
        self.is("three pages were used", found, 0b111);
        let found = (self.uses(Does::Load(at)).is_ok(), self.age(true));
        self.is("then one", found, (true, 0b10));
        let found = self.age(true);
        self.is("then none", found, 0);
    }

    /// Flips the bit by which the engine seals a leaf, as a collapse does while vCPUs run.
    fn sealed(&mut self) {
        let _ = self.uses(Does::Load(self.at + 8));
        let (entry, _) = self.last_entry(self.at);
        put(entry, get(entry) ^ C::Format::MARK);
        self.cpu.forget();
        let found = self.run(Does::Load(self.at + 8));
        self.is("the mark is nothing to hardware", found, Ok(0x1234));
        put(entry, get(entry) ^ C::Format::MARK);
    }

    /// Counts pages of a block that read what is there.
    fn read(&mut self, at: u64) -> u64 {
        let pages = (0..M2).step_by(Self::page_bytes() as usize).zip(1000..);
        pages.filter(|(page, n)| self.uses(Does::Load(at + page + 8)) == Ok(*n)).count() as u64
    }

    fn sizes(&mut self) {
        let (at, bytes) = (self.at + M2, Self::page_bytes());
        let (block, count) = (range(at, M2), M2 / bytes);
        (0..count).for_each(|n| put(self.block + n * bytes + 8, 1000 + n));
        self.map(at, M2, self.block, CLEAN);
        self.is("a block is one leaf", self.size(at), Some(PageSize::SIZE_2M));
        let found = self.read(at);
        self.is("all of it is read where it was mapped", found, count);
        self.cache.fill(16).expect("memory for tables");
        let page = PageSize::from_bytes(bytes).expect("a size");
        self.guard.split(block, page, &mut self.cache).expect("tables at hand");
        self.guard.invalidate();
        self.is("split, it is pages", self.size(at), Some(page));
        let found = self.read(at);
        self.is("and reads the same", found, count);
        let stored = [0, 5, count - 1].map(|n| self.uses(Does::Store(at + n * bytes + 32, n)));
        let harvested = self.guard.harvest(block, &mut [0; 8]);
        self.guard.invalidate();
        let expected = ([Ok(0), Ok(5), Ok(count - 1)], Ok(3));
        self.is("a harvest finds three pages", (stored, harvested), expected);

        let (hole, gone) = (range(at + 5 * bytes, bytes), Does::Store(at + 5 * bytes, 0));
        let mut storage = [UnmapEntry::EMPTY; 1];
        let mut batch = self.guard.unmap_batch(&mut storage);
        self.guard.unmap(hole, &mut batch).expect("a page");
        let freed = batch.complete().next().map(|removed| removed.hpa.0);
        let memory = self.block + 5 * bytes;
        self.is("an unmapped page says where it was", freed, Some(memory));
        let found = (0..count).filter(|n| self.run(Does::Load(at + n * bytes + 8)).is_ok());
        let found = (found.count() as u64, self.run(gone));
        self.is("and it alone is gone", found, (count - 1, Self::refused(gone, Why::Nothing)));
        self.map(at + 5 * bytes, bytes, memory, CLEAN);
        let found = self.read(at);
        self.is("filled again", found, count);
        self.guard.collapse(block, PageSize::SIZE_2M).expect("all leaves agree");
        self.guard.invalidate();
        self.is("collapsed, it is a block", self.size(at), Some(PageSize::SIZE_2M));
        let found = self.read(at);
        self.is("that reads the same", found, count);
    }
}
