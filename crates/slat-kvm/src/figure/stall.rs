//! Figures of the time that memory management took from vCPUs, by the vCPUs' own clocks.
//!
//! [`crate::stall`] defines which times are stalls. Their sum is given for each page that the
//! vCPU touched, and for each second that it would have run. That second leaves out two times,
//! which are given as well: the time that the vCPU's thread waited for a CPU, and the time that the
//! hypervisor below this host took (steal time). Each figure is the largest of all vCPUs.

use crate::phase::{PhaseRun, VcpuRun};
use crate::stall::Stalls;

/// A figure of the stalls in a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stall {
    /// Stalls, for each page.
    Page,
    /// Stalls, in each second.
    Share,
    /// The median stall.
    P50,
    /// The 95th percentile.
    P95,
    /// The 99th percentile.
    P99,
    /// The longest stall.
    Longest,
    /// Waiting for a CPU, in each second.
    Waited,
    /// Time that the hypervisor below took, in each second.
    Stolen,
}

impl Stall {
    /// All figures.
    pub const ALL: [Self; 8] = [
        Self::Page,
        Self::Share,
        Self::P50,
        Self::P95,
        Self::P99,
        Self::Longest,
        Self::Waited,
        Self::Stolen,
    ];

    /// Returns the end of the name in results, the unit, and the heading.
    fn described(self) -> [&'static str; 3] {
        match self {
            Self::Page => ["stall-page", "s", "a page"],
            Self::Share => ["stall", "ms/s", "stalled"],
            Self::P50 => ["stall-p50", "s", "p50"],
            Self::P95 => ["stall-p95", "s", "p95"],
            Self::P99 => ["stall-p99", "s", "p99"],
            Self::Longest => ["stall-max", "s", "longest"],
            Self::Waited => ["waited", "ms/s", "waited"],
            Self::Stolen => ["stolen", "ms/s", "stolen"],
        }
    }

    /// Returns the end of the name in results, after the phase.
    pub fn name(self) -> &'static str {
        self.described()[0]
    }

    /// Returns the name of the unit.
    pub fn unit(self) -> &'static str {
        self.described()[1]
    }

    /// Returns the heading of its column.
    pub fn heading(self) -> &'static str {
        self.described()[2]
    }
}

/// Returns the figures of one occurrence of a phase, in the order of [`Stall::ALL`];
/// nothing if the usual time of an access is not known yet.
pub fn stalls(run: &PhaseRun) -> Option<[f64; 8]> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phase::Phase;

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
    fn stalls_are_reported_per_page_and_per_second_of_run_time() {
        let vcpus = vec![vcpu(0.5, 1.0, 0.01), vcpu(0.3, 0.0, 0.02)];
        let of_run = super::stalls(&run(vcpus)).unwrap();
        assert_eq!((of_run[0], of_run[4]), (0.5, 0.02));
        assert!((of_run[1] - 500.0).abs() < 1e-9, "{of_run:?}");
        assert!((of_run[6] - 500.0).abs() < 1e-9, "{of_run:?}");
        // The vCPU waited for all of the rest, so all of its time that counts is stalls.
        assert_eq!(super::stalls(&run(vec![vcpu(0.5, 1.7, 0.0)])).unwrap()[1], 1000.0);
    }

    #[test]
    fn steps_that_are_skipped_are_no_pages_that_were_touched() {
        let vcpu = |accesses| {
            let one = vcpu(0.5, 0.0, 0.0);
            let stalls = one.stalls.map(|stalls| Stalls { accesses, ..stalls });
            VcpuRun { pages: 1000, stalls, ..one }
        };
        assert_eq!(super::stalls(&run(vec![vcpu(100)])).unwrap()[0], 0.005);
        assert_eq!(super::stalls(&run(vec![vcpu(1000)])).unwrap()[0], 0.0005);
    }

    #[test]
    fn without_knowing_what_is_usual_there_is_nothing_to_say() {
        let unknown = VcpuRun { stalls: None, ..vcpu(1.0, 0.0, 1.0) };
        assert!(super::stalls(&run(vec![unknown.clone()])).is_none());
        assert!(super::stalls(&run(vec![vcpu(1.0, 0.0, 1.0), unknown])).is_none());
    }
}
