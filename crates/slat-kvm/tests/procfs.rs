//! Every reader over every host of the folder `procfs`: page sizes of 4K, 16K and 64K, control
//! groups of version 1, 2 and both, containers, a lockdown, names that are no UTF-8, and text that
//! the kernel cut.

use slat_kvm::procfs::{Files, Version};
use std::path::Path;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What the readers are to tell.
#[derive(Debug, Default, PartialEq)]
struct ExpectedReadings {
    version: Option<Version>,
    available: Option<u64>,
    limited_by: Option<&'static str>,
    swap: Option<u64>,
    cpus: Option<f64>,
    huge_page: Option<u64>,
    pools: Option<Vec<u64>>,
    nodes: Option<Vec<usize>>,
    placed: Option<u64>,
    lockdown: Option<&'static str>,
    is_root: bool,
    has_debugfs: bool,
    /// Bytes in transparent huge pages.
    huge: Option<u64>,
    /// The time that the process used, of all time.
    used: Option<(u64, u64)>,
    waits: Option<(u64, u64)>,
    group: Option<&'static str>,
    /// Bytes that the groups leave of huge pages of 2 MiB.
    huge_left: Option<u64>,
    /// Groups count huge pages as memory.
    counts_huge: bool,
    /// Numbers and names of groups are those of a container.
    is_contained: bool,
    has_other_debugfs: bool,
    swap_areas: Option<u64>,
    speed: (Option<f64>, Option<bool>, Option<f64>),
}

/// The hosts, by the names of their folders.
fn hosts() -> [(&'static str, ExpectedReadings); 6] {
    [
        (
            "x86-v2",
            ExpectedReadings {
                version: Some(Version::Two),
                // Of 1 GiB, 256 MiB are used that are no page cache.
                available: Some(768 * MIB),
                limited_by: Some("sys/fs/cgroup/app.slice"),
                swap: Some(0),
                cpus: Some(0.5),
                huge_page: Some(2 * MIB),
                pools: Some(vec![2 * MIB, GIB]),
                nodes: Some(vec![0, 1]),
                is_root: true,
                group: Some("/app.slice/job"),
                swap_areas: Some(MIB),
                speed: (Some(2100.5), Some(true), Some(0.25)),
                ..ExpectedReadings::default()
            },
        ),
        (
            "arm-16k-hybrid",
            ExpectedReadings {
                version: Some(Version::One),
                available: Some(256 * MIB),
                limited_by: Some("sys/fs/cgroup/memory"),
                swap: Some(256 * MIB),
                cpus: Some(1.5),
                huge_page: Some(32 * MIB),
                pools: Some(vec![32 * MIB]),
                nodes: Some(vec![0]),
                group: Some("/docker/a1"),
                swap_areas: Some(0),
                ..ExpectedReadings::default()
            },
        ),
        (
            "arm-64k-v1",
            ExpectedReadings {
                version: Some(Version::One),
                available: Some(4 * GIB),
                huge_page: Some(512 * MIB),
                pools: Some(vec![512 * MIB]),
                placed: Some(3 << 16),
                group: Some("/"),
                swap_areas: Some(0),
                ..ExpectedReadings::default()
            },
        ),
        (
            "locked-down",
            ExpectedReadings {
                version: Some(Version::Two),
                available: Some(256 * MIB),
                limited_by: Some("sys/fs/cgroup"),
                lockdown: Some("confidentiality"),
                pools: Some(Vec::new()),
                is_root: true,
                group: Some("/"),
                swap_areas: Some(0),
                ..ExpectedReadings::default()
            },
        ),
        (
            // It has no tracefs.
            "container",
            ExpectedReadings {
                version: Some(Version::Two),
                available: Some(384 * MIB),
                limited_by: Some("sys/fs/cgroup"),
                pools: Some(vec![2 * MIB]),
                group: Some("/"),
                huge_left: Some(2 * MIB),
                counts_huge: true,
                is_contained: true,
                has_other_debugfs: true,
                swap_areas: Some(0),
                ..ExpectedReadings::default()
            },
        ),
        (
            // Its list of nodes is cut within a number, its pools cannot be listed, and its kernel
            // does not count waits.
            "odd-bytes",
            ExpectedReadings {
                placed: Some(3 << 12),
                is_root: true,
                has_debugfs: true,
                huge: Some(4 * MIB),
                used: Some((764, 36)),
                ..ExpectedReadings::default()
            },
        ),
    ]
}

#[test]
fn every_reader_tells_of_every_host_what_its_files_say() {
    for (name, wanted) in hosts() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/procfs").join(name);
        let files = Files(&root);
        let bounds = files.memory_bounds();
        let available = files.available_memory(&bounds).ok();
        let group = available.as_ref().and_then(|it| it.group.clone());
        let lockdown = files.choice("sys/kernel/security/lockdown");
        let groups = files.control_groups("memory", "memory.limit_in_bytes");
        assert_eq!(group.as_deref(), wanted.limited_by.map(Path::new), "{name}");
        assert_eq!(lockdown.as_deref(), wanted.lockdown, "{name}");
        assert_eq!(files.group("memory").as_deref(), wanted.group, "{name}");
        let first = |kind| files.in_first_namespace(kind);
        let at_usual = files.is_mounted_at("debugfs", "/sys/kernel/debug");
        let pools = files.huge_pools().ok();
        let told = ExpectedReadings {
            version: groups.map(|groups| groups.version),
            available: available.map(|it| it.bytes),
            limited_by: wanted.limited_by,
            swap: bounds.iter().filter_map(|bound| bound.swap.clone().unwrap()).min(),
            cpus: files.cpu_quota().unwrap(),
            huge_page: files.transparent_huge_page(),
            pools: pools.map(|pools| pools.iter().map(|pool| pool.page_size).collect()),
            nodes: files.list("sys/devices/system/node/online"),
            placed: files.numa_maps(0..1 << 20).map(|nodes| nodes.values().sum()),
            lockdown: wanted.lockdown,
            is_root: files.is_capable(21),
            has_debugfs: at_usual,
            huge: files.anon_huge_pages(0..1 << 20),
            used: files.own().zip(files.ticks().map(|ticks| ticks.all)),
            waits: files.waits(),
            group: wanted.group,
            huge_left: files.huge_page_bound(2 * MIB).unwrap().map(|it| it.bytes),
            counts_huge: files.memory_has_huge_pages(),
            is_contained: !first("pid") && !first("cgroup"),
            has_other_debugfs: files.is_mounted("debugfs") && !at_usual,
            swap_areas: files.swap(),
            speed: (files.frequencies().first().copied(), files.turbo(), files.load()),
        };
        assert_eq!(told, wanted, "{name}");
    }
}
