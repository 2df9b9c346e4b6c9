//! Linux kernels with edits: finds a source tree, applies the edits, and builds an image.

use crate::cli::{ConfigArgs, EditsArgs, PatchesArgs, TreeArgs, TreeChoice};
use anyhow::Context;
use slat_kernel::vm::{Architecture, SOURCES, Teller, cache_folder, linux_source};
use slat_kernel::{Build, Built, Edited, Edits, Error, Tree};
use slat_lab::failure::{Failure, bad_input};
use slat_lab::session::Session;
use std::path::{Path, PathBuf};

/// A source tree with edits.
#[derive(Debug)]
pub struct Source {
    /// The tree.
    pub tree: Tree,
    /// The files that the edits change.
    pub edited: Edited,
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
        patches: &PatchesArgs,
        session: &Session,
    ) -> anyhow::Result<Self> {
        // What is wrong with a patch is told before a tree is fetched.
        let (patches, notes) = slat_kernel::patches(&patches.paths).map_err(refused)?;
        notes.iter().for_each(|note| session.note(note));
        let tree = tree(&choice.tree, session)?;
        session.say("applying the edits");
        let mut found = match choice.edits.is_empty() {
            true => Vec::new(),
            false => Edits::read(edits.edits.as_deref())
                .and_then(|edits| edits.find(&choice.edits))
                .map_err(refused)?,
        };
        found.extend(patches);
        let edited = Edited::new(&tree, found).map_err(refused)?;
        Ok(Self { tree, edited })
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
    ) -> anyhow::Result<Built> {
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

    /// Returns the path of a copy of the tree that has the edits.
    ///
    /// # Errors
    /// As [`build`](Self::build).
    pub fn copy(&self, arch: Architecture, session: &Session) -> anyhow::Result<PathBuf> {
        self.with(arch, &ConfigArgs::default(), session, |build| build.sources())
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

/// Opens a tree by its path, or by the name of one of Debian's sources.
///
/// # Errors
/// [`Failure::BadInput`] if the name is neither, or an error if the source cannot be fetched.
pub fn tree(name: &str, session: &Session) -> anyhow::Result<Tree> {
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
    Tree::open(&name, &path).map_err(refused)
}

/// Returns the name of the folder that keeps what is built from a tree.
fn kept_as(tree: &Tree) -> String {
    if SOURCES.iter().any(|(name, _)| *name == tree.name) {
        return tree.name.clone();
    }
    let path = tree.path.as_os_str().as_encoded_bytes();
    let name = tree.path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    format!("{name}-{:08x}", crc32fast::hash(path))
}

/// Reads options of a kernel configuration from a file.
fn options(path: &Path) -> anyhow::Result<String> {
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
        | Error::Malformed { .. }
        | Error::Io { .. } => bad_input(error.to_string()),
        error => error.into(),
    }
}
