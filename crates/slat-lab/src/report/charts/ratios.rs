//! Times in relation to a base: a row for each operation, with a dot for each way.

use super::{DOT, FONT, colour};
use crate::renderer::Chart;
use plotters::prelude::*;

/// The operation, and the ratio of each way, by its place among the names.
pub type Row = (String, Vec<(usize, f64)>);

/// Draws the ratios on a logarithmic scale. Returns `None` if there are none.
pub fn chart(title: &str, axis: &str, names: &[&str], rows: &[Row]) -> Option<Chart> {
    let all = || rows.iter().flat_map(|(_, dots)| dots).map(|(_, ratio)| *ratio);
    let (least, most) = (all().min_by(f64::total_cmp)?, all().max_by(f64::total_cmp)?);
    let count = rows.len();
    let svg = super::svg(90 + 22 * (count + names.len() / 3) as u32, |area| {
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(330)
            .build_cartesian_2d(
                (least.min(1.0) / 1.5..most.max(1.0) * 2.0).log_scale(),
                (0..count).into_segmented(),
            )?;
        let row = |position: usize| &rows[count - 1 - position];
        chart
            .configure_mesh()
            .max_light_lines(4)
            .label_style(FONT)
            .y_labels(count)
            .x_desc(axis)
            .x_label_formatter(&|ratio| format!("{ratio}"))
            .y_label_formatter(&|y| match y {
                SegmentValue::CenterOf(y) if *y < count => row(*y).0.clone(),
                _ => String::new(),
            })
            .draw()?;
        for (place, name) in names.iter().enumerate() {
            let style = colour(place).filled();
            let dots = (0..count).flat_map(|position| {
                let of_them = row(position).1.iter().filter(|(who, _)| *who == place);
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
    Some(Chart { title: title.to_owned(), svg })
}
