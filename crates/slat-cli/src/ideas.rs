//! What memory management could cost: each idea that Slat grew from, in the engine, in one row.
//!
//! The engine works on tables in this process's memory, so no guest runs and nothing is left out
//! but the hardware's part. Ideas about Arm are measured in Arm's format, the others in x86's, or in
//! Arm's on an Arm host.

use serde_json::json;
use slat_ideas::format::{Granule, TableFormat, TablesArgs};
use slat_ideas::guest::age::{Age, AgeArgs};
use slat_ideas::guest::cache_toggle::{CacheToggle, CacheToggleArgs};
use slat_ideas::guest::execute::{Execute, ExecuteArgs};
use slat_ideas::split::{self, SplitArgs, Walk, What, When};
use slat_lab::published::{self, Published};
use slat_lab::record::Measurement;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_lab::unit::Unit;

/// The name of the rows in results.
pub const SCENARIO: &str = "ideas";

/// The format of this host's own tables.
const HOST: TableFormat =
    if cfg!(target_arch = "aarch64") { TableFormat::Arm64K4 } else { TableFormat::Ept };

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Memory of the guest whose tables are split.
    pub split: Size,
    /// Memory of the guests that execute and are aged.
    pub guest: Size,
    /// Memory of the guest whose caches come on, which is counted and needs none.
    pub flushed: Size,
    /// Samples of each.
    pub rounds: u32,
}

/// A way, and the way that it is held against, with the figure of both.
struct Pair<'a> {
    of: &'a str,
    by: &'a str,
    figure: &'a str,
}

/// An idea: what is timed or counted, what was published of it, and the command that has the rest.
struct Idea {
    name: &'static str,
    what: &'static str,
    published: Published,
    command: &'static str,
}

const SPLIT: Idea = Idea {
    name: "walks that skip levels",
    what: "time to split 2m blocks",
    published: published::SPLIT,
    command: "slat-bench split",
};
const CALL: Idea = Idea {
    name: "the same, as a VMM calls it",
    what: "protect, invalidate, split",
    published: published::SPLIT_CALL,
    command: "slat-bench split",
};
const EXECUTE: Idea = Idea {
    name: "split in the fault",
    what: "time to execute from 1g blocks",
    published: published::EXECUTE,
    command: "slat-bench execute",
};
const AGEING: Idea = Idea {
    name: "ageing without a lock",
    what: "time of a scan beside faults",
    published: published::AGEING,
    command: "slat-bench age",
};
const FLUSH: Idea = Idea {
    name: "flush once",
    what: "bytes that a boot of 64 vCPUs flushes",
    published: published::FLUSH,
    command: "slat-bench cache-toggle --count -b 128g -v 64",
};

/// Measures all five. The first results are the rows, the others what they are made from.
///
/// # Errors
/// Those of the scenarios.
pub fn run(sizes: &Sizes, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let (mut rows, mut all) = (Vec::new(), Vec::new());
    let steps = [splits, faults, ageing, flushes];
    for step in steps {
        if session.interrupted() {
            break;
        }
        step(sizes, session, &mut rows, &mut all)?;
    }
    rows.append(&mut all);
    Ok(rows)
}

type Results = Vec<Measurement>;

/// Linux's proposal, and what the engine does by itself: whole tables at a time.
fn splits(
    sizes: &Sizes,
    session: &mut Session,
    rows: &mut Results,
    all: &mut Results,
) -> anyhow::Result<()> {
    let args = SplitArgs {
        memory: sizes.split,
        backing: vec![Size(2 << 20)],
        target_size: None,
        when: vec![When::Enable],
        what: vec![What::Split, What::Call],
        walk: vec![Walk::EveryEntry, Walk::Bounded, Walk::Batched],
        format: Some(TableFormat::Arm64K4),
        granule: Granule::Size4k,
        bbm: None,
        samples: sizes.rounds,
        quick: false,
    };
    let results = split::run(&args, session)?;
    for (idea, what) in [(SPLIT, What::Split), (CALL, What::Call)] {
        let of = |walk: &str| {
            let fits = |m: &&Measurement| m.variant == walk && m.params["what"] == what.to_string();
            results.iter().find(fits).map_or(Vec::new(), |m| m.samples.clone())
        };
        let every = of("every-entry");
        rows.extend(row(&idea, AS_PROPOSED, quotients(&of("bounded"), &every)));
        rows.extend(row(&idea, FURTHER, quotients(&of("batched"), &every)));
    }
    all.extend(results);
    Ok(())
}

fn faults(
    sizes: &Sizes,
    session: &mut Session,
    rows: &mut Results,
    all: &mut Results,
) -> anyhow::Result<()> {
    let args = ExecuteArgs {
        tables: TablesArgs::of(HOST),
        backing: Some(Size(1 << 30)),
        vcpus: 2,
        memory: Some(sizes.guest.max(Size(1 << 30))),
        rounds: Some(sizes.rounds.min(5)),
        exit: 0,
        quick: false,
    };
    let results = Execute::run(&args, session)?;
    let pair = Pair { of: "split", by: "zap", figure: "execute" };
    rows.extend(row(&EXECUTE, AS_PROPOSED, pair.quotients(&results)));
    all.extend(results);
    Ok(())
}

fn ageing(
    sizes: &Sizes,
    session: &mut Session,
    rows: &mut Results,
    all: &mut Results,
) -> anyhow::Result<()> {
    let args = AgeArgs {
        tables: TablesArgs::of(HOST),
        vcpus: 1,
        memory: Some(sizes.guest),
        rounds: Some(sizes.rounds.min(5)),
        quick: false,
    };
    let results = Age::run(&args, session)?;
    let scan = |of, by| Pair { of, by, figure: "scan of 1 GiB" }.quotients(&results);
    rows.extend(row(&AGEING, AS_PROPOSED, scan("lock-free-64", "locked-64")));
    rows.extend(row(&AGEING, FURTHER, scan("lock-free-512", "locked-64")));
    all.extend(results);
    Ok(())
}

fn flushes(
    sizes: &Sizes,
    session: &mut Session,
    rows: &mut Results,
    all: &mut Results,
) -> anyhow::Result<()> {
    let args = CacheToggleArgs {
        memory: Some(sizes.flushed),
        vcpus: 64,
        image: Size(16 << 20),
        startup: 16,
        threads: 1,
        count: true,
        rounds: Some(1),
        quick: false,
    };
    let results = CacheToggle::run(&args, session)?;
    let bytes = |way: &str| {
        let found = figure(&results, way, "switches, all vCPUs");
        found.map(|m| (m.counts["bytes-switching"] + m.counts["bytes-touching"]) as f64)
    };
    let every: Vec<f64> = bytes("every").into_iter().collect();
    for (kind, way) in [(AS_PROPOSED, "vcpu0"), (FURTHER, "exact")] {
        let of: Vec<f64> = bytes(way).into_iter().collect();
        rows.extend(row(&FLUSH, kind, quotients(&of, &every)));
    }
    all.extend(results);
    Ok(())
}

/// What was proposed, done here.
pub const AS_PROPOSED: &str = "as proposed";
/// What the engine does beyond it.
pub const FURTHER: &str = "further";

fn row(idea: &Idea, variant: &str, samples: Vec<f64>) -> Option<Measurement> {
    let params = [
        ("idea", idea.name),
        ("what", idea.what),
        ("published", idea.published.figure),
        ("source", idea.published.source),
        ("command", idea.command),
    ];
    (!samples.is_empty()).then(|| Measurement {
        scenario: SCENARIO.to_owned(),
        target: "engine".to_owned(),
        variant: variant.to_owned(),
        params: params.map(|(name, value)| (name.to_owned(), json!(value))).into_iter().collect(),
        unit: Unit::RATIO,
        samples,
        counts: Default::default(),
    })
}

impl Pair<'_> {
    fn quotients(&self, results: &[Measurement]) -> Vec<f64> {
        let of = |way| figure(results, way, self.figure).map_or(&[][..], |m| &m.samples[..]);
        quotients(of(self.of), of(self.by))
    }
}

fn figure<'a>(results: &'a [Measurement], way: &str, name: &str) -> Option<&'a Measurement> {
    let named = |m: &&Measurement| m.params.get("figure").is_some_and(|figure| figure == name);
    results.iter().find(|m| m.variant == way && named(m))
}

fn quotients(of: &[f64], by: &[f64]) -> Vec<f64> {
    of.iter().zip(by).map(|(of, by)| of / by).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_idea_is_a_row_beside_what_was_published_of_it() {
        let sizes = Sizes {
            split: Size(1 << 30),
            guest: Size(64 << 20),
            flushed: Size(1 << 30),
            rounds: 1,
        };
        let results = run(&sizes, &mut Session::quiet()).unwrap();
        let rows: Vec<_> = results.iter().filter(|m| m.scenario == SCENARIO).collect();
        let proposed = rows.iter().filter(|m| m.variant == AS_PROPOSED);
        let names: Vec<_> = proposed.map(|m| m.params["idea"].clone()).collect();
        assert_eq!(names, [SPLIT, CALL, EXECUTE, AGEING, FLUSH].map(|idea| json!(idea.name)));
        // Counts, the same on every machine: all of memory 64 times, or what was touched, twice.
        let flushed = |kind: &str| {
            let row = rows.iter().find(|m| m.params["idea"] == FLUSH.name && m.variant == kind);
            row.unwrap().samples[0]
        };
        assert!(flushed(AS_PROPOSED) < 0.05 && flushed(FURTHER) < 0.05);
    }
}
