//! Empirical distribution functions: the part of many samples that does not exceed a value.

use super::strips::Strip;
use super::{FONT, colour};
use crate::unit::Unit;
use plotters::prelude::*;

/// Number of points of a line; more would not be visible.
const POINTS: usize = 400;

/// Draws the empirical distribution functions of a few measurements. Returns `None` without
/// samples.
pub(super) fn svg(strips: &[Strip], unit: &Unit) -> Option<String> {
    let lines: Vec<(&str, Vec<(f64, f64)>)> =
        strips.iter().map(|strip| (&*strip.label, steps(strip.samples))).collect();
    let all = || lines.iter().flat_map(|(_, points)| points).map(|(value, _)| *value);
    let (least, most) = (all().min_by(f64::total_cmp)?, all().max_by(f64::total_cmp)?);
    // On a linear scale a long tail would hide the rest. Values that are not positive have no
    // logarithm.
    let is_wide = least > 0.0 && most / least > 8.0;
    let to = |value: f64| if is_wide { value.log10() } else { value };
    let back = |value: f64| if is_wide { 10f64.powf(value) } else { value };
    let (low, high) = (to(least), to(most));
    let room = (high - low).max(high.abs() * 1e-3).max(f64::MIN_POSITIVE) / 20.0;
    let (above, draw) = super::legend(lines.iter().map(|(name, _)| *name));
    Some(super::svg(300 + above, |area| {
        draw(area)?;
        let (_, area) = area.split_vertically(above);
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(30)
            .y_label_area_size(50)
            .build_cartesian_2d(low - room..high + room, 0.0..1.02)?;
        chart
            .configure_mesh()
            .max_light_lines(0)
            .label_style(FONT)
            .x_labels(8)
            .x_label_formatter(&|value| unit.figure(back(*value)))
            .y_label_formatter(&|part| format!("{:.0} %", part * 100.0))
            .draw()?;
        for (place, (_, points)) in lines.iter().enumerate() {
            let colour = colour(place);
            let path = points.iter().map(|(value, part)| (to(*value), *part));
            chart.draw_series(LineSeries::new(path, colour.stroke_width(2)))?;
        }
        Ok(())
    }))
}

/// Returns the corners of a line: for each value, the part of samples below it, and the part that
/// is not above it.
fn steps(samples: &[f64]) -> Vec<(f64, f64)> {
    let mut sorted: Vec<f64> = samples.iter().copied().filter(|s| s.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    let stride = count.div_ceil(POINTS).max(1);
    let mut points: Vec<(f64, f64)> = Vec::new();
    for (place, value) in sorted.iter().enumerate() {
        // The extremes stay, even if points between them are left out.
        if place % stride != 0 && place + 1 != count {
            continue;
        }
        let before = points.last().map_or(0.0, |(_, part)| *part);
        points.extend([(*value, before), (*value, (place + 1) as f64 / count as f64)]);
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_rises_from_none_to_all_at_the_values_themselves() {
        let points = steps(&[3.0, 1.0, f64::INFINITY, 2.0, 2.0]);
        assert_eq!((points[0], points[1]), ((1.0, 0.0), (1.0, 0.25)));
        assert_eq!(points.last(), Some(&(3.0, 1.0)));
        assert!(points.windows(2).all(|two| two[0].0 <= two[1].0 && two[0].1 <= two[1].1));
    }

    #[test]
    fn few_points_of_many_samples_are_drawn_with_both_extremes() {
        let samples: Vec<f64> = (0..10_000).map(f64::from).collect();
        let points = steps(&samples);
        assert!(points.len() <= 2 * POINTS + 2, "{}", points.len());
        assert_eq!((points[0].0, points.last()), (0.0, Some(&(9999.0, 1.0))));
    }

    #[test]
    fn a_distribution_of_nothing_is_not_drawn() {
        let strip = |samples| Strip { label: "a".to_owned(), family: "a", samples };
        assert!(svg(&[strip(&[][..])], &Unit::SECONDS).is_none());
        let svg = svg(&[strip(&[1e-6, 2e-6, 1.0]), strip(&[1e-6])], &Unit::SECONDS).unwrap();
        assert!(svg.matches("<polyline").count() >= 2 && svg.contains("100 %"), "{svg}");
    }
}
