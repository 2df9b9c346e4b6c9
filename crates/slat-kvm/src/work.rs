//! What a vCPU is to do, and the model of it: which page each step touches, and how.
//!
//! The guest's code computes the order by arithmetic, so that no list has to be read from memory
//! while the work is timed; [`Steps`] computes it again, so that the host knows which pages were
//! written without asking the guest.

use crate::Error;

/// Whole of a share.
pub(crate) const WHOLE: u64 = 100;

/// What is done to a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Three words at its start are written: the step's number, the page's address, and return
    /// instructions.
    Write,
    /// The second word is read, and held against the page's address.
    Read,
    /// The return instructions are called.
    Execute,
    /// Nothing is.
    Skip,
    /// The vCPU switches its MMU and caches off and on again (Arm), which has nothing to do with
    /// the page: without FEAT_S2FWB, KVM maintains all of the guest's memory at both edges.
    ToggleCaches,
}

/// In which order pages are touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One after the other, from the first, over and over.
    Sequential,
    /// Each step draws a page; some are drawn twice before others once.
    Random {
        /// Start of the sequence. Each vCPU's differs.
        seed: u64,
    },
    /// The same, and `share` of a hundred steps draw from the first `percent` of a hundred pages.
    Hot {
        /// Start of the sequence.
        seed: u64,
        /// The hot set's size in per cent of the pages, at least one page.
        percent: u8,
        /// Per cent of the steps that go there.
        share: u8,
    },
}

/// What a vCPU is to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// The order of the pages.
    pub order: Order,
    /// What `share` of a hundred steps do, evenly spread.
    pub hit: Touch,
    /// What the others do.
    pub miss: Touch,
    /// 1 to 100.
    pub share: u8,
    /// Turns the places of the hits on, so that rounds of a share write different pages.
    pub round: u32,
    /// How many steps: one for each page of its part, or until it is stopped.
    pub endless: bool,
    /// One step alone.
    pub once: bool,
    /// Steps a second, at most; a step that comes late is not made up for.
    pub per_second: Option<f64>,
}

impl Work {
    /// One step for each page, in their order, all the same.
    pub fn each_page(touch: Touch) -> Self {
        Self {
            order: Order::Sequential,
            hit: touch,
            miss: Touch::Skip,
            share: WHOLE as u8,
            round: 0,
            endless: false,
            once: false,
            per_second: None,
        }
    }

    /// Checks the shares.
    ///
    /// # Errors
    /// [`Error::Invalid`] if one is not 1 to 100, or the pace not a number above 0.
    pub fn check(&self) -> Result<(), Error> {
        let within = |name, share: u8| match share {
            1..=100 => Ok(()),
            _ => Err(Error::invalid(name, share, "must be 1 to 100 per cent")),
        };
        within("write share", self.share)?;
        let toggles = [self.hit, self.miss].contains(&Touch::ToggleCaches);
        if toggles && !cfg!(target_arch = "aarch64") {
            let (capability, needed_for) =
                ("caches that a guest can switch (Arm)", "toggling them");
            return Err(Error::MissingCapability { capability, needed_for });
        }
        if let Order::Hot { percent, share, .. } = self.order {
            within("size of the hot set", percent)?;
            within("share of the hot set", share)?;
        }
        match self.per_second {
            Some(pace) if !(pace.is_finite() && pace > 0.0) => {
                Err(Error::invalid("steps a second", pace, "must be above 0"))
            }
            _ => Ok(()),
        }
    }

    /// The accumulator before the first step, which is always below 100.
    pub(crate) fn accumulator(&self) -> u64 {
        // 37 and 100 have no common factor: any 100 rounds in a row start at 100 places.
        u64::from(self.round) * 37 % WHOLE
    }

    /// State of the random orders before the first step of a vCPU.
    pub(crate) fn seed(&self, vcpu: usize) -> u64 {
        match self.order {
            Order::Sequential => 0,
            Order::Random { seed } | Order::Hot { seed, .. } => {
                let turn = seed ^ (vcpu as u64 + 1) << 32 ^ u64::from(self.round) << 48;
                advance(advance(turn))
            }
        }
    }

    /// Pages of the hot set, of `pages`.
    pub(crate) fn hot_pages(&self, pages: u64) -> u64 {
        match self.order {
            Order::Hot { percent, .. } => (pages * u64::from(percent) / WHOLE).max(1),
            _ => pages,
        }
    }

    /// The steps of a vCPU over a part of `pages` pages, from the first on, without end.
    pub fn steps(&self, vcpu: usize, pages: u64) -> Steps {
        Steps {
            work: *self,
            pages,
            index: 0,
            random: self.seed(vcpu),
            accumulator: self.accumulator(),
        }
    }
}

/// One step of Knuth's MMIX generator; the guest's code has the same two numbers.
pub(crate) fn advance(state: u64) -> u64 {
    state.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT)
}

pub(crate) const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
pub(crate) const INCREMENT: u64 = 1_442_695_040_888_963_407;

/// A number below `below`, from the upper bits of the state: the lower ones repeat soon.
fn draw(state: u64, below: u64) -> u64 {
    ((u128::from(state) * u128::from(below)) >> 64) as u64
}

/// The pages that a vCPU touches, counted from the first of its part, and what it does to each.
#[derive(Debug, Clone)]
pub struct Steps {
    work: Work,
    pages: u64,
    index: u64,
    random: u64,
    accumulator: u64,
}

impl Iterator for Steps {
    type Item = (u64, Touch);

    fn next(&mut self) -> Option<Self::Item> {
        let page = match self.work.order {
            Order::Sequential => {
                let page = self.index;
                self.index = (page + 1) % self.pages.max(1);
                page
            }
            Order::Random { .. } => {
                self.random = advance(self.random);
                draw(self.random, self.pages)
            }
            Order::Hot { share, .. } => {
                self.random = advance(self.random);
                let hot = draw(self.random, WHOLE) < u64::from(share);
                let among = if hot { self.work.hot_pages(self.pages) } else { self.pages };
                self.random = advance(self.random);
                draw(self.random, among)
            }
        };
        self.accumulator += u64::from(self.work.share);
        let hit = self.accumulator >= WHOLE;
        if hit {
            self.accumulator -= WHOLE;
        }
        Some((page, if hit { self.work.hit } else { self.work.miss }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(share: u8, round: u32, pages: u64) -> Vec<u64> {
        let work = Work { share, round, ..Work::each_page(Touch::Write) };
        let steps = work.steps(0, pages).take(pages as usize);
        steps.filter(|step| step.1 == Touch::Write).map(|step| step.0).collect()
    }

    #[test]
    fn a_share_is_written_evenly_and_all_of_it_at_100_per_cent() {
        for share in 1..=100u8 {
            for round in [0, 1, 99, u32::MAX] {
                assert_eq!(writes(share, round, 100).len(), usize::from(share));
            }
        }
        assert_eq!(writes(100, 3, 1000), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn rounds_in_a_row_write_different_pages() {
        for share in 1..100 {
            assert_ne!(writes(share, 1, 100), writes(share, 2, 100));
        }
    }

    #[test]
    fn a_random_order_reaches_all_of_the_memory_and_each_vcpu_has_its_own() {
        let work = Work { order: Order::Random { seed: 1 }, ..Work::each_page(Touch::Write) };
        let pages = |vcpu| work.steps(vcpu, 1000).take(20_000).map(|step| step.0);
        let mut seen = [0; 1000];
        pages(0).for_each(|page| seen[page as usize] += 1);
        assert!(seen.iter().all(|&times| (2..60).contains(&times)), "{seen:?}");
        assert!(pages(0).ne(pages(1)));
    }

    #[test]
    fn the_hot_set_gets_its_share() {
        let order = Order::Hot { seed: 7, percent: 10, share: 90 };
        let work = Work { order, ..Work::each_page(Touch::Write) };
        let hot = work.steps(0, 1000).take(10_000).filter(|step| step.0 < 100).count();
        // 90 per cent, and a tenth of what goes anywhere.
        assert!((9000..9200).contains(&hot), "{hot}");
        assert_eq!(work.hot_pages(5), 1);
    }

    #[test]
    fn shares_and_paces_that_cannot_be_are_refused() {
        let good = Work::each_page(Touch::Write);
        assert!(good.check().is_ok());
        assert!(Work { share: 0, ..good }.check().is_err());
        assert!(Work { share: 101, ..good }.check().is_err());
        let hot = |percent, share| Order::Hot { seed: 0, percent, share };
        assert!(Work { order: hot(0, 50), ..good }.check().is_err());
        assert!(Work { order: hot(50, 101), ..good }.check().is_err());
        assert!(Work { per_second: Some(0.0), ..good }.check().is_err());
    }
}
