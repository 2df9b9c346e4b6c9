//! The guest: its memory, and the start of each vCPU.

use super::keeper::Keeper;
use super::memory::{self, GUEST, Machine, PAGE, PAGE_SIZE, Run, Stage2};
use super::platform::{El2, id_registers};
use super::stalls::Notes;
use super::{cpu, devicetree, report::say};
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use slat::format::arm64::id::IdRegisters;
use slat::{Format, Gpa, Hpa, PageSize, Vmid};
use slat_guest::{
    CachePolicy, Config, Guest, Hva, HvaRange, MemslotId, MemslotSpec, PostCopy, PrivateAt, Vcpu,
    Worker,
};
use slat_hypervisor::layout::*;
use slat_hypervisor::options::{Caches, ExecuteHuge, Job, Logging, Options};
use spin::Mutex;

/// The guest's memory.
pub type Memory = Guest<'static, Stage2, El2, Behind>;
/// Backing of the guest's memory: the machine's memory, whose content may arrive late.
pub type Behind = PostCopy<Machine>;
/// A thread in `slat-guest`: a vCPU, or the manager, which never runs but can map pages.
pub type Thread<'w> = Vcpu<'w, Stage2, El2, Behind>;

/// Memslot of the guest's RAM. Devices have the memslots that follow.
pub const RAM_SLOT: MemslotId = MemslotId(0);

/// State of the hypervisor, which all CPUs share.
pub struct Hypervisor {
    pub options: Options<'static>,
    pub machine: &'static El2,
    pub id: IdRegisters,
    pub memory: Memory,
    pub vtcr: u64,
    /// Time at which the guest is ended, by `cpu::now`.
    pub deadline: u64,
    /// Start of each vCPU when it is switched on.
    pub vcpus: Box<[Start]>,
    /// Registers of the control page: see `layout::CONTROL_EVENT`.
    pub control: Control,
    /// Times for which faults delay vCPUs.
    pub stalls: Notes,
    /// Set while the manager has invalidated all of the guest's memory, so that a vCPU which faults
    /// waits.
    pub stopped: AtomicBool,
    /// Number of vCPUs that wait in [`Hypervisor::pause`]. Their CPUs run nothing of the guest.
    pub waiting: AtomicU64,
    /// Reason why the guest ended; `None` while it runs.
    pub end: Mutex<Option<String>>,
    pub ended: AtomicBool,
    /// Set if the manager ended the guest; each vCPU then prints its registers.
    pub cut_short: AtomicBool,
}

/// The start of a vCPU, which PSCI's CPU_ON sets.
#[derive(Default)]
pub struct Start {
    entry: AtomicU64,
    context: AtomicU64,
}

impl Start {
    /// Sets entry and context, and returns those before.
    pub fn replace(&self, entry: u64, context: u64) -> (u64, u64) {
        let before = (&self.entry, &self.context);
        (before.0.swap(entry, Ordering::AcqRel), before.1.swap(context, Ordering::AcqRel))
    }

    pub fn restore(&self, (entry, context): (u64, u64)) {
        self.replace(entry, context);
    }

    pub fn get(&self) -> (u64, u64) {
        (self.entry.load(Ordering::Acquire), self.context.load(Ordering::Acquire))
    }
}

/// Content of private memory before the guest writes to it, the same as `NEVER` of the guest's
/// program.
const NEVER: u64 = 0x6e65_7665_7220_7365;

/// Limit of the pages that the program may name on the control page: those of 4 GiB. Further pages
/// are ignored, so a list of this length may be incomplete.
pub const MOST_PAGES: usize = 1 << 20;

/// The registers of the control page.
#[derive(Default)]
pub struct Control {
    pub event: AtomicU64,
    pub declared: AtomicU64,
    pub stop: AtomicBool,
    pub size: AtomicU64,
    /// Page frames of the program's memory, in the order in which the program named them.
    pub pages: Mutex<Vec<u64>>,
    /// Result of the last conversion that the program asked for.
    pub converted: AtomicU64,
}

impl Control {
    /// Adds a page that the program named; `frame` is its guest physical address in units of 4 KiB.
    pub fn add_page(&self, frame: u64) {
        let mut pages = self.pages.lock();
        if pages.len() < MOST_PAGES {
            pages.push(frame);
        }
    }
}

/// Address of the hypervisor. The boot CPU sets it once, before it starts another CPU.
static THE: AtomicU64 = AtomicU64::new(0);

/// Returns the hypervisor, on CPUs other than the boot CPU.
pub fn the() -> &'static Hypervisor {
    let at = THE.load(Ordering::Acquire) as *const Hypervisor;
    // SAFETY: the boot CPU starts other CPUs only after `Hypervisor::new` has stored the address of
    // the value that it leaked.
    unsafe { at.as_ref() }.expect("the boot CPU has made it")
}

impl Hypervisor {
    /// Creates the guest that the command line asks for, ready to start.
    ///
    /// # Errors
    /// Returns in words what is wrong with the options or the machine.
    pub fn new() -> Result<&'static Self, String> {
        // SAFETY: QEMU puts the device tree of the machine at the start of RAM, which `link.ld`
        // leaves free.
        let tree = unsafe { fdt::Fdt::from_ptr(RAM as *const u8) };
        let tree = tree.map_err(|error| format!("no device tree at {RAM:#x}: {error:?}"))?;
        let options = Options::parse(tree.chosen().bootargs().unwrap_or_default());
        let options = options.map_err(|error| format!("{error}"))?;
        let there: usize = tree.memory().regions().filter_map(|region| region.size).sum();
        let needed = machine_ram(options.memory);
        if (there as u64) < needed {
            return Err(format!(
                "the machine has {there:#x} bytes of RAM; a guest of {:#x} takes {needed:#x}",
                options.memory
            ));
        }
        let id = id_registers();
        let format: Stage2 = id.format().map_err(|error| format!("{error}"))?;
        let format = Stage2 {
            hardware_dirty: options.logging == Logging::Hardware && format.hardware_dirty,
            ..format
        };
        if options.job == Job::Fork && options.caches == Caches::Exact && !format.forced_write_back
        {
            let reason = "vCPUs whose caches are off have tables of their own, and are not forked: \
                       take --caches first, or --cpu max";
            return Err(reason.into());
        }
        let keeper = (options.job == Job::Private).then(|| Keeper::new(options.memory));
        let machine = El2::new(&id, &format, options.fault, keeper);
        let machine: &'static El2 = Box::leak(Box::new(machine));
        if options.job == Job::Private {
            if PAGE != 1 << 12 {
                return Err("pages of 4k are converted: --granule 4k".into());
            }
            // Removed from the hypervisor's own table before other CPUs are on.
            let (start, bytes) = (away(options.memory), options.memory);
            Run { first: 0, pages: bytes / PAGE }.fill(start, NEVER);
            machine.clean(Hpa(start), bytes, true);
            memory::hide(start, bytes);
        }
        // Without an option, guest addresses are as wide as the CPU and the format allow.
        let bits = format.output_bits().min(id.address_bits());
        let bits = match options.bits as u32 {
            0 => bits,
            asked if asked <= bits => asked,
            asked => return Err(format!("guest addresses of {asked} bits: at most {bits} here")),
        };
        let guest =
            Guest::new(format, Vmid(1), bits, machine, behind(&options)?, config(&options)?);
        let memory = guest.map_err(|error| format!("{error}"))?;
        let vtcr = memory.tables().guest_root().vtcr(&id);
        let vtcr = vtcr.map_err(|error| format!("{error}"))?;
        slots(&memory, &options).map_err(|error| format!("{error}"))?;
        devicetree::write(&options).map_err(|error| format!("the guest's device tree: {error}"))?;
        let vcpus: Box<[Start]> = (0..options.vcpus).map(|_| Start::default()).collect();
        vcpus[options.first as usize].replace(GUEST_RAM + KERNEL, GUEST_RAM + DEVICE_TREE);
        say!(
            "a guest of {} vCPUs and {} MiB, {bits}-bit addresses, pages of {PAGE_SIZE}, leaves up \
             to {} KiB; break-before-make: {:?}, FWB: {}, TLBI by range: {}, hardware dirty state: \
             {}",
            options.vcpus,
            options.memory >> 20,
            options.largest >> 10,
            id.break_before_make(true),
            format.forced_write_back,
            id.range_instructions(),
            format.hardware_dirty,
        );
        let hypervisor = Box::leak(Box::new(Self {
            options,
            machine,
            id,
            memory,
            vtcr,
            deadline: cpu::now() + options.seconds * cpu::frequency(),
            vcpus,
            control: Control::default(),
            stalls: Notes::new(options.vcpus),
            stopped: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            end: Mutex::new(None),
            ended: AtomicBool::new(false),
            cut_short: AtomicBool::new(false),
        }));
        THE.store(hypervisor as *const Self as u64, Ordering::Release);
        Ok(hypervisor)
    }

    /// Returns whether the guest has ended.
    pub fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Lets the guest run for `milliseconds`, or to its end.
    pub fn sleep(&self, milliseconds: u64) {
        let until = cpu::now() + milliseconds * cpu::frequency() / 1000;
        while cpu::now() < until && !self.ended() {
            cpu::relax();
        }
    }

    /// Waits until the guest's program has reported `event`.
    ///
    /// # Errors
    /// Returns an error if the program has failed, if the guest has ended, or if its time is over.
    pub fn wait_for(&self, event: u64) -> Result<(), String> {
        loop {
            match self.control.event.load(Ordering::Acquire) {
                3 => return Err("the guest's program says that it failed".into()),
                said if said >= event => return Ok(()),
                _ if self.ended() => return Err("the guest was over before its program".into()),
                _ if cpu::now() > self.deadline => {
                    let seconds = self.options.seconds;
                    return Err(format!(
                        "no event {event} of the guest's program within {seconds} s"
                    ));
                }
                _ => cpu::relax(),
            }
        }
    }

    /// Yields to other CPUs, because the page that a vCPU faulted on is not there yet. While
    /// `stopped` is set, waits with VMID 0 loaded, and returns true: the caller then loads the
    /// guest's tables again before it runs the guest.
    pub fn pause(&self) -> bool {
        cpu::relax();
        if !self.stopped.load(Ordering::Acquire) {
            return false;
        }
        // No guest has VMID 0.
        super::platform::load_vmid(Vmid(0));
        self.waiting.fetch_add(1, Ordering::AcqRel);
        while self.stopped.load(Ordering::Acquire) && !self.ended() {
            cpu::relax();
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        true
    }

    /// Ends the guest and stores why. The manager then reports and switches the machine off.
    pub fn end(&self, reason: String) {
        self.end.lock().get_or_insert(reason);
        self.ended.store(true, Ordering::Release);
    }
}

fn config(options: &Options<'_>) -> Result<Config, String> {
    let largest = PageSize::from_bytes(options.largest);
    let largest = largest.ok_or_else(|| format!("leaves of {:#x} bytes", options.largest))?;
    // The manager needs a vCPU of its own, because it maps pages ahead of the guest.
    let mut config = Config::new(options.vcpus as u16 + 1, largest);
    config.logging = match options.logging {
        Logging::Protect => slat_guest::Logging::Protect,
        Logging::Hardware => slat_guest::Logging::Hardware,
    };
    config.eager_split = Some(PAGE_SIZE);
    config.execute_huge = match options.execute {
        ExecuteHuge::Allowed => slat_guest::ExecuteHuge::Allowed,
        ExecuteHuge::Split => slat_guest::ExecuteHuge::Split,
        ExecuteHuge::SplitPage => slat_guest::ExecuteHuge::SplitPage,
        ExecuteHuge::Zap => slat_guest::ExecuteHuge::Zap,
    };
    config.caches = match options.caches {
        Caches::Exact => CachePolicy::Exact,
        Caches::Every => CachePolicy::Every,
        Caches::First => CachePolicy::First,
        Caches::Vcpu0 => CachePolicy::Vcpu0,
    };
    Ok(config)
}

/// Returns the backing of the guest's RAM. All of it is present until a job takes it away.
fn behind(options: &Options<'_>) -> Result<Behind, String> {
    let ram = HvaRange { start: GUEST, bytes: options.memory };
    let largest = PageSize::from_bytes(options.largest).unwrap_or(PAGE_SIZE);
    let block = largest.min(Stage2::size(1));
    let machine = match options.job {
        Job::Fork => Machine::forked(ram, |ram| _ = the().memory.arrived(ram))?,
        _ => Machine::new(options.memory),
    };
    let late = PostCopy::new(machine, ram, PAGE_SIZE, block);
    let mut late = late.map_err(|error| format!("{error}"))?;
    late.have(ram);
    Ok(late)
}

/// Returns the memslot of the guest's RAM.
pub fn ram(options: &Options<'_>) -> MemslotSpec {
    let private = (options.job == Job::Private).then_some(PrivateAt(0));
    let ram = MemslotSpec::new(RAM_SLOT, Gpa(GUEST_RAM), options.memory, GUEST);
    MemslotSpec { private, ..ram }
}

fn slots(memory: &Memory, options: &Options<'_>) -> Result<(), slat_guest::MemslotError> {
    let mut worker = Worker::new(memory).expect("nobody has a reader slot yet");
    worker.set_memslot(ram(options))?;
    let devices = [DISTRIBUTOR, redistributors(options.vcpus), UART];
    for (number, device) in devices.into_iter().enumerate() {
        // The rest of a device's granule is mapped as well; for these devices nothing else is
        // there.
        let bytes = device.bytes.next_multiple_of(PAGE);
        let (id, gpa, host) = (MemslotId(1 + number as u16), Gpa(device.base), Hva(device.base));
        worker.set_memslot(MemslotSpec::new(id, gpa, bytes, host))?;
    }
    Ok(())
}
