//! Operations on ranges: pieces of a range, leaf sizes that fit, and leaves that cross its ends.

use crate::host::Host;
use slat::{Contention, Format, Gpa, GpaRange, Guard, PageSize};

/// The size of the pieces that a thread works on inside the tables. The guest's unlinked tables are
/// not freed before the thread leaves.
#[cfg(not(loom))]
const PIECE: u64 = 1 << 30;
/// A small size, so that a range of several pieces fits into a loom model.
#[cfg(loom)]
const PIECE: u64 = 1 << 12;

/// Cuts `range` into pieces that end at multiples of [`PIECE`], or of `block` if that is larger.
pub(crate) fn pieces(range: GpaRange, block: PageSize) -> impl Iterator<Item = GpaRange> {
    let piece = PIECE.max(block.bytes());
    let (mut start, end) = (range.start().0, range.end().0);
    core::iter::from_fn(move || {
        let next = (start / piece + 1).saturating_mul(piece).min(end);
        let part = GpaRange::new(Gpa(start), next.checked_sub(start)?).ok();
        start = next;
        part
    })
}

/// Returns the leaf that has `at` inside it, not at its start, if there is one.
pub(crate) fn cut_by<F: Format, H: Host>(
    guard: &Guard<'_, '_, F, H>,
    at: Gpa,
) -> Result<Option<GpaRange>, Contention> {
    let Some(leaf) = guard.translate(at)? else { return Ok(None) };
    let start = at.0 & !(leaf.size.bytes() - 1);
    let cut = (start != at.0).then(|| GpaRange::new(Gpa(start), leaf.size.bytes()));
    Ok(cut.map(|leaf| leaf.expect("a leaf is not empty")))
}

/// Widens `range` to include the whole leaves that cross its ends. These leaves may reach into
/// another memslot: a caller that counts pages clips the result to its memslot.
pub(crate) fn widened<F: Format, H: Host>(
    guard: &Guard<'_, '_, F, H>,
    range: GpaRange,
) -> Result<GpaRange, Contention> {
    let start = cut_by(guard, range.start())?.map_or(range.start(), |leaf| leaf.start());
    let end = cut_by(guard, range.end())?.map_or(range.end(), |leaf| leaf.end());
    Ok(GpaRange::new(start, end.0 - start.0).expect("wider than a range"))
}

/// Returns the largest leaf size of the format, at most `largest`, that `fits` accepts; or a page.
#[inline]
pub(crate) fn fitting<F: Format>(largest: PageSize, fits: impl Fn(u64) -> bool) -> PageSize {
    let mut level = F::LARGEST_LEAF;
    while level > 0 && !(F::size(level) <= largest && fits(F::size(level).bytes())) {
        level -= 1;
    }
    F::size(level)
}
