//! Executing from all of the guest's memory: the cost of no-execute huge pages.
//!
//! The workload is that of the proposed `execute_perf_test`. Writes fill the memory with return
//! instructions, so that huge pages are mapped first. Then every vCPU calls one in each page. On a
//! host that maps huge pages no-execute, the first call in a huge page splits it.

use crate::Error;
use crate::figure::{Figure::Time, Outcome, Results, Sentence, WHOLE_PHASES};
use crate::guest::Shape;
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, perform};
use crate::work::{Touch, Work};

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "execute",
    title: "Executing from all of memory (KVM)",
    columns: &[
        (Time(Phase::Populate), "populate"),
        (Time(Phase::Execute), "execute"),
        (Time(Phase::Read), "read"),
        (Time(Phase::Write), "write"),
    ],
    note: WHOLE_PHASES,
    said: Sentence::PerPage(Phase::Execute, "Executing from memory for the first time"),
};

/// What its runs give.
pub const OUTCOME: Outcome<Vec<PhaseRun>> = Outcome::of(Time(Phase::Execute));

/// Writes, then executes `iterations` times, then reads and writes again.
///
/// # Errors
/// The errors of [`Shape::check`]; [`Error::Stopped`]; [`Error::Misread`] if a page is wrong; any
/// other [`Error`] of the guest or the kernel.
pub fn run(shape: &Shape, iterations: u32, setting: Setting<'_>) -> Result<Vec<PhaseRun>, Error> {
    let ((), phases) = perform(shape, setting, |stage| {
        stage.populate(Work::each_page(Touch::Read))?;
        for iteration in (1..=iterations).map(Some) {
            stage.vcpus(Phase::Execute, iteration, Work::each_page(Touch::Execute))?;
        }
        stage.vcpus(Phase::Read, None, Work::each_page(Touch::Read))?;
        stage.vcpus(Phase::Write, None, Work::each_page(Touch::Write))?;
        match stage.guest.misread() {
            0 => Ok(()),
            pages => Err(Error::Misread { pages }),
        }
    })?;
    Ok(phases)
}
