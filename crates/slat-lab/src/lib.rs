//! What memory management costs guests, measured from user space.
//!
//! A *scenario* measures one thing and returns [`record::Measurement`]s; a [`session::Session`] is
//! how it meets the person in front of it (progress, Ctrl-C, what had to be skipped); [`report`]
//! turns what was measured into a table, `results.json` and `report.html`.

pub mod alternate;
mod arena;
mod child;
pub mod cli;
pub mod compare;
pub mod doctor;
pub mod emulate;
pub mod explain;
pub mod failure;
pub mod files;
mod fill;
pub mod format;
pub mod host;
pub mod known;
mod lines;
pub mod merge;
pub mod numbers;
pub mod plan;
mod random;
pub mod rate;
pub mod record;
pub mod report;
pub mod run;
pub mod scenario;
pub mod session;
pub mod show;
pub mod size;
pub mod stats;
pub mod table;

pub use run::main;
