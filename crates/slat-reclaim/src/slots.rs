//! The slots of swap: which hold a page, and which are free but still have the content of one.
//!
//! A slot is *used*; *stale*: free, with old content of a guest; *clean*: free, without content; or
//! *being wiped*: swap is forgetting its content, and it is not handed out. A fault that frees a
//! slot leaves it stale, which takes no system call. Stale slots are handed out first, because an
//! overwrite is the cheapest way to forget their content. Until that overwrite, a used slot is
//! *unwritten*: swap still has what was in it before.

use crate::page::NUMBERS;
use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use spin::Mutex;

/// Most slots that swap forgets in one call.
pub(crate) const RUN: u32 = 1024;

/// A set of slots with a fast search for the first.
#[derive(Debug)]
struct Bits {
    words: Box<[u64]>,
    /// For each word, whether it has a slot.
    any: Box<[u64]>,
    count: u32,
}

impl Bits {
    fn new(total: u32) -> Self {
        let words = |len: usize| vec![0; len.div_ceil(64)].into_boxed_slice();
        let of = words(total as usize);
        let any = words(of.len());
        Self { words: of, any, count: 0 }
    }

    fn all(total: u32) -> Self {
        let mut all = Self::new(total);
        (0..total).for_each(|slot| all.add(slot));
        all
    }

    fn has(&self, slot: u32) -> bool {
        self.words[slot as usize / 64] >> (slot % 64) & 1 != 0
    }

    /// Returns the first slot from `from` on.
    fn first(&self, from: u32) -> Option<u32> {
        let mut slot = from;
        loop {
            let word = slot / 64;
            let here = self.words.get(word as usize)? & !0 << (slot % 64);
            if here != 0 {
                return Some(word * 64 + here.trailing_zeros());
            }
            // Goes to the next word that has a slot, or to the next 64 words if none of these has
            // one.
            let later = self.any[word as usize / 64] & (!1 << (word % 64));
            slot = match later {
                0 => (word / 64 + 1) * 64 * 64,
                later => (word / 64 * 64 + later.trailing_zeros()) * 64,
            };
        }
    }

    fn add(&mut self, slot: u32) {
        let word = slot as usize / 64;
        self.words[word] |= 1 << (slot % 64);
        self.any[word / 64] |= 1 << (word % 64);
        self.count += 1;
    }

    /// Removes `slot` if it is there.
    fn take(&mut self, slot: u32) {
        if self.has(slot) {
            self.remove(slot);
        }
    }

    fn remove(&mut self, slot: u32) {
        let word = slot as usize / 64;
        self.words[word] &= !(1 << (slot % 64));
        self.any[word / 64] &= !(u64::from(self.words[word] == 0) << (word % 64));
        self.count -= 1;
    }
}

/// The slots of swap, and the state of each.
#[derive(Debug)]
pub(crate) struct Slots {
    total: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    clean: Bits,
    stale: Bits,
    /// Used slots that still have old content.
    unwritten: Bits,
    used: u32,
    /// Where the search for a clean slot begins, so that pages that leave together get adjacent
    /// slots.
    next: u32,
    /// No stale slot is below this.
    lowest: u32,
    /// How often slots were given back.
    gives: u64,
    /// How often slots were returned unwritten.
    returns: u64,
}

/// A slot for a page, or why there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taken {
    Slot(u32),
    /// All free slots are being wiped: one will be free soon.
    Wait,
    Full,
}

impl State {
    fn is_free(&self, slot: u32) -> bool {
        self.clean.has(slot) || self.stale.has(slot)
    }

    fn has_leftovers(&self, slot: u32) -> bool {
        self.stale.has(slot) || self.unwritten.has(slot)
    }

    fn stale(&mut self, slot: u32) {
        assert!(!self.is_free(slot), "swap slot {slot} was given back twice");
        self.stale.add(slot);
        self.lowest = self.lowest.min(slot);
    }
}

impl Slots {
    pub fn new(total: u32) -> Self {
        let (clean, stale, unwritten) = (Bits::all(total), Bits::new(total), Bits::new(total));
        let lowest = NUMBERS as u32;
        let state =
            State { clean, stale, unwritten, used: 0, next: 0, lowest, gives: 0, returns: 0 };
        Self { total, state: Mutex::new(state) }
    }

    pub fn used(&self) -> u32 {
        self.state.lock().used
    }

    /// Returns whether no slot is free.
    pub fn is_full(&self) -> bool {
        self.used() == self.total
    }

    /// Returns whether less than a 16th of the slots is free: then pages that come back do not keep
    /// theirs.
    pub fn scarce(&self) -> bool {
        self.total - self.used() < self.total.div_ceil(16)
    }

    /// Returns the number of stale slots.
    pub fn stale(&self) -> u32 {
        self.state.lock().stale.count
    }

    /// Returns how often slots were given back, which makes room in swap.
    pub fn gives(&self) -> u64 {
        self.state.lock().gives
    }

    pub fn take(&self) -> Taken {
        let mut state = self.state.lock();
        if state.used == self.total {
            return Taken::Full;
        }
        let slot = match state.stale.first(state.lowest) {
            Some(slot) => {
                state.stale.remove(slot);
                state.unwritten.add(slot);
                state.lowest = slot + 1;
                slot
            }
            None => {
                state.lowest = NUMBERS as u32;
                let next = state.next;
                let Some(slot) = state.clean.first(next).or_else(|| state.clean.first(0)) else {
                    return Taken::Wait;
                };
                state.clean.remove(slot);
                state.next = slot + 1;
                slot
            }
        };
        state.used += 1;
        Taken::Slot(slot)
    }

    /// Gives `slot` back; it becomes stale.
    pub fn give(&self, slot: u32) {
        let mut state = self.state.lock();
        state.stale(slot);
        state.used -= 1;
        state.gives += 1;
    }

    /// `slot` was taken from a page of which it keeps a copy, and is to have another page.
    pub fn reuse(&self, slot: u32) {
        self.state.lock().unwritten.add(slot);
    }

    /// A whole page was written to `slot`: what was in it before is gone.
    pub fn written(&self, slot: u32) {
        self.state.lock().unwritten.take(slot);
    }

    /// Returns the slots that have old content: stale and unwritten ones.
    pub fn leftovers(&self) -> Vec<u32> {
        let state = self.state.lock();
        (0..self.total).filter(|&slot| state.has_leftovers(slot)).collect()
    }

    /// Keeps those of `slots` that have old content still. Returns whether one of them is
    /// unwritten, and how often slots were returned unwritten.
    pub fn still_left(&self, slots: &mut Vec<u32>) -> (bool, u64) {
        let state = self.state.lock();
        slots.retain(|&slot| state.has_leftovers(slot));
        (slots.iter().any(|&slot| state.unwritten.has(slot)), state.returns)
    }

    /// Gives `slot` back, to which no whole page was written since it was taken: this makes no room
    /// in swap, and does not count in [`Slots::gives`].
    pub fn return_unwritten(&self, slot: u32) {
        let mut state = self.state.lock();
        state.unwritten.take(slot);
        state.returns += 1;
        state.stale(slot);
        state.used -= 1;
    }

    /// Withholds `slot`, which is to be wiped: it is not handed out until [`Slots::wiped`] frees
    /// it.
    pub fn withhold(&self, slot: u32) {
        let mut state = self.state.lock();
        assert!(!state.is_free(slot), "swap slot {slot} was given back twice");
        state.used -= 1;
    }

    /// Withholds the first run of stale slots from `from` on, at most [`RUN`].
    pub fn withhold_stale(&self, from: u32) -> Option<Range<u32>> {
        let mut state = self.state.lock();
        let first = state.stale.first(from)?;
        let end = (first + RUN).min(self.total);
        let end = (first..end).find(|&slot| !state.stale.has(slot)).unwrap_or(end);
        (first..end).for_each(|slot| state.stale.remove(slot));
        Some(first..end)
    }

    /// Frees slots that were withheld; they are stale if swap could not forget their content (not
    /// `clean`).
    pub fn wiped(&self, slots: Range<u32>, clean: bool) {
        let mut state = self.state.lock();
        for slot in slots {
            if clean {
                assert!(!state.is_free(slot), "swap slot {slot} was wiped while it was free");
                state.clean.add(slot);
            } else {
                state.stale(slot);
            }
        }
        state.gives += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn take(slots: &Slots) -> Option<u32> {
        match slots.take() {
            Taken::Slot(slot) => Some(slot),
            _ => None,
        }
    }

    #[test]
    fn slots_are_handed_out_once_until_there_is_none() {
        for total in [1, 63, 64, 65, 200] {
            let slots = Slots::new(total);
            let taken: HashSet<u32> = std::iter::from_fn(|| take(&slots)).collect();
            assert_eq!((taken.len(), slots.used()), (total as usize, total));
            assert!(taken.iter().all(|slot| *slot < total));
            assert!(slots.is_full());
            slots.give(total / 2);
            assert_eq!((slots.stale(), slots.is_full()), (1, false));
            assert_eq!(slots.take(), Taken::Slot(total / 2));
            assert_eq!((slots.take(), slots.stale()), (Taken::Full, 0));
        }
        assert_eq!(Slots::new(0).take(), Taken::Full);
    }

    #[test]
    fn the_last_free_slot_is_found_wherever_it_is() {
        let total = 3 * 64 * 64 + 100;
        let slots = Slots::new(total);
        while take(&slots).is_some() {}
        let mut rng = fastrand::Rng::with_seed(1);
        for (index, free) in [0, 63, 64, 4095, 4096, total - 1]
            .into_iter()
            .chain((0..200).map(|_| rng.u32(..total)))
            .enumerate()
        {
            match index % 2 {
                0 => slots.give(free),
                _ => {
                    slots.withhold(free);
                    assert_eq!(slots.take(), Taken::Wait, "it is free, and not to be had yet");
                    slots.wiped(free..free + 1, true);
                }
            }
            assert!(slots.scarce());
            assert_eq!(slots.take(), Taken::Slot(free));
            assert_eq!(slots.take(), Taken::Full);
        }
    }

    #[test]
    fn slots_are_used_stale_clean_or_being_wiped() {
        const TOTAL: u32 = 5000;
        let slots = Slots::new(TOTAL);
        let mut rng = fastrand::Rng::with_seed(3);
        let (mut used, mut stale, mut wiping): (Vec<u32>, HashSet<u32>, Vec<Range<u32>>) =
            Default::default();
        for step in 0..20_000 {
            match rng.u8(..8) {
                // The lowest stale slot is handed out first.
                0..3 => match slots.take() {
                    Taken::Slot(slot) => {
                        assert_eq!(stale.iter().min().is_some(), stale.contains(&slot));
                        assert!(stale.iter().all(|other| slot <= *other));
                        stale.remove(&slot);
                        used.push(slot);
                    }
                    Taken::Wait => assert!(stale.is_empty() && !wiping.is_empty()),
                    Taken::Full => assert_eq!(used.len(), TOTAL as usize),
                },
                3 => (0..40).for_each(|_| {
                    if let Some(slot) = take(&slots) {
                        stale.remove(&slot);
                        used.push(slot);
                    }
                }),
                4 | 5 if !used.is_empty() => {
                    let slot = used.swap_remove(rng.usize(..used.len()));
                    match rng.bool() {
                        true => slots.give(slot),
                        false => slots.return_unwritten(slot),
                    }
                    stale.insert(slot);
                }
                6 if rng.bool() && !used.is_empty() => {
                    let slot = used.swap_remove(rng.usize(..used.len()));
                    slots.withhold(slot);
                    wiping.push(slot..slot + 1);
                }
                6 => {
                    let from = rng.u32(..TOTAL);
                    let first = stale.iter().filter(|slot| **slot >= from).min().copied();
                    let run = slots.withhold_stale(from);
                    assert_eq!(run.as_ref().map(|run| run.start), first);
                    if let Some(run) = run {
                        assert!(!run.is_empty() && run.clone().all(|slot| stale.remove(&slot)));
                        assert!(run.len() as u32 == RUN || !stale.contains(&run.end));
                        wiping.push(run);
                    }
                }
                _ => {
                    for run in wiping.drain(..) {
                        let clean = rng.bool();
                        slots.wiped(run.clone(), clean);
                        stale.extend(run.filter(|_| !clean));
                    }
                }
            }
            assert_eq!((slots.used(), slots.stale()), (used.len() as u32, stale.len() as u32));
            let wiping: usize = wiping.iter().map(ExactSizeIterator::len).sum();
            let clean = slots.state.lock().clean.count as usize;
            assert_eq!(clean + stale.len() + used.len() + wiping, TOTAL as usize, "{step}");
        }
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_slot_that_is_given_back_twice_is_noticed() {
        Slots::new(8).give(3);
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_free_slot_that_is_to_be_wiped_is_noticed() {
        Slots::new(8).withhold(3);
    }
}
