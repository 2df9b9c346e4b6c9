//! Converts the places of a history into addresses of one format and width, and runs the history.

use super::TestPlatform;
use super::hardware::Hardware;
use super::history::{Beside, Extent, History, Op, Place, Span, Step};
use super::world::{Mapping, World};
use slat::{BatchedSplit, BoundedWalk, EveryEntry, Gpa, GpaRange, PageSize, TableBits};
use std::marker::PhantomData;

pub struct Space<H> {
    pub bits: u32,
    pub most_frames: usize,
    pub hardware: PhantomData<H>,
}

impl<H: Hardware> Space<H> {
    const PAGE: u64 = 1 << H::PAGE;
    const BLOCK: u64 = 1 << (H::PAGE + H::LAST_STRIDE);
    const UPPER: u64 = 1 << (H::PAGE + H::LAST_STRIDE + H::STRIDE);

    pub const fn new(bits: u32, most_frames: usize) -> Self {
        Self { bits, most_frames, hardware: PhantomData }
    }

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
            Extent::All => return GpaRange::new(Gpa(0), 1 << self.bits).ok(),
            Extent::Pages(pages) => pages * Self::PAGE,
            Extent::Blocks(n, pages) => (n * Self::BLOCK).wrapping_add_signed(pages << H::PAGE),
            Extent::Upper(n) => n * Self::UPPER,
            Extent::Hostile(size) => size,
        };
        let range = GpaRange::new(Gpa(start), size);
        assert_eq!(range.is_err(), size == 0 || start.checked_add(size).is_none());
        range.ok()
    }

    /// Guest and host addresses agree modulo every leaf size, or modulo some, or not at all. Where
    /// an address field of Arm's descriptors ends, addresses are around that.
    fn hpa(&self, start: u64, delta: usize) -> u64 {
        let far = match H::PARTED {
            0 => 3 * Self::UPPER,
            bit => (1 << bit) - Self::UPPER,
        };
        let highest = (1u64 << H::OUTPUT).saturating_sub(1 << self.bits);
        let unaligned = far + Self::PAGE / 2;
        let beyond = (1 << H::OUTPUT) - Self::PAGE;
        let by = [far, far + Self::BLOCK, far + Self::PAGE, highest, 0, unaligned, beyond];
        start + by[delta]
    }

    fn size(&self, index: usize) -> PageSize {
        let sizes = H::sizes();
        let bytes = sizes.get(index % 4).copied().unwrap_or(2 << H::PAGE);
        PageSize::from_bytes(bytes).unwrap()
    }

    pub fn play(&self, history: &History) {
        let platform = TestPlatform::new(history.bbm);
        let format = H::format(&history.config);
        let mut world = World::<H>::new(&platform, history.bbm, format, self.bits);
        for Step { op, drops } in &history.steps {
            world.drops = *drops;
            self.step(&mut world, op);
            world.alone();
        }
        world.destroy();
    }

    fn beside(&self, world: &World<'_, H>, start: u64, beside: &Beside) {
        let used = |&(blocks, pages, write, late)| {
            let gpa = start.wrapping_add(blocks * Self::BLOCK + pages * Self::PAGE);
            (gpa, write, late)
        };
        world.meanwhile(beside.iter().map(used).collect());
    }

    fn step(&self, world: &mut World<'_, H>, op: &Op) {
        match *op {
            Op::Map { span, delta, attributes, largest, frames } => {
                let Some(range) = self.range(span) else { return };
                // All of a wide guest is more than fits into memory.
                if matches!(span.extent, Extent::All) && self.bits > 40 {
                    return;
                }
                let hpa = self.hpa(range.start().0, delta);
                let what = Mapping { hpa, attributes, largest: self.size(largest) };
                let mut stopped = world.map(range, what, frames.min(self.most_frames));
                // It is resumed at most twice: a large range may need more frames than there are.
                for _ in 0..2 {
                    let Some(at) = stopped else { break };
                    let rest = GpaRange::new(Gpa(at), range.end().0 - at).unwrap();
                    let hpa = hpa + (at - range.start().0);
                    stopped = world.map(rest, Mapping { hpa, ..what }, 8);
                    assert!(stopped.is_none_or(|next| next > at), "no progress");
                }
            }
            Op::Unmap { span, room } => {
                let Some(range) = self.range(span) else { return };
                if let Some(at) = world.unmap(range, room) {
                    let rest = GpaRange::new(Gpa(at), range.end().0 - at).unwrap();
                    world.unmap(rest, 1024);
                }
            }
            Op::Rewrite(span, rule) => {
                self.range(span).into_iter().for_each(|range| world.rewrite(range, rule));
            }
            Op::Pages { at, ref bits, clean } => world.pages(self.at(at), bits, clean),
            Op::Split { span, way, to, frames, together, ref beside } => {
                let Some(range) = self.range(span) else { return };
                let split = match way {
                    0 => World::split::<EveryEntry>,
                    1 => World::split::<BoundedWalk>,
                    _ => World::split::<BatchedSplit>,
                };
                let (to, frames) = (self.size(to), frames.min(self.most_frames));
                self.beside(world, range.start().0, beside);
                let mut stopped = split(world, range, to, frames, together);
                for _ in 0..2 {
                    let Some(at) = stopped else { break };
                    let rest = GpaRange::new(Gpa(at), range.end().0 - at).unwrap();
                    let tables = world.tree().tables.len();
                    stopped = split(world, rest, to, 8, together);
                    // Of blocks that are broken together, hardware may keep the first one as it is.
                    let further = world.tree().tables.len() > tables;
                    assert!(stopped.is_none_or(|next| next > at || further), "no progress");
                }
            }
            Op::Collapse { span, to, ref beside } => {
                let Some(range) = self.range(span) else { return };
                self.beside(world, range.start().0, beside);
                world.collapse(range, self.size(to));
            }
            Op::Harvest { span, missing, seed } => {
                let Some(range) = self.range(span) else { return };
                world.harvest(range, missing, seed);
            }
            Op::Age { span, scan, ref beside } => {
                let Some(range) = self.range(span) else { return };
                // Only before an exact scan reads leaves is its result known.
                if scan.how.clear && scan.how.table_bits == TableBits::Exact && !scan.how.flush_tlb
                {
                    self.beside(world, range.start().0, beside);
                }
                world.age(range, scan);
            }
            Op::Fault { at, offset, largest, frames, between, commit } => {
                let gpa = self.at(at) + offset;
                world.fault(gpa, self.size(largest), frames, (between, commit));
            }
            Op::ReplaceTable { at, offset, largest, far, attributes, ref beside } => {
                let (gpa, largest) = (self.at(at) + offset, self.size(largest));
                self.beside(world, gpa & !(largest.bytes() - 1), beside);
                world.replace_table(gpa, Mapping { hpa: far, attributes, largest });
            }
            Op::Access { at, write, lazily } => world.access(self.at(at), write, lazily),
            Op::Translate(at) => world.translate(self.at(at)),
            Op::Look(span) => self.range(span).into_iter().for_each(|range| world.look(range)),
            Op::Flush(span) => self.range(span).into_iter().for_each(|range| world.flush(range)),
            Op::Reclaim { inside, refreshes } => world.reclaim(inside, refreshes),
        }
    }
}
