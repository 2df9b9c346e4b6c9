//! Claims about Linux's walks, replayed on Linux's own code: unchanged, and with each change as an
//! edit to a copy of it.

use super::{Cells, ClaimFields, GRANULES, KINDS, Rows, SKIP, mean};
use crate::peers;
use crate::published::{Ran, quotients};
use crate::split::Split;
use crate::split::SplitMoment;
use serde_json::json;
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use slat_lab::size::Size;

const LEVELS: &str = "bounded-walks/2";
const BOTH: &str = "bounded-walks";
const WHY: &str = "Linux's code in user space on another CPU: what its walk costs there, without \
                   invalidations, locks, or the rest of the call.";

/// Returns the command and its results; no results if no tree was given.
fn measured(replay: &mut Rows, session: &mut Session, options: &str) -> anyhow::Result<Ran> {
    let Some(tree) = &replay.args.linux_tree else { return Ok(Default::default()) };
    let quoted = |text: &str| shlex::try_quote(text).map(|text| text.into_owned());
    let named = tree.name.as_ref().map_or(String::new(), |name| format!("{name}="));
    let tree = quoted(&format!("{named}{}", tree.path.display()))?;
    let mut line = format!(
        "--target linux-source --linux-tree {tree} --with {LEVELS} --with {BOTH} --walks exclusive \
         --walk every-entry,bounded {options}"
    );
    if let Some(edits) = &replay.args.edits {
        line += &format!(" --edits {}", quoted(&edits.display().to_string())?);
    }
    replay.replayed::<Split>(&line, session)
}

/// Returns the change of time that an edit brings, in percent, by round.
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

fn told(command: String) -> ClaimFields {
    ClaimFields { claim: SKIP, command, why: WHY }
}

/// Replays the proposal: both hints, 1 GiB, the split alone.
pub fn skip_levels(replay: &mut Rows, session: &mut Session) -> anyhow::Result<()> {
    let samples = if replay.quick { 10 } else { 21 };
    let options = format!("-b 1g --when enable --what split --samples {samples}");
    let Ran { command, results } = measured(replay, session, &options)?;
    let told = told(command);
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

/// Replays the figures from hardware: each a mean over three granules.
pub fn skip_levels_hardware(
    replay: &mut Rows,
    session: &mut Session,
    cells: &Cells,
) -> anyhow::Result<()> {
    let memory = if replay.quick { "2g" } else { "16g" };
    let (mut all, mut commands) = (Vec::new(), Vec::new());
    for (granule, backings) in GRANULES {
        let options = format!("-b {memory} --granule {granule} --what call --samples 10");
        let Ran { command, results } = measured(replay, session, &options)?;
        all.push((results, backings));
        commands.push(command);
        if session.interrupted() {
            return Ok(());
        }
    }
    let told = told(commands.join("; "));
    for (when, name, published) in cells {
        let operation = match when {
            SplitMoment::Enable => "protect and split",
            SplitMoment::Clear => "clear the log and split",
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
