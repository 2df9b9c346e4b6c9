//! Finds the way of logging dirty pages that stalls a guest least on this host.
//!
//! Each way that the host has runs with a guest of the same shape, in turns. `ranking` ranks the
//! ways by the time that a vCPU stood still for each page that it touched, taking the worst vCPU of
//! each run.

use super::guest::{GuestOptions, Pattern};
use super::live::guest;
use super::options::{GuestArgs, QUICK_RUN};
use super::ranking;
use super::runs::{admits, in_turns};
use super::values::HotSet;
use super::way::{Way, ways};
use crate::needs::GUEST;
use clap::Args;
use serde_json::{Map, Value};
use slat_kvm::Error;
use slat_kvm::scenario::live::Config;
use slat_lab::cli::time;
use slat_lab::failure::cannot;
use slat_lab::rate::Rate;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use std::time::Duration;

/// Phases of a run.
const PHASES: u64 = 4;
const EXAMPLES: &str = "\
Examples:
  slat tune dirty-log
      256 MiB dirtied at 50 MiB/s for 2 seconds, each way in turns
  slat tune dirty-log --memory 1G --vcpus 4 --backing 2m --dirty-rate 200MiB/s --duration 5s";

/// Options of `slat tune dirty-log`.
#[derive(Clone, Debug, Args)]
pub struct TuneArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Bytes that all vCPUs write a second
    #[arg(long, value_name = "RATE", default_value = "50MiB/s")]
    pub dirty_rate: Rate,

    /// Most writes go to a part of the pages: 10:90 is 90 % of them to the first 10 %
    #[arg(long, value_name = "PAGES:STEPS")]
    pub hot_set: Option<HotSet>,

    /// How long each guest runs with its log fetched
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time::run)]
    pub duration: Duration,

    /// From one fetch of the log to the next
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = time::some)]
    pub interval: Duration,
}

impl TuneArgs {
    /// Returns the options, reduced if `--quick` is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if args.guest.shrink() {
            args.duration = args.duration.min(QUICK_RUN);
        }
        args
    }
}

/// The scenario.
pub struct TuneDirtyLog;

impl Scenario for TuneDirtyLog {
    const NAME: &'static str = "dirty-log";
    const ABOUT: &'static str = "Run each way of logging dirty pages that this host has, and say \
                                 which stalls a guest least";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("runs", "5")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = ranking::RENDERER;
    type Settings = TuneArgs;

    fn run(args: &TuneArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        dirty_log(args, session)
    }
}

/// Runs a guest with each way of logging, and returns the measurements of all of them.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest or a log that went wrong.
pub fn dirty_log(args: &TuneArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let args = &args.sized();
    let host = slat_kvm::probe()?;
    let ways = ways(&host);
    let mut guests = Vec::new();
    for way in &ways {
        let (config, params) = prepare(args, way)?;
        let name = format!("tune, {}", way.name);
        let missing = |error: &Error| matches!(error, Error::MissingCapability { .. });
        let checked = config.check(&host);
        let asked = !checked.as_ref().is_err_and(missing);
        if admits(checked, &name, asked, session)? {
            guests.push(guest(config, params, &args.guest.run)?);
        }
    }
    if guests.is_empty() {
        return Err(cannot("this host's KVM cannot log dirty pages"));
    }
    session.announce(args.guest.memory.bytes(), args.guest.vcpus as usize, 2);
    in_turns("tune dirty-log", guests, PHASES, session)
}

fn prepare(args: &TuneArgs, way: &Way) -> anyhow::Result<(Config, Map<String, Value>)> {
    let asked = GuestOptions {
        guest: &args.guest,
        overlap: false,
        mode: way.mode,
        eager_split: way.eager_split.map(slat_lab::size::Size),
    };
    let pattern = Pattern {
        random: true,
        hot_set: args.hot_set,
        dirty_rate: Some(args.dirty_rate),
        ..Pattern::WRITES
    };
    let mut params = asked.params();
    params.insert("way".to_owned(), way.name.clone().into());
    params.insert("duration".to_owned(), args.duration.as_secs_f64().into());
    params.insert("interval_ms".to_owned(), (args.interval.as_millis() as u64).into());
    pattern.add_to(&mut params);
    let config = Config {
        shape: asked.shape()?,
        work: pattern.work(args.guest.vcpus),
        duration: args.duration,
        interval: args.interval,
        clear_chunk: way.chunk,
    };
    Ok((config, params))
}
