//! Operations that change the shape of the tables: map, unmap, split, reclaim.

use super::super::hardware::{Hardware, Run, Tree};
use super::super::{Event, Moment};
use super::links::{clipped, filled, retire_around};
use super::{
    ALL, Mapping, Outcome, VMID, World, cache, floor, invalidations, owes, same_but_state, size,
};
use slat::{
    Attributes, BreakBeforeMake, ChangeError, Execute, Gpa, GpaRange, Hpa, Interruption,
    Invalidation, Maintenance, MapError, Memory, PageSize, SplitError, SplitWalk, UnmapEntry,
    UnmapError, UnmappedRun,
};

/// Returns the maintenance that memory needs before the guest sees it.
pub fn maintenance(attributes: &Attributes) -> Option<Maintenance> {
    match (attributes.memory, attributes.execute) {
        (Memory::Device | Memory::DeviceStrict, _) => None,
        (_, Execute::None) => Some(Maintenance::Data),
        _ => Some(Maintenance::Instructions),
    }
}

impl<H: Hardware> World<'_, H> {
    pub fn host_error(&self, hpa: u64, bytes: u64) -> Option<MapError> {
        let bad = !hpa.is_multiple_of(1 << H::PAGE)
            || hpa.checked_add(bytes).is_none_or(|end| end > 1 << H::OUTPUT);
        let page = size(1 << H::PAGE);
        bad.then_some(MapError::HostAddress { hpa: Hpa(hpa), page, bits: H::OUTPUT })
    }

    /// Maps; returns where it stopped if the cache ran out.
    pub fn map(&mut self, range: GpaRange, what: Mapping, frames: usize) -> Option<u64> {
        let before = self.begin();
        let mut storage = Vec::new();
        let mut cache = cache::<H>(self.platform, &mut storage, frames);
        let Mapping { hpa, attributes, largest } = what;
        let (start, end) = (range.start().0, range.end().0);
        // Memory is made coherent before the guest can reach it.
        let hardware = self.hardware;
        self.platform.meanwhile(Some(Box::new(move |platform, moment| {
            if let Moment::Maintain { hpa: memory, bytes } = moment {
                let at = start.wrapping_add(memory.wrapping_sub(hpa));
                let there = hardware.part(platform, at, at + bytes).runs;
                assert_eq!(there, [], "published before it was coherent");
            }
        })));
        let removing = self.removing;
        let out = self.run(|guard| guard.map(range, Hpa(hpa), attributes, largest, &mut cache));
        self.platform.meanwhile(None);
        let left = cache.len();
        drop(cache);

        let mut legal: Vec<_> =
            self.range_errors(&range).into_iter().map(MapError::Range).collect();
        legal.extend(self.host_error(hpa, range.size()));
        legal.extend(self.leaf_size_error(largest).map(MapError::LeafSize));
        legal.extend(self.hardware.refuses(attributes).into_iter().map(MapError::Attributes));
        if !legal.is_empty() {
            self.refused(&before, &out, start, &legal);
            return None;
        }
        let conflict = before.within(start, end).find(|run| {
            run.leaf.oa != hpa + (run.start - start) || !same_but_state(run.leaf.own, attributes)
        });
        if let Some(run) = conflict {
            let into = run.start - floor(run.start, run.size);
            let reason = MapError::Occupied { size: size(run.size), hpa: Hpa(run.leaf.oa - into) };
            self.refused(&before, &out, run.start, &[reason]);
            return None;
        }

        let (bytes, stopped) = match out.result {
            Ok(bytes) => (Some(bytes), None),
            Err(Interruption { at, reason }) => {
                assert_eq!((reason, left), (MapError::CacheEmpty, 0));
                assert!(start <= at.0 && at.0 < end && before.at(at.0).is_none(), "{at}");
                (None, Some(at.0))
            }
        };
        let reached = stopped.unwrap_or(end);
        self.flat_map(start, reached - start, what);
        let new = Vec::from_iter(gaps(&before, start, reached));
        let sum = new.iter().map(|(from, to)| to - from).sum::<u64>();
        assert!(bytes.is_none_or(|bytes| bytes == sum), "bytes mapped: {bytes:?}, not {sum:#x}");
        assert_eq!(out.owed, None, "nothing invalid is cached");
        assert_eq!(out.events.last(), Some(&Event::Publish));
        let maintained = maintained(&out.events, maintenance(&attributes).as_ref());
        let expected = new.iter().map(|(from, to)| (hpa + (from - start), hpa + (to - start)));
        let wanted = maintenance(&attributes).map_or(Vec::new(), |_| expected.collect());
        assert_eq!(maintained, wanted, "memory made coherent");
        // The invalidations of unmaps that have not completed, and no others.
        let refills = self.refill_breaks() && removing;
        assert!(refills || out.counts.invalidations == 0, "{:?}", out.events);
        for what in invalidations(&out.events) {
            let pte = what.range.unwrap();
            let all = Invalidation { vmid: VMID, range: Some(pte), leaf: None, tables: true };
            assert_eq!(what, all, "an entry, whatever was there");
            let size = (0..=self.hardware.root().height).find(|&h| H::size(h) == pte.size());
            assert!(size.is_some() && pte.start().0.is_multiple_of(pte.size()), "{pte:?}");
            // The entry got leaves, or a table for which there were no more table pages.
            let (_, linked) = filled::<H>(&before, &out.tree);
            let there = |&(from, to): &(u64, u64)| from < pte.end().0 && pte.start().0 < to;
            assert!(new.iter().chain(&linked).any(there), "{pte:?} stays as it was");
        }
        let built = out.counts.tables_built as usize;
        assert_eq!(out.tree.tables.len() - before.tables.len(), built);
        assert_eq!(built + left, frames);
        let (ptes, links) = filled::<H>(&before, &out.tree);
        let leaves = |(from, to)| out.tree.within(from, to).map(|run| run.leaves()).sum::<u64>();
        let all: u64 = new.iter().copied().map(leaves).sum();
        let built: u64 = links.iter().flat_map(|link| clipped(&new, *link)).map(leaves).sum();
        let stores = ptes + links.len() as u64 + all - built;
        assert_eq!(out.counts.entries_written, stores, "a store an entry");
        self.check_largest(&before, &out.tree, (start, end), what, stopped);
        self.settle(&out.tree);
        stopped
    }

    /// Maps in the flat model what is not mapped yet.
    pub fn flat_map(&self, start: u64, bytes: u64, what: Mapping) {
        self.flat.borrow_mut().map(start, start + bytes, what.hpa, what.attributes);
    }

    /// Checks that new leaves are the largest that the range, the alignment, `largest` and existing
    /// tables allow.
    fn check_largest(
        &self,
        before: &Tree,
        tree: &Tree,
        (start, end): (u64, u64),
        what: Mapping,
        stopped: Option<u64>,
    ) {
        let sizes = H::sizes();
        let most = H::size(self.hardware.root().height).min(what.largest.bytes());
        for run in tree.within(start, stopped.unwrap_or(end)) {
            let new = before.at(run.start).is_none();
            assert!(!new || run.size <= what.largest.bytes(), "{run:x?} is too large");
            let Some(&larger) = sizes.iter().rev().find(|&&size| size > run.size) else {
                continue;
            };
            if !new || larger > most {
                continue;
            }
            for base in (floor(run.start, larger)..run.end).step_by(larger as usize) {
                let inside = base >= start && base + larger <= end;
                let aligned =
                    (what.hpa.wrapping_sub(start).wrapping_add(base)).is_multiple_of(larger);
                let empty = before.within(base, base + larger).next().is_none()
                    && before.table(base, H::height(larger)).is_none();
                assert!(
                    !(inside && aligned && empty && tree.at(base).is_some_and(|r| r.size < larger)),
                    "{run:x?} could be of {larger:#x}"
                );
            }
        }
    }

    /// Splits; returns where it stopped if the cache ran out.
    pub fn split<W: SplitWalk>(
        &mut self,
        range: GpaRange,
        to: PageSize,
        frames: usize,
        together: usize,
    ) -> Option<u64> {
        let before = self.begin();
        let mut storage = Vec::new();
        let mut cache = cache::<H>(self.platform, &mut storage, frames);
        self.splits = true;
        let out = self.run(|guard| guard.split_by::<W>(range, to, &mut cache, together));
        self.splits = false;
        let left = cache.len();
        drop(cache);

        let (start, end) = (range.start().0, range.end().0);
        let mut legal: Vec<_> =
            self.range_errors(&range).into_iter().map(SplitError::Range).collect();
        legal.extend(self.leaf_size_error(to).map(SplitError::LeafSize));
        if !legal.is_empty() {
            self.refused(&before, &out, start, &legal);
            return None;
        }
        let (bytes, stopped) = match out.result {
            Ok(bytes) => (Some(bytes), None),
            Err(Interruption { at, reason }) => {
                assert_eq!((reason, left), (SplitError::CacheEmpty, 0));
                assert!(start <= at.0 && at.0 < end, "{at}");
                (None, Some(at.0))
            }
        };
        let tree = &out.tree;
        let mut split = Vec::new();
        for run in before.runs.iter().filter(|run| run.size > to.bytes()) {
            let blocks = (run.start..run.end).step_by(run.size as usize);
            split.extend(
                blocks.filter(|&base| tree.at(base).unwrap().size != run.size).map(|base| Run {
                    start: base,
                    end: base + run.size,
                    ..*run
                }),
            );
        }
        let sum = split.iter().map(Run::bytes).sum::<u64>();
        assert!(bytes.is_none_or(|bytes| bytes == sum), "bytes split: {bytes:?}, not {sum:#x}");
        let breaks = self.bbm == BreakBeforeMake::Always;
        assert_eq!(out.counts.broken, if breaks { split.len() as u64 } else { 0 });
        assert_eq!(out.counts.bytes_changed, sum);
        // A block that hardware uses meanwhile is built again.
        if !self.beside.get() {
            assert_eq!(out.counts.tables_built as usize, tree.tables.len() - before.tables.len());
            let (ptes, links) = filled::<H>(&before, tree);
            // Each invalidation covers some of the blocks, and no more than those.
            let mut left = split.clone();
            for what in invalidations(&out.events) {
                let hull = what.range.unwrap();
                let inside = |run: &Run| hull.start().0 <= run.start && run.end <= hull.end().0;
                let (these, others): (Vec<_>, Vec<_>) = left.into_iter().partition(inside);
                assert_eq!(owes(these, &[], self.bbm), Some(what));
                left = others;
            }
            assert!(left.is_empty() || !breaks, "{left:x?}");
            let stores = links.len() as u64 * if breaks { 2 } else { 1 };
            assert_eq!(out.counts.entries_written, ptes + stores, "a store an entry");
        }
        if breaks {
            assert_eq!(out.owed, None, "completed inside");
            let all = out.counts.invalidations;
            let most = (split.len() as u64).div_ceil(together.clamp(1, W::MERGED) as u64);
            assert!(most <= all && all <= split.len() as u64, "{all} for {}", split.len());
            let seen = split.is_empty() || out.events.last() == Some(&Event::Publish);
            assert!(seen, "new tables unseen");
        } else {
            assert_eq!(out.counts.invalidations, 0);
            assert_eq!(out.owed, owes(split.iter().copied(), &[], self.bbm));
        }
        assert_eq!(before.tables.len() + frames - left, tree.tables.len(), "frames taken");
        for run in &tree.runs {
            for at in [run.start, run.end - run.size] {
                let old = before.at(at).unwrap().size;
                let wanted = split_size::<H>(old, at, (start, end), to.bytes());
                match stopped {
                    Some(stopped) if at + run.size > stopped => {
                        assert!(wanted <= run.size && run.size <= old, "{run:x?}, was {old:#x}");
                    }
                    _ => assert_eq!(run.size, wanted, "{run:x?}, was {old:#x}"),
                }
            }
        }
        if let Some(at) = stopped {
            assert!(tree.at(at).unwrap().size > to.bytes(), "{at:#x} is split already");
        }
        self.settle(&out.tree);
        stopped
    }

    /// Unmaps with room for `room` removals; returns where it stopped if that was too little.
    pub fn unmap(&mut self, range: GpaRange, room: usize) -> Option<u64> {
        let before = self.begin();
        let mut storage = Vec::new();
        storage.resize_with(room, || UnmapEntry::EMPTY);
        let (hardware, platform) = (self.hardware, self.platform);
        let (drops, pending) = (self.drops, self.pending);
        let out = self.run_removing(|_, guard, dropped| {
            let mut batch = guard.unmap_batch(&mut storage);
            let result = guard.unmap(range, &mut batch);
            let full = batch.is_full();
            let tree = hardware.tree(platform);
            assert_eq!(invalidations(&platform.events.borrow()), [], "nothing yet");
            if !matches!(result, Ok(_) | Err(Interruption { reason: UnmapError::Full, .. })) {
                return (result, Vec::new(), full);
            }
            if drops {
                dropped.set(tree.runs != before.runs || tree.tables != before.tables);
                return (result, Vec::new(), full);
            }
            let removed: Vec<_> = batch.complete().collect();
            assert_eq!(batch.complete().next(), None, "handed out twice");
            (result, removed, full)
        });
        let Outcome { result: (result, removed, full), counts, owed, events, tree } = out;
        let executed = invalidations(&events);
        let out = Outcome { result, counts, owed, events, tree };
        let (start, end) = (range.start().0, range.end().0);
        let legal = self.change_errors(&before, &range, true);
        if !legal.is_empty() {
            let legal: Vec<_> = legal.into_iter().map(unmap_error).collect();
            self.refused(&before, &out, start, &legal);
            return None;
        }
        let stopped = match out.result {
            Ok(_) => None,
            Err(Interruption { at, reason }) => {
                assert!(reason == UnmapError::Full && full, "{reason}");
                assert!(start <= at.0 && before.at(at.0).is_some(), "{at}");
                assert!(room == 0 || start < at.0, "no progress");
                Some(at.0)
            }
        };
        let reached = stopped.unwrap_or(end);
        self.flat.borrow_mut().unmap(start, reached);
        let gone: Vec<_> =
            if start < reached { before.within(start, reached).collect() } else { Vec::new() };
        let sum = gone.iter().map(Run::bytes).sum::<u64>();
        assert!(out.result.is_err() || out.result == Ok(sum), "bytes unmapped");
        assert_eq!(out.counts.bytes_changed, sum);
        let mut retired: Vec<_> = before
            .tables
            .values()
            .filter(|table| table.within(start, reached))
            .map(|table| (table.start, table.end))
            .collect();
        // In tables of pages that the range covers, leaves are retired as they are taken out.
        let pages = retired.iter().filter(|(start, end)| H::height(end - start) == 1);
        let pages = pages.flat_map(|&(start, end)| before.within(start, end));
        let at_once = pages.map(|run| run.bytes()).sum::<u64>() >> H::PAGE;
        if start < reached {
            for at in [start, reached - 1] {
                retire_around(&before, (start, reached), at, &mut retired);
            }
        }
        self.retired += retired.len();
        self.unlinked += if drops { retired.len() } else { 0 };
        assert_eq!(out.owed, None, "what is owed is in the batch");
        let ptes: u64 = retired.iter().map(|(start, end)| emptied::<H>(end - start)).sum();
        let leaves = gone.iter().map(Run::leaves).sum::<u64>();
        assert_eq!(out.counts.entries_written, leaves + ptes - at_once);
        assert_eq!(out.tree.tables.len(), before.tables.len() - retired.len(), "tables left");
        if drops {
            assert_eq!(executed, []);
        } else {
            let merged = merged(&gone);
            assert_eq!(removed, merged, "removed, in order");
            if let Some(at) = stopped {
                // It stopped for lack of room, and for no other reason.
                let run = before.at(at).unwrap();
                let first = run.clip(at, at + run.size).unwrap();
                assert_eq!(merged_onto(merged, &[first]).len(), room + 1);
            }
            let owed = owes(gone, &retired, self.bbm);
            let expected = if pending { Some(ALL) } else { owed };
            assert_eq!(executed, Vec::from_iter(expected));
        }
        self.settle(&out.tree);
        stopped
    }

    /// Gives tables back: none while a thread may be in them.
    pub fn reclaim(&mut self, inside: bool, refreshes: bool) {
        let before = self.begin();
        let expected = std::mem::take(&mut self.retired);
        let mut freed = 0;
        if inside {
            let mut guard = self.tables.enter(self.other.as_mut().unwrap()).unwrap();
            assert_eq!(self.tables.reclaim(), 0, "somebody is inside");
            assert_eq!(self.platform.live(), 1 + before.tables.len() + expected);
            if refreshes {
                guard.refresh();
                freed = self.tables.reclaim();
                assert_eq!(freed, expected, "nobody is inside any more");
            }
        }
        freed += self.tables.reclaim();
        assert_eq!(freed, expected, "tables given back");
        let invalidates = std::mem::take(&mut self.unlinked) != 0;
        let events = if invalidates { vec![Event::Invalidate(ALL)] } else { vec![] };
        assert_eq!(self.platform.take_events(), events, "one for all that nobody invalidated");
        let tree = self.tree();
        assert_eq!(tree.tables, before.tables);
        if !self.pending {
            self.machine(|machine| machine.check_fresh(&tree));
        }
        self.settle(&tree);
    }
}

/// Converts a refusal of any change to that of an unmap.
fn unmap_error(error: ChangeError) -> UnmapError {
    match error {
        ChangeError::Range(error) => UnmapError::Range(error),
        ChangeError::CutsBlock { size } => UnmapError::CutsBlock { size },
        other => panic!("{other} is no reason to refuse a range"),
    }
}

/// Returns the number of entries of a table whose own entry covers `size` bytes, with that entry.
pub fn emptied<H: Hardware>(size: u64) -> u64 {
    H::entries(H::height(size) - 1) as u64 + 1
}

/// Returns the parts of `start..end` that are not mapped.
pub fn gaps(tree: &Tree, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let there = if start < end { Vec::from_iter(tree.within(start, end)) } else { Vec::new() };
    let mut from = start;
    let ends = there.into_iter().map(|run| (run.start, run.end)).chain([(end, end)]);
    ends.filter_map(move |(at, next)| {
        let gap = (from, at);
        from = next;
        (gap.0 < gap.1).then_some(gap)
    })
}

/// Returns the memory that was made coherent, with neighbours joined.
pub fn maintained(events: &[Event], wanted: Option<&Maintenance>) -> Vec<(u64, u64)> {
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    for event in events {
        if let Event::Maintain { hpa, bytes, what } = event {
            assert_eq!(Some(what), wanted);
            match pieces.last_mut() {
                Some(last) if last.1 == *hpa => last.1 += bytes,
                _ => pieces.push((*hpa, hpa + bytes)),
            }
        }
    }
    pieces
}

/// Returns the leaves that were removed, with neighbours of one size and kind joined.
fn merged(gone: &[Run]) -> Vec<UnmappedRun> {
    merged_onto(Vec::new(), gone)
}

fn merged_onto(mut removed: Vec<UnmappedRun>, gone: &[Run]) -> Vec<UnmappedRun> {
    for run in gone {
        let new = UnmappedRun {
            gpa: Gpa(run.start),
            bytes: run.bytes(),
            size: size(run.size),
            hpa: Hpa(run.leaf.oa),
            attributes: run.leaf.own,
        };
        match removed.last_mut() {
            Some(last)
                if last.gpa.0 + last.bytes == new.gpa.0
                    && last.hpa.0 + last.bytes == new.hpa.0
                    && (last.size, last.attributes) == (new.size, new.attributes) =>
            {
                last.bytes += new.bytes;
            }
            _ => removed.push(new),
        }
    }
    removed
}

/// Returns the size that a leaf of `old` bytes around `at` has after a split of `start..end`.
/// Outside, it is the largest that a table on the path can hold.
fn split_size<H: Hardware>(old: u64, at: u64, (start, end): (u64, u64), to: u64) -> u64 {
    let overlaps = |size| floor(at, size) < end && floor(at, size) + size > start;
    let allowed = |size: &u64| *size <= to || !overlaps(*size);
    if allowed(&old) {
        return old;
    }
    H::sizes().into_iter().filter(|&size| size < old).find(allowed).unwrap()
}
