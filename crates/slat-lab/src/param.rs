//! Parameters of results: their order, their headings, and how their values are written.

use crate::rate::Rate;
use crate::size::Size;
use crate::table::NOTHING;
use serde_json::Value;

/// The form in which the value of a parameter is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
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
}

/// What a parameter is to a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Distinguishes its measurements.
    Label,
    /// Names it: measurements that differ in it have charts of their own.
    Title,
    /// Follows from others, or from the results, and is not shown.
    Derived,
}

/// A parameter that needs more than its name.
#[derive(Clone, Copy, Debug)]
pub struct Param {
    place: u8,
    name: &'static str,
    heading: &'static str,
    kind: Kind,
    role: Role,
}

impl Param {
    /// The same, with another role in charts than that of a label.
    #[must_use]
    pub const fn role(self, role: Role) -> Self {
        Self { role, ..self }
    }
}

/// The place of parameters that follow the others, by name.
pub const LAST: u8 = u8::MAX;

/// Makes a parameter: its place among those of all programs, in the order in which people ask about
/// them; its name; the heading of its column, its name with spaces if this is empty.
pub const fn param(place: u8, name: &'static str, heading: &'static str, kind: Kind) -> Param {
    Param { place, name, heading, kind, role: Role::Label }
}

/// Prose about a result. It is not part of the result's name, because it does not distinguish
/// results.
const PROSE: [&str; 6] = ["command", "lack", "note", "published", "source", "why"];

/// Returns whether the parameter is prose about a result.
pub fn is_prose(name: &str) -> bool {
    PROSE.contains(&name)
}

/// The parameters that need more than their name, in lists of those who measure.
#[derive(Clone, Copy, Debug, Default)]
pub struct Params(pub &'static [&'static [Param]]);

impl Params {
    fn known(self, name: &str) -> Option<&'static Param> {
        self.0.iter().copied().flatten().find(|param| param.name == name)
    }

    /// Returns the parameters that name charts, the first ones before the others.
    pub fn titles(self) -> impl Iterator<Item = &'static str> {
        let titles = self.0.iter().copied().flatten().filter(|param| param.role == Role::Title);
        titles.map(|param| param.name)
    }

    /// Returns what a parameter is to a chart.
    pub fn role(self, name: &str) -> Role {
        self.known(name).map_or(Role::Label, |param| param.role)
    }

    /// Returns the rank of a parameter. Parameters are sorted by it, and then by name.
    pub fn rank(self, name: &str) -> u8 {
        self.known(name).map_or(LAST, |param| param.place)
    }

    /// Returns the heading of a parameter's column.
    pub fn heading(self, name: &str) -> String {
        let own = self.known(name).map(|param| param.heading).filter(|it| !it.is_empty());
        own.map_or_else(|| name.replace('_', " "), str::to_owned)
    }

    /// Formats a parameter's value as on the command line.
    pub fn shown(self, name: &str, value: Option<&Value>) -> String {
        match (self.known(name).map_or(Kind::Plain, |param| param.kind), value) {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_is_written_as_on_the_command_line() {
        const MEMORY: Param = param(1, "memory", "", Kind::Bytes);
        const LEVEL: Param = param(2, "bbm", "BBM level", Kind::Plain);
        const CHUNK: Param = param(LAST, "chunk", "", Kind::Chunk);
        let params = Params(&[&[LEVEL, MEMORY], &[CHUNK]]);
        assert_eq!(params.shown("memory", Some(&json!(64u64 << 30))), "64g");
        assert_eq!(params.shown("chunk", Some(&json!(null))), "all at once");
        assert_eq!(params.shown("overlap", Some(&json!(true))), "on");
        assert_eq!(params.shown("backing", None), NOTHING);
        assert_eq!([params.heading("bbm"), params.heading("a_b")], ["BBM level", "a b"]);
        assert!(params.rank("memory") < params.rank("bbm") && params.rank("bbm") < LAST);
        assert!(is_prose("why") && is_prose("note") && !is_prose("memory"));
    }
}
