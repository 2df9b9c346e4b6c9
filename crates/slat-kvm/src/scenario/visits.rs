//! A guest that visits a part of its pages in random order while its memory comes back.
//!
//! It records its clock after each access, and then does the same once more, which gives the usual
//! time of an access.

use super::live::check_reads;
use super::times::Times;
use super::writes::{last_writes, positions};
use crate::guest::Shape;
use crate::image::Image;
use crate::phase::Phase;
use crate::stage::Stage;
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
}

impl Visits {
    /// Returns the work of a round, which differs from that of other rounds in its order.
    pub(super) fn work(&self, shape: &Shape, round: u32) -> Work {
        let pages = shape.memory / Backing::Small.page_size();
        let each = pages / shape.vcpus.max(1) as u64;
        Work {
            order: Order::Random { seed: self.seed },
            miss: Touch::Read,
            share: self.writes,
            round,
            steps: Some((each * u64::from(self.accesses) / 100).max(1)),
            ..Work::each_page(Touch::Write)
        }
    }
}

/// Returns `shape` with the room that a guest takes to record `work`, and the work recorded.
pub(super) fn recorded(shape: &Shape, work: Work) -> (Shape, Work) {
    let records = work.steps.map_or(0, |steps| steps + 1);
    (Shape { records, ..shape.clone() }, Work { record: true, ..work })
}

/// What a guest's visits showed.
pub(super) struct Visited<T> {
    pub times: Times,
    /// Faults of the host's memory that vCPUs took, where procfs tells.
    pub faults: Option<u64>,
    pub between: T,
}

/// Lets the guest do a work that is recorded, calls `between`, lets it do the same once more, and
/// compares all of its memory with the image it came from. `waited` tells from what `between`
/// returned how many of the accesses had to wait, where something counted them.
pub(super) fn visit<'a, T>(
    stage: &mut Stage<'a>,
    work: Work,
    image: &Image,
    between: impl FnOnce(&mut Stage<'a>) -> Result<T, Error>,
    waited: impl FnOnce(&T) -> Option<u64>,
) -> Result<Visited<T>, Error> {
    let guest = stage.guest;
    let records = || (0..guest.parts().len()).map(|vcpu| guest.record(vcpu)).collect::<Vec<_>>();
    stage.vcpus(Phase::Restore, None, work)?;
    let faults = stage.last_phase().and_then(|run| {
        let of = |name| run.vcpus.iter().map(|vcpu| vcpu.counters.get(name).copied()).sum();
        let both: [Option<i64>; 2] = ["host_minor_faults", "host_major_faults"].map(of);
        Some((both[0]? + both[1]?).unsigned_abs())
    });
    let first = records();
    let between = between(stage)?;
    let given = positions(guest);
    stage.vcpus(Phase::Warm, None, work)?;
    let times = Times::new(&first, &records(), waited(&between), guest.ticks_per_second());
    stage.checking()?;
    let last = last_writes(guest, &work, &given, stage.stop())?;
    image.compare(guest, &last, stage.stop())?;
    check_reads(guest)?;
    Ok(Visited { times, faults, between })
}
