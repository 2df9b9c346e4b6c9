//! Mutants that no test can notice, with the reasons: `docs/mutants.txt`.

use super::{Fate, Mutant};
use anyhow::{Context, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// The reasons, by file and change.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Excused(BTreeMap<(String, String), String>);

impl Excused {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path);
        let text = text.with_context(|| path.display().to_string())?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    /// Parses `FILE: CHANGE` with the reason in indented lines below it; `#` begins a comment.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut list = BTreeMap::new();
        let mut last: Option<&mut String> = None;
        for (line, number) in text.lines().zip(1..) {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(reason) = line.strip_prefix("    ") {
                let Some(last) = &mut last else { bail!("line {number}: a reason of nothing") };
                last.push_str(reason);
                continue;
            }
            let entry = line.split_once(": ");
            let (file, change) =
                entry.with_context(|| format!("line {number}: want `FILE: CHANGE`"))?;
            if last.is_some_and(|reason| reason.is_empty()) {
                bail!("line {number}: the entry above it has no reason");
            }
            let entry = list.entry((file.to_owned(), change.to_owned()));
            last = Some(entry.or_insert_with(String::new));
        }
        if last.is_some_and(|reason| reason.is_empty()) {
            bail!("the last entry has no reason");
        }
        Ok(Self(list))
    }

    pub fn has(&self, mutant: &Mutant) -> bool {
        self.0.contains_key(&(mutant.file.clone(), mutant.change.clone()))
    }

    /// Returns the entries for which no mutant exists.
    pub fn without_mutant(&self, listed: &[Mutant]) -> Vec<String> {
        let is = |(file, change): &(String, String)| {
            listed.iter().any(|mutant| mutant.file == *file && mutant.change == *change)
        };
        let gone = self.0.keys().filter(|entry| !is(entry));
        gone.map(|(file, change)| format!("no such mutant any more: {file}: {change}")).collect()
    }

    /// Returns mutants that pass all tests without an excuse, and those that have an excuse and
    /// fail one.
    pub fn wrong(&self, tested: &[(&Mutant, Fate)]) -> Vec<String> {
        let wrong = |&(mutant, fate): &(&Mutant, Fate)| {
            let what = match (fate, self.has(mutant)) {
                (Fate::Missed, false) => "no test notices",
                (Fate::Caught | Fate::Unviable | Fate::Timeout, true) => "excused, and noticed",
                _ => return None,
            };
            Some(format!("{what}: {}: {}", mutant.file, mutant.change))
        };
        tested.iter().filter_map(wrong).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(change: &str) -> Mutant {
        Mutant::named("a.rs", change)
    }

    const LIST: &str = "# A comment.\n\na.rs: replace a with b\n    Both are\n    the same.\n";

    #[test]
    fn a_missed_mutant_needs_an_excuse_and_an_excuse_a_missed_mutant() {
        let list = Excused::parse(LIST).unwrap();
        let (excused, other) = (mutant("replace a with b"), mutant("replace c with d"));
        assert!(list.wrong(&[(&excused, Fate::Missed), (&other, Fate::Caught)]).is_empty());
        assert_eq!(
            list.wrong(&[(&excused, Fate::Caught), (&other, Fate::Missed)]),
            [
                "excused, and noticed: a.rs: replace a with b",
                "no test notices: a.rs: replace c with d"
            ]
        );
    }

    #[test]
    fn an_excuse_without_a_mutant_is_found() {
        let list = Excused::parse(LIST).unwrap();
        assert!(list.without_mutant(&[mutant("replace a with b")]).is_empty());
        let gone = list.without_mutant(&[mutant("replace c with d")]);
        assert_eq!(gone, ["no such mutant any more: a.rs: replace a with b"]);
    }

    #[test]
    fn an_entry_without_a_reason_is_refused() {
        for text in ["a.rs: one\na.rs: two\n    Why.\n", "a.rs: one\n", "    Why.\n", "a.rs\n"] {
            assert!(Excused::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_list_of_the_repository_can_be_read() {
        Excused::read(&crate::root().join("docs/mutants.txt")).unwrap();
    }
}
