//! The laziest TLB: it caches whatever was valid when it looked, and forgets only what an
//! invalidation names.

use super::TestPlatform;
use super::hardware::{Leaf, Regime, Run, Tree};
use slat::{BreakBeforeMake, Invalidation, Vmid};
use std::collections::BTreeMap;

pub struct Machine {
    pub regime: Regime,
    vmid: Vmid,
    /// Whether the root is loaded: only then are new translations cached.
    loaded: bool,
    tlb: Vec<Run>,
    /// Tables that walk caches may point to, and the addresses that they cover.
    walks: BTreeMap<u64, (u64, u64)>,
}

/// A leaf without what a cached translation does not depend on.
fn cached(run: Run) -> Run {
    Run { leaf: Leaf { af: true, dbm: false, software: 0, ..run.leaf }, ..run }
}

impl Machine {
    pub fn new(regime: Regime, vmid: Vmid) -> Self {
        Self { regime, vmid, loaded: true, tlb: Vec::new(), walks: BTreeMap::new() }
    }

    /// No CPU has the root loaded any more; what is cached stays.
    pub fn unload(&mut self) {
        self.loaded = false;
    }

    pub fn observe(&mut self, memory: &TestPlatform) {
        if !self.loaded {
            return;
        }
        let tree = self.regime.tree(memory);
        for run in tree.runs.into_iter().map(cached) {
            if !self.tlb.contains(&run) {
                self.tlb.push(run);
            }
        }
        self.walks.extend(tree.tables);
    }

    pub fn forget(&mut self, what: &Invalidation) {
        if what.vmid != self.vmid {
            return;
        }
        let (start, end) = what.range.map_or((0, u64::MAX), |r| (r.start().0, r.end().0));
        let named = |size| what.leaf.is_none_or(|hint| hint.bytes() == size);
        let (hit, kept): (Vec<_>, _) = self.tlb.drain(..).partition(|run| named(run.size));
        self.tlb = kept;
        for run in hit {
            self.tlb.extend(run.clip(0, start));
            self.tlb.extend(run.clip(end, u64::MAX));
        }
        // A hint names the level of leaves: what a walk cache holds is of another.
        if what.tables && what.leaf.is_none() {
            self.walks.retain(|_, table| table.1 <= start || end <= table.0);
        }
    }

    pub fn check_free(&self, hpa: u64) {
        assert!(!self.walks.contains_key(&hpa), "a walk cache points to the freed table {hpa:#x}");
    }

    /// Two translations of one address may be cached at once: of two sizes only if the CPU allows
    /// that, of two addresses or memory types never.
    pub fn check_conflicts(&self, tree: &Tree, bbm: BreakBeforeMake) {
        for old in &self.tlb {
            for new in tree.within(old.start, old.end) {
                let same =
                    old.oa(new.start) == new.leaf.oa && old.leaf.mem_attr == new.leaf.mem_attr;
                let size = old.size == new.size || bbm != BreakBeforeMake::Always;
                assert!(same && size, "no break between {old:x?} and {new:x?}");
            }
        }
    }

    /// Everything cached agrees with the tables; a missing right to write is only slow.
    pub fn check_fresh(&mut self, tree: &Tree) {
        for old in &self.tlb {
            let mut covered = 0;
            for new in tree.within(old.start, old.end).map(cached) {
                let weaker = old.leaf.s2ap & !new.leaf.s2ap == 0;
                let leaf = Leaf { oa: old.oa(new.start), s2ap: new.leaf.s2ap, ..old.leaf };
                assert!(
                    weaker && leaf == new.leaf && old.size == new.size,
                    "{old:x?} is stale, now {new:x?}"
                );
                covered += new.end - new.start;
            }
            assert_eq!(covered, old.end - old.start, "{old:x?} is stale, partly unmapped");
        }
        let unlinked = self.walks.keys().find(|table| !tree.tables.contains_key(table));
        assert_eq!(unlinked, None, "a walk cache holds a table that is unlinked");
        self.tlb = tree.runs.iter().copied().map(cached).collect();
    }
}
