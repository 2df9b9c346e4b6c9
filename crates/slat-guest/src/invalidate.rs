//! Invalidations: the host takes memory back while faults may be mapping it.

use crate::backing::{Backing, Hva, HvaRange};
use crate::bits::each_word;
use crate::events::Event;
use crate::guest::Guest;
use crate::host::Host;
use crate::invalidations::Invalidation;
use crate::memslots::{Memslot, View};
use crate::private::MemoryKind;
use crate::sync::agreed;
use crate::worker::{Inside, Worker};
use slat::{Attributes, Format, Gpa, GpaRange, Guard, Removed, Tables};

/// Neighbouring pages that were taken from the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// The first guest address.
    pub gpa: Gpa,
    /// The pages in the host.
    pub host: HvaRange,
    /// The guest wrote them, or may have, since they were last taken; also if a log has taken the
    /// mark from the leaf meanwhile.
    pub dirty: bool,
    /// The guest used them since they were last aged.
    pub accessed: bool,
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Takes the memory at `host` from the guest. `taken` is told, once the guest cannot reach the
    /// memory, what was mapped there, and what was used or written and is not mapped any more.
    /// Blocks that the range touches are taken whole; of a range of no bytes nothing is taken.
    ///
    /// When this returns the host may take the memory back, or change it. Until the value is
    /// dropped no fault maps any of it. It may be called with locks that [`Backing::page`] takes.
    ///
    /// `taken` runs inside the tables: it must not take a lock under which a thread changes
    /// memslots, reads a log that hardware keeps, switches caches, or reports what the host wrote,
    /// as all of these wait for this call.
    pub fn invalidate(&mut self, host: HvaRange, mut taken: impl FnMut(Taken)) -> Invalidation<'w> {
        let invalidation = self.guest.invalidations.begin(&host);
        if host.bytes != 0 {
            self.take_pages(&[host], &mut taken);
        }
        invalidation
    }

    /// Takes memory from the guest that its [`Backing`] has stopped handing out: all of `hosts`,
    /// with one invalidation for every few dozen leaves, wherever they are. `taken` is told what
    /// was mapped, as in [`Worker::invalidate`]; blocks that a range touches are taken whole.
    ///
    /// The backing must answer [`NoPage`](crate::NoPage) for these pages from before this is called
    /// until the memory may be mapped again. Unlike [`Worker::invalidate`], this does not hold up
    /// faults on other pages. When it returns, the guest cannot reach `hosts`.
    ///
    /// *Invariant*: the caller changes what the backing answers, then this walks; a fault reserves
    /// its entry, then asks the backing. The two are crosswise (`agreed`): the fault is refused, or
    /// the walk finds its reservation or leaf. The fences are here; the backing keeps its answer
    /// where a lock is held, or in atomics, with acquire and release if the answer tells what other
    /// memory holds.
    pub fn evict(&mut self, hosts: &[HvaRange], mut taken: impl FnMut(Taken)) {
        agreed();
        self.take_pages(hosts, &mut taken);
    }

    fn take_pages(&mut self, hosts: &[HvaRange], taken: &mut impl FnMut(Taken)) {
        // Pages are taken whole.
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
            // The log has the marks of what is unmapped once a reader that waits for this guard
            // looks at it.
            let bytes = self.with_slots(tables, |view, Inside { guard, .. }| {
                let pages = || hosts.iter().filter(some).map(whole);
                let parts = || pages().flat_map(|host| view.backed_by(host));
                // The host does not take private memory by these addresses.
                let kind = MemoryKind::Shared;
                let mapped = parts().flat_map(|(slot, part)| slot.runs::<F>(part, kind));
                let bytes = guest.take(view, tables, guard, mapped, taken);
                // After all tables: else a view's leaf would be reported as one that is not there.
                if last {
                    parts().for_each(|(slot, part)| guest.tell(slot, part, None, taken));
                }
                bytes
            });
            self.counters.invalidated_bytes.add(bytes);
            guest.reclaim_in(tables);
            all += bytes;
        }
        if !hosts.is_empty() {
            guest.event(|| Event::InvalidationEnd { bytes: all });
        }
    }
}

impl<'p, F: Format, H: Host, B: Backing> Guest<'p, F, H, B> {
    /// Unmaps `ranges`, and reports what was there; returns the bytes.
    pub(crate) fn take(
        &self,
        view: &View,
        tables: &Tables<'p, F, H>,
        guard: &mut Guard<'_, 'p, F, H>,
        ranges: impl IntoIterator<Item = GpaRange>,
        taken: &mut impl FnMut(Taken),
    ) -> u64 {
        self.unmap(tables, guard, ranges, |removed| {
            self.keep_dirty(view, &removed);
            let Removed { gpa, bytes, attributes, .. } = removed;
            // Each memslot's own part, with its host addresses and what it keeps.
            let all = GpaRange::new(gpa, bytes).expect("a leaf is not empty");
            for (slot, part) in view.parts(&all) {
                self.tell(slot, part, Some(attributes), taken);
            }
        })
    }

    /// Reports pages of a memslot that were taken from the guest, by the marks of their leaves, if
    /// there were any, and those that are kept about them ([`Kept`](crate::bits::Kept)). Without
    /// leaves, only pages with a kept mark are reported.
    pub(crate) fn tell(
        &self,
        slot: &Memslot,
        part: GpaRange,
        leaves: Option<Attributes>,
        taken: &mut impl FnMut(Taken),
    ) {
        let spec = &slot.spec;
        let mut tell = |first: u64, end: u64, (dirty, accessed): (bool, bool)| {
            if leaves.is_none() && !(dirty || accessed) {
                return;
            }
            let gpa = Gpa(spec.gpa.0 + (first << F::PAGE_SHIFT));
            let bytes = (end - first) << F::PAGE_SHIFT;
            taken(Taken {
                gpa,
                host: HvaRange { start: spec.host_of(gpa.0), bytes },
                dirty,
                accessed,
            });
        };
        let of_leaf = leaves.map_or((false, false), |leaf| (leaf.dirty, leaf.accessed));
        let first = (part.start().0 - spec.gpa.0) >> F::PAGE_SHIFT;
        let end = first + (part.size() >> F::PAGE_SHIFT);
        let kept = &slot.kept;
        // A run of pages with the same marks: its first page, and the marks.
        let mut run = (first, None);
        each_word::<F>(spec, part.start().0, part.size(), |word, mask| {
            let (written, used) = kept.take(word, mask, leaves.is_some(), &self.leaving);
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
