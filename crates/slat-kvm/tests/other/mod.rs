//! A guest in another process, which counts itself: the test's own program, run again with only its
//! test `child`.

#![allow(dead_code, reason = "each test file uses a part")]

use slat_kvm::guest::{Guest, Shape, Vcpu};
use slat_kvm::procfs::Files;
use slat_kvm::watch::{Debugfs, Events, NotFound, Watch, Which};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Environment variable with the kind of child that the test `child` runs.
pub const CHILD: &str = "SLAT_WATCH_TEST_CHILD";

/// Makes a guest, if one can run here.
pub fn guest() -> Option<(Guest, Vec<Vcpu>)> {
    match Guest::new(&Shape { memory: 8 << 20, vcpus: 2, ..Shape::default() }) {
        Ok(guest) if guest.0.vm_stats().is_some() => Some(guest),
        other => {
            let required = std::env::var("SLAT_REQUIRE_KVM").is_ok_and(|value| value == "1");
            assert!(!required, "SLAT_REQUIRE_KVM=1, and no guest with statistics can run");
            eprintln!("skipped: {:?}", other.err().map(|error| error.to_string()));
            None
        }
    }
}

/// A second process of this test program, which runs only the test `child`. It has a guest, runs it
/// once for each line of input, and reports the guest's own statistics.
pub struct Other {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// Numbers beyond the first two that it said last.
    pub more: Vec<u64>,
}

impl Other {
    pub fn start() -> Option<Self> {
        Self::start_as("guest")
    }

    pub fn start_as(kind: &str) -> Option<Self> {
        guest()?;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--include-ignored"])
            .env(CHILD, kind)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut this = Self { child, to, from: BufReader::new(from), more: Vec::new() };
        this.says();
        Some(this)
    }

    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Returns the faults and exits of both vCPUs, from the guest's own statistics.
    pub fn says(&mut self) -> [u64; 2] {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "the other process ended");
            if let Some((_, said)) = line.split_once("SAYS ") {
                eprint!("{said}");
                let mut numbers = said.split_whitespace().map(|number| number.parse().unwrap());
                let first = [numbers.next().unwrap(), numbers.next().unwrap()];
                self.more = numbers.collect();
                return first;
            }
        }
    }

    pub fn run(&mut self) -> [u64; 2] {
        self.told("run")
    }

    pub fn told(&mut self, what: &str) -> [u64; 2] {
        writeln!(self.to, "{what}").unwrap();
        self.says()
    }

    pub fn end(mut self) {
        drop(self.to);
        assert!(self.child.wait().unwrap().success());
    }
}

pub fn watch(which: Which) -> Result<Watch<'static>, NotFound> {
    Watch::begin(Files::here(), Debugfs::open(), |_| Events::open(), which)
}
