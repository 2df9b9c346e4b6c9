//! Bits of a leaf that are nobody's but the user's.

#![cfg_attr(
    not(any(
        feature = "arm64",
        feature = "ept",
        feature = "npt",
        feature = "power",
        feature = "riscv"
    )),
    allow(dead_code, reason = "of formats")
)]

use super::AttributeError;

/// Bits of a leaf that are the engine's user's: hardware ignores them, a split passes them on, a
/// collapse asks that all have the same. [`Guard::relax_where`](crate::Guard::relax_where) reads
/// them, [`Guard::set_software`](crate::Guard::set_software) writes them.
///
/// Those that are marks of [consumers of dirty state](crate::Consumer) are the engine's: of them a
/// collapse gathers what it finds.
///
/// Every format has two at least, and [`Format::SOFTWARE_BITS`](super::Format::SOFTWARE_BITS) of
/// them: those that it lacks it refuses, by [`AttributeError::SoftwareBits`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Software(u8);

impl Software {
    /// As many as a format can have.
    pub const MOST: usize = 8;
    /// None.
    pub const NONE: Self = Self(0);
    /// Bit 0.
    pub const A: Self = Self::bit(0);
    /// Bit 1.
    pub const B: Self = Self::bit(1);

    /// Bit 0 if `a`, bit 1 if `b`.
    pub const fn new(a: bool, b: bool) -> Self {
        Self(a as u8 | (b as u8) << 1)
    }

    /// The bit of that number, counted from 0.
    ///
    /// # Panics
    /// If `number` is [`Software::MOST`] or more.
    pub const fn bit(number: u8) -> Self {
        assert!((number as usize) < Self::MOST, "no format has so many software bits");
        Self(1 << number)
    }

    /// The bits whose numbers are set in `bits`.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// A number with these bits set.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The bits that are in this one or the other.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The bits that are in this one and not in the other.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether all bits of `other` are in this one.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// As bits of a descriptor, of which `masks` has one a number.
    ///
    /// # Errors
    /// [`AttributeError::SoftwareBits`] of a bit that has no mask.
    #[inline(always)]
    pub(crate) const fn encode(self, masks: [u64; Self::MOST]) -> Result<u64, AttributeError> {
        // All formats have the first two: who uses no other pays for no other.
        if self.0 > 0b11 {
            return self.encode_all(masks);
        }
        Ok(self.mask(0, masks) | self.mask(1, masks))
    }

    #[inline(always)]
    const fn mask(self, number: usize, masks: [u64; Self::MOST]) -> u64 {
        if self.0 >> number & 1 == 1 { masks[number] } else { 0 }
    }

    #[inline]
    const fn encode_all(self, masks: [u64; Self::MOST]) -> Result<u64, AttributeError> {
        let bits = count(masks);
        if self.0 as u32 >> bits != 0 {
            return Err(AttributeError::SoftwareBits { given: self, bits });
        }
        let (mut number, mut raw) = (0, 0);
        while number < Self::MOST {
            raw |= self.mask(number, masks);
            number += 1;
        }
        Ok(raw)
    }

    /// Those of a leaf.
    #[inline(always)]
    pub(crate) const fn decode(raw: u64, masks: [u64; Self::MOST]) -> Self {
        if raw & all(masks) & !(masks[0] | masks[1]) != 0 {
            return Self::decode_all(raw, masks);
        }
        Self::new(raw & masks[0] != 0, raw & masks[1] != 0)
    }

    #[cold]
    #[inline]
    const fn decode_all(raw: u64, masks: [u64; Self::MOST]) -> Self {
        let (mut number, mut bits) = (0, 0);
        while number < Self::MOST {
            bits |= ((raw & masks[number] != 0) as u8) << number;
            number += 1;
        }
        Self(bits)
    }
}

/// The masks of these bits, bit 0 of [`Software`] first, and 0 behind the last.
pub(super) const fn masks<const N: usize>(bits: [u64; N]) -> [u64; Software::MOST] {
    let (mut number, mut masks) = (0, [0; Software::MOST]);
    while number < N {
        masks[number] = bits[number];
        number += 1;
    }
    masks
}

/// How many there are: behind the last all are 0.
pub(super) const fn count(masks: [u64; Software::MOST]) -> u8 {
    let mut number = 0;
    while number < Software::MOST && masks[number] != 0 {
        number += 1;
    }
    number as u8
}

/// The bits of all masks.
pub(super) const fn all(masks: [u64; Software::MOST]) -> u64 {
    let (mut number, mut all) = (0, 0);
    while number < Software::MOST {
        all |= masks[number];
        number += 1;
    }
    all
}
