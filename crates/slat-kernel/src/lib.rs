//! Linux with edits of one's own to its KVM.
//!
//! [`Tree`] is a Linux source tree, [`Edits`] a folder of series of edits: semantic patches, lines
//! for what no C parser reads, new files. [`Edited`] is the tree with some of them applied, in
//! memory; it is built ([`Build`]) from a copy of hard links, and written as a series that `git am`
//! takes ([`Mail`]). The tree itself is never written to.
//!
//! No code of Linux is part of this crate, nor of the edits, which lie in the folder `linux` of the
//! repository under Linux's licence; what they make of a tree is on the user's machine alone.

mod build;
mod config;
mod copy;
mod edited;
mod edits;
mod error;
mod mail;
mod step;
mod tools;
mod tree;

pub use build::{Build, Built};
pub use edited::{Edited, Files};
pub use edits::{Edit, Edits, Series};
pub use error::Error;
pub use mail::{Author, Mail};
pub use tools::{check_for_selftests, cross_compile, linux_arch};
pub use tree::{Tree, Version};
