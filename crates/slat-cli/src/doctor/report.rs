//! Prints the findings on a host as text, as Markdown and as JSON.

use super::{Change, Finding, Status, Verdict};
use serde::Serialize;
use slat_lab::report::markdown;
use slat_lab::table::Table;
use std::fmt::Write;
use textwrap::Options;

/// Version of the JSON schema.
const SCHEMA: u32 = 1;

/// The result of an examination.
pub struct Examination {
    /// The findings.
    pub findings: Vec<Finding>,
    /// A verdict for each scenario that was asked about.
    pub verdicts: Vec<Verdict>,
}

const ROOT: &str = "Commands that change the host need root; nothing was changed.";

/// The JSON of an examination.
#[derive(Serialize, schemars::JsonSchema)]
pub(crate) struct Document<'a> {
    /// Version of the JSON.
    schema: u32,
    /// The version of `slat`.
    tool: &'static str,
    /// What was found of the host.
    #[schemars(with = "Vec<Finding>")]
    findings: &'a [Finding],
    /// Which scenarios can run.
    #[schemars(with = "Vec<Verdict>")]
    scenarios: &'a [Verdict],
}

impl Examination {
    /// Returns the text for a terminal. A finding that is ok, or that refers to another, has one
    /// line; the others also say why they matter, and what would change them.
    pub fn text(&self, width: u16) -> String {
        let mut text = String::new();
        let names = self.findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
        let mut group = None;
        for finding in &self.findings {
            if group != Some(finding.group) {
                let _ = writeln!(
                    text,
                    "{}{}",
                    if group.is_some() { "\n" } else { "" },
                    finding.group.title()
                );
                group = Some(finding.group);
            }
            let head = format!("  {:7}  {:names$}  ", finding.status.word(), finding.name);
            paragraph(&mut text, &head, head.chars().count(), &finding.found, width);
            if finding.status == Status::Ok || matches!(finding.change, Some(Change::See(_))) {
                continue;
            }
            let indent = " ".repeat(11);
            paragraph(&mut text, &format!("{indent}why     "), 19, finding.why, width);
            if let Some(change) = &finding.change {
                paragraph(&mut text, &format!("{indent}change  "), 19, &plain(change), width);
            }
        }
        text += "\nWhat can run here\n";
        let names = self.verdicts.iter().map(|verdict| verdict.scenario.len()).max().unwrap_or(0);
        for verdict in &self.verdicts {
            let head = format!("  {:names$}  ", verdict.scenario);
            paragraph(&mut text, &head, head.len(), &verdict.sentence(), width);
        }
        if self.findings.iter().any(|f| matches!(f.change, Some(Change::Command(_)))) {
            let _ = writeln!(text, "\n{ROOT}");
        }
        text
    }

    /// Returns Markdown, with a table for each group.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for findings in self.findings.chunk_by(|one, next| one.group == next.group) {
            let rows = findings.iter().map(|finding| {
                let change = finding.change.as_ref().map(Change::sentence).unwrap_or_default();
                let cells = [finding.status.word(), finding.name, &finding.found];
                let cells = cells.into_iter().map(str::to_owned);
                cells.chain([finding.why.to_owned(), change]).collect()
            });
            let title = findings[0].group.title();
            text += &markdown::table(&Table::new(title, 5, "|what|found|why|change", rows));
        }
        let rows = self.verdicts.iter().map(|v| vec![v.scenario.clone(), v.sentence()]);
        let table = Table::new("What can run here", 2, "scenario|", rows).noting(ROOT);
        text + &markdown::table(&table)
    }

    /// Returns all of it as JSON.
    ///
    /// # Errors
    /// None that is known.
    pub fn json(&self) -> serde_json::Result<String> {
        let document = Document {
            schema: SCHEMA,
            tool: slat_lab::VERSION,
            findings: &self.findings,
            scenarios: &self.verdicts,
        };
        serde_json::to_string_pretty(&document).map(|text| text + "\n")
    }
}

/// Returns the change without backquotes around a command, so that the command can be copied from a
/// terminal.
fn plain(change: &Change) -> String {
    match change {
        Change::Command(command) => command.clone(),
        other => other.sentence(),
    }
}

fn paragraph(text: &mut String, head: &str, indent: usize, what: &str, width: u16) {
    let indent = " ".repeat(indent);
    let options = Options::new(width.into())
        .initial_indent(head)
        .subsequent_indent(&indent)
        .break_words(false)
        .word_splitter(textwrap::WordSplitter::NoHyphenation);
    let _ = writeln!(text, "{}", textwrap::fill(what, options));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{EMULATE, examine, fake, verdict, verdicts};

    fn examination(host: &fake::FakeHost) -> Examination {
        let findings = examine(&host.evidence());
        Examination { verdicts: verdicts(&findings), findings }
    }

    #[test]
    fn a_bare_metal_server_reads_like_this() {
        insta::assert_snapshot!(examination(&fake::server()).text(100));
    }

    #[test]
    fn a_cloud_machine_without_kvm_reads_like_this() {
        insta::assert_snapshot!(examination(&fake::cloud()).text(100));
    }

    #[test]
    fn a_kvm_in_software_reads_like_this() {
        insta::assert_snapshot!(examination(&fake::software()).text(100));
    }

    #[test]
    fn json_has_the_documented_keys() {
        let json = examination(&fake::cloud()).json().unwrap();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&value["schema"], &value["tool"]), (&1.into(), &slat_lab::VERSION.into()));
        let device = value["findings"].as_array().unwrap();
        let device = device.iter().find(|finding| finding["name"] == "/dev/kvm").unwrap();
        assert_eq!((&device["group"], &device["status"]), (&"kvm".into(), &"missing".into()));
        assert!(device["change"]["by_hand"].as_str().unwrap().contains("nested"));
        assert!(device["scenarios"].as_array().unwrap().contains(&"dirty-log".into()));
        let age = &value["scenarios"][3];
        assert_eq!((&age["scenario"], &age["runs"]), (&"age".into(), &false.into()));
        assert_eq!(age["lacks"], serde_json::json!([["/dev/kvm"]]));
    }

    #[test]
    fn markdown_has_a_table_for_each_group_and_one_of_verdicts() {
        let examination = examination(&fake::server());
        let markdown = examination.markdown();
        assert_eq!(markdown.matches("### ").count(), 10);
        assert_eq!(markdown.matches("\n| ---").count(), 10);
        let mut findings = examination.findings;
        findings.retain(|finding| finding.matters_for(EMULATE));
        let verdicts = vec![verdict::verdict(&findings, EMULATE)];
        assert!(!Examination { findings, verdicts }.markdown().contains("tdp_mmu"));
    }
}
