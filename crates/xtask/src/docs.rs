//! The command lines in the documentation, and the output that it shows for them.
//!
//! Tests here parse every command line with its own program's parser. [`run`] executes those that
//! need only this machine, and compares their output with the page.

#[cfg(test)]
mod links;
#[cfg(test)]
mod parse;
pub mod run;
mod shape;
#[cfg(test)]
mod width;

use crate::root;
use anyhow::{Context, ensure};
use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag};
use std::path::PathBuf;

/// A command line in the documentation, and its place.
pub struct Example {
    /// Page and line.
    pub at: String,
    /// The command line without its prompt.
    pub line: String,
    /// The lines of output that the page shows below it.
    pub shown: Vec<String>,
}

/// The parts of a page that this module reads.
pub struct Page {
    /// Its name in the repository.
    pub name: String,
    /// Command lines in blocks.
    pub examples: Vec<Example>,
    /// Code within sentences that is a command line or the name of a command.
    pub spans: Vec<Example>,
}

/// Returns all pages, in the order of their names.
///
/// # Errors
/// A page cannot be read, or breaks the rules that CONTRIBUTING.md has for blocks.
pub fn pages() -> anyhow::Result<Vec<Page>> {
    let mut names: Vec<_> =
        ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"].map(PathBuf::from).into();
    for entry in root().join("docs").read_dir().context("docs")? {
        let path = entry.context("docs")?.path();
        if path.extension().is_some_and(|extension| extension == "md") {
            names.push(path.strip_prefix(root()).context("docs")?.to_owned());
        }
    }
    names.sort();
    names.iter().map(|name| page(&name.display().to_string())).collect()
}

fn page(name: &str) -> anyhow::Result<Page> {
    let text = std::fs::read_to_string(root().join(name)).context(name.to_owned())?;
    read(name, &text)
}

/// Reads a page.
fn read(name: &str, text: &str) -> anyhow::Result<Page> {
    let mut page = Page { name: name.to_owned(), examples: vec![], spans: vec![] };
    for (event, range) in
        Parser::new_ext(text, pulldown_cmark::Options::ENABLE_TABLES).into_offset_iter()
    {
        let number = text[..range.start].matches('\n').count() + 1;
        match event {
            Event::Code(line) if is_of_ours(&line) => page.spans.push(Example {
                at: format!("{name}:{number}"),
                line: line.into_string(),
                shown: vec![],
            }),
            Event::Start(Tag::CodeBlock(kind)) => {
                let CodeBlockKind::Fenced(language) = kind else {
                    anyhow::bail!("{name}:{number}: an indented block, which no fence explains");
                };
                let inside: Vec<_> = text[range].lines().skip(1).collect();
                let inside = &inside[..inside.len().saturating_sub(1)];
                block(&mut page, &language, number + 1, inside)?;
            }
            _ => {}
        }
    }
    Ok(page)
}

/// Returns whether a line runs one of this project's programs.
fn is_of_ours(line: &str) -> bool {
    let first = line.split_whitespace().next();
    first.is_some_and(|word| ["slat", "slat-bench", "cargo"].contains(&word))
}

/// Reads a block whose first line is `first`.
fn block(page: &mut Page, language: &str, first: usize, lines: &[&str]) -> anyhow::Result<()> {
    let at = |index: usize| format!("{}:{}", page.name, first + index);
    match language {
        "console" => {
            let mut continued = false;
            for (index, line) in lines.iter().enumerate() {
                if let Some(line) = line.strip_prefix("$ ") {
                    page.examples.push(Example { at: at(index), line: line.into(), shown: vec![] });
                } else {
                    ensure!(index > 0, "{}: the block begins with no command", at(index));
                    let example = page.examples.last_mut().context("no command")?;
                    match continued {
                        true => example.line.push_str(&format!("\n{line}")),
                        false => example.shown.push((*line).to_owned()),
                    }
                }
                continued = line.ends_with('\\');
            }
        }
        "text" => {
            let typed = lines.iter().position(|line| line.starts_with("$ ") || is_of_ours(line));
            let where_typed = typed.map(at).unwrap_or_default();
            ensure!(typed.is_none(), "{where_typed}: a command line, in a block that is a sample");
        }
        "sh" => {
            let typed = lines.iter().enumerate().filter(|(_, line)| !line.starts_with('#'));
            let files = typed.map(|(index, line)| Example {
                at: at(index),
                line: (*line).to_owned(),
                shown: vec![],
            });
            page.spans.extend(files);
        }
        _ => ensure!(
            language.starts_with("rust"),
            "{}: a block of {language:?}; CONTRIBUTING.md says which there are",
            at(0)
        ),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_block_has_commands_and_what_each_prints() {
        let text =
            "# Page\n\n```console\n$ slat doctor\nwell\n$ slat \\\n    show\n```\n`slat watch`\n";
        let page = read("a.md", text).unwrap();
        let examples: Vec<_> =
            page.examples.iter().map(|e| (e.at.as_str(), e.line.as_str(), e.shown.len())).collect();
        assert_eq!(examples, [("a.md:4", "slat doctor", 1), ("a.md:6", "slat \\\n    show", 0)]);
        assert_eq!(
            (page.spans[0].at.as_str(), page.spans[0].line.as_str()),
            ("a.md:9", "slat watch")
        );
    }

    #[test]
    fn a_command_hides_in_no_other_block() {
        for text in ["```\n$ slat\n```\n", "```text\nslat doctor\n```\n", "a\n\n    cargo test\n"] {
            assert!(read("a.md", text).is_err(), "{text}");
        }
    }
}
