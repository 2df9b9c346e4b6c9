//! Collapse: which tables become blocks, and which of them share an invalidation.

use super::super::Event;
use super::super::hardware::{Hardware, Leaf, Tree};
use super::shape::emptied;
use super::{World, floor, invalidations, owes, same_but_state};
use slat::{BreakBeforeMake, GpaRange, PageSize, SplitError};
use std::collections::BTreeSet;
use std::marker::PhantomData;

impl<H: Hardware> World<'_, H> {
    /// Turns tables back into blocks.
    pub fn collapse(&mut self, range: GpaRange, to: PageSize) {
        let before = self.begin();
        let out = self.run(|guard| guard.collapse(range, to));
        let (start, end) = (range.start().0, range.end().0);
        let mut legal: Vec<_> =
            self.range_errors(&range).into_iter().map(SplitError::Range).collect();
        legal.extend(self.leaf_size_error(to).map(SplitError::LeafSize));
        if !legal.is_empty() {
            self.refused(&before, &out, start, &legal);
            return;
        }
        let mut gone = BTreeSet::new();
        let mut blocks = Vec::new();
        let root = self.hardware.root();
        let top = H::size(root.height);
        let most = H::height(to.bytes());
        for pte in (floor(start, top)..end).step_by(top as usize) {
            let (gone, blocks) = (&mut gone, &mut blocks);
            let hardware = PhantomData::<H>;
            let mut search = Search { tree: &before, start, end, most, gone, blocks, hardware };
            search.block(pte, root.height);
        }
        let bytes: u64 = gone.iter().map(|(_, size)| size).sum();
        assert_eq!(out.result, Ok(bytes), "bytes collapsed");
        assert_eq!(out.counts.bytes_changed, bytes);
        let seen = gone.is_empty() || out.events.last() == Some(&Event::Publish);
        assert!(seen, "new blocks unseen");
        assert_eq!(out.owed, None, "completed inside");
        let n = gone.len() as u64;
        let breaks = self.bbm == BreakBeforeMake::Always;
        assert_eq!(out.counts.broken, if breaks { n } else { 0 });
        let batches = batches::<H>(&gone, breaks);
        let whole = |batch: &Vec<_>| owes([], batch, self.bbm).unwrap();
        let wanted: Vec<_> = batches.iter().map(whole).collect();
        assert_eq!(invalidations(&out.events), wanted, "one for each batch");
        assert_eq!(out.counts.invalidations, wanted.len() as u64);
        // Each entry of the table is sealed and retired; the entry above is frozen and released.
        let written: u64 = gone.iter().map(|&(_, size)| 2 * emptied::<H>(size)).sum();
        assert_eq!(out.counts.entries_written, written);
        let mut shape = before.shape();
        let hpas = gone.iter().map(|&(at, size)| before.table(at, H::height(size)).unwrap().0);
        hpas.for_each(|hpa| _ = shape.remove(&hpa).unwrap());
        assert_eq!(out.tree.shape(), shape, "tables left");
        self.retired += gone.len();
        let mut flat = self.flat.borrow_mut();
        for &(at, bytes) in &gone {
            if !blocks.contains(&(at, bytes)) {
                continue;
            }
            let (mut accessed, mut dirty) = (false, false);
            for (_, piece) in flat.within(at, at + bytes) {
                accessed |= piece.attributes.accessed;
                dirty |= piece.attributes.dirty;
            }
            for (_, piece) in flat.within(at, at + bytes) {
                (piece.attributes.accessed, piece.attributes.dirty) = (accessed, dirty);
            }
            assert_eq!(out.tree.at(at).unwrap().size, bytes);
        }
        drop(flat);
        self.settle(&out.tree);
    }
}

/// Predicts the result of a collapse.
struct Search<'a, H> {
    tree: &'a Tree,
    start: u64,
    end: u64,
    most: u32,
    /// Tables that become blocks, by address and size; those that remain blocks at the end.
    gone: &'a mut BTreeSet<(u64, u64)>,
    blocks: &'a mut Vec<(u64, u64)>,
    hardware: PhantomData<H>,
}

impl<H: Hardware> Search<'_, H> {
    /// Returns the leaf at that entry in the end, if there is one.
    fn block(&mut self, at: u64, height: u32) -> Option<Leaf> {
        let size = H::size(height);
        let Some((_, table)) = self.tree.table(at, height) else {
            let run = self.tree.at(at).filter(|run| run.size == size)?;
            return Some(Leaf { oa: run.oa(at), ..run.leaf });
        };
        if !table.overlaps(self.start, self.end) {
            return None;
        }
        let eligible =
            height <= self.most && height < H::SIZES && table.within(self.start, self.end);
        if !eligible && height == 1 {
            return None;
        }
        let below = H::size(height - 1);
        let children: Vec<_> = (0..H::entries(height - 1) as u64)
            .map(|index| self.block(at + index * below, height - 1))
            .collect();
        let first = children[0]?;
        let fits = eligible
            && first.oa.is_multiple_of(size)
            && children.iter().zip(0..).all(|(child, index)| {
                child.is_some_and(|leaf| {
                    leaf.oa == first.oa + index * below
                        && leaf.memory == first.memory
                        && same_but_state(leaf.own, first.own)
                })
            });
        if !fits {
            return None;
        }
        self.blocks.retain(|&(inner, _)| !(at..at + size).contains(&inner));
        self.gone.insert((at, size));
        self.blocks.push((at, size));
        Some(first)
    }
}

/// Returns the tables that share an invalidation as they become blocks: neighbours below one table,
/// up to 1 GiB of them; the first batch that is full has 20, as each
/// has with breaks.
fn batches<H: Hardware>(gone: &BTreeSet<(u64, u64)>, breaks: bool) -> Vec<Vec<(u64, u64)>> {
    let mut walked: Vec<_> = gone.iter().copied().collect();
    walked.sort_by_key(|&(at, size)| (at + size, size));
    let (mut batches, mut few) = (Vec::<Vec<_>>::new(), true);
    // Of the last batch: a batch that is full makes room for later ones, not for itself.
    let mut most = 20;
    for (at, size) in walked {
        let last = batches.last().filter(|batch| {
            let (first, end) = batch[0];
            let parent = H::size(H::height(size) + 1);
            end - first == size
                && floor(first, parent) == floor(at, parent)
                && (at - first) / size < most.min((1 << 30) / size).max(1)
        });
        let place = last.map_or(0, |batch| (at - batch[0].0) / size);
        match last {
            Some(_) => batches.last_mut().unwrap().push((at, at + size)),
            None => {
                most = if breaks || few { 20 } else { H::entries(0) as u64 };
                batches.push(vec![(at, at + size)]);
            }
        }
        few &= breaks || H::height(size) != 1 || place != 19;
    }
    batches
}
