//! `slat check`: does a KVM lose a write? What a run of histories found.

mod tries;

pub use tries::{Limits, Tries};

use serde::{Deserialize, Serialize};
use slat_kvm::check::{Counts, History, Loss};
use slat_lab::numbers::thousands;
use slat_lab::size::Size;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The report of `slat check`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this format.
    pub slat_check: u32,
    /// Release and architecture of the kernel.
    pub kernel: String,
    /// KVM's module.
    pub module: String,
    /// Its parameters that affect second-level tables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
    /// The seed.
    pub seed: u64,
    /// Bytes of a guest's host memory.
    pub memory: u64,
    /// How long it took.
    pub seconds: f64,
    /// Whether Ctrl-C ended it.
    pub interrupted: bool,
    /// The file of the history, if it came from one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<String>,
    /// How often pages of the whole host moved meanwhile, by the names of /proc/vmstat.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub moved: BTreeMap<String, u64>,
    /// The classes.
    pub classes: Vec<HistoryClass>,
}

/// A class of histories.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HistoryClass {
    /// Its name.
    pub name: String,
    /// How it went.
    pub verdict: Verdict,
    /// What was checked.
    pub counts: Counts,
    /// What of it could not be tried, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub untried: Vec<String>,
}

/// How a class went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing was lost.
    Held,
    /// Something was lost.
    Lost(Box<Finding>),
    /// It could not be tried, or not to the end, for this reason.
    Untried(String),
}

/// Something that was lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// What.
    pub lost: Loss,
    /// The number of the history.
    pub number: u64,
    /// After how many seconds it was found.
    pub seconds: f64,
    /// The indices of the steps that it takes.
    pub steps: Vec<usize>,
    /// The history of these steps.
    pub history: History,
    /// How often it was lost, of how many times that this history ran once more.
    pub repeated: (u32, u32),
}

/// Columns of the report as text.
const WIDTH: usize = 100;
/// What comes before the command that repeats a loss.
const REPEAT: &str = " by: slat check";

/// The version of the report's format.
pub const FORMAT: u32 = 1;

impl Report {
    /// Returns whether anything was lost.
    pub fn lost(&self) -> bool {
        self.classes.iter().any(|class| matches!(class.verdict, Verdict::Lost(_)))
    }

    /// Returns whether anything was tried.
    pub fn tried(&self) -> bool {
        self.classes
            .iter()
            .any(|class| class.counts.histories > 0 || class.verdict != Verdict::Held)
            && self.classes.iter().any(|class| !matches!(class.verdict, Verdict::Untried(_)))
    }

    /// Returns the report as text.
    pub fn text(&self) -> String {
        let mut text = format!(
            "KVM of Linux {}{}{}; seed {}, {} of memory, {:.0} s\n",
            self.kernel,
            if self.module.is_empty() { "" } else { ", " },
            self.module,
            self.seed,
            Size(self.memory),
            self.seconds
        );
        for class in &self.classes {
            text += &wrapped(&format!(" {:<12} {}", class.name, class.text(self)));
        }
        if !self.moved.is_empty() {
            let moved =
                self.moved.iter().map(|(name, count)| format!("{name} {}", grouped(*count)));
            text += &wrapped(&format!(
                " {:<12} meanwhile: {}",
                "whole host",
                moved.collect::<Vec<_>>().join(", ")
            ));
        }
        text += match (self.lost(), self.interrupted) {
            (true, _) => "LOST: report it to kvm@vger.kernel.org with the steps above\n",
            (false, true) => "interrupted; nothing was lost until then\n",
            (false, false) => "nothing was lost in what could be tried\n",
        };
        text
    }

    /// Returns what to send to KVM's maintainers, if something was lost.
    pub fn letter(&self) -> Option<String> {
        let lost: Vec<(&HistoryClass, &Finding)> =
            self.classes.iter().filter_map(HistoryClass::lost).collect();
        let (_, first) = lost.first()?;
        let parameters = self.parameters.iter().map(|(name, value)| format!("{name}={value}"));
        let mut letter = format!(
            "To: kvm@vger.kernel.org\nSubject: KVM: {}\n\n`slat check`, which runs random \
             histories of a guest's memory and knows each content, found this on\n\n  \
             Linux {}{}\n  {}\n",
            first.lost.what,
            self.kernel,
            if self.module.is_empty() { String::new() } else { format!(", {}", self.module) },
            parameters.collect::<Vec<_>>().join(" ")
        );
        for (class, finding) in lost {
            letter +=
                &format!("\nClass {}, of {} histories:\n", class.name, class.counts.histories);
            letter += &wrapped(&class.text(self));
            let _ = writeln!(
                letter,
                "The same from the attached file: slat check --history {}",
                finding.file(&class.name)
            );
        }
        Some(letter)
    }

    /// Returns the command that repeats a finding.
    fn command(&self, finding: &Finding) -> String {
        if let Some(path) = &self.history {
            return format!("slat check --history {path}");
        }
        let steps: Vec<String> = finding.steps.iter().map(usize::to_string).collect();
        format!(
            "slat check --class {} --seed {} --number {} --memory {} --steps {}",
            finding.history.class,
            self.seed,
            finding.number,
            Size(self.memory),
            steps.join(",")
        )
    }
}

/// Wraps each line behind the names of the classes, but for commands.
fn wrapped(text: &str) -> String {
    let options = textwrap::Options::new(WIDTH)
        .subsequent_indent("              ")
        .break_words(false)
        .word_splitter(textwrap::WordSplitter::NoHyphenation);
    let wrap = |line: &str| match line.contains(REPEAT) {
        true => line.to_owned(),
        false => textwrap::fill(line, &options),
    };
    text.lines().map(|line| wrap(line) + "\n").collect()
}

fn grouped(count: u64) -> String {
    thousands(count.cast_signed())
}

impl Finding {
    /// Returns the name of the file of its history.
    pub fn file(&self, class: &str) -> String {
        format!("{class}-{}.json", self.number)
    }
}

impl HistoryClass {
    /// Returns what was lost in the class.
    pub fn lost(&self) -> Option<(&Self, &Finding)> {
        match &self.verdict {
            Verdict::Lost(finding) => Some((self, finding)),
            _ => None,
        }
    }

    fn text(&self, report: &Report) -> String {
        let Counts { histories, steps, writes, told, .. } = self.counts;
        let counts = format!(
            "{} histories, {} steps, {} writes, {} pages of logs\n",
            grouped(histories),
            grouped(steps),
            grouped(writes),
            grouped(told)
        );
        let mut text = match &self.verdict {
            Verdict::Held if histories == 0 => "not tried: no time was left\n".to_owned(),
            Verdict::Held => format!("held  {counts}"),
            Verdict::Untried(why) if histories > 0 => {
                format!("could not go on: {why}\n{:14}until then {counts}", "")
            }
            Verdict::Untried(why) => format!("could not be tried: {why}\n"),
            Verdict::Lost(finding) => {
                let what = if finding.lost.hang { "HANG" } else { "LOST" };
                let mut text = format!(
                    "{what}  {} (after {:.1} s, in history {})\n",
                    finding.lost.what, finding.seconds, finding.number
                );
                let history = &finding.history;
                let _ = writeln!(
                    text,
                    "{:14}{} host pages ({:?}), {} guest pages, log {:?}, {} vCPUs:",
                    "", history.memory, history.backing, history.window, history.way, history.vcpus
                );
                for (index, step) in finding.steps.iter().zip(&history.steps) {
                    let _ = writeln!(text, "{:14}{index:>3}  {step}", "");
                }
                let again = match finding.repeated {
                    (_, 0) => "once more".to_owned(),
                    (lost, of) => format!("lost {lost} of {of} times"),
                };
                let _ = writeln!(text, "{:14}{again} by: {}", "", report.command(finding));
                text
            }
        };
        for why in &self.untried {
            let _ = writeln!(text, "{:14}not tried: {why}", "");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_kvm::check::{Kind, Span, Step, Way};

    #[test]
    fn a_report_names_the_loss_its_steps_and_the_repeating_command() {
        let history = History {
            class: "log".into(),
            seed: 5,
            memory: 1024,
            window: 2048,
            backing: Kind::Huge,
            way: Way::Manual,
            vcpus: 2,
            private: false,
            steps: vec![
                Step::Log { slot: 1, on: true },
                Step::Write { vcpu: 0, guest: Span::new(3, 4), random: None },
            ],
        };
        let finding = Finding {
            lost: Loss { step: 1, what: "host page 5 holds zeroes".into(), hang: false },
            number: 12,
            seconds: 1.25,
            steps: vec![4, 9],
            history,
            repeated: (5, 5),
        };
        let counts = Counts { histories: 13, steps: 1300, writes: 70_000, contents: 9, told: 8 };
        let class = |name: &str, verdict| HistoryClass {
            name: name.into(),
            verdict,
            counts,
            untried: vec!["swap: none".into()],
        };
        let report = Report {
            slat_check: FORMAT,
            kernel: "6.12 x86_64".into(),
            module: "kvm_amd".into(),
            parameters: [("npt".to_owned(), "1".to_owned())].into(),
            seed: 7,
            memory: 4 << 20,
            seconds: 60.0,
            interrupted: false,
            history: None,
            moved: [("pswpout".to_owned(), 1234)].into(),
            classes: vec![
                class("log", Verdict::Lost(Box::new(finding))),
                class("memslots", Verdict::Held),
                HistoryClass {
                    counts: Counts::default(),
                    ..class("rings", Verdict::Untried("none".into()))
                },
            ],
        };
        insta::assert_snapshot!(report.text());
        insta::assert_snapshot!("what_to_send", report.letter().unwrap());
        assert!(report.lost() && report.tried());
        let read = serde_json::from_str(&serde_json::to_string(&report).unwrap());
        assert_eq!(read.ok(), Some(report));
    }
}
