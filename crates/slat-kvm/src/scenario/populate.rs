//! First touches of a guest's memory: what the host and KVM take to give it.

use crate::Error;
use crate::guest::Shape;
use crate::phase::PhaseRun;
use crate::scenario::live::check_reads;
use crate::stage::{Setting, perform};
use crate::work::{Touch, Work};

/// Writes to each page for the first time, and reads each.
///
/// # Errors
/// What [`Shape::check`] finds; [`Error::Stopped`]; [`Error::Misread`] or any other [`Error`] that
/// the guest or the kernel gives cause for.
pub fn run(shape: &Shape, setting: Setting<'_>) -> Result<Vec<PhaseRun>, Error> {
    let ((), phases) = perform(shape, setting, |stage| {
        stage.populate(Work::each_page(Touch::Read))?;
        check_reads(stage.guest)
    })?;
    Ok(phases)
}
