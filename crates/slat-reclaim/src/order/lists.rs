//! Two lists, an active and an inactive one, as Linux had before generations: a baseline.
//!
//! Pages are tested one by one, when they reach the end of a list. A page at the end of the
//! inactive list that was used becomes active. The page at the end of the active list becomes
//! inactive whenever the inactive list is the shorter one.
//!
//! *Invariant*: a page is in one list at most. A page that arrives while it is still in a list is
//! only marked with its new list, and moves there when its turn comes.

use super::queue::{Links, Queue};
use super::{AccessedBits, LOOKS, Stretches, Victims};
use crate::work;
use alloc::boxed::Box;
use alloc::vec;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum List {
    Active,
    Inactive,
}

#[derive(Debug)]
pub(crate) struct Lists {
    active: Queue,
    inactive: Queue,
    links: Links,
    /// For each page, the list that it belongs to.
    of: Box<[List]>,
}

impl Lists {
    pub fn new(pages: u32) -> Self {
        Self {
            active: Queue::new(),
            inactive: Queue::new(),
            links: Links::new(pages),
            of: vec![List::Inactive; pages as usize].into_boxed_slice(),
        }
    }

    fn enqueue(&mut self, page: u32, list: List) {
        self.of[page as usize] = list;
        let queue = match list {
            List::Active => &mut self.active,
            List::Inactive => &mut self.inactive,
        };
        self.links.push(queue, page);
    }

    pub fn arrive(&mut self, page: u32, distance: Option<u32>, _here: u32) {
        // If the pages of the active list had been given up instead, this one would still be in
        // memory.
        let in_use = distance.is_some_and(|distance| distance <= self.active.len());
        self.enqueue(page, if in_use { List::Active } else { List::Inactive });
    }

    pub fn put_back(&mut self, page: u32, used: bool) {
        self.enqueue(page, if used { List::Active } else { List::Inactive });
    }

    pub fn victims(
        order: &mut Stretches<'_, Self>,
        want: usize,
        guest: &mut impl AccessedBits,
    ) -> Victims {
        let mut found = Victims::default();
        let mut patience = (2 * u64::from(guest.pages())).min(LOOKS) + want as u64;
        while found.pages.len() < want {
            work::step();
            let mut this = order.get();
            while this.inactive.len() < this.active.len() {
                let Some(page) = this.links.pop(&mut this.active) else { break };
                if guest.is_here(page) {
                    order.pause();
                    guest.was_used(page);
                    order.get().enqueue(page, List::Inactive);
                }
                this = order.get();
            }
            let Some(page) = this.links.pop(&mut this.inactive) else { break };
            if !guest.is_here(page) {
                continue;
            }
            if this.of[page as usize] == List::Active {
                this.enqueue(page, List::Active);
                continue;
            }
            if let Some(until) = guest.new_until(page) {
                found.hold(until);
                this.enqueue(page, List::Inactive);
                if patience == 0 {
                    found.cut = true;
                    break;
                }
                patience -= 1;
                continue;
            }
            if patience > 0 {
                order.pause();
                if guest.was_used(page) {
                    found.kept += 1;
                    patience -= 1;
                    order.get().enqueue(page, List::Active);
                    continue;
                }
            }
            found.pages.push(page);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::tests::{Memory, check_queues};
    use spin::Mutex;

    fn victims(lists: &Mutex<Lists>, want: usize, memory: &mut Memory) -> Victims {
        Lists::victims(&mut Stretches::new(lists), want, memory)
    }

    #[test]
    fn what_is_used_twice_outlives_what_is_used_once() {
        let (mut order, mut memory) = (Lists::new(100), Memory::all_here(100));
        (0..100).for_each(|page| order.arrive(page, None, 100));
        let order = Mutex::new(order);
        memory.uses(0..20);
        let first = victims(&order, 40, &mut memory).pages;
        assert!(first.iter().all(|page| *page >= 20) && first.len() == 40);
    }

    #[test]
    fn some_page_is_given_up_even_if_all_are_used_all_the_time() {
        let (mut order, mut memory) = (Lists::new(100), Memory::all_here(100));
        (0..100).for_each(|page| order.arrive(page, None, 100));
        let order = Mutex::new(order);
        memory.always_used = true;
        let found = victims(&order, 10, &mut memory);
        // A search tests each page about twice before it gives up pages without a test.
        assert_eq!((found.pages.len(), found.kept), (10, 210));
    }

    #[test]
    fn a_page_that_comes_back_soon_is_active() {
        let mut order = Lists::new(10);
        (0..8).for_each(|page| order.put_back(page, true));
        order.arrive(8, Some(8), 8);
        order.arrive(9, Some(10), 8);
        assert_eq!(order.of[8..], [List::Active, List::Inactive]);
        assert_eq!((order.active.len(), order.inactive.len()), (9, 1));
    }

    #[test]
    fn active_pages_turn_inactive_while_that_list_is_the_shorter() {
        let mut order = Lists::new(10);
        (0..10).for_each(|page| order.put_back(page, page < 8));
        let order = Mutex::new(order);
        assert_eq!(victims(&order, 1, &mut Memory::all_here(10)).pages, [8]);
        let order = order.lock();
        assert_eq!((order.active.len(), order.inactive.len()), (5, 4));
    }

    #[test]
    fn a_search_passes_over_all_pages_that_came_just_now() {
        let (mut order, mut memory) = (Lists::new(10), Memory::all_here(10));
        (0..10).for_each(|page| order.arrive(page, None, 10));
        memory.new = true;
        let found = victims(&Mutex::new(order), 1, &mut memory);
        assert!(found.pages.is_empty() && found.held >= 10);
    }

    #[test]
    fn a_page_is_in_one_list_at_most_and_none_that_is_here_is_lost() {
        const PAGES: u32 = 150;
        let (order, mut memory) = (Mutex::new(Lists::new(PAGES)), Memory::all_here(PAGES));
        memory.here.fill(false);
        let mut rng = fastrand::Rng::with_seed(5);
        let mut evicted: std::vec::Vec<u32> = vec![];
        for _ in 0..10_000 {
            let page = rng.u32(..PAGES);
            let index = page as usize;
            match rng.u8(..16) {
                0..5 => memory.here[index] = false,
                5..12 if !evicted.contains(&page) => {
                    memory.here[index] = true;
                    let distance = [None, Some(rng.u32(..PAGES))][rng.usize(..2)];
                    order.lock().arrive(page, distance, PAGES);
                }
                12 => memory.uses(index..(index + 20).min(PAGES as usize)),
                13 => memory.new = rng.u8(..4) == 0,
                14 => evicted.drain(..).for_each(|page| match rng.bool() {
                    true => order.lock().put_back(page, rng.bool()),
                    false => memory.here[page as usize] = false,
                }),
                _ => evicted.extend(victims(&order, rng.usize(1..40), &mut memory).pages),
            }
            let order = order.lock();
            let queues = [&order.active, &order.inactive];
            check_queues(&order.links, queues.into_iter(), &memory, &evicted, false);
        }
    }

    #[test]
    fn a_page_back_before_its_turn_joins_its_list_at_its_turn() {
        let mut order = Lists::new(10);
        (0..10).for_each(|page| order.arrive(page, None, 10));
        order.put_back(3, true);
        let order = Mutex::new(order);
        let found = victims(&order, 9, &mut Memory::all_here(10)).pages;
        assert!(found.len() == 9 && !found.contains(&3));
    }
}
