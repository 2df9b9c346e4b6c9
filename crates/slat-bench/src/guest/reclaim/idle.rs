//! Measures how much memory could be taken from a guest, by walks over its accessed bits, and
//! whether the forecast holds. For this, it takes the number of pages that the forecast allows,
//! lets the guest go on as before, and counts the pages that come back.
//!
//! Walks come after a fixed number of accesses, on the vCPU's own thread, so all counts are the
//! same in each run.

use super::sample::{Runner, TheGuest, with_guest};
use super::settings::{AccessPattern, ReclaimArgs, SwapPlace, swap_place};
use super::{Case, cases, params};
#[cfg(test)]
use crate::format::TableFormat;
use crate::format::TablesArgs;
use crate::guest::tables::{Figures, MEANING, renderer};
use crate::guest::turns::{Counts, Recorder, counts};
use crate::on_machine;
use anyhow::{Context, ensure};
use clap::Args;
use serde_json::{Map, Value, json};
use slat::Format;
use slat_lab::failure::bad_input;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_reclaim::{Config, Idle, Pager, ReclaimCounts};
use slat_sim::arch::Arch;
use slat_sim::fast::FastMachine;
use std::path::PathBuf;
use std::time::Instant;

/// Numbers of walks without a use that have a row in the report.
const ROWS: [usize; 10] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24];

const EXAMPLES: &str = "\
Examples:
  slat-bench idle
      four patterns: how long pages are idle, and what taking those that come back rarely costs
  slat-bench idle --pattern zipf --may-return 0.1,0.5,1,2,5
  slat-bench idle --pattern trace --trace pages.txt --interval 0.25 --format arm64-4k";

/// Options of idle pages and the forecast.
#[derive(Clone, Debug, Args)]
pub struct IdleArgs {
    /// Its tables.
    #[command(flatten)]
    pub tables: TablesArgs,

    /// The guest's memory, a multiple of 2m [default: 64m]
    #[arg(long, short = 'b', value_name = "SIZE")]
    pub memory: Option<Size>,

    /// Order in which it uses its pages [default: zipf,phase,scan,trace]
    #[arg(long, value_name = "PATTERN,...", value_delimiter = ',')]
    pub pattern: Vec<AccessPattern>,

    /// A recorded trace, for --pattern trace, as `slat-bench reclaim` reads it [default: one of GNU
    /// sort]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Accesses between two walks, in multiples of the guest's pages
    #[arg(long, value_name = "N", default_value_t = 0.5, value_parser = interval)]
    pub interval: f64,

    /// Number of walks before pages are taken, and after
    #[arg(long, value_name = "N", default_value_t = 48)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub walks: u32,

    /// Pages that may come back between two walks, in percent of the guest's; one guest for each
    /// value
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "1,2,5")]
    #[arg(value_parser = percent)]
    pub may_return: Vec<f64>,

    /// Do not invalidate at the end of a walk: pages in a TLB look idle
    #[arg(long)]
    pub stale: bool,

    /// Place for pages that leave: memory of this process, or an unnamed file in a directory
    #[arg(long, value_name = "memory|DIR", default_value = "memory", value_parser = swap_place)]
    pub swap: SwapPlace,

    /// 8 MiB and few walks: a trial run, gives no figures to quote
    #[arg(long)]
    pub quick: bool,
}

impl IdleArgs {
    /// Returns the defaults of `slat-bench idle`.
    #[cfg(test)]
    pub fn of(format: TableFormat, quick: bool) -> Self {
        Self {
            tables: TablesArgs::of(format),
            memory: None,
            pattern: Vec::new(),
            trace: None,
            interval: 0.5,
            walks: 48,
            may_return: vec![1.0, 2.0, 5.0],
            stale: false,
            swap: SwapPlace::Memory,
            quick,
        }
    }
}

fn within(text: &str, least: f64, most: f64) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("a number from {least} to {most}"))
}

fn interval(text: &str) -> Result<f64, String> {
    within(text, 0.01, 1000.0)
}

fn percent(text: &str) -> Result<f64, String> {
    within(text, 0.0, 100.0)
}

/// Columns of the table of idle pages.
const FIGURES: Figures = Figures {
    of: "guest-idle",
    title: "Idle pages of a guest",
    counts: &[("idle", "pages", "pages")],
    note: "All pages were written once; nothing has been taken yet. idle: pages that so many \
           walks in a row, or more, found unused, of the guest's pages. waking a walk: how many \
           of such pages were used again between two walks, on average. time: of a walk.",
    ..Figures::NONE
};

/// Columns of the table of pages that were taken.
const TAKEN: Figures = Figures {
    of: "guest-idle-taken",
    title: "What was idle, taken from the guest",
    counts: &[("taken", "taken", "pages"), ("came back a walk", "returned", "came back, all")],
    note: "at most: so many pages may come back between two walks, of the guest's pages; taken: \
           what the walks said could be taken for that. Then the guest went on, with so much less \
           memory. came back: the median, and half of the intervals.",
    ..Figures::NONE
};

/// All tables.
const TABLES: [Figures; 2] = [FIGURES, TAKEN];

/// The scenario of idle pages.
pub struct IdlePages;

impl Scenario for IdlePages {
    const NAME: &'static str = "idle";
    const ABOUT: &'static str =
        "Ask which pages of a guest are idle, take what could be taken, and see what comes back";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = renderer!(TABLES, MEANING);
    type Settings = IdleArgs;

    fn run(args: &IdleArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        use AccessPattern::{Fill, Phase, Scan, Trace, Zipf};
        let memory = args.memory.unwrap_or(Size(if args.quick { 8 << 20 } else { 64 << 20 }));
        let walks = if args.quick { args.walks.min(24) } else { args.walks };
        let pattern = match &args.pattern[..] {
            [] if args.trace.is_some() => vec![Trace],
            [] => vec![Zipf, Phase, Scan, Trace],
            given => given.to_vec(),
        };
        if pattern.contains(&Fill) {
            return Err(bad_input("fill uses each page once; take another --pattern"));
        }
        let needed = (f64::from(2 * walks) * args.interval).ceil() as u32;
        let guests = ReclaimArgs {
            tables: args.tables,
            pattern,
            trace: args.trace.clone(),
            guest: vec![1.0],
            accesses: Some(needed.max(1)),
            fresh: !args.stale,
            ..ReclaimArgs::of(args.quick)
        };
        let cases = cases(&guests, memory, session)?;
        let swap = &args.swap;
        session.start("idle", (cases.len() * args.may_return.len()) as u64);
        let mut results = Vec::new();
        for case in &cases {
            on_machine!(&args.tables, |format, arch| {
                let machine = case.machine(arch)?;
                let mut params = params(case, swap);
                params.retain(|name, _| !["memory", "huge"].contains(&name.as_str()));
                params.insert("format".to_owned(), json!(args.tables.format.to_string()));
                params.insert("interval".to_owned(), json!(args.interval));
                let query = Query { case, args, walks, swap, params };
                results.extend(query.answer(format, &machine, session)?);
            });
            if session.interrupted() {
                break;
            }
        }
        session.finish();
        Ok(results)
    }
}

struct Query<'q> {
    case: &'q Case,
    args: &'q IdleArgs,
    walks: u32,
    swap: &'q SwapPlace,
    params: Map<String, Value>,
}

/// Results of one guest: its idle pages, and the effect of taking them.
struct Answer {
    idle: Idle,
    /// Pages that were taken (`taken`), and how many were expected to come back between two walks.
    taken: u64,
    expected: f64,
    /// Number of pages that came back, between each two walks.
    returned: Vec<u64>,
    /// Seconds of each walk.
    walks: Vec<f64>,
}

impl Query<'_> {
    fn answer<F: Format, A: Arch>(
        &self,
        format: F,
        machine: &FastMachine<A>,
        session: &Session,
    ) -> anyhow::Result<Vec<Measurement>> {
        // A forecast takes pages by their idle time only, so frequency is off.
        let (fresh, frequency) = (!self.args.stale, false);
        let config = Config { fresh, frequency, ..Config::new(self.case.pages) };
        let mut results = Vec::new();
        for (place, &percent) in self.args.may_return.iter().enumerate() {
            if session.check().is_err() {
                break;
            }
            session.say(&format!("{}, {percent} %", self.case.pattern));
            let answer = with_guest(format, machine, self.case, config, self.swap, |guest| {
                self.ask(machine, guest, percent)
            })
            .with_context(|| format!("{}, {percent} %", self.case.pattern))?;
            if place == 0 {
                results.extend(self.histogram(&answer));
            }
            results.extend(self.forecast(percent, &answer));
            session.step();
        }
        Ok(results)
    }

    fn ask<F: Format, A: Arch>(
        &self,
        machine: &FastMachine<A>,
        guest: &TheGuest<'_, F, A>,
        percent: f64,
    ) -> anyhow::Result<Answer> {
        let (case, paged) = (self.case, guest.backing());
        let mut runner = Runner::alone(guest, machine, case)?;
        runner.fill()?;
        let accesses = (self.args.interval * f64::from(case.pages)) as usize;
        let mut uses = case.uses[0].chunks_exact(accesses.max(1));
        let mut walks = Vec::new();
        for uses in uses.by_ref().take(self.walks as usize) {
            uses.iter().try_for_each(|&one| runner.apply(one))?;
            let begin = Instant::now();
            ensure!(Pager::new(runner.worker()).walk(), "somebody else reclaims");
            walks.push(begin.elapsed().as_secs_f64());
        }
        let idle = paged.idle().context("generations tell")?;
        let may_return = percent / 100.0 * f64::from(case.pages);
        let taken = idle.takeable(may_return);
        let length = (1..idle.generations.len()).find(|&walks| idle.pages(walks) == taken);
        let limit = u64::from(paged.resident()) - taken;
        paged.set_limit(limit as u32);
        while u64::from(paged.resident()) > limit {
            let excess = u64::from(paged.resident()) - limit;
            let batch = excess.min(case.batch.into()) as u32;
            let ReclaimCounts { pages, .. } = Pager::new(runner.worker()).reclaim(batch)?;
            ensure!(pages > 0, "nothing could be taken");
        }
        let mut returned = Vec::new();
        for uses in uses.take(self.walks as usize) {
            let before = paged.stats().refaults;
            uses.iter().try_for_each(|&one| runner.apply(one))?;
            returned.push(paged.stats().refaults - before);
            Pager::new(runner.worker()).walk();
        }
        let expected = length.map_or(0.0, |walks| idle.waking(walks));
        Ok(Answer { idle, taken, expected, returned, walks })
    }

    fn share(&self, pages: f64) -> f64 {
        100.0 * pages / f64::from(self.case.pages)
    }

    /// Returns the idle pages that walks found before any page was taken.
    fn histogram(&self, answer: &Answer) -> Vec<Measurement> {
        let recorder = Recorder { scenario: "guest-idle", params: self.params.clone() };
        let idle = &answer.idle;
        let counts = |walks: usize| {
            let at = |pages: Option<u64>| pages.unwrap_or(0);
            counts([
                ("pages", idle.pages(walks)),
                ("pages_exactly", at(idle.generations.get(walks).map(|it| it.pages))),
                ("woken_exactly", at(idle.woken.get(walks).copied())),
                ("walks", idle.walks),
            ])
        };
        let mut results = Vec::new();
        for walks in ROWS.into_iter().filter(|&walks| walks as u64 <= idle.walks) {
            let mut add = |figure: &str, unit: &str, samples: Vec<f64>| {
                let name = format!("{walks} walks or more");
                let counts = std::iter::once(counts(walks));
                results.push(recorder.figure(&name, "engine", figure, unit, samples, counts));
            };
            add("idle", "%", vec![self.share(idle.pages(walks) as f64)]);
            add("waking a walk", "%", vec![self.share(idle.waking(walks))]);
        }
        let none = std::iter::empty::<Counts>();
        let walks = vec![answer.walks.clone()];
        results.push(recorder.figure_of_guests("a walk", "engine", "time", "s", walks, none));
        results
    }

    /// Returns the pages that came back, and the number expected.
    fn forecast(&self, percent: f64, answer: &Answer) -> Vec<Measurement> {
        let recorder = Recorder { scenario: "guest-idle-taken", params: self.params.clone() };
        let counts =
            || counts([("taken", answer.taken), ("returned", answer.returned.iter().sum::<u64>())]);
        let figure = |figure: &str, samples: Vec<f64>| {
            let name = format!("at most {percent} %");
            let (guests, counts) = (vec![samples], std::iter::once(counts()));
            recorder.figure_of_guests(&name, "engine", figure, "%", guests, counts)
        };
        let returned = answer.returned.iter().map(|&pages| self.share(pages as f64));
        vec![
            figure("taken", vec![self.share(answer.taken as f64)]),
            figure("expected back a walk", vec![self.share(answer.expected)]),
            figure("came back a walk", returned.collect()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(pattern: AccessPattern, format: TableFormat) -> IdleArgs {
        IdleArgs {
            memory: Some(Size(2 << 20)),
            pattern: vec![pattern],
            ..IdleArgs::of(format, true)
        }
    }

    #[test]
    fn what_was_taken_comes_back_about_as_often_as_was_expected() {
        for format in [TableFormat::Ept, TableFormat::Arm64K4] {
            let args = IdleArgs { walks: 24, ..args(AccessPattern::Zipf, format) };
            let results = IdlePages::run(&args, &mut Session::quiet()).unwrap();
            let figure = |asked: &str, figure: &str| {
                let wanted = |m: &&Measurement| m.variant == asked && m.params["figure"] == figure;
                let samples = &results.iter().find(wanted).unwrap().samples;
                samples.iter().sum::<f64>() / samples.len() as f64
            };
            let taken = figure("at most 5 %", "taken");
            let expected = figure("at most 5 %", "expected back a walk");
            let came = figure("at most 5 %", "came back a walk");
            assert!(taken > 1.0 && expected <= 5.0, "{taken} {expected}");
            assert!(came > expected / 4.0 && came < expected * 4.0 + 1.0, "{expected}: {came}");
            let one_guest = |m: &Measurement| m.group_medians().len() == 1;
            assert!(results.iter().all(one_guest), "walks of one guest are one group");
            // The longer pages must have been idle, the fewer they are.
            let idle = |walks: u32| figure(&format!("{walks} walks or more"), "idle");
            assert!(idle(0) > 99.0 && idle(1) > idle(4), "{} {}", idle(1), idle(4));
        }
    }

    #[test]
    fn what_says_nothing_of_idle_pages_is_refused() {
        let fill =
            IdlePages::run(&args(AccessPattern::Fill, TableFormat::Ept), &mut Session::quiet());
        assert!(fill.unwrap_err().to_string().contains("another --pattern"));
        let odd =
            IdleArgs { memory: Some(Size(3 << 20)), ..args(AccessPattern::Zipf, TableFormat::Ept) };
        assert!(
            IdlePages::run(&odd, &mut Session::quiet()).unwrap_err().to_string().contains("2m")
        );
    }
}
