//! The private and shared parts of a range, for threads inside the guest's tables: the answer holds
//! until the thread leaves them (see [`kinds`](super::kinds)).

use crate::memslots::{Memslot, MemslotSnapshot};
use crate::private::MemoryKind;
use slat::{Format, Gpa, GpaRange};

impl Memslot {
    /// Returns the kind of all pages of `range`, which lies in the memslot; `None` if they differ,
    /// or are changing.
    #[inline]
    pub fn kind_of<F: Format>(&self, range: &GpaRange) -> Option<MemoryKind> {
        match &self.kinds {
            None => Some(MemoryKind::Shared),
            Some(kinds) => kinds.of::<F>(&self.spec, range),
        }
    }

    /// Returns the runs of pages of `kind` in `part`, which lies in the memslot, in ascending
    /// order. Pages that are changing are included.
    pub fn runs<F: Format>(
        &self,
        part: GpaRange,
        kind: MemoryKind,
    ) -> impl Iterator<Item = GpaRange> + Clone + '_ {
        let number = |gpa: Gpa| (gpa.0 - self.spec.gpa.0) >> F::PAGE_SHIFT;
        let (mut page, end) = (number(part.start()), number(part.end()));
        let mut whole = Some(part).filter(|_| self.kinds.is_none() && kind == MemoryKind::Shared);
        core::iter::from_fn(move || {
            let Some(kinds) = &self.kinds else { return whole.take() };
            let first = kinds.find(page, end, kind);
            page = kinds.find(first, end, kind.other());
            let start = Gpa(self.spec.gpa.0 + (first << F::PAGE_SHIFT));
            GpaRange::new(start, (page - first) << F::PAGE_SHIFT).ok()
        })
    }
}

impl MemslotSnapshot {
    /// Returns whether a page of `range` is private.
    pub fn has_private<F: Format>(&self, range: &GpaRange) -> bool {
        let kinds = self.parts(range).filter(|(memslot, _)| memslot.kinds.is_some());
        kinds
            .flat_map(|(memslot, part)| memslot.runs::<F>(part, MemoryKind::Private))
            .next()
            .is_some()
    }

    /// Returns the first run in `range` without a private page; this is `range` if it has none.
    pub fn shared_run<F: Format>(&self, range: GpaRange) -> Option<GpaRange> {
        let mut start = range.start();
        for (memslot, part) in self.parts(&range).filter(|(memslot, _)| memslot.kinds.is_some()) {
            for private in memslot.runs::<F>(part, MemoryKind::Private) {
                if private.start() > start {
                    return GpaRange::new(start, private.start().0 - start.0).ok();
                }
                start = private.end();
            }
        }
        GpaRange::new(start, range.end().0.saturating_sub(start.0)).ok()
    }
}
