//! Memslots that come, move and go beside running vCPUs.
//!
//! What a VMM does as the guest plugs memory or firmware places a device's BAR. The slot is one
//! that no vCPU touches; what it costs them all the same is the question. On x86 KVM answers a move
//! or a deletion by throwing all of the guest's second-level tables away, unless the VM gave that
//! up (`KVM_X86_QUIRK_SLOT_ZAP_ALL`, Linux 6.12); every other architecture unmaps the slot alone.
//! The cycle is that of Linux's `memslot_modification_stress_test`, and of the moves of
//! `memslot_perf_test`.
//!
//! | phase | what happens |
//! |---|---|
//! | populate | every vCPU writes each of its pages for the first time |
//! | baseline | the vCPUs run at their pace: what an access usually takes |
//! | run | they run on, and a slot is added, moved and deleted, over and over |
//! | read | every vCPU reads each of its pages |

use super::live::{CallTimes, Sample, baseline, check_reads, sampled, wait};
use super::writes::{check_last, positions};
use crate::guest::{Guest, Shape};
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Calls, Setting, perform};
use crate::work::{Touch, Work};
use crate::{Error, HostKvm};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// For how long the vCPUs run with nothing in their way.
const BASELINE: Duration = Duration::from_millis(500);

/// What to run.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The guest.
    pub shape: Shape,
    /// What its vCPUs do, again and again.
    pub work: Work,
    /// Bytes of the slot: of pages that the guest's memory has, too.
    pub slot: u64,
    /// How often it is added, moved and deleted.
    pub iterations: u32,
    /// From the end of each change to the next.
    pub delay: Duration,
}

impl Config {
    /// Checks what can be checked without a guest.
    ///
    /// # Errors
    /// [`Error::Invalid`], and what [`Shape::check`] finds.
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        self.work.check()?;
        let page = rustix::param::page_size() as u64;
        if self.slot == 0 || self.slot > self.shape.memory || !self.slot.is_multiple_of(page) {
            let rule = format!(
                "must be a multiple of {page} bytes and at most the guest's memory, whose pages it has"
            );
            return Err(Error::invalid("slot", self.slot, rule));
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

/// What a run found.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// What was run.
    pub config: Config,
    /// The phases.
    pub phases: Vec<PhaseRun>,
    /// Steps a second of all vCPUs with nothing in their way.
    pub baseline: f64,
    /// And over time beside the changes.
    pub samples: Vec<Sample>,
    /// Adding the slot.
    pub add: CallTimes,
    /// Moving it to another guest physical address.
    pub shift: CallTimes,
    /// Deleting it.
    pub delete: CallTimes,
}

/// Runs vCPUs beside a slot that comes, moves and goes.
///
/// # Errors
/// What [`Config::check`] finds; [`Error::Stopped`]; [`Error::WrongStamp`] or [`Error::Misread`] if
/// memory is not what was written; any other [`Error`] that the guest or the kernel gives cause
/// for.
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

/// Times of the additions, the moves and the deletions.
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
