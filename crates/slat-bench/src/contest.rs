//! A contest: entrants that take turns, and the ratios of their times.

use crate::arena::Arena;
use crate::format::TableFormat;
use crate::settings::engine::Part;
use serde_json::{Map, Value, json};
use slat_lab::record::{Kind, Measurement};
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_lab::turns::order;
use slat_lab::unit::Unit;
use std::collections::BTreeMap;

/// Result of one turn.
pub struct Sample {
    /// Usually how long the work took, in seconds.
    pub seconds: f64,
    /// Exact counts.
    pub counts: Vec<(&'static str, u64)>,
}

impl Sample {
    /// Returns a sample with a time and no counts.
    pub fn time(seconds: f64) -> Self {
        Self { seconds, counts: Vec::new() }
    }
}

/// A turn: it prepares what it needs in the arena, measures, and checks the result. The flag asks
/// for the thorough checks, which only the warm-up round makes.
type Turn<'a> = Box<dyn FnMut(&mut Arena, bool) -> anyhow::Result<Sample> + 'a>;

/// Target of variants that are the engine's work.
pub const ENGINE: &str = slat_lab::record::ENGINE;
/// Target of variants that are a plain loop.
pub const MACHINE: &str = slat_lab::record::MACHINE;
/// Name of the comparison of formats in results.
pub const FORMATS: &str = "formats";

struct Entrant<'a> {
    variant: String,
    target: &'static str,
    note: String,
    turn: Turn<'a>,
}

/// The quotient of two products of variants, or a variant's time for each piece of work.
struct Ratio {
    what: String,
    of: Vec<String>,
    by: Vec<String>,
    unit: &'static str,
    scale: f64,
    at_most: Option<f64>,
}

impl Ratio {
    fn new(what: String, of: &[&str], by: &[&str]) -> Self {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Self { what, of: names(of), by: names(by), unit: "x", scale: 1.0, at_most: None }
    }
}

/// Entrants, and the ratios to compute.
pub struct Contest<'a> {
    scenario: &'static str,
    title: String,
    params: Map<String, Value>,
    least_rounds: u32,
    guests: bool,
    entrants: Vec<Entrant<'a>>,
    ratios: Vec<Ratio>,
}

impl<'a> Contest<'a> {
    /// Makes a contest without entrants. All of its results have `params`, which distinguish them
    /// from results of the scenario's other contests; `title` is shown to the user.
    pub fn new(scenario: &'static str, title: String, params: Map<String, Value>) -> Self {
        let (entrants, ratios) = (Vec::new(), Vec::new());
        Self { scenario, title, params, least_rounds: 0, guests: false, entrants, ratios }
    }

    /// Adds an entrant.
    pub fn enter(
        mut self,
        variant: impl Into<String>,
        target: &'static str,
        turn: impl FnMut(&mut Arena, bool) -> anyhow::Result<Sample> + 'a,
    ) -> Self {
        self.entrants.push(Entrant {
            variant: variant.into(),
            target,
            note: String::new(),
            turn: Box::new(turn),
        });
        self
    }

    /// Adds a ratio: the product of the variants `of` by the product of the variants `by`.
    pub fn ratio(mut self, what: impl Into<String>, of: &[&str], by: &[&str]) -> Self {
        self.ratios.push(Ratio::new(what.into(), of, by));
        self
    }

    /// Adds a time in nanoseconds: that of the variants `of` for each of `pieces`.
    pub fn each(mut self, what: impl Into<String>, of: &[&str], pieces: u64) -> Self {
        let scale = 1e9 / pieces as f64;
        self.ratios.push(Ratio { unit: "ns", scale, ..Ratio::new(what.into(), of, &[]) });
        self
    }

    /// Sets the threshold of the last ratio, the most that is allowed: one without is shown and not
    /// judged.
    pub fn at_most(mut self, limit: impl Into<Option<f64>>) -> Self {
        if let Some(ratio) = self.ratios.last_mut() {
            ratio.at_most = limit.into();
        }
        self
    }

    /// Lets entrants other than the engine fail: they are other people's code.
    pub fn with_guests(mut self) -> Self {
        self.guests = true;
        self
    }

    /// Adds a note on a variant, for the reader of the results.
    pub fn note(mut self, variant: &str, note: impl Into<String>) -> Self {
        let of = |entrant: &&mut Entrant| entrant.variant == variant;
        if let Some(entrant) = self.entrants.iter_mut().find(of) {
            entrant.note = note.into();
        }
        self
    }

    /// Sets the smallest number of rounds, for a contest whose turns vary.
    pub fn rounds_at_least(mut self, rounds: u32) -> Self {
        self.least_rounds = rounds;
        self
    }

    /// Returns the number of rounds that count, if `asked` were asked for.
    pub fn rounds(&self, asked: u32) -> u32 {
        asked.max(self.least_rounds)
    }

    /// Returns the title that is shown to the user.
    pub fn title(&self) -> &str {
        &self.title
    }

    /// Holds the contest, after one round that warms up; returns `None` if the user pressed Ctrl-C.
    pub fn hold(
        &mut self,
        arena: &mut Arena,
        session: &mut Session,
        rounds: u32,
    ) -> anyhow::Result<Option<Vec<Measurement>>> {
        let mut samples: Vec<Vec<Sample>> = self.entrants.iter().map(|_| Vec::new()).collect();
        let mut out = vec![false; self.entrants.len()];
        for round in 0..=rounds as usize {
            for place in order(round, self.entrants.len()) {
                if session.check().is_err() {
                    return Ok(None);
                }
                if out[place] {
                    continue;
                }
                let entrant = &mut self.entrants[place];
                let sample = (entrant.turn)(arena, round == 0);
                // A turn that Ctrl-C ended early is no failure.
                if sample.is_err() && session.interrupted() {
                    return Ok(None);
                }
                match sample {
                    Ok(sample) if round > 0 => samples[place].push(sample),
                    Ok(_) => {}
                    // If another's code fails, that entrant drops out, and the others go on.
                    Err(error) if self.guests && entrant.target != ENGINE => {
                        out[place] = true;
                        let what = format!("{}, {}", self.title, entrant.variant);
                        session.fail(what, format!("{error:#}"));
                    }
                    Err(error) => {
                        return Err(error.context(format!("{}, {}", self.title, entrant.variant)));
                    }
                }
            }
            session.step();
        }
        let stayed = |variant: &String| {
            self.entrants.iter().zip(&out).any(|(e, out)| e.variant == *variant && !out)
        };
        let there = self.entrants.iter().zip(&samples).zip(&out).filter(|(_, out)| !**out);
        let mut results: Vec<Measurement> = there.map(|((e, s), _)| self.raw(e, s)).collect();
        let ratios = self.ratios.iter();
        let ratios = ratios.filter(|ratio| ratio.of.iter().chain(&ratio.by).all(stayed));
        results.extend(ratios.map(|ratio| self.of_rounds(ratio, &samples)));
        Ok(Some(results))
    }

    fn raw(&self, entrant: &Entrant, samples: &[Sample]) -> Measurement {
        let mut params = self.params.clone();
        if !entrant.note.is_empty() {
            params.insert("note".to_owned(), json!(entrant.note));
        }
        let (target, variant) = (entrant.target, entrant.variant.clone());
        let seconds = samples.iter().map(|sample| sample.seconds).collect();
        Measurement {
            counts: counts(samples),
            ..Measurement::new(self.scenario, target, variant, params, Unit::SECONDS, seconds)
        }
    }

    /// Returns a ratio of each round.
    fn of_rounds(&self, ratio: &Ratio, samples: &[Vec<Sample>]) -> Measurement {
        let of = |variant: &str, round: usize| {
            let place = self.entrants.iter().position(|entrant| entrant.variant == variant);
            samples[place.expect("a contest asks for its own variants")][round].seconds
        };
        let product = |variants: &[String], round| -> f64 {
            variants.iter().map(|variant| of(variant, round)).product()
        };
        let rounds = samples.iter().map(Vec::len).max().unwrap_or(0);
        let each = |round| product(&ratio.of, round) / product(&ratio.by, round) * ratio.scale;
        let mut params = self.params.clone();
        params.insert("against".to_owned(), json!(ratio.by.join(" * ")));
        params.insert("variants".to_owned(), json!(ratio.of.join(" * ")));
        params.insert("asked".to_owned(), json!(ratio.at_most));
        Measurement::new(
            format!("{}-asked", self.scenario),
            ENGINE,
            ratio.what.clone(),
            params,
            ratio.unit,
            (0..rounds).map(each).collect(),
        )
        .of_kind(Kind::Ratio)
    }
}

/// Returns counts by name where they are the same in each sample, and else the first, least and
/// greatest of each.
fn counts(samples: &[Sample]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    let Some(first) = samples.first() else { return counts };
    for (index, &(name, count)) in first.counts.iter().enumerate() {
        let all = || samples.iter().map(|sample| sample.counts[index].1);
        let (least, most) = (all().min().unwrap_or(count), all().max().unwrap_or(count));
        if least == most {
            counts.insert(name.to_owned(), count);
        } else {
            for (suffix, count) in [("first", count), ("min", least), ("max", most)] {
                counts.insert(format!("{name}_{suffix}"), count);
            }
        }
    }
    counts
}

/// Returns whether the tables of that much memory are too large for caches to hold a part of them.
pub fn is_large(memory: u64) -> bool {
    memory > 16 << 30
}

/// Makes a contest of a part; `of` distinguishes contests of one part and size.
pub fn pose<'a>(part: Part, format: TableFormat, memory: u64, of: &'static str) -> Contest<'a> {
    let params = [
        ("part", json!(part.to_string())),
        ("format", json!(format.to_string())),
        ("memory", json!(memory)),
        ("of", json!(of)),
    ];
    let params = params.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
    Contest::new("engine", format!("{part}, {}, {of}", Size(memory)), params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat::BreakBeforeMake;

    #[test]
    fn a_ratio_is_taken_within_each_round() {
        let mut arena = Arena::new(1 << 20, 4096, BreakBeforeMake::Never).unwrap();
        let mut time = 0.0;
        let mut contest = Contest::new("engine", "a test".to_owned(), Map::new())
            .enter("one", ENGINE, |_, _| {
                time += 1.0;
                Ok(Sample { seconds: 3.0, counts: vec![("pages", 7), ("rounds", time as u64)] })
            })
            .enter("two", MACHINE, |_, _| Ok(Sample::time(2.0)))
            .ratio("translate", &["one"], &["two"])
            .at_most(1.1)
            .each("one a page", &["one"], 3_000);
        let results = contest.hold(&mut arena, &mut Session::quiet(), 3).unwrap().unwrap();
        let samples: Vec<_> = results.iter().map(|m| (&*m.variant, &*m.samples)).collect();
        assert_eq!(samples[0], ("one", &[3.0; 3][..]));
        assert_eq!(samples[2], ("translate", &[1.5; 3][..]));
        assert_eq!(samples[3], ("one a page", &[1e6; 3][..]));
        let counts: Vec<_> = results[0].counts.iter().map(|(n, c)| (&**n, *c)).collect();
        assert_eq!(
            counts,
            [("pages", 7), ("rounds_first", 2), ("rounds_max", 4), ("rounds_min", 2)]
        );
        assert_eq!(results[2].params["asked"], 1.1);
    }

    #[test]
    fn a_guest_that_fails_drops_out_and_the_others_stay() {
        let mut arena = Arena::new(1 << 20, 4096, BreakBeforeMake::Never).unwrap();
        let mut turns = 0;
        let mut contest = Contest::new("test", "a test".to_owned(), Map::new())
            .with_guests()
            .enter("one", ENGINE, |_, _| Ok(Sample::time(1.0)))
            .enter("guest", "crate", |_, _| {
                turns += 1;
                anyhow::ensure!(turns < 3, "no more");
                Ok(Sample::time(1.0))
            })
            .enter("other", "crate", |_, _| Ok(Sample::time(2.0)))
            .ratio("one by guest", &["one"], &["guest"])
            .ratio("one by other", &["one"], &["other"]);
        let mut session = Session::quiet();
        let results = contest.hold(&mut arena, &mut session, 3).unwrap().unwrap();
        let names: Vec<_> = results.iter().map(|m| (&*m.variant, m.samples.len())).collect();
        assert_eq!(names, [("one", 3), ("other", 3), ("one by other", 3)]);
        assert!(session.failed() && session.skipped()[0].what == "a test, guest");
    }

    #[test]
    fn a_contest_that_is_stopped_gives_nothing() {
        let mut arena = Arena::new(1 << 20, 4096, BreakBeforeMake::Never).unwrap();
        let mut contest =
            Contest::new("test", "a test".to_owned(), Map::new())
                .enter("one", ENGINE, |_, _| Ok(Sample::time(1.0)));
        let mut session = Session::quiet();
        session.stop();
        assert!(contest.hold(&mut arena, &mut session, 3).unwrap().is_none());
    }
}
