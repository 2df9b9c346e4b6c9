//! The commands `plan` and `merge`.

use super::output::{self, Output};
use crate::cli::{Format, MergeArgs, PlanArgs};
use crate::merge;
use crate::merge::files::{self, Found};
use crate::plan::run::State;
use crate::plan::{self, Plan, share_of};
use crate::renderer;
use crate::report::{markdown, merged, plan as report, text};
use crate::scenario::Program;
use crate::session::Session;
use serde_json::json;
use std::process::ExitCode;

/// Runs the cells of a plan, or lists them.
pub fn plan(program: &'static Program, args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let plan = Plan::read(program, &args.file)?;
    let cells = share_of(args.cell, &plan.cells)?;
    if args.list {
        let all = || {
            let cells = cells.iter().map(|cell| {
                json!({ "cell": cell.number, "repeat": cell.repeat, "command": cell.line() })
            });
            cells.collect::<Vec<_>>()
        };
        output::print(&match args.print.format() {
            Format::Json => serde_json::to_string_pretty(&all())? + "\n",
            Format::Markdown => markdown::table(&report::list_table(&cells)),
            Format::Text => report::list(&cells),
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut session = Session::interactive()?;
    let outcomes = plan::run::run(&plan, &cells, &args.output, args.again, &mut session)?;
    let summary = report::summary(&outcomes);
    let failed = report::failed(&outcomes);
    output::print(&match args.print.format() {
        Format::Json => serde_json::to_string_pretty(&outcomes)? + "\n",
        Format::Markdown => {
            format!("{summary}\n\n") + &failed.as_ref().map(markdown::table).unwrap_or_default()
        }
        Format::Text => {
            let mut text = format!("{summary}\n");
            failed.iter().for_each(|table| text::grid(&mut text, table, output::width()));
            text
        }
    })?;
    let failed = outcomes.count(|state| matches!(state, State::Failed { .. }));
    Ok(match (session.interrupted(), failed) {
        (true, _) => ExitCode::from(130),
        (false, 0) => ExitCode::SUCCESS,
        (false, _) => ExitCode::FAILURE,
    })
}

/// Merges reports: one report for each host, and a table of all of them.
pub fn merge(program: &Program, args: &MergeArgs) -> anyhow::Result<ExitCode> {
    let found = files::read(&args.paths, &args.output, args.skip_bad)?;
    let Found { reports, bad, failed } = found;
    crate::files::writable(&args.output)?;
    let mut hosts =
        merge::merge(reports, args.any_name, &super::command(program, std::env::args()));
    let renderers = (program.renderers)();
    for host in &mut hosts {
        host.report.verdict = renderer::verdict(&host.report.results, &renderers);
        let _ = Output::prepare(&args.output.join(&host.name))?.write(&host.report, &renderers)?;
    }
    let tables = merged::tables(&hosts, &bad, &failed);
    let json = serde_json::to_string_pretty(&merged::value_of(&hosts, &bad, &failed))? + "\n";
    let markdown: String = tables.iter().map(markdown::table).collect();
    crate::files::write_whole(&args.output.join("table.json"), json.as_bytes())?;
    crate::files::write_whole(&args.output.join("table.md"), markdown.as_bytes())?;
    output::print(&match args.print.format() {
        Format::Json => json,
        Format::Markdown => markdown,
        Format::Text => {
            let mut text = String::new();
            tables.iter().for_each(|table| text::grid(&mut text, table, output::width()));
            text
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
