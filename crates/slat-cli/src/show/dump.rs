//! Dumps of tables, as runs of leaves. A dump is drawn, or stored in a file.

use serde::{Deserialize, Serialize};
use slat_lab::failure::bad_input;
use slat_lab::size::Size;
use std::fmt;
use std::path::Path;

/// Version of the file format.
pub const VERSION: u32 = 1;

/// Width of the widest guest addresses of any format, in bits.
const MOST_BITS: u32 = 56;

/// The leaves of one guest's tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dump {
    /// [`VERSION`]. The name of this key identifies the file format.
    pub slat_tables: u32,
    /// Format of the tables, or the hypervisor that printed them.
    pub format: String,
    /// Size of the smallest page, in bytes.
    pub page: u64,
    /// The operations that made the tables, if any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<String>,
    /// Leaves in ascending order of their addresses.
    pub leaves: Vec<Run>,
}

/// Adjacent leaves of the same size, rights and marks, whose host addresses are adjacent too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Guest address of the first leaf.
    pub gpa: u64,
    /// Host address of the first leaf, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hpa: Option<u64>,
    /// Size of each leaf, in bytes.
    pub size: u64,
    /// Number of leaves.
    pub count: u64,
    /// Rights of the guest.
    pub rights: Rights,
    /// Whether the leaves are marked accessed.
    pub accessed: bool,
    /// Whether the leaves are marked dirty, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty: Option<bool>,
}

impl Run {
    /// Returns the size of all leaves together, in bytes.
    pub fn bytes(&self) -> u64 {
        self.size * self.count
    }

    /// Returns the address behind the last leaf.
    pub fn end(&self) -> u64 {
        self.gpa + self.bytes()
    }

    /// Returns whether `next` continues this run, so that both can be one.
    pub fn is_continued_by(&self, next: &Self) -> bool {
        let memory = match (self.hpa, next.hpa) {
            (Some(hpa), Some(next)) => hpa + self.bytes() == next,
            (one, other) => one == other,
        };
        let kind = |run: &Self| (run.size, run.rights, run.accessed, run.dirty);
        memory && self.end() == next.gpa && kind(self) == kind(next)
    }

    /// Returns the leaves that overlap `start..end`, as a run of whole leaves.
    fn clipped(&self, start: u64, end: u64) -> Option<Self> {
        let from = start.saturating_sub(self.gpa) / self.size;
        let to = end.saturating_sub(self.gpa).div_ceil(self.size).min(self.count);
        (from < to).then(|| Self {
            gpa: self.gpa + from * self.size,
            hpa: self.hpa.map(|hpa| hpa + from * self.size),
            count: to - from,
            ..self.clone()
        })
    }
}

/// Rights of a guest, written as `rwx`. In place of `x`, `u` is execution by user programs only,
/// and `k` by the guest's kernel only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rights {
    /// Right to read.
    pub read: bool,
    /// Right to write.
    pub write: bool,
    /// Right to execute: `x`, `u`, `k` or `-`.
    pub execute: char,
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flag = |on: bool, flag: char| if on { flag } else { '-' };
        f.pad(&format!("{}{}{}", flag(self.read, 'r'), flag(self.write, 'w'), self.execute))
    }
}

impl From<Rights> for String {
    fn from(rights: Rights) -> Self {
        rights.to_string()
    }
}

impl std::str::FromStr for Rights {
    type Err = String;

    /// Parses rights, with or without dashes: `rwx`, `rw`, `r-x`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut rights = Self { read: false, write: false, execute: '-' };
        let mut last = 0;
        for flag in text.chars() {
            let place = match flag {
                'r' => 1,
                'w' => 2,
                'x' | 'u' | 'k' => 3,
                '-' => continue,
                _ => 0,
            };
            if place <= last {
                return Err(format!("`{text}`: write rights as rwx, rw, rx or r"));
            }
            last = place;
            match flag {
                'r' => rights.read = true,
                'w' => rights.write = true,
                flag => rights.execute = flag,
            }
        }
        if last == 0 {
            return Err(format!("`{text}` is no right at all; write rwx, rw, rx or r, or unmap"));
        }
        Ok(rights)
    }
}

impl TryFrom<String> for Rights {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl Dump {
    /// Creates a dump without leaves.
    pub fn new(format: impl Into<String>, page: u64) -> Self {
        let (operations, leaves) = (Vec::new(), Vec::new());
        Self { slat_tables: VERSION, format: format.into(), page, operations, leaves }
    }

    /// Appends leaves, which must be behind all others.
    pub fn push(&mut self, run: Run) {
        match self.leaves.last_mut() {
            Some(last) if last.is_continued_by(&run) => last.count += run.count,
            _ => self.leaves.push(run),
        }
    }

    /// Returns a dump of the leaves that overlap `start..end`.
    pub fn within(&self, start: u64, end: u64) -> Self {
        let leaves = self.leaves.iter().filter_map(|run| run.clipped(start, end));
        Self { leaves: leaves.collect(), ..self.clone() }
    }

    /// Returns the text of a file, which ends in a newline.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// Returns an error for another text, another version, or leaves that no tables can have.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let dump: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if dump.slat_tables != VERSION {
            return Err(format!("version {} of dumps, not {VERSION}", dump.slat_tables));
        }
        dump.check()?;
        Ok(dump)
    }

    /// Checks that tables can have these leaves: aligned, in order, and without an overlap.
    ///
    /// # Errors
    /// Names the leaves that they cannot have.
    pub(super) fn check(&self) -> Result<(), String> {
        if !self.page.is_power_of_two() || self.page < 4096 {
            return Err(format!("a page of {} bytes", self.page));
        }
        let mut before = 0;
        for run in &self.leaves {
            let at = format!("the leaves at {:#x}", run.gpa);
            if !run.size.is_power_of_two() || run.size < self.page {
                return Err(format!("{at}: {} bytes are no leaf's size", run.size));
            }
            if !run.gpa.is_multiple_of(run.size) {
                return Err(format!("{at} are not aligned to their size, {}", Size(run.size)));
            }
            let end = run.size.checked_mul(run.count).and_then(|bytes| bytes.checked_add(run.gpa));
            if run.count == 0 || end.is_none_or(|end| end > 1 << MOST_BITS) {
                return Err(format!("{at}: there are {} of them", run.count));
            }
            if run.gpa < before {
                return Err(format!("{at} begin before the end of the ones before"));
            }
            before = run.end();
        }
        Ok(())
    }

    /// Reads a file: a dump, or the text of KVM's `stage2_page_tables`. `page` is the page size of
    /// the host that printed the text, which does not say it.
    ///
    /// # Errors
    /// Returns [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) for a file that cannot
    /// be read or is neither.
    pub fn read(path: &Path, page: u64) -> anyhow::Result<Self> {
        let name = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| bad_input(format!("{name}: {error}; give the file of a dump")))?;
        let dump = match text.trim_start().starts_with('{') {
            true => Self::from_json(&text),
            false => super::kvm::parse(&text, page),
        };
        dump.map_err(|why| {
            bad_input(format!(
                "{name}: {why}; give what `slat show --json` wrote, or KVM's stage2_page_tables"
            ))
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns leaves whose host addresses are 1 TiB above their guest addresses.
    pub fn run(gpa: u64, size: u64, count: u64, rights: &str, state: &str) -> Run {
        Run {
            gpa,
            hpa: Some(gpa + (1 << 40)),
            size,
            count,
            rights: rights.parse().unwrap(),
            accessed: state.contains('A'),
            dirty: Some(state.contains('D')),
        }
    }

    #[test]
    fn a_dump_survives_its_file() {
        let mut dump = Dump::new("ept", 4096);
        dump.push(run(0, 2 << 20, 3, "rwx", "AD"));
        dump.push(run(6 << 20, 2 << 20, 1, "rwx", "AD"));
        dump.push(run(8 << 20, 4096, 5, "r-u", ""));
        assert_eq!(dump.leaves.len(), 2, "neighbours that are alike are one run");
        assert_eq!(Dump::from_json(&dump.to_json().unwrap()).unwrap(), dump);
    }

    #[test]
    fn leaves_that_no_tables_have_are_refused() {
        let refused = |run: Run, why: &str| {
            let dump = Dump { leaves: vec![run], ..Dump::new("ept", 4096) };
            let error = Dump::from_json(&dump.to_json().unwrap()).unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        refused(run(4096, 2 << 20, 1, "r", ""), "not aligned");
        refused(run(0, 2048, 1, "r", ""), "2048");
        refused(run(0, 4096, 0, "r", ""), "0 of them");
        refused(run(1 << 55, 1 << 54, 4, "r", ""), "4 of them");
        let two = vec![run(0, 4096, 3, "r", ""), run(4096, 4096, 1, "r", "")];
        let dump = Dump { leaves: two, ..Dump::new("ept", 4096) };
        assert!(Dump::from_json(&dump.to_json().unwrap()).unwrap_err().contains("before"));
        let other = dump.to_json().unwrap().replace("\"slat_tables\": 1", "\"slat_tables\": 7");
        assert!(Dump::from_json(&other).unwrap_err().contains("version 7"));
        assert!(Dump::from_json("{\"schema\": 1}").is_err());
    }

    #[test]
    fn a_part_has_the_leaves_that_reach_into_it() {
        let mut dump = Dump::new("ept", 4096);
        dump.push(run(0, 2 << 20, 8, "rwx", "A"));
        let part = dump.within(3 << 20, 5 << 20).leaves;
        assert_eq!(part, [run(2 << 20, 2 << 20, 2, "rwx", "A")]);
        assert!(dump.within(16 << 20, 1 << 30).leaves.is_empty());
    }

    #[test]
    fn rights_are_written_in_their_order() {
        for (text, shown) in [("rwx", "rwx"), ("rw", "rw-"), ("r-x", "r-x"), ("k", "--k")] {
            assert_eq!(text.parse::<Rights>().unwrap().to_string(), shown);
        }
        for text in ["", "---", "wr", "rr", "rwxy", "rxu"] {
            assert!(text.parse::<Rights>().is_err(), "{text}");
        }
    }
}
