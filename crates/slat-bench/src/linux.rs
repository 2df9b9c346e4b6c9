//! Linux's own stage-2 page-table code for arm64, in user space.
//!
//! [`Tree`] is a Linux source tree on this machine. Its `arch/arm64/kvm/hyp/pgtable.c` is compiled
//! unchanged, with its callers cut out of `mmu.c` and `kvm_main.c`, against a stub kernel that has
//! only what they need ([`Workshop`]). The resulting program keeps one guest's tables and takes
//! commands from a pipe ([`Helper`]). [`Edits`] change a copy of the tree before that
//! ([`Tree::with`]).
//!
//! A measurement has the software's own work, including atomic instructions, compiled by this
//! machine's compiler for this machine's CPU. It does not have invalidations, barriers for a
//! walker, cache maintenance and locks, which are counted and not executed, nor effects of other
//! CPUs.
//!
//! Nothing of Linux is part of this crate.

mod compile;
mod cut;
mod edits;
mod helper;
mod tree;

pub use compile::{Build, Workshop};
pub use helper::{Answer, Helper, Leaf, Op, Prot, Run};
pub use slat_kernel::{Edits, Version};
pub use tree::Tree;

use std::path::PathBuf;

/// Reason why a tree's code cannot be used, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no tree, or it lacks a file that is needed.
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
    /// The version is not one that is known to work.
    #[error(
        "{}: this is Linux {version}; its page-table code is known from 6.6 to 7.x. Give such a \
         tree, or allow others by SLAT_ANY_LINUX=1",
        path.display()
    )]
    UnknownVersion {
        /// The tree.
        path: PathBuf,
        /// The version in its Makefile.
        version: String,
    },
    /// A function that calls the walks is not in the file where it is expected.
    #[error(
        "{}: {file} has no function {function}; is the tree patched there? Its callers are cut out \
         by name",
        path.display()
    )]
    NoFunction {
        /// The tree.
        path: PathBuf,
        /// The file.
        file: &'static str,
        /// The function.
        function: &'static str,
    },
    /// No C compiler.
    #[error("no C compiler: {0} does not run; install gcc or clang, or name one by CC")]
    NoCompiler(String),
    /// The tree's code does not compile.
    #[error("{tree}: {file} does not compile:\n{messages}")]
    DoesNotCompile {
        /// The tree.
        tree: String,
        /// The file that does not compile.
        file: String,
        /// The beginning of the compiler's messages.
        messages: String,
    },
    /// An edit is not known, does not fit, or cannot be made here.
    #[error(transparent)]
    Edit(#[from] slat_kernel::Error),
    /// The helper ended, or did not answer.
    #[error("{tree}: {what}")]
    Helper {
        /// The tree.
        tree: String,
        /// Description of the failure.
        what: String,
    },
    /// The tree's own code refused.
    #[error("{tree}: {operation} was refused with errno {errno}")]
    Refused {
        /// The tree.
        tree: String,
        /// The operation.
        operation: String,
        /// Linux's error number.
        errno: i32,
    },
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
    /// An error of the system.
    #[error("{what}: {source}")]
    Io {
        /// The action that failed.
        what: String,
        /// Reason why it failed.
        source: std::io::Error,
    },
}

impl Error {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        |source| Self::Io { what, source }
    }
}
