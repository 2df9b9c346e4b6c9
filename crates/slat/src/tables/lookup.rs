//! The way from the root to the entry of an address.

use super::Tables;
use crate::format::{Format, Kind};
use crate::platform::Platform;
use crate::sync::relax;
use crate::table::{self, Pte, pte};
use crate::walk::PATIENCE;
use core::fmt;

/// The last entry that a lookup read. It is two words, which most ABIs return in registers; a
/// larger result would be returned in memory, and every lookup would then store what it found.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Found {
    pub raw: u64,
    pub level: u8,
}

/// An entry that links a table: the table that holds the entry, and the value that was read.
#[derive(Clone, Copy)]
pub(crate) struct Link<'t> {
    pub table: &'t [Pte],
    pub pte: &'t Pte,
    pub raw: u64,
}

/// Where a walk begins. A guard has a copy: a loop of look-ups through one guard keeps it in
/// registers, where fields of the tables would be loaded again for each.
pub(crate) struct Start<'t, P> {
    platform: &'t P,
    /// The root's entries, and their level.
    ptes: &'t [Pte],
    level: u8,
}

impl<P> fmt::Debug for Start<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "level {}", self.level)
    }
}

impl<P: Platform> Start<'_, P> {
    /// [`Tables::lookup`] of any address, which looks once, and returns marked entries, too. Past
    /// the root's entries nothing is mapped.
    #[inline(always)]
    pub fn lookup_any<F: Format>(&self, gpa: u64) -> Found {
        let root = |level| self.ptes.get((gpa >> F::shift(level)) as usize).map_or(0, Pte::load);
        self.lookup_from::<F>(root, gpa)
    }

    /// Follows the root's entry for `gpa`, which `raw` loads. Compiled for each level that a root
    /// can have: the fewer instructions a lookup takes, the more of them a CPU has under way at
    /// once while it waits for memory.
    #[inline(always)]
    fn lookup_from<F: Format>(&self, raw: impl Fn(u8) -> u64, gpa: u64) -> Found {
        match self.level {
            0 if F::LOWEST_ROOT == 0 => self.lookup_below::<F, 0>(raw(0), gpa),
            2 => self.lookup_below::<F, 2>(raw(2), gpa),
            3 => self.lookup_below::<F, 3>(raw(3), gpa),
            4 => self.lookup_below::<F, 4>(raw(4), gpa),
            _ => self.lookup_below::<F, 1>(raw(1), gpa),
        }
    }

    /// Follows the root's entry for `gpa`, of value `raw`. The levels are one straight run of code,
    /// each compiled with its level as a constant.
    #[inline(always)]
    fn lookup_below<F: Format, const ROOT: u8>(&self, mut raw: u64, gpa: u64) -> Found {
        // Loaded once, so that the loads of entries, which depend on each other, do not wait for
        // it.
        let platform = self.platform;
        macro_rules! below {
            ($($level:literal)*) => {$(
                if ROOT >= $level {
                    if F::kind(raw, $level) != Kind::Table {
                        return Found { raw, level: $level };
                    }
                    let (hpa, len) = (F::table_address(raw), F::entries($level - 1));
                    // SAFETY: a linked table has that many entries, and stays allocated while this
                    // walk runs.
                    let ptes = unsafe { table::entries(platform, hpa, len) };
                    raw = pte::<F>(ptes, gpa, $level - 1).load();
                }
            )*};
        }
        below!(4 3 2 1);
        Found { raw, level: 0 }
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    #[inline(always)]
    pub(crate) fn start(&self) -> Start<'_, P> {
        let (ptes, level) = (self.root_entries(), self.geometry.root_level);
        Start { platform: self.platform, ptes, level }
    }

    /// Returns the first entry from the root downwards that links no table.
    ///
    /// The caller is inside a guard, or no thread reclaims. If the entry is retired, the lookup
    /// waits, and starts again, `PATIENCE` times. So it is for calls that look once: others use
    /// [`Tables::lookup_at_once`] or [`Tables::lookup_within`].
    #[inline(always)]
    pub(crate) fn lookup(&self, gpa: u64) -> Found {
        let found = self.lookup_at_once(gpa);
        if found.raw & F::MARK == 0 { found } else { self.lookup_marked::<true>(gpa) }
    }

    #[inline(always)]
    pub(crate) fn lookup_marked<const WAITS: bool>(&self, gpa: u64) -> Found {
        self.lookup_again(gpa, if WAITS { PATIENCE } else { 0 })
    }

    /// [`Tables::lookup`] after it met a mark. It does not unwind, which its C ABI tells callers:
    /// the clean-up of a panic would keep their guards in memory.
    #[cold]
    #[inline(never)]
    extern "C" fn lookup_again(&self, gpa: u64, mut patience: u32) -> Found {
        self.lookup_within(gpa, &mut patience)
    }

    /// [`Tables::lookup`] that waits for as many turns as `patience` has left.
    #[inline]
    pub(crate) fn lookup_within(&self, gpa: u64, patience: &mut u32) -> Found {
        loop {
            let found = self.lookup_at_once(gpa);
            if *patience == 0 || F::kind(found.raw, found.level) != Kind::Retired {
                return found;
            }
            *patience -= 1;
            relax();
        }
    }

    /// [`Tables::lookup`] that looks once, and returns marked entries, too.
    #[inline(always)]
    pub(crate) fn lookup_at_once(&self, gpa: u64) -> Found {
        let start = self.start();
        start.lookup_from::<F>(|level| pte::<F>(start.ptes, gpa, level).load(), gpa)
    }

    /// Returns the lowest table on the way to `gpa` that is at level `to` or above, and its level.
    /// Calls `each` with each link that it follows, and the level of that link, from the root
    /// downwards.
    ///
    /// The caller is inside a guard, or no thread reclaims.
    #[inline(always)]
    pub(crate) fn descend<'t>(
        &'t self,
        gpa: u64,
        to: u8,
        mut each: impl FnMut(u8, Link<'t>),
    ) -> (&'t [Pte], u8) {
        let mut level = self.geometry.root_level;
        let mut table = self.root_entries();
        while level > to {
            let pte = pte::<F>(table, gpa, level);
            let raw = pte.load();
            if F::kind(raw, level) != Kind::Table {
                break;
            }
            each(level, Link { table, pte, raw });
            level -= 1;
            // SAFETY: a linked table has that many entries, and stays allocated: the caller is
            // inside a guard, or knows that no thread reclaims.
            table =
                unsafe { table::entries(self.platform, F::table_address(raw), F::entries(level)) };
        }
        (table, level)
    }

    /// Returns the entry for `gpa` in the table at `level`, if there is such a table. As in
    /// [`Start::lookup_below`], each level is compiled with its level as a constant.
    ///
    /// The caller is inside a guard, or no thread reclaims.
    #[inline(always)]
    pub(crate) fn entry_at(&self, gpa: u64, level: u8) -> Option<&Pte> {
        let (table, _) = self.table_at(gpa, level);
        Some(pte::<F>(table?, gpa, level))
    }

    /// Returns the table at `level` (at most the root's) on the way to `gpa`, if there is one, and
    /// the bits that all entries on the way have.
    #[inline(always)]
    pub(crate) fn table_at(&self, gpa: u64, level: u8) -> (Option<&[Pte]>, u64) {
        let root = self.geometry.root_level;
        debug_assert!(level <= root, "no table is above the root");
        let platform = self.platform;
        let (mut table, mut common) = (self.root_entries(), !0);
        macro_rules! below {
            ($($above:literal)*) => {$(
                if root >= $above && level < $above {
                    let raw = pte::<F>(table, gpa, $above).load();
                    if F::kind(raw, $above) != Kind::Table {
                        return (None, common);
                    }
                    common &= raw;
                    let (hpa, len) = (F::table_address(raw), F::entries($above - 1));
                    // SAFETY: a linked table has that many entries, and stays allocated while this
                    // walk runs.
                    table = unsafe { table::entries(platform, hpa, len) };
                }
            )*};
        }
        below!(4 3 2 1);
        (Some(table), common)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_shown_by_its_level_and_not_with_all_entries() {
        let start = Start { platform: &(), ptes: &[], level: 2 };
        assert_eq!(std::format!("{start:?}"), "level 2");
    }
}
