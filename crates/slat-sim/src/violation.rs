//! What the machine reports: which rule was broken, by whom, where, by using what.

use slat::Gpa;
use std::fmt;

/// Which rule was broken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// A translation is, or may be, used that the tables do not hold any more.
    StaleTranslation,
    /// A walk may begin in a table that is not linked there any more.
    StaleWalk,
    /// An access reaches, or may reach, memory that was taken back.
    FreedMemory,
    /// A walk, of hardware or of software, reaches or may reach a table that was given back.
    FreedTable,
    /// A live entry was replaced by another address, memory type or table without a break.
    BreakBeforeMake,
    /// Two sizes of one page are cached, and the CPU does not allow that.
    SizeConflict,
    /// A write that is neither marked in the tables nor known to software.
    LostDirty,
    /// An access that is neither marked in the tables nor known to software.
    LostYoung,
    /// A write goes, or may go, through a right that was said to be revoked.
    RevokedRight,
    /// Somebody sees old bytes: caches were not cleaned or invalidated.
    MissingMaintenance,
    /// A CPU faults for ever on a right that the tables grant.
    Livelock,
    /// A walk reads a table that was not filled.
    Unfilled,
    /// An encoding that the manual reserves, or a walk into what is no table.
    Reserved,
    /// The guest reaches a page table of its own hypervisor.
    TableExposed,
    /// The host, or another guest address, reaches a page that is private, or may; or who owns it
    /// was said wrongly.
    PrivateExposed,
    /// A frame is freed twice, with another size, while loaded, or was written after that.
    BadFree,
}

/// A rule broken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Which.
    pub kind: Kind,
    /// The CPU whose TLB, walk or access it is; `None` for software.
    pub cpu: Option<usize>,
    /// The guest's address, where there is one.
    pub gpa: Option<Gpa>,
    /// What was used, or may be.
    pub used: String,
    /// What should have been.
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

/// Violations in the order in which they were found, each once.
#[derive(Default, Debug)]
pub(crate) struct Log(Vec<Violation>);

impl Log {
    /// Enough to see what is wrong; a broken engine breaks everything afterwards.
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
