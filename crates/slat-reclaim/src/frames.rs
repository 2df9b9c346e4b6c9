//! Allocator of frames for guests' pages, and of blocks of frames for huge pages.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;
use spin::Mutex;

/// Frames, in blocks of a power of two. Single frames come from blocks that are broken already, to
/// keep other blocks whole.
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
    /// One bit per frame: whether it is free.
    bits: Box<[u64]>,
    /// For each block, the number of its free frames.
    blocks: Box<[u32]>,
    /// Blocks of which some frames are free, and (`whole`) blocks of which all are.
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

    /// Returns the bits of `word` that are frames of `block`: a block may be smaller than a word.
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

    /// Takes a whole block, and returns its first frame.
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
    #[should_panic(expected = "given back twice")]
    fn a_frame_that_is_given_back_twice_is_noticed() {
        let frames = Frames::new(8, 1);
        frames.give(3);
    }
}
