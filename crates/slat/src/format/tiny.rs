//! Two slots a table: the smallest trees on which an algorithm can go wrong, for model checking.
//!
//! The bits are those of [`super::arm64`]; only the shape differs.

use super::arm64::Arm64K4;
use super::{Access, AttributeError, Attributes, Format, Geometry, GeometryError, Kind};
use crate::addr::Hpa;

/// 4k pages, blocks of 8k and 16k, three levels.
#[derive(Clone, Copy, Debug)]
pub struct Tiny(pub Arm64K4);

impl Default for Tiny {
    fn default() -> Self {
        Self(Arm64K4 { hardware_dirty: true, ..Default::default() })
    }
}

// SAFETY: the bits are those of `Arm64`; the geometry has roots of two slots, at levels 0 to 2, for
// 13 to 15 bits; two slots fit into a page.
unsafe impl Format for Tiny {
    const NAME: &'static str = "two-slot tables";
    const PAGE_SHIFT: u32 = 12;
    const INDEX_BITS: u32 = 1;
    const LARGEST_LEAF: u8 = 2;
    const SOFTWARE: [u64; 2] = Arm64K4::SOFTWARE;
    const STATUS: u64 = Arm64K4::STATUS;
    const MARK: u64 = Arm64K4::MARK;
    const RENEWED: u64 = Arm64K4::RENEWED;
    const ACCESSED: u64 = Arm64K4::ACCESSED;
    const WRITE: u64 = Arm64K4::WRITE;
    const DIRTY: u64 = Arm64K4::DIRTY;
    const TABLE_ACCESSED: u64 = Arm64K4::TABLE_ACCESSED;
    const AGEING: u64 = Arm64K4::AGEING;
    const REFILL_BREAKS: bool = true;
    const TABLE_WRITE: u64 = Arm64K4::TABLE_WRITE;

    /// 13 to 15 bits: a root of two slots at level 0, 1 or 2.
    fn geometry(&self, address_bits: u32) -> Result<Geometry, GeometryError> {
        match address_bits {
            13..=15 => {
                Ok(Geometry { address_bits, root_level: address_bits as u8 - 13, root_slots: 2 })
            }
            _ => Err(GeometryError { address_bits, min: 13, max: 15, format: Self::NAME }),
        }
    }

    fn output_bits(&self) -> u32 {
        48
    }

    fn kind(raw: u64, level: u8) -> Kind {
        Arm64K4::kind(raw, level)
    }

    fn all_pages(common: u64) -> bool {
        Arm64K4::all_pages(common)
    }

    fn encode(&self, attributes: Attributes) -> Result<u64, AttributeError> {
        self.0.encode(attributes)
    }

    fn decode(&self, raw: u64, level: u8) -> Attributes {
        self.0.decode(raw, level)
    }

    fn leaf(attribute_bits: u64, level: u8, hpa: Hpa) -> u64 {
        Arm64K4::leaf(attribute_bits, level, hpa)
    }

    fn attribute_bits(raw: u64, level: u8) -> u64 {
        Arm64K4::attribute_bits(raw, level)
    }

    /// Blocks are smaller than Arm's: the address begins at the page bits.
    fn leaf_address(raw: u64, _level: u8) -> Hpa {
        Arm64K4::leaf_address(raw, 0)
    }

    fn table(hpa: Hpa, level: u8) -> u64 {
        Arm64K4::table(hpa, level)
    }

    fn table_address(raw: u64) -> Hpa {
        Arm64K4::table_address(raw)
    }

    fn frozen(hpa: Hpa) -> u64 {
        Arm64K4::frozen(hpa)
    }

    fn retired(hpa: Hpa) -> u64 {
        Arm64K4::retired(hpa)
    }

    fn reserved(token: u64) -> u64 {
        Arm64K4::reserved(token)
    }

    fn write_protected(raw: u64) -> u64 {
        Arm64K4::write_protected(raw)
    }

    fn execute_protected(raw: u64) -> u64 {
        Arm64K4::execute_protected(raw)
    }

    fn relaxed(&self, raw: u64, access: Access) -> u64 {
        self.0.relaxed(raw, access)
    }

    fn forces_caches(&self) -> bool {
        self.0.forces_caches()
    }

    fn cleaned(&self, raw: u64) -> u64 {
        self.0.cleaned(raw)
    }

    fn level_name(level: u8) -> i8 {
        Arm64K4::level_name(level)
    }
}
