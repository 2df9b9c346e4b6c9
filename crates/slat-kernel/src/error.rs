//! Reasons why an edit cannot be made, with the place of the failure.

use std::path::PathBuf;

/// The reason why an edit cannot be made, with advice.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no tree, or it lacks a file.
    #[error(
        "{}: {missing} is missing; give the top folder of a Linux source tree, such as \
         linux-source-6.12 unpacked",
        path.display()
    )]
    NoTree {
        /// The path that was searched.
        path: PathBuf,
        /// The file.
        missing: String,
    },
    /// No edit has this name.
    #[error("no edit is called {name}; {} has {known}", folder.display())]
    NoEdit {
        /// The name.
        name: String,
        /// The folder of edits.
        folder: PathBuf,
        /// The names of the edits in it.
        known: String,
    },
    /// Two series cannot be in one kernel.
    #[error("{one} and {other} cannot be in one kernel: {why}")]
    NotTogether {
        /// The series that says so.
        one: String,
        /// The other series.
        other: String,
        /// The reason.
        why: String,
    },
    /// Edits need Coccinelle.
    #[error("edits need Coccinelle: spatch does not run; install the package coccinelle")]
    NoCoccinelle,
    /// A step of an edit has a wrong format.
    #[error("{}: {why}", step.display())]
    Malformed {
        /// The file of the step.
        step: PathBuf,
        /// The reason.
        why: String,
    },
    /// An edit does not fit a tree.
    #[error("the edit {edit} does not apply to {tree}: {file}: {why} ({})", step.display())]
    DoesNotApply {
        /// The edit.
        edit: String,
        /// The tree.
        tree: String,
        /// The tree's file.
        file: String,
        /// The step that failed.
        step: PathBuf,
        /// The reason, as far as it is known.
        why: String,
    },
    /// An error of the operating system.
    #[error("{what}: {error}")]
    Io {
        /// The operation.
        what: String,
        /// The error.
        error: std::io::Error,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        |error| Self::Io { what, error }
    }
}
