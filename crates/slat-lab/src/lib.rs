//! What measuring takes, whatever is measured: sessions, samples, statistics, reports, plans, and
//! the command line of all that.
//!
//! A [`scenario::Scenario`] measures one thing and returns [`record::Measurement`]s; a
//! [`session::Session`] is how it meets the person in front of it (progress, Ctrl-C, what had to be
//! skipped); a [`scenario::Program`] has a list of scenarios; [`report`] turns what was measured
//! into a table, `results.json` and `report.html`.

pub mod alternate;
pub mod child;
pub mod cli;
pub mod compare;
pub mod failure;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod files;
pub mod first;
pub mod host;
pub mod merge;
pub mod numbers;
pub mod param;
pub mod plan;
pub mod rate;
pub mod reader;
pub mod record;
pub mod report;
pub mod run;
pub mod scenario;
pub mod session;
pub mod size;
pub mod stats;
pub mod table;
pub mod trust;
pub mod turns;
pub mod unit;
pub mod verdict;
