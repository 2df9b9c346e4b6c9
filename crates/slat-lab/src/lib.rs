//! Laboratory: sessions, samples, statistics, reports, and the command line for them. It
//! does not depend on what is measured.
//!
//! A [`scenario::Scenario`] measures one thing and returns [`record::Measurement`]s. It reports
//! progress, Ctrl-C and skipped parts through a [`session::Session`]. A [`scenario::Program`] has a
//! list of scenarios. [`report`] turns the measurements into a table, `results.json` and
//! `report.html`.

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
pub mod numbers;
pub mod param;
pub mod rate;
pub mod record;
pub mod renderer;
pub mod report;
pub mod run;
pub mod scenario;
pub mod session;
pub mod short;
pub mod size;
pub mod stats;
pub mod table;
pub mod trust;
pub mod turns;
pub mod unit;
pub mod verdict;

/// Version of the programs, with the commit that they were built from.
pub const VERSION: &str = env!("SLAT_VERSION");
