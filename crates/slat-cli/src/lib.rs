//! The `slat` command, which measures from user space what memory management costs guests.

pub mod bisect;
pub mod brief;
pub mod check;
pub mod cli;
pub mod doctor;
pub mod emulate;
pub mod explain;
mod forecast;
pub mod ideas;
pub mod in_turns;
pub mod kernel;
pub mod kvm;
pub mod needs;
pub mod params;
pub mod predict;
mod renderers;
pub mod review;
pub mod run;
pub mod schema;
pub mod selftests;
pub mod show;
pub mod watch;

pub use run::main;

use clap::CommandFactory;
use slat_lab::child;
use slat_lab::scenario::Program;

/// Returns whether the words run a scenario, here or in an emulated machine.
fn measures(words: &[String]) -> bool {
    let scenario = child::scenario(words);
    let is_here = scenario.len() == words.len();
    (is_here || words.first().is_some_and(|word| word == "emulate"))
        && scenario.first().is_some_and(|word| word == "bench")
}

/// Name, version and command line of this program, as `slat-lab` uses them.
pub static PROGRAM: Program = Program {
    name: "slat",
    version: slat_lab::VERSION,
    command: cli::Cli::command,
    measures,
    example: "bench dirty-log --memory 1g",
    renderers: renderers::renderers,
    is_missing_feature: |error| {
        error.downcast_ref().is_some_and(slat_kvm::Error::is_missing_feature)
    },
};

#[cfg(test)]
mod tests {
    #[test]
    fn a_scenario_is_measured_here_or_in_an_emulated_machine() {
        let measures = |line: &str| super::measures(&shlex::split(line).unwrap());
        assert!(measures("bench age -v 1"));
        assert!(measures("emulate --arch aarch64 -- bench age -v 1"));
        for line in ["emulate -- tune age", "emulate --kernel k", "watch -- bench age", "compare a"]
        {
            assert!(!measures(line), "{line}");
        }
    }
}
