//! A guest: test memory in memslots of its own, and vCPUs that touch it.
//!
//! The guest's code, its own page tables and its mailboxes lie in another memslot, which is never
//! logged. So every page in the log is one that the guest's work wrote.

mod log;

use crate::arch::{self, MEMORY_GPA};
use crate::boot::Boot;
use crate::gate::Gate;
use crate::ioctl::{DirtyRing, VcpuDirtyRing, VmDirtyLog};
use crate::machine::Machine;
use crate::mailbox::word;
use crate::memory::HostMemory;
use crate::mode::Mode;
use crate::private::{self, Private};
use crate::probe::{self, SLOT_ZAP_QUIRK};
use crate::probes::{CallCounts, Probes};
pub use crate::shape::Shape;
use crate::stall::{Histogram, STALL_FACTOR};
use crate::stats::Stats;
pub use crate::vcpu::{Part, Vcpu};
use crate::{Error, numa};
use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, KVM_CAP_DISABLE_QUIRKS2, KVM_CAP_VM_DISABLE_NX_HUGE_PAGES,
    kvm_dirty_gfn, kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::VmFd;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

const BOOT_SLOT: u32 = 0;
const FIRST_SLOT: u32 = 1;

/// A guest without its vCPUs, which run on threads of their own.
#[derive(Debug)]
pub struct Guest {
    machine: Arc<Machine>,
    parts: Vec<Part>,
    slots: u32,
    mode: Mode,
    is_bound: bool,
    rings: Mutex<Vec<DirtyRing>>,
    ticks_per_second: f64,
    vm_stats: Option<Stats>,
    vcpu_stats: Vec<Stats>,
    probes: Option<Probes>,
}

impl Guest {
    /// Makes a guest whose memory is not yet populated, after a check that the host and the control
    /// groups of this process have that memory.
    ///
    /// # Errors
    /// [`Error::NoKvm`] and others if the host lacks something; the errors of [`Shape::check`];
    /// [`Error::Os`] if the kernel refuses a call.
    pub fn new(shape: &Shape) -> Result<(Guest, Vec<Vcpu>), Error> {
        Self::with_memory(shape, || HostMemory::new(shape.memory, shape.backing))
    }

    /// Does the same as [`Guest::new`], with memory that `memory` makes.
    pub(crate) fn with_memory(
        shape: &Shape,
        memory: impl FnOnce() -> Result<HostMemory, Error>,
    ) -> Result<(Guest, Vec<Vcpu>), Error> {
        let (guest, vcpus) = Self::without_memslots(shape, shape.memory, false, memory)?;
        guest.set_slots(0)?;
        Ok((guest, vcpus))
    }

    /// Makes a guest without memslots of its test memory, whose own tables map `window` bytes. With
    /// `is_private`, its memslots will have private memory too.
    ///
    /// # Errors
    /// As [`Guest::new`].
    pub(crate) fn with_window(
        shape: &Shape,
        window: u64,
        is_private: bool,
    ) -> Result<(Guest, Vec<Vcpu>), Error> {
        let memory = || HostMemory::new(shape.memory, shape.backing);
        Self::without_memslots(shape, window, is_private, memory)
    }

    fn without_memslots(
        shape: &Shape,
        window: u64,
        is_private: bool,
        memory: impl FnOnce() -> Result<HostMemory, Error>,
    ) -> Result<(Guest, Vec<Vcpu>), Error> {
        let kvm = probe::open()?;
        let host = probe::describe(&kvm);
        arch::check(&kvm, window)?;
        shape.check(&host)?;
        let vm = match is_private {
            true => kvm.create_vm_with_type(private::VM_TYPE),
            false => kvm.create_vm(),
        };
        let vm = vm.map_err(Error::os("KVM_CREATE_VM"))?;
        enable(&vm, shape)?;
        arch::set_up_vm(&vm)?;

        let boot = Boot::new(window, shape.vcpus, shape.records)?;
        let memory = memory()?;
        numa::bind(&memory, &shape.nodes)?;
        if shape.prealloc {
            memory.allocate()?;
        }
        let page_size = rustix::param::page_size() as u64;
        let private = is_private.then(|| Private::new(&vm, shape.memory)).transpose()?;
        let gate = Gate::default();
        let machine = Arc::new(Machine { vm, memory, private, boot, gate, page_size });
        set_memslot(
            &machine.vm,
            BOOT_SLOT,
            0,
            machine.boot.memory(),
            0..machine.boot.memory().len(),
            0,
        )?;

        let pages = shape.memory / page_size;
        let share = if shape.overlap { pages } else { pages / shape.vcpus as u64 };
        let (mut vcpus, mut parts) = (Vec::new(), Vec::new());
        let (mut vcpu_stats, mut rings) = (Vec::new(), Vec::new());
        let mut ticks = 0.0;
        for index in 0..shape.vcpus {
            let fd = machine.vm.create_vcpu(index as u64).map_err(Error::os("KVM_CREATE_VCPU"))?;
            arch::set_up_vcpu(&kvm, &machine.vm, &fd, machine.boot.mailbox_gpa(index))?;
            if host.binary_stats {
                vcpu_stats.push(Stats::open(&fd)?);
            }
            if let Mode::Ring { entries } = shape.mode {
                let bytes = entries * size_of::<kvm_dirty_gfn>() as u32;
                // SAFETY: `enable` gave each ring `bytes` bytes, successfully, before the first
                // vCPU was made.
                let ring = unsafe { fd.map_dirty_ring(bytes) };
                rings.push(ring.map_err(Error::os("mmap of a dirty ring"))?);
            }
            ticks = arch::ticks_per_second(&fd)?;
            let first = if shape.overlap { 0 } else { index as u64 * share };
            let part = Part { first, pages: share };
            let machine = Arc::clone(&machine);
            // Each vCPU numbers its steps from a base of its own, so that no two vCPUs share a
            // number. No step has number 0, because an unwritten page holds 0.
            let mailbox = machine.mailbox(index);
            word!(mailbox, position).store((index as u64 + 1) << 40, Relaxed);
            word!(mailbox, threshold).store(u64::MAX, Relaxed);
            vcpus.push(Vcpu { fd, machine, index, part, ticks_per_second: ticks });
            parts.push(part);
        }
        let vm_stats = host.binary_stats.then(|| Stats::open(&machine.vm));
        let guest = Guest {
            machine,
            parts,
            slots: shape.slots,
            mode: shape.mode,
            is_bound: !shape.nodes.is_empty(),
            rings: Mutex::new(rings),
            ticks_per_second: ticks,
            vm_stats: vm_stats.transpose()?,
            vcpu_stats,
            probes: Probes::start(&shape.probes)?,
        };
        Ok((guest, vcpus))
    }

    /// Returns how often each counted function of the kernel was called so far.
    pub(crate) fn calls(&self) -> CallCounts {
        self.probes.as_ref().map(Probes::read).unwrap_or_default()
    }

    /// Returns the guest's memory, as the host sees it.
    pub fn memory(&self) -> &HostMemory {
        &self.machine.memory
    }

    /// Returns the bytes of the memory on each NUMA node. It is empty if the memory is not bound to
    /// nodes, or if the kernel does not report its placement.
    pub fn placement(&self) -> BTreeMap<u32, u64> {
        match self.is_bound {
            true => numa::placement(self.memory()).unwrap_or_default(),
            false => BTreeMap::new(),
        }
    }

    /// Returns the size of a page of the log, in bytes.
    pub fn page_size(&self) -> u64 {
        self.machine.page_size
    }

    /// Returns the number of pages of the memory.
    pub fn pages(&self) -> u64 {
        self.memory().len() / self.page_size()
    }

    /// Returns the guest-physical address of a page of the memory.
    pub fn gpa(&self, page: u64) -> u64 {
        MEMORY_GPA + page * self.page_size()
    }

    /// Returns each vCPU's part of the memory.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the number of a vCPU's next step. It grows by one with each step, and no two vCPUs
    /// use the same number.
    pub fn position(&self, vcpu: usize) -> u64 {
        self.machine.mailbox(vcpu).position()
    }

    /// Returns the frequency of the vCPUs' clock, in ticks per second.
    pub fn ticks_per_second(&self) -> f64 {
        self.ticks_per_second
    }

    /// Returns the number of the step that wrote a page, as the host sees it, or 0 if no step did.
    ///
    /// # Errors
    /// [`Error::WrongStamp`] if the page holds another page's stamp, or if there is no such page.
    pub fn written_by(&self, page: u64) -> Result<u64, Error> {
        let at = page.checked_mul(self.page_size());
        let words = at.and_then(|at| Some((self.memory().read(at)?, self.memory().read(at + 8)?)));
        match words {
            Some((0, 0)) => Ok(0),
            Some((step, gpa)) if gpa == self.gpa(page) => Ok(step),
            other => {
                let found = other.map_or(0, |it| it.1);
                Err(Error::WrongStamp { page, found, expected: self.gpa(page) })
            }
        }
    }

    /// Checks that a page, as the host sees it, holds the stamp of step `step`.
    ///
    /// # Errors
    /// [`Error::WrongStamp`] if not.
    pub fn check_stamp(&self, page: u64, step: u64) -> Result<(), Error> {
        match self.written_by(page)? {
            found if found == step => Ok(()),
            found => Err(Error::WrongStamp { page, found, expected: step }),
        }
    }

    /// Returns the values of its clock that a vCPU recorded in its last work: at the start, and
    /// after each access.
    pub(crate) fn record(&self, vcpu: usize) -> Vec<u64> {
        let boot = &self.machine.boot;
        let first = boot.records_gpa(vcpu);
        let end = word!(self.machine.mailbox(vcpu), record).load(Relaxed);
        // The end comes from memory that the guest writes.
        let end = end.min(first + boot.records() * 8);
        (first..end).step_by(8).filter_map(|at| boot.memory().read(at)).collect()
    }

    /// Returns how often a vCPU read a page that held another page's stamp.
    pub fn misread(&self) -> u64 {
        let mailboxes = (0..self.parts.len()).map(|vcpu| self.machine.mailbox(vcpu));
        mailboxes.map(|mailbox| word!(mailbox, wrong).load(Relaxed)).sum()
    }

    /// Asks a vCPU to stop after its current step.
    pub fn ask_to_stop(&self, vcpu: usize) {
        self.machine.mailbox(vcpu).ask_to_stop(true);
    }

    /// Withdraws [`Guest::ask_to_stop`].
    pub fn go_on(&self, vcpu: usize) {
        self.machine.mailbox(vcpu).ask_to_stop(false);
    }

    /// Asks all vCPUs to stop, and releases those that wait for their ring to be emptied. These
    /// return [`Error::Stopped`].
    pub fn give_up(&self) {
        (0..self.parts.len()).for_each(|vcpu| self.ask_to_stop(vcpu));
        self.machine.gate.close();
    }

    /// Returns the times between a vCPU's accesses since it was made, in ticks.
    pub fn times(&self, vcpu: usize) -> Histogram {
        self.machine.mailbox(vcpu).histogram()
    }

    /// Sets the threshold of a stall to five times `warm` ticks.
    pub fn set_warm(&self, vcpu: usize, warm: u64) {
        let mailbox = self.machine.mailbox(vcpu);
        word!(mailbox, threshold).store(warm.saturating_mul(STALL_FACTOR), Relaxed);
    }

    /// Returns the number of a vCPU's stalls since it was made, and their sum in ticks.
    pub fn stalls(&self, vcpu: usize) -> (u64, u64) {
        let mailbox = self.machine.mailbox(vcpu);
        (word!(mailbox, stalls).load(Relaxed), word!(mailbox, stall_ticks).load(Relaxed))
    }

    /// Returns the ticks that a vCPU lost to interruptions while it waited for its next step to be
    /// due, since it was made.
    pub fn idle(&self, vcpu: usize) -> u64 {
        word!(self.machine.mailbox(vcpu), idle_ticks).load(Relaxed)
    }

    /// Returns a vCPU's longest stall since the last call, in ticks. The caller calls it while the
    /// vCPU does not run.
    pub fn take_longest(&self, vcpu: usize) -> u64 {
        word!(self.machine.mailbox(vcpu), longest).swap(0, Relaxed)
    }

    /// Returns the counters of the VM, where the kernel has them.
    pub fn vm_stats(&self) -> Option<&Stats> {
        self.vm_stats.as_ref()
    }

    /// Returns the counters of the vCPUs, in their order. It is empty where the kernel has none.
    pub fn vcpu_stats(&self) -> &[Stats] {
        &self.vcpu_stats
    }

    fn set_slots(&self, flags: u32) -> Result<(), Error> {
        let machine = &self.machine;
        let bytes = machine.memory.len() / u64::from(self.slots);
        (0..self.slots).try_for_each(|slot| {
            let from = u64::from(slot) * bytes;
            let range = from..from + bytes;
            set_memslot(
                &machine.vm,
                FIRST_SLOT + slot,
                MEMORY_GPA + from,
                &machine.memory,
                range,
                flags,
            )
        })
    }

    /// Deletes all memslots of the test memory and adds them again, so that none of it is mapped.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn unmap_all(&self) -> Result<(), Error> {
        for slot in FIRST_SLOT..FIRST_SLOT + self.slots {
            set_memslot(&self.machine.vm, slot, MEMORY_GPA, &self.machine.memory, 0..0, 0)?;
        }
        self.set_slots(0)
    }

    /// Adds a memslot above the guest's memory that no vCPU touches, moves it to another place, or
    /// deletes it (`None`). It maps the first `bytes` bytes of the guest's memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the memory has less than `bytes` bytes; [`Error::Os`].
    pub fn place_spare(&self, bytes: u64, place: Option<u64>) -> Result<(), Error> {
        const GIB: u64 = 1 << 30;
        let memory = &self.machine.memory;
        if bytes > memory.len() {
            return Err(Error::invalid("slot", bytes, "must be at most the guest's memory"));
        }
        let behind = (MEMORY_GPA + memory.len()).next_multiple_of(GIB);
        let offset = place.unwrap_or(0).checked_mul(bytes.next_multiple_of(GIB));
        let gpa = offset.and_then(|offset| behind.checked_add(offset)).ok_or_else(|| {
            Error::invalid("place of a slot", place.unwrap_or(0), "must fit the address space")
        })?;
        let range = 0..place.map_or(0, |_| bytes);
        set_memslot(&self.machine.vm, FIRST_SLOT + self.slots, gpa, memory, range, 0)
    }

    /// Adds, moves or changes a memslot of the test memory, or deletes it (an empty range). The
    /// slot is counted from 1, `page` from the start of the guest's window.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the range leaves the memory; [`Error::Os`].
    pub(crate) fn set_slot(
        &self,
        slot: u32,
        page: u64,
        range: std::ops::Range<u64>,
        flags: u32,
    ) -> Result<(), Error> {
        let memory = &self.machine.memory;
        if slot < FIRST_SLOT || range.start > range.end || range.end > memory.len() {
            return Err(Error::invalid("memslot", slot, "must lie in the memory"));
        }
        let Machine { vm, private, .. } = &*self.machine;
        match private.as_ref().filter(|_| !range.is_empty()) {
            Some(private) => {
                let offset = range.start;
                let region = region(slot, self.gpa(page), memory, range, flags);
                // SAFETY: as in `set_memslot`.
                unsafe { private.place(vm, region, offset) }
            }
            None => set_memslot(vm, slot, self.gpa(page), memory, range, flags),
        }
    }

    /// Returns the number of pages of the guest's own code, tables and mailboxes.
    pub(crate) fn own_pages(&self) -> u64 {
        self.machine.boot.memory().len() / self.page_size()
    }

    /// Returns whether memslots have private memory.
    pub(crate) fn is_private(&self) -> bool {
        self.machine.private.is_some()
    }

    /// Makes guest pages private or shared: accesses reach the private memory, or the host's.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub(crate) fn convert(&self, page: u64, pages: u64, is_private: bool) -> Result<(), Error> {
        private::convert(self.vm(), self.gpa(page), pages * self.page_size(), is_private)
    }

    /// Gives a range of the private memory back, if there is private memory.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub(crate) fn punch(&self, range: std::ops::Range<u64>) -> Result<(), Error> {
        self.machine.private.as_ref().map_or(Ok(()), |private| private.punch(range))
    }

    /// Returns the VM.
    pub(crate) fn vm(&self) -> &VmFd {
        &self.machine.vm
    }
}

/// Enables the capabilities that KVM accepts only before the first memslot or vCPU exists.
fn enable(vm: &VmFd, shape: &Shape) -> Result<(), Error> {
    let cap = |cap: u32, first: u64, call: &'static str| {
        let args = [first, 0, 0, 0];
        vm.enable_cap(&kvm_enable_cap { cap, args, ..Default::default() }).map_err(Error::os(call))
    };
    shape.mode.enable(vm)?;
    // Where KVM can dirty pages without a vCPU, memslots keep a bitmap in addition to the rings. On
    // arm64, a fault does not treat a memslot without a bitmap as logged (`memslot_is_logging`): it
    // makes a whole huge page writable, and the ring names only one page of it.
    let bitmap = KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP;
    if shape.mode.is_ring() && vm.check_extension_raw(bitmap.into()) > 0 {
        vm.enable_dirty_log_ring_bitmap()
            .map_err(Error::os("KVM_ENABLE_CAP of KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP"))?;
    }
    if let Some(chunk) = shape.eager_split {
        vm.set_eager_split_chunk_size(chunk)
            .map_err(Error::os("KVM_ENABLE_CAP of KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE"))?;
    }
    if !shape.slot_zap_all {
        let call = "KVM_ENABLE_CAP of KVM_CAP_DISABLE_QUIRKS2";
        cap(KVM_CAP_DISABLE_QUIRKS2, SLOT_ZAP_QUIRK.into(), call)?;
    }
    if !shape.nx_huge_pages {
        let call = "KVM_ENABLE_CAP of KVM_CAP_VM_DISABLE_NX_HUGE_PAGES (it wants CAP_SYS_BOOT)";
        cap(KVM_CAP_VM_DISABLE_NX_HUGE_PAGES, 0, call)?;
    }
    Ok(())
}

fn region(
    slot: u32,
    gpa: u64,
    memory: &HostMemory,
    range: std::ops::Range<u64>,
    flags: u32,
) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot,
        flags,
        guest_phys_addr: gpa,
        memory_size: range.end - range.start,
        userspace_addr: memory.host_address() + range.start,
    }
}

fn set_memslot(
    vm: &VmFd,
    slot: u32,
    gpa: u64,
    memory: &HostMemory,
    range: std::ops::Range<u64>,
    flags: u32,
) -> Result<(), Error> {
    let region = region(slot, gpa, memory, range, flags);
    // SAFETY: `range` is a part of a mapping that `Machine` owns, and this process accesses such
    // mappings by atomic operations only. The mapping is unmapped after the VM and all vCPUs are
    // closed.
    unsafe { vm.set_user_memory_region(region) }.map_err(Error::os("KVM_SET_USER_MEMORY_REGION"))
}
