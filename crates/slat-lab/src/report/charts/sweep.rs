//! Results by setting: a line for each way, with a hollow dot where the target was not reached.

use super::{DOT, FONT, colour};
use crate::renderer::Chart;
use plotters::prelude::*;

/// A setting and its result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The setting.
    pub x: f64,
    /// The result.
    pub y: f64,
    /// Whether it reached its target.
    pub reached: bool,
}

/// Draws the ways, each with its name; `axes` are the axes' names, and `shown` writes a result.
/// Returns `None` if there are no points.
pub fn chart(
    title: &str,
    axes: [&str; 2],
    shown: impl Fn(f64) -> String,
    ways: &[(String, Vec<Point>)],
) -> Option<Chart> {
    let all = || ways.iter().flat_map(|(_, points)| points);
    let right = all().map(|point| point.x).reduce(f64::max).filter(|x| *x > 0.0)?;
    let top = all().map(|point| point.y).reduce(f64::max).filter(|y| *y > 0.0)?;
    let (above, draw) = super::legend(ways.iter().map(|(name, _)| &**name));
    let svg = super::svg(360 + above, |area| {
        draw(area)?;
        let (_, area) = area.split_vertically(above);
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(80)
            .build_cartesian_2d(0.0..right * 1.05, 0.0..top * 1.1)?;
        chart
            .configure_mesh()
            .max_light_lines(0)
            .label_style(FONT)
            .x_desc(axes[0])
            .y_desc(axes[1])
            .y_label_formatter(&|y| shown(*y))
            .draw()?;
        for (place, (_, points)) in ways.iter().enumerate() {
            let colour = colour(place);
            let mut sorted = points.clone();
            sorted.sort_by(|a, b| a.x.total_cmp(&b.x));
            let line = sorted.iter().map(|point| (point.x, point.y));
            chart.draw_series(LineSeries::new(line, colour.stroke_width(2)))?;
            chart.draw_series(sorted.iter().map(|point| {
                let inside = if point.reached { colour.filled() } else { WHITE.filled() };
                EmptyElement::at((point.x, point.y))
                    + Circle::new((0, 0), DOT + 2, colour.filled())
                    + Circle::new((0, 0), DOT, inside)
            }))?;
        }
        Ok(())
    });
    Some(Chart { title: title.to_owned(), svg })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_was_not_reached_is_hollow() {
        let point = |x: f64, reached| Point { x, y: x / 100.0, reached };
        let ways = [("ring".to_owned(), vec![point(50.0, true), point(900.0, false)])];
        let svg = chart("x", ["a", "b"], crate::numbers::seconds, &ways).unwrap().svg;
        let circles = svg.split("<circle").skip(1).filter_map(|it| it.split("/>").next());
        assert_eq!(circles.filter(|it| it.contains("fill=\"#FFFFFF\"")).count(), 1, "{svg}");
        assert!(chart("x", ["a", "b"], crate::numbers::seconds, &[]).is_none());
    }
}
