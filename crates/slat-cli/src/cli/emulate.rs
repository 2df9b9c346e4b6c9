//! The command line of `slat emulate`.

use super::{ConfigArgs, EditsArgs, PatchesArgs, TreeChoice};
use clap::{Args, ValueEnum};
use slat_kernel::vm::modules::ModuleParam;
use slat_kernel::vm::{Architecture, Debian};
use slat_lab::size::Size;
use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  slat emulate --arch x86_64 --kernel debian-6.1 -- bench dirty-log --memory 64M --backing 2m
      KVM with NPT and the TDP MMU, on a host without either; which pages it split, exactly
  slat emulate --kernel debian-6.12 -o after.json -- bench dirty-log --memory 64M --backing 2m
  slat compare before.json after.json
  slat emulate --arch aarch64 -- bench dirty-log --memory 16M --backing 2m
  slat emulate --arch aarch64 --kernel tree:debian-6.12 --count-instructions -o before.json \\
      -- bench dirty-log -b 64M --eager-split 2m --manual-protect on --initially-set on
      a kernel that is built from source; instructions, exactly. With --boots 5, and once more
      with --patch my.patch or of tree:debian-6.12+bounded-walks, `slat compare before.json
      after.json` has a verdict; `slat kernel ab` does all of it
  slat emulate --arch aarch64 -- slat-bench engine --quick
  slat emulate --kernel arch/x86/boot/bzImage --modules /lib/modules/7.1.0 \\
      --module-param kvm.nx_huge_pages=1 -- bench dirty-log --memory 64M
      a kernel of one's own

QEMU interprets every instruction (TCG), so times say nothing and are left out of the report; counts
are exact. With --count-instructions the instructions that a phase took stand in their place: two
boots agree to about one in a hundred. They are no cycles: a cache miss, a barrier and an
invalidation count one. Debian's kernels are fetched once, from the mirror that this machine's apt
uses, without root; they are kept in slat/kernels below the user's cache directory.

Exit codes:
  0    the command ran and its report came home
  1    QEMU or a kernel is missing; or the command's own failure
  2    a command line or values that cannot be right
  3    no report: the kernel did not boot, or its machine ended too early, or too late
  130  interrupted (Ctrl-C, SIGTERM)";

/// Options of `slat emulate`: the machine, and the command to run in it.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct EmulateArgs {
    /// Architecture of the machine [default: this one's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<Architecture>,

    /// Kernel of the machine: debian-6.1, debian-6.12, the path of an x86 bzImage or an arm64
    /// Image, or `tree:TREE[@REVISION][+SERIES,...]`, which is built: see `slat kernel`
    #[arg(long, value_name = "KERNEL", default_value = "debian-6.12")]
    pub kernel: KernelChoice,

    /// Folder of the edits of tree:TREE+SERIES.
    #[command(flatten)]
    pub edits: EditsArgs,

    /// Patches of tree:TREE.
    #[command(flatten)]
    pub patches: PatchesArgs,

    /// How a kernel of tree:TREE is built.
    #[command(flatten)]
    pub config: ConfigArgs,

    /// Let the machine's clocks count instructions, one a nanosecond, and report instructions in
    /// place of times: they do not depend on the load of this host. The machine has one CPU then
    #[arg(long)]
    pub count_instructions: bool,

    /// Functions of the kernel whose calls are counted in each phase, in a machine of their own,
    /// as counting takes instructions: NAME, or NAME? if it may be missing; `none` counts no calls
    ///
    /// [default: none; with --count-instructions visits, flushes, invalidations and locks]
    #[arg(long, value_name = "FUNCTION,...", value_delimiter = ',')]
    pub probe: Vec<String>,

    /// Boot so often, and gather the samples of all boots: guests of one boot count alike, so a
    /// boot is a group for `slat compare`, which wants 5
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "run")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub boots: u32,

    /// CPUs of the machine [default: 2, or 1 with --count-instructions]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: Option<u32>,

    /// Memory of the machine
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: Size,

    /// NUMA nodes of the machine, which share its CPUs and its memory evenly
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=8))]
    pub numa_nodes: u32,

    /// Have Linux there give its free memory back to this host (virtio-balloon), and print what
    /// QEMU held at most, and eight seconds after the command
    #[arg(long)]
    pub free_page_reporting: bool,

    /// What runs there, and on which CPU.
    #[command(flatten)]
    pub parts: PartsArgs,

    /// A program to run there in place of slat, for tests: of this host's architecture, or
    /// statically linked. COMMAND is its arguments; its output and its exit code are passed on
    #[arg(long, value_name = "PATH", hide = true)]
    pub run: Option<PathBuf>,

    /// The kernel's modules, its /lib/modules/VERSION [default: those of Debian's kernel, or none]
    #[arg(long, value_name = "DIR")]
    pub modules: Option<PathBuf>,

    /// A further module of the kernel to load, with those that it needs: zram
    #[arg(long, value_name = "NAME")]
    pub module: Vec<String>,

    /// A parameter of a kernel module: kvm.nx_huge_pages=1
    #[arg(long, value_name = "MODULE.NAME=VALUE")]
    pub module_param: Vec<ModuleParam>,

    /// How long the machine may take: 90s, 10m
    #[arg(long, value_name = "TIME", default_value = "5m")]
    #[arg(value_parser = slat_lab::cli::time::some)]
    pub time_limit: Duration,

    /// Let the machine go on after an Oops, a warning of KVM, a report of lockdep or a stall, which
    /// end it otherwise
    #[arg(long)]
    pub keep_running: bool,

    /// Write the report, a results.json, to this file
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Write all that the machine's console said to this file
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,

    /// Print the report on stdout as JSON in place of the table
    #[arg(long)]
    pub json: bool,

    /// The words to run there: bench ..., tune ..., check ..., or slat-bench ...
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Parts of an emulated machine, which all commands name alike.
#[derive(Clone, Debug, Default, Args)]
pub struct PartsArgs {
    /// The slat program to run in the machine; statically linked, unless the architecture is this
    /// host's
    ///
    /// [default: this program, with its shared libraries, if it is of that architecture; slat-ARCH
    /// beside it; or one that `cargo xtask static` builds from this program's sources]
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,

    /// The machine's CPU, as QEMU names it: cortex-a76 has no FEAT_S2FWB [default: all that QEMU
    /// has]
    #[arg(long, value_name = "MODEL")]
    pub cpu: Option<String>,

    /// More words of the kernel's command line: hugepages=64
    #[arg(long, value_name = "WORDS")]
    pub append: Option<String>,
}

impl EmulateArgs {
    /// Returns the defaults of all options, with this kernel and an empty command.
    pub fn of(kernel: KernelChoice) -> Self {
        Self {
            arch: None,
            kernel,
            edits: EditsArgs::default(),
            patches: PatchesArgs::default(),
            config: ConfigArgs::default(),
            count_instructions: false,
            probe: Vec::new(),
            boots: 1,
            cpus: None,
            memory: Size(1 << 30),
            numa_nodes: 1,
            free_page_reporting: false,
            parts: PartsArgs::default(),
            run: None,
            modules: None,
            module: Vec::new(),
            module_param: Vec::new(),
            time_limit: Duration::from_secs(300),
            keep_running: false,
            output: None,
            console: None,
            json: false,
            command: Vec::new(),
        }
    }

    /// Returns the kernel's name, with its patches.
    pub fn named(&self) -> String {
        let patches = self.patches.paths.iter().filter_map(|path| path.file_name());
        let patches = patches.map(|name| name.to_string_lossy());
        let range = self.patches.range.as_deref().map(Into::into);
        let patches: Vec<_> = range.into_iter().chain(patches).collect();
        let kernel = &self.kernel;
        if patches.is_empty() {
            kernel.to_string()
        } else {
            format!("{kernel}+{}", patches.join("+"))
        }
    }

    /// Returns the number of CPUs of the machine.
    pub fn cpus(&self) -> u32 {
        self.cpus.unwrap_or(if self.count_instructions { 1 } else { 2 })
    }
}

/// Where a kernel comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// A kernel that Debian built.
    Debian(Debian),
    /// The path of a kernel image.
    Path(PathBuf),
    /// A source tree, from which `slat` builds the kernel.
    Tree(TreeChoice),
}

/// Prefix of a kernel that is to be built.
const TREE: &str = "tree:";

impl FromStr for KernelChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        if let Some(tree) = text.strip_prefix(TREE) {
            let Ok(tree) = tree.parse();
            return Ok(Self::Tree(tree));
        }
        let debian = Debian::from_str(text, false);
        Ok(debian.map_or_else(|_| Self::Path(text.into()), Self::Debian))
    }
}

impl fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Debian(kernel) => kernel.fmt(f),
            Self::Path(path) => path.display().fmt(f),
            Self::Tree(tree) => write!(f, "{TREE}{tree}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_one_of_debians_or_a_file() {
        assert_eq!("debian-6.1".parse(), Ok(KernelChoice::Debian(Debian::Linux6_1)));
        assert_eq!("boot/Image".parse(), Ok(KernelChoice::Path("boot/Image".into())));
        let tree = TreeChoice { tree: "../linux".into(), edits: vec!["walks".into()] };
        assert_eq!("tree:../linux+walks".parse(), Ok(KernelChoice::Tree(tree)));
        for name in ["debian-6.1", "debian-6.12", "boot/Image", "tree:debian-6.12+a,b/2"] {
            assert_eq!(name.parse::<KernelChoice>().unwrap().to_string(), name);
        }
    }
}
