//! Ranges in pieces, at sizes that fit, and with the leaves that their ends cut.

use crate::host::Host;
use slat::{Contended, Format, Gpa, GpaRange, Guard, PageSize};

/// The size that is worked on at a time inside the tables: the guest's unlinked tables wait for
/// that.
#[cfg(not(loom))]
const PIECE: u64 = 1 << 30;
/// No larger than a leaf in guests that models can explore.
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

/// The leaf that `at` cuts through, if any.
pub(crate) fn cut_by<F: Format, H: Host>(
    guard: &Guard<'_, '_, F, H>,
    at: Gpa,
) -> Result<Option<GpaRange>, Contended> {
    let Some(leaf) = guard.translate(at)? else { return Ok(None) };
    let start = at.0 & !(leaf.size.bytes() - 1);
    let cut = (start != at.0).then(|| GpaRange::new(Gpa(start), leaf.size.bytes()));
    Ok(cut.map(|leaf| leaf.expect("a leaf is not empty")))
}

/// Widens `range` to the leaves that its ends cut through, each end on its own. The leaves may
/// reach into another memslot: a caller that counts pages clips the result to its memslot.
pub(crate) fn widened<F: Format, H: Host>(
    guard: &Guard<'_, '_, F, H>,
    range: GpaRange,
) -> Result<GpaRange, Contended> {
    let start = cut_by(guard, range.start())?.map_or(range.start(), |leaf| leaf.start());
    let end = cut_by(guard, range.end())?.map_or(range.end(), |leaf| leaf.end());
    Ok(GpaRange::new(start, end.0 - start.0).expect("wider than a range"))
}

/// The largest leaf of the format, at most `largest`, whose size `fits` accepts.
#[inline]
pub(crate) fn fitting<F: Format>(largest: PageSize, fits: impl Fn(u64) -> bool) -> PageSize {
    let mut level = F::LARGEST_LEAF;
    while level > 0 && !(F::size(level) <= largest && fits(F::size(level).bytes())) {
        level -= 1;
    }
    F::size(level)
}
