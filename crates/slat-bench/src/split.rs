//! Splits of a guest's tables by the engine, compared with the machine's limits.
//!
//! The tables are newly built before each sample, on the same warm memory; no guest memory is
//! needed. The measured time covers what a VMM's call would do, including filling the cache of
//! table pages: `--when enable` splits the entry GiB by GiB, `--when clear` 64 pages at a time.
//! Variants and limits take turns, and a different one begins each round.

mod limits;
mod tables;
mod work;

pub use tables::RENDERER;

use crate::arena::Arena;
use crate::fixture::breaks_of;
use crate::format::{Granule, TableFormat, TablesArgs};
use crate::limit::Limit;
use crate::on_format;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};
use slat::{BreakBeforeMake, Format, OpCounts, PageSize};
use slat_lab::failure::bad_input;
use slat_lab::record::{MACHINE, Measurement};
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_lab::turns::order;
use slat_lab::unit::Unit;
use work::{ADDRESS_BITS, WORD, Work};

/// Examples of command lines, for all programs that measure it.
pub const EXAMPLES: &str = "\
Examples:
  slat-bench split
      4k, 2m and 1g backing, at once and 64 pages at a time, every walk; 64 GiB of guest
  slat-bench split --memory 1T --backing 1g --when enable --what split
      the tables of 1 TiB; they take about 2 GiB of this machine's memory
  slat-bench split --format arm64-64k --backing 512m --walk every-entry,bounded
  slat-bench split --format riscv --memory 8G
  slat-bench split --backing 1g --target-size 2m
      stop at 2m blocks
  slat-bench split --target linux-source --linux-tree linux-6.12 --with bounded-walks/2
      beside Linux's own code, as it is and with the level-3 skip";

/// Options of the split.
#[derive(Clone, Debug, Args)]
pub struct SplitArgs {
    /// Memory of the guest whose tables are split
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "64G")]
    pub memory: Size,

    /// Page sizes that back the guest before the split; with the smallest it is already split
    ///
    /// They are sizes of the format [default: all]
    #[arg(long, short = 's', value_name = "SIZE,...", value_delimiter = ',')]
    pub backing: Vec<Size>,

    /// Page size to split down to [default: the smallest]
    #[arg(long, value_name = "SIZE")]
    pub target_size: Option<Size>,

    /// The whole entry at once, as logging is enabled, or 64 pages at a time, as the log is cleared
    #[arg(long, value_name = "WHEN,...", value_delimiter = ',', default_value = "enable,clear")]
    pub when: Vec<SplitMoment>,

    /// The split alone, or the call of a VMM: write-protect, invalidate and split
    #[arg(long, value_name = "WHAT,...", value_delimiter = ',', default_value = "split,call")]
    pub what: Vec<What>,

    /// Ways to walk the tables
    #[arg(long, value_name = "WALK,...", value_delimiter = ',')]
    #[arg(default_value = "every-entry,bounded,batched")]
    pub walk: Vec<Walk>,

    /// Format of the tables [default: arm64-4k]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<TableFormat>,

    /// Smallest page of Arm's tables: --granule 16k means --format arm64-16k
    #[arg(long, value_name = "SIZE", default_value = "4k", conflicts_with = "format")]
    pub granule: Granule,

    /// Level of FEAT_BBM: the changes of size of a live entry that an Arm CPU allows
    ///
    /// 0 always breaks before it makes; 1 and 2 as in the manual; 3 never breaks. Only for Arm's
    /// tables. [default: 0]
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub bbm: Option<u8>,

    /// Samples of each variant, taken in turns
    #[arg(long, value_name = "N", default_value_t = 11)]
    #[arg(value_parser = clap::value_parser!(u32).range(10..=1000))]
    pub samples: u32,

    /// 1 GiB at most, ten samples: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

impl SplitArgs {
    /// Returns the format of the tables.
    pub fn format(&self) -> TableFormat {
        self.format.unwrap_or(TableFormat::of_granule(self.granule))
    }

    /// Returns the level of FEAT_BBM.
    ///
    /// # Errors
    /// The level was given, and the format has none.
    pub fn bbm(&self) -> anyhow::Result<u8> {
        TablesArgs { format: self.format(), bbm: self.bbm }.bbm()
    }

    /// Returns the backings asked for, or all that the format has from the target size on, the
    /// smallest first.
    pub fn backings(&self) -> Vec<Size> {
        if !self.backing.is_empty() {
            return self.backing.clone();
        }
        let target = self.target_size();
        let leaves = self.format().leaves();
        let sizes = leaves.iter().map(|leaf| Size(leaf.bytes()));
        sizes.filter(|size| *size >= target).collect()
    }

    /// Returns the options with the sizes of `--quick`, if that is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if self.quick {
            (args.memory, args.samples) = (self.memory.min(Size(1 << 30)), 10);
        }
        args
    }

    /// Returns the size to split down to.
    pub fn target_size(&self) -> Size {
        self.target_size.unwrap_or_else(|| Size(self.format().leaves()[0].bytes()))
    }
}

/// The moment at which a guest's huge pages are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum SplitMoment {
    /// The whole entry at once, as logging is enabled
    Enable,
    /// 64 pages at a time, as the log is cleared
    Clear,
}

/// The operation that one sample covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum What {
    /// The split alone
    Split,
    /// Write-protect, invalidate and split, as one call of a VMM would
    Call,
}

/// The way in which the tables are walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Walk {
    /// Every entry, including those of tables just built: Linux's way
    EveryEntry,
    /// The same without the last level: the proposed level-3 skip
    Bounded,
    /// Also without the entries of tables just built: the first form of the proposal
    Childless,
    /// The same, by a flag that is read at each entry
    Tested,
    /// Whole tables at a time, no descent into tables just built, merged invalidations
    Batched,
}

slat_lab::display_as_written!(SplitMoment, What, Walk);

/// The scenario of splits by the engine alone.
pub struct Split;

impl Scenario for Split {
    const NAME: &'static str = "split";
    const ABOUT: &'static str =
        "Split huge pages in the tables of a guest (no guest memory needed)";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = RENDERER;
    type Settings = SplitArgs;

    fn run(args: &SplitArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        run(args, session)
    }
}

/// Measures the splits that `args` asks for.
///
/// # Errors
/// Sizes that cannot be right, too little memory, or a split whose result is wrong.
pub fn run(args: &SplitArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let args = &args.sized();
    // Impossible options are reported before a format that this program was built without.
    args.bbm()?;
    leaves(args)?;
    on_format!(args.format(), |format| measure(format, args, session))
}

/// Returns the backings, and the size to split down to.
fn leaves(args: &SplitArgs) -> anyhow::Result<(Vec<PageSize>, PageSize)> {
    let size = |option, size| args.format().leaf(option, size);
    let backings = args.backings().into_iter().map(|backing| size("--backing", backing));
    Ok((backings.collect::<anyhow::Result<_>>()?, size("--target-size", args.target_size())?))
}

/// A row of the result: a state of the tables, and the operation on them.
#[derive(Clone, Copy, Debug)]
struct Case {
    backing: PageSize,
    when: SplitMoment,
    what: What,
}

impl Case {
    /// Returns whether protecting a word of the log would cut a block that the split leaves.
    fn cuts_blocks<F: Format>(&self, target: PageSize) -> bool {
        let word = WORD * F::size(0).bytes();
        self.when == SplitMoment::Clear
            && self.what == What::Call
            && target.min(self.backing).bytes() > word
    }

    /// Returns the limits that the variants of the case are compared with.
    fn limits(&self, page: PageSize) -> &'static [Limit] {
        match (self.backing == page, self.what, self.when) {
            (true, What::Split, _) => &[Limit::ReadUpper, Limit::Read],
            (true, What::Call, _) => &[Limit::Cas],
            (false, What::Call, SplitMoment::Clear) => {
                &[Limit::FillPlain, Limit::FillBest, Limit::Cas]
            }
            (false, ..) => &[Limit::FillPlain, Limit::FillBest],
        }
    }
}

/// An entrant of a case.
#[derive(Clone, Copy, Debug)]
enum Entrant {
    Walk(Walk),
    Limit(Limit),
}

/// Result of one sample.
struct Sample {
    seconds: f64,
    cost: Cost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cost {
    Split { counts: OpCounts, invalidations: u64 },
    Limit { ptes: u64 },
}

fn measure<F: Format>(
    format: F,
    args: &SplitArgs,
    session: &mut Session,
) -> anyhow::Result<Vec<Measurement>> {
    let (cases, target) = plan::<F>(&format, args)?;
    let (cut, cases): (Vec<Case>, Vec<Case>) =
        cases.into_iter().partition(|case| case.cuts_blocks::<F>(target));
    let reason = |case: &Case| {
        format!(
            "a word of the log protects {}, and would cut a {} block that --target-size {target} \
             leaves; take --when enable, --what split or --target-size {}",
            Size(WORD * F::size(0).bytes()),
            target.min(case.backing),
            F::size(0)
        )
    };
    match cut.first() {
        Some(case) if cases.is_empty() => return Err(bad_input(reason(case))),
        _ => {}
    }
    for case in &cut {
        session.skip(format!("{} pages, {}, {}", case.backing, case.when, case.what), reason(case));
    }
    let work = Work::new(format, args.memory.bytes(), target)?;
    let mut arena = arena::<F>(&work, args, session)?;
    let mut results = Vec::new();
    // One round warms up.
    let rounds = args.samples as usize + 1;
    session.start("split", (cases.len() * rounds) as u64);
    for case in &cases {
        session.say(&format!("{} pages, {}, {}", case.backing, case.when, case.what));
        let entrants: Vec<Entrant> = (args.walk.iter().copied().map(Entrant::Walk))
            .chain(case.limits(F::size(0)).iter().copied().map(Entrant::Limit))
            .collect();
        let mut samples: Vec<Vec<Sample>> = entrants.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds {
            for place in order(round, entrants.len()) {
                if session.check().is_err() {
                    return Ok(results);
                }
                let sample = match entrants[place] {
                    Entrant::Walk(walk) => work.split(&mut arena, case, walk, round == 0)?,
                    Entrant::Limit(limit) => work.limit(&mut arena, case, limit)?,
                };
                if round > 0 {
                    samples[place].push(sample);
                }
            }
            session.step();
        }
        for (entrant, samples) in entrants.iter().zip(&samples) {
            results.push(measurement(args, case, target, *entrant, samples)?);
        }
    }
    session.finish();
    Ok(results)
}

/// Returns the cases asked for, after checking them.
fn plan<F: Format>(format: &F, args: &SplitArgs) -> anyhow::Result<(Vec<Case>, PageSize)> {
    let (backings, target) = leaves(args)?;
    let memory = args.memory;
    let wide = ADDRESS_BITS.into_iter().rev().find(|bits| format.geometry(*bits).is_ok());
    let most = 1u64 << (wide.unwrap_or(0).min(format.output_bits()).max(1) - 1);
    if memory.bytes() > most {
        return Err(bad_input(format!(
            "--memory {memory} is more than tables of {} reach beside their host addresses; at \
             most {}",
            args.format(),
            Size(most)
        )));
    }
    let mut cases = Vec::new();
    for backing in backings {
        if target > backing {
            return Err(bad_input(format!(
                "--target-size {target} is larger than --backing {backing}, which a split only \
                 makes smaller; take {backing} at most"
            )));
        }
        if !memory.bytes().is_multiple_of(backing.bytes()) {
            return Err(bad_input(format!(
                "--memory {memory} is not a whole number of {backing} pages; take a multiple of \
                 {backing}"
            )));
        }
        if !memory.bytes().is_multiple_of(WORD * F::size(0).bytes()) {
            return Err(bad_input(format!(
                "--memory {memory} is not a multiple of 64 pages of {}, which one word of a dirty \
                 log covers",
                F::size(0)
            )));
        }
        for &when in &args.when {
            for &what in &args.what {
                cases.push(Case { backing, when, what });
            }
        }
    }
    Ok((cases, target))
}

/// Maps memory for the tables, if the host has that much free.
fn arena<F: Format>(work: &Work<F>, args: &SplitArgs, session: &Session) -> anyhow::Result<Arena> {
    let needed = work.table_bytes();
    let available = session.memory_available();
    if needed > available / 10 * 9 {
        return Err(bad_input(format!(
            "the tables of {} take {} MiB, and this machine has {} MiB free; take a smaller \
             --memory",
            args.memory,
            needed >> 20,
            available >> 20
        )));
    }
    let bbm = match args.bbm()? {
        _ if !args.format().is_arm() => breaks_of::<F>(),
        0 | 1 => BreakBeforeMake::Always,
        2 => BreakBeforeMake::ConflictHandled,
        _ => BreakBeforeMake::Never,
    };
    Arena::new(needed as usize, 1 << F::PAGE_SHIFT, bbm)
}

fn measurement(
    args: &SplitArgs,
    case: &Case,
    target: PageSize,
    entrant: Entrant,
    samples: &[Sample],
) -> anyhow::Result<Measurement> {
    let (scenario, of, variant) = match entrant {
        Entrant::Walk(walk) => ("split", "engine", walk.to_string()),
        Entrant::Limit(limit) => (limits::SCENARIO, MACHINE, limit.name().to_owned()),
    };
    let cost = samples[0].cost;
    if let Some(other) = samples.iter().find(|sample| sample.cost != cost) {
        anyhow::bail!("{variant}: the costs differ between samples: {cost:?}, {:?}", other.cost);
    }
    let mut params: Map<String, Value> = [
        ("memory", json!(args.memory.bytes())),
        ("backing", json!(case.backing.to_string())),
        ("target_size", json!(target.to_string())),
        ("when", json!(case.when.to_string())),
        ("what", json!(case.what.to_string())),
        ("format", json!(args.format().to_string())),
        ("granule", json!(args.format().leaves()[0].bytes())),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into_iter()
    .collect();
    if args.format().is_arm() {
        params.insert("bbm".to_owned(), json!(args.bbm()?));
    }
    let counts = match cost {
        Cost::Split { counts, invalidations } => vec![
            ("entries_read", counts.entries_read),
            ("entries_written", counts.entries_written),
            ("tables_built", counts.tables_built),
            ("invalidations", invalidations),
        ],
        Cost::Limit { ptes } => {
            params.insert("entries".to_owned(), json!(ptes));
            params.insert("bytes".to_owned(), json!(ptes * 8));
            Vec::new()
        }
    };
    let seconds = samples.iter().map(|sample| sample.seconds).collect();
    Ok(Measurement {
        counts: counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        ..Measurement::new(scenario, of, variant, params, Unit::SECONDS, seconds)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::record::ENGINE;

    fn args() -> SplitArgs {
        SplitArgs {
            memory: Size(1 << 30),
            backing: Vec::new(),
            target_size: None,
            when: vec![SplitMoment::Enable, SplitMoment::Clear],
            what: vec![What::Split, What::Call],
            walk: vec![Walk::EveryEntry, Walk::Bounded, Walk::Batched],
            format: None,
            granule: Granule::Size4k,
            bbm: None,
            samples: 1,
            quick: false,
        }
    }

    fn refusal(args: SplitArgs) -> String {
        run(&args, &mut Session::quiet()).unwrap_err().to_string()
    }

    fn reads(results: &[Measurement], backing: &str, variant: &str) -> u64 {
        let found = results.iter().find(|m| {
            m.variant == variant
                && m.params["backing"] == backing
                && m.params["when"] == "enable"
                && m.params["what"] == "split"
        });
        found.unwrap().counts["entries_read"]
    }

    #[test]
    fn each_walk_reads_as_many_entries_of_a_gib_as_its_way_says() {
        // Tables of three levels can map 4 GiB.
        let args = SplitArgs {
            memory: Size(4 << 30),
            when: vec![SplitMoment::Enable],
            what: vec![What::Split],
            ..args()
        };
        let results = run(&args, &mut Session::quiet()).unwrap();
        let reads = |backing, variant| reads(&results, backing, variant) / 4;
        // Linux visits 262,657 entries for 1 GiB that is already split, and 524,801 and 525,313
        // from blocks.
        assert_eq!(reads("4k", "every-entry"), 1 + 512 + (512 << 9));
        assert_eq!(reads("4k", "bounded"), 513);
        assert_eq!(reads("4k", "batched"), 513);
        assert!((524_800..526_400).contains(&reads("2m", "every-entry")));
        assert!((262_656..264_000).contains(&reads("2m", "bounded")));
        assert!(reads("2m", "batched") <= 1100);
        assert!((524_800..526_400).contains(&reads("1g", "every-entry")));
        assert!((262_656..264_000).contains(&reads("1g", "bounded")));
        assert!(reads("1g", "batched") <= 1100);
    }

    #[test]
    fn every_granule_and_bbm_level_splits_to_the_right_leaves() {
        let cases = [
            (Granule::Size4k, 64 << 20, Some(2 << 20)),
            (Granule::Size4k, 1 << 30, Some(1 << 30)),
            (Granule::Size16k, 64 << 20, None),
            (Granule::Size64k, 1 << 30, None),
        ];
        for (granule, memory, backing) in cases {
            for bbm in 0..=3 {
                let backing = backing.map(Size).into_iter().collect();
                let what = if memory == 1 << 30 { vec![What::Split] } else { args().what };
                let bbm = Some(bbm);
                let args =
                    SplitArgs { granule, memory: Size(memory), backing, what, bbm, ..args() };
                // `work` checks each result, and that there are as many samples as asked for.
                assert!(!run(&args, &mut Session::quiet()).unwrap().is_empty());
            }
        }
    }

    #[test]
    fn a_target_size_stops_the_split_there() {
        let args = SplitArgs {
            memory: Size(4 << 30),
            backing: vec![Size(1 << 30)],
            target_size: Some(Size(2 << 20)),
            what: vec![What::Split],
            ..args()
        };
        for result in run(&args, &mut Session::quiet()).unwrap() {
            if result.target == ENGINE {
                assert_eq!(result.counts["tables_built"], 4, "{result:?}");
            }
        }
    }

    #[test]
    fn a_call_that_would_cut_the_target_blocks_is_not_made() {
        let target_size = Some(Size(2 << 20));
        let backing = vec![Size(1 << 30)];
        let all = SplitArgs { backing, target_size, ..args() };
        let mut session = Session::quiet();
        let results = run(&all, &mut session).unwrap();
        let calls = |when: &str| {
            let of = |m: &&Measurement| m.params["when"] == when && m.params["what"] == "call";
            results.iter().filter(of).count()
        };
        assert!(calls("enable") > 0 && calls("clear") == 0);
        assert_eq!(session.skipped().len(), 1);
        assert_eq!(session.skipped()[0].what, "1g pages, clear, call");
        let only = SplitArgs { when: vec![SplitMoment::Clear], what: vec![What::Call], ..all };
        assert!(refusal(only).contains("--target-size 2m"));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_with_those_that_can() {
        let error = refusal(SplitArgs { backing: vec![Size(32 << 20)], ..args() });
        assert!(error.contains("--backing 32m") && error.contains("4k, 2m, 1g"), "{error}");
        let error = refusal(SplitArgs { memory: Size((1 << 30) + (2 << 20)), ..args() });
        assert!(error.contains("1026m") && error.contains("multiple of 1g"), "{error}");
        let error = refusal(SplitArgs {
            backing: vec![Size(4096)],
            target_size: Some(Size(2 << 20)),
            ..args()
        });
        assert!(error.contains("--target-size 2m is larger than --backing 4k"), "{error}");
        let error = refusal(SplitArgs { target_size: Some(Size(8192)), ..args() });
        assert!(error.contains("--target-size 8k"), "{error}");
        let error = refusal(SplitArgs { memory: Size(1 << 50), ..args() });
        assert!(error.contains("1024t") && error.contains("at most 128t"), "{error}");
        let error = refusal(SplitArgs { memory: Size(1 << 46), ..args() });
        assert!(error.contains("64t") && error.contains("MiB free"), "{error}");
    }
}
