//! `slat doctor`.

use super::output;
use crate::cli::{DoctorArgs, Format};
use crate::doctor::{Evidence, examine, verdict, verdicts};
use crate::failure::Failure;
use crate::report::doctor::Examination;
use std::process::ExitCode;

/// Examines the host and prints what it found; refuses a scenario that cannot run.
pub fn doctor(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut findings = examine(&Evidence::here());
    let verdicts = match args.scenario {
        Some(scenario) => vec![verdict::verdict(&findings, scenario)],
        None => verdicts(&findings),
    };
    let refused = args.scenario.and(verdicts.first()).filter(|verdict| !verdict.runs);
    let refused = refused.map(|verdict| verdict::refusal(&findings, verdict));
    findings.retain(|finding| args.scenario.is_none_or(|scenario| finding.matters_for(scenario)));
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
