//! The scenario `migrate`: migrates a running guest into a second memory, in each way of logging.

use super::guest::{GuestOptions, Pattern};
use super::migrate_tables;
use super::options::{GuestArgs, LogArgs};
use super::runs::{Guest, admits, in_turns};
use super::values::KvmWay;
use crate::needs::GUEST;
use anyhow::bail;
use clap::Args;
use clap::ValueEnum;
use serde_json::{Map, Value};
use slat_kvm::scenario::migrate::{self, Config};
use slat_kvm::{Backing, Error, Mode, Setting};
use slat_lab::cli::{count, time};
use slat_lab::rate::Rate;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use std::time::Duration;

/// How long vCPUs run before the migration, so that their pace without logging is known.
const BASELINE: Duration = Duration::from_secs(1);
/// Phases of a run.
const PHASES: u64 = 4;
/// Default rate at which all vCPUs together write.
const RATE: Rate = Rate(100.0 * (1 << 20) as f64);

impl KvmWay {
    /// Returns the mode of logging; a dirty ring has `entries` entries.
    pub fn mode(self, entries: u32) -> Mode {
        match self {
            Self::Legacy => Mode::Legacy,
            Self::Manual => Mode::Manual,
            Self::InitiallySet => Mode::ManualInitiallySet,
            Self::Ring => Mode::Ring { entries },
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  slat bench migrate
      256 MiB dirtied at 100 MiB/s, over 10 Gbit/s, 300 ms of downtime, in each way of logging
  slat bench migrate --dirty-rate 500MiB/s --link 10Gbit/s --max-downtime 300ms
  slat bench migrate --way ring --sweep 50MiB/s,200MiB/s,800MiB/s --link 2Gbit/s
      from which dirty rate on it does not converge
  slat bench migrate --way ring --dirty-ring-size 8192 --hot-set 10:90 --backing 2m";

/// Options of `slat bench migrate`.
#[derive(Clone, Debug, Args)]
pub struct MigrateArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Ways to log [default: all that this host has]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<KvmWay>,

    /// Entries of each vCPU's dirty ring: a power of two
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub dirty_ring_size: u32,

    /// Options of the log, and of the work that the vCPUs do.
    #[command(flatten)]
    pub log: LogArgs,

    /// Dirty rates, each of which is tried: 50MiB/s,200MiB/s
    #[arg(long, value_name = "RATE,...", value_delimiter = ',', conflicts_with = "dirty_rate")]
    pub sweep: Vec<Rate>,

    /// What the link carries: 10Gbit/s, 1GiB/s
    #[arg(long, value_name = "RATE", default_value = "10Gbit/s")]
    pub link: Rate,

    /// How long the guest may stand still at the end
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = time::some)]
    pub max_downtime: Duration,

    /// Rounds after which the guest is stopped in any case
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = count::rounds())]
    pub max_rounds: u32,
}

impl MigrateArgs {
    /// Returns the options, reduced if `--quick` is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        args.guest.shrink();
        args
    }

    /// Returns the dirty rates to try, which are never unlimited: a guest that writes as fast as it
    /// can is not like a guest at work.
    fn rates(&self) -> impl Iterator<Item = Rate> + use<'_> {
        let one = self.log.dirty_rate.unwrap_or(RATE);
        let one = self.sweep.is_empty().then_some(one);
        one.into_iter().chain(self.sweep.iter().copied())
    }
}

/// The scenario.
pub struct Migrate;

impl Scenario for Migrate {
    const NAME: &'static str = migrate::RESULTS.name;
    const ABOUT: &'static str =
        "Migrate a running guest into a second memory, for each way of logging";
    const EXAMPLES: &'static str = EXAMPLES;
    // A turn runs a guest for each way of logging, and each of them takes more than a second.
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("runs", "6-9")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = migrate_tables::RENDERER;
    type Settings = MigrateArgs;

    fn run(args: &MigrateArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let args = &args.sized();
        let host = slat_kvm::probe()?;
        let ways = if args.way.is_empty() { KvmWay::value_variants() } else { &args.way[..] };
        let mut guests = Vec::new();
        for (&way, rate) in ways.iter().flat_map(|way| args.rates().map(move |rate| (way, rate))) {
            let (config, params) = prepare(args, way, rate)?;
            // The host may lack a way of logging that was not asked for by name.
            let checked = config.check(&host);
            let missing = |error: &Error| matches!(error, Error::MissingCapability { .. });
            let asked = !args.way.is_empty() || !checked.as_ref().is_err_and(missing);
            if !admits(checked, &format!("migrate, {way}"), asked, session)? {
                continue;
            }
            let name = format!("migrate, {way}, {rate}");
            let run = move |setting: Setting<'_>| migrate::run(&config, setting);
            let args = &args.guest.run;
            guests.push(Guest::new(Self::NAME, name, params, args, &migrate::OUTCOME, run)?);
        }
        if guests.is_empty() {
            bail!("this host's KVM has no way of logging dirty pages that was asked for");
        }
        session.announce(2 * args.guest.memory.bytes(), args.guest.vcpus as usize, 2);
        in_turns(Self::NAME, guests, PHASES, session)
    }
}

fn prepare(
    args: &MigrateArgs,
    way: KvmWay,
    rate: Rate,
) -> anyhow::Result<(Config, Map<String, Value>)> {
    let mode = way.mode(args.dirty_ring_size);
    let asked = GuestOptions {
        guest: &args.guest,
        overlap: args.log.overlap,
        mode,
        eager_split: args.log.eager_split,
    };
    let chunk = args.log.clear_chunk;
    let chunk = chunk.map(|chunk| chunk.pages(Backing::Small.page_size())).transpose()?;
    let pattern = Pattern::of(&args.log);
    let pattern = Pattern { dirty_rate: Some(rate), ..pattern };
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
    if let Some(chunk) = chunk.filter(|_| mode.is_manual()) {
        params.insert("clear_chunk".to_owned(), chunk.into());
    }
    pattern.add_to(&mut params);
    let config = Config {
        shape: asked.shape()?,
        work: pattern.work(args.guest.vcpus),
        link: args.link.0,
        max_downtime: args.max_downtime,
        max_rounds: args.max_rounds,
        baseline: BASELINE,
        // Only ways that clear the log by a call of its own can clear it in pieces.
        clear_chunk: chunk.filter(|_| mode.is_manual()),
    };
    Ok((config, params))
}
