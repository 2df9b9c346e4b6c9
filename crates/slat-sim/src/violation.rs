//! The machine's reports: which rule was broken, by which CPU, where, and by what.

use slat::Gpa;
use std::fmt;

/// A rule that can be broken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// A CPU uses, or may use, a translation that the tables do not hold any more.
    StaleTranslation,
    /// A walk may begin at a table that is not linked there any more.
    StaleWalk,
    /// An access reaches, or may reach, memory that was taken back or never given.
    FreedMemory,
    /// A walk, of hardware or of software, reaches or may reach a table that was freed.
    FreedTable,
    /// A live entry was replaced by one with another address, memory type or table, without a
    /// break.
    BreakBeforeMake,
    /// Two sizes of one page are cached, and the CPU does not allow that.
    SizeConflict,
    /// A write is neither marked in the tables nor known to software.
    LostDirty,
    /// An access is neither marked in the tables nor known to software.
    LostYoung,
    /// A write uses, or may use, a right that was said to be revoked.
    RevokedRight,
    /// An access sees old data, because caches were not cleaned or invalidated.
    MissingMaintenance,
    /// A CPU faults for ever on a right that the tables grant.
    Livelock,
    /// A walk reads a table that was not filled.
    Unfilled,
    /// An entry has an encoding that the manual reserves, or a walk leads to memory that is no
    /// table.
    Reserved,
    /// The guest reaches a table of its own hypervisor.
    TableExposed,
    /// The host, or another guest address, reaches or may reach a private page; or the hypervisor's
    /// calls contradict the owner of a page.
    PrivateExposed,
    /// A frame is freed twice, with another size, or while it is loaded; or it was written after
    /// that.
    BadFree,
}

/// A rule that was broken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// The rule.
    pub kind: Kind,
    /// The CPU whose TLB, walk or access broke it; `None` for software.
    pub cpu: Option<usize>,
    /// The guest's address, if there is one.
    pub gpa: Option<Gpa>,
    /// The memory or translation that was used, or may be used.
    pub used: String,
    /// The state that should have held.
    pub expected: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)?;
        match self.cpu {
            Some(cpu) => write!(f, " on CPU {cpu}")?,
            None => write!(f, " by software")?,
        }
        if let Some(gpa) = self.gpa {
            write!(f, " at {gpa}")?;
        }
        write!(f, ": {}; {}", self.used, self.expected)
    }
}

/// Violations in the order in which they were found, without duplicates.
#[derive(Default, Debug)]
pub(crate) struct Log(Vec<Violation>);

impl Log {
    /// Most violations that are kept: a broken engine breaks everything afterwards.
    const MOST: usize = 64;

    pub fn report(
        &mut self,
        kind: Kind,
        cpu: Option<usize>,
        gpa: Option<u64>,
        used: String,
        expected: &str,
    ) {
        let violation =
            Violation { kind, cpu, gpa: gpa.map(Gpa), used, expected: expected.to_owned() };
        if self.0.len() < Self::MOST && !self.0.contains(&violation) {
            self.0.push(violation);
        }
    }

    pub fn take(&mut self) -> Vec<Violation> {
        std::mem::take(&mut self.0)
    }

    pub fn all(&self) -> &[Violation] {
        &self.0
    }
}
