//! The stages of the tests, in the order in which they run: stages that fail fast come first.

use crate::workspace::{Outcome, TESTED, cargo, programs, ran};
use crate::{
    api, counts, docs, e2e, emulators, fences, hypervisor, in_ci, kernels, litmus, metrics, miri,
    msrv, packages, peers, publish, setup, size, target, walkers,
};
use clap::ValueEnum;
use std::fs::File;
use std::process::Command;

/// A stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Stage {
    /// `cargo fmt --check`
    Formatting,
    /// `cargo clippy`, without warnings; with --deep
    Clippy,
    /// The engine with no format, and with each alone; with --deep
    Features,
    /// The engine with the oldest Rust that it supports; with --deep
    Msrv,
    /// The engine, and a user of it, without an operating system; with --deep
    Bare,
    /// The published crates, packed, and built from the packages; with --deep
    Publish,
    /// Licences and sources of all dependencies, by cargo-deny; with --deep
    Deny,
    /// The program as it is shipped: a `.deb`, and an image of a container; with --deep
    Packages,
    /// A Prometheus server scrapes a watch; with --deep
    Metrics,
    /// The public interface of these crates, against the last tag; with --deep
    Api,
    /// The stack of each of the engine's operations, and the text of small users; with --deep
    Stack,
    /// Instructions of each operation, against the committed table; with --deep
    Counts,
    /// Number of fences in the operations on RISC-V, where an acquire is one; with --deep
    Fences,
    /// A build of the tests
    Build,
    /// Unit, property and command-line tests
    Tests,
    /// The examples in the documentation
    Doctests,
    /// The documentation itself, without warnings; with --deep
    Docs,
    /// `slat` for emulated machines of the other architecture; with --long
    Static,
    /// Every interleaving of small concurrent histories, by loom; with --deep
    Loom,
    /// Arm's invalidation sequences, complete and without one instruction, by herd7; with --deep
    Herd7,
    /// Long concurrent histories, and threads that stop for ever, by shuttle; with --deep
    Shuttle,
    /// Undefined behaviour in the libraries' tests, by Miri; with --deep
    Miri,
    /// The engine compared with Linux's own code and other crates; with --deep
    Peers,
    /// The programs in emulated machines: of this architecture, and with --long of the other
    Emulators,
    /// Tables of AMD, Intel, RISC-V and Power under the walkers of emulated CPUs; with --deep
    Walkers,
    /// The engine, its guests and reclaim on every format; with --deep
    Formats,
    /// Linux on the hypervisor: migrated, aged, switched off and on, and with deliberate faults;
    /// with --deep
    Hypervisor,
    /// The main job of `slat` on small sizes, and its results
    EndToEnd,
    /// The command lines of the documentation, on small sizes, and their output; in CI and with
    /// --long
    Examples,
    /// Linux with the edits of the folder `linux`: compiled, booted, counted; with --deep. Series
    /// in C compile and boot where they have changed, and with --long. It runs beside the others,
    /// and is waited for here
    Kernels,
}

/// Returns the command for the tests that are programs.
fn tests() -> Command {
    let mut tests = cargo(&["test", "--tests"]);
    tests.args(TESTED);
    tests
}

impl Stage {
    /// Stages that CI runs after the command of the README; they take five times as long.
    const DEEP: [Self; 24] = [
        Self::Clippy,
        Self::Features,
        Self::Msrv,
        Self::Bare,
        Self::Publish,
        Self::Deny,
        Self::Packages,
        Self::Metrics,
        Self::Api,
        Self::Stack,
        Self::Counts,
        Self::Fences,
        Self::Docs,
        Self::Loom,
        Self::Herd7,
        Self::Shuttle,
        Self::Miri,
        Self::Peers,
        Self::Walkers,
        Self::Formats,
        Self::Hypervisor,
        Self::Examples,
        Self::Kernels,
        Self::Static,
    ];

    /// Returns the stages of a run that names none: those that find out within ten minutes whether
    /// a change works; with `deep` the others; with `long` all.
    pub fn all(deep: bool, long: bool) -> Vec<Self> {
        let all = Self::value_variants().iter().copied();
        // Programs of the other architecture are for its emulated machines, which `long` boots.
        let of_long = |stage: &Self| *stage == Self::Static;
        all.filter(|stage| long || Self::DEEP.contains(stage) == deep && !of_long(stage)).collect()
    }

    /// Runs the stage; if `long`, with its longest tests.
    pub fn run(self, long: bool) -> anyhow::Result<Outcome> {
        match self {
            Self::Formatting => with("rustfmt", cargo(&["fmt", "--all", "--check"])),
            Self::Clippy => with(
                "clippy",
                cargo(&["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"]),
            ),
            Self::Features => features(),
            Self::Msrv => msrv::oldest(),
            Self::Bare => msrv::bare(),
            Self::Publish => publish::pack(),
            Self::Deny => packages::deny(),
            Self::Packages => packages::test(),
            Self::Metrics => metrics::test(),
            Self::Counts => counts::run(false),
            Self::Api => api::check(),
            Self::Stack => msrv::needs(setup::target(setup::BARE), size::check),
            Self::Fences => msrv::needs(setup::target(fences::TRIPLE), fences::check),
            // `target/cargo-timings` has the time of each crate.
            Self::Build => ran(tests().args(["--no-run", "--timings"])),
            Self::Tests => {
                // Tests compare patches with the result of `git am`.
                setup::package("git", "git")?;
                let mut tests = tests();
                tests.arg("--no-fail-fast");
                if long {
                    let every = "slat/every-format,slat-guest/every-format,\
                                 slat-reclaim/every-format,slat-bench/every-format,\
                                 slat-cli/every-format";
                    tests.args(["--features", every]);
                    tests.envs([
                        ("HISTORIES", "240"),
                        ("ROUNDS", "20"),
                        ("PROPTEST_CASES", "4096"),
                    ]);
                }
                // Where a guest can run, no test may skip it. Elsewhere, nothing is missing that
                // could be installed.
                let kvm = File::options().read(true).write(true).open("/dev/kvm");
                let left_out = match kvm {
                    Ok(_) => {
                        tests.env("SLAT_REQUIRE_KVM", "1");
                        Vec::new()
                    }
                    Err(reason) => vec![format!("tests with a guest: /dev/kvm: {reason}")],
                };
                ran(&mut tests)?;
                Ok(Outcome::Ran(left_out))
            }
            Self::Doctests => ran(cargo(&["test", "--doc"]).args(TESTED)),
            Self::Docs => {
                let mut docs = cargo(&["doc", "--workspace", "--no-deps"]);
                ran(docs.env("RUSTDOCFLAGS", "--deny warnings"))
            }
            Self::Static => emulators::build(),
            Self::Loom => loom(long),
            Self::Herd7 => litmus::test(),
            Self::Shuttle => shuttle(long),
            Self::Miri => miri::test(),
            Self::Peers => peers::test(long),
            Self::Emulators => emulators::test(long),
            Self::Walkers => walkers::test(long),
            Self::Kernels => kernels::test(long),
            Self::Formats => formats(),
            Self::Hypervisor => hypervisor::test(long),
            Self::Examples => {
                docs::run::run(&target().join("documentation"), &programs()?).map(Outcome::Ran)
            }
            Self::EndToEnd => e2e::run(&target().join("end-to-end")).map(Outcome::Ran),
        }
    }
}

/// Runs a stage that needs a component of the toolchain. If it is missing and cannot be installed,
/// the stage fails in CI, so that CI does not pass without the check.
fn with(component: &str, mut command: Command) -> anyhow::Result<Outcome> {
    match setup::component_for(component) {
        Ok(()) => ran(&mut command),
        Err(error) if in_ci() => Err(error),
        Err(error) => Ok(Outcome::Skipped(format!("{error:#}"))),
    }
}

fn loom(long: bool) -> anyhow::Result<Outcome> {
    let mut tests = cargo(&["test", "--package", "slat", "--package", "slat-guest"]);
    tests.args(["--profile", "explore", "--features", "loom", "--test", "loom"]);
    if long {
        tests.args(["--package", "slat-reclaim"]);
    } else {
        // The models' own bounds take minutes.
        tests.env("LOOM_MAX_PREEMPTIONS", "2");
    }
    // A separate folder: these flags would otherwise rebuild everything each time.
    ran(tests.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", target().join("loom")))
}

/// Checks that each choice of formats compiles without warnings.
fn features() -> anyhow::Result<Outcome> {
    for choice in ["", "arm64", "ept", "npt", "power", "riscv"] {
        let mut clippy = cargo(&["clippy", "--package", "slat", "--no-default-features"]);
        clippy.args(["--features", choice, "--", "--deny", "warnings"]);
        match with("clippy", clippy)? {
            Outcome::Ran(_) => {}
            skipped => return Ok(skipped),
        }
    }
    Ok(Outcome::Ran(Vec::new()))
}

/// Test programs that have more tests with the feature `every-format`, by crate. All others are the
/// same with and without it.
const OF_FORMATS: [(&str, &[&str]); 3] = [
    ("slat", &["engine"]),
    ("slat-guest", &["machine", "memory", "threads"]),
    ("slat-reclaim", &["machine", "overcommit"]),
];

/// Runs the tests that are generic over a format, on the formats that the quick tests leave out.
fn formats() -> anyhow::Result<Outcome> {
    let mut tests = cargo(&["test", "--features", "every-format"]);
    // A quarter of proptest's number, unless another is asked for: the formats share their code.
    const CASES: &str = "PROPTEST_CASES";
    tests.env(CASES, std::env::var(CASES).unwrap_or_else(|_| "64".to_owned()));
    for (package, programs) in OF_FORMATS {
        tests.args(["--package", package]);
        for program in programs {
            tests.args(["--test", program]);
        }
    }
    // After a failure the other programs are run, too.
    ran(tests.args(["--no-fail-fast", "--", "--skip", "::usual::"]))
}

fn shuttle(long: bool) -> anyhow::Result<Outcome> {
    let mut tests = cargo(&["test", "--package", "slat", "--profile", "explore"]);
    tests.args(["--features", "shuttle", "--test", "shuttle"]);
    if long {
        tests.env("SHUTTLE_ITERATIONS", "20000");
    }
    // A separate folder, as for loom.
    ran(tests.env("RUSTFLAGS", "--cfg shuttle").env("CARGO_TARGET_DIR", target().join("shuttle")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_that_has_tests_of_formats_runs_on_all_formats() {
        use std::path::Path;
        fn mentions(path: &Path) -> bool {
            match path.is_dir() {
                true => path.read_dir().unwrap().any(|entry| mentions(&entry.unwrap().path())),
                false => std::fs::read_to_string(path).unwrap().contains("\"every-format\""),
            }
        }
        for (package, programs) in OF_FORMATS {
            let folder = crate::root().join("crates").join(package);
            assert!(
                !mentions(&folder.join("src")),
                "{package}: its unit tests have to run as well"
            );
            let parts = folder.join("tests").read_dir().unwrap().map(|part| part.unwrap().path());
            let found: std::collections::BTreeSet<_> = parts
                .filter(|part| mentions(part))
                .map(|part| part.file_stem().unwrap().to_str().unwrap().to_owned())
                .collect();
            assert_eq!(
                found,
                programs.iter().map(|name| (*name).to_owned()).collect(),
                "{package}"
            );
        }
        let with_the_feature = crate::root().join("crates").read_dir().unwrap().filter(|folder| {
            let manifest = folder.as_ref().unwrap().path().join("Cargo.toml");
            std::fs::read_to_string(manifest).unwrap().contains("every-format = [\"slat/")
        });
        // `slat`'s own is a list of none.
        assert_eq!(with_the_feature.count() + 1, OF_FORMATS.len());
    }
}
