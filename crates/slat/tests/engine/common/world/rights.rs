//! Operations that rewrite leaves: protect, relax, clean.

use super::super::Event;
use super::super::hardware::{Hardware, Leaf, Run, Tree};
use super::shape::{maintained, maintenance};
use super::{GuardOf, World, owes};
use slat::{
    Access, Attributes, ChangeError, Execute, Gpa, GpaRange, Interruption, Maintenance, Pages,
    RangeError, Rights, Software,
};

/// A change of leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    WriteProtect,
    ExecuteProtect,
    Exactly(Rights),
    /// Software bits only.
    Mark {
        set: Software,
        clear: Software,
    },
    Clean,
    Relax(Access),
}

impl Rule {
    pub fn call<H: Hardware>(
        self,
        guard: &mut GuardOf<'_, '_, H>,
        range: GpaRange,
    ) -> Result<u64, Interruption<ChangeError>> {
        match self {
            Self::WriteProtect => guard.write_protect(range),
            Self::ExecuteProtect => guard.execute_protect(range),
            Self::Exactly(rights) => guard.protect(range, rights),
            Self::Mark { set, clear } => guard.set_software(range, set, clear),
            Self::Clean => guard.clean(range),
            Self::Relax(access) => {
                guard.relax(range, access).map(slat::LocalFlush::not_needed_here)
            }
        }
    }

    /// Returns whether the range has to cover leaves whole.
    fn whole(self) -> bool {
        self != Self::Relax(Access::Read)
    }

    /// Returns whether a block that already is as the rule wants it is refused where the range cuts
    /// it, and whether a CPU may go on with the old leaf.
    fn stale(self) -> bool {
        !matches!(self, Self::Relax(_) | Self::Mark { .. })
    }

    pub fn of<H: Hardware>(self, leaf: &Leaf, marks: bool) -> Attributes {
        let own = leaf.own;
        match self {
            Self::WriteProtect => Attributes { write: false, ..own },
            Self::ExecuteProtect => Attributes { execute: Execute::None, ..own },
            Self::Exactly(Rights { read, write, execute }) => {
                let dirty = own.dirty || write && !marks;
                Attributes { read, write, execute, dirty, ..own }
            }
            Self::Mark { set, clear } => {
                Attributes { software: own.software.without(clear).union(set), ..own }
            }
            Self::Clean => Attributes { dirty: own.dirty && own.write && !leaf.marks, ..own },
            Self::Relax(Access::Read) => Attributes { accessed: true, ..own },
            Self::Relax(Access::Write) => {
                let read = own.read || H::WRITE_READS;
                Attributes { accessed: true, read, write: true, dirty: true, ..own }
            }
            Self::Relax(fetch) => executed(own, fetch),
        }
    }
}

/// Returns a leaf after a fetch: the level that fetched has the right, and no other level gets it.
fn executed(own: Attributes, fetch: Access) -> Attributes {
    let execute = match (own.execute, fetch) {
        (Execute::None, Access::ExecuteUser) => Execute::User,
        (Execute::None, Access::ExecuteKernel) => Execute::Kernel,
        (Execute::None, _) => Execute::All,
        (Execute::User, Access::ExecuteKernel) => Execute::All,
        (Execute::Kernel, Access::ExecuteUser) => Execute::All,
        (had, _) => had,
    };
    Attributes { accessed: true, execute, ..own }
}

impl<H: Hardware> World<'_, H> {
    pub fn rewrite(&mut self, range: GpaRange, rule: Rule) {
        let before = self.begin();
        let out = self.run(|guard| rule.call::<H>(guard, range));
        let (start, end) = (range.start().0, range.end().0);
        let marks = self.marks();
        let mut legal = self.change_errors(&before, &range, rule.whole());
        if let Rule::Exactly(Rights { read, write, execute }) = rule {
            let leaf = Attributes { read, write, execute, ..Attributes::RAM };
            legal.extend(self.hardware.refuses(leaf).into_iter().map(ChangeError::Attributes));
        }
        if let Rule::Mark { set, clear } = rule {
            let lacks = [set, clear].into_iter().filter_map(H::lacks);
            legal.extend(lacks.map(ChangeError::Attributes));
        }
        if !rule.stale() {
            // A block that has the right already is not refused, even if it is old.
            let edges = [start, end].into_iter().filter_map(|edge| before.at(edge));
            let needs = |run: Run| {
                let size = run.size;
                let cut = [start, end]
                    .iter()
                    .any(|at| super::floor(*at, size) != *at && run.start <= *at && *at < run.end);
                let (of, own) = (rule.of::<H>(&run.leaf, marks), run.leaf.own);
                cut && Attributes { accessed: own.accessed, ..of } != own
            };
            let sizes: Vec<_> = edges.filter(|run| needs(**run)).map(|run| run.size).collect();
            let cuts = |reason: &ChangeError| match reason {
                ChangeError::CutsBlock { size } => sizes.contains(&size.bytes()),
                _ => true,
            };
            legal.retain(cuts);
        }
        if !legal.is_empty() {
            self.refused(&before, &out, start, &legal);
            return;
        }
        // A leaf that the range cuts is made accessed as a whole.
        let first = before.at(start).map_or(start, |run| super::floor(start, run.size));
        let last = before.at(end - 1).map_or(end, |run| super::floor(end - 1, run.size) + run.size);
        let changed = self.changed(&before, first, last, rule);
        self.expect(&changed, rule);
        let bytes = changed.iter().map(Run::bytes).sum::<u64>();
        assert_eq!(out.result, Ok(bytes), "bytes changed");
        assert_eq!(out.counts.bytes_changed, bytes);
        let maintained = maintained(&out.events, Some(&Maintenance::Instructions));
        assert_eq!(maintained, fetched::<H>(&changed, rule), "memory made coherent");
        let seen = bytes == 0 || out.events.last() == Some(&Event::Publish);
        assert!(seen || !matches!(rule, Rule::Relax(_)), "rights unseen");
        let ptes = changed.iter().map(Run::leaves).sum::<u64>();
        assert_eq!(out.counts.entries_written, ptes, "a store a leaf");
        let published = out.events.contains(&Event::Publish);
        assert!(!(published && matches!(rule, Rule::Mark { .. })), "hardware ignores it");
        let owed = if rule.stale() { owes(changed, &[], self.bbm) } else { None };
        assert_eq!(out.owed, owed);
        assert_eq!(out.tree.shape(), before.shape(), "tables");
        assert_eq!(out.tree.leaves(), before.leaves(), "sizes");
        self.settle(&out.tree);
    }

    /// Changes exactly the pages that a bitmap names.
    pub fn pages(&mut self, at: u64, bits: &[u64], clean: bool) {
        let before = self.begin();
        let pages = Pages { start: Gpa(at), bits };
        let out = self.run(|guard| {
            if clean { guard.clean_pages(&pages) } else { guard.write_protect_pages(&pages) }
        });
        let rule = if clean { Rule::Clean } else { Rule::WriteProtect };
        let mut all = Vec::new();
        let mut expected = None;
        for (first, count) in runs(bits) {
            let (offset, bytes) = ((first as u64) << H::PAGE, (count as u64) << H::PAGE);
            let past =
                |start| vec![ChangeError::Range(RangeError::Overflow { start, size: bytes })];
            let Some(start) = at.checked_add(offset) else {
                expected = Some((Gpa(at), past(Gpa(at))));
                break;
            };
            let Ok(range) = GpaRange::new(Gpa(start), bytes) else {
                expected = Some((Gpa(at), past(Gpa(start))));
                break;
            };
            if self.change_errors(&before, &range, true).is_empty() {
                all.extend(self.changed(&before, range.start().0, range.end().0, rule));
                continue;
            }
            // Pages that have a table are done one by one: what is refused may begin behind them.
            let stopped = out.result.map_or_else(|stopped| stopped.at, |_| range.start());
            let at = stopped.0.clamp(start, range.end().0 - 1);
            all.extend(self.changed(&before, start, at, rule));
            let small = |run: Run| run.size == 1 << H::PAGE;
            assert!(before.within(start, at).all(small), "only pages are done one by one");
            let rest = GpaRange::new(Gpa(at), range.end().0 - at).expect("whole pages");
            expected = Some((Gpa(at), self.change_errors(&before, &rest, true)));
            break;
        }
        self.expect(&all, rule);
        match (out.result, expected) {
            (Ok(bytes), None) => assert_eq!(bytes, all.iter().map(Run::bytes).sum::<u64>()),
            (Err(found), Some((at, legal))) => {
                assert!(found.at == at && legal.contains(&found.reason), "{found:?}");
            }
            (found, expected) => panic!("{found:?}, not {expected:?}"),
        }
        let ptes = all.iter().map(Run::leaves).sum::<u64>();
        assert_eq!(out.counts.entries_written, ptes, "a store a leaf");
        assert_eq!(out.counts.bytes_changed, all.iter().map(Run::bytes).sum::<u64>());
        assert_eq!(out.owed, owes(all, &[], self.bbm));
        self.settle(&out.tree);
    }

    /// Returns the leaves of `start..end` that the rule changes.
    fn changed(&self, before: &Tree, start: u64, end: u64, rule: Rule) -> Vec<Run> {
        let marks = self.marks();
        let differs = |run: &Run| rule.of::<H>(&run.leaf, marks) != run.leaf.own;
        before.within(start, end).filter(differs).collect()
    }

    /// Makes the flat model change the same leaves.
    fn expect(&self, changed: &[Run], rule: Rule) {
        let marks = self.marks();
        let mut flat = self.flat.borrow_mut();
        for run in changed {
            let new = rule.of::<H>(&run.leaf, marks);
            flat.within(run.start, run.end).for_each(|(_, piece)| piece.attributes = new);
        }
    }

    /// Returns whether hardware marks writes.
    pub fn marks(&self) -> bool {
        let clean = Attributes { dirty: false, ..Attributes::RAM };
        self.hardware.refuses(clean).is_empty()
    }
}

/// Returns the memory that becomes executable, with neighbours joined.
fn fetched<H: Hardware>(changed: &[Run], rule: Rule) -> Vec<(u64, u64)> {
    let mut memory: Vec<(u64, u64)> = Vec::new();
    let fetches = match rule {
        Rule::Relax(access) => access.is_fetch(),
        Rule::Exactly(rights) => rights.execute != Execute::None,
        _ => false,
    };
    for run in changed.iter().filter(|_| fetches) {
        // Whether hardware marks writes has no influence on execution.
        let new = rule.of::<H>(&run.leaf, true);
        if new.execute == run.leaf.own.execute || maintenance(&new).is_none() {
            continue;
        }
        let end = run.leaf.oa + run.bytes();
        match memory.last_mut() {
            Some(last) if last.1 == run.leaf.oa => last.1 = end,
            _ => memory.push((run.leaf.oa, end)),
        }
    }
    memory
}

/// Returns the maximal runs of set bits.
fn runs(bits: &[u64]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for at in (0..bits.len() * 64).filter(|at| bits[at / 64] >> (at % 64) & 1 == 1) {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == at => *count += 1,
            _ => runs.push((at, 1)),
        }
    }
    runs
}
