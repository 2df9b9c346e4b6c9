//! Random histories of all operations. vCPUs use the guest's memory at each of the engine's calls,
//! and a flat model records what is mapped.

use crate::cases::Case;
use crate::common::*;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, Execute, Format, Gpa, GpaRange, Hpa, PageSize,
    TableBits, UnmapBatch,
};
use slat_sim::{Arch, Arm, Machine};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Host memory for new mappings; none is used twice.
const HOST: u64 = 1 << 33;

#[derive(Clone, Copy, PartialEq, Debug)]
struct Page {
    hpa: u64,
    protected: bool,
}

struct History<'p, F: Format, A: Arch> {
    guest: Guest<'p, F, A>,
    rng: fastrand::Rng,
    model: BTreeMap<u64, Page>,
    next_host: u64,
    page: u64,
    block: u64,
    blocks: u64,
    /// Most pages of a range.
    longest: u64,
    hints: Arc<Mutex<fastrand::Rng>>,
}

impl<'p, F: Format, A: Arch> History<'p, F, A> {
    fn new(machine: &'p Machine<A>, format: F, seed: u64, blocks: u64) -> Self {
        let (page, block) = (F::size(0).bytes(), F::size(1).bytes());
        machine.give(Hpa(HOST), 1 << 37);
        let guest = Guest::new(machine, format);
        let hints = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed ^ 0xabcd)));
        Self {
            guest,
            rng: fastrand::Rng::with_seed(seed),
            model: BTreeMap::new(),
            next_host: HOST,
            page,
            block,
            blocks,
            longest: 40,
            hints,
        }
    }

    /// Takes memory from `host` on.
    fn with_memory(self, host: u64) -> Self {
        self.guest.machine.give(Hpa(host), 1 << 37);
        Self { next_host: host, ..self }
    }

    fn all(&self) -> GpaRange {
        range(BASE, self.blocks * self.block)
    }

    /// Returns some pages or some blocks.
    fn some(&mut self) -> GpaRange {
        if self.rng.u8(..3) == 0 {
            let first = self.rng.u64(..self.blocks);
            let count = self.rng.u64(1..=self.blocks - first);
            return range(BASE + first * self.block, count * self.block);
        }
        let pages = self.blocks * self.block / self.page;
        // Near an end of a block, in most cases.
        let near = self.rng.u64(..self.blocks) * self.block / self.page;
        let first = near.saturating_add(self.rng.u64(..24)).saturating_sub(8).min(pages - 1);
        let count = self.rng.u64(1..=self.longest.min(pages - first));
        range(BASE + first * self.page, count * self.page)
    }

    /// Makes vCPUs use pages while the engine works.
    fn run_guest(&self) {
        let (rng, page) = (self.hints.clone(), self.page);
        let (blocks, block) = (self.blocks, self.block);
        self.guest.machine.meanwhile(move |machine, _| {
            let mut rng = rng.lock().unwrap();
            for cpu in 0..machine.cpus() {
                let near = rng.u64(..blocks) * block / page + rng.u64(..24);
                let gpa = BASE + near.saturating_sub(8) * page + rng.u64(..page);
                let _ = match rng.u8(..6) {
                    0..3 => machine.cpu(cpu).read(gpa),
                    3..5 => machine.cpu(cpu).write(gpa),
                    _ => machine.cpu(cpu).walk(gpa),
                };
            }
        });
    }

    fn pages(&self, range: GpaRange) -> impl Iterator<Item = u64> + use<F, A> {
        (range.start().0..range.end().0).step_by(self.page as usize)
    }

    fn step(&mut self) {
        match self.rng.u8(..16) {
            0..3 => self.map(),
            3..5 => self.unmap(),
            5 => self.write_protect(),
            6..8 => self.relax(),
            8 => self.split(),
            9 => self.collapse(),
            10 => self.harvest(),
            11..13 => self.move_leaf(),
            13 => self.own(),
            14 => self.replace_table(),
            _ => self.age(),
        }
        if self.rng.u8(..4) == 0 {
            self.guest.tables.reclaim();
        }
    }

    fn map(&mut self) {
        let some = self.some();
        if self.pages(some).any(|page| self.model.contains_key(&page)) {
            return;
        }
        // In some cases, as aligned as the guest's address.
        self.next_host = self.next_host.next_multiple_of(self.block);
        let slip = if self.rng.bool() { some.start().0 % self.block } else { 0 };
        let hpa = self.next_host + slip;
        self.next_host = hpa + some.size();
        let largest = if self.rng.bool() { self.block } else { self.page };
        let clean = Attributes { dirty: !self.rng.bool(), ..Attributes::RAM };
        let clean = self.guest.possible(clean);
        self.guest.machine.unprotect(VMID, some);
        self.guest.with(|guard, cache| {
            let largest = PageSize::from_bytes(largest).unwrap();
            guard.map(some, Hpa(hpa), clean, largest, cache).unwrap();
        });
        for (page, hpa) in self.pages(some).zip((hpa..).step_by(self.page as usize)) {
            self.model.insert(page, Page { hpa, protected: false });
        }
    }

    fn unmap(&mut self) {
        let some = self.some();
        let machine = self.guest.machine;
        let mut storage = [slat::UnmapEntry::EMPTY; 4096];
        let mut batch = UnmapBatch::new(&self.guest.tables, &mut storage);
        let stopped = self.guest.with(|guard, _| guard.unmap(some, &mut batch).err());
        for leaf in batch.complete() {
            machine.take_back(leaf.hpa, leaf.bytes);
            let gone = range(leaf.gpa.0, leaf.bytes);
            machine.claim_clean(VMID, gone, |_| leaf.attributes.dirty);
            machine.copy(VMID, gone);
            machine.seen(VMID, gone);
            machine.unprotect(VMID, gone);
            for page in self.pages(gone) {
                let was = self.model.remove(&page).expect("it was mapped");
                assert_eq!(was.hpa, leaf.hpa.0 + (page - leaf.gpa.0));
            }
        }
        if stopped.is_none() {
            assert!(self.pages(some).all(|page| !self.model.contains_key(&page)));
        }
    }

    fn write_protect(&mut self) {
        let some = self.some();
        if self.guest.with(|guard, _| guard.write_protect(some).is_ok()) {
            self.guest.machine.protect(VMID, some);
            for (_, page) in self.model.range_mut(some.start().0..some.end().0) {
                page.protected = true;
            }
        }
    }

    fn relax(&mut self) {
        let some = self.some();
        let access = [Access::Read, Access::Write, Access::Execute][self.rng.usize(..3)];
        let (start, end) = (some.start().0, some.end().0);
        if access == Access::Write {
            self.guest.machine.unprotect(VMID, some);
        }
        let done = self.guest.with(|guard, _| {
            guard.relax(some, access).map(slat::LocalFlush::not_needed_here).is_ok()
        });
        if access == Access::Write {
            for (_, page) in self.model.range_mut(start..end) {
                page.protected &= !done;
            }
            if !done {
                // The engine refused, and changed nothing.
                let protected: Vec<_> = self.model.range(start..end).collect();
                for (&gpa, _) in protected.into_iter().filter(|(_, page)| page.protected) {
                    self.guest.machine.protect(VMID, range(gpa, self.page));
                }
            }
        }
        let first = self.model.range(start..end).next().map(|(&gpa, _)| gpa);
        if let Some(gpa) = first.filter(|_| done) {
            self.guest.forget_rights(start, end - start);
            let access = match access {
                Access::Read => slat_sim::Access::Read,
                Access::Write => slat_sim::Access::Write,
                _ => slat_sim::Access::Execute,
            };
            self.guest.machine.claim_progress(0, Gpa(gpa), access);
        }
    }

    fn split(&mut self) {
        let (some, page) = (self.some(), PageSize::from_bytes(self.page).unwrap());
        self.guest.with(|guard, cache| guard.split(some, page, cache).unwrap());
    }

    fn collapse(&mut self) {
        let (all, block) = (self.all(), PageSize::from_bytes(self.block).unwrap());
        self.guest.with(|guard, _| guard.collapse(all, block).unwrap());
    }

    /// Puts a block on other memory in place of a table.
    fn replace_table(&mut self) {
        let (at, block) = (self.some().start().0 & !(self.block - 1), self.block);
        let machine = self.guest.machine;
        let hpa = self.next_host.next_multiple_of(block);
        let attributes = Attributes { dirty: !self.rng.bool(), ..Attributes::RAM };
        let attributes = self.guest.possible(attributes);
        let size = PageSize::from_bytes(block).unwrap();
        let replaced = self.guest.with(|guard, _| {
            // Rights are given at once.
            machine.unprotect(VMID, range(at, block));
            guard.replace_table(Gpa(at), size, Hpa(hpa), attributes).unwrap()
        });
        if replaced.is_none() {
            let protected = self.model.range(at..at + block).filter(|(_, page)| page.protected);
            protected.for_each(|(&gpa, _)| machine.protect(VMID, range(gpa, self.page)));
            return;
        }
        self.next_host = hpa + block;
        for gpa in (at..at + block).step_by(self.page as usize) {
            let new = Page { hpa: hpa + (gpa - at), protected: false };
            if let Some(old) = self.model.insert(gpa, new) {
                machine.take_back(Hpa(old.hpa), self.page);
            }
        }
    }

    /// Moves a leaf correctly: protects it, completes that, copies it, and replaces it.
    fn move_leaf(&mut self) {
        let at = self.some().start();
        let Some(leaf) = self.guest.look(at) else { return };
        let (size, start) = (leaf.size.bytes(), at.0 & !(leaf.size.bytes() - 1));
        let (all, from) = (range(start, size), Hpa(leaf.hpa.0 - (at.0 - start)));
        let machine = self.guest.machine;
        let protected = self.guest.with(|guard, _| guard.write_protect(all).is_ok());
        if !protected {
            return;
        }
        machine.protect(VMID, all);
        self.next_host = self.next_host.next_multiple_of(self.block);
        let to = Hpa(self.next_host);
        self.next_host += size;
        let writes = self.rng.bool();
        let attributes = Attributes { write: writes, dirty: true, ..leaf.attributes };
        let attributes = Attributes { accessed: true, ..attributes };
        if writes {
            machine.unprotect(VMID, all);
        }
        self.guest.with(|guard, _| {
            assert_eq!(guard.replace(all, from, to, attributes), Ok(size));
        });
        machine.take_back(from, size);
        for (&gpa, page) in self.model.range_mut(start..start + size) {
            *page = Page { hpa: to.0 + (gpa - start), protected: !writes };
        }
    }

    /// Sets an owner of pages that are not mapped, which keeps other uses out, and removes it
    /// again.
    fn own(&mut self) {
        let some = self.some();
        let owner = slat::Owner::new(self.rng.u64(..1 << slat::Owner::BITS));
        let page = PageSize::from_bytes(self.page).unwrap();
        let free = self.pages(some).all(|page| !self.model.contains_key(&page));
        self.guest.with(|guard, cache| {
            let owned = guard.set_owner(some, None, owner, cache);
            assert_eq!(owned.is_ok(), free, "{owned:?}");
            if free {
                assert!(guard.map(some, Hpa(RAM), Attributes::RAM, page, cache).is_err());
                assert_eq!(guard.set_owner(some, owner, None, cache), Ok(some.size()));
            }
            guard.prune(some).unwrap();
        });
    }

    fn harvest(&mut self) {
        if self.rng.bool() {
            return self.clean();
        }
        let some = self.some();
        let mut bitmap = vec![0u64; (some.size() / self.page).div_ceil(64) as usize];
        self.guest.with(|guard, _| _ = guard.harvest(some, &mut bitmap));
        for (index, gpa) in self.pages(some).enumerate() {
            if bitmap[index / 64] >> (index % 64) & 1 == 1 {
                self.guest.machine.copy(VMID, range(gpa, self.page));
            }
        }
    }

    /// A log that has the written pages already cleans all, and copies them.
    fn clean(&mut self) {
        let some = self.some();
        if self.guest.with(|guard, _| guard.clean(some).is_ok()) {
            self.guest.machine.copy(VMID, some);
        }
    }

    fn age(&mut self) {
        // The accessed bit belongs to the whole block, so that ageing a part would age all of it.
        let some = self.all();
        let words = (some.size() / self.page).div_ceil(64) as usize;
        let (mut young, mut unanswered) = (vec![0u64; words], vec![0u64; words]);
        let skip = [TableBits::Ignored, TableBits::Exact][self.rng.usize(..2)];
        self.guest.with(|guard, _| {
            let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
            guard
                .age(some, &mut ages, AgeOptions { clear: true, table_bits: skip, flush_tlb: true })
                .unwrap();
        });
        for (index, gpa) in self.pages(some).enumerate() {
            if (young[index / 64] | unanswered[index / 64]) >> (index % 64) & 1 == 1 {
                self.guest.machine.seen(VMID, range(gpa, self.page));
            }
        }
    }

    /// Checks what holds after each operation that is completed.
    fn check(&mut self) {
        let (machine, guest, all) = (self.guest.machine, &self.guest, self.all());
        machine.undisturbed();
        machine.claim_fresh(VMID, all);
        let leaf = |gpa: Gpa| guest.look(gpa);
        let attributes = |gpa| leaf(gpa).map(|leaf| leaf.attributes);
        machine.claim_clean(VMID, all, |gpa| attributes(gpa).is_some_and(|a| a.dirty));
        machine.claim_old(VMID, all, |gpa| leaf(gpa).is_some_and(|leaf| leaf.attributes.accessed));
        // At some addresses, the guest must find what the model says.
        for _ in 0..8 {
            let gpa = self.some().start().0;
            let cpu = self.rng.usize(..machine.cpus());
            let page = self.model.get(&gpa);
            let read = self.guest.attempt(cpu, gpa, slat_sim::Access::Read);
            assert_eq!(read.ok(), page.map(|page| Hpa(page.hpa)), "{gpa:#x}");
            let write = self.guest.attempt(cpu, gpa, slat_sim::Access::Write);
            assert!(write.is_err() || page.is_some_and(|page| !page.protected), "{gpa:#x}");
        }
    }

    fn run(mut self, steps: usize) {
        for step in 0..steps {
            self.run_guest();
            self.step();
            self.check();
            let found: Vec<_> = self.guest.machine.finish().iter().map(|v| v.to_string()).collect();
            assert!(found.is_empty(), "step {step}: {found:#?}");
        }
        self.guest.machine.undisturbed();
        let (start, bytes) = (self.all().start().0, self.all().size());
        self.guest.unmap(start, bytes);
        self.guest.tables.reclaim();
        clean(self.guest.machine);
    }
}

fn arm_history<const G: u32>(bbm: u8, seed: u64, blocks: u64, steps: usize) {
    let arch = Arm { bbm, range_instructions: seed % 2 == 1, ..Arm::new(G, BITS) };
    let machine = Machine::new(arch, 2);
    let machine = if seed.is_multiple_of(3) { machine } else { machine.random(seed) };
    History::new(&machine, arm64::<G>(), seed, blocks).run(steps);
}

#[test]
fn histories_on_4k_with_breaks_are_clean() {
    crate::seed::seeds(4).for_each(|seed| arm_history::<12>(0, seed, 3, 80));
}

#[test]
fn histories_on_4k_at_level_2_are_clean() {
    crate::seed::seeds(4).for_each(|seed| arm_history::<12>(2, seed, 3, 80));
}

#[test]
fn histories_on_4k_at_level_3_are_clean() {
    crate::seed::seeds(4).for_each(|seed| arm_history::<12>(3, seed, 3, 80));
}

/// A history on CPUs whose stores may be late; returns what the machine found.
fn late_history(repeats_tlbi: bool, seed: u64) -> usize {
    let arch = Arm { late_stores: true, repeats_tlbi, ..Arm::new(12, BITS) };
    let machine = Machine::new(arch, 2);
    let mut history = History::new(&machine, arm64::<12>(), seed, 3);
    history.run_guest();
    (0..60).for_each(|_| history.step());
    machine.undisturbed();
    machine.violations().len()
}

#[test]
fn late_stores_are_lost_unless_invalidations_are_repeated() {
    let seeds = || crate::seed::seeds(4);
    assert!(seeds().all(|seed| late_history(true, seed) == 0));
    assert!(seeds().any(|seed| late_history(false, seed) != 0), "no history loses a write");
}

#[test]
fn histories_on_16k_are_clean() {
    for (bbm, seed) in [0, 3].into_iter().zip(crate::seed::seeds(2)) {
        arm_history::<14>(bbm, seed, 2, 30);
    }
}

#[test]
fn histories_on_64k_are_clean() {
    for (bbm, seed) in [0, 2].into_iter().zip(crate::seed::seeds(2)) {
        arm_history::<16>(bbm, seed + 1, 2, 10);
    }
}

#[test]
fn histories_without_hardware_state_are_clean() {
    // Faults set accessed flags and dirty state. FEAT_S2FWB is in use, and there are three CPUs.
    let arch = Arm {
        forced_write_back: true,
        hardware_accessed: false,
        hardware_dirty: false,
        ..Arm::new(12, BITS)
    };
    let format = slat::format::arm64::Arm64::<12> {
        forced_write_back: true,
        hardware_dirty: false,
        ..arm64()
    };
    let seed = crate::seed::seed();
    let machine = Machine::new(arch, 3).random(seed);
    History::new(&machine, format, seed, 2).run(60);
}

fn histories_are_clean<C: Case>() {
    for seed in crate::seed::seeds(6) {
        let machine = C::machine(2);
        let machine = if seed % 2 == 0 { machine } else { machine.random(seed) };
        let blocks = if C::F::PAGE_SHIFT == 12 { 3 } else { 2 };
        let history = History::new(&machine, C::format(), seed, blocks);
        history.with_memory(C::HOST).run(C::STEPS);
    }
}

mod histories_are_clean {
    use super::histories_are_clean;
    use crate::cases::*;

    on_cases!(histories_are_clean: on_intel Intel);
    #[cfg(feature = "every-format")]
    on_cases!(histories_are_clean: on_arm_without_dirty_state ArmPlain, on_arm_lpa2 Lpa2K4,
        on_arm_lpa2_16k Lpa2K16, on_arm_lpa_64k LpaK64, on_amd Amd,
        on_amd_with_five_levels Amd5, on_riscv Hart, on_riscv_without_svadu HartSvade,
        on_riscv_with_svvptc HartSvvptc, on_radix_4k Radix4k, on_radix_64k Radix64k,
        on_radix_4k_where_software_sets_r_and_c Radix4kAsks,
        on_radix_64k_where_software_sets_r_and_c Radix64kAsks);
}

#[test]
fn execution_can_be_denied() {
    let machine = ept_machine();
    let guest = Guest::ept(&machine);
    let data = Attributes { execute: Execute::None, ..Attributes::RAM };
    guest.map_as(BASE, RAM, 0x1000, K4, data);
    assert!(machine.cpu(0).execute(BASE).is_err() && machine.cpu(0).read(BASE).is_ok());
    clean(&machine);
}
