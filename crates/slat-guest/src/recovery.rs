//! Huge pages that instruction fetches have split come back after a period.

use crate::backing::Backing;
use crate::guest::Worker;
use crate::host::Host;
use crate::slots::SlotSpec;
use crate::sync::{AtomicU64, Ordering};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{Execute, Format, Gpa, GpaRange};

/// Which tables of a slot instruction fetches have made, a bit each, in this period and the last.
#[derive(Debug)]
pub(crate) struct Splits {
    /// By the parity of the period.
    words: [Box<[AtomicU64]>; 2],
    period: AtomicU64,
}

impl Splits {
    /// `None` if memory is short.
    pub fn new<F: Format>(slot: &SlotSpec) -> Option<Self> {
        let last = slot.gpa.0 + slot.bytes.max(1) - 1;
        let tables = (last >> F::shift(1)) - (slot.gpa.0 >> F::shift(1)) + 1;
        let words = || {
            let len = tables.div_ceil(64) as usize;
            let mut words = Vec::new();
            words.try_reserve_exact(len).ok()?;
            words.extend((0..len).map(|_| AtomicU64::new(0)));
            Some(words.into_boxed_slice())
        };
        Some(Self { words: [words()?, words()?], period: AtomicU64::new(0) })
    }

    pub fn add<F: Format>(&self, slot: &SlotSpec, gpa: u64) {
        let table = (gpa >> F::shift(1)) - (slot.gpa.0 >> F::shift(1));
        let period = self.period.load(Ordering::Relaxed) as usize % 2;
        let word = &self.words[period][(table / 64) as usize];
        word.fetch_or(1 << (table % 64), Ordering::AcqRel);
    }

    /// Ends the period; hands out the tables made in the one before.
    fn turn<F: Format>(&self, slot: &SlotSpec, mut table: impl FnMut(u64)) {
        // What was made in the period that ends waits for the next turn.
        let period = self.period.load(Ordering::Acquire) as usize;
        for (index, word) in self.words[(period + 1) % 2].iter().enumerate() {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                let number = index as u64 * 64 + u64::from(bits.trailing_zeros());
                table(((slot.gpa.0 >> F::shift(1)) + number) << F::shift(1));
                bits &= bits - 1;
            }
        }
        self.period.fetch_add(1, Ordering::AcqRel);
    }
}

/// What a turn of recovery did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Recovered {
    /// Bytes of blocks that came back, without the right to execute.
    pub bytes: u64,
    /// Tables that were left: of slots that log, or whose pages differ.
    pub left: u64,
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, '_, F, H, B> {
    /// Ends a period: tables that instruction fetches made in the period before it become blocks again,
    /// without the right to execute. Those of slots that log are kept for later.
    ///
    /// Called once a period, whose length is the caller's to choose (Linux: an hour for all of them).
    pub fn recover_huge_pages(&mut self) -> Recovered {
        let guest = self.guest;
        let _turn = guest.recovering.lock();
        let mut recovered = Recovered::default();
        let slots = self.look(|view| {
            let kept = view.slots.iter().filter(|slot| !slot.going);
            kept.filter_map(|slot| Some((slot.spec, slot.log.is_some(), slot.splits.clone()?)))
                .collect::<Vec<_>>()
        });
        for (spec, logs, splits) in slots {
            let mut tables = Vec::new();
            splits.turn::<F>(&spec, |gpa| tables.push(gpa));
            for gpa in tables {
                if logs {
                    splits.add::<F>(&spec, gpa);
                    recovered.left += 1;
                    continue;
                }
                match self.recover(&spec, &splits, gpa) {
                    // Somebody held an entry, or its pages differ: it may fit another time.
                    0 => {
                        splits.add::<F>(&spec, gpa);
                        recovered.left += 1;
                    }
                    bytes => recovered.bytes += bytes,
                }
            }
        }
        recovered
    }

    fn recover(&mut self, spec: &SlotSpec, splits: &Arc<Splits>, gpa: u64) -> u64 {
        let guest = self.guest;
        let size = F::size(1);
        let Ok(range) = GpaRange::new(Gpa(gpa), size.bytes()) else { return 0 };
        // A block cannot reach out of the slot: nor is there a table to be put together.
        if !spec.fits(gpa, size.bytes()) || guest.config.largest < size {
            return 0;
        }
        let executable = self.inside(&guest.tables, |guard, _| {
            let leaves = guard.leaves(range).into_iter().flatten();
            leaves.flatten().any(|leaf| leaf.attributes.execute != Execute::None)
        });
        if executable {
            self.until_done(&guest.tables, range, |guard, rest| guard.execute_protect(rest));
        }
        // The slot as it is by then: it may have begun to log, or be another.
        self.collapse_if(range, size, |view| {
            let slot = view.named(spec.id).filter(|slot| !slot.going && slot.log.is_none());
            let theirs = slot.and_then(|slot| slot.splits.as_ref());
            theirs.is_some_and(|theirs| Arc::ptr_eq(theirs, splits))
        })
    }
}
