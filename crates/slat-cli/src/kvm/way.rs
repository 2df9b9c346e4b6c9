//! Ways of logging dirty pages, and the settings that make a VMM log in each way.

use slat_kvm::{HostKvm, Mode};
use slat_lab::verdict::Setting;

/// A way of logging dirty pages.
#[derive(Debug, Clone, PartialEq)]
pub struct Way {
    /// Its name.
    pub name: String,
    /// The mode of KVM's log.
    pub mode: Mode,
    /// Pages that one call clears; `None` means all.
    pub chunk: Option<u64>,
    /// Chunk size of eager splitting on Arm, in bytes.
    pub eager_split: Option<u64>,
}

impl Way {
    fn new(name: impl Into<String>, mode: Mode, chunk: Option<u64>) -> Self {
        Self { name: name.into(), mode, chunk, eager_split: None }
    }

    /// Name of the way that QEMU uses by default, if the kernel has it.
    pub const OF_QEMU: &'static str = "manual, initially set";

    /// Name of the way of a VMM that enables no capability.
    pub const LEGACY: &'static str = "legacy";

    /// Returns the way of that name, whether this host has it or not.
    pub fn named(name: &str) -> Option<Self> {
        let all = HostKvm {
            manual_protect: true,
            initially_set: true,
            dirty_ring_bytes: u64::MAX,
            eager_split_sizes: u64::MAX,
            ..HostKvm::default()
        };
        ways(&all).into_iter().find(|way| way.name == name)
    }

    /// Returns the options of QEMU and libvirt that select this way.
    pub fn settings(&self) -> Vec<Setting> {
        let setting = |of: &str, line: String| Setting { of: of.to_owned(), line };
        if let Mode::Ring { entries } = self.mode {
            let xml = format!(
                "<features><kvm><dirty-ring state='on' size='{entries}'/></kvm></features>"
            );
            return vec![
                setting("QEMU", format!("-accel kvm,dirty-ring-size={entries}")),
                setting("libvirt", xml),
            ];
        }
        match self.eager_split {
            Some(bytes) => vec![setting("QEMU", format!("-accel kvm,eager-split-size={bytes}"))],
            None => vec![setting("QEMU", "-accel kvm has no option for it".to_owned())],
        }
    }

    /// Returns the ioctls that any other VMM calls to log in this way.
    pub fn ioctls(&self) -> String {
        let enable = "KVM_ENABLE_CAP of";
        let mut calls = match self.mode {
            Mode::Legacy => "none; KVM_GET_DIRTY_LOG clears".to_owned(),
            Mode::Manual => format!("{enable} KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, flags 1"),
            Mode::ManualInitiallySet => {
                format!("{enable} KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, flags 3")
            }
            Mode::Ring { entries } => format!(
                "{enable} {}, {} bytes; mmap of each vCPU, KVM_RESET_DIRTY_RINGS",
                if cfg!(target_arch = "x86_64") {
                    "KVM_CAP_DIRTY_LOG_RING"
                } else {
                    "KVM_CAP_DIRTY_LOG_RING_ACQ_REL"
                },
                u64::from(entries) * 16
            ),
        };
        if let Some(chunk) = self.chunk {
            calls += &format!("; KVM_CLEAR_DIRTY_LOG of {chunk} pages a call");
        }
        if let Some(bytes) = self.eager_split {
            calls += &format!("; {enable} KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, {bytes}");
        }
        calls
    }
}

/// Returns all ways that the host has.
pub fn ways(host: &HostKvm) -> Vec<Way> {
    let chunked = "manual, initially set, 2048 pages a clear";
    let mut ways = vec![
        Way::new(Way::LEGACY, Mode::Legacy, None),
        Way::new("manual", Mode::Manual, None),
        Way::new(Way::OF_QEMU, Mode::ManualInitiallySet, None),
        Way::new(chunked, Mode::ManualInitiallySet, Some(2048)),
    ];
    for entries in [4096, 65536] {
        let mode = Mode::Ring { entries };
        ways.push(Way::new(mode.to_string(), mode, None));
    }
    let sizes = [2 << 20, 32 << 20, 512 << 20, 1 << 30];
    for bytes in sizes.into_iter().filter(|bytes| host.eager_split_sizes & bytes != 0) {
        let name = format!("manual, initially set, eager split by {}", slat_lab::size::Size(bytes));
        ways.push(Way {
            eager_split: Some(bytes),
            ..Way::new(name, Mode::ManualInitiallySet, None)
        });
    }
    ways.retain(|way| way.mode.check(host).is_ok());
    ways
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ways_are_those_that_the_host_has() {
        let host = HostKvm { manual_protect: true, ..HostKvm::default() };
        let names = |host: &HostKvm| ways(host).into_iter().map(|way| way.name).collect::<Vec<_>>();
        assert_eq!(names(&host), ["legacy", "manual"]);
        let host = HostKvm {
            initially_set: true,
            dirty_ring_bytes: 1 << 20,
            eager_split_sizes: 2 << 20,
            ..host
        };
        assert_eq!(names(&host).len(), 4 + 2 + 1);
    }

    #[test]
    fn what_to_set_is_said_for_qemu_and_for_others() {
        let ring = Way::new("ring of 4096", Mode::RING, None);
        let lines: Vec<_> = ring.settings().into_iter().map(|setting| setting.line).collect();
        assert_eq!(lines[0], "-accel kvm,dirty-ring-size=4096");
        assert!(lines[1].contains("<dirty-ring state='on' size='4096'/>"), "{lines:?}");
        assert!(ring.ioctls().contains("65536 bytes"), "{}", ring.ioctls());
        let eager =
            Way { eager_split: Some(2 << 20), ..Way::new("x", Mode::ManualInitiallySet, Some(64)) };
        assert!(eager.settings()[0].line.contains("eager-split-size=2097152"));
        assert!(eager.ioctls().contains("64 pages a call"));
    }

    #[test]
    fn a_way_is_found_by_the_name_that_its_results_have() {
        for name in [Way::LEGACY, Way::OF_QEMU, "ring of 65536"] {
            assert_eq!(Way::named(name).map(|way| way.name).as_deref(), Some(name));
        }
        assert_eq!(Way::named("none"), None);
    }
}
