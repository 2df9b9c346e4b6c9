//! Lists of slots of swap: each slot is in one list at most. A slot is added, removed and found in
//! one step, wherever it is, and nothing is allocated for it.

use crate::work;
use alloc::vec;
use alloc::vec::Vec;

/// For each slot: its list, the slot before it and the one behind it, each plus 1, and 0 for none.
/// It is all zero at the start, so that the system provides memory for the slots that are used.
type Links = Vec<[u32; 3]>;
const LIST: usize = 0;
const BEFORE: usize = 1;
const BEHIND: usize = 2;

/// The ends of a list (each plus 1, and 0 for none), and its length.
#[derive(Clone, Copy, Default, Debug)]
struct Ends {
    first: u32,
    last: u32,
    len: u32,
}

#[derive(Debug)]
pub(crate) struct Lists {
    links: Links,
    ends: Vec<Ends>,
}

impl Lists {
    pub fn new(slots: u32) -> Self {
        Self { links: vec![[0; 3]; slots as usize], ends: Vec::new() }
    }

    /// Makes `lists` more lists, the first of which has the number that this returns.
    pub fn more(&mut self, lists: u32) -> u32 {
        let first = self.ends.len();
        self.ends.resize(first + lists as usize, Ends::default());
        first as u32
    }

    pub fn len(&self, list: u32) -> u32 {
        self.ends[list as usize].len
    }

    /// Returns the list that `slot` is in.
    pub fn of(&self, slot: u32) -> Option<u32> {
        self.links[slot as usize][LIST].checked_sub(1)
    }

    pub fn first(&self, list: u32) -> Option<u32> {
        work::step();
        self.ends[list as usize].first.checked_sub(1)
    }

    /// Returns the slots of `list`, in their order.
    pub fn slots(&self, list: u32) -> impl Iterator<Item = u32> {
        let behind = |slot: &u32| self.links[*slot as usize][BEHIND].checked_sub(1);
        core::iter::successors(self.first(list), move |slot| {
            work::step();
            behind(slot)
        })
    }

    /// Puts `slot`, which is in no list, at the end of `list`.
    pub fn push(&mut self, list: u32, slot: u32) {
        work::step();
        let ends = &mut self.ends[list as usize];
        assert_eq!(self.links[slot as usize][LIST], 0, "swap slot {slot} is in two lists");
        self.links[slot as usize] = [list + 1, ends.last, 0];
        match ends.last.checked_sub(1) {
            Some(last) => self.links[last as usize][BEHIND] = slot + 1,
            None => ends.first = slot + 1,
        }
        ends.last = slot + 1;
        ends.len += 1;
    }

    /// Takes `slot` out of its list; returns that list, or `None` if it is in none.
    pub fn remove(&mut self, slot: u32) -> Option<u32> {
        work::step();
        let [list, before, behind] = core::mem::take(&mut self.links[slot as usize]);
        let list = list.checked_sub(1)?;
        let ends = &mut self.ends[list as usize];
        match before.checked_sub(1) {
            Some(before) => self.links[before as usize][BEHIND] = behind,
            None => ends.first = behind,
        }
        match behind.checked_sub(1) {
            Some(behind) => self.links[behind as usize][BEFORE] = before,
            None => ends.last = before,
        }
        ends.len -= 1;
        Some(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn lists_are_those_of_a_model() {
        const SLOTS: u32 = 40;
        let mut lists = Lists::new(SLOTS);
        assert_eq!((lists.more(2), lists.more(1)), (0, 2));
        let mut model: [VecDeque<u32>; 3] = Default::default();
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let (slot, list) = (rng.u32(..SLOTS), rng.usize(..3));
            let at = model.iter().position(|model| model.contains(&slot));
            assert_eq!(lists.of(slot), at.map(|at| at as u32));
            match at {
                None => {
                    lists.push(list as u32, slot);
                    model[list].push_back(slot);
                }
                Some(at) => {
                    assert_eq!(lists.remove(slot), Some(at as u32));
                    model[at].retain(|other| *other != slot);
                }
            }
            for (list, model) in model.iter().enumerate() {
                let list = list as u32;
                assert_eq!(lists.slots(list).collect::<VecDeque<_>>(), *model);
                assert_eq!(
                    (lists.len(list) as usize, lists.first(list)),
                    (model.len(), model.front().copied())
                );
            }
        }
    }
}
