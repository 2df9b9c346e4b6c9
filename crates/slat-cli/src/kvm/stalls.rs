//! Measurements of the time that memory management took from vCPUs, by the vCPUs' own clocks.
//!
//! [`slat_kvm::stall`] defines which times are stalls. Their sum is given for each page that the
//! vCPU touched, and for each second that it would have run. That second leaves out two times,
//! which are given as well: the time that the vCPU's thread waited for a CPU, and the time that the
//! hypervisor below this host took (steal time). Each figure is the largest of all vCPUs.

use super::guest::measurement;
use serde_json::{Map, Value};
use slat_kvm::phase::{PhaseRun, VcpuRun};
use slat_kvm::stall::Stalls;
use slat_lab::record::Measurement;

/// Figures of the stalls of a phase: end of the variant's name, unit, heading.
pub const FIGURES: [(&str, &str, &str); 8] = [
    ("stall-page", "s", "a page"),
    ("stall", "ms/s", "stalled"),
    ("stall-p50", "s", "p50"),
    ("stall-p95", "s", "p95"),
    ("stall-p99", "s", "p99"),
    ("stall-max", "s", "longest"),
    ("waited", "ms/s", "waited"),
    ("stolen", "ms/s", "stolen"),
];

/// Returns the measurements of the stalls of a phase, or nothing if the usual time of an access is
/// not known yet.
pub fn measurements(
    scenario: &str,
    params: &Map<String, Value>,
    runs: &[&PhaseRun],
) -> Vec<Measurement> {
    let figures: Vec<[f64; 8]> = runs.iter().filter_map(|run| figures(run)).collect();
    let Some(first) = runs.first().filter(|_| !figures.is_empty()) else { return Vec::new() };
    let of = |(place, (name, unit, _)): (usize, &(&str, &str, &str))| {
        let samples = figures.iter().map(|figures| figures[place]).collect();
        measurement(scenario, &format!("{}-{name}", first.phase), params.clone(), unit, samples)
    };
    FIGURES.iter().enumerate().map(of).collect()
}

/// Returns the figures of one occurrence of a phase, in the order of [`FIGURES`].
pub fn figures(run: &PhaseRun) -> Option<[f64; 8]> {
    let stolen = run.stolen;
    let worst = |of: &dyn Fn(&VcpuRun, Stalls) -> f64| {
        // The worst may be the one of which nothing is known.
        let each: Option<Vec<f64>> =
            run.vcpus.iter().map(|vcpu| Some(of(vcpu, vcpu.stalls?))).collect();
        each?.into_iter().reduce(f64::max)
    };
    let per_second = |seconds: f64, vcpu: &VcpuRun| {
        if vcpu.seconds > 0.0 { seconds / vcpu.seconds * 1e3 } else { 0.0 }
    };
    Some([
        // Steps that skip their page are not timed, and are no accesses.
        worst(&|_, stalls| stalls.seconds / stalls.accesses.max(1) as f64)?,
        worst(&|vcpu, stalls| {
            let others = vcpu.waited.unwrap_or(0.0) + stolen;
            // The vCPU ran at least as long as it stalled, whatever the two other times add up to.
            let would_run = (vcpu.seconds - others).max(stalls.seconds);
            if would_run > 0.0 { stalls.seconds / would_run * 1e3 } else { 0.0 }
        })?,
        worst(&|_, stalls| stalls.p50)?,
        worst(&|_, stalls| stalls.p95)?,
        worst(&|_, stalls| stalls.p99)?,
        worst(&|_, stalls| stalls.longest)?,
        worst(&|vcpu, _| per_second(vcpu.waited.unwrap_or(0.0), vcpu))?,
        worst(&|vcpu, _| per_second(stolen, vcpu))?,
    ])
}

/// Returns the number of pages that a vCPU wrote in a phase of a round. A count of pages is one of
/// steps, of which a share writes; the first touch writes all pages.
pub(super) fn written(m: &Measurement) -> Option<f64> {
    let steps = *m.counts.get("pages").filter(|steps| **steps > 0)? as f64;
    let percent = m.params.get("write_percent").and_then(serde_json::Value::as_f64);
    let percent = percent.filter(|_| m.variant != "populate").unwrap_or(100.0);
    Some(steps * percent / 100.0)
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
    m.params.get("others").is_some_and(|others| others == "read")
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_kvm::phase::Phase;

    fn vcpu(stalled: f64, waited: f64, p99: f64) -> VcpuRun {
        let stalls = Stalls { seconds: stalled, p99, ..Stalls::default() };
        let counters = Default::default();
        VcpuRun { pages: 1, seconds: 2.0, counters, stalls: Some(stalls), waited: Some(waited) }
    }

    fn run(vcpus: Vec<VcpuRun>) -> PhaseRun {
        PhaseRun {
            phase: Phase::Dirty,
            iteration: None,
            seconds: 2.0,
            calls: 0,
            longest_call_seconds: 0.0,
            call_seconds: 0.0,
            vcpus,
            log: None,
            vm: Default::default(),
            mapped: None,
            tables: None,
            nodes: Default::default(),
            stolen: 0.0,
        }
    }

    #[test]
    fn stalls_are_reported_per_page_and_per_second_that_the_vcpu_would_have_run() {
        let vcpus = vec![vcpu(0.5, 1.0, 0.01), vcpu(0.3, 0.0, 0.02)];
        let of_run = figures(&run(vcpus)).unwrap();
        assert_eq!((of_run[0], of_run[4]), (0.5, 0.02));
        assert!((of_run[1] - 500.0).abs() < 1e-9, "{of_run:?}");
        assert!((of_run[6] - 500.0).abs() < 1e-9, "{of_run:?}");
        // The vCPU waited for all of the rest, so all of its time that counts is stalls.
        assert_eq!(figures(&run(vec![vcpu(0.5, 1.7, 0.0)])).unwrap()[1], 1000.0);
    }

    #[test]
    fn steps_that_are_skipped_are_no_pages_that_were_touched() {
        let vcpu = |accesses| {
            let one = vcpu(0.5, 0.0, 0.0);
            let stalls = one.stalls.map(|stalls| Stalls { accesses, ..stalls });
            VcpuRun { pages: 1000, stalls, ..one }
        };
        assert_eq!(figures(&run(vec![vcpu(100)])).unwrap()[0], 0.005);
        assert_eq!(figures(&run(vec![vcpu(1000)])).unwrap()[0], 0.0005);
    }

    #[test]
    fn without_knowing_what_is_usual_there_is_nothing_to_say() {
        let unknown = VcpuRun { stalls: None, ..vcpu(1.0, 0.0, 1.0) };
        assert!(figures(&run(vec![unknown.clone()])).is_none());
        assert!(figures(&run(vec![vcpu(1.0, 0.0, 1.0), unknown.clone()])).is_none());
        assert!(measurements("x", &Map::new(), &[&run(vec![unknown])]).is_empty());
        let known = measurements("x", &Map::new(), &[&run(vec![vcpu(0.5, 0.1, 0.01)])]);
        let names: Vec<_> = known.iter().map(|m| (&*m.variant, m.unit.name())).collect();
        assert_eq!(names[..2], [("dirty-stall-page", "s"), ("dirty-stall", "ms/s")]);
        assert_eq!(known.len(), FIGURES.len());
    }
}
