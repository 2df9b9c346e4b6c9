//! Charts as SVG text that needs nothing from anywhere else.

pub mod distributions;
mod ecdf;
mod strips;

use super::tables::{Row, rows};
use crate::numbers::seconds;
use crate::record::Measurement;
use crate::unit::Unit;
use plotters::coord::Shift;
use plotters::prelude::*;
use strips::Strip;

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A chart and what it shows.
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// The `<svg>` element.
    pub svg: String,
}

/// Colours that keep apart for the colour-blind, too (Okabe and Ito).
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];
/// More of them, for charts that tell more apart.
///
/// The page's style gives each of these, black and white another colour where the reader's screen
/// is dark.
const MORE: [RGBColor; 4] =
    [RGBColor(86, 180, 233), RGBColor(230, 159, 0), RGBColor(120, 120, 120), RGBColor(0, 0, 0)];
const WIDTH: u32 = 860;
const DOT: i32 = 4;
const FONT: (&str, u32) = ("sans-serif", 13);

/// The chart of each scenario that has one.
pub fn all(results: &[Measurement]) -> Vec<Chart> {
    let mut charts = Vec::new();
    charts.extend(dirtying(results));
    charts.extend(splitting(results));
    charts.extend(peers(results));
    charts
}

/// How many times as long as the engine everybody took: a row for each operation, a dot for each.
fn peers(results: &[Measurement]) -> Option<Chart> {
    use super::tables::peers::{gathered, label, ratio};
    let rows = gathered(results);
    let mut names: Vec<&str> = Vec::new();
    let mut strips: Vec<(String, Vec<(usize, f64)>)> = Vec::new();
    for row in &rows {
        let Some(base) = row.variant(crate::known::SLAT) else { continue };
        let others = row.measurements.iter().filter(|m| m.target != "engine");
        let mut dots = Vec::new();
        for m in others {
            // The machine is one competitor, whatever loop it runs.
            let name = if m.target == "machine" { "the machine" } else { &m.variant };
            let place = names.iter().position(|known| *known == name).unwrap_or(names.len());
            if place == names.len() {
                names.push(name);
            }
            dots.extend(ratio(m, base).map(|by| (place, by.median)));
        }
        strips.push((label(row)?, dots));
    }
    let all = || strips.iter().flat_map(|(_, dots)| dots).map(|(_, ratio)| *ratio);
    let (least, most) = (all().min_by(f64::total_cmp)?, all().max_by(f64::total_cmp)?);
    let count = strips.len();
    let svg = svg(90 + 22 * (count + names.len() / 3) as u32, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(330)
            .build_cartesian_2d(
                (least.min(1.0) / 1.5..most.max(1.0) * 2.0).log_scale(),
                (0..count).into_segmented(),
            )?;
        let strip = |position: usize| &strips[count - 1 - position];
        chart
            .configure_mesh()
            .max_light_lines(4)
            .label_style(FONT)
            .y_labels(count)
            .x_desc("times as long as the engine; right of 1, the engine is faster")
            .x_label_formatter(&|ratio| format!("{ratio}"))
            .y_label_formatter(&|y| match y {
                SegmentValue::CenterOf(y) if *y < count => strip(*y).0.clone(),
                _ => String::new(),
            })
            .draw()?;
        for (place, name) in names.iter().enumerate() {
            let style = colour(place).filled();
            let dots = (0..count).flat_map(|position| {
                let of_them = strip(position).1.iter().filter(|(who, _)| *who == place);
                of_them.map(move |(_, ratio)| (*ratio, SegmentValue::CenterOf(position)))
            });
            chart
                .draw_series(dots.map(|dot| Circle::new(dot, DOT, style)))?
                .label(*name)
                .legend(move |(x, y)| Circle::new((x + 8, y), DOT, style));
        }
        chart
            .configure_series_labels()
            .label_font(FONT)
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.9))
            .border_style(BLACK.mix(0.3))
            .draw()
    });
    Some(Chart { title: "The engine beside others".to_owned(), svg })
}

/// How long each round of dirtying took: one line for each way of logging.
fn dirtying(results: &[Measurement]) -> Option<Chart> {
    let rows = rows(results, "dirty-log", &["vcpu"]);
    let labels = super::tables::Labels::of(&rows);
    let whole = |row: &Row| {
        let mut dirty = row.measurements.iter().filter(|m| m.variant == "dirty");
        dirty.find(|m| !m.params.contains_key("vcpu")).map(|m| m.samples.clone())
    };
    let named = |row: &Row| {
        let parts: Vec<_> =
            labels.headings().zip(labels.cells(row)).map(|(h, c)| format!("{h} {c}")).collect();
        parts.join(", ")
    };
    let lines: Vec<(String, Vec<f64>)> =
        rows.iter().filter_map(|row| Some((named(row), whole(row)?))).collect();
    let rounds =
        lines.iter().map(|(_, samples)| samples.len()).max().filter(|rounds| *rounds > 0)?;
    let slowest = lines.iter().flat_map(|(_, samples)| samples).copied().fold(0.0, f64::max);
    let svg = svg(340, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(70)
            .build_cartesian_2d(
                0.5..rounds as f64 + 0.5,
                0.0..slowest * (1.1 + 0.1 * lines.len() as f64),
            )?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .label_style(FONT)
            .x_labels(rounds.min(20) + 1)
            .x_desc("round")
            .x_label_formatter(&|x| {
                if x.fract() == 0.0 { format!("{x:.0}") } else { String::new() }
            })
            .y_label_formatter(&|y| seconds(*y))
            .draw()?;
        for (index, (name, samples)) in lines.iter().enumerate() {
            let colour = colour(index);
            let points = || samples.iter().enumerate().map(|(n, time)| (n as f64 + 1.0, *time));
            let line = chart.draw_series(LineSeries::new(points(), colour.stroke_width(2)))?;
            // One way of logging alone has nothing to be told from, and no name.
            if lines.len() > 1 {
                line.label(name)
                    .legend(move |(x, y)| Circle::new((x + 8, y), DOT, colour.filled()));
            }
            chart.draw_series(points().map(|point| Circle::new(point, DOT, colour.filled())))?;
        }
        chart
            .configure_series_labels()
            .label_font(FONT)
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .draw()
    });
    Some(Chart { title: "Time of each round of dirtying".to_owned(), svg })
}

/// Every sample of every split as a dot on a logarithmic scale: a chart for each `when` and `what`.
fn splitting(results: &[Measurement]) -> Vec<Chart> {
    let rows = rows(results, "split", &[]);
    let mut groups: Vec<(String, Vec<Strip>)> = Vec::new();
    for row in &rows {
        let name = |key: &str| row.param(key).unwrap_or("?").to_owned();
        let title = match (row.param("when"), row.param("what")) {
            (Some("enable"), Some("split")) => "Split all at once: the split alone",
            (Some("enable"), Some("call")) => "Split all at once: the whole call",
            (Some("clear"), Some("split")) => "64 pages at a time: the split alone",
            (Some("clear"), Some("call")) => "64 pages at a time: the whole call",
            _ => "Splits",
        };
        let strips = row.measurements.iter().map(|m| Strip {
            label: format!("{} {}", name("backing"), m.variant),
            family: &m.variant,
            samples: &m.samples,
        });
        match groups.iter_mut().find(|(known, _)| known == title) {
            Some((_, known)) => known.extend(strips),
            None => groups.push((title.to_owned(), strips.collect())),
        }
    }
    let chart = |(title, strips): (String, Vec<Strip>)| {
        Some(Chart { svg: strips::svg(&strips, &Unit::SECONDS)?, title })
    };
    groups.into_iter().filter_map(chart).collect()
}

/// The colour of the `place`-th of several things.
fn colour(place: usize) -> RGBColor {
    let all = COLOURS.len() + MORE.len();
    *COLOURS.iter().chain(&MORE).nth(place % all).unwrap_or(&BLACK)
}

/// Draws on a fresh sheet. What cannot be drawn leaves the sheet unfinished: a report without one
/// of its charts is better than none.
fn svg(height: u32, draw: impl FnOnce(&Area) -> Drawn) -> String {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        let drawn = area.fill(&WHITE).and_then(|()| draw(&area)).and_then(|()| area.present());
        debug_assert!(drawn.is_ok(), "{drawn:?}");
    }
    // Inside HTML the element needs no namespace, and a report without any address in it is easily
    // seen to load nothing.
    text.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "")
}
