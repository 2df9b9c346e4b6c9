//! Arm's stage 2 with the Contiguous bit (DDI 0487, D8.7): a TLB may cache all of a group from any
//! member's descriptor, and may mark any member for an access to any other.

use super::arm::{Arm, Descriptor, Leaf as Fields};
use super::{Access, Config, Hardware, Leaf, Root, Run, TestPlatform, Tree, append, collected};
use slat::format::AttributeError;
use slat::format::arm64::Arm64;
use slat::{Attributes, BreakBeforeMake, Platform, Tables};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// [`Arm`], for tables that are folded.
#[derive(Clone, Copy, Debug)]
pub struct GroupedArm<const G: u32>(pub Arm<G>);

/// A flag of leaves that were collected entry by entry: the leaf has the Contiguous bit.
const CONTIGUOUS: u64 = 1 << 63;

impl<const G: u32> GroupedArm<G> {
    /// Returns the entries of a group of leaves: table "Contiguous bit" of D8.7, by granule and
    /// level.
    const fn count(level: u32) -> u64 {
        match (G, level) {
            (12, 3) | (12, 2) => 16,
            (14, 3) => 128,
            (14, 2) | (16, 3) | (16, 2) => 32,
            _ => 1,
        }
    }

    /// Returns the bytes of a group of entries of `pte` bytes.
    pub fn group(pte: u64) -> u64 {
        pte * Self::count(3 - Self::height(pte))
    }

    /// Returns whether a leaf of `size` bytes is a group.
    pub fn is_group(size: u64) -> bool {
        Self::entry_size(size) != size
    }

    /// Joins groups in a tree that was collected entry by entry. A group that is being broken or
    /// built counts as a mark; hardware may have all of it cached.
    fn fold(tree: Tree, breaks: bool) -> Tree {
        let mut groups: BTreeMap<u64, (Run, u64)> = BTreeMap::new();
        let mut singles = Vec::new();
        for run in &tree.runs {
            for at in (run.start..run.end).step_by(run.size as usize) {
                let leaf = Leaf { oa: run.oa(at), ..run.leaf };
                if leaf.memory & CONTIGUOUS == 0 {
                    append(&mut singles, Run { start: at, end: at + run.size, leaf, ..*run });
                    continue;
                }
                let bytes = Self::group(run.size);
                assert_ne!(bytes, run.size, "no group at the level of {run:x?}");
                let start = at & !(bytes - 1);
                let oa = leaf.oa.checked_sub(at - start).expect("an address below the group's");
                assert_eq!(oa % bytes, 0, "a member points where no group can: {run:x?}");
                let leaf = Leaf { oa, memory: leaf.memory & !CONTIGUOUS, ..leaf };
                let new = Run { start, end: start + bytes, size: bytes, leaf };
                let (group, members) = groups.entry(start).or_insert((new, 0));
                *members += 1;
                let own = &mut group.leaf.own;
                own.accessed |= leaf.own.accessed;
                own.dirty |= leaf.own.dirty;
                let state = Attributes { accessed: own.accessed, dirty: own.dirty, ..leaf.own };
                assert_eq!(group.leaf, Leaf { own: state, ..leaf }, "members of a group differ");
                assert_eq!(group.size, bytes, "members of two sizes");
            }
        }
        let mut marks = tree.marks;
        for (group, members) in groups.values() {
            marks += usize::from(*members != group.size / Self::entry_size(group.size));
            let beside = singles.iter().find_map(|run| run.clip(group.start, group.end));
            assert!(beside.is_none() || !breaks, "{beside:x?} is valid in {group:x?}");
            marks += usize::from(beside.is_some());
        }
        let mut all: Vec<Run> =
            groups.into_values().map(|(group, _)| group).chain(singles).collect();
        all.sort_by_key(|run| (run.start, run.end));
        let mut runs = Vec::new();
        all.into_iter().for_each(|run| append(&mut runs, run));
        Tree { runs, marks, ..tree }
    }
}

impl<const G: u32> Hardware for GroupedArm<G> {
    type Format = Arm64<G>;
    const PAGE: u32 = Arm::<G>::PAGE;
    const STRIDE: u32 = Arm::<G>::STRIDE;
    const SIZES: u32 = Arm::<G>::SIZES;
    const TABLES_COUNT: bool = false;
    const MARK: u64 = Arm::<G>::MARK;
    const SOFTWARE_BITS: u8 = Arm::<G>::SOFTWARE_BITS;
    const REFILL_BREAKS: bool = true;

    fn of(tables: &Tables<'_, Arm64<G>, TestPlatform>) -> Self {
        Self(Arm::of(tables))
    }

    fn format(config: &Config) -> Arm64<G> {
        Arm::<G>::format(config)
    }

    fn usual() -> Arm64<G> {
        Arm::<G>::usual()
    }

    fn address_bits(&self) -> u32 {
        self.0.address_bits()
    }

    fn root(&self) -> Root {
        self.0.root()
    }

    fn decode(&self, raw: u64, height: u32) -> super::Descriptor {
        match Arm::<G>::fields(raw, 3 - height) {
            Descriptor::Leaf(fields @ Fields { contiguous: true, .. }) => {
                let leaf = self.0.leaf(&fields);
                super::Descriptor::Leaf(Leaf { memory: leaf.memory | CONTIGUOUS, ..leaf })
            }
            _ => self.0.decode(raw, height),
        }
    }

    fn marked(raw: u64, height: u32) -> bool {
        Arm::<G>::marked(raw, height)
    }

    fn used(&self, raw: u64, write: bool) -> u64 {
        self.0.used(raw, write)
    }

    fn passed(&self, raw: u64) -> u64 {
        raw
    }

    fn records_accessed(&self) -> bool {
        true
    }

    fn refuses(&self, attributes: Attributes) -> Vec<AttributeError> {
        self.0.refuses(attributes)
    }

    fn entry_size(size: u64) -> u64 {
        let ptes = (0..Self::SIZES).map(Self::size);
        ptes.rev().find(|&pte| Self::group(pte) == size).unwrap_or(size)
    }

    fn part(&self, memory: &TestPlatform, start: u64, end: u64) -> Tree {
        // Whole groups only.
        let all = Self::group(Self::size(1));
        let (start, end) = (start & !(all - 1), end.checked_next_multiple_of(all).unwrap_or(end));
        let breaks = memory.break_before_make() == BreakBeforeMake::Always;
        Self::fold(collected(self, memory, start, end), breaks)
    }

    /// An access from the root; it marks another member than the one that is accessed, if that is
    /// valid.
    fn access(&self, memory: &TestPlatform, _: Root, gpa: u64, write: bool) -> Access {
        loop {
            let (pte, height) = self.pte(memory, gpa);
            let mut raw = pte.load(Ordering::SeqCst);
            let super::Descriptor::Leaf(leaf) = self.decode(raw, height) else {
                return Access::Fault;
            };
            if !(if write { leaf.own.write } else { leaf.own.read }) {
                return Access::Fault;
            }
            let (mut bytes, mut marked) = (Self::size(height), pte);
            if leaf.memory & CONTIGUOUS != 0 {
                bytes = Self::group(bytes);
                let other = (gpa & !(bytes - 1)) | (gpa.rotate_left(5) ^ gpa >> 7) & (bytes - 1);
                let (pte, found) = self.pte(memory, other);
                let there = pte.load(Ordering::SeqCst);
                if found == height && there & 1 == 1 {
                    (marked, raw) = (pte, there);
                }
            }
            let new = self.used(raw, write);
            if marked.compare_exchange(raw, new, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                let start = gpa & !(bytes - 1);
                return Access::Done { start, end: start + bytes };
            }
        }
    }
}
