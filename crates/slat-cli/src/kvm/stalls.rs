//! Measurements of the time that memory management took from vCPUs, and of the pages that they
//! touched in it.

use super::guest::{Pattern, measurement};
use super::values::Others;
use serde_json::{Map, Value};
use slat_kvm::figure::{Figure, Stall, stalls};
use slat_kvm::phase::{Phase, PhaseRun};
use slat_lab::record::Measurement;

/// Returns the measurements of the stalls of a phase, or nothing if the usual time of an access is
/// not known yet.
pub fn measurements(
    scenario: &str,
    params: &Map<String, Value>,
    runs: &[&PhaseRun],
) -> Vec<Measurement> {
    let figures: Vec<[f64; 8]> = runs.iter().filter_map(|run| stalls(run)).collect();
    let Some(first) = runs.first().filter(|_| !figures.is_empty()) else { return Vec::new() };
    let of = |(place, stall): (usize, Stall)| {
        let samples = figures.iter().map(|figures| figures[place]).collect();
        measurement(scenario, Figure::Stall(first.phase, stall), params.clone(), samples)
    };
    Stall::ALL.into_iter().enumerate().map(of).collect()
}

/// Returns the number of pages that a vCPU wrote in a phase of a round. A count of pages is one of
/// steps, of which a share writes; the first touch writes all pages.
pub(super) fn written(m: &Measurement) -> Option<f64> {
    let steps = *m.counts.get("pages").filter(|steps| **steps > 0)? as f64;
    let whole = Phase::Populate == *m.variant;
    let percent = if whole { 100 } else { Pattern::read(&m.params).write_percent };
    Some(steps * f64::from(percent) / 100.0)
}

/// Returns the number of pages that a vCPU wrote or read in a phase of a round: of the steps that
/// do not write, all read, or all skip their page.
pub(super) fn touched(m: &Measurement) -> Option<f64> {
    match reads(m) {
        true => Some(*m.counts.get("pages").filter(|steps| **steps > 0)? as f64),
        false => written(m),
    }
}

/// Returns whether the steps that do not write read their page.
pub(super) fn reads(m: &Measurement) -> bool {
    Pattern::read(&m.params).others == Others::Read
}
