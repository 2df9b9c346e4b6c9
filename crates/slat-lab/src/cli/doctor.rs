//! The command line of `slat doctor`.

use super::TablePrintArgs;
use clap::{Args, ValueEnum};

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

/// What a host may be asked to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum DoctorScenario {
    /// Touch a guest's memory for the first time
    Populate,
    /// Log a guest's dirty pages
    DirtyLog,
    /// Execute from a guest's huge pages
    Execute,
    /// Look for the pages that a guest used
    Age,
    /// Fill a guest's memory, take it away, fill it again
    MemoryStress,
    /// Add, move and delete a memslot beside running vCPUs
    Memslot,
    /// Have the vCPUs of an Arm guest switch their caches
    BootCaches,
    /// Copy a guest's memory while it runs
    Migrate,
    /// Measure in a machine emulated by QEMU
    Emulate,
}
