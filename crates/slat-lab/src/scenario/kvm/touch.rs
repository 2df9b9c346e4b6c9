//! Touching all of a guest's memory: first touches, execution, ageing, taking it away.

use super::{Asked, observe, phases};
use crate::cli::{
    AgeArgs, BootCachesArgs, ExecuteArgs, KvmArgs, KvmBacking, MemoryStressArgs, PopulateArgs,
    TablesArgs,
};
use crate::failure::bad_input;
use crate::record::Measurement;
use crate::session::Session;
use crate::size::Size;
use serde_json::{Map, Value};
use slat_kvm::cgroup::MemoryLimit;
use slat_kvm::guest::Shape;
use slat_kvm::idle::Tracking;
use slat_kvm::phase::PhaseRun;
use slat_kvm::scenario::{age, boot_caches, execute, memory_stress, populate};
use slat_kvm::{Error, Mode, Setting};
use std::collections::BTreeMap;

/// Runs of each guest unless asked for otherwise.
const RUNS: u32 = 3;

/// One guest, several times.
pub(super) struct Runs {
    scenario: &'static str,
    pub shape: Shape,
    pub params: Map<String, Value>,
    pin: Vec<usize>,
    runs: u32,
}

impl Runs {
    pub fn new(scenario: &'static str, asked: &Asked<'_>, runs: u32) -> anyhow::Result<Self> {
        let mut params = asked.params();
        params.insert("runs".to_owned(), runs.into());
        Ok(Self { scenario, shape: asked.shape()?, params, pin: asked.kvm.cpus()?, runs })
    }

    /// What is measured, for the person waiting.
    pub fn name(&self) -> String {
        let Shape { memory, backing, vcpus, .. } = &self.shape;
        format!("{}, {} on {backing}, {vcpus} vCPUs", self.scenario, Size(*memory))
    }

    /// Runs the guest once more than is asked for; the first warms the host's memory up.
    pub fn measure(
        &self,
        session: &Session,
        mut run: impl FnMut(&Shape, Setting<'_>) -> Result<Vec<PhaseRun>, Error>,
    ) -> anyhow::Result<Vec<Measurement>> {
        let name = self.name();
        session.announce(self.shape.memory, self.shape.vcpus);
        let mut all = Vec::new();
        for number in 0..=self.runs {
            if session.interrupted() {
                break;
            }
            let mut phases = Vec::new();
            observe(session, &name, &self.pin, &mut phases, |setting| run(&self.shape, setting))?;
            if number > 0 {
                all.extend(phases);
            }
        }
        Ok(phases::measurements(self.scenario, &self.params, &all))
    }
}

/// A guest that is not logged.
pub(super) fn asked<'a>(
    memory: Size,
    vcpus: u32,
    backing: KvmBacking,
    overlap: bool,
    kvm: &'a KvmArgs,
) -> Asked<'a> {
    Asked { memory, vcpus, backing, overlap, mode: Mode::Legacy, eager_split: None, kvm }
}

/// The memory of a guest unless asked for otherwise.
const fn usual(quick: bool) -> Size {
    Size(if quick { 16 << 20 } else { 256 << 20 })
}

/// Refuses what only the engine's guests have.
fn refuse(tables: &TablesArgs, others: &[(&str, bool)]) -> anyhow::Result<()> {
    let given = [("--format and --bbm", !tables.is_default())];
    match given.iter().chain(others).find(|(_, given)| *given) {
        Some((name, _)) => Err(bad_input(format!("{name}: only of --target engine"))),
        None => Ok(()),
    }
}

/// First touches.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
pub fn populate(args: &PopulateArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    refuse(&args.tables, &[])?;
    let memory = args.memory.unwrap_or(usual(args.quick));
    let backings = match &args.backing[..] {
        [] => vec![KvmBacking::Small, KvmBacking::Transparent2m],
        given => given.to_vec(),
    };
    let runs = args.rounds.unwrap_or(if args.quick { 1 } else { RUNS });
    let cases =
        backings.iter().flat_map(|&backing| args.vcpus.iter().map(move |&it| (backing, it)));
    let cases: Vec<Runs> = cases
        .map(|(backing, vcpus)| {
            let asked = asked(memory, vcpus.into(), backing, args.overlap, &args.kvm);
            Runs::new("populate", &asked, runs)
        })
        .collect::<anyhow::Result<_>>()?;
    session.start("populate", cases.len() as u64 * u64::from(runs + 1) * 2);
    let mut results = Vec::new();
    for case in &cases {
        if session.interrupted() {
            break;
        }
        match case.measure(session, populate::run) {
            Ok(measured) => results.extend(measured),
            // The others may be possible.
            Err(error) if cases.len() > 1 && error.downcast_ref().is_some_and(Error::is_lack) => {
                session.skip(case.name(), format!("{error:#}"));
            }
            Err(error) => return Err(error),
        }
    }
    session.finish();
    Ok(results)
}

/// Execution from all of memory.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
pub fn execute(args: &ExecuteArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    refuse(&args.tables, &[("--exit", args.exit != 0)])?;
    let backing = args.backing.unwrap_or(KvmBacking::Transparent2m);
    let least = backing.in_kvm()?.page_size() * u64::from(args.vcpus);
    let memory = args.memory.unwrap_or(Size(least.max(usual(args.quick).bytes())));
    let runs = args.rounds.unwrap_or(if args.quick { 1 } else { RUNS });
    let asked = asked(memory, args.vcpus.into(), backing, false, &args.kvm);
    let guests = Runs::new("execute", &asked, runs)?;
    session.start(&guests.name(), u64::from(runs + 1) * 6);
    let results = guests.measure(session, |shape, setting| execute::run(shape, 2, setting));
    session.finish();
    results
}

/// Ageing by what the host has.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
pub fn age(args: &AgeArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    refuse(&args.tables, &[])?;
    let memory = args.memory.unwrap_or(usual(args.quick));
    let backing = args.backing.unwrap_or(KvmBacking::Small);
    let runs = args.rounds.unwrap_or(if args.quick { 1 } else { RUNS });
    let asked = asked(memory, args.vcpus.into(), backing, false, &args.kvm);
    let mut guests = Runs::new("age", &asked, runs)?;
    slat_kvm::probe()?;
    let tracking = Tracking::of_host()?;
    guests.params.insert("tracking".to_owned(), tracking.to_string().into());
    session.start(&guests.name(), u64::from(runs + 1) * 8);
    let (mut idle, mut marked): ([Vec<u64>; 2], Vec<u64>) = Default::default();
    let results = guests.measure(session, |shape, setting| {
        let report = age::run(shape, tracking, setting)?;
        marked.extend(report.marked);
        idle[0].extend(report.idle_after_writes);
        idle[1].extend(report.idle_after_reads);
        Ok(report.phases)
    });
    session.finish();
    let mut results = results?;
    let told = [("write-idle", "idle_after"), ("read-idle", "idle_after"), ("mark-idle", "marked")];
    let [writes, reads] = idle;
    for ((phase, name), idle) in told.into_iter().zip([writes, reads, marked]) {
        let whole = |m: &&mut Measurement| m.variant == phase && !m.params.contains_key("vcpu");
        // The first run only warms up.
        let samples = idle.into_iter().skip(1);
        let counts = samples.map(|idle| BTreeMap::from([(name.to_owned(), idle)]));
        if let Some(whole) = results.iter_mut().find(whole) {
            whole.counts.extend(crate::record::merged_counts(counts));
        }
    }
    Ok(results)
}

/// vCPUs that switch their caches off and on.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
pub fn boot_caches(
    args: &BootCachesArgs,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let args = &args.sized();
    let asked = asked(args.memory, args.vcpus, args.backing, false, &args.kvm);
    let guests = Runs::new("boot-caches", &asked, args.runs)?;
    session.start(&guests.name(), u64::from(args.runs + 1) * 4);
    let mut toggles = Vec::new();
    let results = guests.measure(session, |shape, setting| {
        let report = boot_caches::run(shape, setting)?;
        toggles.extend(report.toggles);
        Ok(report.phases)
    });
    session.finish();
    let mut results = results?;
    let samples = toggles.into_iter().skip(1);
    let counts = samples.map(|toggles| BTreeMap::from([("cache_toggles".to_owned(), toggles)]));
    if let Some(whole) = results.iter_mut().find(|m| m.variant == "toggle") {
        whole.counts.extend(crate::record::merged_counts(counts));
    }
    Ok(results)
}

/// Filling memory, taking it away, filling it again.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest that went wrong.
pub fn memory_stress(
    args: &MemoryStressArgs,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let args = &args.sized();
    let asked = asked(args.memory, args.vcpus, args.backing, false, &args.kvm);
    let mut guests = Runs::new("memory-stress", &asked, args.runs)?;
    guests.params.insert("iterations".to_owned(), args.iterations.into());
    let limit = match args.limit {
        Some(limit) => {
            guests.params.insert("limit".to_owned(), limit.bytes().into());
            Some(MemoryLimit::new(limit.bytes(), args.memory.bytes())?)
        }
        None => None,
    };
    session.start(&guests.name(), u64::from(args.runs + 1) * (2 + 4 * u64::from(args.iterations)));
    let results = guests
        .measure(session, |shape, setting| memory_stress::run(shape, args.iterations, setting));
    drop(limit);
    session.finish();
    results
}
