//! `slat explain`.

use crate::cli::ExplainArgs;
use crate::explain;
use slat_lab::alternate;
use slat_lab::cli::Format;
use slat_lab::compare::Run;
use slat_lab::report::{markdown, text};
use slat_lab::run::output;
use slat_lab::scenario::Program;
use slat_lab::session::Session;
use std::process::ExitCode;

/// Explains where the time of each phase of a run went.
///
/// # Errors
/// Returns an error if the run cannot be read or does not succeed, or if it has no guest under KVM
/// whose time is known.
pub fn explain(program: &Program, args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let run = match &args.run {
        Some(path) => Run::read(path)?,
        None => alternate::once(program, &args.words, &Session::interactive()?)?,
    };
    let explained = explain::explain(run.results());
    if explained.is_empty() {
        anyhow::bail!(
            "no guest under KVM is in it whose time is known; try: slat explain -- bench dirty-log"
        );
    }
    let tables = explain::tables(&explained);
    output::print(&match args.print.format() {
        Format::Json => serde_json::to_string_pretty(&explained)? + "\n",
        Format::Markdown => tables.iter().map(markdown::table).collect(),
        Format::Text => {
            let mut text = run.said() + "\n";
            tables.iter().for_each(|table| text::grid(&mut text, table, output::width()));
            text
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
