//! Files that are written completely or not at all, and the names of a run's files.
//!
//! Root writes reports into folders in which others can change names at any time. So a path is
//! resolved here, one name at a time, and each name is opened once: what is found is looked at and
//! used by its descriptor. A link of another user is not followed, and a file of another owner is
//! not replaced. The kernel's `fs.protected_symlinks` refuses the first in some folders only, and
//! would not stop a name that changes between two looks.

use crate::failure::bad_input;
use anyhow::Context;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, Stat, fchmod, fstat, fstatfs, mkdirat, openat,
    readlinkat, renameat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path};

/// Name of the results file for programs.
pub const RESULTS: &str = "results.json";
/// Name of the report for people.
pub const PAGE: &str = "report.html";

/// Creates the directory, and checks that files can be created in it.
///
/// # Errors
/// Files cannot be created there, or it is reached through another user's link.
pub fn writable(directory: &Path) -> anyhow::Result<()> {
    let made = Target::find(&directory.join(RESULTS), MissingFolder::Make);
    made.and_then(Target::check).map_err(|error| {
        bad_input(format!(
            "--output {}: cannot write there ({RESULTS}: {error}); name a directory that can be \
             written to",
            directory.display()
        ))
    })
}

/// Writes a file that exists completely or not at all, even if the process is killed or the machine
/// stops. A symbolic link of this user or of root stays, and its target is written. The mode of a
/// file that is replaced stays. What is no regular file (a FIFO, a device) is opened and written
/// to.
///
/// # Errors
/// The file cannot be written, belongs to another user, or is reached through another user's link.
pub fn write_whole(path: &Path, text: &[u8]) -> anyhow::Result<()> {
    let write = || StagedFile::new(path, text)?.publish();
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// Checks that [`write_whole`] can write a file, and changes nothing.
///
/// # Errors
/// Those of [`write_whole`].
pub fn check(path: &Path) -> io::Result<()> {
    Target::find(path, MissingFolder::Refuse)?.check()
}

/// A text that is on disk under a temporary name, or that is written where nothing can be replaced.
pub struct StagedFile(Stage);

enum Stage {
    File(Temporary),
    Open(File, Vec<u8>),
}

impl StagedFile {
    /// Writes the text beside the file that it will replace.
    ///
    /// # Errors
    /// Those of [`write_whole`].
    pub fn new(path: &Path, text: &[u8]) -> io::Result<Self> {
        let stage = match Target::find(path, MissingFolder::Refuse)? {
            Target::Name(name) => {
                let mut file = name.temporary()?;
                file.file.write_all(text)?;
                file.file.sync_all()?;
                Stage::File(file)
            }
            Target::Opened(there) => Stage::Open(there.append()?, text.to_owned()),
        };
        Ok(Self(stage))
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// Another file has the name by now, or it cannot be written.
    pub fn publish(self) -> io::Result<()> {
        match self.0 {
            Stage::File(file) => file.publish(),
            Stage::Open(mut file, text) => file.write_all(&text),
        }
    }
}

/// What a path leads to.
enum Target {
    /// A name in a folder, under which there is a file of this user's or none.
    Name(Name),
    /// A device or a FIFO, or one that a process has open.
    Opened(Node),
}

/// What is done about a folder that is not there.
#[derive(Clone, Copy, PartialEq)]
enum MissingFolder {
    Make,
    Refuse,
}

/// A name in a folder that was opened.
struct Name {
    folder: OwnedFd,
    name: OsString,
    /// The file that is there.
    found: Option<Stat>,
}

/// What is no regular file.
struct Node {
    folder: OwnedFd,
    name: OsString,
    found: Stat,
    /// Whether the name is a descriptor of a process: a link of procfs that is no path.
    is_descriptor: bool,
}

/// Most symbolic links that lead to a file, as in path_resolution(7).
const LINKS: usize = 40;
/// The file system's number of procfs (statfs(2)).
const PROC: u64 = 0x9fa0;

fn refused(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}

/// Returns the names of a path in their order, behind `/` where it begins so.
fn names(path: &Path) -> impl DoubleEndedIterator<Item = OsString> {
    path.components().map(|part| part.as_os_str().to_owned())
}

impl Target {
    fn check(self) -> io::Result<()> {
        match self {
            Self::Name(name) => name.temporary().map(drop),
            // To open a FIFO would wait for its reader.
            Self::Opened(node) if is(&node.found, FileType::Fifo) => Ok(()),
            Self::Opened(node) => node.append().map(drop),
        }
    }

    fn find(path: &Path, missing: MissingFolder) -> io::Result<Self> {
        const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
        const LINK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
        let open = |at: &str| openat(rustix::fs::CWD, at, FOLDER, Mode::empty());
        let user = rustix::process::geteuid().as_raw();
        let mut left: VecDeque<OsString> = names(path).collect();
        let (mut folder, mut links) = (open(".")?, 0);
        while let Some(name) = left.pop_front() {
            if Path::new(&name).components().next() == Some(Component::RootDir) {
                folder = open("/")?;
                continue;
            }
            let here = match openat(&folder, &name, LINK, Mode::empty()) {
                Err(Errno::NOENT) if left.is_empty() => {
                    return Ok(Self::Name(Name { folder, name, found: None }));
                }
                Err(Errno::NOENT) if missing == MissingFolder::Make => {
                    match mkdirat(&folder, &name, Mode::from_raw_mode(0o777)) {
                        // Somebody was faster, perhaps with a link: it is looked at as any other.
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(error.into()),
                    }
                    openat(&folder, &name, LINK, Mode::empty())?
                }
                here => here?,
            };
            let found = fstat(&here)?;
            match FileType::from_raw_mode(found.st_mode) {
                FileType::Symlink if is_open_file(&folder, &name)? => {
                    return Self::open_file(folder, name);
                }
                FileType::Symlink if ![0, user].contains(&found.st_uid) => {
                    return Err(refused(format!(
                        "{} is a link of another user (number {}); name the file itself",
                        Path::new(&name).display(),
                        found.st_uid
                    )));
                }
                FileType::Symlink if links == LINKS => {
                    return Err(io::Error::other("too many symbolic links"));
                }
                FileType::Symlink => {
                    links += 1;
                    let target = OsString::from_vec(readlinkat(&here, "", [])?.into_bytes());
                    names(Path::new(&target)).rev().for_each(|name| left.push_front(name));
                }
                FileType::Directory if left.is_empty() => return Err(Errno::ISDIR.into()),
                FileType::Directory => folder = here,
                _ if !left.is_empty() => return Err(Errno::NOTDIR.into()),
                kind => return Self::of(folder, name, kind, found, user),
            }
        }
        // The path ends in a directory.
        Err(Errno::ISDIR.into())
    }

    fn of(
        folder: OwnedFd,
        name: OsString,
        kind: FileType,
        found: Stat,
        user: u32,
    ) -> io::Result<Self> {
        let own = found.st_uid == user;
        match kind {
            FileType::RegularFile if own => {
                Ok(Self::Name(Name { folder, name, found: Some(found) }))
            }
            FileType::RegularFile => Err(refused(format!(
                "the file belongs to another user (number {}); remove it, or name another",
                found.st_uid
            ))),
            FileType::Fifo if !own && found.st_uid != 0 => Err(refused(format!(
                "the FIFO belongs to another user (number {}); name another",
                found.st_uid
            ))),
            _ => Ok(Self::Opened(Node { folder, name, found, is_descriptor: false })),
        }
    }

    /// A descriptor of a process, such as `/dev/stdout`.
    fn open_file(folder: OwnedFd, name: OsString) -> io::Result<Self> {
        let found = statat(&folder, &name, AtFlags::empty())?;
        if is(&found, FileType::RegularFile) {
            // A new file would not have what the process writes, and a second opening has a
            // position of its own.
            return Err(io::Error::other("an open file of a process; name the file itself"));
        }
        Ok(Self::Opened(Node { folder, name, found, is_descriptor: true }))
    }
}

fn is(found: &Stat, kind: FileType) -> bool {
    FileType::from_raw_mode(found.st_mode) == kind
}

fn are_same(one: &Stat, other: &Stat) -> bool {
    (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
}

/// Returns whether a link is one of procfs that stands for a file, not for a path.
fn is_open_file(folder: &OwnedFd, name: &OsStr) -> io::Result<bool> {
    Ok(fstatfs(folder)?.f_type as u64 == PROC && name != "self" && name != "thread-self")
}

impl Node {
    /// Opens what was looked at, and nothing that has its name by now.
    fn append(&self) -> io::Result<File> {
        let mut flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
        flags.set(OFlags::NOFOLLOW, !self.is_descriptor);
        let file = openat(&self.folder, &self.name, flags, Mode::empty())?;
        if !are_same(&fstat(&file)?, &self.found) {
            return Err(changed());
        }
        Ok(file.into())
    }
}

fn changed() -> io::Error {
    refused("another file has the name by now".to_owned())
}

/// A file under a temporary name, which is removed when it is dropped.
struct Temporary {
    file: File,
    temporary: OsString,
    to: Name,
}

impl Name {
    /// Creates a file that will get this name.
    fn temporary(self) -> io::Result<Temporary> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        // Others may read a report, as any new file, unless they could not read the last one.
        let kept = self.found.map(|found| Mode::from_raw_mode(found.st_mode));
        let mode = kept.unwrap_or(Mode::from_raw_mode(0o666));
        loop {
            let name = format!(".slat-{:016x}", fastrand::u64(..));
            match openat(&self.folder, &name, flags | OFlags::CLOEXEC, mode) {
                Err(Errno::EXIST) => {}
                file => {
                    let file = File::from(file?);
                    if kept.is_some() {
                        fchmod(&file, mode)?;
                    }
                    return Ok(Temporary { file, temporary: name.into(), to: self });
                }
            }
        }
    }
}

impl Temporary {
    fn publish(mut self) -> io::Result<()> {
        let (folder, from, to) = (self.to.folder.as_fd(), &self.temporary, &self.to.name);
        let rename = |flags| renameat_with(folder, from, folder, to, flags);
        let renamed = match &self.to.found {
            // What comes out of the exchange is removed with the temporary name, unless it is not
            // the file that was looked at: then it gets its name back.
            Some(found) => match rename(RenameFlags::EXCHANGE) {
                Ok(()) if are_same(&statat(folder, from, AtFlags::SYMLINK_NOFOLLOW)?, found) => {
                    return Ok(());
                }
                Ok(()) => {
                    rename(RenameFlags::EXCHANGE)?;
                    return Err(changed());
                }
                Err(Errno::NOENT) => rename(RenameFlags::NOREPLACE),
                renamed => renamed,
            },
            // Where there was no file, one that came meanwhile is not ours.
            None => rename(RenameFlags::NOREPLACE),
        };
        match renamed {
            // File systems without flags.
            Err(Errno::INVAL | Errno::NOSYS) => renameat(folder, from, folder, to)?,
            renamed => renamed?,
        }
        self.temporary.clear();
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.temporary.is_empty() {
            // There is nobody to tell; the name says whose file it is.
            let _ = unlinkat(&self.to.folder, &self.temporary, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, chown, lchown, symlink};
    use std::sync::atomic::{AtomicBool, Ordering};

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

    /// Number of another user.
    const OTHER: Option<u32> = Some(65534);

    fn is_root() -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            eprintln!("skipped: only root can make files of another user");
        }
        root
    }

    #[test]
    fn a_link_of_another_user_is_followed_in_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("all")).unwrap();
        fs::create_dir(at("mine")).unwrap();
        fs::write(at("mine/file"), "old").unwrap();
        symlink(at("mine/file"), at("all/link")).unwrap();
        symlink(at("mine"), at("all/folder")).unwrap();
        if !is_root() {
            return;
        }
        lchown(at("all/link"), OTHER, None).unwrap();
        lchown(at("all/folder"), OTHER, None).unwrap();
        for mode in [0o1777, 0o755] {
            fs::set_permissions(at("all"), fs::Permissions::from_mode(mode)).unwrap();
            for name in ["all/link", "all/folder/file", "all/folder/new"] {
                let error = check(&at(name)).unwrap_err().to_string();
                assert!(error.contains("a link of another user (number 65534)"), "{error}");
                assert!(write_whole(&at(name), b"report").is_err());
            }
        }
        assert_eq!(fs::read_to_string(at("mine/file")).unwrap(), "old");
        assert!(!at("mine/new").exists());
    }

    #[test]
    fn a_file_of_another_owner_is_not_replaced() {
        if !is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "old").unwrap();
        chown(&path, OTHER, None).unwrap();
        let error = check(&path).unwrap_err().to_string();
        let wanted = "belongs to another user (number 65534); remove it, or name another";
        assert!(error.contains(wanted), "{error}");
        assert!(write_whole(&path, b"report").is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
    }

    #[test]
    fn a_file_that_came_after_the_look_keeps_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for there in [None, Some("old")] {
            let _ = fs::remove_file(&path);
            there.into_iter().for_each(|text| fs::write(&path, text).unwrap());
            let staged = StagedFile::new(&path, b"report").unwrap();
            fs::write(folder.path().join("new"), "new").unwrap();
            fs::rename(folder.path().join("new"), &path).unwrap();
            assert!(staged.publish().is_err());
            assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        }
        // One that went meanwhile is made.
        let staged = StagedFile::new(&path, b"report").unwrap();
        fs::remove_file(&path).unwrap();
        staged.publish().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "report");
        assert_eq!(kinds(folder.path()).len(), 1);
    }

    #[test]
    fn what_is_opened_is_what_was_looked_at() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let socket = std::os::unix::net::UnixListener::bind(at("node")).unwrap();
        let Target::Opened(node) = Target::find(&at("node"), MissingFolder::Refuse).unwrap() else {
            panic!("a socket is no regular file")
        };
        fs::write(at("file"), "old").unwrap();
        fs::remove_file(at("node")).unwrap();
        fs::hard_link(at("file"), at("node")).unwrap();
        assert!(node.append().unwrap_err().to_string().contains("by now"));
        drop(socket);
    }

    #[test]
    fn a_folder_is_never_made_through_another_users_link() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        writable(&at("a/b")).unwrap();
        assert!(at("a/b").is_dir() && kinds(&at("a/b")).is_empty());
        symlink(at("a"), at("link")).unwrap();
        writable(&at("link/own")).unwrap();
        assert!(at("a/own").is_dir());
        if is_root() {
            lchown(at("link"), OTHER, None).unwrap();
            assert!(writable(&at("link/other")).is_err() && !at("a/other").exists());
        }
    }

    #[test]
    fn a_file_that_is_replaced_keeps_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for mode in [0o600, 0o644, 0o666] {
            fs::write(&path, "old").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            write_whole(&path, b"report").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "report");
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        }
    }

    #[test]
    fn a_link_that_comes_and_goes_never_leads_to_another_file() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("all")).unwrap();
        fs::write(at("file"), "old").unwrap();
        if !is_root() {
            return;
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // Of another user before it has the name.
                    let _ = symlink(at("file"), at("all/made"));
                    let _ = lchown(at("all/made"), OTHER, None);
                    let _ = fs::rename(at("all/made"), at("all/out"));
                    let _ = fs::remove_file(at("all/out"));
                }
            });
            for _ in 0..2000 {
                let _ = write_whole(&at("all/out"), b"report");
                assert_eq!(fs::read_to_string(at("file")).unwrap(), "old");
            }
            stop.store(true, Ordering::Relaxed);
        });
        let left = fs::read_dir(at("all")).unwrap().map(|it| it.unwrap().file_name());
        let left: Vec<_> = left.filter(|it| it.to_string_lossy().starts_with(".slat-")).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    #[test]
    fn a_regular_file_is_not_written_through_its_descriptors_path() {
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
