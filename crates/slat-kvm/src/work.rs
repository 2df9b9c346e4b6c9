//! The work of a vCPU, and a model of it: which page each step touches, and how.
//!
//! The guest's code computes the order of the pages, so that it reads no list from memory while the
//! work is timed. [`Steps`] computes the same order, so that the host knows which pages were
//! written without asking the guest.

use crate::Error;

/// The whole of a share, in per cent.
pub(crate) const WHOLE: u64 = 100;

/// The operation of a step on its page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Writes three words at the start of the page: the step's number, the page's address, and
    /// return instructions.
    Write,
    /// Reads the second word, and compares it with the page's address.
    Read,
    /// Reads the first two words, and adds them to a sum that depends on their order.
    Sum,
    /// Calls the return instructions.
    Execute,
    /// Does nothing.
    Skip,
    /// Asks what KVM answers by itself, and does not touch the page: `CPUID` on x86, the version of
    /// the calling convention (`HVC`) on Arm. Where hardware runs the guest, that is an exit
    /// without a fault.
    Ask,
    /// Switches the vCPU's MMU and caches off and on again (Arm), and does not touch the page.
    /// Without FEAT_S2FWB, KVM cleans and invalidates all of the guest's memory at both switches.
    ToggleCaches,
}

/// The order in which pages are touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// From the first page to the last, repeatedly.
    Sequential,
    /// Each step draws a page at random; some pages are drawn twice before others are drawn once.
    Random {
        /// Seed of the sequence, from which each vCPU derives its own.
        seed: u64,
    },
    /// As `Random`, but `share` per cent of the steps draw from the first `percent` per cent of the
    /// pages.
    Hot {
        /// Seed of the sequence, from which each vCPU derives its own.
        seed: u64,
        /// Size of the hot set in per cent of the pages, at least one page.
        percent: u8,
        /// Share of the steps that touch the hot set, in per cent.
        share: u8,
    },
    /// As a recorded list says, from its first entry to the last, repeatedly. It lies behind the
    /// vCPU's records of its clock.
    Listed {
        /// Pages of the vCPU's part; a number beyond it counts from its start again.
        pages: &'static [u64],
    },
}

/// The work of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// The order of the pages.
    pub order: Order,
    /// The operation of `share` per cent of the steps, which are evenly spread.
    pub hit: Touch,
    /// The operation of the other steps.
    pub miss: Touch,
    /// Share of the hits in per cent, 1 to 100.
    pub share: u8,
    /// Shifts which steps are hits, so that rounds with a share below 100 write different pages.
    pub round: u32,
    /// Whether the work goes on until the vCPU is stopped, instead of one step for each page of its
    /// part.
    pub endless: bool,
    /// The number of steps, where it is not one for each page of the vCPU's part.
    pub steps: Option<u64>,
    /// Whether the vCPU records its clock at the start and after each access, in the room that
    /// [`Shape::records`](crate::guest::Shape::records) gives it.
    pub record: bool,
    /// The largest number of steps per second. A step that comes late delays the later ones.
    pub per_second: Option<f64>,
}

impl Work {
    /// Returns the work that does `touch` once to each page, in order.
    pub fn each_page(touch: Touch) -> Self {
        Self {
            order: Order::Sequential,
            hit: touch,
            miss: Touch::Skip,
            share: WHOLE as u8,
            round: 0,
            endless: false,
            steps: None,
            record: false,
            per_second: None,
        }
    }

    /// Checks the shares, the pace, and whether the architecture can toggle caches.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a share is not 1 to 100, or if the pace is not a finite number above
    /// 0; [`Error::MissingCapability`] for [`Touch::ToggleCaches`] on other architectures than
    /// Arm's.
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
        if let Order::Listed { pages: [] } = self.order {
            return Err(Error::invalid("recorded accesses", 0, "must be at least 1"));
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

    /// Returns the accumulator before the first step, which is below 100.
    pub(crate) fn accumulator(&self) -> u64 {
        // 37 and 100 have no common factor, so any 100 successive rounds have different
        // accumulators.
        u64::from(self.round) * 37 % WHOLE
    }

    /// Returns the state of the random orders before a vCPU's first step.
    pub(crate) fn seed(&self, vcpu: usize) -> u64 {
        match self.order {
            Order::Sequential | Order::Listed { .. } => 0,
            Order::Random { seed } | Order::Hot { seed, .. } => {
                let turn = seed ^ (vcpu as u64 + 1) << 32 ^ u64::from(self.round) << 48;
                advance(advance(turn))
            }
        }
    }

    /// Returns the size of the hot set, of `pages` pages.
    pub(crate) fn hot_pages(&self, pages: u64) -> u64 {
        match self.order {
            Order::Hot { percent, .. } => (pages * u64::from(percent) / WHOLE).max(1),
            _ => pages,
        }
    }

    /// Returns the endless steps of a vCPU over a part of `pages` pages.
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

/// Advances Knuth's MMIX generator by one step. The guest's code uses the same two constants.
pub(crate) fn advance(state: u64) -> u64 {
    state.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT)
}

pub(crate) const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
pub(crate) const INCREMENT: u64 = 1_442_695_040_888_963_407;

/// Returns a number below `below` from the upper bits of the state, because the lower ones have a
/// short period.
fn draw(state: u64, below: u64) -> u64 {
    ((u128::from(state) * u128::from(below)) >> 64) as u64
}

/// The steps of a vCPU: each yields the page, counted from the first of its part, and the operation
/// on it.
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
            Order::Listed { pages } => {
                let page = pages.get(self.index as usize).copied().unwrap_or(0);
                self.index = (self.index + 1) % pages.len().max(1) as u64;
                page % self.pages.max(1)
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
    fn a_random_order_reaches_all_memory_and_differs_by_vcpu() {
        let work = Work { order: Order::Random { seed: 1 }, ..Work::each_page(Touch::Write) };
        let pages = |vcpu| work.steps(vcpu, 1000).take(20_000).map(|step| step.0);
        let mut seen = [0; 1000];
        pages(0).for_each(|page| seen[page as usize] += 1);
        assert!(seen.iter().all(|&times| (2..60).contains(&times)), "{seen:?}");
        assert!(pages(0).ne(pages(1)));
    }

    #[test]
    fn a_list_is_repeated_and_stays_within_the_part() {
        let work =
            Work { order: Order::Listed { pages: &[7, 3, 12] }, ..Work::each_page(Touch::Write) };
        let pages: Vec<_> = work.steps(1, 10).take(5).map(|step| step.0).collect();
        assert_eq!(pages, [7, 3, 2, 7, 3]);
        let none = Work { order: Order::Listed { pages: &[] }, ..work };
        assert!(none.check().is_err());
    }

    #[test]
    fn the_hot_set_gets_its_share() {
        let order = Order::Hot { seed: 7, percent: 10, share: 90 };
        let work = Work { order, ..Work::each_page(Touch::Write) };
        let hot = work.steps(0, 1000).take(10_000).filter(|step| step.0 < 100).count();
        // 90 per cent, and a tenth of the draws from all pages.
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
