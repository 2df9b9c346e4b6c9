//! CPUs that enter and leave a guest, beside invalidations: no CPU uses an entry after the
//! invalidation returned.
//!
//! A CPU is a thread with one TLB entry, which it loads from a table of one slot. The slot holds
//! the number of the translation; what is below `invalid` must not be used any more. Models are
//! exhaustive.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::{spawn, yield_now};
use slat::{Announced, Broken, Ran};

struct Guest {
    ran: Ran<2>,
    /// As hardware reads it: in no order.
    table: AtomicU64,
    /// Translations below it were invalidated.
    invalid: AtomicU64,
}

/// What a CPU holds of the guest.
struct Tlb(Option<u64>);

impl Tlb {
    /// It walks, if it holds nothing, and uses the entry.
    fn access(&mut self, guest: &Guest) {
        let used = *self.0.get_or_insert_with(|| guest.table.load(Ordering::Relaxed));
        let invalid = guest.invalid.load(Ordering::Relaxed);
        assert!(used >= invalid, "a CPU uses {used} after {invalid} was made valid instead");
    }
}

impl Guest {
    fn new() -> Arc<Self> {
        let (table, invalid) = (AtomicU64::new(1), AtomicU64::new(0));
        Arc::new(Self { ran: Ran::new(), table, invalid })
    }

    /// Changes the translation, invalidates, and says so.
    fn change(&self, to: u64, announce: impl FnOnce(&Ran<2>) -> Announced<'_, 2>) {
        self.table.store(to, Ordering::Relaxed);
        let announced = announce(&self.ran);
        // CPUs leave by themselves here: an interrupt only hurries them.
        while !announced.is_done() {
            yield_now();
        }
        // What is unmapped may be another's from here on.
        self.invalid.store(to, Ordering::Relaxed);
    }
}

fn announce(ran: &Ran<2>) -> Announced<'_, 2> {
    ran.announce()
}

/// A CPU that holds an old entry enters, uses it and leaves, so often; `other` meanwhile.
fn beside(times: usize, other: impl FnOnce(&Guest) + Send + Sync + Copy + 'static) {
    loom::model(move || {
        let guest = Guest::new();
        let mut tlb = Tlb(None);
        guest.ran.enter(0, || ()).unwrap();
        tlb.access(&guest);
        guest.ran.leave(0).unwrap();
        let theirs = guest.clone();
        let others = spawn(move || other(&theirs));
        for _ in 0..times {
            guest.ran.enter(0, || tlb.0 = None).unwrap();
            tlb.access(&guest);
            guest.ran.leave(0).unwrap();
        }
        others.join().unwrap();
        guest.ran.enter(0, || tlb.0 = None).unwrap();
        tlb.access(&guest);
    });
}

#[test]
fn a_cpu_that_enters_beside_an_invalidation_uses_nothing_old_after_it_returned() {
    beside(1, |guest| guest.change(2, announce));
}

#[test]
fn neither_does_one_that_enters_twice() {
    beside(2, |guest| guest.change(2, announce));
}

#[test]
fn nor_beside_two_invalidations_one_after_the_other() {
    beside(1, |guest| {
        guest.change(2, announce);
        guest.change(3, announce);
    });
}

/// The interrupt may come at any moment: the CPU serves it between two accesses.
#[test]
fn a_cpu_that_serves_an_interrupt_goes_on_with_new_entries() {
    loom::model(|| {
        let guest = Guest::new();
        let mut tlb = Tlb(None);
        guest.ran.enter(0, || ()).unwrap();
        tlb.access(&guest);
        let theirs = guest.clone();
        let others = spawn(move || theirs.change(2, announce));
        guest.ran.serve(0, || tlb.0 = None).unwrap();
        tlb.access(&guest);
        guest.ran.leave(0).unwrap();
        others.join().unwrap();
    });
}

/// The other CPU has never run the guest: its group is not known yet.
#[test]
fn a_cpu_that_enters_for_the_first_time_is_seen_or_sees() {
    loom::model(|| {
        let guest = Guest::new();
        // It ran another guest, whose root lay there.
        let mut tlb = Tlb(Some(1));
        let theirs = guest.clone();
        let others = spawn(move || theirs.change(2, announce));
        guest.ran.enter(1, || tlb.0 = None).unwrap();
        tlb.access(&guest);
        guest.ran.leave(1).unwrap();
        others.join().unwrap();
    });
}

#[test]
fn two_that_invalidate_at_once_are_both_waited_for() {
    loom::model(|| {
        let guest = Guest::new();
        let mut tlb = Tlb(None);
        guest.ran.enter(0, || ()).unwrap();
        tlb.access(&guest);
        let theirs = guest.clone();
        let others = spawn(move || {
            drop_done(&theirs, theirs.ran.announce());
        });
        guest.ran.serve(0, || tlb.0 = None).unwrap();
        guest.ran.leave(0).unwrap();
        guest.change(2, announce);
        guest.ran.enter(0, || tlb.0 = None).unwrap();
        tlb.access(&guest);
        guest.ran.leave(0).unwrap();
        others.join().unwrap();
    });
}

fn drop_done(_: &Guest, announced: Announced<'_, 2>) {
    while !announced.is_done() {
        yield_now();
    }
}

/// As [`beside`], with an order of steps that is wrong.
fn breaks(broken: Broken) {
    loom::model(move || {
        let guest = Guest::new();
        let mut tlb = Tlb(None);
        guest.ran.enter(0, || ()).unwrap();
        tlb.access(&guest);
        guest.ran.leave(0).unwrap();
        let theirs = guest.clone();
        let others = spawn(move || {
            theirs.change(2, announce);
            theirs.change(3, announce);
        });
        guest.ran.enter_broken(0, broken, || tlb.0 = None);
        tlb.access(&guest);
        guest.ran.leave(0).unwrap();
        guest.ran.enter(0, || tlb.0 = None).unwrap();
        tlb.access(&guest);
        guest.ran.leave(0).unwrap();
        others.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn a_cpu_that_reads_the_generation_before_it_is_inside_is_noticed() {
    breaks(Broken::ReadsFirst);
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn a_cpu_without_a_fence_is_noticed() {
    breaks(Broken::NoFence);
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn a_cpu_that_says_it_has_forgotten_before_it_has_is_noticed() {
    breaks(Broken::SaysSoFirst);
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn a_cpu_that_takes_a_later_generation_for_forgotten_is_noticed() {
    breaks(Broken::ReadsAgain);
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn an_invalidation_without_a_fence_is_noticed() {
    beside(1, |guest| guest.change(2, |ran| ran.announce_broken()));
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn an_invalidation_that_waits_for_nobody_is_noticed() {
    beside(1, |guest| {
        guest.table.store(2, Ordering::Relaxed);
        let _ = guest.ran.announce();
        guest.invalid.store(2, Ordering::Relaxed);
    });
}
