//! A guest on the adversarial machine: the engine has its tables, and the host has its memory.

use slat::format::arm64::Arm64;
use slat::format::ept::Ept1G;
use slat::{
    Access, Attributes, Format, Gpa, GpaRange, Guard, Hpa, Invalidation, PageSize, Reader,
    TableCache, Tables, UnmapBatch, Vmid,
};
use slat_sim::{Arch, Arm, Ept, Firmware, HasFirmware, Kind, Lazy, Machine, Place, Violation};

pub type Cache<'c, F, A> = TableCache<'c, F, Machine<A>>;

pub const VMID: Vmid = Vmid(7);
/// Where the host's memory begins.
pub const RAM: u64 = 0x4000_0000;
/// Where the guest's memory begins, in the middle of its addresses.
pub const BASE: u64 = 0x8000_0000;
pub const K4: PageSize = PageSize::SIZE_4K;
pub const M2: PageSize = PageSize::SIZE_2M;
/// Bits of a guest physical address.
pub const BITS: u32 = 39;

/// The attributes with which a read fault maps a page.
pub const CLEAN: Attributes = Attributes { dirty: false, ..Attributes::RAM };

pub fn range(start: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(start), bytes).unwrap()
}

pub fn arm() -> Arm {
    Arm::new(12, BITS)
}

pub fn arm64<const G: u32>() -> Arm64<G> {
    Arm64 { hardware_dirty: true, ..Default::default() }
}

pub fn ept() -> Ept1G {
    Ept1G { output_bits: Ept::default().physical_bits, ..Default::default() }
}

/// Creates a machine of two Arm CPUs with FEAT_BBM level 0.
pub fn arm_machine() -> Machine<Arm> {
    Machine::new(arm(), 2)
}

pub fn ept_machine() -> Machine<Ept> {
    Machine::new(Ept::default(), 2)
}

/// Returns a platform that invalidates by `invalidate`.
pub fn invalidating<A: HasFirmware>(invalidate: fn(&Machine<A>, &Invalidation)) -> Firmware<A> {
    Firmware { invalidate, ..A::FIRMWARE }
}

/// Returns all kinds of laziness except one.
pub fn without(switch: fn(&mut Lazy)) -> Lazy {
    let mut lazy = Lazy::ALL;
    switch(&mut lazy);
    lazy
}

pub struct Guest<'p, F: Format, A: Arch> {
    pub machine: &'p Machine<A>,
    pub tables: Tables<'p, F, Machine<A>>,
}

pub type ArmGuest<'p> = Guest<'p, Arm64<12>, Arm>;
pub type EptGuest<'p> = Guest<'p, Ept1G, Ept>;

impl<'p> ArmGuest<'p> {
    pub fn arm(machine: &'p Machine<Arm>) -> Self {
        Guest::new(machine, arm64())
    }
}

impl<'p> EptGuest<'p> {
    pub fn ept(machine: &'p Machine<Ept>) -> Self {
        Guest::new(machine, ept())
    }
}

impl<'p, F: Format, A: Arch> Guest<'p, F, A> {
    /// Creates empty tables, loads them on every CPU, and gives the guest 64 MiB of memory.
    pub fn new(machine: &'p Machine<A>, format: F) -> Self {
        Self::with_bits(machine, format, BITS)
    }

    pub fn with_bits(machine: &'p Machine<A>, format: F, bits: u32) -> Self {
        let tables = Tables::new(format, VMID, bits, machine).unwrap();
        machine.give(Hpa(RAM), 64 << 20);
        let guest = Self { machine, tables };
        (0..machine.cpus()).for_each(|cpu| machine.cpu(cpu).load(VMID, guest.tables.root()));
        guest
    }

    /// Runs `operate` with a guard, and completes what it owes.
    pub fn with<R>(
        &self,
        operate: impl FnOnce(&mut Guard<'_, 'p, F, Machine<A>>, &mut Cache<'_, F, A>) -> R,
    ) -> R {
        let mut storage = [const { None }; 16];
        let mut cache = TableCache::new(self.machine, &mut storage);
        cache.fill(8).unwrap();
        let mut reader = Reader::register(self.machine).unwrap();
        let mut guard = self.tables.enter(&mut reader).unwrap();
        let result = operate(&mut guard, &mut cache);
        guard.invalidate();
        result
    }

    pub fn map_as(&self, gpa: u64, hpa: u64, bytes: u64, size: PageSize, attributes: Attributes) {
        self.with(|guard, cache| {
            guard.map(range(gpa, bytes), Hpa(hpa), attributes, size, cache).unwrap();
        });
    }

    pub fn map(&self, gpa: u64, hpa: u64, bytes: u64, size: PageSize) {
        self.map_as(gpa, hpa, bytes, size, Attributes::RAM);
    }

    /// Maps pages as a read fault does, clean if hardware marks the first write.
    pub fn map_clean(&self, gpa: u64, hpa: u64, bytes: u64, size: PageSize) {
        self.map_as(gpa, hpa, bytes, size, self.possible(CLEAN));
    }

    /// Returns the attributes if the format can encode them, or else [`Attributes::RAM`], which is
    /// dirty.
    pub fn possible(&self, attributes: Attributes) -> Attributes {
        let clean = self.with(|guard, _| guard.format().encode(attributes).is_ok());
        if clean { attributes } else { Attributes::RAM }
    }

    /// Unmaps correctly: takes memory back when the guest cannot reach it any more.
    pub fn unmap(&self, gpa: u64, bytes: u64) {
        let mut storage = [slat::UnmapEntry::EMPTY; 64];
        let mut batch = UnmapBatch::new(&self.tables, &mut storage);
        self.with(|guard, _| guard.unmap(range(gpa, bytes), &mut batch).unwrap());
        for leaf in batch.complete() {
            self.machine.take_back(leaf.hpa, leaf.bytes);
        }
    }

    pub fn write_protect(&self, gpa: u64, bytes: u64) {
        self.with(|guard, _| guard.write_protect(range(gpa, bytes)).unwrap());
        self.machine.protect(VMID, range(gpa, bytes));
    }

    pub fn relax(&self, gpa: u64, bytes: u64, access: Access) {
        self.machine.unprotect(VMID, range(gpa, bytes));
        self.with(|guard, _| {
            guard.relax(range(gpa, bytes), access).map(slat::LocalFlush::not_needed_here).unwrap()
        });
        self.forget_rights(gpa, bytes);
    }

    /// Invalidates as a fault handler must on its own CPU after it granted a right; here on all
    /// CPUs.
    pub fn forget_rights(&self, gpa: u64, bytes: u64) {
        slat::Platform::publish(self.machine);
        for cpu in 0..self.machine.cpus() {
            self.machine.forget(cpu, VMID, range(gpa, bytes));
        }
    }

    pub fn split(&self, gpa: u64, bytes: u64, size: PageSize) {
        self.with(|guard, cache| guard.split(range(gpa, bytes), size, cache).unwrap());
    }

    pub fn collapse(&self, gpa: u64, bytes: u64, size: PageSize) {
        self.with(|guard, _| guard.collapse(range(gpa, bytes), size).unwrap());
    }

    /// Returns the engine's translation of the page.
    pub fn look(&self, gpa: Gpa) -> Option<slat::Translation> {
        let mut reader = Reader::register(self.machine).unwrap();
        let guard = self.tables.enter(&mut reader).unwrap();
        guard.translate(gpa).unwrap()
    }

    /// Returns whether the engine reports the page as dirty.
    pub fn is_dirty(&self, gpa: Gpa) -> bool {
        self.look(gpa).is_some_and(|found| found.attributes.dirty)
    }

    /// Claims that every page that was written after it was copied is dirty.
    pub fn check_dirty(&self, gpa: u64, bytes: u64) {
        self.machine.claim_clean(VMID, range(gpa, bytes), |gpa| self.is_dirty(gpa));
    }

    pub fn fresh(&self, gpa: u64, bytes: u64) {
        self.machine.claim_fresh(VMID, range(gpa, bytes));
    }

    pub fn place(&self, gpa: u64) -> Place {
        self.machine.pte(VMID, Gpa(gpa))
    }

    /// Changes the entry where `gpa` ends, without the engine.
    pub fn poke(&self, gpa: u64, change: impl FnOnce(u64) -> u64) -> Place {
        let place = self.place(gpa);
        self.machine.poke(place.table, place.index, change(place.raw));
        place
    }

    /// Invalidates everything correctly, without the engine.
    pub fn flush(&self) {
        let all = Invalidation { vmid: VMID, range: None, leaf: None, tables: true };
        slat::Platform::invalidate(self.machine, &all);
    }

    pub fn read(&self, cpu: usize, gpa: u64) {
        self.attempt(cpu, gpa, slat_sim::Access::Read).unwrap();
    }

    pub fn write(&self, cpu: usize, gpa: u64) {
        self.attempt(cpu, gpa, slat_sim::Access::Write).unwrap();
    }

    /// Does an access of the guest, and handles faults that need no change of rights: a leaf that
    /// software has to mark, and cached entries that are older than the tables.
    pub fn attempt(
        &self,
        cpu: usize,
        gpa: u64,
        access: slat_sim::Access,
    ) -> Result<Hpa, slat_sim::Fault> {
        let arch = self.machine.arch();
        let write = access == slat_sim::Access::Write;
        let mut done = self.machine.cpu(cpu).access(gpa, access);
        for _ in 0..3 {
            if done.is_ok() {
                break;
            }
            let leaf = self.look(Gpa(gpa)).filter(|leaf| !write || leaf.attributes.write);
            match (done, leaf) {
                (Err(slat_sim::Fault::Accessed), Some(leaf)) => {
                    let start = gpa & !(leaf.size.bytes() - 1);
                    let access = if write { Access::Write } else { Access::Read };
                    self.with(|guard, _| {
                        guard
                            .relax(range(start, leaf.size.bytes()), access)
                            .map(slat::LocalFlush::not_needed_here)
                    })
                    .unwrap();
                }
                (Err(_), Some(_)) if arch.caches_invalid() || arch.caches_unmarked() => {}
                _ => break,
            }
            done = self.machine.cpu(cpu).access(gpa, access);
        }
        done
    }
}

/// Returns the kinds of the violations, each once.
pub fn kinds(violations: &[Violation]) -> Vec<Kind> {
    let mut kinds: Vec<_> = violations.iter().map(|violation| violation.kind).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

/// Checks that the machine found a violation of this kind.
#[track_caller]
pub fn caught<A: Arch>(machine: &Machine<A>, kind: Kind) {
    let found = machine.finish();
    let text: Vec<_> = found.iter().map(ToString::to_string).collect();
    assert!(kinds(&found).contains(&kind), "no {kind:?} in {text:#?}");
}

/// Checks that the machine found no violation.
#[track_caller]
pub fn clean<A: Arch>(machine: &Machine<A>) {
    let text: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
    assert!(text.is_empty(), "{text:#?}");
}
