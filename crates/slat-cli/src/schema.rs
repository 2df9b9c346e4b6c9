//! JSON schemas (2020-12) of what the commands print for programs.

use clap::builder::PossibleValuesParser;

/// Each schema: its name, which commands print such JSON, and its text.
const SCHEMAS: &[(&str, &str, &str)] = &[
    ("compare", "slat compare, ab and noise --json", include_str!("../schemas/compare.json")),
    ("doctor", "slat doctor --json", include_str!("../schemas/doctor.json")),
    ("explain", "slat explain --json", include_str!("../schemas/explain.json")),
    ("predict", "slat predict --json", include_str!("../schemas/predict.json")),
    (
        "results",
        "slat bench, tune --json, and results.json",
        include_str!("../schemas/results.json"),
    ),
    ("watch", "slat watch --json", include_str!("../schemas/watch.json")),
    (
        "watch-lines",
        "a line of slat watch --json-lines",
        include_str!("../schemas/watch-lines.json"),
    ),
];

/// Returns what the command line takes.
pub fn names() -> PossibleValuesParser {
    SCHEMAS.iter().map(|(name, ..)| *name).into()
}

/// Returns a schema, or a line for each without a name.
pub fn text(name: Option<&str>) -> String {
    let chosen = SCHEMAS.iter().find(|(this, ..)| name == Some(this));
    let list = || SCHEMAS.iter().map(|(name, what, _)| format!("{name:12} {what}\n")).collect();
    chosen.map_or_else(list, |(.., text)| (*text).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::doctor::report::{Document, Examination};
    use crate::doctor::{examine, fake, verdicts};
    use crate::watch::exposition::{self, Line};
    use crate::watch::report::{Report, WatchEnd};
    use crate::{explain, predict, watch};
    use clap::Parser;
    use schemars::schema_for;
    use serde_json::Value;
    use slat_lab::fake::{fits, published};

    fn check(name: &str, schema: schemars::Schema, text: &str) {
        let schema = published(name, schema.into());
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(fits(&schema, &value), "{name}: {text}");
        assert!(!fits(&schema, &Value::from("no report")), "{name} takes anything");
    }

    #[test]
    fn each_schema_is_that_of_the_types_and_what_is_printed_fits() {
        let guest = watch::fake::guest("qemu");
        let mut report = Report::new(vec![&guest], WatchEnd::Time);
        report.transition_ns = Some(1);
        check("watch", schema_for!(Report<'_>), &report.json().unwrap());
        let lines = [exposition::sample(&guest, &guest.samples[0], 1e9)];
        for line in lines.into_iter().chain([exposition::verdict(&guest, 1e9)]) {
            check("watch-lines", schema_for!(Line<'_>), &line);
        }
        for host in fake::hosts() {
            let findings = examine(&host.evidence());
            let verdicts = verdicts(&findings);
            let json = Examination { findings, verdicts }.json().unwrap();
            check("doctor", schema_for!(Document<'_>), &json);
        }
        let explained = explain::explain(&slat_lab::fake::kvm());
        let json = serde_json::to_string(&explained).unwrap();
        check("explain", schema_for!(Vec<explain::Explanation>), &json);
        let line = "slat predict --memory 64G --vcpus 16 --dirty-rate 2GiB/s --link 25Gbit/s";
        let cli = Cli::parse_from(line.split(' '));
        let Some(Command::Predict(args)) = &cli.command else { panic!("{cli:?}") };
        let json = serde_json::to_string(&predict::all(args).unwrap()).unwrap();
        check("predict", schema_for!(Vec<predict::Prediction>), &json);
    }

    #[test]
    fn every_schema_is_listed_and_printed() {
        assert_eq!(text(None).lines().count(), SCHEMAS.len());
        for (name, _, schema) in SCHEMAS {
            let value: Value = serde_json::from_str(&text(Some(name))).unwrap();
            assert!(value["$schema"].as_str().unwrap().contains("2020-12"), "{schema}");
        }
    }
}
