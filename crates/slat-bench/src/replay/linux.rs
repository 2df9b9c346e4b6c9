//! The claims about Linux's walks, on Linux's own code: as it is, and with each change as an edit to a
//! copy of it.

use super::{Cells, GRANULES, KINDS, Rows, SKIP, Told, mean, quotients, split_args};
use crate::peers;
use crate::settings::peers::{EditSet, LinuxArgs, TablesTarget, TreesArgs, WalkKind};
use serde_json::json;
use slat_ideas::split::{SplitArgs, What, When};
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use slat_lab::size::Size;

const LEVELS: &str = "skip-level3";
const BOTH: &str = "skip-level3,skip-children";
const WHY: &str = "Linux's code in user space on another CPU: what its walk costs there, without invalidations, locks, \
    or the rest of the call.";

/// Nothing, where no tree was given.
fn measured(
    replay: &mut Rows,
    session: &mut Session,
    args: SplitArgs,
) -> anyhow::Result<Vec<Measurement>> {
    let Some(tree) = replay.args.linux_tree.clone() else { return Ok(Vec::new()) };
    let set = |names: &str| EditSet(names.split(',').map(str::to_owned).collect());
    let trees = TreesArgs {
        linux_tree: vec![tree],
        with: vec![set(LEVELS), set(BOTH)],
        edits: replay.args.edits.clone(),
        walks: vec![WalkKind::Exclusive],
        ..TreesArgs::default()
    };
    let linux = LinuxArgs { target: TablesTarget::LinuxSource, trees, ..LinuxArgs::default() };
    let results = peers::split(&args, &linux, session)?;
    replay.results.extend(results.iter().cloned());
    Ok(results)
}

/// The change of time that an edit brings, in percent, round by round.
fn changes(results: &[Measurement], operation: &str, backing: u64, edit: &str) -> Vec<f64> {
    let backing = json!(Size(backing).to_string());
    let of = |edited: &str| {
        let fits = |m: &&Measurement| {
            let name = m.variant.split_once('+').map_or("", |(_, edits)| edits);
            m.target == peers::LINUX
                && name == edited
                && m.params.get("operation") == Some(&json!(operation))
                && m.params.get("backing") == Some(&backing)
        };
        results.iter().find(fits).map_or(Vec::new(), |m| m.samples.clone())
    };
    quotients(&of(edit), &of("")).iter().map(|ratio| (ratio - 1.0) * 100.0).collect()
}

fn told(options: &str) -> Told {
    Told {
        claim: SKIP,
        command: format!(
            "slat-bench split --target linux-source --linux-tree PATH --with {LEVELS} --with {BOTH} {options}"
        ),
        why: WHY,
    }
}

/// The proposal: both hints, 1 GiB, the split alone.
pub fn skip_levels(replay: &mut Rows, session: &mut Session) -> anyhow::Result<()> {
    let args = SplitArgs {
        memory: Size(1 << 30),
        what: vec![What::Split],
        when: vec![When::Enable],
        samples: if replay.quick { 5 } else { 21 },
        ..split_args()
    };
    let results = measured(replay, session, args)?;
    let told = told("-b 1g --when enable --what split");
    for (backing, name, published) in [
        (4 << 10, "split already", "−97.33 %"),
        (2 << 20, "THP", "−19.82 %"),
        (1 << 30, "1g hugetlb", "−20.65 %"),
    ] {
        let change = changes(&results, "split", backing, BOTH);
        replay.row(
            &told,
            format!("Linux, 1 GiB, {name}: time of the split"),
            published,
            "%",
            change,
        );
    }
    Ok(())
}

/// The figures from hardware: each a mean over three granules.
pub fn skip_levels_hardware(
    replay: &mut Rows,
    session: &mut Session,
    cells: &Cells,
) -> anyhow::Result<()> {
    let memory = Size(if replay.quick { 2 << 30 } else { 16 << 30 });
    let mut all = Vec::new();
    for (granule, backings) in GRANULES {
        let args = SplitArgs {
            memory,
            granule,
            what: vec![What::Call],
            when: vec![When::Enable, When::Clear],
            samples: if replay.quick { 3 } else { 7 },
            ..split_args()
        };
        all.push((measured(replay, session, args)?, backings));
        if session.interrupted() {
            return Ok(());
        }
    }
    let told = told(&format!("-b {memory} --granule 4k --what call; and 16k, 64k"));
    for (when, name, published) in cells {
        let operation = match when {
            When::Enable => "protect and split",
            When::Clear => "clear the log and split",
        };
        for (kind, published) in published.iter().enumerate() {
            for (edit, published, what) in
                [(LEVELS, published[0], "levels"), (BOTH, published[1], "levels and children")]
            {
                let parts: Vec<Vec<f64>> = all
                    .iter()
                    .map(|(results, backings)| changes(results, operation, backings[kind], edit))
                    .collect();
                let samples = mean(&parts);
                let row = format!("Linux, call, {name}, {}: {what}", KINDS[kind]);
                replay.row(&told, row, published, "%", samples);
            }
        }
    }
    Ok(())
}
