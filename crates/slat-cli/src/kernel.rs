//! Linux kernels with edits: from what was asked for to a tree, its edits, and an image.

use crate::cli::{ConfigArgs, TreeChoice};
use anyhow::Context;
use slat_kernel::{Build, Built, Edited, Edits, Error, Tree};
use slat_lab::failure::{Failure, bad_input};
use slat_lab::session::Session;
use slat_vm::{Architecture, SOURCES, Teller, cache_folder, linux_source};
use std::path::{Path, PathBuf};

/// A tree with edits, of which nothing is built yet.
#[derive(Debug)]
pub struct Source {
    /// The tree.
    pub tree: Tree,
    /// It with its edits.
    pub edited: Edited,
}

impl Source {
    /// Finds a tree, fetches it if it is one of Debian's, and applies its edits.
    ///
    /// # Errors
    /// [`Failure::BadInput`] for a tree or an edit that there is not; an edit that does not fit.
    pub fn find(
        choice: &TreeChoice,
        edits: Option<&Path>,
        session: &Session,
    ) -> anyhow::Result<Self> {
        let tree = tree(&choice.tree, session)?;
        let edits = Edits::read(edits).map_err(refused)?;
        session.say("applying the edits");
        let found = edits.find(&choice.edits).map_err(refused)?;
        let edited = Edited::new(&tree, found).map_err(refused)?;
        Ok(Self { tree, edited })
    }

    /// Builds it, or finds it built.
    ///
    /// # Errors
    /// See [`Build::run`]; [`Failure::BadInput`] for a file of options that is none.
    pub fn build(
        &self,
        arch: Architecture,
        config: &ConfigArgs,
        session: &Session,
    ) -> anyhow::Result<Built> {
        self.with(arch, config, session, |build| build.run())
    }

    /// Compiles KVM's objects and those that the edits touch; says how many commands it took.
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

    /// Compiles, after each edit in turn, the objects that any of them touches; says how many
    /// commands each took.
    ///
    /// # Errors
    /// As [`build`](Self::build), with the edit.
    pub fn each(
        &self,
        arch: Architecture,
        config: &ConfigArgs,
        session: &Session,
    ) -> anyhow::Result<Vec<u64>> {
        self.with(arch, config, session, |build| build.each())
    }

    /// Where the tree with its edits is, as a copy.
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

    /// Where what is built of this tree is kept.
    ///
    /// # Errors
    /// There is no cache.
    pub fn folder(&self) -> anyhow::Result<PathBuf> {
        Ok(cache_folder()?.join("linux").join(kept_as(&self.tree)))
    }
}

/// A tree by its path, or by the name of a source of Debian's.
///
/// # Errors
/// [`Failure::BadInput`] if it is neither; or it cannot be fetched.
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

/// The name of the folder in which what is built of a tree is kept.
fn kept_as(tree: &Tree) -> String {
    if SOURCES.iter().any(|(name, _)| *name == tree.name) {
        return tree.name.clone();
    }
    let path = tree.path.as_os_str().as_encoded_bytes();
    let name = tree.path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    format!("{name}-{:08x}", crc32fast::hash(path))
}

/// Options of a configuration, from a file.
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

/// What cannot be right on any machine ends as bad input does.
fn refused(error: Error) -> anyhow::Error {
    match error {
        Error::NoTree { .. } | Error::NoEdit { .. } | Error::Malformed { .. } => {
            bad_input(error.to_string())
        }
        error => error.into(),
    }
}
