//! Figures of scenarios, and how a scenario's results are shown. What runs a scenario and what
//! prints its results both take names, units and headings from here.

mod stall;

pub use stall::{Stall, stalls};

use crate::phase::{Phase, PhaseRun};
use std::borrow::Cow;

/// A figure that runs of a guest give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// The time of a phase, or of a call.
    Time(Phase),
    /// The time of the longest call in a phase.
    LongestCall(Phase),
    /// A figure of the stalls in a phase.
    Stall(Phase, Stall),
    /// Another figure, by its name and unit.
    Own(&'static str, &'static str),
    /// A figure that has a course over time, by its name and unit.
    Course(&'static str, &'static str),
}

impl Figure {
    /// The time of a get of the log with its clear.
    pub const GET_AND_CLEAR: Self = Self::Own("get-and-clear", "s");
    /// The part of its pace that the guest lost.
    pub const LOSS: Self = Self::Own("loss", "%");
    /// The loss of the second that lost most.
    pub const WORST_LOSS: Self = Self::Own("loss-worst", "%");
    /// The rate at which the vCPUs wrote, each write being one of a page.
    pub const WRITE_RATE: Self = Self::Own("write-rate", "MiB/s");
    /// The vCPUs' pace over time, of what it is undisturbed.
    pub const PACE: Self = Self::Course("pace", "%");
    /// The times of [`Figure::PACE`].
    pub const PACE_AT: Self = Self::Course("pace-at", "s");

    /// Returns the name in results.
    pub fn name(self) -> Cow<'static, str> {
        match self {
            Self::Time(phase) => phase.name().into(),
            Self::LongestCall(phase) => format!("{phase}-longest-call").into(),
            Self::Stall(phase, stall) => format!("{phase}-{}", stall.name()).into(),
            Self::Own(name, _) | Self::Course(name, _) => name.into(),
        }
    }

    /// Returns the name of the unit.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Time(_) | Self::LongestCall(_) => "s",
            Self::Stall(_, stall) => stall.unit(),
            Self::Own(_, unit) | Self::Course(_, unit) => unit,
        }
    }
}

impl PartialEq<str> for Figure {
    fn eq(&self, name: &str) -> bool {
        self.name() == name
    }
}

/// A figure, and the heading of its column.
pub type Column = (Figure, &'static str);

/// A figure, and where a run's report has it; a run without it gives no sample.
pub type Value<R> = (Figure, fn(&R) -> Option<f64>);

/// A count of a phase, by its name, and where a run's report has it.
pub type Count<R> = (Phase, &'static str, fn(&R) -> Option<u64>);

/// Figures of one run, each with several samples.
pub type Course = Vec<(Figure, Vec<f64>)>;

/// What each run of a scenario gives, beside its phases.
#[derive(Debug)]
pub struct Outcome<R: 'static> {
    /// The figure that decides how often a guest is run.
    pub answer: Figure,
    /// The figures of its report.
    pub figures: &'static [Value<R>],
    /// Counts, which are those of all runs together.
    pub counts: &'static [Count<R>],
    /// Counts of the last run.
    pub last: &'static [Count<R>],
    /// The course over time of the last run.
    pub course: fn(&R) -> Course,
}

impl<R> Outcome<R> {
    /// Runs that give nothing but their phases.
    pub const fn of(answer: Figure) -> Self {
        Self { answer, figures: &[], counts: &[], last: &[], course: |_| Vec::new() }
    }

    /// Returns the answer of a run.
    pub fn answer(&self, phases: &[PhaseRun], report: &R) -> Option<f64> {
        let runs = |phase: Phase| phases.iter().filter(move |run| run.phase == phase);
        let own = self.figures.iter().find(|(figure, _)| *figure == self.answer);
        match (own, self.answer) {
            (Some((_, of)), _) => Some(of(report).unwrap_or(f64::NAN)),
            (None, Figure::Time(phase)) => Some(runs(phase).map(|run| run.seconds).sum()),
            (None, Figure::Stall(phase, Stall::Page)) => {
                runs(phase).find_map(stalls).map(|[by_page, ..]| by_page)
            }
            _ => None,
        }
    }
}

/// The sentence that a scenario's results come to.
#[derive(Debug, Clone, Copy)]
pub enum Sentence {
    /// These words, and what a page costs a vCPU in the phase.
    PerPage(Phase, &'static str),
    /// These words, and the figure.
    Whole(Figure, &'static str),
}

/// How the results of a scenario are shown.
#[derive(Debug, Clone, Copy)]
pub struct Results {
    /// The scenario's name.
    pub name: &'static str,
    /// The title of the table.
    pub title: &'static str,
    /// The columns of the table.
    pub columns: &'static [Column],
    /// The note below the table.
    pub note: &'static str,
    /// The sentence that comes first.
    pub said: Sentence,
}

/// The note below a table of phases.
pub const WHOLE_PHASES: &str = "Times of whole phases, all vCPUs, seen from user space; medians.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_one_name_and_is_found_by_it() {
        let mut names = std::collections::BTreeSet::new();
        for &phase in Phase::ALL {
            let stalls = Stall::ALL.map(|stall| Figure::Stall(phase, stall));
            for figure in
                stalls.into_iter().chain([Figure::Time(phase), Figure::LongestCall(phase)])
            {
                assert!(figure == *figure.name() && names.insert(figure.name()), "{figure:?}");
            }
        }
        assert_eq!(Figure::Stall(Phase::Dirty, Stall::P99).name(), "dirty-stall-p99");
        assert_eq!(Figure::LongestCall(Phase::Get).name(), "get-longest-call");
    }
}
