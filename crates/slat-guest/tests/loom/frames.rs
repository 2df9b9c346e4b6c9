//! Frames run short while guests copy pages that they share.

use crate::fixture::*;
use loom::sync::atomic::{AtomicU64, Ordering};
use slat::{Access, BreakBeforeMake, Hpa, PageSize};
use slat_guest::{Backing, Cow, Frames, Hva, HvaRange, NoPage, SharedFrames};

/// The number of reports that a frame is free again.
struct Told(AtomicU64);

impl Frames for Told {
    fn hpa(&self, frame: u32) -> Hpa {
        Hpa(OLD + u64::from(frame) * PAGE)
    }

    fn copy(&self, _from: u32, _to: u32) {}

    fn zero(&self, _frame: u32) {}

    fn freed(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    fn wait(&self) {
        loom::thread::yield_now();
    }
}

/// A guest and its fork share a page, with `frames` frames. Each writes; or, if `ends`, the fork
/// ends instead.
fn short(frames: u32, ends: bool) {
    let memory = Told(AtomicU64::new(0));
    let page = PageSize::from_bytes(PAGE).unwrap();
    let shared: &SharedFrames<Told> = Box::leak(Box::new(SharedFrames::new(memory, page, frames)));
    let host = Hva(HOST);
    let guests = Cow::new(shared, HvaRange { start: host, bytes: PAGE }).unwrap();
    guests.page(host, Access::Write).unwrap();
    let guest = guest(World::new(BreakBeforeMake::Never), Ram::new(PAGE), config());
    let forks = guests.fork(&mut worker(guest)).unwrap();
    let thread = spawn(move || {
        if ends {
            return None;
        }
        let answer = forks.page(host, Access::Write);
        Some((answer, forks))
    });
    let mut answers = vec![(guests.page(host, Access::Write), guests)];
    answers.extend(thread.join().unwrap());
    for (answer, memory) in &answers {
        match answer {
            Ok(page) => assert!(page.write),
            Err(NoPage::Absent) => {
                assert_ne!(shared.memory().0.load(Ordering::Acquire), 0, "nobody tells it");
                assert!(memory.page(host, Access::Write).is_ok_and(|page| page.write));
            }
            Err(NoPage::Never) => panic!("there will be a frame"),
        }
    }
    if let [(_, one), (_, other)] = &answers[..] {
        assert_ne!(one.frame(host), other.frame(host), "each has its own");
    }
}

#[test]
fn a_thread_that_finds_no_frame_is_notified_of_a_free_one_or_needs_none() {
    bounded("two copy a page, one frame is free", 3, || short(2, false));
    bounded("one copies a page, no frame is free, and the other ends", 3, || short(1, true));
}
