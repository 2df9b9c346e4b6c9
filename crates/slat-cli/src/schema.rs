//! JSON schemas (2020-12) of what the commands print for programs.

use crate::doctor::report::Document;
use crate::explain::Explanation;
use crate::predict::Prediction;
use crate::watch::exposition::Line;
use crate::watch::report::Report as WatchedConsole;
use clap::builder::PossibleValuesParser;
use schemars::{Schema, schema_for};
use slat_lab::compare::Comparison;
use slat_lab::record::Report;

/// The name of a schema, which commands print such JSON, and the schema itself.
type Named = (&'static str, &'static str, fn() -> Schema);

const SCHEMAS: [Named; 7] = [
    ("compare", "slat compare, ab and noise --json", || schema_for!(Comparison)),
    ("doctor", "slat doctor --json", || schema_for!(Document<'_>)),
    ("explain", "slat explain --json", || schema_for!(Vec<Explanation>)),
    ("predict", "slat predict --json", || schema_for!(Vec<Prediction>)),
    ("results", "slat bench, tune --json, and results.json", || schema_for!(Report)),
    ("watch", "slat watch --json", || schema_for!(WatchedConsole<'_>)),
    ("watch-lines", "a line of slat watch --json-lines", || schema_for!(Line<'_>)),
];

/// Returns what the command line takes.
pub fn names() -> PossibleValuesParser {
    SCHEMAS.iter().map(|(name, ..)| *name).into()
}

/// Returns a schema, or a line for each without a name.
pub fn text(name: Option<&str>) -> String {
    let chosen = SCHEMAS.iter().find(|(this, ..)| name == Some(this));
    let list = || SCHEMAS.iter().map(|(name, what, _)| format!("{name:12} {what}\n")).collect();
    chosen.map_or_else(list, |(.., schema)| format!("{:#}\n", schema().as_value()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::doctor::report::Examination;
    use crate::doctor::{examine, fake, verdicts};
    use crate::watch::exposition;
    use crate::watch::report::WatchEnd;
    use crate::{explain, predict, watch};
    use clap::Parser;
    use serde_json::Value;
    use slat_lab::fake::fits;

    fn check(name: &str, text: &str) {
        let schema: Value = serde_json::from_str(&super::text(Some(name))).unwrap();
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(fits(&schema, &value), "{name}: {text}");
        assert!(!fits(&schema, &Value::from("no report")), "{name} takes anything");
    }

    #[test]
    fn what_is_printed_fits_its_schema() {
        let guest = watch::fake::guest("qemu");
        let mut report = WatchedConsole::new(vec![&guest], WatchEnd::Time);
        report.transition_ns = Some(1);
        check("watch", &report.json().unwrap());
        let lines = [exposition::sample(&guest, &guest.samples[0], 1e9)];
        for line in lines.into_iter().chain([exposition::verdict(&guest, 1e9)]) {
            check("watch-lines", &line);
        }
        for host in fake::hosts() {
            let findings = examine(&host.evidence());
            let verdicts = verdicts(&findings);
            check("doctor", &Examination { findings, verdicts }.json().unwrap());
        }
        let explained = explain::explain(&slat_lab::fake::kvm());
        check("explain", &serde_json::to_string(&explained).unwrap());
        let line = "slat predict --memory 64G --vcpus 16 --dirty-rate 2GiB/s --link 25Gbit/s";
        let cli = Cli::parse_from(line.split(' '));
        let Some(Command::Predict(args)) = &cli.command else { panic!("{cli:?}") };
        check("predict", &serde_json::to_string(&predict::all(args).unwrap()).unwrap());
    }

    #[test]
    fn every_schema_is_listed_and_printed() {
        assert_eq!(text(None).lines().count(), SCHEMAS.len());
        for (name, ..) in SCHEMAS {
            let value: Value = serde_json::from_str(&text(Some(name))).unwrap();
            assert!(value["$schema"].as_str().unwrap().contains("2020-12"), "{name}");
        }
    }
}
