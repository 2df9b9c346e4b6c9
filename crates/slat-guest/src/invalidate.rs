//! Invalidations: the host takes memory back while faults may be mapping it.

use crate::backing::{Backing, Hva, HvaRange};
use crate::bits::each_word;
use crate::config::Logging;
use crate::events::Event;
use crate::guest::Guest;
use crate::host::Host;
use crate::invalidations::InvalidationInProgress;
use crate::memslots::{Memslot, MemslotSnapshot};
use crate::private::MemoryKind;
use crate::sync::agreed;
use crate::worker::{Inside, Worker};
use slat::{Attributes, Format, Gpa, GpaRange, Guard, Tables, UnmappedRun};

/// Neighbouring pages that were unmapped for the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnmappedPages {
    /// The first guest address.
    pub gpa: Gpa,
    /// The host addresses of the pages.
    pub host: HvaRange,
    /// The guest wrote them, or may have, since they were last taken. This includes writes whose
    /// mark a log has taken from the leaf.
    pub dirty: bool,
    /// The guest used them since they were last aged.
    pub accessed: bool,
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Unmaps the memory at `host` from the guest. Once the guest cannot access the memory any
    /// more, it calls `taken` with what was mapped there, and with pages that were used or written
    /// and are no longer mapped. A page may be told more than once, for example while its mark
    /// moves from a leaf into a log: its state is all that was told together. Blocks that overlap
    /// the range are unmapped whole. With an empty range it does nothing.
    ///
    /// When this returns the host may take the memory back, or change it. No fault maps any of it
    /// until the result is dropped. The caller may hold locks that [`Backing::page`] takes.
    ///
    /// If `taken` panics, what it has not been told stays to be told: to a later call for these
    /// pages, as dirty if in doubt. `taken` runs inside the tables. It must not take a lock under
    /// which a thread changes memslots, reads a log that hardware keeps, switches caches, or
    /// reports host writes ([`Worker::host_wrote`]): these operations wait for this call.
    pub fn invalidate(
        &mut self,
        host: HvaRange,
        mut taken: impl FnMut(UnmappedPages),
    ) -> InvalidationInProgress<'w> {
        let invalidation = self.guest.invalidations.begin(&host);
        if host.bytes != 0 {
            self.take_pages(&[host], &mut taken);
        }
        invalidation
    }

    /// Unmaps memory that the guest's [`Backing`] no longer hands out: all of `hosts`, with one TLB
    /// invalidation for every few dozen leaves, wherever they are. It calls `taken` with what was
    /// mapped, as [`Worker::invalidate`] does; blocks that overlap a range are unmapped whole.
    ///
    /// The backing must return [`NoPage`](crate::NoPage) for these pages from before this call
    /// until the memory may be mapped again. Unlike [`Worker::invalidate`], this does not delay
    /// faults on other pages. When it returns, the guest cannot access `hosts`.
    ///
    /// *Invariant*: a fault is refused, or the walk finds its reservation or leaf. The caller
    /// changes what the backing answers, then this walks; a fault reserves its entry, then asks the
    /// backing (`agreed`). The fences are in this crate. The backing keeps its answer under a lock,
    /// or in atomics, with acquire and release if the answer implies what other memory holds.
    pub fn evict(&mut self, hosts: &[HvaRange], mut taken: impl FnMut(UnmappedPages)) {
        agreed();
        self.take_pages(hosts, &mut taken);
    }

    fn take_pages(&mut self, hosts: &[HvaRange], taken: &mut impl FnMut(UnmappedPages)) {
        // Ranges are widened to whole pages.
        let page = F::size(0).bytes();
        let whole = |host: &HvaRange| {
            let start = host.start.0 & !(page - 1);
            let end = host.end().0.checked_next_multiple_of(page).unwrap_or(!(page - 1));
            HvaRange { start: Hva(start), bytes: end.saturating_sub(start) }
        };
        let some = |host: &&HvaRange| host.bytes != 0;
        let guest = self.guest;
        if let Some(&host) = hosts.first() {
            guest.event(|| Event::InvalidationBegin { host, ranges: hosts.len() });
        }
        let mut all = 0;
        let mut spaces = guest.spaces().peekable();
        while let Some(tables) = spaces.next() {
            let last = spaces.peek().is_none();
            // A reader of the log waits for this guard, and after that finds in the log the marks
            // of what is unmapped here.
            let bytes = self.with_memslots(tables, |view, Inside { guard, .. }| {
                let pages = || hosts.iter().filter(some).map(whole);
                let parts = || pages().flat_map(|host| view.backed_by(host));
                // Private memory has no host address, so the host cannot take it here.
                let kind = MemoryKind::Shared;
                let runs = || {
                    parts().flat_map(|(memslot, part)| {
                        memslot.runs::<F>(part, kind).map(move |run| (memslot, run))
                    })
                };
                let mapped = runs().map(|(_, run)| run);
                let bytes = guest.unmap_for_host(view, tables, guard, mapped, taken);
                // After all tables: otherwise a page in a view would be reported as not mapped.
                if last {
                    runs().for_each(|(memslot, run)| guest.report_taken(memslot, run, None, taken));
                }
                bytes
            });
            self.counters.invalidated_bytes.add(bytes);
            tables.reclaim();
            all += bytes;
        }
        if !hosts.is_empty() {
            guest.event(|| Event::InvalidationEnd { bytes: all });
        }
    }
}

impl<'p, F: Format, H: Host, B: Backing> Guest<'p, F, H, B> {
    /// Unmaps `ranges`, and reports what was mapped there; returns the bytes.
    pub(crate) fn unmap_for_host(
        &self,
        view: &MemslotSnapshot,
        tables: &Tables<'p, F, H>,
        guard: &mut Guard<'_, 'p, F, H>,
        ranges: impl IntoIterator<Item = GpaRange>,
        taken: &mut impl FnMut(UnmappedPages),
    ) -> u64 {
        let hardware = self.config.logging == Logging::Hardware;
        let _taking = hardware.then(|| self.host_unmaps.begin());
        self.unmap(view, tables, guard, ranges, |removed| {
            self.spill_dirty(view, &removed);
            let UnmappedRun { gpa, bytes, attributes, .. } = removed;
            // Each memslot's own part, with its host addresses and its kept marks.
            let all = GpaRange::new(gpa, bytes).expect("a leaf is not empty");
            for (memslot, part) in view.parts(&all) {
                self.report_taken(memslot, part, Some(attributes), taken);
            }
        })
    }

    /// Reports pages of a memslot that were unmapped, with the marks of their leaves, if there were
    /// any, and with their kept marks ([`SpilledBits`](crate::bits::SpilledBits)). Without leaves,
    /// only pages with a kept mark are reported.
    pub(crate) fn report_taken(
        &self,
        memslot: &Memslot,
        part: GpaRange,
        leaves: Option<Attributes>,
        taken: &mut impl FnMut(UnmappedPages),
    ) {
        let spec = &memslot.spec;
        let mut tell = |first: u64, end: u64, (dirty, accessed): (bool, bool)| {
            if leaves.is_none() && !(dirty || accessed) {
                return;
            }
            let gpa = Gpa(spec.gpa.0 + (first << F::PAGE_SHIFT));
            let bytes = (end - first) << F::PAGE_SHIFT;
            taken(UnmappedPages {
                gpa,
                host: HvaRange { start: spec.host_of(gpa.0), bytes },
                dirty,
                accessed,
            });
        };
        let of_leaf = leaves.map_or((false, false), |leaf| (leaf.dirty, leaf.accessed));
        let first = (part.start().0 - spec.gpa.0) >> F::PAGE_SHIFT;
        let end = first + (part.size() >> F::PAGE_SHIFT);
        let spilled_bits = &memslot.spilled_bits;
        // A run of pages with the same marks: its first page, and the marks.
        let mut run = (first, None);
        each_word::<F>(spec, part.start().0, part.size(), |word, mask| {
            let (written, used) =
                spilled_bits.swap_out(word, mask, leaves.is_some(), &self.marks_in_flight);
            let of = |bits: u64, leaf: bool| if leaf { mask } else { bits };
            let (written, used) = (of(written, of_leaf.0), of(used, of_leaf.1));
            let alike = |bits: u64| bits == 0 || bits == mask;
            let first = mask.trailing_zeros();
            let step = if alike(written) && alike(used) { mask.count_ones() } else { 1 };
            for bit in (first..first + mask.count_ones()).step_by(step as usize) {
                let state = (written >> bit & 1 != 0, used >> bit & 1 != 0);
                let page = word as u64 * 64 + u64::from(bit);
                match run {
                    (_, Some(now)) if now == state => {}
                    (begin, Some(now)) => {
                        tell(begin, page, now);
                        run = (page, Some(state));
                    }
                    (_, None) => run = (page, Some(state)),
                }
            }
        });
        if let (begin, Some(state)) = run {
            tell(begin, end, state);
        }
    }
}
