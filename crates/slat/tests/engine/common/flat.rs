//! The flat model: which bytes are mapped where, with which attributes. It has no leaves and no
//! tables.

use super::hardware::Tree;
use slat::Attributes;
use std::collections::BTreeMap;

/// A piece of mapped bytes, by its first address: its end, its host address, its attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    pub end: u64,
    pub hpa: u64,
    pub attributes: Attributes,
}

#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Flat(pub BTreeMap<u64, Piece>);

impl Flat {
    /// Makes the model of what an independent walk of the tables found.
    pub fn of(tree: &Tree) -> Self {
        let pieces = tree.runs.iter().map(|run| {
            let attributes = run.leaf.own;
            (run.start, Piece { end: run.end, hpa: run.leaf.oa, attributes })
        });
        Self(pieces.collect()).merged()
    }

    /// Cuts a piece in two at `at`.
    fn cut(&mut self, at: u64) {
        if let Some((&start, &piece)) = self.0.range(..at).next_back()
            && piece.end > at
        {
            self.0.insert(start, Piece { end: at, ..piece });
            self.0.insert(at, Piece { hpa: piece.hpa + (at - start), ..piece });
        }
    }

    /// Returns the pieces of `start..end`, clipped to it.
    pub fn within(&mut self, start: u64, end: u64) -> impl Iterator<Item = (u64, &mut Piece)> {
        self.cut(start);
        self.cut(end);
        self.0.range_mut(start..end).map(|(start, piece)| (*start, piece))
    }

    pub fn at(&self, gpa: u64) -> Option<(u64, Attributes)> {
        let (start, piece) = self.0.range(..=gpa).next_back()?;
        (piece.end > gpa).then(|| (piece.hpa + (gpa - start), piece.attributes))
    }

    pub fn unmap(&mut self, start: u64, end: u64) {
        self.cut(start);
        self.cut(end);
        self.0.retain(|&at, _| at < start || at >= end);
    }

    /// Maps the parts that are not mapped yet.
    pub fn map(&mut self, start: u64, end: u64, hpa: u64, attributes: Attributes) {
        let there: Vec<_> = self.within(start, end).map(|(at, piece)| (at, piece.end)).collect();
        let mut from = start;
        for (at, next) in there.into_iter().chain([(end, end)]) {
            if from < at {
                let piece = Piece { end: at, hpa: hpa + (from - start), attributes };
                self.0.insert(from, piece);
            }
            from = next;
        }
    }

    /// Returns the model with contiguous pieces joined, so that equal models compare equal.
    pub fn merged(&self) -> Self {
        let mut merged: BTreeMap<u64, Piece> = BTreeMap::new();
        for (&at, &piece) in &self.0 {
            if let Some((&start, last)) = merged.iter_mut().next_back()
                && last.end == at
                && last.hpa + (at - start) == piece.hpa
                && last.attributes == piece.attributes
            {
                last.end = piece.end;
            } else {
                merged.insert(at, piece);
            }
        }
        Self(merged)
    }
}
