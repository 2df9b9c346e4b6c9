//! Translation of an address by a vCPU: by its TLB, its walk cache, or the tables.

use crate::arch::{Access, Descriptor, Fault, Sizes};
use crate::lazy::Choice;
use crate::marked::MarkedEntries;
use crate::state::{Root, State};
use crate::tlb::{Entry, Scope, Walk};
use crate::violation::Kind;

/// Hardware begins the walk anew, because an entry changed during it.
struct Again;

impl State {
    /// Does an access of the guest on `cpu`; returns the host address that it reaches.
    pub fn access(
        &mut self,
        cpu: usize,
        gpa: u64,
        access: Access,
        uncached: bool,
    ) -> Result<u64, Fault> {
        let root = self.cpus[cpu].root.ok_or(Fault::Translation)?;
        if gpa >> self.arch.address_bits() != 0 {
            return Err(Fault::Translation);
        }
        self.tick();
        let mut late = true;
        loop {
            self.abort_conflict(cpu, root, gpa)?;
            self.through_hole(cpu, root, gpa)?;
            if let Some(entry) = self.through_tlb(cpu, root, gpa, access)? {
                return Ok(self.reach(cpu, root, gpa, &entry, access, uncached));
            }
            match self.walk(cpu, root, gpa, access, late) {
                Ok(Ok(entry)) => {
                    return Ok(self.reach(cpu, root, gpa, &entry, access, uncached));
                }
                Ok(Err(Again)) => late = false,
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Raises a conflict abort if the TLB holds two sizes; the abort drops what is cached for the
    /// address.
    fn abort_conflict(&mut self, cpu: usize, root: Root, gpa: u64) -> Result<(), Fault> {
        if self.arch.sizes() != Sizes::MayAbort || !self.lazy.conflict_aborts {
            return Ok(());
        }
        let sizes: Vec<_> =
            self.cpus[cpu].leaves.at(root.vmid, gpa).iter().map(|e| e.shift).collect();
        if sizes.iter().all(|&shift| shift == sizes[0]) {
            return Ok(());
        }
        self.conflict_aborts += 1;
        self.forget(&Scope {
            cpu: Some(cpu),
            range: Some((gpa, gpa + 1)),
            ..Scope::guest(root.vmid)
        });
        if self.handles_conflicts {
            return Ok(());
        }
        let used = "a TLB conflict abort, which nobody handles".to_owned();
        let expected = "a platform that does not handle it has its splits break";
        self.log.report(Kind::SizeConflict, Some(cpu), Some(gpa), used, expected);
        Err(Fault::Conflict)
    }

    /// Faults on a cached invalid entry, unless the CPU chooses an older translation.
    fn through_hole(&mut self, cpu: usize, root: Root, gpa: u64) -> Result<(), Fault> {
        let held = &self.cpus[cpu];
        let Some(born) = held.holes.at(root.vmid, gpa) else { return Ok(()) };
        let held = [held.leaves.at(root.vmid, gpa), held.combined.at(root.vmid, gpa)];
        let mut leaves = held.iter().flatten();
        let used = match self.choice {
            Choice::Stalest => leaves.all(|entry| born < entry.born),
            Choice::Random => self.rng.bool(),
        };
        if used { Err(Fault::Translation) } else { Ok(()) }
    }

    fn through_tlb(
        &mut self,
        cpu: usize,
        root: Root,
        gpa: u64,
        access: Access,
    ) -> Result<Option<Entry>, Fault> {
        let write = access == Access::Write;
        if write && !self.lazy.silent_writes {
            return Ok(None);
        }
        let mut held = self.cpus[cpu].leaves.at(root.vmid, gpa);
        held.extend(self.cpus[cpu].combined.at(root.vmid, gpa));
        if self.choice == Choice::Random {
            // A CPU may have dropped any entry, and may find any of them first.
            if self.rng.bool() {
                held.clear();
            }
            held = self.rng.choice(held).into_iter().collect();
        }
        held.sort_by_key(|entry| entry.born);
        if held.first().is_some_and(|oldest| !oldest.allows(access)) {
            if self.arch.fault_forgets() {
                self.forget_address(cpu, root, gpa);
                return Ok(None);
            }
            if self.lazy.stale_faults {
                return Err(Fault::Permission);
            }
        }
        let marked = |entry: &Entry| entry.leaf.accessed && (!write || entry.leaf.dirty);
        let unmarked = held.first().is_some_and(|oldest| !marked(oldest));
        if unmarked && self.arch.caches_unmarked() && self.lazy.stale_faults {
            return Err(Fault::Accessed);
        }
        // A write through a translation that is not dirty walks the tables again.
        let usable = |entry: &&Entry| entry.allows(access) && marked(entry);
        Ok(held.iter().find(usable).copied())
    }

    fn forget_address(&mut self, cpu: usize, root: Root, gpa: u64) {
        let range = Some((gpa, gpa + 1));
        self.forget(&Scope { cpu: Some(cpu), range, ..Scope::guest(root.vmid) });
    }

    /// Returns where a walk begins: at the root, or at a table that the walk cache holds.
    fn beginning(&mut self, cpu: usize, root: Root, gpa: u64) -> Walk {
        let mut walks = self.cpus[cpu].walks.at(root.vmid, gpa);
        walks.push(self.start(root));
        walks.sort_by_key(|walk| (walk.shift, walk.born));
        match self.choice {
            Choice::Stalest => walks[0],
            Choice::Random => walks[self.rng.usize(..walks.len())],
        }
    }

    fn walk(
        &mut self,
        cpu: usize,
        root: Root,
        gpa: u64,
        access: Access,
        late: bool,
    ) -> Result<Result<Entry, Again>, Fault> {
        let mut walk = self.beginning(cpu, root, gpa);
        loop {
            let (level, shift) = (walk.level, self.arch.shift(walk.level));
            let index = ((gpa - walk.start) >> shift) as usize;
            let Some(found) = self.read(Some(cpu), &walk, index) else {
                return Err(Fault::Translation);
            };
            let random = self.choice == Choice::Random;
            let old = found.late.filter(|_| late && (!random || self.rng.bool()));
            let raw = old.unwrap_or(found.now);
            let decoded = self.decode(Some(cpu), raw, level, gpa);
            let write = access == Access::Write;
            let start = gpa >> shift << shift;
            match decoded {
                Descriptor::Invalid => {
                    if self.arch.caches_invalid() && self.lazy.invalid_entries {
                        self.cpus[cpu].holes.insert(root.vmid, start, shift, self.clock);
                    }
                    return Err(Fault::Translation);
                }
                Descriptor::Reserved(_) => return Err(Fault::Reserved),
                Descriptor::Table { table, rights } => {
                    let new = self.arch.mark(raw, level, write)?;
                    if new != raw && !self.mark(&walk, index, found.cell, raw, new) {
                        return Ok(Err(Again));
                    }
                    let rights = rights.and(walk.rights);
                    let level = self.arch.below(level);
                    walk = Walk { start, shift, level, table, rights, born: self.clock };
                    self.cache_walk(cpu, root.vmid, walk);
                }
                Descriptor::Leaf(mut leaf) => {
                    leaf.rights = leaf.rights.and(walk.rights);
                    let mut entry = self.entry(Some(cpu), raw, start, shift, leaf);
                    if !entry.allows(access) {
                        if self.arch.fault_forgets() {
                            self.forget_address(cpu, root, gpa);
                        } else if leaf.accessed || self.arch.caches_unmarked() {
                            self.cache(cpu, root.vmid, entry);
                        }
                        return Err(Fault::Permission);
                    }
                    let new = match self.arch.mark(raw, level, write) {
                        Ok(new) => new,
                        Err(fault) => {
                            if self.arch.caches_unmarked() {
                                self.cache(cpu, root.vmid, entry);
                            }
                            return Err(fault);
                        }
                    };
                    let marks = write && !entry.leaf.dirty && new != raw;
                    if marks && self.cpus[cpu].marked.as_ref().is_some_and(MarkedEntries::is_full) {
                        return Err(Fault::LogFull);
                    }
                    if new != raw && !self.mark(&walk, index, found.cell, raw, new) {
                        return Ok(Err(Again));
                    }
                    if let Some(marked) = self.cpus[cpu].marked.as_mut().filter(|_| marks) {
                        marked.push(start, level);
                    }
                    entry.leaf.accessed = true;
                    entry.leaf.dirty |= write;
                    self.cache(cpu, root.vmid, entry);
                    return Ok(Ok(entry));
                }
            }
        }
    }

    /// Checks an access that was translated, and does it; returns the host address.
    fn reach(
        &mut self,
        cpu: usize,
        root: Root,
        gpa: u64,
        entry: &Entry,
        access: Access,
        uncached: bool,
    ) -> u64 {
        let hpa = entry.hpa(gpa);
        let write = access == Access::Write;
        let (log, who, at) = (&mut self.log, Some(cpu), Some(gpa));
        let used = || format!("{access:?} through {} reaches {hpa:#x}", entry.text());
        if let Some((table, _)) = self.memory.around(hpa) {
            let expected = &format!("the table at {table:#x} is nobody's but the hypervisor's");
            log.report(Kind::TableExposed, who, at, used(), expected);
            return hpa;
        }
        if let Some(reason) = self.host.refuses(hpa) {
            log.report(Kind::FreedMemory, who, at, used(), reason);
        }
        if let Some(reason) = self.owned.refuses(hpa, gpa) {
            log.report(Kind::PrivateExposed, who, at, used(), reason);
        }
        if write && self.uses.is_protected(root.vmid.0, gpa) {
            log.report(Kind::RevokedRight, who, at, used(), "the page was said to be protected");
        }
        self.uses.record(root.vmid.0, gpa, cpu, write);
        let bypass = self.arch.bypasses(entry.leaf.memory, uncached);
        let fetch = access == Access::Execute;
        let stale = match fetch {
            true if self.lazy.instruction_cache && self.arch.stale_fetch() => self.host.fetch(hpa),
            true => Ok(()),
            false => {
                let bypass = bypass && self.lazy.data_cache;
                self.host.guest_access(hpa, write, bypass)
            }
        };
        if let Err(reason) = stale {
            log.report(Kind::MissingMaintenance, who, at, used(), reason);
        }
        hpa
    }
}
