//! A running program of a tree, and its commands.

use crate::linux::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// An operation takes seconds at most; a walk of a patched tree may never end.
const PATIENCE: Duration = Duration::from_secs(120);

/// Rights of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prot {
    /// May be read.
    pub read: bool,
    /// May be written.
    pub write: bool,
    /// May be executed.
    pub execute: bool,
}

impl Prot {
    /// Ordinary memory.
    pub const RAM: Self = Self { read: true, write: true, execute: true };

    fn bits(self) -> u64 {
        u64::from(self.execute) | u64::from(self.write) << 1 | u64::from(self.read) << 2
    }
}

/// Operation of a helper. Addresses and sizes are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those that their names say")]
pub enum Op {
    /// Empty tables.
    Reset,
    /// Maps by leaves of one size, in tables that no other walker uses; table pages are at hand.
    Build { start: u64, size: u64, host: u64, leaf: u64, prot: Prot },
    /// Brings the first bytes of table memory into the caches.
    Warm { bytes: u64 },
    /// Drives the first bytes of table memory out of the caches.
    Cool { bytes: u64 },
    /// Maps as a fault does, leaf by leaf; table pages are at hand.
    Map { start: u64, size: u64, host: u64, leaf: u64, prot: Prot },
    /// Unmaps.
    Unmap { start: u64, size: u64 },
    /// Splits as KVM does when logging is enabled; filling the cache of table pages is part of it.
    Split { start: u64, size: u64, chunk: u64 },
    /// Write-protects.
    Protect { start: u64, size: u64 },
    /// Clears the log, 64 pages at a time: protects the range that spans the pages of each word,
    /// and splits it by `chunk` unless that is 0.
    Clear { start: u64, size: u64, word: u64, chunk: u64 },
    /// Tests and clears accessed bits, in one walk or page by page.
    Age { start: u64, size: u64, each: bool },
    /// A permission fault on each page.
    Relax { start: u64, size: u64, prot: Prot },
    /// An access fault on each page.
    Young { start: u64, size: u64 },
    /// Looks up the addresses of [`Helper::addresses`]; `found` is the sum of the host addresses,
    /// plus one for each that may be written.
    Lookup,
    /// Cleans the caches of mapped memory.
    Flush { start: u64, size: u64 },
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Reset => write!(f, "reset"),
            Self::Build { start, size, host, leaf, prot } => {
                write!(f, "build {start} {size} {host} {leaf} {}", prot.bits())
            }
            Self::Warm { bytes } => write!(f, "warm {bytes}"),
            Self::Cool { bytes } => write!(f, "cool {bytes}"),
            Self::Map { start, size, host, leaf, prot } => {
                write!(f, "map {start} {size} {host} {leaf} {}", prot.bits())
            }
            Self::Unmap { start, size } => write!(f, "unmap {start} {size}"),
            Self::Split { start, size, chunk } => write!(f, "split {start} {size} {chunk}"),
            Self::Protect { start, size } => write!(f, "protect {start} {size}"),
            Self::Clear { start, size, word, chunk } => {
                write!(f, "clear {start} {size} {word} {chunk}")
            }
            Self::Age { start, size, each } => {
                write!(f, "age {start} {size} {}", u64::from(each))
            }
            Self::Relax { start, size, prot } => write!(f, "relax {start} {size} {}", prot.bits()),
            Self::Young { start, size } => write!(f, "young {start} {size}"),
            Self::Lookup => write!(f, "lookup"),
            Self::Flush { start, size } => write!(f, "flush {start} {size}"),
        }
    }
}

/// Time and results of an operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Time on a CPU.
    pub seconds: f64,
    /// Young pages or walks; faults that are to be tried again; or the sum of a look-up.
    pub found: u64,
    /// Exact counts by name, if the program counts.
    pub counts: Vec<(String, u64)>,
}

/// One leaf descriptor, or several that follow each other in both addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first leaf.
    pub first: Leaf,
    /// Number of leaves; the address in each descriptor is greater by the size than the one before.
    pub count: u64,
}

/// A leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The guest address it translates.
    pub gpa: u64,
    /// Its size, in bytes.
    pub size: u64,
    /// The descriptor.
    pub raw: u64,
}

/// A running program. It ends with this value.
#[derive(Debug)]
pub struct Helper {
    tree: String,
    child: Child,
    /// `None` once the helper is being ended.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    huge_bytes: u64,
    stop: Arc<AtomicBool>,
}

impl Helper {
    /// Starts a program with `table_bytes` bytes of memory for tables. `stop` ends waiting for it.
    ///
    /// # Errors
    /// It does not start, or the machine has not that much memory.
    pub fn start(
        tree: &str,
        program: &Path,
        table_bytes: u64,
        stop: Arc<AtomicBool>,
    ) -> Result<Self, Error> {
        let mut command = Command::new(program);
        // A process group of its own: Ctrl-C goes to the command, which then ends its helpers.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child =
            command.spawn().map_err(Error::io(format!("cannot start the helper of {tree}")))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { unreachable!("both are piped") };
        let output = BufReader::new(output);
        let input = Some(input);
        let mut helper = Self { tree: tree.to_owned(), child, input, output, huge_bytes: 0, stop };
        let answer = helper.ask(&format!("arena {table_bytes}"), &[])?;
        helper.huge_bytes = answer.found;
        Ok(helper)
    }

    /// Does one operation.
    ///
    /// # Errors
    /// [`Error::Refused`] by the tree's own code; [`Error::Helper`] if it warned, ended, or did not
    /// return; [`Error::Interrupted`].
    pub fn call(&mut self, op: Op) -> Result<Answer, Error> {
        self.ask(&op.to_string(), &[])
    }

    /// Returns the bytes of its memory that huge pages back.
    pub fn huge_bytes(&self) -> u64 {
        self.huge_bytes
    }

    /// Sends the addresses for [`Op::Lookup`].
    ///
    /// # Errors
    /// As [`Helper::call`].
    pub fn addresses(&mut self, addresses: &[u64]) -> Result<(), Error> {
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_ne_bytes()).collect();
        self.ask(&format!("addresses {}", addresses.len()), &bytes).map(drop)
    }

    /// Returns the leaves of a range, in ascending order.
    ///
    /// # Errors
    /// As [`Helper::call`].
    pub fn leaves(&mut self, start: u64, size: u64) -> Result<Vec<Run>, Error> {
        let line = format!("leaves {start} {size}");
        self.say(&line, &[])?;
        let mut runs = Vec::new();
        loop {
            let answer = self.hear(&line)?;
            if answer == "end" {
                return Ok(runs);
            }
            let words = answer.split(' ').map(|word| u64::from_str_radix(word, 16));
            let words: Result<Vec<u64>, _> = words.collect();
            let Ok([gpa, size, raw, count]) = words.as_deref() else {
                return Err(self.broken(format!("{line}: {answer}")));
            };
            let first = Leaf { gpa: *gpa, size: *size, raw: *raw };
            runs.push(Run { first, count: *count });
        }
    }

    fn ask(&mut self, line: &str, bytes: &[u8]) -> Result<Answer, Error> {
        self.say(line, bytes)?;
        let answer = self.hear(line)?;
        let (kind, rest) = answer.split_once(' ').unwrap_or((&answer, ""));
        match kind {
            "ok" => parsed(rest).ok_or_else(|| self.broken(format!("{line}: {answer}"))),
            "refused" => Err(Error::Refused {
                tree: self.tree.clone(),
                operation: line.to_owned(),
                errno: rest.parse().unwrap_or(0),
            }),
            "broken" => Err(self.broken(format!("its own check failed in `{line}`: {rest}"))),
            _ => Err(self.broken(format!("`{line}`: {rest}"))),
        }
    }

    fn say(&mut self, line: &str, bytes: &[u8]) -> Result<(), Error> {
        let mut text = format!("{line}\n").into_bytes();
        text.extend(bytes);
        // A pipe that is ready for writing takes this much without blocking.
        for part in text.chunks(4096) {
            self.wait(line, PollFlags::OUT)?;
            let written = self.input.as_mut().map(|input| input.write_all(part));
            if !matches!(written, Some(Ok(()))) {
                return Err(self.ended(line));
            }
        }
        Ok(())
    }

    /// Waits for the next line, until Ctrl-C is pressed.
    fn hear(&mut self, asked: &str) -> Result<String, Error> {
        if self.output.buffer().is_empty() {
            self.wait(asked, PollFlags::IN)?;
        }
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(read) if read > 0 => Ok(line.trim_end().to_owned()),
            _ => Err(self.ended(asked)),
        }
    }

    /// Waits until the helper reads, or has written something. A helper that takes too long gets no
    /// further command: its late answer would be taken for the answer to that.
    fn wait(&mut self, asked: &str, wanted: PollFlags) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            let Some(input) = &self.input else {
                return Err(self.broken(format!("`{asked}`: it has ended")));
            };
            let moment = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            let mut polled = [match wanted {
                PollFlags::OUT => PollFd::new(input, wanted),
                _ => PollFd::new(self.output.get_ref(), wanted),
            }];
            // An error is found by the read or write that follows.
            if poll(&mut polled, Some(&moment)).unwrap_or(1) > 0 {
                return Ok(());
            }
            if self.stop.load(Ordering::Relaxed) {
                self.input = None;
                return Err(Error::Interrupted);
            }
            if begin.elapsed() > PATIENCE {
                self.input = None;
                let seconds = PATIENCE.as_secs();
                return Err(self.broken(format!("`{asked}` did not return within {seconds} s")));
            }
        }
    }

    /// Ends a helper whose pipes are closed: it has ended, or is about to.
    fn ended(&mut self, asked: &str) -> Error {
        self.input = None;
        let begin = Instant::now();
        let how = loop {
            match self.child.try_wait() {
                Ok(None) if begin.elapsed() < Duration::from_secs(1) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(None) => break "it closed its pipe".to_owned(),
                Ok(Some(status)) => break status.to_string(),
                Err(error) => break error.to_string(),
            }
        };
        self.broken(format!("the helper ended in `{asked}`: {how}"))
    }

    fn broken(&self, what: String) -> Error {
        Error::Helper { tree: self.tree.clone(), what }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // It may be in a walk that never ends.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parsed(rest: &str) -> Option<Answer> {
    let mut words = rest.split(' ');
    let seconds = words.next()?.parse().ok()?;
    let mut answer = Answer { seconds, ..Answer::default() };
    for word in words {
        let (name, value) = word.split_once('=')?;
        let value = value.parse().ok()?;
        match name {
            "found" => answer.found = value,
            _ => answer.counts.push((name.to_owned(), value)),
        }
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_time_a_find_and_counts() {
        let answer = parsed("0.5 found=7 visits=3 tables=8192").unwrap();
        assert_eq!((answer.seconds, answer.found), (0.5, 7));
        assert_eq!(answer.counts, [("visits".to_owned(), 3), ("tables".to_owned(), 8192)]);
        assert_eq!(parsed("x"), None);
        assert_eq!(parsed("1.0 visits"), None);
    }

    /// A program cannot be executed while it is being written, or while the forked child of another
    /// test still has it open.
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    fn script(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        (folder, program)
    }

    #[test]
    fn a_helper_that_ends_or_warns_is_an_error_that_says_where() {
        let _one = ONE.lock();
        let stop = || Arc::new(AtomicBool::new(false));
        let (_folder, program) = script("read a; echo ok 0; read b; echo broken x.c:3; exit 3");
        let mut helper = Helper::start("tree", &program, 1, stop()).unwrap();
        let text = helper.call(Op::Reset).unwrap_err().to_string();
        assert_eq!(text, "tree: its own check failed in `reset`: x.c:3");
        let text = helper.call(Op::Warm { bytes: 4096 }).unwrap_err().to_string();
        assert!(text.contains("ended in `warm 4096`: exit status: 3"), "{text}");
    }

    #[test]
    fn a_walk_that_never_ends_can_be_left() {
        let _one = ONE.lock();
        let stop = Arc::new(AtomicBool::new(false));
        let (_folder, program) = script("read a; echo ok 0; exec sleep 1000");
        let mut helper = Helper::start("tree", &program, 1, stop.clone()).unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(matches!(helper.call(Op::Reset), Err(Error::Interrupted)));
    }
}
