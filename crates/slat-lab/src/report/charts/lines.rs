//! Times by round, with a line for each way.

use super::{DOT, FONT, colour};
use crate::numbers::seconds;
use crate::renderer::Chart;
use plotters::prelude::*;

/// Draws the lines, each with its name. Returns `None` if there are no rounds.
pub fn chart(title: &str, lines: &[(String, Vec<f64>)]) -> Option<Chart> {
    let rounds =
        lines.iter().map(|(_, samples)| samples.len()).max().filter(|rounds| *rounds > 0)?;
    let slowest = lines.iter().flat_map(|(_, samples)| samples).copied().fold(0.0, f64::max);
    // A single way needs no name.
    let named = if lines.len() > 1 { lines } else { &[] };
    let (above, draw) = super::legend(named.iter().map(|(name, _)| &**name));
    let svg = super::svg(340 + above, |area| {
        draw(area)?;
        let (_, area) = area.split_vertically(above);
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(70)
            .build_cartesian_2d(0.5..rounds as f64 + 0.5, 0.0..slowest * 1.1)?;
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
        for (index, (_, samples)) in lines.iter().enumerate() {
            let colour = colour(index);
            let points = || samples.iter().enumerate().map(|(n, time)| (n as f64 + 1.0, *time));
            chart.draw_series(LineSeries::new(points(), colour.stroke_width(2)))?;
            chart.draw_series(points().map(|point| Circle::new(point, DOT, colour.filled())))?;
        }
        Ok(())
    });
    Some(Chart { title: title.to_owned(), svg })
}
