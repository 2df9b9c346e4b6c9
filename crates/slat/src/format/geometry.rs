//! Start of walks, and the number of table pages that operations on a range take.

use super::{Format, entry_shift};
use crate::addr::{GpaRange, Hpa, PageSize};
use core::fmt;

/// Start of a walk: level and size of the root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Number of bits of a guest physical address.
    pub address_bits: u32,
    /// The level of the root's entries.
    pub root_level: u8,
    /// Number of entries of the root, a power of two. It is larger than that of a table where
    /// tables are concatenated.
    pub root_entries: usize,
}

impl Geometry {
    /// Returns the size of the root in bytes, which is also its alignment: at least one page.
    pub const fn root_bytes(&self, page_shift: u32) -> usize {
        let bytes = self.root_entries * 8;
        if bytes < 1 << page_shift { 1 << page_shift } else { bytes }
    }

    /// Returns how many table pages [`Guard::map`](crate::Guard::map) of `range` to `hpa` takes at
    /// most, with leaves of at most `largest`. It takes that many if nothing is mapped and no table
    /// exists. With host memory of another alignment it may take more; for a bound that holds for
    /// any alignment, pass the page size as `largest`.
    ///
    /// `F` is the format of the tables that have this geometry. The result has no meaning for a
    /// range, size or address that `map` refuses. It is a bound only while no thread unmaps in the
    /// range.
    pub const fn tables_to_map<F: Format>(
        &self,
        range: GpaRange,
        hpa: Hpa,
        largest: PageSize,
    ) -> u64 {
        let (start, end) = (range.start().0, range.end().0);
        let delta = hpa.0.wrapping_sub(start);
        let (mut level, mut tables) = (1, 0);
        while level <= self.root_level {
            let shift = entry_shift::<F>(level);
            let covered = 1u64 << shift;
            let (first, last) = (start >> shift, (end - 1) >> shift);
            let leaf =
                level <= F::LARGEST_LEAF && shift <= largest.shift() && delta & (covered - 1) == 0;
            let (head, tail) = (start & (covered - 1) != 0, end & (covered - 1) != 0);
            tables += match (leaf, head, tail) {
                (false, ..) => last - first + 1,
                (true, true, true) if first < last => 2,
                (true, false, false) => 0,
                (true, ..) => 1,
            };
            level += 1;
        }
        tables
    }

    /// Returns how many table pages [`Guard::split`](crate::Guard::split) of `range` to leaves of
    /// `to` takes at most. It takes that many if all of the range is mapped by the largest leaves
    /// of the format.
    ///
    /// `F` is as in [`Geometry::tables_to_map`].
    pub const fn tables_to_split<F: Format>(&self, range: GpaRange, to: PageSize) -> u64 {
        let (mut level, mut tables) = (1, 0);
        while level <= F::LARGEST_LEAF && level <= self.root_level {
            let shift = entry_shift::<F>(level);
            if shift > to.shift() {
                tables += ((range.end().0 - 1) >> shift) - (range.start().0 >> shift) + 1;
            }
            level += 1;
        }
        tables
    }

    /// Returns how many table pages a fault takes at most:
    /// [`Guard::reserve`](crate::Guard::reserve) for a leaf of at most `largest`, and the commit.
    /// It takes that many if nothing is mapped around the address.
    ///
    /// `F` is as in [`Geometry::tables_to_map`].
    pub const fn tables_to_reserve<F: Format>(&self, largest: PageSize) -> u64 {
        let mut level = F::LARGEST_LEAF;
        // A leaf does not reach beyond the end of a guest that is smaller.
        while level > 0
            && (entry_shift::<F>(level) > largest.shift()
                || entry_shift::<F>(level) > self.address_bits
                || level > self.root_level)
        {
            level -= 1;
        }
        (self.root_level - level) as u64
    }
}

/// A width of guest addresses that the format does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GeometryError {
    /// The width asked for, in bits.
    pub address_bits: u32,
    /// The smallest width allowed, in bits.
    pub min: u32,
    /// The largest width allowed, in bits.
    pub max: u32,
    /// Name of the format.
    pub format: &'static str,
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address_bits, min, max, format } = self;
        write!(
            f,
            "{format} cannot translate {address_bits}-bit guest addresses; {min} to {max} bits are \
             allowed"
        )
    }
}

impl core::error::Error for GeometryError {}
