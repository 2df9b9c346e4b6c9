//! The cases of x86: accesses of the guest, and the exits that they must cause. `cpu` is a
//! vendor's.

use super::cpu::{
    self, ACCESSED, CALL, DIRTY, Does, EXIT_CALL, Exit, FAULTS, GUEST_TABLES, Tree, Vcpu,
};
use super::machine::{Memory, Serial};
use super::platform::{Fault, LOWEST_ADDRESS, Machine, TABLES, Why};
use core::fmt::Write;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, Gpa, GpaRange, Guard, Hpa, PageSize, Reader,
    TableBits, TableCache, Tables, Vmid,
};

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;
/// The guest's memory: its first 64 KiB by pages, then a block of 2 MiB at 2 MiB.
pub static MEMORY: Memory<{ 4 << 20 }> = Memory::new();
const LOW: u64 = 64 * K;
pub const BLOCK: u64 = 2 * M;
/// Pages of the first part, one for each case.
pub const READ: u64 = 0x8000;
const WRITTEN: u64 = 0x9000;
const PROTECTED: u64 = 0xa000;
const EXECUTED: u64 = 0xb000;
const OTHER: u64 = 0xc000;

pub type GuardOf<'t, 'p> = Guard<'t, 'p, Tree, Machine>;

/// A guest, the root of its tables, and whether all cases were right so far.
pub struct Fixture<'p> {
    pub machine: &'p Machine,
    pub vcpu: &'static Vcpu,
    pub root: u64,
    pub levels: usize,
    /// Of the CPU's physical addresses.
    pub address_bits: u32,
    pub fault: Option<&'static Fault>,
    right: bool,
}

impl Fixture<'_> {
    pub fn says(&mut self, what: &str, right: bool) {
        self.right &= right;
        if self.fault.is_none() {
            let _ = writeln!(Serial, "{}: {what}", if right { "right" } else { "wrong" });
        }
    }

    pub fn run(&self, does: Does) -> Exit {
        let (Does::Read(gpa) | Does::Write(gpa, _) | Does::Execute(gpa)) = does;
        let Some(fault) = self.fault else {
            return self.vcpu.run(does, self.machine.take_stale());
        };
        let walk = || self.entries(gpa).enumerate();
        let last = walk().count() - 1;
        let wrong = walk().filter(|(n, (_, entry))| {
            let is_leaf = *n == last && entry & 7 != 0;
            is_leaf == fault.in_leaf && (is_leaf || *n < last)
        });
        // A leaf's address is off by a leaf.
        let size = if last + 1 == self.levels { 0 } else { 9 };
        let shift = |bits: u64| if bits == LOWEST_ADDRESS { bits << size } else { bits };
        let [mut undo, mut entries] = [[(0, 0); 5], [(0, 0); 5]];
        let mut count = 0;
        for (_, (at, entry)) in wrong {
            entries[count] = (at - TABLES.hpa(), (entry | shift(fault.set)) & !fault.clear);
            undo[count] = (entries[count].0, entry ^ entries[count].1);
            count += 1;
        }
        entries[..count].iter().for_each(|&(at, entry)| TABLES.write(at, entry));
        self.machine.take_stale();
        let exit = self.vcpu.run(does, true);
        // The CPU's marks stay.
        undo[..count].iter().for_each(|&(at, bits)| TABLES.write(at, TABLES.read(at) ^ bits));
        self.machine.set_stale();
        exit
    }

    /// Checks that the guest did the action; returns the value that it read.
    fn done(&mut self, what: &str, does: Does) -> u64 {
        let exit = self.run(does);
        if exit.code != EXIT_CALL && self.fault.is_none() {
            let _ = writeln!(Serial, "  {exit:x?}");
        }
        self.says(what, exit.code == EXIT_CALL);
        exit.rax
    }

    /// Checks that a fault of the tables at `gpa` stopped the guest.
    fn faults(&mut self, what: &str, does: Does, why: Why, gpa: u64) {
        let exit = self.run(does);
        let right = cpu::refused(&exit, does, why, gpa);
        if !right && self.fault.is_none() {
            let _ = writeln!(Serial, "  {exit:x?}, at {gpa:#x}");
        }
        self.says(what, right);
    }

    /// Returns the entries that hardware reads for `gpa`, as [`Machine::entries`].
    pub fn entries(&self, gpa: u64) -> impl Iterator<Item = (u64, u64)> {
        self.machine.entries(self.root, self.levels, gpa)
    }

    /// Returns the state in the leaf for `gpa`, if the leaf is at this level.
    pub fn state(&self, gpa: u64, level: usize) -> Option<u64> {
        let found = self.entries(gpa).enumerate().last();
        let found = found.filter(|(n, _)| n + 1 + level == self.levels);
        found.map(|(_, (_, leaf))| leaf & (ACCESSED | DIRTY))
    }

    /// Returns the number of tables on the way to `gpa` that are not accessed.
    fn tables_old(&self, gpa: u64) -> usize {
        let tables = self.entries(gpa).take(self.levels - 1);
        tables.filter(|(_, entry)| entry & ACCESSED == 0).count()
    }
}

pub fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).expect("a range")
}

fn page(at: u64) -> GpaRange {
    range(at, 4 * K)
}

fn marks(fixture: &mut Fixture<'_>, guest: &mut GuardOf<'_, '_>) {
    MEMORY.write(READ + 0x18, 0x1234_5678_9abc_def0);
    fixture.says("no leaf is marked before", fixture.state(READ, 0) == Some(0));
    let read = fixture.done("a read is allowed", Does::Read(READ + 0x18));
    fixture.says("it finds what is there", read == 0x1234_5678_9abc_def0);
    fixture.says("its leaf is accessed and not dirty", fixture.state(READ, 0) == Some(ACCESSED));
    fixture.says("and so is the code's", fixture.state(0x4000, 0) == Some(ACCESSED));
    let walked = [0, 0x1000, 0x2000].map(|n| fixture.state(GUEST_TABLES + n, 0));
    fixture.says("the guest's own tables are dirty", walked == [Some(ACCESSED | DIRTY); 3]);

    fixture.done("a write is allowed", Does::Write(WRITTEN + 8, 77));
    fixture.says("it arrives", MEMORY.read(WRITTEN + 8) == 77);
    fixture.says("its leaf is dirty", fixture.state(WRITTEN, 0) == Some(ACCESSED | DIRTY));
    guest.clean(page(WRITTEN)).expect("mapped");
    guest.invalidate();
    fixture.says("a cleaned leaf is not", fixture.state(WRITTEN, 0) == Some(ACCESSED));
    fixture.done("the next write is allowed", Does::Write(WRITTEN + 8, 78));
    fixture.says("and marks it again", fixture.state(WRITTEN, 0) == Some(ACCESSED | DIRTY));

    let how = AgeOptions { clear: true, table_bits: TableBits::Exact, flush_tlb: false };
    // All that the lowest table covers.
    let mut age = |young: &mut [u64; 8]| {
        let mut unanswered = [0; 8];
        let mut ages = AgeBitmaps { young, unanswered: &mut unanswered };
        guest.age(range(0, 2 * M), &mut ages, how).expect("mapped");
        guest.invalidate();
    };
    age(&mut [0; 8]);
    fixture.says("an aged table is not accessed", fixture.tables_old(READ) == 1);
    fixture.done("a read below it is allowed", Does::Read(READ));
    fixture.says("it is accessed again", fixture.tables_old(READ) == 0);
    let mut young = [0; 8];
    age(&mut young);
    // The guest's three tables, its code, and the page.
    fixture.says("and leads to what was used", young == [0b1_0001_1110, 0, 0, 0, 0, 0, 0, 0]);
}

fn faults(fixture: &mut Fixture<'_>, guest: &mut GuardOf<'_, '_>) {
    let why = Why::Nothing;
    fixture.faults("a read of nothing faults", Does::Read(8 * M + 0x128), why, 8 * M + 0x128);
    fixture.faults("a write to nothing faults", Does::Write(1 << 29, 0), why, 1 << 29);

    guest.write_protect(page(PROTECTED)).expect("mapped");
    guest.invalidate();
    let write = Does::Write(PROTECTED + 0x40, 5);
    let why = Why::Right;
    fixture.faults("a write without the right faults", write, why, PROTECTED + 0x40);
    fixture.says("it does not arrive", MEMORY.read(PROTECTED + 0x40) == 0);
    fixture.done("a read is still allowed", Does::Read(PROTECTED));
    guest.relax(page(PROTECTED), Access::Write).expect("mapped").flush_local();
    fixture.done("a relaxed leaf allows it", write);
    fixture.says("then it arrives", MEMORY.read(PROTECTED + 0x40) == 5);

    MEMORY.write(EXECUTED, CALL);
    fixture.done("code is executed", Does::Execute(EXECUTED));
    guest.execute_protect(page(EXECUTED)).expect("mapped");
    guest.invalidate();
    let why = Why::Right;
    fixture.faults("a fetch without the right faults", Does::Execute(EXECUTED), why, EXECUTED);
    fixture.done("a read is still allowed", Does::Read(EXECUTED));
    guest.relax(page(EXECUTED), Access::Execute).expect("mapped").flush_local();
    fixture.done("a relaxed leaf executes", Does::Execute(EXECUTED));
}

fn protection(fixture: &mut Fixture<'_>, guest: &mut GuardOf<'_, '_>) {
    guest.write_protect(range(0, 1 << 30)).expect("mapped");
    guest.invalidate();
    let why = Why::Walk;
    let read = Does::Read(OTHER);
    fixture.faults("a guest's walk needs the right to write", read, why, GUEST_TABLES);
    guest.relax(range(GUEST_TABLES, 0x3000), Access::Write).expect("mapped").flush_local();
    fixture.done("with it, a read is allowed", read);
    let why = Why::Right;
    let write = Does::Write(OTHER, 6);
    fixture.faults("other pages are still protected", write, why, OTHER);
    let block = Does::Write(BLOCK, 6);
    fixture.faults("and a block", block, why, BLOCK);
    guest.relax(page(OTHER), Access::Write).expect("mapped").flush_local();
    guest.relax(range(BLOCK, 2 * M), Access::Write).expect("mapped").flush_local();
    fixture.done("a relaxed page is written", write);
    fixture.done("and a relaxed block", block);
    fixture.says("both arrive", [OTHER, BLOCK].map(|at| MEMORY.read(at)) == [6, 6]);
}

fn blocks(
    fixture: &mut Fixture<'_>,
    guest: &mut GuardOf<'_, '_>,
    cache: &mut TableCache<'_, Tree, Machine>,
) {
    let block = range(BLOCK, 2 * M);
    for n in 0..512 {
        MEMORY.write(BLOCK + n * 4 * K + 0xff8, n);
    }
    let all = |fixture: &mut Fixture<'_>, what| {
        let at = |n| Does::Read(BLOCK + n * 4 * K + 0xff8);
        let right = (0..512).all(|n| {
            let exit = fixture.run(at(n));
            (exit.code, exit.rax) == (EXIT_CALL, n)
        });
        fixture.says(what, right);
    };
    all(fixture, "a block of 2m is read, all of it");
    fixture.says("one leaf stands for it", fixture.state(BLOCK, 1) == Some(ACCESSED | DIRTY));
    guest.clean(block).expect("mapped");
    guest.invalidate();
    guest.split(block, PageSize::SIZE_4K, cache).expect("frames");
    guest.invalidate();
    let leaf = fixture.state(BLOCK + M, 0);
    fixture.says("split, a page has the block's state", leaf == Some(ACCESSED));
    all(fixture, "each of 512 pages is where it was");
    for n in [0, 64, 65, 511] {
        fixture.done("a page is written", Does::Write(BLOCK + n * 4 * K, n));
    }
    let mut bits = [0; 8];
    guest.harvest(block, &mut bits).expect("mapped");
    guest.invalidate();
    fixture.says("a harvest finds those four", bits == [1, 3, 0, 0, 0, 0, 0, 1 << 63]);
    guest.collapse(block, PageSize::SIZE_2M).expect("uniform");
    guest.invalidate();
    fixture.says("collapsed, one leaf stands for them", fixture.state(BLOCK, 1).is_some());
    all(fixture, "and all of it is read");
}

/// Cases of one vendor's CPUs.
pub type Own =
    for<'p> fn(&mut Fixture<'p>, &mut GuardOf<'_, 'p>, &mut TableCache<'p, Tree, Machine>);

/// Checks all, and that each fault made on purpose is noticed; returns whether all was right.
pub fn run(own: Own) -> bool {
    let mut right = check(None, own);
    for fault in &FAULTS {
        let is_noticed = right && !check(Some(fault), own);
        let word = if is_noticed { "right" } else { "wrong" };
        let _ = writeln!(Serial, "{word}: a fault made on purpose is noticed: {}", fault.what);
        right &= is_noticed;
    }
    right
}

/// Lets `work` have a platform, empty tables, and a guest's memory, which is empty too.
pub fn with_tables<R>(
    format: Tree,
    work: impl for<'t, 'p> FnOnce(
        &'p Machine,
        &'t Tables<'p, Tree, Machine>,
        GuardOf<'t, 'p>,
        TableCache<'p, Tree, Machine>,
    ) -> R,
) -> R {
    let machine = Machine::new();
    MEMORY.clear();
    let bits = format.output_bits.min(if format.five_levels { 52 } else { 48 });
    let tables = Tables::new(format, Vmid(1), bits, &machine).expect("a frame");
    let mut storage = [const { None }; 16];
    let mut cache = TableCache::new(&machine, &mut storage);
    cache.fill(16).expect("frames");
    let mut reader = Reader::register(&machine).expect("a reader slot");
    let guard = tables.enter(&mut reader).expect("the same platform");
    work(&machine, &tables, guard, cache)
}

/// Makes a guest, and checks its tables; returns whether all was right.
fn check(fault: Option<&'static Fault>, own: Own) -> bool {
    let Some(format) = cpu::format(fault.is_none()) else { return false };
    with_tables(format, |machine, tables, mut guest, mut cache| {
        let unused = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
        let hpa = Hpa(MEMORY.hpa());
        guest.map(range(0, LOW), hpa, unused, PageSize::SIZE_4K, &mut cache).expect("frames");
        let (block, at) = (range(BLOCK, 2 * M), Hpa(hpa.0 + BLOCK));
        guest.map(block, at, unused, PageSize::SIZE_2M, &mut cache).expect("frames");
        cpu::prepare(&MEMORY);
        let vcpu = &cpu::VCPUS[0];
        vcpu.create(&tables.guest_root());
        let levels = usize::from(tables.geometry().root_level) + 1;
        let (root, address_bits) = (tables.root().0, format.output_bits);
        let mut fixture = Fixture { machine, vcpu, root, levels, address_bits, fault, right: true };
        marks(&mut fixture, &mut guest);
        faults(&mut fixture, &mut guest);
        protection(&mut fixture, &mut guest);
        blocks(&mut fixture, &mut guest, &mut cache);
        if fault.is_none() {
            own(&mut fixture, &mut guest, &mut cache);
        }
        cpu::off();
        fixture.right
    })
}
