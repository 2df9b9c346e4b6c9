//! Runs tests of the libraries under Miri, to find undefined behaviour.

use crate::workspace::{Outcome, ran};
use crate::{msrv, setup, target};

/// Tests of a crate whose names contain one of `names`; all if there are none.
struct Tests {
    package: &'static str,
    target: &'static [&'static str],
    names: &'static [&'static str],
    /// Tests that are left out.
    skip: &'static [&'static str],
    /// Flags for Miri.
    flags: &'static str,
}

/// Tests without memory accesses of interest are left out: they compute over many values, at which
/// Miri is slow.
const TESTS: [Tests; 4] = [
    Tests { package: "slat", target: &["--lib"], names: &[], skip: &["format::"], flags: "" },
    Tests {
        package: "slat",
        target: &["--test", "engine"],
        names: &["interleavings::"],
        skip: &[],
        // Hooks leak their state on purpose.
        flags: "-Zmiri-ignore-leaks",
    },
    // Trees of slots are safe code, and their tests work on many slots, which takes Miri minutes.
    Tests {
        package: "slat-guest",
        target: &["--lib"],
        names: &[],
        skip: &["memslots::tree::"],
        flags: "",
    },
    Tests {
        package: "slat-reclaim",
        target: &["--lib"],
        names: &["arrivals::", "buffer::", "limits::", "page::"],
        // Miri has no `fcntl` for files.
        skip: &["file::"],
        flags: "",
    },
];

/// Runs the tests under Miri.
pub fn test() -> anyhow::Result<Outcome> {
    msrv::needs(setup::miri(), || {
        TESTS.iter().try_for_each(run)?;
        Ok(Outcome::Ran(Vec::new()))
    })
}

fn run(tests: &Tests) -> anyhow::Result<()> {
    let mut miri = setup::cargo_of("nightly");
    miri.args(["miri", "test", "--package", tests.package]).args(tests.target).arg("--");
    miri.args(tests.names);
    tests.skip.iter().for_each(|name| _ = miri.args(["--skip", name]));
    // Tables have the host addresses of the tests' memory, so integers become pointers. Tests also
    // read the environment.
    let flags = "-Zmiri-permissive-provenance -Zmiri-disable-isolation";
    miri.env("MIRIFLAGS", [flags, tests.flags].join(" "));
    miri.envs([("HISTORIES", "1"), ("PROPTEST_CASES", "1"), ("ROUNDS", "1")]);
    ran(miri.env("CARGO_TARGET_DIR", target().join("miri"))).map(|_| ())
}
