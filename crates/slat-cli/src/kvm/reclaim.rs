//! The scenario `reclaim`: a guest with less memory than it uses.

use super::options::GuestArgs;
use super::runs::{Guest, admits, asked, in_turns};
use super::tables::{renderer, said};
use super::values::{HotSet, SEED, all_or, name_of};
use super::visits_tables::{lines_by, median_of};
use crate::needs::GUEST;
use anyhow::Context;
use clap::Args;
use slat_kvm::Setting;
use slat_kvm::scenario::reclaim::{self, Config, Store, Way};
use slat_lab::cli::{count, param_of};
use slat_lab::files::write_whole;
use slat_lab::numbers::thousands;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::{Row, rows};
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::verdict::Verdict;
use std::path::PathBuf;

/// Phases of a run.
const PHASES: u64 = 5;

const EXAMPLES: &str = "\
Examples:
  slat bench reclaim
      a guest with all, three quarters, a half and a quarter of its memory, in each way
  slat bench reclaim --way pageout,limit --store file --folder /var/tmp --allowed 75,50
      memory that is a shared mapping of a file on a disk, for a host without swap
  slat bench reclaim --way limit --store swap
      with the swap that the host has: swapon a zram device first, and compare
  slat bench reclaim --way limit --allowed 50 --trace trace.txt
  slat-bench reclaim --pattern trace --trace trace.txt --memory 32m --guest 2
      the same accesses by the engine's own pager";

/// Options of `slat bench reclaim`.
#[derive(Clone, Debug, Args)]
pub struct ReclaimArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Ways to take memory away [default: all that this host has]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<Way>,

    /// Memory that the guest may have, in per cent of what it has, each of which is tried
    #[arg(long, value_name = "1..100,...", value_delimiter = ',', default_value = "100,75,50,25")]
    #[arg(value_parser = count::of_hundred())]
    pub allowed: Vec<u8>,

    /// Where the contents go [default: swap if the host has enough of it, else a file]
    #[arg(long, value_name = "swap|file")]
    pub store: Option<Store>,

    /// Accesses of the guest, in per cent of its pages
    #[arg(long, value_name = "PERCENT", default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub accesses: u32,

    /// How many of a hundred accesses write; with a balloon all do
    #[arg(long, short = 'w', value_name = "1..100", default_value_t = 20)]
    #[arg(value_parser = count::of_hundred())]
    pub write_percent: u8,

    /// Most accesses go to a part of the pages: 20:80 is 80 % of them to the first 20 %
    #[arg(long, value_name = "PAGES:STEPS", default_value = "20:80")]
    pub hot_set: HotSet,

    /// Write the accesses to a file, for `slat-bench reclaim --pattern trace` (one vCPU)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Folder for the file of the guest's memory [default: that for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

/// The scenario.
pub struct Reclaim;

impl Scenario for Reclaim {
    const NAME: &'static str = reclaim::RESULTS.name;
    const ABOUT: &'static str = "Give a guest less memory than it uses, in each way";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] =
        &[("runs", "3"), ("vcpus", "1"), ("memory", "64M")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = Renderer {
        verdict,
        plots: |results| {
            let title = "A guest's speed against the memory that it may have";
            let axes = ["memory allowed, in per cent", "speed"];
            let shown = |speed| format!("{speed:.0} %");
            let (name, speed) = (reclaim::RESULTS.name, reclaim::SPEED);
            lines_by(results, name, "allowed", speed, title, axes, shown)
        },
        ..renderer!(reclaim::RESULTS)
    };
    type Settings = ReclaimArgs;

    fn run(args: &ReclaimArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        args.guest.shrink();
        let host = slat_kvm::probe()?;
        let store = match args.store {
            Some(store) => store,
            None => {
                let swap = config(&args, Way::Pageout, Store::Swap, 50)?.check(&host);
                if swap.is_ok() { Store::Swap } else { Store::File }
            }
        };
        if let Some(path) = &args.trace {
            let config = config(&args, Way::Pageout, store, 50)?;
            write_whole(path, trace(&config).as_bytes()).context("--trace")?;
        }
        let folder = args.folder.clone().unwrap_or_else(std::env::temp_dir);
        session.announce(2 * args.guest.memory.bytes(), args.guest.vcpus as usize, 1);
        let mut guests = Vec::new();
        for &way in all_or(&args.way) {
            // With version 1, the kernel kills a process whose pages are all in use.
            if way == Way::Limit && args.way.is_empty() && slat_kvm::cgroup::may_kill() {
                let why = "a limit of control groups of version 1 may kill it; --way limit tries";
                session.skip("reclaim, limit", why);
                continue;
            }
            // A balloon has no contents to keep.
            let balloon = way == Way::Balloon;
            let store = if balloon { Store::Swap } else { store };
            // Without a limit, there is one run.
            let damon = way == Way::Damon;
            for &allowed in if damon { &args.allowed[..1] } else { &args.allowed[..] } {
                let config = config(&args, way, store, allowed)?;
                let name = format!("reclaim, {}, {allowed} %", name_of(way));
                if !admits(config.try_out(&host), &name, !args.way.is_empty(), session)? {
                    break;
                }
                let folder = &folder;
                let run = move |setting: Setting<'_>| reclaim::run(&config, folder, setting);
                let (params, run_args) = (asked(&args.guest, false).params(), &args.guest.run);
                let mut guest =
                    Guest::new(Self::NAME, name, params, run_args, &reclaim::OUTCOME, run)?
                        .with("way", name_of(way))
                        .with("accesses", args.accesses)
                        .with("hot_set", args.hot_set.to_string());
                if !damon {
                    guest = guest.with("allowed", allowed);
                }
                if !balloon {
                    guest = guest.with("write_percent", args.write_percent);
                    guest = guest.with("store", name_of(store));
                }
                guests.push(guest);
            }
        }
        in_turns(Self::NAME, guests, PHASES, session)
    }
}

fn config(args: &ReclaimArgs, way: Way, store: Store, allowed: u8) -> anyhow::Result<Config> {
    Ok(Config {
        shape: asked(&args.guest, false).shape()?,
        way,
        store,
        allowed,
        accesses: args.accesses,
        writes: args.write_percent,
        hot: (args.hot_set.pages, args.hot_set.steps),
        seed: SEED,
    })
}

/// Returns the text of a trace: a page a line, a written one after a w.
fn trace(config: &Config) -> String {
    let line = |(page, written)| format!("{}{page}\n", if written { "w" } else { "" });
    config.trace().map(line).collect()
}

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, Reclaim::NAME, &["vcpu"]);
    let mut all = said(results, &reclaim::RESULTS);
    // The scarcest memory of each way says most.
    all.says.extend(rows.iter().filter_map(|row| {
        let limited = |row: &Row<'_>| {
            Some((param_of::<Way>(&row.params, "way")?, row.params.get("allowed")?.as_u64()?))
        };
        let (way, own) = limited(row)?;
        if rows.iter().filter_map(limited).any(|(other, it)| other == way && it < own) {
            return None;
        }
        let way = name_of(way);
        Some(format!(
            "With {own} % of its memory a guest keeps {:.0} % of its speed by {way}, with {} pages \
             read back.",
            median_of(row, reclaim::SPEED)?,
            thousands(median_of(row, reclaim::READ)? as i64),
        ))
    }));
    all
}
