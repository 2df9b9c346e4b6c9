//! A guest with more memory than it may have at a time: which pages leave, how often they have to
//! come back, and the cost of the choice.
//!
//! vCPUs use pages in an order that is computed before they run, the same for all policies. Each
//! page has a stamp, which each read checks. A thread gives up pages while few are free; where none
//! is free, a vCPU does so in its fault. The locked policies hold a lock for each look at accessed
//! bits and for each unmap, and faults hold it shared, as Linux does.

pub mod idle;
mod pattern;
mod sample;
pub mod settings;
mod swap;

use crate::guest::tables::{Figures, MEANING};
use crate::guest::turns::{Counts, Recorder, counts, ratios, take_turns};
use crate::on_machine;
use crate::threads::cpus;
use anyhow::Context;
use clap::ValueEnum;
use pattern::Use;
use sample::{Sample, sample};
use serde_json::{Map, Value, json};
use settings::{AccessPattern, EXAMPLES, ReclaimArgs, ReclaimPolicy, SwapPlace};
use slat::Format;
use slat_lab::failure::bad_input;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_reclaim::bounds;
use slat_sim::arch::Arch;
use slat_sim::fast::FastMachine;
use std::sync::atomic::AtomicBool;

/// Workload and memory of the guests.
pub struct Case {
    pattern: AccessPattern,
    /// Size of a page, in bytes.
    page: u64,
    /// Number of the guest's pages (`pages`), and of those that it may have at a time (`memory`).
    pages: u32,
    memory: u32,
    vcpus: u16,
    /// The uses of each vCPU.
    uses: Vec<Vec<Use>>,
    /// Refaults by Belady's rule; `None` for several vCPUs, whose order is not known.
    fewest: Option<u64>,
    /// Refaults if every use is seen and the page used longest ago is given up.
    lru: Option<u64>,
    /// Refaults of a policy that knows how often each page is used, and not when.
    by_frequency: u64,
    /// Lower bound of refaults for policies without foresight, if uses are independent.
    no_foresight: Option<f64>,
    seed: u64,
    window: u32,
    fresh: bool,
    huge: bool,
    batch: u32,
    /// Shortest time that a page stays, in nanoseconds.
    residency: u64,
    /// Set when the timed part begins.
    started: AtomicBool,
}

impl Case {
    fn machine<A: Arch>(&self, arch: A) -> anyhow::Result<FastMachine<A>> {
        let table_bytes = u64::from(self.pages) * 64 + (64 << 20) + (self.page << 8);
        let bytes = (u64::from(self.memory) * self.page).next_multiple_of(2 << 20);
        let machine = FastMachine::new(arch, self.vcpus.into(), bytes, table_bytes)
            .context("the host does not map the guest's memory; take a smaller --memory")?;
        // The machine may refuse huge pages and population; then the run only takes longer.
        let _ = machine.set_huge_pages(true);
        let _ = machine.populate(machine.memory_base(), bytes);
        Ok(machine)
    }
}

/// Costs of each policy for the guest.
const GUEST: Figures = Figures {
    of: "guest-reclaim",
    title: "Guests with more memory than there is",
    without: &["reclaim a page", "thread", "lock", "walk", "check", "around", "unmap", "write"],
    counts: &[("time", "refaults", "refaults")],
    note: "After all pages were written once. Each policy gives up pages of a guest that uses \
           them in the same order; every read was checked. locked and clock hold a lock for each \
           look at accessed bits and each unmapping, which faults take for reading. p50, p99: of \
           a fault, swap included.",
    ..Figures::NONE
};

/// Costs of each policy for the thread that reclaims.
const THREAD: Figures = Figures {
    title: "What reclaim took",
    without: &["time", "accesses", "p50", "p99"],
    counts: &[
        ("time", "given_up_clean", "clean"),
        ("time", "kept", "kept"),
        ("time", "rescued", "rescued"),
    ],
    note: "reclaim a page: all of reclaim, by the pages given up; lock to write: parts of that \
           (lock: waiting for it, which is in the parts that follow as well). clean: swap had a \
           copy already. kept: next to go, and had been used. rescued: used between that look and \
           the unmapping.",
    ..GUEST
};

/// The scenario of reclaim.
pub struct Reclaim;

impl Scenario for Reclaim {
    const NAME: &'static str = "reclaim";
    const ABOUT: &'static str =
        "Run a guest with more memory than there is: what leaves, and what that costs";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = Renderer {
        reads: |m| GUEST.has(m),
        tables: |results| [GUEST, THREAD].iter().filter_map(|of| of.table(results)).collect(),
        meaning: MEANING,
        ..Renderer::NONE
    };
    type Settings = ReclaimArgs;

    fn run(args: &ReclaimArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let memory = args.memory.unwrap_or(Size(if args.quick { 8 << 20 } else { 64 << 20 }));
        let swap = &args.swap;
        let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 5 });
        let cases = cases(args, memory, session)?;
        let policies = match &args.policy[..] {
            [] => ReclaimPolicy::value_variants().to_vec(),
            given => given.to_vec(),
        };
        let cpus = cpus()?;
        session.start("reclaim", cases.len() as u64 * (u64::from(rounds) + 1));
        let mut results = Vec::new();
        for case in &cases {
            on_machine!(&args.tables, |format, arch| {
                let machine = case.machine(arch)?;
                let mut params = params(case, swap);
                params.insert("format".to_owned(), json!(args.tables.format.to_string()));
                let bench = Bench { case, policies: &policies, swap, cpus: &cpus, params };
                results.extend(bench.measure(format, &machine, rounds, session)?);
            });
            if session.interrupted() {
                break;
            }
        }
        session.finish();
        Ok(results)
    }
}

fn cases(args: &ReclaimArgs, memory: Size, session: &Session) -> anyhow::Result<Vec<Case>> {
    use AccessPattern::{Phase, Scan, Trace, Uniform, Zipf};
    if !memory.bytes().is_multiple_of(2 << 20) || memory.bytes() == 0 {
        return Err(bad_input(format!("--memory {memory} is no multiple of 2m; take one")));
    }
    let largest = args.guest.iter().copied().fold(1.0, f64::max);
    let needed = memory.bytes() as f64 * (1.0 + largest * 1.2);
    if needed > session.memory_available() as f64 * 0.8 {
        return Err(bad_input(format!(
            "a guest of {largest} times {memory}, its swap and its tables take {} MiB, and this \
             machine has {} MiB free; take a smaller --memory",
            needed as u64 >> 20,
            session.memory_available() >> 20
        )));
    }
    let patterns = match &args.pattern[..] {
        [] if args.trace.is_some() => vec![Trace],
        [] => vec![Uniform, Zipf, Scan, Phase, Trace],
        given => given.to_vec(),
    };
    let page = args.tables.format.leaves()[0].bytes();
    let mut cases = Vec::new();
    for &pattern in &patterns {
        let recorded = match pattern {
            Trace => Some(pattern::trace(args.trace.as_deref())?),
            _ => None,
        };
        for &factor in &args.guest {
            // A trace decides the number of pages, so the amount of memory is adapted.
            let (pages, memory) = match &recorded {
                Some((_, pages)) => (*pages, (f64::from(*pages) / factor) as u32),
                None => {
                    let memory = (memory.bytes() / page) as u32;
                    ((f64::from(memory) * factor) as u32, memory)
                }
            };
            if memory < 64 * u32::from(args.vcpus) {
                return Err(bad_input(format!(
                    "{memory} pages of memory for {} vCPUs; each needs 64",
                    args.vcpus
                )));
            }
            let times = args.accesses.unwrap_or(match pattern {
                _ if args.quick => 4,
                // The recorded program ran for a moment only.
                Trace => 400,
                _ => 20,
            });
            let accesses = u64::from(times) * u64::from(pages);
            let uses: Vec<Vec<Use>> = match &recorded {
                // The program runs repeatedly.
                Some((uses, _)) => {
                    let again = uses.iter().copied().cycle().take(accesses as usize);
                    vec![again.collect(); args.vcpus.into()]
                }
                None => (0..args.vcpus)
                    .map(|id| {
                        pattern::uses(pattern, args.seed, pages, memory, accesses, id, args.vcpus)
                    })
                    .collect(),
            };
            let fewest = (args.vcpus == 1).then(|| {
                bounds::fewest_refaults(pages, memory, uses[0].iter().map(|one| one.page()))
            });
            let lru = (args.vcpus == 1).then(|| {
                bounds::refaults_of_lru(pages, memory, uses[0].iter().map(|one| one.page()))
            });
            let all = uses.iter().flatten().map(|one| one.page());
            let by_frequency = bounds::refaults_by_frequency(pages, memory, all);
            let no_foresight = (args.vcpus == 1 && matches!(pattern, Uniform | Zipf)).then(|| {
                let uses = uses[0].iter().map(|one| one.page());
                bounds::refaults_without_foresight(pages, memory, uses)
            });
            cases.push(Case {
                pattern,
                page,
                pages,
                memory,
                vcpus: args.vcpus,
                uses,
                fewest,
                lru,
                by_frequency,
                no_foresight,
                seed: args.seed,
                window: args.window,
                fresh: args.fresh,
                huge: args.huge,
                batch: args.batch.min(memory / 4),
                residency: args.residency.as_nanos() as u64,
                started: AtomicBool::new(false),
            });
        }
    }
    Ok(cases)
}

fn params(case: &Case, swap: &SwapPlace) -> Map<String, Value> {
    [
        ("pattern", json!(case.pattern.to_string())),
        ("memory", json!(u64::from(case.memory) * case.page)),
        ("guest", json!(u64::from(case.pages) * case.page)),
        ("vcpus", json!(case.vcpus)),
        ("seed", json!(case.seed)),
        ("fresh", json!(case.fresh)),
        ("huge", json!(case.huge)),
        ("swap", json!(swap.to_string())),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into_iter()
    .chain((case.seed != 0).then(|| ("seed".to_owned(), json!(case.seed))))
    .collect()
}

struct Bench<'b> {
    case: &'b Case,
    policies: &'b [ReclaimPolicy],
    swap: &'b SwapPlace,
    cpus: &'b [usize],
    params: Map<String, Value>,
}

/// A ratio: its name, the policy, the policy that it is compared with, the figure, and the most
/// that is allowed with a pattern.
type Ratio = (
    &'static str,
    ReclaimPolicy,
    ReclaimPolicy,
    fn(&Sample) -> f64,
    fn(AccessPattern) -> Option<f64>,
);

const RATIOS: [Ratio; 13] = {
    use AccessPattern::{Scan, Zipf};
    use ReclaimPolicy::{
        Clock, FreeBitmap, FreeExact, FreePage, FreeRecent, LockedBitmap, LockedPage,
    };
    [
        ("p99 of a fault", FreeBitmap, LockedPage, Sample::p99, |_| Some(0.5)),
        ("p99 of a fault", FreeBitmap, LockedBitmap, Sample::p99, |_| None),
        ("reclaim per page given up", FreeBitmap, LockedPage, Sample::per_page, |_| Some(0.7)),
        ("reclaim per page given up", FreePage, LockedPage, Sample::per_page, |_| None),
        ("reclaim per page given up", FreeBitmap, FreePage, Sample::per_page, |_| None),
        ("reclaim per page given up", FreeExact, FreeBitmap, Sample::per_page, |_| None),
        ("time of the guest", FreeBitmap, LockedPage, Sample::seconds, |_| Some(1.03)),
        ("time of the guest", FreeBitmap, LockedBitmap, Sample::seconds, |_| Some(1.03)),
        ("time of the guest", FreeBitmap, Clock, Sample::seconds, |_| Some(1.03)),
        ("refaults", FreeBitmap, Clock, Sample::refaults, |it| {
            matches!(it, Zipf | Scan).then_some(1.03)
        }),
        ("refaults", FreeBitmap, FreeRecent, Sample::refaults, |_| Some(1.02)),
        ("reclaim per page given up", FreeBitmap, FreeRecent, Sample::per_page, |_| None),
        ("time of the guest", FreeBitmap, FreeRecent, Sample::seconds, |_| None),
    ]
};

impl Sample {
    fn p99(&self) -> f64 {
        self.faults.quantile(0.99) as f64
    }

    const fn seconds(&self) -> f64 {
        self.seconds
    }

    const fn refaults(&self) -> f64 {
        self.refaults as f64
    }

    /// Returns the nanoseconds of reclaim for each page that was given up.
    fn per_page(&self) -> f64 {
        self.stats.reclaim.ticks as f64 / self.stats.evicted.max(1) as f64
    }

    /// Returns the share of reclaim that `ticks` are, in percent.
    fn share(&self, ticks: u64) -> f64 {
        100.0 * ticks as f64 / self.stats.reclaim.ticks.max(1) as f64
    }

    fn counts(&self) -> Counts {
        let stats = &self.stats;
        counts([
            ("accesses", self.accesses),
            ("faults", self.faults.count()),
            ("refaults", self.refaults),
            ("refaults_soon", stats.refaults_within_set),
            ("given_up", stats.evicted),
            ("given_up_clean", stats.clean),
            ("kept", stats.kept),
            ("rescued", stats.rescued),
            ("walk_calls", stats.walk.count),
            ("check_calls", stats.check.count),
            ("around_calls", stats.around.count),
        ])
    }
}

impl Bench<'_> {
    fn measure<F: Format, A: Arch>(
        &self,
        format: F,
        machine: &FastMachine<A>,
        rounds: u32,
        session: &Session,
    ) -> anyhow::Result<Vec<Measurement>> {
        let samples = take_turns(session, rounds, self.policies.len(), |place, _| {
            let policy = self.policies[place];
            session.say(&format!("{}, {policy}", self.case.pattern));
            sample(format, machine, self.case, policy, self.swap, self.cpus)
                .with_context(|| format!("{}, {policy}", self.case.pattern))
        })?;
        if samples[0].is_empty() {
            return Ok(Vec::new());
        }
        let recorder = Recorder { scenario: "guest-reclaim", params: self.params.clone() };
        let mut results = Vec::new();
        for (policy, samples) in self.policies.iter().zip(&samples) {
            self.figures(&recorder, *policy, samples, &mut results);
        }
        self.asked(&recorder, &samples, &mut results);
        Ok(results)
    }

    fn figures(
        &self,
        recorder: &Recorder,
        policy: ReclaimPolicy,
        samples: &[Sample],
        results: &mut Vec<Measurement>,
    ) {
        let mut add = |figure: &str, unit: &str, of: &dyn Fn(&Sample) -> f64| {
            let values = samples.iter().map(of).collect();
            let counts = samples.iter().map(Sample::counts);
            let name = policy.to_string();
            results.push(recorder.figure(&name, "engine", figure, unit, values, counts));
        };
        add("time", "s", &|s| s.seconds);
        add("accesses", "M/s", &|s| s.accesses as f64 / s.seconds / 1e6);
        add("p50", "s", &|s| s.faults.quantile(0.5) as f64 / 1e9);
        add("p99", "s", &|s| s.faults.quantile(0.99) as f64 / 1e9);
        add("reclaim a page", "s", &|s| s.per_page() / 1e9);
        add("thread", "CPU s", &|s| s.cpu);
        add("lock", "%", &|s| s.share(s.waited));
        add("walk", "%", &|s| s.share(s.stats.walk.ticks));
        add("check", "%", &|s| s.share(s.stats.check.ticks));
        add("around", "%", &|s| s.share(s.stats.around.ticks));
        add("unmap", "%", &|s| s.share(s.stats.unmap.ticks));
        add("write", "%", &|s| s.share(s.stats.write.ticks));
    }

    fn asked(&self, recorder: &Recorder, samples: &[Vec<Sample>], results: &mut Vec<Measurement>) {
        let of = |policy: ReclaimPolicy| {
            let place = self.policies.iter().position(|&one| one == policy)?;
            Some(&samples[place])
        };
        let name = |what: &str| format!("{}: {what}", self.case.pattern);
        for (what, ours, theirs, figure, at_most) in RATIOS {
            let (Some(ours_of), Some(theirs_of)) = (of(ours), of(theirs)) else { continue };
            let values = ratios(ours_of.iter().map(figure), theirs_of.iter().map(figure));
            results.push(recorder.ratio(
                name(what),
                &ours.to_string(),
                &theirs.to_string(),
                values,
                at_most(self.case.pattern),
            ));
        }
        let zipf = self.case.pattern == AccessPattern::Zipf;
        let by_frequency = (zipf && self.case.by_frequency != 0).then_some(self.case.by_frequency);
        let fewest = self.case.fewest.filter(|&fewest| fewest != 0);
        let lru = self.case.lru.filter(|&lru| lru != 0);
        let bounds = [
            ("belady", fewest, Some(2.4)),
            ("by frequency", by_frequency, None),
            ("lru", lru, None),
        ];
        let bounds =
            bounds.map(|(bound, best, limit)| (bound, best.map(|best| best as f64), None, limit));
        let no_foresight = self.case.no_foresight.filter(|&best| best != 0.0);
        for (bound, best, beside, limit) in
            bounds.into_iter().chain([("no foresight", no_foresight, fewest, Some(1.1))])
        {
            let Some(best) = best else { continue };
            if let Some(fewest) = beside {
                // The figure that the others are compared with, in the same unit.
                let values = vec![best / fewest as f64];
                results.push(recorder.ratio(name("refaults"), bound, "belady", values, None));
            }
            for policy in self.policies {
                let Some(ours) = of(*policy) else { continue };
                let values = ours.iter().map(|s| s.refaults as f64 / best).collect();
                let name = name("refaults");
                let at_most = limit.filter(|_| zipf && *policy == ReclaimPolicy::FreeBitmap);
                results.push(recorder.ratio(name, &policy.to_string(), bound, values, at_most));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{TableFormat, TablesArgs};

    fn args(pattern: AccessPattern, format: TableFormat, vcpus: u16) -> ReclaimArgs {
        ReclaimArgs {
            tables: TablesArgs::of(format),
            memory: Some(Size(2 << 20)),
            pattern: vec![pattern],
            vcpus,
            accesses: Some(3),
            batch: 32,
            rounds: Some(1),
            ..ReclaimArgs::of(true)
        }
    }

    /// The guest checks every read; this test only checks that it finishes, and that it needed
    /// swap.
    #[test]
    fn every_policy_brings_a_guest_through() {
        use AccessPattern::{Fill, Scan, Trace, Zipf};
        use ReclaimPolicy::{FreeBitmap, LockedPage};
        let all = ReclaimPolicy::value_variants();
        for (pattern, format, vcpus, policies) in [
            (Zipf, TableFormat::Arm64K4, 1, all),
            (Scan, TableFormat::Arm64K4, 2, &[LockedPage, FreeBitmap]),
            (Fill, TableFormat::Ept, 2, &[FreeBitmap]),
            (Trace, TableFormat::Arm64K4, 1, &[FreeBitmap]),
        ] {
            let policy = policies.to_vec();
            let args = ReclaimArgs { policy, ..args(pattern, format, vcpus) };
            let results = Reclaim::run(&args, &mut Session::quiet()).unwrap();
            for policy in policies {
                let name = policy.to_string();
                let time = |m: &&Measurement| m.variant == name && m.params["figure"] == "time";
                let found = results.iter().find(time).unwrap();
                assert!(found.counts["refaults"] > 0, "{pattern} {policy}: {:?}", found.counts);
            }
            let belady =
                results.iter().filter(|m| m.params.get("against") == Some(&json!("belady")));
            for m in belady {
                assert!(m.samples[0] >= 1.0, "{pattern}: nothing needs fewer, {:?}", m.samples);
            }
        }
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_what_can() {
        let good = || args(AccessPattern::Zipf, TableFormat::Ept, 1);
        let refused =
            |args: ReclaimArgs| Reclaim::run(&args, &mut Session::quiet()).unwrap_err().to_string();
        let odd = ReclaimArgs { memory: Some(Size(3 << 20)), ..good() };
        assert!(refused(odd).contains("multiple of 2m"));
        let huge = ReclaimArgs { memory: Some(Size(1 << 50)), ..good() };
        assert!(refused(huge).contains("smaller --memory"));
        let traceless =
            ReclaimArgs { trace: Some("/nonexistent".into()), pattern: vec![], ..good() };
        assert!(refused(traceless).contains("cannot read the trace"));
        let crowded = ReclaimArgs { vcpus: 64, ..good() };
        assert!(refused(crowded).contains("each needs 64"));
        let nowhere = ReclaimArgs { swap: SwapPlace::Directory("/nonexistent".into()), ..good() };
        let error = Reclaim::run(&nowhere, &mut Session::quiet()).unwrap_err();
        assert!(format!("{error:#}").contains("another --swap"), "{error:#}");
    }
}
