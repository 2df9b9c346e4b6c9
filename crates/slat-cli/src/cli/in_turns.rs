//! The command line of kernels that boot in turns: `slat kernel ab` and `slat kernel bisect`.

use super::{ConfigArgs, EditsArgs, EmulateArgs, KernelChoice, PartsArgs, PatchesArgs};
use clap::Args;
use slat_kernel::vm::Architecture;
use slat_lab::cli::PrintArgs;
use slat_lab::size::Size;
use std::path::PathBuf;
use std::time::Duration;

const IN_TURNS_EXAMPLES: &str = "\
Examples:
  slat kernel ab tree:debian-6.12 --patch my.patch --arch aarch64 \\
      -- bench dirty-log -v 1 -b 32M --eager-split 2m --manual-protect on --initially-set on
  slat kernel ab tree:debian-6.12 tree:debian-6.12+bounded-walks --arch aarch64 -- bench age -v 1
  slat kernel ab tree:$HOME/linux --range v6.12..topic -- bench dirty-log -v 1 -b 32M
  slat kernel ab old/bzImage new/bzImage --fail-if-slower -- bench populate -v 1 -b 32M
  slat kernel ab tree:debian-6.12 --patch my.patch -- check --for 2m
      does one of them lose a write of a guest? Each kernel boots once

A kernel is written as for `slat emulate --kernel`. Without AFTER, it is BEFORE with the patches;
with AFTER, --patch is for that one. Each boot differs a little from the one before, so that ticks
fall into other phases; the first line says what every boot of one kernel takes more of than every
boot of the other, and by how much nothing else differs.

Exit codes:
  0    compared
  1    --fail-if-slower, and a phase takes more instructions; AFTER loses a write; or a build failed
  2    a command line or values that cannot be right, or a patch that is none
  3    a kernel did not boot, or complained; the text has the cause
  130  interrupted (Ctrl-C, SIGTERM)";

/// Options of `slat kernel ab`.
#[derive(Clone, Debug, Args)]
#[command(after_help = IN_TURNS_EXAMPLES)]
pub struct InTurnsArgs {
    /// The kernel to compare with: `tree:TREE[@REVISION][+SERIES,...]`, debian-6.12, the path of an
    /// image
    #[arg(value_name = "BEFORE")]
    pub before: KernelChoice,

    /// The kernel to judge [default: BEFORE with the patches]
    #[arg(value_name = "AFTER")]
    pub after: Option<KernelChoice>,

    /// The modules of an image BEFORE, its /lib/modules/VERSION [default: as for `slat emulate`]
    #[arg(long, value_name = "DIR")]
    pub modules: Option<PathBuf>,

    /// The modules of an image AFTER
    #[arg(long, value_name = "DIR", requires = "after")]
    pub modules_after: Option<PathBuf>,

    /// Patches of the kernel to judge.
    #[command(flatten)]
    pub patches: PatchesArgs,

    /// How both are built and booted.
    #[command(flatten)]
    pub counted: CountedArgs,

    /// Write before.json and after.json to this folder, for `slat compare`
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// Exit code 1 if a phase takes more instructions
    #[arg(long)]
    pub fail_if_slower: bool,

    /// How it is printed.
    #[command(flatten)]
    pub print: PrintArgs,
}

const BISECT_EXAMPLES: &str = "\
Examples:
  slat kernel bisect --tree ~/linux v6.12 topic --arch aarch64 \\
      -- bench dirty-log -v 1 -b 32M --eager-split 2m --manual-protect on --initially-set on
  slat kernel bisect --tree ~/linux v6.12 topic --phase clear -- bench dirty-log -v 1 -b 32M

GOOD and BAD are compared as by `slat kernel ab`; the phase that differs most is searched. A commit
is bad if its kernel is nearer to that of BAD. One that does not build or boot is passed over.

Exit codes: as of `slat kernel ab`; 1 also if GOOD and BAD do not differ";

/// Options of `slat kernel bisect`.
#[derive(Clone, Debug, Args)]
#[command(after_help = BISECT_EXAMPLES)]
pub struct BisectArgs {
    /// The git repository, which is only read
    #[arg(long, value_name = "REPOSITORY")]
    pub tree: String,

    /// A revision before the change
    #[arg(value_name = "GOOD")]
    pub good: String,

    /// A revision with the change
    #[arg(value_name = "BAD")]
    pub bad: String,

    /// The phase to look at: clear, enable, ... [default: the one that differs most]
    #[arg(long, value_name = "PHASE")]
    pub phase: Option<String>,

    /// How kernels are built and booted.
    #[command(flatten)]
    pub counted: CountedArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const REVIEW_EXAMPLES: &str = "\
Examples:
  slat kernel review tree:debian-6.12 --patch series.mbox --arch aarch64 -o review.md \\
      -- bench dirty-log -v 1 -b 32M --eager-split 2m --manual-protect on --initially-set on
  slat kernel review tree:$HOME/linux --range v6.12..topic --no-tests -o review.html \
      -- bench age -v 1

The page says of the patches: whether each compiles, and its new warnings (W=1, and sparse if it is
installed); what checkpatch says; KVM's selftests before and after, on one CPU and on two, and with
--checked under lockdep and KASAN; whether a guest's writes are lost (`slat check`) before and
after; which phases take more instructions; what is new in the kernel's log; with the command that
repeats each. What fails is part of the page.";

/// Options of `slat kernel review`.
#[derive(Clone, Debug, Args)]
#[command(after_help = REVIEW_EXAMPLES)]
pub struct ReviewArgs {
    /// The tree without the patches: `tree:TREE[@REVISION][+SERIES,...]`
    #[arg(value_name = "BEFORE")]
    pub before: KernelChoice,

    /// The patches.
    #[command(flatten)]
    pub patches: PatchesArgs,

    /// How both kernels are built and booted.
    #[command(flatten)]
    pub counted: CountedArgs,

    /// Selftests to run [default: all that are known for the architecture]
    #[arg(long = "test", value_name = "NAME,...", value_delimiter = ',')]
    pub tests: Vec<String>,

    /// Run no selftest
    #[arg(long, conflicts_with = "tests")]
    pub no_tests: bool,

    /// Run the selftests on machines with so many CPUs
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: Vec<u32>,

    /// Run the selftests on a kernel with lockdep, PROVE_RCU and KASAN, too (`--config checked`): a
    /// build of its own, and tests that take ten times as long
    #[arg(long, conflicts_with_all = ["no_tests", "config"])]
    pub checked: bool,

    /// How long `slat check` looks for lost writes under each kernel
    #[arg(long, value_name = "TIME", default_value = "60s")]
    #[arg(value_parser = slat_lab::cli::time::run)]
    pub check: Duration,

    /// Do not run `slat check`
    #[arg(long)]
    pub no_check: bool,

    /// Write the page to this file: HTML if its name ends in .html, Markdown otherwise
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Machines that count instructions, whichever their kernels.
#[derive(Clone, Debug, Args)]
pub struct CountedArgs {
    /// The folder of edits.
    #[command(flatten)]
    pub edits: EditsArgs,

    /// How trees are built.
    #[command(flatten)]
    pub config: ConfigArgs,

    /// Architecture [default: this machine's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<Architecture>,

    /// Boots of each kernel
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u32).range(5..=1000))]
    pub boots: u32,

    /// Functions whose calls are counted, as for `slat emulate`; `none` counts none
    #[arg(long, value_name = "FUNCTION,...", value_delimiter = ',')]
    pub probe: Vec<String>,

    /// Memory of the machine
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: Size,

    /// What runs in it, and on which CPU.
    #[command(flatten)]
    pub parts: PartsArgs,

    /// How long each machine may take
    #[arg(long, value_name = "TIME", default_value = "5m")]
    #[arg(value_parser = slat_lab::cli::time::some)]
    pub time_limit: Duration,

    /// The words to run there: bench ..., or check ...
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl CountedArgs {
    /// Returns the machine of a kernel.
    pub fn machine(&self, kernel: KernelChoice, patches: PatchesArgs) -> EmulateArgs {
        EmulateArgs {
            arch: self.arch,
            edits: self.edits.clone(),
            patches,
            config: self.config.clone(),
            count_instructions: true,
            probe: self.probe.clone(),
            memory: self.memory,
            parts: self.parts.clone(),
            time_limit: self.time_limit,
            command: self.command.clone(),
            ..EmulateArgs::of(kernel)
        }
    }
}
