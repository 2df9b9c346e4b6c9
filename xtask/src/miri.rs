//! Miri: what the tests of the libraries do with memory is defined.

use crate::stages::{Outcome, ran};
use crate::{msrv, setup, target};

/// Tests of a crate, and which of them: their names contain one of these.
struct Tests {
    package: &'static str,
    target: &'static [&'static str],
    names: &'static [&'static str],
    /// What is left out of them.
    skip: &'static [&'static str],
    /// Flags of Miri.
    flags: &'static str,
}

/// What has no memory of its own is arithmetic over many values, which Miri is slow at and has nothing to say about.
const TESTS: [Tests; 4] = [
    Tests { package: "slat", target: &["--lib"], names: &[], skip: &["format::"], flags: "" },
    Tests {
        package: "slat",
        target: &["--test", "engine"],
        names: &["interleavings::"],
        skip: &[],
        // What hooks know lives for ever.
        flags: "-Zmiri-ignore-leaks",
    },
    // The trees of slots are safe code, and their tests work on many slots: minutes of Miri's.
    Tests {
        package: "slat-guest",
        target: &["--lib"],
        names: &[],
        skip: &["slots::tree::"],
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
    // Tests have tables at host addresses that are those of their memory: integers become pointers.
    // They read the environment.
    let flags = "-Zmiri-permissive-provenance -Zmiri-disable-isolation";
    miri.env("MIRIFLAGS", [flags, tests.flags].join(" "));
    miri.envs([("HISTORIES", "1"), ("PROPTEST_CASES", "1"), ("ROUNDS", "1")]);
    ran(miri.env("CARGO_TARGET_DIR", target().join("miri"))).map(|_| ())
}
