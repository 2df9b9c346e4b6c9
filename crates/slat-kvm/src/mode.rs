//! Modes in which KVM reports the pages that a guest wrote.

use crate::ioctl::VmDirtyLog;
use crate::{Error, HostKvm};
use kvm_bindings::{
    KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_dirty_gfn,
};
use kvm_ioctls::VmFd;
use std::fmt;

/// A way to report the pages that a guest wrote (api.rst, `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`,
/// `KVM_CAP_DIRTY_LOG_RING`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// `KVM_GET_DIRTY_LOG` fetches and clears the log and write-protects its pages, in one call.
    Legacy,
    /// `KVM_GET_DIRTY_LOG` only copies the log. `KVM_CLEAR_DIRTY_LOG` clears and write-protects
    /// pieces.
    Manual,
    /// As `Manual`, but the log starts with all bits set and no page is write-protected: the first
    /// clear write-protects.
    ManualInitiallySet,
    /// KVM records the pages that each vCPU writes in a ring of the vCPU.
    Ring {
        /// Number of entries of each ring, a power of two.
        entries: u32,
    },
}

impl Mode {
    /// A ring of the least size that api.rst recommends.
    pub const RING: Mode = Mode::Ring { entries: 4096 };

    /// One mode of each kind.
    pub const ALL: [Mode; 4] = [Mode::Legacy, Mode::Manual, Mode::ManualInitiallySet, Mode::RING];

    /// Returns whether a separate call clears the log.
    pub fn is_manual(self) -> bool {
        matches!(self, Mode::Manual | Mode::ManualInitiallySet)
    }

    /// Returns whether the mode uses dirty rings.
    pub fn is_ring(self) -> bool {
        matches!(self, Mode::Ring { .. })
    }

    /// Checks that the host's KVM has the mode.
    ///
    /// # Errors
    /// [`Error::MissingCapability`] if it has not; [`Error::Invalid`] if no ring can have this
    /// size.
    pub fn check(self, host: &HostKvm) -> Result<(), Error> {
        let missing =
            |capability, needed_for| Err(Error::MissingCapability { capability, needed_for });
        if self.is_manual() && !host.manual_protect {
            return missing("KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2", "manual protect");
        }
        if self == Mode::ManualInitiallySet && !host.initially_set {
            return missing("KVM_DIRTY_LOG_INITIALLY_SET", "a log that starts full");
        }
        let Mode::Ring { entries } = self else { return Ok(()) };
        if host.dirty_ring_bytes == 0 {
            return missing("KVM_CAP_DIRTY_LOG_RING", "a dirty ring");
        }
        let size = size_of::<kvm_dirty_gfn>() as u64;
        // At least a page, and more than KVM reserves for a vCPU's exit.
        let least = (rustix::param::page_size() as u64 / size).max(1024);
        let most = host.dirty_ring_bytes / size;
        if !entries.is_power_of_two() || !(least..=most).contains(&u64::from(entries)) {
            let rule = format!("must be a power of two from {least} to {most} on this host");
            return Err(Error::invalid("entries of the dirty ring", entries, rule));
        }
        Ok(())
    }

    /// Enables the mode for a VM that has no vCPU yet.
    pub(crate) fn enable(self, vm: &VmFd) -> Result<(), Error> {
        let manual = |flags| {
            vm.enable_manual_dirty_log_protect(flags)
                .map_err(Error::os("KVM_ENABLE_CAP of KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2"))
        };
        match self {
            Mode::Legacy => Ok(()),
            Mode::Manual => manual(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE),
            Mode::ManualInitiallySet => {
                manual(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET)
            }
            Mode::Ring { entries } => vm
                .enable_dirty_log_ring(entries * size_of::<kvm_dirty_gfn>() as u32)
                .map_err(Error::os("KVM_ENABLE_CAP of KVM_CAP_DIRTY_LOG_RING")),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Legacy => f.write_str("legacy"),
            Mode::Manual => f.write_str("manual"),
            Mode::ManualInitiallySet => f.write_str("manual, initially set"),
            Mode::Ring { entries } => write!(f, "ring of {entries}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_has_a_power_of_two_of_entries_that_the_host_allows() {
        let host = HostKvm { dirty_ring_bytes: 1 << 20, ..HostKvm::default() };
        assert!(Mode::RING.check(&host).is_ok());
        for entries in [0, 512, 4095, 1 << 17] {
            let error = Mode::Ring { entries }.check(&host).unwrap_err().to_string();
            assert!(error.contains("1024 to 65536"), "{error}");
        }
        let error = Mode::RING.check(&HostKvm::default()).unwrap_err().to_string();
        assert!(error.contains("KVM_CAP_DIRTY_LOG_RING"), "{error}");
    }
}
