//! Leaves of tables, as runs of those that are alike.

use std::fmt;

/// Adjacent leaves of the same size, rights and marks, whose host addresses are adjacent too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Guest address of the first leaf.
    pub gpa: u64,
    /// Host address of the first leaf.
    pub hpa: u64,
    /// Size of each leaf, in bytes.
    pub size: u64,
    /// Number of leaves.
    pub count: u64,
    /// Rights of the guest.
    pub rights: Rights,
    /// Whether the leaves are marked accessed.
    pub accessed: bool,
    /// Whether the leaves are marked dirty.
    pub dirty: bool,
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

    /// Appends leaves, which must be behind all others.
    pub fn push(self, runs: &mut Vec<Self>) {
        match runs.last_mut() {
            Some(last) if last.is_continued_by(&self) => last.count += self.count,
            _ => runs.push(self),
        }
    }

    /// Returns whether `next` continues this run, so that both can be one.
    fn is_continued_by(&self, next: &Self) -> bool {
        let kind = |run: &Self| (run.size, run.rights, run.accessed, run.dirty);
        self.hpa + self.bytes() == next.hpa && self.end() == next.gpa && kind(self) == kind(next)
    }
}

/// Rights of a guest, written as `rwx`. In place of `x`, `u` is execution by user programs only,
/// and `k` by the guest's kernel only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns leaves whose host addresses are 1 TiB above their guest addresses.
    pub fn run(gpa: u64, size: u64, count: u64, rights: &str, state: &str) -> Run {
        Run {
            gpa,
            hpa: gpa + (1 << 40),
            size,
            count,
            rights: rights.parse().unwrap(),
            accessed: state.contains('A'),
            dirty: state.contains('D'),
        }
    }

    #[test]
    fn neighbours_that_are_alike_are_one_run() {
        let mut runs = Vec::new();
        run(0, 2 << 20, 3, "rwx", "AD").push(&mut runs);
        run(6 << 20, 2 << 20, 1, "rwx", "AD").push(&mut runs);
        run(8 << 20, 4096, 5, "r-u", "").push(&mut runs);
        assert_eq!(runs, [run(0, 2 << 20, 4, "rwx", "AD"), run(8 << 20, 4096, 5, "r-u", "")]);
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
