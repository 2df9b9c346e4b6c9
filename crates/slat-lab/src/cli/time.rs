//! Times on the command line. Each has a unit, such as `500ms`, `5s` or `2m`.

use std::time::Duration;

const DAY: Duration = Duration::from_secs(86_400);

/// Returns a parser of times from `least` to a day.
pub fn at_least(least: Duration) -> impl Fn(&str) -> Result<Duration, String> + Clone {
    move |text| {
        let text = text.trim();
        if text.parse::<f64>().is_ok() {
            return Err(format!("`{text}` has no unit; write {text}s, {text}ms or {text}m"));
        }
        // The library does not accept fractions of a unit, such as 0.5s.
        let time = part(text).or_else(|| humantime::parse_duration(text).ok());
        let within = time.filter(|time| (least..=DAY).contains(time));
        within.ok_or_else(|| {
            let least = humantime::format_duration(least);
            format!("`{text}` is no time from {least} to a day; write it as 90s, 500ms or 5m")
        })
    }
}

/// Parses a time, which may be zero.
pub fn any(text: &str) -> Result<Duration, String> {
    at_least(Duration::ZERO)(text)
}

/// Parses a time of 1 ms or more.
pub fn some(text: &str) -> Result<Duration, String> {
    at_least(Duration::from_millis(1))(text)
}

/// Parses a time of 50 ms or more, in which a guest can run.
pub fn run(text: &str) -> Result<Duration, String> {
    at_least(Duration::from_millis(50))(text)
}

fn part(text: &str) -> Option<Duration> {
    let units = [("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let (number, unit) =
        units.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))?;
    let seconds = number.trim_end().parse::<f64>().ok()? * unit;
    (0.0..1e9).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit_and_may_be_a_part_of_it() {
        let cases =
            [("90s", 90_000), ("5m", 300_000), ("500ms", 500), ("0.2s", 200), ("1h", 3_600_000)];
        for (text, millis) in cases {
            assert_eq!(run(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(any("1m 30s"), Ok(Duration::from_secs(90)));
        assert_eq!(any("10us"), Ok(Duration::from_micros(10)));
        assert_eq!(any("0s"), Ok(Duration::ZERO));
    }

    #[test]
    fn a_number_without_a_unit_is_refused_with_examples_of_units() {
        for text in ["5", "0.5"] {
            let error = any(text).unwrap_err();
            assert!(error.contains(&format!("write {text}s, {text}ms")), "{error}");
        }
    }

    #[test]
    fn what_is_no_time_or_too_short_or_too_long_is_refused() {
        for text in ["", "soon", "-1s", "0s", "49ms", "25h", "1e99s", "5x"] {
            assert!(run(text).unwrap_err().contains("90s, 500ms"), "{text}");
        }
        assert!(some("0s").unwrap_err().contains("1ms"));
    }
}
