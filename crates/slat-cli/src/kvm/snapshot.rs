//! The scenario `snapshot`: incremental snapshots of a guest, in each way to find written pages.

use super::guest::Asked;
use super::kept::Answer;
use super::one_way::{OneWay, admits, in_turns};
use super::options::{GuestArgs, VisitArgs};
use super::tables::{MEANING, is, of, said};
use super::visits_tables::strips_of;
use crate::needs::GUEST;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};
use slat_kvm::Setting;
use slat_kvm::scenario::snapshot::{self, Config, Report, Way};
use slat_lab::cli::count;
use slat_lab::numbers::thousands;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::rows;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::verdict::Verdict;

/// Ways to find the pages that a guest wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SnapshotWay {
    /// KVM's dirty log, fetched and cleared
    Log,
    /// KVM's dirty rings
    Ring,
    /// Write-protecting userfaultfd: a handler takes each first write
    UffdWp,
    /// Userfaultfd with WP_ASYNC, and PAGEMAP_SCAN
    PagemapScan,
    /// Soft-dirty bits of the process
    SoftDirty,
    /// All pages that are in memory, as mincore tells
    Mincore,
}

slat_lab::display_as_written!(SnapshotWay);

impl SnapshotWay {
    fn way(self) -> Way {
        match self {
            Self::Log => Way::Log,
            Self::Ring => Way::Ring,
            Self::UffdWp => Way::Protect,
            Self::PagemapScan => Way::Scan,
            Self::SoftDirty => Way::SoftDirty,
            Self::Mincore => Way::Mincore,
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  slat bench snapshot
      256 MiB, four epochs in which the guest writes a tenth of its pages, in each way
  slat bench snapshot --way log,pagemap-scan --backing 2m -v 2 --epochs 8
  slat bench snapshot --way uffd-wp,ring --accesses 5 --write-percent 100";

/// Options of `slat bench snapshot`.
#[derive(Clone, Debug, Args)]
pub struct SnapshotArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Ways to find written pages [default: all that this host has]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<SnapshotWay>,

    /// Epochs, each of which ends with a snapshot
    #[arg(long, short = 'i', value_name = "N", default_value_t = 4, value_parser = count::rounds())]
    pub epochs: u32,

    /// The guest's accesses in an epoch.
    #[command(flatten)]
    pub visits: VisitArgs,
}

/// The scenario.
pub struct Snapshot;

impl Scenario for Snapshot {
    const NAME: &'static str = snapshot::RESULTS.name;
    const ABOUT: &'static str = "Take incremental snapshots of a guest, in each way";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] =
        &[("runs", "3"), ("vcpus", "1"), ("accesses", "20"), ("write_percent", "50")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = Renderer {
        reads: |m| is(m, snapshot::RESULTS.name),
        verdict,
        tables: |results| of(results, &snapshot::RESULTS),
        plots: |results| {
            let title = "How long an incremental snapshot stops the guest";
            strips_of(results, snapshot::RESULTS.name, snapshot::ROUND, title)
        },
        meaning: MEANING,
        ..Renderer::NONE
    };
    type Settings = SnapshotArgs;

    fn run(args: &SnapshotArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        args.guest.shrink();
        let host = slat_kvm::probe()?;
        let ways = if args.way.is_empty() { SnapshotWay::value_variants() } else { &args.way[..] };
        let mut guests = Vec::new();
        for &way in ways {
            let (config, params) = prepare(&args, way)?;
            let name = format!("snapshot, {way}");
            if admits(config.check(&host), &name, !args.way.is_empty(), session)? {
                let answer = Answer::Figure(snapshot::ROUND, snapshot::round);
                let run = move |setting: Setting<'_>| snapshot::run(&config, setting);
                guests.push(OneWay::new(name, params, &args.guest.run, answer, run)?);
            }
        }
        session.announce(2 * args.guest.memory.bytes(), args.guest.vcpus as usize, 1);
        let phases = 2 + 4 * u64::from(args.epochs);
        in_turns(Snapshot::NAME, &mut guests, &args.guest.run, phases, session)?;
        let of = |guest: &OneWay<'_, Report>| guest.measurements(Snapshot::NAME, snapshot::FIGURES);
        Ok(guests.iter().flat_map(of).collect())
    }
}

fn prepare(args: &SnapshotArgs, way: SnapshotWay) -> anyhow::Result<(Config, Map<String, Value>)> {
    let mode = way.way().mode();
    let asked = Asked { guest: &args.guest, overlap: false, mode, eager_split: None };
    let mut params = asked.params();
    params.insert("way".to_owned(), way.to_string().into());
    params.insert("epochs".to_owned(), args.epochs.into());
    args.visits.add_to(&mut params);
    let visits = args.visits.visits();
    Ok((Config { shape: asked.shape()?, way: way.way(), epochs: args.epochs, visits }, params))
}

fn verdict(results: &[Measurement]) -> Verdict {
    let rows = rows(results, snapshot::RESULTS.name, &["vcpu"]);
    let most = |figure| {
        let of = |row: &slat_lab::report::tables::Row<'_>| {
            let pages = row.whole(figure)?.samples.iter().copied().reduce(f64::max)?;
            (pages > 0.0).then(|| {
                format!("{} {}", row.param("way").unwrap_or_default(), thousands(pages as i64))
            })
        };
        rows.iter().filter_map(of).collect::<Vec<_>>().join(", ")
    };
    let [missed, surplus] = [snapshot::MISSED, snapshot::SURPLUS].map(most);
    let or_none = |pages: String| if pages.is_empty() { "none".to_owned() } else { pages };
    let mut all = said(results, &snapshot::RESULTS);
    if !rows.is_empty() {
        all.says.push(format!(
            "Written pages that were missed: {}; pages reported without need: {}.",
            or_none(missed),
            or_none(surplus),
        ));
    }
    all
}
