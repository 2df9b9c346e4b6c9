//! Runs the examples of the documentation on small sizes, and compares their output with the pages.

use super::{Example, pages, shape};
use crate::root;
use anyhow::{Context, bail, ensure};
use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Beginnings of lines on a page, with the programs of this checkout that they run.
const PROGRAMS: [(&str, &str); 3] = [
    ("cargo run --release -p slat-bench --", "slat-bench"),
    ("cargo run --release --", "slat"),
    ("cargo run --release", "slat --quick"),
];

/// Commands that measure, with options that make them short, added to lines that lack them.
const SMALL: [(&str, &[&str]); 20] = [
    ("slat noise", &["--pairs 3"]),
    ("bench dirty-log", &["--quick"]),
    ("bench migrate", &["--quick"]),
    ("slat bench restore", &["--quick"]),
    ("slat bench snapshot", &["--quick"]),
    ("slat bench fork", &["--quick"]),
    ("slat bench postcopy", &["--quick"]),
    ("slat bench reclaim", &["--quick"]),
    ("tune dirty-log", &["--quick"]),
    ("slat ab", &["--pairs 1"]),
    ("slat-bench noise", &["--pairs 1"]),
    ("slat-bench split", &["--quick"]),
    ("slat-bench engine", &["--quick", "--only map,age"]),
    ("slat-bench replay", &["--quick"]),
    ("slat-bench execute", &["--quick"]),
    ("slat-bench age", &["--quick"]),
    ("slat-bench populate", &["--quick"]),
    ("slat-bench cache-toggle", &["--quick"]),
    (
        "slat-bench reclaim",
        &["--quick", "--memory 2m", "--policy clock,free-bitmap", "--accesses 2"],
    ),
    ("slat-bench idle", &["--quick", "--memory 2m"]),
];

/// Replacements by smaller sizes, and of formats that these programs are built without.
const SMALLER: [(&str, &str); 10] = [
    ("slat check --for 60s", "slat check --for 2s"),
    ("--check 100", "--check 2"),
    ("arm64-4k,ept,npt,riscv", "arm64-4k,ept"),
    ("arm64-4k,arm64-16k,ept,riscv", "arm64-4k,arm64-16k,ept"),
    ("--format arm64-64k", "--format arm64"),
    ("--memory 1T", "--memory 4G"),
    ("--memory 8G", "--memory 1G"),
    ("--memory 256m", "--memory 2m"),
    ("--accesses 400", "--accesses 20"),
    ("-- split", "-- split --quick"),
];

/// Words of lines that are not run, with the reasons.
const LEFT_OUT: [(&str, &str); 11] = [
    ("slat emulate", "the stage emulators has its machines"),
    ("slat kernel", "the stage kernels builds and boots"),
    ("6.1.json", "the stage emulators has its machines"),
    ("before.json", "they are of emulated machines"),
    ("--linux-tree", "the stage peers has a tree"),
    ("cargo xtask", "it is what runs this"),
    ("cargo test", "it takes hours"),
    ("sudo", "it changes the machine"),
    ("rustup", "it changes the toolchain"),
    ("not in the group kvm", "it is another user's"),
    ("--fail-if-slower", "its exit code says what the machine did"),
];

/// Words of lines whose output is from other machines, with the reasons.
const NOT_HELD: [(&str, &str); 1] = [("slat check", "what can be tried is the host's")];

/// Output that depends on the host is compared with that of a test for a known host.
const OF_A_HOST: (&str, &str) = (
    "slat doctor",
    concat!(
        "crates/slat-cli/src/doctor/snapshots/",
        "slat_cli__doctor__report__tests__a_kvm_in_software_reads_like_this.snap"
    ),
);

/// The output of a line, and whether it succeeded.
#[derive(Clone)]
struct LineOutput {
    text: String,
    success: bool,
}

/// Runs all examples in a folder, with the programs in another; returns what it had to skip.
pub fn run(folder: &Path, programs: &Path) -> anyhow::Result<Vec<String>> {
    let _ = fs::remove_dir_all(folder);
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    let (mut skipped, mut failed) = (Vec::new(), Vec::new());
    let mut known: HashMap<String, LineOutput> = HashMap::new();
    for page in pages()? {
        let folder = folder.join(page.name.replace('/', "-"));
        prepare(&folder)?;
        for example in &page.examples {
            let Example { at, line, .. } = example;
            if let Some((_, why)) = LEFT_OUT.iter().find(|(word, _)| line.contains(word)) {
                println!("{at}: not run, {why}: {line}");
                continue;
            }
            if let Err(reason) = &kvm
                && needs_kvm(line)
            {
                println!("{at}: not run, /dev/kvm: {reason}: {line}");
                skipped.push(format!("{at}: /dev/kvm: {reason}"));
                continue;
            }
            let (small, begin) = (small(line), Instant::now());
            // A command whose files no other line reads prints the same in every place.
            let again =
                known.get(&small).filter(|_| MEASURES.iter().any(|it| small.starts_with(it)));
            let printed = match again {
                Some(printed) => printed.clone(),
                None => shell(&small, &folder, programs)?,
            };
            let seconds = begin.elapsed().as_secs_f64();
            match held(example, &small, &printed) {
                Ok(note) => println!("{at}: {seconds:.1} s{note}: {small}"),
                Err(error) => failed.push(format!("{at}: {line}\n{error:#}")),
            }
            known.insert(small, printed);
        }
    }
    ensure!(failed.is_empty(), "examples of the documentation:\n{}", failed.join("\n"));
    Ok(skipped)
}

/// Beginnings of lines that measure, and leave no file that another line reads.
const MEASURES: [&str; 3] = ["slat bench", "slat-bench ", "slat --quick"];

/// Returns whether a line runs a guest under KVM.
fn needs_kvm(line: &str) -> bool {
    let alone = ["slat show", "slat doctor", "slat-bench", "cargo run --release -p slat-bench"];
    line.contains("slat bench") || !alone.iter().any(|word| line.starts_with(word))
}

/// Makes the folder of a page, with the files that its lines read.
fn prepare(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    // Pages of a guest, in the order of their use.
    let line = |number: usize| format!("{}{}\n", ["", "w "][number % 2], number * 7 % 300);
    fs::write(folder.join("FILE"), (0..4000).map(line).collect::<String>()).context("FILE")?;
    Ok(())
}

/// Returns the line as it is run here: shorter, of the same scenario.
fn small(line: &str) -> String {
    let line = line.split(" #").next().unwrap_or(line).trim_end();
    let mut line = PROGRAMS.iter().fold(line.to_owned(), |line, (from, to)| line.replace(from, to));
    for (scenario, options) in SMALL {
        for option in options.iter().rev() {
            let name = option.split(' ').next().unwrap_or(option);
            if !line.contains(name) {
                line = line.replace(scenario, &format!("{scenario} {option}"));
            }
        }
    }
    SMALLER.iter().fold(line, |line, (from, to)| line.replace(from, to))
}

/// Runs a line in a shell.
fn shell(line: &str, folder: &Path, programs: &Path) -> anyhow::Result<LineOutput> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::iter::once(programs.to_owned()).chain(std::env::split_paths(&path));
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("exec 2>&1\n{line}")]).current_dir(folder);
    shell.env("PATH", std::env::join_paths(path)?).stdin(Stdio::null());
    let output = shell.output().context("sh does not start")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(LineOutput { text, success: output.status.success() })
}

/// Compares the output of a line with its page; returns a message on the result.
fn held(example: &Example, small: &str, printed: &LineOutput) -> anyhow::Result<String> {
    let LineOutput { text, success } = printed;
    // A page that shows an error shows that the line fails.
    let fails = example.shown.first().is_some_and(|line| line.starts_with("slat: "));
    ensure!(*success != fails, "`{small}` {}:\n{text}", if fails { "succeeds" } else { "fails" });
    if example.shown.is_empty() {
        return Ok(String::new());
    }
    if let Some((_, why)) = NOT_HELD.iter().find(|(word, _)| small.contains(word)) {
        return Ok(format!(", its output not held against the page, {why}"));
    }
    let (text, of) = match example.line == OF_A_HOST.0 {
        true => {
            let text = fs::read_to_string(root().join(OF_A_HOST.1)).context(OF_A_HOST.1)?;
            let (_, printed) = text.rsplit_once("\n---\n").context("no snapshot")?;
            (printed.to_owned(), "the host of a test printed")
        }
        // A report repeats its command line.
        false => (text.replace(small, &example.line), "printed"),
    };
    match shape::differs(&example.shown, &text) {
        Some(shown) => bail!("the page shows\n{shown}\nand `{small}` {of}\n{text}"),
        None => Ok(String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_run_small_once_and_without_its_comment() {
        let cases = [
            ("slat-bench dirty-log   # six ways", "slat-bench dirty-log --quick"),
            ("slat-bench engine --quick", "slat-bench engine --only map,age --quick"),
            ("cargo run --release", "slat --quick"),
            ("slat bench dirty-log --memory 1G", "slat bench dirty-log --quick --memory 1G"),
            ("slat doctor", "slat doctor"),
            (
                "slat ab --first 'bench dirty-log' --second 'bench dirty-log -b 4k'",
                "slat ab --pairs 1 --first 'bench dirty-log --quick' \
                 --second 'bench dirty-log --quick -b 4k'",
            ),
        ];
        for (line, run) in cases {
            assert_eq!(small(line), run);
        }
    }

    #[test]
    fn what_runs_a_guest_needs_kvm() {
        let guests = ["slat bench age", "slat doctor && slat bench age", "cargo run --release"];
        assert!(guests.into_iter().all(needs_kvm));
        assert!(!["slat doctor", "slat-bench age", "slat show --do x"].into_iter().any(needs_kvm));
    }

    #[test]
    fn what_a_page_shows_of_a_failure_has_to_fail() {
        let example = |shown: &str| Example {
            at: "a.md:1".to_owned(),
            line: "slat x".to_owned(),
            shown: shown.lines().map(str::to_owned).collect(),
        };
        let printed = |success| LineOutput { text: "slat: no\n".to_owned(), success };
        assert!(held(&example("slat: no"), "slat x", &printed(false)).is_ok());
        assert!(held(&example("slat: no"), "slat x", &printed(true)).is_err());
        assert!(held(&example(""), "slat x", &printed(false)).is_err());
        assert!(held(&example("slat: yes"), "slat x", &printed(false)).is_err());
    }
}
