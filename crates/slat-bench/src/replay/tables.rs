//! Report of published claims, with the figures of this machine.

use super::Replay;
use slat_lab::numbers::three_digits;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::report::tables::thresholds::parameter;
use slat_lab::scenario::Scenario;
use slat_lab::stats::Summary;
use slat_lab::table::{NOTHING, Table};
use slat_lab::unit::Unit;

/// How the report presents the results.
pub const RENDERER: Renderer = Renderer {
    reads: |m| m.scenario == Replay::NAME,
    tables: |results| claims(results).into_iter().collect(),
    ..Renderer::NONE
};

/// Returns a table with one row for each claim.
fn claims(results: &[Measurement]) -> Option<Table> {
    let replayed = || results.iter().filter(|m| m.scenario == Replay::NAME);
    let mut commands: Vec<&str> = Vec::new();
    let mut whys: Vec<String> = Vec::new();
    for m in replayed() {
        let why = format!("{}: {}", parameter(m, "claim"), parameter(m, "why"));
        if !whys.contains(&why) {
            whys.push(why);
        }
        if !commands.contains(&parameter(m, "command")) {
            commands.push(parameter(m, "command"));
        }
    }
    let letter = |at: usize| char::from(b'a' + at as u8).to_string();
    let rows: Vec<Vec<String>> = replayed()
        .filter_map(|m| {
            let summary = Summary::of(&m.samples)?;
            let (low, high) = (summary.lower_quartile, summary.upper_quartile);
            let command = parameter(m, "command");
            let published = parameter(m, "published");
            Some(vec![
                parameter(m, "claim").to_owned(),
                m.variant.clone(),
                commands.iter().position(|known| *known == command).map(letter)?,
                if published.is_empty() { NOTHING } else { published }.to_owned(),
                figure(&m.unit, summary.median),
                if low == high {
                    NOTHING.to_owned()
                } else {
                    format!("{} to {}", figure(&m.unit, low), figure(&m.unit, high))
                },
            ])
        })
        .collect();
    let listed = commands.iter().enumerate();
    let listed = listed.map(|(at, command)| format!("{}  {command}", letter(at)));
    let title = "What was published, and what this machine gives";
    let table = Table::new(title, 3, "claim|what|by|published|here|half of rounds", rows);
    Table { notes: listed.chain(whys).collect(), ..table }.some()
}

fn figure(unit: &Unit, value: f64) -> String {
    match unit.name() {
        "%" => format!("{value:+.1} %").replace('-', "−"),
        "x" => {
            format!("{} ×", if value < 0.01 { format!("{value:.5}") } else { three_digits(value) })
        }
        _ => unit.shown(value),
    }
}
