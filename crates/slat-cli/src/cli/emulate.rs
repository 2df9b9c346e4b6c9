//! The command line of emulated machines.

use clap::{Args, ValueEnum};
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
  slat emulate --arch aarch64 -- slat-bench engine --quick
  slat emulate --kernel arch/x86/boot/bzImage --modules /lib/modules/7.1.0 \\
      --module-param kvm.nx_huge_pages=1 -- bench dirty-log --memory 64M
      a kernel of one's own

QEMU interprets every instruction (TCG), so times say nothing and are left out of the report; counts
are exact. Debian's kernels are fetched once, from the mirror that this machine's apt uses, without
root; they are kept in slat/kernels below the user's cache directory.

Exit codes:
  0    the command ran and its report came home
  1    QEMU or a kernel is missing; or the command's own failure
  2    a command line or values that cannot be right
  3    no report: the kernel did not boot, or its machine ended too early, or too late
  130  interrupted (Ctrl-C, SIGTERM)";

/// A machine to emulate, and what to run in it.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct EmulateArgs {
    /// Architecture of the machine [default: this one's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<Architecture>,

    /// Its kernel: debian-6.1, debian-6.12, or the path of an x86 bzImage or an arm64 Image
    #[arg(long, value_name = "KERNEL", default_value = "debian-6.12")]
    pub kernel: KernelChoice,

    /// CPUs of the machine
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    pub cpus: u32,

    /// Memory of the machine
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: Size,

    /// NUMA nodes of the machine, which share its CPUs and its memory evenly
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=8)
    )]
    pub numa_nodes: u32,

    /// The slat of that architecture to run there; a static one unless it is of this machine's own
    ///
    /// [default: this program, with its shared libraries, if it is of that architecture; slat-ARCH
    /// beside it; or one that `cargo xtask static` builds from this program's sources]
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,

    /// The kernel's modules, its /lib/modules/VERSION [default: those of Debian's kernel, or none]
    #[arg(long, value_name = "DIR")]
    pub modules: Option<PathBuf>,

    /// A parameter of a kernel module: kvm.nx_huge_pages=1
    #[arg(long, value_name = "MODULE.NAME=VALUE")]
    pub module_param: Vec<ModuleParam>,

    /// More words of the kernel's command line: hugepages=64
    #[arg(long, value_name = "WORDS")]
    pub append: Option<String>,

    /// The machine's CPU, as QEMU names it: cortex-a76 has no FEAT_S2FWB [default: all that QEMU
    /// has]
    #[arg(long, value_name = "MODEL")]
    pub cpu: Option<String>,

    /// How long the machine may take: 90s, 10m
    #[arg(
        long,
        value_name = "TIME",
        default_value = "5m",
        value_parser = slat_lab::cli::time::some
    )]
    pub time_limit: Duration,

    /// Write the report, a results.json, to this file
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Write all that the machine's console said to this file
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,

    /// Print the report on stdout as JSON in place of the table
    #[arg(long)]
    pub json: bool,

    /// The words to run there: bench ..., tune ..., or slat-bench ...
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// An architecture that can be emulated with second-stage translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Architecture {
    /// AMD's nested paging (NPT)
    #[value(name = "x86_64")]
    X86_64,
    /// Arm's stage 2, VHE
    #[value(name = "aarch64")]
    Aarch64,
}

impl Architecture {
    /// This machine's.
    pub fn of_this_machine() -> Option<Self> {
        Self::from_str(std::env::consts::ARCH, false).ok()
    }
}

/// Where a kernel comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// Linux 6.1, of Debian 12.
    Debian6_1,
    /// Linux 6.12, of Debian 12's backports.
    Debian6_12,
    /// A file.
    Path(PathBuf),
}

impl FromStr for KernelChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "debian-6.1" => Self::Debian6_1,
            "debian-6.12" => Self::Debian6_12,
            path => Self::Path(path.into()),
        })
    }
}

impl fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Debian6_1 => f.write_str("debian-6.1"),
            Self::Debian6_12 => f.write_str("debian-6.12"),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// A parameter of a module, as the kernel's command line would have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleParam {
    /// Name of the module, with `_`.
    pub module: String,
    /// Name of the parameter.
    pub name: String,
    /// Its value.
    pub value: String,
}

impl FromStr for ModuleParam {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = || {
            let (module, rest) = text.split_once('.')?;
            let (name, value) = rest.split_once('=')?;
            let word = |text: &str| {
                let inside = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
                !text.is_empty() && text.chars().all(inside)
            };
            let clean = !value.chars().any(|c| c.is_whitespace() || c.is_control() || c == '"');
            (word(module) && word(name) && clean).then(|| Self {
                module: module.replace('-', "_"),
                name: name.to_owned(),
                value: value.to_owned(),
            })
        };
        parts()
            .ok_or_else(|| "write it as MODULE.NAME=VALUE, such as kvm.nx_huge_pages=1".to_owned())
    }
}

slat_lab::display_as_written!(Architecture);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_parameter_has_three_parts() {
        let param: ModuleParam = "kvm-amd.npt=0".parse().unwrap();
        let parts = (&*param.module, &*param.name, &*param.value);
        assert_eq!(parts, ("kvm_amd", "npt", "0"));
        for wrong in ["kvm", "kvm.npt", "npt=1", ".npt=1", "kvm.=1", "kvm.npt=1 2", "kvm.a b=1"] {
            assert!(wrong.parse::<ModuleParam>().unwrap_err().contains("MODULE.NAME"), "{wrong}");
        }
    }

    #[test]
    fn a_kernel_is_one_of_debians_or_a_file() {
        assert_eq!("debian-6.1".parse(), Ok(KernelChoice::Debian6_1));
        assert_eq!("boot/Image".parse(), Ok(KernelChoice::Path("boot/Image".into())));
        for name in ["debian-6.1", "debian-6.12", "boot/Image"] {
            assert_eq!(name.parse::<KernelChoice>().unwrap().to_string(), name);
        }
    }
}
