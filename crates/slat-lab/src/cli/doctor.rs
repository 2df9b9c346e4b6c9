//! The command line of `slat doctor`.

use super::TablePrintArgs;
use crate::doctor::DoctorScenario;
use clap::Args;

const EXAMPLES: &str = "\
Examples:
  slat doctor
      everything, by group, and which scenarios can run under this host's KVM
  slat doctor --for dirty-log
      only what matters for it
  slat doctor --for age > /dev/null && slat bench age
      run it only where it can run
  slat doctor --markdown
      to paste into an issue

Exit codes:
  0    examined; with --for, the scenario can run
  2    the command line cannot be right
  4    --for: this host cannot run that scenario; stderr says what it lacks";

/// Which scenario, and how it is printed.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct DoctorArgs {
    /// Only what matters for this scenario, on the host's KVM (on the engine, all run everywhere)
    #[arg(long = "for", value_name = "SCENARIO")]
    pub scenario: Option<DoctorScenario>,

    /// How it is printed.
    #[command(flatten)]
    pub print: TablePrintArgs,
}
