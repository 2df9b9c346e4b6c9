//! Adding, moving and deleting a memslot while vCPUs run.
//!
//! VMMs do this when the guest plugs memory or firmware places a device's BAR. No vCPU touches the
//! memslot here, and the run measures the cost of its changes to the vCPUs. On x86, KVM zaps all
//! second-level tables of the guest when a memslot is moved or deleted, unless the VM has disabled
//! that (`KVM_X86_QUIRK_SLOT_ZAP_ALL`, Linux 6.12). Other architectures unmap only the memslot. The
//! cycle is that of Linux's `memslot_modification_stress_test`, and of the moves of
//! `memslot_perf_test`.
//!
//! | phase | activity |
//! |---|---|
//! | populate | every vCPU writes each of its pages for the first time |
//! | warm | every vCPU reads each of its pages |
//! | baseline | the vCPUs run at their pace: how long an access usually takes |
//! | run | the vCPUs run while the memslot is added, moved and deleted repeatedly |
//! | read | every vCPU reads each of its pages |

use super::live::{CallTimes, baseline, check_reads, sampled, wait};
use super::pace::{Sample, course, loss, worst};
use super::writes::{check_last, positions};
use crate::error::size_name;
use crate::figure::Figure::{self, LongestCall, Time};
use crate::figure::{Outcome, Results, Sentence, Stall};
use crate::guest::{Guest, Shape};
use crate::phase::{Phase, PhaseRun, VcpuRun};
use crate::stage::{Calls, Setting, perform};
use crate::work::{Touch, Work};
use crate::{Error, HostKvm};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "memslot",
    title: "A memslot that comes, moves and goes beside running vCPUs (KVM)",
    columns: &[
        (Figure::LOSS, "guest lost"),
        (Figure::WORST_LOSS, "worst second"),
        (FAULTS, "faults"),
        (Time(Phase::Add), "add"),
        (LongestCall(Phase::Add), "longest"),
        (Time(Phase::Move), "move"),
        (LongestCall(Phase::Move), "longest"),
        (Time(Phase::Delete), "delete"),
        (LongestCall(Phase::Delete), "longest"),
    ],
    note: "No vCPU touches the slot. “guest lost” is what is missing of the pace that the vCPUs \
           kept before; “faults” are theirs for each move and deletion.",
    said: Sentence::Whole(
        Figure::LOSS,
        "Memslots that come, move and go take from the guest's pace",
    ),
};

/// The faults of all vCPUs for each move and deletion.
const FAULTS: Figure = Figure::Own("faults", "faults");

/// What its runs give.
pub const OUTCOME: Outcome<Report> = Outcome {
    figures: &[
        (Figure::LOSS, |report| Some(loss(&report.samples, report.baseline))),
        (Figure::WORST_LOSS, |report| Some(worst(&report.samples, report.baseline))),
        (FAULTS, faults),
        (Time(Phase::Add), |report| report.add.mean()),
        (LongestCall(Phase::Add), |report| report.add.longest()),
        (Time(Phase::Move), |report| report.shift.mean()),
        (LongestCall(Phase::Move), |report| report.shift.longest()),
        (Time(Phase::Delete), |report| report.delete.mean()),
        (LongestCall(Phase::Delete), |report| report.delete.longest()),
    ],
    course: |report| course(&report.samples, report.baseline).into(),
    ..Outcome::of(Figure::Stall(Phase::Run, Stall::Page))
};

/// Time that the vCPUs run undisturbed.
const BASELINE: Duration = Duration::from_millis(500);

/// Configuration of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest.
    pub shape: Shape,
    /// The work of its vCPUs, repeated without end.
    pub work: Work,
    /// Size of the memslot in bytes. It maps the first pages of the guest's memory at other
    /// addresses.
    pub slot: u64,
    /// Number of times that the memslot is added, moved and deleted.
    pub iterations: u32,
    /// Time from the end of each change to the start of the next.
    pub delay: Duration,
}

impl Config {
    /// Checks the configuration, without making a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], and the errors of [`Shape::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        self.work.check()?;
        let page = rustix::param::page_size() as u64;
        if self.slot == 0 || self.slot > self.shape.memory || !self.slot.is_multiple_of(page) {
            let rule = format!(
                "must be a multiple of {page} bytes and at most the guest's memory, whose pages it \
                 has"
            );
            return Err(Error::invalid("slot size", size_name(self.slot), rule));
        }
        if self.iterations == 0 {
            return Err(Error::invalid("iterations", 0, "must be above 0"));
        }
        if self.shape.slots as usize + 2 > host.max_memslots {
            let rule = format!("must leave one of this host's {} free", host.max_memslots);
            return Err(Error::invalid("memslots", self.shape.slots, rule));
        }
        self.shape.check(host)
    }
}

/// Results of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The configuration of the run.
    pub config: Config,
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Steps per second of all vCPUs while undisturbed.
    pub baseline: f64,
    /// Samples over time during the changes.
    pub samples: Vec<Sample>,
    /// Calls that added the memslot.
    pub add: CallTimes,
    /// Calls that moved it to another guest-physical address.
    pub shift: CallTimes,
    /// Calls that deleted it.
    pub delete: CallTimes,
}

/// Returns the faults of all vCPUs for each move and deletion, if KVM counts them.
fn faults(report: &Report) -> Option<f64> {
    let run = report.phases.iter().find(|run| run.phase == Phase::Run)?;
    let has = |vcpu: &VcpuRun| vcpu.counters.get("pf_taken").copied();
    // A phase lists only counters that changed: a counter that no phase lists may not exist.
    let counted = report.phases.iter().flat_map(|run| &run.vcpus).any(|vcpu| has(vcpu).is_some());
    let faults: i64 = run.vcpus.iter().filter_map(has).sum();
    let changes = report.shift.count + report.delete.count;
    counted.then(|| faults as f64 / changes.max(1) as f64)
}

/// Runs vCPUs while a memslot is added, moved and deleted.
///
/// # Errors
/// The errors of [`Config::check`]; [`Error::Stopped`]; [`Error::WrongStamp`] or [`Error::Misread`]
/// if a page is wrong; any other [`Error`] of the guest or the kernel.
pub fn run(config: &Config, setting: Setting<'_>) -> Result<Report, Error> {
    config.check(&crate::probe()?)?;
    let (report, phases) = perform(&config.shape, setting, |stage| {
        let (work, baseline) = baseline(stage, config.work, BASELINE)?;
        let stop = stage.stop();
        let given = positions(stage.guest);
        let ([add, shift, delete], samples) = stage.live(
            Phase::Run,
            work,
            |guest| sampled(guest, || change(guest, config, stop)),
            |_, _| Ok(false),
            |_, found| Ok(found),
        )?;
        stage.checking()?;
        check_last(stage.guest, &work, &given, stop)?;
        stage.vcpus(Phase::Read, None, Work::each_page(Touch::Read))?;
        check_reads(stage.guest)?;
        Ok(Report {
            config: config.clone(),
            phases: Vec::new(),
            baseline,
            samples,
            add: add.into(),
            shift: shift.into(),
            delete: delete.into(),
        })
    })?;
    Ok(Report { phases, ..report })
}

/// Changes the memslot, and returns the times of the additions, the moves and the deletions.
fn change(guest: &Guest, config: &Config, stop: &AtomicBool) -> Result<[Calls; 3], Error> {
    let mut calls = [Calls::default(); 3];
    for _ in 0..config.iterations {
        for (kind, place) in [Some(0), Some(1), None].into_iter().enumerate() {
            if stop.load(Ordering::Relaxed) {
                return Ok(calls);
            }
            calls[kind].time(|| guest.place_spare(config.slot, place))?;
            wait(guest, Instant::now() + config.delay, stop);
        }
    }
    Ok(calls)
}
