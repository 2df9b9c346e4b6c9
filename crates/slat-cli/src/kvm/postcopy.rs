//! The scenario `postcopy`: a guest that runs on before its memory is there.

use super::guest::{Asked, course};
use super::kept::Answer;
use super::one_way::{OneWay, admits, in_turns};
use super::options::{GuestArgs, VisitArgs};
use super::runs::asked;
use super::tables::{MEANING, is, of, said};
use super::visits_tables::{courses, median_of};
use crate::needs::GUEST;
use clap::{Args, ValueEnum};
use slat_kvm::image::Image;
use slat_kvm::scenario::postcopy::{self, Config, Link, Report, Way};
use slat_kvm::{Backing, Mode, Setting};
use slat_lab::cli::{count, time};
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

/// Ways to move a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MoveWay {
    /// The guest runs on at once, and its pages follow
    PostCopy,
    /// Its pages are copied before it moves
    PreCopy,
}

slat_lab::display_as_written!(MoveWay);

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
    pub way: Vec<MoveWay>,

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
        reads: |m| is(m, postcopy::RESULTS.name),
        verdict,
        tables: |results| of(results, &postcopy::RESULTS),
        plots: |results| {
            let title = "When a guest that moved has done its accesses";
            courses(results, postcopy::RESULTS.name, postcopy::COURSE, title, "since it moved")
        },
        meaning: MEANING,
        ..Renderer::NONE
    };
    type Settings = PostcopyArgs;

    fn run(args: &PostcopyArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        args.guest.shrink();
        let host = slat_kvm::probe()?;
        let mut configs = Vec::new();
        let ways = if args.way.is_empty() { MoveWay::value_variants() } else { &args.way[..] };
        for &way in ways {
            // Pre-copy has no faults that wait for the delay, or in the queue.
            let once = way == MoveWay::PreCopy;
            let delays = if once { &args.delay[..1] } else { &args.delay[..] };
            let queues = if once { &args.queue[..1] } else { &args.queue[..] };
            for (&delay, &queue) in delays.iter().flat_map(|d| queues.iter().map(move |q| (d, q))) {
                let config = config(&args, way, Link { rate: args.link.0, delay, queue })?;
                let name = format!("postcopy, {way}");
                if admits(config.check(&host), &name, !args.way.is_empty(), session)? {
                    configs.push((name, way, config));
                }
            }
        }
        let folder = args.folder.clone().unwrap_or_else(std::env::temp_dir);
        let image = Image::new(&folder, args.guest.memory.bytes())?;
        session.announce(2 * args.guest.memory.bytes(), args.guest.vcpus as usize, 2);
        let mut guests = Vec::new();
        for (name, way, config) in configs {
            let mut params = asked(&args.guest, false).params();
            params.insert("way".to_owned(), way.to_string().into());
            params.insert("dirty_rate".to_owned(), (args.dirty_rate.0.round() as u64).into());
            params.insert("link".to_owned(), (args.link.0.round() as u64).into());
            if way == MoveWay::PostCopy {
                let delay = config.link.delay.as_micros() as u64;
                params.insert("delay_us".to_owned(), delay.into());
                params.insert("queue".to_owned(), config.link.queue.into());
            }
            args.visits.add_to(&mut params);
            let image = &image;
            let run = move |setting: Setting<'_>| postcopy::run(&config, image, setting);
            let answer = Answer::Figure(postcopy::ALL_THERE, |report: &Report| report.all_there);
            guests.push(OneWay::new(name, params, &args.guest.run, answer, run)?);
        }
        in_turns(Postcopy::NAME, &mut guests, &args.guest.run, PHASES, session)?;
        let results = guests.iter().flat_map(|guest| {
            let mut results = guest.measurements(Postcopy::NAME, postcopy::FIGURES);
            let last = guest.last().map(|last| (postcopy::COURSE, last.times.course(0.0)));
            results.extend(course(Postcopy::NAME, &guest.params(), last));
            results
        });
        Ok(results.collect())
    }
}

fn config(args: &PostcopyArgs, way: MoveWay, link: Link) -> anyhow::Result<Config> {
    let asked = Asked { mode: Mode::Manual, ..asked(&args.guest, false) };
    Ok(Config {
        shape: asked.shape()?,
        way: match way {
            MoveWay::PostCopy => Way::PostCopy,
            MoveWay::PreCopy => Way::PreCopy,
        },
        visits: args.visits.visits(),
        per_second: args.dirty_rate.0 / Backing::Small.page_size() as f64,
        link,
        max_downtime: args.max_downtime,
        max_rounds: args.max_rounds,
    })
}

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, Postcopy::NAME, &["vcpu"]);
    let pre = rows.iter().find(|row| row.param("way") == Some("pre-copy"));
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
