//! What a run leaves behind, for a person and for a program.

pub mod charts;
pub mod comparison;
pub mod csv;
pub mod doctor;
pub mod html;
pub mod json;
pub mod ktap;
pub mod markdown;
pub mod merged;
pub mod numbers;
pub mod plan;
pub mod tables;
pub mod text;

use crate::host::Host;
use crate::record::{Measurement, Skipped};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The version of the schema of `results.json`. A change that a reader can stumble over counts it up.
pub const SCHEMA: u32 = 1;

/// Everything about one run; `results.json` is this, serialised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Whether Ctrl-C ended the run before it was complete.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
    /// The version of this program.
    pub tool: Cow<'static, str>,
    /// Where it ran.
    pub host: Host,
    /// The command line that does it again.
    pub command: Vec<String>,
    /// What was measured, in the order it was measured in.
    pub results: Vec<Measurement>,
    /// What was not.
    pub skipped: Vec<Skipped>,
}

#[cfg(test)]
pub(crate) mod fake;
