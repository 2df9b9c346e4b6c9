//! A guest that visits a part of its pages while its memory comes back, in random order or in a
//! recorded one.
//!
//! It records its clock after each access, and then does the same once more, which gives the usual
//! time of an access.

use super::live::check_reads;
use super::times::Times;
use super::writes::{last_writes, positions};
use crate::guest::{Guest, Shape};
use crate::image::Image;
use crate::phase::Phase;
use crate::stage::{Calls, Stage};
use crate::work::{Order, Touch, Work};
use crate::{Backing, Error};

/// The accesses of a guest to a part of its pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Visits {
    /// Accesses, in per cent of the pages.
    pub accesses: u8,
    /// The part of the accesses that write, in per cent. The others read.
    pub writes: u8,
    /// Seed of the order.
    pub seed: u64,
    /// The pages of a recorded guest, which are visited in place of random ones: all of them.
    pub pattern: Option<&'static [u64]>,
}

impl Visits {
    /// Returns the work of a round. Of random accesses it differs from that of other rounds in its
    /// order, of recorded ones in what is written.
    pub(super) fn work(&self, shape: &Shape, round: u32) -> Work {
        let pages = shape.memory / Backing::Small.page_size();
        let each = pages / shape.vcpus.max(1) as u64;
        let random = Order::Random { seed: self.seed };
        let steps = (each * u64::from(self.accesses) / 100).max(1);
        Work {
            order: self.pattern.map_or(random, |pages| Order::Listed { pages }),
            miss: Touch::Read,
            share: self.writes,
            round,
            steps: Some(self.pattern.map_or(steps, |pages| pages.len() as u64)),
            ..Work::each_page(Touch::Write)
        }
    }
}

/// Returns `shape` with the room that a guest takes to record `work`, and the work recorded.
pub(super) fn recorded(shape: &Shape, work: Work) -> (Shape, Work) {
    let records = work.steps.map_or(0, |steps| steps + 1) + listed(&work);
    (Shape { records, ..shape.clone() }, Work { record: true, ..work })
}

/// Returns the room that the list of a work takes.
pub(super) fn listed(work: &Work) -> u64 {
    match work.order {
        Order::Listed { pages } => pages.len() as u64,
        _ => 0,
    }
}

/// What a guest's visits showed.
pub(super) struct VisitResults<T> {
    pub times: Times,
    /// Faults of the host's memory that vCPUs took in the first visit, where procfs tells: those
    /// that read from a disk or swap, and the others.
    pub faults: Option<[u64; 2]>,
    pub between: T,
}

/// A guest that visits its pages twice: while its memory comes or goes, and undisturbed, which
/// gives the usual time. After that all of its memory is compared with the image it came from.
pub(super) struct Visit<'i> {
    pub work: Work,
    pub image: &'i Image,
    /// Whether pages may have lost their contents.
    pub may_be_empty: bool,
}

impl Visit<'_> {
    /// Runs both visits, the first with calls of the host [`beside`](Stage::vcpus_beside) it, and
    /// calls `between` between them. `waited` tells from what that returned how many of the
    /// accesses had to wait, where something counted them.
    pub fn run<'a, T>(
        self,
        stage: &mut Stage<'a>,
        beside: impl FnMut(&Guest, &mut Calls) -> Result<bool, Error>,
        between: impl FnOnce(&mut Stage<'a>) -> Result<T, Error>,
        waited: impl FnOnce(&T) -> Option<u64>,
    ) -> Result<VisitResults<T>, Error> {
        let (guest, work) = (stage.guest, self.work);
        let records = || (0..guest.parts().len()).map(|vcpu| guest.record(vcpu)).collect();
        stage.vcpus_beside(Phase::Restore, None, work, beside)?;
        let faults = stage.last_phase().and_then(|run| {
            let of = |name| {
                let all = run.vcpus.iter().map(|vcpu| vcpu.counters.get(name).copied());
                Some(all.sum::<Option<i64>>()?.unsigned_abs())
            };
            Some([of("host_major_faults")?, of("host_minor_faults")?])
        });
        let first: Vec<_> = records();
        let between = between(stage)?;
        let given = positions(guest);
        stage.vcpus(Phase::Warm, None, work)?;
        let again: Vec<_> = records();
        let times = Times::new(&first, &again, waited(&between), guest.ticks_per_second());
        stage.checking()?;
        let last = last_writes(guest, &work, &given, stage.stop())?;
        self.image.compare(guest, &last, self.may_be_empty, stage.stop())?;
        check_reads(guest)?;
        Ok(VisitResults { times, faults, between })
    }
}
