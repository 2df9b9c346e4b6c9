//! The command line of `slat kernel`.

use super::{BisectArgs, EditsArgs, InTurnsArgs, PartsArgs, ReviewArgs, TreeArgs};
use clap::{Args, Subcommand};
use slat_kernel::vm::Architecture;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  slat kernel list --tree debian-6.12
      the edits that there are, and whether they fit that tree
  slat kernel build --tree ~/linux --arch aarch64 --edit bounded-walks
  git -C ~/linux format-patch -2 --stdout | slat kernel build --tree debian-6.12 --patch -
  slat kernel ab tree:debian-6.12 --patch my.patch --arch aarch64 \
      -- bench dirty-log -v 1 -b 32M --eager-split 2m --manual-protect on --initially-set on
      does the patch take more instructions? a verdict from five boots of each kernel in turns
  slat kernel boot --tree debian-6.12 --arch aarch64 --edit bounded-walks
      build it, boot it in QEMU, and run a small guest under its KVM
  slat kernel patch --tree ~/linux --edit bounded-walks -o patches/ && git -C ~/linux am patches/0*
  slat kernel test --tree debian-6.12 --arch aarch64 --edit bounded-walks
      KVM's own selftests on it
  slat kernel test --tree ~/linux --arch aarch64 --edit flush-once --cpu cortex-a76 \\
      --test flush_once_test --probe kvm_pgtable_stage2_flush -- -v 8
      one of them, with arguments of one's own, counting the calls of a function
  slat emulate --arch aarch64 --kernel tree:debian-6.12+bounded-walks --count-instructions \\
      -- bench dirty-log -b 64M --eager-split 2m --manual-protect on --initially-set on
      what the edit costs or saves, exactly

The tree is never written to: edits are made to a copy of hard links below the user's cache, where
objects and images are kept, so that the next build compiles what changed. --patch takes patches as
they are: a diff, files of `git format-patch` or a folder of them, an mbox; git applies them, whole
or not at all. Slat's own edits are semantic patches, which Coccinelle applies; they are part of
this program, under GPL-2.0-only.

Exit codes:
  0    done
  1    a program is missing, an edit does not fit, or a build or a test failed; the text says which
  2    a command line or values that cannot be right
  3    the kernel did not boot, or its machine ended too early, or too late
  130  interrupted (Ctrl-C, SIGTERM); objects that are whole are kept";

/// Options of `slat kernel`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct KernelArgs {
    /// The action.
    #[command(subcommand)]
    pub action: KernelAction,
}

/// Actions of `slat kernel`.
#[derive(Clone, Debug, Subcommand)]
pub enum KernelAction {
    /// List the edits, and with --tree whether they fit it
    List(ListArgs),
    /// Build a tree with edits, and print the path of its image
    #[command(arg_required_else_help = true)]
    Build(BuildArgs),
    /// Write edits as patches against a tree, for `git am`
    #[command(arg_required_else_help = true)]
    Patch(PatchArgs),
    /// Build a tree with edits, boot it in QEMU, and run a small guest under its KVM
    #[command(arg_required_else_help = true)]
    Boot(BootArgs),
    /// Build a tree with edits and its KVM selftests, and run them on it in QEMU
    #[command(arg_required_else_help = true)]
    Test(TestArgs),
    /// Boot two kernels in turns, and say what the second takes more or fewer instructions for
    #[command(arg_required_else_help = true)]
    Ab(InTurnsArgs),
    /// Find the commit from which on a phase takes more or fewer instructions
    #[command(arg_required_else_help = true)]
    Bisect(BisectArgs),
    /// Write a page on patches: compiled, checked, tested, measured, with the commands
    #[command(arg_required_else_help = true)]
    Review(ReviewArgs),
}

/// Options of `slat kernel list`.
#[derive(Clone, Debug, Args)]
pub struct ListArgs {
    /// Say of each series whether it fits this tree: a path, debian-6.1, debian-6.12, debian-7.3
    #[arg(long, value_name = "TREE")]
    pub tree: Option<String>,

    /// The folder of edits.
    #[command(flatten)]
    pub edits: EditsArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `slat kernel build`.
#[derive(Clone, Debug, Args)]
pub struct BuildArgs {
    /// The tree and its edits.
    #[command(flatten)]
    pub tree: TreeArgs,

    /// Architecture [default: this machine's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<Architecture>,

    /// Compile KVM's objects and those that the edits touch, and no image: a check in two minutes
    #[arg(long)]
    pub objects: bool,

    /// Compile, after each edit in turn, the objects of all files touched so far, and no image: the
    /// series can be bisected
    #[arg(long, conflicts_with = "objects")]
    pub each: bool,

    /// With --each, compile with the kernel's additional warnings (W=1), and print those that each
    /// edit adds
    #[arg(long, requires = "each")]
    pub warnings: bool,

    /// Print JSON: the image, the release, and what was run for it
    #[arg(long)]
    pub json: bool,
}

/// Options of `slat kernel patch`.
#[derive(Clone, Debug, Args)]
pub struct PatchArgs {
    /// The tree and its edits.
    #[command(flatten)]
    pub tree: TreeArgs,

    /// Add your Signed-off-by, as `git commit --signoff` does
    #[arg(long)]
    pub signoff: bool,

    /// Folder to write them to, which is made; patches of the same names are replaced
    #[arg(long, short, value_name = "DIR", default_value = "patches")]
    pub output: PathBuf,
}

/// Options of `slat kernel boot`.
#[derive(Clone, Debug, Args)]
pub struct BootArgs {
    /// The tree and its edits.
    #[command(flatten)]
    pub tree: TreeArgs,

    /// The emulated machine.
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// The emulated machine that boots a kernel.
#[derive(Clone, Debug, Args)]
pub struct MachineArgs {
    /// Architecture [default: this machine's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<Architecture>,

    /// What runs in it, and on which CPU.
    #[command(flatten)]
    pub parts: PartsArgs,

    /// How long the machine may take: 90s, 10m
    #[arg(long, value_name = "TIME", default_value = "10m")]
    #[arg(value_parser = slat_lab::cli::time::some)]
    pub time_limit: Duration,

    /// Let the machine go on after an Oops, a warning of KVM, a report of lockdep or a stall, which
    /// end it otherwise
    #[arg(long)]
    pub keep_running: bool,

    /// Write all that the machine's console said to this file
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `slat kernel test`: KVM selftests to run.
#[derive(Clone, Debug, Args)]
pub struct TestArgs {
    /// The tree and its edits.
    #[command(flatten)]
    pub tree: TreeArgs,

    /// The emulated machine.
    #[command(flatten)]
    pub machine: MachineArgs,

    /// Tests to run; those of arm64 that concern no memory have to be named [default: all others
    /// that are known for the architecture]
    #[arg(long = "test", value_name = "NAME,...", value_delimiter = ',')]
    pub tests: Vec<String>,

    /// Run `slat check` as well, for so long: does KVM lose a guest's write?
    #[arg(long, value_name = "TIME", value_parser = slat_lab::cli::time::run)]
    #[arg(conflicts_with = "arguments")]
    pub check: Option<Duration>,

    /// CPUs of the machine. page_fault_test fails with two: QEMU 7.2 delays a TLB invalidation of
    /// Arm's for a CPU that another thread emulates
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "count_instructions")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=8))]
    pub cpus: u32,

    /// Let the machine's clock count instructions, one a nanosecond, so that times which tests
    /// report do not depend on the load of this host. The machine has one CPU then
    #[arg(long)]
    pub count_instructions: bool,

    /// Functions of the kernel whose calls are counted while each test runs: NAME, or NAME? if it
    /// may be missing
    #[arg(long, value_name = "FUNCTION,...", value_delimiter = ',')]
    pub probe: Vec<String>,

    /// Arguments of the test in place of its usual ones; needs --test with one name
    #[arg(last = true, value_name = "ARGUMENT")]
    pub arguments: Vec<String>,
}

/// Options of the hidden `slat calls`, by which an emulated machine runs its tests: a program, and
/// the kernel functions whose calls are counted while it runs.
#[derive(Clone, Debug, Args)]
pub struct CallsArgs {
    /// Functions of the kernel whose calls are counted.
    #[arg(long, value_name = "FUNCTION,...", value_delimiter = ',')]
    pub probe: Vec<String>,

    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub command: Vec<String>,
}
