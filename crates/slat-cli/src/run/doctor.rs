//! `slat doctor`.

use crate::cli::DoctorArgs;
use crate::doctor::report::Examination;
use crate::doctor::{Evidence, examine, verdict, verdicts};
use slat_lab::cli::Format;
use slat_lab::failure::Failure;
use slat_lab::run::output;
use std::process::ExitCode;

/// Examines the host and prints the findings.
///
/// # Errors
/// Returns [`Failure::CannotRun`] if `--for` names a scenario that this host cannot run.
pub fn doctor(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut findings = examine(&Evidence::here());
    let verdicts = match &args.scenario {
        Some(scenario) => vec![verdict::verdict(&findings, scenario)],
        None => verdicts(&findings),
    };
    let refused = args.scenario.as_ref().and(verdicts.first()).filter(|verdict| !verdict.runs);
    let refused = refused.map(|verdict| verdict::refusal(&findings, verdict));
    findings.retain(|finding| {
        args.scenario.as_ref().is_none_or(|scenario| finding.matters_for(scenario))
    });
    let examination = Examination { findings, verdicts };
    output::print(&match args.print.format() {
        Format::Text => examination.text(output::width()),
        Format::Markdown => examination.markdown(),
        Format::Json => examination.json()?,
    })?;
    match refused {
        Some(text) => Err(Failure::CannotRun(text).into()),
        None => Ok(ExitCode::SUCCESS),
    }
}
