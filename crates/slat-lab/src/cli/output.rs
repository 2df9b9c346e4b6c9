//! The command line that says where results go, and how they are printed.

use clap::{Args, ValueEnum};
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

/// How a report is printed on stdout.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct PrintArgs {
    /// How the report is printed on stdout [default: text]
    #[arg(long, value_name = "FORMAT", conflicts_with_all = ["json", "markdown"])]
    pub report: Option<ReportFormat>,

    /// Print results.json on stdout in place of the table, as --report json does
    #[arg(long, conflicts_with = "markdown")]
    pub json: bool,

    /// Print Markdown in place of the table, as --report markdown does
    #[arg(long)]
    pub markdown: bool,
}

impl PrintArgs {
    /// Returns the format that the user asked for.
    pub fn format(self) -> ReportFormat {
        match self {
            Self { report: Some(format), .. } => format,
            Self { json: true, .. } => ReportFormat::Json,
            Self { markdown: true, .. } => ReportFormat::Markdown,
            _ => ReportFormat::Text,
        }
    }

    /// Returns whether the user asked for a format.
    pub fn is_given(self) -> bool {
        self.report.is_some() || self.json || self.markdown
    }
}

/// How tables that are no report are printed on stdout.
#[derive(Clone, Debug, Default, Args)]
pub struct TablePrintArgs {
    /// How it is printed on stdout [default: text]
    #[arg(long, value_name = "FORMAT", conflicts_with_all = ["json", "markdown"])]
    pub report: Option<Format>,

    /// Print JSON, as --report json does
    #[arg(long, conflicts_with = "markdown")]
    pub json: bool,

    /// Print Markdown to paste into a mail or an issue, as --report markdown does
    #[arg(long)]
    pub markdown: bool,

    /// As it was written once.
    #[arg(long = "format", hide = true, value_parser = renamed)]
    pub renamed: Option<String>,
}

impl TablePrintArgs {
    /// Returns the format that the user asked for.
    pub fn format(&self) -> Format {
        match self {
            Self { report: Some(format), .. } => *format,
            Self { json: true, .. } => Format::Json,
            Self { markdown: true, .. } => Format::Markdown,
            _ => Format::Text,
        }
    }
}

/// Refuses the old use of `--format`, which now means the format of page tables only.
fn renamed(value: &str) -> Result<String, String> {
    Err(format!("--format is of page tables now; write --report {value}"))
}

/// How a table is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table
    #[default]
    Text,
    /// A table to paste into a mail or an issue
    Markdown,
    /// All of it, for programs
    Json,
}

/// How a report is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// Tables
    #[default]
    Text,
    /// results.json
    Json,
    /// Tables to paste into a mail or an issue
    Markdown,
    /// A row for each sample and each count, for spreadsheets and data frames
    Csv,
    /// A test for each measurement, for kernel CI (KTAP version 1)
    Ktap,
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

    #[derive(Parser)]
    struct Tables {
        #[command(flatten)]
        print: TablePrintArgs,
    }

    fn parsed<P: Parser>(words: &str) -> Result<P, clap::Error> {
        P::try_parse_from(std::iter::once("slat").chain(words.split_whitespace()))
    }

    #[test]
    fn what_is_no_report_is_asked_for_in_the_same_words_and_the_old_ones_name_the_new() {
        for words in ["--json", "--report json"] {
            assert_eq!(parsed::<Tables>(words).unwrap().print.format(), Format::Json);
        }
        let error = parsed::<Tables>("--format json").err().unwrap().to_string();
        assert!(error.contains("--report json"), "{error}");
        assert!(parsed::<Tables>("--json --markdown").is_err());
    }

    #[test]
    fn the_older_flags_mean_what_they_meant_and_contradict_the_newer() {
        let format = |words: &str| parsed::<Scenario>(words).unwrap().out.print.format();
        assert_eq!(format(""), ReportFormat::Text);
        assert_eq!(format("--json"), ReportFormat::Json);
        assert_eq!(format("--markdown"), ReportFormat::Markdown);
        assert_eq!(format("--report ktap"), ReportFormat::Ktap);
        for words in ["--json --report csv", "--markdown --report json", "--report yaml"] {
            assert!(parsed::<Scenario>(words).is_err(), "{words}");
        }
    }
}
