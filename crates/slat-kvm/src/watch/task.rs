//! Reads a VMM's process and its vCPUs' threads from procfs.

use crate::procfs::{Files, KernelValue, bytes};
use crate::watch::metric::{Metric, Sink, Source};
use rustix::process::{Resource, getrlimit};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Nanoseconds of a clock tick, as procfs counts them (`USER_HZ`).
const TICK: u64 = 10_000_000;

/// Files of a process or thread that are read repeatedly, and so are held open: to look up their
/// names costs as much as to read them.
#[derive(Debug, Default)]
pub(crate) struct OpenFiles {
    folder: String,
    files: Vec<(&'static str, File)>,
}

impl OpenFiles {
    /// Drops the files if `folder` is another one than before.
    fn of(&mut self, folder: String) -> &mut Self {
        if self.folder != folder {
            *self = Self { folder, files: Vec::new() };
        }
        self
    }

    /// Returns the current text of a file.
    fn text(&mut self, files: &Files<'_>, name: &'static str) -> Option<String> {
        if let Some((_, file)) = self.files.iter().find(|(kept, _)| *kept == name) {
            let mut bytes = [0; 4096];
            // The kernel fills each of these files in one read: a short read is the whole file.
            return match file.read_at(&mut bytes, 0).ok()? {
                0 => None,
                length @ 1..4096 => Some(crate::procfs::lossy(bytes[..length].to_vec())),
                _ => crate::procfs::whole(file),
            };
        }
        let file = File::open(files.0.join(&self.folder).join(name)).ok()?;
        let text = crate::procfs::whole(&file).filter(|text| !text.is_empty());
        // Half of the descriptors stay free for uses that cannot do without one.
        let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 2;
        if u64::try_from(file.as_raw_fd()).is_ok_and(|fd| fd < most) {
            self.files.push((name, file));
        }
        text
    }
}

/// Reads the thread of a vCPU.
pub(crate) fn thread(files: &Files<'_>, kept: &mut OpenFiles, pid: i32, tid: i32, sink: &mut Sink) {
    let kept = kept.of(format!("proc/{pid}/task/{tid}"));
    let mut at = |file| kept.text(files, file);
    match at("schedstat").as_deref().map(schedstat) {
        Some(Some([running, waiting, slices])) => {
            sink.put(Metric::RunningNs, Source::Schedstat, known(running));
            sink.put(Metric::WaitingNs, Source::Schedstat, known(waiting));
            sink.put(Metric::Slices, Source::Schedstat, known(slices));
        }
        other => {
            let why = match other {
                Some(_) => {
                    "schedstat is not counted: sysctl kernel.task_delayacct=1, or a kernel with \
                     CONFIG_SCHED_INFO"
                }
                None => "the thread has no schedstat: it ended, or the kernel has none",
            };
            for metric in [Metric::RunningNs, Metric::WaitingNs, Metric::Slices] {
                sink.missing(metric, why);
            }
        }
    }
    let ticks = at("stat").and_then(|stat| field(&stat, 43));
    let guest = ticks.and_then(|ticks| ticks.checked_mul(TICK));
    sink.put(Metric::GuestNs, Source::Stat, guest.ok_or("the thread has no stat: it ended"));
}

/// Reads the process. `huge`: its bytes in huge pages, if they were read. `private`: why its memory
/// is not known, if a part of it is in no figure of the process. Returns its bytes in pages of
/// hugetlbfs.
pub(crate) fn process(
    files: &Files<'_>,
    kept: &mut OpenFiles,
    pid: i32,
    huge: Option<u64>,
    private: Option<&str>,
    sink: &mut Sink,
) -> u64 {
    let kept = kept.of(format!("proc/{pid}"));
    let mut at = |file| kept.text(files, file);
    let missing = |why| match files.0.join(format!("proc/{pid}")).exists() {
        true => why,
        false => "the process ended",
    };
    let ended = || missing("procfs does not tell it of this process");
    let status = at("status").unwrap_or_default();
    // Pages of hugetlbfs are in no RSS (proc_pid_status(5)).
    let hugetlb = bytes(&status, "HugetlbPages").unwrap_or(0);
    let rss = bytes(&status, "VmRSS").map(|rss| rss + hugetlb).ok_or_else(ended);
    let resident = rss.unwrap_or(u64::MAX);
    match private {
        Some(why) => sink.missing(Metric::RssBytes, why),
        None => sink.put(Metric::RssBytes, Source::Status, rss),
    }
    sink.put(Metric::SwapBytes, Source::Status, bytes(&status, "VmSwap").ok_or_else(ended));
    let huge = match huge {
        None => Err("no permission to read smaps_rollup, or the kernel has none (4.14)"),
        Some(huge) if huge > resident => Err("smaps_rollup was read before memory was taken away"),
        Some(huge) => Ok(huge),
    };
    match private {
        Some(why) => sink.missing(Metric::HugeBytes, why),
        None => sink.put(Metric::HugeBytes, Source::SmapsRollup, huge),
    }
    let stat = at("stat").unwrap_or_default();
    sink.put(Metric::HostMinorFaults, Source::Stat, field(&stat, 10).ok_or_else(ended));
    sink.put(Metric::HostMajorFaults, Source::Stat, field(&stat, 12).ok_or_else(ended));
    let groups = at("cgroup").ok_or_else(|| missing("procfs tells no control group of it"));
    let group = groups.and_then(|groups| group(files, pid, &groups));
    let pressure = group.as_ref().map_err(|why| *why).and_then(|group| pressure(files, group));
    for (metric, line) in [(Metric::PressureSomeNs, "some"), (Metric::PressureFullNs, "full")] {
        let total = pressure.as_ref().map_err(|why| *why);
        let total = total.and_then(|text| total_of(text, line).ok_or(UNREADABLE));
        sink.put(metric, Source::Pressure, total);
    }
    let high = group.and_then(|group| {
        let events = files.text(group.join("memory.events"));
        let high = events.as_deref().and_then(high);
        high.ok_or("its control group has no memory.events: the memory controller is off for it")
    });
    sink.put(Metric::MemoryHighEvents, Source::MemoryEvents, high);
    hugetlb
}

/// Returns how often a control group went over its `memory.high`.
fn high(events: &str) -> Option<u64> {
    events.lines().find_map(|line| line.strip_prefix("high "))?.trim().parse().ok()
}

const UNREADABLE: &str = "memory.pressure of its control group has no such line";

/// Returns the bytes of a process in huge pages, those of hugetlbfs included. The kernel walks all
/// of its tables for it.
pub(crate) fn huge(files: &Files<'_>, pid: i32) -> Option<u64> {
    let text = files.text(format!("proc/{pid}/smaps_rollup"))?;
    let fields =
        ["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"];
    fields.into_iter().filter_map(|name| bytes(&text, name)).reduce(|sum, more| sum + more)
}

/// Returns the mapped address ranges of a process whose access (such as `rw-p`) is `wanted`; `None`
/// if there is no such process.
///
/// # Errors
/// The file, if it cannot be read.
pub(crate) fn mappings(
    files: &Files<'_>,
    pid: i32,
    wanted: fn(&str) -> bool,
) -> KernelValue<Vec<Range<u64>>> {
    let Some(text) = files.told(format!("proc/{pid}/maps"))? else { return Ok(None) };
    let range = |line: &str| {
        let (begin, rest) = line.split_once('-')?;
        let mut words = rest.split_whitespace();
        let end = words.next()?;
        words.next().filter(|access| wanted(access))?;
        let [begin, end] = [begin, end].map(|hex| u64::from_str_radix(hex, 16).ok());
        Some(begin?..end?)
    };
    Ok(Some(text.lines().filter_map(range).collect()))
}

fn known(value: u64) -> Result<u64, &'static str> {
    Ok(value)
}

/// Returns time running, time waiting, and slices; `None` if the kernel has the file but does not
/// count.
fn schedstat(text: &str) -> Option<[u64; 3]> {
    let mut words = text.split_whitespace().map(|word| word.parse::<u64>().ok());
    let fields = [words.next()??, words.next()??, words.next()??];
    (fields != [0; 3]).then_some(fields)
}

/// Returns a field of a `stat` behind the name, numbered as in proc(5).
fn field(stat: &str, number: usize) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
}

/// Returns the folder of the process's control group. The group must be of version 2, and not the
/// root, whose files cover the whole host. In a namespace of control groups, the mounted groups may
/// be the host's, of which another one may have the name: then the group must list the process.
fn group(files: &Files<'_>, pid: i32, groups: &str) -> Result<PathBuf, &'static str> {
    let group = match groups.lines().find_map(|line| line.strip_prefix("0::/")) {
        None => return Err("its control groups are of version 1, which has no such figures"),
        Some("") => {
            return Err("it is in the root control group of version 2, whose figures cover the \
                        whole host");
        }
        Some(group) if group.split('/').any(|part| part == "..") => {
            return Err("its control group is outside of this namespace of control groups");
        }
        Some(group) => group,
    };
    let is_first = files.in_first_namespace("cgroup");
    let pid = pid.to_string();
    let lists = |text: String| text.lines().any(|line| line.trim() == pid);
    let is_its = |folder: &PathBuf| {
        let procs = || files.text(folder.join("cgroup.procs")).is_some_and(lists);
        files.0.join(folder).is_dir() && (is_first || procs())
    };
    let usual = ["sys/fs/cgroup", "sys/fs/cgroup/unified"].map(|root| Path::new(root).join(group));
    let mounted = || {
        let below = |(root, at): (String, PathBuf)| {
            let root = root.trim_start_matches('/');
            Some(at.join(Path::new(group).strip_prefix(root).ok()?))
        };
        files.hierarchies(None).into_iter().filter_map(below).find(is_its)
    };
    usual.into_iter().find(is_its).or_else(mounted).ok_or("its control group is not mounted here")
}

/// Returns `memory.pressure` of a control group.
fn pressure(files: &Files<'_>, group: &Path) -> Result<String, &'static str> {
    let file = group.join("memory.pressure");
    files.text(&file).ok_or_else(|| match files.0.join(&file).exists() {
        _ if files.text("proc/pressure/memory").is_none() => {
            "the kernel counts no pressure: boot it with psi=1"
        }
        true => "memory.pressure of its control group takes root",
        false => "its control group has no memory.pressure",
    })
}

/// Returns the total of a line of a pressure file in nanoseconds; the file has microseconds.
fn total_of(text: &str, line: &str) -> Option<u64> {
    let line = text.lines().find_map(|it| it.strip_prefix(line))?;
    let total = line.split_whitespace().find_map(|word| word.strip_prefix("total="))?;
    total.parse::<u64>().ok()?.checked_mul(1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::find::tests::FakeProc;
    use crate::watch::metric::Metric as M;

    #[test]
    fn a_vcpus_thread_reports_its_run_wait_and_guest_times() {
        let host = FakeProc::new();
        let fields = "S 1 1 1 0 -1 0 0 0 0 0 5 6 0 0 20 0 1 0 9 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 \
                      17 0 0 0 0 59 0";
        host.write("proc/7/task/8/schedstat", "70 2210450 3\n");
        host.write("proc/7/task/8/stat", &format!("8 (a) b) {fields}"));
        host.write("proc/7/task/9/schedstat", "0 0 0\n");
        let mut sink = Sink::default();
        thread(&host.files(), &mut OpenFiles::default(), 7, 8, &mut sink);
        let values = [(M::RunningNs, 70), (M::WaitingNs, 2_210_450), (M::Slices, 3)];
        let values = values.into_iter().chain([(M::GuestNs, 590_000_000)]).collect();
        assert_eq!((sink.values, sink.unknown.len()), (values, 0));
        let mut sink = Sink::default();
        thread(&host.files(), &mut OpenFiles::default(), 7, 9, &mut sink);
        assert!(sink.values.is_empty());
        assert!(sink.unknown[&M::WaitingNs].contains("task_delayacct"));
        assert!(sink.unknown[&M::GuestNs].contains("ended"));
    }

    #[test]
    fn a_process_reports_its_memory_faults_and_group_pressure() {
        let host = FakeProc::new();
        host.write("proc/7/status", "VmRSS:\t  4100 kB\nVmSwap:\t  8 kB\n");
        host.write("proc/7/stat", "7 (x) S 1 1 1 0 -1 0 11 0 13 0 5 6 0 0 20 0");
        host.write("proc/7/cgroup", "4:memory:/old\n0::/vms/a\n");
        host.write("proc/7/smaps_rollup", "AnonHugePages: 2048 kB\nShmemPmdMapped: 4 kB\n");
        let some = "some avg10=0.00 avg60=0.00 avg300=0.00 total=41\nfull avg10=0 total=7\n";
        host.write("sys/fs/cgroup/unified/vms/a/memory.pressure", some);
        host.write("sys/fs/cgroup/unified/vms/a/memory.events", "low 0\nhigh 17\nmax 2\n");
        let mut sink = Sink::default();
        process(
            &host.files(),
            &mut OpenFiles::default(),
            7,
            huge(&host.files(), 7),
            None,
            &mut sink,
        );
        for (metric, value) in [
            (M::RssBytes, 4100 << 10),
            (M::SwapBytes, 8192),
            (M::HugeBytes, 2052 << 10),
            (M::HostMinorFaults, 11),
            (M::HostMajorFaults, 13),
            (M::PressureSomeNs, 41_000),
            (M::PressureFullNs, 7000),
            (M::MemoryHighEvents, 17),
        ] {
            assert_eq!(sink.values.get(&metric), Some(&value), "{metric:?}");
        }
        // Huge pages are a part of what is resident.
        let mut sink = Sink::default();
        process(&host.files(), &mut OpenFiles::default(), 7, Some(4101 << 10), None, &mut sink);
        assert!(sink.unknown[&M::HugeBytes].contains("taken away"), "{sink:?}");
        // The file of the root covers the host, and no single group.
        host.write("sys/fs/cgroup/memory.pressure", some).write("proc/8/cgroup", "0::/\n");
        let mut sink = Sink::default();
        process(&host.files(), &mut OpenFiles::default(), 8, None, None, &mut sink);
        assert!(sink.values.is_empty(), "{sink:?}");
        assert!(sink.unknown[&M::PressureSomeNs].contains("root control group"), "{sink:?}");
    }

    #[test]
    fn a_missing_control_group_figure_has_its_true_reason() {
        let host = FakeProc::new();
        let why = |groups: &str| {
            host.write("proc/7/cgroup", groups);
            let mut sink = Sink::default();
            process(&host.files(), &mut OpenFiles::default(), 7, None, None, &mut sink);
            sink.unknown.get(&M::PressureSomeNs).cloned().unwrap_or_default()
        };
        assert!(why("4:memory:/a\n").contains("version 1"));
        assert!(why("0::/\n").contains("root control group"));
        assert!(why("0::/../a\n").contains("namespace"));
        assert!(why("0::/a\n").contains("not mounted here"));
        host.write("sys/fs/cgroup/a/cgroup.procs", "7\n");
        assert!(why("0::/a\n").contains("psi=1"));
        host.write("proc/pressure/memory", "some avg10=0 total=1\n");
        assert!(why("0::/a\n").contains("has no memory.pressure"));
        // Wherever the groups are mounted.
        let mount = "31 30 0:28 / /cg rw - cgroup2 none rw\n";
        host.write("proc/self/mountinfo", mount);
        host.write("cg/b/memory.pressure", "some avg10=0 total=5\nfull avg10=0 total=1\n");
        assert_eq!(why("0::/b\n"), "");
    }
}
