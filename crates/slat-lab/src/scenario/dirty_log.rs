//! Dirty logging of a guest under the host's KVM: from the command line to `slat-kvm` and back.
//!
//! Each phase is a measurement with a sample for each time it came; each vCPU's part in a phase is
//! another, with the parameter `vcpu`. Counts come from KVM: those of the VM and of the dirty log
//! with the phase, those of a vCPU with its part. Rounds differ, the first from the others above
//! all, so a count that is not the same in all samples is given three times: `_first`, `_min` and
//! `_max`.

use crate::cli::{DirtyLogArgs, GuestFormat, KvmBacking, Target};
use crate::failure::bad_input;
use crate::record::Measurement;
use crate::session::Session;
use crate::size::Size;
use serde_json::{Map, Value, json};
use slat_kvm::dirty_log::{self, Config, Event, Mode, Phase, PhaseRun, Report};
use slat_kvm::{Backing, Error};
use std::collections::{BTreeMap, BTreeSet};

/// Measures the phases of dirty logging that `args` asks for.
///
/// # Errors
///
/// [`Failure::BadInput`](crate::failure::Failure::BadInput) for values that cannot be right; any
/// other error for what this host lacks, or for a guest or a log that went wrong.
pub fn run(args: &DirtyLogArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    if args.target == Target::Engine {
        return super::guest::dirty_log::run(args, session);
    }
    let mut guest = Guest::new(args)?;
    session.start(&guest.name(), guest.steps());
    for _ in 0..=args.runs {
        guest.run(session)?;
    }
    session.finish();
    Ok(guest.measurements())
}

/// One way of logging, measured in several runs of a guest of its own; the first warms up.
///
/// Memory that the host never used before costs more at its first touch than ever again, most of
/// all where the host is itself a guest: a run that nobody counts takes that upon itself.
pub struct Guest<'a> {
    args: &'a DirtyLogArgs,
    config: Config,
    warm: bool,
    phases: Vec<PhaseRun>,
    last: Option<Report>,
}

impl<'a> Guest<'a> {
    /// A guest as `args` describes it, checked.
    ///
    /// # Errors
    ///
    /// [`Failure::BadInput`](crate::failure::Failure::BadInput) for values that cannot be right.
    pub fn new(args: &'a DirtyLogArgs) -> anyhow::Result<Self> {
        let config = config(args)?;
        Ok(Self { args, config, warm: false, phases: Vec::new(), last: None })
    }

    /// What is measured, for the person waiting.
    pub fn name(&self) -> String {
        let Config { memory, .. } = self.config;
        let DirtyLogArgs { backing, manual_protect, initially_set, .. } = self.args;
        format!(
            "dirty-log, {} on {backing}, manual protect {manual_protect}, initially set \
             {initially_set}",
            Size(memory)
        )
    }

    /// Steps of all its runs.
    pub fn steps(&self) -> u64 {
        let calls = if self.config.mode.is_manual() { 3 } else { 2 };
        (3 + u64::from(self.config.iterations) * calls) * u64::from(self.args.runs + 1)
    }

    /// Runs the guest once. After Ctrl-C, what had ended by then is kept.
    ///
    /// # Errors
    ///
    /// What this host lacks, or a guest or a log that went wrong.
    pub fn run(&mut self, session: &Session) -> anyhow::Result<()> {
        let stop = session.stop_flag();
        let mut phases = Vec::new();
        let name = self.name();
        let result = dirty_log::run(&self.config, &stop, &mut |event| match event {
            Event::Begin { phase, iteration: Some(round) } => {
                session.say(&format!("{name}: {phase}, round {round}"));
            }
            Event::Begin { phase, iteration: None } => session.say(&format!("{name}: {phase}")),
            Event::End(run) => {
                phases.push(run.clone());
                session.step();
            }
            Event::Checking => session.say("checking what the guest wrote"),
            _ => {}
        });
        match result {
            Ok(report) => {
                if self.warm {
                    self.phases.extend(phases);
                } else if let Some(line) = shortfall(self.args, &report) {
                    session.note(&line);
                }
                if let Some(line) = left_behind(&name, &report) {
                    session.note(&line);
                }
                self.last = Some(report);
                self.warm = true;
                Ok(())
            }
            // Each phase that ended has been checked against its log, and stands.
            Err(Error::Stopped) => {
                if self.warm {
                    self.phases.extend(phases);
                }
                Ok(())
            }
            Err(error @ Error::Invalid { .. }) => Err(bad_input(error.to_string())),
            Err(error) => Err(error.into()),
        }
    }

    /// What was measured so far.
    pub fn measurements(&self) -> Vec<Measurement> {
        measurements(&params(self.args, &self.config), &self.phases, self.last.as_ref())
    }
}

fn config(args: &DirtyLogArgs) -> anyhow::Result<Config> {
    let ept = args.tables.format == GuestFormat::Ept && args.tables.bbm.is_none();
    if !args.way.is_empty() || !ept || args.quick {
        return Err(bad_input(
            "--way, --format, --bbm and --quick are of --target engine; a guest under KVM takes \
             --manual-protect, --initially-set and a smaller --memory",
        ));
    }
    let mode = match (args.manual_protect.is_on(), args.initially_set.is_on()) {
        (false, false) => Mode::Legacy,
        (true, false) => Mode::Manual,
        (true, true) => Mode::ManualInitiallySet,
        (false, true) => {
            return Err(bad_input(
                "--initially-set on needs --manual-protect on: KVM has no such log otherwise",
            ));
        }
    };
    let page_size = Backing::Small.page_size();
    let backing = match args.backing {
        KvmBacking::Block1g => {
            return Err(bad_input(
                "--backing 1g is of --target engine; KVM has 1g from hugetlb: --backing hugetlb-1g",
            ));
        }
        KvmBacking::Small => Backing::Small,
        KvmBacking::Transparent2m => Backing::Thp,
        KvmBacking::Hugetlb2m => Backing::Hugetlb2M,
        KvmBacking::Hugetlb1g => Backing::Hugetlb1G,
    };
    let share = Size(backing.page_size() * u64::from(args.vcpus));
    if !args.memory.bytes().is_multiple_of(share.bytes()) {
        return Err(bad_input(format!(
            "--memory {} does not give each of {} vCPUs whole pages of {}; take a multiple of {share}",
            args.memory, args.vcpus, args.backing
        )));
    }
    Ok(Config {
        memory: args.memory.bytes(),
        vcpus: args.vcpus as usize,
        iterations: args.iterations,
        backing,
        mode,
        clear_chunk: args.clear_chunk.map(|chunk| chunk.pages(page_size)).transpose()?,
        write_share: args.write_percent,
    })
}

fn params(args: &DirtyLogArgs, config: &Config) -> Map<String, Value> {
    let pairs = [
        ("memory", json!(config.memory)),
        ("vcpus", json!(config.vcpus)),
        ("backing", json!(args.backing.to_string())),
        ("manual_protect", json!(args.manual_protect.is_on())),
        ("initially_set", json!(args.initially_set.is_on())),
        ("clear_chunk", json!(config.clear_chunk)),
        ("write_percent", json!(config.write_share)),
        ("iterations", json!(config.iterations)),
        ("runs", json!(args.runs)),
    ];
    pairs.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
}

/// What to say if the kernel gave fewer huge pages than were asked for.
fn shortfall(args: &DirtyLogArgs, report: &Report) -> Option<String> {
    let asked = report.config.memory;
    let found = report.transparent_huge_bytes?;
    (report.config.backing == Backing::Thp && found < asked).then(|| {
        format!(
            "dirty-log on {}: the kernel found huge pages for {} of {} only, the rest is on 4k",
            args.backing,
            Size(found),
            Size(asked)
        )
    })
}

/// What to say if pages stayed in the log that the last round cleared, nobody writing.
fn left_behind(name: &str, report: &Report) -> Option<String> {
    (report.left_in_log > 0).then(|| {
        format!(
            "{name}: {} of {} pages are in the log again after it was cleared, and nobody wrote",
            report.left_in_log, report.pages
        )
    })
}

fn measurements(
    params: &Map<String, Value>,
    phases: &[PhaseRun],
    report: Option<&Report>,
) -> Vec<Measurement> {
    use Phase::{Clear, Dirty, Disable, Enable, Get, Populate};
    let mut results = Vec::new();
    for phase in [Populate, Enable, Dirty, Get, Clear, Disable] {
        let runs: Vec<&PhaseRun> = phases.iter().filter(|run| run.phase == phase).collect();
        let Some(first) = runs.first() else { continue };
        let name = phase.name();
        let seconds = runs.iter().map(|run| run.seconds).collect();
        let mut whole = measurement(name, params.clone(), seconds);
        whole.counts = merge(runs.iter().map(|run| counts(run)));
        match (phase, report) {
            (Populate, Some(Report { transparent_huge_bytes: Some(bytes), .. })) => {
                whole.counts.insert("transparent_huge_bytes".to_owned(), *bytes);
            }
            (Get, Some(report)) => {
                whole.counts.insert("left_after_last_round".to_owned(), report.left_in_log);
            }
            _ => {}
        }
        results.push(whole);
        if runs.iter().any(|run| run.calls > 1) {
            let longest = runs.iter().map(|run| run.longest_call_seconds).collect();
            results.push(measurement(&format!("{name}-longest-call"), params.clone(), longest));
        }
        for vcpu in 0..first.vcpus.len() {
            let parts: Vec<_> = runs.iter().filter_map(|run| run.vcpus.get(vcpu)).collect();
            let mut params = params.clone();
            params.insert("vcpu".to_owned(), vcpu.into());
            let seconds = parts.iter().map(|part| part.seconds).collect();
            let mut part = measurement(name, params, seconds);
            part.counts = merge(parts.iter().map(|part| changes(&part.counters)));
            // Rounds of a share differ by a page at most; whoever divides wants one number.
            let pages = parts.iter().map(|part| part.pages).sum::<u64>();
            part.counts.insert("pages".to_owned(), pages / (parts.len() as u64).max(1));
            results.push(part);
        }
    }
    results
}

fn measurement(variant: &str, params: Map<String, Value>, samples: Vec<f64>) -> Measurement {
    Measurement {
        scenario: "dirty-log".to_owned(),
        target: "kvm".to_owned(),
        variant: variant.to_owned(),
        params,
        unit: "s".to_owned(),
        samples,
        counts: BTreeMap::new(),
    }
}

/// The counts of one occurrence of a phase.
fn counts(run: &PhaseRun) -> BTreeMap<String, u64> {
    let mut counts = changes(&run.vm);
    let mut add = |name: &str, count| {
        counts.insert(name.to_owned(), count);
    };
    if run.calls != 0 {
        add("ioctls", run.calls);
    }
    if let Some(log) = run.log {
        add("pages_in_log", log.in_log);
        add("pages_written", log.written);
        add("pages_in_excess", log.excess);
    }
    if !run.vcpus.is_empty() {
        add("pages", run.vcpus.iter().map(|vcpu| vcpu.pages).sum());
    }
    if let Some(mapped) = run.mapped {
        add("mapped_4k", mapped.size_4k);
        add("mapped_2m", mapped.size_2m);
        add("mapped_1g", mapped.size_1g);
    }
    counts
}

/// Changes of KVM's counters as counts, without those of mapped pages, which are given whole.
fn changes(changes: &BTreeMap<String, i64>) -> BTreeMap<String, u64> {
    let changes = changes.iter().filter(|(name, _)| !name.starts_with("pages_"));
    let count = |(name, change): (&String, &i64)| {
        let name = if *change < 0 { format!("{name}_less") } else { name.clone() };
        (name, change.unsigned_abs())
    };
    changes.map(count).collect()
}

/// The counts of several samples: one number where they agree, first, least and most where not.
pub(super) fn merge(samples: impl Iterator<Item = BTreeMap<String, u64>>) -> BTreeMap<String, u64> {
    let samples: Vec<_> = samples.collect();
    let names: BTreeSet<&String> = samples.iter().flat_map(BTreeMap::keys).collect();
    let mut merged = BTreeMap::new();
    for name in names {
        // KVM's counters are given where they changed.
        let counts = || samples.iter().map(|sample| sample.get(name).copied().unwrap_or(0));
        let (Some(first), Some(min), Some(max)) = (counts().next(), counts().min(), counts().max())
        else {
            continue;
        };
        if min == max {
            merged.insert(name.clone(), first);
        } else {
            let three = [("first", first), ("min", min), ("max", max)];
            merged.extend(three.map(|(which, count)| (format!("{name}_{which}"), count)));
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Bench, Cli, Command};
    use crate::failure::Failure;
    use clap::Parser;
    use slat_kvm::bitmap::Tally;
    use slat_kvm::dirty_log::{MappedPages, VcpuRun};

    fn args(options: &[&str]) -> DirtyLogArgs {
        let line = ["slat", "bench", "dirty-log"].iter().chain(options);
        match Cli::try_parse_from(line).expect("a command line that is right").command {
            Some(Command::Bench { bench: Some(Bench::DirtyLog(args)), .. }) => args,
            other => panic!("{other:?}"),
        }
    }

    fn refusal(options: &[&str]) -> String {
        let error = config(&args(options)).expect_err("refused");
        assert!(matches!(error.downcast_ref(), Some(Failure::BadInput(_))), "{error}");
        error.to_string()
    }

    #[test]
    fn each_mode_has_its_options() {
        let mode = |options: &[&str]| config(&args(options)).unwrap().mode;
        assert_eq!(mode(&["--manual-protect", "off"]), Mode::Legacy);
        assert_eq!(mode(&[]), Mode::Manual);
        assert_eq!(mode(&["--initially-set", "on"]), Mode::ManualInitiallySet);
    }

    #[test]
    fn options_that_contradict_each_other_are_refused() {
        let text = refusal(&["--manual-protect", "off", "--initially-set", "on"]);
        assert!(text.contains("--manual-protect on"), "{text}");
        assert!(refusal(&["--clear-chunk", "63"]).contains("multiple of 64"));
        let text = refusal(&["--memory", "1g", "--backing", "hugetlb-1g"]);
        assert!(text.contains("--memory 1g") && text.contains("multiple of 2g"), "{text}");
    }

    #[test]
    fn a_chunk_in_bytes_is_one_in_pages() {
        let chunk = |text| config(&args(&["--clear-chunk", text])).unwrap().clear_chunk;
        assert_eq!(chunk("128"), Some(128));
        assert_eq!(chunk("2m"), Some((2 << 20) / Backing::Small.page_size()));
    }

    fn dirty(round: u32, seconds: f64, flushes: i64) -> PhaseRun {
        let counters = [("exits".to_owned(), 7)].into();
        PhaseRun {
            phase: Phase::Dirty,
            iteration: Some(round),
            seconds,
            calls: 0,
            longest_call_seconds: 0.0,
            vcpus: vec![VcpuRun { pages: 64, seconds, counters }; 2],
            log: None,
            vm: [("remote_tlb_flush".to_owned(), flushes), ("pages_2m".to_owned(), -1)].into(),
            mapped: Some(MappedPages { size_4k: 129, size_2m: 0, size_1g: 0 }),
        }
    }

    #[test]
    fn a_phase_keeps_every_sample_and_each_vcpu_has_its_own() {
        let results = measurements(&Map::new(), &[dirty(1, 0.5, 32), dirty(2, 0.25, 0)], None);
        assert_eq!(results.len(), 3);
        assert!(results.iter().all(|m| m.variant == "dirty" && m.samples == [0.5, 0.25]));
        let whole = &results[0].counts;
        let expected = [
            ("mapped_1g", 0),
            ("mapped_2m", 0),
            ("mapped_4k", 129),
            ("pages", 128),
            ("remote_tlb_flush_first", 32),
            ("remote_tlb_flush_max", 32),
            ("remote_tlb_flush_min", 0),
        ];
        assert_eq!(*whole, expected.map(|(name, count)| (name.to_owned(), count)).into());
        assert_eq!(results[2].params["vcpu"], 1);
        assert_eq!(results[2].counts["pages"], 64);
        assert_eq!(results[2].counts["exits"], 7);
    }

    #[test]
    fn a_clear_in_pieces_tells_its_longest_call() {
        let clear = PhaseRun {
            phase: Phase::Clear,
            calls: 8,
            longest_call_seconds: 0.125,
            vcpus: Vec::new(),
            ..dirty(1, 0.5, 1)
        };
        let results = measurements(&Map::new(), &[clear], None);
        assert_eq!(results.len(), 2);
        assert_eq!(results[0].counts["ioctls"], 8);
        assert_eq!(results[1].variant, "clear-longest-call");
        assert_eq!(results[1].samples, [0.125]);
    }

    #[test]
    fn a_log_says_what_was_in_it() {
        let get = PhaseRun {
            phase: Phase::Get,
            log: Some(Tally { in_log: 9, written: 8, excess: 1 }),
            vcpus: Vec::new(),
            ..dirty(1, 0.5, 1)
        };
        let results = measurements(&Map::new(), &[get], None);
        assert_eq!(results[0].counts["pages_in_log"], 9);
        assert_eq!(results[0].counts["pages_in_excess"], 1);
    }

    #[test]
    fn a_guest_on_this_host_gives_every_phase() {
        if let Err(reason) = slat_kvm::probe() {
            eprintln!("skipped: {reason}");
            let required = std::env::var("SLAT_REQUIRE_KVM").is_ok_and(|value| value == "1");
            assert!(!required, "SLAT_REQUIRE_KVM=1, and no guest can run: {reason}");
            return;
        }
        let small =
            args(&["--memory", "8m", "--clear-chunk", "64", "--iterations", "2", "--runs", "2"]);
        let results = run(&small, &mut Session::quiet()).unwrap();
        let samples = |variant: &str| {
            let of_all = |m: &&Measurement| m.variant == variant && !m.params.contains_key("vcpu");
            results.iter().find(of_all).map(|m| m.samples.len())
        };
        for (variant, count) in [
            ("populate", 2),
            ("enable", 2),
            ("dirty", 4),
            ("get", 4),
            ("clear", 4),
            ("clear-longest-call", 4),
            ("disable", 2),
        ] {
            assert_eq!(samples(variant), Some(count), "{variant}");
        }
    }

    #[test]
    fn pages_that_a_clear_left_behind_are_told() {
        let report = |left_in_log| Report {
            config: Config::default(),
            pages: 9,
            phases: Vec::new(),
            transparent_huge_bytes: None,
            left_in_log,
            stamps_checked: 9,
        };
        assert_eq!(left_behind("guest", &report(0)), None);
        assert!(left_behind("guest", &report(2)).unwrap().starts_with("guest: 2 of 9 pages"));
    }

    #[test]
    fn a_run_that_only_warms_up_gives_no_samples_when_stopped() {
        if slat_kvm::probe().is_err() {
            return;
        }
        let session = Session::quiet();
        let args = args(&["--memory", "64m", "--iterations", "1000"]);
        let mut guest = Guest::new(&args).unwrap();
        let stop = session.stop_flag();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(500));
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            guest.run(&session).unwrap();
        });
        assert_eq!(guest.measurements(), []);
    }

    #[test]
    fn a_session_that_was_stopped_gives_what_it_has() {
        if slat_kvm::probe().is_err() {
            return;
        }
        let mut session = Session::quiet();
        session.stop();
        assert_eq!(run(&args(&["--memory", "8m"]), &mut session).unwrap(), []);
    }
}
