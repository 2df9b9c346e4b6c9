//! The table of leaves, with a row for each run of them.

use super::leaf::Run;
use slat_lab::numbers::{bytes, thousands};
use slat_lab::size::Size;
use slat_lab::table::Table;

/// Returns the table with a row for each run of leaves.
pub fn table(title: String, runs: &[Run]) -> Table {
    let flag = |on: bool, name: &str| if on { name.to_owned() } else { String::new() };
    let row = |run: &Run| {
        vec![
            format!("{:#x}–{:#x}", run.gpa, run.end()),
            Size(run.size).to_string(),
            thousands(run.count.cast_signed()),
            run.rights.to_string(),
            flag(run.accessed, "A"),
            flag(run.dirty, "D"),
            format!("{:#x}", run.hpa),
        ]
    };
    let columns = "guest addresses|leaf|count|rights|A|D|host address";
    let note = "A: used since it was last made old. D: written since it was last made clean.";
    let table = Table::new(title, 2, columns, runs.iter().map(row)).noting(note);
    Table { common: summary(runs), ..table }
}

/// Returns the text on how much memory is mapped, and by how many leaves of each size.
fn summary(runs: &[Run]) -> String {
    let mut sizes: Vec<(u64, u64)> = Vec::new();
    for run in runs {
        match sizes.iter_mut().find(|(size, _)| *size == run.size) {
            Some((_, count)) => *count += run.count,
            None => sizes.push((run.size, run.count)),
        }
    }
    sizes.sort_unstable();
    let mapped: u64 = runs.iter().map(Run::bytes).sum();
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

#[cfg(test)]
mod tests {
    use super::super::leaf::tests::run;
    use super::*;
    use slat_lab::report::text::grid;

    const M: u64 = 1 << 20;

    #[test]
    fn tables_read_like_this() {
        let runs = [
            run(0, 2 * M, 2, "r-x", ""),
            run(4 * M, 4096, 256, "r-x", "A"),
            run(5 * M, 4096, 1, "rwx", "AD"),
            run(5 * M + 4096, 4096, 255, "r-x", ""),
            run(6 * M, 2 * M, 5, "rwx", "AD"),
            run(1 << 30, 1 << 30, 1, "rw", "D"),
        ];
        let mut text = String::new();
        grid(&mut text, &table("EPT, 4k pages".to_owned(), &runs), 120);
        insta::assert_snapshot!(text);
        assert_eq!(summary(&[]), "nothing is mapped");
    }
}
