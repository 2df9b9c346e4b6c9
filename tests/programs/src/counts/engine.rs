//! Operations of the engine, on tables that map 16 MiB in pages or 128 MiB in blocks.

use crate::machine::Machine;
use crate::{announce, measured, wanted};
use slat::{
    Access, AddressSpace, AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, Format, Frame, Gpa,
    GpaRange, Guard, Hpa, PageSize, Pages, Reader, Software, TableCache, Tables, UnloadedTables,
    UnmappedRun, Vmid,
};
use std::hint::black_box;
use std::io;

/// Guest address of the memory; it is aligned, so that operations cover whole tables of the last
/// level.
const BASE: u64 = 1 << 30;
/// Host addresses of the memory, and of the memory that replaces it.
const HOST: u64 = 1 << 36;
const OTHER: u64 = 1 << 37;
const PAGE: PageSize = PageSize::SIZE_4K;
const PAGES: u64 = 4096;
const BLOCK: PageSize = PageSize::SIZE_2M;
const BLOCKS: u64 = 64;
/// More table pages than any operation takes.
const TABLES: usize = 96;
const WORDS: usize = PAGES as usize / 64;

const CLEAN: Attributes = Attributes { dirty: false, ..Attributes::RAM };
const OLD: Attributes = Attributes { accessed: false, ..Attributes::RAM };
const PROTECTED: Attributes = Attributes { write: false, ..Attributes::RAM };

type Inside<'t, F> = Guard<'t, 'static, F, Machine>;

fn pages(count: u64) -> GpaRange {
    GpaRange::new(Gpa(BASE), count * PAGE.bytes()).expect("memory is not empty")
}

fn blocks() -> GpaRange {
    GpaRange::new(Gpa(BASE), BLOCKS * BLOCK.bytes()).expect("memory is not empty")
}

/// Returns each page of the memory, in order.
fn each() -> impl Iterator<Item = GpaRange> {
    let page = |index| GpaRange::new(Gpa(BASE + index * PAGE.bytes()), PAGE.bytes());
    (0..PAGES).map(move |index| page(index).expect("a page is not empty"))
}

fn host(range: &GpaRange) -> Hpa {
    Hpa(range.start().0 - BASE + HOST)
}

/// Measures the operations of one format.
struct Bench {
    format: &'static str,
}

impl Bench {
    /// Counts `work` inside tables that map `memory`, if any, by `leaf` with `attributes`.
    fn count<F: Format + Default, R>(
        &self,
        operation: &str,
        units: u64,
        (memory, leaf, attributes): (Option<GpaRange>, PageSize, Attributes),
        work: impl FnOnce(&mut Inside<'_, F>, &mut TableCache<'static, F, Machine>) -> R,
    ) -> io::Result<()> {
        if !wanted(self.format, operation) {
            return Ok(());
        }
        let (tables, reader, mut cache) = prepare::<F>((memory, leaf, attributes));
        let mut guard = tables.enter(reader).expect("the reader slot is of this machine");
        announce(self.format, operation, units)?;
        black_box(measured(|| work(&mut guard, &mut cache)));
        guard.invalidate();
        Ok(())
    }

    /// Counts `work` with tables that map all pages: `work` enters them itself.
    fn count_outside<F: Format + Default, R>(
        &self,
        operation: &str,
        work: impl FnOnce(&Tables<'static, F, Machine>, &mut Reader<'static, Machine>) -> R,
    ) -> io::Result<()> {
        if !wanted(self.format, operation) {
            return Ok(());
        }
        let memory = (Some(pages(PAGES)), PAGE, Attributes::RAM);
        let (tables, reader, _) = prepare::<F>(memory);
        announce(self.format, operation, PAGES)?;
        black_box(measured(|| work(tables, reader)));
        Ok(())
    }

    /// Counts `work` on tables with one owner, which map `memory`, if any, in pages.
    fn count_owned<F: Format + Default, R>(
        &self,
        operation: &str,
        memory: Option<GpaRange>,
        work: impl FnOnce(&mut AddressSpace<'static, F, Machine>) -> R,
    ) -> io::Result<()> {
        if !wanted(self.format, operation) {
            return Ok(());
        }
        let machine = machine::<F>();
        let space = AddressSpace::new(F::default(), Vmid(1), 40, machine);
        let mut space = space.expect("the format has 40 bits");
        if let Some(range) = memory {
            space.map(range, Hpa(HOST), Attributes::RAM, PAGE).expect("nothing is mapped");
        }
        announce(self.format, operation, PAGES)?;
        black_box(measured(|| work(&mut space)));
        Ok(())
    }
}

fn machine<F: Format>() -> &'static Machine {
    Machine::leaked(match F::REFILL_BREAKS {
        true => BreakBeforeMake::Always,
        false => BreakBeforeMake::Never,
    })
}

/// Returns tables that map `memory`, if any, by `leaf` with `attributes`; a reader slot; and table
/// pages.
fn prepare<F: Format + Default>(
    (memory, leaf, attributes): (Option<GpaRange>, PageSize, Attributes),
) -> (
    &'static Tables<'static, F, Machine>,
    &'static mut Reader<'static, Machine>,
    TableCache<'static, F, Machine>,
) {
    let machine = machine::<F>();
    let storage: Vec<Option<Frame>> = (0..TABLES).map(|_| None).collect();
    let mut cache = TableCache::new(machine, storage.leak());
    cache.fill(TABLES).expect("the machine has as many");
    let mut tables =
        UnloadedTables::new(F::default(), Vmid(1), 40, machine).expect("the format has 40 bits");
    if let Some(range) = memory {
        tables.map(range, Hpa(HOST), attributes, leaf, &mut cache).expect("nothing is mapped");
    }
    cache.fill(TABLES).expect("the machine has as many");
    let reader = Reader::register(machine).expect("nobody else has a reader slot");
    (Box::leak(Box::new(tables.activate())), Box::leak(Box::new(reader)), cache)
}

/// Counts all operations on tables of one format.
pub fn all<F: Format + Default>(format: &'static str) -> io::Result<()> {
    let bench = Bench { format };
    let nothing = (None, PAGE, Attributes::RAM);
    let in_pages = |attributes| (Some(pages(PAGES)), PAGE, attributes);
    let in_blocks = |attributes| (Some(blocks()), BLOCK, attributes);
    let hardware_marks = F::default().encode(CLEAN).is_ok();

    bench.count::<F, _>("map, one call", PAGES, nothing, |guard, cache| {
        guard.map(pages(PAGES), Hpa(HOST), Attributes::RAM, PAGE, cache).expect("nothing is mapped")
    })?;
    bench.count::<F, _>("map, page by page", PAGES, nothing, |guard, cache| {
        for page in each() {
            guard.map(page, host(&page), Attributes::RAM, PAGE, cache).expect("nothing is mapped");
        }
    })?;
    bench.count::<F, _>("reserve and commit, page by page", PAGES, nothing, |guard, cache| {
        for page in each() {
            let reserved = guard.reserve(page.start(), PAGE, cache).expect("nothing is mapped");
            reserved.commit(host(&page), Attributes::RAM).expect("the attributes are the format's");
        }
    })?;
    let all = in_pages(Attributes::RAM);
    bench.count::<F, _>("unmap, one call", PAGES, all, |guard, _| {
        let mut storage = [const { slat::UnmapEntry::EMPTY }; 16];
        unmap(guard, pages(PAGES), &mut storage)
    })?;
    bench.count::<F, _>("unmap, page by page", PAGES, all, |guard, _| {
        let mut storage = [const { slat::UnmapEntry::EMPTY }; 16];
        each().map(|page| unmap(guard, page, &mut storage)).sum::<u64>()
    })?;
    bench.count::<F, _>("write-protect", PAGES, all, |guard, _| {
        guard.write_protect(pages(PAGES)).expect("no block is cut")
    })?;
    let bits = [0x5555_5555_5555_5555; WORDS];
    let half = Pages { start: Gpa(BASE), bits: &bits };
    bench.count::<F, _>("write-protect, every other page", PAGES / 2, all, |guard, _| {
        guard.write_protect_pages(&half).expect("no block is cut")
    })?;
    let protected = in_pages(PROTECTED);
    bench.count::<F, _>("write-protect, protected already", PAGES, protected, |guard, _| {
        guard.write_protect(pages(PAGES)).expect("no block is cut")
    })?;
    bench.count::<F, _>("relax for a write, page by page", PAGES, protected, |guard, _| {
        for page in each() {
            guard.relax(page, Access::Write).expect("no block is cut").not_needed_here();
        }
    })?;
    bench.count::<F, _>("execute-protect", PAGES, all, |guard, _| {
        guard.execute_protect(pages(PAGES)).expect("no block is cut")
    })?;
    bench.count::<F, _>("set a software bit", PAGES, all, |guard, _| {
        let set = guard.set_software(pages(PAGES), Software::A, Software::NONE);
        set.expect("no block is cut")
    })?;
    for (operation, attributes) in [("age, all young", Attributes::RAM), ("age, all old", OLD)] {
        bench.count::<F, _>(operation, PAGES, in_pages(attributes), |guard, _| {
            let (mut young, mut unanswered) = ([0; WORDS], [0; WORDS]);
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            guard
                .age(pages(PAGES), &mut ages, AgeOptions::LEAVES)
                .expect("the bitmap is long enough")
        })?;
    }
    bench.count::<F, _>("age, page by page", PAGES, all, |guard, _| {
        let (mut young, mut unanswered) = ([0; 1], [0; 1]);
        for page in each() {
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            let aged = guard.age(page, &mut ages, AgeOptions::LEAVES);
            black_box(aged.expect("the bitmap is long enough"));
        }
    })?;
    if hardware_marks {
        bench.count::<F, _>("harvest, all dirty", PAGES, all, |guard, _| {
            guard.harvest(pages(PAGES), &mut [0; WORDS]).expect("no block is cut")
        })?;
        bench.count::<F, _>("harvest, all clean", PAGES, in_pages(CLEAN), |guard, _| {
            guard.harvest(pages(PAGES), &mut [0; WORDS]).expect("no block is cut")
        })?;
    }
    bench.count::<F, _>("replace, page by page", PAGES, protected, |guard, _| {
        for page in each() {
            let (from, to) = (host(&page), Hpa(host(&page).0 - HOST + OTHER));
            guard.replace(page, from, to, PROTECTED).expect("nobody else works here");
        }
    })?;
    bench.count::<F, _>("translate, in order", PAGES, all, |guard, _| {
        each().map(|page| guard.translate(page.start())).filter(Result::is_ok).count()
    })?;
    let mut random = fastrand::Rng::with_seed(1);
    let addresses: Vec<Gpa> =
        (0..PAGES).map(|_| Gpa(BASE + random.u64(..PAGES * PAGE.bytes()))).collect();
    bench.count::<F, _>("translate, random", PAGES, all, |guard, _| {
        addresses.iter().filter(|gpa| guard.translate(**gpa).is_ok()).count()
    })?;
    bench.count::<F, _>("list leaves", PAGES, all, |guard, _| {
        let leaves = guard.leaves(pages(PAGES)).expect("the range is the tables'");
        leaves.map(|leaf| black_box(&leaf).is_ok()).filter(|found| *found).count()
    })?;
    bench.count::<F, _>("maintain caches", PAGES, all, |guard, _| {
        guard.clean_caches(pages(PAGES)).expect("no block is cut")
    })?;
    bench.count_outside::<F, _>("translate, random, a guard each", |tables, reader| {
        let found = |gpa: &&Gpa| {
            let guard = tables.enter(reader).expect("the reader slot is of this machine");
            guard.translate(**gpa).is_ok()
        };
        addresses.iter().filter(found).count()
    })?;
    bench.count_outside::<F, _>("enter and leave", |tables, reader| {
        for _ in 0..PAGES {
            black_box(tables.enter(reader).expect("the reader slot is of this machine").vmid());
        }
    })?;
    bench.count_owned::<F, _>("owned: map, page by page", None, |space| {
        for page in each() {
            space.map(page, host(&page), Attributes::RAM, PAGE).expect("nothing is mapped");
        }
    })?;
    let memory = Some(pages(PAGES));
    bench.count_owned::<F, _>("owned: look up, random", memory, |space| {
        addresses.iter().filter(|gpa| black_box(&space.query(**gpa)).is_some()).count()
    })?;
    bench.count_owned::<F, _>("owned: unmap, page by page", memory, |space| {
        each()
            .map(|page| space.unmap(page, |run| _ = black_box(run)).expect("no block"))
            .sum::<u64>()
    })?;
    bench.count_owned::<F, _>("owned: discard, 16 pages a call", memory, |space| {
        for first in each().step_by(16) {
            let range = GpaRange::new(first.start(), 16 * PAGE.bytes());
            space.discard(range.expect("it is not empty")).expect("no block is cut");
        }
    })?;
    let huge = in_blocks(Attributes::RAM);
    bench.count::<F, _>("split blocks to pages", BLOCKS * 512, huge, |guard, cache| {
        guard.split(blocks(), PAGE, cache).expect("the cache has enough")
    })?;
    let small = (Some(blocks()), PAGE, Attributes::RAM);
    bench.count::<F, _>("collapse pages to blocks", BLOCKS * 512, small, |guard, _| {
        guard.collapse(blocks(), BLOCK).expect("nobody else works here")
    })
}

fn unmap<F: Format>(
    guard: &mut Inside<'_, F>,
    range: GpaRange,
    storage: &mut [slat::UnmapEntry],
) -> u64 {
    let mut batch = guard.unmap_batch(storage);
    let mut bytes = 0;
    let mut rest = range;
    loop {
        let result = guard.unmap(rest, &mut batch);
        bytes += batch.complete().map(|removed: UnmappedRun| removed.bytes).sum::<u64>();
        match result {
            Ok(_) => return bytes,
            Err(stopped) => {
                let left = rest.end().0 - stopped.at.0;
                rest = GpaRange::new(stopped.at, left).expect("something is left");
            }
        }
    }
}
