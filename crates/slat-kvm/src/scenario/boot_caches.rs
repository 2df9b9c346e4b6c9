//! Toggling the caches of every vCPU of an Arm guest: the cost of KVM's cache maintenance.
//!
//! At boot, at a reset and at a kexec, each vCPU of a guest turns its MMU and caches off or on. On
//! a CPU without FEAT_S2FWB, KVM then cleans and invalidates all of the guest's memory, once for
//! each change of each vCPU (the proposed "flush once" does it for one vCPU only). Here every vCPU
//! makes both changes while all of the memory is mapped. KVM's tracepoint counts them, if this
//! process may trace.

use super::live::check_reads;
use crate::Error;
use crate::figure::{Figure::Time, Outcome, Results, Sentence, WHOLE_PHASES};
use crate::guest::Shape;
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, perform};
use crate::trace::Events;
use crate::work::{Touch, Work};

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "boot-caches",
    title: "Caches switched off and on (KVM)",
    columns: &[(Time(Phase::Populate), "populate"), (Time(Phase::Toggle), "switch")],
    note: WHOLE_PHASES,
    said: Sentence::Whole(
        Time(Phase::Toggle),
        "Switching the caches of all vCPUs off and on takes",
    ),
};

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    counts: &[(Phase::Toggle, "cache_toggles", |report| report.toggles)],
    ..Outcome::of(Time(Phase::Toggle))
};

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Number of changes that KVM saw (`kvm_toggle_cache`), if this process could trace them.
    pub toggles: Option<u64>,
}

/// Populates the memory, and has all vCPUs turn their caches off and on at once.
///
/// # Errors
/// The errors of [`Shape::check`]; [`Error::MissingCapability`] on other architectures;
/// [`Error::Stopped`]; [`Error::Misread`] if a page is wrong; any other [`Error`] of the guest or
/// the kernel.
pub fn run(shape: &Shape, setting: Setting<'_>) -> Result<Report, Error> {
    let toggle = Work { steps: Some(1), ..Work::each_page(Touch::ToggleCaches) };
    toggle.check()?;
    let (report, phases) = perform(shape, setting, |stage| {
        let read = Work::each_page(Touch::Read);
        stage.populate(read)?;
        let events = Events::start(&["kvm/kvm_toggle_cache"]);
        stage.vcpus(Phase::Toggle, None, toggle)?;
        let toggles = events.and_then(|events| events.count("kvm_toggle_cache"));
        stage.vcpus(Phase::Read, None, read)?;
        check_reads(stage.guest)?;
        Ok(Report { phases: Vec::new(), toggles })
    })?;
    Ok(Report { phases, ..report })
}
