//! Ageing a guest's memory by what the host has for it, beside what that costs the guest.
//!
//! The phases are those of Linux's `access_tracking_perf_test`: writes and reads of memory that is
//! there, then the same after the host marked all of it as not used, which takes the accessed bits
//! away that the guest's accesses have to set again, by hardware or by a fault.

use super::live::check_reads;
use crate::Error;
use crate::guest::Shape;
use crate::idle::{Marker, Tracking};
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, perform};
use crate::work::{Touch, Work};

/// What a run found.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Pages that could be marked, where the kernel tells.
    pub marked: Option<u64>,
    /// Pages still marked after the guest had written to all, where the kernel tells: the fewer,
    /// the more of its accesses the host learnt of.
    pub idle_after_writes: Option<u64>,
    /// And after it had read all.
    pub idle_after_reads: Option<u64>,
}

/// Populates, writes, reads, marks, writes, marks, reads.
///
/// # Errors
/// What [`Shape::check`] finds; [`Error::NoAccessTracking`]; [`Error::Stopped`]; [`Error::Misread`]
/// or any other [`Error`] that the guest or the kernel gives cause for.
pub fn run(shape: &Shape, tracking: Tracking, setting: Setting<'_>) -> Result<Report, Error> {
    let (report, phases) = perform(shape, setting, |stage| {
        let (write, read) = (Work::each_page(Touch::Write), Work::each_page(Touch::Read));
        stage.populate(read)?;
        stage.vcpus(Phase::Write, None, write)?;
        stage.vcpus(Phase::Read, None, read)?;
        let marker = Marker::new(tracking, stage.guest.memory())?;
        let (mut idle, mut marked) = ([None; 2], None);
        let idle_phases = [(Phase::WriteIdle, write), (Phase::ReadIdle, read)];
        for (round, (phase, work)) in (1..).zip(idle_phases) {
            stage.calls(Phase::MarkIdle, Some(round), |_, calls| calls.time(|| marker.mark()))?;
            // Pages that cannot be marked (of huge pages, all but the first) would look used.
            marked = marker.idle()?;
            stage.vcpus(phase, None, work)?;
            idle[round as usize - 1] = marker.idle()?;
        }
        check_reads(stage.guest)?;
        let [idle_after_writes, idle_after_reads] = idle;
        Ok(Report { phases: Vec::new(), marked, idle_after_writes, idle_after_reads })
    })?;
    Ok(Report { phases, ..report })
}
