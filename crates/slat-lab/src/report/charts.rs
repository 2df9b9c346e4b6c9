//! Charts as SVG text that refers to nothing outside it.

pub mod distributions;
mod ecdf;
pub mod lines;
pub mod ratios;
pub mod series;
pub mod strips;
pub mod sweep;
pub mod timeline;

use plotters::coord::Shift;
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

/// Height of a line of names, and about how wide a character of one is.
const NAME: (i32, i32) = (20, 8);

/// Writes the names of a chart's lines above it, from the left: there they hide no line, and a
/// narrow screen shows them. Returns the height that this took, and how to draw it.
fn legend<'n>(names: impl Iterator<Item = &'n str>) -> (u32, impl Fn(&Area) -> Drawn) {
    let (mut x, mut y) = (12, NAME.0);
    let mut places = Vec::new();
    for (place, name) in names.enumerate() {
        let wide = 34 + NAME.1 * name.chars().count() as i32;
        if x > 12 && x + wide > WIDTH as i32 {
            (x, y) = (12, y + NAME.0);
        }
        places.push((x, y, colour(place), name.to_owned()));
        x += wide;
    }
    let height = if places.is_empty() { 0 } else { y + NAME.0 / 2 };
    let draw = move |area: &Area| {
        places.iter().try_for_each(|(x, y, colour, name)| {
            area.draw(&Rectangle::new([(*x, y - 6), (x + 16, y - 3)], colour.filled()))?;
            area.draw(&Text::new(name.clone(), (x + 22, y - 11), FONT))
        })
    };
    (height as u32, draw)
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
