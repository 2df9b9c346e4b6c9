//! Takes turns, and computes results from the samples.

use serde_json::{Map, Value, json};
use slat_lab::record::{ENGINE, Kind, Measurement};
use slat_lab::session::Session;
use slat_lab::turns::order;
use slat_lab::unit::Unit;
use std::collections::BTreeMap;

/// Returns the samples of each entrant, of the complete rounds: Ctrl-C ends them. One round warms
/// up.
///
/// `turn` gets the entrant's number, and whether the turn counts.
///
/// # Errors
/// Errors of `turn`.
pub fn take_turns<T>(
    session: &Session,
    rounds: u32,
    entrants: usize,
    mut turn: impl FnMut(usize, bool) -> anyhow::Result<T>,
) -> anyhow::Result<Vec<Vec<T>>> {
    let mut samples: Vec<Vec<T>> = (0..entrants).map(|_| Vec::new()).collect();
    for round in 0..=rounds as usize {
        let mut taken: Vec<Option<T>> = (0..entrants).map(|_| None).collect();
        for place in order(round, entrants) {
            if session.check().is_err() {
                return Ok(samples);
            }
            taken[place] = Some(turn(place, round > 0)?);
        }
        // A turn that was stopped half-way does not count.
        if session.check().is_err() {
            return Ok(samples);
        }
        if round > 0 {
            samples.iter_mut().zip(taken).for_each(|(all, one)| all.extend(one));
        }
        session.step();
    }
    Ok(samples)
}

/// Counts of one sample.
pub type Counts = BTreeMap<String, u64>;

/// Returns counts with their names.
pub fn counts<const N: usize>(named: [(&str, u64); N]) -> Counts {
    named.map(|(name, count)| (name.to_owned(), count)).into()
}

/// The fields that results of one scenario share.
pub struct Recorder {
    /// The scenario.
    pub scenario: &'static str,
    /// Parameters of all results.
    pub params: Map<String, Value>,
}

impl Recorder {
    /// Returns a variant's samples of one figure.
    pub fn figure(
        &self,
        variant: &str,
        target: &str,
        figure: &str,
        unit: &str,
        samples: Vec<f64>,
        counts: impl Iterator<Item = Counts>,
    ) -> Measurement {
        let mut params = self.params.clone();
        params.insert("figure".to_owned(), json!(figure));
        Measurement {
            counts: slat_lab::record::merged_counts(counts),
            ..Measurement::new(self.scenario, target, variant, params, unit, samples)
        }
    }

    /// Returns a variant's samples of one figure, of which each guest has several. They are no more
    /// independent than the guests are.
    pub fn figure_of_guests(
        &self,
        variant: &str,
        target: &str,
        figure: &str,
        unit: &str,
        guests: Vec<Vec<f64>>,
        counts: impl Iterator<Item = Counts>,
    ) -> Measurement {
        let groups: Vec<usize> = guests.iter().map(Vec::len).collect();
        let groups = if groups.iter().all(|size| *size == 1) { Vec::new() } else { groups };
        let one = self.figure(variant, target, figure, unit, guests.concat(), counts);
        Measurement { groups, ..one }
    }

    /// Returns the ratios of a figure of each round to another's, and the most that is allowed, if
    /// they are judged.
    pub fn ratio(
        &self,
        what: impl Into<String>,
        of: &str,
        by: &str,
        samples: Vec<f64>,
        at_most: Option<f64>,
    ) -> Measurement {
        let mut params = self.params.clone();
        params.insert("variants".to_owned(), json!(of));
        params.insert("against".to_owned(), json!(by));
        params.insert("asked".to_owned(), json!(at_most));
        Measurement::new(super::tables::ASKED, ENGINE, what, params, Unit::RATIO, samples)
            .of_kind(Kind::Ratio)
    }
}

/// Returns the quotients of two lists, by round.
pub fn ratios(of: impl Iterator<Item = f64>, by: impl Iterator<Item = f64>) -> Vec<f64> {
    of.zip(by).map(|(of, by)| of / by).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_entrant_runs_once_a_round_and_round_one_is_not_counted() {
        let mut order = Vec::new();
        let samples = take_turns(&Session::quiet(), 2, 3, |place, counts| {
            order.push((place, counts));
            Ok(place)
        });
        assert_eq!(samples.unwrap(), [[0, 0], [1, 1], [2, 2]]);
        assert_eq!(order.iter().filter(|(_, counts)| !counts).count(), 3);
        let firsts: Vec<_> = order.chunks(3).map(|round| round[0].0).collect();
        assert_eq!(firsts, [0, 2, 1]);
    }

    #[test]
    fn a_round_that_was_stopped_half_way_is_left_out() {
        let session = Session::quiet();
        let mut turns = 0;
        let samples = take_turns(&session, 5, 2, |place, _| {
            turns += 1;
            if turns == 6 {
                session.stop();
            }
            Ok(place)
        });
        assert_eq!(samples.unwrap(), [[0], [1]]);
    }
}
