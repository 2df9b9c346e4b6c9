//! Hardware that walks tables, written from the manuals and not from the engine. This file has the
//! parts that all formats share; heights count upwards from 0, the level of pages.

pub mod arm;
pub mod ept;
pub mod grouped;
pub mod leaves;
pub mod npt;
pub mod power;
pub mod riscv;

use super::TestPlatform;
use slat::format::AttributeError;
use slat::{Attributes, Format, Software, Tables};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

/// The content of a leaf, in terms that all formats share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    pub oa: u64,
    /// Memory type and shareability, as they are encoded.
    pub memory: u64,
    /// The rights and state of the leaf alone.
    pub own: Attributes,
    /// Whether hardware marks the first write.
    pub marks: bool,
    /// Whether the tables above are marked accessed, on formats that have such marks.
    pub reached: bool,
}

impl Leaf {
    /// Returns whether a write leaves no trace.
    pub fn unmarked(&self) -> bool {
        self.own.write && (self.own.dirty || !self.marks)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Descriptor {
    Invalid,
    Table {
        table: u64,
        accessed: bool,
    },
    /// The leaf with `reached` set.
    Leaf(Leaf),
}

/// Adjacent leaves of one size, with the same attributes and contiguous output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    pub start: u64,
    pub end: u64,
    /// The size of each leaf, in bytes.
    pub size: u64,
    /// The output address of `start`.
    pub leaf: Leaf,
}

impl Run {
    pub fn oa(&self, gpa: u64) -> u64 {
        self.leaf.oa + (gpa - self.start)
    }

    /// Returns the part inside `start..end`, if any.
    pub fn clip(&self, start: u64, end: u64) -> Option<Self> {
        let (start, end) = (self.start.max(start), self.end.min(end));
        let leaf = Leaf { oa: self.oa(start.max(self.start).min(self.end)), ..self.leaf };
        (start < end).then_some(Self { start, end, leaf, ..*self })
    }

    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    pub fn leaves(&self) -> u64 {
        self.bytes() / self.size
    }
}

/// Appends a run, or extends the last one.
pub fn append(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last)
            if last.end == run.start
                && last.size == run.size
                && (Leaf { oa: last.oa(run.start), ..last.leaf }) == run.leaf =>
        {
            last.end = run.end;
        }
        _ => runs.push(run),
    }
}

/// A table below the root, by the entry that links it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Table {
    pub start: u64,
    pub end: u64,
    /// The height of the entry.
    pub height: u32,
    /// The mark of this entry alone.
    pub accessed: bool,
    /// The mark of this entry and all tables above.
    pub reached: bool,
}

impl Table {
    pub fn within(&self, start: u64, end: u64) -> bool {
        start <= self.start && self.end <= end
    }

    pub fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end
    }
}

/// All content of the tables.
#[derive(Clone, Default, Debug)]
pub struct Tree {
    pub runs: Vec<Run>,
    /// The tables by host address.
    pub tables: BTreeMap<u64, Table>,
    /// The tables by first guest address and height.
    links: BTreeMap<(u64, u32), u64>,
    /// Entries with a mark that only an operation in progress may have set.
    pub marks: usize,
}

impl Tree {
    pub fn at(&self, gpa: u64) -> Option<&Run> {
        let index = self.runs.partition_point(|run| run.end <= gpa);
        self.runs.get(index).filter(|run| run.start <= gpa)
    }

    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = Run> {
        let first = self.runs.partition_point(|run| run.end <= start);
        let runs = self.runs[first..].iter().take_while(move |run| run.start < end);
        runs.filter_map(move |run| run.clip(start, end))
    }

    /// Returns the table whose entry covers `size` bytes from `start`.
    pub fn table(&self, start: u64, height: u32) -> Option<(u64, Table)> {
        let hpa = *self.links.get(&(start, height))?;
        Some((hpa, self.tables[&hpa]))
    }

    /// Returns the tables' addresses and ranges, which are equal in trees of the same shape.
    pub fn shape(&self) -> BTreeMap<u64, (u64, u64)> {
        self.tables.iter().map(|(hpa, table)| (*hpa, (table.start, table.end))).collect()
    }

    /// Returns the leaves without regard to marks in the tables above.
    pub fn plain(&self) -> Vec<Run> {
        let mut runs = Vec::new();
        for run in &self.runs {
            append(&mut runs, Run { leaf: Leaf { reached: true, ..run.leaf }, ..*run });
        }
        runs
    }

    pub fn leaves(&self) -> u64 {
        self.runs.iter().map(Run::leaves).sum()
    }
}

/// The result of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// The leaf, as it was translated; hardware has set its bits.
    Done { start: u64, end: u64 },
    /// A translation or permission fault.
    Fault,
}

/// A table from which a walk begins: the root, or a table in a walk cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Root {
    pub table: u64,
    pub ptes: usize,
    /// The height of its entries.
    pub height: u32,
}

/// Returns the bits of `raw` at `places`, numbered as the engine numbers software bits.
pub fn software(raw: u64, places: &[u32]) -> Software {
    let numbered = (0..).zip(places).filter(|(_, place)| raw >> **place & 1 == 1);
    numbered.fold(Software::NONE, |all, (number, _)| all.union(Software::bit(number)))
}

/// The options of a user, in terms that fit every format.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub forced_write_back: bool,
    /// Hardware sets the dirty state, and on x86 the accessed state as well.
    pub hardware_marks: bool,
    pub split_execute: bool,
}

/// A kind of MMU, configured for one guest's tables.
pub trait Hardware: Copy + Debug + 'static {
    type Format: Format;
    /// Base-2 logarithms of the bytes of a page, and of the entries of a table below the root.
    const PAGE: u32;
    const STRIDE: u32;
    /// As above, for the entries of a table of pages, where that is smaller.
    const LAST_STRIDE: u32 = Self::STRIDE;
    /// Bits of a host address that fit into a leaf.
    const OUTPUT: u32 = 48;
    /// The bit of an address from which on it is in another field of the descriptor; 0 if there is
    /// none.
    const PARTED: u32 = 0;
    /// The number of leaf sizes.
    const SIZES: u32;
    /// Whether tables have rights, and hardware marks tables that it walks through.
    const TABLES_COUNT: bool;
    /// The bit, ignored by hardware, with which the engine keeps other software out.
    const MARK: u64;
    /// Whether two translations of one address must never be cached, of any size.
    const REFILL_BREAKS: bool;
    /// The software bits of a leaf.
    const SOFTWARE_BITS: u8;
    /// Whether the right to write requires the right to read.
    const WRITE_READS: bool = false;

    fn of(tables: &Tables<'_, Self::Format, TestPlatform>) -> Self;

    fn format(config: &Config) -> Self::Format;

    /// The format that most tests have.
    fn usual() -> Self::Format;

    fn address_bits(&self) -> u32;

    fn root(&self) -> Root;

    fn decode(&self, raw: u64, height: u32) -> Descriptor;

    /// Returns whether the entry holds a mark of the engine that must not stay.
    fn marked(raw: u64, height: u32) -> bool;

    /// Returns the leaf after an access that it allows.
    fn used(&self, raw: u64, write: bool) -> u64;

    /// Returns the table's link after a walk through it.
    fn passed(&self, raw: u64) -> u64;

    /// Returns whether a permitted access to the leaf faults because hardware does not mark it.
    fn faults(&self, _leaf: &Attributes, _write: bool) -> bool {
        false
    }

    /// Returns whether leaves become marked when they are used, or fault.
    fn records_accessed(&self) -> bool;

    /// Returns the reasons why a leaf cannot have these attributes.
    fn refuses(&self, attributes: Attributes) -> Vec<AttributeError>;

    /// Returns the reason why a leaf cannot have these software bits.
    fn lacks(software: Software) -> Option<AttributeError> {
        let bits = Self::SOFTWARE_BITS;
        let lacks = u32::from(software.bits()) >> bits != 0;
        lacks.then_some(AttributeError::SoftwareBits { given: software, bits })
    }

    /// Returns the base-2 logarithm of the bytes that an entry covers.
    fn shift(height: u32) -> u32 {
        let pages = if height == 0 { 0 } else { Self::LAST_STRIDE };
        Self::PAGE + pages + Self::STRIDE * height.saturating_sub(1)
    }

    /// Returns the number of entries of a table below the root.
    fn entries(height: u32) -> usize {
        1 << if height == 0 { Self::LAST_STRIDE } else { Self::STRIDE }
    }

    fn size(height: u32) -> u64 {
        1 << Self::shift(height)
    }

    /// Returns the size of the entries of a leaf of `size`: a group of entries can be one leaf.
    fn entry_size(size: u64) -> u64 {
        size
    }

    fn height(size: u64) -> u32 {
        (1..).take_while(|&height| Self::shift(height) <= size.trailing_zeros()).count() as u32
    }

    /// Returns the sizes of leaves, largest first.
    fn sizes() -> Vec<u64> {
        (0..Self::SIZES).rev().map(Self::size).collect()
    }

    /// Returns the entry where the walk for `gpa` ends, and its height.
    fn pte<'p>(&self, memory: &'p TestPlatform, gpa: u64) -> (&'p AtomicU64, u32) {
        let mut from = self.root();
        loop {
            let index = (gpa >> Self::shift(from.height)) as usize % from.ptes;
            let pte = &memory.table(from.table, from.ptes)[index];
            match self.decode(pte.load(Ordering::SeqCst), from.height) {
                Descriptor::Table { table, .. } => {
                    (from.table, from.ptes) = (table, Self::entries(from.height - 1));
                }
                _ => return (pte, from.height),
            }
            from.height -= 1;
        }
    }

    /// Returns the entries that link the tables on the way to `gpa`, from the root downwards.
    fn links<'p>(&self, memory: &'p TestPlatform, gpa: u64) -> Vec<&'p AtomicU64> {
        let (mut from, mut links) = (self.root(), Vec::new());
        loop {
            let index = (gpa >> Self::shift(from.height)) as usize % from.ptes;
            let pte = &memory.table(from.table, from.ptes)[index];
            let Descriptor::Table { table, .. } =
                self.decode(pte.load(Ordering::SeqCst), from.height)
            else {
                return links;
            };
            links.push(pte);
            from.height -= 1;
            (from.table, from.ptes) = (table, Self::entries(from.height));
        }
    }

    /// Returns everything that hardware could translate.
    fn tree(&self, memory: &TestPlatform) -> Tree {
        self.part(memory, 0, u64::MAX)
    }

    /// Returns everything that overlaps `start..end`.
    fn part(&self, memory: &TestPlatform, start: u64, end: u64) -> Tree {
        collected(self, memory, start, end)
    }

    /// An access of the guest, which begins at the root or at a table in a walk cache.
    fn access(&self, memory: &TestPlatform, from: Root, gpa: u64, write: bool) -> Access {
        let mut from = from;
        loop {
            let shift = Self::shift(from.height);
            let index = (gpa >> shift) as usize % from.ptes;
            let pte = &memory.table(from.table, from.ptes)[index];
            let raw = pte.load(Ordering::SeqCst);
            let new = match self.decode(raw, from.height) {
                Descriptor::Invalid => return Access::Fault,
                Descriptor::Table { .. } => self.passed(raw),
                Descriptor::Leaf(leaf) => {
                    let allowed = if write { leaf.own.write } else { leaf.own.read };
                    if !allowed || self.faults(&leaf.own, write) {
                        return Access::Fault;
                    }
                    self.used(raw, write)
                }
            };
            if pte.compare_exchange(raw, new, Ordering::SeqCst, Ordering::SeqCst).is_err() {
                continue;
            }
            match self.decode(new, from.height) {
                Descriptor::Table { table, .. } => {
                    from = Root {
                        table,
                        ptes: Self::entries(from.height - 1),
                        height: from.height - 1,
                    };
                }
                _ => {
                    let start = gpa >> shift << shift;
                    return Access::Done { start, end: start + (1 << shift) };
                }
            }
        }
    }
}

/// Collects every entry that overlaps `start..end`, each on its own.
fn collected<H: Hardware>(hardware: &H, memory: &TestPlatform, start: u64, end: u64) -> Tree {
    let mut tree = Tree::default();
    let whole = Part { base: 0, start, end, reached: true };
    collect(hardware, memory, hardware.root(), whole, &mut tree);
    tree
}

#[derive(Clone, Copy)]
struct Part {
    base: u64,
    start: u64,
    end: u64,
    reached: bool,
}

fn collect<H: Hardware>(
    hardware: &H,
    memory: &TestPlatform,
    from: Root,
    part: Part,
    tree: &mut Tree,
) {
    let size = H::size(from.height);
    let ptes = memory.table(from.table, from.ptes);
    let mut index = (part.start.saturating_sub(part.base) / size) as usize;
    // The entry before, and what it added to the one before it, or 0 if it continued no run.
    let (mut last, mut step) = (0, 0);
    while index < ptes.len() {
        let start = part.base + index as u64 * size;
        if start >= part.end {
            break;
        }
        let raw = ptes[index].load(Ordering::SeqCst);
        index += 1;
        let (before, added) = (last, raw.wrapping_sub(last));
        last = raw;
        if raw == 0 {
            step = 0;
            continue;
        }
        tree.marks += usize::from(H::marked(raw, from.height));
        let (end, height) = (start + size, from.height);
        // To decode each page of a large run would take most of the tests' time. What differs is of
        // the address, whose field contains bit 46 in every format.
        if step != 0 && step == added && (raw ^ before) >> 47 == 0 {
            tree.runs.last_mut().unwrap().end = end;
            continue;
        }
        let runs = tree.runs.len();
        step = 0;
        match hardware.decode(raw, height) {
            Descriptor::Invalid => {}
            Descriptor::Leaf(leaf) => {
                let leaf = Leaf { reached: part.reached, ..leaf };
                append(&mut tree.runs, Run { start, end, size, leaf });
                step = if before != 0 && runs == tree.runs.len() { added } else { 0 };
            }
            Descriptor::Table { table, accessed } => {
                let reached = part.reached && accessed;
                let link = Table { start, end, height, accessed, reached };
                let twice = tree.tables.insert(table, link);
                assert_eq!(twice, None, "the table at {table:#x} is linked twice");
                tree.links.insert((start, height), table);
                let (ptes, height) = (H::entries(height - 1), height - 1);
                let below = Root { table, ptes, height };
                collect(hardware, memory, below, Part { base: start, reached, ..part }, tree);
            }
        }
    }
}
