//! What the runs of one guest leave, however the last of them ended.

use serde_json::{Map, Value};
use slat_kvm::phase::PhaseRun;

/// Phases and reports of a guest's runs.
///
/// The first run warms the host's memory up and gives way to the next. Where none comes, because
/// the person waiting stopped, it is what there is: its results have the parameter `warm_up`, so
/// that nobody compares them with those of a warm guest.
pub struct Kept<R> {
    pub phases: Vec<PhaseRun>,
    pub reports: Vec<R>,
    warm: bool,
    counts: bool,
}

impl<R> Kept<R> {
    pub fn new() -> Self {
        Self { phases: Vec::new(), reports: Vec::new(), warm: false, counts: false }
    }

    /// Whether the first run came to its end.
    pub fn is_warm(&self) -> bool {
        self.warm
    }

    /// Adds a run that came to its end, or, without a report, the phases that ended before it was
    /// stopped.
    pub fn add(&mut self, phases: Vec<PhaseRun>, report: Option<R>) {
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
        let mut kept = Kept::new();
        kept.add(Vec::new(), Some(1));
        assert_eq!(kept.reports, [1]);
        assert_eq!(kept.params(&Map::new())["warm_up"], true);
        kept.add(Vec::new(), None);
        assert_eq!(kept.reports, [1], "a run that was stopped takes nothing away");
        kept.add(Vec::new(), Some(2));
        kept.add(Vec::new(), Some(3));
        assert_eq!(kept.reports, [2, 3]);
        assert!(kept.params(&Map::new()).is_empty());
    }
}
