//! The scenario `snapshot`: incremental snapshots of a guest, in each way to find written pages.

use super::guest::GuestOptions;
use super::options::{GuestArgs, VisitArgs};
use super::runs::{Guest, admits, in_turns};
use super::tables::{renderer, said};
use super::values::{all_or, name_of};
use super::visits_tables::strips_of;
use crate::needs::GUEST;
use clap::Args;
use slat_kvm::Setting;
use slat_kvm::scenario::snapshot::{self, Config, Way};
use slat_lab::cli::count;
use slat_lab::numbers::thousands;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::rows;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::verdict::Verdict;

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
    pub way: Vec<Way>,

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
        verdict,
        plots: |results| {
            let title = "How long an incremental snapshot stops the guest";
            strips_of(results, snapshot::RESULTS.name, snapshot::ROUND, title)
        },
        ..renderer!(snapshot::RESULTS)
    };
    type Settings = SnapshotArgs;

    fn run(args: &SnapshotArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        args.guest.shrink();
        let host = slat_kvm::probe()?;
        let mut guests = Vec::new();
        for &way in all_or(&args.way) {
            let (mode, visits) = (way.mode(), args.visits.visits());
            let asked =
                GuestOptions { guest: &args.guest, overlap: false, mode, eager_split: None };
            let config = Config { shape: asked.shape()?, way, epochs: args.epochs, visits };
            let name = format!("snapshot, {}", name_of(way));
            if admits(config.check(&host), &name, !args.way.is_empty(), session)? {
                let run = move |setting: Setting<'_>| snapshot::run(&config, setting);
                let (mut params, run_args) = (asked.params(), &args.guest.run);
                args.visits.add_to(&mut params);
                let outcome = &snapshot::OUTCOME;
                let guest = Guest::new(Self::NAME, name, params, run_args, outcome, run)?;
                guests.push(guest.with("way", name_of(way)).with("epochs", args.epochs));
            }
        }
        session.announce(2 * args.guest.memory.bytes(), args.guest.vcpus as usize, 1);
        in_turns(Self::NAME, guests, 2 + 4 * u64::from(args.epochs), session)
    }
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
