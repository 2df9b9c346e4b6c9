//! What the runs of one guest leave, however the last of them ended.

use super::stalls;
use serde_json::{Map, Value};
use slat_kvm::phase::{Phase, PhaseRun};

/// What a guest is run for: a figure of each run.
pub enum Answer<R> {
    /// The time of a phase, all its rounds together.
    Time(Phase),
    /// What its stalls took by the page.
    Stalls(Phase),
    /// A figure of the report, by its variant.
    Figure(&'static str, fn(&R) -> f64),
}

impl<R> Answer<R> {
    /// The variant that results have it under.
    fn variant(&self) -> String {
        match self {
            Self::Time(phase) => phase.to_string(),
            Self::Stalls(phase) => format!("{phase}-stall-page"),
            Self::Figure(variant, _) => (*variant).to_owned(),
        }
    }

    fn of(&self, phases: &[PhaseRun], report: &R) -> Option<f64> {
        let runs = |phase: Phase| phases.iter().filter(move |run| run.phase == phase);
        match *self {
            Self::Time(phase) => Some(runs(phase).map(|run| run.seconds).sum()),
            Self::Stalls(phase) => {
                runs(phase).find_map(stalls::figures).map(|[by_page, ..]| by_page)
            }
            Self::Figure(_, of) => Some(of(report)),
        }
    }
}

/// Phases and reports of a guest's runs.
///
/// The first run warms the host's memory up and gives way to the next. Where none comes, because
/// the person waiting stopped, it is what there is: its results have the parameter `warm_up`, so
/// that nobody compares them with those of a warm guest.
pub struct Kept<R> {
    pub phases: Vec<PhaseRun>,
    pub reports: Vec<R>,
    answer: Answer<R>,
    answers: Vec<f64>,
    warm: bool,
    counts: bool,
}

impl<R> Kept<R> {
    pub fn new(answer: Answer<R>) -> Self {
        let (phases, reports, answers) = Default::default();
        Self { phases, reports, answer, answers, warm: false, counts: false }
    }

    /// Whether the first run came to its end.
    pub fn is_warm(&self) -> bool {
        self.warm
    }

    /// Adds a run that came to its end, or, without a report, the phases that ended before it was
    /// stopped.
    pub fn add(&mut self, phases: Vec<PhaseRun>, report: Option<R>) {
        let answer = report.as_ref().and_then(|report| self.answer.of(&phases, report));
        // The run that warms up is no sample.
        self.answers.extend(answer.filter(|_| self.warm));
        if self.warm && !self.counts && report.is_some() {
            self.phases.clear();
            self.reports.clear();
            self.counts = true;
        }
        // Where a part is all that would count, the whole run that warmed up says more.
        if report.is_some() || !self.warm || self.counts {
            self.phases.extend(phases);
        }
        self.warm |= report.is_some();
        self.reports.extend(report);
    }

    /// What the guest is run for, by its variant: a sample for each run that counts.
    pub fn answer(&self) -> (String, &[f64]) {
        (self.answer.variant(), &self.answers)
    }

    /// The parameters of its results.
    pub fn params(&self, params: &Map<String, Value>) -> Map<String, Value> {
        let mut params = params.clone();
        if !self.counts {
            params.insert("warm_up".to_owned(), true.into());
        }
        params
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_that_warms_up_gives_way_to_the_next_and_stands_where_none_comes() {
        let mut kept = Kept::new(Answer::Figure("total", |report: &i32| f64::from(*report)));
        kept.add(Vec::new(), Some(1));
        assert_eq!(kept.reports, [1]);
        assert_eq!(kept.params(&Map::new())["warm_up"], true);
        assert!(kept.answer().1.is_empty());
        kept.add(Vec::new(), None);
        assert_eq!(kept.reports, [1], "a run that was stopped takes nothing away");
        kept.add(Vec::new(), Some(2));
        kept.add(Vec::new(), Some(3));
        assert_eq!(kept.reports, [2, 3]);
        assert_eq!(kept.answer(), ("total".to_owned(), &[2.0, 3.0][..]));
        assert!(kept.params(&Map::new()).is_empty());
    }
}
