//! Prints tables as text: a row for each run of leaves, and maps with a character for each unit of
//! memory.

use super::bins::{Bin, Part, bins, count_parts, parts};
use super::dump::{Dump, Run};
use slat_lab::numbers::{bytes, thousands};
use slat_lab::size::Size;
use slat_lab::table::{NOTHING, Table};
use std::fmt::Write;

/// Characters in a line of a map.
const LINE: usize = 64;

/// Largest number of lines in a map; beyond it, [`unit()`] returns a larger unit.
const LINES: u64 = 32;

/// Returns the memory that a character of the maps stands for, in bytes: the smallest for which a
/// map has at most `LINES` lines.
pub fn unit(dump: &Dump) -> u64 {
    let mut unit = dump.page.max(4096);
    while count_parts(dump, unit * LINE as u64) > LINES {
        unit *= 2;
    }
    unit
}

/// Returns the table with a row for each run of leaves.
pub fn table(dump: &Dump) -> Table {
    let row = |run: &Run| {
        vec![
            format!("{:#x}–{:#x}", run.gpa, run.end()),
            Size(run.size).to_string(),
            thousands(run.count.cast_signed()),
            run.rights.to_string(),
            flag(Some(run.accessed), "A"),
            flag(run.dirty, "D"),
            run.hpa.map_or_else(|| NOTHING.to_owned(), |hpa| format!("{hpa:#x}")),
        ]
    };
    let columns = "guest addresses|leaf|count|rights|A|D|host address";
    let note = "A: used since it was last made old. D: written since it was last made clean.";
    let rows = dump.leaves.iter().map(row);
    let table = Table::new(dump.format.clone(), 2, columns, rows).noting(note);
    Table { common: summary(dump), ..table }
}

fn flag(on: Option<bool>, name: &str) -> String {
    match on {
        None => NOTHING.to_owned(),
        Some(true) => name.to_owned(),
        Some(false) => String::new(),
    }
}

/// Returns the text on how much memory is mapped, and by how many leaves of each size.
pub fn summary(dump: &Dump) -> String {
    let mut sizes: Vec<(u64, u64)> = Vec::new();
    for run in &dump.leaves {
        match sizes.iter_mut().find(|(size, _)| *size == run.size) {
            Some((_, count)) => *count += run.count,
            None => sizes.push((run.size, run.count)),
        }
    }
    sizes.sort_unstable();
    let mapped: u64 = dump.leaves.iter().map(Run::bytes).sum();
    let sizes: Vec<_> = sizes
        .iter()
        .map(|(size, count)| format!("{} of {}", thousands(count.cast_signed()), Size(*size)))
        .collect();
    match sizes.is_empty() {
        true => "nothing is mapped".to_owned(),
        false => format!("{} mapped by {}", amount(mapped), sizes.join(", ")),
    }
}

fn amount(value: u64) -> String {
    if value < 1 << 20 { format!("{} KiB", value >> 10) } else { bytes(value) }
}

/// Returns the letter for the size of a leaf.
fn letter(size: u64) -> char {
    match size {
        ..0x10_0000 => 'k',
        0x10_0000..0x4000_0000 => 'm',
        _ => 'g',
    }
}

const SEVERAL: char = '*';
const UNMAPPED: char = '.';

/// Returns the character for a bin's leaf size and right to write.
fn shape(bin: &Bin) -> char {
    match (bin.mapped, bin.write) {
        (Part::Nothing, _) => UNMAPPED,
        (Part::All, Part::All) if bin.least == bin.most => letter(bin.least).to_ascii_uppercase(),
        (Part::All, Part::Nothing) if bin.least == bin.most => letter(bin.least),
        _ => SEVERAL,
    }
}

/// Returns the character for a bin's accessed and dirty marks.
fn state(bin: &Bin) -> char {
    match (bin.mapped, bin.accessed, bin.dirty.unwrap_or_default()) {
        (Part::Nothing, ..) => UNMAPPED,
        (_, Part::Nothing, Part::Nothing) => '-',
        (_, Part::All, Part::Nothing) => 'a',
        (_, Part::All, Part::All) => 'D',
        (_, Part::Nothing, Part::All) => 'd',
        _ => SEVERAL,
    }
}

/// Returns both maps: leaf sizes, and accessed and dirty marks.
pub fn maps(dump: &Dump, unit: u64) -> String {
    let mut text = String::new();
    let part = unit * LINE as u64;
    let starts = parts(dump, part);
    let width = starts.last().map_or(1, |last| format!("{last:#x}").len());
    let unit_name = Size(unit);
    for (title, legend, show) in [
        (
            "Leaf sizes",
            "K M G  leaves below 1m, below 1g, and larger ones, that may be written; k m g: that \
             may not; *: several kinds; .: nothing",
            shape as fn(&Bin) -> char,
        ),
        (
            "Used and written",
            "D  used and written; d: written, then made old; a: used; -: neither; *: some of it",
            state,
        ),
    ] {
        let _ = writeln!(text, "\n{title}: a character is {unit_name}, a line {}", Size(part));
        let lines: Vec<(u64, String)> = starts
            .iter()
            .map(|start| (*start, bins(dump, *start, unit, LINE).iter().map(show).collect()))
            .collect();
        let mut next = None;
        for alike in lines.chunk_by(|one, two| one.1 == two.1 && one.0 + part == two.0) {
            let (start, line) = &alike[0];
            if next.is_some_and(|next| next != *start) {
                let _ = writeln!(text, "  {:>width$}", "…");
            }
            let _ = writeln!(text, "  {:>width$}  {line}", format!("{start:#x}"));
            if let more @ 2.. = alike.len() {
                let _ = writeln!(text, "  {:>width$}  and {} more like it", "", more - 1);
            }
            next = Some(start + part * alike.len() as u64);
        }
        let _ = writeln!(text, "  {legend}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::dump::tests::run;
    use super::*;
    use slat_lab::report::text::grid;

    const M: u64 = 1 << 20;

    #[test]
    fn tables_read_like_this() {
        let mut dump = Dump::new("EPT, 4k pages", 4096);
        dump.push(run(0, 2 * M, 2, "r-x", ""));
        dump.push(run(4 * M, 4096, 256, "r-x", "A"));
        dump.push(run(5 * M, 4096, 1, "rwx", "AD"));
        dump.push(run(5 * M + 4096, 4096, 255, "r-x", ""));
        dump.push(run(6 * M, 2 * M, 5, "rwx", "AD"));
        dump.push(run(1 << 30, 1 << 30, 1, "rw", "D"));
        let mut text = String::new();
        grid(&mut text, &table(&dump), 120);
        text += &maps(&dump, unit(&dump));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn what_is_not_known_is_not_made_up() {
        let mut dump = Dump::new("KVM", 4096);
        dump.push(Run { hpa: None, dirty: None, ..run(0, 4096, 64, "rwx", "A") });
        let row = &table(&dump).rows[0];
        assert_eq!(row[4..], ["A", NOTHING, NOTHING]);
        assert!(maps(&dump, 4096).contains(&"a".repeat(64)));
    }

    #[test]
    fn a_map_of_a_tib_is_still_a_page() {
        let mut dump = Dump::new("EPT", 4096);
        dump.push(run(0, 1 << 30, 1024, "rwx", "AD"));
        let unit = unit(&dump);
        assert_eq!(unit, 512 * M);
        assert_eq!(maps(&dump, unit).matches("and 31 more").count(), 2);
        assert!(maps(&Dump::new("EPT", 4096), 4096).contains("Leaf sizes"));
        assert_eq!(summary(&Dump::new("EPT", 4096)), "nothing is mapped");
    }
}
