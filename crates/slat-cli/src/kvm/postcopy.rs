//! The scenario `postcopy`: a guest that runs on before its memory is there.

use super::guest::GuestOptions;
use super::options::{GuestArgs, VisitArgs};
use super::runs::{Guest, admits, asked, in_turns};
use super::tables::{renderer, said};
use super::values::{all_or, name_of};
use super::visits_tables::{courses, median_of};
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::image::Image;
use slat_kvm::scenario::postcopy::{self, Config, Link, Way};
use slat_kvm::{Backing, Mode, Setting};
use slat_lab::cli::{count, param_of, time};
use slat_lab::numbers::{bytes, seconds};
use slat_lab::rate::Rate;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::rows;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_lab::verdict::Verdict;
use std::path::PathBuf;
use std::time::Duration;

/// Phases of a run, at most.
const PHASES: u64 = 4;

const EXAMPLES: &str = "\
Examples:
  slat bench postcopy
      256 MiB over 10 Gbit/s and 100 us of delay, beside pre-copy of the same guest
  slat bench postcopy --way post-copy --delay 50us,500us,5ms --link 2Gbit/s
      what the delay of the link does to a remote fault
  slat bench postcopy --way post-copy --queue 0,256k,4m
      what a page that is asked for waits behind: 0 as with QEMU's postcopy-preempt";

/// Options of `slat bench postcopy`.
#[derive(Clone, Debug, Args)]
pub struct PostcopyArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Ways to move the guest [default: both]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<Way>,

    /// The guest's accesses.
    #[command(flatten)]
    pub visits: VisitArgs,

    /// Bytes that all vCPUs touch a second, a page an access
    #[arg(long, value_name = "RATE", default_value = "100MiB/s")]
    pub dirty_rate: Rate,

    /// What the link carries: 10Gbit/s, 1GiB/s
    #[arg(long, value_name = "RATE", default_value = "10Gbit/s")]
    pub link: Rate,

    /// Delays of the link from one end to the other, each of which is tried with post-copy
    #[arg(long, value_name = "TIME,...", value_delimiter = ',', default_value = "100us")]
    #[arg(value_parser = time::any)]
    pub delay: Vec<Duration>,

    /// Bytes that are queued before a page that is asked for, each of which is tried
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_value = "64k")]
    #[arg(value_parser = queue)]
    pub queue: Vec<u64>,

    /// How long pre-copy may stop the guest
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = time::some)]
    pub max_downtime: Duration,

    /// Rounds after which pre-copy stops the guest in any case
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = count::rounds())]
    pub max_rounds: u32,

    /// Folder for the file of the guest's memory [default: that for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

/// Reads a size that may be 0.
fn queue(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => text.parse().map(Size::bytes),
    }
}

/// The scenario.
pub struct Postcopy;

impl Scenario for Postcopy {
    const NAME: &'static str = postcopy::RESULTS.name;
    const ABOUT: &'static str = "Move a guest that runs on before its memory is there";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] =
        &[("runs", "3"), ("vcpus", "1"), ("accesses", "25"), ("write_percent", "50")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = Renderer {
        verdict,
        plots: |results| {
            let title = "When a guest that moved has done its accesses";
            courses(results, postcopy::RESULTS.name, postcopy::COURSE, title, "since it moved")
        },
        ..renderer!(postcopy::RESULTS)
    };
    type Settings = PostcopyArgs;

    fn run(args: &PostcopyArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        args.guest.shrink();
        let host = slat_kvm::probe()?;
        let mut configs = Vec::new();
        for &way in all_or(&args.way) {
            // Pre-copy has no faults that wait for the delay, or in the queue.
            let once = way == Way::PreCopy;
            let delays = if once { &args.delay[..1] } else { &args.delay[..] };
            let queues = if once { &args.queue[..1] } else { &args.queue[..] };
            for (&delay, &queue) in delays.iter().flat_map(|d| queues.iter().map(move |q| (d, q))) {
                let config = config(&args, way, Link { rate: args.link.0, delay, queue })?;
                let name = format!("postcopy, {}", name_of(way));
                if admits(config.check(&host), &name, !args.way.is_empty(), session)? {
                    configs.push((name, config));
                }
            }
        }
        let folder = args.folder.clone().unwrap_or_else(std::env::temp_dir);
        let image = Image::new(&folder, args.guest.memory.bytes())?;
        session.announce(2 * args.guest.memory.bytes(), args.guest.vcpus as usize, 2);
        let mut guests = Vec::new();
        for (name, config) in configs {
            let mut params = asked(&args.guest, false).params();
            args.visits.add_to(&mut params);
            let (image, way, link) = (&image, config.way, config.link);
            let run = move |setting: Setting<'_>| postcopy::run(&config, image, setting);
            let run_args = &args.guest.run;
            let mut guest =
                Guest::new(Self::NAME, name, params, run_args, &postcopy::OUTCOME, run)?
                    .with("way", name_of(way))
                    .with("dirty_rate", args.dirty_rate.0.round() as u64)
                    .with("link", args.link.0.round() as u64);
            if way == Way::PostCopy {
                guest = guest.with("delay_us", link.delay.as_micros() as u64);
                guest = guest.with("queue", link.queue);
            }
            guests.push(guest);
        }
        in_turns(Self::NAME, guests, PHASES, session)
    }
}

fn config(args: &PostcopyArgs, way: Way, link: Link) -> anyhow::Result<Config> {
    let asked = GuestOptions { mode: Mode::Manual, ..asked(&args.guest, false) };
    Ok(Config {
        shape: asked.shape()?,
        way,
        visits: args.visits.visits(),
        per_second: args.dirty_rate.0 / Backing::Small.page_size() as f64,
        link,
        max_downtime: args.max_downtime,
        max_rounds: args.max_rounds,
    })
}

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, Postcopy::NAME, &["vcpu"]);
    let pre = rows.iter().find(|row| param_of(&row.params, "way") == Some(Way::PreCopy));
    let beside = pre.and_then(|row| {
        let [total, stopped] = [postcopy::ALL_THERE, postcopy::STOPPED]
            .map(|figure| median_of(row, figure).map(seconds));
        Some(format!("; pre-copy takes {} and stops the guest for {}", total?, stopped?))
    });
    let beside = beside.unwrap_or_default();
    let mut all = said(results, &postcopy::RESULTS);
    all.says.extend(rows.iter().filter_map(|row| {
        let times = [postcopy::REMOTE_P50, postcopy::REMOTE_P99, postcopy::ALL_THERE];
        let [p50, p99, all] = times.map(|figure| median_of(row, figure).map(seconds));
        let delay = row.params.get("delay_us")?.as_f64()? / 1e6;
        Some(format!(
            "A remote fault stalls a vCPU for {} (median) and {} (p99) over a link with {} of \
             delay, behind up to {} that are queued, until all is there after {}{beside}.",
            p50?,
            p99?,
            seconds(delay),
            bytes(row.params.get("queue")?.as_u64()?),
            all?,
        ))
    }));
    all
}
