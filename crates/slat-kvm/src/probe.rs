//! Capabilities of the host's KVM. Reading them changes nothing.

use crate::Error;
use crate::procfs::Files;
use kvm_bindings::{
    KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES, KVM_CAP_BINARY_STATS_FD, KVM_CAP_DIRTY_LOG_RING,
    KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DISABLE_QUIRKS2, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
};
use kvm_ioctls::Kvm;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// The only version of KVM's API (api.rst, `KVM_GET_API_VERSION`).
const API_VERSION: i32 = 12;

/// `KVM_X86_QUIRK_SLOT_ZAP_ALL`, which the headers of other architectures lack.
pub(crate) const SLOT_ZAP_QUIRK: u32 = 1 << 7;

/// Capabilities of the host's KVM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostKvm {
    /// `KVM_GET_API_VERSION`.
    pub api_version: i32,
    /// Module of the implementation: `kvm_intel`, `kvm_amd` or `kvm_pvm`; empty if sysfs lists none
    /// of them.
    pub module: String,
    /// The largest number of vCPUs of a VM.
    pub max_vcpus: usize,
    /// The largest number of memslots of a VM.
    pub max_memslots: usize,
    /// `KVM_CLEAR_DIRTY_LOG` can clear the log instead of `KVM_GET_DIRTY_LOG`.
    pub manual_protect: bool,
    /// A log can start with all bits set.
    pub initially_set: bool,
    /// Size of the largest dirty ring in bytes, 0 without rings.
    pub dirty_ring_bytes: u64,
    /// Sum of the sizes by which KVM can split huge pages ahead of faults; 0 if it cannot, and on
    /// x86, where a module parameter decides.
    pub eager_split_sizes: u64,
    /// A VM can disable that deleting a memslot zaps all second-level tables (x86).
    pub slot_zap_quirk: bool,
    /// KVM has statistics of VMs and vCPUs in binary form.
    pub binary_stats: bool,
    /// Module parameters that affect second-level tables, with their values as sysfs shows them.
    pub parameters: BTreeMap<String, String>,
}

/// Parameters of `kvm` and of its architecture modules that affect the cost of a dirty log.
const PARAMETERS: [&str; 8] = [
    "tdp_mmu",
    "eager_page_split",
    "nx_huge_pages",
    "nx_huge_pages_recovery_period_ms",
    "nx_huge_pages_recovery_ratio",
    "ept",
    "npt",
    "pml",
];

/// Reads the capabilities of the host's KVM.
///
/// # Errors
/// [`Error::NoKvm`] or [`Error::KvmPermission`] if KVM cannot be opened; [`Error::Os`] for any
/// other failure; [`Error::Invalid`] for an unknown version of the API.
pub fn probe() -> Result<HostKvm, Error> {
    Ok(describe(&open()?))
}

/// Opens `/dev/kvm`.
pub(crate) fn open() -> Result<Kvm, Error> {
    let kvm = Kvm::new().map_err(|error| open_error(error.into()))?;
    let version = kvm.get_api_version();
    if version < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Error::os("KVM_GET_API_VERSION: /dev/kvm is not KVM's device")(error));
    }
    if version != API_VERSION {
        return Err(Error::invalid("the host's KVM API version", version, "only 12 is known"));
    }
    Ok(kvm)
}

fn open_error(source: std::io::Error) -> Error {
    match source.kind() {
        ErrorKind::NotFound => Error::NoKvm,
        ErrorKind::PermissionDenied => Error::KvmPermission,
        // ENODEV and ENXIO: no module serves the device node.
        _ if matches!(source.raw_os_error(), Some(6 | 19)) => Error::NoKvm,
        _ => Error::os("open of /dev/kvm")(source),
    }
}

pub(crate) fn describe(kvm: &Kvm) -> HostKvm {
    let capability = |number: u32| kvm.check_extension_raw(number.into()).max(0) as u32;
    let manual = capability(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2);
    let ring = capability(KVM_CAP_DIRTY_LOG_RING).max(capability(KVM_CAP_DIRTY_LOG_RING_ACQ_REL));
    let modules = ["kvm_intel", "kvm_amd", "kvm_pvm"];
    let module = modules.into_iter().find(|name| Path::new("/sys/module").join(name).exists());
    HostKvm {
        api_version: kvm.get_api_version(),
        module: module.unwrap_or_default().into(),
        max_vcpus: kvm.get_max_vcpus(),
        max_memslots: kvm.get_nr_memslots(),
        manual_protect: manual & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0,
        initially_set: manual & KVM_DIRTY_LOG_INITIALLY_SET != 0,
        dirty_ring_bytes: ring.into(),
        eager_split_sizes: capability(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES).into(),
        slot_zap_quirk: cfg!(target_arch = "x86_64")
            && capability(KVM_CAP_DISABLE_QUIRKS2) & SLOT_ZAP_QUIRK != 0,
        binary_stats: capability(KVM_CAP_BINARY_STATS_FD) != 0,
        parameters: parameters(module),
    }
}

fn parameters(module: Option<&str>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for module in ["kvm"].into_iter().chain(module) {
        for name in PARAMETERS {
            let path = format!("sys/module/{module}/parameters/{name}");
            found.extend(Files::here().text(path).map(|value| (name.into(), value)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_why_kvm_cannot_be_opened_has_its_own_error() {
        let error = |number| open_error(std::io::Error::from_raw_os_error(number));
        assert!(matches!(error(2), Error::NoKvm));
        assert!(matches!(error(19), Error::NoKvm));
        assert!(matches!(error(13), Error::KvmPermission));
        assert!(matches!(error(24), Error::Os { .. }));
    }
}
