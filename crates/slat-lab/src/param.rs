//! Parameters of results: their order, their headings, and how their values are written.

use crate::rate::Rate;
use crate::size::Size;
use crate::table::NOTHING;
use serde_json::Value;

/// The form in which the value of a parameter is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// As it is.
    Plain,
    /// Bytes, written as a size.
    Bytes,
    /// Bytes per second.
    Rate,
    /// A number in this unit.
    Of(&'static str),
    /// Bytes; `null` means all at once.
    Chunk,
    /// Prose about a result. It is not part of the result's name, because it does not distinguish
    /// results.
    Prose,
}

/// A known parameter.
struct Param {
    name: &'static str,
    /// The heading of its column; the name with spaces if this is empty.
    heading: &'static str,
    kind: Kind,
}

const fn param(name: &'static str, heading: &'static str, kind: Kind) -> Param {
    Param { name, heading, kind }
}

/// Parameters that need more than their name, in the order in which people ask about them. Others
/// follow by name.
const KNOWN: [Param; 40] = [
    param("host", "", Kind::Plain),
    param("format", "", Kind::Plain),
    param("memory", "", Kind::Bytes),
    param("vcpus", "vCPUs", Kind::Plain),
    param("granule", "", Kind::Bytes),
    param("backing", "pages", Kind::Plain),
    param("target_size", "", Kind::Bytes),
    param("way", "", Kind::Plain),
    param("when", "", Kind::Plain),
    param("what", "", Kind::Plain),
    param("bbm", "BBM level", Kind::Plain),
    param("overlap", "", Kind::Plain),
    param("bits", "dirty of 64", Kind::Plain),
    param("exit_ns", "exit", Kind::Of("ns")),
    param("manual_protect", "manual", Kind::Plain),
    param("initially_set", "", Kind::Plain),
    param("clear_chunk", "", Kind::Chunk),
    param("write_percent", "% written", Kind::Plain),
    param("iterations", "", Kind::Plain),
    param("runs", "", Kind::Plain),
    param("bytes", "", Kind::Bytes),
    param("slots", "", Kind::Plain),
    param("entries", "", Kind::Plain),
    param("asked", "", Kind::Plain),
    param("chunk_size", "", Kind::Bytes),
    param("delay_us", "delay", Kind::Of("µs")),
    param("dirty_rate", "", Kind::Rate),
    param("duration", "", Kind::Of("s")),
    param("eager_split", "", Kind::Bytes),
    param("interval_ms", "interval", Kind::Of("ms")),
    param("limit", "", Kind::Bytes),
    param("link", "", Kind::Rate),
    param("allowed", "memory allowed", Kind::Of("%")),
    param("queue", "", Kind::Bytes),
    param("max_downtime_ms", "max downtime", Kind::Of("ms")),
    param("slot_size", "", Kind::Bytes),
    param("vcpu", "vCPU", Kind::Plain),
    param("command", "", Kind::Prose),
    param("note", "", Kind::Prose),
    param("published", "", Kind::Prose),
];

/// Prose that does not belong in a table.
const MORE_PROSE: [&str; 3] = ["why", "lack", "source"];

/// Number of entries of [`KNOWN`] that come first; the others follow by name.
const ASKED: usize = 24;

fn known(name: &str) -> Option<&'static Param> {
    KNOWN.iter().find(|param| param.name == name)
}

/// Returns the rank of a parameter. Parameters are sorted by it, and then by name.
pub fn rank(name: &str) -> usize {
    KNOWN[..ASKED].iter().position(|param| param.name == name).unwrap_or(ASKED)
}

/// Returns the heading of a parameter's column.
pub fn heading(name: &str) -> String {
    let own = known(name).map(|param| param.heading).filter(|heading| !heading.is_empty());
    own.map_or_else(|| name.replace('_', " "), str::to_owned)
}

/// Returns whether the parameter is prose about a result.
pub fn is_prose(name: &str) -> bool {
    known(name).is_some_and(|param| param.kind == Kind::Prose) || MORE_PROSE.contains(&name)
}

/// Formats a parameter's value as on the command line.
pub fn shown(name: &str, value: Option<&Value>) -> String {
    let kind = known(name).map_or(Kind::Plain, |param| param.kind);
    match (kind, value) {
        (Kind::Chunk, Some(Value::Null)) => "all at once".to_owned(),
        (_, None | Some(Value::Null)) => NOTHING.to_owned(),
        (_, Some(Value::String(text))) => text.clone(),
        (_, Some(Value::Bool(on))) => if *on { "on" } else { "off" }.to_owned(),
        (Kind::Bytes, Some(Value::Number(number))) => {
            number.as_u64().map_or_else(|| number.to_string(), |bytes| Size(bytes).to_string())
        }
        (Kind::Rate, Some(Value::Number(number))) => {
            Rate(number.as_f64().unwrap_or(0.0)).to_string()
        }
        (Kind::Of(unit), Some(number)) => format!("{number} {unit}"),
        (_, Some(other)) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_is_known_once() {
        for (place, param) in KNOWN.iter().enumerate() {
            assert!(KNOWN[..place].iter().all(|other| other.name != param.name), "{}", param.name);
        }
        assert_eq!(KNOWN[ASKED - 1].name, "asked");
    }

    #[test]
    fn a_value_is_written_as_on_the_command_line() {
        assert_eq!(shown("memory", Some(&json!(64u64 << 30))), "64g");
        assert_eq!(shown("clear_chunk", Some(&json!(null))), "all at once");
        assert_eq!(shown("overlap", Some(&json!(true))), "on");
        assert_eq!(shown("backing", None), NOTHING);
        assert_eq!(
            (heading("bbm"), heading("target_size")),
            ("BBM level".into(), "target size".into())
        );
        assert!(rank("memory") < rank("asked") && rank("asked") < rank("link"));
        assert!(is_prose("why") && is_prose("note") && !is_prose("memory"));
    }
}
