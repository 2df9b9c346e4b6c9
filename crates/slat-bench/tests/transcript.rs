//! KVM's operations, in Linux's own code and on the engine (`slat-linux`): after each call of a
//! random history both have returned the same, and have the same descriptors.
//!
//! The trees are those of `tests/trees.rs`. What differs is known, and there is no other:
//! - A leaf that may be written has a bit of software's on the engine.
//! - A fault on a page inside a block that maps the same memory splits the block. Linux unmaps the
//!   other pages, so here it splits the block before.
//! - Pages that Linux splits off are young. Here both age them at once.
//! - A permission fault makes its leaf young. Linux does not, as a CPU reports an old leaf as such
//!   first; and it replaces the rights of an old leaf that is mapped again. So the leaf is made
//!   young before either.

#[path = "../../../tests/seed.rs"]
mod seed;

use slat::format::arm64::Arm64;
use slat::{BreakBeforeMake, Format, Frame, Gpa, Platform, Pte};
use slat_bench::arena::Arena;
use slat_bench::linux::{Build, Helper, Leaf, Op, Prot, Run, Tree, Workshop};
use slat_linux::{EXECUTE, Errno, READ, Stage2, WRITE};
use std::sync::Arc;

/// The guest's memory: three blocks, from where the largest granule has a block.
const START: u64 = 4 << 30;
const BLOCKS: u64 = 3;
const HOST: u64 = 1 << 38;
const STEPS: usize = 150;
const BITS: u32 = 40;

/// Bits of a descriptor that only the engine has.
const SOFTWARE: u64 = 1 << 57;

fn trees() -> Vec<Tree> {
    let Some(paths) = std::env::var_os("SLAT_LINUX_TREES") else {
        eprintln!("skipped: SLAT_LINUX_TREES names no Linux source tree");
        return Vec::new();
    };
    std::env::split_paths(&paths).map(|path| Tree::open(None, &path).unwrap()).collect()
}

fn bits(prot: Prot) -> u64 {
    [(prot.read, READ), (prot.write, WRITE), (prot.execute, EXECUTE)]
        .into_iter()
        .map(|(given, bit)| if given { bit } else { 0 })
        .sum()
}

/// Returns whether a call is to be tried again, which is the only error that a history meets.
fn again(result: Result<(), Errno>) -> u64 {
    match result {
        Ok(()) => 0,
        Err(Errno::AGAIN) => 1,
        Err(errno) => panic!("{errno:?}"),
    }
}

struct Both<'p, F: Format> {
    arena: &'p Arena,
    stage2: Stage2<'p, F, Arena>,
    linux: Helper,
    page: u64,
    block: u64,
    /// What was done, for the message of a failure.
    steps: Vec<String>,
}

impl<F: Format> Both<'_, F> {
    fn say(&mut self, step: String) {
        self.steps.push(step);
    }

    fn told(&self) -> String {
        self.steps.join("\n")
    }

    fn linux(&mut self, op: Op) -> u64 {
        self.linux.call(op).unwrap_or_else(|error| panic!("{error}\n{}", self.told())).found
    }

    /// Checks that both returned the same.
    fn same(&self, ours: u64, theirs: u64) {
        assert_eq!(
            ours,
            theirs,
            "the engine's result, and Linux's, of the last of\n{}",
            self.told()
        );
    }

    fn source(&self) -> impl FnMut() -> Option<Frame> + Send + use<'_, F> {
        let (arena, bytes) = (self.arena, self.page as usize);
        move || {
            let frame = arena.allocate(bytes)?;
            let ptes = arena.entries(frame.hpa()).as_ptr();
            // SAFETY: the frame has as many entries, and is this function's own.
            let ptes = unsafe { std::slice::from_raw_parts_mut(ptes, bytes / 8) };
            ptes.iter_mut().for_each(|pte: &mut Pte| pte.set(0));
            Some(frame)
        }
    }

    /// The leaf at an address: its descriptor and size; `None` if nothing is mapped.
    fn leaf(&self, gpa: u64) -> Option<(u64, u64)> {
        // SAFETY: nothing reclaims.
        let guard = unsafe { self.stage2.tables().enter_unchecked() };
        let (raw, size) = guard.descriptor(Gpa(gpa))?;
        (raw & 1 != 0).then_some((raw & !SOFTWARE, size.bytes()))
    }

    /// The leaves, in runs as [`Helper::leaves`] returns them.
    fn ours(&self) -> Vec<Run> {
        let (mut runs, mut at) = (Vec::<Run>::new(), START);
        while at < START + BLOCKS * self.block {
            let Some((raw, size)) = self.leaf(at) else {
                at += self.page;
                continue;
            };
            let leaf = Leaf { gpa: at, size, raw };
            match runs.last_mut() {
                Some(Run { first, count })
                    if (first.gpa + *count * size, first.size, first.raw + *count * size)
                        == (at, size, raw) =>
                {
                    *count += 1;
                }
                _ => runs.push(Run { first: leaf, count: 1 }),
            }
            at += size;
        }
        runs
    }

    fn compare(&mut self) {
        let ours = self.ours();
        let theirs = self.linux.leaves(START, BLOCKS * self.block).unwrap();
        if let Some(at) =
            (0..ours.len().max(theirs.len())).find(|at| ours.get(*at) != theirs.get(*at))
        {
            let (our, their) = (ours.get(at), theirs.get(at));
            panic!("{our:x?} on the engine, {their:x?} in Linux, after\n{}", self.told());
        }
    }

    /// Ages on both sides; pages that Linux made young are old again.
    fn age_alike(&mut self, start: u64, size: u64) {
        self.stage2.age(start, size, true);
        self.linux(Op::Age { start, size, each: false });
    }

    fn make_young(&mut self, start: u64) {
        self.stage2.mkyoung(start);
        self.linux(Op::Young { start, size: self.page });
    }

    fn split(&mut self, start: u64) {
        let size = self.block;
        self.linux(Op::Split { start, size, chunk: size });
        self.stage2.split(start, size, &mut self.source()).unwrap();
        self.age_alike(start, size);
    }

    fn map(&mut self, start: u64, leaf: u64, host: u64, prot: Prot) {
        let there = self.leaf(start);
        let mask = (1 << 48) - self.page;
        let inside =
            |(raw, size): (u64, u64)| size > leaf && (raw & mask) + (start & (size - 1)) == host;
        if there.is_some_and(inside) {
            let block = start & !(self.block - 1);
            self.linux(Op::Split { start: block, size: self.block, chunk: self.block });
            self.stage2.map(start, leaf, host, bits(prot), &mut self.source()).unwrap();
            self.linux(Op::Relax { start, size: leaf, prot });
            self.age_alike(block, self.block);
            return;
        }
        if there.is_some() {
            self.make_young(start);
        }
        let ours = again(self.stage2.map(start, leaf, host, bits(prot), &mut self.source()));
        let theirs = self.linux(Op::Map { start, size: leaf, host, leaf, prot });
        self.same(ours, theirs);
        // SAFETY: no other thread exists.
        unsafe { self.stage2.take_retired().free(self.arena) };
    }

    fn step(&mut self, rng: &mut fastrand::Rng) {
        let pages = self.block / self.page;
        let block = START + rng.u64(..BLOCKS) * self.block;
        // Near the start of a block or near its end, so that operations meet.
        let near = if rng.bool() { rng.u64(..9) } else { pages - 1 - rng.u64(..9) };
        let start = block + near * self.page;
        let most = (START + BLOCKS * self.block - start) / self.page;
        let size = if rng.bool() { self.page } else { rng.u64(1..=most.min(80)) * self.page };
        let other = if rng.u32(..6) == 0 { 1 << 36 } else { 0 };
        let prot = Prot { read: true, write: rng.u32(..3) > 0, execute: rng.bool() };
        match rng.u32(..12) {
            0..3 => {
                self.say(format!("map the page {start:#x}, {prot:?}, memory + {other:#x}"));
                self.map(start, self.page, HOST + start - START + other, prot);
            }
            3 | 4 => {
                self.say(format!("map the block {block:#x}, {prot:?}, memory + {other:#x}"));
                self.map(block, self.block, HOST + block - START + other, prot);
            }
            5 => {
                self.say(format!("protect {start:#x} + {size:#x}"));
                self.stage2.wrprotect(start, size).unwrap();
                self.linux(Op::Protect { start, size });
            }
            6 | 7 => {
                self.say(format!("relax {start:#x} to {prot:?}"));
                self.make_young(start);
                let ours = again(self.stage2.relax(start, bits(prot)));
                let theirs = self.linux(Op::Relax { start, size: self.page, prot });
                self.same(ours, theirs);
            }
            8 => {
                self.say(format!("make {start:#x} young"));
                self.make_young(start);
            }
            9 => {
                self.say(format!("unmap {start:#x} + {size:#x}"));
                self.stage2.unmap(start, size).unwrap();
                self.linux(Op::Unmap { start, size });
            }
            10 => {
                self.say(format!("split {block:#x}"));
                self.split(block);
            }
            _ => {
                self.say(format!("age {start:#x} + {size:#x}"));
                let ours = u64::from(self.stage2.age(start, size, true));
                let theirs = self.linux(Op::Age { start, size, each: false });
                self.same(ours, theirs);
            }
        }
        self.compare();
    }
}

fn histories<const SHIFT: u32>(workshop: &mut Workshop, tree: &Tree, fwb: bool)
where
    Arm64<SHIFT>: Format,
{
    let page = 1 << SHIFT;
    let how = Build { page_shift: SHIFT, address_bits: BITS, fwb, shared: true, count: true };
    let program = workshop.build(tree, how).unwrap();
    for seed in seed::seeds(if SHIFT == 12 { 4 } else { 1 }) {
        let arena = Arena::new(32 << 20, page as usize, BreakBeforeMake::Always).unwrap();
        let mut linux = Helper::start(&tree.name, &program, 32 << 20, Arc::default()).unwrap();
        linux.call(Op::Reset).unwrap();
        let format =
            Arm64::<SHIFT> { forced_write_back: fwb, hardware_dirty: false, ..Arm64::default() };
        let stage2 = Stage2::new(format, BITS, &arena).unwrap();
        let steps = vec![format!("seed {seed}, pages of {page} bytes, FWB {fwb}")];
        let block = page << (SHIFT - 3);
        let mut both = Both { arena: &arena, stage2, linux, page, block, steps };
        let mut rng = fastrand::Rng::with_seed(seed);
        (0..STEPS).for_each(|_| both.step(&mut rng));
    }
}

#[test]
fn kvm_on_the_engine_does_what_kvm_in_c_does() {
    let mut workshop = Workshop::new().unwrap();
    for tree in trees() {
        for fwb in [true, false] {
            histories::<12>(&mut workshop, &tree, fwb);
            histories::<14>(&mut workshop, &tree, fwb);
            histories::<16>(&mut workshop, &tree, fwb);
        }
    }
}
