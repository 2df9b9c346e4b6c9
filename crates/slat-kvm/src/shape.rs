//! The configuration of a guest, and checks whether this host can run it.

use crate::memory::Backing;
use crate::mode::Mode;
use crate::{Error, HostKvm, mailbox, numa};
use kvm_bindings::kvm_dirty_gfn;

/// The configuration of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Size of the memory, in bytes.
    pub memory: u64,
    /// The kind of host memory that backs it.
    pub backing: Backing,
    /// Whether the host has all of the memory before a vCPU touches it, as with `prealloc=on` of
    /// QEMU. What a first touch then costs is KVM's fault alone.
    pub prealloc: bool,
    /// Number of vCPUs.
    pub vcpus: usize,
    /// Whether each vCPU touches all of the memory, and not a share of its own.
    pub overlap: bool,
    /// Number of memslots, which divide the memory evenly.
    pub slots: u32,
    /// How KVM reports dirty pages.
    pub mode: Mode,
    /// Chunk size in bytes of eager page splitting (Arm): KVM splits huge pages when it
    /// write-protects them for the log. `None`: a write fault splits them.
    pub eager_split: Option<u64>,
    /// Whether KVM's mitigation of no-execute huge pages applies to this guest, where the host uses
    /// it.
    pub nx_huge_pages: bool,
    /// Whether deleting or moving a memslot zaps all second-level tables. Only x86 lets a VM
    /// disable this (`KVM_X86_QUIRK_SLOT_ZAP_ALL`).
    pub slot_zap_all: bool,
    /// NUMA nodes of the host to which the memory is bound. If it is empty, the kernel places the
    /// memory.
    pub nodes: Vec<u32>,
    /// Functions of the kernel whose calls are counted in each phase. A name that ends in `?` is
    /// skipped if the function cannot be counted.
    pub probes: Vec<String>,
    /// Values of its clock that each vCPU has room to record
    /// ([`Work::record`](crate::work::Work::record)), and entries of a list of pages
    /// ([`Order::Listed`](crate::work::Order::Listed)).
    pub records: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            memory: 64 << 20,
            backing: Backing::Small,
            prealloc: false,
            vcpus: 1,
            overlap: false,
            slots: 1,
            mode: Mode::Manual,
            eager_split: None,
            nx_huge_pages: true,
            slot_zap_all: true,
            nodes: Vec::new(),
            probes: Vec::new(),
            records: 0,
        }
    }
}

impl Shape {
    /// Checks, without making a guest, the values, the capabilities of `host`, and the memory that
    /// the machine has available now.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::MissingCapability`], [`Error::NotEnoughOnNodes`], or an error
    /// of [`Backing::check`].
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        self.check_values(host)?;
        numa::check(&self.nodes, self.memory, self.backing)?;
        self.backing.check_with(self.memory, self.of_vcpus())
    }

    /// Returns the bytes that the vCPUs take: each has a mailbox, a thread, a ring if there are
    /// any, and what KVM keeps of it.
    fn of_vcpus(&self) -> u64 {
        const OF_KVM: u64 = 128 << 10;
        let ring = match self.mode {
            Mode::Ring { entries } => u64::from(entries) * size_of::<kvm_dirty_gfn>() as u64,
            _ => 0,
        };
        (self.vcpus as u64).saturating_mul(OF_KVM + mailbox::STRIDE + ring)
    }

    pub(crate) fn check_values(&self, host: &HostKvm) -> Result<(), Error> {
        let (vcpus, max) = (self.vcpus, host.max_vcpus);
        if vcpus == 0 || vcpus > max {
            let rule = format!("must be 1 to {max} on this host");
            return Err(Error::invalid("vCPUs", vcpus, rule));
        }
        check_share(self.memory, self.backing, if self.overlap { 1 } else { vcpus })?;
        self.check_slots(host)?;
        self.mode.check(host)?;
        if let Some(chunk) = self.eager_split
            && (!chunk.is_power_of_two() || host.eager_split_sizes & chunk == 0)
        {
            let needed_for = "splitting huge pages ahead of faults by a chunk of that size";
            let capability = "KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE (of that size)";
            return Err(Error::MissingCapability { capability, needed_for });
        }
        if !self.slot_zap_all && !host.slot_zap_quirk {
            let needed_for = "slots that go without all second-level tables (x86, Linux 6.12)";
            return Err(Error::MissingCapability {
                capability: "KVM_X86_QUIRK_SLOT_ZAP_ALL",
                needed_for,
            });
        }
        Ok(())
    }

    fn check_slots(&self, host: &HostKvm) -> Result<(), Error> {
        let slots = u64::from(self.slots);
        let max = host.max_memslots.saturating_sub(1);
        if slots == 0 || self.slots as usize > max {
            let rule = format!("must be 1 to {max} on this host");
            return Err(Error::invalid("memslots", slots, rule));
        }
        // The log of each slot must cover whole words of the log of the memory, and a huge page
        // must not cross slots.
        let unit = self.backing.page_size().max(64 * Backing::Small.page_size());
        if slots > 1 && !self.memory.is_multiple_of(slots * unit) {
            let rule = format!("must share the memory in multiples of {unit} bytes");
            return Err(Error::invalid("memslots", slots, rule));
        }
        Ok(())
    }
}

/// Checks that each vCPU gets the same whole number of the backing's pages.
fn check_share(bytes: u64, backing: Backing, vcpus: usize) -> Result<(), Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_shared_out_is_refused_with_the_unit() {
        let error = check_share(6 << 20, Backing::Thp, 2).unwrap_err().to_string();
        assert!(error.contains("6291456") && error.contains("4194304"), "{error}");
        assert!(check_share(8 << 20, Backing::Thp, 2).is_ok());
        assert!(check_share(0, Backing::Small, 1).is_err());
        assert!(check_share(1 << 44, Backing::Hugetlb(1 << 30), 1).is_err());
    }

    #[test]
    fn the_memory_of_vcpus_and_their_rings_is_checked_as_well() {
        let alone = Shape { vcpus: 4, ..Shape::default() }.of_vcpus();
        let rings = Mode::Ring { entries: 1 << 16 };
        let shape = Shape { vcpus: 4, mode: rings, ..Shape::default() };
        assert_eq!(shape.of_vcpus() - alone, 4 << 20);
        let host = HostKvm { max_vcpus: 1 << 31, dirty_ring_bytes: 1 << 20, ..HostKvm::default() };
        let shape = Shape { vcpus: 1 << 26, overlap: true, ..shape };
        let host = HostKvm { max_memslots: 9, ..host };
        assert!(matches!(shape.check(&host), Err(Error::NotEnoughMemory { .. })));
    }

    #[test]
    fn what_the_host_cannot_do_is_refused_with_the_limit() {
        let host = HostKvm { max_vcpus: 8, max_memslots: 9, ..HostKvm::default() };
        let legacy = Shape { mode: Mode::Legacy, ..Shape::default() };
        let message = |shape: Shape| shape.check_values(&host).unwrap_err().to_string();
        assert!(legacy.check_values(&host).is_ok());
        assert!(message(Shape { vcpus: 9, ..legacy.clone() }).contains("1 to 8"));
        assert!(message(Shape { slots: 9, ..legacy.clone() }).contains("1 to 8"));
        assert!(message(Shape { slots: 3, ..legacy.clone() }).contains("multiples of"));
        let split = Shape { eager_split: Some(2 << 20), ..legacy };
        assert!(message(split).contains("EAGER_SPLIT"));
        assert!(message(Shape::default()).contains("MANUAL_DIRTY_LOG_PROTECT2"));
    }
}
