//! The files to merge, and their reports.

use crate::compare;
use crate::failure::bad_input;
use crate::files::RESULTS;
use crate::plan::cell;
use crate::record::Report;
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A file that was found and not merged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UnmergedFile {
    /// The file.
    pub file: PathBuf,
    /// The reason.
    pub reason: String,
}

/// The files that were found.
#[derive(Debug, Default)]
pub struct Found {
    /// Reports in the order of the arguments; those of a directory in the order of their names.
    pub reports: Vec<(PathBuf, Report)>,
    /// Files that are no reports.
    pub bad: Vec<UnmergedFile>,
    /// Cells that failed.
    pub failed: Vec<UnmergedFile>,
}

/// Reads the files that `paths` name, and from directories those that `slat` writes, except below
/// `output`.
///
/// # Errors
/// Without `skip_bad`, a file is no report, or is a copy of another one; or there is no report.
pub fn read(paths: &[PathBuf], output: &Path, skip_bad: bool) -> anyhow::Result<Found> {
    let mut found = Found::default();
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let before = files.len() + found.failed.len();
            below(path, output, &mut files, &mut found.failed)
                .map_err(|error| bad_input(format!("{}: {error}", path.display())))?;
            if files.len() + found.failed.len() == before {
                return Err(bad_input(format!(
                    "{}: neither {RESULTS} nor a cell-NNN.json in it; name a directory that slat \
                     wrote",
                    path.display()
                )));
            }
        } else {
            files.push(path.clone());
        }
    }
    let mut seen: Vec<(PathBuf, Vec<u8>)> = Vec::new();
    for file in files {
        // A file with two names is read once.
        let place = fs::canonicalize(&file).unwrap_or_else(|_| file.clone());
        if seen.iter().any(|(known, _)| *known == place) {
            continue;
        }
        let text = fs::read(&file).unwrap_or_default();
        let copied = seen.iter().find(|(_, other)| !text.is_empty() && *other == text);
        let report = match copied {
            // The samples of a copy would count twice.
            Some((of, _)) => Err(format!("it is a copy of {}", of.display())),
            None => one(&file),
        };
        match report {
            Ok(report) => found.reports.push((file, report)),
            Err(reason) if skip_bad => found.bad.push(UnmergedFile { file, reason }),
            Err(reason) => {
                return Err(bad_input(format!(
                    "{}: {reason}; leave it out, or go on without such files by --skip-bad",
                    file.display()
                )));
            }
        }
        seen.push((place, text));
    }
    if found.reports.is_empty() {
        let why = found.bad.first().or(found.failed.first());
        let why = why.map_or_else(String::new, |left| {
            format!(" ({}: {})", left.file.display(), left.reason)
        });
        return Err(bad_input(format!("there is no report to merge{why}")));
    }
    Ok(found)
}

/// Reads a report; the error says why the file is none.
fn one(file: &Path) -> Result<Report, String> {
    let text = fs::read(file).map_err(|error| error.to_string())?;
    let report = compare::parse_report(&text).map_err(|why| format!("no report of slat: {why}"))?;
    serde_json::from_value(report).map_err(|error| format!("no report of slat: {error}"))
}

/// Finds the reports in a directory and below it, in the order of their names, and the failed
/// cells.
fn below(
    directory: &Path,
    output: &Path,
    files: &mut Vec<PathBuf>,
    failed: &mut Vec<UnmergedFile>,
) -> io::Result<()> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    entries.sort();
    let is_output = |path: &Path| match (fs::canonicalize(path), fs::canonicalize(output)) {
        (Ok(path), Ok(output)) => path == output,
        _ => false,
    };
    for path in entries {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        // A link to a directory above would never end.
        if path.is_dir() && !path.is_symlink() && !name.starts_with('.') && !is_output(&path) {
            below(&path, output, files, failed)?;
        } else if name == RESULTS || cell::is_report(name) {
            files.push(path);
        } else if name.ends_with(cell::FAILED) {
            let reason = failure(&path);
            failed.push(UnmergedFile { file: path, reason });
        }
    }
    Ok(())
}

/// Returns the command and the reason from a failed cell's record.
fn failure(file: &Path) -> String {
    let record: Value =
        fs::read(file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let text = |name: &str| record[name].as_str().unwrap_or("not recorded").to_owned();
    format!("`{}`: {}", text("command"), text("reason"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;
    use crate::report::json;

    /// Creates a directory of files, each with the given text or a report.
    fn files(names: &[(&str, Option<&str>)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (number, (name, text)) in names.iter().enumerate() {
            let mut report = fake::short_report();
            report.results[0].samples = vec![number as f64];
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text.map_or_else(|| json::render(&report).unwrap(), str::to_owned))
                .unwrap();
        }
        folder
    }

    fn names(folder: &Path, found: &Found) -> Vec<String> {
        let files = found.reports.iter().map(|(file, _)| file.strip_prefix(folder).unwrap());
        files.map(|file| file.display().to_string()).collect()
    }

    #[test]
    fn a_directory_is_what_slat_wrote_below_it_but_for_the_output() {
        let folder = files(&[
            ("b/cell-002.json", None),
            ("b/cell-001.json", None),
            ("a/results.json", None),
            ("b/cell-003.failed.json", Some(r#"{"command": "slat x", "reason": "no memory"}"#)),
            ("b/notes.json", Some("{}")),
            ("merged/example/results.json", None),
            (".hidden/results.json", Some("{")),
        ]);
        let path = folder.path();
        let found = read(&[path.to_owned()], &path.join("merged"), false).unwrap();
        assert_eq!(names(path, &found), ["a/results.json", "b/cell-001.json", "b/cell-002.json"]);
        assert_eq!(found.failed[0].reason, "`slat x`: no memory");
        // A file that is named twice is read once.
        let twice = [path.join("a/results.json"), path.join("a")];
        assert_eq!(read(&twice, &path.join("merged"), false).unwrap().reports.len(), 1);
    }

    #[test]
    fn what_is_no_report_is_named_or_left_out_if_asked() {
        let whole = json::render(&fake::short_report()).unwrap();
        let other = whole.replace("\"schema\": 1", "\"schema\": 99");
        for (text, why) in [
            (&whole[..whole.len() / 2], "EOF"),
            ("{\"name\": \"something else\"}", "schema is null"),
            ("{\"schema\": 1}", "missing field"),
            ("not json", "expected"),
            (&other, "99"),
            ("", "EOF"),
        ] {
            let folder = files(&[("good.json", None), ("bad.json", Some(text))]);
            let paths = ["good.json", "bad.json"].map(|name| folder.path().join(name));
            let error = read(&paths, Path::new("out"), false).unwrap_err().to_string();
            assert!(error.contains("bad.json") && error.contains(why), "{error}");
            let found = read(&paths, Path::new("out"), true).unwrap();
            assert_eq!((found.reports.len(), found.bad.len()), (1, 1));
            assert!(found.bad[0].reason.contains(why));
            // If all files are bad, this is an error even with `skip_bad`.
            assert!(read(&paths[1..], Path::new("out"), true).is_err());
        }
    }

    #[test]
    fn a_copy_does_not_count_twice() {
        let text = json::render(&fake::short_report()).unwrap();
        let folder = files(&[("a.json", Some(&text)), ("b.json", Some(&text))]);
        let paths = ["a.json", "b.json"].map(|name| folder.path().join(name));
        let error = read(&paths, Path::new("out"), false).unwrap_err().to_string();
        assert!(error.contains("b.json: it is a copy of") && error.contains("a.json"), "{error}");
    }

    #[test]
    fn a_directory_without_any_is_refused() {
        let folder = files(&[("notes.json", Some("{}"))]);
        let error = read(&[folder.path().to_owned()], Path::new("out"), true).unwrap_err();
        assert!(error.to_string().contains("cell-NNN.json"), "{error}");
    }
}
