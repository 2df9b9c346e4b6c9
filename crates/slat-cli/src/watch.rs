//! The output of `slat watch`: a table that is redrawn with each sample, lines, and the report.

pub mod exposition;
#[cfg(test)]
pub(crate) mod fake;
pub mod live;
pub mod migration;
pub mod page;
pub mod report;
pub mod serve;
mod stalls;
pub mod timeline;
pub mod verdict;

use slat_kvm::watch::{Metric, Values};
use slat_lab::table::NOTHING;

/// Formats a rate per second.
fn rate(values: &Values, metric: Metric, seconds: f64) -> String {
    let rate = values.get(&metric).map(|count| *count as f64 / seconds);
    rate.filter(|rate| rate.is_finite()).map_or(NOTHING.to_owned(), number)
}

/// Formats a share of the vCPUs' time, in per cent.
fn share(values: &Values, metric: Metric, seconds: f64, vcpus: usize) -> String {
    let share = values.get(&metric).map(|spent| *spent as f64 / 1e7 / seconds);
    let share = share.map(|share| share / vcpus.max(1) as f64).filter(|share| share.is_finite());
    // The threads are read a little later than the clock, or their time is counted in ticks.
    share.map(|share| share.min(100.0)).map_or(NOTHING.to_owned(), |share| format!("{share:.1} %"))
}

/// Formats a size in bytes.
fn size(values: &Values, metric: Metric) -> String {
    values.get(&metric).map_or(NOTHING.to_owned(), |bytes| slat_lab::numbers::bytes(*bytes))
}

/// Formats the share of the process's memory that is in huge pages.
fn coverage(values: &Values) -> String {
    let (huge, all) = (values.get(&Metric::HugeBytes), values.get(&Metric::RssBytes));
    let share = huge.zip(all).filter(|(_, all)| **all > 0);
    share.map_or(NOTHING.to_owned(), |(huge, all)| {
        format!("{:.0} %", 100.0 * *huge as f64 / *all as f64)
    })
}

/// Formats the numbers of existing mappings, by size.
fn mapped(values: &Values) -> String {
    let sizes = [Metric::Pages4k, Metric::Pages2m, Metric::Pages1g];
    let counts = sizes.map(|metric| values.get(&metric).map(u64::to_string));
    match counts.iter().all(Option::is_none) {
        true => NOTHING.to_owned(),
        false => counts.map(|count| count.unwrap_or(NOTHING.to_owned())).join(" / "),
    }
}

/// Formats a number with three significant digits.
fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        ..10.0 => format!("{value:.1}"),
        _ => slat_lab::numbers::thousands(value.round() as i64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_a_dash_and_no_zero() {
        let nothing = Values::new();
        let dashes = [
            rate(&nothing, Metric::Faults, 1.0),
            share(&nothing, Metric::RunningNs, 1.0, 1),
            size(&nothing, Metric::RssBytes),
            coverage(&nothing),
            mapped(&nothing),
        ];
        assert!(dashes.iter().all(|cell| cell == NOTHING), "{dashes:?}");
        let zero =
            Values::from([(Metric::Faults, 0), (Metric::HugeBytes, 5), (Metric::RssBytes, 0)]);
        assert_eq!(
            (rate(&zero, Metric::Faults, 2.0), coverage(&zero)),
            ("0".into(), NOTHING.into())
        );
        assert_eq!(rate(&zero, Metric::Faults, 0.0), NOTHING);
    }

    #[test]
    fn counts_are_shown_per_second_and_times_as_vcpu_shares() {
        let values = Values::from([
            (Metric::Faults, 2500),
            (Metric::RunningNs, 3_000_000_000),
            (Metric::HugeBytes, 3),
            (Metric::RssBytes, 4),
            (Metric::Pages4k, 7),
            (Metric::Pages2m, 1),
        ]);
        assert_eq!(rate(&values, Metric::Faults, 2.0), "1,250");
        assert_eq!(share(&values, Metric::RunningNs, 2.0, 2), "75.0 %");
        assert_eq!(share(&values, Metric::RunningNs, 2.0, 1), "100.0 %");
        assert_eq!((coverage(&values), mapped(&values)), ("75 %".into(), "7 / 1 / –".into()));
    }
}
