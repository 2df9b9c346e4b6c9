//! Manual pages: one of the program, and one of each of its subcommands.

use super::output;
use crate::failure::bad_input;
use crate::files;
use crate::scenario::Program;
use anyhow::Context;
use std::fs;
use std::path::Path;

/// Prints the page of a subcommand, which these words name, or of the program without any.
///
/// # Errors
/// There is no such subcommand; stdout cannot be written.
pub fn print(program: &Program, words: &[String]) -> anyhow::Result<()> {
    let mut command = (program.command)().disable_help_subcommand(true);
    // Names the subcommands by their parents.
    command.build();
    let mut chosen = &command;
    for word in words {
        let found = chosen.find_subcommand(word);
        chosen = found.ok_or_else(|| {
            let name = chosen.get_bin_name().unwrap_or(program.name).to_owned();
            bad_input(format!(
                "`{name}` has no subcommand {word}, so no page; `{name} --help` lists those it has"
            ))
        })?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(chosen.clone()).render(&mut page)?;
    output::print(&String::from_utf8_lossy(&page))
}

/// Writes the pages of the program and of all its subcommands into a folder.
///
/// # Errors
/// The folder cannot be made, or a page cannot be written.
pub fn write(program: &Program, folder: &Path) -> anyhow::Result<()> {
    let why = || format!("cannot write manual pages into {}", folder.display());
    fs::create_dir_all(folder).with_context(why)?;
    let command = (program.command)().disable_help_subcommand(true);
    let made = tempfile::tempdir().with_context(why)?;
    clap_mangen::generate_to(command, made.path()).with_context(why)?;
    for page in made.path().read_dir().with_context(why)? {
        let page = page.with_context(why)?;
        let text = fs::read(page.path()).with_context(why)?;
        files::write_whole(&folder.join(page.file_name()), &text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::fake::PROGRAM;

    #[test]
    fn a_page_is_not_written_through_a_link_of_another_user() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can make links of another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (link, file) = (folder.path().join("slat.1"), folder.path().join("file"));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        assert!(write(&PROGRAM, folder.path()).is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "old");
    }

    #[test]
    fn every_subcommand_has_a_manual_page() {
        let folder = tempfile::tempdir().unwrap();
        write(&PROGRAM, folder.path()).unwrap();
        for (page, says) in [
            ("slat.1", "slat\\-bench(1)"),
            ("slat-bench.1", "slat\\-bench\\-first(1)"),
            ("slat-bench-first.1", "\\fB\\-\\-granule\\fR"),
        ] {
            let text = fs::read_to_string(folder.path().join(page)).unwrap();
            assert!(text.contains(says), "{page}: {text}");
        }
    }

    #[test]
    fn a_page_of_no_subcommand_is_refused_with_where_to_look() {
        let words = ["bench", "nothing"].map(str::to_owned);
        let why = print(&PROGRAM, &words).unwrap_err().to_string();
        assert!(why.contains("`slat bench --help`"), "{why}");
    }
}
