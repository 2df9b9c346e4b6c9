//! Linux with the user's edits to its KVM.
//!
//! [`Tree`] is a Linux source tree, and [`Edits`] a folder of series of edits: semantic patches,
//! lines for files that no C parser reads, and new files; [`patches`] reads those of other people.
//! [`EditedTree`] is the tree with some of them
//! applied, in memory. [`Build`] builds it from a copy of hard links, and [`Mail`] writes it as a
//! series that `git am` accepts. The tree itself is never written to.
//!
//! This crate contains no code of Linux. It carries the edits of the repository's folder `linux` as
//! data; they are under Linux's licence, GPL-2.0-only. Edited trees exist only on the user's
//! machine.

mod build;
mod config;
mod copy;
mod diff;
mod edited;
mod edits;
mod error;
mod git;
mod mail;
mod object;
mod patches;
mod step;
mod tools;
mod tree;
pub mod vm;

pub use build::{Build, BuiltKernel, Sources};
pub use config::SETS;
pub use edited::{EditedTree, Files};
pub use edits::{Author, Edit, Edits, SELFTESTS, Series};
pub use error::Error;
pub use git::Revision;
pub use mail::Mail;
pub use object::RustObject;
pub use patches::read as patches;
pub use tools::{check_for_selftests, cross_compile, has_sparse, linux_arch};
pub use tree::{Tree, Version};
