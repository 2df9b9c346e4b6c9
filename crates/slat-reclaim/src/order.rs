//! In which order pages are given up: by generations, or by two lists.
//!
//! Both work on numbers of pages, and ask for accessed bits through [`Accessed`]; neither knows of
//! tables, frames or swap.

mod generations;
mod lists;

pub(crate) use generations::Generations;
pub(crate) use lists::Lists;

use alloc::boxed::Box;
use alloc::vec::Vec;

/// Why accessed bits are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Look {
    /// An ageing walk over all memory.
    Walk,
    /// The page that is about to be given up.
    Check,
    /// That page and those around it.
    Around,
}

/// The guest, to who orders its pages.
pub(crate) trait Accessed {
    /// Pages of the guest.
    fn pages(&self) -> u32;
    /// Whether the page is in memory.
    fn is_here(&self, page: u32) -> bool;
    /// Whether the page came back so recently that it is not to be given up.
    fn is_new(&self, page: u32) -> bool;
    /// Tests and clears the accessed bits of `count` pages from `first` on: bit 0 of `young` is the
    /// first. `young` is all zero, and long enough.
    fn young(&mut self, look: Look, first: u32, count: u32, young: &mut [u64]);
    /// Whether the page has been used, and is it no more.
    fn was_used(&mut self, page: u32) -> bool {
        let mut young = [0];
        self.young(Look::Check, page, 1, &mut young);
        young[0] & 1 != 0
    }
    /// The time, in ticks.
    fn now(&self) -> u64;
}

/// Pages to be given up, and what it took to find them.
#[derive(Debug, Default)]
pub(crate) struct Victims {
    pub pages: Vec<u32>,
    /// Pages that were next, and had been used.
    pub kept: u64,
    /// Walks over all memory.
    pub walks: u64,
    /// Pages that were next, but had come back too recently.
    pub held: u64,
}

/// How accessed bits are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Looks {
    /// Pages of one call of the walk; 1 asks for each page that is there.
    pub window: u32,
    /// A page that is about to be given up is asked about with the 64 pages around it.
    pub around: bool,
}

/// Either order.
#[derive(Debug)]
pub(crate) enum Order {
    Generations(Box<Generations>),
    Lists(Lists),
}

impl Order {
    /// `page` is in memory. `distance` is how many pages were given up since it was; `None` for a first
    /// touch. `here` is how many pages are in memory.
    pub fn arrive(&mut self, page: u32, distance: Option<u32>, here: u32) {
        match self {
            Self::Generations(order) => order.arrive(page, distance, here),
            Self::Lists(order) => order.arrive(page, distance, here),
        }
    }

    /// Pages to be given up, `want` at most. They are in no list any more: what is not given up after all
    /// is to be put back by [`Order::put_back`].
    pub fn victims(&mut self, want: usize, guest: &mut impl Accessed) -> Victims {
        match self {
            Self::Generations(order) => order.victims(want, guest),
            Self::Lists(order) => order.victims(want, guest),
        }
    }

    /// `page` was not given up: it was used meanwhile, or could not be written.
    pub fn put_back(&mut self, page: u32, used: bool) {
        match self {
            Self::Generations(order) => order.put_back(page, used),
            Self::Lists(order) => order.put_back(page, used),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::ops::Range;

    /// A guest of pages that say what they are asked.
    pub struct Memory {
        pub here: Vec<bool>,
        pub accessed: Vec<bool>,
        pub always_used: bool,
        pub new: bool,
        pub time: u64,
        pub calls: u64,
    }

    impl Memory {
        pub fn all_here(pages: u32) -> Self {
            let (here, accessed) = (vec![true; pages as usize], vec![false; pages as usize]);
            Self { here, accessed, always_used: false, new: false, time: 0, calls: 0 }
        }

        pub fn uses(&mut self, pages: Range<usize>) {
            self.accessed[pages].fill(true);
        }
    }

    impl Accessed for Memory {
        fn pages(&self) -> u32 {
            self.here.len() as u32
        }

        fn is_here(&self, page: u32) -> bool {
            self.here[page as usize]
        }

        fn is_new(&self, _page: u32) -> bool {
            self.new
        }

        fn young(&mut self, _look: Look, first: u32, count: u32, young: &mut [u64]) {
            self.calls += 1;
            for bit in 0..count as usize {
                let accessed = &mut self.accessed[first as usize + bit];
                if core::mem::take(accessed) || self.always_used {
                    young[bit / 64] |= 1 << (bit % 64);
                }
            }
        }

        fn now(&self) -> u64 {
            self.time
        }
    }
}
