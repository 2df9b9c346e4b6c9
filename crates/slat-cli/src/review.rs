//! A page on patches, for a reply to them: does each compile, what does the kernel's own checker
//! say, which selftests change, is a write lost, what is new in the kernel's log, which phases take
//! more instructions.

use crate::cli::{
    ConfigArgs, CountedArgs, InTurnsArgs, KernelChoice, MachineArgs, ReviewArgs, TestArgs, TreeArgs,
};
use crate::in_turns;
use crate::kernel::Source;
use crate::selftests::{self, Results};
use anyhow::Context;
use slat_kernel::vm::Architecture;
use slat_kernel::{Author, Mail, SELFTESTS};
use slat_lab::cli::PrintArgs;
use slat_lab::failure::{bad_input, is_bad_input, is_interruption};
use slat_lab::numbers::several;
use slat_lab::report::html::{self, Part};
use slat_lab::report::markdown;
use slat_lab::session::Session;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Stdio};

/// Lines of a list that the page shows.
const SHOWN: usize = 20;

/// What a review found.
#[derive(Debug)]
pub struct Review {
    title: String,
    parts: Vec<Part>,
}

impl Review {
    /// Returns the page in Markdown.
    pub fn markdown(&self) -> String {
        let mut page = format!("{}\n\n", self.title);
        for Part { what, result, .. } in &self.parts {
            let _ = writeln!(page, "- **{what}**: {result}");
        }
        for Part { what, command, lines, tables, .. } in &self.parts {
            let _ = write!(page, "\n## {what}\n\n    {command}\n{}", block(lines));
            if !tables.is_empty() {
                page += "\n";
            }
            tables.iter().for_each(|table| page += &markdown::table(table));
        }
        page
    }

    /// Returns the page in HTML.
    pub fn html(&self) -> String {
        html::parts(&self.title, &self.parts)
    }
}

/// Builds, checks, tests and measures the patches.
///
/// # Errors
/// The patches do not fit, or a program is missing. What fails in one part is told there.
pub fn run(args: &ReviewArgs, arch: Architecture, session: &mut Session) -> anyhow::Result<Review> {
    let KernelChoice::Tree(choice) = &args.before else {
        return Err(bad_input("give a tree with the patches: tree:debian-6.12, tree:~/linux"));
    };
    if args.patches.paths.iter().any(|path| path.as_os_str() == "-") {
        return Err(bad_input(
            "a review reads patches several times: give a file, not `--patch -`",
        ));
    }
    let counted = &args.counted;
    let source = Source::find(choice, &counted.edits, &args.patches, session)?;
    if args.patches.is_empty() {
        return Err(bad_input("give the patches by --patch FILE, or --range A..B"));
    }
    session.start("review", 4);
    let words = words(args);
    let tree = format!("--tree {}", choice.tree);
    let mut parts = vec![compile(&source, args, arch, &format!("{tree} {words}"), session)?];
    session.step();
    parts.push(checked(&source, arch, &format!("{tree} {}", patch_words(args)), session)?);
    session.step();
    drop(source);
    if !args.no_tests {
        for &cpus in &args.cpus {
            parts.push(tests(args, arch, &format!("{tree} {words}"), cpus, session)?);
        }
    }
    if args.checked {
        parts.push(checked_tests(args, arch, &format!("{tree} {words}"), session)?);
    }
    if !args.no_check {
        parts.push(content(args, &words, session)?);
    }
    parts.extend(measured(args, &tree, &words, session)?);
    session.finish();
    Ok(Review { title: format!("Patches of {}, {arch}", args.before), parts })
}

/// Returns the options that name the patches.
fn patch_words(args: &ReviewArgs) -> String {
    let paths = args.patches.paths.iter().map(|path| format!("--patch {}", path.display()));
    let range = args.patches.range.iter().map(|range| format!("--range {range}"));
    paths.chain(range).collect::<Vec<_>>().join(" ")
}

/// Returns the options that name the patches and the architecture.
fn words(args: &ReviewArgs) -> String {
    let arch = args.counted.arch.map(|arch| format!(" --arch {arch}"));
    patch_words(args) + &arch.unwrap_or_default()
}

/// Shortens a list.
fn shortened(mut lines: Vec<String>) -> Vec<String> {
    if let Some(more) = lines.len().checked_sub(SHOWN).filter(|&more| more > 0) {
        lines.truncate(SHOWN);
        lines.push(format!("… {more} more"));
    }
    lines
}

/// Returns lines in a block.
fn block(lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    format!("\n```\n{}\n```\n", lines.join("\n"))
}

/// Passes on what has to end the command; another error is the result of a part.
fn told<T>(done: anyhow::Result<T>) -> anyhow::Result<Result<T, String>> {
    match done {
        Err(error) if is_interruption(&error) || is_bad_input(&error) => Err(error),
        Err(error) => Ok(Err(format!("{error:#}"))),
        Ok(value) => Ok(Ok(value)),
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// Returns a part without tables.
fn part(what: &str, result: String, command: String, lines: Vec<String>) -> Part {
    Part { what: what.to_owned(), result, command, lines: shortened(lines), tables: Vec::new() }
}

fn failed(what: &str, error: &str, command: String) -> Part {
    part(what, first_line(error), command, error.lines().map(str::to_owned).collect())
}

fn compile(
    source: &Source,
    args: &ReviewArgs,
    arch: Architecture,
    words: &str,
    session: &Session,
) -> anyhow::Result<Part> {
    let what = match slat_kernel::has_sparse() {
        true => "Compiled after each patch, W=1 and sparse",
        false => "Compiled after each patch, W=1 (sparse is not installed)",
    };
    let command = format!("slat kernel build {words} --each --warnings");
    let added = match told(source.warnings(arch, &args.counted.config, session))? {
        Ok(added) => added,
        Err(error) => return Ok(failed(what, &error, command)),
    };
    let all: Vec<String> = added.iter().flatten().cloned().collect();
    let result =
        format!("{}, {}", several(added.len(), "patch"), several(all.len(), "new warning"));
    Ok(part(what, result, command, all))
}

/// Runs the tree's own checkpatch.pl.
fn checked(
    source: &Source,
    arch: Architecture,
    words: &str,
    session: &Session,
) -> anyhow::Result<Part> {
    let what = "checkpatch";
    let sources = source.copy(arch, &ConfigArgs::default(), session)?;
    let tree = &sources.path;
    let folder = tempfile::tempdir().context("cannot make a folder for patches")?;
    let nobody = "Nobody <nobody@localhost>".to_owned();
    let author = Author { from: nobody, date: "Thu, 1 Jan 1970 00:00:00 +0000".to_owned() };
    let mut files = Vec::new();
    for mail in Mail::series("", &source.edited, &author).iter().skip(1) {
        let path = folder.path().join(&mail.file);
        fs::write(&path, &mail.text).context("cannot write a patch")?;
        files.push(path);
    }
    let mut perl = Command::new("perl");
    perl.arg(tree.join("scripts/checkpatch.pl")).arg("--root").arg(tree);
    perl.args(["--terse", "--no-summary", "--color=never"]).args(&files);
    let output = perl.stdin(Stdio::null()).output().context("cannot start perl")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let prefix = format!("{}/", folder.path().display());
    let lines = said.lines().filter(|line| line.contains("ERROR: ") || line.contains("WARNING: "));
    let lines: Vec<String> = lines.map(|line| line.replace(&prefix, "")).collect();
    let errors = lines.iter().filter(|line| line.contains("ERROR: ")).count();
    let warnings = several(lines.len() - errors, "warning");
    let result = format!("{}, {warnings}", several(errors, "error"));
    let command = format!(
        "slat kernel patch {words} -o p && TREE/scripts/checkpatch.pl --terse p/*[1-9]-*.patch"
    );
    Ok(part(what, result, command, lines))
}

/// Runs the selftests on both kernels.
fn tests(
    args: &ReviewArgs,
    arch: Architecture,
    words: &str,
    cpus: u32,
    session: &mut Session,
) -> anyhow::Result<Part> {
    let what = format!("KVM's selftests, {}", several(cpus as usize, "CPU"));
    let command =
        format!("slat kernel test {words} --edit {} --cpus {cpus}{}", edits(args), named(args));
    let [before, after] = [false, true].map(|is_patched| {
        let test = test_args(args, is_patched, cpus);
        test.and_then(|test| told(selftests::run(&test, arch, session)))
    });
    let (before, after) = match (before?, after?) {
        (Ok(before), Ok(after)) => (before, after),
        (Err(error), _) => {
            return Ok(failed(&what, &format!("without the patches: {error}"), command));
        }
        (_, Err(error)) => return Ok(failed(&what, &error, command)),
    };
    let changed = changed(&before, &after);
    let result = format!(
        "{}, {} failed before and {} after, {} changed",
        several(after.tests.len(), "test"),
        failures(&before).len(),
        failures(&after).len(),
        changed.len()
    );
    Ok(part(&what, result, command, changed))
}

/// Runs the selftests on the patched kernel with its own checks. If it complains, the kernel
/// without the patches runs them as well: it may complain of the same.
fn checked_tests(
    args: &ReviewArgs,
    arch: Architecture,
    words: &str,
    session: &mut Session,
) -> anyhow::Result<Part> {
    let what = "KVM's selftests under lockdep, PROVE_RCU and KASAN";
    let command = format!(
        "slat kernel test {words} --edit {} --config {CHECKED}{}",
        edits(args),
        named(args)
    );
    let mut run = |is_patched| {
        let mut test = test_args(args, is_patched, 1)?;
        test.tree.config.config = Some(CHECKED.into());
        test.machine.time_limit *= 6;
        told(selftests::run(&test, arch, session))
    };
    match run(true)? {
        Ok(after) => {
            let failures = failures(&after);
            let result = format!(
                "{}, {} failed; the kernel complains of nothing",
                several(after.tests.len(), "test"),
                failures.len()
            );
            Ok(part(what, result, command, failures))
        }
        Err(error) => {
            let before = match run(false)? {
                Ok(_) => "without the patches the kernel complains of nothing".to_owned(),
                Err(before) => format!("without the patches: {}", first_line(&before)),
            };
            let error = format!("{}; {before}\n{error}", first_line(&error));
            Ok(failed(what, &error, command))
        }
    }
}

/// The set of options of a kernel that checks itself.
const CHECKED: &str = "checked";

/// Returns the edits of a kernel that runs tests.
fn edits(args: &ReviewArgs) -> String {
    let KernelChoice::Tree(choice) = &args.before else { return SELFTESTS.to_owned() };
    choice.edits.iter().map(|name| format!("{name},")).collect::<String>() + SELFTESTS
}

/// Returns the option that names selftests.
fn named(args: &ReviewArgs) -> String {
    let names = args.tests.join(",");
    if names.is_empty() { names } else { format!(" --test {names}") }
}

/// Returns the tests that failed, a line each.
fn failures(results: &Results) -> Vec<String> {
    let failed = results.tests.iter().filter(|test| test.failed());
    failed.map(|test| format!("{}: {}", test.name, test.result)).collect()
}

/// Returns tests that end otherwise after the patches.
fn changed(before: &Results, after: &Results) -> Vec<String> {
    let of = |test: &selftests::Test| {
        let was = before.tests.iter().find(|other| other.name == test.name);
        let was = was.map_or("not there", |was| &*was.result);
        (was != test.result).then(|| format!("{}: {was} → {}", test.name, test.result))
    };
    after.tests.iter().filter_map(of).collect()
}

fn test_args(args: &ReviewArgs, is_patched: bool, cpus: u32) -> anyhow::Result<TestArgs> {
    let KernelChoice::Tree(choice) = &args.before else { return Err(bad_input("no tree")) };
    let (counted, mut patches) = (&args.counted, args.patches.clone());
    let mut tree = choice.tree.clone();
    if !is_patched {
        if let Some((first, _)) = patches.range.as_deref().and_then(|it| it.split_once("..")) {
            tree = format!("{tree}@{first}");
        }
        patches = Default::default();
    }
    let mut names = choice.edits.clone();
    names.push(SELFTESTS.to_owned());
    let tree = TreeArgs {
        tree,
        names,
        patches,
        edits: counted.edits.clone(),
        config: counted.config.clone(),
    };
    let machine = MachineArgs {
        arch: counted.arch,
        parts: counted.parts.clone(),
        time_limit: counted.time_limit * 4,
        keep_running: false,
        console: None,
        json: false,
    };
    Ok(TestArgs {
        tree,
        machine,
        tests: args.tests.clone(),
        check: None,
        cpus,
        count_instructions: false,
        probe: Vec::new(),
        arguments: Vec::new(),
    })
}

/// Returns both kernels, with what to run in them.
fn both(args: &ReviewArgs, command: Vec<String>) -> InTurnsArgs {
    InTurnsArgs {
        before: args.before.clone(),
        after: None,
        modules: None,
        modules_after: None,
        patches: args.patches.clone(),
        counted: CountedArgs { command, ..args.counted.clone() },
        output: None,
        fail_if_slower: false,
        print: PrintArgs::default(),
    }
}

/// Runs random histories under both kernels: does one of them lose what a guest wrote?
fn content(args: &ReviewArgs, words: &str, session: &mut Session) -> anyhow::Result<Part> {
    let what = "What a guest wrote (slat check)";
    let check = selftests::check_words(args.check);
    let command = format!("slat kernel ab {} {words} -- {}", args.before, check.join(" "));
    let checked = match told(in_turns::check_both(&both(args, check), session))? {
        Ok(checked) => checked,
        Err(error) => return Ok(failed(what, &error, command)),
    };
    // What was lost is of use only as a whole.
    let part = part(what, checked.answer(), command, Vec::new());
    Ok(Part { lines: checked.lines(), ..part })
}

/// Boots both kernels in turns: what takes more instructions, and what is new in the log.
fn measured(
    args: &ReviewArgs,
    tree: &str,
    words: &str,
    session: &mut Session,
) -> anyhow::Result<Vec<Part>> {
    let what = "Instructions";
    let in_turns = both(args, args.counted.command.clone());
    let command =
        format!("slat kernel ab {} {words} -- {}", args.before, args.counted.command.join(" "));
    let compared = match told(in_turns::run(&in_turns, session))? {
        Ok(compared) => compared,
        Err(error) => return Ok(vec![failed(what, &error, command)]),
    };
    let [before, after] = [0, 1].map(|side| log(&compared.consoles[side]));
    let lines = |marks: char, one: &[String], other: &[String]| -> Vec<String> {
        let known: BTreeSet<String> = other.iter().map(|line| without_numbers(line)).collect();
        let new = one.iter().filter(|line| !known.contains(&without_numbers(line)));
        new.map(|line| format!("{marks} {line}")).collect()
    };
    let (gone, new) = (lines('-', &before, &after), lines('+', &after, &before));
    let result = format!("{} new, {} gone", several(new.len(), "line"), gone.len());
    let differ: Vec<String> = gone.into_iter().chain(new).collect();
    let boot = format!("slat kernel boot {tree} {words} --console FILE");
    let log = part("The kernel's log", result, boot, differ);
    let counted = part(what, compared.answer(), command, Vec::new());
    Ok(vec![Part { tables: compared.tables(), ..counted }, log])
}

/// Returns the kernel's lines of a console, without their times.
fn log(console: &str) -> Vec<String> {
    let text = |line: &str| {
        let (_, text) = line.trim().strip_prefix('[')?.split_once("] ")?;
        // It names the build.
        (!text.starts_with("Linux version") && !text.starts_with("Kernel command line"))
            .then(|| text.to_owned())
    };
    console.lines().filter_map(text).collect()
}

/// Returns a line without its numbers: sizes and addresses differ from kernel to kernel.
fn without_numbers(line: &str) -> String {
    let is_number = |word: &str| word.chars().any(|c| c.is_ascii_digit());
    let words = line.split([' ', ',', '=', ':']);
    words.map(|word| if is_number(word) { "#" } else { word }).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_log_are_the_same_whatever_their_numbers() {
        let console = "[    0.1] Linux version 6\n[    0.2] Memory: 12K/40K available\r\nslat: x\n";
        assert_eq!(log(console), ["Memory: 12K/40K available"]);
        assert_eq!(without_numbers("Memory: 12K/40K"), without_numbers("Memory: 13K/41K"));
        assert_ne!(without_numbers("kvm [1]: new"), without_numbers("kvm [1]: old"));
    }

    #[test]
    fn a_long_list_is_shortened_and_an_empty_one_is_none() {
        let lines: Vec<String> = (0..SHOWN + 3).map(|line| line.to_string()).collect();
        assert_eq!(shortened(lines).last().unwrap(), "… 3 more");
        assert_eq!(block(&[]), "");
    }

    #[test]
    fn each_part_of_a_page_has_its_command_and_its_lines() {
        let lines = vec!["a < b".to_owned()];
        let parts = vec![part("checkpatch", "1 error".to_owned(), "slat x".to_owned(), lines)];
        let review = Review { title: "Patches of tree:a".to_owned(), parts };
        let page = "Patches of tree:a\n\n- **checkpatch**: 1 error\n\n## checkpatch\n\n    \
                    slat x\n\n```\na < b\n```\n";
        assert_eq!(review.markdown(), page);
        let html = review.html();
        assert!(html.contains("<pre>a &lt; b</pre>") && html.contains("slat x"), "{html}");
    }
}
