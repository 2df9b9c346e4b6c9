//! The machine: CPUs, memory, and the operations of a test on them.

use crate::arch::{Access, Arch, Descriptor, Ept, Fault, Npt, RiscV};
use crate::host::Host;
use crate::lazy::{Choice, Lazy};
use crate::memory::Memory;
use crate::owned::OwnedPages;
use crate::state::{Cpu, Eye, Iommu, Root, State};
use crate::tlb::{Scope, Walk};
use crate::uses::UseLog;
use crate::violation::{Kind, Log, Violation};
use slat::{
    BreakBeforeMake, Gpa, GpaRange, Hpa, Invalidation, Maintenance, ReaderSlot, Readers, Vmid,
};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Mutex, MutexGuard};

/// Number of threads that may walk the tables in software at once.
const READERS: usize = 16;

/// Point at which the engine calls the machine; a test's hook runs there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Moment {
    /// A table was filled, and is not linked yet.
    Fill,
    /// The engine begins to look at a table.
    Table,
    /// Stores are to be published; this is not done yet.
    Publish,
    /// An invalidation is to be done; this is not done yet.
    Invalidate,
    /// An invalidation was done.
    Invalidated,
}

/// A page-table entry, for tests that inspect it or change it without the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Address of the table.
    pub table: Hpa,
    /// The entry's number in the table.
    pub index: usize,
    /// The table's level, in the architecture's numbering.
    pub level: i8,
    /// The entry's value when it was read.
    pub raw: u64,
}

/// The functions by which a hypervisor's platform serves the engine's calls.
#[derive(Debug)]
pub struct Firmware<A: Arch> {
    /// [`slat::Platform::publish`].
    pub publish: fn(&Machine<A>),
    /// [`slat::Platform::invalidate`].
    pub invalidate: fn(&Machine<A>, &Invalidation),
    /// [`slat::Platform::invalidate_local`].
    pub invalidate_local: fn(&Machine<A>, &Invalidation),
    /// [`slat::Platform::maintain`].
    pub maintain: fn(&Machine<A>, Hpa, u64, Maintenance),
    /// Called with a CPU and the address of its last fault, before the guest continues, after any
    /// result of the fault's handling.
    pub resume: fn(&Machine<A>, usize, Gpa),
}

impl<A: Arch> Clone for Firmware<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A: Arch> Copy for Firmware<A> {}

/// An architecture, and how a correct platform of it serves the engine.
pub trait HasFirmware: Arch + Copy {
    /// The platform's functions.
    const FIRMWARE: Firmware<Self>;
}

type Hook<A> = Box<dyn FnMut(&Machine<A>, Moment) + Send>;

/// A machine of CPUs that run guests on the engine's tables, and a host that owns the memory. The
/// CPUs are as lazy as their architecture allows.
///
/// It is the [`slat::Platform`] of the engine under test. The engine's calls do not panic: the
/// machine reports broken rules in [`Machine::violations`].
pub struct Machine<A: Arch> {
    arch: A,
    state: Mutex<State>,
    pub(crate) readers: Readers<[ReaderSlot; READERS]>,
    pub(crate) firmware: Firmware<A>,
    pub(crate) declared: BreakBeforeMake,
    hook: Mutex<Option<Hook<A>>>,
}

impl<A: HasFirmware> Machine<A> {
    /// Creates a machine of `cpus` CPUs, with [`Lazy::ALL`] and [`Choice::Stalest`].
    pub fn new(arch: A, cpus: usize) -> Self {
        let declared = arch.break_before_make();
        let state = State {
            arch: Box::new(arch),
            lazy: Lazy::ALL,
            choice: Choice::Stalest,
            rng: fastrand::Rng::with_seed(0),
            clock: 0,
            memory: Memory::default(),
            host: Host::default(),
            owned: OwnedPages::default(),
            iommu: Iommu::default(),
            uses: UseLog::default(),
            log: Log::default(),
            cpus: (0..cpus).map(|_| Cpu::default()).collect(),
            roots: Vec::new(),
            vmids: BTreeSet::new(),
            threads: HashMap::new(),
            handles_conflicts: declared == BreakBeforeMake::ConflictHandled,
            conflict_aborts: 0,
        };
        Self {
            arch,
            state: Mutex::new(state),
            readers: Readers::<[ReaderSlot; READERS]>::new([const { ReaderSlot::new() }; READERS]),
            firmware: A::FIRMWARE,
            declared,
            hook: Mutex::new(None),
        }
    }
}

impl<A: Arch> Machine<A> {
    /// Sets the switches of laziness.
    #[must_use]
    pub fn lazy(self, lazy: Lazy) -> Self {
        self.state().lazy = lazy;
        self
    }

    /// Makes the frames of tables begin at `hpa`: for tests of the highest addresses, and of
    /// descriptors that split an address into several fields.
    #[must_use]
    pub fn frames_from(self, hpa: u64) -> Self {
        self.state().memory.next = hpa;
        self
    }

    /// Makes CPUs choose at random, from `seed`.
    #[must_use]
    pub fn random(self, seed: u64) -> Self {
        self.state().choice = Choice::Random;
        self.state().rng = fastrand::Rng::with_seed(seed);
        self
    }

    /// Sets the functions that serve the engine's calls.
    #[must_use]
    pub fn firmware(self, firmware: Firmware<A>) -> Self {
        Self { firmware, ..self }
    }

    /// Sets what the platform declares to the engine about break-before-make. The machine handles
    /// conflict aborts only with [`BreakBeforeMake::ConflictHandled`].
    #[must_use]
    pub fn declaring(self, declared: BreakBeforeMake) -> Self {
        self.state().handles_conflicts = declared == BreakBeforeMake::ConflictHandled;
        Self { declared, ..self }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // A panic of another thread, which poisons the lock, must not hide the failure of this one.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the architecture of the CPUs.
    pub const fn arch(&self) -> &A {
        &self.arch
    }

    /// Returns the number of CPUs.
    pub fn cpus(&self) -> usize {
        self.state().cpus.len()
    }

    /// Returns CPU `index`.
    ///
    /// # Panics
    /// If there is no such CPU.
    pub fn cpu(&self, index: usize) -> Vcpu<'_, A> {
        assert!(index < self.cpus(), "no CPU {index}");
        Vcpu { machine: self, index }
    }

    /// Makes the calling thread run on CPU `index`, where its local invalidations take effect.
    pub fn here(&self, index: usize) {
        self.state().issuer().cpu = index;
    }

    /// Calls `hook` at each of the engine's calls, except while the hook itself runs.
    pub fn meanwhile(&self, hook: impl FnMut(&Self, Moment) + Send + 'static) {
        *self.hook() = Some(Box::new(hook));
    }

    /// Removes the hook.
    pub fn undisturbed(&self) {
        *self.hook() = None;
    }

    fn hook(&self) -> MutexGuard<'_, Option<Hook<A>>> {
        self.hook.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn moment(&self, moment: Moment) {
        let speculates = moment != Moment::Table;
        if speculates {
            self.speculate();
        }
        let Some(mut hook) = self.hook().take() else { return };
        hook(self, moment);
        if speculates {
            self.speculate();
        }
        self.hook().get_or_insert(hook);
    }

    /// Makes every CPU walk to all that it can reach, if [`Lazy::speculation`] is on.
    pub fn speculate(&self) {
        let mut state = self.state();
        if state.lazy.speculation {
            state.speculate();
        }
    }

    /// Returns the CPU of the calling thread.
    pub(crate) fn issuer(&self) -> usize {
        self.state().issuer().cpu
    }

    /// Makes a CPU drop its translations of `range`, and keep its links to tables. No instruction
    /// does this; a CPU may do it at any time.
    pub fn forget(&self, cpu: usize, vmid: Vmid, range: GpaRange) {
        let range = Some((range.start().0, range.end().0));
        let scope = Scope { cpu: Some(cpu), range, walks: false, ..Scope::guest(vmid) };
        self.state().forget(&scope);
    }

    /// Limits the number of live frames from now on.
    pub fn limit(&self, frames: usize) {
        self.state().memory.limit = frames;
    }

    /// Returns the number of frames that are allocated and not freed.
    pub fn frames(&self) -> usize {
        self.state().memory.live
    }

    /// Returns the number of conflict aborts that CPUs raised.
    pub fn conflict_aborts(&self) -> u64 {
        self.state().conflict_aborts
    }

    /// Returns the entry where a walk for `gpa` ends now.
    ///
    /// # Panics
    /// If no CPU has the guest's tables loaded.
    pub fn pte(&self, vmid: Vmid, gpa: Gpa) -> Place {
        let mut state = self.state();
        let root = state.roots.iter().find(|root| root.vmid == vmid).copied();
        let mut walk = state.start(root.expect("the guest is loaded"));
        loop {
            let shift = state.arch.shift(walk.level);
            let index = ((gpa.0 - walk.start) >> shift) as usize;
            let found = state.read(None, &walk, index).expect("a table");
            let link = state.arch.decode(found.now, walk.level);
            let Descriptor::Table { table, rights } = link else {
                let (table, level) = (Hpa(walk.table), walk.level);
                return Place { table, index, level, raw: found.now };
            };
            let (start, level) = (gpa.0 >> shift << shift, state.arch.below(walk.level));
            walk = Walk { start, shift, level, table, rights, born: 0 };
        }
    }

    /// Returns the entry that links the table of `place`.
    ///
    /// # Panics
    /// If no entry links that table, as for a root.
    pub fn above(&self, vmid: Vmid, place: &Place) -> Place {
        let mut state = self.state();
        let roots: Vec<_> = state.roots.iter().filter(|root| root.vmid == vmid).copied().collect();
        let mut tables: Vec<_> = roots.into_iter().map(|root| state.start(root)).collect();
        let (_, links) = state.explore(Eye::GOD, tables.clone());
        tables.extend(links);
        for walk in tables {
            for index in 0..state.arch.entries(walk.level) {
                let Some(found) = state.read(None, &walk, index) else { break };
                let link = state.arch.decode(found.now, walk.level);
                if matches!(link, Descriptor::Table { table, .. } if table == place.table.0) {
                    let (table, level) = (Hpa(walk.table), walk.level);
                    return Place { table, index, level, raw: found.now };
                }
            }
        }
        panic!("nothing links the table at {}", place.table);
    }

    /// Returns the value of entry `index` of the table at `table`.
    ///
    /// # Panics
    /// If there is no such table or entry.
    pub fn peek(&self, table: Hpa, index: usize) -> u64 {
        self.state().memory.get(table.0).expect("a table").cell(index).load()
    }

    /// Stores `raw` to an entry, as code that does not use the engine would.
    ///
    /// # Panics
    /// If there is no such table or entry.
    pub fn poke(&self, table: Hpa, index: usize, raw: u64) {
        self.state().memory.get(table.0).expect("a table").cell(index).store(raw);
    }

    /// Returns the violations found since the last call.
    pub fn violations(&self) -> Vec<Violation> {
        self.state().log.take()
    }

    /// Returns the violations found since the last call, and those that only the end of a test
    /// shows: freed frames that were written.
    pub fn finish(&self) -> Vec<Violation> {
        let mut state = self.state();
        for hpa in state.memory.spoilt() {
            let used = format!("the frame at {hpa:#x} was written");
            state.log.report(Kind::BadFree, None, None, used, "it was freed before");
        }
        state.log.take()
    }
}

impl Machine<Ept> {
    /// INVEPT on one CPU: single-context for a guest, or all-context for `None`.
    pub fn invept(&self, cpu: usize, guest: Option<Vmid>) {
        let scope = Scope { cpu: Some(cpu), vmid: guest, ..Scope::guest(Vmid(0)) };
        self.state().forget(&scope);
    }

    /// INVLPG on one CPU. It takes a linear address of the hypervisor, hence drops no translation
    /// of a guest.
    pub fn invlpg(&self, _cpu: usize, _linear: u64) {}
}

impl Machine<Npt> {
    /// VMRUN on one CPU with a VMCB that asks for a flush of this guest's translations.
    pub fn flush_asid(&self, cpu: usize, guest: Vmid) {
        let scope = Scope { cpu: Some(cpu), ..Scope::guest(guest) };
        self.state().forget(&scope);
    }
}

impl Machine<RiscV> {
    /// FENCE W, W: harts that fence after it see what the calling thread stored to the tables
    /// before it.
    pub fn fence(&self) {
        let mut state = self.state();
        // Until this fence, walkers may have read older values.
        if state.lazy.speculation {
            state.speculate();
        }
        state.drain();
    }

    /// HFENCE.GVMA on one hart. `rs1` is a guest physical address shifted right by 2, `rs2` a VMID;
    /// `None` is x0. With an address, it orders reads of leaves alone.
    pub fn hfence_gvma(&self, hart: usize, rs1: Option<u64>, rs2: Option<Vmid>) {
        let scope = Scope { cpu: Some(hart), vmid: rs2, ..Scope::guest(Vmid(0)) };
        let scope = match rs1.map(|operand| operand << 2 >> 12 << 12) {
            Some(gpa) => Scope { range: Some((gpa, gpa + 0x1000)), walks: false, ..scope },
            None => scope,
        };
        self.state().forget(&scope);
    }

    /// HFENCE.VVMA on one hart. It orders the guest's own tables, hence keeps all entries of the
    /// second stage alone.
    pub fn hfence_vvma(&self, hart: usize, guest: Vmid) {
        let none = Scope { leaves: false, walks: false, ..Scope::guest(guest) };
        self.state().forget(&Scope { cpu: Some(hart), ..none });
    }
}

impl<A: Arch> fmt::Debug for Machine<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Machine")
            .field("arch", &state.arch)
            .field("lazy", &state.lazy)
            .field("violations", &state.log.all())
            .finish_non_exhaustive()
    }
}

/// A CPU, and the guest that runs on it.
#[derive(Clone, Copy, Debug)]
pub struct Vcpu<'m, A: Arch> {
    pub(crate) machine: &'m Machine<A>,
    pub(crate) index: usize,
}

impl<A: Arch> Vcpu<'_, A> {
    /// Loads a guest's tables on this CPU.
    pub fn load(&self, vmid: Vmid, root: Hpa) {
        let mut state = self.machine.state();
        let root = Root { vmid, table: root.0 };
        if !state.roots.contains(&root) {
            state.roots.push(root);
        }
        state.vmids.insert(vmid.0);
        state.cpus[self.index].root = Some(root);
        state.forget_roots();
        state.drain();
    }

    /// Unloads the tables. What the CPU has cached stays.
    pub fn unload(&self) {
        let mut state = self.machine.state();
        state.cpus[self.index].root = None;
        state.forget_roots();
    }

    /// The guest reads.
    ///
    /// # Errors
    /// The fault that it takes.
    pub fn read(&self, gpa: u64) -> Result<Hpa, Fault> {
        self.access(gpa, Access::Read)
    }

    /// The guest writes.
    ///
    /// # Errors
    /// The fault that it takes.
    pub fn write(&self, gpa: u64) -> Result<Hpa, Fault> {
        self.access(gpa, Access::Write)
    }

    /// The guest executes.
    ///
    /// # Errors
    /// The fault that it takes.
    pub fn execute(&self, gpa: u64) -> Result<Hpa, Fault> {
        self.access(gpa, Access::Execute)
    }

    /// The guest does `access` with its caches on.
    ///
    /// # Errors
    /// The fault that it takes.
    pub fn access(&self, gpa: u64, access: Access) -> Result<Hpa, Fault> {
        self.guest_access(gpa, access, false)
    }

    /// The guest's MMU walks its own tables, through an entry at `gpa`.
    ///
    /// # Errors
    /// The fault that it takes.
    pub fn walk(&self, gpa: u64) -> Result<Hpa, Fault> {
        let writes = self.machine.arch.walks_write();
        self.access(gpa, if writes { Access::Write } else { Access::Read })
    }

    fn guest_access(&self, gpa: u64, access: Access, uncached: bool) -> Result<Hpa, Fault> {
        let faulted = self.machine.state().cpus[self.index].faulted.take();
        if let Some(gpa) = faulted {
            (self.machine.firmware.resume)(self.machine, self.index, Gpa(gpa));
        }
        let mut state = self.machine.state();
        let done = state.access(self.index, gpa, access, uncached);
        state.cpus[self.index].faulted = done.err().map(|_| gpa);
        done.map(Hpa)
    }

    /// The guest does `access` with its caches off.
    ///
    /// # Errors
    /// The fault that it takes.
    pub fn access_uncached(&self, gpa: u64, access: Access) -> Result<Hpa, Fault> {
        self.guest_access(gpa, access, true)
    }

    /// Returns whether this CPU holds a translation of `gpa`.
    pub fn holds(&self, vmid: Vmid, gpa: Gpa) -> bool {
        let state = self.machine.state();
        let cpu = &state.cpus[self.index];
        !(cpu.leaves.at(vmid, gpa.0).is_empty() && cpu.combined.at(vmid, gpa.0).is_empty())
    }
}
