//! Tests that each command line of the documentation is one that its program accepts.

use super::{Example, pages};
use crate::{Cli, Task, root};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use slat_lab::scenario::Program;

/// Programs of others, which no test runs.
const OTHERS: [&str; 3] = ["sudo", "echo", "rustup"];

/// Placeholders in command lines, with values for them.
const FORMS: [(&str, &str); 3] =
    [("--linux-tree PATH", "--linux-tree tree"), ("--vcpus N", "--vcpus 8"), (" …", "")];

/// Kinds of lines.
#[derive(Debug, PartialEq, Eq)]
enum LineKind {
    /// Its program accepts it.
    Understood,
    /// Its program wants more: the line is the name of a command.
    Name,
    /// It runs another program.
    Other,
}

/// Parses a line by the shell's rules: the commands that it runs, one after the other.
fn read(line: &str) -> Result<LineKind, String> {
    let forms = FORMS.iter().fold(line.to_owned(), |line, (form, value)| line.replace(form, value));
    let spaced = forms.replace(';', " ; ").replace("\\\n", " ");
    let words = shlex::split(&spaced).ok_or("a quote is not closed")?;
    let mut read = LineKind::Other;
    for words in words.split(|word| [";", "|", "&&"].contains(&word.as_str())) {
        let words: Vec<_> =
            words.iter().take_while(|word| *word != ">").map(String::as_str).collect();
        if !words.is_empty() {
            read = match (command(&words)?, read) {
                (LineKind::Other, before) => before,
                (read, _) => read,
            };
        }
    }
    Ok(read)
}

fn command(words: &[&str]) -> Result<LineKind, String> {
    match words {
        ["nice", rest @ ..] => command(rest),
        [variable, rest @ ..] if variable.contains('=') => command(rest),
        ["slat", rest @ ..] => of_program(&slat_cli::PROGRAM, rest),
        ["slat-bench", rest @ ..] => of_program(&slat_bench::cli::PROGRAM, rest),
        ["cargo", rest @ ..] => cargo(rest),
        [other, ..] if OTHERS.contains(other) => Ok(LineKind::Other),
        _ => {
            Err(format!("{words:?} is no program of this project, nor one that its pages may name"))
        }
    }
}

fn of_program(program: &'static Program, words: &[&str]) -> Result<LineKind, String> {
    let line = std::iter::once(program.name).chain(words.iter().copied());
    let matches = match (program.command)().try_get_matches_from(line) {
        Ok(matches) => matches,
        Err(error) => return of_error(&error),
    };
    // Some programs run another command line, which they parse later.
    let inner = words.iter().position(|word| *word == "--").map(|at| &words[at + 1..]);
    match (matches.subcommand(), inner) {
        (Some(("emulate" | "noise" | "explain", _)), Some(["slat-bench", inner @ ..])) => {
            of_program(&slat_bench::cli::PROGRAM, inner)
        }
        (Some(("emulate" | "noise" | "explain", _)), Some(inner)) => of_program(program, inner),
        (Some(("ab", ab)), _) => {
            for side in ["first", "second"] {
                let line: &String = ab.get_one(side).ok_or("ab has two command lines")?;
                let words: Vec<_> = line.split(' ').collect();
                of_program(program, &words)?;
            }
            Ok(LineKind::Understood)
        }
        _ => Ok(LineKind::Understood),
    }
}

fn of_error(error: &clap::Error) -> Result<LineKind, String> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(LineKind::Understood),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand => Ok(LineKind::Name),
        _ => Err(error.to_string()),
    }
}

fn cargo(words: &[&str]) -> Result<LineKind, String> {
    let at = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let (own, passed) = (&words[..at], words.get(at + 1..).unwrap_or_default());
    let value =
        |option: &str| own.windows(2).find_map(|pair| (pair[0] == option).then_some(pair[1]));
    let package = value("-p");
    let name = package.unwrap_or("slat-cli");
    let folders = [root().join("crates").join(name), root().join(name)];
    let Some(folder) = folders.iter().find(|folder| folder.exists()) else {
        return Err(format!("no package {name}"));
    };
    let exists = |what: &str, name: &str| {
        let there = [format!("{what}/{name}.rs"), format!("{what}/{name}/main.rs")];
        there.iter().any(|path| folder.join(path).exists())
    };
    match (own, value("--example"), value("--test")) {
        (["xtask", ..], ..) => xtask(&words[1..]),
        (["run", ..], Some(name), _) if exists("examples", name) => Ok(LineKind::Other),
        (["run", ..], None, _) if package.is_none() => of_program(&slat_cli::PROGRAM, passed),
        (["run", ..], None, _) if package == Some("slat-bench") => {
            of_program(&slat_bench::cli::PROGRAM, passed)
        }
        (["test", ..], _, Some(name)) if exists("tests", name) => Ok(LineKind::Other),
        (["test", ..], _, None) => Ok(LineKind::Other),
        _ => Err(format!("cargo {own:?} runs nothing that is here")),
    }
}

fn xtask(words: &[&str]) -> Result<LineKind, String> {
    let line = std::iter::once("cargo xtask").chain(words.iter().copied());
    let cli = match Cli::try_parse_from(line) {
        Ok(cli) => cli,
        Err(error) => return of_error(&error),
    };
    let (scenario, passed) = match &cli.task {
        Task::Bench { arguments } => ("engine", arguments),
        Task::Peers { arguments } => ("peers", arguments),
        _ => return Ok(LineKind::Understood),
    };
    let passed: Vec<_> =
        std::iter::once(scenario).chain(passed.iter().map(String::as_str)).collect();
    of_program(&slat_bench::cli::PROGRAM, &passed)
}

/// Returns the lines that no program accepts, with their places.
fn wrong<'a>(examples: impl Iterator<Item = &'a Example>, names: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for Example { at, line, .. } in examples {
        match read(line) {
            Ok(LineKind::Name) if !names => wrong.push(format!("{at}: `{line}` lacks something")),
            Ok(LineKind::Other) => println!("{at}: not of this project: {line}"),
            Ok(_) => {}
            Err(reason) => wrong.push(format!("{at}: `{line}`: {reason}")),
        }
    }
    wrong
}

#[test]
fn every_documented_command_line_is_valid_for_its_program() {
    let pages = pages().unwrap();
    let mut found = wrong(pages.iter().flat_map(|page| &page.examples), false);
    found.extend(wrong(pages.iter().flat_map(|page| &page.spans), true));
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_line_with_an_option_or_a_scenario_that_is_gone_is_refused() {
    for line in [
        "slat bench dirty-log --bakcing 4k",
        "slat bench gone",
        "slat doctor > /dev/null && slat bench gone",
        "slat emulate --arch aarch64 -- slat-bench gone",
        "slat-bench noise -- split --gone",
        "slat-bench ab --first split --second 'split --gone'",
        "cargo run --release -p slat-bench -- split --gone",
        "cargo run -p slat --example gone",
        "cargo xtask test gone",
        "cargo xtask bench --gone",
        "gone",
    ] {
        assert!(read(line).is_err(), "{line}");
    }
}

#[test]
fn a_line_that_lacks_a_value_is_a_name() {
    assert_eq!(read("slat bench"), Ok(LineKind::Name));
    assert_eq!(read("slat bench dirty-log # as it is"), Ok(LineKind::Understood));
    assert!(Cli::command().get_name().starts_with("cargo"));
}
