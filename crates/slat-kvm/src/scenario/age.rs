//! Ageing a guest's memory with the host's access tracking, and its cost to the guest.
//!
//! The phases are those of Linux's `access_tracking_perf_test`: writes and reads of mapped memory,
//! then the same after the host has marked all of it as not used. Marking clears the accessed bits,
//! and the guest's accesses have to set them again, by hardware or by a fault.

use super::live::check_reads;
use crate::Error;
use crate::figure::{Figure::Time, Outcome, Results, Sentence, WHOLE_PHASES};
use crate::guest::Shape;
use crate::idle::{AccessTracking, Marker};
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, perform};
use crate::work::{Touch, Work};

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "age",
    title: "Ageing (KVM)",
    columns: &[
        (Time(Phase::Populate), "populate"),
        (Time(Phase::Write), "write"),
        (Time(Phase::Read), "read"),
        (Time(Phase::MarkIdle), "mark idle"),
        (Time(Phase::WriteIdle), "write to idle"),
        (Time(Phase::ReadIdle), "read idle"),
    ],
    note: WHOLE_PHASES,
    said: Sentence::PerPage(Phase::WriteIdle, "A write to memory that was marked idle"),
};

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    counts: &[
        (Phase::WriteIdle, "idle_after", |report| report.idle_after_writes),
        (Phase::ReadIdle, "idle_after", |report| report.idle_after_reads),
        (Phase::MarkIdle, "marked", |report| report.marked),
    ],
    ..Outcome::of(Time(Phase::WriteIdle))
};

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Number of pages that the host could mark, where the kernel reports it.
    pub marked: Option<u64>,
    /// Number of pages still marked after the guest wrote to all, where the kernel reports it. A
    /// lower number means that the host saw more of the accesses.
    pub idle_after_writes: Option<u64>,
    /// Number of pages still marked after the guest read all, where the kernel reports it.
    pub idle_after_reads: Option<u64>,
}

/// Populates the memory, writes and reads it; then marks and writes it, and marks and reads it.
///
/// # Errors
/// The errors of [`Shape::check`]; [`Error::NoAccessTracking`]; [`Error::Stopped`];
/// [`Error::Misread`] if a page is wrong; any other [`Error`] of the guest or the kernel.
pub fn run(shape: &Shape, tracking: AccessTracking, setting: Setting<'_>) -> Result<Report, Error> {
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
            // Counted before the accesses: pages that cannot be marked (all but the first of a huge
            // page) would look used.
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
