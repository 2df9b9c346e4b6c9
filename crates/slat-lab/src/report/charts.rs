//! Charts as SVG text that needs nothing from anywhere else.

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

/// The colour of the `place`-th of several things.
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
