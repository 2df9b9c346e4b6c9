//! Units of samples: how they are printed, and whether noise affects them.

use crate::numbers::{WIDE, seconds, thousands, three_digits, with_wide_spread};
use crate::stats::Summary;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// A unit, by its name in `results.json`. One that is not known here is printed by its name.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(transparent)]
pub struct Unit(Cow<'static, str>);

impl Unit {
    /// Seconds.
    pub const SECONDS: Self = Self(Cow::Borrowed("s"));
    /// Nanoseconds, for a single operation.
    pub const NANOSECONDS: Self = Self(Cow::Borrowed("ns"));
    /// A ratio of two times.
    pub const RATIO: Self = Self(Cow::Borrowed("x"));
    /// Milliseconds in each second of a run.
    pub const SHARE: Self = Self(Cow::Borrowed("ms/s"));
    /// Per cent, of a change or a part.
    pub const PERCENT: Self = Self(Cow::Borrowed("%"));
    /// Rounds of a migration; a slower host needs more of them.
    pub const ROUNDS: Self = Self(Cow::Borrowed("rounds"));
    /// Memory that was copied; a slower host copies more of it.
    pub const MEBIBYTES: Self = Self(Cow::Borrowed("MiB"));
    /// Memory that was copied or written in a second.
    pub const RATE: Self = Self(Cow::Borrowed("MiB/s"));
    /// Seconds of a CPU.
    pub const CPU_SECONDS: Self = Self(Cow::Borrowed("CPU s"));
    /// A count of bytes.
    pub const BYTES: Self = Self(Cow::Borrowed("bytes"));
    /// A count of instructions by an emulator.
    pub const INSTRUCTIONS: Self = Self(Cow::Borrowed("instructions"));
    /// A count of operations.
    pub const OPERATIONS: Self = Self(Cow::Borrowed("operations"));

    /// Returns whether samples are times, ratios of times, or depend on speed.
    pub fn is_timed(&self) -> bool {
        let timed = [
            Self::SECONDS,
            Self::NANOSECONDS,
            Self::RATIO,
            Self::SHARE,
            Self::PERCENT,
            Self::ROUNDS,
            Self::MEBIBYTES,
            Self::CPU_SECONDS,
        ];
        timed.contains(self) || self.is_rate()
    }

    /// Returns whether samples are work done in a second, so that more is better: `MiB/s`,
    /// `faults/s`, and not [`Unit::SHARE`].
    pub fn is_rate(&self) -> bool {
        self.name().ends_with("/s") && *self != Self::SHARE
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Formats a value in this unit: `1.25 ms`, `0.80 ×`, `12.5 MiB`.
    pub fn shown(&self, value: f64) -> String {
        match self.name() {
            "s" => seconds(value),
            "x" => format!("{} ×", three_digits(value)),
            "instructions" => thousands(value as i64),
            "bytes" => format!("{} MiB", thousands((value / f64::from(1 << 20)) as i64)),
            name => format!("{} {name}", three_digits(value)),
        }
    }

    /// Formats the median with its spread, or the least and the most if a median would mislead.
    pub fn with_spread(&self, summary: &Summary) -> String {
        if *self == Self::SECONDS {
            return with_wide_spread(summary);
        }
        match summary.relative_spread().abs() {
            _ if summary.min == summary.max => self.shown(summary.median),
            ..WIDE => {
                let percent = summary.relative_spread().abs() * 100.0;
                format!("{} ±{percent:.0}%", self.shown(summary.median))
            }
            _ => format!("{}–{}", three_digits(summary.min), self.shown(summary.max)),
        }
    }

    /// Formats a value without the unit's name, for headings and axes that have it; times keep
    /// theirs.
    pub fn figure(&self, value: f64) -> String {
        if *self == Self::SECONDS { seconds(value) } else { three_digits(value) }
    }
}

impl From<&str> for Unit {
    fn from(name: &str) -> Self {
        Self(Cow::Owned(name.to_owned()))
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_shown_by_its_units_rule_or_an_unknown_units_name() {
        assert_eq!(Unit::SECONDS.shown(0.001_25), "1.25 ms");
        assert_eq!(Unit::RATIO.shown(0.8), "0.80 ×");
        assert_eq!(Unit::from("M/s").shown(1234.0), "1,234 M/s");
        assert_eq!(Unit::BYTES.shown(f64::from(3 << 20)), "3 MiB");
    }

    #[test]
    fn a_median_is_shown_with_its_spread_regardless_of_its_unit() {
        let shown = |unit: Unit, samples: &[f64]| unit.with_spread(&Summary::of(samples).unwrap());
        assert_eq!(shown(Unit::SHARE, &[40.0, 40.0, 44.0]), "40.0 ms/s ±4%");
        assert_eq!(shown(Unit::PERCENT, &[14.0, 22.0, 70.0]), "14.0–70.0 %");
        assert_eq!(shown(Unit::ROUNDS, &[3.0, 3.0]), "3.00 rounds");
        assert_eq!(shown(Unit::SECONDS, &[1.0, 1.0]), "1.00 s ±0%");
    }

    #[test]
    fn work_in_a_second_is_a_rate_and_time_in_a_second_is_none() {
        assert!(["MiB/s", "faults/s", "M/s"].iter().all(|name| Unit::from(*name).is_rate()));
        assert!(["s", "ms/s", "MiB", "x"].iter().all(|name| !Unit::from(*name).is_rate()));
    }

    #[test]
    fn counts_are_not_timed_and_what_hangs_on_speed_is() {
        assert!(Unit::from("s").is_timed() && Unit::ROUNDS.is_timed());
        assert!(Unit::from("faults/s").is_timed() && Unit::from("CPU s").is_timed());
        assert!(!Unit::BYTES.is_timed() && !Unit::from("faults").is_timed());
        assert_eq!(serde_json::to_string(&Unit::SHARE).unwrap(), "\"ms/s\"");
    }
}
