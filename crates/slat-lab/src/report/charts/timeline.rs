//! A migration over time: the pace of the guest above, what is left to copy below, and the downtime
//! of the guest.

use super::{Area, DOT, Drawn, FONT, colour};
use crate::numbers::seconds;
use crate::renderer::Chart;
use plotters::prelude::*;

/// Draws a migration. `pace` has pairs of seconds and per cent of the pace without logging, `left`
/// pairs of seconds and MiB left to copy; `stop` is the begin and end of the downtime. Returns
/// `None` without a time.
pub fn chart(
    title: &str,
    pace: &[(f64, f64)],
    left: &[(f64, f64)],
    stop: (f64, f64),
) -> Option<Chart> {
    let end = Some(stop.1).filter(|end| end.is_finite() && *end > 0.0)?;
    // After the stop there is no pace.
    let pace: Vec<_> = pace.iter().copied().filter(|(at, _)| *at <= stop.0 + 0.05).collect();
    let svg = super::svg(380, |area| {
        let (above, below) = area.split_vertically(190);
        let most = pace.iter().map(|(_, pace)| *pace).fold(100.0, f64::max) * 1.1;
        let names = ["pace of the guest", "left to copy"];
        panel(&above, names[0], (end, most), stop, &pace, 0, &|y| format!("{y:.0} %"))?;
        let most = left.iter().map(|(_, left)| *left).fold(1.0, f64::max) * 1.1;
        panel(&below, names[1], (end, most), stop, left, 1, &|y| format!("{y:.0} MiB"))
    });
    Some(Chart { title: title.to_owned(), svg })
}

fn panel(
    area: &Area,
    name: &str,
    (end, most): (f64, f64),
    (stop, go): (f64, f64),
    points: &[(f64, f64)],
    place: usize,
    label: &dyn Fn(f64) -> String,
) -> Drawn {
    let mut chart = ChartBuilder::on(area)
        .margin(8)
        .x_label_area_size(30)
        .y_label_area_size(80)
        .build_cartesian_2d(0.0..end * 1.02, 0.0..most)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .max_light_lines(0)
        .label_style(FONT)
        .x_label_formatter(&|x| seconds(*x))
        .y_labels(5)
        .y_label_formatter(&|y| label(*y))
        .draw()?;
    let still = colour(1).mix(0.25).filled();
    chart.draw_series([Rectangle::new([(stop, 0.0), (go, most)], still)])?;
    let style = colour(place * 2);
    chart.draw_series(LineSeries::new(points.iter().copied(), style.stroke_width(2)))?;
    chart.draw_series(points.iter().map(|point| Circle::new(*point, DOT, style.filled())))?;
    let corner =
        EmptyElement::at((end * 0.01, most * 0.97)) + Text::new(name.to_owned(), (0, 0), FONT);
    chart.draw_series([corner])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chart_has_a_dot_for_each_sample_and_round_and_the_stop() {
        let pace = [(0.1, 100.0), (0.2, 60.0), (0.9, 1.0)];
        let left = [(0.0, 256.0), (0.25, 30.0), (0.4, 0.0)];
        let chart = chart("x", &pace, &left, (0.3, 0.4)).unwrap();
        assert_eq!(chart.svg.matches("<circle").count(), 2 + 3, "a pace after the stop is none");
        assert!(chart.svg.matches("<rect").count() >= 3);
        assert!(super::chart("x", &[], &[], (0.0, 0.0)).is_none());
    }
}
