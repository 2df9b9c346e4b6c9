//! Random histories of all operations that change leaves, compared with a set of pages for each
//! consumer.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug)]
enum Op {
    Write(u64),
    Harvest(usize, Span),
    Clean(usize, Span),
    Protect(Span),
    Relax(Span),
    Split(Span),
    Collapse,
    Unmap(Span),
    /// Maps with the dirty state of none, one, or all consumers.
    Map(Span, bool, usize),
    Replace(Span, bool),
}

/// The start and length of a range, in pages or in blocks.
#[derive(Clone, Copy, Debug)]
struct Span(u64, u64, bool);

fn range_of(gpa: Gpa, bytes: u64) -> GpaRange {
    range(gpa.0, bytes)
}

/// The number of blocks in the histories.
const BLOCKS: u64 = 2;

fn op() -> impl Strategy<Value = Op> {
    let span = (0..40u64, 1..12u64, prop::bool::weighted(0.4))
        .prop_map(|(at, count, blocks)| Span(at, count, blocks));
    // For a log, a pager, or no consumer.
    let whom = prop_oneof![3 => Just(0usize), 3 => Just(1), 1 => Just(2)];
    prop_oneof![
        6 => (0..60u64).prop_map(Op::Write),
        4 => (whom.clone(), span.clone()).prop_map(|(whom, span)| Op::Harvest(whom, span)),
        3 => (whom, span.clone()).prop_map(|(whom, span)| Op::Clean(whom, span)),
        2 => span.clone().prop_map(Op::Protect),
        2 => span.clone().prop_map(Op::Relax),
        2 => span.clone().prop_map(Op::Split),
        2 => Just(Op::Collapse),
        1 => span.clone().prop_map(Op::Unmap),
        3 => (span.clone(), any::<bool>(), 0..4usize).prop_map(|(span, large, state)| {
            Op::Map(span, large, state)
        }),
        1 => (span, any::<bool>()).prop_map(|(span, write)| Op::Replace(span, write)),
    ]
}

/// The pages that a log, a pager, and a harvest for no consumer would find dirty.
struct Views<'b, 'c, 't, 'p, H: Hardware> {
    fixture: &'b mut Fixture<'c, 't, 'p, H>,
    dirty: [BTreeSet<u64>; 3],
}

impl<H: Hardware> Views<'_, '_, '_, '_, H> {
    fn range(&self, Span(at, count, blocks): Span) -> GpaRange {
        let (page, block) = (H::size(0), H::size(1));
        if blocks {
            let first = at % BLOCKS;
            return range(first * block, count.min(BLOCKS - first) * block);
        }
        // Around the end of the first block.
        let start = block - 20 * page.min(block / 20) + at * page;
        let start = start & !(page - 1);
        range(start, count * page)
    }

    fn pages(range: GpaRange) -> impl Iterator<Item = u64> {
        (range.start().0..range.end().0).step_by(H::size(0) as usize)
    }

    fn made_dirty(&mut self, range: GpaRange) {
        self.dirty.iter_mut().for_each(|view| view.extend(Self::pages(range)));
    }

    /// Leaves that overlap a range.
    fn leaves(&self, range: GpaRange) -> Vec<(GpaRange, Attributes)> {
        let leaves = self.fixture.guard.leaves(range).unwrap().map(Result::unwrap);
        leaves.map(|leaf| (range_of(leaf.gpa, leaf.size.bytes()), leaf.attributes)).collect()
    }

    fn step(&mut self, op: Op) {
        let page = H::size(0);
        let small = PageSize::from_bytes(page).unwrap();
        let large = PageSize::from_bytes(H::size(1)).unwrap();
        let whole = range(0, BLOCKS * H::size(1));
        match op {
            Op::Write(at) => {
                let gpa = self.range(Span(at % 40, 1, false)).start().0;
                if self.fixture.write(gpa) {
                    let found = self.fixture.guard.translate(Gpa(gpa)).unwrap().unwrap();
                    let size = found.size.bytes();
                    self.made_dirty(range(gpa & !(size - 1), size));
                }
            }
            Op::Harvest(whom, span) => {
                let range = self.range(span);
                let consumer = self.fixture.consumers.get(whom).copied();
                let Ok(told) = self.fixture.harvest(consumer, range) else { return };
                let (start, end) = (range.start().0, range.end().0);
                let expected: BTreeSet<_> = self.dirty[whom].range(start..end).copied().collect();
                assert_eq!(told, expected, "what was written since, and nothing else");
                self.taken(whom, range);
            }
            Op::Clean(whom, span) => {
                let range = self.range(span);
                let done = match self.fixture.consumers.get(whom) {
                    Some(consumer) => self.fixture.guard.clean_for(*consumer, range),
                    None => self.fixture.guard.clean(range),
                };
                self.fixture.guard.invalidate();
                let (start, end) = (range.start().0, range.end().0);
                let Ok(bytes) = done else { return };
                assert_eq!(bytes, self.dirty[whom].range(start..end).count() as u64 * page);
                self.taken(whom, range);
            }
            Op::Protect(span) => {
                _ = self.fixture.guard.write_protect(self.range(span));
                self.fixture.guard.invalidate();
            }
            Op::Relax(span) => {
                let range = self.range(span);
                let done = self.fixture.guard.relax(range, Access::Write);
                if done.map(slat::LocalFlush::not_needed_here).is_ok() {
                    let leaves = self.leaves(range);
                    leaves.into_iter().for_each(|(leaf, _)| self.made_dirty(leaf));
                }
            }
            Op::Split(span) => {
                let range = self.range(span);
                self.fixture.guard.split(range, small, &mut self.fixture.cache).unwrap();
                self.fixture.guard.invalidate();
            }
            Op::Collapse => {
                self.fixture.guard.collapse(whole, large).unwrap();
                for (leaf, _) in self.leaves(whole) {
                    let (start, end) = (leaf.start().0, leaf.end().0);
                    for view in &mut self.dirty {
                        if view.range(start..end).next().is_some() {
                            view.extend(Self::pages(leaf));
                        }
                    }
                }
            }
            Op::Unmap(span) => {
                let range = self.range(span);
                let mut storage = [const { UnmapEntry::EMPTY }; 600];
                let mut batch = UnmapBatch::new(self.fixture.tables, &mut storage);
                _ = self.fixture.guard.unmap(range, &mut batch);
                for leaf in batch.complete() {
                    let gone = range_of(leaf.gpa, leaf.bytes);
                    for gpa in Self::pages(gone) {
                        self.is_as_told(gpa, &leaf.attributes);
                        self.dirty.iter_mut().for_each(|view| _ = view.remove(&gpa));
                    }
                }
                self.fixture.tables.reclaim();
            }
            Op::Map(span, blocks, state) => {
                let range = self.range(span);
                if !self.leaves(range).is_empty() {
                    return;
                }
                let software = self.fixture.consumers.get(state).map(|consumer| consumer.mark());
                let software = software.unwrap_or(Software::NONE);
                let attributes = Attributes { software, dirty: state == 2, ..CLEAN };
                let size = if blocks { large } else { small };
                let hpa = Hpa(HOST + range.start().0);
                self.fixture
                    .guard
                    .map(range, hpa, attributes, size, &mut self.fixture.cache)
                    .unwrap();
                match state {
                    2 => self.made_dirty(range),
                    0 | 1 => self.dirty[state].extend(Self::pages(range)),
                    _ => {}
                }
            }
            Op::Replace(span, write) => {
                let range = self.range(span);
                let (host, attributes) =
                    (Hpa(HOST + range.start().0), Attributes { write, ..CLEAN });
                _ = self.fixture.guard.replace(range, host, host, attributes);
                self.fixture.guard.invalidate();
            }
        }
        for (leaf, attributes) in self.leaves(whole) {
            for gpa in [leaf.start().0, leaf.end().0 - page] {
                self.is_as_told(gpa, &attributes);
            }
        }
    }

    /// A page that one consumer takes stays dirty for the other, and not for a harvest without a
    /// consumer.
    fn taken(&mut self, whom: usize, range: GpaRange) {
        for view in [whom, 2] {
            Self::pages(range).for_each(|gpa| _ = self.dirty[view].remove(&gpa));
        }
    }

    fn is_as_told(&self, gpa: u64, attributes: &Attributes) {
        for (view, consumer) in self.dirty.iter().zip(self.fixture.consumers) {
            assert_eq!(consumer.is_dirty(attributes), view.contains(&gpa), "{gpa:#x}");
        }
        assert_eq!(attributes.dirty, self.dirty[2].contains(&gpa), "{gpa:#x}");
    }
}

fn history<H: Hardware>(bbm: BreakBeforeMake, ops: &[Op]) {
    with_consumers::<H>(bbm, |fixture| {
        let mut views = Views { fixture, dirty: Default::default() };
        ops.iter().for_each(|op| views.step(*op));
        for whom in 0..2 {
            let whole = range(0, BLOCKS * H::size(1));
            let told = views.fixture.harvest(Some(views.fixture.consumers[whom]), whole).unwrap();
            assert_eq!(told, views.dirty[whom], "nothing is lost");
            views.taken(whom, whole);
        }
    });
}

proptest! {
    #![proptest_config(crate::properties::config())]

    #[test]
    fn in_any_history_each_consumer_finds_exactly_what_was_written_since_it_looked(
        ops in prop::collection::vec(op(), 1..40),
        format in 0..5,
        breaks: bool,
    ) {
        let bbm = if breaks { BreakBeforeMake::Always } else { BreakBeforeMake::Never };
        match format {
            1 => history::<Ept<true>>(bbm, &ops),
            #[cfg(feature = "every-format")]
            2 => history::<Npt<true>>(bbm, &ops),
            #[cfg(feature = "every-format")]
            3 => history::<Hart<true>>(bbm, &ops),
            #[cfg(feature = "every-format")]
            4 => history::<Core<16, true>>(bbm, &ops),
            _ => history::<Arm<12>>(bbm, &ops),
        }
    }
}
