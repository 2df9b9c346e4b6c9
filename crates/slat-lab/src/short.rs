//! The help of `-h`: one screen with the options that are used most. `--help` has all.

use crate::scenario::Program;
use clap::Command;
use std::ffi::OsString;
use std::io::{IsTerminal, Write};

/// Options that are used most, in any command, the most used first.
const USED: &[&str] = &[
    "memory", "vcpus", "backing", "runs", "quick", "output", "json", "time", "all", "listen",
    "link", "kernel", "arch", "patch", "tree", "edit", "way", "run", "first", "second", "scenario",
    "words", "kvm", "fail_if_slower", "dirty_rate", "duration", "iterations", "boots", "pairs",
    "every", "seed", "only_differences", "max_downtime",
];

/// Lines of a screen.
const SCREEN: usize = 24;

/// Columns of it.
const COLUMNS: usize = 80;

/// Most characters of what is said of a subcommand, so that it takes a line.
const ABOUT: usize = 62;

/// Prints the short help and ends the program, if its command line asks for it.
pub fn answer(program: &Program) {
    if let Some(before) = asked(std::env::args_os()) {
        let mut command = shorten((program.command)());
        // No more of the line is parsed: what else it lacks is no reason to refuse help.
        for word in before {
            if let Some(sub) = command.find_subcommand(&word) {
                command = sub.clone();
            }
        }
        let help = command.render_help();
        let is_seen = std::io::stdout().is_terminal();
        let text = if is_seen { help.ansi().to_string() } else { help.to_string() };
        // Nobody reads it if the pipe is closed.
        _ = std::io::stdout().write_all(text.as_bytes());
        std::process::exit(0);
    }
}

/// Returns the words before `-h`, if the words ask for the short help.
fn asked(words: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let words: Vec<OsString> = words.skip(1).take_while(|word| word != "--").collect();
    let at = words.iter().position(|word| word == "-h")?;
    Some(words[..at].to_vec())
}

/// Makes `-h` of a command, and of its subcommands, short. For nothing but to print it: options
/// are gone.
pub fn shorten(command: Command) -> Command {
    // Subcommands get the names of their parents.
    let mut command = command.term_width(COLUMNS);
    command.build();
    short(command)
}

fn short(mut command: Command) -> Command {
    let name = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
    let commands: Vec<_> = command.get_subcommands().map(|it| it.get_name().to_owned()).collect();
    for sub in commands {
        command = command.mut_subcommand(sub, |sub| {
            let about = sub.get_about().map(|about| about.to_string()).unwrap_or_default();
            short(sub).about(cut(&about))
        });
    }
    let mut hidden = false;
    command = command.mut_args(|arg| {
        let is_used = arg.is_positional() || USED.contains(&arg.get_id().as_str());
        let stays = is_used || matches!(arg.get_id().as_str(), "help" | "version");
        hidden |= !stays && !arg.is_hide_set();
        let about = arg.get_help().map(|help| help.to_string()).unwrap_or_default();
        arg.hide(!stays).hide_possible_values(true).help(cut(&about))
    });
    let more = if hidden { "More options, and examples" } else { "Examples" };
    command = command.after_help(format!("{more}: {name} --help"));
    let mut gone = Vec::new();
    // The last subcommands are those that are used least.
    while command.clone().render_help().to_string().lines().count() > SCREEN {
        let shown = command.get_subcommands().filter(|it| !it.is_hide_set());
        let Some(last) = shown.last().map(|last| last.get_name().to_owned()) else {
            let place = |arg: &clap::Arg| USED.iter().position(|id| arg.get_id() == *id);
            let shown = command.get_opts().filter(|arg| !arg.is_hide_set());
            let least = shown.filter_map(|arg| Some((place(arg)?, arg.get_id().clone()))).max();
            let Some((_, least)) = least else { break };
            command = command.mut_arg(least, |arg| arg.hide(true));
            continue;
        };
        command = command.mut_subcommand(&last, |sub| sub.hide(true));
        if last != "help" {
            gone.insert(0, last);
            command = command.after_help(format!("Also: {}: {name} --help", gone.join(", ")));
        }
    }
    command
}

/// Cuts a sentence where a part of it ends, to a line.
fn cut(text: &str) -> String {
    let text = text.lines().next().unwrap_or_default();
    if text.chars().count() <= ABOUT {
        return text.to_owned();
    }
    let end = text.char_indices().nth(ABOUT).map_or(text.len(), |(at, _)| at);
    let part = text[..end].rfind([',', ':', ';', '(']).filter(|at| *at > 12);
    let word = || text[..end].rfind(' ').unwrap_or(end);
    text[..part.unwrap_or_else(word)].trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::fake::PROGRAM;

    #[test]
    fn short_help_is_one_screen_with_the_options_used_most() {
        let short = shorten((PROGRAM.command)());
        let bench = short.find_subcommand("bench").unwrap();
        let help = bench.find_subcommand("first").unwrap().clone().render_help().to_string();
        assert!(help.contains("--memory") && !help.contains("--granule"), "{help}");
        assert!(help.contains("More options, and examples: slat bench first --help"), "{help}");
        assert!(help.lines().all(|line| line.chars().count() <= COLUMNS), "{help}");
    }

    #[test]
    fn a_sentence_is_cut_where_a_part_ends() {
        assert_eq!(cut("short, and whole"), "short, and whole");
        let long = "Say where the time of a run's guests went: faults, calls, waiting, and so on";
        assert_eq!(cut(long), "Say where the time of a run's guests went: faults, calls");
    }

    #[test]
    fn short_help_is_asked_for_before_the_words_of_others() {
        let asked = |line: &str| asked(line.split(' ').map(OsString::from));
        assert_eq!(asked("slat bench -h"), Some(vec!["bench".into()]));
        assert_eq!((asked("slat ab -- bench -h"), asked("slat --help")), (None, None));
    }
}
