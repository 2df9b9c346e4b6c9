//! A fault on a page that is missing, while a thread brings the page.

use crate::fixture::*;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use slat::{Access, BreakBeforeMake, Gpa, PageSize};
use slat_guest::{
    AsyncFault, Backing, Hva, HvaRange, InvalidationInProgress, Outcome, PostCopy, Retry,
};

#[test]
fn no_arrival_is_lost_between_asking_and_waiting() {
    bounded("fault on a late page || arrival", 5, || {
        let (world, ram) = (World::new(BreakBeforeMake::Never), Ram::that_goes(PAGE));
        let gone = ram.gone.as_ref().unwrap();
        gone.store(1, Ordering::SeqCst);
        let guest = guest(world, ram, config());
        worker(guest).set_memslot(memslot(false)).unwrap();
        let faults = SendCell(vcpu(guest));
        let thread = spawn(move || {
            let mut vcpu = faults.get();
            let outcome = vcpu.fault(Gpa(0), Access::Read);
            SendCell((vcpu, outcome))
        });
        gone.store(0, Ordering::SeqCst);
        let told = guest.arrived(HvaRange { start: Hva(HOST), bytes: PAGE });
        let (mut vcpu, outcome) = thread.join().unwrap().get();
        let waits: Vec<AsyncFault> = vcpu.waiting().collect();
        match outcome {
            Outcome::Mapped(_) => assert!(waits.is_empty()),
            Outcome::Retry(Retry::Absent(Some(arrival))) => {
                assert_eq!((told, &waits[..]), (1, &[arrival][..]), "it sleeps for ever");
                assert_eq!(vcpu.ready(), Some(arrival));
            }
            outcome => panic!("{outcome:?}"),
        }
    });
}

/// A page that comes late, whose memory is one word; nothing maps it.
type Late = PostCopy<&'static Ram>;

#[inline(never)]
fn late() -> &'static Late {
    let page = PageSize::from_bytes(PAGE).unwrap();
    Box::leak(Box::new(PostCopy::new(Ram::new(PAGE), LATE, page, page).unwrap()))
}

const LATE: HvaRange = HvaRange { start: Hva(HOST), bytes: PAGE };

/// A thread fetches the page, whose content is `source`, and places it in `memory`.
#[inline(never)]
fn fetch(worker: &mut TheWorker, late: &Late, source: &AtomicU64, memory: &AtomicU64) {
    let Some(fetch) = late.next(1) else { return };
    let content = source.load(Ordering::SeqCst);
    fetch.place(|_| memory.store(content, Ordering::SeqCst));
    fetch.arrived(worker);
}

/// The words of the content and of the memory, the taking of the memory, and the thread.
type FetchInProgress = (Words, InvalidationInProgress<'static>, Thread<SendCell<TheWorker>>);
type Words = (Arc<AtomicU64>, Arc<AtomicU64>);

/// Begins a thread that fetches the page, whose content is `content`, while the memory is taken
/// from the guest.
#[inline(never)]
fn fetching(late: &'static Late, content: u64) -> FetchInProgress {
    let guest = guest(World::new(BreakBeforeMake::Never), Ram::new(PAGE), config());
    let words = (Arc::new(AtomicU64::new(content)), Arc::new(AtomicU64::new(0)));
    let (source, memory) = words.clone();
    let mut fetches = worker(guest);
    let taken = fetches.invalidate(LATE, |_| {});
    let fetches = SendCell(fetches);
    let thread = spawn(move || {
        let mut worker = fetches.get();
        fetch(&mut worker, late, &source, &memory);
        SendCell(worker)
    });
    (words, taken, thread)
}

#[test]
fn a_fetched_page_never_overwrites_a_discarded_one() {
    bounded("fetch of a page || discard of it, then a write", 3, || {
        let late = late();
        let (words, taken, thread) = fetching(late, 7);
        late.discard(LATE, &taken);
        words.1.store(0, Ordering::SeqCst);
        drop(taken);
        assert!(late.page(LATE.start, Access::Read).is_ok(), "it is here, with zeroes");
        words.1.store(1, Ordering::SeqCst);
        drop(thread.join().unwrap());
        assert_eq!(words.1.load(Ordering::SeqCst), 1, "the guest's write is lost");
        assert!(late.next(1).is_none());
        assert_eq!(late.counts().missing, 0);
    });
}

#[test]
fn a_page_that_was_lost_holds_what_a_later_fetch_brings() {
    bounded("fetch of a page || loss of it", 3, || {
        let late = late();
        let (words, taken, thread) = fetching(late, 1);
        // From here on the source has the snapshot.
        words.0.store(2, Ordering::SeqCst);
        late.lose(LATE, &taken);
        drop(taken);
        let asked = late.page(LATE.start, Access::Read).is_err();
        let mut worker = thread.join().unwrap().get();
        if late.page(LATE.start, Access::Read).is_err() {
            assert!(late.next(0).is_some_and(|fetch| fetch.asked()), "nobody fetches it: {asked}");
            fetch(&mut worker, late, &words.0, &words.1);
        }
        assert_eq!(words.1.load(Ordering::SeqCst), 2, "what it was before the loss");
        assert_eq!(late.counts().missing, 0);
    });
}
