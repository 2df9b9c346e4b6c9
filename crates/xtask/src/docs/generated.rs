//! Tests that figures in the documentation are those of a run that is kept in the repository.
//!
//! A comment `<!-- PROGRAM render FOLDER -->`, with `slat` or `slat-bench`, stands above a block
//! that the command prints. `<!-- PROGRAM render FOLDER: TITLE; TITLE -->` selects the parts whose
//! first line begins with a title. `<!-- slat brief FOLDER -->` is the main job's summary of the
//! run, and `<!-- slat explain FOLDER -->` its account. `<!-- kernels FOLDER -->` is for the
//! [tables of kernels](super::kernels), `<!-- selftests FOLDER -->` and `<!-- executes FOLDER -->`
//! are for [those of selftests](super::selftests). `UPDATE_DOCS=1 cargo test -p xtask generated`
//! updates the blocks.

use super::{kernels, selftests};
use crate::root;
use slat_lab::report::{html, text};
use slat_lab::scenario::Program;
use std::path::PathBuf;

/// Width of the blocks, which is that of the programs' output without a terminal.
const WIDTH: u16 = 120;
const FENCES: [&str; 2] = ["```text\n", "```\n"];

/// Returns the page with each such block as its command prints it now, and the number of blocks.
fn rendered(text: &str) -> Result<(String, usize), String> {
    let (page, blocks) = rendered_by(&slat_cli::PROGRAM, text)?;
    let (page, more) = rendered_by(&slat_bench::cli::PROGRAM, &page)?;
    let (page, tables) = below("<!-- kernels ", &page, |folder| kernels::tables(folder, WIDTH))?;
    let (page, tests) = below("<!-- selftests ", &page, |folder| selftests::tables(folder, WIDTH))?;
    let (page, executes) =
        below("<!-- executes ", &page, |folder| selftests::executes(folder, WIDTH))?;
    Ok((page, blocks + more + tables + tests + executes))
}

fn rendered_by(program: &Program, text: &str) -> Result<(String, usize), String> {
    below(&format!("<!-- {} ", program.name), text, |command| {
        let (how, what) = command.split_once(' ').ok_or("a comment without a folder")?;
        let (folder, titles) = what.split_once(": ").unwrap_or((what, ""));
        let report = slat_lab::run::read(program, &root().join(folder))
            .map_err(|error| format!("{folder}: {error:#}"))?;
        let shown = match how {
            "render" => text::render(&report, &(program.readers)(), WIDTH),
            "brief" => slat_cli::brief::render(&report, WIDTH),
            "explain" => {
                let mut shown = String::new();
                for table in slat_cli::explain::tables(&slat_cli::explain::explain(&report.results))
                {
                    text::grid(&mut shown, &table, WIDTH);
                }
                shown.trim_start().to_owned()
            }
            _ => return Err(format!("{how} is neither render, brief nor explain")),
        };
        parts_of(&shown, titles)
    })
}

/// Returns the page with the text that `shown` returns in each block below a comment that begins
/// so.
fn below(
    begin: &str,
    text: &str,
    shown: impl Fn(&str) -> Result<String, String>,
) -> Result<(String, usize), String> {
    let mut parts = text.split(begin);
    let mut page = parts.next().unwrap_or_default().to_owned();
    let mut blocks = 0;
    for part in parts {
        let (command, rest) = part.split_once(" -->\n").ok_or("a comment without its end")?;
        let (between, rest) = rest.split_once(FENCES[0]).ok_or("no block below a comment")?;
        let (_, rest) = rest.split_once(FENCES[1]).ok_or("a block without its end")?;
        if !between.trim().is_empty() {
            return Err(format!("{command}: the block does not stand below its comment"));
        }
        let shown = shown(command)?;
        let [open, close] = FENCES;
        page += &format!("{begin}{command} -->\n{between}{open}{shown}{close}{rest}");
        blocks += 1;
    }
    Ok((page, blocks))
}

/// Returns the parts of a report whose titles begin so, in the report's order, below the lines on
/// trust and host of the run; without titles all of the report.
fn parts_of(shown: &str, titles: &str) -> Result<String, String> {
    if titles.is_empty() {
        return Ok(shown.to_owned());
    }
    let titles: Vec<&str> = titles.split("; ").collect();
    let parts = || shown.trim_end().split("\n\n");
    for title in &titles {
        if !parts().any(|part| part.starts_with(title)) {
            let all: Vec<_> = parts().filter_map(|part| part.lines().next()).collect();
            return Err(format!("no part is called {title}, of {all:?}"));
        }
    }
    let verdict = |line: &&str| line.starts_with("- ") || line.starts_with("  ");
    let head = parts().next().unwrap_or_default().lines().filter(|line| !verdict(line));
    let chosen = parts().filter(|part| titles.iter().any(|title| part.starts_with(title)));
    let chosen = chosen.map(|part| format!("\n{part}\n"));
    Ok(head.map(|line| format!("{line}\n")).chain(chosen).collect())
}

#[test]
fn figures_that_come_from_a_kept_run_are_its_own() {
    let update = std::env::var_os("UPDATE_DOCS").is_some();
    let (mut all, mut stale) = (0, Vec::new());
    let mut hold = |path: PathBuf, now: &dyn Fn(&str) -> (String, usize)| {
        let page = std::fs::read_to_string(&path).unwrap_or_default();
        let (now, blocks) = now(&page);
        all += blocks;
        if page != now && update {
            std::fs::write(&path, &now).unwrap();
        }
        if page != now {
            stale.push(path);
        }
    };
    let pages = root().join("docs").read_dir().unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    for path in pages.chain([root().join("README.md")]) {
        let at = path.clone();
        hold(path, &|page| rendered(page).unwrap_or_else(|why| panic!("{at:?}: {why}")));
    }
    hold(root().join("docs/peers.svg"), &|_| (plot("docs/figures/peers"), 1));
    assert!(all >= 15, "{all} blocks and plots");
    assert!(stale.is_empty(), "UPDATE_DOCS=1 writes {stale:?} anew, or has just done so");
}

/// Returns the first plot of a run's report.html, as a separate file.
fn plot(folder: &str) -> String {
    let program = &slat_bench::cli::PROGRAM;
    let report = slat_lab::run::read(program, &root().join(folder)).unwrap();
    let page = html::render(&report, &(program.readers)());
    let (_, rest) = page.split_once("<svg ").expect("a plot");
    let (plot, _) = rest.split_once("</svg>").expect("its end");
    format!("<svg xmlns=\"http://www.w3.org/2000/svg\" {plot}</svg>\n")
}

#[test]
fn a_block_that_is_missing_or_of_no_run_is_an_error() {
    assert_eq!(rendered("none").unwrap(), ("none".to_owned(), 0));
    for page in [
        "<!-- slat render docs -->\n",
        "<!-- slat render docs -->\ntext\n```text\n```\n",
        "<!-- slat render docs -->\n```text\n```\n",
        "<!-- slat-bench render docs -->\n```text\n```\n",
        "<!-- slat render docs/examples/main: None -->\n```text\n```\n",
    ] {
        assert!(rendered(page).is_err(), "{page}");
    }
}

#[test]
fn parts_are_chosen_by_how_their_titles_begin() {
    let shown = "Quiet\n- Verdict\n  more\nA CPU\n\nOne table\n a  b\n\nOther\n c\n\nLast\n";
    assert_eq!(parts_of(shown, "").unwrap(), shown);
    let chosen = parts_of(shown, "Other; One").unwrap();
    assert_eq!(chosen, "Quiet\nA CPU\n\nOne table\n a  b\n\nOther\n c\n");
    assert!(parts_of(shown, "One; Two").unwrap_err().contains("no part is called Two"));
}
