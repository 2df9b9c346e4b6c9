//! A watched guest for tests.

use slat_kvm::watch::{
    GuestTotal, Knowledge, Metric, Sample, Source, Stalls, State, Values, VcpuTotal,
};
use std::collections::BTreeMap;

/// A guest that was watched for two seconds.
pub fn guest(name: &str) -> GuestTotal {
    let values = Values::from([(Metric::Faults, 1000), (Metric::RunningNs, 3_000_000_000)]);
    let sample =
        Sample { at: 2.0, seconds: 2.0, guest: values.clone(), vcpus: vec![values.clone()] };
    let knowledge = Knowledge {
        sources: BTreeMap::from([
            (Metric::Faults, Source::BinaryStatistics),
            (Metric::RunningNs, Source::Schedstat),
        ]),
        unknown: BTreeMap::from([(Metric::FaultNs, "nobody times them".to_owned())]),
    };
    GuestTotal {
        pid: 4711,
        name: name.to_owned(),
        domain: None,
        cgroup: None,
        pod: None,
        vms: 1,
        found_at: 0.0,
        seconds: 2.0,
        state: State::ProcessEnded,
        knowledge,
        total: values.clone(),
        statistics: [("pf_taken".to_owned(), 1000)].into(),
        stalls: Stalls::new(),
        invalidated_by: [("ksmd".to_owned(), 1234), ("qemu".to_owned(), 5)].into(),
        threads: Vec::new(),
        vcpus: vec![VcpuTotal {
            index: 0,
            thread: Some(4712),
            total: values,
            statistics: [("pf_taken".to_owned(), 1000)].into(),
            stalls: Stalls::new(),
        }],
        samples: vec![sample],
    }
}
