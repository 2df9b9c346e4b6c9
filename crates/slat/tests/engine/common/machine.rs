//! The laziest TLB: it caches every translation that was valid when it looked, and drops only those
//! that an invalidation names.

use super::TestPlatform;
use super::hardware::{Hardware, Leaf, Root, Run, Table, Tree};
use slat::{Attributes, BreakBeforeMake, Execute, Invalidation, Software, Vmid};
use std::collections::BTreeMap;

/// The entries that the MMU finds in a part of the tables.
type Look = Box<dyn Fn(&TestPlatform, (u64, u64)) -> Tree>;

pub struct Machine {
    vmid: Vmid,
    look: Look,
    entry_size: fn(u64) -> u64,
    /// Whether the root is loaded: only then does it cache new translations.
    loaded: bool,
    tlb: Vec<Run>,
    /// Tables that walk caches may point to, and the addresses that they cover. The MMU has walked
    /// through those that are `reached`; it may have fetched any.
    walks: BTreeMap<u64, Table>,
}

/// A leaf, without the parts that a cached translation does not depend on. `dirty` says whether a
/// write leaves no trace, `reached` whether the MMU has used the leaf.
fn cached(run: Run) -> Run {
    let Leaf { own, reached, .. } = run.leaf;
    let own =
        Attributes { dirty: run.leaf.unmarked(), accessed: true, software: Software::NONE, ..own };
    let reached = reached && run.leaf.own.accessed;
    Run { leaf: Leaf { own, marks: false, reached, ..run.leaf }, ..run }
}

/// Returns whether the first rights (`dirty`: to write without a trace) are included in the second.
fn weaker(old: &Attributes, new: &Attributes) -> bool {
    let execute =
        old.execute == new.execute || old.execute == Execute::None || new.execute == Execute::All;
    old.read <= new.read && old.write <= new.write && old.dirty <= new.dirty && execute
}

impl Machine {
    pub fn new<H: Hardware>(hardware: H, vmid: Vmid) -> Self {
        let look: Look = Box::new(move |memory, (start, end)| hardware.part(memory, start, end));
        let (tlb, walks) = (Vec::new(), BTreeMap::new());
        Self { vmid, look, entry_size: H::entry_size, loaded: true, tlb, walks }
    }

    /// No CPU has the root loaded any more; cached entries stay.
    pub fn unload(&mut self) {
        self.loaded = false;
    }

    pub fn observe(&mut self, memory: &TestPlatform, range: (u64, u64)) {
        if !self.loaded {
            return;
        }
        let tree = (self.look)(memory, range);
        for run in tree.runs.into_iter().map(cached) {
            if !self.tlb.contains(&run) {
                self.tlb.push(run);
            }
        }
        for (hpa, table) in tree.tables {
            let known = self.walks.entry(hpa).or_insert(table);
            known.reached |= table.reached;
        }
    }

    /// Returns the lowest table for `gpa` that the MMU has walked through and still has cached.
    pub fn walk<H: Hardware>(&self, gpa: u64) -> Option<Root> {
        let held = self.walks.iter().filter(|(_, table)| table.reached);
        let held = held.filter(|(_, table)| table.start <= gpa && gpa < table.end);
        let (&hpa, table) = held.min_by_key(|(_, table)| table.height)?;
        let (ptes, height) = (H::entries(table.height - 1), table.height - 1);
        Some(Root { table: hpa, ptes, height })
    }

    pub fn forget(&mut self, what: &Invalidation) {
        if what.vmid != self.vmid {
            return;
        }
        let (start, end) = what.range.map_or((0, u64::MAX), |r| (r.start().0, r.end().0));
        // A hint names the level of descriptors.
        let entry_size = self.entry_size;
        let named = |size| what.leaf.is_none_or(|hint| hint.bytes() == entry_size(size));
        let (hit, kept): (Vec<_>, _) = self.tlb.drain(..).partition(|run| named(run.size));
        self.tlb = kept;
        for run in hit {
            self.tlb.extend(run.clip(0, start));
            self.tlb.extend(run.clip(end, u64::MAX));
        }
        // A hint names the level of leaves: walk caches hold other levels.
        if what.tables && what.leaf.is_none() {
            self.walks.retain(|_, table| !table.overlaps(start, end));
        }
    }

    pub fn check_free(&self, hpa: u64) {
        assert!(!self.walks.contains_key(&hpa), "a walk cache points to the freed table {hpa:#x}");
    }

    /// Checks that the TLB may not hold two translations of one address: two sizes only if the CPU
    /// allows that, two addresses or memory types never.
    pub fn check_conflicts(&self, tree: &Tree, bbm: BreakBeforeMake) {
        for old in &self.tlb {
            for new in tree.within(old.start, old.end) {
                let same = old.oa(new.start) == new.leaf.oa && old.leaf.memory == new.leaf.memory;
                let size = old.size == new.size || bbm != BreakBeforeMake::Always;
                assert!(same && size, "no break between {old:x?} and {new:x?}");
            }
        }
    }

    /// Checks that everything cached agrees with the tables. A cached entry that lacks a right is
    /// only slow.
    pub fn check_fresh(&mut self, tree: &Tree) {
        for old in &self.tlb {
            let mut covered = 0;
            for new in tree.within(old.start, old.end).map(cached) {
                let own = new.leaf.own;
                let like = Attributes {
                    read: own.read,
                    write: own.write,
                    dirty: own.dirty,
                    execute: own.execute,
                    ..old.leaf.own
                };
                let oa = old.oa(new.start);
                let leaf = Leaf { oa, own: like, reached: new.leaf.reached, ..old.leaf };
                assert!(
                    weaker(&old.leaf.own, &own) && leaf == new.leaf && old.size == new.size,
                    "{old:x?} is stale, now {new:x?}"
                );
                covered += new.end - new.start;
            }
            assert_eq!(covered, old.end - old.start, "{old:x?} is stale, partly unmapped");
        }
        for hpa in self.walks.keys() {
            assert!(tree.tables.contains_key(hpa), "a walk cache holds {hpa:#x}, unlinked");
        }
        for run in tree.runs.iter().copied().map(cached) {
            if !self.tlb.contains(&run) {
                self.tlb.push(run);
            }
        }
    }

    /// Checks that below a table without a mark no leaf is marked, and no cached entry is.
    pub fn check_unmarked(&self, tree: &Tree) {
        for table in tree.tables.values().filter(|table| !table.accessed) {
            let used = |runs: &[Run]| {
                let inside = |run: &&Run| run.clip(table.start, table.end).is_some();
                runs.iter().filter(inside).any(|run| run.leaf.own.accessed && run.leaf.reached)
            };
            let leaf = tree.within(table.start, table.end).find(|run| run.leaf.own.accessed);
            assert_eq!(leaf, None, "accessed below {table:x?}");
            assert!(!used(&self.tlb), "a TLB holds a leaf below {table:x?}");
            let below = |held: &&Table| held.reached && held.within(table.start, table.end);
            assert_eq!(self.walks.values().find(below), None, "a walk cache, below {table:x?}");
        }
    }

    /// Checks that no TLB would use an unmarked leaf in this part of the tree again without a
    /// trace.
    pub fn check_old(&self, tree: &Tree, start: u64, end: u64) {
        for old in tree.within(start, end).filter(|run| !run.leaf.own.accessed) {
            let used = |run: &&Run| run.leaf.reached && run.clip(old.start, old.end).is_some();
            assert_eq!(self.tlb.iter().find(used), None, "a TLB uses {old:x?} without a trace");
        }
    }
}
