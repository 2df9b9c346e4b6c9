//! The scenario `restore`: a guest's memory comes back from a file, in each way of VMMs.

use super::guest::observe;
use super::options::{RunArgs, VisitArgs};
use super::repeat::Times;
use super::restore_tables;
use super::runs::{Guest, admits, in_turns};
use super::values::{Switch, all_or, name_of};
use crate::needs::GUEST;
use clap::Args;
use serde_json::{Map, Value};
use slat_kvm::guest::Shape;
use slat_kvm::image::{Cache, Image};
use slat_kvm::scenario::restore::{self, Config, Slow, Way};
use slat_kvm::{Backing, Mode, Setting};
use slat_lab::cli::{count, time};
use slat_lab::failure::bad_input;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// Phases of a run.
const PHASES: u64 = 3;

/// Pages for which the handler is slow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowPages(Slow);

impl FromStr for SlowPages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let both = text.split_once(':').and_then(|(percent, delay)| {
            let percent: f64 = percent.parse().ok()?;
            let delay = time::any(delay).ok()?;
            (!delay.is_zero() && percent > 0.0 && percent <= 100.0)
                .then_some(Slow { percent, delay })
        });
        both.map(Self).ok_or_else(|| {
            format!("`{text}` is no delay; 1:500us lets the handler sleep 500 us for 1 % of pages")
        })
    }
}

impl fmt::Display for SlowPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}us", self.0.percent, self.0.delay.as_micros())
    }
}

const EXAMPLES: &str = "\
Examples:
  slat bench restore
      256 MiB in each way, with and without prefetch of the order that was recorded first
  slat bench restore --way private --cache warm,cold --folder /var/tmp
      a guest that maps its file, which is in the page cache or on the disk
  slat bench restore --way uffd-4k,minor --handlers 1,2,4 -v 4
      how many threads a handler wants
  slat bench restore --way eager,uffd-2m --thp off,on --memory 1g
  slat bench restore --pattern requests --memory 128m
      a guest that touches its pages as a recorded one did
  slat bench restore --way uffd-4k --slow 1:500us
      a handler that is slow for some pages, and what of it the guest sees";

/// Options of `slat bench restore`.
#[derive(Clone, Debug, Args)]
pub struct RestoreArgs {
    /// Memory of the guest, which the vCPUs share evenly
    #[arg(long, short = 'b', value_name = "SIZE", default_value = "256M")]
    pub memory: Size,

    /// vCPUs
    #[arg(long, short = 'v', value_name = "N", default_value = "1", value_parser = count::vcpus())]
    pub vcpus: u32,

    /// Ways to bring the memory back [default: all that this host has]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',')]
    pub way: Vec<Way>,

    /// Bring the pages of a recorded order before the guest runs: without, with, or both
    #[arg(long, value_name = "off|on,...", value_delimiter = ',', default_value = "off,on")]
    pub prefetch: Vec<Switch>,

    /// Threads of the handler, each number of which is tried
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub handlers: Vec<u32>,

    /// Transparent huge pages, where the memory is anonymous (eager, uffd-4k, uffd-2m)
    #[arg(long, value_name = "off|on,...", value_delimiter = ',', default_value = "off")]
    pub thp: Vec<Switch>,

    /// Whether the file is in the page cache at the start
    #[arg(long, value_name = "warm|cold,...", value_delimiter = ',', default_value = "warm")]
    pub cache: Vec<Cache>,

    /// The guest's accesses.
    #[command(flatten)]
    pub visits: VisitArgs,

    /// Let the handler sleep for a part of the pages, to test what is measured: 1:500us
    #[arg(long, value_name = "PERCENT:TIME")]
    pub slow: Option<SlowPages>,

    /// Folder for the file of the guest's memory [default: that for temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,

    /// Options of the measurement.
    #[command(flatten)]
    pub run: RunArgs,
}

/// The scenario.
pub struct Restore;

impl Scenario for Restore {
    const NAME: &'static str = restore::RESULTS.name;
    const ABOUT: &'static str = "Bring a guest's memory back from a file, in each way of VMMs";
    const EXAMPLES: &'static str = EXAMPLES;
    // Each run restores a guest in each way.
    const DEFAULTS: &'static [(&'static str, &'static str)] =
        &[("runs", "3"), ("accesses", "25"), ("write_percent", "20")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = restore_tables::RENDERER;
    type Settings = RestoreArgs;

    fn run(args: &RestoreArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let mut args = args.clone();
        if args.run.quick {
            args.memory = args.memory.min(Size(16 << 20));
            args.run.runs = Times::ONCE;
        }
        let host = slat_kvm::probe()?;
        let first = config(&args, Way::Copy, Switch::Off, Cache::Warm, 1)?;
        admits(first.shape.check(&host), Restore::NAME, true, session)?;
        let folder = args.folder.clone().unwrap_or_else(std::env::temp_dir);
        let image = Image::new(&folder, args.memory.bytes())?;
        session.announce(2 * args.memory.bytes(), args.vcpus as usize, 1);
        let order = match args.prefetch.contains(&Switch::On) {
            true => recorded(&args, first, &image, session)?,
            false => None,
        };
        let mut guests = Vec::new();
        for choice in choices(&args) {
            let Some(config) = prepare(&args, &choice, order.as_ref())? else { continue };
            let (way, cache) = (name_of(choice.way), name_of(choice.cache));
            let name = format!("restore, {way}, prefetch {}, {cache}", choice.prefetch);
            if admits(config.check(&host), &name, !args.way.is_empty(), session)? {
                let (image, params) = (&image, params(&args, &choice));
                let run = move |setting: Setting<'_>| restore::run(&config, image, setting);
                let outcome = &restore::OUTCOME;
                guests.push(Guest::new(Self::NAME, name, params, &args.run, outcome, run)?);
            }
        }
        in_turns(Self::NAME, guests, PHASES, session)
    }
}

/// Restores a guest once, and returns the order in which it asked for its pages. Returns `None` if
/// this host cannot tell.
fn recorded(
    args: &RestoreArgs,
    config: Config,
    image: &Image,
    session: &mut Session,
) -> anyhow::Result<Option<Arc<[u64]>>> {
    let config = Config { slow: None, ..config };
    let pin = args.run.kvm.cpus()?;
    let report = observe(session, "restore, recorded", &pin, &mut Vec::new(), |setting| {
        restore::run(&config, image, setting)
    });
    match report {
        Ok(report) => Ok(report.map(|report| report.order.into())),
        Err(error) => match error.downcast::<slat_kvm::Error>() {
            Ok(error @ slat_kvm::Error::NoUserfaultfd { .. }) => {
                session.skip("restore, with prefetch", error.to_string());
                Ok(None)
            }
            Ok(error) => Err(error.into()),
            Err(error) => Err(error),
        },
    }
}

/// One combination of the options that are lists.
struct Choice {
    way: Way,
    thp: Switch,
    prefetch: Switch,
    cache: Cache,
    handlers: u32,
}

/// Returns the combinations that make a difference.
fn choices(args: &RestoreArgs) -> Vec<Choice> {
    let mut all = Vec::new();
    for &way in all_or(&args.way) {
        // An option that changes nothing is taken once, at its first value.
        let thps = if way.is_anonymous() { &args.thp[..] } else { &[Switch::Off] };
        let eager = way == Way::Eager;
        let prefetches = if eager { &[Switch::Off] } else { &args.prefetch[..] };
        let handlers = if way.has_handler() { &args.handlers[..] } else { &[1] };
        for (&thp, &prefetch) in
            thps.iter().flat_map(|thp| prefetches.iter().map(move |p| (thp, p)))
        {
            for (&cache, &handlers) in
                args.cache.iter().flat_map(|cache| handlers.iter().map(move |n| (cache, n)))
            {
                all.push(Choice { way, thp, prefetch, cache, handlers });
            }
        }
    }
    all
}

fn config(
    args: &RestoreArgs,
    way: Way,
    thp: Switch,
    cache: Cache,
    handlers: u32,
) -> anyhow::Result<Config> {
    let kvm = &args.run.kvm;
    let memory = args.memory.bytes();
    let page = Backing::Small.page_size() * u64::from(args.vcpus);
    if memory == 0 || !memory.is_multiple_of(page) {
        let unit = Size(page);
        return Err(bad_input(format!("--memory {} is no multiple of {unit}", args.memory)));
    }
    Ok(Config {
        shape: Shape {
            memory,
            backing: if thp == Switch::On { Backing::Thp } else { Backing::Small },
            vcpus: args.vcpus as usize,
            slots: kvm.slots.unwrap_or(1),
            mode: Mode::Legacy,
            nx_huge_pages: !kvm.disable_nx_huge_pages,
            probes: kvm.probe.clone(),
            ..Shape::default()
        },
        way,
        cache,
        prefetch: None,
        handlers,
        visits: args.visits.visits(),
        slow: args.slow.map(|slow| slow.0),
    })
}

/// Returns the configuration of a choice, or `None` if its order could not be recorded.
fn prepare(
    args: &RestoreArgs,
    choice: &Choice,
    order: Option<&Arc<[u64]>>,
) -> anyhow::Result<Option<Config>> {
    let Choice { way, thp, prefetch, cache, handlers } = *choice;
    let prefetched = (prefetch == Switch::On).then_some(order);
    if prefetched == Some(None) {
        return Ok(None);
    }
    let config = config(args, way, thp, cache, handlers)?;
    Ok(Some(Config { prefetch: prefetched.flatten().cloned(), ..config }))
}

/// Returns the parameters of the results of a choice, without options that have their usual value.
fn params(args: &RestoreArgs, choice: &Choice) -> Map<String, Value> {
    let mut params = Map::new();
    let mut add = |name: &str, value: Value| params.insert(name.to_owned(), value);
    add("memory", args.memory.bytes().into());
    add("vcpus", args.vcpus.into());
    add("way", name_of(choice.way).into());
    add("prefetch", choice.prefetch.to_string().into());
    add("cache", name_of(choice.cache).into());
    if args.thp != [Switch::Off] {
        add("thp", choice.thp.to_string().into());
    }
    if args.handlers != [1] {
        add("handlers", choice.handlers.into());
    }
    if let Some(slow) = args.slow {
        add("slow", slow.to_string().into());
    }
    args.visits.add_to(&mut params);
    params
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_lab::scenario::settings;

    #[test]
    fn options_that_change_nothing_are_not_tried_twice() {
        let all = |line: &str| choices(&settings::<Restore>(line).unwrap()).len();
        // Eager has no prefetch.
        assert_eq!(all(""), 11);
        assert_eq!(all("--thp off,on --way private,eager"), 4);
        assert_eq!(all("--handlers 1,2,4 --way private,minor --prefetch off"), 4);
        assert_eq!(all("--cache warm,cold --way eager"), 2);
    }

    #[test]
    fn a_delay_is_a_part_and_a_time() {
        let slow: SlowPages = "1:500us".parse().unwrap();
        assert_eq!(slow.to_string(), "1:500us");
        for text in ["500us", "0:500us", "101:1ms", "1:5", "1:0s", "x:1ms"] {
            assert!(text.parse::<SlowPages>().unwrap_err().contains("1:500us"), "{text}");
        }
    }
}
