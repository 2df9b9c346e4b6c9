//! The answers of a report in plain words, which come first.

use serde::{Deserialize, Serialize};

/// The answer, and what follows from it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Verdict {
    /// Sentences, the one that matters most first.
    pub says: Vec<String>,
    /// What to set. A setting is here only if the results show that it is better.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub settings: Vec<Setting>,
}

/// What to set somewhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Setting {
    /// Where: `QEMU`, `libvirt`.
    pub of: String,
    /// The line, as it is typed there; or why there is none.
    pub line: String,
}

impl Verdict {
    /// Creates a verdict without settings.
    pub fn of_lines(says: impl IntoIterator<Item = String>) -> Self {
        Self { says: says.into_iter().collect(), settings: Vec::new() }
    }

    /// Returns whether it has neither sentences nor settings.
    pub fn is_empty(&self) -> bool {
        self.says.is_empty() && self.settings.is_empty()
    }
}
