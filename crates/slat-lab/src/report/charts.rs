//! Charts as SVG text that refers to nothing outside it.

pub mod distributions;
mod ecdf;
pub mod lines;
pub mod ratios;
pub mod series;
pub mod strips;
pub mod sweep;
pub mod timeline;

use plotters::coord::{CoordTranslate, Shift};
use plotters::prelude::*;

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Colours that the colour-blind can distinguish, too (Okabe and Ito).
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];
/// More colours, for charts with more lines.
///
/// The page's style replaces each of these colours, black and white on dark screens.
const MORE: [RGBColor; 4] =
    [RGBColor(86, 180, 233), RGBColor(230, 159, 0), RGBColor(120, 120, 120), RGBColor(0, 0, 0)];
const WIDTH: u32 = 860;
const DOT: i32 = 4;
const FONT: (&str, u32) = ("sans-serif", 13);

/// Returns the colour of item `place`.
fn colour(place: usize) -> RGBColor {
    let all = COLOURS.len() + MORE.len();
    *COLOURS.iter().chain(&MORE).nth(place % all).unwrap_or(&BLACK)
}

/// Writes the names of a chart's lines into one of its corners.
fn names<'a, DB: DrawingBackend + 'a, CT: CoordTranslate>(
    chart: &mut ChartContext<'a, DB, CT>,
    corner: SeriesLabelPosition,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>> {
    let mut names = chart.configure_series_labels();
    names.label_font(FONT).position(corner).background_style(WHITE.mix(0.8)).draw()
}

/// Draws on a new sheet. If drawing fails, the sheet stays unfinished: a report without one chart
/// is better than no report.
fn svg(height: u32, draw: impl FnOnce(&Area) -> Drawn) -> String {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
        let drawn = area.fill(&WHITE).and_then(|()| draw(&area)).and_then(|()| area.present());
        debug_assert!(drawn.is_ok(), "{drawn:?}");
    }
    // Inside HTML the element needs no namespace. Without any address in it, a report visibly loads
    // nothing.
    text.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "")
}
