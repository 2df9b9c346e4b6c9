//! Measures what memory management could cost: each of the five ideas that Slat grew from, in
//! Slat's own tables, as a row of a table.
//!
//! The tables are in this process's memory and no guest runs, so only the cost of the hardware is
//! left out. Ideas about Arm are measured in Arm's format, the others in x86's, or in Arm's on an
//! Arm host.

use serde_json::json;
use slat_bench::format::TableFormat;
use slat_bench::guest::age::Age;
use slat_bench::guest::cache_toggle::CacheToggle;
use slat_bench::guest::execute::Execute;
use slat_bench::published::{self, PublishedFigure, Ran, quotients};
use slat_bench::split::Split;
use slat_lab::numbers::{thousands, three_digits};
use slat_lab::record::{Kind, Measurement};
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_lab::stats::Summary;
use slat_lab::table::{NOTHING, Table};
use slat_lab::unit::Unit;

/// Scenario of the rows in results.
pub const SCENARIO: &str = "ideas";

/// Renderer of the rows.
pub const RENDERER: Renderer = Renderer {
    reads: |m| m.scenario == SCENARIO,
    tables: |results| table(results).into_iter().collect(),
    ..Renderer::NONE
};

/// Format of the second-stage tables of this host's architecture.
const HOST: TableFormat =
    if cfg!(target_arch = "aarch64") { TableFormat::Arm64K4 } else { TableFormat::Ept };

/// Sizes of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Memory of the guest whose tables are split.
    pub split: Size,
    /// Memory of the guests that are aged.
    pub guest: Size,
    /// Memory of the guests that execute from blocks of 1 GiB, if there is room for them.
    pub executed: Option<Size>,
    /// Memory of the guest whose vCPUs switch their caches on. Flushes are only counted, so this
    /// memory is not allocated.
    pub flushed: Size,
    /// Rounds of executing and ageing; a split is sampled at least 10 times.
    pub rounds: u32,
}

impl Sizes {
    /// Returns the largest amount of memory that is in use at one time, in bytes.
    pub fn memory(&self) -> u64 {
        let tables = self.split.bytes() / 256;
        // A guest that is aged counts twice; one that executes counts with its tables.
        let executed = self.executed.map_or(0, |memory| memory.bytes() / 64 * 65);
        tables.max(2 * self.guest.bytes()).max(executed)
    }
}

/// An idea: what is timed or counted, and the figure that was published.
struct Idea {
    name: &'static str,
    what: &'static str,
    published: PublishedFigure,
}

const SPLIT: Idea = Idea {
    name: "walks that skip levels",
    what: "time to split 2m blocks",
    published: published::SPLIT,
};
const CALL: Idea = Idea {
    name: "the same, as a VMM calls it",
    what: "protect, invalidate, split",
    published: published::SPLIT_CALL,
};
const EXECUTE: Idea = Idea {
    name: "split in the fault",
    what: "time to execute from 1g blocks",
    published: published::EXECUTE,
};
const AGEING: Idea = Idea {
    name: "ageing without a lock",
    what: "time of a scan beside faults",
    published: published::AGEING,
};
const FLUSH: Idea = Idea {
    name: "flush once",
    what: "bytes that a boot of 64 vCPUs flushes",
    published: published::FLUSH,
};

/// Measures all five ideas. The first results are the rows; after them come the measurements from
/// which the rows are computed.
///
/// # Errors
/// Returns the errors of the scenarios.
pub fn run(sizes: &Sizes, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let mut ideas = Ideas { rows: Vec::new(), all: Vec::new() };
    let steps = [Ideas::splits, Ideas::faults, Ideas::ageing, Ideas::flushes];
    for step in steps {
        if session.interrupted() {
            break;
        }
        step(&mut ideas, sizes, session)?;
    }
    ideas.rows.append(&mut ideas.all);
    Ok(ideas.rows)
}

struct Ideas {
    rows: Vec<Measurement>,
    all: Vec<Measurement>,
}

impl Ideas {
    /// Runs a scenario by the command line that the idea's row shows.
    fn ran<S: Scenario>(&mut self, line: &str, session: &mut Session) -> anyhow::Result<Ran> {
        let ran = Ran::by::<S>(line, session)?;
        self.all.extend(ran.results.iter().cloned());
        Ok(ran)
    }

    fn row(&mut self, idea: &Idea, variant: &str, ran: &Ran, samples: Vec<f64>) {
        if samples.is_empty() {
            return;
        }
        let params = [
            ("idea", idea.name),
            ("what", idea.what),
            ("published", idea.published.figure),
            ("source", idea.published.source),
            ("command", &ran.command),
        ];
        let params = params.map(|(name, value)| (name.to_owned(), json!(value)));
        let params = params.into_iter().collect();
        let row = Measurement::new(SCENARIO, "engine", variant, params, Unit::RATIO, samples);
        self.rows.push(row.of_kind(Kind::Published));
    }

    /// Measures splits with bounded walks, as proposed for Linux, and as Slat splits by default: a
    /// whole table at a time.
    fn splits(&mut self, sizes: &Sizes, session: &mut Session) -> anyhow::Result<()> {
        let Sizes { split, rounds, .. } = sizes;
        let line = format!(
            "--format arm64-4k --memory {split} --backing 2m --when enable --what split,call \
             --walk every-entry,bounded,batched --samples {}",
            rounds.max(&10)
        );
        let ran = self.ran::<Split>(&line, session)?;
        for (idea, what) in [(SPLIT, "split"), (CALL, "call")] {
            let of = |walk: &str| {
                let fits = |m: &&Measurement| m.variant == walk && m.params["what"] == what;
                ran.results.iter().find(fits).map_or(Vec::new(), |m| m.samples.clone())
            };
            let every = of("every-entry");
            self.row(&idea, AS_PROPOSED, &ran, quotients(&of("bounded"), &every));
            self.row(&idea, FURTHER, &ran, quotients(&of("batched"), &every));
        }
        Ok(())
    }

    fn faults(&mut self, sizes: &Sizes, session: &mut Session) -> anyhow::Result<()> {
        let Some(memory) = sizes.executed else {
            session.skip(EXECUTE.name, "a guest of 1 GiB is more than the memory that is free");
            return Ok(());
        };
        let line = format!(
            "--format {HOST} --backing 1g --vcpus 2 --memory {memory} --rounds {}",
            sizes.rounds
        );
        let ran = self.ran::<Execute>(&line, session)?;
        self.row(&EXECUTE, AS_PROPOSED, &ran, ran.quotients("split", "zap", "execute"));
        Ok(())
    }

    fn ageing(&mut self, sizes: &Sizes, session: &mut Session) -> anyhow::Result<()> {
        let Sizes { guest, rounds, .. } = sizes;
        let line = format!("--format {HOST} --vcpus 1 --memory {guest} --rounds {rounds}");
        let ran = self.ran::<Age>(&line, session)?;
        for (kind, way) in [(AS_PROPOSED, "lock-free-64"), (FURTHER, "lock-free-512")] {
            self.row(&AGEING, kind, &ran, ran.quotients(way, "locked-64", "scan of 1 GiB"));
        }
        Ok(())
    }

    fn flushes(&mut self, sizes: &Sizes, session: &mut Session) -> anyhow::Result<()> {
        let line = format!("--count --memory {} --vcpus 64 --rounds 1", sizes.flushed);
        let ran = self.ran::<CacheToggle>(&line, session)?;
        let bytes = |way| ran.maintained(way).into_iter().collect::<Vec<_>>();
        let every = bytes("every");
        for (kind, way) in [(AS_PROPOSED, "vcpu0"), (FURTHER, "exact")] {
            self.row(&FLUSH, kind, &ran, quotients(&bytes(way), &every));
        }
        Ok(())
    }
}

/// Variant of an idea as it was proposed.
pub const AS_PROPOSED: &str = "as proposed";
/// Variant of what Slat does beyond the proposal.
pub const FURTHER: &str = "further";

/// Formats a ratio; below 0.01 as a fraction.
fn times(ratio: f64) -> String {
    match ratio {
        0.0..0.01 => format!("1/{} ×", thousands((1.0 / ratio).round() as i64)),
        _ => format!("{} ×", three_digits(ratio)),
    }
}

/// Returns the table with a row for each idea.
pub fn table(results: &[Measurement]) -> Option<Table> {
    let of = |idea: &str, variant: &str| {
        let found = results
            .iter()
            .find(|m| m.scenario == SCENARIO && m.variant == variant && m.params["idea"] == idea);
        found.and_then(|m| Summary::of(&m.samples))
    };
    let mut sources = Vec::new();
    let rows: Vec<Vec<String>> = results
        .iter()
        .filter(|m| m.scenario == SCENARIO && m.variant == AS_PROPOSED)
        .map(|m| {
            let text = |name: &str| m.params[name].as_str().unwrap_or_default().to_owned();
            let idea = text("idea");
            let shown = |variant| {
                let summary = of(&idea, variant);
                summary.map_or(NOTHING.to_owned(), |it| times(it.median))
            };
            let (here, further) = (shown(AS_PROPOSED), shown(FURTHER));
            sources.push(format!("{}: {}", idea, text("source")));
            let command = text("command");
            let command = command.split(" --").next().unwrap_or(&command).to_owned();
            vec![idea, text("what"), text("published"), here, further, command]
        })
        .collect();
    let title = "What it could cost: five ideas, in the engine's own tables";
    let table = Table::new(title, 2, "idea|what|published|here|further|command", rows).noting(
        "“published”: by the idea's authors; “here”: the same idea in the engine; “further”: with \
         what the engine adds. No guest runs, so what hardware adds is left out. Sources and every \
         sample: report.html, docs/sources.md.",
    );
    let common =
        "Time (or bytes) of the new way, divided by that of KVM's way before: less is better.";
    Table { common: common.to_owned(), ..table }.some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_idea_has_a_row_next_to_its_published_result() {
        let sizes = Sizes {
            split: Size(1 << 30),
            guest: Size(64 << 20),
            executed: Some(Size(1 << 30)),
            flushed: Size(1 << 30),
            rounds: 1,
        };
        let results = run(&sizes, &mut Session::quiet()).unwrap();
        let rows: Vec<_> = results.iter().filter(|m| m.scenario == SCENARIO).collect();
        let proposed = rows.iter().filter(|m| m.variant == AS_PROPOSED);
        let names: Vec<_> = proposed.map(|m| m.params["idea"].clone()).collect();
        assert_eq!(names, [SPLIT, CALL, EXECUTE, AGEING, FLUSH].map(|idea| json!(idea.name)));
        // The counts are the same on every machine: all of memory 64 times, or twice the memory
        // that was touched.
        let flushed = |kind: &str| {
            let row = rows.iter().find(|m| m.params["idea"] == FLUSH.name && m.variant == kind);
            row.unwrap().samples[0]
        };
        assert!(flushed(AS_PROPOSED) < 0.05 && flushed(FURTHER) < 0.05);
    }
}
