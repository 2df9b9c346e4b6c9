//! The scenario `snapshot`: incremental snapshots of a guest, in each way to find written pages.

use super::guest::{Asked, figures, observe};
use super::kept::{Answer, Kept};
use super::options::GuestArgs;
use super::phases;
use super::repeat::Repeatable;
use super::tables::{MEANING, is, of, said};
use crate::needs::GUEST;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};
use slat_kvm::scenario::snapshot::{self, Config, Report, Way};
use slat_lab::cli::count;
use slat_lab::failure::bad_input;
use slat_lab::numbers::thousands;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::rows;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::verdict::Verdict;

/// Seed of the order of accesses. It is fixed, so that all ways have the same pages to find.
const SEED: u64 = 0x51a7;

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

    /// Accesses of the guest in an epoch, in per cent of its pages, in random order
    #[arg(long, value_name = "1..100", default_value_t = 20, value_parser = count::of_hundred())]
    pub accesses: u8,

    /// How many of a hundred accesses write
    #[arg(long, short = 'w', value_name = "1..100", default_value_t = 50)]
    #[arg(value_parser = count::of_hundred())]
    pub write_percent: u8,
}

/// A guest of which snapshots are taken in one way.
struct Taken {
    name: String,
    config: Config,
    params: Map<String, Value>,
    pin: Vec<usize>,
    kept: Kept<Report>,
}

/// The scenario.
pub struct Snapshot;

impl Scenario for Snapshot {
    const NAME: &'static str = snapshot::RESULTS.name;
    const ABOUT: &'static str = "Take incremental snapshots of a guest, in each way";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("runs", "3"), ("vcpus", "1")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = Renderer {
        reads: |m| is(m, snapshot::RESULTS.name),
        verdict,
        tables: |results| of(results, &snapshot::RESULTS),
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
            let guest = prepare(&args, way)?;
            match guest.config.check(&host) {
                Ok(()) => guests.push(guest),
                Err(error @ slat_kvm::Error::Invalid { .. }) => {
                    return Err(bad_input(error.to_string()));
                }
                Err(error) if error.is_missing_feature() && args.way.is_empty() => {
                    session.skip(guest.name, error.to_string());
                }
                Err(error) => return Err(error.into()),
            }
        }
        session.announce(2 * args.guest.memory.bytes(), args.guest.vcpus as usize, 1);
        let repeat = args.guest.run.repeat();
        let phases = 2 + 4 * u64::from(args.epochs);
        session.start(Snapshot::NAME, guests.len() as u64 * repeat.steps() * phases);
        repeat.run(&mut guests.iter_mut().collect::<Vec<_>>(), session)?;
        session.finish();
        let results = guests.iter().flat_map(|guest| {
            let Kept { phases, reports, .. } = &guest.kept;
            let params = guest.kept.params(&guest.params);
            let mut results = phases::measurements(Snapshot::NAME, &params, phases);
            results.extend(figures(Snapshot::NAME, &params, snapshot::FIGURES, reports));
            results
        });
        Ok(results.collect())
    }
}

fn prepare(args: &SnapshotArgs, way: SnapshotWay) -> anyhow::Result<Taken> {
    let mode = way.way().mode();
    let asked = Asked { guest: &args.guest, overlap: false, mode, eager_split: None };
    let mut params = asked.params();
    params.insert("way".to_owned(), way.to_string().into());
    params.insert("epochs".to_owned(), args.epochs.into());
    params.insert("accesses".to_owned(), args.accesses.into());
    params.insert("write_percent".to_owned(), args.write_percent.into());
    params.insert("runs".to_owned(), args.guest.run.repeat().param());
    let config = Config {
        shape: asked.shape()?,
        way: way.way(),
        epochs: args.epochs,
        accesses: args.accesses,
        writes: args.write_percent,
        seed: SEED,
    };
    Ok(Taken {
        name: format!("snapshot, {way}"),
        config,
        params,
        pin: args.guest.run.kvm.cpus()?,
        kept: Kept::new(Answer::Figure(snapshot::ROUND, snapshot::round)),
    })
}

impl Repeatable for Taken {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn run(&mut self, session: &Session) -> anyhow::Result<()> {
        let mut phases = Vec::new();
        let report = observe(session, &self.name, &self.pin, &mut phases, |setting| {
            snapshot::run(&self.config, setting)
        })?;
        self.kept.add(phases, report);
        Ok(())
    }

    fn answer(&self) -> (String, &[f64]) {
        self.kept.answer()
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
