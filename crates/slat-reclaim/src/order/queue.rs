//! Queues of pages: each page is in one at most.
//!
//! A queue is linked through one array, with one entry per page, that all queues of an order share.
//! So a page that is in a queue cannot be put into another, all queues together never have more
//! entries than the guest has pages, and nothing is allocated after the start.

use alloc::boxed::Box;
use alloc::vec;

/// The page is in no queue.
const ABSENT: u32 = u32::MAX;
/// No page follows.
const END: u32 = u32::MAX - 1;

/// For each page, the one behind it.
#[derive(Debug)]
pub(super) struct Links(Box<[u32]>);

/// The ends of a queue.
#[derive(Debug)]
pub(super) struct Queue {
    first: u32,
    last: u32,
    len: u32,
}

impl Queue {
    pub const fn new() -> Self {
        Self { first: END, last: END, len: 0 }
    }

    pub const fn len(&self) -> u32 {
        self.len
    }

    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Links {
    pub fn new(pages: u32) -> Self {
        Self(vec![ABSENT; pages as usize].into_boxed_slice())
    }

    /// Puts `page` at the end of `queue`. If it is in a queue already, leaves it there, and returns
    /// false.
    pub fn push(&mut self, queue: &mut Queue, page: u32) -> bool {
        let link = &mut self.0[page as usize];
        if *link != ABSENT {
            return false;
        }
        *link = END;
        match queue.len {
            0 => queue.first = page,
            _ => self.0[queue.last as usize] = page,
        }
        queue.last = page;
        queue.len += 1;
        true
    }

    /// Removes the first page of `queue`, and returns it.
    pub fn pop(&mut self, queue: &mut Queue) -> Option<u32> {
        queue.len = queue.len.checked_sub(1)?;
        let page = queue.first;
        queue.first = core::mem::replace(&mut self.0[page as usize], ABSENT);
        Some(page)
    }

    /// Puts all pages of `ahead` before those of `queue`.
    pub fn prepend(&mut self, ahead: &Queue, queue: &mut Queue) {
        if ahead.len == 0 {
            return;
        }
        match queue.len {
            0 => queue.last = ahead.last,
            _ => self.0[ahead.last as usize] = queue.first,
        }
        queue.first = ahead.first;
        queue.len += ahead.len;
    }

    #[cfg(test)]
    pub fn is_queued(&self, page: u32) -> bool {
        self.0[page as usize] != ABSENT
    }

    /// The pages of `queue`, in their order.
    #[cfg(test)]
    pub fn pages(&self, queue: &Queue) -> std::vec::Vec<u32> {
        let first = (queue.len != 0).then_some(queue.first);
        let next = |page: &u32| Some(self.0[*page as usize]).filter(|next| *next != END);
        std::iter::successors(first, next).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn queues_are_those_of_a_model_and_no_page_is_in_two() {
        const PAGES: u32 = 40;
        let mut rng = fastrand::Rng::with_seed(1);
        let mut links = Links::new(PAGES);
        let mut queues = [const { Queue::new() }; 3];
        let mut model: [VecDeque<u32>; 3] = Default::default();
        for _ in 0..50_000 {
            let (which, page) = (rng.usize(..3), rng.u32(..PAGES));
            match rng.u8(..16) {
                0 => {
                    let other = (which + 1) % 3;
                    let ahead = core::mem::replace(&mut queues[which], Queue::new());
                    links.prepend(&ahead, &mut queues[other]);
                    let mut pages = core::mem::take(&mut model[which]);
                    pages.append(&mut model[other]);
                    model[other] = pages;
                }
                1..8 => assert_eq!(links.pop(&mut queues[which]), model[which].pop_front()),
                _ => {
                    let queued = model.iter().any(|queue| queue.contains(&page));
                    assert_eq!(links.push(&mut queues[which], page), !queued);
                    if !queued {
                        model[which].push_back(page);
                    }
                }
            }
            for (queue, model) in queues.iter().zip(&model) {
                assert_eq!(VecDeque::from(links.pages(queue)), *model);
                assert_eq!(
                    (queue.len() as usize, queue.is_empty()),
                    (model.len(), model.is_empty())
                );
            }
            let queued = (0..PAGES).filter(|page| links.is_queued(*page)).count();
            assert_eq!(queued, model.iter().map(VecDeque::len).sum::<usize>());
        }
    }
}
