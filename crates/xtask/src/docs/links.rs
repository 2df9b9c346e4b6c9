//! Links from one page to another, a file, or a heading.

use crate::root;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use std::path::{Path, PathBuf};

/// Returns the links of a page that lead nowhere; `read` returns the text of a page, if the file
/// exists.
fn dead(page: &Path, text: &str, read: &impl Fn(&Path) -> Option<String>) -> Vec<String> {
    let mut dead = Vec::new();
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event else {
            continue;
        };
        if dest_url.contains("://") || dest_url.starts_with("mailto:") {
            continue;
        }
        let (file, heading) = dest_url.split_once('#').unwrap_or((&dest_url, ""));
        let there = match file {
            "" => Some(text.to_owned()),
            file => read(&resolved(page, file)),
        };
        let found = there.is_some_and(|text| heading.is_empty() || has_heading(&text, heading));
        if !found {
            dead.push(format!("{}: {dest_url}", page.display()));
        }
    }
    dead
}

/// Returns the path of a file that a page links to.
fn resolved(page: &Path, file: &str) -> PathBuf {
    let mut path = page.parent().unwrap_or(Path::new("")).to_owned();
    for part in Path::new(file) {
        match part.to_str() {
            Some("..") => _ = path.pop(),
            Some(".") => {}
            _ => path.push(part),
        }
    }
    path
}

/// Returns whether a page has a heading of this name, as code hosts derive names from headings.
fn has_heading(text: &str, name: &str) -> bool {
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match (event, &mut heading) {
            (Event::Start(Tag::Heading { .. }), _) => heading = Some(String::new()),
            (Event::Text(text) | Event::Code(text), Some(heading)) => heading.push_str(&text),
            (Event::End(TagEnd::Heading(_)), Some(of)) => {
                let kept = of.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
                let slug: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
                if slug.to_lowercase() == name {
                    return true;
                }
                heading = None;
            }
            _ => {}
        }
    }
    false
}

/// Finds all pages below a folder, except in build folders and in links to folders.
pub(super) fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    files("md", folder, found);
}

/// Finds all files of this extension, as [`pages`] does.
pub(super) fn files(extension: &str, folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in root().join(folder).read_dir().unwrap().map(Result::unwrap) {
        let path = folder.join(entry.file_name());
        let name = entry.file_name();
        if entry.path().is_dir() {
            if !entry.path().is_symlink()
                && name != "target"
                && !name.to_string_lossy().starts_with('.')
            {
                files(extension, &path, found);
            }
        } else if path.extension().is_some_and(|own| own == extension) {
            found.push(path);
        }
    }
}

#[test]
fn every_link_of_a_page_leads_somewhere() {
    let mut all = Vec::new();
    pages(Path::new(""), &mut all);
    assert!(all.len() > 40, "{} pages", all.len());
    let read = |path: &Path| {
        let path = root().join(path);
        path.exists().then(|| std::fs::read_to_string(&path).unwrap_or_default())
    };
    let dead: Vec<_> =
        all.iter().flat_map(|page| dead(page, &read(page).unwrap(), &read)).collect();
    assert!(dead.is_empty(), "dead links:\n{}", dead.join("\n"));
}

#[test]
fn every_page_of_docs_is_in_the_list_of_pages() {
    let list = std::fs::read_to_string(root().join("docs/README.md")).unwrap();
    let mut all = Vec::new();
    pages(Path::new("docs"), &mut all);
    all.retain(|page| page.parent() == Some(Path::new("docs")) && !page.ends_with("README.md"));
    let missing =
        |page: &PathBuf| !list.contains(&format!("]({})", page.file_name().unwrap().display()));
    all.retain(missing);
    assert!(all.is_empty(), "not in docs/README.md: {all:?}");
}

#[test]
fn a_link_to_nothing_is_found() {
    let text =
        "# A page\n\n## What, if `x`?\n\n[a](b.md#there) [c](../d.md) [e](#what-if-x) [f](#g)";
    let read = |path: &Path| (path == Path::new("docs/b.md")).then(|| "# There\n".to_owned());
    assert_eq!(dead(Path::new("docs/a.md"), text, &read), ["docs/a.md: ../d.md", "docs/a.md: #g"]);
}
