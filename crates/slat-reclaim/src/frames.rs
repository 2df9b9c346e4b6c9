//! Memory for guests' pages: frames, and blocks of them for huge pages.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use spin::Mutex;

/// Frames, in blocks of a power of two: single frames come from blocks that are broken already, so that
/// whole ones last.
#[derive(Debug)]
pub(crate) struct Frames {
    total: u32,
    /// Base-2 logarithm of the frames of a block.
    order: u32,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    /// Frames that are free.
    count: u32,
    /// A bit a frame: free.
    bits: Box<[u64]>,
    /// Of each block, how many are free.
    blocks: Box<[u32]>,
    /// Blocks of which some are free, and all.
    partial: BTreeSet<u32>,
    whole: Vec<u32>,
}

impl Frames {
    pub fn new(total: u32, order: u32) -> Self {
        let blocks = total.div_ceil(1 << order);
        let mut bits = vec![!0; (total as usize).div_ceil(64)];
        if let Some(last) = bits.last_mut()
            && !total.is_multiple_of(64)
        {
            *last = (1 << (total % 64)) - 1;
        }
        let size = |block: u32| (total - (block << order)).min(1 << order);
        let is_whole = |block: &u32| size(*block) == 1 << order;
        let free = Free {
            count: total,
            bits: bits.into_boxed_slice(),
            blocks: (0..blocks).map(size).collect(),
            partial: (0..blocks).filter(|block| !is_whole(block)).collect(),
            whole: (0..blocks).rev().filter(is_whole).collect(),
        };
        Self { total, order, free: Mutex::new(free) }
    }

    pub const fn total(&self) -> u32 {
        self.total
    }

    pub const fn order(&self) -> u32 {
        self.order
    }

    pub fn free(&self) -> u32 {
        self.free.lock().count
    }

    pub fn take(&self) -> Option<u32> {
        let mut free = self.free.lock();
        let block = match free.partial.first() {
            Some(&block) => block,
            None => {
                let block = free.whole.pop()?;
                free.partial.insert(block);
                block
            }
        };
        let first = (block << self.order) as usize / 64;
        let word = (first..).find(|&word| free.bits[word] & self.within(block, word) != 0)?;
        let bit = (free.bits[word] & self.within(block, word)).trailing_zeros();
        free.bits[word] &= !(1 << bit);
        free.blocks[block as usize] -= 1;
        free.count -= 1;
        if free.blocks[block as usize] == 0 {
            free.partial.remove(&block);
        }
        Some(word as u32 * 64 + bit)
    }

    /// The bits of `word` that are of `block`'s frames: blocks may be smaller than words.
    const fn within(&self, block: u32, word: usize) -> u64 {
        if self.order >= 6 {
            return !0;
        }
        let first = block << self.order;
        if first / 64 != word as u32 {
            0
        } else {
            ((1 << (1u32 << self.order)) - 1) << (first % 64)
        }
    }

    /// The first frame of a whole block.
    pub fn take_block(&self) -> Option<u32> {
        let mut free = self.free.lock();
        let block = free.whole.pop()?;
        let first = block << self.order;
        (first..first + (1 << self.order))
            .for_each(|frame| free.bits[frame as usize / 64] &= !(1 << (frame % 64)));
        free.blocks[block as usize] = 0;
        free.count -= 1 << self.order;
        Some(first)
    }

    pub fn give(&self, frame: u32) {
        let mut free = self.free.lock();
        let (word, bit, block) = (frame as usize / 64, 1 << (frame % 64), frame >> self.order);
        assert_eq!(free.bits[word] & bit, 0, "frame {frame} was given back twice");
        free.bits[word] |= bit;
        free.count += 1;
        free.blocks[block as usize] += 1;
        if free.blocks[block as usize] == 1 << self.order {
            free.partial.remove(&block);
            free.whole.push(block);
        } else {
            free.partial.insert(block);
        }
    }
}

/// Places in swap.
#[derive(Debug)]
pub(crate) struct Slots {
    total: u32,
    used: Mutex<Used>,
}

#[derive(Debug)]
struct Used {
    bits: Box<[u64]>,
    /// Of each word of the others, whether all of it is used.
    full: Box<[u64]>,
    count: u32,
    /// Where to look first: neighbours are written together.
    next: u32,
}

impl Used {
    /// The first in `range` that is free.
    fn first(&self, range: Range<u32>) -> Option<u32> {
        let mut slot = range.start;
        while slot < range.end {
            let word = slot / 64;
            let full = !self.full[word as usize / 64] & !0 << (word % 64);
            let free = !self.bits[word as usize] & !0 << (slot % 64);
            slot = match (free, full) {
                (1.., _) => {
                    let found = word * 64 + free.trailing_zeros();
                    return (found < range.end).then_some(found);
                }
                // The next word that is not full, or the next that tells of 64 of them.
                (_, full) => match full & !(1 << (word % 64)) {
                    0 => (word / 64 + 1) * 64 * 64,
                    later => (word / 64 * 64 + later.trailing_zeros()) * 64,
                },
            };
        }
        None
    }

    fn set(&mut self, slot: u32) {
        let word = slot as usize / 64;
        self.bits[word] |= 1 << (slot % 64);
        self.full[word / 64] |= u64::from(self.bits[word] == !0) << (word % 64);
    }

    fn clear(&mut self, slot: u32) {
        let word = slot as usize / 64;
        self.bits[word] &= !(1 << (slot % 64));
        self.full[word / 64] &= !(1 << (word % 64));
    }

    fn is_set(&self, slot: u32) -> bool {
        self.bits[slot as usize / 64] >> (slot % 64) & 1 != 0
    }
}

impl Slots {
    pub fn new(total: u32) -> Self {
        let words = |len: usize| vec![0; len.div_ceil(64)].into_boxed_slice();
        let bits = words(total as usize);
        let full = words(bits.len());
        Self { total, used: Mutex::new(Used { bits, full, count: 0, next: 0 }) }
    }

    pub fn used(&self) -> u32 {
        self.used.lock().count
    }

    /// So few are free that pages that came back should not keep theirs.
    pub fn scarce(&self) -> bool {
        self.total - self.used() < self.total / 16
    }

    pub fn take(&self) -> Option<u32> {
        let mut used = self.used.lock();
        if used.count == self.total {
            return None;
        }
        let next = used.next;
        let slot = used.first(next..self.total).or_else(|| used.first(0..next))?;
        used.set(slot);
        used.count += 1;
        used.next = slot + 1;
        Some(slot)
    }

    pub fn give(&self, slot: u32) {
        let mut used = self.used.lock();
        assert!(used.is_set(slot), "swap slot {slot} was given back twice");
        used.clear(slot);
        used.count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn frames_are_handed_out_once_and_blocks_come_back_whole() {
        for (total, order) in [(1024 + 100, 9), (64, 3), (7, 1), (130, 5)] {
            let frames = Frames::new(total, order);
            let mut rng = fastrand::Rng::with_seed(total.into());
            let mut taken = HashSet::new();
            for _ in 0..10_000 {
                match rng.u8(..8) {
                    0 => {
                        if let Some(first) = frames.take_block() {
                            assert!(first.is_multiple_of(1 << order));
                            let block = first..first + (1 << order);
                            assert!(block.end <= total);
                            block.for_each(|frame| assert!(taken.insert(frame)));
                        }
                    }
                    1..=3 => match frames.take() {
                        Some(frame) => assert!(frame < total && taken.insert(frame)),
                        None => assert_eq!(taken.len(), total as usize),
                    },
                    _ => {
                        if let Some(&frame) = taken.iter().next() {
                            taken.remove(&frame);
                            frames.give(frame);
                        }
                    }
                }
                assert_eq!(frames.free() as usize + taken.len(), total as usize);
            }
            taken.drain().for_each(|frame| frames.give(frame));
            let blocks = std::iter::from_fn(|| frames.take_block()).count();
            assert_eq!(blocks as u32, total >> order, "whole blocks of {total} frames");
        }
    }

    #[test]
    fn single_frames_leave_blocks_whole() {
        let frames = Frames::new(4 << 9, 9);
        (0..512).for_each(|_| assert!(frames.take().is_some()));
        assert_eq!(std::iter::from_fn(|| frames.take_block()).count(), 3);
    }

    #[test]
    fn swap_slots_are_handed_out_once_until_there_is_none() {
        for total in [1, 63, 64, 65, 200] {
            let slots = Slots::new(total);
            let taken: HashSet<u32> = std::iter::from_fn(|| slots.take()).collect();
            assert_eq!((taken.len(), slots.used()), (total as usize, total));
            assert!(taken.iter().all(|slot| *slot < total));
            slots.give(total / 2);
            assert_eq!(slots.take(), Some(total / 2));
        }
        assert_eq!(Slots::new(0).take(), None);
    }

    #[test]
    fn the_last_free_slot_is_found_wherever_it_is() {
        let total = 3 * 64 * 64 + 100;
        let slots = Slots::new(total);
        while slots.take().is_some() {}
        let mut rng = fastrand::Rng::with_seed(1);
        for free in
            [0, 63, 64, 4095, 4096, total - 1].into_iter().chain((0..200).map(|_| rng.u32(..total)))
        {
            slots.give(free);
            assert!(slots.scarce());
            assert_eq!(slots.take(), Some(free));
            assert_eq!(slots.take(), None);
        }
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_frame_that_is_given_back_twice_is_noticed() {
        let frames = Frames::new(8, 1);
        frames.give(3);
    }
}
