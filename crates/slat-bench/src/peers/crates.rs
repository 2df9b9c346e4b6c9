//! Compares crates with the engine's inactive tables of as many levels. No CPU walks any of these
//! tables.

use super::ours::temper;
use super::work::LOOKUPS;
use super::{CRATE, OWNED, PLAIN, SLAT};
use crate::arena::Arena;
use crate::contest::{Contest, ENGINE, Sample};
use crate::crates::{Leaf, Memory, PEERS, Peer, Tables, Way};
use crate::fill::Stores;
use crate::fixture::{
    CHUNK, Fixture, chunk_storage, look_up, look_up_plainly, steps, storage, value,
};
use crate::settings::peers::Caches;
use crate::stopwatch::Stopwatch;
use anyhow::{anyhow, bail, ensure};
use serde_json::json;
use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::{
    AddressSpace, Attributes, BreakBeforeMake, Format, Gpa, PageSize, Rights, TableCache,
    UnloadedTables, Vmid,
};
use slat_lab::size::Size;
use std::hint::black_box;
use std::ptr::NonNull;
use std::rc::Rc;

/// The operation, on all of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    MapRange,
    MapEach,
    Protect,
    Unmap,
    /// As [`Op::Unmap`], but the caller does not learn what was mapped.
    Drop,
    Split,
    Lookup,
}

const OPS: [(Op, &str); 7] = [
    (Op::MapRange, "map a range"),
    (Op::MapEach, "map page by page"),
    (Op::Protect, "write-protect"),
    (Op::Unmap, "unmap"),
    (Op::Drop, "unmap unseen"),
    (Op::Split, "split"),
    (Op::Lookup, "look up"),
];

/// Returns a contest for each operation, with the crates that have as many levels as a format of
/// the engine.
pub fn contests<'a>(memory: u64, caches: Caches) -> Vec<Contest<'a>> {
    let mut contests = Vec::new();
    for (op, name) in OPS {
        contests.extend(contest(Fixture::new(Arm64K4::default(), memory), 40, 3, op, name, caches));
        contests.extend(contest(Fixture::new(Ept1G::default(), memory), 48, 4, op, name, caches));
    }
    contests
}

fn has(peer: &Peer, op: Op) -> bool {
    match op {
        Op::MapRange => peer.map_range,
        Op::Split => peer.split.is_some(),
        _ => true,
    }
}

/// Returns whether the crate needs a call for each page.
fn each(peer: &Peer, op: Op) -> bool {
    match op {
        Op::Protect => peer.protect == Way::EachPage,
        Op::Unmap | Op::Drop => peer.unmap == Way::EachPage,
        _ => false,
    }
}

fn contest<'a, F: Format + 'a>(
    fixture: Fixture<F>,
    address_bits: u32,
    levels: u32,
    op: Op,
    name: &str,
    caches: Caches,
) -> Option<Contest<'a>> {
    let peers: Vec<&'static Peer> =
        PEERS.iter().filter(|peer| peer.levels == levels && has(peer, op)).collect();
    if peers.is_empty() {
        return None;
    }
    let memory = fixture.range().size();
    let operation = format!("inactive, {levels} levels: {name}");
    let lacking: Vec<&str> = PEERS
        .iter()
        .filter(|peer| peer.levels == levels && !has(peer, op))
        .map(|peer| peer.name)
        .collect();
    let pieces = if op == Op::Lookup { LOOKUPS as u64 } else { fixture.pages() };
    let leaf = if op == Op::Split { PageSize::SIZE_2M } else { PageSize::SIZE_4K };
    let params = [
        ("operation", json!(operation)),
        ("memory", json!(memory)),
        ("backing", json!(leaf.to_string())),
        ("granule", json!(4096)),
        ("pieces", json!(pieces)),
        ("caches", json!(caches.to_string())),
        ("lack", json!(lacking.join(","))),
    ];
    let params = params.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
    let addresses: Rc<[u64]> = fixture.addresses(LOOKUPS).into();
    let ours = Ours {
        fixture,
        address_bits,
        op,
        caches,
        sum: fixture.sum(&addresses),
        addresses: addresses.clone(),
    };
    let title = format!("{operation}, {}", Size(memory));
    let (all, owned) = (ours.clone(), ours.clone());
    let mut contest = Contest::new("peers", title, params).enter(
        SLAT,
        ENGINE,
        move |arena: &mut Arena, check| all.turn(arena, check),
    );
    // An [`AddressSpace`] splits only by the engine's guard.
    let has_owned = op != Op::Split;
    if has_owned {
        contest = contest
            .enter(OWNED, ENGINE, move |arena: &mut Arena, check| owned.turn_owned(arena, check))
            .note(OWNED, "live tables with one owner: each call fills its cache, and completes");
    }
    if op == Op::Lookup {
        let plain = ours.clone();
        contest = contest
            .enter(PLAIN, ENGINE, move |arena: &mut Arena, _| plain.turn_plain(arena))
            .note(PLAIN, "promises no more than the crates do: see `look_up_plainly`");
    }
    for peer in peers {
        let variant = peer.name;
        let (addresses, sum) = (addresses.clone(), fixture.sum(&addresses));
        contest = contest.enter(variant, CRATE, move |arena: &mut Arena, check| {
            theirs(peer, &fixture, op, (&addresses, sum), caches, arena, check)
        });
        contest = contest.ratio(&*operation, &[SLAT], &[variant]).at_most(1.1);
        if has_owned {
            // A crate that drops whole subtrees is compared with what drops them, too.
            let judged = matches!(op, Op::MapRange | Op::MapEach | Op::Drop)
                || op == Op::Lookup && levels == 4 && variant == "page_table_multiarch";
            contest = contest
                .ratio(format!("{operation}, owned"), &[OWNED], &[variant])
                .at_most(judged.then_some(1.1));
        }
        if op == Op::Lookup {
            contest = contest.ratio(format!("{operation}, plain walk"), &[PLAIN], &[variant]);
        }
        // The results have a note that explains why the crate may be slower.
        let way = if each(peer, op) { "a call for each page. " } else { "" };
        contest =
            contest.note(variant, format!("{way}{} {}: {}", peer.name, peer.version, peer.notes));
    }
    Some(contest)
}

/// The engine's side.
#[derive(Clone)]
struct Ours<F> {
    fixture: Fixture<F>,
    address_bits: u32,
    op: Op,
    caches: Caches,
    addresses: Rc<[u64]>,
    sum: u64,
}

impl<F: Format> Ours<F> {
    fn turn(&self, arena: &mut Arena, check: bool) -> anyhow::Result<Sample> {
        let Self { fixture, op, .. } = self;
        let arena = arena.begin(BreakBeforeMake::Never, Stores::Plain);
        let all = fixture.range();
        let mut tables = UnloadedTables::new(*fixture.format(), Vmid(1), self.address_bits, arena)?;
        let mut storage =
            storage((fixture.pages() / 512 + fixture.pages() / (512 * 512)) as usize + 8);
        let mut each_cache = TableCache::new(arena, &mut storage);
        let mut storage = chunk_storage();
        let mut cache = TableCache::new(arena, &mut storage);
        if *op == Op::MapEach {
            each_cache.fill(usize::MAX)?;
        }
        temper(arena, fixture.pages() * 8 + (4 << 20), self.caches);
        let leaf = if *op == Op::Split { PageSize::SIZE_2M } else { PageSize::SIZE_4K };
        let mut seconds = 0.0;
        if *op == Op::MapEach {
            let watch = Stopwatch::start();
            for page in 0..fixture.pages() {
                let page = fixture.page(page);
                let hpa = Fixture::<F>::host(&page);
                tables.map(page, hpa, Attributes::RAM, leaf, &mut each_cache)?;
            }
            seconds = watch.seconds();
        } else {
            let watch = Stopwatch::start();
            for chunk in steps(all, CHUNK) {
                cache.fill(usize::MAX)?;
                tables.map(chunk, Fixture::<F>::host(&chunk), Attributes::RAM, leaf, &mut cache)?;
            }
            if *op == Op::MapRange {
                seconds = watch.seconds();
            }
        }
        let watch = Stopwatch::start();
        let done = match op {
            Op::MapRange | Op::MapEach => all.size(),
            Op::Protect => tables.write_protect(all)?,
            Op::Unmap => {
                let mut handed = 0;
                let bytes = tables.unmap(all, |removed| handed += removed.bytes)?;
                ensure!(handed == bytes, "{handed} of {bytes} bytes were handed out");
                bytes
            }
            Op::Drop => {
                tables.discard(all)?;
                all.size()
            }
            Op::Split => {
                let mut split = 0;
                for chunk in steps(all, CHUNK) {
                    cache.fill(usize::MAX)?;
                    split += tables.enter_mut().split(chunk, PageSize::SIZE_4K, &mut cache)?;
                }
                split
            }
            Op::Lookup => {
                let sum = look_up(&tables.enter_mut(), &self.addresses)?;
                ensure!(black_box(sum) == self.sum, "other addresses");
                all.size()
            }
        };
        if !matches!(op, Op::MapRange | Op::MapEach) {
            seconds = watch.seconds();
        }
        ensure!(done == all.size(), "{done} bytes");
        if check && matches!(op, Op::Unmap | Op::Drop) {
            let found = tables.enter_mut().leaves(all)?.next();
            ensure!(found.is_none(), "{found:?} is left");
        } else if check {
            let write = *op != Op::Protect;
            let right = |a: Attributes| a.write == write;
            fixture.check(&tables.enter_mut(), all, PageSize::SIZE_4K, right)?;
        }
        Ok(Sample::time(seconds))
    }
}

impl<F: Format> Ours<F> {
    /// Takes a turn with an [`AddressSpace`]: one call for a range or a page, as with the crates.
    fn turn_owned(&self, arena: &mut Arena, check: bool) -> anyhow::Result<Sample> {
        let Self { fixture, op, .. } = self;
        let arena = arena.begin(BreakBeforeMake::Never, Stores::Plain);
        let all = fixture.range();
        let mut space = AddressSpace::new(*fixture.format(), Vmid(1), self.address_bits, arena)?;
        temper(arena, fixture.pages() * 8 + (4 << 20), self.caches);
        let (hpa, leaf) = (Fixture::<F>::host(&all), PageSize::SIZE_4K);
        let watch = Stopwatch::start();
        if *op == Op::MapEach {
            for page in 0..fixture.pages() {
                let page = fixture.page(page);
                space.map(page, Fixture::<F>::host(&page), Attributes::RAM, leaf)?;
            }
        } else {
            space.map(all, hpa, Attributes::RAM, leaf)?;
        }
        let mut seconds = watch.seconds();
        let watch = Stopwatch::start();
        let done = match op {
            Op::MapRange | Op::MapEach | Op::Split => all.size(),
            Op::Protect => space.protect(all, Rights { write: false, ..Rights::ALL })?,
            Op::Unmap => {
                let mut handed = 0;
                let bytes = space.unmap(all, |removed| handed += removed.bytes)?;
                ensure!(handed == bytes, "{handed} of {bytes} bytes were handed out");
                bytes
            }
            Op::Drop => {
                space.discard(all)?;
                all.size()
            }
            Op::Lookup => {
                let look = |sum: u64, gpa: &u64| sum.wrapping_add(value(space.query(Gpa(*gpa))));
                let sum = self.addresses.iter().fold(0, look);
                ensure!(black_box(sum) == self.sum, "other addresses");
                all.size()
            }
        };
        if !matches!(op, Op::MapRange | Op::MapEach) {
            seconds = watch.seconds();
        }
        ensure!(done == all.size(), "{done} bytes");
        if check && matches!(op, Op::Unmap | Op::Drop) {
            let found = space.enter().leaves(all)?.next();
            ensure!(found.is_none(), "{found:?} is left");
        } else if check {
            let write = *op != Op::Protect;
            let right = |a: Attributes| a.write == write;
            fixture.check(&space.enter(), all, leaf, right)?;
        }
        Ok(Sample::time(seconds))
    }
}

impl<F: Format> Ours<F> {
    /// Looks up all addresses by a walk that promises less than the engine's.
    fn turn_plain(&self, arena: &mut Arena) -> anyhow::Result<Sample> {
        let arena = arena.begin(BreakBeforeMake::Never, Stores::Plain);
        temper(arena, self.fixture.pages() * 8 + (4 << 20), self.caches);
        let tables = self.fixture.live(arena, PageSize::SIZE_4K, Attributes::RAM)?;
        let addresses = &self.addresses;
        let watch = Stopwatch::start();
        let sum = match tables.geometry().root_level {
            2 => look_up_plainly::<F, 2>(&tables, arena, addresses),
            3 => look_up_plainly::<F, 3>(&tables, arena, addresses),
            level => bail!("the root is at level {level}"),
        };
        let seconds = watch.seconds();
        ensure!(black_box(sum) == self.sum, "other addresses");
        Ok(Sample::time(seconds))
    }
}

/// Returns a crate's empty tables, in all of the arena's memory.
pub fn tables<'a>(peer: &Peer, arena: &'a mut Arena) -> anyhow::Result<Box<dyn Tables + 'a>> {
    arena.reset();
    let words = arena.words(usize::MAX);
    let (start, bytes) = (NonNull::from(&mut *words).cast::<u8>(), words.len() * 8);
    let why = |error: String| anyhow!("{}: {error}", peer.name);
    // SAFETY: the arena's memory is page-aligned and writable, and its exclusive borrow, which
    // lasts as long as the tables, keeps all other code from it.
    let memory = unsafe { Memory::new(start, bytes) }.map_err(why)?;
    peer.tables(memory).map_err(why)
}

fn theirs<F: Format>(
    peer: &Peer,
    fixture: &Fixture<F>,
    op: Op,
    (addresses, expected): (&[u64], u64),
    caches: Caches,
    arena: &mut Arena,
    check: bool,
) -> anyhow::Result<Sample> {
    let why = |error: String| anyhow!("{}: {error}", peer.name);
    temper(arena, fixture.pages() * 8 + (4 << 20), caches);
    let mut tables = tables(peer, arena)?;
    let (gpa, bytes) = (fixture.range().start().0, fixture.range().size());
    let hpa = Fixture::<F>::host(&fixture.range()).0;
    let leaf = if op == Op::Split { Leaf::Block2M } else { Leaf::Page4K };
    let watch = Stopwatch::start();
    let mapped = match (op, peer.map_range) {
        (Op::MapEach, _) | (_, false) => tables.map_each(gpa, hpa, bytes, leaf),
        _ => tables.map_range(gpa, hpa, bytes, leaf),
    };
    mapped.map_err(why)?;
    let mut seconds = watch.seconds();
    let watch = Stopwatch::start();
    match op {
        Op::MapRange | Op::MapEach => {}
        Op::Protect => tables.protect_range(gpa, bytes).map_err(why)?,
        Op::Unmap | Op::Drop => tables.unmap_range(gpa, bytes).map_err(why)?,
        Op::Split => tables.split(gpa, bytes).map_err(why)?,
        Op::Lookup => {
            let sum = tables.lookup_all(addresses).map_err(why)?;
            ensure!(black_box(sum) == expected, "{}: other addresses", peer.name);
        }
    }
    if !matches!(op, Op::MapRange | Op::MapEach) {
        seconds = watch.seconds();
    }
    if check {
        let found = tables.leaves(gpa, bytes).map_err(why)?;
        let found: Vec<_> =
            found.iter().map(|run| (run.gpa, run.hpa, run.bytes, run.leaf, run.writable)).collect();
        let whole = vec![(gpa, hpa, bytes, 4096, op != Op::Protect)];
        let right = if matches!(op, Op::Unmap | Op::Drop) { Vec::new() } else { whole };
        ensure!(found == right, "{} left {found:x?}", peer.name);
    }
    Ok(Sample::time(seconds))
}
