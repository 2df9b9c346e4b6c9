//! Random histories: operations, in terms that fit every format.

use super::hardware::Config;
use super::world::{Between, Commit, Rule, Scan};
use proptest::prelude::*;
use slat::{
    Access, AgeOptions, Attributes, BreakBeforeMake, Execute, Memory, Rights, Software, TableBits,
};

/// An address near a boundary where something can go wrong.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub anchor: usize,
    pub blocks: u64,
    pub pages: i64,
}

#[derive(Clone, Copy, Debug)]
pub enum Extent {
    To(Place),
    Pages(u64),
    Blocks(u64, i64),
    /// The range of an entry two levels above pages.
    Upper(u64),
    /// All addresses that the tables translate.
    All,
    Hostile(u64),
}

#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub from: Place,
    pub extent: Extent,
}

/// An access of hardware during an operation: blocks and pages from the start of its range, whether
/// it writes, and whether it is late.
pub type Beside = Vec<(u64, u64, bool, bool)>;

#[derive(Clone, Debug)]
pub enum Op {
    Map {
        span: Span,
        delta: usize,
        attributes: Attributes,
        largest: usize,
        frames: usize,
    },
    Unmap {
        span: Span,
        room: usize,
    },
    Rewrite(Span, Rule),
    Pages {
        at: Place,
        bits: Vec<u64>,
        clean: bool,
    },
    Split {
        span: Span,
        way: u8,
        to: usize,
        frames: usize,
        together: usize,
        beside: Beside,
    },
    Collapse {
        span: Span,
        to: usize,
        beside: Beside,
    },
    Harvest {
        span: Span,
        missing: usize,
        seed: u64,
    },
    Age {
        span: Span,
        scan: Scan,
        beside: Beside,
    },
    Fault {
        at: Place,
        offset: u64,
        largest: usize,
        frames: usize,
        between: Between,
        commit: Commit,
    },
    ReplaceTable {
        at: Place,
        offset: u64,
        largest: usize,
        far: u64,
        attributes: Attributes,
        beside: Beside,
    },
    Access {
        at: Place,
        write: bool,
        lazily: bool,
    },
    Translate(Place),
    Look(Span),
    Flush(Span),
    Reclaim {
        inside: bool,
        refreshes: bool,
    },
}

/// An operation, and whether it drops what it owes.
#[derive(Clone, Debug)]
pub struct Step {
    pub op: Op,
    pub drops: bool,
}

#[derive(Clone, Debug)]
pub struct History {
    pub bits: usize,
    pub bbm: BreakBeforeMake,
    pub config: Config,
    pub steps: Vec<Step>,
}

fn place() -> impl Strategy<Value = Place> {
    let pages = prop_oneof![4 => Just(0), 2 => -2i64..3, 1 => 100..110i64];
    (0..3usize, 0..5u64, pages).prop_map(|(anchor, blocks, pages)| Place { anchor, blocks, pages })
}

fn span() -> impl Strategy<Value = Span> {
    let extent = prop_oneof![
        6 => place().prop_map(Extent::To),
        4 => (1..4u64).prop_map(Extent::Pages),
        6 => (1..4u64, -1..2i64).prop_map(|(blocks, pages)| Extent::Blocks(blocks, pages)),
        2 => (1..3u64).prop_map(Extent::Upper),
        1 => Just(Extent::All),
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
    let any = (any::<[bool; 4]>(), execute, memory, software()).prop_map(
        |(on, execute, memory, software)| Attributes {
            read: on[0],
            write: on[1],
            execute,
            memory,
            accessed: on[2],
            dirty: on[3],
            software,
        },
    );
    let clean = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
    let read_only = Attributes { write: false, dirty: false, ..Attributes::RAM };
    prop_oneof![4 => Just(Attributes::RAM), 4 => Just(clean), 1 => Just(read_only), 2 => any]
}

/// Mostly bits that every format has; sometimes more than any format has.
fn software() -> impl Strategy<Value = Software> {
    let one = (0..Software::MOST as u8).prop_map(Software::bit);
    let any = any::<u8>().prop_map(Software::from_bits);
    prop_oneof![6 => (0..4u8).prop_map(Software::from_bits), 3 => one, 1 => any]
}

fn rule() -> impl Strategy<Value = Rule> {
    prop_oneof![
        2 => Just(Rule::WriteProtect),
        1 => Just(Rule::ExecuteProtect),
        2 => rights().prop_map(Rule::Exactly),
        2 => (software(), software()).prop_map(|(set, clear)| Rule::Mark { set, clear }),
        1 => Just(Rule::Clean),
        1 => Just(Rule::Relax(Access::Read)),
        4 => Just(Rule::Relax(Access::Write)),
        1 => Just(Rule::Relax(Access::Execute)),
    ]
}

fn rights() -> impl Strategy<Value = Rights> {
    attributes().prop_map(|Attributes { read, write, execute, .. }| Rights { read, write, execute })
}

fn scan() -> impl Strategy<Value = Scan> {
    let skip = prop_oneof![
        1 => Just(TableBits::Ignored),
        3 => Just(TableBits::Exact),
    ];
    let how = (prop::bool::weighted(0.8), skip, prop::bool::weighted(0.4))
        .prop_map(|(clear, skip, fresh)| AgeOptions { clear, table_bits: skip, flush_tlb: fresh });
    (how, seed(), (missing(), missing())).prop_map(|(how, seed, missing)| Scan {
        how,
        seed,
        missing,
    })
}

fn seed() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0), 1 => Just(u64::MAX), 1 => any::<u64>()]
}

/// The number of words that a bitmap lacks.
fn missing() -> impl Strategy<Value = usize> {
    prop_oneof![14 => Just(0), 1 => Just(1)]
}

/// Enough frames for most operations, or a number with which some run out.
fn frames() -> impl Strategy<Value = usize> {
    prop_oneof![2 => 0..5usize, 2 => Just(24), 1 => Just(usize::MAX)]
}

fn beside() -> impl Strategy<Value = Beside> {
    let pages = prop_oneof![Just(0), 0..8u64];
    prop::collection::vec((0..3u64, pages, any::<bool>(), any::<bool>()), 0..6)
}

/// Guest and host addresses agree modulo 4 GiB, or 2 MiB, or 64 KiB; or the end is beyond the
/// limit.
fn far() -> impl Strategy<Value = u64> {
    prop_oneof![6 => Just(3 << 40), 1 => Just(5 << 21), 1 => Just(1 << 16), 1 => Just(1 << 48)]
}

fn commit() -> impl Strategy<Value = Commit> {
    prop_oneof![
        1 => Just(Commit::GivenUp),
        6 => (far(), attributes()).prop_map(|(far, attributes)| Commit::To { far, attributes }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let to = 0..5usize;
    let delta = prop_oneof![5 => Just(0), 3 => Just(1), 2 => Just(2), 1 => 3..7usize];
    let room = prop_oneof![1 => 0..3usize, 4 => Just(64)];
    let together =
        prop_oneof![1 => Just(0usize), 1 => Just(1), 1 => Just(2), 3 => Just(usize::MAX)];
    let bits = prop::collection::vec(
        prop_oneof![2 => Just(0), 1 => Just(u64::MAX), 3 => any::<u64>(), 2 => Just(1)],
        0..4,
    );
    let between = prop_oneof![
        4 => Just(Between::Nothing),
        1 => Just(Between::Unmaps),
        1 => Just(Between::Maps),
        1 => Just(Between::Reserves),
    ];
    prop_oneof![
        8 => (span(), delta, attributes(), to.clone(), frames()).prop_map(
            |(span, delta, attributes, largest, frames)| Op::Map {
                span, delta, attributes, largest, frames
            }
        ),
        2 => (span(), room).prop_map(|(span, room)| Op::Unmap { span, room }),
        5 => (span(), rule()).prop_map(|(span, rule)| Op::Rewrite(span, rule)),
        1 => (place(), bits, any::<bool>()).prop_map(|(at, bits, clean)| Op::Pages {
            at, bits, clean
        }),
        5 => (span(), 0..3u8, to.clone(), frames(), together, beside()).prop_map(
            |(span, way, to, frames, together, beside)| Op::Split {
                span, way, to, frames, together, beside
            }
        ),
        3 => (span(), to.clone(), beside()).prop_map(|(span, to, beside)| Op::Collapse {
            span, to, beside
        }),
        2 => (span(), missing(), seed()).prop_map(|(span, missing, seed)| Op::Harvest {
            span, missing, seed
        }),
        3 => (span(), scan(), beside()).prop_map(|(span, scan, beside)| Op::Age {
            span, scan, beside
        }),
        3 => (place(), 0..4096u64, 1..4usize, far(), attributes(), beside()).prop_map(
            |(at, offset, largest, far, attributes, beside)| Op::ReplaceTable {
                at, offset, largest, far, attributes, beside
            }
        ),
        2 => (place(), prop_oneof![Just(0), 0..4096u64], to, 0..4usize, between, commit()).prop_map(
            |(at, offset, largest, frames, between, commit)| Op::Fault {
                at, offset, largest, frames, between, commit
            }
        ),
        4 => (place(), any::<bool>(), any::<bool>()).prop_map(|(at, write, lazily)| Op::Access {
            at, write, lazily
        }),
        1 => place().prop_map(Op::Translate),
        1 => span().prop_map(Op::Look),
        1 => span().prop_map(Op::Flush),
        1 => any::<[bool; 2]>().prop_map(|[inside, refreshes]| Op::Reclaim { inside, refreshes }),
    ]
}

pub fn history() -> impl Strategy<Value = History> {
    let bbm = prop_oneof![
        2 => Just(BreakBeforeMake::Always),
        1 => Just(BreakBeforeMake::ConflictHandled),
        1 => Just(BreakBeforeMake::Never)
    ];
    let step = (op(), prop::bool::weighted(0.2)).prop_map(|(op, drops)| Step { op, drops });
    let steps = prop::collection::vec(step, 1..32);
    let config = (any::<bool>(), prop::bool::weighted(0.75), any::<bool>()).prop_map(
        |(forced_write_back, hardware_marks, split_execute)| Config {
            forced_write_back,
            hardware_marks,
            split_execute,
        },
    );
    (0..4usize, bbm, config, steps).prop_map(|(bits, bbm, config, steps)| History {
        bits,
        bbm,
        config,
        steps,
    })
}
