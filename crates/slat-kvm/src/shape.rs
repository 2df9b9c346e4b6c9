//! What guest to make, and whether this host can.

use crate::memory::Backing;
use crate::mode::Mode;
use crate::{Error, HostKvm, numa};

/// What guest to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of its memory.
    pub memory: u64,
    /// The host's pages behind it.
    pub backing: Backing,
    /// vCPUs.
    pub vcpus: usize,
    /// Whether each vCPU touches all of the memory, and not its own share of it.
    pub overlap: bool,
    /// Memslots, which share the memory evenly.
    pub slots: u32,
    /// How dirty pages are told.
    pub mode: Mode,
    /// Bytes by which huge pages are split as logging protects them, on Arm; none: in the fault.
    pub eager_split: Option<u64>,
    /// Whether the host's rule of no-execute huge pages holds for this guest, if there is one.
    pub nx_huge_pages: bool,
    /// Whether a slot that goes or moves takes all second-level tables with it, on x86, where a VM
    /// can say no (`KVM_X86_QUIRK_SLOT_ZAP_ALL`).
    pub slot_zap_all: bool,
    /// NUMA nodes of the host that its memory is bound to; none: as the kernel places it.
    pub nodes: Vec<u32>,
    /// Functions of the kernel whose calls are counted in each phase; those that end in `?` only
    /// where the kernel has them.
    pub probes: Vec<String>,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            memory: 64 << 20,
            backing: Backing::Small,
            vcpus: 1,
            overlap: false,
            slots: 1,
            mode: Mode::Manual,
            eager_split: None,
            nx_huge_pages: true,
            slot_zap_all: true,
            nodes: Vec::new(),
            probes: Vec::new(),
        }
    }
}

impl Shape {
    /// Checks what can be checked without a guest: the values by themselves, the capabilities of
    /// `host`, and the memory of the machine as it is now.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::MissingCapability`], or what [`Backing::check`] finds.
    pub fn check(&self, host: &HostKvm) -> Result<(), Error> {
        self.check_values(host)?;
        numa::check(&self.nodes, self.memory, self.backing)?;
        self.backing.check(self.memory)
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
        // Each slot's log is whole words of the whole log, and huge pages do not cross slots.
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
        assert!(check_share(1 << 44, Backing::Hugetlb1G, 1).is_err());
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
