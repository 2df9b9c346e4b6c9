//! Several threads, each with a random history of operations, while CPUs use the guest.

use crate::guest::{End, Guest, Op, SharedRef, range};
use crate::hardware::{Use, WalkedFormat};
use crate::machine::{ALL, BIG, BLOCK, CLEAN, PAGE, RAM, World};
use crate::run::{self, Way};
use shuttle::rand::RngCore;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// SplitMix64, seeded by shuttle: a replayed schedule has the same histories.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % end
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 1
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    fn gpa(&mut self) -> u64 {
        self.below(ALL / PAGE) * PAGE
    }

    /// A page, a block, half of the guest or all of it; sometimes any pages.
    fn range(&mut self) -> GpaRange {
        if self.below(8) == 0 {
            let (a, b) = (self.gpa(), self.gpa());
            return range(a.min(b), a.max(b) + PAGE);
        }
        let size = self.of(&[PAGE, PAGE, BLOCK, BLOCK, BIG, ALL]);
        let start = self.gpa() / size * size;
        range(start, start + size)
    }

    fn op(&mut self) -> Op {
        let at = self.range();
        let (frames, complete) = (self.below(7) as usize, self.below(4) != 0);
        match self.below(21) {
            0 | 1 => {
                let attributes = self.of(&[RAM, CLEAN]);
                let largest = self.of(&[PAGE, BLOCK, BIG]);
                let (each, fold) = (self.coin(), self.coin());
                Op::Map { at, attributes, largest, each, fold, frames }
            }
            2 | 3 => Op::Unmap { at },
            4 => Op::Evict { page: self.gpa() },
            5 | 6 => {
                let (gpa, largest) = (self.gpa(), self.of(&[PAGE, BLOCK, BIG]));
                Op::Fault { gpa, largest, fold: self.coin(), frames }
            }
            7 | 8 => Op::Protect { at, complete },
            9 | 10 => {
                let access =
                    self.of(&[Access::Read, Access::Write, Access::Write, Access::Execute]);
                Op::Relax { at, access, complete }
            }
            11 => Op::Split { at, to: self.of(&[PAGE, PAGE, BLOCK]), frames, complete },
            12 | 13 => Op::Collapse { at, to: self.of(&[BLOCK, BIG]) },
            14 => {
                let skip = self.of(&[TableBits::Ignored, TableBits::Exact]);
                let how = AgeOptions {
                    clear: self.below(4) != 0,
                    table_bits: skip,
                    flush_tlb: self.coin(),
                };
                // A scan that cuts a block makes all of it old, and reports the pages in its range.
                let whole = [range(0, ALL), range(0, BIG), range(BIG, ALL)];
                Op::Age { at: self.of(&whole), how }
            }
            15 => Op::Harvest { at },
            16 => Op::Own { at, gives: true, frames },
            17 => Op::Own { at, gives: false, frames },
            18 | 19 => {
                let memory = self.of(&[Memory::Normal, Memory::Device]);
                Op::Replace { at, moves: self.coin(), memory }
            }
            _ => self.of(&[Op::Reclaim, Op::Reclaim, Op::Translate { gpa: at.start().0 }]),
        }
    }
}

/// How often operations ended other than done: without any of these, the histories prove little.
static CONTENDED: AtomicUsize = AtomicUsize::new(0);

fn history<F: WalkedFormat>(bbm: BreakBeforeMake) {
    let mut random = Random(shuttle::rand::thread_rng().next_u64());
    let world = World::new(bbm, random.coin());
    let guest = Guest::<F>::new(&world);
    let mut reader = Reader::register(&world).unwrap();
    for at in [range(0, BIG), range(BIG, ALL)] {
        let (attributes, largest) = (random.of(&[RAM, CLEAN]), random.of(&[PAGE, BLOCK, BIG]));
        let fold = random.coin();
        let op = Op::Map { at, attributes, largest, each: false, fold, frames: 3 };
        assert_eq!(guest.perform(&mut reader, op), End::Done);
    }
    drop(reader);
    world.running.set(true);
    let threads = 3 + random.below(3);
    let cpus = 1 + random.below(2);
    shuttle::thread::scope(|scope| {
        for seed in 0..threads {
            let mut random = Random(random.0 ^ seed << 32);
            let guest = SharedRef::new(&guest);
            scope.spawn(move || {
                let guest = guest.get();
                let mut reader = Reader::register(guest.world).unwrap();
                for _ in 0..2 + random.below(5) {
                    let op = random.op();
                    if guest.perform(&mut reader, op) == End::Contended {
                        CONTENDED.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        for seed in 0..cpus {
            let mut random = Random(random.0 ^ (seed + 16) << 32);
            let guest = SharedRef::new(&guest);
            scope.spawn(move || {
                for _ in 0..4 + random.below(9) {
                    let (gpa, write) = (random.gpa(), random.coin());
                    let held = if random.below(4) != 0 { Use::Always } else { Use::Never };
                    guest.get().access(gpa, write, held);
                }
            });
        }
    });
    guest.finish();
}

fn explore<F: WalkedFormat>(name: &str, bbm: BreakBeforeMake) {
    CONTENDED.store(0, Ordering::Relaxed);
    for way in [Way::Random, Way::Priorities] {
        run::sample(name, way, 15_000, move || history::<F>(bbm));
    }
    eprintln!("  {} operations ended contended", CONTENDED.load(Ordering::Relaxed));
}

#[test]
fn mixed_histories_keep_every_promise_if_all_changes_break() {
    explore::<Tiny>("Arm, break before make", BreakBeforeMake::Always);
}

#[test]
fn mixed_histories_keep_every_promise_if_sizes_never_break() {
    explore::<Tiny>("Arm, no break", BreakBeforeMake::Never);
}

#[test]
fn mixed_histories_keep_every_promise_with_rights_in_tables() {
    explore::<TinyEpt>("EPT", BreakBeforeMake::Never);
}
