//! Files that are written completely or not at all, and the names of a run's files.

use crate::failure::bad_input;
use anyhow::Context;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Name of the results file for programs.
pub const RESULTS: &str = "results.json";
/// Name of the report for people.
pub const PAGE: &str = "report.html";

/// Creates the directory, and checks that files can be created in it.
///
/// # Errors
/// Files cannot be created there.
pub fn writable(directory: &Path) -> anyhow::Result<()> {
    let made = fs::create_dir_all(directory).and_then(|()| temporary(directory).map(drop));
    made.map_err(|error| {
        bad_input(format!(
            "--output {}: cannot write there ({error}); name a directory that can be written to",
            directory.display()
        ))
    })
}

/// Writes a file that exists completely or not at all, even if the process is killed or the machine
/// stops. A symbolic link stays, and its target is written. What is no regular file (a FIFO, a
/// device) is opened and written to.
///
/// # Errors
/// The file cannot be written.
pub fn write_whole(path: &Path, text: &[u8]) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        let Some(path) = replaced(path)? else { return opened(path)?.write_all(text) };
        let mut file = temporary(folder(&path))?;
        file.write_all(text)?;
        file.as_file().sync_all()?;
        let _ = file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// Checks that [`write_whole`] can write a file, and changes nothing.
///
/// # Errors
/// The file cannot be written.
pub fn check(path: &Path) -> io::Result<()> {
    match replaced(path)? {
        Some(path) => temporary(folder(&path)).map(drop),
        // To open a FIFO would wait for its reader.
        None if fs::metadata(path)?.file_type().is_fifo() => Ok(()),
        None => opened(path).map(drop),
    }
}

/// Most symbolic links that lead to a file, as in path_resolution(7).
const LINKS: usize = 40;

/// Returns the file that is replaced when `path` is written; `None` if `path` is opened instead,
/// because a file in its place would be another thing: a device, a FIFO.
fn replaced(path: &Path) -> io::Result<Option<PathBuf>> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() && !found.is_dir() => return Ok(None),
        // Perhaps the kernel follows no link of another user here (`fs.protected_symlinks`). Nor
        // must this.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
        _ => {}
    }
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        let Ok(target) = fs::read_link(&path) else { return Ok(Some(path)) };
        if fs::canonicalize(folder(&path))?.starts_with("/proc") {
            // `/dev/stdout` of a process whose output goes to a file. A new file would not have what
            // the process writes, and a second opening has a position of its own.
            return Err(io::Error::other("an open file of a process; name the file itself"));
        }
        path = folder(&path).join(target);
    }
    Err(io::Error::other("too many symbolic links"))
}

/// Opens what is already there.
fn opened(path: &Path) -> io::Result<fs::File> {
    fs::File::options().append(true).open(path)
}

/// Returns the folder that a file lies in.
fn folder(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Creates a file in `directory` under a temporary name. It is deleted when it is dropped.
pub fn temporary(directory: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    let _ = builder.prefix(".slat-");
    // Others may read a report, as any new file.
    builder.permissions(fs::Permissions::from_mode(0o666));
    builder.tempfile_in(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Names in a folder, with what kind of file each is.
    fn kinds(folder: &Path) -> Vec<(String, fs::FileType)> {
        let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
        let name = |it: &fs::DirEntry| it.file_name().into_string().unwrap();
        let mut kinds: Vec<_> = entries.map(|it| (name(&it), it.file_type().unwrap())).collect();
        kinds.sort_by(|one, next| one.0.cmp(&next.0));
        kinds
    }

    #[test]
    fn a_fifo_and_a_device_are_written_to_and_stay_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        check(&fifo).unwrap();
        let read = std::thread::spawn({
            let fifo = fifo.clone();
            move || fs::read_to_string(fifo).unwrap()
        });
        write_whole(&fifo, b"report").unwrap();
        let kinds = kinds(folder.path());
        assert!(kinds.len() == 1 && kinds[0].1.is_fifo(), "{kinds:?}");
        assert_eq!(read.join().unwrap(), "report");
        // A device by a link in a folder of the test's own, so that a failure harms nothing else.
        let null = folder.path().join("null");
        symlink("/dev/null", &null).unwrap();
        check(&null).unwrap();
        write_whole(&null, b"report").unwrap();
        assert_eq!(fs::read_link(&null).unwrap(), Path::new("/dev/null"));
        assert!(fs::metadata(&null).unwrap().file_type().is_char_device());
    }

    #[test]
    fn a_symbolic_link_stays_and_its_target_is_replaced_or_made() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("inner")).unwrap();
        fs::write(at("inner/file"), "old").unwrap();
        symlink("inner/link", at("link")).unwrap();
        symlink("file", at("inner/link")).unwrap();
        symlink("inner/made", at("to_nothing")).unwrap();
        let before = kinds(folder.path());
        for name in ["link", "to_nothing"] {
            check(&at(name)).unwrap();
            write_whole(&at(name), b"report").unwrap();
        }
        assert_eq!(kinds(folder.path()), before);
        assert!(fs::symlink_metadata(at("inner/link")).unwrap().is_symlink());
        for name in ["inner/file", "inner/made"] {
            assert!(fs::symlink_metadata(at(name)).unwrap().is_file());
            assert_eq!(fs::read_to_string(at(name)).unwrap(), "report");
        }
        symlink("loop", at("loop")).unwrap();
        assert!(check(&at("loop")).is_err() && write_whole(&at("loop"), b"report").is_err());
        assert!(fs::symlink_metadata(at("loop")).unwrap().is_symlink());
    }

    #[test]
    fn a_link_that_another_user_put_into_a_folder_of_all_users_is_not_followed() {
        let protected = fs::read_to_string("/proc/sys/fs/protected_symlinks");
        if protected.unwrap_or_default().trim() != "1" {
            return eprintln!("skipped: fs.protected_symlinks is off");
        }
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("all")).unwrap();
        fs::set_permissions(at("all"), fs::Permissions::from_mode(0o1777)).unwrap();
        fs::write(at("file"), "old").unwrap();
        symlink(at("file"), at("all/link")).unwrap();
        if std::os::unix::fs::lchown(at("all/link"), Some(65534), None).is_err() {
            return eprintln!("skipped: only root can make a link of another user");
        }
        assert!(check(&at("all/link")).is_err());
        assert!(write_whole(&at("all/link"), b"report").is_err());
        assert_eq!(fs::read_to_string(at("file")).unwrap(), "old");
    }

    #[test]
    fn a_regular_file_is_not_written_by_the_name_of_a_descriptor_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = fs::File::create(&path).unwrap();
        log.write_all(b"before ").unwrap();
        let link = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&log));
        assert!(check(Path::new(&link)).unwrap_err().to_string().contains("name the file itself"));
        assert!(write_whole(Path::new(&link), b"report").is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "before ");
    }
}
