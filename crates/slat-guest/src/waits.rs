//! Pages that vCPUs wait for, and how the vCPUs learn that one has arrived.
//!
//! # Protocol
//! A vCPU has a few places. Each is a word: free, or a page of the host that is *waited for* or
//! *ready*.
//! 1. Only the vCPU's own thread takes a place and frees it.
//! 2. A fault whose answer is *not yet* takes a place, then asks the backing once more, and only
//!    then reports that it waits.
//! 3. A thread that changes the backing's answer does so first, then looks through the places, and
//!    makes the page's places *ready*.
//!
//! *Invariant*: no arrival is lost between asking and waiting. The fault takes a place and then
//! asks; the other thread changes the answer and then looks (`agreed`). So the fault gets the page,
//! or the other thread finds the place. A place is for one page at a time, and its word has the
//! page, so no other vCPU is woken. *Ready* means that the vCPU has to ask again: the page may have
//! gone since.

use crate::backing::{Hva, HvaRange};
use crate::memslots::spec::MemslotId;
use crate::sync::{AtomicU64, Ordering, agreed};
use alloc::boxed::Box;
use slat::Gpa;

/// The number of pages that a vCPU can wait for at once.
#[cfg(not(loom))]
pub(crate) const PLACES: usize = 16;
#[cfg(loom)]
pub(crate) const PLACES: usize = 1;

const FREE: u64 = 0;
const WAITED_FOR: u64 = 1;
const READY: u64 = 2;
const STATE: u64 = 3;

/// A page that a vCPU waits for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AsyncFault {
    /// The arrival's number, unique among the vCPU's last 2^32 waits; never 0.
    pub token: u32,
    /// The memslot that has the page.
    pub memslot: MemslotId,
    /// The page's guest address.
    pub gpa: Gpa,
    /// The page's address in the backing.
    pub host: Hva,
}

/// The pages that the vCPUs of a guest wait for.
#[derive(Debug)]
pub(crate) struct Waits {
    words: Box<[AtomicU64]>,
    /// The number of places that are not free.
    taken: AtomicU64,
}

impl Waits {
    pub fn new(vcpus: u16) -> Self {
        let words = (0..usize::from(vcpus) * PLACES).map(|_| AtomicU64::new(FREE)).collect();
        Self { words, taken: AtomicU64::new(0) }
    }

    fn of(&self, vcpu: u16) -> &[AtomicU64] {
        &self.words[usize::from(vcpu) * PLACES..][..PLACES]
    }

    /// Makes the vCPU wait for `page` at `place`. The vCPU asks the backing after this.
    fn begin(&self, vcpu: u16, place: usize, page: Hva) {
        let word = &self.of(vcpu)[place];
        if word.swap(page.0 | WAITED_FOR, Ordering::AcqRel) == FREE {
            self.taken.fetch_add(1, Ordering::AcqRel);
        }
        agreed();
    }

    fn end(&self, vcpu: u16, place: usize) {
        if self.of(vcpu)[place].swap(FREE, Ordering::AcqRel) != FREE {
            self.taken.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn is_ready(&self, vcpu: u16, place: usize) -> bool {
        self.of(vcpu)[place].load(Ordering::Acquire) & STATE == READY
    }

    /// Makes the waits for `host` ready, because the backing's answer for it has changed. Calls
    /// `told` with each vCPU that had such a wait, once.
    pub fn wake(&self, host: &HvaRange, mut told: impl FnMut(u16)) {
        agreed();
        if self.taken.load(Ordering::Acquire) == 0 {
            return;
        }
        for (vcpu, places) in self.words.chunks(PLACES).enumerate() {
            let mut any = false;
            for place in places {
                let now = place.load(Ordering::Acquire);
                let page = now & !STATE;
                // If the word has changed since, it is for another page, or for a wait that begins
                // only now and asks the backing after this.
                any |= now & STATE == WAITED_FOR
                    && (host.start.0..host.end().0).contains(&page)
                    && place
                        .compare_exchange(now, page | READY, Ordering::AcqRel, Ordering::Acquire)
                        .is_ok();
            }
            if any {
                told(vcpu as u16);
            }
        }
    }
}

/// The places of one vCPU, as its own thread sees them.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// The wait at each place, and when it began.
    waits: [Option<(AsyncFault, u64)>; PLACES],
    last: u32,
    /// The number of places that are taken.
    taken: u32,
}

impl Places {
    /// Begins to wait for a page; returns the arrival, and whether the vCPU has to ask the backing
    /// once more. Returns `None` if all places are taken.
    pub fn begin(
        &mut self,
        waits: &Waits,
        vcpu: u16,
        (memslot, gpa, host): (MemslotId, Gpa, Hva),
        now: u64,
    ) -> Option<(AsyncFault, bool)> {
        let same = |wait: &Option<(AsyncFault, u64)>| {
            wait.is_some_and(|(wait, _)| {
                (wait.memslot, wait.gpa, wait.host) == (memslot, gpa, host)
            })
        };
        if let Some(place) = self.waits.iter().position(same) {
            let (arrival, _) = self.waits[place]?;
            let again = waits.is_ready(vcpu, place);
            if again {
                waits.begin(vcpu, place, host);
            }
            return Some((arrival, again));
        }
        let place = self.waits.iter().position(Option::is_none)?;
        self.last = self.last.wrapping_add(1).max(1);
        let arrival = AsyncFault { token: self.last, memslot, gpa, host };
        self.waits[place] = Some((arrival, now));
        self.taken += 1;
        waits.begin(vcpu, place, host);
        Some((arrival, true))
    }

    /// Ends the first wait that `wanted` accepts; returns its arrival, and when it began.
    pub fn end(
        &mut self,
        waits: &Waits,
        vcpu: u16,
        mut wanted: impl FnMut(&AsyncFault, bool) -> bool,
    ) -> Option<(AsyncFault, u64)> {
        let place = self.waits.iter().enumerate().position(|(place, wait)| {
            wait.is_some_and(|(wait, _)| wanted(&wait, waits.is_ready(vcpu, place)))
        })?;
        waits.end(vcpu, place);
        self.taken -= 1;
        self.waits[place].take()
    }

    #[inline]
    pub const fn any(&self) -> bool {
        self.taken != 0
    }

    pub fn is_ready(&self, waits: &Waits, vcpu: u16, arrival: &AsyncFault) -> bool {
        let at = |wait: &Option<(AsyncFault, u64)>| wait.is_some_and(|(wait, _)| wait == *arrival);
        let place = self.waits.iter().position(at);
        place.is_none_or(|place| waits.is_ready(vcpu, place))
    }

    pub fn all(&self) -> impl Iterator<Item = AsyncFault> + '_ {
        self.waits.iter().flatten().map(|(wait, _)| *wait)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    const PAGE: u64 = 0x1000;

    fn what(page: u64) -> (MemslotId, Gpa, Hva) {
        (MemslotId(1), Gpa(page * PAGE), Hva((page + 100) * PAGE))
    }

    fn told(waits: &Waits, page: u64, pages: u64) -> Vec<u16> {
        let mut all = Vec::new();
        let host = HvaRange { start: what(page).2, bytes: pages * PAGE };
        waits.wake(&host, |vcpu| all.push(vcpu));
        all
    }

    #[test]
    fn only_vcpus_that_wait_for_a_page_are_notified_and_once() {
        let waits = Waits::new(3);
        let mut places: [Places; 3] = Default::default();
        for (vcpu, page) in [(0, 5), (1, 6), (2, 5)] {
            let (_, asks) = places[vcpu as usize].begin(&waits, vcpu, what(page), 0).unwrap();
            assert!(asks);
        }
        assert_eq!(told(&waits, 4, 1), []);
        assert_eq!(told(&waits, 5, 1), [0, 2]);
        assert_eq!(told(&waits, 5, 1), []);
        assert_eq!(told(&waits, 0, 100), [1]);
        for (vcpu, place) in places.iter_mut().enumerate() {
            assert!(place.end(&waits, vcpu as u16, |_, ready| ready).is_some());
            assert!(!place.any());
        }
        assert_eq!(waits.taken.load(Ordering::Relaxed), 0);
        assert_eq!(told(&waits, 0, 100), []);
    }

    #[test]
    fn a_vcpu_waits_for_as_many_pages_as_it_has_places() {
        let (waits, mut places) = (Waits::new(1), Places::default());
        let mut tokens: Vec<u32> = (0..PLACES as u64)
            .map(|page| places.begin(&waits, 0, what(page), page).unwrap().0.token)
            .collect();
        assert_eq!(places.begin(&waits, 0, what(99), 0), None);
        // A vCPU that already waits for the page goes on waiting, and does not ask again.
        assert_eq!(
            places.begin(&waits, 0, what(3), 9).unwrap(),
            (places.all().nth(3).unwrap(), false)
        );
        tokens.dedup();
        assert_eq!(tokens.len(), PLACES);
        assert_eq!(told(&waits, 3, 1), [0]);
        assert_eq!(places.begin(&waits, 0, what(99), 0), None, "until it has been taken");
        let (arrival, since) = places.end(&waits, 0, |_, ready| ready).unwrap();
        assert_eq!((arrival.gpa, since), (Gpa(3 * PAGE), 3));
        assert!(places.begin(&waits, 0, what(99), 0).is_some());
    }

    #[test]
    fn a_page_that_came_and_went_is_waited_for_anew() {
        let (waits, mut places) = (Waits::new(1), Places::default());
        let (first, _) = places.begin(&waits, 0, what(1), 0).unwrap();
        assert_eq!(told(&waits, 1, 1), [0]);
        assert!(places.is_ready(&waits, 0, &first));
        assert_eq!(places.begin(&waits, 0, what(1), 0), Some((first, true)));
        assert!(!places.is_ready(&waits, 0, &first));
        assert_eq!(told(&waits, 1, 1), [0]);
    }
}
