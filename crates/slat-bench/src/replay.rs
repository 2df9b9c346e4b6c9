//! Replays published claims that led to Slat: prints each with the command that measures it here,
//! and with the published figures.
//!
//! The results of the scenarios keep every sample, too.

mod linux;
mod tables;

use crate::format::Granule;
use crate::guest::age::Age;
use crate::guest::cache_toggle::CacheToggle;
use crate::guest::execute::Execute;
use crate::guest::reclaim::Reclaim;
use crate::published::{Ran, SWITCHES, quotients};
use crate::settings::peers::NamedTree;
use crate::split::Split;
use crate::split::SplitMoment;
use clap::{Args, ValueEnum};
use serde_json::{Map, json};
use slat_lab::cli::param_of;
use slat_lab::record::{Kind, Measurement};
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  slat-bench replay
      all claims, at sizes that take a few minutes
  slat-bench replay --quick
      the same on small sizes, in a minute: shows that it works, gives no figures to quote
  slat-bench replay --only execute,flush-once
  slat-bench replay --only skip-levels,skip-levels-hardware --linux-tree linux-6.12
      on Linux's own code, with the changes as edits to a copy of it";

/// Options: the claims to replay.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// Only these claims [default: all]
    #[arg(long, value_name = "CLAIM,...", value_delimiter = ',')]
    pub only: Vec<Claim>,

    /// A Linux source tree, 6.6 to 7.x, on whose own code the claims about Linux's walks are also
    /// replayed
    #[arg(long, value_name = "[NAME=]PATH")]
    pub linux_tree: Option<NamedTree>,

    /// Folder of edits to it, each NAME.cocci or a folder with a series [default: Slat's own]
    #[arg(long, value_name = "DIR")]
    pub edits: Option<PathBuf>,

    /// Small sizes: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

/// The published discussions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Claim {
    /// Walks that leave out levels, as proposed: 1 GiB
    SkipLevels,
    /// The same, measured on hardware: twelve cells over three granules
    SkipLevelsHardware,
    /// Splitting a huge page in the fault
    Execute,
    /// Ageing without a lock
    Ageing,
    /// Flushing once as caches come on
    FlushOnce,
}

slat_lab::display_as_written!(Claim);

/// The scenario of published claims.
pub struct Replay;

impl Scenario for Replay {
    const NAME: &'static str = "replay";
    const ABOUT: &'static str =
        "Run the command that shows each published claim here, and print both";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = tables::RENDERER;
    type Settings = ReplayArgs;

    fn run(args: &ReplayArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut replay = Rows { args, quick: args.quick, rows: Vec::new(), results: Vec::new() };
        let wanted = |claim| args.only.is_empty() || args.only.contains(&claim);
        type Step<'a> = fn(&mut Rows<'a>, &mut Session) -> anyhow::Result<()>;
        let steps: [(Claim, Step<'_>); 5] = [
            (Claim::SkipLevels, Rows::skip_levels),
            (Claim::SkipLevelsHardware, Rows::skip_levels_hardware),
            (Claim::Execute, Rows::execute),
            (Claim::Ageing, Rows::ageing),
            (Claim::FlushOnce, Rows::flush_once),
        ];
        for (_, step) in steps.into_iter().filter(|(claim, _)| wanted(*claim)) {
            step(&mut replay, session)?;
            if session.interrupted() {
                break;
            }
        }
        replay.rows.append(&mut replay.results);
        Ok(replay.rows)
    }
}

struct Rows<'a> {
    args: &'a ReplayArgs,
    quick: bool,
    rows: Vec<Measurement>,
    results: Vec<Measurement>,
}

/// Published figures of each call: by kind of memory, without levels, and without levels and
/// children.
type Cells = [(SplitMoment, &'static str, [[&'static str; 2]; 3]); 2];

/// Kinds of memory in that publication, and their page sizes for each granule: those of THP and of
/// hugetlb.
const KINDS: [&str; 3] = ["regular pages", "THP", "hugetlb"];
const GRANULES: [(Granule, [u64; 3]); 3] = [
    (Granule::Size4k, [4 << 10, 2 << 20, 1 << 30]),
    (Granule::Size16k, [16 << 10, 32 << 20, 32 << 20]),
    (Granule::Size64k, [64 << 10, 512 << 20, 512 << 20]),
];

/// The fields that all rows of a claim share.
struct ClaimFields {
    claim: &'static str,
    command: String,
    why: &'static str,
}

const SKIP: &str = "level-3 skip";
const SKIP_WHY: &str = "here the entries left out cost a quarter of a nanosecond, not a call \
    each, and next to nothing in a table just built; no invalidation is executed. In the whole \
    call one exchange a page weighs most.";

impl Rows<'_> {
    fn row(
        &mut self,
        told: &ClaimFields,
        what: impl Into<String>,
        published: &str,
        unit: &str,
        samples: Vec<f64>,
    ) {
        if samples.is_empty() {
            return;
        }
        let mut params = Map::new();
        params.insert("claim".to_owned(), json!(told.claim));
        params.insert("published".to_owned(), json!(published));
        params.insert("command".to_owned(), json!(told.command));
        params.insert("why".to_owned(), json!(told.why));
        let row = Measurement::new(Replay::NAME, "engine", what, params, unit, samples);
        self.rows.push(row.of_kind(Kind::Published));
    }

    /// Runs a scenario by the command line that is printed with its claim.
    fn replayed<S: Scenario>(&mut self, line: &str, session: &mut Session) -> anyhow::Result<Ran> {
        let ran = Ran::by::<S>(line, session)?;
        self.results.extend(ran.results.iter().cloned());
        Ok(ran)
    }

    /// Replays the proposal: 1 GiB, the split alone, as logging is enabled.
    fn skip_levels(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let samples = if self.quick { 10 } else { 21 };
        let line = format!(
            "-b 1g --when enable --what split --walk every-entry,bounded,childless,tested \
             --samples {samples}"
        );
        let Ran { command, results } = self.replayed::<Split>(&line, session)?;
        let told = ClaimFields { claim: SKIP, command, why: SKIP_WHY };
        for (backing, name, published) in [
            (4 << 10, "split already", "−97.33 %"),
            (2 << 20, "THP", "−19.82 %"),
            (1 << 30, "1g hugetlb", "−20.65 %"),
        ] {
            let change = changes(&results, "bounded", backing, SplitMoment::Enable);
            self.row(&told, format!("1 GiB, {name}: time of the split"), published, "%", change);
        }
        // Testing a flag at each entry costs about as much as leaving out children saves.
        let of = |walk| changes(&results, walk, 2 << 20, SplitMoment::Enable);
        let lost = of("tested").iter().zip(of("childless")).map(|(a, b)| a - b).collect();
        let what = "1 GiB, THP: points lost by testing a flag at each entry";
        self.row(&told, what, "about 1 (of a call)", "%", lost);
        linux::skip_levels(self, session)
    }

    /// Replays the figures from hardware: twelve cells of whole calls, each a mean over three
    /// granules.
    fn skip_levels_hardware(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let memory = if self.quick { "2g" } else { "16g" };
        let (mut all, mut commands) = (Vec::new(), Vec::new());
        for (granule, backings) in GRANULES {
            let line = format!(
                "-b {memory} --granule {granule} --what call --walk every-entry,bounded,childless \
                 --samples 10"
            );
            let Ran { command, results } = self.replayed::<Split>(&line, session)?;
            all.push((results, backings));
            commands.push(command);
            if session.interrupted() {
                return Ok(());
            }
        }
        let told = ClaimFields { claim: SKIP, command: commands.join("; "), why: SKIP_WHY };
        let mean = |walk: &str, kind: usize, when| {
            let parts =
                all.iter().map(|(results, backings)| changes(results, walk, backings[kind], when));
            let parts: Vec<Vec<f64>> = parts.collect();
            self::mean(&parts)
        };
        let cells: Cells = [
            (
                SplitMoment::Clear,
                "clear",
                [["−26.7 %", "−25.3 %"], ["−13.2 %", "−11.9 %"], ["−14.3 %", "−13.2 %"]],
            ),
            (
                SplitMoment::Enable,
                "enable",
                [["−33.1 %", "−35.0 %"], ["−11.9 %", "−10.7 %"], ["−13.4 %", "−13.2 %"]],
            ),
        ];
        for (when, name, published) in &cells {
            for (kind, [levels, children]) in published.iter().enumerate() {
                let call = format!("call, {name}, {}", KINDS[kind]);
                self.row(
                    &told,
                    format!("{call}: levels"),
                    levels,
                    "%",
                    mean("bounded", kind, *when),
                );
                let children_too = format!("{call}: levels and children");
                self.row(&told, children_too, children, "%", mean("childless", kind, *when));
            }
        }
        linux::skip_levels_hardware(self, session, &cells)
    }

    fn execute(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let line = match self.quick {
            true => "--backing 1g --vcpus 2 --memory 1g --rounds 1",
            false => "--backing 1g --vcpus 2",
        };
        let ran = self.replayed::<Execute>(line, session)?;
        let told = ClaimFields {
            claim: "split on fault",
            command: ran.command.clone(),
            why: "another machine, 2 vCPUs and 2 GiB in place of 96 and their memory; a fault is \
                a call here, not an exit to a kernel (--exit models one), so zap costs less than \
                it did there.",
        };
        let seconds = |way| ran.samples(way, "execute").to_vec();
        self.row(&told, "execute, zap", "2.90 s", "s", seconds("zap"));
        self.row(&told, "execute, split", "0.112 s", "s", seconds("split"));
        let by_zap = ran.quotients("split", "zap", "execute");
        self.row(&told, "execute, split by zap", "0.039 ×", "x", by_zap);
        let faults = |way| ran.figure(way, "execute").map_or(0.0, |m| m.counts["faults"] as f64);
        let ratio = faults("split") / faults("zap").max(1.0);
        self.row(&told, "faults, split by zap", "1/512 expected", "x", vec![ratio]);
        Ok(())
    }

    fn ageing(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let line = if self.quick { "--quick" } else { "" };
        let Ran { command, results } = self.replayed::<Age>(line, session)?;
        let told = ClaimFields {
            claim: "lock-free ageing",
            command,
            why: "there a whole reclaimer under memory pressure, here its scan alone, beside one \
                vCPU that faults: what the lock costs both.",
        };
        for m in results.iter().filter(|m| m.kind == Kind::Ratio) {
            let text =
                |name: &str| m.params.get(name).and_then(|value| value.as_str()).unwrap_or("");
            let what = format!("{}: {} by {}", m.variant, text("variants"), text("against"));
            let published = if text("against").starts_with("locked") {
                "51 s / 64 s = 0.80 ×, whole test"
            } else {
                ""
            };
            self.row(&told, what, published, "x", m.samples.clone());
        }
        if session.interrupted() {
            return Ok(());
        }
        self.fill_again(session)
    }

    /// Replays the published test: a guest writes all of its memory, and then again.
    fn fill_again(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let policies = "locked-page,locked-bitmap,free-bitmap";
        let quick = if self.quick { " --quick" } else { "" };
        let line = format!("--pattern fill --policy {policies}{quick}");
        let ran = self.replayed::<Reclaim>(&line, session)?;
        let told = ClaimFields {
            claim: "lock-free ageing",
            command: ran.command.clone(),
            why: "there 64 vCPUs and swap in memory, here one vCPU, a thread that reclaims, and \
                1.5 times the memory that there is: the second fill.",
        };
        for (locked, published) in [("locked-page", "51 s / 64 s = 0.80 ×"), ("locked-bitmap", "")]
        {
            let what = format!("fill again: free-bitmap by {locked}");
            let ratio = ran.quotients("free-bitmap", locked, "time");
            self.row(&told, what, published, "x", ratio);
        }
        Ok(())
    }

    fn flush_once(&mut self, session: &mut Session) -> anyhow::Result<()> {
        let memory = if self.quick { "1g" } else { "128g" };
        let line = format!("--count -b {memory} -v 64 --rounds 1");
        let ran = self.replayed::<CacheToggle>(&line, session)?;
        let why = "there the boot of a Linux guest, here its switches alone; on 1 GiB the CPU's \
            own flush, on 128 GiB by count. exact is right for guests that rely on the \
            hypervisor, which vcpu0 and first are not.";
        let told = ClaimFields { claim: "flush once", command: ran.command.clone(), why };
        for (way, published) in
            [("every", "33 s of boot"), ("vcpu0", "5 s"), ("first", ""), ("exact", "")]
        {
            let bytes = ran.maintained(way);
            let what = format!("64 vCPUs, 128 GiB, {way}: bytes maintained");
            self.row(&told, what, published, "bytes", bytes.into_iter().collect());
        }
        if session.interrupted() {
            return Ok(());
        }
        let line = if self.quick { "--quick" } else { "" };
        let ran = self.replayed::<CacheToggle>(line, session)?;
        let told = ClaimFields { command: ran.command.clone(), ..told };
        for (way, published) in
            [("every", ""), ("vcpu0", "0.15 × of a boot"), ("first", ""), ("exact", "")]
        {
            let what = format!("8 vCPUs, 1 GiB, {way}: time in switches, by every");
            self.row(&told, what, published, "x", ran.quotients(way, "every", SWITCHES));
        }
        Ok(())
    }
}

/// Returns the change of a walk's time against the walk over every entry, in percent, by round.
fn changes(results: &[Measurement], walk: &str, backing: u64, when: SplitMoment) -> Vec<f64> {
    let backing = json!(Size(backing).to_string());
    let of = |walk: &str| {
        let fits = |m: &&Measurement| {
            m.scenario == Split::NAME
                && m.variant == walk
                && m.params.get("backing") == Some(&backing)
                && param_of(&m.params, "when") == Some(when)
        };
        results.iter().find(fits).map_or(Vec::new(), |m| m.samples.clone())
    };
    quotients(&of(walk), &of("every-entry")).iter().map(|ratio| (ratio - 1.0) * 100.0).collect()
}

/// Returns the mean over granules, by round.
fn mean(parts: &[Vec<f64>]) -> Vec<f64> {
    let rounds = parts.iter().map(Vec::len).min().unwrap_or(0);
    let of = |round: usize| parts.iter().map(|part| part[round]).sum::<f64>();
    (0..rounds).map(|round| of(round) / parts.len() as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_claim_has_its_rows_next_to_the_published_values() {
        let args = ReplayArgs {
            only: vec![Claim::SkipLevels, Claim::FlushOnce],
            linux_tree: None,
            edits: None,
            quick: true,
        };
        let results = Replay::run(&args, &mut Session::quiet()).unwrap();
        let rows: Vec<_> = results.iter().filter(|m| m.scenario == Replay::NAME).collect();
        assert_eq!(rows.len(), 4 + 4 + 4);
        let published = |row: &&Measurement| row.params["published"].as_str().unwrap().to_owned();
        assert_eq!(published(&rows[0]), "−97.33 %");
        assert!(rows[0].samples.iter().all(|&change| change < -90.0), "{:?}", rows[0].samples);
        assert!(results.len() > rows.len(), "the samples behind them are kept");
    }
}
