//! Two lists, an active and an inactive one, as Linux had before generations: a baseline.
//!
//! Pages are asked about one by one, when they reach the end of a list. A page that was used and is at the
//! end of the inactive list becomes active; the end of the active list becomes inactive whenever that is
//! the shorter one.

use super::{Accessed, Victims};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum List {
    None,
    Active,
    Inactive,
}

#[derive(Debug)]
pub(crate) struct Lists {
    active: VecDeque<u32>,
    inactive: VecDeque<u32>,
    /// Of each page: entries of other lists are of an earlier stay.
    of: Box<[List]>,
}

impl Lists {
    pub fn new(pages: u32) -> Self {
        Self {
            active: VecDeque::new(),
            inactive: VecDeque::new(),
            of: vec![List::None; pages as usize].into_boxed_slice(),
        }
    }

    fn enqueue(&mut self, page: u32, list: List) {
        self.of[page as usize] = list;
        match list {
            List::Active => self.active.push_back(page),
            _ => self.inactive.push_back(page),
        }
    }

    pub fn arrive(&mut self, page: u32, distance: Option<u32>, _here: u32) {
        // It would not have been given up, had the active list been given up instead.
        let in_use = distance.is_some_and(|distance| distance as usize <= self.active.len());
        self.enqueue(page, if in_use { List::Active } else { List::Inactive });
    }

    pub fn put_back(&mut self, page: u32, used: bool) {
        self.enqueue(page, if used { List::Active } else { List::Inactive });
    }

    pub fn victims(&mut self, want: usize, guest: &mut impl Accessed) -> Victims {
        let mut found = Victims::default();
        let mut patience = 2 * u64::from(guest.pages()) + want as u64;
        while found.pages.len() < want {
            while self.inactive.len() < self.active.len() {
                let Some(page) = self.active.pop_front() else { break };
                if self.of[page as usize] == List::Active && guest.is_here(page) {
                    guest.was_used(page);
                    self.enqueue(page, List::Inactive);
                }
            }
            let Some(page) = self.inactive.pop_front() else { break };
            if self.of[page as usize] != List::Inactive || !guest.is_here(page) {
                continue;
            }
            if guest.is_new(page) {
                found.held += 1;
                self.enqueue(page, List::Inactive);
                if patience == 0 {
                    break;
                }
                patience -= 1;
                continue;
            }
            if patience > 0 && guest.was_used(page) {
                found.kept += 1;
                patience -= 1;
                self.enqueue(page, List::Active);
                continue;
            }
            self.of[page as usize] = List::None;
            found.pages.push(page);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::tests::Memory;

    #[test]
    fn what_is_used_twice_outlives_what_is_used_once() {
        let (mut order, mut memory) = (Lists::new(100), Memory::all_here(100));
        (0..100).for_each(|page| order.arrive(page, None, 100));
        memory.uses(0..20);
        let first = order.victims(40, &mut memory).pages;
        assert!(first.iter().all(|page| *page >= 20) && first.len() == 40);
    }

    #[test]
    fn something_is_given_up_even_if_all_pages_are_used_all_the_time() {
        let (mut order, mut memory) = (Lists::new(100), Memory::all_here(100));
        (0..100).for_each(|page| order.arrive(page, None, 100));
        memory.always_used = true;
        assert_eq!(order.victims(10, &mut memory).pages.len(), 10);
    }

    #[test]
    fn a_page_that_comes_back_soon_is_active() {
        let mut order = Lists::new(10);
        (0..8).for_each(|page| order.put_back(page, true));
        order.arrive(8, Some(8), 8);
        order.arrive(9, Some(10), 8);
        assert_eq!((order.active.len(), order.inactive.len()), (9, 1));
    }
}
