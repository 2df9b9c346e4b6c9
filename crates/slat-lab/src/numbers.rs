//! Numbers for people: three digits and a unit.

use crate::stats::Summary;

/// Formats a number of things that `one` names: `1 patch`, `2 patches`.
pub fn several(count: usize, one: &str) -> String {
    let end = match count {
        1 => "",
        _ if one.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{count} {one}{end}")
}

/// Formats seconds in the unit that leaves one to three digits before the point.
pub fn seconds(value: f64) -> String {
    list_of_seconds(&[value])
}

/// Formats several times in the unit that suits the greatest: `0.13, 10.2, 10.2 ms`.
pub fn list_of_seconds(values: &[f64]) -> String {
    let (scale, unit) = match values.iter().fold(0.0, |most: f64, value| most.max(value.abs())) {
        0.0 => (1.0, "s"),
        v if v < 0.999_5e-6 => (1e9, "ns"),
        v if v < 0.999_5e-3 => (1e6, "µs"),
        v if v < 0.999_5 => (1e3, "ms"),
        _ => (1.0, "s"),
    };
    let scaled: Vec<_> = values.iter().map(|value| three_digits(value * scale)).collect();
    format!("{} {unit}", scaled.join(", "))
}

/// Formats three digits; from 1,000 on, all before the point; below 0.1, three after the point.
pub fn three_digits(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 0.099_95 => format!("{value:.3}"),
        v if v < 9.995 => format!("{value:.2}"),
        v if v < 99.95 => format!("{value:.1}"),
        _ => thousands(value.round() as i64),
    }
}

/// Formats an amount of memory: `23.1 GiB`, `320 MiB`.
pub fn bytes(value: u64) -> String {
    let (shift, unit) = if value < 1 << 30 { (20, "MiB") } else { (30, "GiB") };
    let scaled = value as f64 / (1u64 << shift) as f64;
    if scaled.fract() == 0.0 { format!("{scaled} {unit}") } else { format!("{scaled:.1} {unit}") }
}

/// Formats the median and, after `±`, half the interquartile range in per cent of it.
pub fn with_spread(summary: &Summary) -> String {
    if summary.count < 2 {
        return seconds(summary.median);
    }
    format!("{} ±{:.0}%", seconds(summary.median), summary.relative_spread() * 100.0)
}

/// From this relative spread on (half the interquartile range by the median), a median would
/// mislead.
pub const WIDE: f64 = 0.5;

/// Formats the median with its spread, or the least and the most if a median would mislead.
pub fn with_wide_spread(summary: &Summary) -> String {
    if summary.relative_spread().abs() < WIDE {
        return with_spread(summary);
    }
    list_of_seconds(&[summary.min, summary.max]).replace(", ", "–")
}

/// Formats the difference of `value` from `base`, in per cent, with its sign: `−97.3 %`.
pub fn change(value: f64, base: f64) -> String {
    let percent = (value / base - 1.0) * 100.0;
    let sign = if percent < 0.0 { '−' } else { '+' };
    format!("{sign}{:.1} %", percent.abs())
}

/// Formats a number in groups of three digits: `524,800`.
pub fn thousands(value: i64) -> String {
    let digits = value.unsigned_abs().to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3 + 1);
    if value < 0 {
        text.push('−');
    }
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_has_its_spread_or_a_range_where_that_misleads() {
        let shown = |samples: &[f64]| with_wide_spread(&Summary::of(samples).unwrap());
        assert_eq!(shown(&[1.0, 1.0, 1.01]), "1.00 s ±0%");
        assert_eq!(shown(&[0.8, 0.8, 1.0, 1.2, 1.2]), "1.00 s ±20%");
        assert_eq!(shown(&[7e-3, 7e-3, 8e-3, 0.2, 0.2]), "7.00–200 ms");
    }

    #[test]
    fn a_time_has_three_digits_and_the_unit_that_suits_it() {
        let times = [0.0, 2.4e-9, 0.999_7e-6, 23.45e-6, 0.27, 0.999_9, 12.345, 1234.4];
        let text: Vec<_> = times.into_iter().map(seconds).collect();
        let wanted =
            ["0 s", "2.40 ns", "1.00 µs", "23.4 µs", "270 ms", "1.00 s", "12.3 s", "1,234 s"];
        assert_eq!(text, wanted);
    }

    #[test]
    fn times_of_a_list_share_the_unit_of_the_greatest() {
        assert_eq!(list_of_seconds(&[126e-6, 10.2e-3, 0.0]), "0.13, 10.2, 0 ms");
    }

    #[test]
    fn a_change_carries_its_sign() {
        assert_eq!(change(2.67, 100.0), "−97.3 %");
        assert_eq!(change(150.0, 100.0), "+50.0 %");
    }

    #[test]
    fn memory_is_counted_in_mib_or_gib() {
        assert_eq!(
            [320 << 20, 64 << 30, 24_000_000_000].map(bytes),
            ["320 MiB", "64 GiB", "22.4 GiB"]
        );
    }

    #[test]
    fn long_numbers_are_grouped() {
        assert_eq!(thousands(0), "0");
        assert_eq!(thousands(999), "999");
        assert_eq!(thousands(-524_800), "−524,800");
    }

    #[test]
    fn one_sample_has_no_spread_to_show() {
        assert_eq!(with_spread(&Summary::of(&[0.5]).unwrap()), "500 ms");
        assert_eq!(with_spread(&Summary::of(&[0.9, 1.0, 1.1]).unwrap()), "1.00 s ±8%");
    }
}
