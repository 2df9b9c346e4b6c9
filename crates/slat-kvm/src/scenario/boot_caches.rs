//! Every vCPU of an Arm guest switches its caches: what KVM's maintenance costs.
//!
//! At boot, at a reset and at a kexec, each vCPU of a guest turns its MMU and caches off or on. On
//! a CPU without FEAT_S2FWB, KVM then cleans and invalidates all of the guest's memory, once for
//! each edge of each vCPU ("flush once" proposes to do it for one). Here every vCPU makes both
//! edges, all of the memory being mapped; KVM's tracepoint counts them, where this process may
//! trace.

use super::live::check_reads;
use crate::Error;
use crate::guest::Shape;
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, perform};
use crate::trace::Events;
use crate::work::{Touch, Work};

/// What a run found.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Edges that KVM saw (`kvm_toggle_cache`), where that could be traced.
    pub toggles: Option<u64>,
}

/// Populates, and has each vCPU switch its caches off and on, all of them at once.
///
/// # Errors
/// What [`Shape::check`] finds; [`Error::MissingCapability`] on other architectures;
/// [`Error::Stopped`]; [`Error::Misread`] or any other [`Error`] that the guest or the kernel gives
/// cause for.
pub fn run(shape: &Shape, setting: Setting<'_>) -> Result<Report, Error> {
    let toggle = Work { once: true, ..Work::each_page(Touch::ToggleCaches) };
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
