//! Keeps the results of one guest's runs, also where the last run was stopped.

use serde_json::{Map, Value};
use slat_kvm::figure::Outcome;
use slat_kvm::phase::PhaseRun;

/// The phases and reports of a guest's runs.
///
/// The first run warms the host's memory up. The next complete run replaces its results. If the
/// session is stopped before that, the results of the warm-up stay, with the parameter `warm_up`,
/// so that they are not compared with those of a warm guest.
pub struct KeptResults<R: 'static> {
    pub phases: Vec<PhaseRun>,
    pub reports: Vec<R>,
    pub outcome: &'static Outcome<R>,
    answers: Vec<f64>,
    warm: bool,
    counts: bool,
}

impl<R> KeptResults<R> {
    pub fn new(outcome: &'static Outcome<R>) -> Self {
        let (phases, reports, answers) = Default::default();
        Self { phases, reports, outcome, answers, warm: false, counts: false }
    }

    /// Returns whether the run that warms up is complete.
    pub fn is_warm(&self) -> bool {
        self.warm
    }

    /// Adds the phases of a complete run and its report. A stopped run has no report, and only
    /// those phases that ended before.
    pub fn add(&mut self, phases: Vec<PhaseRun>, report: Option<R>) {
        let answer = report.as_ref().and_then(|report| self.outcome.answer(&phases, report));
        // The run that warms up is no sample.
        self.answers.extend(answer.filter(|_| self.warm));
        if self.warm && !self.counts && report.is_some() {
            self.phases.clear();
            self.reports.clear();
            self.counts = true;
        }
        // The phases of a stopped run are dropped if no complete run but the warm-up precedes it:
        // the complete warm-up says more.
        if report.is_some() || !self.warm || self.counts {
            self.phases.extend(phases);
        }
        self.warm |= report.is_some();
        self.reports.extend(report);
    }

    /// Returns the variant of the answer, and one sample for each run that counts.
    pub fn answer(&self) -> (String, &[f64]) {
        (self.outcome.answer.name().into_owned(), &self.answers)
    }

    /// Returns `params`, with `warm_up` added if only the run that warms up is there.
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
    use slat_kvm::figure::Figure;

    #[test]
    fn the_warm_up_run_counts_only_if_no_other_run_follows() {
        const TOTAL: Figure = Figure::Own("total", "s");
        const OUTCOME: Outcome<i32> = Outcome {
            figures: &[(TOTAL, |report| Some(f64::from(*report)))],
            ..Outcome::of(TOTAL)
        };
        let mut kept = KeptResults::new(&OUTCOME);
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
