//! `slat predict`.

use crate::cli::PredictArgs;
use crate::predict;
use slat_lab::cli::Format;
use slat_lab::report::{markdown, text};
use slat_lab::run::output;
use std::process::ExitCode;

/// Computes a migration from figures, and prints it.
///
/// # Errors
/// Returns an error if the figures cannot be.
pub fn predict(args: &PredictArgs) -> anyhow::Result<ExitCode> {
    let all = predict::all(args)?;
    let table = predict::table(args, &all);
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
