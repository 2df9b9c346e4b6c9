//! Linux kernels with edits: finds a source tree, applies the edits, and builds an image.

use crate::cli::{ConfigArgs, EditsArgs, PatchesArgs, TreeArgs, TreeChoice};
use anyhow::Context;
use slat_kernel::vm::{Architecture, SOURCES, Teller, cache_folder, linux_source};
use slat_kernel::{Build, BuiltKernel, EditedTree, Edits, Error, Revision, SETS, Sources, Tree};
use slat_lab::failure::{Failure, bad_input};
use slat_lab::session::Session;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A source tree with edits.
#[derive(Debug)]
pub struct Source {
    /// The tree.
    pub tree: Tree,
    /// The files that the edits change.
    pub edited: EditedTree,
    /// Keeps a tree that was taken out of a repository at its revision.
    _lock: Option<File>,
}

impl Source {
    /// Finds a tree, fetches it if it is one of Debian's, and applies the edits to it.
    ///
    /// # Errors
    /// [`Failure::BadInput`] for a tree or an edit that does not exist, or an error for an edit
    /// that does not fit the tree.
    pub fn find(
        choice: &TreeChoice,
        edits: &EditsArgs,
        given: &PatchesArgs,
        session: &Session,
    ) -> anyhow::Result<Self> {
        // What is wrong with a patch is told before a tree is fetched.
        let (patches, notes) = slat_kernel::patches(&given.paths).map_err(refused)?;
        notes.iter().for_each(|note| session.note(note));
        let range = given.range.as_deref().map(|range| ends(&choice.tree, range));
        let range = range.transpose()?;
        let base = range.as_ref().map(|(first, _)| format!("{}@{}", choice.tree, first.commit));
        let (tree, lock) = tree(base.as_deref().unwrap_or(&choice.tree), session)?;
        session.say("applying the edits");
        let mut found = match choice.edits.is_empty() {
            true => Vec::new(),
            false => Edits::read(edits.edits.as_deref())
                .and_then(|edits| edits.find(&choice.edits))
                .map_err(refused)?,
        };
        if let Some((first, last)) = range {
            found.extend(first.edits(&last)?);
        }
        found.extend(patches);
        let edited = EditedTree::new(&tree, found).map_err(refused)?;
        Ok(Self { tree, edited, _lock: lock })
    }

    /// Finds the tree that options name, with its edits and patches.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn of(args: &TreeArgs, session: &Session) -> anyhow::Result<Self> {
        Self::find(&TreeChoice::from(args), &args.edits, &args.patches, session)
    }

    /// Builds the kernel, as far as it is not built already.
    ///
    /// # Errors
    /// See [`Build::run`]. Also returns [`Failure::BadInput`] for a file of options that cannot be
    /// read, or that has other lines.
    pub fn build(
        &self,
        arch: Architecture,
        config: &ConfigArgs,
        session: &Session,
    ) -> anyhow::Result<BuiltKernel> {
        self.with(arch, config, session, |build| build.run())
    }

    /// Compiles KVM's objects and those that the edits touch. Returns the number of commands that
    /// ran.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn objects(
        &self,
        arch: Architecture,
        config: &ConfigArgs,
        session: &Session,
    ) -> anyhow::Result<u64> {
        self.with(arch, config, session, |build| build.objects_only())
    }

    /// Compiles, after each edit in turn, the objects that any edit touches. Returns the number of
    /// commands that ran for each edit.
    ///
    /// # Errors
    /// As [`build`](Self::build); the error names the edit.
    pub fn each(
        &self,
        arch: Architecture,
        config: &ConfigArgs,
        session: &Session,
    ) -> anyhow::Result<Vec<u64>> {
        self.with(arch, config, session, |build| build.each())
    }

    /// Compiles after each edit in turn with additional warnings. Returns those that each adds.
    ///
    /// # Errors
    /// As [`build`](Self::build); the error names the edit.
    pub fn warnings(
        &self,
        arch: Architecture,
        config: &ConfigArgs,
        session: &Session,
    ) -> anyhow::Result<Vec<Vec<String>>> {
        self.with(arch, config, session, |build| build.warnings())
    }

    /// Returns a copy of the tree that has the edits, and nobody else's while it is there.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn copy(
        &self,
        arch: Architecture,
        config: &ConfigArgs,
        session: &Session,
    ) -> anyhow::Result<Sources> {
        self.with(arch, config, session, |build| build.sources())
    }

    fn with<T>(
        &self,
        arch: Architecture,
        config: &ConfigArgs,
        session: &Session,
        run: impl FnOnce(Build<'_>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let options = config.config.as_deref().map(options).transpose()?;
        let stop = session.stop_flag();
        let folder = self.folder()?;
        let build = Build {
            tree: &self.tree,
            edited: &self.edited,
            arch,
            options: options.as_deref().unwrap_or_default(),
            folder: &folder,
            jobs: std::thread::available_parallelism().map_or(1, usize::from),
            stop: &stop,
            tell: Teller { say: &|what| session.say(what), note: &|line| session.note(line) },
        };
        run(build).map_err(|error| interrupted(error, session))
    }

    /// Returns the folder that keeps what is built from this tree.
    ///
    /// # Errors
    /// Returns an error if there is no cache folder.
    pub fn folder(&self) -> anyhow::Result<PathBuf> {
        Ok(cache_folder()?.join("linux").join(kept_as(&self.tree)))
    }
}

/// Returns the revisions of a range, which is written `A..B`.
fn ends(repository: &str, range: &str) -> anyhow::Result<(Revision, Revision)> {
    let wrong = || bad_input(format!("--range {range}: write A..B, such as v6.12..topic"));
    let (first, last) = range.split_once("..").ok_or_else(wrong)?;
    if first.is_empty() || last.starts_with('.') {
        return Err(wrong());
    }
    let last = if last.is_empty() { "HEAD" } else { last };
    let find = |name: &str| {
        Revision::find(Path::new(repository), name)
            .map_err(|error| bad_input(format!("--range {range}: {error:#}")))
    };
    Ok((find(first)?, find(last)?))
}

/// Opens a tree by its path, by the name of one of Debian's sources, or by a repository and a
/// revision, `REPOSITORY@REVISION`. With the last comes a lock that keeps it at that revision.
///
/// # Errors
/// [`Failure::BadInput`] if the name is neither, or an error if the source cannot be fetched.
pub fn tree(name: &str, session: &Session) -> anyhow::Result<(Tree, Option<File>)> {
    let revision = name.rsplit_once('@').filter(|(path, _)| Path::new(path).is_dir());
    if let Some((path, revision)) = revision.filter(|_| !Path::new(name).is_dir()) {
        let revision = Revision::find(Path::new(path), revision)
            .map_err(|error| bad_input(format!("--tree {name}: {error:#}")))?;
        session.say(&format!("taking {name} out of git"));
        let own = kept_name(&std::fs::canonicalize(path)?);
        let folder = cache_folder()?.join("sources").join(format!("{GIT}{own}"));
        let (place, lock) = revision.take_out(&folder)?;
        let mut tree = Tree::open(name, &place).map_err(refused)?;
        tree.commit = Some(revision.commit);
        return Ok((tree, Some(lock)));
    }
    let tell = Teller { say: &|what| session.say(what), note: &|line| session.note(line) };
    let path = linux_source(name, &session.stop_flag(), tell)
        .map_err(|error| interrupted(error, session))
        .with_context(|| format!("--tree {name}"))?;
    let (name, path) = match path {
        Some(path) => (name.to_owned(), path),
        None if Path::new(name).is_dir() => (name.to_owned(), PathBuf::from(name)),
        None => {
            let known = SOURCES.map(|(name, _)| name).join(", ");
            return Err(bad_input(format!(
                "--tree {name}: there is no such folder; give the top folder of a Linux source \
                 tree, or one of {known}"
            )));
        }
    };
    Ok((Tree::open(&name, &path).map_err(refused)?, None))
}

/// Begin of the names of folders with trees of a repository.
const GIT: &str = "git-";

/// Returns the name of the folder that keeps what is built from a tree.
fn kept_as(tree: &Tree) -> String {
    if SOURCES.iter().any(|(name, _)| *name == tree.name) {
        return tree.name.clone();
    }
    let folder = tree.path.parent().and_then(|folder| folder.file_name()?.to_str());
    match folder.filter(|_| tree.commit.is_some()) {
        // All revisions of a repository share their objects.
        Some(folder) => folder.to_owned(),
        None => kept_name(&tree.path),
    }
}

fn kept_name(path: &Path) -> String {
    let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    format!("{name}-{:08x}", crc32fast::hash(path.as_os_str().as_encoded_bytes()))
}

/// Returns a set of options by its name, or reads options of a kernel configuration from a file.
fn options(path: &Path) -> anyhow::Result<String> {
    if let Some((_, text)) = SETS.iter().find(|(name, _)| path == Path::new(name)) {
        return Ok((*text).to_owned());
    }
    let refused = |why: &str| bad_input(format!("--config {}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| refused(&error.to_string()))?;
    let is_option = |line: &str| {
        line.is_empty()
            || line.starts_with('#')
            || (line.starts_with("CONFIG_") && line.contains('='))
    };
    match text.lines().find(|line| !is_option(line.trim())) {
        None => Ok(text),
        Some(line) => Err(refused(&format!("`{line}` is no option such as CONFIG_PREEMPT=y"))),
    }
}

fn interrupted(error: anyhow::Error, session: &Session) -> anyhow::Error {
    if session.interrupted() { Failure::Interrupted.into() } else { error }
}

/// Converts errors of the command line's values to [`Failure::BadInput`].
fn refused(error: Error) -> anyhow::Error {
    match error {
        Error::NoTree { .. }
        | Error::NoEdit { .. }
        | Error::NotTogether { .. }
        | Error::Malformed { .. }
        | Error::Io { .. } => bad_input(error.to_string()),
        error => error.into(),
    }
}
