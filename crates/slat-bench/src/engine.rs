//! Operations of the engine, as a hypervisor's fault path calls them, compared with the machine's
//! limits.
//!
//! A *contest* compares a few entrants: an operation of the engine, and a plain loop over the same
//! entries or another crate's operation. They take turns on the same warm memory, each on newly
//! built tables, and a different entrant begins each round. Each round gives the ratios that the
//! contest asks for. The thread that enters the tables has registered once. For each call it
//! enters, does the operation, reads the counts and completes the owed invalidations.

mod contention;
mod entering;
mod faults;
mod inactive;
mod leaves;
mod lookup;
mod split;
mod tables;

use crate::arena::Arena;
use crate::contest::Contest;
use crate::fixture::{STEP, whole_blocks};
use crate::format::{Granule, TableFormat};
use crate::peers;
use crate::settings::engine::{EXAMPLES, EngineArgs, Part};
use crate::settings::peers::TablesTarget;
use crate::threads::{Pin, cpus};
use slat::BreakBeforeMake;
use slat::format::ept::Ept1G;
use slat_lab::failure::bad_input;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;

/// The scenario of the engine's operations.
pub struct Engine;

impl Scenario for Engine {
    const NAME: &'static str = "engine";
    const ABOUT: &'static str =
        "Hold the engine's operations against the machine's limits (no guest memory needed)";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = tables::RENDERER;
    type Settings = EngineArgs;

    fn run(args: &EngineArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        args.linux.check()?;
        if args.linux.target == TablesTarget::LinuxSource {
            return peers::engine(args, session);
        }
        if args.granule != Granule::Size4k {
            return Err(bad_input(format!(
                "--granule {0}: the limits are those of 4k tables; take --format arm64-{0}, or \
             --target linux-source",
                args.granule
            )));
        }
        if !args.format.is_empty() {
            return peers::formats::run(args, session);
        }
        let memory = whole_blocks(args.memory())?;
        let sizes = Sizes::of(memory);
        let bytes = table_bytes(memory);
        let available = session.memory_available();
        if bytes > available / 10 * 9 {
            return Err(bad_input(format!(
                "the tables of {memory} take {} MiB, and this machine has {} MiB free; take a \
                 smaller --memory",
                bytes >> 20,
                available >> 20
            )));
        }
        let mut arena = Arena::new(bytes as usize, 4096, BreakBeforeMake::Always)?;
        let cpus = cpus()?;
        let contests = contests(args, &sizes, &cpus, session)?;
        let _pin = Pin::to(cpus[0])?;
        // An explicit number of rounds takes precedence over the contest's limits.
        let rounds =
            |contest: &Contest| args.rounds.unwrap_or_else(|| contest.rounds(args.rounds()));
        session.start("engine", contests.iter().map(|c| u64::from(rounds(c)) + 1).sum());
        let mut results = Vec::new();
        for mut contest in contests {
            session.say(contest.title());
            let rounds = rounds(&contest);
            match contest.hold(&mut arena, session, rounds)? {
                Some(measured) => results.extend(measured),
                None => break,
            }
        }
        session.finish();
        drop(arena);
        // These parts are measured by the comparison with others, here for the engine alone.
        let parts = [Part::Unmap, Part::Clear, Part::Relax, Part::Flush];
        let wanted: Vec<Part> = parts.into_iter().filter(|part| args.wants(*part)).collect();
        if !wanted.is_empty() && !session.interrupted() {
            results.extend(peers::alone(args, &wanted, session)?);
        }
        Ok(results)
    }
}

/// The sizes of guest memory that are measured.
struct Sizes {
    /// An eighth of the guest's memory.
    small: u64,
    /// All of the guest's memory.
    large: u64,
}

impl Sizes {
    fn of(memory: Size) -> Self {
        let small = (memory.bytes() / 8).next_multiple_of(STEP);
        Self { small, large: memory.bytes() }
    }

    /// Returns both sizes, without duplicates.
    fn both(&self) -> Vec<u64> {
        let mut both = vec![self.small, self.large];
        both.dedup();
        both
    }
}

/// Returns the bytes of tables that map the memory by pages, with room for full caches.
fn table_bytes(memory: Size) -> u64 {
    let memory = memory.bytes();
    (memory >> 9) + (memory >> 18) + (8 << 20)
}

fn contests<'a>(
    args: &EngineArgs,
    sizes: &Sizes,
    cpus: &'a [usize],
    session: &mut Session,
) -> anyhow::Result<Vec<Contest<'a>>> {
    let mut contests = Vec::new();
    let wants = |part| args.wants(part);
    for memory in sizes.both() {
        if wants(Part::Split) {
            contests.extend(split::contests(memory)?);
        }
        if wants(Part::Protect) {
            contests.extend(leaves::protect(memory)?);
        }
        if wants(Part::Age) {
            contests.extend(leaves::age(memory)?);
        }
        if wants(Part::Inactive) {
            contests.extend(inactive::contests(memory)?);
        }
    }
    if wants(Part::AgeTables) {
        contests.extend(crate::tables::age(Ept1G::default(), TableFormat::Ept, sizes.large));
    }
    if wants(Part::Map) {
        contests.push(faults::map(sizes.small)?);
    }
    if wants(Part::Translate) {
        contests.push(lookup::contest(sizes.small, session)?);
    }
    if wants(Part::Enter) {
        contests.push(entering::contest(sizes.small, cpus)?);
    }
    let threaded = [Part::SplitThreads, Part::MapThreads, Part::Beside];
    if cpus.len() < 2 {
        for part in threaded.into_iter().filter(|part| wants(*part)) {
            session.skip(part.to_string(), "it takes two CPUs, and this process may use one");
        }
        return Ok(contests);
    }
    if wants(Part::SplitThreads) {
        contests.push(split::threads(sizes.large, cpus)?);
    }
    if wants(Part::MapThreads) {
        contests.push(faults::threads(sizes.small, cpus)?);
    }
    if wants(Part::Beside) {
        contests.push(contention::contest(sizes.small, cpus)?);
    }
    Ok(contests)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    fn args(only: &[Part]) -> EngineArgs {
        EngineArgs {
            memory: Some(Size(1 << 30)),
            only: only.to_vec(),
            rounds: Some(1),
            quick: true,
            format: Vec::new(),
            granule: Granule::Size4k,
            linux: crate::settings::peers::LinuxArgs::default(),
        }
    }

    fn run_only(only: &[Part]) -> Vec<Measurement> {
        let mut session = Session::quiet();
        let results = Engine::run(&args(only), &mut session).unwrap();
        let left_out: Vec<_> = session.skipped().iter().map(|skipped| &skipped.what).collect();
        assert!(!results.is_empty() || !left_out.is_empty(), "{only:?}");
        results
    }

    fn count(results: &[Measurement], of: &str, variant: &str, name: &str) -> u64 {
        let found = results.iter().find(|m| m.params["of"] == of && m.variant == variant);
        found.and_then(|m| m.counts.get(name)).copied().unwrap_or_else(|| {
            panic!("no {name} of {variant}, {of}: {results:?}");
        })
    }

    /// Each turn checks its result; this test only checks that every part runs.
    #[test]
    fn every_part_gives_samples_that_are_times() {
        for &part in Part::value_variants() {
            for result in run_only(&[part]) {
                // Parts that are measured by the comparison with others name their operation
                // instead.
                let beside = result.scenario.starts_with("peers");
                assert!(beside || result.params["part"] == part.to_string(), "{result:?}");
                assert_eq!(result.samples.len(), 1, "{result:?}");
                assert!(result.samples.iter().all(|time| *time > 0.0), "{result:?}");
            }
        }
    }

    #[test]
    fn counts_are_those_of_the_work() {
        let results = run_only(&[Part::Split, Part::Protect, Part::Age]);
        let pages = (1 << 30) / 4096;
        assert_eq!(count(&results, "2m", "split", "tables_built"), 512);
        assert_eq!(count(&results, "2m", "split-streaming", "invalidations"), 26);
        assert_eq!(count(&results, "1g", "split", "tables_built"), 513);
        assert_eq!(count(&results, "writable", "protect", "entries_written"), pages);
        assert_eq!(count(&results, "writable", "protect", "invalidations"), 1);
        assert_eq!(count(&results, "protected already", "protect", "entries_written"), 0);
        assert_eq!(count(&results, "young", "age", "entries_written"), pages);
        assert_eq!(count(&results, "old", "age", "entries_read"), pages + 512 + 1);
    }

    #[test]
    fn tables_spare_what_the_guest_did_not_touch() {
        let results = run_only(&[Part::AgeTables]);
        let runs = "1 % in runs of 32 MiB";
        let exact = count(&results, runs, "exact", "entries_read");
        let leaves = count(&results, runs, "leaves", "entries_read");
        // One run of 32 MiB is a thirty-second of this guest.
        assert!(exact * 20 < leaves, "{exact} of {leaves}");
        assert_eq!(count(&results, runs, "exact", "invalidations"), 1);
    }

    #[test]
    fn a_size_is_measured_once_where_both_are_one() {
        assert_eq!(Sizes::of(Size(64 << 30)).both(), [8 << 30, 64 << 30]);
        assert_eq!(Sizes::of(Size(1 << 30)).both(), [1 << 30]);
        assert_eq!(Sizes::of(Size(12 << 30)).both(), [2 << 30, 12 << 30]);
    }

    #[test]
    fn a_session_that_is_stopped_returns_what_it_has() {
        let mut session = Session::quiet();
        session.stop();
        assert!(Engine::run(&args(&[Part::Protect]), &mut session).unwrap().is_empty());
    }
}
