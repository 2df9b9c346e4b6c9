//! Tasks of the workspace: set-up, tests, benchmarks and checks.

mod api;
mod bench;
mod counts;
mod docs;
mod e2e;
mod emulators;
mod fences;
mod hypervisor;
mod kernels;
mod litmus;
mod metrics;
mod miri;
mod msrv;
mod packages;
mod peers;
mod publish;
#[cfg(test)]
mod rooms;
mod setup;
mod size;
mod stages;
mod static_build;
mod stick;
mod test;
mod walkers;
mod workspace;

use clap::{Parser, Subcommand};
use slat_kernel::vm::{Architecture, Debian};
use stages::Stage;
use static_build::Program;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  cargo xtask test                   the tests
  cargo xtask test --deep            what CI runs after them
  cargo xtask test formatting clippy
  cargo xtask test --long            with longer histories, more interleavings, and what takes hours
  cargo xtask bench                  the engine's operations against what is asked of each
  cargo xtask bench --quick
  cargo xtask peers --quick          beside Linux's own code and other crates
  cargo xtask counts                 instructions of each operation against the committed table
  cargo xtask size                   the engine's text, by format and operation
  cargo xtask size --stack           its stack
  cargo xtask static --arch x86_64 --arch aarch64    programs for `slat emulate`
  cargo xtask stick                  a USB stick that proves the tables on the machine that boots it
  cargo xtask package                a .deb, and an image of a container
  cargo xtask hypervisor run         Linux on the hypervisor, in QEMU
  cargo xtask setup                  install what the tests need, and stop";

/// Set-up, tests and checks of the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Test, stage by stage, and print the time of each stage and what was skipped
    ///
    /// A failing stage does not stop the next ones. With CI=true in the environment, a stage fails
    /// instead of being skipped if its tools are missing and could be installed.
    Test {
        /// Only these stages [default: those without a flag below]
        stages: Vec<Stage>,
        /// The further stages of CI: lints, every interleaving, the emulated CPUs' walkers, every
        /// format
        #[arg(long, conflicts_with = "stages")]
        deep: bool,
        /// All stages, with longer histories, every interleaving within each model's own bound,
        /// larger guests
        #[arg(long)]
        long: bool,
    },
    /// Compare the engine's operations with the machine's limits, and print thresholds and results
    ///
    /// Builds for release and runs `slat-bench engine`. A missed threshold is no failure.
    Bench {
        /// Arguments of `slat-bench engine`: --quick, --only NAME,..., --rounds N, --memory SIZE
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Compare the engine with Linux's own page-table code and other crates, in one run
    ///
    /// Installs Debian's Linux source and Coccinelle, builds for release and runs
    /// `slat-bench peers`.
    Peers {
        /// Arguments of `slat-bench peers`: --quick, --memory SIZE, --rounds N, --output DIR
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Count the instructions and cache lines of each operation, and compare them with
    /// docs/counts.md
    ///
    /// Installs valgrind if it is missing. Fails if a count differs by more than 2 %.
    Counts {
        /// Write the table instead
        #[arg(long)]
        accept: bool,
    },
    /// Print the bytes of text that the engine adds to a user without an operating system
    Size {
        /// Print bytes of stack instead: the deepest path of calls of each operation
        #[arg(long)]
        stack: bool,
    },
    /// Build static `slat` and `slat-bench`, which need nothing of a system, for `slat emulate`
    ///
    /// The programs are target/static/slat-ARCH and slat-bench-ARCH. Needs rustup, which installs
    /// what each target needs.
    Static {
        /// Architecture; repeat it for several [default: this machine's]
        #[arg(long)]
        arch: Vec<Architecture>,
        /// Only this program [default: both]
        #[arg(long)]
        program: Vec<Program>,
    },
    /// Write an image for a USB stick that proves the tables on the machine that boots it
    ///
    /// The machine needs UEFI firmware with Secure Boot off, and VT-x or SVM, or Arm's EL2. The
    /// stick checks EPT or NPT on every CPU, or stage 2 on two, and writes slat.txt to itself.
    /// Installs Rust's targets for UEFI if they are missing.
    #[command(after_help = "Examples:\n  cargo xtask stick\n  cargo xtask stick /tmp/stick.img")]
    Stick {
        /// The file to write [default: target/slat-stick.img]
        image: Option<PathBuf>,
    },
    /// Build a `.deb` with the static `slat`, and what an image of a container is made of, into
    /// target/dist
    Package,
    /// Run Linux on the hypervisor, in QEMU
    #[command(subcommand)]
    Hypervisor(Hypervisor),
    /// Install the tools that the tests need
    Setup,
}

#[derive(Debug, Subcommand)]
enum Hypervisor {
    /// Boot a guest, and show its console and the cost of its memory
    ///
    /// Installs QEMU, Rust's target and Debian's kernel if they are missing. Lines of the
    /// hypervisor begin with `slat:`.
    Run(Box<hypervisor::RunArgs>),
    /// Write the files that a guest boots to DIR: `initrd`, and a link to its kernel, `Image`
    Guest {
        /// The folder to make
        dir: PathBuf,
        /// Debian's kernel
        #[arg(long, default_value = "debian-6.12")]
        kernel: Debian,
        /// Also put the kernel and a small initial file system into it, for the guest to boot
        #[arg(long)]
        kexec: bool,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Test { stages, deep, long } => test::run(&stages, deep, long),
        Task::Bench { arguments } => bench::run(&arguments),
        Task::Peers { arguments } => peers::run(&arguments),
        Task::Counts { accept } => counts::run(accept).map(|outcome| {
            if let workspace::Outcome::Skipped(reason) = outcome {
                println!("not compared: {reason}");
            }
        }),
        Task::Size { stack } => size::run(stack),
        Task::Static { arch, program } => static_build::run(&arch, &program),
        Task::Stick { image } => walkers::write_stick(image),
        Task::Package => packages::build().map(|(deb, image)| {
            println!("{}\n{}: podman build", deb.display(), image.display());
        }),
        Task::Hypervisor(Hypervisor::Run(args)) => hypervisor::run(&args),
        Task::Hypervisor(Hypervisor::Guest { dir, kernel, kexec }) => {
            hypervisor::image_to(&dir, kernel, kexec)
        }
        Task::Setup => setup::all(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the folder of the workspace.
fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("xtask is a crate of the workspace")
}

/// Returns the folder in which the workspace is built.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Returns whether this is CI, where a missing tool cannot be installed on request.
fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true" || value == "1")
}
