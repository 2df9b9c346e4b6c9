//! The copy of a tree that kernels are built from: hard links, and the files that edits changed.
//!
//! A link takes no space, and an edit of the tree in place also edits the copy. Files that differ
//! are written to a new file and renamed, so that the tree's own are never written to. A file that
//! did not change keeps its time, so that `make` compiles nothing without need; a changed file gets
//! the current time.

use anyhow::{Context, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Folders that a build in the tree itself leaves behind; `make` refuses sources that have them.
const GENERATED: [&str; 2] = ["include/config", "include/generated"];

/// What differs from the tree: whole files, and `None` for those that are gone.
pub type Changes = BTreeMap<String, Option<Vec<u8>>>;

/// Returns whether a path is no source.
fn is_left_out(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    // Selftests generate headers below tools, but not while their folder exists.
    let of_arch = (path.starts_with("arch/") || path.starts_with("tools/arch/"))
        && path.ends_with("/include/generated");
    path == ".git"
        || path == ".config"
        || GENERATED.contains(&path)
        || of_arch
        || name.ends_with(".o")
        || (name.starts_with('.') && name.ends_with(".cmd"))
}

/// Returns a number that tells a tree with its edits from others, without reading its files: it
/// covers names, lengths and times of the files, or their commit, the whole of edited files, and
/// `how` it is built.
pub fn fingerprint(
    tree: &Path,
    commit: Option<&str>,
    files: &Changes,
    how: &[&str],
    stop: &AtomicBool,
) -> anyhow::Result<u64> {
    let mut hasher = DefaultHasher::new();
    match commit {
        Some(commit) => commit.hash(&mut hasher),
        None => walk(tree, "", stop, &mut |path, found| {
            (path, found.len(), found.mtime(), found.mtime_nsec()).hash(&mut hasher);
            Ok(())
        })?,
    }
    files.hash(&mut hasher);
    how.hash(&mut hasher);
    Ok(hasher.finish())
}

/// Returns a number that tells a tree from others whose Kconfig files, which list the options that
/// exist, have other texts.
///
/// # Errors
/// A folder or such a file cannot be read, or `stop` was set.
pub fn known_options(tree: &Path, stop: &AtomicBool) -> anyhow::Result<u64> {
    let mut hasher = DefaultHasher::new();
    walk(tree, "", stop, &mut |path, found| {
        let name = path.rsplit('/').next().unwrap_or(path);
        if name.starts_with("Kconfig") && found.is_file() {
            let text = fs::read(tree.join(path));
            let text = text.with_context(|| format!("cannot read {}", tree.join(path).display()));
            (path, text?).hash(&mut hasher);
        }
        Ok(())
    })?;
    Ok(hasher.finish())
}

/// Makes `copy` equal to the tree with these files.
///
/// # Errors
/// A folder cannot be read or written, or `stop` was set.
pub fn make(tree: &Path, files: &Changes, copy: &Path, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut known = BTreeSet::new();
    walk(tree, "", stop, &mut |path, found| {
        if !files.contains_key(path) {
            known.insert(path.to_owned());
            same(&tree.join(path), found, &copy.join(path))?;
        }
        Ok(())
    })?;
    for (path, bytes) in files {
        let Some(bytes) = bytes else { continue };
        known.insert(path.clone());
        let place = copy.join(path);
        if fs::read(&place).ok().as_deref() != Some(&**bytes) {
            replace(&place, bytes)?;
            // A script that an edit changed still runs.
            if let Ok(found) = fs::metadata(tree.join(path)) {
                let failed = || format!("cannot write {}", place.display());
                fs::set_permissions(&place, found.permissions()).with_context(failed)?;
            }
        }
    }
    let mut gone = Vec::new();
    walk(copy, "", stop, &mut |path, _| {
        if !known.contains(path) {
            gone.push(copy.join(path));
        }
        Ok(())
    })?;
    for path in gone {
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

/// Calls `of` with every file, including symbolic links, by its path below the top.
fn walk(
    top: &Path,
    below: &str,
    stop: &AtomicBool,
    of: &mut dyn FnMut(&str, &Metadata) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    let folder = top.join(below);
    let failed = || format!("cannot read {}", folder.display());
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(failed)?,
    };
    let mut entries = entries.collect::<Result<Vec<_>, _>>().with_context(failed)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        // No file of Linux has a path that is not text.
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        if is_left_out(&path) {
            continue;
        }
        let found = entry.metadata().with_context(failed)?;
        match found.is_dir() {
            true => walk(top, &path, stop, of)?,
            false => of(&path, &found)?,
        }
    }
    Ok(())
}

/// Makes one file of the copy equal to the tree's.
fn same(from: &Path, found: &Metadata, to: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", to.display());
    let there = fs::symlink_metadata(to).ok();
    if found.is_symlink() {
        let target = fs::read_link(from).with_context(failed)?;
        if fs::read_link(to).ok().as_ref() == Some(&target) {
            return Ok(());
        }
        let _ = fs::remove_file(to);
        fs::create_dir_all(folder_of(to)).with_context(failed)?;
        return std::os::unix::fs::symlink(target, to).with_context(failed);
    }
    let Some(there) = there else {
        fs::create_dir_all(folder_of(to)).with_context(failed)?;
        // The copy is on another file system, or on one without hard links.
        if fs::hard_link(from, to).is_err() {
            fs::copy(from, to).with_context(failed)?;
            let file = fs::File::options().write(true).open(to).with_context(failed)?;
            file.set_modified(found.modified()?).with_context(failed)?;
        }
        return Ok(());
    };
    let is_linked = (there.ino(), there.dev()) == (found.ino(), found.dev());
    let times = |of: &Metadata| (of.len(), of.mtime(), of.mtime_nsec());
    if is_linked || times(&there) == times(found) {
        return Ok(());
    }
    let bytes = fs::read(from).with_context(failed)?;
    if fs::read(to).with_context(failed)? == bytes {
        return Ok(());
    }
    replace(to, &bytes)?;
    fs::set_permissions(to, found.permissions()).with_context(failed)
}

fn folder_of(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new(".")).to_owned()
}

/// Puts a new file in a place, so that the file that was linked there stays unchanged.
fn replace(place: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", place.display());
    let folder = folder_of(place);
    fs::create_dir_all(&folder).with_context(failed)?;
    let mut file = tempfile::NamedTempFile::new_in(folder).with_context(failed)?;
    std::io::Write::write_all(&mut file, bytes).with_context(failed)?;
    file.persist(place).with_context(failed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(text: &str) -> Changes {
        let file = |path: &str, text: &str| (path.to_owned(), Some(text.into()));
        [file("kvm/mmu.c", text), file("kvm/new.c", "n")].into()
    }

    fn tree() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("Makefile", "all:"),
            ("kvm/mmu.c", "old"),
            ("kvm/arm.c", "arm"),
            (".config", "left out"),
            ("arch/arm64/include/generated/a.h", "left out"),
            ("tools/arch/arm64/include/generated/a.h", "left out"),
            ("kvm/.mmu.o.cmd", "left out"),
            ("kvm/mmu.o", "left out"),
        ] {
            let path = tree.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        std::os::unix::fs::symlink("kvm", tree.path().join("link")).unwrap();
        tree
    }

    fn files(folder: &Path) -> Vec<String> {
        let (mut all, stop) = (Vec::new(), AtomicBool::new(false));
        walk(folder, "", &stop, &mut |path, _| {
            all.push(path.to_owned());
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn options_that_come_with_an_edit_or_go_with_it_are_noticed() {
        let (tree, stop) = (tree(), AtomicBool::new(false));
        let copy = tempfile::tempdir().unwrap();
        let known = |edits: &[(&str, &str)]| {
            let edits = edits.iter().map(|(path, text)| ((*path).to_owned(), Some((*text).into())));
            make(tree.path(), &edits.collect(), copy.path(), &stop).unwrap();
            known_options(copy.path(), &stop).unwrap()
        };
        let before = known(&[]);
        assert_eq!(known(&[("kvm/mmu.c", "new")]), before);
        let one = known(&[("kvm/Kconfig", "config A")]);
        let others = known(&[("kvm/Kconfig.debug", "config A"), ("kvm/Kconfig", "config A")]);
        assert!(one != before && others != one && known(&[("kvm/Kconfig", "config B")]) != one);
        assert_eq!(known(&[]), before);
    }

    #[test]
    fn the_tree_is_never_written_to_and_edits_come_and_go() {
        let (tree, stop) = (tree(), AtomicBool::new(false));
        let copy = tempfile::tempdir().unwrap();
        let read = |path: &str| fs::read_to_string(copy.path().join(path)).ok();
        make(tree.path(), &edits("new"), copy.path(), &stop).unwrap();
        assert_eq!(files(copy.path()), ["Makefile", "kvm/arm.c", "kvm/mmu.c", "kvm/new.c", "link"]);
        assert_eq!((read("kvm/mmu.c"), read("kvm/new.c")), (Some("new".into()), Some("n".into())));
        assert_eq!(fs::read_to_string(tree.path().join("kvm/mmu.c")).unwrap(), "old");
        assert!(!copy.path().join(".config").exists() && !copy.path().join("kvm/mmu.o").exists());

        make(tree.path(), &BTreeMap::new(), copy.path(), &stop).unwrap();
        assert_eq!((read("kvm/mmu.c"), read("kvm/new.c")), (Some("old".into()), None));

        let gone = [("kvm/arm.c".to_owned(), None)].into();
        make(tree.path(), &gone, copy.path(), &stop).unwrap();
        assert_eq!(files(copy.path()), ["Makefile", "kvm/mmu.c", "link"]);
        assert!(tree.path().join("kvm/arm.c").exists());
    }

    #[test]
    fn unchanged_files_keep_their_times_and_changed_ones_get_new() {
        let (tree, stop) = (tree(), AtomicBool::new(false));
        let copy = tempfile::tempdir().unwrap();
        let time = |path: &str| fs::metadata(copy.path().join(path)).unwrap().modified().unwrap();
        let old = std::time::SystemTime::UNIX_EPOCH;
        for path in ["kvm/mmu.c", "kvm/arm.c"] {
            let file = fs::File::options().write(true).open(tree.path().join(path)).unwrap();
            file.set_modified(old).unwrap();
        }
        make(tree.path(), &edits("new"), copy.path(), &stop).unwrap();
        let edited = time("kvm/mmu.c");
        assert!(time("kvm/arm.c") == old && edited > old);
        make(tree.path(), &edits("new"), copy.path(), &stop).unwrap();
        assert_eq!(time("kvm/mmu.c"), edited, "the same edit again is no change");
        // A file that loses its edit is older than its object, unless it gets a new time.
        make(tree.path(), &BTreeMap::new(), copy.path(), &stop).unwrap();
        assert!(time("kvm/mmu.c") >= edited);
        // Some editors replace the file.
        fs::remove_file(tree.path().join("kvm/arm.c")).unwrap();
        fs::write(tree.path().join("kvm/arm.c"), "arm, edited").unwrap();
        make(tree.path(), &BTreeMap::new(), copy.path(), &stop).unwrap();
        assert_eq!(fs::read_to_string(copy.path().join("kvm/arm.c")).unwrap(), "arm, edited");
        assert!(time("kvm/arm.c") > old);
    }

    #[test]
    fn a_fingerprint_differs_after_every_change() {
        let (tree, stop) = (tree(), AtomicBool::new(false));
        let built = |files: &Changes, how: &str| {
            fingerprint(tree.path(), None, files, &[how], &stop).unwrap()
        };
        let of = |files: &Changes| built(files, "gcc");
        assert_ne!(of(&BTreeMap::new()), built(&BTreeMap::new(), "another gcc"));
        let (plain, edited) = (of(&BTreeMap::new()), of(&edits("new")));
        assert!(plain == of(&BTreeMap::new()) && plain != edited && edited != of(&edits("newer")));
        fs::write(tree.path().join("kvm/arm.c"), "longer than it was").unwrap();
        assert_ne!(of(&BTreeMap::new()), plain);
    }
}
