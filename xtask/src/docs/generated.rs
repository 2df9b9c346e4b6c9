//! Tests that figures in the documentation are those of a run that is kept beside it.
//!
//! A comment `<!-- PROGRAM render FOLDER -->`, of `slat` or `slat-bench`, stands above a block that
//! the command prints; `<!-- PROGRAM render FOLDER: TITLE; TITLE -->` has those of its parts whose
//! first line begins so. `UPDATE_DOCS=1 cargo test -p xtask generated` writes such blocks anew.

use crate::root;
use slat_lab::report::text;
use slat_lab::scenario::Program;

/// How wide the blocks are.
const WIDTH: u16 = 100;
const FENCES: [&str; 2] = ["```text\n", "```\n"];

/// The page with each such block as its command prints it now; how many there are.
fn rendered(text: &str) -> Result<(String, usize), String> {
    let (page, blocks) = rendered_by(&slat_cli::PROGRAM, text)?;
    let (page, more) = rendered_by(&slat_bench::cli::PROGRAM, &page)?;
    Ok((page, blocks + more))
}

fn rendered_by(program: &Program, text: &str) -> Result<(String, usize), String> {
    let begin = format!("<!-- {} render ", program.name);
    let mut parts = text.split(&begin);
    let mut page = parts.next().unwrap_or_default().to_owned();
    let mut blocks = 0;
    for part in parts {
        let (what, rest) = part.split_once(" -->\n").ok_or("a comment without its end")?;
        let (between, rest) = rest.split_once(FENCES[0]).ok_or("no block below a comment")?;
        let (_, rest) = rest.split_once(FENCES[1]).ok_or("a block without its end")?;
        if !between.trim().is_empty() {
            return Err(format!("{what}: the block does not stand below its comment"));
        }
        let (folder, titles) = what.split_once(": ").unwrap_or((what, ""));
        let report = slat_lab::run::read(program, &root().join(folder))
            .map_err(|error| format!("{folder}: {error:#}"))?;
        let shown = parts_of(&text::render(&report, &(program.readers)(), WIDTH), titles)?;
        let [open, close] = FENCES;
        page += &format!("{begin}{what} -->\n{between}{open}{shown}{close}{rest}");
        blocks += 1;
    }
    Ok((page, blocks))
}

/// The parts of a report whose titles begin so, in the report's order; all of them without titles.
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
    let chosen = parts().filter(|part| titles.iter().any(|title| part.starts_with(title)));
    Ok(chosen.collect::<Vec<_>>().join("\n\n") + "\n")
}

#[test]
fn figures_that_come_from_a_kept_run_are_its_own() {
    let mut all = 0;
    for entry in root().join("docs").read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let page = std::fs::read_to_string(&path).unwrap();
        let (now, blocks) = rendered(&page).unwrap_or_else(|why| panic!("{path:?}: {why}"));
        all += blocks;
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, &now).unwrap();
        }
        assert!(page == now, "{path:?}: UPDATE_DOCS=1 writes it anew");
    }
    assert!(all >= 3, "{all} blocks");
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
    let shown = "A line\n\nOne table\n a  b\n\nOther table\n c\n\nLast\n";
    assert_eq!(parts_of(shown, "").unwrap(), shown);
    assert_eq!(parts_of(shown, "Other; One").unwrap(), "One table\n a  b\n\nOther table\n c\n");
    assert!(parts_of(shown, "One; Two").unwrap_err().contains("no part is called Two"));
}
