//! Which pages a vCPU writes in one pass, and what it writes: known to guest and host alike.
//!
//! The guest computes both by arithmetic, so that no list has to be read from memory while the
//! pass is timed, and the host computes them again to check the log and the memory.
//!
//! A share of `s` per cent is spread evenly: an accumulator grows by `s` a page, and a page is
//! written each time it passes 100. Its start differs from round to round, so that with
//! `s < 100` the pages written differ too, and a log that was not cleared shows.

use crate::Error;

/// Pages that a vCPU walks between two looks at the caller's wish to stop. At 25 us a fault,
/// a slow host, that is 0.4 s; the exit it costs is shared by all of them.
pub const PAGES_PER_RUN: u64 = 16384;

/// Whole of the share.
pub(crate) const WHOLE: u64 = 100;

/// One pass of a vCPU over its part of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WritePass {
    round: u32,
    share: u8,
}

impl WritePass {
    /// Makes the pass of a round that writes `share` per cent of the pages.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the share is not 1 to 100.
    pub fn new(round: u32, share: u8) -> Result<Self, Error> {
        if !(1..=WHOLE as u8).contains(&share) {
            return Err(Error::invalid("write share", share, "must be 1 to 100 per cent"));
        }
        Ok(Self { round, share })
    }

    /// The share in per cent.
    pub fn share(&self) -> u64 {
        u64::from(self.share)
    }

    /// The accumulator before page `index`, which is always below 100.
    pub(crate) fn accumulator(&self, index: u64) -> u64 {
        // 37 and 100 have no common factor: any 100 rounds in a row start at 100 places.
        (u64::from(self.round) * 37 + (index % WHOLE) * self.share()) % WHOLE
    }

    /// Whether page `index`, counted from the first page of the vCPU, is written.
    pub fn writes(&self, index: u64) -> bool {
        self.accumulator(index) + self.share() >= WHOLE
    }

    /// How many of `pages` pages from page `start` on are written.
    pub fn written(&self, start: u64, pages: u64) -> u64 {
        (self.accumulator(start) + pages * self.share()) / WHOLE
    }

    /// What is added to a page's address to make the 64-bit stamp written to its start.
    ///
    /// The stamp tells page and round apart, so that a page that was mapped in place of another,
    /// or that kept the content of an earlier round, is found.
    pub(crate) fn tag(&self) -> u64 {
        (u64::from(self.round) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// The stamp of the page at `gpa`.
    pub fn stamp(&self, gpa: u64) -> u64 {
        self.tag().wrapping_add(gpa)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_are_written_at_100_per_cent() {
        for round in 0..200 {
            let pass = WritePass::new(round, 100).unwrap();
            assert!((0..1000).all(|page| pass.writes(page)));
        }
    }

    #[test]
    fn the_count_is_that_of_the_pages_from_any_start() {
        for share in 1..=100 {
            for round in [0, 1, 2, 99, u32::MAX] {
                let pass = WritePass::new(round, share).unwrap();
                for start in [0, 1, 64, 12345] {
                    let pages = (start..start + 777).filter(|&page| pass.writes(page)).count();
                    assert_eq!(pass.written(start, 777), pages as u64);
                }
                assert_eq!(pass.written(0, 100), u64::from(share));
            }
        }
    }

    #[test]
    fn the_accumulator_is_the_one_that_a_guest_adds_up() {
        let pass = WritePass::new(3, 43).unwrap();
        let mut acc = pass.accumulator(0);
        for page in 0..500 {
            assert_eq!(acc, pass.accumulator(page));
            acc += pass.share();
            assert_eq!(pass.writes(page), acc >= WHOLE);
            acc -= if acc >= WHOLE { WHOLE } else { 0 };
        }
    }

    #[test]
    fn rounds_in_a_row_write_different_pages() {
        for share in 1..100 {
            let [a, b] = [1, 2].map(|round| WritePass::new(round, share).unwrap());
            assert!((0..100).any(|page| a.writes(page) && !b.writes(page)));
        }
    }

    #[test]
    fn stamps_tell_pages_and_rounds_apart() {
        let [a, b] = [1, 2].map(|round| WritePass::new(round, 100).unwrap());
        assert_ne!(a.stamp(0x1000), a.stamp(0x2000));
        assert_ne!(a.stamp(0x1000), b.stamp(0x1000));
        assert_ne!(a.stamp(0), 0);
    }

    #[test]
    fn a_share_that_writes_nothing_or_too_much_is_refused() {
        assert!(WritePass::new(0, 0).is_err());
        assert!(WritePass::new(0, 101).is_err());
    }
}
