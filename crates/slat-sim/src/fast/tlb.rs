//! The TLB of one CPU: two direct-mapped arrays, for pieces of 4 KiB and of 2 MiB.
//!
//! An entry has a tag for each kind of access: the address of the piece, and in its low bits the
//! epoch in which it was filled. One comparison checks that the page is the right one, that the
//! access is allowed, that the entry was not flushed, and that the address is aligned.

use crate::arch::{Access, Rights};

/// Number of entries for pieces of 4 KiB.
const SMALL: usize = 1024;
/// Number of entries for pieces of 2 MiB.
const LARGE: usize = 256;
/// Base-2 logarithms of the sizes of the pieces.
const SMALL_SHIFT: u32 = 12;
const LARGE_SHIFT: u32 = 21;
/// Epochs use the bits of a tag that are neither the address of a piece nor the three bits that are
/// zero in the address of a word. No epoch is 0, so that an empty tag matches nothing.
const EPOCH_STEP: u64 = 8;
const EPOCHS_END: u64 = 1 << SMALL_SHIFT;
/// Largest range that is looked up; for a larger one, the TLB is flushed.
const HULL: u64 = 64 << SMALL_SHIFT;

#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Entry {
    /// Indexed by [`Access`].
    tags: [u64; 3],
    /// The difference of host and guest addresses.
    addend: u64,
}

const EMPTY: Entry = Entry { tags: [0; 3], addend: 0 };

/// The result of a walk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub gpa: u64,
    /// The host address of `gpa`.
    pub hpa: u64,
    /// Base-2 logarithm of the leaf's size.
    pub shift: u32,
    pub rights: Rights,
    /// The leaf is marked dirty, so that a write needs no mark.
    pub dirty: bool,
}

impl Found {
    /// Returns the base-2 logarithm of the size of the pieces in which the leaf is kept.
    pub const fn piece(&self) -> u32 {
        if self.shift < LARGE_SHIFT { SMALL_SHIFT } else { LARGE_SHIFT }
    }
}

#[derive(Debug)]
pub(super) struct Tlb {
    small: Box<[Entry; SMALL]>,
    large: Box<[Entry; LARGE]>,
    epoch: u64,
    /// Whether there may be pieces of larger leaves, which an invalidation of any address of the
    /// leaf covers.
    fractured: bool,
}

impl Default for Tlb {
    fn default() -> Self {
        let (small, large) = (Box::new([EMPTY; SMALL]), Box::new([EMPTY; LARGE]));
        Self { small, large, epoch: EPOCH_STEP, fractured: false }
    }
}

const fn below(shift: u32) -> u64 {
    (1 << shift) - 1
}

/// Returns the tag of a piece, with the low bits that keep an unaligned address from matching.
#[inline(always)]
const fn tag(gpa: u64, shift: u32, epoch: u64) -> u64 {
    gpa & !(below(shift) - 7) | epoch
}

#[inline(always)]
const fn index(gpa: u64, shift: u32, entries: usize) -> usize {
    (gpa >> shift) as usize & (entries - 1)
}

impl Tlb {
    /// Returns the host address of a word, if the TLB allows the access without a walk.
    #[inline(always)]
    pub fn find(&self, gpa: u64, access: Access) -> Option<u64> {
        let entry = &self.small[index(gpa, SMALL_SHIFT, SMALL)];
        if entry.tags[access as usize] == tag(gpa, SMALL_SHIFT, self.epoch) {
            return Some(gpa.wrapping_add(entry.addend));
        }
        let entry = &self.large[index(gpa, LARGE_SHIFT, LARGE)];
        let hit = entry.tags[access as usize] == tag(gpa, LARGE_SHIFT, self.epoch);
        hit.then(|| gpa.wrapping_add(entry.addend))
    }

    /// Keeps the piece that contains the result of a walk.
    pub fn keep(&mut self, found: &Found) {
        let (gpa, shift) = (found.gpa, found.piece());
        let tag = tag(gpa & !7, shift, self.epoch);
        let Rights { read, write, execute } = found.rights;
        let tags = [read, write && found.dirty, execute].map(|has| if has { tag } else { 0 });
        let entry = Entry { tags, addend: found.hpa.wrapping_sub(gpa) };
        if shift == SMALL_SHIFT {
            self.small[index(gpa, shift, SMALL)] = entry;
        } else {
            self.large[index(gpa, shift, LARGE)] = entry;
            self.fractured |= found.shift > shift;
        }
    }

    /// Drops all entries that translate an address in `start..end`.
    pub fn forget(&mut self, start: u64, end: u64) {
        if self.fractured || start >= end || end - start > HULL {
            return self.flush();
        }
        let pieces = |shift: u32| (start >> shift..=(end - 1) >> shift).map(move |n| n << shift);
        for gpa in pieces(SMALL_SHIFT) {
            self.small[index(gpa, SMALL_SHIFT, SMALL)].forget(gpa);
        }
        for gpa in pieces(LARGE_SHIFT) {
            self.large[index(gpa, LARGE_SHIFT, LARGE)].forget(gpa);
        }
    }

    /// Drops all entries, usually by advancing the epoch.
    pub fn flush(&mut self) {
        self.fractured = false;
        self.epoch += EPOCH_STEP;
        if self.epoch == EPOCHS_END {
            self.small.fill(EMPTY);
            self.large.fill(EMPTY);
            self.epoch = EPOCH_STEP;
        }
    }
}

impl Entry {
    /// Empties the entry if it is for the piece at `gpa`, in any epoch.
    fn forget(&mut self, gpa: u64) {
        for tag in &mut self.tags {
            if *tag & !below(SMALL_SHIFT) == gpa {
                *tag = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(gpa: u64, shift: u32) -> Found {
        Found { gpa, hpa: gpa + (1 << 40), shift, rights: Rights::ALL, dirty: true }
    }

    fn hits(tlb: &Tlb, gpa: u64) -> bool {
        tlb.find(gpa, Access::Read).is_some_and(|hpa| hpa == gpa + (1 << 40))
    }

    #[test]
    fn an_entry_serves_its_piece_and_no_more() {
        let mut tlb = Tlb::default();
        tlb.keep(&found(0x1008, 12));
        assert!(hits(&tlb, 0x1000) && hits(&tlb, 0x1ff8));
        assert!(!hits(&tlb, 0x1001) && !hits(&tlb, 0x2000) && !hits(&tlb, 0x40_1000));
        tlb.keep(&found(0x4123_4568, 30));
        assert!(hits(&tlb, 0x4120_0000) && hits(&tlb, 0x413f_fff8) && !hits(&tlb, 0x4140_0000));
        assert!(!hits(&tlb, 0x4120_0004));
    }

    #[test]
    fn rights_and_dirtiness_are_in_the_tags() {
        let mut tlb = Tlb::default();
        let rights = Rights { execute: false, ..Rights::ALL };
        tlb.keep(&Found { dirty: false, rights, ..found(0x1000, 12) });
        let may = [Access::Read, Access::Write, Access::Execute]
            .map(|access| tlb.find(0x1000, access).is_some());
        assert_eq!(may, [true, false, false]);
    }

    #[test]
    fn a_range_takes_what_overlaps_it_and_leaves_the_rest() {
        let mut tlb = Tlb::default();
        [0x1000, 0x2000, 0x3000].iter().for_each(|&gpa| tlb.keep(&found(gpa, 12)));
        tlb.keep(&found(0x20_0000, 21));
        tlb.forget(0x2000, 0x3000);
        assert!(hits(&tlb, 0x1000) && !hits(&tlb, 0x2000) && hits(&tlb, 0x3000));
        tlb.forget(0x20_5000, 0x20_6000);
        assert!(!hits(&tlb, 0x20_0000) && hits(&tlb, 0x1000));
        tlb.keep(&found(0x4000_0000, 30));
        tlb.forget(0x7000_0000, 0x7000_1000);
        assert!(!hits(&tlb, 0x4000_0000), "a piece of the block that was named");
    }

    #[test]
    fn nothing_comes_back_when_epochs_do() {
        let mut tlb = Tlb::default();
        for _ in 0..2 * EPOCHS_END {
            tlb.keep(&found(0x1000, 12));
            assert!(hits(&tlb, 0x1000));
            tlb.flush();
            assert!(!hits(&tlb, 0x1000));
        }
        tlb.keep(&found(0x1000, 12));
        (0..2 * EPOCHS_END).for_each(|_| {
            tlb.flush();
            assert!(!hits(&tlb, 0x1000));
        });
    }
}
