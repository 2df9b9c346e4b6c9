//! What EPT and nested paging share: tables of x86's long mode, with an entry of 64 bits whose bit
//! 0 is clear where hardware ignores the rest.

use super::Software;

/// An entry that hardware follows. For EPT it is the right to read, which every leaf here has.
pub(super) const PRESENT: u64 = 1 << 0;
/// The right to write.
pub(super) const W: u64 = 1 << 1;
/// A leaf above level 0.
pub(super) const BLOCK: u64 = 1 << 7;
/// `HPA[51:12]`; bits above the physical address width are reserved, as are those below a block's
/// size.
pub(super) const ADDRESS: u64 = (1 << 52) - (1 << 12);
/// These bits tell markers, reservations and owners apart in an entry that is not present. A marker
/// also holds a table's address, a reservation its token.
pub(super) const RETIRED: u64 = 1 << 3;
pub(super) const RESERVED: u64 = 1 << 4;
pub(super) const TOKEN_SHIFT: u32 = 12;

/// Widths of guest addresses that four and five levels translate.
pub(super) const FOUR_LEVELS_BITS: u32 = 48;
pub(super) const FIVE_LEVELS_BITS: u32 = 57;
pub(super) const MAX_OUTPUT_BITS: u32 = 52;

pub(super) const fn bit(on: bool, bit: u64) -> u64 {
    if on { bit } else { 0 }
}

/// The bits that a format of this kind chooses itself.
#[derive(Clone, Copy)]
pub(super) struct Bits {
    pub accessed: u64,
    pub dirty: u64,
    pub mark: u64,
    pub ageing: u64,
    pub software: [u64; Software::MOST],
    /// The bits that a split copies to smaller leaves: all but address, size and the engine's
    /// marks.
    pub inherited: u64,
}

/// The items of [`Format`](super::Format) that follow from [`Bits`].
///
/// What they contribute to its promises:
/// 1. Leaves and tables have bit 0. Markers, reservations and owners do not, whatever their
///    address, token or word: these lie at bits 59:12, from where `owner` takes a word. With bit 0,
///    bit 7 tells block from table, and no table is at level 0. Without bit 0, the mark is in
///    markers only, and bit 3 tells the two kinds of marker apart; bit 4 is in reservations, and
///    owners have bits 3 and 4. `kind` reads no bit of `STATUS`, `SOFTWARE`, `TABLE_ACCESSED`
///    and `AGEING`, and none of these is a bit of an address. `all_tables` requires bit 0 of all
///    entries, and bit 7 of none.
/// 2. Frames are aligned to 4 KiB and lie below 2^52: `ADDRESS` holds all of their bits, and no
///    other bit of a marker or of a table.
/// 3. A root at level 3 or 4 has `2^(address_bits - 39)` or `2^(address_bits - 48)` entries, or
///    one.
/// 4. A page of 4 KiB holds 512 entries, at any level.
/// 5. `CARRY` is 0.
/// 6. There are no groups: `group` is 1, and `CONTIGUOUS` is 0, which is no bit.
macro_rules! long_mode {
    ($bits:expr) => {
        const PAGE_SHIFT: u32 = 12;
        const INDEX_BITS: u32 = 9;
        const LARGEST_LEAF: u8 = if HUGE_1G { 2 } else { 1 };
        const SOFTWARE: [u64; Software::MOST] = $bits.software;
        const STATUS: u64 = $bits.accessed | $bits.dirty;
        const MARK: u64 = $bits.mark;
        const ACCESSED: u64 = $bits.accessed;
        const WRITE: u64 = long_mode::W;
        const DIRTY: u64 = $bits.dirty;
        const TABLE_ACCESSED: u64 = $bits.accessed;
        const AGEING: u64 = $bits.ageing;
        const REFILL_BREAKS: bool = false;
        const KEEPS_FAULTING: bool = false;

        #[inline(always)]
        fn output_bits(&self) -> u32 {
            self.output_bits.min(long_mode::MAX_OUTPUT_BITS)
        }

        #[inline(always)]
        fn kind(raw: u64, level: u8) -> Kind {
            use long_mode::{BLOCK, PRESENT, RESERVED, RETIRED};
            if raw & PRESENT != 0 {
                let block = raw & BLOCK != 0;
                return match level {
                    1.. if !block => Kind::Table,
                    // The bit is reserved above the largest leaf; a walk does not enter it.
                    1.. if level > Self::LARGEST_LEAF => Kind::Frozen,
                    _ if raw & Self::MARK != 0 => Kind::Sealed,
                    _ => Kind::Leaf,
                };
            }
            match raw & (Self::MARK | RETIRED | RESERVED) {
                0 | RETIRED => Kind::Empty,
                RESERVED => Kind::Reserved,
                bits if bits == RETIRED | RESERVED => Kind::Owned,
                bits if bits & (Self::MARK | RETIRED) == Self::MARK | RETIRED => Kind::Retired,
                _ => Kind::Frozen,
            }
        }

        #[inline(always)]
        fn all_tables(common: u64, any: u64, level: u8) -> bool {
            level > 0 && common & long_mode::PRESENT != 0 && any & long_mode::BLOCK == 0
        }

        #[inline(always)]
        fn all_pages(common: u64) -> bool {
            common & long_mode::PRESENT != 0
        }

        #[inline(always)]
        fn leaf(attribute_bits: u64, level: u8, hpa: Hpa) -> u64 {
            let size = if level == 0 { 0 } else { long_mode::BLOCK };
            attribute_bits | hpa.0 | long_mode::PRESENT | size
        }

        #[inline(always)]
        fn attribute_bits(raw: u64, _level: u8) -> u64 {
            raw & $bits.inherited
        }

        #[inline(always)]
        fn leaf_address(raw: u64, level: u8) -> Hpa {
            Hpa(raw & long_mode::ADDRESS & !((1 << Self::shift(level)) - 1))
        }

        #[inline(always)]
        fn table_address(raw: u64) -> Hpa {
            Hpa(raw & long_mode::ADDRESS)
        }

        #[inline(always)]
        fn frozen(hpa: Hpa) -> u64 {
            hpa.0 | Self::MARK
        }

        #[inline(always)]
        fn retired(hpa: Hpa) -> u64 {
            hpa.0 | Self::MARK | long_mode::RETIRED
        }

        #[inline(always)]
        fn reserved(token: u64) -> u64 {
            token << long_mode::TOKEN_SHIFT | long_mode::RESERVED
        }

        #[inline(always)]
        fn owned(word: u64) -> u64 {
            Self::reserved(word) | long_mode::RETIRED
        }

        #[inline(always)]
        fn owner(raw: u64) -> u64 {
            raw >> long_mode::TOKEN_SHIFT & ((1 << TOKEN_BITS) - 1)
        }

        /// The dirty bit stays, to remember the write.
        #[inline(always)]
        fn write_protected(raw: u64) -> u64 {
            raw & !long_mode::W
        }

        #[inline(always)]
        fn readable(raw: u64, _read: bool) -> u64 {
            raw
        }

        /// The manuals count levels from 1: level 4 is that of the PML4.
        fn level_name(level: u8) -> i8 {
            level as i8 + 1
        }
    };
}
pub(super) use long_mode;
