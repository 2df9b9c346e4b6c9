//! How hardware reads the entries of the small formats.

use slat::Format;
use slat::format::tiny::{Tiny, TinyEpt, TinyRiscV};

/// How a CPU reads the bits of a format, written apart from the engine's own code.
pub trait WalkedFormat: Format + Default {
    /// Returns whether hardware follows the entry to another table.
    fn links(raw: u64, level: u8) -> bool;
    /// The link after a walk through it.
    fn passed(raw: u64) -> u64;
    /// Returns whether the link allows writes below.
    fn lets_write(raw: u64) -> bool;
    /// The leaf after an access; `None` if that faults.
    fn used(raw: u64, write: bool) -> Option<u64>;
    /// The size that a TLB may hold as one entry with the leaf, in bytes, a power of two.
    fn reach(_raw: u64, level: u8) -> u64 {
        1 << Self::shift(level)
    }
    /// Returns whether a write through the TLB goes on without reading the leaf again.
    fn written(raw: u64) -> bool;
}

/// FEAT_HAFDBS: bit 51 makes a leaf without bit 7 writable; hardware sets bit 7.
impl WalkedFormat for Tiny {
    fn links(raw: u64, level: u8) -> bool {
        level > 0 && raw & 0b11 == 0b11
    }

    fn passed(raw: u64) -> u64 {
        raw
    }

    fn lets_write(_: u64) -> bool {
        true
    }

    fn used(raw: u64, write: bool) -> Option<u64> {
        let fits = raw & 1 != 0 && raw & 1 << 6 != 0 && (!write || raw & (1 << 7 | 1 << 51) != 0);
        fits.then_some(raw | 1 << 10 | if write { 1 << 7 } else { 0 })
    }

    /// Bit 52: contiguous with its neighbour.
    fn reach(raw: u64, level: u8) -> u64 {
        1 << (Self::shift(level) + u32::from(raw >> 52 & 1 == 1))
    }

    fn written(raw: u64) -> bool {
        raw & 1 << 7 != 0
    }
}

/// Accessed (bit 8) in all levels, dirty (bit 9) in leaves; all levels have the right to write (bit
/// 1).
impl WalkedFormat for TinyEpt {
    fn links(raw: u64, level: u8) -> bool {
        level > 0 && raw & 1 != 0 && raw & 1 << 7 == 0
    }

    fn passed(raw: u64) -> u64 {
        raw | 1 << 8
    }

    fn lets_write(raw: u64) -> bool {
        raw & 1 << 1 != 0
    }

    fn used(raw: u64, write: bool) -> Option<u64> {
        let fits = raw & 1 != 0 && (!write || raw & 1 << 1 != 0);
        fits.then_some(raw | 1 << 8 | if write { 1 << 9 } else { 0 })
    }

    fn written(raw: u64) -> bool {
        raw & (1 << 1 | 1 << 9) == 1 << 1 | 1 << 9
    }
}

/// With Svadu: accessed (bit 6) and dirty (bit 7) in leaves. A leaf has one of bits 3:1, and the
/// user bit (bit 4); a link has none of them.
impl WalkedFormat for TinyRiscV {
    fn links(raw: u64, level: u8) -> bool {
        level > 0 && raw & 0b1111 == 1
    }

    fn passed(raw: u64) -> u64 {
        raw
    }

    fn lets_write(_: u64) -> bool {
        true
    }

    fn used(raw: u64, write: bool) -> Option<u64> {
        let right = if write { 1 << 2 } else { 1 << 1 };
        let fits = raw & (1 | 1 << 4 | right) == 1 | 1 << 4 | right;
        fits.then_some(raw | 1 << 6 | if write { 1 << 7 } else { 0 })
    }

    fn written(raw: u64) -> bool {
        raw & (1 << 2 | 1 << 7) == 1 << 2 | 1 << 7
    }
}
