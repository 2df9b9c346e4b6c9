//! Readers of the files of procfs and sysfs in which Linux describes a host.
//!
//! They return nothing for a file that does not exist or does not have the format of proc(5) and
//! the kernel's documentation. The crate `procfs` takes
//! 22 CPU seconds to build for a dozen short files, and lacks those of huge pages and groups.

mod cgroup;

pub use cgroup::{Available, Bound, Groups, KernelValue, Version};

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A limit that no machine's number of CPUs or nodes exceeds.
const MOST: usize = 1 << 16;

/// The directory below which a host's files are: `/`, or a directory of a test.
#[derive(Clone, Copy, Debug)]
pub struct Files<'a>(pub &'a Path);

/// A pool of huge pages (admin-guide/mm/hugetlbpage.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePool {
    /// Size of a page, in bytes.
    pub page_size: u64,
    /// Number of pages in the pool.
    pub total: Option<u64>,
    /// Number of free pages.
    pub free: Option<u64>,
    /// Number of free pages that are reserved for a mapping.
    pub reserved: Option<u64>,
}

/// How all CPUs spent their time since the host booted, in hundredths of a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticks {
    /// All time.
    pub all: u64,
    /// Time in which the machine below gave the CPUs to others (steal).
    pub stolen: u64,
    /// Idle time, including waits for I/O.
    pub idle: u64,
    /// Number of CPUs.
    pub cpus: usize,
}

impl Files<'static> {
    /// Returns the files of the host on which this program runs.
    pub fn here() -> Self {
        Self(Path::new("/"))
    }
}

impl Files<'_> {
    /// Returns the contents of a file without leading and trailing blanks, if it exists and is not
    /// blank.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let mut text = whole(&fs::File::open(self.0.join(path)).ok()?)?;
        text.truncate(text.trim_end().len());
        let blank = text.len() - text.trim_start().len();
        text.drain(..blank);
        (!text.is_empty()).then_some(text)
    }

    /// Returns whether this process is in the host's first namespace of a kind (`pid`, `cgroup`),
    /// so that its numbers and names of that kind are those of the host. A host without such
    /// namespaces has one.
    pub fn in_first_namespace(&self, kind: &str) -> bool {
        // The kernel's fixed numbers of them (include/linux/proc_ns.h).
        let first = match kind {
            "pid" => "pid:[4026531836]",
            "cgroup" => "cgroup:[4026531835]",
            kind => panic!("{kind}: no kind of namespace that is looked at"),
        };
        let link = fs::read_link(self.0.join("proc/self/ns").join(kind));
        match link {
            Ok(name) => name.as_os_str() == first,
            Err(error) => error.kind() == ErrorKind::NotFound,
        }
    }

    /// Returns the number in a file.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// Returns the CPUs or nodes that a file lists. A list without a newline is none: the kernel
    /// cut it at the end of a page, perhaps within a number.
    pub fn list(&self, path: impl AsRef<Path>) -> Option<Vec<usize>> {
        let text = whole(&fs::File::open(self.0.join(path)).ok()?)?;
        list(text.strip_suffix('\n')?)
    }

    /// Returns the size of a transparent huge page, in bytes, if the kernel has them.
    pub fn transparent_huge_page(&self) -> Option<u64> {
        let size = self.number("sys/kernel/mm/transparent_hugepage/hpage_pmd_size")?;
        size.is_power_of_two().then_some(size)
    }

    /// Returns the selected word of a file such as `always [madvise] never`.
    pub fn choice(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = self.text(path)?;
        let (_, rest) = text.split_once('[')?;
        rest.split_once(']').map(|(word, _)| word.to_owned())
    }

    /// Returns the names in a directory, in sorted order; none of one that cannot be listed.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        self.told_names(path).ok().flatten().unwrap_or_default()
    }

    /// Returns the names in a directory, in sorted order, or nothing if there is no such directory.
    ///
    /// # Errors
    /// The directory, if it cannot be listed.
    pub fn told_names(&self, path: impl AsRef<Path>) -> KernelValue<Vec<String>> {
        let path = path.as_ref();
        let untold = |_| path.to_owned();
        let entries = match fs::read_dir(self.0.join(path)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            entries => entries.map_err(untold)?,
        };
        let names: Result<Vec<_>, _> =
            entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
        let names = names.map_err(untold)?.into_iter();
        let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
        names.sort();
        Ok(Some(names))
    }

    /// Returns the current frequency of each CPU in MHz, from its driver
    /// (admin-guide/pm/cpufreq.rst) or else from `/proc/cpuinfo`, which has it on some
    /// architectures only.
    pub fn frequencies(&self) -> Vec<f64> {
        let cpus = "sys/devices/system/cpu";
        let khz = |cpu| self.number(format!("{cpus}/{cpu}/cpufreq/scaling_cur_freq"));
        let driver: Vec<f64> =
            self.names(cpus).into_iter().filter_map(khz).map(|khz| khz as f64 / 1e3).collect();
        if !driver.is_empty() {
            return driver;
        }
        let cpuinfo = self.text("proc/cpuinfo").unwrap_or_default();
        let fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let mhz = fields.filter(|(name, _)| name.trim() == "cpu MHz");
        mhz.filter_map(|(_, mhz)| mhz.trim().parse().ok()).collect()
    }

    /// Returns whether the driver allows CPUs to exceed their nominal frequency.
    pub fn turbo(&self) -> Option<bool> {
        let cpus = Path::new("sys/devices/system/cpu");
        let boost = || Some(self.number(cpus.join("cpufreq/boost"))? != 0);
        let no_turbo = self.number(cpus.join("intel_pstate/no_turbo"));
        no_turbo.map(|no| no == 0).or_else(boost)
    }

    /// Returns a field of `/proc/meminfo`, in bytes.
    pub fn meminfo(&self, name: &str) -> Option<u64> {
        bytes(&self.text("proc/meminfo")?, name)
    }

    /// Returns whether this process has the capability with a number.
    pub fn is_capable(&self, capability: u32) -> bool {
        let status = self.text("proc/self/status").unwrap_or_default();
        let mask = value(&status, "CapEff").and_then(|mask| u64::from_str_radix(mask, 16).ok());
        mask.is_some_and(|mask| mask >> capability & 1 != 0)
    }

    /// Returns whether a file system of type `kind` is mounted, wherever.
    pub fn is_mounted(&self, kind: &str) -> bool {
        self.mounts(|_, of| of == kind)
    }

    /// Returns whether a file system of type `kind` is mounted at a directory.
    pub fn is_mounted_at(&self, kind: &str, directory: &str) -> bool {
        self.mounts(|at, of| of == kind && at == directory)
    }

    fn mounts(&self, is_it: impl Fn(&str, &str) -> bool) -> bool {
        let mounts = self.text("proc/mounts").unwrap_or_default();
        mounts.lines().any(|line| {
            let mut words = line.split_whitespace().skip(1);
            words.next().zip(words.next()).is_some_and(|(at, kind)| is_it(at, kind))
        })
    }

    /// Returns the load average of the last minute.
    pub fn load(&self) -> Option<f64> {
        self.text("proc/loadavg")?.split_whitespace().next()?.parse().ok()
    }

    /// Returns the size of all swap areas, in bytes, unless it is not told of one of them. A kernel
    /// without swap has no such file.
    pub fn swap(&self) -> Option<u64> {
        // Columns: name, type, size and used size in KiB, priority.
        let areas = self.told("proc/swaps").ok()?.unwrap_or_default();
        let size = |line: &str| line.split_whitespace().nth(2)?.parse::<u64>().ok();
        let kib: Option<u64> = areas.lines().skip(1).map(size).sum();
        kib?.checked_mul(1024)
    }

    /// Returns how all CPUs spent their time.
    pub fn ticks(&self) -> Option<Ticks> {
        let text = self.text("proc/stat")?;
        let (total, each) = text.split_once('\n').unwrap_or((&text, ""));
        let words = total.strip_prefix("cpu ")?.split_whitespace();
        // user, nice, system, idle, iowait, irq, softirq, steal. The guests' times that follow are
        // part of user and nice.
        let ticks: Vec<u64> = words.take(8).map_while(|tick| tick.parse().ok()).collect();
        let cpus = each.lines().take_while(|line| line.starts_with("cpu")).count().max(1);
        let idle = ticks.get(3)? + ticks.get(4)?;
        Some(Ticks { all: ticks.iter().sum(), stolen: *ticks.get(7)?, idle, cpus })
    }

    /// Returns the time that this process and its waited-for children used, in the unit of
    /// [`Ticks`].
    pub fn own(&self) -> Option<u64> {
        let text = self.text("proc/self/stat")?;
        // utime, stime, cutime and cstime. The name before them is in parentheses and may contain
        // blanks.
        let mut words = text.rsplit_once(')')?.1.split_whitespace().skip(11);
        (0..4).map(|_| words.next()?.parse::<u64>().ok()).sum()
    }

    /// Returns for how many nanoseconds the calling thread was ready and waited for a CPU, and how
    /// often it got one (scheduler/sched-stats.rst), where the kernel counts that.
    pub fn waits(&self) -> Option<(u64, u64)> {
        let text = self.text("proc/thread-self/schedstat")?;
        // A kernel that does not count has the file, too.
        if text == "0 0 0" {
            return None;
        }
        let mut words = text.split_whitespace().skip(1).map(str::parse);
        Some((words.next()?.ok()?, words.next()?.ok()?))
    }

    /// Returns the path of this process's cgroup for a controller, in version 1 or else in version
    /// 2, if the kernel tells it. It tells nothing where no cgroups were ever mounted: there is
    /// only the root then.
    pub fn group(&self, controller: &str) -> Option<String> {
        let file = "proc/self/cgroup";
        let Some(text) = self.text(file) else {
            return self.0.join(file).exists().then(|| "/".to_owned());
        };
        let lines = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let own = lines().find(|(names, _)| names.split(',').any(|name| name == controller));
        let group = own.or_else(|| lines().find(|(names, _)| names.is_empty()));
        group.map(|(_, path)| path.to_owned())
    }

    /// Returns the pools of huge pages, sorted by page size.
    ///
    /// # Errors
    /// Their directory, if it cannot be listed.
    pub fn huge_pools(&self) -> Result<Vec<HugePool>, PathBuf> {
        let folder = Path::new("sys/kernel/mm/hugepages");
        let pool = |name: String| {
            let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?;
            let read = |file| self.number(folder.join(&name).join(file));
            Some(HugePool {
                page_size: kib.checked_mul(1024)?,
                total: read("nr_hugepages"),
                free: read("free_hugepages"),
                reserved: read("resv_hugepages"),
            })
        };
        let names = self.told_names(folder)?.unwrap_or_default();
        let mut pools: Vec<_> = names.into_iter().filter_map(pool).collect();
        pools.sort_by_key(|pool| pool.page_size);
        Ok(pools)
    }

    /// Returns the bytes that this process has in transparent huge pages, in mappings that lie
    /// within a range. The kernel tells nothing of a part of a mapping: one that lies across an end
    /// of the range may have all of its pages on either side.
    pub fn anon_huge_pages(&self, range: Range<u64>) -> Option<u64> {
        let smaps = self.text("proc/self/smaps")?;
        let (mut inside, mut sum) = (false, 0);
        for line in smaps.lines() {
            let first = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((Ok(from), Ok(to))) = first.map(|(from, to)| (address(from), address(to))) {
                inside = from >= range.start && to <= range.end;
                if !inside && from < range.end && range.start < to {
                    return None;
                }
            } else if inside {
                sum += bytes(line, "AnonHugePages").unwrap_or(0);
            }
        }
        Some(sum)
    }

    /// Returns the bytes of memory that mappings of this process hold which start within one of
    /// some ranges: all of their own pages, and their share of those that others map, too.
    pub fn proportional(&self, ranges: &[Range<u64>]) -> Option<u64> {
        let smaps = self.text("proc/self/smaps")?;
        let (mut inside, mut sum) = (false, 0);
        for line in smaps.lines() {
            let first = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((Ok(from), Ok(_))) = first.map(|(from, to)| (address(from), address(to))) {
                inside = ranges.iter().any(|range| range.contains(&from));
            } else if inside {
                sum += bytes(line, "Pss").unwrap_or(0);
            }
        }
        Some(sum)
    }

    /// Returns the bytes on each NUMA node, of this process's mappings that start within a range.
    pub fn numa_maps(&self, range: Range<u64>) -> Option<BTreeMap<u32, u64>> {
        let maps = self.text("proc/self/numa_maps")?;
        let mut found = BTreeMap::new();
        for line in maps.lines() {
            let (start, rest) = line.split_once(' ').unwrap_or((line, ""));
            if !address(start).is_ok_and(|start| range.contains(&start)) {
                continue;
            }
            let words = rest.split(' ');
            // Only a mapping without pages has no size of them.
            let size = words.clone().find_map(|word| word.strip_prefix("kernelpagesize_kB="));
            let Some(size) = size else { continue };
            let page = size.parse::<u64>().ok()?.checked_mul(1024)?;
            for word in words.filter_map(|word| word.strip_prefix('N')) {
                let (node, pages) = word.split_once('=')?;
                let bytes = pages.parse::<u64>().ok()?.checked_mul(page)?;
                *found.entry(node.parse().ok()?).or_default() += bytes;
            }
        }
        Some(found)
    }
}

/// Returns text, with a replacement character for what is no UTF-8.
pub fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// All of a file, which may be read again later. Bytes that are no UTF-8, such as those of a name
/// that the kernel cut within a character, become replacement characters: they hide nothing else.
pub fn whole(file: &fs::File) -> Option<String> {
    all(file).map(lossy)
}

/// All bytes of a file. The kernel says that files of its own are empty, so that the library would
/// begin with little room, and ask for most of them a dozen times.
fn all(file: &fs::File) -> Option<Vec<u8>> {
    const ROOM: usize = 4096;
    let (mut bytes, mut length) = (Vec::new(), 0);
    loop {
        if bytes.len() < length + ROOM {
            bytes.resize(2 * length + ROOM, 0);
        }
        match file.read_at(&mut bytes[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    bytes.truncate(length);
    Some(bytes)
}

fn address(text: &str) -> Result<u64, std::num::ParseIntError> {
    u64::from_str_radix(text, 16)
}

/// Returns the value of the first line `name: value`.
pub fn value<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
}

/// Returns the number of the first line `name number`.
fn value_of(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(key, _)| *key == name).and_then(|(_, number)| number.trim().parse().ok())
}

/// Returns the value of a line such as `MemAvailable:   1234 kB`, in bytes.
pub fn bytes(text: &str, name: &str) -> Option<u64> {
    value(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the CPUs or nodes of a list such as `0-3,8`, in its order.
pub fn list(text: &str) -> Option<Vec<usize>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse().ok().filter(|number| *number < MOST);
        let (first, last): (usize, usize) = (number(first)?, number(last)?);
        (first <= last).then_some(first..=last)
    };
    let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
    Some(ranges?.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `ask` with the files of a host that has one file.
    fn with<R>(path: &str, text: &str, ask: impl FnOnce(Files<'_>) -> R) -> R {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
        ask(Files(root.path()))
    }

    #[test]
    fn a_host_that_reports_nothing_can_still_be_asked() {
        with("empty", "", |files| {
            assert_eq!(
                (files.meminfo("MemTotal"), files.ticks(), files.waits()),
                (None, None, None)
            );
            assert_eq!((files.swap(), files.group("memory")), (Some(0), None));
            assert_eq!(files.control_groups("cpu", "cpu.cfs_quota_us"), None);
            assert!(!files.is_capable(0) && !files.is_mounted("proc") && files.load().is_none());
            assert_eq!((files.huge_pools(), files.numa_maps(0..1)), (Ok(Vec::new()), None));
        });
    }

    #[test]
    fn a_field_is_found_by_its_whole_name_and_memory_has_a_unit() {
        let text = "MemTotalX: 1 kB\nMemTotal:       24684556 kB\nHugePages_Free: 5\n";
        assert_eq!(bytes(text, "MemTotal"), Some(24684556 * 1024));
        assert_eq!((bytes(text, "Mem"), bytes(text, "HugePages_Free")), (None, None));
        assert_eq!(bytes("Node 0 Inactive(file):  4 kB", "Node 0 Inactive(file)"), Some(4096));
    }

    #[test]
    fn lists_are_read_as_sysfs_has_them() {
        assert_eq!(list("3,0-2,8"), Some(vec![3, 0, 1, 2, 8]));
        for text in ["", "1,", "2-1", "a", "1-", "0-99999999"] {
            assert_eq!(list(text), None, "{text}");
        }
    }

    #[test]
    fn swap_is_summed_over_areas() {
        let text =
            "Filename Type Size Used Priority\n/dev/a partition 1024 24 -2\n/b file 10 10 -3\n";
        assert_eq!(with("proc/swaps", text, |files| files.swap()), Some(1034 << 10));
    }

    #[test]
    fn frequencies_are_the_drivers_or_those_of_cpuinfo() {
        let ask = |path, text| with(path, text, |files| (files.frequencies(), files.turbo()));
        let cpus = "sys/devices/system/cpu";
        let driver = format!("{cpus}/cpu0/cpufreq/scaling_cur_freq");
        assert_eq!(ask(&driver, "2100500\n"), (vec![2100.5], None));
        let cpuinfo = "cpu MHz\t\t: 800.5\nflags : x\ncpu MHz\t\t: 900\n";
        assert_eq!(ask("proc/cpuinfo", cpuinfo), (vec![800.5, 900.0], None));
        let boost = format!("{cpus}/cpufreq/boost");
        assert_eq!(ask(&boost, "1\n"), (vec![], Some(true)));
        let no_turbo = format!("{cpus}/intel_pstate/no_turbo");
        assert_eq!(ask(&no_turbo, "1\n"), (vec![], Some(false)));
    }

    #[test]
    fn ticks_of_guests_count_once() {
        let text = "cpu  1 2 3 4 5 6 7 8 9 9\ncpu0 1 1 1\ncpu1 0 0 0\nintr 5\n";
        let ticks = with("proc/stat", text, |files| files.ticks());
        assert_eq!(ticks, Some(Ticks { all: 36, stolen: 8, idle: 9, cpus: 2 }));
    }

    #[test]
    fn a_process_used_its_own_time_and_that_of_its_children() {
        let text = "7 (a) b) S 1 7 7 0 -1 0 1 2 3 4 50 6 700 8 20 0";
        assert_eq!(with("proc/self/stat", text, |files| files.own()), Some(764));
        assert_eq!(with("proc/self/stat", "7 (a) S 1", |files| files.own()), None);
    }

    #[test]
    fn a_thread_waited_so_long_and_so_often() {
        let waits = |text| with("proc/thread-self/schedstat", text, |files| files.waits());
        assert_eq!(waits("70 2210450 3\n"), Some((2210450, 3)));
        assert_eq!((waits("70 2210450\n"), waits("0 0 0\n")), (None, None));
    }

    #[test]
    fn a_controllers_group_is_that_of_version_1_or_the_only_one() {
        let group = |text| with("proc/self/cgroup", text, |files| files.group("memory"));
        assert_eq!(group("0::/user.slice/x\n").unwrap(), "/user.slice/x");
        assert_eq!(group("5:cpu,cpuacct:/c\n3:memory:/m\n0::/u\n").unwrap(), "/m");
        assert_eq!(group("5:cpu,cpuacct:/c\n"), None, "no group is not the root");
        assert_eq!(group("\n").unwrap(), "/", "nothing was ever mounted");
    }

    #[test]
    fn capabilities_are_bits_of_a_mask() {
        let text = "Name:\tx\nCapEff:\t0000000000200000";
        with("proc/self/status", text, |files| {
            assert!(files.is_capable(21) && !files.is_capable(38));
        });
    }

    #[test]
    fn a_file_system_is_mounted_by_its_type_and_not_its_name() {
        with("proc/mounts", "debugfs /mnt tmpfs rw 0 0\n", |files| {
            assert!(files.is_mounted("tmpfs") && !files.is_mounted("debugfs"));
            assert!(files.is_mounted_at("tmpfs", "/mnt") && !files.is_mounted_at("tmpfs", "/"));
        });
    }

    #[test]
    fn a_folder_that_cannot_be_listed_is_not_an_empty_one() {
        // A file in its place, as root may list any folder.
        let folder = "sys/kernel/mm/hugepages";
        with(folder, "", |files| {
            assert_eq!(files.told_names(folder), Err(folder.into()));
            assert_eq!(files.huge_pools(), Err(folder.into()));
            assert_eq!(files.told_names("sys/none"), Ok(None));
            assert_eq!(files.told_names("sys/kernel"), Ok(Some(vec!["mm".to_owned()])));
        });
    }

    #[test]
    fn huge_pages_are_summed_over_the_range_only() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0 \nAnonHugePages:      2048 kB\n\
                     3000-5000 rw-p 00000000 00:00 0 \nAnonHugePages:      4096 kB\n\
                     5000-6000 rw-p 00000000 00:00 0 \nAnonHugePages:      8192 kB\n";
        with("proc/self/smaps", smaps, |files| {
            assert_eq!(files.anon_huge_pages(0x1000..0x5000), Some(6144 * 1024));
            assert_eq!(files.anon_huge_pages(0x3000..0x5000), Some(4096 * 1024));
            assert_eq!(files.anon_huge_pages(0x2000..0x5000), None, "a part of a mapping");
            assert_eq!(files.anon_huge_pages(0..0x4000), None);
            assert_eq!(files.anon_huge_pages(0..0x1000), Some(0));
        });
    }

    #[test]
    fn shares_of_the_mappings_of_all_ranges_are_summed() {
        let smaps = "1000-2000 rw-p 00000000 00:00 0 \nPss:    3 kB\nPss_Dirty:   1 kB\n\
                     2000-5000 rw-p 00000000 00:00 0 \nPss:    5 kB\n\
                     5000-6000 rw-p 00000000 00:00 0 \nPss:    9 kB\n";
        with("proc/self/smaps", smaps, |files| {
            assert_eq!(files.proportional(&[0x2000..0x3000, 0x5000..0x6000]), Some(14 << 10));
            assert_eq!(files.proportional(&[]), Some(0));
        });
    }

    #[test]
    fn pages_of_the_range_alone_are_summed_by_node() {
        let maps = "7000 bind:1 anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4\n\
                    9000 default heap anon=9 N0=9 kernelpagesize_kB=4\n\
                    7f000 bind:1 huge dirty=1 N1=1 kernelpagesize_kB=2048\n";
        with("proc/self/numa_maps", maps, |files| {
            let small = BTreeMap::from([(0, 4096), (1, 8192)]);
            assert_eq!(files.numa_maps(0x7000..0x8000), Some(small));
            assert_eq!(files.numa_maps(0x7f000..0x80000), Some(BTreeMap::from([(1, 2 << 20)])));
            assert_eq!(files.numa_maps(0..0), Some(BTreeMap::new()));
        });
        with("proc/self/numa_maps", "7000 default N0=1 N1=x kernelpagesize_kB=4\n", |files| {
            assert_eq!(files.numa_maps(0x7000..0x8000), None, "a part would be told as all");
        });
    }
}
