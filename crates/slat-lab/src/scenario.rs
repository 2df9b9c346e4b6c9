//! Scenarios, each of which measures something, and the programs that have a list of them.

use crate::cli::OutputArgs;
use crate::record::Measurement;
use crate::renderer::{Renderer, Renderers};
use crate::session::Session;
use anyhow::Context;
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};
use std::fmt;
use std::marker::PhantomData;

/// A scenario. The command line and the doctor take all of its properties from this trait.
pub trait Scenario: 'static {
    /// Name, on the command line and in results.
    const NAME: &'static str;

    /// Description, in one line.
    const ABOUT: &'static str;

    /// Examples of command lines, each with a description.
    const EXAMPLES: &'static str;

    /// Default values of options that it has in common with others, where its own differ.
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[];

    /// The host's features that it needs, by the names of the doctor's findings. Of each entry, any
    /// one suffices.
    const NEEDS: &'static [&'static [&'static str]] = &[];

    /// Presentation of its results in reports. Without a renderer, they are rows of a plain table.
    const RENDERER: Renderer = Renderer::NONE;

    /// Settings, which are its options on the command line.
    type Settings: Args;

    /// Measures, and returns the results.
    ///
    /// 1. Input that cannot be right is [`Failure::BadInput`](crate::failure::Failure::BadInput),
    ///    before anything is measured. Any other error is a measurement that failed.
    /// 2. A part that this machine cannot measure is skipped by [`Session::skip`]. This is not
    ///    an error, as long as another requested part remains.
    /// 3. It calls [`Session::check`] between samples. When it is stopped, it returns `Ok` with the
    ///    results that are complete. The caller knows from [`Session::interrupted`] that they are a
    ///    part.
    ///
    /// # Errors
    /// The errors of point 1.
    fn run(settings: &Self::Settings, session: &mut Session) -> anyhow::Result<Vec<Measurement>>;
}

/// A scenario in a list.
pub struct Entry {
    /// Name of the scenario.
    pub name: &'static str,
    /// Description, in one line.
    pub about: &'static str,
    /// The host's features that it needs.
    pub needs: &'static [&'static [&'static str]],
    renderer: Renderer,
    command: fn() -> Command,
    run: fn(&ArgMatches, &mut Session) -> anyhow::Result<Vec<Measurement>>,
}

impl Entry {
    /// Creates the entry of a scenario.
    pub const fn of<S: Scenario>() -> Self {
        Self {
            name: S::NAME,
            about: S::ABOUT,
            needs: S::NEEDS,
            renderer: S::RENDERER,
            command: || {
                OutputArgs::augment_args(own::<S>()).about(S::ABOUT).after_help(S::EXAMPLES)
            },
            run: |matches, session| S::run(&S::Settings::from_arg_matches(matches)?, session),
        }
    }
}

/// Returns a scenario's own part of the command line.
fn own<S: Scenario>() -> Command {
    let command = S::Settings::augment_args(Command::new(S::NAME));
    let differing = S::DEFAULTS.iter();
    differing.fold(command, |command, &(name, value)| {
        command.mut_arg(name, |argument| argument.default_value(value))
    })
}

/// The scenarios of one program.
pub trait Scenarios: 'static {
    /// All of them, in the order of the help.
    const ALL: &'static [Entry];

    /// Returns whether a scenario has that name.
    fn has(name: &str) -> bool {
        Self::ALL.iter().any(|entry| entry.name == name)
    }

    /// Returns the renderers of their results.
    fn renderers() -> Vec<Renderer> {
        Self::ALL.iter().map(|entry| entry.renderer).collect()
    }
}

/// A scenario that the command line chose from a list.
pub struct Choice<L> {
    /// Options for the output of its results.
    pub out: OutputArgs,
    entry: &'static Entry,
    matches: ArgMatches,
    list: PhantomData<L>,
}

impl<L> Choice<L> {
    /// Runs the scenario.
    ///
    /// # Errors
    /// The errors of the scenario.
    pub fn run(&self, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        (self.entry.run)(&self.matches, session)
    }
}

impl<L> fmt::Debug for Choice<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.entry.name)
    }
}

impl<L: Scenarios> FromArgMatches for Choice<L> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let missing = || clap::Error::new(ErrorKind::MissingSubcommand);
        let (name, matches) = matches.subcommand().ok_or_else(missing)?;
        let entry = L::ALL.iter().find(|entry| entry.name == name).ok_or_else(missing)?;
        let out = OutputArgs::from_arg_matches(matches)?;
        Ok(Self { out, entry, matches: matches.clone(), list: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<L: Scenarios> Subcommand for Choice<L> {
    fn augment_subcommands(command: Command) -> Command {
        command.subcommands(L::ALL.iter().map(|entry| (entry.command)()))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        L::has(name)
    }
}

/// A program that measures.
pub struct Program {
    /// Name of the program.
    pub name: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// Command line of the program.
    pub command: fn() -> Command,
    /// Returns whether the words after the program's name measure a scenario.
    pub measures: fn(&[String]) -> bool,
    /// Words that measure a scenario, as an example.
    pub example: &'static str,
    /// Returns the renderers of its results, in the order of its reports.
    pub renderers: fn() -> Renderers,
    /// Returns whether an error says that the host lacks something, so that no test failed.
    pub is_missing_feature: fn(&anyhow::Error) -> bool,
}

impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Parses a scenario's settings from its command line after its name.
///
/// # Errors
/// The words cannot be right, or a quote is not closed.
pub fn settings<S: Scenario>(line: &str) -> anyhow::Result<S::Settings> {
    let words = shlex::split(line).with_context(|| format!("`{line}`: a quote is not closed"))?;
    let words = std::iter::once(S::NAME.to_owned()).chain(words);
    let matches = own::<S>().try_get_matches_from(words)?;
    Ok(S::Settings::from_arg_matches(&matches)?)
}

/// Runs a scenario by its command line after its name.
///
/// # Errors
/// The errors of [`settings`] and of the scenario.
pub fn run<S: Scenario>(line: &str, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    S::run(&settings::<S>(line)?, session)
}

#[cfg(test)]
pub(crate) mod fake {
    //! A program that measures nothing, and has a command line like one that does.

    use super::*;
    use crate::cli::count;
    use clap::{Arg, ArgAction};

    fn option(name: &'static str) -> Arg {
        Arg::new(name).long(name)
    }

    fn command() -> Command {
        let flags = ["quick", "manual-protect"];
        let first = Command::new("first")
            .arg(option("memory"))
            .arg(option("granule").value_parser(["4k", "16k", "64k"]))
            .arg(option("backing").short('s').value_delimiter(',').action(ArgAction::Append))
            .arg(option("when").value_parser(["enable", "clear"]))
            .arg(option("samples").value_parser(clap::value_parser!(u32).range(10..=1000)))
            .args(flags.map(|name| option(name).action(ArgAction::SetTrue)));
        let second = Command::new("second")
            .arg(option("granule").value_parser(["4k", "16k", "64k"]))
            .arg(option("rounds").value_parser(count::rounds()))
            .arg(option("quick").action(ArgAction::SetTrue));
        let all = [first, second].map(OutputArgs::augment_args);
        Command::new("slat").subcommand(Command::new("bench").subcommands(all))
    }

    pub static PROGRAM: Program = Program {
        name: "slat",
        version: "0.1.0",
        command,
        measures: |words| words.first().is_some_and(|word| word == "bench"),
        example: "bench first --backing 2m",
        renderers: Renderers::default,
        is_missing_feature: |_| false,
    };
}
