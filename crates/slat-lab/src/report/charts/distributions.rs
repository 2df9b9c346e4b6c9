//! The distribution of each measurement's samples, by scenario.

use super::ecdf;
use super::strips::{self, Strip};
use crate::compare::LEAST;
use crate::param::{Params, Role, is_prose};
use crate::record::{KVM, Measurement};
use crate::renderer::{Chart, Renderer, Renderers};
use crate::report::tables::{Labels, Row};
use crate::table::NOTHING;
use crate::unit::Unit;

/// From this number of samples on, dots overlap, and a line is clearer.
const MANY: usize = 50;
/// More lines cannot be distinguished.
const LINES: usize = 8;
/// More strips become two charts.
const STRIPS: usize = 40;

/// The charts of one scenario.
pub struct Scenario {
    /// Name of the scenario.
    pub name: String,
    /// Its charts.
    pub charts: Vec<Chart>,
}

/// Returns the distributions of each scenario's measurements, without those that a renderer draws
/// itself, and without measurements that were made of others.
pub fn all(results: &[Measurement], renderers: &Renderers) -> Vec<Scenario> {
    let drawn: Vec<&Renderer> =
        renderers.each.iter().filter(|renderer| renderer.draws_samples).collect();
    let mut topics: Vec<(Topic, Vec<&Measurement>)> = Vec::new();
    let is_raw =
        |m: &&Measurement| !m.is_derived() && !drawn.iter().any(|renderer| (renderer.reads)(m));
    for m in results.iter().filter(is_raw) {
        let topic = Topic::of(m, renderers.params);
        match topics.iter_mut().find(|(known, _)| *known == topic) {
            Some((_, measurements)) => measurements.push(m),
            None => topics.push((topic, vec![m])),
        }
    }
    let mut scenarios: Vec<Scenario> = Vec::new();
    for (topic, measurements) in &topics {
        let charts = charts(topic, measurements, renderers.params);
        match scenarios.iter_mut().find(|known| known.name == topic.scenario) {
            Some(known) => known.charts.extend(charts),
            None => scenarios.push(Scenario { name: topic.scenario.to_owned(), charts }),
        }
    }
    scenarios.retain(|scenario| !scenario.charts.is_empty());
    scenarios
}

/// The properties that the measurements of a chart have in common.
#[derive(PartialEq)]
struct Topic<'a> {
    scenario: &'a str,
    unit: &'a Unit,
    /// The operation, figure or phase.
    name: &'a str,
    /// Whether the name is the variant.
    is_phase: bool,
}

impl<'a> Topic<'a> {
    fn of(m: &'a Measurement, params: Params) -> Self {
        let name = params.titles().find_map(|name| m.params.get(name)?.as_str());
        // Under KVM a variant is a phase, and the parameters distinguish the ways.
        let is_phase = name.is_none() && m.target == KVM;
        let name = name.unwrap_or(if is_phase { &m.variant } else { "" });
        Self { scenario: &m.scenario, unit: &m.unit, name, is_phase }
    }

    fn title(&self) -> String {
        match (self.name, self.unit.name()) {
            ("", "s") => self.scenario.to_owned(),
            (name, "s") => name.to_owned(),
            ("", unit) => unit.to_owned(),
            (name, unit) => format!("{name}, {unit}"),
        }
    }
}

fn charts(topic: &Topic, measurements: &[&Measurement], own: Params) -> Vec<Chart> {
    let rows: Vec<Row> = measurements
        .iter()
        .map(|&m| {
            let mut params = m.params.clone();
            params.retain(|name, _| !is_prose(name) && own.role(name) != Role::Derived);
            Row { params, measurements: vec![m] }
        })
        .collect();
    let common = Labels::of(&rows, own);
    let labels: Vec<String> = rows.iter().map(|row| label(topic, row, &common)).collect();
    let strips: Vec<Strip> = measurements
        .iter()
        .zip(&labels)
        .map(|(m, label)| Strip {
            label: label.clone(),
            family: if topic.is_phase { label } else { &m.variant },
            samples: &m.samples,
        })
        .collect();
    let most = strips.iter().map(|strip| strip.samples.len()).max().unwrap_or(0);
    if most < LEAST {
        return Vec::new();
    }
    let drawn = match most > MANY && strips.len() <= LINES {
        true => vec![ecdf::svg(&strips, topic.unit)],
        false => strips.chunks(STRIPS).map(|strips| strips::svg(strips, topic.unit)).collect(),
    };
    drawn.into_iter().flatten().map(|svg| Chart { title: topic.title(), svg }).collect()
}

/// Returns the label that distinguishes a measurement from the others of its chart.
fn label(topic: &Topic, row: &Row, labels: &Labels) -> String {
    let variant = row.measurements.iter().map(|m| &m.variant);
    let own = variant.clone().filter(|_| !topic.is_phase).cloned();
    let words = labels
        .headings()
        .zip(labels.cells(row))
        .filter_map(|(heading, value)| (value != NOTHING).then(|| format!("{heading} {value}")));
    let label = own.chain(words).collect::<Vec<_>>().join(", ");
    if label.is_empty() { variant.cloned().collect() } else { label }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn each_phase_of_a_kvm_guest_is_a_chart_with_a_strip_per_way() {
        let mut results = fake::report().results;
        results.retain(|m| m.scenario == "dirty-log");
        // Three rounds are no distribution.
        assert!(all(&results, &Renderers::default()).is_empty());
        results.iter_mut().for_each(|m| m.samples = [0.1, 0.2, 0.3, 0.4, 0.5].to_vec());
        let scenarios = all(&results, &Renderers::default());
        assert_eq!(scenarios.len(), 1);
        let titles: Vec<_> = scenarios[0].charts.iter().map(|chart| &*chart.title).collect();
        assert_eq!(titles, ["populate", "enable", "dirty", "get", "disable", "clear"]);
        assert!(scenarios[0].charts[0].svg.contains("backing 2m, manual protect on"));
    }

    #[test]
    fn many_samples_are_a_line_and_few_are_dots() {
        let mut results = fake::guests();
        results.retain(|m| m.scenario == "execute" && m.params["figure"] == "execute");
        let svg =
            |results: &[Measurement]| all(results, &Renderers::default())[0].charts[0].svg.clone();
        results.iter_mut().for_each(|m| m.samples = vec![0.5; 7]);
        assert_eq!(svg(&results).matches("<circle").count(), 14);
        results[0].samples = (1..=60).map(f64::from).collect();
        assert!(svg(&results).contains("100 %") && svg(&results).matches("<circle").count() == 0);
    }

    #[test]
    fn ratios_and_what_a_renderer_draws_are_not_drawn_again() {
        let mut results = fake::report().results;
        results.extend(fake::guests());
        results.retain(|m| m.scenario == "split" || m.scenario == "guest-asked");
        results.iter_mut().for_each(|m| m.samples = vec![0.5; 7]);
        assert_eq!(all(&results, &Renderers::default()).len(), 1);
        let reads = |m: &Measurement| m.scenario == "split";
        let renderer = Renderer { reads, draws_samples: true, ..Renderer::NONE };
        let renderers = Renderers { each: vec![renderer], ..Renderers::default() };
        assert!(all(&results, &renderers).is_empty());
    }
}
