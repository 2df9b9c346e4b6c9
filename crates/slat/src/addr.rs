//! Addresses, ranges, page sizes and levels, as values that are checked when they are made.

use core::fmt;

/// A guest physical address (Arm: intermediate physical address), in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Gpa(pub u64);

/// A host physical address, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Hpa(pub u64);

macro_rules! hex_address {
    ($($name:ident)*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    )*};
}
hex_address!(Gpa Hpa);

/// A non-empty range of guest physical addresses that does not wrap.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpaRange {
    start: u64,
    end: u64,
}

impl GpaRange {
    /// Makes a range of `size` bytes from `start`.
    ///
    /// # Errors
    /// [`RangeError::Empty`] for a size of zero; [`RangeError::Overflow`] if the end does not fit
    /// into 64 bits.
    #[inline]
    pub const fn new(start: Gpa, size: u64) -> Result<Self, RangeError> {
        if size == 0 {
            return Err(RangeError::Empty { start });
        }
        match start.0.checked_add(size) {
            Some(end) => Ok(Self { start: start.0, end }),
            None => Err(RangeError::Overflow { start, size }),
        }
    }

    /// Makes a range from bounds that the engine derived from a checked range.
    pub(crate) const fn from_bounds(start: u64, end: u64) -> Self {
        debug_assert!(start < end);
        Self { start, end }
    }

    /// Returns the first address.
    pub const fn start(&self) -> Gpa {
        Gpa(self.start)
    }

    /// Returns the first address past the end.
    pub const fn end(&self) -> Gpa {
        Gpa(self.end)
    }

    /// Returns the size in bytes; never zero.
    pub const fn size(&self) -> u64 {
        self.end - self.start
    }

    /// Returns the smallest range that contains both.
    pub fn hull(&self, other: &Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }

    /// Checks that both ends are multiples of `2^page_shift` and the end is at most `2^bits`.
    pub(crate) const fn check(&self, page_shift: u32, bits: u32) -> Result<(), RangeError> {
        let page = 1 << page_shift;
        if (self.start | self.end) & (page - 1) != 0 {
            return Err(RangeError::Unaligned { range: *self, page });
        }
        if self.end > 1 << bits {
            return Err(RangeError::BeyondAddressSize { end: Gpa(self.end), bits });
        }
        Ok(())
    }
}

impl fmt::Debug for GpaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpaRange({self})")
    }
}

impl fmt::Display for GpaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

/// Reason why a range was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RangeError {
    /// A size of zero.
    Empty {
        /// Start of the range.
        start: Gpa,
    },
    /// The end does not fit into 64 bits.
    Overflow {
        /// Start of the range.
        start: Gpa,
        /// Its size in bytes.
        size: u64,
    },
    /// An end of the range is not a multiple of the page size.
    Unaligned {
        /// The range.
        range: GpaRange,
        /// The page size of the format, in bytes.
        page: u64,
    },
    /// The range ends beyond what these tables translate.
    BeyondAddressSize {
        /// The end of the range.
        end: Gpa,
        /// Bits of a guest physical address in these tables.
        bits: u32,
    },
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Empty { start } => {
                write!(f, "the range at {start} is empty; give at least one page")
            }
            Self::Overflow { start, size } => {
                write!(f, "{size:#x} bytes from {start} go past the end of the address space")
            }
            Self::Unaligned { range, page } => write!(
                f,
                "the range {range} is not aligned: both ends must be multiples of the page size {}",
                PageSize::of_bytes(page)
            ),
            Self::BeyondAddressSize { end, bits } => write!(
                f,
                "the range ends at {end}, beyond the {bits}-bit guest addresses of these tables \
                 (at most {:#x})",
                1u64 << bits
            ),
        }
    }
}

impl core::error::Error for RangeError {}

/// The size of a page or block: a power of two, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize(u8);

impl PageSize {
    /// 4 KiB.
    pub const SIZE_4K: Self = Self(12);
    /// 2 MiB.
    pub const SIZE_2M: Self = Self(21);
    /// 1 GiB.
    pub const SIZE_1G: Self = Self(30);

    /// Returns the size of `bytes` bytes, or `None` if that is not a power of two.
    pub const fn from_bytes(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() { Some(Self::of_bytes(bytes)) } else { None }
    }

    const fn of_bytes(bytes: u64) -> Self {
        Self(bytes.trailing_zeros() as u8)
    }

    #[inline]
    pub(crate) const fn from_shift(shift: u32) -> Self {
        Self(shift as u8)
    }

    /// Returns the size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// Returns the base-2 logarithm of the size in bytes.
    pub const fn shift(self) -> u32 {
        self.0 as u32
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            40.. => (40, "t"),
            30.. => (30, "g"),
            20.. => (20, "m"),
            10.. => (10, "k"),
            _ => (0, ""),
        };
        write!(f, "{}{name}", 1u64 << (self.0 - unit))
    }
}

impl fmt::Debug for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSize({self})")
    }
}

/// The format has no leaf of that size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeafSizeError {
    /// The size that was asked for.
    pub size: PageSize,
    /// The page size of the format.
    pub smallest: PageSize,
    /// The largest block of the format.
    pub largest: PageSize,
}

impl fmt::Display for LeafSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, smallest, largest } = self;
        write!(
            f,
            "the format has no leaf of {size}; the smallest is {smallest}, the largest {largest}"
        )
    }
}

impl core::error::Error for LeafSizeError {}

/// A set of levels, known at compile time, which says which entries a walk reads.
///
/// Level 0 is the level of pages; levels count upwards to the root. (The manuals of Arm and x86
/// count differently; a format prints its own names.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Levels(u8);

impl Levels {
    /// Every level.
    pub const ALL: Self = Self(u8::MAX);

    /// Returns the levels above `level`.
    pub const fn above(level: u8) -> Self {
        Self(!((2 << level) - 1) as u8)
    }

    /// Returns whether the set contains `level`.
    pub const fn contains(self, level: u8) -> bool {
        self.0 >> level & 1 == 1
    }

    /// Returns whether the set contains a level below `level`.
    pub const fn any_below(self, level: u8) -> bool {
        self.0 & ((1 << level) - 1) as u8 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_never_empty_and_never_wraps() {
        assert_eq!(GpaRange::new(Gpa(4096), 0), Err(RangeError::Empty { start: Gpa(4096) }));
        assert!(matches!(GpaRange::new(Gpa(u64::MAX), 1), Err(RangeError::Overflow { .. })));
        assert_eq!(GpaRange::new(Gpa(u64::MAX - 1), 1).unwrap().end(), Gpa(u64::MAX));
    }

    #[test]
    fn levels_above_zero_leave_out_the_last_level_only() {
        let upper = Levels::above(0);
        assert!(!upper.contains(0) && upper.contains(1) && upper.contains(4));
        assert!(!upper.any_below(1) && upper.any_below(2));
        assert!(Levels::ALL.any_below(1) && !Levels::ALL.any_below(0));
    }

    #[test]
    fn sizes_print_as_people_write_them() {
        let text = |bytes| std::format!("{}", PageSize::from_bytes(bytes).unwrap());
        assert_eq!(text(4 << 10), "4k");
        assert_eq!(text(32 << 20), "32m");
        assert_eq!(text(1 << 30), "1g");
        assert_eq!(text(512 << 30), "512g");
        assert_eq!(text(4 << 40), "4t");
        assert_eq!(PageSize::from_bytes(3 << 12), None);
    }

    #[test]
    fn errors_name_the_value_and_what_would_be_right() {
        let range = GpaRange::new(Gpa(0x1001), 0x1000).unwrap();
        let text = std::format!("{}", range.check(12, 40).unwrap_err());
        assert!(text.contains("0x1001..0x2001") && text.contains("4k"), "{text}");
        let range = GpaRange::new(Gpa(1 << 40), 0x1000).unwrap();
        let text = std::format!("{}", range.check(12, 40).unwrap_err());
        assert!(text.contains("40-bit") && text.contains("0x10000000000"), "{text}");
    }
}
