//! Results as tests for kernel CI: KTAP version 1 (Documentation/dev-tools/ktap.rst).
//!
//! Each measurement is a test, and each skipped part is a skipped test. A test fails if a check
//! failed: a part was tried and failed, three quarters of the rounds missed a threshold, or the run
//! did not end. A time alone never fails.

use super::tables::thresholds::verdict;
use super::text;
use crate::numbers::{list_of_seconds, three_digits, with_spread};
use crate::param::{is_prose, shown};
use crate::record::Measurement;
use crate::record::Report;
use crate::stats::Summary;
use crate::table::NOTHING;
use crate::unit::Unit;
use std::collections::HashMap;
use std::fmt::Write;

/// A result line, and the diagnostics above it.
struct Test {
    name: String,
    passed: bool,
    /// Whether a threshold decided the result.
    judged: bool,
    skipped: Option<String>,
    diagnostics: Vec<String>,
}

/// Renders the report as KTAP.
pub fn render(report: &Report) -> String {
    let tests = tests(report);
    let mut ktap = format!("KTAP version 1\n1..{}\n", tests.len());
    let words = report.command.iter().map(String::as_str);
    let command = shlex::try_join(words).unwrap_or_else(|_| report.command.join(" "));
    report.trust.iter().for_each(|trust| diagnostic(&mut ktap, &trust.line()));
    report.repeated.iter().for_each(|answer| diagnostic(&mut ktap, &answer.line()));
    for line in [format!("{command} (slat {})", report.tool), text::host(report)] {
        diagnostic(&mut ktap, &line);
    }
    for (number, test) in (1..).zip(&tests) {
        // The diagnostics of a test come before its result.
        test.diagnostics.iter().for_each(|line| diagnostic(&mut ktap, line));
        let result = if test.passed { "ok" } else { "not ok" };
        let skipped = test.skipped.as_deref().map(|reason| format!(" # SKIP {}", one_line(reason)));
        let _ = writeln!(ktap, "{result} {number} - {}{}", test.name, skipped.unwrap_or_default());
    }
    ktap
}

fn tests(report: &Report) -> Vec<Test> {
    let mut tests: Vec<Test> = report.results.iter().map(measurement).collect();
    if report.command.iter().any(|word| word == "--quick") {
        let judged = tests.iter_mut().filter(|test| test.judged);
        judged.for_each(|test| {
            test.passed = true;
            test.skipped = Some("thresholds are not meant for the sizes of --quick".to_owned());
        });
    }
    tests.extend(report.skipped.iter().map(|skipped| Test {
        name: name(&skipped.what),
        passed: !skipped.failed,
        judged: false,
        skipped: (!skipped.failed).then(|| skipped.reason.clone()),
        diagnostics: skipped.failed.then(|| skipped.reason.clone()).into_iter().collect(),
    }));
    if report.partial {
        tests.push(Test {
            name: "run to the end".to_owned(),
            passed: false,
            judged: false,
            skipped: None,
            diagnostics: vec!["interrupted: what is here is a part".to_owned()],
        });
    }
    // Tests are followed from run to run by their names.
    let mut seen: HashMap<String, u32> = HashMap::new();
    for test in &mut tests {
        let times = seen.entry(test.name.clone()).or_default();
        *times += 1;
        if *times > 1 {
            let _ = write!(test.name, " ({times})");
        }
    }
    tests
}

fn measurement(m: &Measurement) -> Test {
    let Measurement { scenario, target, variant, params, samples, counts, .. } = m;
    let named = params.iter().filter(|(name, value)| !is_prose(name) && !value.is_null());
    let words = named.map(|(name, value)| format!(" {name}={}", shown(name, Some(value))));
    let name = name(&format!("{scenario} {target} {variant}{}", words.collect::<String>()));
    let mut diagnostics = Vec::new();
    let summary = Summary::of(samples);
    if let Some(summary) = &summary {
        diagnostics.push(figures(summary, &m.unit));
    }
    diagnostics.extend(counts.iter().map(|(name, count)| format!("{name} {count}")));
    let asked = params.get("asked").and_then(|asked| asked.as_f64());
    let verdict = summary.zip(asked).map(|(summary, asked)| verdict(&summary, asked));
    if let (Some(verdict), Some(asked)) = (verdict, asked) {
        diagnostics.push(format!("at most {asked} {}: {verdict}", m.unit));
    }
    let (passed, judged) = (verdict != Some("missed"), verdict.is_some());
    Test { name, passed, judged, skipped: None, diagnostics }
}

fn figures(summary: &Summary, unit: &Unit) -> String {
    let Summary { count, min, max, median, .. } = *summary;
    match (unit.name(), count) {
        ("s", 1) => with_spread(summary),
        ("s", _) => {
            let range = list_of_seconds(&[min, max]).replace(", ", " to ");
            format!("median {}, {range}, {count} samples", with_spread(summary))
        }
        (_, 1) => format!("{} {unit}", three_digits(median)),
        _ => {
            let [median, min, max] = [median, min, max].map(three_digits);
            format!("median {median}, {min} to {max} {unit}, {count} samples")
        }
    }
}

/// Returns a name without `#`, after which a parser looks for a directive.
fn name(text: &str) -> String {
    one_line(&text.replace('#', " no. ").replace(NOTHING, "-"))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn diagnostic(ktap: &mut String, text: &str) {
    for line in text.lines() {
        let _ = writeln!(ktap, "# {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;
    use crate::record::Skipped;

    /// A result as a parser of KTAP sees it: whether it passed, its name, and the reason if it was
    /// skipped.
    type Parsed = (bool, String, Option<String>);

    /// Parses by the rules of the format: version, plan, diagnostics, and results numbered from 1.
    fn parse(text: &str) -> Vec<Parsed> {
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("KTAP version 1"));
        let plan: usize = lines.next().unwrap().strip_prefix("1..").unwrap().parse().unwrap();
        let mut results = Vec::new();
        for line in lines.filter(|line| !line.starts_with("# ")) {
            let (passed, rest) = match line.strip_prefix("not ok ") {
                Some(rest) => (false, rest),
                None => (true, line.strip_prefix("ok ").unwrap_or_else(|| panic!("{line}"))),
            };
            let (number, rest) = rest.split_once(' ').unwrap();
            assert_eq!(number.parse(), Ok(results.len() + 1), "{line}");
            let rest = rest.strip_prefix("- ").unwrap();
            let (name, directive) = match rest.split_once(" # ") {
                Some((name, directive)) => (name, Some(directive)),
                None => (rest, None),
            };
            assert!(!name.contains('#'), "{line}");
            let reason = directive.map(|d| d.strip_prefix("SKIP ").unwrap().to_owned());
            results.push((passed, name.to_owned(), reason));
        }
        assert_eq!(results.len(), plan);
        results
    }

    #[test]
    fn there_is_a_test_for_each_measurement_and_for_each_thing_left_out() {
        let report = fake::report();
        let tests = parse(&render(&report));
        assert_eq!(tests.len(), report.results.len() + report.skipped.len());
        assert!(tests.iter().all(|(passed, ..)| *passed));
        let (_, name, reason) = tests.last().unwrap();
        assert_eq!(name, "dirty-log on hugetlb-2m");
        assert!(reason.as_ref().unwrap().contains("vm.nr_hugepages"));
        let bounded = "split engine bounded backing=2m bbm=0 granule=4k memory=64g target_size=4k \
                       what=split when=enable";
        assert!(tests.iter().any(|(_, name, _)| name == bounded), "{tests:#?}");
    }

    #[test]
    fn no_two_tests_have_the_same_name() {
        let mut report = fake::report();
        report.results.extend(report.results.clone());
        let mut names: Vec<_> =
            parse(&render(&report)).into_iter().map(|(_, name, _)| name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn what_failed_is_not_ok_and_what_was_left_out_is() {
        let skipped = |what: &str, failed| Skipped {
            what: what.to_owned(),
            reason: "it is\nso".to_owned(),
            failed,
        };
        let skipped = vec![skipped("left # out", false), skipped("failed", true)];
        let report = Report { results: Vec::new(), skipped, partial: true, ..fake::report() };
        let expected = [
            (true, "left no. out".to_owned(), Some("it is so".to_owned())),
            (false, "failed".to_owned(), None),
            (false, "run to the end".to_owned(), None),
        ];
        let text = render(&report);
        assert_eq!(parse(&text), expected);
        assert!(text.contains("\n# it is\n# so\nnot ok 2 - failed\n"), "{text}");
    }

    #[test]
    fn a_threshold_that_was_missed_fails_and_one_missed_barely_does_not() {
        let mut report = Report { results: fake::guests(), skipped: Vec::new(), ..fake::report() };
        report.results.retain(|m| m.scenario == "guest-asked");
        let judged = |report: &Report| parse(&render(report))[0].0;
        assert!(judged(&report));
        report.results[0].samples = vec![0.0019, 0.0019, 0.0021, 0.0022, 0.0023];
        assert!(judged(&report));
        assert!(render(&report).contains("missed, barely"));
        report.results[0].samples = vec![0.003; 5];
        assert!(!judged(&report));
        report.command.push("--quick".to_owned());
        let (passed, _, reason) = parse(&render(&report)).remove(0);
        assert!(passed && reason.unwrap().contains("--quick"));
    }
}
