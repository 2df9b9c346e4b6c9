//! The scenario `fork`: many guests of one image.

use super::options::{GuestArgs, VisitArgs};
use super::runs::{Guest, admits, asked, in_turns};
use super::tables::{renderer, said};
use super::values::{all_or, name_of};
use super::visits_tables::{lines_by, median_of};
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::Setting;
use slat_kvm::image::Image;
use slat_kvm::scenario::fork::{self, Config, Way};
use slat_lab::numbers::{bytes, seconds};
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::rows;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::verdict::Verdict;
use std::path::PathBuf;

/// Phases of each guest.
const PHASES: u64 = 3;

const EXAMPLES: &str = "\
Examples:
  slat bench fork
      8 guests of 64 MiB in each way: the memory of one, and how soon it answers
  slat bench fork --guests 1,4,16,32 --way private,ksm
      how memory grows with the number of guests
  slat bench fork --accesses 10 --write-percent 50 --memory 256m --guests 4";

/// Options of `slat bench fork`.
#[derive(Clone, Debug, Args)]
pub struct ForkArgs {
    /// Each guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Numbers of guests, each of which is tried
    #[arg(long, short = 'n', value_name = "N,...", value_delimiter = ',', default_value = "8")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    pub guests: Vec<u32>,

    /// Ways to give the guests their contents [default: all that this host has]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<Way>,

    /// The accesses of each guest.
    #[command(flatten)]
    pub visits: VisitArgs,

    /// Folder for the file of the guests' memory [default: that for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

/// The scenario.
pub struct Fork;

impl Scenario for Fork {
    const NAME: &'static str = fork::RESULTS.name;
    const ABOUT: &'static str = "Run many guests of one image, in each way to share its pages";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[
        ("runs", "3"),
        ("vcpus", "1"),
        ("memory", "64M"),
        ("accesses", "25"),
        ("write_percent", "20"),
    ];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = Renderer {
        verdict,
        plots: |results| {
            let title = "Memory that guests of one image hold";
            let axes = ["guests", "all of them hold"];
            let mib = |mib| bytes((mib * f64::from(1 << 20)) as u64);
            lines_by(results, fork::RESULTS.name, "guests", fork::ALL, title, axes, mib)
        },
        ..renderer!(fork::RESULTS)
    };
    type Settings = ForkArgs;

    fn run(args: &ForkArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        args.guest.shrink();
        let host = slat_kvm::probe()?;
        let asked = asked(&args.guest, false);
        let mut configs = Vec::new();
        for (&way, &guests) in
            all_or(&args.way).iter().flat_map(|way| args.guests.iter().map(move |n| (way, n)))
        {
            let visits = args.visits.visits();
            let config = Config { shape: asked.shape()?, way, guests, visits };
            let name = format!("fork, {guests} guests, {}", name_of(way));
            if admits(config.check(&host), &name, !args.way.is_empty(), session)? {
                configs.push((name, config));
            }
        }
        let folder = args.folder.clone().unwrap_or_else(std::env::temp_dir);
        let image = Image::new(&folder, args.guest.memory.bytes())?;
        let most = u64::from(args.guests.iter().copied().max().unwrap_or(1));
        session.announce(most * args.guest.memory.bytes(), args.guest.vcpus as usize, 1);
        let mut guests = Vec::new();
        for (name, config) in configs {
            let mut params = asked.params();
            // What backs the memory follows from the way.
            params.remove("backing");
            args.visits.add_to(&mut params);
            let (image, way, number) = (&image, config.way, config.guests);
            let run = move |setting: Setting<'_>| fork::run(&config, image, setting);
            let run_args = &args.guest.run;
            let guest = Guest::new(Self::NAME, name, params, run_args, &fork::OUTCOME, run)?;
            guests.push(guest.with("way", name_of(way)).with("guests", number));
        }
        in_turns(Self::NAME, guests, PHASES * most, session)
    }
}

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, Fork::NAME, &["vcpu"]);
    let mut all = said(results, &fork::RESULTS);
    all.says.extend(rows.iter().filter_map(|row| {
        let guests = row.params.get("guests")?.as_u64()?;
        Some(format!(
            "{guests} guest{} of {} by {} hold {}; one answers after {}, and a visit when all are \
             there takes {:.2} of the usual time.",
            if guests == 1 { "" } else { "s" },
            bytes(row.params.get("memory")?.as_u64()?),
            row.param("way")?,
            bytes((median_of(row, fork::ALL)? * f64::from(1 << 20)) as u64),
            seconds(median_of(row, fork::FIRST)?),
            median_of(row, fork::SLOWDOWN)?,
        ))
    }));
    all
}
