//! Rules: the new value of a leaf whose rights, or software bits, are changed.

use crate::addr::Hpa;
use crate::format::{Access, Accesses, Execute, Format, Rights};

/// A rule by which leaves are rewritten.
pub(crate) trait Rule<F: Format>: Copy {
    /// A leaf with none of these bits stays as it is.
    const QUIET: u64 = !0;
    /// A leaf with any of them changes.
    #[cfg_attr(any(loom, shuttle), allow(dead_code, reason = "models have no runs"))]
    const SURE: bool = false;
    /// A CPU may go on using the right that was taken.
    const STALE: bool = true;
    /// Hardware reads the bits that change.
    const SEEN: bool = true;
    /// A leaf that the range covers in part is refused.
    const WHOLE: bool = true;
    /// Leaves become accessed.
    const TOUCHES: bool = false;
    /// Blocks are refused.
    const PAGES: bool = false;
    /// The right to execute is given: the memory is made coherent for fetches first.
    const EXECUTES: bool = false;

    fn change(&self, raw: u64) -> u64;
}

#[derive(Clone, Copy)]
pub(crate) struct NoWrite;
impl<F: Format> Rule<F> for NoWrite {
    const QUIET: u64 = F::WRITE;
    const SURE: bool = true;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        F::write_protected(raw)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct NoExecute;
impl<F: Format> Rule<F> for NoExecute {
    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        F::execute_protected(raw)
    }
}

/// Rules of a fault: for a read (a leaf that is not accessed is in no TLB), a write, and a fetch.
/// They are only for leaves that have all of the bits given.
#[derive(Clone, Copy)]
pub(crate) struct ForRead<F>(pub(crate) F, pub(crate) u64);
#[derive(Clone, Copy)]
pub(crate) struct ForWrite<F>(pub(crate) F, pub(crate) u64);
#[derive(Clone, Copy)]
pub(crate) struct ForExecute<F>(pub(crate) F, pub(crate) u64, pub(crate) Access);
/// For a set of accesses.
#[derive(Clone, Copy)]
pub(crate) struct ForEach<F>(pub(crate) F, pub(crate) Accesses);
/// A right that is given without a use: leaves do not become accessed.
#[derive(Clone, Copy)]
pub(crate) struct Writable<F>(pub(crate) F, pub(crate) u64);
#[derive(Clone, Copy)]
pub(crate) struct Executable<F>(pub(crate) F, pub(crate) u64, pub(crate) Access);
/// For a write to a page at a host address; also sets software bits.
#[derive(Clone, Copy)]
pub(crate) struct WriteAt<F>(pub(crate) F, pub(crate) Hpa, pub(crate) u64);

/// Sets exactly these rights.
#[derive(Clone, Copy)]
pub(crate) struct Exactly<F>(pub(crate) F, pub(crate) Rights);

/// Sets and clears software bits.
#[derive(Clone, Copy)]
pub(crate) struct SoftwareBitsRule {
    pub(crate) set: u64,
    pub(crate) clear: u64,
}

/// Returns `relaxed` if the leaf `raw` has all bits of `needed`, otherwise `raw`.
#[inline(always)]
fn where_all(raw: u64, needed: u64, relaxed: u64) -> u64 {
    if raw & needed == needed { relaxed } else { raw }
}

impl<F: Format> Rule<F> for ForRead<F> {
    const STALE: bool = false;
    const WHOLE: bool = false;
    const TOUCHES: bool = true;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        where_all(raw, self.1, self.0.relaxed(raw, Access::Read))
    }
}

impl<F: Format> Rule<F> for ForWrite<F> {
    const STALE: bool = false;
    const TOUCHES: bool = true;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        where_all(raw, self.1, self.0.relaxed(raw, Access::Write))
    }
}

impl<F: Format> Rule<F> for ForExecute<F> {
    const STALE: bool = false;
    const TOUCHES: bool = true;
    const EXECUTES: bool = true;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        where_all(raw, self.1, self.0.relaxed(raw, self.2))
    }
}

impl<F: Format> Rule<F> for ForEach<F> {
    const STALE: bool = false;
    const WHOLE: bool = false;
    const TOUCHES: bool = true;
    const EXECUTES: bool = true;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        self.1.iter().fold(raw, |raw, access| self.0.relaxed(raw, access))
    }
}

impl<F: Format> Rule<F> for Writable<F> {
    const STALE: bool = false;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        let relaxed = self.0.relaxed(raw, Access::Write) & !F::ACCESSED | raw & F::ACCESSED;
        let clean = raw & F::DIRTY == 0;
        where_all(raw, self.1, if clean { self.0.cleaned(relaxed) } else { relaxed })
    }
}

impl<F: Format> Rule<F> for WriteAt<F> {
    const STALE: bool = false;
    const TOUCHES: bool = true;
    const PAGES: bool = true;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        if F::leaf_address(raw, 0) == self.1 {
            self.0.relaxed(raw, Access::Write) | self.2
        } else {
            raw
        }
    }
}

impl<F: Format> Rule<F> for Exactly<F> {
    const EXECUTES: bool = true;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        let Self(format, rights) = self;
        let given = match rights.write {
            true => Writable(*format, 0).change(raw),
            false => F::write_protected(raw),
        };
        let to = match rights.execute {
            Execute::None => None,
            Execute::All => Some(Access::Execute),
            Execute::User => Some(Access::ExecuteUser),
            Execute::Kernel => Some(Access::ExecuteKernel),
        };
        let nobody = F::execute_protected(given);
        let executable = to.map_or(nobody, |to| format.relaxed(nobody, to));
        let changed = F::readable(executable, rights.read);
        changed & !F::ACCESSED | raw & F::ACCESSED
    }
}

impl<F: Format> Rule<F> for SoftwareBitsRule {
    const STALE: bool = false;
    const SEEN: bool = false;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        raw & !self.clear | self.set
    }
}

impl<F: Format> Rule<F> for Executable<F> {
    const STALE: bool = false;
    const PAGES: bool = true;
    const EXECUTES: bool = true;

    #[inline(always)]
    fn change(&self, raw: u64) -> u64 {
        if !self.2.is_fetch() {
            return raw;
        }
        let relaxed = self.0.relaxed(raw, self.2) & !F::ACCESSED | raw & F::ACCESSED;
        where_all(raw, self.1, relaxed)
    }
}
