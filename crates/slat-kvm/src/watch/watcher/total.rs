//! What a watch says of each guest: samples, and their totals.

use crate::stats::Changes;
use crate::watch::events::times::Stalls;
use crate::watch::guest::{Knowledge, State};
use crate::watch::metric::Values;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// The values between two moments.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Sample {
    /// Seconds from the start of the watch to the end of the sample.
    pub at: f64,
    /// Length of the sample, in seconds.
    pub seconds: f64,
    /// Values of the guest.
    pub guest: Values,
    /// Values of each vCPU.
    pub vcpus: Vec<Values>,
}

/// Most samples that are kept of a guest. With one more, all samples are merged in pairs.
pub(super) const MOST_SAMPLES: usize = 2048;

/// Merges the samples in pairs. The last one stays as it is if their number is odd.
pub(super) fn halve(samples: &mut Vec<Sample>) {
    let both = |pair: &[Sample]| {
        let [one, next] = pair else { return pair[0].clone() };
        let vcpus = (0..next.vcpus.len()).map(|place| match one.vcpus.get(place) {
            Some(before) => together(before, &next.vcpus[place]),
            None => next.vcpus[place].clone(),
        });
        Sample {
            at: next.at,
            seconds: one.seconds + next.seconds,
            guest: together(&one.guest, &next.guest),
            vcpus: vcpus.collect(),
        }
    };
    *samples = samples.chunks(2).map(both).collect();
}

/// Merges the values of two consecutive samples.
fn together(one: &Values, next: &Values) -> Values {
    let mut sum = next.clone();
    for (metric, value) in one {
        let both = sum.entry(*metric).or_insert(if metric.is_level() { *value } else { 0 });
        *both += if metric.is_level() { 0 } else { *value };
    }
    sum
}

/// The totals of a vCPU.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct VcpuTotal {
    /// The vCPU's number.
    pub index: u32,
    /// The thread that runs the vCPU, if it is known.
    pub thread: Option<i32>,
    /// Values over the time of the watch.
    pub total: Values,
    /// Counters of KVM that changed until [`Watch::end`](crate::watch::Watch::end) or the guest's
    /// end, by the kernel's names.
    pub statistics: Changes,
    /// How long the vCPU was out of the guest, by reason, if tracepoints provide it.
    pub stalls: Stalls,
}

impl VcpuTotal {
    pub(super) fn new(index: u32, thread: Option<i32>) -> Self {
        let (total, statistics, stalls) = Default::default();
        Self { index, thread, total, statistics, stalls }
    }
}

/// A vCPU's thread that came or went during the watch.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ThreadChange {
    /// Seconds from the beginning of the watch to the sample that noticed it.
    pub at: f64,
    /// The vCPU's number.
    pub vcpu: u32,
    /// Whether it came, or else went.
    pub came: bool,
    /// The thread, where it is known.
    pub thread: Option<i32>,
}

/// Most changes of threads that are kept of a guest.
const MOST_CHANGES: usize = 256;

/// The totals of a guest.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GuestTotal {
    /// The guest's process.
    pub pid: i32,
    /// The name of the guest's process.
    pub name: String,
    /// The guest's name, by QEMU's `-name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// The control group of the guest's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The UID of the pod of Kubernetes that the guest's process belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Number of VMs of the process.
    pub vms: usize,
    /// Seconds from the start of the watch until the guest was found.
    pub found_at: f64,
    /// Time that the guest was watched, in seconds.
    pub seconds: f64,
    /// Whether the guest still exists.
    pub state: State,
    /// The sources of the values, and the reasons for the unknown ones.
    #[serde(flatten)]
    pub knowledge: Knowledge,
    /// Values over the time of the watch. Levels are those of the last sample.
    pub total: Values,
    /// Counters of the VM that changed until [`Watch::end`](crate::watch::Watch::end) or the
    /// guest's end, by the kernel's names.
    pub statistics: Changes,
    /// How long the vCPUs were out of the guest, by reason, if tracepoints provide it.
    pub stalls: Stalls,
    /// The processes that unmapped memory of the guest, by name, and how often each did.
    pub invalidated_by: BTreeMap<String, u64>,
    /// Threads of vCPUs that came or went, of these the first 256.
    pub threads: Vec<ThreadChange>,
    /// The guest's vCPUs.
    pub vcpus: Vec<VcpuTotal>,
    /// The values of each step.
    pub samples: Vec<Sample>,
}

impl GuestTotal {
    /// Takes the thread that runs each vCPU now.
    pub(super) fn threads_now(
        &mut self,
        at: Duration,
        now: impl Iterator<Item = (u32, Option<i32>)>,
    ) {
        for (place, (vcpu, thread)) in now.enumerate().take(self.vcpus.len()) {
            let before = std::mem::replace(&mut self.vcpus[place].thread, thread);
            let last = self.threads.iter().rfind(|it| it.vcpu == vcpu);
            match (before, thread) {
                (Some(_), None) => self.thread_changed(at, vcpu, false, before),
                // One that is found late did not come late.
                (None, Some(_)) if last.is_some_and(|it| !it.came) => {
                    self.thread_changed(at, vcpu, true, thread);
                }
                _ => {}
            }
        }
    }

    /// Notes that a vCPU's thread came or went.
    pub(super) fn thread_changed(
        &mut self,
        at: Duration,
        vcpu: u32,
        came: bool,
        thread: Option<i32>,
    ) {
        if self.threads.len() < MOST_CHANGES {
            self.threads.push(ThreadChange { at: at.as_secs_f64(), vcpu, came, thread });
        }
    }

    /// Takes the counters that changed: those of the VM, and those of each vCPU.
    pub(super) fn take(&mut self, (vm, vcpus): (Changes, Vec<Changes>)) {
        self.statistics = vm;
        self.vcpus.iter_mut().zip(vcpus).for_each(|(row, it)| row.statistics = it);
    }
}
