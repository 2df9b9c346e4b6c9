//! Random histories of groups, beside the flat model.

use super::*;
use proptest::prelude::*;

/// A range where pages are folded in groups, or one of blocks. Units are groups of pages, or
/// blocks; then pages.
#[derive(Clone, Copy, Debug)]
struct Span {
    blocks: bool,
    unit: u64,
    page: i64,
    units: u64,
    pages: u64,
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Map {
        span: Span,
        far: usize,
        attributes: Attributes,
        largest: usize,
        frames: usize,
        fold: bool,
    },
    Unmap(Span),
    Rewrite(Span, Rule),
    Split(Span, usize, usize),
    Collapse(Span, usize),
    Harvest(Span),
    Age(Span, bool),
    Unfold(Span, Option<(Span, bool)>),
    Access(Span, bool),
    Look(Span),
}

fn span() -> impl Strategy<Value = Span> {
    let page = prop_oneof![5 => Just(0i64), 2 => -2..3i64];
    let length = prop_oneof![
        3 => (1..4u64).prop_map(|pages| (0, pages)),
        6 => (1..4u64, 0..2u64),
        // A group of blocks, and more than one.
        3 => prop_oneof![Just((16, 0)), Just((16, 1)), Just((18, 0))],
    ];
    (prop::bool::weighted(0.35), 0..3u64, page, length)
        .prop_map(|(blocks, unit, page, (units, pages))| Span { blocks, unit, page, units, pages })
}

fn attributes() -> impl Strategy<Value = Attributes> {
    let clean = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
    let read_only = Attributes { write: false, dirty: false, ..Attributes::RAM };
    let idle = Attributes { accessed: false, ..read_only };
    prop_oneof![3 => Just(clean), 2 => Just(RAM), 1 => Just(read_only), 1 => Just(idle)]
}

fn op() -> impl Strategy<Value = Op> {
    let far = prop_oneof![8 => Just(0usize), 1 => Just(1), 1 => Just(2)];
    let frames = prop_oneof![1 => 0..3usize, 6 => Just(64)];
    let rule = prop_oneof![
        2 => Just(Rule::WriteProtect),
        1 => Just(Rule::ExecuteProtect),
        2 => Just(Rule::Clean),
        2 => Just(Rule::Relax(Access::Read)),
        2 => Just(Rule::Relax(Access::Write)),
        1 => Just(Rule::Relax(Access::Execute)),
        1 => Just(Rule::Mark { set: Software::A, clear: Software::bit(5) }),
        1 => Just(Rule::Mark { set: Software::bit(5), clear: Software::A }),
    ];
    let beside = prop::option::of((span(), any::<bool>()));
    let fold = prop::bool::weighted(0.8);
    prop_oneof![
        8 => (span(), far, attributes(), 0..3usize, frames.clone(), fold).prop_map(
            |(span, far, attributes, largest, frames, fold)| Op::Map {
                span, far, attributes, largest, frames, fold
            }
        ),
        3 => span().prop_map(Op::Unmap),
        4 => (span(), rule).prop_map(|(span, rule)| Op::Rewrite(span, rule)),
        2 => (span(), 0..3usize, frames).prop_map(|(span, to, frames)| Op::Split(span, to, frames)),
        2 => (span(), 0..3usize).prop_map(|(span, to)| Op::Collapse(span, to)),
        1 => span().prop_map(Op::Harvest),
        3 => (span(), any::<bool>()).prop_map(|(span, clear)| Op::Age(span, clear)),
        1 => (span(), beside).prop_map(|(span, beside)| Op::Unfold(span, beside)),
        6 => (span(), any::<bool>()).prop_map(|(span, write)| Op::Access(span, write)),
        1 => span().prop_map(Op::Look),
    ]
}

#[derive(Clone, Debug)]
struct History {
    bbm: BreakBeforeMake,
    marks: bool,
    first: Attributes,
    steps: Vec<(Op, bool)>,
}

fn history() -> impl Strategy<Value = History> {
    let bbm = prop_oneof![2 => Just(BBM[0]), 1 => Just(BBM[1]), 1 => Just(BBM[2])];
    let steps = prop::collection::vec((op(), prop::bool::weighted(0.25)), 1..24);
    (bbm, prop::bool::weighted(0.75), attributes(), steps).prop_map(|(bbm, marks, first, steps)| {
        // Where hardware marks no writes, no leaf is writable and clean.
        let dirty = first.dirty || first.write && !marks;
        History { bbm, marks, first: Attributes { dirty, ..first }, steps }
    })
}

fn play<const GRANULE: u32>(history: &History, bits: u32)
where
    GroupedArm<GRANULE>: Hardware<Format = Arm64<GRANULE>>,
{
    let page = 1u64 << GRANULE;
    let block = GroupedArm::<GRANULE>::size(1);
    let group = GroupedArm::<GRANULE>::group(page);
    let blocks = GroupedArm::<GRANULE>::group(block);
    let at = |span: Span| {
        let (from, unit) = if span.blocks { (blocks, block) } else { (block, group) };
        (from + span.unit * unit).saturating_add_signed(span.page * page as i64)
    };
    let reach = |span: Span| {
        let units = if span.units < 16 { span.units } else { span.units * blocks / block / 16 };
        let bytes = units * if span.blocks { block } else { group } + span.pages * page;
        GpaRange::new(Gpa(at(span)), bytes).unwrap()
    };
    let sizes = GroupedArm::<GRANULE>::sizes();
    let nth = |index: usize| size(sizes[sizes.len() - 1 - index.min(sizes.len() - 1)]);
    let platform = TestPlatform::new(history.bbm);
    let config =
        Config { forced_write_back: false, hardware_marks: history.marks, split_execute: false };
    let format = GroupedArm::<GRANULE>::format(&config);
    let mut fixture = Fixture::<GRANULE>::new(&platform, history.bbm, format, bits);
    // The history begins with groups.
    for (from, bytes, largest) in [(block, 4 * group, 0), (blocks, blocks, 1)] {
        let from = range(from, bytes);
        fixture.map(from, from.start().0 + (1 << 40), history.first, nth(largest), 8, true);
    }
    for &(op, drops) in &history.steps {
        fixture.world.drops = drops;
        match op {
            Op::Map { span, far, attributes, largest, frames, fold } => {
                let range = reach(span);
                let far = (1 << 40) + [0, group, page][far];
                fixture.map(range, range.start().0 + far, attributes, nth(largest), frames, fold);
            }
            Op::Unmap(span) => fixture.unmap(reach(span)),
            Op::Rewrite(span, rule) => fixture.rewrite(reach(span), rule),
            Op::Split(span, to, frames) => fixture.split(reach(span), nth(to), frames),
            Op::Collapse(span, to) => fixture.collapse(reach(span), nth(to)),
            Op::Harvest(span) => fixture.harvest(reach(span)),
            Op::Age(span, clear) => fixture.age(reach(span), clear),
            Op::Unfold(span, beside) => {
                fixture.unfold(reach(span), beside.map(|(span, write)| (at(span), write)));
            }
            Op::Access(span, write) => fixture.access(at(span), write),
            Op::Look(span) => fixture.look(at(span)),
        }
    }
    fixture.world.destroy();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases / 4, ..crate::properties::config()
    })]

    #[test]
    fn histories_of_folds_on_the_4k_granule_match_the_flat_model(history in history()) {
        play::<12>(&history, 30);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn histories_of_folds_on_the_16k_granule_match_the_flat_model(history in history()) {
        play::<14>(&history, 32);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn histories_of_folds_on_the_64k_granule_match_the_flat_model(history in history()) {
        play::<16>(&history, 36);
    }
}
