//! The flat model: for each run of bytes, its start as the key, its end, its host address and its
//! attributes. It knows only the leaves that its callers report.

use crate::machine::Machine;
use slat::*;
use std::collections::BTreeMap;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    end: u64,
    hpa: u64,
    attributes: Attributes,
}

#[derive(Default)]
pub struct Model {
    pieces: BTreeMap<u64, Piece>,
    /// Set once tables were protected as a whole: then a leaf's own bits may have more rights than
    /// the walk gives.
    pub subtrees: bool,
}

/// Returns the range extended to all leaves that it overlaps.
pub fn leaves_of<F: Format>(guard: &Guard<'_, '_, F, Machine>, at: GpaRange) -> GpaRange {
    guard.leaves(at).unwrap().fold(at, |hull, leaf| {
        let leaf = leaf.unwrap();
        hull.hull(&GpaRange::new(leaf.gpa, leaf.size.bytes()).unwrap())
    })
}

/// Returns the leaves that lie in the range as a whole.
pub fn leaves_within<F: Format>(guard: &Guard<'_, '_, F, Machine>, at: GpaRange) -> Vec<GpaRange> {
    let leaves = guard.leaves(at).unwrap().map(|leaf| leaf.unwrap());
    let leaves = leaves.map(|leaf| GpaRange::new(leaf.gpa, leaf.size.bytes()).unwrap());
    leaves.filter(|leaf| leaf.hull(&at) == at).collect()
}

impl Model {
    fn cut(&mut self, at: u64) {
        if let Some((&start, &piece)) = self.pieces.range(..at).next_back()
            && piece.end > at
        {
            self.pieces.insert(start, Piece { end: at, ..piece });
            self.pieces.insert(at, Piece { hpa: piece.hpa + (at - start), ..piece });
        }
    }

    fn within(&mut self, start: u64, end: u64) -> impl Iterator<Item = (u64, &mut Piece)> {
        self.cut(start);
        self.cut(end);
        self.pieces.range_mut(start..end).map(|(start, piece)| (*start, piece))
    }

    pub fn each(&mut self, at: GpaRange, change: impl Fn(&mut Attributes)) {
        self.within(at.start().0, at.end().0).for_each(|(_, piece)| change(&mut piece.attributes));
    }

    pub fn mapped(
        &mut self,
        at: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        result: &Result<u64, Halted<MapError>>,
    ) {
        let (start, end) = (at.start().0, at.end().0);
        let other = self.within(start, end).any(|(from, piece)| {
            piece.hpa != hpa.0 + (from - start) || piece.attributes.software != attributes.software
        });
        let end = match result {
            Ok(_) => end,
            Err(Halted { why: MapError::Occupied { .. }, .. }) => start,
            Err(Halted { at, why: MapError::CacheEmpty }) => at.0,
            Err(error) => panic!("{error}"),
        };
        assert!(!other || end == start, "mapped over other memory");
        let there: Vec<_> = match end > start {
            true => self.within(start, end).map(|(from, piece)| (from, piece.end)).collect(),
            false => Vec::new(),
        };
        let (mut from, mut new) = (start, 0);
        for (at, next) in there.into_iter().chain([(end, end)]) {
            if from < at {
                let piece = Piece { end: at, hpa: hpa.0 + (from - start), attributes };
                self.pieces.insert(from, piece);
                new += at - from;
            }
            from = next;
        }
        if let Ok(bytes) = result {
            assert_eq!(*bytes, new, "bytes that were not mapped before");
        }
    }

    pub fn unmapped(
        &mut self,
        at: GpaRange,
        result: &Result<u64, Halted<UnmapError>>,
        removed: &[Removed],
    ) {
        let end = match result {
            Ok(_) => at.end().0,
            Err(Halted { why: UnmapError::CutsBlock { .. }, .. }) => at.start().0,
            Err(Halted { at, why: UnmapError::Full }) => at.0,
            Err(error) => panic!("{error}"),
        };
        let mut told = 0;
        for leaf in removed {
            assert!(leaf.gpa.0 >= at.start().0 && leaf.gpa.0 + leaf.bytes <= end);
            let subtrees = self.subtrees;
            for (from, piece) in self.within(leaf.gpa.0, leaf.gpa.0 + leaf.bytes) {
                let write = if subtrees { leaf.attributes.write } else { piece.attributes.write };
                let attributes = Attributes { write, ..piece.attributes };
                assert_eq!(
                    (leaf.hpa.0 + (from - leaf.gpa.0), leaf.attributes),
                    (piece.hpa, attributes)
                );
                told += piece.end - from;
            }
        }
        if end > at.start().0 {
            let all = self.within(at.start().0, end).map(|(from, piece)| piece.end - from);
            assert_eq!(all.sum::<u64>(), told, "what was unmapped was handed out");
            self.pieces.retain(|&from, _| from < at.start().0 || from >= end);
        } else {
            assert!(removed.is_empty());
        }
    }

    pub fn changed(
        &mut self,
        at: GpaRange,
        result: &Result<u64, Halted<ChangeError>>,
        change: impl Fn(&mut Attributes),
    ) {
        match result {
            Ok(_) => self.each(at, change),
            Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Checks that the bits of `bitmap` name exactly the pages that `wanted` does.
    pub fn named(
        &mut self,
        at: GpaRange,
        shift: u32,
        bitmap: &[u64],
        wanted: impl Fn(&Attributes) -> bool,
    ) {
        let mut expected = vec![0u64; bitmap.len()];
        for (from, piece) in self.within(at.start().0, at.end().0) {
            if wanted(&piece.attributes) {
                for page in (from - at.start().0) >> shift..(piece.end - at.start().0) >> shift {
                    expected[page as usize / 64] |= 1 << (page % 64);
                }
            }
        }
        assert_eq!(bitmap, expected, "pages named in {at}");
    }

    /// Merges the state of each block: it is accessed, or dirty, if any part of it was.
    pub fn merge<F: Format>(&mut self, guard: &Guard<'_, '_, F, Machine>, at: GpaRange) {
        for leaf in guard.leaves(at).unwrap().map(|leaf| leaf.unwrap()) {
            let (start, end) = (leaf.gpa.0, leaf.gpa.0 + leaf.size.bytes());
            let (accessed, dirty) =
                self.within(start, end).fold((false, false), |(accessed, dirty), (_, piece)| {
                    (accessed | piece.attributes.accessed, dirty | piece.attributes.dirty)
                });
            for (_, piece) in self.within(start, end) {
                (piece.attributes.accessed, piece.attributes.dirty) = (accessed, dirty);
            }
        }
    }

    /// Checks that the tables agree with the model.
    pub fn compare<F: Format>(&mut self, guard: &Guard<'_, '_, F, Machine>, bits: u32) {
        let all = GpaRange::new(Gpa(0), 1 << bits).unwrap();
        let mut told = 0;
        for leaf in guard.leaves(all).unwrap().map(|leaf| leaf.unwrap()) {
            let (mut at, end) = (leaf.gpa.0, leaf.gpa.0 + leaf.size.bytes());
            told += leaf.size.bytes();
            while at < end {
                let found = self.pieces.range(..=at).next_back();
                let (&start, piece) = found.unwrap_or_else(|| panic!("{at:#x} is not mapped"));
                assert!(piece.end > at, "{at:#x} is not mapped");
                let hpa = piece.hpa + (at - start);
                assert_eq!(leaf.hpa.0 + (at - leaf.gpa.0), hpa, "where {at:#x} points");
                assert_eq!(leaf.attributes, piece.attributes, "attributes of {at:#x}");
                at = piece.end.min(end);
            }
        }
        let all = self.pieces.iter().map(|(start, piece)| piece.end - start);
        assert_eq!(told, all.sum::<u64>(), "bytes that are mapped");
    }
}
