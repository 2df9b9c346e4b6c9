//! Values over time, with a line for each series.

use super::{FONT, colour};
use crate::renderer::Chart;
use plotters::prelude::*;

/// A line: its name, and pairs of seconds and values.
pub type Line = (String, Vec<(f64, f64)>);

/// The colour of marks, one that the page's style knows.
const MARK: RGBColor = RGBColor(120, 120, 120);

/// Draws the lines, and a vertical one at each of the `marks`; `values` is the axis's name. Returns
/// `None` for fewer than two points in time.
pub fn chart(title: &str, values: &str, lines: &[Line], marks: &[f64]) -> Option<Chart> {
    let all = || lines.iter().flat_map(|(_, points)| points);
    let finite = |value: &f64| value.is_finite();
    let end = all().map(|(at, _)| *at).filter(finite).reduce(f64::max)?;
    let begin = all().map(|(at, _)| *at).filter(finite).reduce(f64::min)?;
    if begin >= end {
        return None;
    }
    let top = all().map(|(_, value)| *value).filter(finite).fold(0.0, f64::max);
    let top = if top > 0.0 { top * 1.1 } else { 1.0 };
    let (above, draw) = super::legend(lines.iter().map(|(name, _)| &**name));
    let svg = super::svg(300 + above, |area| {
        draw(area)?;
        let (_, area) = area.split_vertically(above);
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(80)
            .build_cartesian_2d(begin..end, 0.0..top)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .label_style(FONT)
            .x_desc("seconds")
            .y_desc(values)
            .draw()?;
        for at in marks.iter().filter(|at| (begin..=end).contains(*at)) {
            chart.draw_series(LineSeries::new([(*at, 0.0), (*at, top)], &MARK))?;
        }
        for (place, (_, points)) in lines.iter().enumerate() {
            let colour = colour(place);
            let points = points.iter().copied().filter(|(_, value)| value.is_finite());
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        }
        Ok(())
    });
    Some(Chart { title: title.to_owned(), svg })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_drawn_by_name_and_one_moment_is_none() {
        let line = |name: &str, points: &[(f64, f64)]| (name.to_owned(), points.to_vec());
        assert!(chart("t", "v", &[], &[]).is_none());
        assert!(chart("t", "v", &[line("a", &[(1.0, 2.0)])], &[]).is_none());
        let drawn = chart(
            "t",
            "faults a second",
            &[
                line("alpha", &[(1.0, 2.0), (2.0, f64::NAN), (3.0, 0.0)]),
                line("beta", &[(1.0, 0.0)]),
            ],
            &[2.0, 9.0],
        );
        let svg = drawn.unwrap().svg;
        for text in ["alpha", "beta", "faults a second"] {
            assert!(svg.contains(text), "{text}");
        }
        // A mark beyond the end is none.
        assert_eq!(svg.matches("stroke=\"#787878\"").count(), 1, "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("://"));
        // A line of zeros is drawn as well.
        assert!(chart("t", "v", &[line("a", &[(0.0, 0.0), (1.0, 0.0)])], &[]).is_some());
    }
}
