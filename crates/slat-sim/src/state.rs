//! The state of a machine, behind one lock: what walks may find, and the checks of it.

use crate::arch::{Arch, Descriptor, Leaf, Rights, Sizes};
use crate::host::Host;
use crate::lazy::{Choice, Lazy};
use crate::marked::MarkedEntries;
use crate::memory::{Cell, Memory, POISON};
use crate::owned::OwnedPages;
use crate::tlb::{Clash, Entry, Holes, LateStore, Leaves, Scope, Walk, Walks};
use crate::uses::UseLog;
use crate::violation::{Kind, Log};
use slat::Vmid;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::thread::ThreadId;

/// A guest's root table, as a CPU loads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Root {
    pub vmid: Vmid,
    pub table: u64,
}

#[derive(Default, Debug)]
pub(crate) struct Cpu {
    pub root: Option<Root>,
    pub leaves: Leaves,
    pub combined: Leaves,
    pub walks: Walks,
    pub holes: Holes,
    /// The log of entries that hardware marked as dirty, if it keeps one.
    pub marked: Option<MarkedEntries>,
    /// The address of the last access, if it faulted and the guest has not resumed.
    pub faulted: Option<u64>,
    /// Stores under way through translations that are gone.
    pub late: Vec<LateStore>,
}

/// A thread of the hypervisor as a processing element that issues invalidations.
#[derive(Default, Debug)]
pub(crate) struct Issuer {
    /// The CPU that it runs on, where its local invalidations take effect.
    pub cpu: usize,
    /// The current guest, for invalidations that do not name one.
    pub vmid: Option<Vmid>,
    /// Invalidations that it issued and that no barrier has waited for.
    pub pending: Vec<Scope>,
    /// Power: how many of `pending` an `eieio`, and then a `tlbsync`, has ordered.
    pub ordered: [usize; 2],
}

/// The IOMMU's tables: for each page of the guest, the page of the host, and the right to write.
#[derive(Default, Debug)]
pub(crate) struct Iommu {
    pub pages: BTreeMap<u64, (u64, bool)>,
}

/// All of a machine but its hook. It is not generic, so that it is compiled once, in this crate,
/// and optimised where the crates of tests are not.
#[derive(Debug)]
pub(crate) struct State {
    pub arch: Box<dyn Arch>,
    pub lazy: Lazy,
    pub choice: Choice,
    pub rng: fastrand::Rng,
    pub clock: u64,
    pub memory: Memory,
    pub host: Host,
    pub owned: OwnedPages,
    pub iommu: Iommu,
    pub uses: UseLog,
    pub log: Log,
    pub cpus: Vec<Cpu>,
    /// Roots that some CPU has loaded.
    pub roots: Vec<Root>,
    /// All guests that ever ran: TLBs may hold translations of each.
    pub vmids: BTreeSet<u16>,
    pub threads: HashMap<ThreadId, Issuer>,
    pub handles_conflicts: bool,
    pub conflict_aborts: u64,
}

/// A page-table entry as a walker finds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub cell: Cell,
    pub now: u64,
    /// An older value that it may read instead.
    pub late: Option<u64>,
}

/// How to read tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Eye {
    pub cpu: Option<usize>,
    /// Read old values too.
    pub late: bool,
    /// Set the accessed marks of links to tables, as hardware does in a walk.
    pub marks: bool,
}

impl Eye {
    /// Reads current values, and reports nothing.
    pub const GOD: Self = Self { cpu: None, late: false, marks: false };
}

impl State {
    pub fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub fn issuer(&mut self) -> &mut Issuer {
        self.threads.entry(std::thread::current().id()).or_default()
    }

    /// Forgets roots that no CPU has loaded any more.
    pub fn forget_roots(&mut self) {
        let Self { roots, cpus, .. } = self;
        roots.retain(|root| cpus.iter().any(|cpu| cpu.root == Some(*root)));
    }

    pub fn start(&self, root: Root) -> Walk {
        Walk {
            start: 0,
            shift: self.arch.address_bits(),
            level: self.arch.root_level(),
            table: root.table,
            rights: Rights::ALL,
            born: 0,
        }
    }

    /// Reads an entry; reports what no walk of `cpu` should meet.
    pub fn read(&mut self, cpu: Option<usize>, walk: &Walk, index: usize) -> Option<Found> {
        let gpa = walk.start + ((index as u64) << self.arch.shift(walk.level));
        let ptes = self.arch.entries(walk.level);
        let Some(table) = self.memory.get(walk.table).filter(|table| table.len() >= ptes) else {
            if cpu.is_some() {
                let used = format!("a walk reads {:#x}, which is no table", walk.table);
                self.log.report(Kind::Reserved, cpu, Some(gpa), used, "a link leads to a table");
            }
            return None;
        };
        let cell = table.cell(index);
        let late = table.late(index).filter(|_| self.lazy.late_stores && self.arch.late());
        let found = Found { cell, now: cell.load(), late };
        if !table.live || found.now == POISON {
            if cpu.is_some() {
                let (kind, expected) = if table.live {
                    (Kind::Unfilled, "a table is filled before it is linked")
                } else {
                    (Kind::FreedTable, "a table is freed when no walk can reach it")
                };
                let used = format!("a walk reads entry {index} of the table {:#x}", walk.table);
                self.log.report(kind, cpu, Some(gpa), used, expected);
            }
            return None;
        }
        // A walker that has read a table may read these values again, until a barrier.
        if cpu.is_some()
            && !table.has_drained()
            && let Some(table) = self.memory.get_mut(walk.table)
        {
            table.drain();
        }
        Some(found)
    }

    /// Decodes an entry; reports reserved encodings.
    pub fn decode(&mut self, cpu: Option<usize>, raw: u64, level: i8, gpa: u64) -> Descriptor {
        let decoded = self.arch.decode(raw, level);
        if let (Descriptor::Reserved(reason), Some(_)) = (decoded, cpu) {
            let used = format!("the descriptor {raw:#x} at level {level}");
            self.log.report(Kind::Reserved, cpu, Some(gpa), used, reason);
        }
        decoded
    }

    /// Returns all leaves and links that walks from `starts` can find.
    pub fn explore(&mut self, eye: Eye, starts: Vec<Walk>) -> (Vec<Entry>, Vec<Walk>) {
        let (mut leaves, mut links) = (Vec::new(), Vec::new());
        let mut seen = BTreeSet::new();
        let mut todo = starts;
        while let Some(walk) = todo.pop() {
            let Rights { read, write, execute } = walk.rights;
            if !seen.insert((walk.table, walk.start, read, write, execute)) {
                continue;
            }
            let shift = self.arch.shift(walk.level);
            // Reading the first entry reports what is wrong with the table as a whole.
            if self.read(eye.cpu, &walk, 0).is_none() {
                continue;
            }
            let ptes = self.arch.entries(walk.level);
            let filled = self.memory.get(walk.table).map(|table| table.filled(ptes));
            for index in filled.unwrap_or_default() {
                let gpa = walk.start + ((index as u64) << shift);
                let Some(found) = self.read(eye.cpu, &walk, index) else { break };
                for raw in [Some(found.now), found.late.filter(|_| eye.late)].into_iter().flatten()
                {
                    if raw == 0 {
                        continue;
                    }
                    match self.decode(eye.cpu, raw, walk.level, gpa) {
                        Descriptor::Table { table, rights } => {
                            if eye.marks && !self.set(&walk, index, found, raw) {
                                continue;
                            }
                            let link = Walk {
                                start: gpa,
                                shift,
                                level: self.arch.below(walk.level),
                                table,
                                rights: rights.and(walk.rights),
                                born: self.clock,
                            };
                            links.push(link);
                            todo.push(link);
                        }
                        Descriptor::Leaf(mut leaf) => {
                            leaf.rights = leaf.rights.and(walk.rights);
                            leaves.push(self.entry(eye.cpu, raw, gpa, shift, leaf));
                        }
                        Descriptor::Invalid | Descriptor::Reserved(_) => {}
                    }
                }
            }
        }
        (leaves, links)
    }

    /// Returns what a TLB may keep of the leaf `raw` at `start`: if it is in a group, the whole
    /// group.
    pub fn entry(
        &mut self,
        cpu: Option<usize>,
        raw: u64,
        start: u64,
        shift: u32,
        mut leaf: Leaf,
    ) -> Entry {
        let (born, member, member_shift) = (self.clock, start, shift);
        if !self.arch.grouped(raw) {
            return Entry { start, shift, leaf, member, member_shift, born };
        }
        let shift = shift + self.arch.group(shift);
        let first = start >> shift << shift;
        leaf.hpa = leaf.hpa.wrapping_sub(start - first);
        if leaf.hpa & ((1 << shift) - 1) != 0 && cpu.is_some() {
            let used = format!("the descriptor {raw:#x} of a group at {:#x}", leaf.hpa);
            let expected = "a group points to memory that is aligned to it";
            self.log.report(Kind::Reserved, cpu, Some(start), used, expected);
        }
        Entry { start: first, shift, leaf, member, member_shift, born }
    }

    /// Sets the marks of a link that a walk uses; returns whether the walk may go on.
    fn set(&mut self, walk: &Walk, index: usize, found: Found, raw: u64) -> bool {
        match self.arch.mark(raw, walk.level, false) {
            Ok(new) if new == raw => true,
            Ok(new) => self.mark(walk, index, found.cell, raw, new),
            Err(_) => false,
        }
    }

    /// Marks an entry by compare-and-swap, as hardware does.
    pub fn mark(&mut self, walk: &Walk, index: usize, cell: Cell, old: u64, new: u64) -> bool {
        let done = cell.exchange(old, new).is_ok();
        if done && let Some(table) = self.memory.get_mut(walk.table) {
            table.marked(index, new);
        }
        done
    }

    /// Makes every CPU walk to all that it can reach, and cache it. Leaves that are not accessed
    /// are left alone: a CPU would be allowed to mark them, but that would hide which accesses used
    /// them.
    pub fn speculate(&mut self) {
        self.tick();
        for cpu in 0..self.cpus.len() {
            let Some(root) = self.cpus[cpu].root else { continue };
            let mut starts = self.cpus[cpu].walks.within(root.vmid, 0, u64::MAX);
            starts.push(self.start(root));
            let eye = Eye { cpu: Some(cpu), late: true, marks: true };
            let (leaves, links) = self.explore(eye, starts);
            for link in links {
                self.cache_walk(cpu, root.vmid, link);
            }
            for leaf in leaves.into_iter().filter(|entry| entry.leaf.accessed) {
                self.cache(cpu, root.vmid, leaf);
            }
        }
    }

    /// Caches a translation, if the switches say that TLBs keep it; reports entries that must not
    /// meet.
    pub fn cache(&mut self, cpu: usize, vmid: Vmid, entry: Entry) {
        let Self { arch, lazy, cpus, log, .. } = self;
        let Cpu { leaves, combined, walks, .. } = &mut cpus[cpu];
        let clash = [(leaves, lazy.tlb), (combined, lazy.combined)]
            .into_iter()
            .filter_map(|(map, on)| on.then(|| map.insert(&**arch, vmid, entry)).flatten())
            .next();
        if let Some((clash, old)) = clash {
            let kind = match clash {
                Clash::Changed => Kind::BreakBeforeMake,
                Clash::Resized => Kind::SizeConflict,
            };
            let used = format!("it caches {} beside {}", entry.text(), old.text());
            log.report(kind, Some(cpu), Some(entry.start), used, "a break goes before the change");
        }
        if arch.sizes() != Sizes::Forbidden {
            return;
        }
        let inside = |walk: &&Walk| walk.start >= entry.start && walk.end() <= entry.end();
        if let Some(link) = walks.within(vmid, entry.start, entry.end()).iter().find(inside) {
            let used = format!("it caches {} beside a link to {:#x}", entry.text(), link.table);
            let expected = "a break goes before a block replaces a table";
            log.report(Kind::SizeConflict, Some(cpu), Some(entry.start), used, expected);
        }
    }

    /// Caches a link, if walk caches keep links; reports entries that must not meet.
    pub fn cache_walk(&mut self, cpu: usize, vmid: Vmid, walk: Walk) {
        let Self { arch, lazy, cpus, log, .. } = self;
        if !lazy.walk_cache {
            return;
        }
        let cpu_state = &mut cpus[cpu];
        if let Some(old) = cpu_state.walks.insert(&**arch, vmid, walk) {
            let used = format!("it caches links to {:#x} and {:#x}", walk.table, old.table);
            let expected = "a break goes before another table";
            log.report(Kind::BreakBeforeMake, Some(cpu), Some(walk.start), used, expected);
        }
        if arch.sizes() != Sizes::Forbidden {
            return;
        }
        let held = cpu_state.leaves.within(vmid, walk.start, walk.end());
        if let Some(block) = held.iter().find(|entry| entry.shift >= walk.shift) {
            let used = format!("it caches a link to {:#x} beside {}", walk.table, block.text());
            let expected = "a break goes before a table replaces a block";
            log.report(Kind::SizeConflict, Some(cpu), Some(walk.start), used, expected);
        }
    }

    /// Returns all translations of `start..end` that `cpu` may use from now on, and its cached
    /// links.
    pub fn possible(
        &mut self,
        cpu: usize,
        vmid: Vmid,
        start: u64,
        end: u64,
    ) -> (Vec<Entry>, Vec<Walk>) {
        let mut starts = self.cpus[cpu].walks.within(vmid, start, end);
        let links = starts.clone();
        if let Some(root) = self.cpus[cpu].root.filter(|root| root.vmid == vmid) {
            starts.push(self.start(root));
        }
        let (found, _) = self.explore(Eye { late: true, ..Eye::GOD }, starts);
        let cpu = &self.cpus[cpu];
        let mut all = cpu.leaves.within(vmid, start, end);
        all.extend(cpu.combined.within(vmid, start, end));
        all.extend(found.into_iter().filter(|entry| entry.start < end && start < entry.end()));
        (all, links)
    }

    /// Returns what the tables of `vmid` hold now: leaves and links by their first address.
    pub fn present(&mut self, vmid: Vmid) -> (BTreeMap<u64, Entry>, BTreeMap<(u64, u32), Walk>) {
        let roots: Vec<_> = self.roots.iter().filter(|root| root.vmid == vmid).copied().collect();
        let starts = roots.into_iter().map(|root| self.start(root)).collect();
        let (leaves, links) = self.explore(Eye::GOD, starts);
        let mut present: BTreeMap<u64, Entry> = BTreeMap::new();
        let mut members: BTreeMap<u64, u64> = BTreeMap::new();
        leaves.iter().for_each(|entry| *members.entry(entry.start).or_default() += 1);
        for entry in leaves {
            // A group with missing members counts as single leaves, even if a TLB uses it as a
            // whole.
            if members[&entry.start] << entry.member_shift != 1 << entry.shift {
                let leaf = Leaf { hpa: entry.hpa(entry.member), ..entry.leaf };
                let (start, shift) = (entry.member, entry.member_shift);
                present.insert(start, Entry { start, shift, leaf, ..entry });
                continue;
            }
            // A mark in any member is a mark of the group.
            let all = present.entry(entry.start).or_insert(entry);
            all.leaf.dirty |= entry.leaf.dirty;
            all.leaf.accessed |= entry.leaf.accessed;
        }
        (present, links.into_iter().map(|walk| ((walk.start, walk.shift), walk)).collect())
    }

    /// Executes a barrier: walkers see all stores before it.
    pub fn drain(&mut self) {
        let starts: Vec<_> = self.roots.iter().map(|&root| self.start(root)).collect();
        for start in starts {
            let (_, mut links) = self.explore(Eye::GOD, vec![start]);
            links.push(start);
            for walk in links {
                let Some(table) = self.memory.get_mut(walk.table).filter(|table| table.live) else {
                    continue;
                };
                table.drain();
            }
        }
        let unlinked = self.memory.live_tables().filter(|(_, table)| table.has_drained());
        unlinked.for_each(|(_, table)| table.drain());
    }

    /// Executes an invalidation.
    pub fn forget(&mut self, scope: &Scope) {
        // An invalidation that names a level also covers groups: their members are of that level.
        let members = scope.shift.filter(|&shift| self.arch.group(shift) != 0);
        if let Some(shift) = members {
            let shift = shift + self.arch.group(shift);
            self.forget(&Scope { shift: Some(shift), walks: false, ..*scope });
        }
        // An invalidation that leaves links also leaves cached invalid entries that now link a
        // table.
        let links = if scope.walks { Vec::new() } else { self.linked_holes() };
        for (index, cpu) in self.cpus.iter_mut().enumerate() {
            if scope.cpu.is_some_and(|only| only != index) {
                continue;
            }
            if scope.leaves {
                cpu.leaves.forget(scope);
                cpu.holes.forget(scope, &links);
            }
            if scope.combined {
                cpu.combined.forget(&Scope { shift: None, ..*scope });
            }
            if scope.walks && scope.shift.is_none() {
                cpu.walks.forget(scope);
            }
        }
    }

    /// Returns the entries that some CPU has cached as invalid, and that link a table now.
    fn linked_holes(&mut self) -> Vec<(Vmid, u64, u32)> {
        let mut holes: Vec<_> = self.cpus.iter().flat_map(|cpu| cpu.holes.all()).collect();
        holes.retain(|&(vmid, start, shift)| {
            let root = self.roots.iter().find(|root| root.vmid == vmid).copied();
            root.is_some_and(|root| self.links(self.start(root), start, shift))
        });
        holes
    }

    /// Returns whether the entry for `gpa` that covers `2^shift` bytes links a table, below `walk`.
    fn links(&mut self, mut walk: Walk, gpa: u64, shift: u32) -> bool {
        loop {
            let here = self.arch.shift(walk.level);
            let index = ((gpa - walk.start) >> here) as usize;
            let Some(found) = self.read(None, &walk, index) else { return false };
            let Descriptor::Table { table, rights } = self.arch.decode(found.now, walk.level)
            else {
                return false;
            };
            if here == shift {
                return true;
            }
            let (start, level) = (gpa >> here << here, self.arch.below(walk.level));
            walk = Walk { start, shift: here, level, table, rights, born: 0 };
        }
    }

    /// Completes the invalidations that the calling thread issued, in the worst order, while other
    /// CPUs run. With `locally`, those for all CPUs complete on this CPU alone, and stay pending
    /// for the others.
    pub fn complete(&mut self, locally: bool) {
        let issuer = self.issuer();
        let (here, mut pending) = (issuer.cpu, std::mem::take(&mut issuer.pending));
        pending.sort_by_key(|scope| scope.leaves);
        let late = !locally && self.arch.late_stores();
        let broadcast = |scope: &Scope| scope.cpu.is_none();
        let is_broadcast = pending.iter().any(broadcast);
        let combined = pending.iter().any(|scope| broadcast(scope) && scope.combined);
        for mut scope in pending {
            if locally && scope.cpu.is_none() {
                self.issuer().pending.push(scope);
                scope.cpu = Some(here);
            }
            if late && broadcast(&scope) {
                self.forget_late(&scope, here);
            } else {
                self.forget(&scope);
            }
            // A CPU may make translations of both stages again, from those of the second stage that
            // it has.
            if self.lazy.combined && !scope.leaves {
                for cpu in &mut self.cpus {
                    let Some(root) = cpu.root else { continue };
                    for entry in cpu.leaves.all(root.vmid) {
                        cpu.combined.insert(&*self.arch, root.vmid, entry);
                    }
                }
            }
        }
        if late && is_broadcast {
            self.land(combined);
        }
    }
}
