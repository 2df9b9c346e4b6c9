//! First touches of a guest's memory: the cost of allocating and mapping it.

use crate::Error;
use crate::figure::{Figure::Time, Outcome, Results, Sentence, WHOLE_PHASES};
use crate::guest::Shape;
use crate::phase::{Phase, PhaseRun};
use crate::scenario::live::check_reads;
use crate::stage::{Setting, perform};
use crate::work::{Touch, Work};

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "populate",
    title: "First touches (KVM)",
    columns: &[(Time(Phase::Populate), "populate"), (Time(Phase::Warm), "again")],
    note: WHOLE_PHASES,
    said: Sentence::PerPage(Phase::Populate, "The first touch of memory"),
};

/// What its runs give.
pub const OUTCOME: Outcome<Vec<PhaseRun>> = Outcome::of(Time(Phase::Populate));

/// Writes each page for the first time, and then reads it.
///
/// # Errors
/// The errors of [`Shape::check`]; [`Error::Stopped`]; [`Error::Misread`] if a page is wrong; any
/// other [`Error`] of the guest or the kernel.
pub fn run(shape: &Shape, setting: Setting<'_>) -> Result<Vec<PhaseRun>, Error> {
    let ((), phases) = perform(shape, setting, |stage| {
        stage.populate(Work::each_page(Touch::Read))?;
        check_reads(stage.guest)
    })?;
    Ok(phases)
}
