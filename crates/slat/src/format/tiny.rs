//! Tables of two entries with the bits of another format, for model checking: the smallest trees on
//! which an algorithm can go wrong.

#[cfg(feature = "arm64")]
use super::arm64::Arm64K4;
#[cfg(feature = "ept")]
use super::ept::Ept1G;
#[cfg(feature = "riscv")]
use super::riscv::RiscV;
use super::{
    Access, AttributeError, Attributes, Format, Geometry, GeometryError, Kind, Memory, Software,
};
use crate::addr::Hpa;

/// Bits of Arm: an entry that was emptied is filled only after an invalidation.
#[cfg(feature = "arm64")]
pub type Tiny = TwoSlots<Arm64K4>;
/// Bits of Intel: tables have rights and accessed bits of their own.
#[cfg(feature = "ept")]
pub type TinyEpt = TwoSlots<Ept1G>;
/// Bits of RISC-V: tables have neither rights nor accessed bits, and entries are filled at once.
#[cfg(feature = "riscv")]
pub type TinyRiscV = TwoSlots<RiscV>;

/// Tables of two entries: 4k pages, blocks of 8k and 16k, three levels.
#[derive(Clone, Copy, Debug)]
pub struct TwoSlots<F>(pub F);

#[cfg(feature = "arm64")]
impl Default for Tiny {
    fn default() -> Self {
        Self(Arm64K4 { hardware_dirty: true, ..Default::default() })
    }
}

#[cfg(feature = "ept")]
impl Default for TinyEpt {
    fn default() -> Self {
        Self(Ept1G::default())
    }
}

#[cfg(feature = "riscv")]
impl Default for TinyRiscV {
    fn default() -> Self {
        Self(RiscV::default())
    }
}

/// Formats with 4k pages, leaves at levels 0 to 2, and no [`Format::CARRY`].
pub trait Bits: Format {}

#[cfg(feature = "arm64")]
impl Bits for Arm64K4 {}
#[cfg(feature = "ept")]
impl Bits for Ept1G {}
#[cfg(feature = "riscv")]
impl Bits for RiscV {}

// SAFETY:
// 1. `F` encodes and decodes entries, at levels at which it has leaves and tables, too, and the
//    bits named are those of `F`. Blocks are smaller than those of `F`: the bits of their addresses
//    begin where those of a page do, and `leaf_address` reads them as a page's.
// 2. By `F`.
// 3. The root has two entries at level 0, 1 or 2, which cover 13, 14 or 15 bits.
// 4. Tables have two entries at any level; a page holds more.
// 5. Pages are those of `F`, whose `CARRY` is 0 as `Bits` says.
// 6. A group is one entry, or both of a table. `CONTIGUOUS`, and the methods that read a leaf with
//    it, are those of `F`.
unsafe impl<F: Bits> Format for TwoSlots<F> {
    const NAME: &'static str = "two-entry tables";
    const PAGE_SHIFT: u32 = 12;
    const INDEX_BITS: u32 = 1;
    const LOWEST_ROOT: u8 = 0;
    const LARGEST_LEAF: u8 = 2;
    const SOFTWARE: [u64; Software::MOST] = F::SOFTWARE;
    const STATUS: u64 = F::STATUS;
    const MARK: u64 = F::MARK;
    const ACCESSED: u64 = F::ACCESSED;
    const WRITE: u64 = F::WRITE;
    const DIRTY: u64 = F::DIRTY;
    const TABLE_ACCESSED: u64 = F::TABLE_ACCESSED;
    const AGEING: u64 = F::AGEING;
    const REFILL_BREAKS: bool = F::REFILL_BREAKS;
    const KEEPS_FAULTING: bool = F::KEEPS_FAULTING;
    const CONTIGUOUS: u64 = F::CONTIGUOUS;

    /// 13 to 15 bits: a root of two entries at level 0, 1 or 2.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError> {
        match address_bits {
            13..=15 => {
                Ok(Geometry { address_bits, root_level: address_bits as u8 - 13, root_entries: 2 })
            }
            _ => Err(GeometryError { address_bits, min: 13, max: 15, format: Self::NAME }),
        }
    }

    #[inline(always)]
    fn output_bits(&self) -> u32 {
        self.0.output_bits()
    }

    fn kind(raw: u64, level: u8) -> Kind {
        F::kind(raw, level)
    }

    fn all_tables(common: u64, any: u64, level: u8) -> bool {
        F::all_tables(common, any, level)
    }

    fn all_pages(common: u64) -> bool {
        F::all_pages(common)
    }

    fn encode(&self, attributes: Attributes) -> Result<u64, AttributeError> {
        self.0.encode(attributes)
    }

    fn device(&self) -> Memory {
        self.0.device()
    }

    fn marks_valid(&self) -> bool {
        self.0.marks_valid()
    }

    fn further(raw: u64, bytes: u64) -> u64 {
        F::further(raw, bytes)
    }

    fn decode(&self, raw: u64, level: u8) -> Attributes {
        self.0.decode(raw, level)
    }

    fn leaf(attribute_bits: u64, level: u8, hpa: Hpa) -> u64 {
        F::leaf(attribute_bits, level, hpa)
    }

    fn attribute_bits(raw: u64, level: u8) -> u64 {
        F::attribute_bits(raw, level)
    }

    /// Blocks are smaller than those of `F`: the address begins at the page bits.
    fn leaf_address(raw: u64, _level: u8) -> Hpa {
        F::leaf_address(raw, 0)
    }

    fn table(hpa: Hpa, level: u8) -> u64 {
        F::table(hpa, level)
    }

    fn table_address(raw: u64) -> Hpa {
        F::table_address(raw)
    }

    fn frozen(hpa: Hpa) -> u64 {
        F::frozen(hpa)
    }

    fn retired(hpa: Hpa) -> u64 {
        F::retired(hpa)
    }

    fn reserved(token: u64) -> u64 {
        F::reserved(token)
    }

    fn owned(word: u64) -> u64 {
        F::owned(word)
    }

    fn owner(raw: u64) -> u64 {
        F::owner(raw)
    }

    fn write_protected(raw: u64) -> u64 {
        F::write_protected(raw)
    }

    fn readable(raw: u64, read: bool) -> u64 {
        F::readable(raw, read)
    }
    fn execute_protected(raw: u64) -> u64 {
        F::execute_protected(raw)
    }

    fn relaxed(&self, raw: u64, access: Access) -> u64 {
        self.0.relaxed(raw, access)
    }

    #[inline(always)]
    fn records_accessed(&self) -> bool {
        self.0.records_accessed()
    }

    #[inline(always)]
    fn forces_caches(&self) -> bool {
        self.0.forces_caches()
    }

    fn cleaned(&self, raw: u64) -> u64 {
        self.0.cleaned(raw)
    }

    fn level_name(level: u8) -> i8 {
        F::level_name(level)
    }

    fn group(level: u8) -> usize {
        if F::CONTIGUOUS != 0 && level < 2 { 2 } else { 1 }
    }
}
