//! A guest on the machine, and its vCPUs as a VMM runs them.

use crate::model::{Machine, RAM, Ram};
use slat::format::arm64::Arm64K4;
use slat::{Access, Gpa, GpaRange, Hpa, Maintenance, PageSize, Vmid};
use slat_guest::{
    CachePolicy, CacheSwitch, Config, Guest, Hva, HvaRange, MemslotId, MemslotSpec, Outcome, Vcpu,
    Worker,
};

pub const VCPUS: u16 = 4;
/// The size of the guest's memory in bytes, and its first guest address.
pub const BYTES: u64 = 64 << 20;
pub const BASE: u64 = 1 << 30;

pub type TestGuest<'m> = Guest<'m, Arm64K4, Machine, Ram<'m>>;
pub type TestWorker<'w, 'm> = Worker<'w, Arm64K4, Machine, Ram<'m>>;

/// The side that maintains lines that were written past the caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Manners {
    /// The guest maintains each line by its address, as a machine without a hypervisor requires.
    Cleans,
    /// The hypervisor does; at most, the guest maintains by set and way before it switches off.
    Relies,
}

impl Manners {
    pub const ALL: [Self; 2] = [Self::Cleans, Self::Relies];
}

pub fn config(policy: CachePolicy) -> Config {
    let config = Config::new(VCPUS, PageSize::SIZE_2M);
    Config { caches: policy, ..config }
}

pub fn memslot(bytes: u64, log_dirty: bool) -> MemslotSpec {
    let (id, host) = (MemslotId(0), Hva(RAM));
    MemslotSpec { log_dirty, ..MemslotSpec::new(id, Gpa(BASE), bytes, host) }
}

/// Makes a guest with one memslot for the duration of `run`.
pub fn with_guest<R>(
    machine: &Machine,
    config: Config,
    log_dirty: bool,
    run: impl FnOnce(&TestGuest<'_>) -> R,
) -> R {
    let format = Arm64K4 {
        hardware_dirty: config.logging == slat_guest::Logging::Hardware,
        forced_write_back: machine.forces_caches(),
        ..Arm64K4::default()
    };
    let backing = Ram { machine, interrupts: None.into() };
    let guest = Guest::new(format, Vmid(1), 40, machine, backing, config).unwrap();
    Worker::new(&guest).unwrap().set_memslot(memslot(BYTES, log_dirty)).unwrap();
    let result = run(&guest);
    // SAFETY: no CPU ever loads these tables.
    unsafe { guest.destroy() };
    result
}

/// Returns the guest address of a page, by its number.
pub const fn page(number: u64) -> u64 {
    BASE + number * 4096
}

pub fn range(gpa: u64, bytes: u64) -> GpaRange {
    GpaRange::new(Gpa(gpa), bytes).unwrap()
}

pub fn hpa(gpa: u64) -> u64 {
    gpa - BASE + RAM
}

pub fn host_range(gpa: u64, bytes: u64) -> HvaRange {
    HvaRange { start: Hva(hpa(gpa)), bytes }
}

/// A read did not find the last write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LostWrite;

/// A vCPU, with its caches.
pub struct Cpu<'w, 'm> {
    pub vcpu: Vcpu<'w, Arm64K4, Machine, Ram<'m>>,
    machine: &'m Machine,
    pub manners: Manners,
    /// Whether its caches are really on, reported or not.
    on: bool,
    traps: bool,
    loaded: Hpa,
}

impl<'w, 'm> Cpu<'w, 'm> {
    pub fn new(guest: &'w TestGuest<'m>, id: u16, manners: Manners) -> Self {
        let vcpu = Vcpu::new(guest, id).unwrap();
        let (loaded, on) = (vcpu.root(), vcpu.is_cached());
        let machine = guest.tables().platform();
        Self { vcpu, machine, manners, on, traps: true, loaded }
    }

    pub fn worker(&mut self) -> &mut TestWorker<'w, 'm> {
        self.vcpu.worker()
    }

    /// Returns the host address of an access, after the faults that it takes.
    fn walk(&mut self, gpa: u64, access: Access) -> u64 {
        assert_eq!(self.loaded, self.vcpu.root(), "runs on the root that was said to be its own");
        for _ in 0..8 {
            let found = self.vcpu.translate(Gpa(gpa)).filter(|leaf| {
                let rights = leaf.attributes;
                access != Access::Write || rights.write
            });
            if let Some(leaf) = found {
                return leaf.hpa.0;
            }
            let outcome = self.vcpu.fault(Gpa(gpa), access);
            assert!(!matches!(outcome, Outcome::Refused(_) | Outcome::Mmio), "{outcome:?}");
        }
        panic!("{gpa:#x} keeps faulting");
    }

    /// Maps the page, without an access.
    pub fn touch(&mut self, gpa: u64, access: Access) {
        self.walk(gpa, access);
    }

    pub fn read(&mut self, gpa: u64) -> u64 {
        let hpa = self.walk(gpa, Access::Read);
        self.machine.read(hpa, self.on)
    }

    pub fn execute(&mut self, gpa: u64) -> u64 {
        let hpa = self.walk(gpa, Access::Execute);
        self.machine.execute(hpa, self.on)
    }

    /// Writes. A guest that maintains drops the line before and after a write past the caches.
    pub fn write(&mut self, gpa: u64, value: u64) {
        let hpa = self.walk(gpa, Access::Write);
        let cleans = !self.on && self.manners == Manners::Cleans;
        if cleans {
            self.machine.clean(hpa);
        }
        self.machine.write(hpa, value, self.on);
        if cleans {
            self.machine.clean(hpa);
        }
    }

    /// Reads, and compares with the expected value.
    pub fn expect(&mut self, gpa: u64, value: u64) -> Result<(), LostWrite> {
        if self.read(gpa) == value { Ok(()) } else { Err(LostWrite) }
    }

    fn follow(&mut self, switch: CacheSwitch) {
        self.traps = switch.trap;
        if switch.root_changed {
            assert_ne!(self.loaded, self.vcpu.root());
            self.loaded = self.vcpu.root();
        }
    }

    /// Switches its caches on.
    pub fn on(&mut self) {
        self.on = true;
        self.toggled();
    }

    /// Switches its caches off; `needed` are the lines that it will read past them.
    pub fn off(&mut self, needed: &[u64]) {
        match self.manners {
            Manners::Cleans => needed.iter().for_each(|&gpa| {
                let hpa = self.walk(gpa, Access::Read);
                self.machine.clean(hpa);
            }),
            Manners::Relies => {
                let switch = self.vcpu.set_way();
                self.follow(switch);
            }
        }
        self.on = false;
        self.toggled();
    }

    /// Reports the switch, if the VMM traps it.
    fn toggled(&mut self) {
        self.machine.moment();
        if self.traps {
            let switch = self.vcpu.set_caches(self.on);
            self.follow(switch);
        }
        self.machine.moment();
    }

    /// Starts the vCPU, which was off or had been reset.
    pub fn start(&mut self) {
        self.on = false;
        let switch = self.vcpu.reset();
        self.follow(switch);
    }

    /// The host writes a line of the guest's memory, and reports it.
    pub fn host_writes(&mut self, gpa: u64, value: u64) {
        self.machine.write(hpa(gpa), value, true);
        self.worker().host_wrote(range(gpa & !4095, 4096), Maintenance::Data);
    }

    /// The host reads a line of the guest's memory, after it has announced that.
    pub fn host_reads(&mut self, gpa: u64) -> u64 {
        self.worker().host_reads(range(gpa & !4095, 4096));
        self.machine.read(hpa(gpa), true)
    }
}
