//! A cell of a plan: a command line, and the files of its results.

use super::{Setting, parser};
use crate::child;
use crate::scenario::Program;
use anyhow::bail;
use std::path::{Path, PathBuf};

/// One command line in one repeat.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    program: &'static Program,
    /// Number of the cell, from 1 in the order of the plan.
    pub number: usize,
    /// Number of its repeat, from 1.
    pub repeat: u32,
    /// The words of the command line, without the program.
    pub words: Vec<String>,
    /// Number of words that come from the scenario.
    scenario: usize,
    /// Names of the settings.
    settings: Vec<String>,
}

impl Cell {
    /// Creates a cell of the scenario's words with one combination of settings.
    pub(super) fn new(
        program: &'static Program,
        number: usize,
        repeat: u32,
        scenario: &[String],
        combination: &[Setting],
    ) -> Self {
        let mut words = scenario.to_vec();
        for (name, value) in combination {
            // The values were checked when the plan was read.
            words.extend(written(name, value).unwrap_or_default());
        }
        let settings = combination.iter().map(|(name, _)| name.clone()).collect();
        Self { program, number, repeat, words, scenario: scenario.len(), settings }
    }

    /// Returns the command line, ready to paste into a shell.
    pub fn line(&self) -> String {
        let words = self.words.iter().map(String::as_str);
        let line = shlex::try_join(words).unwrap_or_else(|_| self.words.join(" "));
        format!("{} {line}", self.program.name)
    }

    /// Checks the command line with the program's parser.
    ///
    /// # Errors
    /// The parser refuses it, or the scenario's words also set one of the settings.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let parser = parser(self.program);
        let command = self.command(&parser);
        self.check_twice(command)?;
        let all = std::iter::once(self.program.name).chain(self.words.iter().map(String::as_str));
        let parsed = (self.program.command)().try_get_matches_from(all);
        let Err(error) = parsed else { return self.check_known(command) };
        if !error.use_stderr() {
            bail!("`{}` prints a text and measures nothing; leave out --help", self.line());
        }
        let text = error.render().to_string();
        // The rest is for people at a command line, not for a plan.
        let text = text.split("\n\nUsage:").next().unwrap_or(&text);
        let text = text.split("\n\nFor more information").next().unwrap_or(text);
        bail!("`{}`: {}", self.line(), text.trim_start_matches("error: ").trim())
    }

    /// Returns the part of the parser that reads the scenario.
    fn command<'p>(&self, parser: &'p clap::Command) -> &'p clap::Command {
        let mut command = parser;
        for word in child::scenario(&self.words[..self.scenario]) {
            match command.find_subcommand(word) {
                Some(found) => command = found,
                None => break,
            }
        }
        command
    }

    /// Checks that each setting is an option: a flag that is false leaves no word for the parser to
    /// refuse.
    fn check_known(&self, command: &clap::Command) -> anyhow::Result<()> {
        let known = |name: &&String| {
            command.get_arguments().any(|argument| argument.get_long() == Some(name))
        };
        match self.settings.iter().find(|name| !known(name)) {
            Some(name) => bail!(
                "settings.{name}: `{} {}` has no --{name}",
                self.program.name,
                self.scenario()
            ),
            None => Ok(()),
        }
    }

    /// Checks that no option is set twice: an option that takes a list would accept both.
    fn check_twice(&self, command: &clap::Command) -> anyhow::Result<()> {
        for name in &self.settings {
            let arguments = command.get_arguments();
            let mut same = arguments.filter(|argument| argument.get_long() == Some(name));
            let short = same.next().and_then(|argument| argument.get_short());
            let long = format!("--{name}");
            let says = |word: &String| {
                let long = word.strip_prefix(&long);
                long.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
                    || short.is_some_and(|short| word.starts_with(&format!("-{short}")))
            };
            if child::scenario(&self.words[..self.scenario]).iter().any(says) {
                bail!(
                    "`{}` and settings both say {long}; leave it out in one of them",
                    self.scenario()
                );
            }
        }
        Ok(())
    }

    fn scenario(&self) -> String {
        self.words[..self.scenario].join(" ")
    }

    /// Returns whether a report's command line is that of this cell.
    pub fn is_command(&self, command: &[String]) -> bool {
        command.first().is_some_and(|word| word == self.program.name)
            && child::without_output(&command[1..]) == self.words
    }

    /// Returns the path of its report in `directory`.
    pub fn report(&self, directory: &Path) -> PathBuf {
        directory.join(format!("cell-{:03}.json", self.number))
    }

    /// Returns the path of its record in `directory` if it failed.
    pub fn failure(&self, directory: &Path) -> PathBuf {
        directory.join(format!("cell-{:03}{FAILED}", self.number))
    }
}

/// The end of the name of a failed cell's record.
pub const FAILED: &str = ".failed.json";

/// Returns whether a file of this name is a cell's report.
pub fn is_report(name: &str) -> bool {
    let number = name.strip_prefix("cell-").and_then(|name| name.strip_suffix(".json"));
    number.is_some_and(|number| number.len() >= 3 && number.bytes().all(|b| b.is_ascii_digit()))
}

/// Returns the option that a setting names.
pub(super) fn option_of(name: &str) -> anyhow::Result<String> {
    if name.starts_with('-') {
        bail!("settings.{name}: write the option without dashes, {}", name.trim_start_matches('-'));
    }
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
        bail!("settings: `{name}` is no name of an option");
    }
    if ["output", "json", "markdown", super::SCENARIO].contains(&name) {
        bail!("settings: --{name} is none; all results are gathered here");
    }
    Ok(format!("--{name}"))
}

/// Returns a setting as words of a command line. A flag has one word, or none if it is false.
pub(super) fn written(name: &str, value: &toml::Value) -> anyhow::Result<Vec<String>> {
    let option = option_of(name)?;
    let value = match value {
        toml::Value::Boolean(true) => return Ok(vec![option]),
        toml::Value::Boolean(false) => return Ok(Vec::new()),
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        other => bail!(
            "settings.{name} has {other}; values are texts, numbers, or true and false for a flag"
        ),
    };
    // A value that begins with a dash would be read as an option.
    Ok(if value.starts_with('-') { vec![format!("{option}={value}")] } else { vec![option, value] })
}
