//! The host: everything that must be known to compare two runs.
//!
//! This module only reads files. It needs no root, and changes nothing.

use crate::stats::median;
use schemars::JsonSchema;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use slat_kvm::procfs::{Files, value};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

/// The text in place of a value that is not known.
const NOT_AVAILABLE: &str = "not available";

/// A value that the host may not provide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Maybe<T>(pub Option<T>);

impl<T: fmt::Display> fmt::Display for Maybe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.pad(NOT_AVAILABLE),
        }
    }
}

impl<T: Serialize> Serialize for Maybe<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Some(value) => value.serialize(serializer),
            None => serializer.serialize_str(NOT_AVAILABLE),
        }
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Maybe<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(text) if text == NOT_AVAILABLE => Ok(Self(None)),
            value => serde_json::from_value(value).map(|value| Self(Some(value))),
        }
        .map_err(D::Error::custom)
    }
}

impl<T: JsonSchema> JsonSchema for Maybe<T> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("Maybe_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "anyOf": [generator.subschema_for::<T>(), { "const": NOT_AVAILABLE }],
        })
    }
}

/// The host of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// What it calls itself.
    pub name: Maybe<String>,
    /// Processors.
    pub cpu: Cpu,
    /// The kernel that runs here.
    pub kernel: Kernel,
    /// Whether this is itself a guest.
    pub virtualisation: Virtualisation,
    /// Main memory.
    pub memory: Memory,
    /// The host's KVM.
    pub kvm: Kvm,
    /// Transparent huge pages.
    pub thp: Thp,
    /// The pools of huge pages, by page size.
    pub hugetlb: Vec<HugePool>,
    /// Number of NUMA nodes.
    pub numa_nodes: Maybe<usize>,
    /// `kernel.randomize_va_space`.
    pub aslr: Maybe<String>,
}

/// Processors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Cpu {
    /// What `/proc/cpuinfo` calls the first.
    pub model: Maybe<String>,
    /// The architecture that this program was compiled for.
    pub architecture: Cow<'static, str>,
    /// How many this process may run on.
    pub usable: usize,
    /// Revision of the microcode.
    pub microcode: Maybe<String>,
    /// Who sets the frequency.
    pub governor: Maybe<String>,
    /// Whether sibling threads share cores.
    pub smt: Maybe<String>,
    /// The frequency as the run began, in MHz: the middle one of all CPUs.
    pub mhz: Maybe<f64>,
    /// Whether CPUs may exceed their nominal frequency.
    pub turbo: Maybe<bool>,
    /// What the kernel does about each vulnerability of the processor, by the names of its files.
    pub mitigations: BTreeMap<String, Maybe<String>>,
}

/// The kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Kernel {
    /// As `uname -r` has it.
    pub release: Maybe<String>,
    /// As `uname -v` has it.
    pub version: Maybe<String>,
    /// What it was booted with.
    pub command_line: Maybe<String>,
}

/// Whether the host is itself a guest; its times are then those of two hypervisors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Virtualisation {
    /// Whether the processor says that a hypervisor is below.
    pub hypervisor: Maybe<bool>,
    /// Maker and product of the machine as its firmware has it.
    pub product: Maybe<String>,
}

/// Main memory in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Memory {
    /// All of it.
    pub total: Maybe<u64>,
    /// What could be had without pushing anybody else out, as the run began.
    pub available: Maybe<u64>,
}

/// The host's KVM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Kvm {
    /// `usable`, or why it is not.
    pub device: String,
    /// Every parameter of each module whose name begins with kvm.
    pub parameters: BTreeMap<String, BTreeMap<String, Maybe<String>>>,
}

/// Transparent huge pages: the choice made, of those that the kernel offers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Thp {
    /// For which mappings.
    pub enabled: Maybe<String>,
    /// How hard the kernel tries in a fault.
    pub defrag: Maybe<String>,
}

/// A pool of huge pages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HugePool {
    /// Bytes of a page.
    pub page_size: u64,
    /// Pages in the pool.
    pub total: Maybe<u64>,
    /// Pages that nobody uses.
    pub free: Maybe<u64>,
}

impl Host {
    /// Reads this host.
    pub fn read() -> Self {
        Self::read_below(Path::new("/"))
    }

    /// Reads a host whose files are below `root`.
    pub fn read_below(root: &Path) -> Self {
        let files = Files(root);
        let known = |path: &str| Maybe(files.text(path));
        let cpuinfo = files.text("proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| Maybe(value(&cpuinfo, name).map(str::to_owned));
        let dmi = |name: &str| files.text(format!("sys/class/dmi/id/{name}"));
        let product: Vec<_> =
            [dmi("sys_vendor"), dmi("product_name")].into_iter().flatten().collect();
        Self {
            name: known("proc/sys/kernel/hostname"),
            cpu: Cpu {
                model: Maybe(field("model name").0.or_else(|| field("CPU part").0)),
                architecture: std::env::consts::ARCH.into(),
                usable: std::thread::available_parallelism().map_or(1, Into::into),
                microcode: field("microcode"),
                governor: known("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
                smt: known("sys/devices/system/cpu/smt/control"),
                mhz: Maybe(median(&files.frequencies())),
                turbo: Maybe(files.turbo()),
                mitigations: texts(files, "sys/devices/system/cpu/vulnerabilities"),
            },
            kernel: Kernel {
                release: known("proc/sys/kernel/osrelease"),
                version: known("proc/sys/kernel/version"),
                command_line: Maybe(files.text("proc/cmdline").map(own_words)),
            },
            virtualisation: Virtualisation {
                // Only x86 has this flag. On other architectures, its absence means nothing.
                hypervisor: Maybe(
                    field("flags")
                        .0
                        .map(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor")),
                ),
                product: Maybe((!product.is_empty()).then(|| product.join(" "))),
            },
            memory: Memory {
                total: Maybe(files.meminfo("MemTotal")),
                available: Maybe(available_memory(files)),
            },
            kvm: Kvm {
                device: kvm_device(&root.join("dev/kvm")),
                parameters: kvm_parameters(files),
            },
            thp: Thp {
                enabled: Maybe(files.choice("sys/kernel/mm/transparent_hugepage/enabled")),
                defrag: Maybe(files.choice("sys/kernel/mm/transparent_hugepage/defrag")),
            },
            hugetlb: huge_pools(files),
            numa_nodes: Maybe(
                files.list("sys/devices/system/node/online").map(|nodes| nodes.len()),
            ),
            aslr: known("proc/sys/kernel/randomize_va_space"),
        }
    }
}

/// Removes values that change by themselves from a host in a report, so that runs on one host
/// agree.
pub fn keep_lasting(host: &mut Value) {
    for path in ["/memory/available", "/cpu/mhz"] {
        host.pointer_mut(path).map(Value::take);
    }
    let pools = host.get_mut("hugetlb").and_then(Value::as_array_mut);
    for free in pools.into_iter().flatten().filter_map(|pool| pool.get_mut("free")) {
        free.take();
    }
}

/// Returns the part of the command line that the kernel reads. The rest is for the first process.
/// It may hold secrets, and does not affect memory.
fn own_words(command_line: String) -> String {
    command_line.split(" -- ").next().unwrap_or_default().to_owned()
}

/// Returns the bytes of memory that are available now: the kernel's estimate, or what is left below
/// the limit of this process's control groups, if that is less. It is 0 if such a limit cannot be
/// read, as every other number may be too large.
pub fn memory_available() -> u64 {
    available_to(Files::here())
}

fn available_to(files: Files<'_>) -> u64 {
    let bounds = files.memory_bounds();
    let known = files.available_memory(&bounds);
    known.map(|it| it.bytes).unwrap_or_else(|_| match bounds.iter().all(|it| it.memory.is_ok()) {
        // Without /proc, the kernel tells what is free, and not what it would free.
        true => {
            let host = rustix::system::sysinfo();
            host.freeram.saturating_mul(host.mem_unit.into())
        }
        false => 0,
    })
}

fn available_memory(files: Files<'_>) -> Option<u64> {
    Some(files.available_memory(&files.memory_bounds()).ok()?.bytes)
}

fn kvm_parameters(files: Files<'_>) -> BTreeMap<String, BTreeMap<String, Maybe<String>>> {
    let modules = files.names("sys/module").into_iter().filter(|name| name.starts_with("kvm"));
    modules
        .map(|module| {
            let parameters = texts(files, &format!("sys/module/{module}/parameters"));
            (module, parameters)
        })
        .collect()
}

/// Returns the text of each file in a folder.
fn texts(files: Files<'_>, folder: &str) -> BTreeMap<String, Maybe<String>> {
    let text = |name: &String| Maybe(files.text(format!("{folder}/{name}")));
    files.names(folder).into_iter().map(|name| (name.clone(), text(&name))).collect()
}

fn huge_pools(files: Files<'_>) -> Vec<HugePool> {
    let pool = |pool: slat_kvm::procfs::HugePool| HugePool {
        page_size: pool.page_size,
        total: Maybe(pool.total),
        free: Maybe(pool.free),
    };
    files.huge_pools().unwrap_or_default().into_iter().map(pool).collect()
}

fn kvm_device(path: &Path) -> String {
    match fs::OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => "usable".to_owned(),
        Err(error) => format!("cannot be opened: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::files as fake;

    #[test]
    fn a_host_that_reports_nothing_is_still_described() {
        let root = fake(&[]);
        let host = Host::read_below(root.path());
        let json = serde_json::to_value(&host).unwrap();
        assert_eq!(json["cpu"]["model"], "not available");
        assert_eq!(json["memory"]["total"], "not available");
        assert_eq!(json["numa_nodes"], "not available");
        assert_eq!(serde_json::from_value::<Host>(json).unwrap(), host);
        assert!(host.kvm.device.starts_with("cannot be opened"), "{}", host.kvm.device);
    }

    #[test]
    fn what_the_files_say_is_what_is_reported() {
        let root = fake(&[
            (
                "proc/cpuinfo",
                "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu hypervisor sse\n",
            ),
            ("proc/meminfo", "MemTotal:       1024 kB\nMemAvailable:    512 kB\n"),
            ("proc/sys/kernel/osrelease", "6.12.1\n"),
            ("sys/module/kvm/parameters/nx_huge_pages", "N\n"),
            ("sys/module/kvm_intel/parameters/ept", "Y\n"),
            ("sys/module/kvmgt_not/x", ""),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", "1\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
            ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "500\n"),
            ("sys/devices/system/node/online", "0-1\n"),
            ("dev/kvm", ""),
        ]);
        let host = Host::read_below(root.path());
        let json = serde_json::to_value(&host).unwrap();
        assert_eq!(serde_json::from_value::<Host>(json).unwrap(), host);
        assert_eq!(host.cpu.model.to_string(), "A CPU");
        assert_eq!(host.virtualisation.hypervisor, Maybe(Some(true)));
        assert_eq!(host.memory.available, Maybe(Some(512 << 10)));
        assert_eq!(host.kernel.release.to_string(), "6.12.1");
        assert_eq!(host.kvm.device, "usable");
        assert_eq!(host.kvm.parameters["kvm_intel"]["ept"].to_string(), "Y");
        assert_eq!(host.thp.enabled.to_string(), "madvise");
        assert_eq!(host.thp.defrag, Maybe(None));
        let pools: Vec<_> = host.hugetlb.iter().map(|p| (p.page_size, p.free.0)).collect();
        assert_eq!(pools, [(2 << 20, Some(500)), (1 << 30, None)]);
        assert_eq!(host.numa_nodes, Maybe(Some(2)));
    }

    #[test]
    fn how_it_was_booted_and_what_it_mitigates_is_read() {
        let root = fake(&[
            ("proc/cmdline", "ro mitigations=auto -- --token x\n"),
            ("proc/cpuinfo", "cpu MHz\t: 2100.5\ncpu MHz\t: 800\ncpu MHz\t: 2300\n"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Mitigation: Clear CPU buffers\n"),
            ("sys/devices/system/cpu/intel_pstate/no_turbo", "1\n"),
        ]);
        let host = Host::read_below(root.path());
        assert_eq!(host.kernel.command_line.to_string(), "ro mitigations=auto");
        assert_eq!((host.cpu.mhz, host.cpu.turbo), (Maybe(Some(2100.5)), Maybe(Some(false))));
        assert_eq!(host.cpu.mitigations["mds"].to_string(), "Mitigation: Clear CPU buffers");
    }

    #[test]
    fn this_host_has_memory() {
        assert!(memory_available() > 0);
    }

    #[test]
    fn nothing_is_available_below_a_limit_that_cannot_be_read() {
        let root = tempfile::tempdir().unwrap();
        // A folder in the file's place, as root may read any file.
        for folder in ["proc/self", "sys/fs/cgroup/a/memory.max"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        std::fs::write(root.path().join("proc/self/cgroup"), "0::/a\n").unwrap();
        std::fs::write(root.path().join("proc/meminfo"), "MemAvailable: 4096 kB\n").unwrap();
        assert_eq!(available_to(Files(root.path())), 0);
        std::fs::remove_dir(root.path().join("sys/fs/cgroup/a/memory.max")).unwrap();
        assert_eq!(available_to(Files(root.path())), 4 << 20);
    }
}
