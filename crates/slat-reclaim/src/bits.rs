//! A set of numbers that finds its first member from a number on in a few steps.

use crate::work;
use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

/// A set of numbers below a bound: a bit for each number, and above each 64 bits one that says
/// whether any of them is set.
#[derive(Debug)]
pub(crate) struct Bits {
    levels: Vec<Box<[u64]>>,
    count: u32,
}

impl Bits {
    pub fn new(total: u32) -> Self {
        let mut levels = Vec::new();
        let mut len = total as usize;
        loop {
            len = len.div_ceil(64).max(1);
            levels.push(vec![0; len].into_boxed_slice());
            if len == 1 {
                return Self { levels, count: 0 };
            }
        }
    }

    pub fn all(total: u32) -> Self {
        let mut all = Self::new(total);
        (0..total).for_each(|number| all.add(number));
        all
    }

    #[cfg(test)]
    pub const fn count(&self) -> u32 {
        self.count
    }

    pub fn has(&self, number: u32) -> bool {
        self.levels[0][number as usize / 64] >> (number % 64) & 1 != 0
    }

    /// Returns the first member from `from` on.
    pub fn first(&self, from: u32) -> Option<u32> {
        let (mut at, mut level) = (from as usize, 0);
        loop {
            work::step();
            let word = self.levels.get(level)?.get(at / 64)? & !0 << (at % 64);
            if word != 0 {
                at = at / 64 * 64 + word.trailing_zeros() as usize;
                break;
            }
            (at, level) = (at / 64 + 1, level + 1);
        }
        for level in self.levels[..level].iter().rev() {
            work::step();
            at = at * 64 + level[at].trailing_zeros() as usize;
        }
        Some(at as u32)
    }

    /// Adds `number`, which may be a member already.
    pub fn add(&mut self, number: u32) {
        self.count += u32::from(!self.has(number));
        let mut at = number as usize;
        for level in &mut self.levels {
            level[at / 64] |= 1 << (at % 64);
            at /= 64;
        }
    }

    /// Removes `number`; returns whether it was a member.
    pub fn remove(&mut self, number: u32) -> bool {
        if !self.has(number) {
            return false;
        }
        self.count -= 1;
        let mut at = number as usize;
        for level in &mut self.levels {
            level[at / 64] &= !(1 << (at % 64));
            if level[at / 64] != 0 {
                break;
            }
            at /= 64;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_set_is_that_of_a_model_and_finds_its_first_in_a_few_steps() {
        for total in [0, 1, 63, 64, 65, 4096, 4097, 300_000] {
            let (mut bits, mut model) = (Bits::new(total), BTreeSet::new());
            let mut rng = fastrand::Rng::with_seed(total.into());
            for _ in 0..if total == 0 { 0 } else { 5000 } {
                let number = rng.u32(..total);
                match rng.u8(..4) {
                    0 => assert_eq!(bits.remove(number), model.remove(&number)),
                    1 => _ = (bits.add(number), model.insert(number)),
                    _ => {
                        let first = model.range(number..).next().copied();
                        let steps = work::steps(|| assert_eq!(bits.first(number), first));
                        assert!(steps <= 10, "{steps}");
                    }
                }
                assert_eq!(bits.has(number), model.contains(&number));
                assert_eq!(bits.count() as usize, model.len());
            }
            assert_eq!(Bits::all(total).count(), total);
            assert_eq!(bits.first(total), None);
        }
    }
}
