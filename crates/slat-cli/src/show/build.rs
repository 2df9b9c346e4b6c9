//! Builds tables of Slat by operations.

use super::leaf::{Rights, Run};
use super::ops::{Op, What};
use super::text;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, Execute, Format, Frame, Gpa,
    GpaRange, Guard, Hpa, Interruption, MapError, Memory, PageSize, Software, SplitError,
    TableCache, Tables, UnmapEntry, UnmapError, Vmid,
};
use slat_bench::arena::Arena;
use slat_bench::format::TableFormat;
use slat_bench::on_format;
use slat_lab::failure::bad_input;
use slat_lab::size::Size;
use slat_lab::table::Table;
use std::fmt::Display;

/// Bits of guest addresses: 1 TiB, which is more than a drawing needs.
const ADDRESS_BITS: u32 = 40;

/// Distance from a guest address to its host address, in bytes. The host addresses are never
/// accessed.
const HOST_OFFSET: u64 = 1 << 40;

/// Memory for the tables, in bytes. It is enough to map about 30 GiB by 4 KiB pages.
const TABLES: usize = 64 << 20;

/// Table pages that the cache holds.
const AT_HAND: usize = 16;

/// Runs `ops` on empty tables, and returns the table of their leaves.
///
/// # Errors
/// Returns an error if an operation fails, or if the tables need more than `TABLES` bytes.
pub fn build(format: TableFormat, ops: &[Op]) -> anyhow::Result<Table> {
    on_format!(format, |format| {
        let leaves = leaves(format, ops)?;
        Ok(text::table(title(format), &leaves))
    })
}

fn title<F: Format>(_: F) -> String {
    format!("{}, {} pages", F::NAME, Size(1 << F::PAGE_SHIFT))
}

fn leaves<F: Format>(format: F, ops: &[Op]) -> anyhow::Result<Vec<Run>> {
    let page = 1usize << F::PAGE_SHIFT;
    let arena = Arena::new(TABLES, page, BreakBeforeMake::Always)?;
    let mut tables = Tables::new(format, Vmid(1), ADDRESS_BITS, &arena)?;
    let mut storage = [const { None::<Frame> }; AT_HAND];
    let mut work = Work { guard: tables.enter_mut(), cache: TableCache::new(&arena, &mut storage) };
    for op in ops {
        work.run(op)?;
        work.guard.invalidate();
    }
    let mut runs = Vec::new();
    for leaf in work.guard.leaves(GpaRange::new(Gpa(0), 1 << ADDRESS_BITS)?)? {
        let leaf = leaf?;
        let attributes = leaf.attributes;
        let run = Run {
            gpa: leaf.gpa.0,
            hpa: leaf.hpa.0,
            size: leaf.size.bytes(),
            count: 1,
            rights: rights(attributes),
            accessed: attributes.accessed,
            dirty: attributes.dirty,
        };
        run.push(&mut runs);
    }
    Ok(runs)
}

fn rights(attributes: Attributes) -> Rights {
    let execute = match attributes.execute {
        Execute::None => '-',
        Execute::All => 'x',
        Execute::User => 'u',
        Execute::Kernel => 'k',
    };
    Rights { read: attributes.read, write: attributes.write, execute }
}

/// Returns the attributes of leaves that the guest has not used.
fn attributes(rights: Rights) -> Attributes {
    let execute = match rights.execute {
        'x' => Execute::All,
        'u' => Execute::User,
        'k' => Execute::Kernel,
        _ => Execute::None,
    };
    Attributes {
        read: rights.read,
        write: rights.write,
        execute,
        memory: Memory::Normal,
        accessed: false,
        dirty: false,
        software: Software::NONE,
    }
}

/// The tables that operations change.
struct Work<'t, 'p, 's, F: Format> {
    guard: Guard<'t, 'p, F, Arena>,
    cache: TableCache<'s, F, Arena>,
}

impl<F: Format> Work<'_, '_, '_, F> {
    fn run(&mut self, op: &Op) -> anyhow::Result<()> {
        let refused = |why: &dyn Display| bad_input(format!("--do {op}: {why}"));
        let range = op.range;
        match op.what {
            What::Map(largest, rights) => {
                self.map(range, largest, rights)?.map_err(|e| refused(&e))
            }
            What::Split(size) => self.split(range, size)?.map_err(|e| refused(&e)),
            What::Unmap => self.unmap(range).map_err(|e| refused(&e)),
            What::Protect(rights) => {
                if !rights.write {
                    let _ = self.guard.write_protect(range).map_err(|e| refused(&e))?;
                }
                if rights.execute == '-' {
                    let _ = self.guard.execute_protect(range).map_err(|e| refused(&e))?;
                }
                Ok(())
            }
            What::Access(access) => self.access(range, access).map_err(|e| refused(&e)),
            What::Collapse(to) => self.guard.collapse(range, to).map(drop).map_err(|e| refused(&e)),
            What::Clean => self.guard.clean(range).map(drop).map_err(|e| refused(&e)),
            What::Age => self.age(range).map_err(|e| refused(&e)),
        }
    }

    /// Fills the cache as far as memory is left. Returns an error if the cache stays empty.
    fn fill(&mut self) -> anyhow::Result<()> {
        let filled = self.cache.fill(usize::MAX);
        match filled {
            Err(_) if self.cache.is_empty() => Err(bad_input(format!(
                "the tables take more than {}; draw less memory, or larger pages",
                Size(TABLES as u64)
            ))),
            _ => Ok(()),
        }
    }

    fn map(
        &mut self,
        range: GpaRange,
        largest: PageSize,
        rights: Rights,
    ) -> anyhow::Result<Result<(), Interruption<MapError>>> {
        let mut rest = range;
        // A format that has no leaf of this size uses its largest.
        let largest = largest.min(F::size(F::LARGEST_LEAF));
        loop {
            self.fill()?;
            let hpa = Hpa(rest.start().0 + HOST_OFFSET);
            match self.guard.map(rest, hpa, attributes(rights), largest, &mut self.cache) {
                Ok(_) => return Ok(Ok(())),
                Err(Interruption { at, reason: MapError::CacheEmpty }) => {
                    rest = GpaRange::new(at, range.end().0 - at.0)?;
                }
                Err(stopped) => return Ok(Err(stopped)),
            }
        }
    }

    fn split(
        &mut self,
        range: GpaRange,
        to: PageSize,
    ) -> anyhow::Result<Result<(), Interruption<SplitError>>> {
        let mut rest = range;
        loop {
            self.fill()?;
            match self.guard.split(rest, to, &mut self.cache) {
                Ok(_) => return Ok(Ok(())),
                Err(Interruption { at, reason: SplitError::CacheEmpty }) => {
                    rest = GpaRange::new(at, range.end().0 - at.0)?;
                }
                Err(stopped) => return Ok(Err(stopped)),
            }
        }
    }

    fn unmap(&mut self, range: GpaRange) -> Result<(), Interruption<UnmapError>> {
        let mut storage = [UnmapEntry::EMPTY; AT_HAND];
        let mut batch = self.guard.unmap_batch(&mut storage);
        let mut rest = range;
        loop {
            let done = self.guard.unmap(rest, &mut batch);
            batch.complete().for_each(drop);
            match done {
                Err(Interruption { at, reason: UnmapError::Full }) => {
                    let range = GpaRange::new(at, range.end().0 - at.0);
                    rest = range
                        .map_err(|error| Interruption { at, reason: UnmapError::Range(error) })?;
                }
                done => return done.map(drop),
            }
        }
    }

    /// Does what a guest's access causes: hardware marks the whole leaf, and a fault adds a right
    /// that the leaf lacks.
    fn access(&mut self, range: GpaRange, access: Access) -> anyhow::Result<()> {
        let leaves: Vec<GpaRange> = self
            .guard
            .leaves(range)?
            .map(|leaf| {
                let leaf = leaf?;
                Ok(GpaRange::new(leaf.gpa, leaf.size.bytes())?)
            })
            .collect::<anyhow::Result<_>>()?;
        anyhow::ensure!(!leaves.is_empty(), "nothing is mapped there");
        for leaf in leaves {
            self.guard.relax(leaf, access)?.not_needed_here();
        }
        Ok(())
    }

    fn age(&mut self, range: GpaRange) -> anyhow::Result<()> {
        let words = (range.size() >> F::PAGE_SHIFT).div_ceil(64) as usize;
        let (mut young, mut unanswered) = (vec![0; words], vec![0; words]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let _ = self.guard.age(range, &mut ages, AgeOptions::LEAVES)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::leaf::tests::run;
    use super::*;

    fn ops(text: &str) -> Vec<Op> {
        text.split(',').map(|op| op.parse().unwrap_or_else(|error| panic!("{error}"))).collect()
    }

    fn built(kind: TableFormat, text: &str) -> anyhow::Result<Vec<Run>> {
        on_format!(kind, |format| super::leaves(format, &ops(text)))
    }

    fn leaves(kind: TableFormat, text: &str) -> Vec<Run> {
        built(kind, text).unwrap_or_else(|error| panic!("{error:#}"))
    }

    const K: u64 = 1 << 10;
    const M: u64 = 1 << 20;
    const G: u64 = 1 << 30;

    #[test]
    fn the_one_page_written_after_a_split_is_the_only_dirty_one() {
        let text = "map:0-2g:1g,protect:0-2g:rx,split:4m-6m:4k,write:5m-5124k";
        let wanted = [
            run(0, 2 * M, 2, "r-x", ""),
            run(4 * M, 4 * K, 256, "r-x", ""),
            run(5 * M, 4 * K, 1, "rwx", "AD"),
            run(5 * M + 4 * K, 4 * K, 255, "r-x", ""),
            run(6 * M, 2 * M, 509, "r-x", ""),
            run(G, G, 1, "r-x", ""),
        ];
        for kind in [TableFormat::Ept, TableFormat::Arm64K4] {
            assert_eq!(leaves(kind, text), wanted, "{kind:?}");
        }
    }

    #[test]
    fn hardware_marks_a_leaf_as_a_whole_and_ageing_makes_it_old() {
        let used = "map:0-2m:2m,read:0-4k,write:8k-12k";
        assert_eq!(leaves(TableFormat::Ept, used), [run(0, 2 * M, 1, "rwx", "AD")]);
        let old = format!("{used},age:0-2m,clean:0-2m");
        assert_eq!(leaves(TableFormat::Ept, &old), [run(0, 2 * M, 1, "rwx", "")]);
    }

    #[test]
    fn what_was_split_collapses_and_what_was_unmapped_is_gone() {
        let text = "map:0-1g,split:0-1g:4k,collapse:0-1g:1g";
        assert_eq!(leaves(TableFormat::Arm64K4, text), [run(0, G, 1, "rwx", "")]);
        let holes = "map:0-8m:4k,unmap:0-2m,unmap:3m-4m,unmap:8188k-8m";
        let bytes: u64 = leaves(TableFormat::Ept, holes).iter().map(Run::bytes).sum();
        assert_eq!(bytes, 5 * M - 4 * K);
    }

    #[test]
    fn each_granule_has_its_own_sizes() {
        let sizes = |kind, text| -> Vec<(u64, u64)> {
            leaves(kind, text).iter().map(|run| (run.size, run.count)).collect()
        };
        assert_eq!(
            sizes(TableFormat::Arm64K16, "map:0-64m,split:0-16k:16k"),
            [(16 * K, 2048), (32 * M, 1)]
        );
        assert_eq!(sizes(TableFormat::Arm64K64, "map:0-1g"), [(512 * M, 2)]);
        let error = built(TableFormat::Arm64K64, "map:0-1g,split:0-1g:4k").unwrap_err().to_string();
        assert!(error.contains("--do split:0-1g:4k") && error.contains("64k"), "{error}");
    }

    #[test]
    fn what_the_engine_refuses_names_the_operation() {
        for (text, why) in [
            ("map:0-1g,protect:0-4k:r", "split it first"),
            ("read:0-4k", "nothing is mapped"),
            ("map:1-5", "not aligned"),
            ("map:0-2t", "40-bit"),
            ("map:0-4k:4k:w", "right to read"),
            ("map:0-64g:4k", "larger pages"),
        ] {
            let error = built(TableFormat::Ept, text).unwrap_err();
            assert!(error.to_string().contains(why), "{text}: {error:#}");
        }
    }
}
