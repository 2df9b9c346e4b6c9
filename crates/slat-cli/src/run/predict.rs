//! `slat predict`.

use crate::cli::PredictArgs;
use crate::{PROGRAM, kvm, predict};
use slat_lab::cli::Format;
use slat_lab::failure::bad_input;
use slat_lab::report::{markdown, text};
use slat_lab::run::output;
use std::process::ExitCode;
use std::time::Duration;

/// Computes a migration from figures, and prints it.
///
/// # Errors
/// Returns an error if the figures cannot be, or if a report has none.
pub fn predict(args: &PredictArgs) -> anyhow::Result<ExitCode> {
    let mut args = args.clone();
    if let Some(path) = &args.measured {
        let report = slat_lab::run::read(&PROGRAM, path)?;
        let cost = kvm::logged::cost(&report.results).ok_or_else(|| {
            bad_input(format!(
                "{} has no cost of a logged write; `slat bench dirty-log` measures it",
                path.display()
            ))
        })?;
        args.logged_write = Duration::from_secs_f64(cost.max(0.0));
    }
    let all = predict::all(&args)?;
    let table = predict::table(&args, &all);
    output::print(&match args.print.format() {
        Format::Json => serde_json::to_string_pretty(&all)? + "\n",
        Format::Markdown => markdown::table(&table),
        Format::Text => {
            let mut text = String::new();
            text::grid(&mut text, &table, output::width());
            text
        }
    })?;
    Ok(ExitCode::SUCCESS)
}
