//! Software bits of a leaf, which the engine leaves to its user.

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

/// Software bits of a leaf. Hardware ignores them, a split copies them, and a collapse requires
/// that all leaves have the same. [`Relax::only_if`](crate::Relax::only_if) reads them,
/// [`Guard::set_software`](crate::Guard::set_software) writes them.
///
/// Every format has at least two, and [`Format::SOFTWARE_BITS`](super::Format::SOFTWARE_BITS) in
/// all. It refuses others with [`AttributeError::SoftwareBits`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Software(u8);

impl Software {
    /// The largest number of bits that a format can have.
    pub const MOST: usize = 8;
    /// No bits.
    pub const NONE: Self = Self(0);
    /// Bit 0.
    pub const A: Self = Self::bit(0);
    /// Bit 1.
    pub const B: Self = Self::bit(1);

    /// Returns bit 0 if `a`, and bit 1 if `b`.
    pub const fn new(a: bool, b: bool) -> Self {
        Self(a as u8 | (b as u8) << 1)
    }

    /// Returns the bit with that number, counted from 0.
    ///
    /// # Panics
    /// If `number` is [`Software::MOST`] or more.
    pub const fn bit(number: u8) -> Self {
        assert!((number as usize) < Self::MOST, "no format has so many software bits");
        Self(1 << number)
    }

    /// Returns the bits whose numbers are set in `bits`.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// Returns a number with these bits set.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns the bits that are in `self` or in `other`.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the bits that are in `self` and not in `other`.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns whether all bits of `other` are in `self`.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the bits as bits of an entry; `masks` has the mask of each bit, by its number.
    ///
    /// # Errors
    /// [`AttributeError::SoftwareBits`] if a bit has no mask.
    #[inline(always)]
    pub(crate) const fn encode(self, masks: [u64; Self::MOST]) -> Result<u64, AttributeError> {
        // All formats have the first two: a caller that uses no other does not pay for the check.
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

    /// Returns the software bits of a leaf.
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

/// Returns the masks of these bits, that of bit 0 first, and 0 after the last.
pub(super) const fn masks<const N: usize>(bits: [u64; N]) -> [u64; Software::MOST] {
    let (mut number, mut masks) = (0, [0; Software::MOST]);
    while number < N {
        masks[number] = bits[number];
        number += 1;
    }
    masks
}

/// Returns the number of masks before the first 0.
pub(super) const fn count(masks: [u64; Software::MOST]) -> u8 {
    let mut number = 0;
    while number < Software::MOST && masks[number] != 0 {
        number += 1;
    }
    number as u8
}

/// Returns the union of all masks.
pub(super) const fn all(masks: [u64; Software::MOST]) -> u64 {
    let (mut number, mut all) = (0, 0);
    while number < Software::MOST {
        all |= masks[number];
        number += 1;
    }
    all
}
