//! Tests that figures in the documentation are those of a run that is kept beside it.
//!
//! A comment `<!-- slat render FOLDER -->` stands above a block that the command prints;
//! `UPDATE_DOCS=1 cargo test -p xtask generated` writes such blocks anew.

use crate::root;
use slat_lab::report::text;

/// How wide the blocks are.
const WIDTH: u16 = 100;
const BEGIN: &str = "<!-- slat render ";
const FENCES: [&str; 2] = ["```text\n", "```\n"];

/// The page with each such block as its command prints it now; how many there are.
fn rendered(text: &str) -> Result<(String, usize), String> {
    let mut parts = text.split(BEGIN);
    let mut page = parts.next().unwrap_or_default().to_owned();
    let mut blocks = 0;
    for part in parts {
        let (folder, rest) = part.split_once(" -->\n").ok_or("a comment without its end")?;
        let (between, rest) = rest.split_once(FENCES[0]).ok_or("no block below a comment")?;
        let (_, rest) = rest.split_once(FENCES[1]).ok_or("a block without its end")?;
        if !between.trim().is_empty() {
            return Err(format!("{folder}: the block does not stand below its comment"));
        }
        let program = &slat_cli::PROGRAM;
        let report = slat_lab::run::read(program, &root().join(folder))
            .map_err(|error| format!("{folder}: {error:#}"))?;
        let shown = text::render(&report, &(program.readers)(), WIDTH);
        let [open, close] = FENCES;
        page += &format!("{BEGIN}{folder} -->\n{between}{open}{shown}{close}{rest}");
        blocks += 1;
    }
    Ok((page, blocks))
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
    ] {
        assert!(rendered(page).is_err(), "{page}");
    }
}
