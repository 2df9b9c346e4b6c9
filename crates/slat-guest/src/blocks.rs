//! Blocks and memslots: no block lies in two memslots.
//!
//! Each memslot has its own place in the host, its own log and rights. If a leaf were in two
//! memslots, a write through it would be logged in only one of them. *Invariant*: code that maps,
//! folds or collapses calls [`MemslotSpec::fits`](crate::MemslotSpec::fits), or works on a
//! memslot's part of a range, at leaf sizes that have the same alignment in the host as in the
//! guest. Faults do so by `fitting`; everything else does so in [`Worker::collapse_if`], the only
//! place that collapses tables.
//!
//! A caller of [`Guest::tables`](crate::Guest::tables) can still make such a block. A log that
//! finds one splits it ([`Worker::cut_ends`]), and marks its own part of it.

use crate::backing::Backing;
use crate::config::ExecuteHuge;
use crate::events::Event;
use crate::host::Host;
use crate::memslots::Memslot;
use crate::memslots::spec::MemslotSpec;
use crate::outcome::SplitStop;
use crate::private::MemoryKind;
use crate::ranges::{cut_by, fitting, pieces};
use crate::worker::{Inside, PATIENCE, Worker};
use alloc::vec::Vec;
use slat::{
    Attributes, Contention, Execute, Format, Gpa, GpaRange, Interruption, PageSize, SplitError,
};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Collapses tables in `range` into blocks of at most `to`, where their pages are physically
    /// contiguous and have the same attributes; returns the bytes. A block lies in one memslot,
    /// with the same alignment in the host as in the guest. Tables of memslots that log stay
    /// tables.
    pub fn collapse(&mut self, range: GpaRange, to: PageSize) -> u64 {
        let page = F::size(0).bytes();
        let start = range.start().0.next_multiple_of(page);
        let end = range.end().0 & !(page - 1);
        match end.checked_sub(start).map(|bytes| GpaRange::new(Gpa(start), bytes)) {
            Some(Ok(pages)) => self.collapse_if(pages, to, |_| true),
            // The range is less than a page.
            _ => 0,
        }
    }

    /// As [`Worker::collapse`], for a `range` of whole pages, in the memslots that `wanted` accepts
    /// at the time of the look.
    pub(crate) fn collapse_if(
        &mut self,
        range: GpaRange,
        to: PageSize,
        wanted: impl Fn(&Memslot) -> bool,
    ) -> u64 {
        let guest = self.guest;
        let parts: Vec<_> = self.look(|view| view.parts(&range).map(|(_, part)| part).collect());
        let mut bytes = 0;
        for piece in parts.into_iter().flat_map(|part| pieces(part, F::size(F::LARGEST_LEAF))) {
            bytes += self.with_memslots(&guest.tables, |view, Inside { guard, .. }| {
                // If executable huge pages are not allowed, a collapse must not make one.
                let huge = guest.config.execute_huge == ExecuteHuge::Allowed;
                let fits = |leaf: &Attributes| leaf.execute == Execute::None || huge;
                for (memslot, part) in view.parts(&piece) {
                    if memslot.deleting || memslot.log.is_some() || !wanted(memslot) {
                        continue;
                    }
                    let to = fitting::<F>(to, |bytes| memslot.spec.is_aligned(bytes));
                    // Private pages keep the size with which they were mapped.
                    let shared = memslot.runs::<F>(part, MemoryKind::Shared);
                    for run in shared.flat_map(|run| guest.pins.free(run)) {
                        match guard.collapse_where(run, to, fits) {
                            // If a thread holds an entry, or a device walks the tables, the table
                            // stays as it is.
                            Ok(_)
                            | Err(Interruption {
                                reason: SplitError::Contended | SplitError::Shared,
                                ..
                            }) => {}
                            Err(Interruption { reason, .. }) => {
                                unreachable!("a memslot's pages, a leaf's size: {reason}")
                            }
                        }
                    }
                }
                guard.counts().bytes_changed
            });
            guest.piece_done(piece);
        }
        self.counters.collapsed_bytes.add(bytes);
        if bytes != 0 {
            guest.event(|| Event::Collapse { range, bytes });
        }
        guest.tables.reclaim();
        bytes
    }

    /// Splits the leaves that cross an end of the memslot. If table pages are short, it unmaps
    /// them, and faults map what fits. vCPUs' own views have pages only.
    ///
    /// # Errors
    /// [`Contention`]: another thread held an entry for too long.
    pub(crate) fn cut_ends(&mut self, spec: &MemslotSpec) -> Result<(), Contention> {
        let guest = self.guest;
        let host = guest.tables.platform();
        for at in [spec.gpa, spec.range().end()] {
            let mut patience = PATIENCE;
            loop {
                let leaf =
                    match self.inside(&guest.tables, |Inside { guard, .. }| cut_by(guard, at)) {
                        Ok(None) => break,
                        Ok(Some(leaf)) => Ok(leaf),
                        Err(contended) => Err(contended),
                    };
                let done = leaf.and_then(|leaf| self.cut(leaf, at));
                if let Err(contended) = done {
                    patience -= 1;
                    if patience == 0 {
                        return Err(contended);
                    }
                    host.wait();
                }
            }
        }
        Ok(())
    }

    fn cut(&mut self, leaf: GpaRange, at: Gpa) -> Result<(), Contention> {
        let guest = self.guest;
        let level = (0..=F::LARGEST_LEAF).find(|&level| F::size(level).bytes() == leaf.size());
        if level.is_none() {
            let unfolded = self.inside(&guest.tables, |Inside { guard, .. }| guard.unfold(leaf));
            return unfolded.map(drop).map_err(|stopped| Contention { at: stopped.at });
        }
        let page = GpaRange::new(at, F::size(0).bytes()).expect("a page is not empty");
        let mut bytes = 0;
        let result = self.split(page, F::size(0), &mut bytes);
        guest.count_split(self.counters, at, bytes);
        match result {
            Ok(()) => Ok(()),
            Err(SplitStop::Contended { at }) => Err(Contention { at }),
            Err(SplitStop::OutOfFrames { .. }) => {
                let _moving = guest.marks_in_flight.begin();
                self.with_memslots(&guest.tables, |view, Inside { guard, .. }| {
                    guest.unmap(view, &guest.tables, guard, [leaf], |removed| {
                        guest.spill_marks(view, &removed);
                    });
                });
                guest.tables.reclaim();
                Ok(())
            }
            Err(SplitStop::Asked | SplitStop::Refused(_)) => {
                unreachable!("a page of the guest's, of the format's smallest size")
            }
        }
    }
}
