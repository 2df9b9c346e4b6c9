//! The command line of `slat doctor`.

use crate::doctor;
use clap::Args;
use clap::builder::PossibleValuesParser;
use slat_lab::cli::PrintArgs;

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

/// Options of `slat doctor`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct DoctorArgs {
    /// Only what matters for this scenario, on the host's KVM
    #[arg(long = "for", value_name = "SCENARIO")]
    #[arg(value_parser = PossibleValuesParser::new(doctor::scenarios()))]
    pub scenario: Option<String>,

    /// How the findings are printed.
    #[command(flatten)]
    pub print: PrintArgs,
}
