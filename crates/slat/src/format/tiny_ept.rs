//! Two slots a table under the bits of [`super::ept`]: the smallest trees whose tables have rights
//! and accessed bits of their own, for model checking.

use super::ept::Ept1G;
use super::{Access, AttributeError, Attributes, Format, Geometry, GeometryError, Kind, RUN};
use crate::addr::Hpa;

/// 4k pages, blocks of 8k and 16k, three levels.
#[derive(Clone, Copy, Default, Debug)]
pub struct TinyEpt(pub Ept1G);

// SAFETY: the bits are those of `Ept`; the geometry has roots of two slots, at levels 0 to 2, for
// 13 to 15 bits; two slots fit into a page.
unsafe impl Format for TinyEpt {
    const NAME: &'static str = "two-slot tables of EPT";
    const PAGE_SHIFT: u32 = 12;
    const INDEX_BITS: u32 = 1;
    const LARGEST_LEAF: u8 = 2;
    const SOFTWARE: [u64; 2] = Ept1G::SOFTWARE;
    const STATUS: u64 = Ept1G::STATUS;
    const MARK: u64 = Ept1G::MARK;
    const RENEWED: u64 = Ept1G::RENEWED;
    const ACCESSED: u64 = Ept1G::ACCESSED;
    const WRITE: u64 = Ept1G::WRITE;
    const DIRTY: u64 = Ept1G::DIRTY;
    const TABLE_ACCESSED: u64 = Ept1G::TABLE_ACCESSED;
    const AGEING: u64 = Ept1G::AGEING;
    const REFILL_BREAKS: bool = false;
    const TABLE_WRITE: u64 = Ept1G::TABLE_WRITE;

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
        self.0.output_bits()
    }

    fn kind(raw: u64, level: u8) -> Kind {
        Ept1G::kind(raw, level)
    }

    fn all_tables(raws: &[u64; RUN], level: u8) -> bool {
        Ept1G::all_tables(raws, level)
    }

    fn all_pages(common: u64) -> bool {
        Ept1G::all_pages(common)
    }

    fn encode(&self, attributes: Attributes) -> Result<u64, AttributeError> {
        self.0.encode(attributes)
    }

    fn decode(&self, raw: u64, level: u8) -> Attributes {
        self.0.decode(raw, level)
    }

    fn leaf(attribute_bits: u64, level: u8, hpa: Hpa) -> u64 {
        Ept1G::leaf(attribute_bits, level, hpa)
    }

    fn attribute_bits(raw: u64, level: u8) -> u64 {
        Ept1G::attribute_bits(raw, level)
    }

    /// Blocks are smaller than Intel's: the address begins at the page bits.
    fn leaf_address(raw: u64, _level: u8) -> Hpa {
        Ept1G::leaf_address(raw, 0)
    }

    fn table(hpa: Hpa, level: u8) -> u64 {
        Ept1G::table(hpa, level)
    }

    fn table_address(raw: u64) -> Hpa {
        Ept1G::table_address(raw)
    }

    fn frozen(hpa: Hpa) -> u64 {
        Ept1G::frozen(hpa)
    }

    fn retired(hpa: Hpa) -> u64 {
        Ept1G::retired(hpa)
    }

    fn reserved(token: u64) -> u64 {
        Ept1G::reserved(token)
    }

    fn write_protected(raw: u64) -> u64 {
        Ept1G::write_protected(raw)
    }

    fn execute_protected(raw: u64) -> u64 {
        Ept1G::execute_protected(raw)
    }

    fn relaxed(&self, raw: u64, access: Access) -> u64 {
        self.0.relaxed(raw, access)
    }

    fn records_accessed(&self) -> bool {
        self.0.records_accessed()
    }

    fn cleaned(&self, raw: u64) -> u64 {
        self.0.cleaned(raw)
    }

    fn level_name(level: u8) -> i8 {
        Ept1G::level_name(level)
    }
}
