//! CPUs that enter and leave a guest during invalidations: no CPU uses an entry after the
//! invalidation returned.
//!
//! A CPU is a thread with one TLB entry, which it loads from a table of one entry. The entry holds
//! the number of the translation; no CPU may use a number below `invalid` any more. Models are
//! exhaustive.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::{spawn, yield_now};
use slat::{Broken, GuestCpus, RemoteFlush};

struct Guest {
    guest_cpus: GuestCpus<2>,
    /// The table, which hardware reads without ordering.
    table: AtomicU64,
    /// Translations below this number were invalidated.
    invalid: AtomicU64,
}

/// The TLB entry that a CPU holds of the guest.
struct Tlb(Option<u64>);

impl Tlb {
    /// Walks, if the TLB is empty, and uses the entry.
    fn access(&mut self, guest: &Guest) {
        let used = *self.0.get_or_insert_with(|| guest.table.load(Ordering::Relaxed));
        let invalid = guest.invalid.load(Ordering::Relaxed);
        assert!(used >= invalid, "a CPU uses {used} after {invalid} was made valid instead");
    }
}

impl Guest {
    fn new() -> Arc<Self> {
        let (table, invalid) = (AtomicU64::new(1), AtomicU64::new(0));
        Arc::new(Self { guest_cpus: GuestCpus::new(), table, invalid })
    }

    /// Changes the translation, invalidates, and publishes that.
    fn change(&self, to: u64, announce: impl FnOnce(&GuestCpus<2>) -> RemoteFlush<'_, 2>) {
        self.table.store(to, Ordering::Relaxed);
        let announced = announce(&self.guest_cpus);
        // CPUs leave by themselves here: an interrupt only makes them leave earlier.
        while !announced.is_done() {
            yield_now();
        }
        // Unmapped memory may have another owner from here on.
        self.invalid.store(to, Ordering::Relaxed);
    }
}

fn announce(guest_cpus: &GuestCpus<2>) -> RemoteFlush<'_, 2> {
    guest_cpus.announce()
}

/// A CPU that holds an old entry enters, uses it and leaves, `times` times; `other` runs meanwhile.
fn beside(times: usize, other: impl FnOnce(&Guest) + Send + Sync + Copy + 'static) {
    loom::model(move || {
        let guest = Guest::new();
        let mut tlb = Tlb(None);
        guest.guest_cpus.enter(0, || ()).unwrap();
        tlb.access(&guest);
        guest.guest_cpus.leave(0).unwrap();
        let theirs = guest.clone();
        let others = spawn(move || other(&theirs));
        for _ in 0..times {
            guest.guest_cpus.enter(0, || tlb.0 = None).unwrap();
            tlb.access(&guest);
            guest.guest_cpus.leave(0).unwrap();
        }
        others.join().unwrap();
        guest.guest_cpus.enter(0, || tlb.0 = None).unwrap();
        tlb.access(&guest);
    });
}

#[test]
fn a_cpu_that_enters_during_an_invalidation_uses_no_stale_entry_after_it_returned() {
    beside(1, |guest| guest.change(2, announce));
}

#[test]
fn neither_does_one_that_enters_twice() {
    beside(2, |guest| guest.change(2, announce));
}

#[test]
fn a_cpu_that_enters_during_two_invalidations_uses_no_stale_entry() {
    beside(1, |guest| {
        guest.change(2, announce);
        guest.change(3, announce);
    });
}

/// A CPU that is inside holds an old entry; `serves` runs at any moment, as its interrupt does. The
/// CPU may use the entry until it has invalidated, and may walk as soon as it has. Meanwhile
/// another thread changes the translation several times, and waits once for all of them.
fn inside(changes: &'static [u64], serves: impl Fn(&Guest, &mut Tlb) + Send + Sync + 'static) {
    loom::model(move || {
        let guest = Guest::new();
        let mut tlb = Tlb(None);
        guest.guest_cpus.enter(0, || ()).unwrap();
        tlb.access(&guest);
        let theirs = guest.clone();
        let others = spawn(move || {
            let (last, before) = changes.split_last().unwrap();
            for &to in before {
                theirs.table.store(to, Ordering::Relaxed);
                let _ = theirs.guest_cpus.announce();
            }
            theirs.change(*last, announce);
        });
        serves(&guest, &mut tlb);
        tlb.access(&guest);
        guest.guest_cpus.leave(0).unwrap();
        others.join().unwrap();
    });
}

impl Tlb {
    fn forget(&mut self, guest: &Guest) {
        self.access(guest);
        self.0 = None;
        self.access(guest);
    }
}

#[test]
fn a_cpu_that_serves_an_interrupt_goes_on_with_new_entries() {
    inside(&[2], |guest, tlb| {
        guest.guest_cpus.serve(0, || tlb.forget(guest)).unwrap();
    });
}

#[test]
fn nor_does_it_take_a_later_invalidation_for_served() {
    inside(&[2, 3], |guest, tlb| {
        guest.guest_cpus.serve(0, || tlb.forget(guest)).unwrap();
    });
}

/// The other CPU has never run the guest: its group is not known yet.
#[test]
fn a_cpu_that_enters_for_the_first_time_is_seen_or_sees() {
    loom::model(|| {
        let guest = Guest::new();
        // The CPU ran another guest, whose root was at the same address.
        let mut tlb = Tlb(Some(1));
        let theirs = guest.clone();
        let others = spawn(move || theirs.change(2, announce));
        guest.guest_cpus.enter(1, || tlb.0 = None).unwrap();
        tlb.access(&guest);
        guest.guest_cpus.leave(1).unwrap();
        others.join().unwrap();
    });
}

#[test]
fn two_that_invalidate_at_once_are_both_waited_for() {
    loom::model(|| {
        let guest = Guest::new();
        let mut tlb = Tlb(None);
        guest.guest_cpus.enter(0, || ()).unwrap();
        tlb.access(&guest);
        let theirs = guest.clone();
        let others = [2, 3].map(|to| {
            let guest = theirs.clone();
            spawn(move || {
                guest.table.fetch_max(to, Ordering::Relaxed);
                // An invalidation that is not done would wait for ever.
                if guest.guest_cpus.announce().is_done() {
                    guest.invalid.fetch_max(to, Ordering::Relaxed);
                }
            })
        });
        guest.guest_cpus.serve(0, || tlb.0 = None).unwrap();
        tlb.access(&guest);
        guest.guest_cpus.leave(0).unwrap();
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// As [`beside`], with a CPU that enters in another way.
fn enters(broken: Broken) {
    loom::model(move || {
        let guest = Guest::new();
        let mut tlb = Tlb(None);
        guest.guest_cpus.enter(0, || ()).unwrap();
        tlb.access(&guest);
        guest.guest_cpus.leave(0).unwrap();
        let theirs = guest.clone();
        let others = spawn(move || theirs.change(2, announce));
        guest.guest_cpus.enter_broken(0, broken, || tlb.0 = None);
        tlb.access(&guest);
        guest.guest_cpus.leave(0).unwrap();
        others.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn a_cpu_that_reads_the_generation_before_it_is_inside_is_noticed() {
    enters(Broken::ReadsFirst);
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn a_cpu_without_a_fence_is_noticed() {
    enters(Broken::NoFence);
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn a_cpu_that_says_it_has_forgotten_before_it_has_is_noticed() {
    inside(&[2], |guest, tlb| {
        guest.guest_cpus.enter_broken(0, Broken::SaysSoFirst, || tlb.forget(guest));
    });
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn a_cpu_that_takes_a_later_generation_for_forgotten_is_noticed() {
    inside(&[2, 3], |guest, tlb| {
        guest.guest_cpus.enter_broken(0, Broken::ReadsAgain, || tlb.forget(guest));
    });
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn an_invalidation_without_a_fence_is_noticed() {
    beside(1, |guest| guest.change(2, |guest_cpus| guest_cpus.announce_broken()));
}

#[test]
#[should_panic(expected = "a CPU uses")]
fn an_invalidation_that_waits_for_no_cpu_is_noticed() {
    beside(1, |guest| {
        guest.table.store(2, Ordering::Relaxed);
        let _ = guest.guest_cpus.announce();
        guest.invalid.store(2, Ordering::Relaxed);
    });
}
