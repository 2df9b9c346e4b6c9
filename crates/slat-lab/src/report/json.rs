//! `results.json`.

use crate::record::Report;

/// Renders the report as JSON that ends in a newline. Parameters and counts are in the order of
/// their names, results in the order of the run, so that two runs differ only where the machine
/// did.
pub fn render(report: &Report) -> serde_json::Result<String> {
    serde_json::to_string_pretty(report).map(|text| text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn the_schema_is_the_documented_one() {
        insta::assert_snapshot!(render(&fake::short_report()).unwrap());
    }

    #[test]
    fn a_complete_run_has_these_keys_and_no_others() {
        let value = serde_json::to_value(fake::report()).unwrap();
        let keys: Vec<_> = value.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["command", "host", "results", "schema", "skipped", "tool", "trust"]);
        assert_eq!(value["schema"], 1);
    }
}
