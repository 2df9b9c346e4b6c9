//! Hosts whose files are made up, for tests.

use super::Evidence;
use slat_kvm::{Error, HostKvm};
use slat_lab::fake::files as fake;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

/// A host. Its files are deleted when it is dropped.
pub(crate) struct FakeHost {
    root: tempfile::TempDir,
    cpus: usize,
    kvm: fn() -> Result<HostKvm, Error>,
}

impl FakeHost {
    fn new(files: &[(&str, &str)], cpus: usize, kvm: fn() -> Result<HostKvm, Error>) -> Self {
        let root = fake(files);
        let permit = |path: &str, mode: u32| {
            fs::set_permissions(root.path().join(path), Permissions::from_mode(mode)).unwrap();
        };
        for (path, _) in files {
            match path {
                path if path.starts_with("usr/bin/") => permit(path, 0o755),
                // The kernel reads this parameter as it loads the module, so the file is not
                // writable.
                path if path.ends_with("tdp_mmu") => permit(path, 0o444),
                _ => {}
            }
        }
        Self { root, cpus, kvm }
    }

    pub(crate) fn evidence(&self) -> Evidence {
        let programs = vec!["/usr/bin".into()];
        let mut evidence = Evidence::below(self.root.path().to_owned(), (self.kvm)(), programs);
        // These two come from this process, not from the host's files.
        evidence.host.cpu.architecture = "x86_64".into();
        evidence.host.cpu.usable = self.cpus;
        evidence
    }
}

fn kvm(module: &str, max_vcpus: usize, dirty_ring_bytes: u64) -> HostKvm {
    HostKvm {
        api_version: 12,
        module: module.to_owned(),
        max_vcpus,
        max_memslots: 32764,
        manual_protect: true,
        initially_set: true,
        dirty_ring_bytes,
        eager_split_sizes: 0,
        slot_zap_quirk: true,
        binary_stats: true,
        parameters: BTreeMap::new(),
    }
}

/// Returns a host of each kind.
pub(crate) fn hosts() -> [FakeHost; 3] {
    [server(), cloud(), software()]
}

/// Returns a host without any file.
pub(crate) fn nothing() -> FakeHost {
    FakeHost::new(&[], 1, || Err(Error::NoKvm))
}

const ALL_CAPABILITIES: &str = "CapEff:\t000001ffffffffff\n";
const NO_CAPABILITIES: &str = "CapEff:\t0000000000000000\n";

/// Returns a bare-metal server with EPT. It is largely set up for measuring; exceptions are its
/// turbo, its huge pages, NUMA balancing, DAMON and some parameters of KVM.
pub(crate) fn server() -> FakeHost {
    let files = [
        ("proc/cpuinfo", "model name\t: Example Xeon\nflags\t\t: fpu vmx pdpe1gb\n"),
        ("proc/meminfo", "MemTotal: 263000000 kB\nMemAvailable: 250609664 kB\n"),
        ("proc/sys/kernel/osrelease", "6.12.1\n"),
        ("proc/self/status", ALL_CAPABILITIES),
        ("proc/self/cgroup", "0::/user.slice\n"),
        ("proc/self/schedstat", "1 2 3\n"),
        (
            "proc/mounts",
            "debugfs /sys/kernel/debug debugfs rw 0 0\n\
             tracefs /sys/kernel/tracing tracefs rw 0 0\n",
        ),
        ("proc/sys/kernel/unprivileged_bpf_disabled", "2\n"),
        ("proc/sys/vm/unprivileged_userfaultfd", "0\n"),
        ("proc/modules", "kvm_intel 400000 0 - Live 0x0\nkvm 1400000 1 kvm_intel, Live 0x0\n"),
        ("proc/swaps", "Filename Type Size Used Priority\n/dev/sda2 partition 8388604 0 -2\n"),
        ("proc/stat", "cpu  100 0 100 9800 0 0 0 0 0 0\n"),
        ("proc/loadavg", "0.02 0.03 0.01 1/900 4242\n"),
        ("proc/sys/kernel/perf_event_paranoid", "2\n"),
        ("proc/sys/kernel/numa_balancing", "1\n"),
        ("sys/class/dmi/id/product_name", "Example Server\n"),
        ("sys/module/kvm/parameters/tdp_mmu", "N\n"),
        ("sys/module/kvm/parameters/eager_page_split", "Y\n"),
        ("sys/module/kvm/parameters/nx_huge_pages", "N\n"),
        ("sys/module/kvm_intel/parameters/ept", "Y\n"),
        ("sys/module/kvm_intel/parameters/pml", "Y\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "200\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "50\n"),
        ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "0\n"),
        ("sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "0\n"),
        ("sys/kernel/mm/page_idle/bitmap", ""),
        ("sys/kernel/mm/lru_gen/enabled", "0x0007\n"),
        ("sys/kernel/debug/lru_gen", "memcg 1 /\n"),
        ("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "1\n"),
        ("sys/kernel/mm/damon/admin/kdamonds/0/state", "on\n"),
        ("sys/kernel/security/lockdown", "[none] integrity confidentiality\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n"),
        ("sys/devices/system/node/online", "0-1\n"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
        ("sys/devices/system/cpu/intel_pstate/no_turbo", "0\n"),
        ("sys/devices/system/cpu/smt/control", "off\n"),
        ("sys/devices/system/cpu/isolated", "2-31\n"),
        ("sys/devices/system/cpu/nohz_full", "2-31\n"),
        ("sys/bus/event_source/devices/cpu/type", "4\n"),
        ("usr/bin/qemu-system-x86_64", ""),
        ("usr/bin/dpkg-deb", ""),
        ("usr/bin/apt-get", ""),
    ];
    FakeHost::new(&files, 32, || Ok(kvm("kvm_intel", 1024, 1 << 20)))
}

/// Returns a cloud instance without nested virtualisation, with an unprivileged user and the limits
/// of a container.
pub(crate) fn cloud() -> FakeHost {
    let files = [
        ("proc/cpuinfo", "model name\t: Example EPYC\nflags\t\t: fpu hypervisor\n"),
        ("proc/meminfo", "MemTotal: 4000000 kB\nMemAvailable: 3145728 kB\n"),
        ("proc/self/status", NO_CAPABILITIES),
        ("proc/self/cgroup", "0::/pod/inner\n"),
        ("proc/self/schedstat", "0 0 0\n"),
        ("proc/filesystems", "nodev\tsysfs\nnodev\tdebugfs\nnodev\ttracefs\n"),
        ("proc/sys/kernel/unprivileged_bpf_disabled", "2\n"),
        ("proc/sys/vm/unprivileged_userfaultfd", "0\n"),
        ("proc/swaps", "Filename Type Size Used Priority\n"),
        ("proc/stat", "cpu  100 0 100 9500 0 0 0 300 0 0\n"),
        ("proc/loadavg", "1.93 0.03 0.01 1/900 4242\n"),
        ("proc/sys/kernel/perf_event_paranoid", "3\n"),
        ("sys/class/dmi/id/product_name", "Example Instance\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ("sys/kernel/mm/lru_gen/enabled", "0x0007\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu io memory pids\n"),
        ("sys/fs/cgroup/pod/cpu.max", "150000 100000\n"),
        ("sys/fs/cgroup/pod/inner/cgroup.controllers", "cpu io memory pids\n"),
        ("sys/fs/cgroup/pod/inner/cpu.max", "max 100000\n"),
        ("sys/devices/system/node/online", "0\n"),
        ("sys/devices/system/cpu/smt/control", "on\n"),
        ("usr/bin/qemu-system-aarch64", ""),
        ("usr/bin/dpkg-deb", ""),
    ];
    FakeHost::new(&files, 2, || Err(Error::NoKvm))
}

/// Returns a guest whose KVM works without hardware virtualisation.
pub(crate) fn software() -> FakeHost {
    let files = [
        ("proc/cpuinfo", "model name\t: Example Xeon\nflags\t\t: fpu hypervisor pdpe1gb\n"),
        ("proc/meminfo", "MemTotal: 24000000 kB\nMemAvailable: 23068672 kB\n"),
        ("proc/self/status", ALL_CAPABILITIES),
        ("proc/self/schedstat", "0 2274154 1\n"),
        ("proc/filesystems", "nodev\tsysfs\nnodev\tdebugfs\nnodev\ttracefs\n"),
        ("proc/sys/kernel/unprivileged_bpf_disabled", "2\n"),
        ("proc/sys/vm/unprivileged_userfaultfd", "0\n"),
        ("proc/swaps", "Filename Type Size Used Priority\n"),
        ("proc/stat", "cpu  2030 0 830 51723 440 0 51 56 0 0\n"),
        ("proc/loadavg", "0.10 0.03 0.01 1/90 4242\n"),
        ("proc/sys/kernel/perf_event_paranoid", "2\n"),
        ("proc/sys/kernel/numa_balancing", "0\n"),
        ("sys/module/kvm/parameters/tdp_mmu", "N\n"),
        ("sys/module/kvm/parameters/eager_page_split", "Y\n"),
        ("sys/module/kvm/parameters/nx_huge_pages", "N\n"),
        ("sys/module/kvm_pvm/parameters/stats", "N\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "512\n"),
        ("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds", "0\n"),
        ("proc/self/cgroup", "4:memory:/\n"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ("sys/devices/system/node/online", "0\n"),
        ("sys/devices/system/cpu/smt/control", "notsupported\n"),
        ("usr/bin/dpkg-deb", ""),
        ("usr/bin/apt-get", ""),
    ];
    FakeHost::new(&files, 2, || Ok(kvm("kvm_pvm", 710, 1 << 20)))
}
