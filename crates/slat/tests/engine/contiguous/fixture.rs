//! The engine compared with the flat model, with maps that fold: a group is one leaf to hardware
//! and to the model.

use crate::common::flat::Flat;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::hardware::{Access as Accessed, Hardware, Run, Tree};
use crate::common::world::{
    GuardOf, Outcome, Rule, TablesOf, World, cache, clipped, filled, floor, gaps, invalidations,
    maintained, maintenance, size,
};
use crate::common::{Event, Moment, TestPlatform};
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, ChangeError, Gpa, GpaRange, Hpa,
    Interruption, Invalidation, MapError, OpCounts, PageSize, SplitError, UnmapEntry, UnmapError,
};
use std::cell::Cell;

pub struct Fixture<'p, const G: u32> {
    pub world: World<'p, GroupedArm<G>>,
    /// The cost and the events of the last operation, without the invalidation that it completed at
    /// its end.
    pub counts: OpCounts,
    pub events: Vec<Event>,
}

impl<'p, const G: u32> Fixture<'p, G> {
    pub fn new(
        platform: &'p TestPlatform,
        bbm: BreakBeforeMake,
        format: <GroupedArm<G> as Hardware>::Format,
        bits: u32,
    ) -> Self {
        let world = World::new(platform, bbm, format, bits);
        Self { world, counts: OpCounts::NONE, events: Vec::new() }
    }

    /// Runs an operation, and checks the result: groups outside `range` are whole, and others were
    /// invalidated as a whole.
    fn run<R>(
        &mut self,
        range: GpaRange,
        op: impl for<'t> FnOnce(&mut GuardOf<'t, 'p, GroupedArm<G>>) -> R,
    ) -> (Tree, R, Tree) {
        self.run_removing(range, |_, guard, _| op(guard))
    }

    fn run_removing<R>(
        &mut self,
        range: GpaRange,
        op: impl for<'t> FnOnce(
            &'t TablesOf<'p, GroupedArm<G>>,
            &mut GuardOf<'t, 'p, GroupedArm<G>>,
            &Cell<bool>,
        ) -> R,
    ) -> (Tree, R, Tree) {
        let before = self.world.begin();
        let Outcome { result, counts, events, tree: after, .. } = self.world.run_removing(op);
        (self.counts, self.events) = (counts, events);
        let unlinked = before.tables.keys().filter(|hpa| !after.tables.contains_key(hpa));
        self.world.retired += unlinked.count();
        check_unfolded::<G>(&before, &after, &self.executed(), self.world.bbm);
        let (start, end) = (range.start().0, range.end().0);
        for group in before.runs.iter().filter(|run| GroupedArm::<G>::is_group(run.size)) {
            for at in (group.start..group.end).step_by(group.size as usize) {
                let size = after.at(at).map(|run| run.size);
                let apart = at >= end || at + group.size <= start;
                assert!(!apart || size == Some(group.size), "{at:#x} was unfolded for nothing");
            }
        }
        (before, result, after)
    }

    /// Returns the invalidations inside the last operation.
    pub fn executed(&self) -> Vec<Invalidation> {
        invalidations(&self.events)
    }

    /// Returns whether an end of the range cuts a block; a group is not a block.
    fn cuts(&self, before: &Tree, range: &GpaRange) -> bool {
        let cut = |edge: u64| {
            before
                .at(edge)
                .is_some_and(|run| !edge.is_multiple_of(GroupedArm::<G>::entry_size(run.size)))
        };
        cut(range.start().0) || cut(range.end().0)
    }

    pub fn map(
        &mut self,
        range: GpaRange,
        hpa: u64,
        attributes: Attributes,
        largest: PageSize,
        frames: usize,
        fold: bool,
    ) {
        let platform = self.world.platform;
        let mut storage = Vec::new();
        let mut cache = cache::<GroupedArm<G>>(platform, &mut storage, frames);
        let (before, result, after) = self.run(range, |guard| {
            if fold {
                guard.map_contiguous(range, Hpa(hpa), attributes, largest, &mut cache)
            } else {
                guard.map(range, Hpa(hpa), attributes, largest, &mut cache)
            }
        });
        drop(cache);
        let (start, end) = (range.start().0, range.end().0);
        let legal = self.world.hardware.refuses(attributes).is_empty();
        let end = match result {
            Ok(_) => {
                assert!(legal);
                end
            }
            Err(Interruption { at, reason: MapError::CacheEmpty }) => at.0,
            Err(Interruption { reason: MapError::Attributes(_), .. }) => {
                assert!(!legal);
                return self.world.settle(&after);
            }
            Err(Interruption { at, reason: MapError::Occupied { .. } }) => {
                let there = before.at(at.0).unwrap();
                let own = there.leaf.own;
                let like = Attributes { accessed: own.accessed, dirty: own.dirty, ..attributes };
                assert!(there.oa(at.0) != hpa + (at.0 - start) || own != like);
                return self.world.settle(&after);
            }
            Err(other) => panic!("{other:?}"),
        };
        if start < end {
            self.world.flat.borrow_mut().map(start, end, hpa, attributes);
        }
        self.world.settle(&after);
        let new = Vec::from_iter(gaps(&before, start, end));
        let bytes = new.iter().map(|(from, to)| to - from).sum::<u64>();
        assert!(result.is_err() || result == Ok(bytes), "bytes mapped: {result:?}, not {bytes:#x}");
        let wanted = new.iter().map(|(from, to)| (hpa + (from - start), hpa + (to - start)));
        let wanted = maintenance(&attributes).map_or(Vec::new(), |_| wanted.collect());
        // A page of a group may be made coherent twice: the walk saw it empty as the group's first
        // page was mapped.
        let mut found: Vec<(u64, u64)> = Vec::new();
        for piece in maintained(&self.events, maintenance(&attributes).as_ref()) {
            match found.last_mut() {
                Some(last) if (last.0..=last.1).contains(&piece.0) => last.1 = last.1.max(piece.1),
                _ => found.push(piece),
            }
        }
        assert_eq!(found, wanted, "memory made coherent");
        assert_eq!(self.counts.invalidations, self.executed().len() as u64);
        if range.size() > 1 << G {
            assert_eq!(self.counts.bytes_changed, bytes);
            // In a table that existed before, each entry of a group is frozen, then filled.
            let (ptes, links) = filled::<GroupedArm<G>>(&before, &after);
            let stores = |(from, to)| {
                let runs = after.within(from, to);
                let each = |run: Run| {
                    let times = if GroupedArm::<G>::is_group(run.size) { 2 } else { 1 };
                    times * run.bytes() / GroupedArm::<G>::entry_size(run.size)
                };
                runs.map(each).sum::<u64>()
            };
            let all: u64 = new.iter().copied().map(stores).sum();
            let built: u64 = links.iter().flat_map(|&link| clipped(&new, link)).map(stores).sum();
            let expected = ptes + links.len() as u64 + all - built;
            assert_eq!(self.counts.entries_written, expected, "a store an entry, two in groups");
        }
        // Everything that can be folded is folded.
        for pte in [1 << G, GroupedArm::<G>::size(1)] {
            let bytes = GroupedArm::<G>::group(pte);
            let first = start.next_multiple_of(bytes);
            for base in (first..floor(end, bytes)).step_by(bytes as usize) {
                let empty = before.within(base, base + bytes).next().is_none();
                let aligned = hpa.wrapping_add(base - start) % bytes == 0;
                let size = after.at(base).unwrap().size;
                let new = empty && aligned && pte <= largest.bytes() && size == pte;
                assert!(!(fold && new), "{base:#x} is not folded");
                assert!(fold || !empty || size != bytes, "{base:#x} is folded");
            }
        }
    }

    pub fn unmap(&mut self, range: GpaRange) {
        let (mut storage, mut removed) = ([const { UnmapEntry::EMPTY }; 8], Vec::new());
        let (mut at, end) = (range.start().0, range.end().0);
        let drops = self.world.drops;
        loop {
            let rest = GpaRange::new(Gpa(at), end - at).unwrap();
            let (before, result, after) = self.run_removing(rest, |tables, guard, dropped| {
                let mut batch = slat::UnmapBatch::new(tables, &mut storage);
                let result = guard.unmap(rest, &mut batch);
                // If the removals are dropped, the memory is not handed out, and the next map
                // executes the invalidation.
                if drops {
                    dropped.set(guard.counts().entries_written != 0);
                } else {
                    removed.extend(batch.complete());
                }
                result
            });
            assert!(result.is_err() || result == Ok(self.counts.bytes_changed));
            let stopped = match result {
                Ok(_) => end,
                Err(Interruption { at, reason: UnmapError::Full }) => at.0,
                Err(Interruption { reason: UnmapError::CutsBlock { .. }, .. }) => {
                    assert!(self.cuts(&before, &rest));
                    return self.world.settle(&after);
                }
                Err(other) => panic!("{other:?}"),
            };
            let mut flat = self.world.flat.borrow_mut();
            let gone: Vec<_> = match at < stopped {
                true => flat.within(at, stopped).map(|(at, piece)| (at, *piece)).collect(),
                false => vec![],
            };
            // The memory that was handed out, byte for byte.
            let mut out = Flat::default();
            for leaves in removed.drain(..) {
                out.map(leaves.gpa.0, leaves.gpa.0 + leaves.bytes, leaves.hpa.0, leaves.attributes);
            }
            let sum = gone.iter().map(|(at, piece)| piece.end - at).sum::<u64>();
            assert_eq!(self.counts.bytes_changed, sum, "bytes unmapped");
            assert!(drops || out.merged() == Flat(gone.into_iter().collect()).merged());
            if at < stopped {
                flat.unmap(at, stopped);
            }
            drop(flat);
            self.world.settle(&after);
            if stopped == end {
                return;
            }
            at = stopped;
        }
    }

    pub fn rewrite(&mut self, range: GpaRange, rule: Rule) {
        let (before, result, after) =
            self.run(range, |guard| rule.call::<GroupedArm<G>>(guard, range));
        let (start, end) = (range.start().0, range.end().0);
        let whole = rule != Rule::Relax(Access::Read);
        if let Err(stopped) = result {
            assert!(matches!(stopped.reason, ChangeError::CutsBlock { .. }), "{stopped:?}");
            assert!(whole && self.cuts(&before, &range));
            return self.world.settle(&after);
        }
        let mut flat = self.world.flat.borrow_mut();
        for run in &before.runs {
            let Some(part) = run.clip(start, end) else { continue };
            let old = run.leaf.own;
            let new = rule.of::<GroupedArm<G>>(&run.leaf, run.leaf.marks);
            // Accessed state, and reads, apply to whole leaves; other changes leave the rest of a
            // leaf as it is.
            let state = Attributes { accessed: new.accessed, ..old } == new;
            let (from, to) = match state {
                true => (
                    floor(part.start, run.size),
                    (floor(part.end - 1, run.size) + run.size).min(run.end),
                ),
                false => (part.start, part.end),
            };
            for (_, piece) in flat.within(from, to) {
                piece.attributes = new;
            }
        }
        drop(flat);
        self.world.settle(&after);
    }

    pub fn split(&mut self, range: GpaRange, to: PageSize, frames: usize) {
        let platform = self.world.platform;
        let mut storage = Vec::new();
        let mut cache = cache::<GroupedArm<G>>(platform, &mut storage, frames);
        self.world.splits = true;
        let (_, result, after) = self.run(range, |guard| guard.split(range, to, &mut cache));
        self.world.splits = false;
        drop(cache);
        let end = match result {
            Ok(_) => range.end().0,
            Err(Interruption { at, reason: SplitError::CacheEmpty }) => at.0,
            Err(other) => panic!("{other:?}"),
        };
        self.world.settle(&after);
        if range.start().0 < end {
            for run in after.within(range.start().0, end) {
                assert!(
                    GroupedArm::<G>::entry_size(run.size) <= to.bytes(),
                    "{run:x?} is not split"
                );
            }
        }
    }

    pub fn collapse(&mut self, range: GpaRange, to: PageSize) {
        let (before, result, after) = self.run(range, |guard| guard.collapse(range, to));
        let bytes = result.unwrap();
        let mut made = 0;
        let mut flat = self.world.flat.borrow_mut();
        for run in after.runs.iter().filter(|run| !GroupedArm::<G>::is_group(run.size)) {
            for at in (run.start..run.end).step_by(run.size as usize) {
                let pte = before.at(at).map(|old| GroupedArm::<G>::entry_size(old.size));
                if pte == Some(run.size) {
                    continue;
                }
                made += run.size;
                let used = |piece: Attributes| (piece.accessed, piece.dirty);
                let all: Vec<_> =
                    flat.within(at, at + run.size).map(|(_, p)| used(p.attributes)).collect();
                for (_, piece) in flat.within(at, at + run.size) {
                    piece.attributes.accessed = all.iter().any(|used| used.0);
                    piece.attributes.dirty = all.iter().any(|used| used.1);
                }
            }
        }
        assert!(bytes >= made && (made != 0 || bytes == 0));
        drop(flat);
        self.world.settle(&after);
    }

    pub fn harvest(&mut self, range: GpaRange) {
        let words = (range.size() >> G).div_ceil(64) as usize;
        let mut bitmap = vec![0; words];
        let (before, result, after) = self.run(range, |guard| guard.harvest(range, &mut bitmap));
        let (start, end) = (range.start().0, range.end().0);
        if let Err(stopped) = result {
            assert!(matches!(stopped.reason, ChangeError::CutsBlock { .. }), "{stopped:?}");
            assert!(self.cuts(&before, &range));
            return self.world.settle(&after);
        }
        let mut expected = vec![0; words];
        let marks = self.world.marks();
        for (at, piece) in self.world.flat.borrow_mut().within(start, end) {
            if piece.attributes.dirty {
                set(&mut expected, (at - start) >> G, (piece.end - start) >> G);
                piece.attributes.dirty = piece.attributes.write && !marks;
            }
        }
        assert!(bitmap == expected, "exactly what is dirty");
        let grouped = |run: &Run| GroupedArm::<G>::is_group(run.size);
        assert_eq!(after.within(start, end).find(grouped), None, "who harvests wants pages");
        self.world.settle(&after);
    }

    pub fn age(&mut self, range: GpaRange, clear: bool) {
        let words = (range.size() >> G).div_ceil(64) as usize;
        let (mut young, mut unanswered) = (vec![0; words], vec![0; words]);
        let (before, result, after) = self.run(range, |guard| {
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            guard.age(range, &mut ages, AgeOptions { clear, ..AgeOptions::LEAVES })
        });
        assert_eq!(result.unwrap().unanswered, 0);
        let (start, end) = (range.start().0, range.end().0);
        let mut expected = vec![0; words];
        let mut flat = self.world.flat.borrow_mut();
        for (at, piece) in flat.within(start, end).filter(|(_, piece)| piece.attributes.accessed) {
            set(&mut expected, (at - start) >> G, (piece.end - start) >> G);
        }
        assert!(young == expected, "exactly what was used");
        if clear {
            for run in before.runs.iter() {
                let from = start.max(run.start).next_multiple_of(run.size);
                let to = floor(end.min(run.end), run.size);
                if from < to {
                    flat.within(from, to).for_each(|(_, piece)| piece.attributes.accessed = false);
                }
            }
        }
        drop(flat);
        let sizes = |tree: &Tree| {
            tree.runs.iter().map(|run| (run.size, run.start, run.bytes())).fold(
                Vec::<(u64, u64, u64)>::new(),
                |mut all, (size, start, bytes)| {
                    match all.last_mut() {
                        Some(last) if last.0 == size && last.1 + last.2 == start => last.2 += bytes,
                        _ => all.push((size, start, bytes)),
                    }
                    all
                },
            )
        };
        assert_eq!(sizes(&before), sizes(&after), "nothing is unfolded");
        self.world.settle(&after);
    }

    /// Unfolds while hardware uses an address, in the invalidation, through a TLB that holds the
    /// group.
    pub fn unfold(&mut self, range: GpaRange, beside: Option<(u64, bool)>) {
        let (flat, hardware) = (self.world.flat.clone(), self.world.hardware);
        let groups = self.world.tree();
        let mut beside = beside;
        self.world.platform.meanwhile(Some(Box::new(move |platform, moment| {
            if moment == Moment::Invalidating
                && let Some((gpa, write)) = beside.take()
            {
                let held = groups.at(gpa).map(|run| (floor(gpa, run.size), run.size));
                if let Accessed::Done { .. } =
                    hardware.access(platform, hardware.root(), gpa, write)
                    && let Some((start, size)) = held
                {
                    used(&mut flat.borrow_mut(), start, start + size, write);
                }
            }
        })));
        let (before, result, after) = self.run(range, |guard| guard.unfold(range));
        self.world.platform.meanwhile(None);
        let grouped = |run: &Run| GroupedArm::<G>::is_group(run.size);
        let mut expected = Vec::new();
        for run in before.runs.iter().filter(|run| grouped(run)) {
            let all = (run.start..run.end).step_by(run.size as usize);
            let touched = |&at: &u64| at < range.end().0 && range.start().0 < at + run.size;
            expected.extend(all.filter(touched).map(|at| (at, run.size)));
        }
        let groups = self.executed().into_iter().map(|what| what.range.unwrap());
        let groups: Vec<_> = groups.map(|group| (group.start().0, group.size())).collect();
        assert_eq!(groups, expected, "one invalidation a group");
        let bytes = expected.iter().map(|(_, size)| size).sum();
        let ptes = expected.iter().map(|(_, size)| size / GroupedArm::<G>::entry_size(*size)).sum();
        assert_eq!((result, self.counts.bytes_changed), (Ok(bytes), bytes));
        let breaks = self.world.bbm == BreakBeforeMake::Always;
        let invalidations = expected.len() as u64;
        let (entries_written, broken) = (2 * ptes, if breaks { ptes } else { 0 });
        assert!(self.counts.entries_read >= invalidations);
        let costs = OpCounts { entries_written, broken, invalidations, ..self.counts };
        assert_eq!(self.counts, costs);
        assert!(groups.is_empty() || self.events.last() == Some(&Event::Publish), "unseen");
        assert_eq!(after.within(range.start().0, range.end().0).find(grouped), None);
        // The access may have come in an invalidation that completed later, owed by an earlier
        // operation.
        let tree = self.world.tree();
        self.world.settle(&tree);
    }

    pub fn access(&mut self, gpa: u64, write: bool) {
        self.world.access(gpa, write, false);
        let tree = self.world.tree();
        self.world.settle(&tree);
    }

    /// Checks lookups: a group is one leaf.
    pub fn look(&mut self, gpa: u64) {
        let page = GpaRange::new(Gpa(floor(gpa, 1 << G)), 1 << G).unwrap();
        self.world.translate(gpa);
        self.world.look(page);
        self.world.flush(page);
        let all = 1 << self.world.hardware.address_bits();
        self.world.look(GpaRange::new(Gpa(0), all).unwrap());
    }
}

/// Checks that a group whose members became single leaves was invalidated as a whole, as one leaf
/// of its level.
fn check_unfolded<const G: u32>(
    before: &Tree,
    after: &Tree,
    executed: &[Invalidation],
    bbm: BreakBeforeMake,
) {
    for run in before.runs.iter().filter(|run| GroupedArm::<G>::is_group(run.size)) {
        let pte = size(GroupedArm::<G>::entry_size(run.size));
        for at in (run.start..run.end).step_by(run.size as usize) {
            let there = |gpa| after.at(gpa).is_some_and(|now| now.size < run.size);
            if !there(at) && !there(at + run.size - 1) {
                continue;
            }
            let covers = |what: &&Invalidation| {
                what.range.is_none_or(|r| r.start().0 <= at && at + run.size <= r.end().0)
                    && what.leaf.is_none_or(|hint| hint == pte)
            };
            let found = executed.iter().find(covers);
            let found = found.unwrap_or_else(|| panic!("{at:#x} unfolded: {executed:?}"));
            let hint = (bbm == BreakBeforeMake::Always && !found.tables).then_some(pte);
            assert_eq!(found.leaf, found.range.and(hint));
        }
    }
}

fn used(flat: &mut Flat, start: u64, end: u64, write: bool) {
    for (_, piece) in flat.within(start, end) {
        piece.attributes.accessed = true;
        piece.attributes.dirty |= write;
    }
}

fn set(bits: &mut [u64], first: u64, end: u64) {
    (first..end).for_each(|page| bits[page as usize / 64] |= 1 << (page % 64));
}
