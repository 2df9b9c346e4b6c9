//! Draws tables as a picture in SVG, with a strip for each part of the guest's memory.
//!
//! The file refers to no other files. It has a light and a dark version, and the reader's setting
//! selects one.

use super::bins::{Bin, Part, bins, count_parts, parts};
use super::dump::Dump;
use super::text::summary;
use maud::{Markup, PreEscaped, html};
use slat_lab::failure::bad_input;
use slat_lab::size::Size;

/// Columns of a strip. In a strip of 1 GiB, a column is 2 MiB.
const COLUMNS: usize = 512;
/// Width of a column, in pixels.
const COLUMN: u64 = 2;
/// Left edge and top of the strips, height of a strip, and distance from one strip to the next.
const LEFT: u64 = 128;
const TOP: u64 = 52;
const STRIP: u64 = 26;
const STEP: u64 = 38;
/// Additional distance between two strips if memory between them is left out.
const GAP: u64 = 16;
const WIDTH: u64 = LEFT + COLUMNS as u64 * COLUMN + 24;
/// Largest number of characters in a line of text.
const LINE: usize = 150;
/// Width in pixels from which on leaves are separated by lines.
const APART: u64 = 8;
/// Largest number of strips in a picture.
const MOST: u64 = 256;

const STYLE: &str = "\
svg { --ink: #1b1f24; --paper: #ffffff; --void: #eceff2; --hatch: #10151c; \
--small: #e69f00; --middle: #56b4e9; --large: #2fb38a; --mixed: #b9a5d6; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ed; --paper: #14171b; --void: #252a31; \
--hatch: #f4f6f8; --small: #b77a00; --middle: #2f7fb3; --large: #1f8062; --mixed: #6d5a91; } }
.paper { fill: var(--paper); } .void { fill: var(--void); }
text { fill: var(--ink); font: 13px sans-serif; } .head { font-weight: 600; font-size: 15px; }
.address { font-family: monospace; text-anchor: end; } .gap { text-anchor: middle; }
.small { fill: var(--small); } .middle { fill: var(--middle); } .large { fill: var(--large); }
.mixed { fill: var(--mixed); } .old { fill-opacity: .45; } .half { fill-opacity: .7; }
.line { stroke: var(--hatch); fill: none; } .edge { stroke: var(--paper); stroke-width: 1; }";

/// Returns the picture, with a strip for each part of `part` bytes that a leaf overlaps.
///
/// # Errors
/// Returns [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) if there are too many
/// strips.
pub fn render(dump: &Dump, part: u64) -> anyhow::Result<String> {
    let count = count_parts(dump, part);
    if count > MOST {
        return Err(bad_input(format!(
            "{count} strips of {} are no picture; take a larger --strip, or a part by --range",
            Size(part)
        )));
    }
    let unit = (part / COLUMNS as u64).max(1);
    let starts = parts(dump, part);
    let mut strips = Vec::new();
    let mut lines = vec![format!("A strip is {}, a column {}.", Size(part), Size(unit))];
    let operations = dump.operations.join(", ");
    lines.extend(textwrap::wrap(&operations, LINE).into_iter().map(Into::into));
    let (mut y, mut before) = (TOP + 18 * (lines.len() as u64 - 1), None);
    for start in starts {
        let gap = before.is_some_and(|end| end != start);
        y += if gap { GAP } else { 0 };
        strips.push((start, y, gap));
        before = Some(start + part);
        y += STEP;
    }
    let drawn: Vec<_> = strips
        .iter()
        .map(|&(start, y, gap)| (start, y, gap, bins(dump, start, unit, COLUMNS)))
        .collect();
    let all: Vec<Bin> = drawn.iter().flat_map(|(_, _, _, bins)| bins.iter().copied()).collect();
    let (key, bottom) = legend(&all, y + 14);
    let height = bottom + 14;
    let title = format!("{}: {}", dump.format, summary(dump));
    let picture = html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox=(format!("0 0 {WIDTH} {height}"))
            width=(WIDTH) height=(height) role="img" {
            title { (title) }
            style { (PreEscaped(STYLE)) }
            (patterns())
            rect .paper width=(WIDTH) height=(height) {}
            text .head x="12" y="24" { (title) }
            @for (line, text) in lines.iter().enumerate() {
                text x="12" y=(42 + 18 * line) { (text) }
            }
            @for (start, y, gap, bins) in &drawn {
                @if *gap { text .gap x=(LEFT / 2) y=(y - 8) { "⋮" } }
                text .address x=(LEFT - 10) y=(y + 18) { (format!("{start:#x}")) }
                (strip(*start, *y, unit, bins))
            }
            (key)
        }
    };
    Ok(picture.into_string() + "\n")
}

/// Returns the hatchings over a colour, for read-only and for dirty memory; they are sparse where
/// only a part is so.
fn patterns() -> Markup {
    let pattern = |name: &str, step: u64, path: String, width: &str| {
        html! {
            pattern id=(name) width=(step) height=(step) patternUnits="userSpaceOnUse" {
                path .line d=(path) stroke-width=(width) {}
            }
        }
    };
    // Each line continues in the corners of the tile, because it would be cut off there otherwise.
    let rising =
        |n: u64| format!("M0 {n} L{n} 0 M-1 1 L1 -1 M{} {} L{} {}", n - 1, n + 1, n + 1, n - 1);
    let falling =
        |n: u64| format!("M0 0 L{n} {n} M-1 {} L1 {} M{} -1 L{} 1", n - 1, n + 1, n - 1, n + 1);
    html! {
        defs {
            (pattern("read-only", 6, rising(6), "1"))
            (pattern("read-only-some", 14, rising(14), "1"))
            (pattern("dirty", 6, falling(6), "1.6"))
            (pattern("dirty-some", 14, falling(14), "1.6"))
        }
    }
}

/// Draws a strip, where adjacent columns of the same look are one rectangle.
fn strip(start: u64, y: u64, unit: u64, bins: &[Bin]) -> Markup {
    let mut runs: Vec<(usize, usize, &Bin)> = Vec::new();
    for (place, bin) in bins.iter().enumerate() {
        match runs.last_mut() {
            Some((_, count, last)) if look(last) == look(bin) => *count += 1,
            _ => runs.push((place, 1, bin)),
        }
    }
    html! {
        rect .void x=(LEFT) y=(y) width=(COLUMNS as u64 * COLUMN) height=(STRIP) {}
        @for (place, count, bin) in runs {
            @if let Some(class) = look(bin).class() {
                @let x = LEFT + place as u64 * COLUMN;
                @let width = count as u64 * COLUMN;
                @let from = start + place as u64 * unit;
                g {
                    title { (words(bin, from, from + count as u64 * unit)) }
                    rect class=(class) x=(x) y=(y) width=(width) height=(STRIP) {}
                    @for pattern in look(bin).patterns() {
                        rect fill=(format!("url(#{pattern})")) x=(x) y=(y) width=(width) height=(STRIP) {}
                    }
                }
                @if bin.least == bin.most {
                    (edges(bin.least, from, from + count as u64 * unit, unit, x, y))
                }
            }
        }
    }
}

/// Draws lines between leaves, if the leaves are wide enough.
fn edges(size: u64, from: u64, to: u64, unit: u64, x: u64, y: u64) -> Markup {
    let wide = size / unit * COLUMN >= APART;
    let first = from.next_multiple_of(size);
    html! {
        @if wide {
            @for edge in (first..to).step_by(size as usize) {
                @let at = x + (edge - from) / unit * COLUMN;
                line .edge x1=(at) x2=(at) y1=(y) y2=(y + STRIP) {}
            }
        }
    }
}

/// The look of a column.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Look {
    mapped: Part,
    least: u64,
    most: u64,
    write: Part,
    accessed: Part,
    dirty: Part,
}

fn look(bin: &Bin) -> Look {
    let dirty = bin.dirty.unwrap_or_default();
    let Bin { mapped, least, most, write, accessed, .. } = *bin;
    Look { mapped, least, most, write, accessed, dirty }
}

impl Look {
    /// Returns the class of the colour, or `None` if nothing is mapped.
    fn class(self) -> Option<String> {
        let size = match (self.least == self.most, self.least) {
            (false, _) => "mixed",
            (_, ..0x10_0000) => "small",
            (_, 0x10_0000..0x4000_0000) => "middle",
            _ => "large",
        };
        let used = match self.accessed {
            Part::All => "",
            Part::Some => " half",
            Part::Nothing => " old",
        };
        (self.mapped != Part::Nothing).then(|| format!("{size}{used}"))
    }

    fn patterns(self) -> impl Iterator<Item = &'static str> {
        let read_only = match self.write {
            Part::Nothing => Some("read-only"),
            Part::Some => Some("read-only-some"),
            Part::All => None,
        };
        let dirty = match self.dirty {
            Part::Nothing => None,
            Part::Some => Some("dirty-some"),
            Part::All => Some("dirty"),
        };
        read_only.into_iter().chain(dirty)
    }
}

/// Returns the tooltip of a column.
fn words(bin: &Bin, from: u64, to: u64) -> String {
    let part = |part: Part, all: &str, some: &str| match part {
        Part::All => format!(", {all}"),
        Part::Some => format!(", {some}"),
        Part::Nothing => String::new(),
    };
    let size = match bin.least == bin.most {
        true => Size(bin.least).to_string(),
        false => format!("{} to {}", Size(bin.least), Size(bin.most)),
    };
    let writable = match bin.write {
        Part::All => ", writable",
        Part::Some => ", writable in part",
        Part::Nothing => ", read-only",
    };
    let unmapped = if bin.mapped == Part::Some { ", mapped in part" } else { "" };
    let execute = part(bin.execute, "executable", "executable in part");
    let accessed = part(bin.accessed, "used", "used in part");
    let dirty = part(bin.dirty.unwrap_or_default(), "written", "written in part");
    format!("{from:#x}–{to:#x}: {size}{writable}{execute}{accessed}{dirty}{unmapped}")
}

/// Draws the legend, with only those looks that the picture has. Also returns its lower edge.
fn legend(all: &[Bin], mut y: u64) -> (Markup, u64) {
    let mapped = || all.iter().filter(|bin| bin.mapped != Part::Nothing);
    let mut sizes: Vec<u64> =
        mapped().filter(|bin| bin.least == bin.most).map(|bin| bin.least).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let plain = |size| Look {
        mapped: Part::All,
        least: size,
        most: size,
        write: Part::All,
        accessed: Part::All,
        dirty: Part::Nothing,
    };
    let mut items: Vec<(Look, String)> =
        sizes.iter().map(|size| (plain(*size), Size(*size).to_string())).collect();
    if mapped().any(|bin| bin.least != bin.most) {
        items.push((Look { least: 0, ..plain(1) }, "several sizes".to_owned()));
    }
    let base = plain(sizes.first().copied().unwrap_or(4096));
    let mut add = |there: bool, look: Look, name: &str| {
        if there {
            items.push((look, name.to_owned()));
        }
    };
    let any = |of: fn(&Look) -> bool| mapped().any(|bin| of(&look(bin)));
    let (some, none) = (Part::Some, Part::Nothing);
    add(any(|look| look.write == Part::Nothing), Look { write: none, ..base }, "read-only");
    add(any(|look| look.write == Part::Some), Look { write: some, ..base }, "read-only in part");
    add(any(|look| look.dirty == Part::All), Look { dirty: Part::All, ..base }, "written");
    add(any(|look| look.dirty == Part::Some), Look { dirty: some, ..base }, "written in part");
    add(any(|look| look.accessed == Part::Some), Look { accessed: some, ..base }, "used in part");
    add(any(|look| look.accessed == Part::Nothing), Look { accessed: none, ..base }, "not used");
    let mut x = LEFT;
    let placed: Vec<_> = items
        .into_iter()
        .map(|(look, name)| {
            let width = 44 + name.chars().count() as u64 * 8;
            if x + width > WIDTH {
                (x, y) = (LEFT, y + 26);
            }
            x += width;
            (x - width, y, look, name)
        })
        .collect();
    let key = html! {
        @for (x, y, look, name) in placed {
            rect class=(look.class().unwrap_or_default()) x=(x) y=(y) width="26" height="18" {}
            @for pattern in look.patterns() {
                rect fill=(format!("url(#{pattern})")) x=(x) y=(y) width="26" height="18" {}
            }
            text x=(x + 32) y=(y + 14) { (name) }
        }
    };
    (key, y + 18)
}

#[cfg(test)]
mod tests {
    use super::super::dump::{Run, tests::run};
    use super::*;

    const M: u64 = 1 << 20;
    const G: u64 = 1 << 30;

    fn dump(runs: &[Run]) -> Dump {
        Dump { leaves: runs.to_vec(), ..Dump::new("EPT <4k>", 4096) }
    }

    fn picture(runs: &[Run]) -> String {
        render(&dump(runs), G).unwrap()
    }

    #[test]
    fn a_strip_is_drawn_for_each_part_that_has_a_leaf() {
        let picture = picture(&[run(0, 4096, 1, "rw", ""), run(5 * G, G, 2, "rw", "A")]);
        assert_eq!(picture.matches("class=\"address\"").count(), 3);
        assert_eq!(picture.matches('⋮').count(), 1);
        for address in ["0x0<", "0x140000000<", "0x180000000<"] {
            assert!(picture.contains(address), "{address}");
        }
    }

    #[test]
    fn colours_and_hatches_say_what_is_there_and_the_legend_nothing_else() {
        let clean = picture(&[run(0, 2 * M, 512, "rw", "A")]);
        assert!(clean.contains("<rect class=\"middle\" x=\"128\""));
        assert!(!clean.contains("url(#") && !clean.contains("read-only<"), "{clean}");
        let dirty = picture(&[run(0, 2 * M, 1, "r", "AD"), run(2 * M, 4096, 512, "rw", "")]);
        assert!(dirty.contains("url(#read-only)") && dirty.contains("url(#dirty)"));
        assert!(dirty.contains("class=\"small old\"") && dirty.contains(">not used<"));
        assert!(dirty.contains("0x0–0x200000: 2m, read-only, used, written"));
        let some = picture(&[run(0, 4096, 256, "rw", "AD"), run(M, 4096, 256, "r", "")]);
        assert!(some.contains("url(#read-only-some)") && some.contains("url(#dirty-some)"));
        assert!(some.contains("class=\"small half\""));
    }

    #[test]
    fn the_picture_refers_to_nothing_outside_itself_and_text_is_no_markup() {
        let picture = picture(&[run(0, G, 1, "rw", "A")]);
        assert!(picture.contains("EPT &lt;4k&gt;"));
        let rest = picture.replace("http://www.w3.org/2000/svg", "");
        for reference in ["://", "href", "@import", "<script", "url(h"] {
            assert!(!rest.contains(reference), "{reference}");
        }
        assert!(picture.contains("prefers-color-scheme: dark"));
    }

    #[test]
    fn leaves_are_separated_by_edges_where_they_are_wide() {
        let lines = |part| {
            let dump = dump(&[run(0, 2 * M, 32, "rw", "A")]);
            render(&dump, part).unwrap().matches("class=\"edge\"").count()
        };
        assert_eq!((lines(G), lines(64 * M)), (0, 32));
    }

    #[test]
    fn too_many_strips_are_refused() {
        let dump = dump(&[run(0, G, 1024, "rw", "A")]);
        assert!(render(&dump, G).unwrap_err().to_string().contains("--strip"));
        assert!(render(&dump, 64 * G).is_ok());
    }
}
