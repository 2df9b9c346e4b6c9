//! Migrations of a running guest into a second memory, in each way of logging.

use super::live::{loss, pace, worst};
use super::{Asked, Pattern, measurement, observe, phases};
use crate::cli::{KvmWay, MigrateArgs};
use crate::failure::bad_input;
use crate::record::Measurement;
use crate::session::Session;
use anyhow::bail;
use clap::ValueEnum;
use serde_json::{Map, Value};
use slat_kvm::phase::{Phase, PhaseRun};
use slat_kvm::scenario::migrate::{self, Config, Report};
use slat_kvm::{Backing, Mode};
use std::time::Duration;

/// How long vCPUs run before, to know their pace.
const BASELINE: Duration = Duration::from_secs(1);
/// Phases of a run.
const PHASES: u64 = 4;

impl KvmWay {
    /// The mode, with rings of `entries`.
    pub fn mode(self, entries: u32) -> Mode {
        match self {
            Self::Legacy => Mode::Legacy,
            Self::Manual => Mode::Manual,
            Self::InitiallySet => Mode::ManualInitiallySet,
            Self::Ring => Mode::Ring { entries },
        }
    }
}

/// A guest that is migrated in one way.
struct Migration {
    way: KvmWay,
    config: Config,
    params: Map<String, Value>,
    phases: Vec<PhaseRun>,
    reports: Vec<Report>,
}

/// Measures what `args` asks for.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest or a log that went wrong.
pub fn run(args: &MigrateArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let args = &args.sized();
    let host = slat_kvm::probe()?;
    let ways = if args.way.is_empty() { KvmWay::value_variants() } else { &args.way[..] };
    let mut guests = Vec::new();
    for &way in ways {
        let guest = prepare(args, way)?;
        match guest.config.check(&host) {
            Ok(()) => guests.push(guest),
            Err(error @ slat_kvm::Error::Invalid { .. }) => {
                return Err(bad_input(error.to_string()));
            }
            // Of ways that were not asked for by name, some may be missing.
            Err(error @ slat_kvm::Error::MissingCapability { .. }) if args.way.is_empty() => {
                session.skip(format!("migrate, {way}"), error.to_string());
            }
            Err(error) => return Err(error.into()),
        }
    }
    if guests.is_empty() {
        bail!("this host's KVM has no way of logging dirty pages that was asked for");
    }
    let pin = args.kvm.cpus()?;
    session.announce(2 * args.memory.bytes(), args.vcpus as usize + 2);
    session.start("migrate", guests.len() as u64 * u64::from(args.runs + 1) * PHASES);
    for run in 0..=args.runs {
        // A guest finds the host's memory as the one before left it: the order turns round.
        let mut order: Vec<usize> = (0..guests.len()).collect();
        if run % 2 == 1 {
            order.reverse();
        }
        for place in order {
            if session.interrupted() {
                break;
            }
            guests[place].run(&pin, run > 0, session)?;
        }
    }
    session.finish();
    Ok(guests.iter().flat_map(Migration::measurements).collect())
}

fn prepare(args: &MigrateArgs, way: KvmWay) -> anyhow::Result<Migration> {
    let mode = way.mode(args.dirty_ring_size);
    let asked = Asked {
        memory: args.memory,
        vcpus: args.vcpus,
        backing: args.backing,
        overlap: args.log.overlap,
        mode,
        eager_split: args.log.eager_split,
        kvm: &args.kvm,
    };
    let chunk = args.log.clear_chunk;
    let chunk = chunk.map(|chunk| chunk.pages(Backing::Small.page_size())).transpose()?;
    let pattern = Pattern::of(&args.log);
    let pattern = Pattern {
        // Memory that nobody writes, or that everybody writes as fast as they can, says nothing of
        // a guest at work.
        dirty_rate: pattern.dirty_rate.or_else(|| "100MiB/s".parse().ok()),
        ..pattern
    };
    let mut params = asked.params();
    let name = match mode {
        Mode::Ring { entries } => format!("{way}-{entries}"),
        _ => way.to_string(),
    };
    params.insert("way".to_owned(), name.into());
    params.insert("write_percent".to_owned(), args.log.write_percent.into());
    params.insert("link".to_owned(), (args.link.0.round() as u64).into());
    params.insert("max_downtime_ms".to_owned(), (args.max_downtime.as_millis() as u64).into());
    params.insert("max_rounds".to_owned(), args.max_rounds.into());
    params.insert("runs".to_owned(), args.runs.into());
    if let Some(chunk) = chunk.filter(|_| mode.is_manual()) {
        params.insert("clear_chunk".to_owned(), chunk.into());
    }
    pattern.add_to(&mut params);
    let config = Config {
        shape: asked.shape()?,
        work: pattern.work(args.vcpus),
        link: args.link.0,
        max_downtime: args.max_downtime,
        max_rounds: args.max_rounds,
        baseline: BASELINE,
        // Only those that clear by a call of its own can do it in pieces.
        clear_chunk: chunk.filter(|_| mode.is_manual()),
    };
    Ok(Migration { way, config, params, phases: Vec::new(), reports: Vec::new() })
}

impl Migration {
    fn run(&mut self, pin: &[usize], counts: bool, session: &Session) -> anyhow::Result<()> {
        let mut phases = Vec::new();
        let name = format!("migrate, {}", self.way);
        let report = observe(session, &name, pin, &mut phases, |setting| {
            migrate::run(&self.config, setting)
        })?;
        if let Some(report) = report.filter(|_| counts) {
            self.phases.extend(phases);
            self.reports.push(report);
        }
        Ok(())
    }

    fn measurements(&self) -> Vec<Measurement> {
        let Some(last) = self.reports.last() else { return Vec::new() };
        let mut results = phases::measurements("migrate", &self.params, &self.phases);
        if let Some(run) = results.iter_mut().find(|m| m.variant == Phase::Run.name()) {
            let counts = self.reports.iter().map(|report| {
                let counts = [
                    ("converged", report.converged.into()),
                    ("pages_compared", report.compared),
                    ("writes_verified", report.verified.writes),
                    ("pages_in_excess", report.verified.excess),
                    ("full_rings", report.full_rings),
                ];
                counts.map(|(name, count)| (name.to_owned(), count)).into()
            });
            run.counts.extend(crate::record::merged_counts(counts));
        }
        let mut add = |variant: &str, unit: &str, of: &dyn Fn(&Report) -> f64| {
            let samples = self.reports.iter().map(of).collect();
            results.push(measurement("migrate", variant, self.params.clone(), unit, samples));
        };
        add("total", "s", &|report| report.seconds);
        add("downtime", "s", &|report| report.downtime);
        add("rounds", "rounds", &|report| report.passes.len() as f64);
        add("copied", "MiB", &|report| report.bytes as f64 / f64::from(1 << 20));
        add("loss", "%", &|report| loss(&report.samples, report.baseline));
        add("loss-worst", "%", &|report| worst(&report.samples, report.baseline));
        add("enable", "s", &|report| report.enable.seconds);
        add("get-longest-call", "s", &|report| report.get.longest);
        if last.clear.count > 0 {
            add("clear-longest-call", "s", &|report| report.clear.longest);
        }
        let pace = pace(&last.samples, last.baseline);
        results.push(measurement("migrate", "pace", self.params.clone(), "%", pace));
        let passes = last.passes.iter().map(|pass| pass.pages as f64).collect();
        results.push(measurement("migrate", "pass", self.params.clone(), "pages", passes));
        results
    }
}
