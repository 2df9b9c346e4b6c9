//! All samples: a strip of dots for each measurement, over the box of its quartiles.

use super::{Area, DOT, Drawn, FONT, colour};
use crate::stats::Summary;
use crate::unit::Unit;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

/// A measurement.
pub struct Strip<'a> {
    /// The label of its row.
    pub label: String,
    /// Strips of one family have the same colour.
    pub family: &'a str,
    /// Its samples.
    pub samples: &'a [f64],
}

/// From this ratio of the greatest to the least on, a linear scale would show only the greatest.
const WIDE: f64 = 8.0;
/// With fewer samples, quartiles would be guesses.
const BOXED: usize = 5;
/// Approximate width of a letter of a label.
const LETTER: usize = 7;

/// Draws the strips, the first on top. Returns `None` if there are no samples.
pub fn svg(strips: &[Strip], unit: &Unit) -> Option<String> {
    let all = || strips.iter().flat_map(|strip| strip.samples).copied().filter(|s| s.is_finite());
    let (least, most) = (all().min_by(f64::total_cmp)?, all().max_by(f64::total_cmp)?);
    let height = 70 + 26 * strips.len() as u32;
    Some(super::svg(height, |area| {
        if least > 0.0 && most / least > WIDE {
            let range = (least / 1.5..most * 1.5).log_scale();
            return draw(area, strips, (range, 30), &|value| tick(value, unit));
        }
        // A scale that begins at its least value would exaggerate small differences.
        let room = (most - least).max(most.abs() / 10.0).max(f64::MIN_POSITIVE) / 10.0;
        draw(area, strips, (least - room..most + room, 8), &|value| unit.figure(value))
    }))
}

/// Draws over a range with at most `ticks` ticks.
fn draw<R>(
    area: &Area,
    strips: &[Strip],
    (range, ticks): (R, usize),
    label: &dyn Fn(f64) -> String,
) -> Drawn
where
    R: AsRangedCoord<Value = f64>,
    R::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    // Between the many lines of a logarithmic scale, there is no room for more.
    let light = if ticks > 10 { 1 } else { 4 };
    let count = strips.len();
    let longest = strips.iter().map(|strip| strip.label.chars().count()).max().unwrap_or(0);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(30)
        .y_label_area_size((longest * LETTER).clamp(60, 420) as u32)
        .build_cartesian_2d(range, (0..count).into_segmented())?;
    // The axis counts upwards.
    let strip = |position: usize| &strips[count - 1 - position];
    chart
        .configure_mesh()
        .disable_y_mesh()
        .max_light_lines(light)
        .label_style(FONT)
        .y_labels(count)
        .x_labels(ticks)
        .x_label_formatter(&|value| label(*value))
        .y_label_formatter(&|y| match y {
            SegmentValue::CenterOf(y) if *y < count => strip(*y).label.clone(),
            _ => String::new(),
        })
        .draw()?;
    let mut families: Vec<&str> = strips.iter().map(|strip| strip.family).collect();
    let mut seen = std::collections::BTreeSet::new();
    families.retain(|family| seen.insert(*family));
    for position in 0..count {
        let Strip { family, samples, .. } = *strip(position);
        let colour = colour(families.iter().position(|known| *known == family).unwrap_or(0));
        let middle = SegmentValue::CenterOf(position);
        let finite: Vec<f64> =
            samples.iter().copied().filter(|sample| sample.is_finite()).collect();
        let summary = Summary::of(&finite).filter(|summary| summary.count >= BOXED);
        if let Some(Summary { lower_quartile, median, upper_quartile, .. }) = summary {
            let half = [(lower_quartile, middle.clone()), (upper_quartile, middle.clone())];
            let style = colour.mix(0.25).stroke_width(14);
            chart.draw_series([PathElement::new(half, style)])?;
            let tick = PathElement::new([(0, -9), (0, 9)], colour.stroke_width(2));
            chart.draw_series([EmptyElement::at((median, middle.clone())) + tick])?;
        }
        let style = colour.mix(0.6).filled();
        let dots = finite.iter().map(|sample| Circle::new((*sample, middle.clone()), DOT, style));
        chart.draw_series(dots)?;
    }
    Ok(())
}

/// Returns the label of a tick on the logarithmic scale. Only 1, 2 and 5 of each decade have one:
/// there is no room for more text.
fn tick(value: f64, unit: &Unit) -> String {
    let leading = format!("{value:e}").chars().next();
    if matches!(leading, Some('1' | '2' | '5')) { unit.figure(value) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strip(samples: &[f64]) -> Strip<'_> {
        Strip { label: "one".to_owned(), family: "x", samples }
    }

    #[test]
    fn each_sample_is_a_dot_and_only_finite_ones_are_drawn() {
        let svg = svg(&[strip(&[1.0, 2.0, f64::NAN]), strip(&[3.0])], &Unit::SECONDS).unwrap();
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(super::svg(&[strip(&[])], &Unit::SECONDS).is_none());
    }

    #[test]
    fn five_samples_have_a_box_and_four_have_none() {
        // The box and its median are the only wide lines.
        let boxes = |samples: &[f64]| {
            let svg = svg(&[strip(samples)], &Unit::SECONDS).unwrap();
            svg.matches("stroke-width=\"14\"").count()
        };
        assert_eq!(boxes(&[1.0, 2.0, 3.0, 4.0]), 0);
        assert_eq!(boxes(&[1.0, 2.0, 3.0, 4.0, 5.0]), 1);
    }

    #[test]
    fn equal_zero_and_negative_samples_can_be_drawn() {
        for samples in [&[0.0, 0.0][..], &[-1.0, 100.0], &[7.0, 7.0], &[1e-9, 1e3]] {
            assert!(
                svg(&[strip(samples)], &Unit::PERCENT).unwrap().contains("<circle"),
                "{samples:?}"
            );
        }
    }
}
