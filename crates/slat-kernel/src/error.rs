//! Why an edit cannot be made, with the place at which it was found out.

use std::path::PathBuf;

/// Why an edit cannot be made, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no tree, or it lacks what is needed.
    #[error(
        "{}: {missing} is missing; give the top folder of a Linux source tree, such as \
         linux-source-6.12 unpacked",
        path.display()
    )]
    NoTree {
        /// Where it was looked for.
        path: PathBuf,
        /// The file.
        missing: String,
    },
    /// An edit is not known.
    #[error("no edit is called {name}; {} has {known}", folder.display())]
    NoEdit {
        /// The name that was given.
        name: String,
        /// Where edits are.
        folder: PathBuf,
        /// Their names.
        known: String,
    },
    /// Edits need Coccinelle.
    #[error("edits need Coccinelle: spatch does not run; install the package coccinelle")]
    NoCoccinelle,
    /// A step of an edit is not written as it has to be.
    #[error("{}: {why}", step.display())]
    Malformed {
        /// The file of the step.
        step: PathBuf,
        /// What is wrong with it.
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
        /// What is known of the reason.
        why: String,
    },
    /// The machine around it.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        error: std::io::Error,
    },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        |error| Self::Io { what, error }
    }
}
