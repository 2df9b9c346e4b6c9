//! The command line that says where results go, and how they are printed.

use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Where a scenario's results go.
#[derive(Clone, Debug, Default, Args)]
pub struct OutputArgs {
    /// Write results.json and report.html to this directory, too
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// How it is printed.
    #[command(flatten)]
    pub print: PrintArgs,

    /// Stop after this time (90s, 5m), as Ctrl-C does, with exit code 5
    #[arg(long, value_name = "TIME", value_parser = super::time::some)]
    pub time_limit: Option<Duration>,

    /// Exit with code 6 if the run cannot be trusted, as the report's first line says
    #[arg(long)]
    pub fail_if_noisy: bool,
}

/// How results are printed on stdout.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct PrintArgs {
    /// Print JSON on stdout in place of the table
    #[arg(long, conflicts_with = "markdown")]
    pub json: bool,

    /// Print Markdown in place of the table, to paste into a mail or an issue
    #[arg(long)]
    pub markdown: bool,
}

impl PrintArgs {
    /// Returns the format that the user asked for.
    pub fn format(self) -> Format {
        match self {
            Self { json: true, .. } => Format::Json,
            Self { markdown: true, .. } => Format::Markdown,
            _ => Format::Text,
        }
    }
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Tables.
    Text,
    /// Tables to paste into a mail or an issue.
    Markdown,
    /// All of it, for programs.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Scenario {
        #[command(flatten)]
        out: OutputArgs,
    }

    #[test]
    fn a_flag_chooses_the_format_and_two_contradict() {
        let parsed = |words: &[&str]| Scenario::try_parse_from([&["slat"], words].concat());
        let format = |words: &[&str]| parsed(words).unwrap().out.print.format();
        assert_eq!(format(&[]), Format::Text);
        assert_eq!(format(&["--json"]), Format::Json);
        assert_eq!(format(&["--markdown"]), Format::Markdown);
        assert!(parsed(&["--json", "--markdown"]).is_err());
    }
}
