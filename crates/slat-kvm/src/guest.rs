//! A guest: test memory in a memslot of its own, and vCPUs that write to it.
//!
//! The code and the guest's own page tables lie in another memslot, which is never logged, so
//! that everything in the log is a write of the pass.

use crate::arch::{self, Progress, Registers, Stretch};
use crate::bitmap::DirtyBitmap;
use crate::memory::{Backing, HostMemory};
use crate::stats::Stats;
use crate::write_pass::{PAGES_PER_RUN, WritePass};
use crate::{Error, HostKvm, ioctl, probe};
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_MEM_LOG_DIRTY_PAGES, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{VcpuFd, VmFd};
use rustix::fd::BorrowedFd;
use std::fmt;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const BOOT_SLOT: u32 = 0;
const MEMORY_SLOT: u32 = 1;

/// Who clears the dirty log, and what it starts with (api.rst,
/// `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// `KVM_GET_DIRTY_LOG` clears the log and protects the pages, all in one call.
    Legacy,
    /// `KVM_GET_DIRTY_LOG` only copies; `KVM_CLEAR_DIRTY_LOG` clears and protects, in pieces.
    Manual,
    /// The same, and the log starts full with nothing protected: the first clear protects.
    ManualInitiallySet,
}

impl Mode {
    /// All there are.
    pub const ALL: [Mode; 3] = [Mode::Legacy, Mode::Manual, Mode::ManualInitiallySet];

    /// Whether the log is cleared by a call of its own.
    pub fn is_manual(self) -> bool {
        self != Mode::Legacy
    }

    /// Checks that the host's KVM has it.
    ///
    /// # Errors
    /// [`Error::MissingCapability`] if not.
    pub fn check(self, host: &HostKvm) -> Result<(), Error> {
        let missing =
            |capability, needed_for| Err(Error::MissingCapability { capability, needed_for });
        if self.is_manual() && !host.manual_protect {
            return missing("KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2", "manual protect");
        }
        if self == Mode::ManualInitiallySet && !host.initially_set {
            return missing("KVM_DIRTY_LOG_INITIALLY_SET", "a log that starts full");
        }
        Ok(())
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Legacy => "legacy",
            Mode::Manual => "manual",
            Mode::ManualInitiallySet => "manual, initially set",
        })
    }
}

/// The VM and its memory. vCPUs keep it alive, so that no vCPU can outlive its memory.
#[derive(Debug)]
struct Machine {
    // Dropped in this order: the VM before the memory it maps.
    vm: VmFd,
    memory: HostMemory,
    _boot: HostMemory,
}

/// A guest, without its vCPUs, which run on threads of their own.
#[derive(Debug)]
pub struct Guest {
    machine: Arc<Machine>,
    page_size: u64,
    vm_stats: Option<Stats>,
    vcpu_stats: Vec<Stats>,
}

/// One vCPU of a [`Guest`], with its part of the memory.
#[derive(Debug)]
pub struct Vcpu {
    // Dropped in this order: the vCPU before the machine.
    fd: VcpuFd,
    _machine: Arc<Machine>,
    index: usize,
    pages: u64,
    first_gpa: u64,
    page_size: u64,
    registers: Registers,
    pass: Option<WritePass>,
}

fn borrow(fd: &impl AsRawFd) -> BorrowedFd<'_> {
    // SAFETY: kvm-ioctls' types own the descriptor that they give out, and the borrow of the
    // owner keeps it open for as long as the result lives.
    unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
}

impl Guest {
    /// Makes a guest with `bytes` of memory, not yet populated, shared out evenly to `vcpus`.
    ///
    /// # Errors
    /// What the host lacks ([`Error::NoKvm`] and others), [`Error::Invalid`] for what cannot be,
    /// [`Error::Os`] for what the kernel refuses.
    pub fn new(
        bytes: u64,
        backing: Backing,
        vcpus: usize,
        mode: Mode,
    ) -> Result<(Guest, Vec<Vcpu>), Error> {
        let kvm = probe::open()?;
        let host = probe::describe(&kvm);
        arch::check(&kvm, bytes)?;
        check_vcpus(vcpus, host.max_vcpus)?;
        check_share(bytes, backing, vcpus)?;
        mode.check(&host)?;
        let vm = kvm.create_vm().map_err(Error::os("KVM_CREATE_VM"))?;
        enable(&vm, mode)?;
        arch::set_up_vm(&vm)?;

        let boot = HostMemory::new(arch::boot_bytes(bytes), Backing::Small)?;
        arch::write_boot(&boot, bytes)
            .ok_or_else(|| Error::os("boot memory")(rustix::io::Errno::NOSPC))?;
        let memory = HostMemory::new(bytes, backing)?;
        let machine = Arc::new(Machine { vm, memory, _boot: boot });
        set_slot(&machine.vm, BOOT_SLOT, 0, &machine._boot, 0)?;
        set_slot(&machine.vm, MEMORY_SLOT, arch::MEMORY_GPA, &machine.memory, 0)?;

        let page_size = rustix::param::page_size() as u64;
        let pages = bytes / page_size / vcpus as u64;
        let mut made = Vec::with_capacity(vcpus);
        let mut vcpu_stats = Vec::new();
        for index in 0..vcpus {
            let fd = machine.vm.create_vcpu(index as u64).map_err(Error::os("KVM_CREATE_VCPU"))?;
            arch::set_up_vcpu(&kvm, &fd)?;
            if host.binary_stats {
                // SAFETY: a vCPU.
                vcpu_stats.push(unsafe { Stats::open(borrow(&fd)) }?);
            }
            made.push(Vcpu {
                fd,
                _machine: Arc::clone(&machine),
                index,
                pages,
                first_gpa: arch::MEMORY_GPA + index as u64 * pages * page_size,
                page_size,
                registers: Registers::at_entry(),
                pass: None,
            });
        }
        // SAFETY: a VM.
        let vm_stats = host.binary_stats.then(|| unsafe { Stats::open(borrow(&machine.vm)) });
        let vm_stats = vm_stats.transpose()?;
        Ok((Guest { machine, page_size, vm_stats, vcpu_stats }, made))
    }

    /// The memory in the logged slot, as the host sees it.
    pub fn memory(&self) -> &HostMemory {
        &self.machine.memory
    }

    /// Pages of the logged slot.
    pub fn pages(&self) -> u64 {
        self.memory().len() / self.page_size
    }

    /// Guest physical address of a page of the logged slot.
    pub fn gpa(&self, page: u64) -> u64 {
        arch::MEMORY_GPA + page * self.page_size
    }

    /// Checks that a page, as the host sees it, holds what `pass` wrote to it.
    ///
    /// # Errors
    /// [`Error::WrongStamp`] if not, or if there is no such page.
    pub fn check_stamp(&self, page: u64, pass: WritePass) -> Result<(), Error> {
        let expected = pass.stamp(self.gpa(page));
        match page.checked_mul(self.page_size).and_then(|offset| self.memory().read(offset)) {
            Some(found) if found == expected => Ok(()),
            found => Err(Error::WrongStamp { page, found: found.unwrap_or(0), expected }),
        }
    }

    /// Counters of the VM, where the kernel has them.
    pub fn vm_stats(&self) -> Option<&Stats> {
        self.vm_stats.as_ref()
    }

    /// Counters of the vCPUs, in their order; empty where the kernel has none.
    pub fn vcpu_stats(&self) -> &[Stats] {
        &self.vcpu_stats
    }

    /// Starts logging: sets `KVM_MEM_LOG_DIRTY_PAGES` on the slot.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn start_log(&self) -> Result<(), Error> {
        let machine = &self.machine;
        let flags = KVM_MEM_LOG_DIRTY_PAGES;
        set_slot(&machine.vm, MEMORY_SLOT, arch::MEMORY_GPA, &machine.memory, flags)
    }

    /// Stops logging.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn stop_log(&self) -> Result<(), Error> {
        let machine = &self.machine;
        set_slot(&machine.vm, MEMORY_SLOT, arch::MEMORY_GPA, &machine.memory, 0)
    }

    /// `KVM_GET_DIRTY_LOG`.
    ///
    /// # Errors
    /// [`Error::Os`]; [`Error::Invalid`] if the bitmap is not of the slot's size.
    pub fn get_dirty_log(&self, log: &mut DirtyBitmap) -> Result<(), Error> {
        if log.pages() != self.pages() {
            let rule = format!("must be that of the slot, {} pages", self.pages());
            return Err(Error::invalid("size of the dirty log", log.pages(), rule));
        }
        // SAFETY: a VM, and a bitmap of the slot's size.
        unsafe { ioctl::get_dirty_log(borrow(&self.machine.vm), MEMORY_SLOT, log) }
            .map_err(Error::os("KVM_GET_DIRTY_LOG"))
    }

    /// `KVM_CLEAR_DIRTY_LOG` for `pages` pages from `first` on.
    ///
    /// # Errors
    /// [`Error::Os`]: `EINVAL` if `first` is no multiple of 64, or if `pages` is none and does
    /// not end the slot.
    pub fn clear_dirty_log(&self, log: &DirtyBitmap, first: u64, pages: u32) -> Result<(), Error> {
        // SAFETY: a VM.
        unsafe { ioctl::clear_dirty_log(borrow(&self.machine.vm), MEMORY_SLOT, first, pages, log) }
            .map_err(Error::os("KVM_CLEAR_DIRTY_LOG"))
    }
}

impl Vcpu {
    /// Which one, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Pages of its part.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// First page of its part, counted from the start of the slot.
    pub fn first_page(&self) -> u64 {
        self.index as u64 * self.pages
    }

    /// Sets the registers for a pass, ahead of [`Vcpu::run`] and outside of what is timed.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn load(&mut self, pass: WritePass) -> Result<(), Error> {
        self.pass = Some(pass);
        self.registers.set(self.stretch(pass, 0));
        self.registers.store(&self.fd)
    }

    /// Runs the pass that was loaded; answers with the number of pages written.
    ///
    /// # Errors
    /// [`Error::Stopped`] if `stop` is seen, at the latest after [`PAGES_PER_RUN`] pages;
    /// [`Error::GuestStopped`] or [`Error::PassIncomplete`] if the guest did not do its work.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<u64, Error> {
        let Some(pass) = self.pass.take() else { return Ok(0) };
        let mut start = 0;
        loop {
            let stretch = self.stretch(pass, start);
            self.run_stretch(stop)?;
            self.registers.fetch(&self.fd)?;
            let expected = Progress {
                gpa: stretch.gpa + stretch.pages * self.page_size,
                left: 0,
                written: pass.written(start, stretch.pages),
            };
            let found = self.registers.progress();
            if found != expected {
                let vcpu = self.index;
                let [found, expected] = [found, expected].map(|it| format!("{it:x?}"));
                return Err(Error::PassIncomplete { vcpu, found, expected });
            }
            start += stretch.pages;
            if start == self.pages {
                return Ok(pass.written(0, self.pages));
            }
            if stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            self.registers.set(self.stretch(pass, start));
            self.registers.store(&self.fd)?;
        }
    }

    fn stretch(&self, pass: WritePass, start: u64) -> Stretch {
        Stretch {
            gpa: self.first_gpa + start * self.page_size,
            pages: (self.pages - start).min(PAGES_PER_RUN),
            share: pass.share(),
            accumulator: pass.accumulator(start),
            tag: pass.tag(),
        }
    }

    fn run_stretch(&mut self, stop: &AtomicBool) -> Result<(), Error> {
        loop {
            match self.fd.run() {
                Ok(exit) if arch::is_end_of_stretch(&exit) => return Ok(()),
                Ok(exit) => {
                    let exit = format!("{exit:?}");
                    let registers = match self.registers.fetch(&self.fd) {
                        Ok(()) => format!("{:x?}", self.registers),
                        Err(error) => error.to_string(),
                    };
                    return Err(Error::GuestStopped { vcpu: self.index, exit, registers });
                }
                // A signal came: it may be the one that sets `stop`.
                Err(error) => match rustix::io::Errno::from_raw_os_error(error.errno()) {
                    rustix::io::Errno::INTR | rustix::io::Errno::AGAIN => {
                        if stop.load(Ordering::Relaxed) {
                            return Err(Error::Stopped);
                        }
                    }
                    error => return Err(Error::os("KVM_RUN")(error)),
                },
            }
        }
    }
}

pub(crate) fn check_vcpus(vcpus: usize, max: usize) -> Result<(), Error> {
    if vcpus == 0 || vcpus > max {
        return Err(Error::invalid("vCPUs", vcpus, format!("must be 1 to {max} on this host")));
    }
    Ok(())
}

/// Checks that each vCPU gets the same whole number of the backing's pages.
pub(crate) fn check_share(bytes: u64, backing: Backing, vcpus: usize) -> Result<(), Error> {
    /// `KVM_MEM_MAX_NR_PAGES`, the most that a memslot can have.
    const MAX_PAGES: u64 = (1 << 31) - 1;
    let unit = backing.page_size().saturating_mul(vcpus as u64);
    if unit == 0 || bytes == 0 || !bytes.is_multiple_of(unit) {
        let rule =
            format!("must be a multiple of {unit} bytes ({vcpus} vCPUs x pages of {backing})");
        return Err(Error::invalid("memory", bytes, rule));
    }
    let max = MAX_PAGES * rustix::param::page_size() as u64;
    if bytes > max {
        return Err(Error::invalid("memory", bytes, format!("a memslot has at most {max} bytes")));
    }
    Ok(())
}

/// Chooses the mode, which KVM takes before the first slot is logged.
fn enable(vm: &VmFd, mode: Mode) -> Result<(), Error> {
    let flags = match mode {
        Mode::Legacy => return Ok(()),
        Mode::Manual => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
        Mode::ManualInitiallySet => {
            KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET
        }
    };
    let cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
    let args = [flags.into(), 0, 0, 0];
    vm.enable_cap(&kvm_enable_cap { cap, args, ..Default::default() })
        .map_err(Error::os("KVM_ENABLE_CAP of KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2"))
}

fn set_slot(vm: &VmFd, slot: u32, gpa: u64, memory: &HostMemory, flags: u32) -> Result<(), Error> {
    let region = kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: memory.len(),
        userspace_addr: memory.host_address(),
    };
    // SAFETY: both slots are backed by mappings of `Machine`, of just this size, which
    // this process only accesses atomically. They are unmapped after the VM and all vCPUs are closed.
    unsafe { vm.set_user_memory_region(region) }.map_err(Error::os("KVM_SET_USER_MEMORY_REGION"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_shared_out_is_refused_with_the_unit() {
        let error = check_share(6 << 20, Backing::Thp, 2).unwrap_err().to_string();
        assert!(error.contains("6291456") && error.contains("4194304"), "{error}");
        assert!(check_share(8 << 20, Backing::Thp, 2).is_ok());
        assert!(check_share(0, Backing::Small, 1).is_err());
        assert!(check_share(1 << 44, Backing::Hugetlb1G, 1).is_err());
    }

    #[test]
    fn too_many_vcpus_are_refused_with_the_limit() {
        assert!(check_vcpus(0, 8).is_err());
        assert!(check_vcpus(8, 8).is_ok());
        assert!(check_vcpus(9, 8).unwrap_err().to_string().contains("1 to 8"));
    }
}
