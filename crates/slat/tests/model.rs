//! Long random histories through the engine and a flat model, on every granule and with every
//! break-before-make requirement, beside hardware that sets accessed and dirty bits.
//!
//! `PROPTEST_CASES` sets how many histories a granule gets.

#![cfg(not(loom))]

mod common;

use common::TestPlatform;
use common::world::{Mapping, World, sizes};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use slat::format::arm64::{Arm64, Shareability};
use slat::{
    Attributes, Batched, Bounded, BreakBeforeMake, EveryEntry, Execute, Format, Gpa, GpaRange,
    Memory, PageSize,
};

/// An address near a place where something can go wrong.
#[derive(Clone, Copy, Debug)]
struct Place {
    anchor: usize,
    blocks: u64,
    pages: i64,
}

#[derive(Clone, Copy, Debug)]
enum Extent {
    To(Place),
    Pages(u64),
    Blocks(u64, i64),
    /// What a slot two levels above pages covers.
    Upper(u64),
    Hostile(u64),
}

#[derive(Clone, Copy, Debug)]
struct Span {
    from: Place,
    extent: Extent,
}

#[derive(Clone, Debug)]
enum Op {
    Map { span: Span, delta: usize, attributes: Attributes, largest: usize, frames: usize },
    Unmap(Span),
    Protect(Span),
    Relax(Span, bool),
    Split { span: Span, way: u8, to: usize, frames: usize, meanwhile: Vec<(u64, bool)> },
    Access(Place, bool),
    Translate(Place),
    Reclaim,
}

#[derive(Clone, Debug)]
struct History {
    bits: usize,
    bbm: BreakBeforeMake,
    forced_write_back: bool,
    hardware_dirty: bool,
    split_execute: bool,
    ops: Vec<Op>,
}

fn place() -> impl Strategy<Value = Place> {
    let pages = prop_oneof![4 => Just(0), 2 => -2i64..3, 1 => 100..110i64];
    (0..3usize, 0..5u64, pages).prop_map(|(anchor, blocks, pages)| Place { anchor, blocks, pages })
}

fn span() -> impl Strategy<Value = Span> {
    let extent = prop_oneof![
        6 => place().prop_map(Extent::To),
        4 => (1..4u64).prop_map(Extent::Pages),
        5 => (1..4u64, -1..2i64).prop_map(|(blocks, pages)| Extent::Blocks(blocks, pages)),
        2 => (1..3u64).prop_map(Extent::Upper),
        1 => prop_oneof![Just(1), Just(0), Just(u64::MAX), Just(1 << 63), Just(0x1800)]
            .prop_map(Extent::Hostile),
    ];
    (place(), extent).prop_map(|(from, extent)| Span { from, extent })
}

fn attributes() -> impl Strategy<Value = Attributes> {
    let execute = prop_oneof![
        Just(Execute::All),
        Just(Execute::None),
        Just(Execute::User),
        Just(Execute::Kernel)
    ];
    let memory = prop_oneof![
        Just(Memory::Normal),
        Just(Memory::NonCacheable),
        Just(Memory::Device),
        Just(Memory::DeviceStrict)
    ];
    let any = (any::<[bool; 5]>(), execute, memory).prop_map(|(on, execute, memory)| Attributes {
        read: on[0],
        write: on[1],
        execute,
        memory,
        accessed: on[2],
        dirty: on[3],
        software: on[4],
    });
    let clean = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
    let read_only = Attributes { write: false, dirty: false, ..Attributes::RAM };
    prop_oneof![4 => Just(Attributes::RAM), 4 => Just(clean), 1 => Just(read_only), 2 => any]
}

/// Enough for what is asked of most operations, or a number at which some run dry.
fn frames() -> impl Strategy<Value = usize> {
    prop_oneof![2 => 0..5usize, 2 => Just(24), 1 => Just(usize::MAX)]
}

fn op() -> impl Strategy<Value = Op> {
    let to = 0..5usize;
    // Blocks from the start of the range that hardware uses while tables are built.
    let meanwhile = prop::collection::vec((0..3u64, any::<bool>()), 0..6);
    let delta = prop_oneof![6 => Just(0), 1 => Just(1), 1 => Just(2), 1 => 3..7usize];
    prop_oneof![
        6 => (span(), delta, attributes(), 0..5usize, frames()).prop_map(
            |(span, delta, attributes, largest, frames)| Op::Map {
                span, delta, attributes, largest, frames
            }
        ),
        2 => span().prop_map(Op::Unmap),
        2 => span().prop_map(Op::Protect),
        2 => (span(), any::<bool>()).prop_map(|(span, write)| Op::Relax(span, write)),
        6 => (span(), 0..3u8, to, frames(), meanwhile).prop_map(
            |(span, way, to, frames, meanwhile)| Op::Split { span, way, to, frames, meanwhile }
        ),
        3 => (place(), any::<bool>()).prop_map(|(place, write)| Op::Access(place, write)),
        1 => place().prop_map(Op::Translate),
        1 => Just(Op::Reclaim),
    ]
}

fn history() -> impl Strategy<Value = History> {
    let bbm = prop_oneof![
        2 => Just(BreakBeforeMake::Always),
        1 => Just(BreakBeforeMake::ConflictHandled),
        1 => Just(BreakBeforeMake::Never)
    ];
    let ops = prop::collection::vec(op(), 1..28);
    (0..4usize, bbm, any::<bool>(), prop::bool::weighted(0.8), prop::bool::weighted(0.9), ops)
        .prop_map(|(bits, bbm, forced_write_back, hardware_dirty, split_execute, ops)| History {
            bits,
            bbm,
            forced_write_back,
            hardware_dirty,
            split_execute,
            ops,
        })
}

/// Turns places into addresses for one granule and width.
struct Space<const G: u32> {
    bits: u32,
    most_frames: usize,
}

impl<const G: u32> Space<G> {
    const PAGE: u64 = 1 << G;
    const BLOCK: u64 = 1 << (2 * G - 3);
    const UPPER: u64 = 1 << (3 * G - 6);

    fn at(&self, place: Place) -> u64 {
        let top = 1 << self.bits;
        let middle = if Self::UPPER < top { Self::UPPER } else { 4 * Self::BLOCK };
        let anchors = [0, middle - 2 * Self::BLOCK, top - 4 * Self::BLOCK];
        let at = anchors[place.anchor] + place.blocks * Self::BLOCK;
        at.saturating_add_signed(place.pages * Self::PAGE as i64)
    }

    fn range(&self, span: Span) -> Option<GpaRange> {
        let start = self.at(span.from);
        let size = match span.extent {
            Extent::To(place) => {
                let (start, end) = (start.min(self.at(place)), start.max(self.at(place)));
                return GpaRange::new(Gpa(start), (end - start).max(Self::PAGE)).ok();
            }
            Extent::Pages(pages) => pages * Self::PAGE,
            Extent::Blocks(n, pages) => (n * Self::BLOCK).wrapping_add_signed(pages << G),
            Extent::Upper(n) => n * Self::UPPER,
            Extent::Hostile(size) => size,
        };
        let range = GpaRange::new(Gpa(start), size);
        assert_eq!(range.is_err(), size == 0 || start.checked_add(size).is_none());
        range.ok()
    }

    /// Guest and host addresses agree modulo every leaf size, or modulo some, or not at all.
    fn hpa(&self, start: u64, delta: usize) -> u64 {
        let far = 3 * Self::UPPER;
        let highest = (1 << 48) - (1 << self.bits);
        let unaligned = far + Self::PAGE / 2;
        let beyond = (1 << 48) - Self::PAGE;
        let by = [far, far + Self::BLOCK, far + Self::PAGE, highest, 0, unaligned, beyond];
        start + by[delta]
    }

    fn size(&self, index: usize) -> PageSize {
        let sizes = sizes(G);
        let bytes = sizes.get(index % 4).copied().unwrap_or(2 << G);
        PageSize::from_bytes(bytes).unwrap()
    }

    fn play(&self, history: &History) {
        let platform = TestPlatform::new(history.bbm);
        let format = Arm64::<G> {
            output_bits: 48,
            forced_write_back: history.forced_write_back,
            hardware_dirty: history.hardware_dirty,
            split_execute: history.split_execute,
            shareability: Shareability::Inner,
        };
        let mut world = World::new(&platform, history.bbm, format, self.bits);
        for op in &history.ops {
            self.step(&mut world, op);
        }
        world.destroy();
    }

    fn step(&self, world: &mut World<'_, G>, op: &Op)
    where
        Arm64<G>: Format,
    {
        match *op {
            Op::Map { span, delta, attributes, largest, frames } => {
                let Some(range) = self.range(span) else { return };
                let hpa = self.hpa(range.start().0, delta);
                let what = Mapping { hpa, attributes, largest: self.size(largest) };
                let mut stopped = world.map(range, what, frames.min(self.most_frames));
                // Resumed at most twice: a large range may need more frames than there are.
                for _ in 0..2 {
                    let Some(at) = stopped else { break };
                    let rest = GpaRange::new(Gpa(at), range.end().0 - at).unwrap();
                    let hpa = hpa + (at - range.start().0);
                    stopped = world.map(rest, Mapping { hpa, ..what }, 8);
                    assert!(stopped.is_none_or(|next| next > at), "no progress");
                }
            }
            Op::Unmap(span) => self.range(span).into_iter().for_each(|range| world.unmap(range)),
            Op::Protect(span) => {
                self.range(span).into_iter().for_each(|range| world.write_protect(range));
            }
            Op::Relax(span, write) => {
                self.range(span).into_iter().for_each(|range| world.relax(range, write));
            }
            Op::Split { span, way, to, frames, ref meanwhile } => {
                let Some(range) = self.range(span) else { return };
                let split = match way {
                    0 => World::split::<EveryEntry>,
                    1 => World::split::<Bounded>,
                    _ => World::split::<Batched>,
                };
                let (to, frames) = (self.size(to), frames.min(self.most_frames));
                let used = |&(blocks, write)| (range.start().0 + blocks * Self::BLOCK, write);
                world.meanwhile(meanwhile.iter().map(used).collect());
                let mut stopped = split(world, range, to, frames);
                for _ in 0..2 {
                    let Some(at) = stopped else { break };
                    let rest = GpaRange::new(Gpa(at), range.end().0 - at).unwrap();
                    stopped = split(world, rest, to, 8);
                    assert!(stopped.is_none_or(|next| next > at), "no progress");
                }
                world.platform.meanwhile(None);
            }
            Op::Access(place, write) => world.access(self.at(place), write),
            Op::Translate(place) => {
                if self.at(place) >> self.bits == 0 {
                    world.translate(self.at(place));
                }
            }
            Op::Reclaim => world.reclaim(),
        }
    }
}

fn config() -> ProptestConfig {
    let persistence = FileFailurePersistence::WithSource("regressions");
    ProptestConfig { failure_persistence: Some(Box::new(persistence)), ..Default::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_history_on_the_4k_granule_agrees_with_the_flat_model(history in history()) {
        // Roots of 2m slots, of 1g slots (31 bits need sixteen tables of 2m), of 512g slots.
        let bits = [25, 31, 36, 44][history.bits];
        Space::<12> { bits, most_frames: 600 }.play(&history);
    }

    #[test]
    fn any_history_on_the_16k_granule_agrees_with_the_flat_model(history in history()) {
        let bits = [27, 30, 37, 41][history.bits];
        Space::<14> { bits, most_frames: 40 }.play(&history);
    }

    #[test]
    fn any_history_on_the_64k_granule_agrees_with_the_flat_model(history in history()) {
        let bits = [31, 33, 43, 47][history.bits];
        Space::<16> { bits, most_frames: 20 }.play(&history);
    }
}

#[test]
fn hardware_that_uses_a_block_while_its_tables_are_built_is_not_forgotten() {
    fn split<const G: u32>(bbm: BreakBeforeMake, way: u8, large: usize) {
        let platform = TestPlatform::new(bbm);
        let format = Arm64::<G> { hardware_dirty: true, ..Default::default() };
        let mut world = World::new(&platform, bbm, format, 40);
        let size = sizes(G)[large];
        let (blocks, page) = (GpaRange::new(Gpa(size), 3 * size).unwrap(), 1 << G);
        let attributes = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
        let largest = PageSize::from_bytes(size).unwrap();
        assert_eq!(world.map(blocks, Mapping { hpa: 8 * size, attributes, largest }, 2), None);
        // A read of the first block, then writes to it and to the last.
        world.meanwhile(vec![(size, false), (2 * size - 1, true), (3 * size + 5, true)]);
        let (to, at) = (PageSize::from_bytes(page).unwrap(), Gpa(2 * size - page));
        let cut = GpaRange::new(at, size + 2 * page).unwrap();
        let split = match way {
            0 => World::split::<EveryEntry>,
            1 => World::split::<Bounded>,
            _ => World::split::<Batched>,
        };
        assert_eq!(split(&mut world, cut, to, 600), None);
        world.platform.meanwhile(None);
        world.destroy();
    }
    use BreakBeforeMake::{Always, ConflictHandled, Never};
    for (bbm, way) in
        [Always, ConflictHandled, Never].into_iter().zip(0..3).chain([(Never, 0), (Always, 2)])
    {
        split::<12>(bbm, way, 0);
        split::<12>(bbm, way, 1);
        split::<14>(bbm, way, 0);
        split::<16>(bbm, way, 0);
    }
}

#[test]
fn a_table_is_given_back_only_when_no_walk_cache_can_hold_it() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let mut world = World::new(&platform, BreakBeforeMake::Never, Arm64::<12>::default(), 40);
    let block = GpaRange::new(Gpa(1 << 21), 1 << 21).unwrap();
    let page = GpaRange::new(Gpa(1 << 21), 1 << 12).unwrap();
    let what = Mapping { hpa: 0, attributes: Attributes::RAM, largest: PageSize::SIZE_4K };
    assert_eq!(world.map(page, what, 2), None);
    platform.observe();
    // The shootdown is still owed when the table is reclaimed: the machine checks each free.
    let done = world.tables.unmap(block, |_| ()).unwrap();
    assert!(done.shootdown.owed().is_some_and(|owed| owed.tables));
    assert_eq!((platform.live(), world.tables.reclaim(), platform.live()), (3, 1, 2));
    let _proof = done.shootdown.complete(&platform);
    platform.machine.take();
    world.tables.destroy();
    assert_eq!(platform.live(), 0);
}
