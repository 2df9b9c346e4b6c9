//! All thresholds: for each ratio, the most that is allowed.
//!
//! A ratio that fits no row is shown and not judged.

use serde_json::{Map, Value};

/// Guests for which a threshold holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Always,
    /// Guests of at most 16 GiB, whose tables fit into caches in part.
    Small,
    /// Larger guests.
    Large,
    /// Guests on blocks of that size.
    On(&'static str),
}
use Where::{Always, Large, On, Small};

/// The scenario, the name of the ratio, the variants, the variants to compare with; the guests; the
/// most that is allowed.
///
/// In the name of the ratio `*` stands for any text without a comma, in those of variants for any
/// text.
type Threshold = (&'static str, &'static str, &'static str, &'static str, Where, f64);

const ALL: &[Threshold] = &[
    // Operations against the machine's own limit for the same entries.
    ("engine", "split *", "*", "fill-plain", Small, 1.3),
    ("engine", "split *", "*", "fill-plain", Large, 1.5),
    ("engine", "split *, streaming", "*", "fill-plain", Large, 0.8),
    ("engine", "split 2m, two threads by one", "*", "*", Always, 1.2),
    ("engine", "write-protect", "*", "cas", Always, 1.25),
    ("engine", "write-protect, protected already", "*", "read", Small, 2.0),
    ("engine", "write-protect, protected already", "*", "read", Large, 1.5),
    ("engine", "age, all young", "*", "cas", Always, 1.25),
    ("engine", "age, all old", "*", "read", Small, 2.0),
    ("engine", "age, all old", "*", "read", Large, 1.5),
    ("engine", "*, age by tables, 1 % in runs of 32 MiB", "*", "*", Always, 0.05),
    ("engine", "*, age by tables, 1 % scattered", "*", "*", Always, 1.1),
    ("engine", "64 faults beside ageing, p99", "*", "*", Always, 1.15),
    ("engine", "inactive: map a range", "*", "*", Always, 1.5),
    ("engine", "inactive: write-protect", "*", "*", Always, 1.5),
    ("engine", "map one page, guard kept", "*", "cas", Always, 5.0),
    ("engine", "map one page, a guard for each", "*", "cas", Always, 5.0),
    ("engine", "map one page, two threads by one", "*", "*", Always, 1.2),
    ("engine", "translate", "*", "*", Always, 1.1),
    ("engine", "translate, refreshed after each", "*", "*", Always, 1.3),
    ("engine", "translate, a guard for each", "*", "*", Always, 1.3),
    ("engine", "translate, a guard by an exchange for each", "*", "*", Always, 1.1),
    // Nanoseconds.
    ("engine", "enter and leave", "*", "", Always, 5.0),
    ("engine", "enter and leave, two threads by one", "*", "*", Always, 1.2),
    // Other crates, and Linux's own code with exclusive or shared walks. Next, tables with one
    // owner: a crate that drops whole subtrees is compared with the operation that drops them, too.
    ("peers", "inactive, *: map page by page, owned", "*", "*", Always, 1.1),
    ("peers", "inactive, *: map a range, owned", "*", "*", Always, 1.1),
    ("peers", "unmap, *", "*", "*", Always, 1.0),
    ("peers", "inactive, *: unmap unseen, owned", "*", "*", Always, 1.1),
    ("peers", "inactive, 4 levels: look up, owned", "*", "page_table_multiarch", Always, 1.1),
    ("peers", "inactive, *", "*", "*", Always, 1.1),
    ("peers", "split, 4k pages", "slat", "exclusive", Always, 0.01),
    ("peers", "split, * pages", "slat", "exclusive", Small, 0.05),
    ("peers", "split, * pages", "slat", "exclusive", Large, 0.125),
    ("peers", "split, * pages, streaming", "*", "exclusive", Large, 1.0 / 12.0),
    ("peers", "age, all old, * pages", "slat", "exclusive", Always, 0.25),
    ("peers", "map page by page, * pages", "slat", "exclusive", Always, 1.0 / 3.0),
    ("peers", "look up, * pages", "slat", "exclusive", Always, 0.5),
    ("peers", "write-protect, * pages", "slat", "exclusive", Always, 1.1),
    ("peers", "inactive: write-protect, * pages", "slat", "exclusive", Always, 1.0 / 6.0),
    ("peers", "write-protect, * pages", "slat", "shared", Always, 1.0 / 1.5),
    ("peers", "clear the log, * of 64, * pages", "slat", "shared", Always, 1.0 / 1.5),
    ("peers", "clear the log, all dirty, * pages", "slat", "shared", Always, 1.0 / 1.5),
    ("peers", "age, all young, * pages", "slat", "shared", Always, 1.0 / 1.5),
    // Guests of the engine against their baselines.
    ("guest", "faults of executing from all pages", "split", "zap", On("1g"), 0.002),
    ("guest", "time to execute from all pages", "split", "zap", On("1g"), 0.1),
    ("guest", "bytes maintained, by bytes touched past the caches", "*", "*", Always, 2.0),
    ("guest", "clear, two threads by one", "*", "*", Always, 1.2),
    ("guest", "faults, one guest by two apart", "*", "*", Always, 1.1),
    ("guest", "*: p99 of a fault", "free-bitmap", "locked-page", Always, 0.5),
    ("guest", "*: reclaim per page given up", "free-bitmap", "locked-page", Always, 0.7),
    ("guest", "*: time of the guest", "free-bitmap", "locked-page", Always, 1.03),
    ("guest", "*: time of the guest", "free-bitmap", "locked-bitmap", Always, 1.03),
    ("guest", "*: time of the guest", "free-bitmap", "clock", Always, 1.03),
    ("guest", "zipf: refaults", "free-bitmap", "clock", Always, 1.03),
    ("guest", "scan: refaults", "free-bitmap", "clock", Always, 1.03),
    ("guest", "*: refaults", "free-bitmap", "free-recent", Always, 1.02),
    ("guest", "zipf: refaults", "free-bitmap", "belady", Always, 2.4),
    ("guest", "zipf: refaults", "free-bitmap", "no foresight", Always, 1.1),
];

/// Returns the threshold of a ratio with these parameters, which include `variants` and `against`:
/// that of the first row that it fits.
pub fn at_most(scenario: &str, what: &str, params: &Map<String, Value>) -> Option<f64> {
    let text = |name: &str| params.get(name).and_then(Value::as_str).unwrap_or_default();
    let large = params.get("memory").and_then(Value::as_u64).is_some_and(|it| it > 16 << 30);
    let fits = |row: &&Threshold| {
        let &(of, named, variants, against, place, _) = *row;
        let here = match place {
            Always => true,
            Small => !large,
            Large => large,
            On(size) => text("backing") == size,
        };
        of == scenario
            && here
            && is_like(named, what, ',')
            && is_like(variants, text("variants"), '\0')
            && is_side(against, text("against"))
    };
    ALL.iter().find(fits).map(|row| row.5)
}

/// Returns whether a name is the one that a row compares with. Names of Linux's walks have a
/// version.
fn is_side(side: &str, name: &str) -> bool {
    let shared = name.ends_with(", shared");
    match side {
        "exclusive" => name.starts_with("linux") && !shared,
        "shared" => name.starts_with("linux") && shared,
        _ => is_like(side, name, '\0'),
    }
}

/// Returns whether a name fits a pattern, whose `*` stands for any text without `not`.
fn is_like(pattern: &str, name: &str, not: char) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == name };
    let Some(rest) = name.strip_prefix(before) else { return false };
    let ends = rest.char_indices().map(|(at, _)| at).chain([rest.len()]);
    ends.take_while(|at| !rest[..*at].contains(not)).any(|at| is_like(after, &rest[at..], not))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn asked(scenario: &str, what: &str, params: Value) -> Option<f64> {
        at_most(scenario, what, params.as_object().unwrap())
    }

    #[test]
    fn a_threshold_is_found_by_what_is_measured_and_against_what() {
        let of = |gib: u64| json!({ "memory": gib << 30, "against": "fill-plain" });
        assert_eq!(asked("engine", "split 2m", of(8)), Some(1.3));
        assert_eq!(asked("engine", "split 2m", of(64)), Some(1.5));
        assert_eq!(asked("engine", "split 2m, streaming", of(64)), Some(0.8));
        assert_eq!(asked("engine", "split 2m, streaming", of(8)), None);
        assert_eq!(asked("engine", "split 2m, no break needed", of(8)), None);
        let linux =
            |name: &str| json!({ "variants": "slat", "against": name, "memory": 8u64 << 30 });
        let protect = "write-protect, 4k pages";
        assert_eq!(asked("peers", protect, linux("linux-6.12")), Some(1.1));
        assert_eq!(asked("peers", protect, linux("linux-6.12, shared")), Some(1.0 / 1.5));
        let again = "write-protect, protected, 4k pages";
        assert_eq!(asked("peers", again, linux("linux-6.12")), None);
        assert_eq!(asked("peers", "split, 4k pages", linux("linux-6.12")), Some(0.01));
        assert_eq!(asked("peers", "split, 2m pages", linux("linux-6.12")), Some(0.05));
        assert_eq!(asked("guest", "split, 2m pages", linux("linux-6.12")), None);
    }

    #[test]
    fn no_row_hides_behind_one_before_it() {
        for (place, row) in ALL.iter().enumerate() {
            let same = |other: &&Threshold| {
                (other.0, other.1, other.2, other.3) == (row.0, row.1, row.2, row.3)
                    && (other.4 == Always || other.4 == row.4)
            };
            assert!(ALL[..place].iter().find(same).is_none(), "{}: {}", row.0, row.1);
        }
    }

    #[test]
    fn a_star_is_any_text_without_a_comma() {
        assert!(is_like("a *, b", "a x y, b", ',') && is_like("*", "", ','));
        assert!(!is_like("a *", "a x, y", ',') && is_like("*: p99", "zipf: p99", ','));
        assert!(is_like("* of 64, * pages", "3 of 64, 4k pages", ','));
    }
}
