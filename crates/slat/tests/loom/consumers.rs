//! Consumers of dirty state, concurrent with each other, with a CPU that writes through its TLB,
//! and with all operations that change leaves.

use crate::guest::*;
use crate::hardware::{Use, Walked};
use crate::machine::*;
use core::ops::Range;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::*;

impl<F: Walked> On<F> {
    /// Adds a log and a pager, with the marks that every format has.
    fn consumed(self) -> (Self, [Consumer; 2]) {
        // SAFETY: no thread was started yet, and no other code borrows the tables.
        let tables = unsafe { self.exclusive() };
        let marks = [Software::A, Software::B];
        (self, marks.map(|mark| tables.add_consumer(mark).unwrap()))
    }

    /// Takes the pages written for `consumer`, and copies them: returns which pages, and when.
    fn take(&self, consumer: Consumer, at: Range<u64>) -> (u64, usize) {
        let mut bitmap = [0];
        let done = self.inside().guard.harvest_for(consumer, range(&at), &mut bitmap);
        assert!(
            done.is_ok() || done.is_err_and(|stopped| stopped.reason == ChangeError::Contended)
        );
        (bitmap[0], self.copied())
    }

    fn copied(&self) -> usize {
        let _bus = self.world.bus.lock().unwrap();
        self.world.tick()
    }

    /// When the guest last wrote.
    fn written(&self) -> usize {
        let uses = self.world.uses.borrow();
        uses.iter().filter(|used| used.write).map(|used| used.when).max().unwrap_or(0)
    }
}

/// A pager finds what a log has taken, and the other way round. A write that marks nothing, because
/// the CPU's TLB holds the page as dirty, is in the copies of both or found by both.
fn two_views<F: Walked>(name: &str) {
    bounded(name, 3, || {
        let (guest, [log, pager]) = On::<F>::new(13, ALWAYS).running().consumed();
        let guest = guest.mapped(0..PAGE, RAM, PAGE);
        // The TLB holds the page as writable and dirty: later writes mark nothing.
        guest.access(0, true, Use::Always);
        let logs = spawn(move || guest.take(log, 0..PAGE));
        let vcpu = spawn(move || guest.access(0, true, Use::Always).is_some());
        let paged = guest.take(pager, 0..PAGE);
        let (logged, wrote) = (logs.join().unwrap(), vcpu.join().unwrap());
        assert!(wrote);
        let last = guest.written();
        for (consumer, (bits, copied)) in [(log, logged), (pager, paged)] {
            // A consumer that was contended has taken nothing.
            let found = guest.take(consumer, 0..PAGE).0 == 1;
            assert!(found || bits == 1 && last < copied, "a write is lost");
        }
        guest.end(0);
    });
}

#[test]
fn a_write_while_two_consumers_harvest_is_in_the_copy_of_each_or_found_by_it_again() {
    two_views::<Tiny>("harvest for one || for another || hardware, through the TLB, Arm");
    two_views::<TinyEpt>("harvest for one || for another || hardware, through the TLB, Intel");
}

/// A pager that finds its page clean drops it; a log that has copied it does not copy it again.
#[test]
fn a_page_unmapped_while_two_consumers_clean_is_dirty_for_each_whose_copy_misses_a_write() {
    bounded("clean for one, unmap || clean for another || hardware, through the TLB", 3, || {
        let (guest, [log, pager]) = Guest::new(13, ALWAYS).running().consumed();
        let guest = guest.mapped(0..PAGE, RAM, PAGE);
        guest.access(0, true, Use::Always);
        let cleaned = move |consumer| {
            let mut inside = guest.inside();
            _ = inside.guard.clean_for(consumer, range(&(0..PAGE)));
            inside.guard.invalidate();
            guest.copied()
        };
        let logs = spawn(move || cleaned(log));
        let vcpu = spawn(move || guest.access(0, true, Use::Always).is_some());
        let paged = cleaned(pager);
        let result = guest.unmap(0..PAGE);
        let removed = guest.unmap_rest(result);
        let (logged, _) = (logs.join().unwrap(), vcpu.join().unwrap());
        let last = guest.written();
        for (consumer, copied) in [(log, logged), (pager, paged)] {
            let dirty = consumer.is_dirty(&removed[0].attributes);
            assert!(dirty || last < copied, "a write is lost");
        }
        guest.end(0);
    });
}

/// Two pages were written, and the log has taken one of them. Other operations on them at the same
/// time lose no write, for the log or for the pager.
fn beside<F: Walked>(
    name: &str,
    size: u64,
    bbm: BreakBeforeMake,
    preemptions: usize,
    other: impl Fn(On<F>, &mut Cache<F>) + Copy + Send + Sync + 'static,
) {
    let name = std::format!("{name} || harvest for a consumer");
    bounded(&name, preemptions, move || {
        let (guest, [log, pager]) = On::<F>::new(14, bbm).consumed();
        let guest = guest.mapped(0..BLOCK, RAM, size);
        // The log has taken one page already: only the pager's mark is left there.
        let before = if size == PAGE { guest.take(log, 0..PAGE).0 } else { 0 };
        let logs = spawn(move || guest.take(log, 0..BLOCK).0);
        let mut cache = guest.cache(1);
        other(guest, &mut cache);
        let took = logs.join().unwrap() | before;
        drop(cache);
        let rest = guest.take(log, 0..BLOCK).0;
        assert_eq!(took | rest, 0b11, "lost to the log");
        assert_eq!(guest.take(pager, 0..BLOCK).0, 0b11, "lost to the pager");
        guest.tables().reclaim();
        guest.close();
    });
}

#[test]
fn a_split_during_a_harvest_passes_on_the_marks_of_other_consumers() {
    let split = |guest: Guest, cache: &mut Cache<Tiny>| {
        let (_, rest) = guest.split(0..BLOCK, PAGE, cache);
        guest.split_rest(rest, PAGE, cache);
    };
    beside("split", BLOCK, NEVER, 3, split);
    beside("split, breaking", BLOCK, ALWAYS, 3, split);
}

#[test]
fn a_collapse_during_a_harvest_gathers_the_marks_of_other_consumers() {
    let collapse = |guest: Guest, _: &mut Cache<Tiny>| _ = guest.collapse(0..BLOCK, BLOCK);
    beside("collapse", PAGE, NEVER, 3, collapse);
    beside("collapse, breaking", PAGE, ALWAYS, 3, collapse);
    let collapse = |guest: X86, _: &mut Cache<TinyEpt>| _ = guest.collapse(0..BLOCK, BLOCK);
    beside("collapse, Intel", PAGE, NEVER, 3, collapse);
}

#[test]
fn other_changes_during_a_harvest_leave_the_marks_of_other_consumers() {
    beside("write-protect", PAGE, NEVER, 3, |guest: Guest, _: &mut Cache<Tiny>| {
        _ = guest.protect(0..BLOCK);
    });
    beside("replace", PAGE, ALWAYS, 3, |guest: Guest, _: &mut Cache<Tiny>| {
        _ = guest.inside().retype(0..BLOCK);
    });
    beside("age", PAGE, NEVER, 3, |guest: Guest, _: &mut Cache<Tiny>| {
        _ = guest.age(0..BLOCK, EXACT);
    });
    beside("clean for nobody", PAGE, NEVER, 3, |guest: X86, _: &mut Cache<TinyEpt>| {
        guest.clean(0..BLOCK);
    });
}
