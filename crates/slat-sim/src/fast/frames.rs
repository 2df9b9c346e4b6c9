//! Frames for tables, allocated from one region and reused by size.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

/// The smallest frame, as base-2 logarithm.
const SMALLEST: u32 = 12;

#[derive(Debug)]
pub(super) struct Frames(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Memory that was never allocated.
    rest: Range<u64>,
    /// Freed frames, by the base-2 logarithm of their size.
    free: [Vec<u64>; u64::BITS as usize],
}

impl Frames {
    /// Creates an allocator for `rest`, which does not contain address 0, and begins and ends at a
    /// multiple of the smallest frame.
    pub fn new(rest: Range<u64>) -> Self {
        Self(Mutex::new(State { rest, free: [const { Vec::new() }; u64::BITS as usize] }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// Allocates a frame of `bytes`, aligned to its size. Returns `None` if there is no room, or
    /// `bytes` is no size of a frame.
    pub fn take(&self, bytes: u64) -> Option<u64> {
        if !bytes.is_power_of_two() || bytes < 1 << SMALLEST {
            return None;
        }
        let mut state = self.state();
        if let Some(frame) = state.free[bytes.trailing_zeros() as usize].pop() {
            return Some(frame);
        }
        let frame = state.rest.start.checked_next_multiple_of(bytes)?;
        let end = frame.checked_add(bytes).filter(|&end| end <= state.rest.end)?;
        // Keeps what alignment skips as smaller frames.
        while state.rest.start < frame {
            let log = state.rest.start.trailing_zeros();
            let skipped = state.rest.start;
            state.free[log as usize].push(skipped);
            state.rest.start += 1 << log;
        }
        state.rest.start = end;
        Some(frame)
    }

    /// Takes back a frame that `take` returned for the same size.
    pub fn give(&self, frame: u64, bytes: u64) {
        self.state().free[bytes.trailing_zeros() as usize].push(frame);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_aligned_disjoint_and_reused() {
        let frames = Frames::new(0x1000..0x1_0000);
        assert_eq!(frames.take(0x4000), Some(0x4000));
        let skipped = [frames.take(0x1000), frames.take(0x2000)];
        assert_eq!(skipped, [Some(0x1000), Some(0x2000)]);
        assert_eq!(frames.take(0x8000), Some(0x8000));
        assert_eq!((frames.take(0x1000), frames.take(24)), (None, None));
        frames.give(0x4000, 0x4000);
        assert_eq!(frames.take(0x4000), Some(0x4000));
    }
}
